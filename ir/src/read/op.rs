//! Operations as their `Display` writes them.

use anyhow::{Context as _, Result, bail};
use smallvec::smallvec;

use super::line::Line;
use crate::id::{Few, WeightId};
use crate::op::{Activation, Attention, ExpertPart, Experts, Linear, Norm, NormKind, Op, Then};

pub(super) fn read(line: &mut Line<'_>) -> Result<Op> {
    if let Some(norm) = norm(line)? {
        return Ok(Op::Norm(norm));
    }
    Ok(match line.word() {
        "embed" => {
            line.expect(" ")?;
            let table = line.row("w")?;
            let scale = line.field(" scale=", Line::number)?.unwrap_or(1.0);
            Op::Embed { table, scale }
        }
        "add_position" => {
            line.expect(" ")?;
            let table = line.row("w")?;
            line.expect(" offset=")?;
            Op::AddPosition { table, offset: line.count()? }
        }
        "linear" => Op::Linear(linear(line)?),
        "attention" => Op::Attention(attention(line)?),
        "activate" => {
            line.expect(" ")?;
            Op::Activate(activation(line)?)
        }
        "gate" => {
            line.expect(" ")?;
            Op::Gate(activation(line)?)
        }
        "add" => Op::Add,
        "sigmoid_gate" => Op::SigmoidGate,
        "route" => {
            line.expect(" used=")?;
            Op::Route { used: line.count()?, renormalise: line.eat(" renormalised") }
        }
        "experts" => {
            line.expect(" ")?;
            let gate = line.row("w")?;
            line.expect(", ")?;
            let up = line.row("w")?;
            line.expect(", ")?;
            let down = line.row("w")?;
            line.expect(" ")?;
            let activation = activation(line)?;
            let part = if line.eat(" first=") {
                let first = line.count()?;
                line.expect(" load=")?;
                Some(ExpertPart { first, load: line.number()? })
            } else {
                None
            };
            Op::Experts(Experts { gate, up, down, activation, part })
        }
        "select_rows" => Op::SelectRows,
        "soft_cap" => {
            line.expect(" cap=")?;
            Op::SoftCap { cap: line.number()? }
        }
        word => bail!("unknown operation {word:?}"),
    })
}

fn linear(line: &mut Line<'_>) -> Result<Linear> {
    line.expect(" ")?;
    let weights: Few<WeightId> = line.list(|line| line.row("w"))?;
    let bias = |line: &mut Line<'_>| {
        if line.eat("-") { Ok(None) } else { line.row("w").map(Some) }
    };
    let biases = line.field(" bias=", |line| line.separated(",", bias))?;
    let biases = biases.unwrap_or_else(|| smallvec![None; weights.len()]);
    let norm = line.field(" of ", |line| norm(line)?.context("expected a norm"))?;
    let then = if line.eat(" then gate ") {
        Then::Gate(activation(line)?)
    } else if line.eat(" then ") {
        Then::Activate(activation(line)?)
    } else {
        Then::Nothing
    };
    Ok(Linear { norm, weights, biases, then, residual: line.eat(" plus residual") })
}

fn attention(line: &mut Line<'_>) -> Result<Attention> {
    line.expect(" ")?;
    let cache = line.row("c")?;
    line.expect(" heads=")?;
    let heads = line.count()?;
    line.expect("/")?;
    let kv_heads = line.count()?;
    line.expect("x")?;
    let head_dim = line.count()?;
    line.expect(" group=")?;
    let group = line.count()?;
    let first_head = line.field(" first=", Line::count)?.unwrap_or(0);
    line.expect(" scale=")?;
    let scale = line.number()?;
    let window = line.field(" window=", Line::count)?;
    let soft_cap = line.field(" cap=", Line::number)?;
    let head_norm = |line: &mut Line<'_>| norm(line)?.context("expected a norm");
    let q_norm = line.field(" q=", head_norm)?;
    let k_norm = line.field(" k=", head_norm)?;
    let rope = line.field(" rope=", |line| line.row("r"))?;
    Ok(Attention {
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
    })
}

/// `rms_norm(w1 bias=w2 eps=0.00001 offset=1)`, if a norm is next.
fn norm(line: &mut Line<'_>) -> Result<Option<Norm>> {
    let kind = if line.eat("rms_norm(") {
        NormKind::Rms
    } else if line.eat("layer_norm(") {
        NormKind::Layer
    } else {
        return Ok(None);
    };
    let scale = if line.is_next("w") { Some(weight_before_space(line)?) } else { None };
    let bias = line.field("bias=", weight_before_space)?;
    line.expect("eps=")?;
    let epsilon = line.number()?;
    let scale_offset = line.field(" offset=", Line::number)?.unwrap_or(0.0);
    line.expect(")")?;
    Ok(Some(Norm { kind, scale, bias, epsilon, scale_offset }))
}

fn activation(line: &mut Line<'_>) -> Result<Activation> {
    Ok(match line.word() {
        "relu" => Activation::Relu,
        "silu" => Activation::Silu,
        "gelu" => Activation::Gelu,
        "gelu_tanh" => Activation::GeluTanh,
        word => bail!("unknown activation {word:?}"),
    })
}

fn weight_before_space(line: &mut Line<'_>) -> Result<WeightId> {
    let weight = line.row("w")?;
    line.expect(" ")?;
    Ok(weight)
}
