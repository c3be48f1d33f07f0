//! The choice of the next token from its logits.
//!
//! The steps and their order are those of transformers:
//! repetition penalty → temperature → top-k → top-p → min-p → draw.
//!
//! - The same logits, options and seed give the same tokens, on every machine whose logits are
//!   the same: the generator is xoshiro256++ seeded by SplitMix64, both written out here.
//! - Temperature 0 takes the highest logit, the lowest id among equals, and draws nothing.
//! - Nothing of the vocabulary's size is allocated after the first token, and never is the
//!   whole vocabulary sorted, unless top-p needs all of it.

use std::cmp::Ordering;

use anyhow::{Result, bail, ensure};

mod random;
mod shortlist;

use random::Random;
pub use shortlist::Shortlist;

/// How tokens are chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingOptions {
    /// Divides the logits; 0 takes the highest.
    pub temperature: f32,
    /// Only this many of the highest logits stay, and those equal to the last of them; 0 keeps all.
    pub top_k: usize,
    /// Only the most probable tokens stay whose sum reaches this; 1 keeps all.
    pub top_p: f32,
    /// Only tokens stay that are at least this probable, relative to the most probable; 0 keeps all.
    pub min_p: f32,
    /// Divides positive logits of tokens that occur already and multiplies negative ones; 1 is none.
    pub repetition_penalty: f32,
    /// Where the generator of random numbers starts.
    pub seed: u64,
}

/// Beyond this penalty, and below one over it, tokens that occur are as good as forbidden or forced,
/// and far beyond, logits become infinite.
const HIGHEST_PENALTY: f32 = 1000.0;

impl Default for SamplingOptions {
    /// Greedy.
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            seed: 0,
        }
    }
}

impl SamplingOptions {
    /// Whether every value that has an effect is in its range; at temperature 0, top-p and min-p have none.
    ///
    /// # Errors
    ///
    /// Naming the first value that is not.
    pub fn check(&self) -> Result<()> {
        let Self { temperature, top_k: _, top_p, min_p, repetition_penalty, seed: _ } = *self;
        ensure!(
            temperature.is_finite() && temperature >= 0.0,
            "temperature is {temperature}, but must be 0 or more"
        );
        ensure!(
            (1.0 / HIGHEST_PENALTY..=HIGHEST_PENALTY).contains(&repetition_penalty),
            "repetition penalty is {repetition_penalty:?}, but must be between {} and {HIGHEST_PENALTY}",
            1.0 / HIGHEST_PENALTY
        );
        if temperature == 0.0 {
            return Ok(());
        }
        ensure!(top_p > 0.0 && top_p <= 1.0, "top-p is {top_p}, but must be above 0 and at most 1");
        ensure!((0.0..=1.0).contains(&min_p), "min-p is {min_p}, but must be between 0 and 1");
        Ok(())
    }
}

/// Chooses the tokens of one sequence.
#[derive(Clone, Debug)]
pub struct Sampler {
    options: SamplingOptions,
    random: Random,
    /// Ids that occur in the sequence, each once, if there is a penalty on them.
    seen: Vec<u32>,
    /// One bit an id, set for those in `seen`.
    is_seen: Vec<u64>,
    penalised: Vec<f32>,
    candidates: Vec<Candidate>,
    /// Tokens for which no shortlist is asked, after one that was too short.
    without_shortlist: u32,
}

#[derive(Clone, Copy, Debug)]
struct Candidate {
    id: u32,
    /// A logit, later the token's share of the remaining probability.
    weight: f32,
}

impl Candidate {
    /// Higher weights first, then lower ids.
    fn order(&self, other: &Self) -> Ordering {
        other.weight.total_cmp(&self.weight).then(self.id.cmp(&other.id))
    }
}

impl Sampler {
    /// A sampler for one sequence; the options have been checked.
    #[must_use]
    pub fn new(options: &SamplingOptions) -> Self {
        Self {
            options: options.clone(),
            random: Random::new(options.seed),
            seen: Vec::new(),
            is_seen: Vec::new(),
            penalised: Vec::new(),
            candidates: Vec::new(),
            without_shortlist: 0,
        }
    }

    /// Takes note of tokens of the sequence, for the repetition penalty: first the prompt's.
    /// Tokens that [`Self::sample`] chose are noted already.
    pub fn observe(&mut self, ids: &[u32]) {
        if self.options.repetition_penalty == 1.0 {
            return;
        }
        for &id in ids {
            let (word, bit) = (id as usize / 64, 1 << (id % 64));
            if word >= self.is_seen.len() {
                self.is_seen.resize(word + 1, 0);
            }
            if self.is_seen[word] & bit == 0 {
                self.is_seen[word] |= bit;
                self.seen.push(id);
            }
        }
    }

    /// The next token of the sequence, from the logits of all ids.
    ///
    /// # Errors
    ///
    /// When a logit is not a number or infinite, or all are minus infinity: something upstream
    /// overflowed.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32> {
        let mut penalised = std::mem::take(&mut self.penalised);
        let chosen = if self.seen.is_empty() {
            self.choose(logits)
        } else {
            penalised.clear();
            penalised.extend_from_slice(logits);
            self.penalise(&mut penalised);
            self.choose(&penalised)
        };
        self.penalised = penalised;
        let id = chosen?;
        self.without_shortlist = self.without_shortlist.saturating_sub(1);
        self.observe(&[id]);
        Ok(id)
    }

    fn penalise(&self, logits: &mut [f32]) {
        for &id in &self.seen {
            if let Some(logit) = logits.get_mut(id as usize) {
                *logit = self.penalised(*logit);
            }
        }
    }

    /// The logit of a token that occurs already.
    fn penalised(&self, logit: f32) -> f32 {
        let penalty = self.options.repetition_penalty;
        if logit < 0.0 { logit * penalty } else { logit / penalty }
    }

    fn choose(&mut self, logits: &[f32]) -> Result<u32> {
        let highest = highest(logits)?;
        if self.options.temperature == 0.0 {
            return Ok(highest.id);
        }
        self.keep_top_k(logits);
        let total = self.weigh(highest.weight);
        let total = self.keep_top_p(total);
        let total = self.keep_min_p(total);
        Ok(self.draw(total))
    }

    /// Fills the candidates with the highest logits.
    fn keep_top_k(&mut self, logits: &[f32]) {
        let candidates = &mut self.candidates;
        candidates.clear();
        let all = logits.iter().zip(0..).map(|(&weight, id)| Candidate { id, weight });
        let top_k = self.options.top_k;
        if top_k == 0 || top_k >= logits.len() {
            candidates.extend(all);
            return;
        }
        // A logit below the k-th highest so far cannot be among the k highest. Raising that
        // threshold only now and then keeps the scan at one comparison a logit.
        let mut threshold = f32::NEG_INFINITY;
        let mut limit = (4 * top_k).max(1024);
        for candidate in all {
            if candidate.weight >= threshold {
                candidates.push(candidate);
                if candidates.len() == limit {
                    threshold = kth_weight(candidates, top_k);
                    candidates.retain(|candidate| candidate.weight >= threshold);
                    // Equal logits may leave more than k.
                    limit = limit.max(2 * candidates.len());
                }
            }
        }
        if candidates.len() > top_k {
            threshold = kth_weight(candidates, top_k);
            candidates.retain(|candidate| candidate.weight >= threshold);
        }
    }

    /// Turns the logits of the candidates into probabilities relative to the highest, and
    /// returns their sum.
    fn weigh(&mut self, highest: f32) -> f64 {
        let temperature = self.options.temperature;
        let mut total = 0.0;
        for candidate in &mut self.candidates {
            // The difference first: a tiny temperature would make logits infinite.
            candidate.weight = ((candidate.weight - highest) / temperature).exp();
            total += f64::from(candidate.weight);
        }
        total
    }

    /// Keeps the fewest most probable candidates whose sum reaches top-p.
    fn keep_top_p(&mut self, total: f64) -> f64 {
        let top_p = f64::from(self.options.top_p);
        if top_p >= 1.0 {
            return total;
        }
        let wanted = top_p * total;
        // Candidates that have less than this each cannot have more than `total - wanted`
        // together, so all of them fall away.
        let least = (total - wanted) / self.candidates.len() as f64;
        self.candidates.retain(|candidate| f64::from(candidate.weight) >= least);

        let (mut kept, mut sum, mut sorted) = (0, 0.0, 0);
        while kept < self.candidates.len() && sum < wanted {
            if kept == sorted {
                // Sorting ever larger parts costs little more than sorting what is kept.
                let open = &mut self.candidates[sorted..];
                let part = (4 * sorted).max(64).min(open.len());
                if part < open.len() {
                    open.select_nth_unstable_by(part, Candidate::order);
                }
                open[..part].sort_unstable_by(Candidate::order);
                sorted += part;
            }
            sum += f64::from(self.candidates[kept].weight);
            kept += 1;
        }
        self.candidates.truncate(kept);
        sum
    }

    /// Keeps the candidates that are probable enough beside the most probable.
    fn keep_min_p(&mut self, total: f64) -> f64 {
        let min_p = self.options.min_p;
        if min_p == 0.0 {
            return total;
        }
        // The most probable one weighs 1.
        self.candidates.retain(|candidate| candidate.weight >= min_p);
        self.candidates.iter().map(|candidate| f64::from(candidate.weight)).sum()
    }

    /// Draws one of the candidates, each as likely as its weight.
    fn draw(&mut self, total: f64) -> u32 {
        // Selection leaves its survivors in no fixed order; a draw must not depend on that.
        if self.options.top_k > 0 {
            self.candidates.sort_unstable_by_key(|candidate| candidate.id);
        }
        let mut left = self.random.unit() * total;
        let mut last = 0;
        for candidate in &self.candidates {
            if candidate.weight > 0.0 {
                last = candidate.id;
                left -= f64::from(candidate.weight);
                if left < 0.0 {
                    break;
                }
            }
        }
        last
    }
}

/// The highest logit, the lowest id among equals.
///
/// # Errors
/// When a logit is not a number that can be sampled.
fn highest(logits: &[f32]) -> Result<Candidate> {
    // Two plain reductions and a search are vectorised; one loop that does it all is not.
    let mut lanes = [f32::NEG_INFINITY; 16];
    let mut is_bad = false;
    let (chunks, rest) = logits.as_chunks::<16>();
    for chunk in chunks {
        for (lane, &logit) in lanes.iter_mut().zip(chunk) {
            is_bad |= !is_usable(logit);
            *lane = if logit > *lane { logit } else { *lane };
        }
    }
    is_bad |= rest.iter().any(|&logit| !is_usable(logit));
    if is_bad {
        let id = logits.iter().position(|&logit| !is_usable(logit)).unwrap_or_default();
        bail!("the logit of token {id} is {}: {UNUSABLE_LOGITS}", logits[id]);
    }
    let weight = lanes.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max);
    match logits.iter().zip(0..).find(|&(&logit, _)| logit == weight) {
        Some((_, id)) if weight > f32::NEG_INFINITY => Ok(Candidate { id, weight }),
        _ => bail!("no token has a finite logit among {}", logits.len()),
    }
}

/// Why logits are no numbers, and what to do.
pub(crate) const UNUSABLE_LOGITS: &str = "the checkpoint has weights that are no numbers, or the model overflows in formats of less \
     than 32 bits, which a plan compiled with --format f32 does not have";

/// Whether a logit is below infinity; one that is not a number is not.
fn is_usable(logit: f32) -> bool {
    logit < f32::INFINITY
}

/// The k-th highest weight.
fn kth_weight(candidates: &mut [Candidate], k: usize) -> f32 {
    candidates.select_nth_unstable_by(k - 1, Candidate::order).1.weight
}

#[cfg(test)]
mod tests;
