//! When each step is expected to run: lanes in order, every step after what it waits for.

use super::{Step, Times};

/// Times since the start of the program. Steps in no lane, and steps behind a deadlock, have none.
pub(super) fn times(steps: &[Step], queues: &[(usize, Vec<usize>)]) -> Vec<Option<Times>> {
    let mut times: Vec<Option<Times>> = vec![None; steps.len()];
    let mut heads = vec![(0_usize, 0_u64); queues.len()];
    let mut moved = true;
    while moved {
        moved = false;
        for ((_, queue), (head, free)) in queues.iter().zip(&mut heads) {
            while let Some(&step) = queue.get(*head) {
                let Some(waited) = latest_end(&steps[step].waits, &times) else { break };
                let start = waited.max(*free);
                let end = start.saturating_add(steps[step].predicted_nanos);
                times[step] = Some(Times { ready: *free, start, end });
                *free = end;
                *head += 1;
                moved = true;
            }
        }
    }
    times
}

/// When the last of them ends; `None` while one has no time.
fn latest_end(waits: &[usize], times: &[Option<Times>]) -> Option<u64> {
    waits.iter().try_fold(0, |latest, &step| Some(latest.max(times[step]?.end)))
}
