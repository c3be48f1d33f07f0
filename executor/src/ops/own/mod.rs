//! Every operation with this project's CPU kernels, on the tensors of Burn's `flex` backend.
//!
//! - A kernel reads the elements of Burn tensors in place and writes a buffer of the team's arena, which
//!   becomes the storage of the output tensor without a copy.

mod attention;
mod caches;
mod linear;
mod rotations;
mod rows;
mod state;
mod tensors;
mod weights;

use anyhow::{Context as _, Result, ensure};
use ir::op::Op;

pub(crate) use self::state::State;
pub(crate) use self::tensors::{Input, Output};
pub(crate) use self::weights::{Weights, weight_dims};
use crate::kernels::cpu::{activation, norm, router};
use crate::ops::Scope;
use crate::slots::Value;
use crate::team::Team;

/// Computes one operation; its outputs in order.
pub(crate) fn run(
    op: &Op,
    team: &Team,
    state: &mut State,
    scope: Scope<'_>,
    inputs: Vec<Value>,
) -> Result<Vec<Value>> {
    let isa = state.isa;
    if let Op::SelectRows = op {
        return Ok(vec![rows::select_rows(team, inputs, scope.batch)?]);
    }
    let inputs = inputs.into_iter().map(Input::of).collect::<Result<Vec<_>>>()?;
    let x = |index: usize| inputs.get(index).with_context(|| format!("input {index} is missing"));
    let like = |x: &Input| Output::new(team, x.rows(), x.columns());
    let out = match op {
        Op::Embed { table, scale } => rows::embed(team, state, *table, *scale, scope.batch)?,
        Op::AddPosition { table, offset } => {
            rows::add_position(team, state, *table, *offset, x(0)?, scope.batch)?
        }
        Op::Norm(weights) => {
            let (x, mut out) = (x(0)?, like(x(0)?)?);
            let residual = inputs.get(1).map(|residual| residual.floats()).transpose()?;
            let weights = state.weights.norm(weights)?;
            let (floats, features) = (x.floats()?, x.columns());
            norm::norm(team, isa, &weights, features, floats, residual, out.floats());
            out
        }
        Op::Linear(op) => return linear::linear(op, team, state, &inputs),
        Op::Attention(op) => attention::attention(op, team, state, scope, &inputs)?,
        Op::Activate(kind) => {
            let mut out = like(x(0)?)?;
            activation::activate(team, isa, *kind, x(0)?.floats()?, out.floats());
            out
        }
        Op::Gate(kind) => {
            let mut out = like(x(0)?)?;
            activation::gate(team, isa, *kind, x(0)?.floats()?, x(1)?.floats()?, out.floats());
            out
        }
        Op::Add => {
            let mut out = like(x(0)?)?;
            activation::add(team, isa, x(0)?.floats()?, x(1)?.floats()?, out.floats());
            out
        }
        Op::SigmoidGate => {
            let (gate, x) = (x(0)?, x(1)?);
            let mut out = like(x)?;
            let features = x.columns();
            activation::sigmoid_gate(
                team,
                isa,
                gate.floats()?,
                features,
                x.floats()?,
                out.floats(),
            );
            out
        }
        Op::Route { used, renormalise } => {
            let (logits, used) = (x(0)?, *used as usize);
            let (tokens, experts) = (logits.rows(), logits.columns());
            ensure!(used > 0 && used <= experts, "{used} of {experts} experts are used");
            let mut ids = Output::new(team, tokens, used)?;
            let mut weights = Output::new(team, tokens, used)?;
            let logits = logits.floats()?;
            let (sizes, weights_to) = ((experts, used), weights.floats());
            router::route(team, logits, sizes, *renormalise, ids.ints(), weights_to);
            return Ok(vec![ids.into_ints(), weights.into_floats()]);
        }
        Op::Experts(op) => linear::experts(op, team, state, [x(0)?, x(1)?, x(2)?])?,
        Op::SelectRows => unreachable!("handled above"),
        Op::SoftCap { cap } => {
            let mut out = like(x(0)?)?;
            activation::soft_cap(team, isa, *cap, x(0)?.floats()?, out.floats());
            out
        }
    };
    Ok(vec![out.into_floats()])
}
