//! Nonlinearities inside kernels.

use cubecl::prelude::*;
use ir::op::Activation;

use super::device::has_ptx;
use super::registers::held;

/// `activation(x)`.
#[cube]
pub(super) fn activate(x: f32, #[comptime] activation: Activation) -> f32 {
    match activation {
        Activation::Relu => x.max(0.0),
        Activation::Silu => quotient(x, 1.0 + (-x).exp()),
        Activation::Gelu => 0.5 * x * (1.0 + Erf::erf(x * std::f32::consts::FRAC_1_SQRT_2)),
        Activation::GeluTanh => {
            // sqrt(2 / pi), as in the definition.
            let inner = 0.797_884_6 * (x + 0.044_715 * x * x * x);
            0.5 * x * (1.0 + inner.tanh())
        }
    }
}

/// `x / y` to two units in the last place: what is exact takes a branch, at which a unit's other quotients wait.
#[cube]
fn quotient(x: f32, y: f32) -> f32 {
    let properties = comptime::device_properties();
    if comptime!(has_ptx(&properties)) {
        let (x, y) = (held::<f32>(x), held::<f32>(y));
        let quotient: f32;
        gpu_asm!(
            "div.full.f32 {quotient}, {x}, {y};",
            x = in(_) x, y = in(_) y, quotient = out(_) quotient,
            options(pure, nomem),
        );
        quotient
    } else {
        x / y
    }
}
