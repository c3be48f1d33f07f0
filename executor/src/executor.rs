//! A loaded plan: starts runs and lets their lanes work.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use anyhow::{Context as _, Result};
use ir::plan::Plan;
use ir::trace::Trace;

use crate::batch::Batch;
use crate::lane::Inbox;
use crate::run::{Run, RunHandle};
use crate::trace::Recorder;

/// Every device bound, every weight in place; lanes wait for runs.
pub struct Executor {
    plan: Arc<Plan>,
    lanes: Vec<LaneThread>,
    recorder: Option<Arc<Recorder>>,
    /// Runs started. Held while a run is handed out, so that all lanes see runs in one order.
    started: Mutex<u32>,
}

/// One lane's thread and the way to it.
pub(crate) struct LaneThread {
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) thread: Option<JoinHandle<()>>,
}

impl Executor {
    pub(crate) fn new(
        plan: Arc<Plan>,
        lanes: Vec<LaneThread>,
        recorder: Option<Arc<Recorder>>,
    ) -> Self {
        Self { plan, lanes, recorder, started: Mutex::new(0) }
    }

    /// The plan that is run.
    pub fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }

    /// Number of lanes.
    pub fn lanes(&self) -> usize {
        self.lanes.len()
    }

    /// Starts a run of a program and returns at once. Several runs may be under way; each lane works
    /// through them in the order they were started, so a later run sees what an earlier one has cached.
    ///
    /// # Errors
    /// When there is no such program, or the batch is more than it takes.
    pub fn start(&self, program: usize, batch: Batch) -> Result<RunHandle> {
        let model = &self.plan.model;
        let schedule = self.plan.programs.get(program).context("the plan lacks the program")?;
        batch.check(schedule, model.vocabulary, model.block_tokens)?;
        let mut started = self.started.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(recorder) = &self.recorder {
            recorder.start_run(program, &batch);
        }
        let run = Arc::new(Run::new(&self.plan, program, *started, batch));
        *started += 1;
        for lane in &self.lanes {
            lane.inbox.push(Arc::clone(&run));
        }
        let (plan, recorder) = (Arc::clone(&self.plan), self.recorder.clone());
        Ok(RunHandle { run, plan, recorder })
    }

    /// What was recorded until now; `None` where nothing is.
    pub fn trace(&self) -> Option<Trace> {
        self.recorder.as_ref().map(|recorder| recorder.trace().clone())
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        for lane in &self.lanes {
            lane.inbox.close();
        }
        for lane in &mut self.lanes {
            if let Some(thread) = lane.thread.take() {
                // A lane catches every panic of its steps; there is nothing more to learn here.
                drop(thread.join());
            }
        }
    }
}
