//! A mixture's choice of experts: softmax over the router's logits, then the largest.

use cubecl::prelude::*;

use super::device::{Gpu, Span};

impl Gpu {
    /// For each token the `used` experts with the largest logits `[tokens, experts]`: ids as `i32` and weights,
    /// both `[tokens, used]`, in falling order; the lower id wins a tie. One plane works for each token.
    pub fn route(
        &self,
        logits: &Span,
        [tokens, experts]: [usize; 2],
        used: usize,
        renormalises: bool,
        ids: &Span,
        weights: &Span,
    ) {
        let plane = self.plane();
        route::launch(
            &self.client,
            CubeCount::Static(tokens as u32, 1, 1),
            CubeDim::new_1d(plane),
            logits.argument(tokens * experts, size_of::<f32>()),
            ids.argument(tokens * used, size_of::<i32>()),
            weights.argument(tokens * used, size_of::<f32>()),
            experts as u32,
            used as u32,
            plane,
            renormalises,
        );
    }
}

#[cube(launch)]
fn route(
    logits: &[f32],
    ids: &mut [i32],
    weights: &mut [f32],
    #[comptime] experts: u32,
    #[comptime] used: u32,
    #[comptime] plane: u32,
    #[comptime] renormalises: bool,
) {
    let token = CUBE_POS_X;
    let lane = UNIT_POS_X;
    let each = comptime!(experts.div_ceil(plane));
    // Less than any logit, and left over once an expert is taken.
    let taken = f32::new(-3.0e38);
    let mut left = Array::<f32>::new(each as usize);
    let mut most = taken;
    #[unroll]
    for i in 0..each {
        let expert = i * plane + lane;
        let mut logit = taken;
        if expert < experts {
            logit = logits[(token * experts + expert) as usize];
        }
        left[i as usize] = logit;
        most = max(most, logit);
    }
    let most = plane_max(most);
    let mut sum = f32::new(0.0);
    #[unroll]
    for i in 0..each {
        if i * plane + lane < experts {
            sum += f32::exp(left[i as usize] - most);
        }
    }
    let sum = plane_sum(sum);
    let mut total = f32::new(0.0);
    // Ranks of a lane: every plane's width of them.
    let ranks = comptime!(used.div_ceil(plane));
    let mut own_ids = Array::<u32>::new(ranks as usize);
    let mut own_weights = Array::<f32>::new(ranks as usize);
    for rank in 0..used {
        let mut best = taken;
        let mut id = u32::new(0x7fff_ffff);
        #[unroll]
        for i in 0..each {
            if left[i as usize] > best {
                best = left[i as usize];
                id = i * plane + lane;
            }
        }
        let largest = plane_max(best);
        let mut candidate = u32::new(0x7fff_ffff);
        if best == largest {
            candidate = id;
        }
        let chosen = plane_min(candidate);
        #[unroll]
        for i in 0..each {
            if i * plane + lane == chosen {
                left[i as usize] = taken;
            }
        }
        let weight = f32::exp(largest - most) / sum;
        total += weight;
        #[unroll]
        for i in 0..ranks {
            if i * plane + lane == rank {
                own_ids[i as usize] = chosen;
                own_weights[i as usize] = weight;
            }
        }
    }
    #[unroll]
    for i in 0..ranks {
        let rank = i * plane + lane;
        if rank < used {
            let at = (token * used + rank) as usize;
            ids[at] = own_ids[i as usize] as i32;
            let mut weight = own_weights[i as usize];
            if renormalises {
                weight /= total;
            }
            weights[at] = weight;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::gpu;

    #[test]
    fn the_largest_are_chosen_and_ties_go_to_the_lower() {
        let Some(gpu) = gpu() else { return };
        for (experts, used, renormalises) in [(6, 2, true), (60, 4, false), (128, 8, true)] {
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
