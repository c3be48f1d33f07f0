//! How lanes end: the GPUs of an executor meet before any of them gives its memory back.
//!
//! - Others write to a GPU's memory, and what they have queued goes on after their lanes have left a run.
//! - So each comes when all that it has queued is done. Where that is not known of one of them, none gives memory back.

use std::mem;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::pulse::Pulse;
use super::{Lane, guarded};
use crate::bell::Bell;
use crate::bind::Form;
use crate::run::PATIENCE;

/// Where the GPUs of one executor meet at the end.
#[derive(Default)]
pub(crate) struct Parting {
    /// GPUs that are to come.
    expected: AtomicUsize,
    come: AtomicUsize,
    /// Whether one has come that may still work.
    is_unsure: AtomicBool,
    bell: Bell,
}

impl Parting {
    /// Counts a GPU in, before it takes part in any run.
    pub(crate) fn join(&self) {
        self.expected.fetch_add(1, Ordering::SeqCst);
    }

    /// A GPU comes, of which it is known or not that it has done all its work. Waits for the others, but no longer than
    /// until lanes have been silent for `patience`. Whether all have done their work.
    fn meet(&self, is_done: bool, pulse: &Pulse, patience: Duration) -> bool {
        if !is_done {
            self.is_unsure.store(true, Ordering::SeqCst);
        }
        self.come.fetch_add(1, Ordering::SeqCst);
        self.bell.ring();
        let start = Instant::now();
        let all_are_here =
            || self.come.load(Ordering::SeqCst) >= self.expected.load(Ordering::SeqCst);
        let is_unsure = || self.is_unsure.load(Ordering::SeqCst);
        self.bell.wait_until(|| all_are_here() || is_unsure() || pulse.is_silent(start, patience));
        all_are_here() && !is_unsure()
    }
}

impl Lane {
    /// Gives the memory of the device back, once nobody uses it any more.
    pub(super) fn part(self) {
        let Self { device, parting, pulse, .. } = self;
        match &device.form {
            Form::Cpu(_) => {
                // Much of it takes its time.
                let _work = pulse.work();
                drop(device);
            }
            Form::Gpu(state) => {
                let finished = guarded(|| state.finish());
                if let Err(cause) = &finished {
                    tracing::debug!("{} may still be at work at the end: {cause}", device.name);
                }
                pulse.beat();
                if !parting.meet(finished.is_ok(), &pulse, PATIENCE) {
                    // A GPU that failed or never came may still use this memory: it stays taken until the process ends.
                    mem::forget(device);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// As long as no test takes.
    const LONG: Duration = Duration::from_secs(600);

    fn of_two() -> (Parting, Pulse) {
        let (parting, pulse) = (Parting::default(), Pulse::default());
        parting.join();
        parting.join();
        (parting, pulse)
    }

    #[test]
    fn nobody_goes_before_all_have_come() {
        let (parting, pulse) = of_two();
        let second_comes = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                assert!(parting.meet(true, &pulse, LONG));
                assert!(second_comes.load(Ordering::SeqCst));
            });
            thread::sleep(Duration::from_millis(20));
            second_comes.store(true, Ordering::SeqCst);
            assert!(parting.meet(true, &pulse, LONG));
        });
    }

    #[test]
    fn one_that_never_comes_is_not_waited_for_for_good() {
        let (parting, pulse) = of_two();
        assert!(!parting.meet(true, &pulse, Duration::from_millis(1)));
        // One that comes late finds that the other has done its work.
        assert!(parting.meet(true, &pulse, LONG));
    }

    #[test]
    fn no_memory_is_given_back_beside_a_gpu_that_may_still_work() {
        let (parting, pulse) = of_two();
        assert!(!parting.meet(false, &pulse, LONG));
        assert!(!parting.meet(true, &pulse, LONG));
    }
}
