//! How much longer steps take that wait for launches, or share a node's memory: its cores read it, and links fetch from
//! it.

use ir::id::{DeviceId, Id as _, StepId, Table, WeightId};
use ir::op::Op;
use ir::plan::{Action, Phase, Program, Queue, Step};
use ir::workspace::{MAX_PLANE_ROWS, most_rows_on};

use crate::bind::Bound;
use crate::cost::{fetch_share, nanos_at, rows_of};
use crate::queueing::waits_for_launches;
use crate::task::Task;

/// What a product of the vendor's library takes longer on a GPU while weights are copied to it, which take some of the
/// memory's time. Measured on an H200, between nothing and this: see benches/RESULTS.md.
const BESIDE_COPIES_NANOS: u64 = 20_000;

/// What a step does.
#[derive(Clone, Copy, Debug)]
struct Work {
    /// What it takes when nothing else uses the memory that it does.
    nanos: f64,
    memory: Memory,
}

/// How a step uses the memory of a node that weights are fetched from.
#[derive(Clone, Copy, Debug)]
enum Memory {
    /// Not at all.
    Unused,
    /// The node's cores read it.
    Read {
        node: DeviceId,
        /// Part of the step's time that reading alone would take: the rest is arithmetic in whose shadow it reads.
        part: f64,
        /// Part of its rate that reading keeps beside a fetch.
        kept: f64,
    },
    /// A link fetches from it.
    Fetched {
        node: DeviceId,
        /// Part of its rate that the link keeps while cores do nothing but read.
        kept: f64,
    },
}

impl Memory {
    /// Whose it is.
    fn node(self) -> Option<DeviceId> {
        match self {
            Self::Unused => None,
            Self::Read { node, .. } | Self::Fetched { node, .. } => Some(node),
        }
    }
}

/// Lengthens steps by what they wait for their launches, and what GPUs and NUMA nodes do while weights are fetched.
pub(crate) fn contend(task: &Task<'_>, bound: &Bound, program: &mut Program) {
    let devices = &task.target.machine.devices;
    let waits = waits_for_launches(|device| devices[device].kind.is_gpu(), program);
    let steps = program.steps.rows_mut().iter_mut().zip(waits.rows());
    steps.for_each(|(step, wait)| step.estimate_nanos += wait);
    let has_fetches = program.steps.rows().iter().any(|s| matches!(s.action, Action::Fetch { .. }));
    if !has_fetches {
        return;
    }
    let mut works: Table<StepId, Work> =
        program.steps.ids().map(|_| Work { nanos: 0.0, memory: Memory::Unused }).collect();
    for lane in &program.lanes {
        for &id in &lane.steps {
            works[id] = work(task, bound, program, lane.device, (&program.steps[id], waits[id]));
        }
    }
    let nanos = flow(program, &works);
    for (id, nanos) in nanos.iter() {
        program.steps[id].estimate_nanos = *nanos;
    }
}

/// What a step of a device does, of which it waits so many nanoseconds for its launches.
fn work(
    task: &Task<'_>,
    bound: &Bound,
    program: &Program,
    device: DeviceId,
    (step, wait): (&Step, u64),
) -> Work {
    let machine = &task.target.machine;
    let nanos = step.estimate_nanos as f64;
    match &step.action {
        Action::Fetch { weight, .. } => {
            let node = bound.weights[*weight].device;
            let kept = fetch_share(task.target, node, device);
            Work { nanos, memory: Memory::Fetched { node, kept } }
        }
        Action::Run(op) if !machine.devices[device].kind.is_gpu() => {
            let rates = &machine.devices[device].rates;
            let is_decode = program.phase == Phase::Decode;
            let part = if op.takes_fetched() {
                let weights = op.weights();
                let bytes: u64 = weights.iter().map(|&id| bound.weights[id].bytes(task)).sum();
                (nanos_at(bytes as f64, rates.read_bytes_per_sec) / nanos.max(1.0)).min(1.0)
            } else if is_decode && matches!(op, Op::Attention(_)) {
                // One token reads what all before it left.
                1.0
            } else {
                0.0
            };
            Work { nanos, memory: Memory::Read { node: device, part, kept: rates.beside_fetch } }
        }
        Action::Run(Op::Linear(linear))
            if program.phase == Phase::Prefill && program.lane(device, Queue::Copy).is_some() =>
        {
            let kind = &machine.devices[device].kind;
            let most = |&id: &WeightId| {
                let weight = &bound.weights[id];
                most_rows_on(kind, weight.format, weight.shape(task).last().copied().unwrap_or(1))
            };
            let most = linear.weights.iter().map(most).min().unwrap_or(0);
            let rows = step.reads.first().map(|&x| rows_of(&program.buffers[x].ty, program.max));
            let beside = if rows > Some(most) { BESIDE_COPIES_NANOS } else { 0 };
            // What products of many rows take longer was measured where they wait for launches, too.
            let counted = if rows > Some(MAX_PLANE_ROWS) { wait } else { 0 };
            Work { nanos: nanos + beside.saturating_sub(counted) as f64, memory: Memory::Unused }
        }
        Action::Run(_) | Action::Move { .. } => Work { nanos, memory: Memory::Unused },
    }
}

/// A step under way.
struct Running {
    id: StepId,
    start: f64,
    /// What is left of it, in nanoseconds of its own.
    left: f64,
}

/// Who uses a node's memory.
#[derive(Clone, Copy, Default)]
struct Users {
    /// Part of its time that its cores' step would need for reading alone.
    read: f64,
    /// Links that fetch from it.
    links: u32,
}

impl Users {
    /// What a step keeps of its speed beside these, itself among them.
    fn speed(self, memory: Memory) -> f64 {
        match memory {
            Memory::Unused => 1.0,
            Memory::Read { part, kept, .. } if self.links > 0 => {
                1.0 / (1.0 + part * (1.0 / kept - 1.0))
            }
            Memory::Read { .. } => 1.0,
            Memory::Fetched { kept, .. } => 1.0 - (1.0 - kept) * self.read,
        }
    }

    /// Counts a step that begins, or one that ends.
    fn count(&mut self, memory: Memory, begins: bool) {
        match memory {
            Memory::Unused => (),
            // The cores of a node are at one step at a time.
            Memory::Read { part, .. } => self.read = if begins { part } else { 0.0 },
            Memory::Fetched { .. } if begins => self.links += 1,
            Memory::Fetched { .. } => self.links -= 1,
        }
    }
}

/// Runs a program in thought, with steps that slow each other down; what each takes.
///
/// From one start or end of a step to the next all go on at an even rate.
fn flow(program: &Program, works: &Table<StepId, Work>) -> Table<StepId, u64> {
    /// Nanoseconds: what is left of a step that is over but for rounding.
    const NOTHING: f64 = 1e-3;
    let mut nanos: Table<StepId, u64> = works.rows().iter().map(|_| 0).collect();
    let mut is_over: Table<StepId, bool> = works.rows().iter().map(|_| false).collect();
    let nodes = works.rows().iter().filter_map(|work| work.memory.node());
    let nodes = nodes.map(|node| node.index() + 1).max().unwrap_or(0);
    let mut users: Table<DeviceId, Users> = (0..nodes).map(|_| Users::default()).collect();
    let mut next = vec![0_usize; program.lanes.len()];
    let mut running: Vec<Option<Running>> = program.lanes.iter().map(|_| None).collect();
    let mut now = 0.0;
    loop {
        for (lane, running) in running.iter_mut().enumerate().filter(|(_, step)| step.is_none()) {
            let Some(&id) = program.lanes[lane].steps.get(next[lane]) else { continue };
            if program.steps[id].waits.iter().all(|&wait| is_over[wait]) {
                let Work { nanos, memory } = works[id];
                *running = Some(Running { id, start: now, left: nanos });
                next[lane] += 1;
                if let Some(node) = memory.node() {
                    users[node].count(memory, true);
                }
            }
        }
        let speed = |id: StepId| {
            let memory = works[id].memory;
            memory.node().map_or(1.0, |node| users[node].speed(memory))
        };
        let ends = running.iter().flatten().map(|step| step.left / speed(step.id));
        let Some(passing) = ends.min_by(f64::total_cmp) else { return nanos };
        running.iter_mut().flatten().for_each(|step| step.left -= passing * speed(step.id));
        now += passing;
        for ended in running.iter_mut().filter_map(|step| step.take_if(|s| s.left <= NOTHING)) {
            let memory = works[ended.id].memory;
            if let Some(node) = memory.node() {
                users[node].count(memory, false);
            }
            nanos[ended.id] = (now - ended.start).round() as u64;
            is_over[ended.id] = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use ir::id::{BufferId, CauseId, Few, WeightId};
    use ir::plan::Lane;
    use ir::smallvec;
    use ir::tensor::Extent;

    use super::*;

    /// Steps of a lane of its own each.
    fn alone(steps: usize) -> Program {
        let step = |_| Step {
            name: "".into(),
            action: Action::Fetch { weight: WeightId::from_index(0), offset: 0 },
            reads: Few::new(),
            writes: Few::new(),
            waits: Few::new(),
            frees: Few::new(),
            estimate_nanos: 0,
            cause: CauseId::from_index(0),
        };
        let lane = |at: usize| Lane {
            device: DeviceId::from_index(at),
            queue: Queue::Compute,
            steps: vec![StepId::from_index(at)],
        };
        Program {
            name: "decode1".into(),
            phase: Phase::Decode,
            max: Extent { tokens: 1, rows: 1 },
            max_sequences: 1,
            buffers: Table::default(),
            steps: (0..steps).map(step).collect(),
            lanes: (0..steps).map(lane).collect(),
            output: BufferId::from_index(0),
        }
    }

    fn flows(program: &Program, works: &[(f64, Memory)]) -> Vec<u64> {
        let works = works.iter().map(|&(nanos, memory)| Work { nanos, memory }).collect();
        flow(program, &works).rows().to_vec()
    }

    #[test]
    fn links_and_cores_slow_each_other_down_while_both_use_a_memory() {
        let [node, other] = [0, 1].map(DeviceId::from_index);
        let read = |part| Memory::Read { node, part, kept: 0.8 };
        let fetched = |node| Memory::Fetched { node, kept: 0.5 };
        let both = alone(2);
        // The cores are done after 125; then the link has 37.5 of 100 left, and the memory for itself.
        let times = flows(&both, &[(100.0, read(1.0)), (100.0, fetched(node))]);
        assert_eq!(times, [125, 163]);
        // The link is done first: 80 of 100 nanoseconds' work is done by then.
        let times = flows(&both, &[(100.0, read(1.0)), (50.0, fetched(node))]);
        assert_eq!(times, [120, 100]);
        // Where reading is half of the time, the link keeps three quarters, and a quarter of a half is added.
        let times = flows(&both, &[(100.0, read(0.5)), (300.0, fetched(node))]);
        assert_eq!(times, [113, 328]);
        let times = flows(&both, &[(100.0, read(1.0)), (100.0, fetched(other))]);
        assert_eq!(times, [100, 100]);
    }

    #[test]
    fn a_step_that_waits_slows_nothing_down() {
        let node = DeviceId::from_index(0);
        let mut program = alone(3);
        program.steps[StepId::from_index(1)].waits = smallvec![StepId::from_index(2)];
        let fetched = Memory::Fetched { node, kept: 0.5 };
        let read = Memory::Read { node, part: 1.0, kept: 0.5 };
        let times = flows(&program, &[(100.0, read), (30.0, fetched), (100.0, Memory::Unused)]);
        assert_eq!(times, [100, 30, 100]);
    }
}
