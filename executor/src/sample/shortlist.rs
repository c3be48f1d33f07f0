//! Choosing from the most likely tokens alone, where they are enough to give the same choice.

use anyhow::{Result, bail};
use ir::workspace::shortlist::LISTED_TOKENS;

use super::{Candidate, Sampler, UNUSABLE_LOGITS};
use crate::kernels::gpu::shortlist::{IMPOSSIBLE, UNUSABLE};

/// Tokens for which no shortlist is asked after one that was too short: a text is seldom flat for one token alone, and
/// what was too short is made again as a whole.
const PAUSE: u32 = 16;

/// The most likely tokens of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shortlist<'a> {
    /// In falling order, the lower id first among equals.
    pub logits: &'a [f32],
    /// As many ids, each a whole number.
    pub ids: &'a [f32],
    /// The sum over all tokens of `exp((logit − highest) / temperature)`.
    pub weight: f32,
}

impl Sampler {
    /// One over the temperature, if a shortlist is probably enough for the next choice.
    #[must_use]
    pub fn inverse_temperature(&self) -> Option<f32> {
        let options = &self.options;
        // A penalty below 1 raises tokens that may be on no list, and one changes what all weigh.
        let is_penalised = !self.seen.is_empty();
        let is_greedy = options.temperature == 0.0;
        // The last candidate must be more likely than the last of the list.
        let is_short = match options.top_k {
            _ if is_greedy => true,
            0 => is_filtered(options) && !is_penalised,
            top_k => top_k < LISTED_TOKENS as usize,
        };
        let may_do = is_short && options.repetition_penalty >= 1.0 && self.without_shortlist == 0;
        // The least temperatures have no such number.
        let inverse = if is_greedy { 1.0 } else { options.temperature.recip() };
        (may_do && inverse.is_finite()).then_some(inverse)
    }

    /// The next token of the sequence, as [`Sampler::sample`] would choose it; `None` where the list is too short to
    /// tell, and all logits are needed.
    ///
    /// # Errors
    /// As [`Sampler::sample`].
    pub fn sample_shortlist(&mut self, list: &Shortlist<'_>) -> Result<Option<u32>> {
        let chosen = self.choose_from(list)?;
        match chosen {
            Some(id) => self.observe(&[id]),
            None => self.without_shortlist = PAUSE,
        }
        Ok(chosen)
    }

    fn choose_from(&mut self, list: &Shortlist<'_>) -> Result<Option<u32>> {
        let (Some(&most), Some(&least), Some(&id)) =
            (list.logits.first(), list.logits.last(), list.ids.first())
        else {
            return Ok(None);
        };
        if most >= UNUSABLE {
            bail!("the logit of token {id} is infinite or not a number: {UNUSABLE_LOGITS}");
        }
        if most <= IMPOSSIBLE {
            bail!("no token has a finite logit");
        }
        let options = &self.options;
        if options.repetition_penalty < 1.0 {
            return Ok(None);
        }
        let is_seen = |id: u32| {
            self.is_seen.get(id as usize / 64).is_some_and(|word| word >> (id % 64) & 1 == 1)
        };
        let candidates = list.logits.iter().zip(list.ids).map(|(&logit, &id)| {
            let id = id as u32;
            // The device has no infinities.
            let logit = if logit <= IMPOSSIBLE { f32::NEG_INFINITY } else { logit };
            Candidate { id, weight: if is_seen(id) { self.penalised(logit) } else { logit } }
        });
        let mut candidates: Vec<Candidate> = candidates.collect();
        let is_penalised = !self.seen.is_empty();
        if is_penalised {
            candidates.sort_unstable_by(Candidate::order);
        }
        // All others are at most as likely as the last of the list. A token with that very logit may have others of
        // lower ids beside it.
        let is_certain = |candidate: &Candidate| candidate.weight > least;
        let highest = candidates[0];
        if options.temperature == 0.0 {
            // Unpenalised, the first of the list has the lowest id among equals.
            let is_first = is_certain(&highest) || !is_penalised;
            return Ok(is_first.then_some(highest.id));
        }
        let top_k = options.top_k;
        if top_k > 0 {
            let Some(last) = candidates.get(top_k - 1).filter(|last| is_certain(last)) else {
                return Ok(None);
            };
            let last = last.weight;
            candidates.retain(|candidate| candidate.weight >= last);
        } else if is_penalised {
            return Ok(None);
        }
        self.candidates = candidates;
        let listed = self.weigh(highest.weight);
        let total = if top_k > 0 { listed } else { f64::from(list.weight) };
        let Some(total) = self.keep_listed(total) else { return Ok(None) };
        Ok(Some(self.draw(total)))
    }

    /// Keeps what top-p and min-p keep, given what all tokens weigh; `None` where they may keep tokens beyond the list.
    fn keep_listed(&mut self, total: f64) -> Option<f64> {
        let options = &self.options;
        let min_p = options.min_p;
        let is_whole = options.top_k > 0;
        if options.top_p < 1.0 {
            let wanted = f64::from(options.top_p) * total;
            let (mut kept, mut sum) = (0, 0.0);
            while kept < self.candidates.len() && sum < wanted {
                sum += f64::from(self.candidates[kept].weight);
                kept += 1;
            }
            if sum < wanted && !is_whole {
                return None;
            }
            self.candidates.truncate(kept);
        } else if !is_whole {
            if self.candidates.last().is_none_or(|last| last.weight >= min_p) {
                return None;
            }
            // As logits come.
            self.candidates.sort_unstable_by_key(|candidate| candidate.id);
        }
        let sum = self.candidates.iter().map(|candidate| f64::from(candidate.weight)).sum();
        Some(self.keep_min_p(sum))
    }
}

/// Whether options keep only tokens that are likely enough.
fn is_filtered(options: &super::SamplingOptions) -> bool {
    options.top_p < 1.0 || options.min_p > 0.0
}
