//! Types of computations.

use ir::id::WeightId;
use ir::machine::DeviceKind;
use ir::op::{Activation, Linear, Norm, NormKind, Op, Then};
use ir::plan::{Action, Plan};
use ir::tensor::{DType, Dim, Format};
use ir::workspace::MAX_FUSED_ROWS;

use crate::plans::{b, d, one_device, streamed, w};
use crate::{findings, finds, finds_in_op, finds_in_prefill, finds_in_step, named};

/// Gives a step another operation, and expects that what it reads and writes does not suit it.
#[track_caller]
fn misfit(step: &str, op: Op, expected: &[&str]) {
    finds_in_op(one_device(), step, |old| *old = op, expected);
}

/// Changes the first linear.
#[track_caller]
fn linear(change: impl FnOnce(&mut Linear), expected: &[&str]) {
    finds_in_op(
        one_device(),
        "q",
        |op| {
            let Op::Linear(linear) = op else { panic!("{op} is no linear") };
            change(linear);
        },
        expected,
    );
}

pub(crate) fn norm(scale: Option<WeightId>, epsilon: f32) -> Norm {
    Norm { kind: NormKind::Layer, scale, bias: scale, epsilon, scale_offset: 0.0 }
}

#[test]
fn an_embedding_has_a_row_for_every_token_id() {
    finds(
        one_device(),
        |plan| {
            plan.weights[w(0)].shape[0] = 31;
            plan.weights[w(0)].sources[0].axes[0][0].size = 31;
        },
        &[
            "s0 (embed) of prefill: w0 has 31 rows for a vocabulary of 32",
            "s0 (embed) of decode: w0 has 31 rows for a vocabulary of 32",
        ],
    );
    misfit(
        "embed",
        Op::Embed { table: w(3), scale: 1.0 },
        &["s0 (embed) of prefill: w3 has 4 rows for a vocabulary of 32"],
    );
    misfit(
        "embed",
        Op::Embed { table: w(1), scale: 1.0 },
        &["s0 (embed) of prefill: w1 has shape [8] where a matrix is used"],
    );
    misfit(
        "embed",
        Op::Embed { table: w(0), scale: f32::NAN },
        &["s0 (embed) of prefill: the scale is NaN"],
    );
    misfit(
        "norm",
        Op::Embed { table: w(0), scale: 1.0 },
        &["s1 (norm) of prefill: 1 reads and 1 writes instead of 0 and 1"],
    );
}

#[test]
fn a_position_table_has_a_row_for_every_position() {
    misfit(
        "norm",
        Op::AddPosition { table: w(0), offset: 2 },
        &["s1 (norm) of prefill: w0 has 32 rows for 66 positions"],
    );
    finds(
        one_device(),
        |plan| {
            let op = Op::AddPosition { table: w(0), offset: u32::MAX };
            plan.programs[0].steps.rows_mut()[1].action = Action::Run(op);
        },
        &["s1 (norm) of prefill: w0 has 32 rows for 4294967359 positions"],
    );
}

#[test]
fn a_norm_keeps_the_type() {
    misfit(
        "norm",
        Op::Norm(norm(Some(w(2)), 1e-5)),
        &["s1 (norm) of prefill: w2 has shape [8, 8] instead of [8]"],
    );
    misfit(
        "norm",
        Op::Norm(norm(None, -1.0)),
        &["s1 (norm) of prefill: a norm with epsilon -1 and offset 0"],
    );
    misfit(
        "k",
        Op::Norm(norm(None, 1e-5)),
        &["s3 (k) of prefill: f32[tokens, 8] and f32[tokens, 4] where types must be the same"],
    );
}

#[test]
fn a_linear_has_weights_for_its_input_and_outputs() {
    let unlike =
        "s5 (attention) of decode: its queries are made with another matrix than those of prefill";
    linear(
        |linear| linear.weights[0] = w(9),
        &["s2 (q) of prefill: w9 has shape [4, 8, 16] where a matrix is used", unlike],
    );
    linear(
        |linear| linear.weights[0] = w(3),
        &["s2 (q) of prefill: f32[tokens, 8] instead of [tokens, 4]", unlike],
    );
    linear(|linear| linear.weights.clear(), &["s2 (q) of prefill: a linear without a weight"]);
    linear(|linear| linear.biases.clear(), &["s2 (q) of prefill: 0 biases for 1 weights"]);
    linear(
        |linear| linear.biases[0] = Some(w(2)),
        &["s2 (q) of prefill: w2 has shape [8, 8] instead of [8]"],
    );
    linear(
        |linear| linear.norm = Some(norm(Some(w(2)), 1e-5)),
        &["s2 (q) of prefill: w2 has shape [8, 8] instead of [8]"],
    );
    linear(|linear| linear.residual = true, &["s2 (q) of prefill: 1 reads instead of 2"]);
    linear(
        |linear| linear.then = Then::Gate(Activation::Silu),
        &["s2 (q) of prefill: a gate of linears that make [8] features"],
    );
    finds_in_op(
        one_device(),
        "o",
        |op| *op = op.clone().map_weights(|_| w(3)),
        &["s6 (o) of prefill: f32[tokens, 8] instead of [tokens, 4]"],
    );
}

#[test]
fn a_residual_is_for_one_output() {
    finds_in_step(
        one_device(),
        "q",
        |step| {
            step.reads.push(b(0));
            if let Action::Run(Op::Linear(linear)) = &mut step.action {
                linear.residual = true;
                linear.weights.push(w(3));
                linear.biases.push(None);
            }
        },
        &["s2 (q) of prefill: 1 writes instead of 2"],
    );
}

#[test]
fn elementwise_work_keeps_the_type() {
    misfit(
        "k",
        Op::Activate(Activation::Silu),
        &["s3 (k) of prefill: f32[tokens, 8] and f32[tokens, 4] where types must be the same"],
    );
    misfit(
        "add",
        Op::Activate(Activation::Silu),
        &["s7 (add) of prefill: 2 reads and 1 writes instead of 1 and 1"],
    );
    misfit("norm", Op::Add, &["s1 (norm) of prefill: 1 reads and 1 writes instead of 2 and 1"]);
    misfit("norm", Op::SoftCap { cap: 0.0 }, &["s1 (norm) of prefill: the cap is 0"]);
    misfit("add", Op::SigmoidGate, &["s7 (add) of prefill: f32[tokens, 8] instead of [tokens, 1]"]);
}

#[test]
fn a_router_chooses_among_its_experts() {
    let route = |used| Op::Route { used, renormalise: false };
    misfit("route", route(0), &["s9 (route) of prefill: 0 of 4 experts are used"]);
    misfit("route", route(5), &["s9 (route) of prefill: 5 of 4 experts are used"]);
    misfit("route", route(1), &["s9 (route) of prefill: i32[tokens, 2] instead of i32[tokens, 1]"]);
    finds_in_prefill(
        one_device(),
        |program| program.buffers[b(9)].ty.dtype = DType::F32,
        &[
            "s9 (route) of prefill: f32[tokens, 2] instead of i32[tokens, 2]",
            "s10 (experts) of prefill: f32[tokens, 2] instead of i32[tokens, 2]",
        ],
    );
}

#[test]
fn experts_are_alike_and_enough() {
    finds(
        one_device(),
        |plan| {
            plan.weights[w(8)].shape[1] = 8;
            plan.weights[w(8)].sources[0].axes[1][0].size = 8;
        },
        &[
            "s10 (experts) of prefill: experts of shapes [4, 16, 8], [4, 8, 8] and [4, 8, 16] for 8 features",
            "s10 (experts) of decode: experts of shapes [4, 16, 8], [4, 8, 8] and [4, 8, 16] for 8 features",
        ],
    );
    finds_in_op(
        one_device(),
        "experts",
        |op| *op = op.clone().map_weights(|_| w(1)),
        &["s10 (experts) of prefill: w1 has shape [8]"],
    );
    finds_in_step(
        one_device(),
        "experts",
        |step| step.reads[1] = b(8),
        &[
            "s10 (experts) of prefill: f32[tokens, 4] instead of i32[tokens, 4]",
            "s10 (experts) of prefill: its expert ids come from no router",
            "s10 (experts) of prefill touches b8 after its end",
        ],
    );
}

#[test]
fn matrices_of_a_gate_have_one_home() {
    let mut plan = streamed();
    plan.weights[w(4)].device = d(0);
    plan.programs.truncate(1);
    let gate = "s8 (experts) of prefill: a gate of w3 on d1 and w4 on d0";
    assert!(findings(&plan).contains(&gate.to_string()), "{:?}", findings(&plan));
}

/// The GPU's first linear with a matrix of the GPU's own of so many columns.
fn with_columns(columns: u32, tokens: u32) -> Plan {
    let mut plan = streamed();
    plan.programs.truncate(1);
    let program = &mut plan.programs[0];
    program.max.tokens = tokens;
    let x = program.steps[named(program, "first")].reads[0];
    program.buffers[x].ty.shape[1] = Dim::Fixed(columns);
    plan.weights[w(1)].shape[1] = columns;
    plan.weights[w(1)].device = d(0);
    plan
}

#[test]
fn gpus_multiply_rows_of_whole_loads() {
    let broken = |plan: &Plan| {
        let found = findings(plan);
        found.into_iter().find(|finding| finding.ends_with("are no whole loads"))
    };
    // Without the library products are made in f32.
    let found = "s2 (first) of prefill: rows of 6 features in f32 are no whole loads";
    assert_eq!(broken(&with_columns(6, 9)).unwrap(), found);
    assert_eq!(broken(&with_columns(12, 9)), None);
    let has_library = |plan: &mut Plan| {
        let library = DeviceKind::Gpu {
            ordinal: 0,
            reserved_bytes: 0,
            library_bytes: 1,
            launch_bytes: 0,
            has_warpgroups: false,
        };
        plan.machine.devices[d(0)].kind = library;
    };
    let mut plan = with_columns(12, 9);
    has_library(&mut plan);
    let found = "s2 (first) of prefill: rows of 12 features in bf16 are no whole loads";
    assert_eq!(broken(&plan).unwrap(), found);
    // Few rows are multiplied with matrices as they lie, but for what is normalised with a bias or by a deviation.
    let mut plan = with_columns(6, 8);
    has_library(&mut plan);
    assert_eq!(broken(&plan), None);
    let first = named(&plan.programs[0], "first");
    let Action::Run(Op::Linear(linear)) = &mut plan.programs[0].steps[first].action else {
        panic!("it is a linear")
    };
    linear.norm = Some(norm(None, 1e-5));
    let found = "s2 (first) of prefill: rows of 6 features in f32 are no whole loads";
    assert_eq!(broken(&plan).unwrap(), found);
    // NUMA nodes pad what they pack.
    plan.machine.devices[d(0)].kind = DeviceKind::Numa { node: 0, cpus: vec![0] };
    assert_eq!(broken(&plan), None);
}

#[test]
fn gpus_look_up_no_rows_in_12_bits() {
    let narrow = |plan: &mut Plan| plan.weights[w(0)].format = Format::Bf12;
    finds(one_device(), narrow, &[]);
    finds(
        streamed(),
        narrow,
        &[
            "s0 (embed) of prefill: w0 is in bf12, in which GPUs look up no rows",
            "s0 (embed) of decode: w0 is in bf12, in which GPUs look up no rows",
        ],
    );
}

#[test]
fn expert_ids_come_from_a_router_over_as_many_experts() {
    finds(
        one_device(),
        |plan| {
            for weight in [w(7), w(8), w(9)] {
                plan.weights[weight].shape[0] = 3;
                plan.weights[weight].sources[0].axes[0][0].size = 3;
            }
        },
        &[
            "s10 (experts) of prefill: a router over 4 experts feeds 3",
            "s10 (experts) of decode: a router over 4 experts feeds 3",
        ],
    );
    finds_in_step(
        one_device(),
        "route",
        |step| step.action = Action::Run(Op::Add),
        &[
            "s9 (route) of prefill: 1 reads and 2 writes instead of 2 and 1",
            "s10 (experts) of prefill: its expert ids come from no router",
        ],
    );
}

#[test]
fn rows_are_selected_from_tokens() {
    misfit("norm", Op::SelectRows, &["s1 (norm) of prefill: f32[tokens, 8] instead of [rows, 8]"]);
    misfit("head", Op::SelectRows, &["s12 (head) of prefill: rows are selected from f32[rows, 8]"]);
}

#[test]
fn the_output_is_the_logits() {
    finds(
        one_device(),
        |plan| plan.model.vocabulary = 31,
        &[
            "program prefill: it returns f32[rows, 32] instead of f32[rows, 31]",
            "program decode: it returns f32[rows, 32] instead of f32[rows, 31]",
        ],
    );
    finds_in_prefill(
        one_device(),
        |program| program.output = b(12),
        &[
            "program prefill: it returns f32[rows, 8] instead of f32[rows, 32]",
            "s12 (head) of prefill frees the output",
            "no step of prefill frees b13",
        ],
    );
}

#[test]
fn activations_are_rows_of_features() {
    finds_in_prefill(
        one_device(),
        |program| program.buffers[b(5)].ty.shape[0] = Dim::Fixed(8),
        &[
            "s5 (attention) of prefill: f32[8, 8] where rows of features are expected",
            "s6 (o) of prefill: f32[8, 8] where rows of features are expected",
        ],
    );
    finds_in_prefill(
        one_device(),
        |program| program.buffers[b(5)].ty.shape.clear(),
        &[
            "s5 (attention) of prefill: f32[] where rows of features are expected",
            "s6 (o) of prefill: f32[] where rows of features are expected",
        ],
    );
    finds_in_prefill(
        one_device(),
        |program| program.buffers[b(5)].ty.shape[1] = Dim::Fixed(0),
        &[
            "s5 (attention) of prefill: f32[tokens, 0] where rows of features are expected",
            "s6 (o) of prefill: f32[tokens, 0] where rows of features are expected",
        ],
    );
}

/// Lets a linear activate what it makes and write it in 16 bits.
fn narrow(plan: &mut Plan, step: &str) {
    let prefill = &mut plan.programs[0];
    let id = named(prefill, step);
    let Action::Run(Op::Linear(linear)) = &mut prefill.steps[id].action else {
        panic!("{step} is no linear")
    };
    linear.then = Then::Activate(Activation::Relu);
    prefill.buffers[prefill.steps[id].writes[0]].ty.dtype = DType::Bf16;
}

#[test]
fn gpus_alone_hold_values_between_linears_of_many_tokens_in_16_bits() {
    let made = "s10 (second) of prefill: bf16[tokens, 8] where numbers of f32 are expected";
    let read = "s11 (select) of prefill: bf16[tokens, 8] where numbers of f32 are expected";
    let many = |plan: &mut Plan| plan.programs[0].max.tokens = MAX_FUSED_ROWS + 1;
    let narrow_second = |plan: &mut Plan| narrow(plan, "second");
    let mut long = streamed();
    many(&mut long);
    // What follows takes f32, be it activated or not.
    finds(long.clone(), narrow_second, &[read]);
    finds(streamed(), narrow_second, &[made, read]);
    finds(
        long,
        |plan| {
            narrow_second(plan);
            let id = named(&plan.programs[0], "second");
            let Action::Run(Op::Linear(linear)) = &mut plan.programs[0].steps[id].action else {
                panic!("it is a linear")
            };
            linear.then = Then::Nothing;
        },
        &[read],
    );
    let mut long = one_device();
    many(&mut long);
    finds(
        long,
        |plan| narrow(plan, "q"),
        &[
            "s2 (q) of prefill: bf16[tokens, 8] where numbers of f32 are expected",
            "s5 (attention) of prefill: bf16[tokens, 8] where numbers of f32 are expected",
        ],
    );
}
