//! Generating: feed, choose a token of each sequence, feed again.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::feed::Wants;
use super::{Engine, SequenceId};
use crate::run::Row;

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

/// Chooses the next token of each sequence.
pub trait Chooser {
    /// One over the temperature of a sequence's next choice, where the most likely tokens will probably do for it.
    fn inverse_temperature(&self, index: usize) -> Option<f32>;

    /// The next token of a sequence, from what follows its last one: logits, or the most likely tokens if all sequences
    /// that are fed would have them.
    ///
    /// # Errors
    /// Whatever ends the generation.
    fn choose(&mut self, index: usize, row: Row<'_>) -> Result<Choice>;
}

/// What is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// This token is next.
    Token(u32),
    /// The sequence ends.
    End,
    /// The most likely tokens are too few to tell: all logits are needed.
    NeedsLogits,
}

/// A chooser that is given all logits.
struct ByLogits<F>(F);

impl<F: FnMut(usize, &[f32]) -> Result<Option<u32>>> Chooser for ByLogits<F> {
    fn inverse_temperature(&self, _: usize) -> Option<f32> {
        None
    }

    fn choose(&mut self, index: usize, row: Row<'_>) -> Result<Choice> {
        let token = (self.0)(index, row.logits()?)?;
        Ok(token.map_or(Choice::End, Choice::Token))
    }
}

impl Engine {
    /// Feeds everything appended to `ids`, then one token a sequence until all have ended.
    ///
    /// `choose` gets the index of the sequence and the logits after its last token, and returns the next
    /// token, or `None` where the sequence ends. It is called in the order of `ids`. Sequences stay open,
    /// with everything that was fed. Those that have ended keep their cache blocks until they are closed, so that
    /// the cache must hold all of `ids` with their answers. Raising `abort` ends generation within the step of a
    /// run; tokens that were not fed whole then wait to be fed again.
    ///
    /// # Errors
    /// As [`Engine::advance`] and [`Engine::append`], or when `choose` fails.
    pub fn generate(
        &mut self,
        ids: &[SequenceId],
        abort: &AtomicBool,
        choose: impl FnMut(usize, &[f32]) -> Result<Option<u32>>,
    ) -> Result<Timings> {
        self.generate_with(ids, abort, &mut ByLogits(choose))
    }

    /// As [`Engine::generate`], with a chooser that may do without all logits.
    ///
    /// # Errors
    /// As [`Engine::generate`].
    pub fn generate_with(
        &mut self,
        ids: &[SequenceId],
        abort: &AtomicBool,
        chooser: &mut impl Chooser,
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
            let inverse_temperatures: Option<Vec<f32>> =
                active.iter().map(|&index| chooser.inverse_temperature(index)).collect();
            let wants = inverse_temperatures.as_deref().map_or(Wants::Last, Wants::Listed);
            let mut chosen = Vec::new();
            let mut is_fed = self.feed(&fed, wants, abort, |position, _, row| {
                let now = Instant::now();
                if is_prompt && chosen.is_empty() {
                    timings.prompt = now - start;
                    start = now;
                }
                let index = active[position];
                chosen.push((index, chooser.choose(index, row)?));
                Ok(())
            })?;
            if is_fed {
                is_fed = self.choose_again(ids, abort, chooser, &mut chosen)?;
            }
            active.clear();
            for (index, choice) in chosen {
                if let Choice::Token(token) = choice {
                    self.append(ids[index], &[token])?;
                    active.push(index);
                }
            }
            // What was chosen stays so: the chooser counts with it.
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
        }
        Ok(timings)
    }

    /// Feeds the last token of the sequences once more whose most likely tokens were too few to choose from, and lets
    /// all logits decide. Says whether it came to the end.
    fn choose_again(
        &mut self,
        ids: &[SequenceId],
        abort: &AtomicBool,
        chooser: &mut impl Chooser,
        chosen: &mut [(usize, Choice)],
    ) -> Result<bool> {
        let open = |(_, choice): &(usize, Choice)| *choice == Choice::NeedsLogits;
        let places: Vec<usize> =
            chosen.iter().enumerate().filter(|(_, chosen)| open(chosen)).map(|(i, _)| i).collect();
        if places.is_empty() {
            return Ok(true);
        }
        let again: Vec<SequenceId> = places.iter().map(|&place| ids[chosen[place].0]).collect();
        for id in &again {
            if let Some(sequence) = self.sequences.get_mut(id) {
                sequence.cached = sequence.tokens.len() - 1;
            }
        }
        self.feed(&again, Wants::Last, abort, |position, _, row| {
            let (index, choice) = &mut chosen[places[position]];
            *choice = chooser.choose(*index, row)?;
            ensure!(*choice != Choice::NeedsLogits, "all logits are too few to choose from");
            Ok(())
        })
    }

    /// Tokens that were appended and not yet fed.
    pub(super) fn unfed(&self, id: SequenceId) -> usize {
        self.sequences.get(&id).map_or(0, |sequence| sequence.tokens.len() - sequence.cached)
    }
}
