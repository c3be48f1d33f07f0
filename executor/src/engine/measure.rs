//! Measuring a model: how well it predicts a text. Measuring the machine: how fast it feeds and decodes.

use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use super::feed::Wants;
use super::{Engine, SequenceId};
use crate::sample::UNUSABLE_LOGITS;

/// How well a text is predicted.
#[derive(Clone, Debug, PartialEq)]
pub struct Perplexity {
    /// Tokens that were predicted: all but the first.
    pub tokens: usize,
    /// Mean negative log-likelihood of a token, natural logarithm.
    pub nll: f64,
    /// Logits after the last token.
    pub last_logits: Vec<f32>,
}

impl Perplexity {
    /// `exp(nll)`.
    pub fn perplexity(&self) -> f64 {
        self.nll.exp()
    }
}

impl Engine {
    /// Scores a text; rotary frequencies that follow the length are those of the whole.
    ///
    /// # Errors
    /// When it is shorter than two tokens, or as [`Engine::append`] and [`Engine::advance`].
    pub fn perplexity(&mut self, tokens: &[u32]) -> Result<Perplexity> {
        let scored = self.perplexity_unless(tokens, &AtomicBool::new(false))?;
        scored.context("a text was left before its end")
    }

    /// The same; `None` where raising `abort` stopped it.
    ///
    /// # Errors
    /// As [`Engine::perplexity`].
    pub fn perplexity_unless(
        &mut self,
        tokens: &[u32],
        abort: &AtomicBool,
    ) -> Result<Option<Perplexity>> {
        ensure!(tokens.len() > 1, "a perplexity needs at least two tokens, not {}", tokens.len());
        let id = self.open();
        let scored = self.append(id, tokens).and_then(|()| {
            let (mut sum, mut last_logits) = (0.0, Vec::new());
            let is_fed = self.feed(&[id], Wants::All, abort, |_, position, row| {
                let logits = row.logits()?;
                match tokens.get(position + 1) {
                    Some(&next) => {
                        let of_token = negative_log_likelihood(logits, next);
                        ensure!(
                            of_token.is_finite(),
                            "the logits after token {position} are not all numbers, or make token {next} impossible: \
                             {UNUSABLE_LOGITS}"
                        );
                        sum += of_token;
                    }
                    None => last_logits = logits.to_vec(),
                }
                Ok(())
            })?;
            let predicted = tokens.len() - 1;
            let nll = sum / predicted as f64;
            Ok(is_fed.then_some(Perplexity { tokens: predicted, nll, last_logits }))
        });
        self.close(id);
        scored
    }

    /// Time of feeding `tokens` made-up tokens to an empty sequence; `None` where raising `abort` stopped it.
    ///
    /// # Errors
    /// As [`Engine::append`] and [`Engine::advance`].
    pub fn time_prefill(&mut self, tokens: usize, abort: &AtomicBool) -> Result<Option<Duration>> {
        let id = self.open();
        let timed = self.feed_made_up(id, 0, tokens, abort);
        self.close(id);
        timed
    }

    /// Time of feeding `tokens` made-up tokens one by one to each of `sequences` sequences that already hold
    /// `depth` tokens, at least one, up to the logits of each or, where a device can tell them, its most likely tokens;
    /// `None` where raising `abort` stopped it.
    ///
    /// # Errors
    /// As [`Engine::append`] and [`Engine::advance`].
    pub fn time_decode(
        &mut self,
        sequences: usize,
        depth: usize,
        tokens: usize,
        abort: &AtomicBool,
    ) -> Result<Option<Duration>> {
        let ids: Vec<SequenceId> = (0..sequences).map(|_| self.open()).collect();
        let timed = self.decode_made_up(&ids, depth.max(1), tokens, abort);
        ids.into_iter().for_each(|id| self.close(id));
        timed
    }

    fn decode_made_up(
        &mut self,
        ids: &[SequenceId],
        depth: usize,
        tokens: usize,
        abort: &AtomicBool,
    ) -> Result<Option<Duration>> {
        for (number, &id) in ids.iter().enumerate() {
            if self.feed_made_up(id, number, depth, abort)?.is_none() {
                return Ok(None);
            }
        }
        let greedy = vec![1.0; ids.len()];
        let start = Instant::now();
        for place in depth..depth + tokens {
            for (number, &id) in ids.iter().enumerate() {
                self.append(id, &[self.made_up(number, place)])?;
            }
            if !self.feed(ids, Wants::Listed(&greedy), abort, |_, _, _| Ok(()))? {
                return Ok(None);
            }
        }
        Ok(Some(start.elapsed()))
    }

    /// Feeds the first tokens of the made-up sequence of that number.
    fn feed_made_up(
        &mut self,
        id: SequenceId,
        number: usize,
        tokens: usize,
        abort: &AtomicBool,
    ) -> Result<Option<Duration>> {
        let tokens: Vec<u32> = (0..tokens).map(|place| self.made_up(number, place)).collect();
        self.append(id, &tokens)?;
        let start = Instant::now();
        let is_fed = self.feed(&[id], Wants::Listed(&[1.0]), abort, |_, _, _| Ok(()))?;
        Ok(is_fed.then(|| start.elapsed()))
    }

    /// The token at a place of a made-up sequence: a prime step visits all of the vocabulary. At one place all
    /// sequences have others, since those of a mixture that are alike would choose the same experts.
    fn made_up(&self, number: usize, place: usize) -> u32 {
        /// Places from a sequence to the next.
        const APART: usize = 1021;
        let visited = (number * APART + place) as u64;
        (visited * 7919 % u64::from(self.plan().model.vocabulary.max(1))) as u32
    }
}

/// `−ln softmax(logits)[token]`, summed in 64 bits.
fn negative_log_likelihood(logits: &[f32], token: u32) -> f64 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - largest).exp()).sum();
    sum.ln() - f64::from(logits[token as usize] - largest)
}
