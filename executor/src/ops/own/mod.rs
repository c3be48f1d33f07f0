//! Every operation with this project's CPU kernels, by their extension of Burn's `flex` backend.

mod attention;
mod caches;
mod linear;
mod rotations;
mod state;
mod weights;

use anyhow::{Context as _, Result};
use burn_flex::{Flex, FlexTensor};
use ir::op::Op;

pub(crate) use self::state::State;
pub(crate) use self::weights::{Weights, weight_dims};
use crate::kernels::cpu::extension::{Cores, Kernels};
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
    let cores = Cores { team, isa: state.isa };
    let batch = scope.batch;
    let mut inputs = inputs.into_iter();
    let mut next =
        || -> Result<FlexTensor> { inputs.next().context("an input is missing")?.into_flex() };
    let out = match op {
        Op::Embed { table, scale } => {
            Flex::look_up(cores, state.weights.lookup(*table)?, batch.tokens(), *scale)?
        }
        Op::AddPosition { table, offset } => {
            let table = state.weights.lookup(*table)?;
            Flex::add_rows(cores, next()?, table, batch.positions(), *offset)?
        }
        Op::Norm(norm) => {
            let x = next()?;
            let residual = inputs.next().map(Value::into_flex).transpose()?;
            Flex::norm(cores, x, &state.weights.norm(norm)?, residual)?
        }
        Op::Linear(op) => {
            let x = next()?;
            let residual = op.residual.then(next).transpose()?;
            let outputs = linear::linear(op, cores, &state.weights, x, residual)?;
            return Ok(outputs.into_iter().map(Value::of_flex).collect());
        }
        Op::Attention(op) => {
            attention::attention(op, cores, state, scope, [next()?, next()?, next()?])?
        }
        Op::Activate(kind) => Flex::activate(cores, *kind, next()?)?,
        Op::Gate(kind) => Flex::gate(cores, *kind, next()?, next()?)?,
        Op::Add => Flex::add_by_team(cores, next()?, next()?)?,
        Op::SigmoidGate => Flex::sigmoid_gate(cores, next()?, next()?)?,
        Op::Route { used, renormalise } => {
            let (ids, weights) = Flex::route(cores, next()?, *used as usize, *renormalise)?;
            return Ok(vec![Value::of_flex_ints(ids), Value::of_flex(weights)]);
        }
        Op::Experts(op) => linear::experts(op, cores, &state.weights, [next()?, next()?, next()?])?,
        // All rows are the input itself.
        Op::SelectRows if batch.rows().len() == batch.tokens().len() => next()?,
        Op::SelectRows => Flex::select_rows(cores, next()?, batch.rows())?,
        Op::SoftCap { cap } => Flex::soft_cap(cores, *cap, next()?)?,
    };
    Ok(vec![Value::of_flex(out)])
}
