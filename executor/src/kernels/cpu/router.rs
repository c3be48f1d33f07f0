//! The choice of experts: softmax over all, the best few, and their weights.

#![expect(unsafe_code, reason = "members write the choices of disjoint tokens")]

use super::disjoint::DisjointMut;
use crate::team::Team;

/// Logits that one member is done with before others would have begun, at some 5 ns each.
const LONE_LOGITS: usize = 1024;

/// Chooses `used` experts for each row of `logits`, `[tokens, experts]`, best first and of equals the lower.
///
/// Writes their numbers and softmax weights, both `[tokens, used]`. With `renormalise` the weights are divided by
/// their sum, which is the softmax over the chosen logits only.
///
/// # Panics
/// When shapes disagree, or more experts are used than there are.
pub fn route(
    team: &Team,
    logits: &[f32],
    (experts, used): (usize, usize),
    renormalise: bool,
    ids: &mut [i32],
    weights: &mut [f32],
) {
    assert!(used > 0 && used <= experts && logits.len().is_multiple_of(experts), "experts to use");
    let tokens = logits.len() / experts;
    assert!(ids.len() == tokens * used && weights.len() == ids.len(), "places for the choice");
    if logits.len() <= LONE_LOGITS {
        return route_rows(logits, (experts, used), renormalise, ids, weights);
    }
    let (ids, weights) = (DisjointMut::new(ids), DisjointMut::new(weights));
    team.for_each_chunk(tokens, LONE_LOGITS.div_ceil(experts), |range| {
        let places = range.start * used..range.end * used;
        // SAFETY: every token is dealt out once, and its places are its own.
        let (ids, weights) = unsafe { (ids.part(places.clone()), weights.part(places)) };
        let logits = &logits[range.start * experts..range.end * experts];
        route_rows(logits, (experts, used), renormalise, ids, weights);
    });
}

/// Routes some tokens.
fn route_rows(
    logits: &[f32],
    (experts, used): (usize, usize),
    renormalise: bool,
    ids: &mut [i32],
    weights: &mut [f32],
) {
    let mut exponentials = vec![0.0; experts];
    let rows = logits.chunks_exact(experts).zip(ids.chunks_exact_mut(used));
    for ((logits, ids), weights) in rows.zip(weights.chunks_exact_mut(used)) {
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        for (exponential, logit) in exponentials.iter_mut().zip(logits) {
            *exponential = (logit - largest).exp();
        }
        let total: f32 = exponentials.iter().sum();
        // Ordered by logit, not by weight: distinct logits can share a weight.
        choose(logits, ids);
        for (weight, &id) in weights.iter_mut().zip(&*ids) {
            *weight = exponentials[id as usize] / total;
        }
        if renormalise {
            let total: f32 = weights.iter().sum();
            weights.iter_mut().for_each(|weight| *weight /= total);
        }
    }
}

/// Writes the indices of the largest `logits`, by falling logit and rising index.
fn choose(logits: &[f32], ids: &mut [i32]) {
    let mut chosen = 0;
    for (i, &logit) in logits.iter().enumerate() {
        let place = ids[..chosen].iter().position(|&id| logits[id as usize] < logit);
        let place = place.unwrap_or(chosen);
        if place < ids.len() {
            chosen = (chosen + 1).min(ids.len());
            ids.copy_within(place..chosen - 1, place + 1);
            ids[place] = i as i32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Random, distance, with_team};
    use super::*;

    /// Sorts all experts by falling weight.
    fn expected(logits: &[f32], used: usize, renormalise: bool) -> (Vec<i32>, Vec<f64>) {
        let total: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        order.truncate(used);
        let weight = |&id: &usize| f64::from(logits[id]).exp() / total;
        let sum: f64 = if renormalise { order.iter().map(weight).sum() } else { 1.0 };
        let weights = order.iter().map(|id| weight(id) / sum).collect();
        (order.iter().map(|&id| id as i32).collect(), weights)
    }

    #[test]
    fn the_largest_logits_are_chosen_with_their_softmax_weights() {
        with_team(3, |team| {
            let mut random = Random(31);
            // The last are dealt out to the team.
            for (tokens, experts, used) in
                [(17, 1, 1), (17, 8, 2), (17, 60, 4), (17, 5, 5), (0, 8, 2), (77, 128, 8)]
            {
                // Few distinct logits, so that there are ties.
                let logits: Vec<f32> = (0..tokens * experts)
                    .map(|_| (random.next() % 11) as f32 / 2.0 - 3.0)
                    .collect();
                for renormalise in [false, true] {
                    let (mut ids, mut weights) =
                        (vec![-1; tokens * used], vec![f32::NAN; tokens * used]);
                    let sizes = (experts, used);
                    route(team, &logits, sizes, renormalise, &mut ids, &mut weights);
                    for (token, logits) in logits.chunks_exact(experts).enumerate() {
                        let (best, shares) = expected(logits, used, renormalise);
                        let range = token * used..(token + 1) * used;
                        assert_eq!(ids[range.clone()], best);
                        assert!(distance(&weights[range], &shares) < 1e-6);
                    }
                }
            }
        });
    }
}
