//! Members of collectives.

use ir::id::{CollectiveId, Id as _};
use ir::layout::Move;
use ir::plan::{Action, Step};

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
