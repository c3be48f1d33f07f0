//! The pieces that families are put together from: embedding, norm, linear, attention, MLPs, experts, head.
//!
//! Each piece names its nodes as the checkpoint names its layers, so that pins and explanations read alike.

use anyhow::{Result, ensure};
use ir::id::{RopeId, ValueId, WeightId};
use ir::model::ModelCache;
use ir::op::{Activation, Attention, Experts, Linear, Norm, NormKind, Op, Then};
use ir::smallvec;
use ir::tensor::{DType, Dim, TensorType};
use ir::weight::{Slice, Source};

use crate::lowering::Lowering;

/// The heads of an attention layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Heads {
    /// Query heads.
    pub(crate) query: u32,
    /// Key and value heads.
    pub(crate) key: u32,
    /// Features of each.
    pub(crate) features: u32,
}

/// How an attention layer turns queries, keys and values into its result.
#[derive(Clone, Debug)]
pub(crate) struct AttentionStyle {
    pub(crate) heads: Heads,
    pub(crate) scale: f32,
    pub(crate) window: Option<u32>,
    pub(crate) soft_cap: Option<f32>,
    pub(crate) q_norm: Option<Norm>,
    pub(crate) k_norm: Option<Norm>,
    pub(crate) rope: Option<RopeId>,
}

impl AttentionStyle {
    /// Attention to all earlier tokens, without rotation.
    pub(crate) fn plain(heads: Heads, scale: f32) -> Self {
        Self { heads, scale, window: None, soft_cap: None, q_norm: None, k_norm: None, rope: None }
    }
}

/// A mixture of gated MLPs.
#[derive(Clone, Debug)]
pub(crate) struct Mixture {
    /// Experts there are.
    pub(crate) experts: u32,
    /// Experts that a token visits.
    pub(crate) used: u32,
    /// Whether their weights are divided by their sum.
    pub(crate) renormalise: bool,
    /// Features inside an expert.
    pub(crate) intermediate: u32,
    /// Features inside the MLP that every token visits, behind a sigmoid gate.
    pub(crate) shared: Option<u32>,
    /// Names of an expert's gate, up and down matrices.
    pub(crate) matrices: [&'static str; 3],
}

/// The embedding of the batch's tokens.
pub(crate) fn embed(
    lowering: &mut Lowering<'_>,
    name: &str,
    table: WeightId,
    scale: f32,
) -> Result<ValueId> {
    let features = lowering.model.weights[table].shape[1];
    lowering.push(name, Op::Embed { table, scale }, &[], features)
}

/// A normalisation with `{name}.weight` and, for a layer norm, `{name}.bias`.
pub(crate) fn norm_weights(
    lowering: &mut Lowering<'_>,
    name: &str,
    kind: NormKind,
    features: u32,
    epsilon: f32,
) -> Result<Norm> {
    let scale = Some(lowering.weight(&format!("{name}.weight"), &[features])?);
    let bias = match kind {
        NormKind::Rms => None,
        NormKind::Layer => Some(lowering.weight(&format!("{name}.bias"), &[features])?),
    };
    Ok(Norm { kind, scale, bias, epsilon, scale_offset: 0.0 })
}

/// A normalisation as a node of its own.
pub(crate) fn norm(
    lowering: &mut Lowering<'_>,
    name: &str,
    norm: Norm,
    x: ValueId,
) -> Result<ValueId> {
    let features = lowering.features(x);
    lowering.push(name, Op::Norm(norm), &[x], features)
}

/// `{name}.weight`, `[outputs, features of x]`, with `{name}.bias` where `biased`.
pub(crate) fn linear(
    lowering: &mut Lowering<'_>,
    name: &str,
    outputs: u32,
    biased: bool,
    x: ValueId,
) -> Result<ValueId> {
    let inputs = lowering.features(x);
    let weight = lowering.weight(&format!("{name}.weight"), &[outputs, inputs])?;
    let bias =
        if biased { Some(lowering.weight(&format!("{name}.bias"), &[outputs])?) } else { None };
    linear_of(lowering, name, weight, bias, x)
}

/// A linear of given weights.
pub(crate) fn linear_of(
    lowering: &mut Lowering<'_>,
    name: &str,
    weight: WeightId,
    bias: Option<WeightId>,
    x: ValueId,
) -> Result<ValueId> {
    let outputs = lowering.outputs(weight);
    let linear = Linear {
        norm: None,
        weights: smallvec![weight],
        biases: smallvec![bias],
        then: Then::Nothing,
        residual: false,
    };
    lowering.push(name, Op::Linear(linear), &[x], outputs)
}

/// Rows `start..start + size` of a fused tensor, as a weight called `{name}.{part}`.
pub(crate) fn rows_of(
    lowering: &mut Lowering<'_>,
    name: &str,
    part: &str,
    fused: &Source,
    start: u32,
    size: u32,
) -> Result<WeightId> {
    let rows = fused.sliced(Slice { axis: 0, start, size })?;
    Ok(lowering.view(&format!("{name}.{part}"), rows))
}

/// `a + b`.
pub(crate) fn add(
    lowering: &mut Lowering<'_>,
    name: String,
    a: ValueId,
    b: ValueId,
) -> Result<ValueId> {
    let features = lowering.features(a);
    lowering.push(name, Op::Add, &[a, b], features)
}

/// Attention over a cache of its own, between the projections.
pub(crate) fn attention(
    lowering: &mut Lowering<'_>,
    name: &str,
    style: &AttentionStyle,
    [query, key, value]: [ValueId; 3],
) -> Result<ValueId> {
    let Heads { query: heads, key: kv_heads, features: head_dim } = style.heads;
    let cache = lowering.model.caches.push(ModelCache { kv_heads, head_dim });
    let attention = Attention {
        cache,
        heads,
        kv_heads,
        head_dim,
        group: heads / kv_heads,
        first_head: 0,
        scale: style.scale,
        window: style.window,
        soft_cap: style.soft_cap,
        q_norm: style.q_norm.clone(),
        k_norm: style.k_norm.clone(),
        rope: style.rope,
    };
    let features = lowering.features(query);
    lowering.push(name, Op::Attention(attention), &[query, key, value], features)
}

/// `down(activation(up(x)))`; `names` are those of the two linears.
pub(crate) fn plain_mlp(
    lowering: &mut Lowering<'_>,
    names: [&str; 2],
    intermediate: u32,
    activation: Activation,
    biased: bool,
    x: ValueId,
) -> Result<ValueId> {
    let features = lowering.features(x);
    let up = linear(lowering, names[0], intermediate, biased, x)?;
    let activated = lowering.push(
        format!("{}.act", names[0]),
        Op::Activate(activation),
        &[up],
        intermediate,
    )?;
    linear(lowering, names[1], features, biased, activated)
}

/// `down(activation(gate(x)) * up(x))`.
pub(crate) fn gated_mlp(
    lowering: &mut Lowering<'_>,
    name: &str,
    intermediate: u32,
    activation: Activation,
    biased: bool,
    x: ValueId,
) -> Result<ValueId> {
    let gate = linear(lowering, &format!("{name}.gate_proj"), intermediate, biased, x)?;
    let up = linear(lowering, &format!("{name}.up_proj"), intermediate, biased, x)?;
    gated(lowering, name, activation, biased, [gate, up], x)
}

/// A gated MLP whose gate and up matrices are the halves of one tensor.
pub(crate) fn fused_gated_mlp(
    lowering: &mut Lowering<'_>,
    name: &str,
    intermediate: u32,
    activation: Activation,
    x: ValueId,
) -> Result<ValueId> {
    let inputs = lowering.features(x);
    let layer = format!("{name}.gate_up_proj");
    let tensor = format!("{layer}.weight");
    let fused = lowering.source(&tensor, &[lowering.product(2, intermediate)?, inputs])?;
    let mut halves = [x; 2];
    for (half, (part, start)) in halves.iter_mut().zip([("gate", 0), ("up", intermediate)]) {
        let weight = rows_of(lowering, &tensor, part, &fused, start, intermediate)?;
        *half = linear_of(lowering, &format!("{layer}.{part}"), weight, None, x)?;
    }
    gated(lowering, name, activation, false, halves, x)
}

fn gated(
    lowering: &mut Lowering<'_>,
    name: &str,
    activation: Activation,
    biased: bool,
    [gate, up]: [ValueId; 2],
    x: ValueId,
) -> Result<ValueId> {
    let intermediate = lowering.features(gate);
    let product =
        lowering.push(format!("{name}.act"), Op::Gate(activation), &[gate, up], intermediate)?;
    linear(lowering, &format!("{name}.down_proj"), lowering.features(x), biased, product)
}

/// Router, chosen experts and, where there is one, the shared expert.
pub(crate) fn mixture(
    lowering: &mut Lowering<'_>,
    name: &str,
    mixture: &Mixture,
    activation: Activation,
    x: ValueId,
) -> Result<ValueId> {
    let features = lowering.features(x);
    let Mixture { experts, used, renormalise, .. } = *mixture;
    ensure!(
        used <= experts,
        lowering
            .config
            .error(format_args!("num_experts_per_tok is {used}, but there are {experts} experts"))
    );
    let logits = linear(lowering, &format!("{name}.gate"), experts, false, x)?;
    let rows = lowering.rows(x);
    let chosen = |dtype| TensorType { dtype, shape: smallvec![rows, Dim::Fixed(used)] };
    let (ids, weights) = (chosen(DType::I32), chosen(DType::F32));
    let route = Op::Route { used, renormalise };
    let routed = lowering.model.layers.push(
        format!("{name}.gate.route"),
        route,
        &[logits],
        &[ids, weights],
    )?;
    let stacks = expert_stacks(lowering, &format!("{name}.experts"), mixture, features)?;
    let [gate, up, down] = stacks;
    let op = Op::Experts(Experts { gate, up, down, activation, part: None });
    let mixed =
        lowering.push(format!("{name}.experts"), op, &[x, routed[0], routed[1]], features)?;
    let Some(intermediate) = mixture.shared else { return Ok(mixed) };
    let shared =
        gated_mlp(lowering, &format!("{name}.shared_expert"), intermediate, activation, false, x)?;
    let gate = linear(lowering, &format!("{name}.shared_expert_gate"), 1, false, x)?;
    let shared = lowering.push(
        format!("{name}.shared_expert.gated"),
        Op::SigmoidGate,
        &[gate, shared],
        features,
    )?;
    add(lowering, format!("{name}.sum"), mixed, shared)
}

/// Gate, up and down stacks, stored expert by expert or as transformers 5 holds them: two stacks, the first
/// of gate above up.
fn expert_stacks(
    lowering: &mut Lowering<'_>,
    name: &str,
    mixture: &Mixture,
    features: u32,
) -> Result<[WeightId; 3]> {
    let Mixture { experts, intermediate, matrices, .. } = *mixture;
    let stacked = format!("{name}.gate_up_proj");
    if lowering.has(&stacked) {
        let both = lowering.product(2, intermediate)?;
        let fused = lowering.source(&stacked, &[experts, both, features])?;
        let half = |start| fused.sliced(Slice { axis: 1, start, size: intermediate });
        let gate = lowering.view(&format!("{stacked}.gate"), half(0)?);
        let up = lowering.view(&format!("{stacked}.up"), half(intermediate)?);
        let down =
            lowering.weight(&format!("{name}.down_proj"), &[experts, features, intermediate])?;
        return Ok([gate, up, down]);
    }
    let mut stack = |matrix: &str, shape: &[u32]| {
        let sources = (0..experts)
            .map(|expert| lowering.source(&format!("{name}.{expert}.{matrix}.weight"), shape))
            .collect::<Result<Vec<_>>>()?;
        lowering.stack(&format!("{name}.{matrix}"), sources)
    };
    let [gate, up, down] = matrices;
    Ok([
        stack(gate, &[intermediate, features])?,
        stack(up, &[intermediate, features])?,
        stack(down, &[features, intermediate])?,
    ])
}

/// Token embedding and head: one weight where they are tied.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Vocabulary {
    pub(crate) table: WeightId,
    pub(crate) head: WeightId,
}

/// Finds the embedding `[vocabulary, features]` and the head under the first of `heads` that is there.
pub(crate) fn vocabulary(
    lowering: &mut Lowering<'_>,
    table: &str,
    heads: &[&str],
    tied: bool,
    shape: [u32; 2],
) -> Result<Vocabulary> {
    lowering.model.vocabulary = shape[0];
    let head = heads.iter().find(|head| lowering.has(head));
    if !tied {
        let head = lowering.weight(head.unwrap_or(&heads[0]), &shape)?;
        return Ok(Vocabulary { table: lowering.weight(table, &shape)?, head });
    }
    match (head, lowering.checkpoint.get(table)) {
        // Writers that store a shared tensor once keep either name.
        (Some(head), None) => {
            let head = lowering.weight(head, &shape)?;
            Ok(Vocabulary { table: head, head })
        }
        // As transformers does, a tie is not believed where both are stored and differ.
        (Some(head), Some(table_tensor))
            if !lowering
                .checkpoint
                .same_contents(table_tensor, lowering.checkpoint.tensor(head)?)? =>
        {
            let head = lowering.weight(head, &shape)?;
            Ok(Vocabulary { table: lowering.weight(table, &shape)?, head })
        }
        (_, _) => {
            let table = lowering.weight(table, &shape)?;
            Ok(Vocabulary { table, head: table })
        }
    }
}

/// The rows whose logits are wanted: what follows works on them alone.
pub(crate) fn select_rows(
    lowering: &mut Lowering<'_>,
    name: String,
    x: ValueId,
) -> Result<ValueId> {
    let shape = smallvec![Dim::Rows, Dim::Fixed(lowering.features(x))];
    let rows = TensorType { dtype: DType::F32, shape };
    lowering.model.layers.push_one(name, Op::SelectRows, &[x], rows)
}

/// Logits, capped where `cap` says so, as the model's result.
pub(crate) fn head(
    lowering: &mut Lowering<'_>,
    weight: WeightId,
    bias: Option<WeightId>,
    cap: Option<f32>,
    x: ValueId,
) -> Result<()> {
    let mut logits = linear_of(lowering, "lm_head", weight, bias, x)?;
    if let Some(cap) = cap {
        let features = lowering.features(logits);
        logits = lowering.push("lm_head.soft_cap", Op::SoftCap { cap }, &[logits], features)?;
    }
    lowering.model.layers.return_value(logits);
    Ok(())
}
