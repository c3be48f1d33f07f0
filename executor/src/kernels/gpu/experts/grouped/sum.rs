//! The weighted sum of what a token's experts made.

use cubecl::prelude::*;

/// `out[token] = Σ weights[slot] · products[slot]` over the token's slots whose experts are held, in their order.
#[cube(launch_unchecked)]
pub(super) fn sum_slots<N: Size>(
    products: &[Vector<f32, N>],
    ids: &[i32],
    weights: &[f32],
    out: &mut [Vector<f32, N>],
    first_expert: i32,
    experts: i32,
    used: usize,
    vectors: usize,
    all: usize,
) {
    let at = ABSOLUTE_POS;
    if at < all {
        let (token, vector) = (at / vectors, at % vectors);
        let mut sum = Vector::<f32, N>::new(0.0);
        for i in 0..used {
            let slot = token * used + i;
            let expert = ids[slot] - first_expert;
            if expert >= 0 && expert < experts {
                sum += Vector::<f32, N>::new(weights[slot]) * products[slot * vectors + vector];
            }
        }
        out[at] = sum;
    }
}
