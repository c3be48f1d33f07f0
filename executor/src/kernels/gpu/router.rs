//! A mixture's choice of experts: softmax over the router's logits, then the largest.

use cubecl::prelude::*;

use super::device::{Gpu, Span};

/// Units of a token's cube at most: a whole number of planes.
const MOST_UNITS: usize = 256;

impl Gpu {
    /// For each token the `used` experts with the largest logits `[tokens, experts]`: ids as `i32` and weights,
    /// both `[tokens, used]`, in falling order; the lower id wins a tie, and what is not a number counts as the
    /// largest.
    pub fn route(
        &self,
        logits: &Span,
        [tokens, experts]: [usize; 2],
        used: usize,
        renormalises: bool,
        ids: &Span,
        weights: &Span,
    ) {
        let plane = self.plane() as usize;
        let units = experts.next_multiple_of(plane).min(MOST_UNITS);
        route::launch(
            &self.client,
            CubeCount::Static(tokens as u32, 1, 1),
            CubeDim::new_1d(units as u32),
            logits.argument(tokens * experts, size_of::<f32>()),
            ids.argument(tokens * used, size_of::<i32>()),
            weights.argument(tokens * used, size_of::<f32>()),
            experts,
            used,
            units,
            plane,
            renormalises,
        );
    }
}

/// A cube for each token. Each expert's rank is the number of those before it, which its unit counts by itself.
#[cube(launch)]
fn route(
    logits: &[f32],
    ids: &mut [i32],
    weights: &mut [f32],
    #[comptime] experts: usize,
    #[comptime] used: usize,
    #[comptime] units: usize,
    #[comptime] plane: usize,
    #[comptime] renormalises: bool,
) {
    let token = CUBE_POS_X as usize;
    let unit = UNIT_POS as usize;
    let planes = comptime!(units / plane);
    let each = comptime!(experts.div_ceil(units));
    let mut keys = Shared::<[u32]>::new_slice(experts);
    let mut sums = Shared::<[f32]>::new_slice(planes);
    // Exponentials by rank.
    let mut chosen = Shared::<[f32]>::new_slice(used);
    #[unroll]
    for i in 0..each {
        let expert = comptime!(i * units) + unit;
        if expert < experts {
            keys[expert] = ordered(logits[token * experts + expert]);
        }
    }
    sync_cube();
    let mut ranks = Array::<usize>::new(each);
    let mut powers = Array::<f32>::new(each);
    let mut sum = f32::new(0.0);
    #[unroll]
    for i in 0..each {
        let expert = comptime!(i * units) + unit;
        let own = keys[min(expert, comptime!(experts - 1).runtime())];
        let mut rank = 0usize.runtime();
        let mut largest = own;
        for other in 0..experts {
            let key = keys[other];
            largest = max(largest, key);
            if key > own || (key == own && other < expert) {
                rank += 1usize;
            }
        }
        ranks[i] = rank;
        powers[i] = f32::exp(logit(own) - logit(largest));
        if expert < experts {
            sum += powers[i];
            if rank < used {
                chosen[rank] = powers[i];
            }
        }
    }
    let sum = plane_sum(sum);
    if unit.is_multiple_of(plane) {
        sums[unit / plane] = sum;
    }
    sync_cube();
    let mut sum = f32::new(0.0);
    #[unroll]
    for other in 0..planes {
        sum += sums[other];
    }
    if comptime!(renormalises) {
        sum = f32::new(0.0);
        for rank in 0..used {
            sum += chosen[rank];
        }
    }
    #[unroll]
    for i in 0..each {
        let expert = comptime!(i * units) + unit;
        if expert < experts && ranks[i] < used {
            let at = token * used + ranks[i];
            ids[at] = expert as i32;
            weights[at] = powers[i] / sum;
        }
    }
}

/// A whole number that is as large beside those of other floats as its float is beside them.
#[cube]
fn ordered(x: f32) -> u32 {
    // Zeros are equal.
    let bits = u32::reinterpret(select(x == 0.0, f32::new(0.0), x));
    let is_number = bits & 0x7fff_ffffu32 <= 0x7f80_0000u32;
    let flips = select(bits >> 31u32 == 1u32, 0xffff_ffffu32.runtime(), 0x8000_0000u32.runtime());
    select(is_number, bits ^ flips, 0xffff_ffffu32.runtime())
}

/// The float that a number stands for.
#[cube]
fn logit(key: u32) -> f32 {
    let flips = select(key >> 31u32 == 1u32, 0x8000_0000u32.runtime(), 0xffff_ffffu32.runtime());
    f32::reinterpret(key ^ flips)
}

#[cfg(test)]
mod tests {
    use super::super::testing::gpu;

    #[test]
    fn ids_are_experts_where_logits_are_not_numbers() {
        let Some(gpu) = gpu() else { return };
        let logits = [1.0, f32::NAN, -0.0, f32::NEG_INFINITY, 0.0, -f32::NAN];
        let (ids, weights) = (gpu.poisoned(6 * 4), gpu.poisoned(6 * 4));
        gpu.route(&gpu.upload(&logits), [1, 6], 6, false, &ids, &weights);
        assert_eq!(gpu.download::<i32>(&ids, 6), [1, 5, 0, 2, 4, 3]);
    }

    #[test]
    fn the_largest_are_chosen_and_ties_go_to_the_lower() {
        let Some(gpu) = gpu() else { return };
        for (experts, used, renormalises) in
            [(6, 2, true), (60, 4, false), (128, 8, true), (300, 7, true), (512, 512, false)]
        {
            let tokens = 7;
            let logits: Vec<f32> =
                (0..tokens * experts).map(|i| ((i * 7919) % 13) as f32 * 0.5 - 3.0).collect();
            let (ids, weights) = (gpu.poisoned(tokens * used * 4), gpu.poisoned(tokens * used * 4));
            let on_gpu = gpu.upload(&logits);
            gpu.route(&on_gpu, [tokens, experts], used, renormalises, &ids, &weights);
            let ids = gpu.download::<i32>(&ids, tokens * used);
            let weights = gpu.download::<f32>(&weights, tokens * used);
            for token in 0..tokens {
                let row = &logits[token * experts..(token + 1) * experts];
                let mut order: Vec<usize> = (0..experts).collect();
                order.sort_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
                let sum: f32 = row.iter().map(|x| x.exp()).sum();
                let mut expected: Vec<f32> =
                    order[..used].iter().map(|&i| row[i].exp() / sum).collect();
                if renormalises {
                    let total: f32 = expected.iter().sum();
                    expected.iter_mut().for_each(|x| *x /= total);
                }
                let at = token * used;
                let chosen: Vec<i32> = order[..used].iter().map(|&i| i as i32).collect();
                assert_eq!(ids[at..at + used], chosen, "{experts} experts");
                for (a, e) in weights[at..at + used].iter().zip(expected) {
                    assert!((a - e).abs() < 1e-5, "{a} is not {e}");
                }
            }
        }
    }
}
