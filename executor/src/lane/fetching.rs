//! The lane of a GPU that fetches weights beside its computing.
//!
//! - Two weights are on their way at a time, so that the link never waits for this thread.
//! - Nothing is on its way while the lane waits for steps of others: whoever waits for a weight gets it.
//! - A run's first weight is fetched when the run before has read the last of its own: all share one window.

use std::collections::VecDeque;
use std::sync::Arc;

use ir::id::{DeviceId, StepId, Table};
use ir::plan::{Action, Plan, Program, Queue, Step};
use ir::trace::Span;

use super::{Inbox, guarded};
use crate::fetch::{Fetch, Fetcher};
use crate::load::Fault;
use crate::run::{Failure, Run};
use crate::trace::Recorder;

/// Weights that are on their way when the next is queued.
const AHEAD: usize = 1;

/// What the thread of a copy queue works with.
pub(crate) struct FetchLane {
    pub(crate) plan: Arc<Plan>,
    pub(crate) device: DeviceId,
    pub(crate) fetcher: Fetcher,
    /// For each program the index of this queue's lane in it.
    pub(crate) lanes: Vec<Option<usize>>,
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) recorder: Option<Arc<Recorder>>,
    pub(crate) fault: Option<Fault>,
}

struct OnItsWay {
    step: StepId,
    fetch: Fetch,
    ready: u64,
    start: u64,
}

/// The last step of a GPU's compute lane that reads its window; `None` where none does.
pub(crate) fn last_read(program: &Program, device: DeviceId) -> Option<StepId> {
    let of = |queue| {
        let is_it = move |lane: &&ir::plan::Lane| lane.device == device && lane.queue == queue;
        program.lanes.iter().find(is_it)
    };
    let fetched: Vec<_> =
        of(Queue::Copy)?.steps.iter().flat_map(|&step| &program.steps[step].writes).collect();
    let reads = |step: &Step| step.reads.iter().any(|buffer| fetched.contains(&buffer));
    of(Queue::Compute)?.steps.iter().rev().copied().find(|&step| reads(&program.steps[step]))
}

/// For each step whether a copy queue of the same device waits until it has read the window.
pub(crate) fn releases(program: &Program, device: DeviceId) -> Table<StepId, bool> {
    let mut releases: Table<StepId, bool> = program.steps.ids().map(|_| false).collect();
    let lanes = program.lanes.iter();
    let copies = lanes.filter(|lane| lane.device == device && lane.queue == Queue::Copy);
    let waits = copies.flat_map(|lane| &lane.steps).flat_map(|&step| &program.steps[step].waits);
    for &step in waits.chain(&last_read(program, device)) {
        releases[step] = true;
    }
    releases
}

impl FetchLane {
    /// A lane thread's life.
    pub(crate) fn serve(self) {
        let mut before: Option<Arc<Run>> = None;
        while let Some(run) = self.inbox.next() {
            let Some(lane) = self.lanes[run.program] else { continue };
            if let Some(before) = before.replace(Arc::clone(&run)) {
                let last = last_read(&self.plan.programs[before.program], self.device);
                // A run that was aborted reads nothing that matters.
                before.wait_for(last.as_slice());
            }
            let mut spans = Vec::new();
            self.work(&run, lane, &mut spans);
            if let Some(recorder) = &self.recorder {
                recorder.add(&mut spans);
            }
            run.leave();
        }
    }

    fn work(&self, run: &Run, lane: usize, spans: &mut Vec<Span>) {
        let program = &self.plan.programs[run.program];
        let now = || self.recorder.as_ref().map_or(0, |recorder| recorder.now());
        let mut under_way = VecDeque::new();
        let mut end = 0;
        for &id in &program.lanes[lane].steps {
            let step = &program.steps[id];
            if !run.has_done(&step.waits) {
                while let Some(first) = under_way.pop_front() {
                    if !self.finish(run, lane, first, &mut end, spans) {
                        return;
                    }
                }
            }
            let ready = now();
            if !run.wait_for(&step.waits) {
                return;
            }
            let start = now();
            let mut started = None;
            let outcome = guarded(|| {
                let Action::Fetch { weight, offset } = step.action else {
                    anyhow::bail!("a copy queue computes nothing")
                };
                if let Some(fault) = &self.fault {
                    fault.strike(&step.name)?;
                }
                started = Some(self.fetcher.start(weight, offset)?);
                Ok(())
            });
            match (outcome, started) {
                (Ok(()), Some(fetch)) => {
                    under_way.push_back(OnItsWay { step: id, fetch, ready, start });
                }
                (Err(cause), _) => return self.fail(run, id, cause),
                (Ok(()), None) => return,
            }
            if under_way.len() > AHEAD
                && let Some(first) = under_way.pop_front()
                && !self.finish(run, lane, first, &mut end, spans)
            {
                return;
            }
        }
        for last in under_way {
            if !self.finish(run, lane, last, &mut end, spans) {
                return;
            }
        }
    }

    /// Waits for a weight; `last_end` is when the one before was there. False when the device failed.
    fn finish(
        &self,
        run: &Run,
        lane: usize,
        on_its_way: OnItsWay,
        last_end: &mut u64,
        spans: &mut Vec<Span>,
    ) -> bool {
        let OnItsWay { step, fetch, ready, start } = on_its_way;
        if let Err(cause) = guarded(|| fetch.wait()) {
            self.fail(run, step, cause);
            return false;
        }
        run.finish(step);
        if let Some(recorder) = &self.recorder {
            let (start, end) = (start.max(*last_end), recorder.now());
            *last_end = end;
            spans.push(Span { run: run.number, step, lane: lane as u32, ready, start, end });
        }
        true
    }

    fn fail(&self, run: &Run, step: StepId, cause: String) {
        let program = &self.plan.programs[run.program];
        let step = format!("{step} ({}) of {}", program.steps[step].name, program.name);
        let device = self.plan.machine.devices[self.device].name.clone();
        run.abort(Failure::Step { step, device, cause });
    }
}
