//! Types of moves.

use ir::plan::{Action, Plan};
use ir::tensor::DType;

use crate::plans::{b, pipeline, tensor_parallel};
use crate::{finds, finds_in_step};

#[test]
fn a_transfer_keeps_the_type() {
    let arrives =
        |dtype: DType| move |plan: &mut Plan| plan.programs[0].buffers[b(8)].ty.dtype = dtype;
    finds(
        pipeline(),
        arrives(DType::I32),
        &[
            "s8 (transfer) of prefill: f32[tokens, 8] and i32[tokens, 8] where types must be the same",
            "s9 (router) of prefill: i32[tokens, 8] where numbers of f32 are expected",
            "s11 (experts) of prefill: i32[tokens, 8] where numbers of f32 are expected",
        ],
    );
    finds(
        pipeline(),
        arrives(DType::F16),
        &[
            "s8 (transfer) of prefill: transfer d0 -> d1 of f16[tokens, 8]",
            "s9 (router) of prefill: f16[tokens, 8] where numbers of f32 are expected",
            "s11 (experts) of prefill: f16[tokens, 8] where numbers of f32 are expected",
        ],
    );
}

/// Changes the first step of that name, a move.
#[track_caller]
fn movement(plan: Plan, step: &str, change: impl FnOnce(&mut Action), expected: &[&str]) {
    finds_in_step(plan, step, |step| change(&mut step.action), expected);
}

#[test]
fn only_what_joins_devices_is_a_collective() {
    let lose = |action: &mut Action| {
        if let Action::Move { collective, .. } = action {
            *collective = None;
        }
    };
    movement(
        tensor_parallel(),
        "x",
        lose,
        &["s1 (x) of prefill: broadcast d0 with the wrong kind of membership"],
    );
}

#[test]
fn only_what_cuts_has_a_slice() {
    let cut = |action: &mut Action| {
        if let Action::Move { slice, .. } = action {
            *slice = Some((0, 4));
        }
    };
    movement(
        pipeline(),
        "transfer",
        cut,
        &["s8 (transfer) of prefill: transfer d0 -> d1 with slice Some((0, 4))"],
    );
    movement(
        tensor_parallel(),
        "gather",
        cut,
        &["s16 (gather) of prefill: all_gather axis=1 with slice Some((0, 4))"],
    );
}

#[test]
fn a_slice_lies_inside_the_whole() {
    let beyond = |action: &mut Action| {
        if let Action::Move { slice, .. } = action {
            *slice = Some((u32::MAX, 4));
        }
    };
    movement(
        tensor_parallel(),
        "scatter",
        beyond,
        &[
            "s14 (scatter) of prefill: elements 4294967295..+4 of f32[tokens, 8]",
            "collective g2 of prefill: its slices do not follow each other",
        ],
    );
}

#[test]
fn gathered_parts_make_the_whole() {
    finds_in_step(
        tensor_parallel(),
        "gather",
        |step| step.reads.truncate(1),
        &[
            "s16 (gather) of prefill: 4 elements are gathered to f32[tokens, 8]",
            "collective g3 of prefill: its steps differ in what they do or read",
        ],
    );
    finds_in_step(
        tensor_parallel(),
        "gather",
        |step| step.reads.clear(),
        &[
            "s16 (gather) of prefill: a gathering of nothing",
            "collective g3 of prefill: its steps differ in what they do or read",
        ],
    );
    finds_in_step(
        tensor_parallel(),
        "gather",
        |step| step.writes.clear(),
        &["s16 (gather) of prefill: 0 writes instead of 1", "no step of prefill writes b16"],
    );
}

#[test]
fn terms_of_a_sum_are_alike() {
    finds_in_step(
        tensor_parallel(),
        "scatter",
        |step| step.reads[1] = b(1),
        &[
            "collective g2 of prefill: its steps differ in what they do or read",
            "s14 (scatter) of prefill touches b1 after its end",
        ],
    );
    finds_in_step(
        tensor_parallel(),
        "scatter",
        |step| step.reads.clear(),
        &[
            "s14 (scatter) of prefill: a sum of nothing",
            "collective g2 of prefill: its steps differ in what they do or read",
        ],
    );
}
