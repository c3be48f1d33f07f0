//! A mixture of experts: which are chosen, and what they do.

use anyhow::{Context as _, Result, ensure};
use burn::tensor::{IndexingUpdateOp, Int, Tensor, TensorData, activation};
use ir::op::Experts;

use super::State;
use super::activate;
use super::rows::ids;

/// Ids `[tokens, used]` and weights `[tokens, used]` of the experts with the largest logits `[tokens, experts]`;
/// the lower id wins a tie.
pub(super) fn route(
    logits: Tensor<2>,
    used: usize,
    renormalise: bool,
) -> (Tensor<2, Int>, Tensor<2>) {
    let mut left = activation::softmax(logits, 1);
    let (mut chosen, mut weights) = (Vec::new(), Vec::new());
    for _ in 0..used {
        let (weight, id) = left.clone().max_dim_with_indices(1);
        left = left.scatter(1, id.clone(), -weight.clone() - 1.0, IndexingUpdateOp::Add);
        chosen.push(id);
        weights.push(weight);
    }
    let mut weights = Tensor::cat(weights, 1);
    if renormalise {
        weights = weights.clone() / weights.sum_dim(1);
    }
    (Tensor::cat(chosen, 1), weights)
}

/// The weighted sum of the chosen experts' gated MLPs of `x: [tokens, features]`.
pub(super) fn experts(
    experts: &Experts,
    x: Tensor<2>,
    chosen: Tensor<2, Int>,
    weights: Tensor<2>,
    state: &State,
) -> Result<Tensor<2>> {
    let [gate, up, down] = [experts.gate, experts.up, experts.down].map(|stack| state.stack(stack));
    let (gate, up, down) = (gate?, up?, down?);
    let [_, used] = chosen.dims();
    let chosen = chosen.into_data().convert::<i32>();
    let chosen = chosen.as_slice::<i32>().map_err(|error| anyhow::anyhow!("{error:?}"))?;
    let weights = weights.into_data();
    let weights = weights.as_slice::<f32>().map_err(|error| anyhow::anyhow!("{error:?}"))?;
    let first = experts.first() as usize;
    ensure!(
        experts.part.is_some() || chosen.iter().all(|&id| (id as usize) < gate.len()),
        "a token chose no expert"
    );
    let mut sum = x.zeros_like();
    for expert in 0..gate.len() {
        let slots = chosen.iter().enumerate().filter(|&(_, &id)| id as usize == first + expert);
        let (rows, factors): (Vec<u32>, Vec<f32>) =
            slots.map(|(slot, _)| ((slot / used) as u32, weights[slot])).unzip();
        if rows.is_empty() {
            continue;
        }
        let matrix = |stack: &[Tensor<2>]| -> Result<Tensor<2>> {
            Ok(stack.get(expert).context("a stack lacks an expert")?.clone().transpose())
        };
        let count = rows.len();
        let rows = ids(&rows, &state.burn);
        let x = x.clone().select(0, rows.clone());
        let inner =
            activate(experts.activation, x.clone().matmul(matrix(gate)?)) * x.matmul(matrix(up)?);
        let factors = Tensor::<2>::from_data(TensorData::new(factors, [count, 1]), &state.burn);
        let output = inner.matmul(matrix(down)?) * factors;
        sum = sum.select_assign(0, rows, output, IndexingUpdateOp::Add);
    }
    Ok(sum)
}
