//! Linears, and the linears of experts, with their weights.

use anyhow::{Result, ensure};
use burn_flex::{Flex, FlexTensor};
use ir::op;

use super::Weights;
use crate::kernels::cpu::experts::{Expert, Experts};
use crate::kernels::cpu::extension::{Cores, Kernels};
use crate::kernels::cpu::linear::Linear;
use crate::kernels::cpu::pack::PackedMatrix;

/// The outputs of a linear, in order.
pub(super) fn linear(
    op: &op::Linear,
    cores: Cores<'_>,
    held: &Weights,
    x: FlexTensor,
    residual: Option<FlexTensor>,
) -> Result<Vec<FlexTensor>> {
    let matrix = |&weight| held.matrix(weight);
    let weights = op.weights.iter().map(matrix).collect::<Result<Vec<&PackedMatrix>>>()?;
    let bias = |bias: &Option<_>| bias.map(|bias| held.vector(bias)).transpose();
    let biases = op.biases.iter().map(bias).collect::<Result<Vec<Option<&[f32]>>>>()?;
    let call = Linear {
        tokens: rows(&x),
        x,
        norm: op.norm.as_ref().map(|norm| held.norm(norm)).transpose()?,
        weights: &weights,
        biases: &biases,
        then: op.then,
        residual,
    };
    Flex::linear(cores, call)
}

/// The weighted sum of the chosen experts of `[x, ids, weights]`.
pub(super) fn experts(
    op: &op::Experts,
    cores: Cores<'_>,
    held: &Weights,
    [x, ids, weights]: [FlexTensor; 3],
) -> Result<FlexTensor> {
    let [gate, up, down] = [op.gate, op.up, op.down].map(|stack| held.stack(stack));
    let (gate, up, down) = (gate?, up?, down?);
    ensure!(gate.len() == up.len() && up.len() == down.len(), "stacks hold as many experts");
    let experts: Vec<Expert<'_>> =
        gate.iter().zip(up).zip(down).map(|((gate, up), down)| Expert { gate, up, down }).collect();
    let call = Experts {
        tokens: rows(&x),
        x,
        ids,
        weights,
        first_expert: op.first().cast_signed(),
        experts: &experts,
        activation: op.activation,
    };
    Flex::experts(cores, call)
}

/// Rows of a tensor.
fn rows(x: &FlexTensor) -> usize {
    x.layout().shape().first().copied().unwrap_or(0)
}
