//! Attention: its inputs, its heads, and that all programs attend alike.

use ir::id::{FileId, Id as _};
use ir::op::{Activation, Attention, Norm, Op};
use ir::plan::{Action, Plan, Program, Weight};
use ir::tensor::DType;
use ir::weight::Source;

use crate::plans::{c, one_device, tensor_parallel, w};
use crate::shapes::norm;
use crate::{finds, finds_in_step, named};

/// The attention of each device that attends in a program.
fn attending(program: &mut Program) -> impl Iterator<Item = &mut Attention> {
    program.steps.rows_mut().iter_mut().filter_map(|step| match &mut step.action {
        Action::Run(Op::Attention(attention)) => Some(attention),
        Action::Run(_) | Action::Move { .. } | Action::Fetch { .. } => None,
    })
}

/// Changes attention in all programs, where these problems are to be found.
#[track_caller]
fn attention(change: impl Fn(&mut Attention), problems: &[&str]) {
    let in_program = |program: &'static str| {
        let step = move |problem: &&str| format!("s5 (attention) of {program}: {problem}");
        problems.iter().map(step)
    };
    let expected: Vec<String> = ["prefill", "decode"].into_iter().flat_map(in_program).collect();
    let expected: Vec<&str> = expected.iter().map(String::as_str).collect();
    finds(
        one_device(),
        |plan| plan.programs.iter_mut().flat_map(attending).for_each(change),
        &expected,
    );
}

#[test]
fn attention_fits_its_inputs_and_its_cache() {
    attention(
        |attention| attention.heads = 1,
        &[
            "f32[tokens, 8] instead of [tokens, 4]",
            "query heads 0..1, in groups of 2, have 1 key heads",
        ],
    );
    attention(
        |attention| attention.heads = 0,
        &[
            "0 heads over 1 of 4 features in groups of 2",
            "query heads 0..0, in groups of 2, have 1 key heads",
        ],
    );
    attention(
        |attention| attention.group = 0,
        &[
            "2 heads over 1 of 4 features in groups of 0",
            "query heads 0..2, in groups of 0, have 1 key heads",
        ],
    );
    attention(|attention| attention.head_dim = u32::MAX, &["2 heads of 4294967295 features"]);
    attention(
        |attention| attention.q_norm = Some(norm(Some(w(1)), 1e-5)),
        &["w1 has shape [8] instead of [4]"],
    );
    attention(|attention| attention.scale = f32::INFINITY, &["the scale is inf"]);
    attention(|attention| attention.scale = -0.5, &["the scale is -0.5"]);
    attention(|attention| attention.window = Some(0), &["the window is empty"]);
    attention(|attention| attention.soft_cap = Some(0.0), &["the cap is 0"]);
    finds(
        one_device(),
        |plan| plan.caches[c(0)].head_dim = 8,
        &[
            "s5 (attention) of prefill: c0 holds 1 heads of 8 features, not 1 of 4",
            "s5 (attention) of decode: c0 holds 1 heads of 8 features, not 1 of 4",
        ],
    );
}

#[test]
fn every_query_head_has_a_key_head() {
    attention(
        |attention| attention.group = 1,
        &["query heads 0..2, in groups of 1, have 1 key heads"],
    );
    attention(
        |attention| attention.first_head = 1,
        &["query heads 1..3, in groups of 2, have 1 key heads"],
    );
    attention(
        |attention| attention.first_head = u32::MAX,
        &["query heads 4294967295..4294967297, in groups of 2, have 1 key heads"],
    );
}

#[test]
fn every_key_head_has_all_of_its_query_heads() {
    for group in [3, 900_000, u32::MAX] {
        let expected = format!("query heads 0..2, in groups of {group}, have 1 key heads");
        attention(|attention| attention.group = group, &[&expected]);
    }
}

/// Two devices that have the same key head, and the query heads of a group of that size from these on.
fn dividing(group: u32, first_heads: [u32; 2]) -> impl FnOnce(&mut Plan) {
    move |plan: &mut Plan| {
        for program in &mut plan.programs {
            for (attention, first_head) in attending(program).zip(first_heads) {
                (attention.group, attention.first_head) = (group, first_head);
            }
        }
    }
}

#[test]
fn devices_that_have_the_same_key_heads_divide_the_query_heads() {
    finds(tensor_parallel(), dividing(4, [0, 2]), &[]);
    finds(tensor_parallel(), dividing(4, [2, 0]), &[]);
    for (group, first_heads, found) in [
        (4, [0, 0], "query heads 0..2 and 0..2, in groups of 4, have 1 and 1 key heads"),
        (8, [0, 2], "query heads 0..2 and 2..4, in groups of 8, have 1 and 1 key heads"),
        (4, [2, 4], "query heads 2..4 and 4..6, in groups of 4, have 1 and 1 key heads"),
    ] {
        let expected =
            ["prefill", "decode"].map(|program| format!("s5 (attention) of {program}: {found}"));
        let expected = expected.each_ref().map(String::as_str);
        finds(tensor_parallel(), dividing(group, first_heads), &expected);
    }
}

#[test]
fn a_program_that_attends_to_nothing_leaves_nothing_for_the_others() {
    finds_in_step(
        one_device(),
        "attention",
        |step| {
            step.action = Action::Run(Op::Activate(Activation::Relu));
            step.reads.truncate(1);
        },
        &["no step of prefill appends to c0"],
    );
}

/// Changes the attention of the decode program alone.
#[track_caller]
fn in_decode(change: impl FnMut(&mut Attention)) {
    finds(
        one_device(),
        |plan| attending(&mut plan.programs[1]).for_each(change),
        &["s5 (attention) of decode: it attends to c0 otherwise than prefill does"],
    );
}

#[test]
fn all_programs_attend_alike() {
    in_decode(|attention| attention.window = Some(2));
    in_decode(|attention| attention.scale = 0.25);
    in_decode(|attention| attention.soft_cap = Some(30.0));
    in_decode(|attention| attention.rope = None);
    in_decode(|attention| attention.k_norm = Some(norm(None, 1e-5)));
}

#[test]
fn heads_are_normalised_alike_by_each_device() {
    /// Lets a program scale its key heads by a weight of that name which is its own.
    fn scale(plan: &mut Plan, program: usize, name: &str) {
        let sources = vec![Source::contiguous(FileId::from_index(0), DType::Bf16, 16, &[4])];
        let scale =
            Weight { name: name.into(), shape: vec![4], sources, ..plan.weights[w(1)].clone() };
        let scale = Some(plan.weights.push(scale));
        let norm = Norm { bias: None, ..norm(scale, 1e-5) };
        attending(&mut plan.programs[program]).for_each(|a| a.k_norm = Some(norm.clone()));
    }
    let scaled = |names: [&'static str; 2]| {
        move |plan: &mut Plan| (0..2).for_each(|program| scale(plan, program, names[program]))
    };
    finds(one_device(), scaled(["k_norm", "k_norm"]), &[]);
    finds(
        one_device(),
        scaled(["k_norm", "q_norm"]),
        &["s5 (attention) of decode: it attends to c0 otherwise than prefill does"],
    );
}

#[test]
fn all_programs_cache_what_the_same_matrices_make() {
    let swap = |plan: &mut Plan| {
        // Both make one key head.
        for (name, weight) in [("k", w(4)), ("v", w(3))] {
            let step = named(&plan.programs[1], name);
            if let Action::Run(op) = &mut plan.programs[1].steps[step].action {
                *op = op.clone().map_weights(|_| weight);
            }
        }
    };
    finds(
        one_device(),
        swap,
        &["s5 (attention) of decode: its keys are made with another matrix than those of prefill"],
    );
}
