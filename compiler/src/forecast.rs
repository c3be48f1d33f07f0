//! Predicted times of a program, from the estimates of its steps.

use ir::id::{Id as _, StepId, Table};
use ir::plan::Program;

/// How long one run takes, alone on the machine.
#[derive(Clone, Debug)]
pub(crate) struct Times {
    /// Nanoseconds from start to end.
    pub(crate) nanos: u64,
    /// Work of the lane that works longest.
    pub(crate) busiest_lane_nanos: u64,
}

/// Runs a program in thought: a step begins when its lane is free and what it waits for is over.
pub(crate) fn simulate(program: &Program) -> Times {
    let mut clock = Clock::new(program);
    let mut busy = vec![0u64; program.lanes.len()];
    for (id, step) in program.steps.iter() {
        let (lane, start) = clock.start(program, id);
        clock.end(id, start + step.estimate_nanos);
        busy[lane] += step.estimate_nanos;
    }
    Times {
        nanos: clock.ends.rows().iter().copied().max().unwrap_or(0),
        busiest_lane_nanos: busy.into_iter().max().unwrap_or(0),
    }
}

/// When lanes and steps are done.
struct Clock {
    lane_of: Table<StepId, usize>,
    ends: Table<StepId, u64>,
    free: Vec<u64>,
}

impl Clock {
    fn new(program: &Program) -> Self {
        let mut lane_of: Table<StepId, usize> = program.steps.ids().map(|_| 0).collect();
        for (lane, steps) in program.lanes.iter().enumerate() {
            for &step in &steps.steps {
                lane_of[step] = lane;
            }
        }
        let ends = program.steps.ids().map(|_| 0).collect();
        Self { lane_of, ends, free: vec![0; program.lanes.len()] }
    }

    /// The lane of the next step and when it starts.
    ///
    /// The scheduler numbers steps so that each comes after what it depends on, in its lane too.
    fn start(&self, program: &Program, id: StepId) -> (usize, u64) {
        let lane = self.lane_of[id];
        let waits = &program.steps[id].waits;
        debug_assert!(waits.iter().all(|wait| wait.index() < id.index()));
        let waited = waits.iter().map(|&wait| self.ends[wait]).max().unwrap_or(0);
        (lane, self.free[lane].max(waited))
    }

    fn end(&mut self, id: StepId, at: u64) {
        self.ends[id] = at;
        self.free[self.lane_of[id]] = at;
    }
}
