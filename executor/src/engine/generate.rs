//! Generating: feed, choose a token of each sequence, feed again.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;

use super::{Engine, SequenceId};

/// How long a generation took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timings {
    /// Tokens fed before the first choice.
    pub prompt_tokens: usize,
    /// From the start to the first logits.
    pub prompt: Duration,
    /// Tokens fed after the first choice.
    pub decoded_tokens: usize,
    /// From the first logits to the last, choosing included.
    pub decode: Duration,
    /// Whether it was stopped by the abort flag.
    pub is_aborted: bool,
}

impl Engine {
    /// Feeds everything appended to `ids`, then one token a sequence until all have ended.
    ///
    /// `choose` gets the index of the sequence and the logits after its last token, and returns the next
    /// token, or `None` where the sequence ends. It is called in the order of `ids`. Sequences stay open,
    /// with everything that was fed. Raising `abort` ends generation within the step of a run; tokens that were
    /// not fed whole then wait to be fed again.
    ///
    /// # Errors
    /// As [`Engine::advance`] and [`Engine::append`], or when `choose` fails.
    pub fn generate(
        &mut self,
        ids: &[SequenceId],
        abort: &AtomicBool,
        mut choose: impl FnMut(usize, &[f32]) -> Result<Option<u32>>,
    ) -> Result<Timings> {
        let mut timings = Timings::default();
        let mut active: Vec<usize> = (0..ids.len()).collect();
        let mut is_prompt = true;
        let mut start = Instant::now();
        while !active.is_empty() {
            if abort.load(Ordering::Relaxed) {
                timings.is_aborted = true;
                break;
            }
            let fed: Vec<SequenceId> = active.iter().map(|&index| ids[index]).collect();
            let tokens: usize = fed.iter().map(|&id| self.unfed(id)).sum();
            let mut chosen = Vec::new();
            let is_fed = self.feed(&fed, false, abort, |position, _, logits| {
                let now = Instant::now();
                if is_prompt && chosen.is_empty() {
                    timings.prompt = now - start;
                    start = now;
                }
                let index = active[position];
                chosen.push((index, choose(index, logits)));
            })?;
            if !is_fed {
                timings.is_aborted = true;
                break;
            }
            if is_prompt {
                timings.prompt_tokens = tokens;
            } else {
                timings.decoded_tokens += tokens;
                timings.decode = start.elapsed();
            }
            is_prompt = false;
            active.clear();
            for (index, choice) in chosen {
                if let Some(token) = choice? {
                    self.append(ids[index], &[token])?;
                    active.push(index);
                }
            }
        }
        Ok(timings)
    }

    /// Tokens that were appended and not yet fed.
    fn unfed(&self, id: SequenceId) -> usize {
        self.sequences.get(&id).map_or(0, |sequence| sequence.tokens.len() - sequence.cached)
    }
}
