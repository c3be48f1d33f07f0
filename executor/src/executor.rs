//! A loaded plan: starts runs and lets their lanes work.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use ir::machine::DeviceKind;
use ir::plan::Plan;
use ir::trace::Trace;

use crate::batch::Batch;
use crate::cpus::team_cpus;
use crate::known_graphs::KnownGraphs;
use crate::lane::Inbox;
use crate::lane::pulse::Pulse;
use crate::load::Options;
use crate::locked;
use crate::run::{Failure, PATIENCE, Run, RunHandle};
use crate::slots::Uses;
use crate::trace::Recorder;
use crate::waiting::NAP;

/// Every device bound, every weight in place; lanes wait for runs.
pub struct Executor {
    plan: Arc<Plan>,
    lanes: Vec<LaneThread>,
    recorder: Option<Arc<Recorder>>,
    known: Arc<KnownGraphs>,
    /// For each program.
    uses: Vec<Arc<Uses>>,
    /// Whether the lanes' teams have all processors, and none is left to look for the end of a run.
    is_crowded: bool,
    /// Locked while a run is handed out, so that all lanes see runs in one order.
    started: Mutex<Started>,
    pulse: Arc<Pulse>,
}

#[derive(Default)]
struct Started {
    count: u32,
    /// Those that may be under way.
    latest: Vec<Weak<Run>>,
}

impl Started {
    /// Whether lanes that wait for devices never left a run that was ended early.
    fn is_stuck(&self) -> bool {
        self.latest.iter().filter_map(Weak::upgrade).any(|run| run.is_stuck(PATIENCE))
    }
}

/// One lane's thread and the way to it.
pub(crate) struct LaneThread {
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) thread: Option<JoinHandle<()>>,
}

impl Executor {
    pub(crate) fn new(
        plan: Arc<Plan>,
        recorder: Option<Arc<Recorder>>,
        pulse: Arc<Pulse>,
        options: &Options,
    ) -> Self {
        let is_crowded = is_crowded(&plan, options);
        let known = Arc::new(KnownGraphs::of(&plan, options));
        let uses = plan.programs.iter().map(|program| Arc::new(Uses::of(program))).collect();
        let (lanes, started) = (Vec::new(), Mutex::default());
        Self { plan, lanes, recorder, known, uses, is_crowded, started, pulse }
    }

    /// Takes over a lane that has started.
    pub(crate) fn add(&mut self, lane: LaneThread) {
        self.lanes.push(lane);
    }

    /// The plan that is run.
    pub fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }

    /// Tokens that the run of a prompt of `tokens` tokens is to have, so that fewer kinds of them are captured.
    pub(crate) fn padded(&self, tokens: usize) -> usize {
        self.known.padded(tokens)
    }

    /// Starts a run of a program and returns at once. Several runs may be under way; each lane works
    /// through them in the order they were started, so a later run sees what an earlier one has cached.
    ///
    /// # Errors
    /// When there is no such program, the batch is more than it takes, or a device never ended an earlier run.
    pub fn start(&self, program: usize, batch: Batch) -> Result<RunHandle> {
        let schedule = self.plan.programs.get(program).context("the plan lacks the program")?;
        batch.check(schedule, &self.plan.model)?;
        let mut started = locked(&self.started);
        ensure!(!started.is_stuck(), "some devices never ended an earlier run: start again");
        // Flags that GPUs raise for each other hold a run's number, and later ones are larger.
        ensure!(
            started.count < u32::MAX - 1,
            "there were as many runs as can be counted: start again"
        );
        if let Some(recorder) = &self.recorder {
            recorder.start_run(program, &batch);
        }
        let (known, uses) = (&self.known, &self.uses[program]);
        let run = Run::new(&self.plan, program, started.count, batch, known, uses, &self.pulse);
        let run = Arc::new(run);
        started.count += 1;
        started.latest.retain(|run| run.strong_count() > 0);
        started.latest.push(Arc::downgrade(&run));
        for lane in &self.lanes {
            lane.inbox.push(Arc::clone(&run));
        }
        let (plan, recorder) = (Arc::clone(&self.plan), self.recorder.clone());
        let (known, is_crowded) = (Arc::clone(&self.known), self.is_crowded);
        Ok(RunHandle { run, plan, recorder, known, is_crowded })
    }

    /// Parts of runs that GPUs have replayed as captured in earlier runs of their kind, one for each GPU that takes part:
    /// none where nothing is captured.
    pub fn replays(&self) -> usize {
        self.known.replays()
    }

    /// What was recorded until now; `None` where nothing is.
    pub fn trace(&self) -> Option<Trace> {
        self.recorder.as_ref().map(|recorder| recorder.trace())
    }
}

/// Whether the teams of a plan's lanes have all processors of this machine. Where GPUs compute, some are left over.
fn is_crowded(plan: &Plan, options: &Options) -> bool {
    let mut cpus: BTreeSet<u32> = BTreeSet::new();
    for lane in plan.programs.iter().flat_map(|program| &program.lanes) {
        match &plan.machine.devices[lane.device].kind {
            DeviceKind::Numa { cpus: of_node, .. } => {
                cpus.extend(team_cpus(plan, of_node, options));
            }
            DeviceKind::Gpu { .. } => return false,
        }
    }
    thread::available_parallelism().is_ok_and(|all| cpus.len() >= all.get())
}

impl Drop for Executor {
    fn drop(&mut self) {
        let started = self.started.get_mut().unwrap_or_else(PoisonError::into_inner);
        for run in started.latest.iter().filter_map(Weak::upgrade) {
            run.abort(Failure::Cancelled);
        }
        for lane in &self.lanes {
            lane.inbox.close();
        }
        let (closed, pulse) = (Instant::now(), &self.pulse);
        // Lanes wait for their devices once more when they have left all runs.
        let is_stuck = || started.is_stuck() || pulse.is_silent(closed, PATIENCE);
        for lane in &mut self.lanes {
            if let Some(thread) = lane.thread.take() {
                while !thread.is_finished() && !is_stuck() {
                    thread::sleep(NAP);
                }
                // What waits for a device that failed ends with the process.
                if !thread.is_finished() {
                    continue;
                }
                // A lane catches every panic of its steps; there is nothing more to learn here.
                drop(thread.join());
            }
        }
    }
}
