//! Graphs survive their text form.

use std::fmt::Debug;

use ir::graph::{Cause, LayerGraph, Placed, PlacedGraph, Reason, Work};
use ir::id::{CacheId, DeviceId, Id, RopeId, ValueId, WeightId};
use ir::layout::{Layout, Move, Share};
use ir::op::{Activation, Attention, Experts, Linear, Norm, NormKind, Op, Then};
use ir::tensor::{DType, Dim, TensorType};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

#[track_caller]
fn refused(text: &str, expected: &str) {
    let error = text.parse::<PlacedGraph>().expect_err("the text is wrong");
    assert_eq!(format!("{error:#}"), expected);
}

#[test]
fn values_may_carry_any_numbers() {
    let text = "; two layers\n\n\
        v7: f32[tokens, 8] = embed w0 ()  ; embed\n\
        v3: f32[tokens, 8] = rms_norm(w1 eps=0.1) (v7)  ; norm\n\
        return v3\n";
    let graph: LayerGraph = text.parse().expect("it is a graph");
    assert_eq!(
        graph.to_string(),
        "v0: f32[tokens, 8] = embed w0 ()  ; embed\n\
         v1: f32[tokens, 8] = rms_norm(w1 eps=0.1) (v0)  ; norm\n\
         return v1\n"
    );
}

#[test]
fn errors_name_line_and_column() {
    refused("", "the graph ends without a return");
    refused("return v0", "line 1, column 9: no line before makes v0");
    refused("v0: f64[8] = ", "line 1, column 5: unknown element type \"f64\"");
    refused("v0: f32[8] = @d0 embde", "line 1, column 18: unknown operation \"embde\"");
    refused("v0: f32[8] = embed", "line 1, column 14: expected \"@\" before \"embed\"");
    refused("v0: f32[8] = @d0 soft_cap cap=x", "line 1, column 31: expected a number before \"x\"");
    refused(
        "v0: f32[8] = @d0 route used=-1",
        "line 1, column 29: expected a whole number before \"-1\"",
    );
    refused("v0: f32[8] = @d0+d1/1:4 add", "line 1, column 24: 1 parts for 2 devices");
    refused("v0: f32[8] = @d0 linear", "line 1, column 24: expected \" \" before \"\"");
    let embed = "v0: f32[tokens, 8] = @d0 embed w0 ()  ; embed\n";
    refused(&format!("{embed}{embed}"), "line 2, column 41: v0 is made twice");
    refused(&format!("{embed}return v0, v1"), "line 2, column 13: no line before makes v1");
    refused(&format!("{embed}return v0\n{embed}"), "line 3, column 1: a line after the return");
    refused(
        &format!("{embed}v1: f32[] = @d0 add needs @d0, @d1 (v0)  ; x"),
        "line 2, column 39: 2 needs for 1 inputs",
    );
}

fn id<I: Id + Debug>() -> impl Strategy<Value = I> {
    (0usize..100).prop_map(I::from_index)
}

/// A number that prints as it is; zero and minus zero are one.
fn number() -> impl Strategy<Value = f32> {
    prop_oneof![-1e30f32..1e30, Just(1e-5f32), Just(0.5)].prop_map(|number| number + 0.0)
}

fn activation() -> impl Strategy<Value = Activation> {
    use Activation::{Gelu, GeluTanh, Relu, Silu};
    prop_oneof![Just(Relu), Just(Silu), Just(Gelu), Just(GeluTanh)]
}

fn norm() -> impl Strategy<Value = Norm> {
    let kind = prop_oneof![Just(NormKind::Rms), Just(NormKind::Layer)];
    (kind, option::of(id()), option::of(id()), number(), number()).prop_map(
        |(kind, scale, bias, epsilon, scale_offset)| Norm {
            kind,
            scale,
            bias,
            epsilon,
            scale_offset,
        },
    )
}

fn linear() -> impl Strategy<Value = Linear> {
    let then = prop_oneof![
        Just(Then::Nothing),
        activation().prop_map(Then::Activate),
        activation().prop_map(Then::Gate)
    ];
    let weights = vec((id::<WeightId>(), option::of(id::<WeightId>())), 1..4);
    (option::of(norm()), weights, then, any::<bool>()).prop_map(
        |(norm, weights, then, residual)| {
            let (weights, biases) = weights.into_iter().unzip();
            Linear { norm, weights, biases, then, residual }
        },
    )
}

fn attention() -> impl Strategy<Value = Attention> {
    let counts = (id::<CacheId>(), 0u32..99, 0u32..99, 0u32..999, 0u32..9, 0u32..9);
    let options = (
        number(),
        option::of(0u32..9999),
        option::of(number()),
        option::of(norm()),
        option::of(norm()),
        option::of(id::<RopeId>()),
    );
    (counts, options).prop_map(
        |(
            (cache, heads, kv_heads, head_dim, group, first_head),
            (scale, window, soft_cap, q_norm, k_norm, rope),
        )| Attention {
            cache,
            heads,
            kv_heads,
            head_dim,
            group,
            first_head,
            scale,
            window,
            soft_cap,
            q_norm,
            k_norm,
            rope,
        },
    )
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        (id(), number()).prop_map(|(table, scale)| Op::Embed { table, scale }),
        (id(), any::<u32>()).prop_map(|(table, offset)| Op::AddPosition { table, offset }),
        norm().prop_map(Op::Norm),
        linear().prop_map(Op::Linear),
        attention().prop_map(Op::Attention),
        activation().prop_map(Op::Activate),
        activation().prop_map(Op::Gate),
        Just(Op::Add),
        Just(Op::SigmoidGate),
        (any::<u32>(), any::<bool>())
            .prop_map(|(used, renormalise)| Op::Route { used, renormalise }),
        (id(), id(), id(), activation()).prop_map(|(gate, up, down, activation)| Op::Experts(
            Experts { gate, up, down, activation, part: None }
        )),
        Just(Op::SelectRows),
        number().prop_map(|cap| Op::SoftCap { cap }),
    ]
}

fn tensor_type() -> impl Strategy<Value = TensorType> {
    let dtype = prop_oneof![
        Just(DType::F32),
        Just(DType::F16),
        Just(DType::Bf16),
        Just(DType::I32),
        Just(DType::U8),
        Just(DType::I8)
    ];
    let dim = prop_oneof![Just(Dim::Tokens), Just(Dim::Rows), any::<u32>().prop_map(Dim::Fixed)];
    (dtype, vec(dim, 0..4)).prop_map(|(dtype, shape)| TensorType { dtype, shape: shape.into() })
}

fn layout() -> impl Strategy<Value = Layout> {
    vec((id::<DeviceId>(), any::<u32>()), 1..4).prop_flat_map(|members| {
        let (devices, parts): (Vec<DeviceId>, Vec<u32>) = members.into_iter().unzip();
        let share = prop_oneof![
            Just(Share::Whole),
            Just(Share::Partial),
            any::<u8>().prop_map(move |axis| Share::Split { axis, parts: parts.clone().into() })
        ];
        share.prop_map(move |share| Layout { devices: devices.clone().into(), share })
    })
}

fn movement() -> impl Strategy<Value = Move> {
    prop_oneof![
        (id(), id()).prop_map(|(from, to)| Move::Transfer { from, to }),
        id().prop_map(|from| Move::Broadcast { from }),
        Just(Move::AllReduce),
        any::<u8>().prop_map(|axis| Move::AllGather { axis }),
        any::<u8>().prop_map(|axis| Move::ReduceScatter { axis }),
        any::<u8>().prop_map(|axis| Move::Slice { axis }),
    ]
}

/// A node: its name, what it makes, and what it reads as far as that exists.
fn node<W: Debug>(
    work: impl Strategy<Value = W>,
) -> impl Strategy<Value = (String, W, Vec<TensorType>, Vec<prop::sample::Index>)> {
    let name = "[ -~é]{0,12}";
    (name, work, vec(tensor_type(), 1..3), vec(any::<prop::sample::Index>(), 0..4))
}

proptest! {
    #[test]
    fn weights_are_renamed_in_their_order(op in op()) {
        let mut renamed = Vec::new();
        let same = op.clone().map_weights(|weight| {
            renamed.push(weight);
            weight
        });
        prop_assert_eq!(op.weights().into_vec(), renamed);
        prop_assert_eq!(same, op);
    }

    #[test]
    fn layer_graphs_survive_their_text(nodes in vec(node(op()), 1..12)) {
        let mut graph = LayerGraph::default();
        let mut values: Vec<ValueId> = Vec::new();
        for (name, op, types, reads) in nodes {
            let inputs: Vec<ValueId> = if values.is_empty() { vec![] } else {
                reads.iter().map(|read| *read.get(&values)).collect()
            };
            values.extend(graph.push(name, op, &inputs, &types).expect("its inputs exist"));
        }
        graph.return_value(values[values.len() - 1]);
        let text = graph.to_string();
        let read: LayerGraph = text.parse().map_err(|error| TestCaseError::fail(format!("{error:#}: {text}")))?;
        prop_assert_eq!(&read.to_string(), &text);
        prop_assert_eq!(read, graph);
    }

    #[test]
    fn placed_graphs_survive_their_text(
        nodes in vec(
            node((
                prop_oneof![op().prop_map(Work::Compute), movement().prop_map(Work::Move)],
                vec(layout(), 3),
                vec(layout(), 3),
                any::<bool>(),
                vec(any::<u32>(), 0..3),
                option::of(id()),
            )),
            1..12,
        )
    ) {
        let mut graph = PlacedGraph::default();
        let mut values: Vec<ValueId> = Vec::new();
        for (name, (work, layouts, needs, needs_the_same, inner, home), types, reads) in nodes {
            let inputs: Vec<ValueId> = if values.is_empty() { vec![] } else {
                reads.iter().map(|read| *read.get(&values)).collect()
            };
            let layouts = layouts[..types.len()].to_vec();
            let needs = inputs
                .iter()
                .enumerate()
                .map(|(input, _)| if needs_the_same { layouts[0].clone() } else { needs[input % 3].clone() })
                .collect();
            let cause = Cause { reason: Reason::FollowsInput, runner_up: None };
            let placed = Placed { work, needs, layouts, inner: inner.into(), home, cause };
            values.extend(graph.push(name, placed, &inputs, &types).expect("its inputs exist"));
        }
        graph.return_value(values[values.len() - 1]);
        let text = graph.to_string();
        let read: PlacedGraph = text.parse().map_err(|error| TestCaseError::fail(format!("{error:#}: {text}")))?;
        prop_assert_eq!(&read.to_string(), &text);
        prop_assert_eq!(read, graph);
    }

    #[test]
    fn no_text_makes_the_reader_panic(text in "(v[0-9]: f32\\[8\\] = )?(@d0(/1:9)?|linear|w[0-9]| |\\(|\\)|;|,|add|attention c0|[é=/+.-]){0,12}") {
        let _ = text.parse::<PlacedGraph>();
        let _ = text.parse::<LayerGraph>();
    }
}
