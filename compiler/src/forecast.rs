//! Predicted times of a program, from the estimates of its steps.

use ir::id::{DeviceId, Id as _, StepId, Table};
use ir::op::Op;
use ir::plan::{Action, Phase, Program, Queue};
use ir::workspace::most_fused_rows;

use crate::bind::Bound;
use crate::cost::{nanos_at, rows_of};
use crate::task::Task;

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

/// What a product of the vendor's library takes longer on a GPU while weights are copied to it: products and launches
/// take turns by flags, and copies take some of the memory's time. Measured on an H200: see benches/RESULTS.md.
const BESIDE_COPIES_NANOS: u64 = 100_000;

/// Lengthens what GPUs and NUMA nodes compute while weights are fetched.
///
/// On the home of the weights only the time that a step would need to read its own is longer; a product of many rows
/// reads them in the shadow of its arithmetic.
pub(crate) fn contend(task: &Task<'_>, bound: &Bound, program: &mut Program) {
    let has_fetches = program.steps.rows().iter().any(|s| matches!(s.action, Action::Fetch { .. }));
    if !has_fetches {
        return;
    }
    let is_prefill = program.phase == Phase::Prefill;
    // For each home when it is read by a link.
    let mut fetches: Table<DeviceId, Vec<(u64, u64)>> = task.per_device(Vec::new());
    let mut clock = Clock::new(program);
    for id in program.steps.ids() {
        let (lane, start) = clock.start(program, id);
        let device = program.lanes[lane].device;
        let copies = program.lane(device, Queue::Copy).is_some();
        let step = &mut program.steps[id];
        match &step.action {
            Action::Fetch { weight, .. } => {
                let home = bound.weights[*weight].device;
                fetches[home].push((start, start + step.estimate_nanos));
            }
            Action::Run(op) if !fetches[device].is_empty() => {
                let rates = &task.target.machine.devices[device].rates;
                let bytes: u64 = op.weights().iter().map(|&id| bound.weights[id].bytes(task)).sum();
                let reading = nanos_at(bytes as f64, rates.read_bytes_per_sec);
                let alone = step.estimate_nanos;
                let slowed = reading.min(alone as f64) * (1.0 / rates.beside_fetch - 1.0);
                let end = start + alone;
                let overlap: u64 = fetches[device]
                    .iter()
                    .map(|&(from, to)| to.min(end).saturating_sub(from.max(start)))
                    .sum();
                let share = overlap.min(alone) as f64 / alone.max(1) as f64;
                step.estimate_nanos += (slowed * share) as u64;
            }
            Action::Run(Op::Linear(linear)) if is_prefill && copies => {
                let formats = linear.weights.iter().map(|&id| bound.weights[id].format);
                let most = formats.map(most_fused_rows).min().unwrap_or(0);
                let rows =
                    step.reads.first().map(|&x| rows_of(&program.buffers[x].ty, program.max));
                if rows > Some(most) {
                    step.estimate_nanos += BESIDE_COPIES_NANOS;
                }
            }
            Action::Run(_) | Action::Move { .. } => (),
        }
        clock.end(id, start + program.steps[id].estimate_nanos);
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
