//! What a GPU waits for beside devices: its launches have to be queued.
//!
//! Decodes are captured, and replayed as a whole. Of prompts that hosts take part in most are not, nor are the
//! first two of a length: a GPU's lane waits for what a step needs, queues launches up to the next step that others wait
//! for, and so on. What is queued while the GPU computes takes no time; in short prompts it waits for nearly all of its
//! launches.

use ir::id::{DeviceId, StepId, Table};
use ir::plan::{Action, Lane, Phase, Program, Queue};

use crate::forecast::lane_of;

/// From the end of a wait until launches are on the device. Measured on H200s' hosts: 84 to 96 microseconds for 16
/// tokens, 117 to 170 for 64; see benches/RESULTS.md.
const QUEUEING_NANOS: u64 = 100_000;

/// How far a lane has come.
#[derive(Clone, Copy, Default)]
struct Progress {
    /// When its latest step ends.
    free: u64,
    /// When that step's launches are queued.
    queued: u64,
    /// From when on the next step's launches can be queued, if that is not at once with those before.
    next: Option<u64>,
}

/// How many nanoseconds each step waits for its launches when its device is ready for it.
pub(crate) fn waits_for_launches(
    is_gpu: impl Fn(DeviceId) -> bool,
    program: &Program,
) -> Table<StepId, u64> {
    let mut waits: Table<StepId, u64> = program.steps.ids().map(|_| 0).collect();
    if program.phase == Phase::Decode {
        return waits;
    }
    let lane_of = lane_of(program);
    let is_hosted = |lane: &Lane| lane.queue == Queue::Copy || !is_gpu(lane.device);
    let mut is_heard: Table<StepId, bool> = program.steps.ids().map(|_| false).collect();
    for lane in program.lanes.iter().filter(|lane| is_hosted(lane)) {
        let heard = lane.steps.iter().flat_map(|&step| &program.steps[step].waits);
        heard.for_each(|&step| is_heard[step] = true);
    }
    let mut lanes: Vec<Progress> = program.lanes.iter().map(|_| Progress::default()).collect();
    let mut ends: Table<StepId, u64> = Table::with_capacity(program.steps.len());
    // The scheduler numbers steps so that each comes after what it depends on, in its lane too.
    for id in program.steps.ids() {
        let (step, lane) = (&program.steps[id], lane_of[id]);
        let Progress { free, mut queued, next } = lanes[lane];
        let ready = step.waits.iter().map(|&wait| ends[wait]).fold(free, u64::max);
        let on_host = step.waits.iter().filter(|&&wait| is_hosted(&program.lanes[lane_of[wait]]));
        let from = on_host.map(|&wait| ends[wait]).chain(next).max();
        if let Some(from) = from
            && !is_hosted(&program.lanes[lane])
        {
            queued = queued.max(from) + QUEUEING_NANOS;
        }
        waits[id] = queued.saturating_sub(ready);
        let end = ready + waits[id] + step.estimate_nanos;
        let is_taken = matches!(step.action, Action::Move { .. })
            && step.reads.iter().any(|&buffer| !is_gpu(program.buffers[buffer].device));
        let next = if is_heard[id] { Some(end) } else { is_taken.then_some(queued) };
        lanes[lane] = Progress { free: end, queued, next };
        ends.push(end);
    }
    waits
}

#[cfg(test)]
mod tests {
    use ir::id::{BufferId, CauseId, Few, Id as _, WeightId};
    use ir::layout::Move;
    use ir::op::Op;
    use ir::plan::{Algorithm, Buffer, Step};
    use ir::smallvec;
    use ir::tensor::{DType, Extent, Shape, TensorType};

    use super::*;

    const SHORT: u64 = 20_000;
    const LONG: u64 = 3_000_000;

    /// A prompt of a GPU (device 0) and a NUMA node (1). By number: 0 fetches; 1 is the GPU's first step and 2 follows;
    /// 3 waits for the fetch, 4 follows, and the node (5) waits for that; 6 follows; 7 takes the node's value and 8
    /// follows; 9 and 10 need what is fetched, too.
    fn program(phase: Phase) -> Program {
        let step = |action, waits: &[usize], nanos| Step {
            name: "".into(),
            action,
            reads: smallvec![BufferId::from_index(0)],
            writes: Few::new(),
            waits: waits.iter().map(|&wait| StepId::from_index(wait)).collect(),
            frees: Few::new(),
            estimate_nanos: nanos,
            cause: CauseId::from_index(0),
        };
        let run = || Action::Run(Op::Add);
        let taken = Action::Move {
            movement: Move::Transfer { from: DeviceId::from_index(1), to: DeviceId::from_index(0) },
            collective: None,
            slice: None,
            algorithm: Algorithm::Direct,
        };
        let fetch = Action::Fetch { weight: WeightId::from_index(0), offset: 0 };
        let steps = [
            step(fetch, &[], LONG),
            step(run(), &[], SHORT),
            step(run(), &[], SHORT),
            step(run(), &[0], SHORT),
            step(run(), &[], SHORT),
            step(run(), &[4], SHORT),
            step(run(), &[], SHORT),
            Step { reads: smallvec![BufferId::from_index(1)], ..step(taken, &[5], SHORT) },
            step(run(), &[], SHORT),
            step(run(), &[0], LONG),
            step(run(), &[0], LONG),
        ];
        let lane = |device, queue, steps: &[usize]| Lane {
            device: DeviceId::from_index(device),
            queue,
            steps: steps.iter().map(|&step| StepId::from_index(step)).collect(),
        };
        let buffer = |device| Buffer {
            device: DeviceId::from_index(device),
            ty: TensorType { dtype: DType::F32, shape: Shape::new() },
        };
        Program {
            name: "prefill".into(),
            phase,
            max: Extent { tokens: 8, rows: 1 },
            max_sequences: 1,
            buffers: [buffer(0), buffer(1)].into_iter().collect(),
            steps: steps.into_iter().collect(),
            lanes: vec![
                lane(0, Queue::Compute, &[1, 2, 3, 4, 6, 7, 8, 9, 10]),
                lane(0, Queue::Copy, &[0]),
                lane(1, Queue::Compute, &[5]),
            ],
            output: BufferId::from_index(0),
        }
    }

    #[test]
    fn what_follows_a_wait_waits_for_its_launches_unless_the_gpu_is_busy() {
        let waits = |phase| -> Vec<u64> {
            let waits = waits_for_launches(|device| device.index() == 0, &program(phase));
            waits.rows().to_vec()
        };
        let queued = QUEUEING_NANOS;
        // The launches of 7 and of those behind it are queued while the step before is under way.
        let behind = queued - SHORT;
        assert_eq!(
            waits(Phase::Prefill),
            [0, 0, 0, queued, 0, 0, queued, behind, behind, behind, 0]
        );
        assert_eq!(waits(Phase::Decode), [0; 11]);
    }
}
