//! Linears, and the linears of experts.

use anyhow::{Context as _, Result, ensure};
use ir::op::{self, Then};

use super::{Input, Output, State};
use crate::kernels::cpu::experts::{Expert, Experts, experts as compute_experts};
use crate::kernels::cpu::linear::{Linear, linear as compute};
use crate::kernels::cpu::pack::PackedMatrix;
use crate::slots::Value;
use crate::team::Team;

/// The outputs of a linear, in order.
pub(super) fn linear(
    op: &op::Linear,
    team: &Team,
    state: &State,
    inputs: &[Input],
) -> Result<Vec<Value>> {
    let x = inputs.first().context("the input is missing")?;
    let residual = match (op.residual, inputs.get(1)) {
        (false, _) => None,
        (true, residual) => Some(residual.context("the residual is missing")?.floats()?),
    };
    let matrix = |&weight| state.weights.matrix(weight);
    let weights = op.weights.iter().map(matrix).collect::<Result<Vec<&PackedMatrix>>>()?;
    let bias = |bias: &Option<_>| bias.map(|bias| state.weights.vector(bias)).transpose();
    let biases = op.biases.iter().map(bias).collect::<Result<Vec<Option<&[f32]>>>>()?;
    ensure!(weights.len() == biases.len(), "a linear has no place for every bias");
    let norm = op.norm.as_ref().map(|norm| state.weights.norm(norm)).transpose()?;
    let is_gated = matches!(op.then, Then::Gate(_));
    let made = if is_gated { &weights[..1] } else { &weights[..] };
    let mut outputs = made
        .iter()
        .map(|weight| Output::new(team, x.rows(), weight.rows()))
        .collect::<Result<Vec<_>>>()?;
    let mut first = 0;
    while first < weights.len() {
        // One dispatch takes neighbours of one format.
        let format = weights[first].format();
        let alike = weights[first..].iter().take_while(|weight| weight.format() == format).count();
        let end = if is_gated { weights.len() } else { first + alike };
        let call = Linear {
            x: x.floats()?,
            tokens: x.rows(),
            norm,
            weights: &weights[first..end],
            biases: &biases[first..end],
            then: op.then,
            residual,
        };
        let outputs = &mut outputs[first..end.min(made.len())];
        let mut slices: Vec<&mut [f32]> = outputs.iter_mut().map(Output::floats).collect();
        compute(team, state.isa, &call, &mut slices)?;
        first = end;
    }
    Ok(outputs.into_iter().map(Output::into_floats).collect())
}

/// The weighted sum of the chosen experts.
pub(super) fn experts(
    op: &op::Experts,
    team: &Team,
    state: &State,
    [x, ids, weights]: [&Input; 3],
) -> Result<Output> {
    let [gate, up, down] = [op.gate, op.up, op.down].map(|stack| state.weights.stack(stack));
    let (gate, up, down) = (gate?, up?, down?);
    ensure!(gate.len() == up.len() && up.len() == down.len(), "stacks hold as many experts");
    let experts: Vec<Expert<'_>> =
        gate.iter().zip(up).zip(down).map(|((gate, up), down)| Expert { gate, up, down }).collect();
    let call = Experts {
        x: x.floats()?,
        tokens: x.rows(),
        ids: ids.ints()?,
        weights: weights.floats()?,
        first_expert: op.first().cast_signed(),
        experts: &experts,
        activation: op.activation,
    };
    let mut out = Output::new(team, x.rows(), x.columns())?;
    compute_experts(team, state.isa, &call, out.floats())?;
    Ok(out)
}
