//! Measuring a model: how well it predicts a text. Measuring the machine: how fast it feeds and decodes.

use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::feed::Wants;
use super::{Engine, SequenceId};

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
        ensure!(tokens.len() > 1, "a perplexity needs at least two tokens, not {}", tokens.len());
        let id = self.open();
        let scored = self.append(id, tokens).and_then(|()| {
            let never = AtomicBool::new(false);
            let (mut sum, mut last_logits) = (0.0, Vec::new());
            self.feed(&[id], Wants::All, &never, |_, position, row| {
                let logits = row.logits()?;
                match tokens.get(position + 1) {
                    Some(&next) => {
                        let of_token = negative_log_likelihood(logits, next);
                        ensure!(
                            of_token.is_finite(),
                            "the logits after token {position} are not all numbers, or make token {next} impossible: \
                             the checkpoint has weights that are no numbers, or the model overflows in the plan's formats"
                        );
                        sum += of_token;
                    }
                    None => last_logits = logits.to_vec(),
                }
                Ok(())
            })?;
            let predicted = tokens.len() - 1;
            Ok(Perplexity { tokens: predicted, nll: sum / predicted as f64, last_logits })
        });
        self.close(id);
        scored
    }

    /// Time of feeding `tokens` made-up tokens to an empty sequence.
    ///
    /// # Errors
    /// As [`Engine::append`] and [`Engine::advance`].
    pub fn time_prefill(&mut self, tokens: usize) -> Result<Duration> {
        let id = self.open();
        let timed = self.feed_made_up(id, tokens);
        self.close(id);
        timed
    }

    /// Time of feeding `tokens` made-up tokens one by one to each of `sequences` sequences that already hold
    /// `depth` tokens, at least one, up to the logits of each or, where a device can tell them, its most likely tokens.
    ///
    /// # Errors
    /// As [`Engine::append`] and [`Engine::advance`].
    pub fn time_decode(
        &mut self,
        sequences: usize,
        depth: usize,
        tokens: usize,
    ) -> Result<Duration> {
        let ids: Vec<SequenceId> = (0..sequences).map(|_| self.open()).collect();
        let timed = ids
            .iter()
            .try_for_each(|&id| self.feed_made_up(id, depth.max(1)).map(drop))
            .and_then(|()| {
                let never = AtomicBool::new(false);
                let greedy = vec![1.0; sequences];
                let start = Instant::now();
                for number in 0..tokens {
                    let token = self.made_up(number);
                    ids.iter().try_for_each(|&id| self.append(id, &[token]))?;
                    self.feed(&ids, Wants::Listed(&greedy), &never, |_, _, _| Ok(()))?;
                }
                Ok(start.elapsed())
            });
        ids.into_iter().for_each(|id| self.close(id));
        timed
    }

    fn feed_made_up(&mut self, id: SequenceId, tokens: usize) -> Result<Duration> {
        let tokens: Vec<u32> = (0..tokens).map(|number| self.made_up(number)).collect();
        self.append(id, &tokens)?;
        let start = Instant::now();
        self.feed(&[id], Wants::Listed(&[1.0]), &AtomicBool::new(false), |_, _, _| Ok(()))?;
        Ok(start.elapsed())
    }

    /// Some token of the vocabulary: a prime step visits all of it.
    fn made_up(&self, number: usize) -> u32 {
        (number as u64 * 7919 % u64::from(self.plan().model.vocabulary.max(1))) as u32
    }
}

/// `−ln softmax(logits)[token]`, summed in 64 bits.
fn negative_log_likelihood(logits: &[f32], token: u32) -> f64 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - largest).exp()).sum();
    sum.ln() - f64::from(logits[token as usize] - largest)
}
