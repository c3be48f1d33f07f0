//! Matrices that share an input, with what surrounds them.

use anyhow::{Result, ensure};
use burn::tensor::Tensor;
use ir::op::{Linear, Then};

use super::State;
use super::{activate, norm};

/// The outputs of a linear of `x: [tokens, inputs]`.
pub(super) fn linear(
    linear: &Linear,
    x: Tensor<2>,
    residual: Option<Tensor<2>>,
    state: &State,
) -> Result<Vec<Tensor<2>>> {
    let x = match &linear.norm {
        Some(norm) => norm::norm(norm, x, state)?,
        None => x,
    };
    let mut products = Vec::new();
    for (&weight, &bias) in linear.weights.iter().zip(&linear.biases) {
        let product = x.clone().matmul(state.tensor(weight)?.transpose());
        products.push(match bias {
            Some(bias) => product + state.tensor(bias)?,
            None => product,
        });
    }
    let mut outputs = match linear.then {
        Then::Nothing => products,
        Then::Activate(kind) => products.into_iter().map(|y| activate(kind, y)).collect(),
        Then::Gate(kind) => {
            ensure!(products.len() == 2, "a gated linear has {} matrices", products.len());
            let up = products.remove(1);
            vec![activate(kind, products.remove(0)) * up]
        }
    };
    if let Some(residual) = residual {
        ensure!(outputs.len() == 1, "a residual is added to {} outputs", outputs.len());
        outputs = vec![outputs.remove(0) + residual];
    }
    Ok(outputs)
}
