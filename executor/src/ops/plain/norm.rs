//! Normalisation over the last axis.

use anyhow::Result;
use burn::tensor::Tensor;
use ir::op::{Norm, NormKind};

use super::State;

/// `norm(x)` for `x: [rows, features]`.
pub(super) fn norm(norm: &Norm, x: Tensor<2>, state: &State) -> Result<Tensor<2>> {
    let centred = match norm.kind {
        NormKind::Rms => x,
        NormKind::Layer => x.clone() - x.mean_dim(1),
    };
    let variance = (centred.clone() * centred.clone()).mean_dim(1);
    let mut y = centred / (variance + norm.epsilon).sqrt();
    if let Some(scale) = norm.scale {
        y = y * (state.tensor(scale)? + norm.scale_offset);
    }
    if let Some(bias) = norm.bias {
        y = y + state.tensor(bias)?;
    }
    Ok(y)
}
