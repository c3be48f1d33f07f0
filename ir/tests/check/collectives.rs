//! Members of collectives.

use ir::check::{check, memory};
use ir::id::{CollectiveId, DeviceId, Id as _};
use ir::layout::Move;
use ir::machine::{Collectives, DeviceKind};
use ir::plan::{Action, Algorithm, Phase, Program, Step};

use crate::plans::tensor_parallel;
use crate::{finds_in_prefill, finds_in_step};

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
fn by_library(program: &mut Program, sums: usize) {
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
    let on_gpus = || {
        let mut plan = tensor_parallel();
        for (ordinal, device) in (0..).zip(plan.machine.devices.rows_mut()) {
            device.kind = DeviceKind::Gpu { ordinal, reserved_bytes: 0, library_bytes: 0 };
        }
        plan
    };
    let missing = "collective g1 of prefill: the machine has no library that makes it";
    finds_in_prefill(on_gpus(), |program| by_library(program, 2), &[missing]);
    let collectives = Collectives { bytes_per_sec: 1e11, latency_nanos: 1e4, reserved_bytes: 256 };
    let mut plan = on_gpus();
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
    // Nothing may be taken for a device that is none.
    for buffer in plan.programs[0].buffers.rows_mut() {
        buffer.device = DeviceId::from_index(99);
    }
    assert_ne!(check(&plan), []);
}
