//! Every operation in Burn's own tensor operations: the reference of the kernels, and what a backend
//! without kernels runs.
//!
//! - Weights and caches are f32 whatever the plan's format; weights carry the rounding of their format, to the bit.

mod attention;
mod experts;
mod linear;
mod norm;
mod rows;
mod state;

use anyhow::{Result, bail};
use burn::tensor::{Tensor, activation};
use ir::op::{Activation, Op};

use self::attention::Cache;
pub(crate) use self::state::State;

use crate::ops::Scope;
use crate::slots::Value;

/// Computes one operation; its outputs in order.
pub(crate) fn run(
    op: &Op,
    state: &mut State,
    scope: Scope<'_>,
    inputs: &[Value],
) -> Result<Vec<Value>> {
    let x = |index: usize| -> Result<Tensor<2>> {
        let Some(value) = inputs.get(index) else { bail!("input {index} is missing") };
        value.float().cloned()
    };
    let output = match op {
        Op::Embed { table, scale } => rows::embed(state, *table, *scale, scope.batch)?,
        Op::AddPosition { table, offset } => {
            rows::add_position(state, *table, *offset, x(0)?, scope.batch)?
        }
        Op::Norm(norm) => {
            let normed = norm::norm(norm, x(0)?, state)?;
            if inputs.len() > 1 { normed + x(1)? } else { normed }
        }
        Op::Linear(linear) => {
            let residual = if linear.residual { Some(x(1)?) } else { None };
            let outputs = linear::linear(linear, x(0)?, residual, state)?;
            return Ok(outputs.into_iter().map(Value::Float).collect());
        }
        Op::Attention(attention) => {
            attention::attention(attention, [x(0)?, x(1)?, x(2)?], state, scope)?
        }
        Op::Activate(kind) => activate(*kind, x(0)?),
        Op::Gate(kind) => activate(*kind, x(0)?) * x(1)?,
        Op::Add => x(0)? + x(1)?,
        Op::SigmoidGate => activation::sigmoid(x(0)?) * x(1)?,
        Op::Route { used, renormalise } => {
            let (ids, weights) = experts::route(x(0)?, *used as usize, *renormalise);
            return Ok(vec![Value::Int(ids), Value::Float(weights)]);
        }
        Op::Experts(experts) => {
            let Some(ids) = inputs.get(1) else { bail!("the chosen experts are missing") };
            experts::experts(experts, x(0)?, ids.int()?.clone(), x(2)?, state)?
        }
        Op::SelectRows => rows::select_rows(x(0)?, scope.batch),
        Op::SoftCap { cap } => soft_cap(x(0)?, *cap),
    };
    Ok(vec![Value::Float(output)])
}

fn activate(kind: Activation, x: Tensor<2>) -> Tensor<2> {
    match kind {
        Activation::Relu => activation::relu(x),
        Activation::Silu => activation::silu(x),
        Activation::Gelu => activation::gelu(x),
        Activation::GeluTanh => {
            // As transformers has it: x / 2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))).
            let cubed = x.clone() * x.clone() * x.clone();
            let inner =
                (x.clone() + cubed * 0.044_715) * (2.0 / std::f64::consts::PI).sqrt() as f32;
            x * 0.5 * (inner.tanh() + 1.0)
        }
    }
}

fn soft_cap(x: Tensor<2>, cap: f32) -> Tensor<2> {
    (x / cap).tanh() * cap
}
