//! Members of collectives.

use ir::check::{check, memory};
use ir::id::{CollectiveId, DeviceId, FileId, Id as _};
use ir::layout::Move;
use ir::machine::{Collectives, Device, DeviceKind};
use ir::op::{Linear, Op, Then};
use ir::plan::{Action, Algorithm, Lane, Phase, Plan, Program, Queue, Step, Weight};
use ir::smallvec;
use ir::tensor::DType;
use ir::weight::{Slice, Source};

use crate::plans::{b, d, gpus, s, tensor_parallel, w};
use crate::{finds, finds_in_prefill, finds_in_step};

fn set(step: &mut Step, to: CollectiveId) {
    if let Action::Move { collective, .. } = &mut step.action {
        *collective = Some(to);
    }
}

#[test]
fn every_holder_of_a_term_takes_part() {
    let other = CollectiveId::from_index(9);
    finds_in_step(
        tensor_parallel(),
        "gather",
        |step| set(step, other),
        &[
            "collective g3 of prefill: the devices that hold its terms are not those that take part",
            "collective g9 of prefill: the devices that hold its terms are not those that take part",
        ],
    );
}

#[test]
fn a_device_takes_part_once() {
    let gathers = CollectiveId::from_index(3);
    finds_in_step(
        tensor_parallel(),
        "scatter",
        |step| set(step, gathers),
        &[
            "collective g2 of prefill: the devices that hold its terms are not those that take part",
            "collective g3 of prefill: a device takes part twice",
        ],
    );
}

#[test]
fn members_do_the_same() {
    finds_in_step(
        tensor_parallel(),
        "gather",
        |step| {
            if let Action::Move { movement, .. } = &mut step.action {
                *movement = Move::AllGather { axis: 0 };
            }
        },
        &[
            "s16 (gather) of prefill: f32[tokens, 4] has no axis 0 that could be cut",
            "collective g3 of prefill: its steps differ in what they do or read",
        ],
    );
}

#[test]
fn slices_of_a_scattered_sum_follow_each_other() {
    finds_in_step(
        tensor_parallel(),
        "scatter",
        |step| {
            if let Action::Move { slice, .. } = &mut step.action {
                *slice = Some((1, 4));
            }
        },
        &["collective g2 of prefill: its slices do not follow each other"],
    );
}

#[test]
fn slices_of_a_scattered_sum_leave_nothing_out() {
    finds_in_prefill(
        tensor_parallel(),
        |program| {
            let scatters = program.steps.rows_mut().iter_mut();
            for step in scatters.filter(|step| &*step.name == "scatter") {
                if let Action::Move { slice: Some((start, size)), .. } = &mut step.action {
                    (*start, *size) = (*start / 4 * 3, 3);
                }
            }
        },
        &[
            "s14 (scatter) of prefill: f32[tokens, 3] and f32[tokens, 4] where types must be the same",
            "s15 (scatter) of prefill: f32[tokens, 3] and f32[tokens, 4] where types must be the same",
            "collective g2 of prefill: its slices leave some of the sum out",
        ],
    );
}

#[test]
fn a_term_is_no_whole() {
    finds_in_step(
        gpus(),
        "select",
        |step| step.reads[0] = b(12),
        &["s16 (select) of prefill: it reads b12, which is a term of a sum"],
    );
    finds_in_step(
        tensor_parallel(),
        "gather",
        |step| step.reads[0] = b(12),
        &[
            "s16 (gather) of prefill: 12 elements are gathered to f32[tokens, 8]",
            "s16 (gather) of prefill: it reads b12, which is a term of a sum",
            "collective g3 of prefill: its steps differ in what they do or read",
        ],
    );
}

/// The plan of two devices, of which each makes half of what is gathered with half of one matrix's rows.
fn gathering() -> Plan {
    let mut plan = tensor_parallel();
    let whole = Source::contiguous(FileId::from_index(0), DType::Bf16, 1 << 10, &[8, 8]);
    let halves = [0, 1].map(|member| {
        let slice = Slice { axis: 0, start: 4 * member, size: 4 };
        let source = whole.sliced(slice).expect("it has such rows");
        plan.weights.push(Weight {
            name: "halved".into(),
            device: d(member as usize),
            shape: vec![4, 8],
            sources: vec![source],
            ..plan.weights[w(0)].clone()
        })
    });
    for program in &mut plan.programs {
        let scatters = program.steps.rows_mut().iter_mut().filter(|step| &*step.name == "scatter");
        for ((step, weight), sum) in scatters.zip(halves).zip([b(12), b(13)]) {
            step.reads = smallvec![sum];
            step.action = Action::Run(Op::Linear(Linear {
                norm: None,
                weights: smallvec![weight],
                biases: smallvec![None],
                then: Then::Nothing,
                residual: false,
            }));
        }
    }
    plan
}

#[test]
fn parts_are_gathered_in_the_order_of_the_rows_that_make_them() {
    let found =
        "collective g3 of prefill: its parts are not in the order of the rows that make them";
    finds_in_prefill(
        gathering(),
        |program| {
            for step in program.steps.rows_mut().iter_mut().filter(|step| &*step.name == "gather") {
                step.reads.reverse();
            }
        },
        &[found],
    );
    // Both make the same half.
    let mut plan = gathering();
    let rows = plan.weights.rows_mut();
    let last = rows.len() - 1;
    rows[last].sources = rows[last - 1].sources.clone();
    let all: Vec<String> = check(&plan).iter().map(ToString::to_string).collect();
    assert!(all.contains(&found.to_string()), "{all:?}");
}

#[test]
fn members_issue_collectives_in_one_order() {
    finds_in_prefill(
        tensor_parallel(),
        |program| {
            let steps = &mut program.lanes[1].steps;
            let last = steps.len() - 1;
            steps.swap(last, last - 1);
        },
        &[
            "s16 (gather) of prefill waits for itself",
            "lanes of prefill issue g2 and g3 in different orders",
        ],
    );
}

/// Lets the library make so many members' parts of sums.
pub(crate) fn by_library(program: &mut Program, sums: usize) {
    let algorithms =
        program.steps.rows_mut().iter_mut().filter_map(|step| match &mut step.action {
            Action::Move { movement: Move::AllReduce, algorithm, .. } => Some(algorithm),
            Action::Run(_) | Action::Fetch { .. } | Action::Move { .. } => None,
        });
    algorithms.take(sums).for_each(|algorithm| *algorithm = Algorithm::Library);
}

#[test]
fn a_library_sums_over_gpus_that_have_it_in_prefill() {
    finds_in_prefill(
        tensor_parallel(),
        |program| by_library(program, 1),
        &["collective g1 of prefill: its steps differ in what they do or read"],
    );
    let of_others =
        "collective g1 of prefill: a library makes sums of all their GPUs' terms, in prefill";
    finds_in_prefill(tensor_parallel(), |program| by_library(program, 2), &[of_others]);
    let missing = "collective g1 of prefill: the machine has no library that makes it";
    finds_in_prefill(gpus(), |program| by_library(program, 2), &[missing]);
    let collectives = Collectives { bytes_per_sec: 1e11, latency_nanos: 1e4, reserved_bytes: 256 };
    let mut plan = gpus();
    plan.machine.collectives = Some(collectives.clone());
    let before = memory(&plan);
    by_library(&mut plan.programs[0], 2);
    assert_eq!(check(&plan), []);
    for (after, before) in memory(&plan).rows().iter().zip(before.rows()) {
        assert_eq!(after.reserved_bytes, before.reserved_bytes + 256);
    }
    let mut in_decode = plan.clone();
    in_decode.programs[0].phase = Phase::Decode;
    let found: Vec<String> = check(&in_decode).iter().map(ToString::to_string).collect();
    assert!(found.contains(&of_others.to_string()), "{found:?}");
    // Nothing is taken for a GPU that is none.
    for buffer in plan.programs[0].buffers.rows_mut() {
        buffer.device = DeviceId::from_index(99);
    }
    let found: Vec<String> = check(&plan).iter().map(ToString::to_string).collect();
    assert!(found.contains(&of_others.to_string()), "{found:?}");
}

#[test]
fn gpus_that_sum_wait_for_each_other_alone() {
    let mut plan = gpus();
    // What the other member does up to the sum is over when the sum is.
    plan.programs[0].steps[s(14)].waits.extend([s(1), s(13), s(15)]);
    assert_eq!(check(&plan), []);
    // A third device embeds the tokens.
    let node = plan.machine.devices.push(Device {
        name: "host".into(),
        kind: DeviceKind::Numa { node: 0, cpus: vec![0] },
        ..plan.machine.devices[d(0)].clone()
    });
    let table = plan.weights.push(Weight { device: node, ..plan.weights[w(0)].clone() });
    finds_in_prefill(
        plan,
        |program| {
            let embed = program.steps[s(0)].clone();
            let x = program.buffers.push(program.buffers[embed.writes[0]].clone());
            program.buffers[x].device = node;
            let action = Action::Run(Op::Embed { table, scale: 1.0 });
            let embed = Step { action, writes: smallvec![x], frees: smallvec![x], ..embed };
            let embed = program.steps.push(embed);
            let queue = Queue::Compute;
            program.lanes.push(Lane { device: node, queue, steps: vec![embed] });
            program.steps[s(14)].waits.push(embed);
        },
        &["collective g2 of prefill: s14 (again) of prefill waits for s18 (embed) of prefill, \
             which no member of the sum does"],
    );
}

#[test]
fn gpus_sum_with_the_same_others_in_one_order() {
    let reversed = |program: &mut Program| {
        for step in program.steps.rows_mut().iter_mut().filter(|step| &*step.name == "again") {
            step.reads.reverse();
        }
    };
    finds_in_prefill(
        gpus(),
        reversed,
        &["collective g2 of prefill: GPUs that sum among themselves do so with the same others"],
    );
    // Runs of several programs may be under way.
    finds(
        gpus(),
        |plan| {
            for step in plan.programs[1].steps.rows_mut() {
                if matches!(step.action, Action::Move { movement: Move::AllReduce, .. }) {
                    step.reads.reverse();
                }
            }
        },
        &["collective g1 of decode: GPUs that sum among themselves do so with the same others"],
    );
    // On NUMA nodes sums need no count.
    let mut plan = gpus();
    for (node, device) in (0..).zip(plan.machine.devices.rows_mut()) {
        device.kind = DeviceKind::Numa { node, cpus: vec![node] };
    }
    finds_in_prefill(plan, reversed, &[]);
}
