//! The lane of a GPU that fetches weights beside its computing.
//!
//! - The last pieces of a weight are on their way while the first of the next are queued, so that the link never waits
//!   for this thread.
//! - Nothing is on its way while the lane waits for steps of others: a step that waits for a weight gets it.
//! - A run's first weight is fetched when the run before has read the last of its own: all share one window.

use std::collections::VecDeque;
use std::sync::Arc;

use ir::id::{DeviceId, StepId};
use ir::plan::{Action, Plan, Program, Queue, Step};
use ir::trace::Span;

use super::pulse::Pulse;
use super::{Inbox, guarded};
use crate::fetch::{Fetch, Fetcher};
use crate::load::Fault;
use crate::run::{Failure, Run};
use crate::trace::Recorder;

/// What the thread of a copy queue works with.
pub(crate) struct FetchLane {
    pub(crate) plan: Arc<Plan>,
    pub(crate) device: DeviceId,
    pub(crate) fetcher: Fetcher,
    /// For each program the index of this queue's lane in it.
    pub(crate) lanes: Vec<Option<usize>>,
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) pulse: Arc<Pulse>,
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
    let copies = program.lane(device, Queue::Copy)?;
    let fetched: Vec<_> =
        copies.steps.iter().flat_map(|&step| &program.steps[step].writes).collect();
    let reads = |step: &Step| step.reads.iter().any(|buffer| fetched.contains(&buffer));
    program
        .lane(device, Queue::Compute)?
        .steps
        .iter()
        .rev()
        .copied()
        .find(|&step| reads(&program.steps[step]))
}

impl FetchLane {
    /// A lane thread's life.
    pub(crate) fn serve(mut self) {
        let programs = self.plan.programs.iter();
        let last_reads: Vec<_> = programs.map(|program| last_read(program, self.device)).collect();
        let mut before: Option<Arc<Run>> = None;
        while let Some(run) = self.inbox.next() {
            let Some(lane) = self.lanes[run.program] else { continue };
            let _presence = run.enter();
            if let Some(before) = before.replace(Arc::clone(&run)) {
                // A run that was aborted reads nothing that matters.
                before.wait_for(last_reads[before.program].as_slice());
            }
            let mut spans = Vec::new();
            let outcome = guarded(|| {
                self.work(&run, lane, &mut spans);
                Ok(())
            });
            if let Err(cause) = outcome {
                run.abort(self.failure(&run, cause));
            }
            if let Some(recorder) = &self.recorder {
                recorder.add(&mut spans);
            }
        }
        let Self { mut fetcher, pulse, .. } = self;
        fetcher.finish();
        // To unpin much takes its time.
        let _work = pulse.work();
        drop(fetcher);
    }

    fn failure(&self, run: &Run, cause: String) -> Failure {
        let device = &self.plan.machine.devices[self.device].name;
        Failure::beside_steps(&self.plan.programs[run.program], device, cause)
    }

    fn work(&mut self, run: &Run, lane: usize, spans: &mut Vec<Span>) {
        let Self { plan, device, fetcher, recorder, fault, .. } = self;
        let program = &plan.programs[run.program];
        let mut fetches = Fetches {
            run,
            program,
            lane,
            device: &plan.machine.devices[*device].name,
            recorder: recorder.as_deref(),
            under_way: VecDeque::new(),
            last_end: 0,
            spans,
        };
        for &id in &program.lanes[lane].steps {
            let step = &program.steps[id];
            if !run.has_done(&step.waits) && !fetches.finish_all() {
                return;
            }
            let ready = fetches.now();
            if !run.wait_for(&step.waits) {
                return;
            }
            let start = fetches.now();
            let mut started = None;
            let outcome = guarded(|| {
                let Action::Fetch { weight, offset } = step.action else {
                    anyhow::bail!(
                        "a copy queue fetches weights, and the plan has another step in it"
                    )
                };
                if let Some(fault) = fault {
                    fault.strike(&step.name)?;
                }
                started = Some(fetcher.start(weight, offset, || fetches.finish_done())?);
                Ok(())
            });
            match (outcome, started) {
                (Ok(()), Some(fetch)) => {
                    fetches.under_way.push_back(OnItsWay { step: id, fetch, ready, start });
                }
                (Err(cause), _) => return fetches.fail(id, cause),
                (Ok(()), None) => return,
            }
            fetches.finish_done();
        }
        fetches.finish_all();
    }
}

/// The fetches of one run.
struct Fetches<'a> {
    run: &'a Run,
    program: &'a Program,
    lane: usize,
    /// Its name.
    device: &'a str,
    recorder: Option<&'a Recorder>,
    under_way: VecDeque<OnItsWay>,
    /// When the last weight was there.
    last_end: u64,
    spans: &'a mut Vec<Span>,
}

impl Fetches<'_> {
    fn now(&self) -> u64 {
        self.recorder.map_or(0, Recorder::now)
    }

    /// Tells of the weights that are there by now.
    fn finish_done(&mut self) {
        while let Some(first) = self.under_way.pop_front_if(|first| first.fetch.is_done()) {
            self.finish(first);
        }
    }

    /// Waits for all weights; false when the device failed.
    fn finish_all(&mut self) -> bool {
        while let Some(first) = self.under_way.pop_front() {
            if !self.finish(first) {
                return false;
            }
        }
        true
    }

    /// Waits for a weight; false when the device failed.
    fn finish(&mut self, on_its_way: OnItsWay) -> bool {
        let OnItsWay { step, fetch, ready, start } = on_its_way;
        if let Err(cause) = guarded(|| fetch.wait()) {
            self.fail(step, cause);
            return false;
        }
        // Others begin what waits for it as soon as they know of it.
        let end = self.now();
        self.run.finish(step);
        if self.recorder.is_some() {
            let start = start.max(self.last_end);
            self.last_end = end;
            let (run, lane) = (self.run.number, self.lane as u32);
            self.spans.push(Span { run, step, lane, ready, start, end });
        }
        true
    }

    fn fail(&self, step: StepId, cause: String) {
        self.run.abort(Failure::at_step(self.program, step, self.device, cause));
    }
}
