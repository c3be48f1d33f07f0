//! Types of moves.

use ir::id::BufferId;
use ir::layout::Move;
use ir::machine::DeviceKind;
use ir::plan::{Action, Algorithm, Plan, Step};
use ir::smallvec;
use ir::tensor::{DType, Dim};
use ir::workspace::MAX_FUSED_ROWS;

use crate::plans::{b, d, gpu, gpus, pipeline, tensor_parallel};
use crate::{findings, finds, finds_in_step, named};

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
fn a_sum_has_several_terms() {
    finds(
        tensor_parallel(),
        |plan| {
            for step in plan.programs[0].steps.rows_mut() {
                if matches!(step.action, Action::Move { movement: Move::AllReduce, .. }) {
                    step.reads.truncate(1);
                }
            }
        },
        &[
            "s12 (o) of prefill: a sum of one term",
            "s13 (o) of prefill: a sum of one term",
            "collective g1 of prefill: the devices that hold its terms are not those that take part",
        ],
    );
}

#[test]
fn ids_are_not_cut() {
    let cut = |movement: &Move| Action::Move {
        movement: movement.clone(),
        collective: None,
        slice: Some((0, 2)),
        algorithm: Algorithm::Direct,
    };
    let slice = Move::Slice { axis: 1 };
    let mut plan = pipeline();
    let program = &mut plan.programs[0];
    let ids = program.steps[named(program, "route")].writes[0];
    let copy = program.buffers.push(program.buffers[ids].clone());
    let step = Step {
        action: cut(&slice),
        reads: smallvec![ids],
        writes: smallvec![copy],
        frees: smallvec![copy],
        ..program.steps[named(program, "select")].clone()
    };
    let step = program.steps.push(step);
    program.lanes[1].steps.insert(3, step);
    assert_eq!(findings(&plan), ["s14 (select) of prefill: slice axis=1 of i32[tokens, 2]"]);
}

#[test]
fn only_sums_are_made_by_a_library() {
    let by_library = |action: &mut Action| {
        if let Action::Move { algorithm, .. } = action {
            *algorithm = Algorithm::Library;
        }
    };
    movement(
        pipeline(),
        "transfer",
        by_library,
        &["s8 (transfer) of prefill: transfer d0 -> d1 by a library of collectives"],
    );
}

#[test]
fn gpus_make_whole_sums() {
    let mut plan = tensor_parallel();
    plan.programs.truncate(1);
    plan.machine.devices[d(0)].kind = gpu(0);
    let found = findings(&plan);
    let expected =
        "s14 (scatter) of prefill: reduce_scatter axis=1 on a GPU, which makes whole sums";
    assert!(found.contains(&expected.to_string()), "{found:?}");
    let of_other = "s15 (scatter) of prefill: reduce_scatter axis=1";
    assert!(!found.iter().any(|finding| finding.starts_with(of_other)), "{found:?}");
}

#[test]
fn gpus_sum_rows_of_fours() {
    let mut plan = gpus();
    let narrow = |plan: &mut Plan| {
        let program = &mut plan.programs[0];
        for step in program.steps.rows_mut().iter_mut().filter(|step| &*step.name == "again") {
            for &buffer in step.reads.iter().chain(&step.writes) {
                program.buffers[buffer].ty.shape[1] = Dim::Fixed(6);
            }
        }
    };
    let expected =
        "s14 (again) of prefill: GPUs sum numbers in rows of a multiple of 4, not f32[tokens, 6]";
    narrow(&mut plan);
    assert!(findings(&plan).contains(&expected.to_string()), "{:?}", findings(&plan));
    // Through the host any number of features can be summed.
    for (node, device) in (0..).zip(plan.machine.devices.rows_mut()) {
        device.kind = DeviceKind::Numa { node, cpus: vec![node] };
    }
    assert!(!findings(&plan).iter().any(|finding| finding.contains("(again)")));
}

#[test]
fn gpus_sum_terms_of_many_tokens_in_16_bits() {
    let narrow = |dtype: DType| {
        move |plan: &mut Plan| {
            let program = &mut plan.programs[0];
            let terms =
                program.steps.rows().iter().filter(|step| {
                    matches!(&step.action, Action::Move { .. }) && &*step.name == "o"
                });
            let terms: Vec<BufferId> = terms.flat_map(|sum| sum.reads.to_vec()).collect();
            terms.into_iter().for_each(|term| program.buffers[term].ty.dtype = dtype);
        }
    };
    let of = |tokens: u32| {
        let mut plan = gpus();
        plan.programs[0].max.tokens = tokens;
        plan
    };
    finds(of(MAX_FUSED_ROWS + 1), narrow(DType::Bf16), &[]);
    // Matrices in bfloat16 are not multiplied in f16.
    let made = |step: &str, dtype| {
        format!("{step} (o) of prefill: {dtype}[tokens, 8] where numbers of f32 are expected")
    };
    let f16 = ["s6", "s11"].map(|step| made(step, DType::F16));
    finds(of(MAX_FUSED_ROWS + 1), narrow(DType::F16), &f16.each_ref().map(String::as_str));
    // Runs of few tokens are decoded, too, where what is summed is small.
    let sums =
        ["s12", "s13"].map(|step| format!("{step} (o) of prefill: all_reduce of bf16[tokens, 8]"));
    let bf16 = ["s6", "s11"].map(|step| made(step, DType::Bf16));
    let all: Vec<&str> = bf16.iter().chain(&sums).map(String::as_str).collect();
    finds(of(MAX_FUSED_ROWS), narrow(DType::Bf16), &all);
    // Of eight features there are whole loads in 16 bits, of four there are not.
    let mut plan = of(MAX_FUSED_ROWS + 1);
    narrow(DType::Bf16)(&mut plan);
    let fewer = |step: &&mut Step| matches!(&step.action, Action::Move { .. });
    let program = &mut plan.programs[0];
    for step in program.steps.rows_mut().iter_mut().filter(fewer) {
        for &buffer in step.reads.iter().chain(&step.writes) {
            program.buffers[buffer].ty.shape[1] = Dim::Fixed(4);
        }
    }
    let expected =
        "s12 (o) of prefill: GPUs sum numbers in rows of a multiple of 8, not bf16[tokens, 4]";
    assert!(findings(&plan).contains(&expected.to_string()), "{:?}", findings(&plan));
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
            "s7 (q) of prefill: it reads b1, which is a term of a sum",
            "s8 (k) of prefill: it reads b1, which is a term of a sum",
            "s9 (v) of prefill: it reads b1, which is a term of a sum",
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
