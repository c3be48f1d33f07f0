//! The choice of experts: softmax over all, the best few, and their weights.

/// Chooses `used` experts for each row of `logits`, `[tokens, experts]`, best first and of equals the lower.
///
/// Writes their numbers and softmax weights, both `[tokens, used]`. With `renormalise` the weights are divided by
/// their sum, which is the softmax over the chosen logits only.
///
/// # Panics
/// When shapes disagree, or more experts are used than there are.
pub fn route(
    logits: &[f32],
    experts: usize,
    used: usize,
    renormalise: bool,
    ids: &mut [i32],
    weights: &mut [f32],
) {
    assert!(used > 0 && used <= experts && logits.len().is_multiple_of(experts), "experts to use");
    let tokens = logits.len() / experts;
    assert!(ids.len() == tokens * used && weights.len() == ids.len(), "places for the choice");
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
