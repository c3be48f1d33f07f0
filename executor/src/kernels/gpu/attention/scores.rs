//! Scores and their weights.

use cubecl::prelude::*;

use crate::kernels::gpu::registers::held;

/// A score below every other, of which differences are still numbers.
pub(super) const UNSEEN: f32 = -1e30;

/// What the largest score of some keys is at least where a factor comes after: above [`UNSEEN`] times any scale. Beside
/// it keys that are not seen weigh nothing, even if they are all; beside such a product itself they would weigh what
/// its rounding makes of them, since one instruction multiplies and subtracts.
pub(super) const LEAST: f32 = -1e20;

/// The score of a product of query and key, times log2(e).
#[cube]
pub(super) fn score(product: f32, inner: f32, outer: f32, #[comptime] capped: bool) -> f32 {
    let mut score = product * inner;
    if comptime!(capped) {
        score = f32::tanh(score) * outer;
    }
    score
}

/// 2 to the power of `x`, which is not above 0.
#[cube]
pub(super) fn weight(x: f32, #[comptime] cuda: bool) -> f32 {
    let x = held::<f32>(x);
    let weight: f32;
    if comptime!(cuda) {
        gpu_asm!("ex2.approx.ftz.f32 {y}, {x};", x = in(_) x, y = out(_) weight, options(pure, nomem));
    } else {
        weight = f32::exp(x * comptime!(std::f32::consts::LN_2));
    }
    weight
}
