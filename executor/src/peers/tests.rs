//! Which steps of GPUs are waited for on the host.

use ::tests::machines::{gpu, linked, numa};
use ::tests::toys::Toy;
use compiler::options::{Request, parse_pipeline, parse_tensor_parallel};
use ir::id::{CauseId, CollectiveId, Few, Id as _, WeightId};
use ir::layout::Move;
use ir::op::Op;
use ir::plan::{Action, Algorithm, Buffer, Phase, Step};
use ir::smallvec;
use ir::tensor::{Extent, TensorType};

use super::*;

fn d(index: usize) -> DeviceId {
    DeviceId::from_index(index)
}

fn b(index: usize) -> BufferId {
    BufferId::from_index(index)
}

fn s(index: usize) -> StepId {
    StepId::from_index(index)
}

/// A toy on some GPUs and a NUMA node, in that order.
fn compiled(gpus: u32, request: Request) -> Plan {
    let devices = (0..gpus).map(|ordinal| gpu(ordinal, 1 << 30));
    let machine = linked(devices.chain([numa(0, 1 << 30)]).collect());
    let options = compiler::Options { request, ..compiler::Options::default() };
    let model = Toy::llama().model().unwrap();
    compiler::compile(&model, &machine, &options, &mut |_, _| ()).unwrap()
}

/// Two GPUs that each embed the tokens and sum up what both have; the caller reads the sum of the first.
fn summing() -> Program {
    let step = |action: Action, reads: &[BufferId], written: usize| Step {
        name: "step".into(),
        action,
        reads: reads.into(),
        writes: smallvec![b(written)],
        frees: Few::new(),
        waits: Few::new(),
        estimate_nanos: 0,
        cause: CauseId::from_index(0),
    };
    let embed = Action::Run(Op::Embed { table: WeightId::from_index(0), scale: 1.0 });
    let sum = Action::Move {
        movement: Move::AllReduce,
        collective: Some(CollectiveId::from_index(0)),
        slice: None,
        algorithm: Algorithm::Library,
    };
    let terms = [b(0), b(1)];
    let steps = [
        step(embed.clone(), &[], 0),
        step(embed, &[], 1),
        step(sum.clone(), &terms, 2),
        step(sum, &terms, 3),
    ];
    let buffer = |device: usize| Buffer { device: d(device), ty: TensorType::activation(8) };
    let lane = |device: usize, steps: [usize; 2]| Lane {
        device: d(device),
        queue: Queue::Compute,
        steps: steps.map(s).to_vec(),
    };
    Program {
        name: "prefill".into(),
        phase: Phase::Prefill,
        max: Extent { tokens: 8, rows: 1 },
        max_sequences: 1,
        buffers: [0, 1, 0, 1].map(buffer).into_iter().collect(),
        steps: steps.into_iter().collect(),
        lanes: vec![lane(0, [0, 2]), lane(1, [1, 3])],
        output: b(2),
    }
}

#[test]
fn a_gpu_whose_results_leave_through_sums_alone_is_waited_for() {
    let mut plan = compiled(2, parse_tensor_parallel("gpu0,gpu1").unwrap());
    plan.programs = vec![summing()];
    let awaited = |gpu_driver: GpuDriver| {
        let options = Options { gpu_driver, ..Options::default() };
        Peers::new(&plan, &options).awaited(0).rows().to_vec()
    };
    // The library makes the sums, so the driver is not asked who reaches whom.
    assert_eq!(awaited(GpuDriver::Cuda), [false, false, false, true]);
    // Without letters nothing of the next run is in the way.
    assert_eq!(awaited(GpuDriver::Vulkan), [false; 4]);
}

#[test]
fn what_alone_is_added_to_a_sum_is_added_in_its_launch() {
    let plan = compiled(2, parse_tensor_parallel("gpu0,gpu1").unwrap());
    let mut program = summing();
    for (device, sum) in [2, 3].into_iter().enumerate() {
        let Action::Move { algorithm, .. } = &mut program.steps[s(sum)].action else {
            panic!("it is a sum")
        };
        *algorithm = Algorithm::Direct;
        let added = program.buffers.push(program.buffers[b(device)].clone());
        let add = Step {
            action: Action::Run(Op::Add),
            reads: smallvec![b(device), b(sum)],
            writes: smallvec![added],
            ..program.steps[s(0)].clone()
        };
        let add = program.steps.push(add);
        program.lanes[device].steps.push(add);
    }
    program.output = b(4);
    let joined = |program: &Program| {
        let is_move = |step: &Step| matches!(step.action, Action::Move { .. });
        let sums = program.steps.rows().iter().map(is_move).collect();
        joined_with_next(&plan, program, &sums).rows().to_vec()
    };
    assert_eq!(joined(&program), [false, false, true, true, false, false]);
    // The caller reads one sum, and a later step the other.
    let mut read = program.clone();
    read.output = b(2);
    read.steps[s(5)].reads = smallvec![b(3), b(3)];
    assert_eq!(joined(&read), [false; 6]);
    // The vendor's library adds nothing.
    let Action::Move { algorithm, .. } = &mut program.steps[s(2)].action else {
        panic!("it is a sum")
    };
    *algorithm = Algorithm::Library;
    assert_eq!(joined(&program), [false, false, false, true, false, false]);
}

/// Adds a step that embeds the tokens once more, on any device.
fn embed_again(program: &mut Program, device: usize, waits: Few<StepId>) -> StepId {
    let buffer = Buffer { device: d(device), ..program.buffers[b(0)].clone() };
    let writes = smallvec![program.buffers.push(buffer)];
    let step = Step { writes, waits, ..program.steps[s(0)].clone() };
    program.steps.push(step)
}

#[test]
fn a_gpu_that_is_told_something_behind_what_is_heard_of_it_is_waited_for() {
    let ends = |program: &Program| {
        let is_move = |step: &Step| matches!(step.action, Action::Move { .. });
        let sums: Table<StepId, bool> = program.steps.rows().iter().map(is_move).collect();
        let lying = BTreeMap::new();
        let waits = waits_on_the_host(program, &sums, &lying);
        let awaited = awaited_on_the_host(program, &waits, &lying);
        let host = OnHost { sums: &sums, lying: &lying, waits: &waits };
        unheard_ends(program, |device| device != d(2), host, &awaited)
    };
    let mut program = summing();
    assert_eq!(ends(&program), [s(3)]);
    // A NUMA node waits for what the second GPU does first.
    let of_node = embed_again(&mut program, 2, smallvec![s(1)]);
    program.lanes.push(Lane { device: d(2), queue: Queue::Compute, steps: vec![of_node] });
    assert_eq!(ends(&program), []);
    // The GPU waits for the node.
    let behind = embed_again(&mut program, 1, smallvec![of_node]);
    program.lanes[1].steps.insert(1, behind);
    assert_eq!(ends(&program), [s(3)]);
    // Somebody waits for that.
    program.steps[of_node].waits.clear();
    program.steps[s(0)].waits.push(behind);
    assert_eq!(ends(&program), []);
}

/// What does not pass through the host where GPUs sum without it; where they reach each other's memory, what they read
/// there is not moved through it either.
fn beside_host(
    plan: &Plan,
    program: &Program,
    is_reached: bool,
) -> (Table<StepId, bool>, BTreeMap<StepId, Vec<Lying>>) {
    let is_sum =
        |step: &Step| plan.is_peer_sum(program, step) || plan.is_library_sum(program, step);
    let sums = program.steps.rows().iter().map(is_sum).collect();
    let mut lying = BTreeMap::new();
    for (id, step) in program.steps.iter().filter(|_| is_reached) {
        let moved = plan.peer_moved(program, step).into_iter();
        let moved: Vec<Lying> =
            moved.map(|(buffer, with)| Lying { buffer, with, start: 0 }).collect();
        if !moved.is_empty() {
            lying.insert(id, moved);
        }
    }
    (sums, lying)
}

#[test]
fn every_gpu_of_a_plan_is_heard_of_in_each_run() {
    for (gpus, request) in [
        (2, parse_tensor_parallel("gpu0,gpu1").unwrap()),
        (3, parse_tensor_parallel("gpu0,gpu1,gpu2").unwrap()),
        (2, parse_tensor_parallel("gpu0,gpu1,numa0").unwrap()),
        (2, parse_pipeline("gpu0,gpu1").unwrap()),
    ] {
        let plan = compiled(gpus, request);
        let is_gpu = |device: DeviceId| plan.machine.devices[device].kind.is_gpu();
        let programs = plan.programs.iter();
        for (program, is_reached) in
            programs.flat_map(|program| [(program, false), (program, true)])
        {
            let (sums, lying) = beside_host(&plan, program, is_reached);
            let waits = waits_on_the_host(program, &sums, &lying);
            let mut awaited = awaited_on_the_host(program, &waits, &lying);
            let host = OnHost { sums: &sums, lying: &lying, waits: &waits };
            for end in unheard_ends(program, is_gpu, host, &awaited) {
                awaited[end] = true;
            }
            let mut exported = BTreeSet::from([program.output]);
            for lane in &program.lanes {
                let read = lane.steps.iter().flat_map(|&step| host.reads(program, lane, step));
                exported.extend(read);
            }
            let lanes = program.lanes.iter().filter(|lane| lane.queue == Queue::Compute);
            for lane in lanes.filter(|lane| is_gpu(lane.device)) {
                let is_heard = |&step: &StepId| {
                    let mut writes = program.steps[step].writes.iter();
                    awaited[step] || writes.any(|buffer| exported.contains(buffer))
                };
                let is_told = |&step: &StepId| {
                    !host.waits[step].is_empty() || !host.reads(program, lane, step).is_empty()
                };
                let heard = lane.steps.iter().rposition(is_heard);
                let told = lane.steps.iter().rposition(is_told);
                assert!(heard.is_some() && heard >= told, "{} of {}", lane.device, program.name);
            }
        }
    }
}
