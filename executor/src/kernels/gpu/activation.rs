//! Nonlinearities inside kernels.

use cubecl::prelude::*;
use ir::op::Activation;

/// `activation(x)`.
#[cube]
pub(super) fn activate(x: f32, #[comptime] activation: Activation) -> f32 {
    match activation {
        Activation::Relu => x.max(0.0),
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::Gelu => 0.5 * x * (1.0 + Erf::erf(x * std::f32::consts::FRAC_1_SQRT_2)),
        Activation::GeluTanh => {
            // sqrt(2 / pi), as in the definition.
            let inner = 0.797_884_6 * (x + 0.044_715 * x * x * x);
            0.5 * x * (1.0 + inner.tanh())
        }
    }
}
