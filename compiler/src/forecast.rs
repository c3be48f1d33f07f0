//! Predicted times of a program, from the estimates of its steps.

use ir::captured::includes_prompts;
use ir::id::{DeviceId, Id as _, StepId, Table};
use ir::plan::{Phase, Plan, Program, Queue};

/// What a run of a prompt takes longer where its launches are queued one by one. By prompts of 5 to 2,048 tokens on one
/// H200 and on two: 0.5 to 1.5 ms.
const UNREPLAYED_NANOS: u64 = 1_000_000;

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
    let lane_of = lane_of(program);
    let mut ends = Table::with_capacity(program.steps.len());
    let (mut free, mut busy) = (vec![0; program.lanes.len()], vec![0; program.lanes.len()]);
    // The scheduler numbers steps so that each comes after what it depends on, in its lane too.
    for (id, step) in program.steps.iter() {
        let lane = lane_of[id];
        debug_assert!(step.waits.iter().all(|wait| wait.index() < id.index()));
        let waited = step.waits.iter().map(|&wait| ends[wait]).max().unwrap_or(0);
        free[lane] = waited.max(free[lane]) + step.estimate_nanos;
        busy[lane] += step.estimate_nanos;
        ends.push(free[lane]);
    }
    Times {
        nanos: free.into_iter().max().unwrap_or(0),
        busiest_lane_nanos: busy.into_iter().max().unwrap_or(0),
    }
}

/// What a run takes longer than its steps where GPUs do not replay it. What a single GPU beside others waits for its
/// launches is counted by steps: see [`crate::queueing`].
pub(crate) fn unreplayed_nanos(plan: &Plan, phase: Phase) -> u64 {
    if phase == Phase::Decode || includes_prompts(plan) {
        return 0;
    }
    let is_gpu = |device: DeviceId| plan.machine.devices[device].kind.is_gpu();
    let computes =
        |&&(device, queue): &&(DeviceId, Queue)| queue == Queue::Compute && is_gpu(device);
    let queues = plan.queues();
    let gpus = queues.iter().filter(computes).count();
    let is_alone = gpus == queues.len();
    if gpus > 1 || gpus == 1 && is_alone { UNREPLAYED_NANOS } else { 0 }
}

/// The lane of each step, by its number in the program.
pub(crate) fn lane_of(program: &Program) -> Table<StepId, usize> {
    let mut lane_of: Table<StepId, usize> = program.steps.ids().map(|_| 0).collect();
    for (lane, steps) in program.lanes.iter().enumerate() {
        for &step in &steps.steps {
            lane_of[step] = lane;
        }
    }
    lane_of
}
