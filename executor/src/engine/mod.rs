//! The engine: sequences of tokens, turned into batches and runs.
//!
//! - A sequence owns the cache blocks of its tokens until they are truncated or it is closed. One that has ended while
//!   others go on is closed by nobody but the caller.
//! - What a run caches is counted when the run is started: lanes work through runs in order.

mod blocks;
mod feed;
mod generate;
mod measure;
mod stages;

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;

use anyhow::{Context as _, Result, ensure};
use ir::op::Rope;
use ir::plan::{ModelInfo, Plan};

use self::blocks::Blocks;
use self::feed::Wants;
pub use self::generate::{Choice, Chooser, Timings};
pub use self::measure::Perplexity;
pub use self::stages::{nanos_in_stages, nanos_in_turn};
use crate::executor::Executor;

/// Sequences over one executor.
pub struct Engine {
    executor: Executor,
    blocks: Blocks,
    sequences: BTreeMap<SequenceId, Sequence>,
    next: u64,
    /// Stages that can work on different runs of a prompt at a time.
    stages: usize,
}

/// Names an open sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(u64);

/// Tokens, and how many of them are cached.
#[derive(Default)]
struct Sequence {
    tokens: Vec<u32>,
    cached: usize,
    /// Tokens of the sequence when the first and when the latest of its keys were rotated.
    rope_lengths: [usize; 2],
    blocks: Vec<u32>,
}

impl Sequence {
    /// Takes what is cached for missing where its keys were rotated otherwise than those to come.
    fn forget_other_keys(&mut self, ropes: &[Rope]) {
        let now = self.tokens.len();
        let before = self.rope_lengths.map(|length| length as u32);
        let is_next = now == self.rope_lengths[1] || now == self.rope_lengths[1] + 1;
        let is_decode = self.cached + 1 == now && is_next;
        let keep = |rope: &Rope| rope.frequencies.keep_keys(before, now as u32, is_decode);
        if !ropes.iter().all(keep) {
            self.cached = 0;
        }
        let first = if self.cached == 0 { now } else { self.rope_lengths[0] };
        self.rope_lengths = [first, now];
    }
}

impl Engine {
    /// An engine with an empty cache.
    pub fn new(executor: Executor) -> Self {
        let model = &executor.plan().model;
        let blocks = Blocks::new(model.blocks, model.block_tokens);
        let stages = stages::stages(executor.plan());
        Self { executor, blocks, sequences: BTreeMap::new(), next: 0, stages }
    }

    /// The plan that is run.
    pub fn plan(&self) -> &Plan {
        self.executor.plan()
    }

    /// Stages that can work on different runs of a prompt at a time.
    pub fn stages(&self) -> usize {
        self.stages
    }

    /// What runs the plan.
    pub fn executor(&self) -> &Executor {
        &self.executor
    }

    /// Opens an empty sequence.
    pub fn open(&mut self) -> SequenceId {
        let id = SequenceId(self.next);
        self.next += 1;
        self.sequences.insert(id, Sequence::default());
        id
    }

    /// Appends tokens that are fed by the next [`Engine::advance`].
    ///
    /// # Errors
    /// When a token is not in the vocabulary, or the sequence grows beyond the context.
    pub fn append(&mut self, id: SequenceId, tokens: &[u32]) -> Result<()> {
        let model = &self.executor.plan().model;
        check_tokens(tokens, model.vocabulary)?;
        let sequence = self.sequences.get_mut(&id).context("the sequence is closed")?;
        let length = sequence.tokens.len() + tokens.len();
        ensure!(
            length <= model.context as usize,
            "{length} tokens are more than the plan's context of {}: feed fewer, or compile it with --context {length} \
             or more if the model has as much",
            model.context
        );
        sequence.tokens.extend_from_slice(tokens);
        Ok(())
    }

    /// Tokens of a sequence.
    pub fn tokens(&self, id: SequenceId) -> &[u32] {
        self.sequences.get(&id).map_or(&[], |sequence| &sequence.tokens)
    }

    /// Forgets all tokens beyond the first `length` and frees their cache blocks; the first need not be fed again.
    pub fn truncate(&mut self, id: SequenceId, length: usize) {
        if let Some(sequence) = self.sequences.get_mut(&id) {
            sequence.tokens.truncate(length);
            sequence.cached = sequence.cached.min(length);
        }
        self.release_uncached(id);
    }

    /// Frees the blocks of a sequence beyond what it has cached.
    fn release_uncached(&mut self, id: SequenceId) {
        if let Some(sequence) = self.sequences.get_mut(&id) {
            self.blocks.release_beyond(&mut sequence.blocks, sequence.cached);
        }
    }

    /// Ends a sequence and frees its cache blocks.
    pub fn close(&mut self, id: SequenceId) {
        if let Some(sequence) = self.sequences.remove(&id) {
            self.blocks.release(sequence.blocks);
        }
    }

    /// Feeds everything appended to these sequences and returns the logits after the last token of each,
    /// in their order. As many runs are under way at a time as the plan has lanes, and one more.
    ///
    /// # Errors
    /// When the cache is full, nothing was appended to a sequence, or a lane fails. The sequences are then as
    /// they were before, but that they may have nothing cached.
    pub fn advance(&mut self, ids: &[SequenceId]) -> Result<Vec<Vec<f32>>> {
        let mut last = vec![Vec::new(); ids.len()];
        let never = AtomicBool::new(false);
        self.feed(ids, Wants::Last, &never, |index, _, row| {
            last[index] = row.logits()?.to_vec();
            Ok(())
        })?;
        Ok(last)
    }
}

/// Whether the cache holds so many sequences of so many tokens each at once.
///
/// # Errors
/// Where it is too small.
pub fn check_cache(model: &ModelInfo, sequences: usize, tokens: usize) -> Result<()> {
    let mut blocks = Blocks::new(model.blocks, model.block_tokens);
    (0..sequences).try_for_each(|_| blocks.reserve(&mut Vec::new(), tokens))
}

/// Whether all tokens are in the vocabulary.
pub fn check_tokens(tokens: &[u32], vocabulary: u32) -> Result<()> {
    match tokens.iter().find(|&&token| token >= vocabulary) {
        Some(token) => Err(anyhow::anyhow!(
            "token id {token} is out of range: the vocabulary of the plan's model has {vocabulary} tokens; the ids, or \
             the tokenizer that made them, belong to another model"
        )),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use ir::op::{Frequencies, Pairing};

    use super::*;

    /// How many tokens are still cached when a sequence that has got some more is fed.
    fn kept(sequence: &mut Sequence, more: usize) -> usize {
        let frequencies = Frequencies::Dynamic { base: 1e4, factor: 2.0, original_tokens: 8 };
        let rope = Rope { pairing: Pairing::Halves, dims: 4, magnitude: 1.0, frequencies };
        sequence.tokens.resize(sequence.tokens.len() + more, 0);
        sequence.forget_other_keys(&[rope]);
        let kept = sequence.cached;
        sequence.cached = sequence.tokens.len();
        kept
    }

    fn truncate(sequence: &mut Sequence, length: usize) {
        sequence.tokens.truncate(length);
        sequence.cached = length;
    }

    #[test]
    fn a_prompt_beyond_the_unscaled_length_is_computed_with_all_that_is_before_it() {
        let mut sequence = Sequence::default();
        // Nothing is scaled up to 8 tokens.
        assert_eq!([5, 1, 2].map(|more| kept(&mut sequence, more)), [0, 5, 6]);
        // Decoding goes on behind what is cached.
        assert_eq!([1, 1].map(|more| kept(&mut sequence, more)), [8, 9]);
        assert_eq!([3, 1, 1].map(|more| kept(&mut sequence, more)), [0, 13, 14]);
        // Keys of several lengths serve no prompt, even one of the latest length.
        truncate(&mut sequence, 12);
        assert_eq!(kept(&mut sequence, 3), 0);
        // A token that takes the place of several is a prompt.
        truncate(&mut sequence, 10);
        assert_eq!(kept(&mut sequence, 1), 0);
        // Nor do keys that were scaled serve a short text.
        truncate(&mut sequence, 4);
        assert_eq!([2, 2].map(|more| kept(&mut sequence, more)), [0, 6]);
    }

    #[test]
    fn a_token_that_is_fed_again_is_no_prompt() {
        let mut sequence = Sequence::default();
        assert_eq!([20, 1].map(|more| kept(&mut sequence, more)), [0, 20]);
        sequence.cached = 20;
        assert_eq!(kept(&mut sequence, 0), 20);
    }

    #[test]
    fn a_cache_holds_whole_blocks_of_each_sequence() {
        let model = ModelInfo {
            name: String::new(),
            architecture: String::new(),
            folder: PathBuf::new(),
            vocabulary: 8,
            context: 64,
            max_sequences: 3,
            block_tokens: 16,
            blocks: 5,
        };
        check_cache(&model, 2, 32).unwrap();
        check_cache(&model, 3, 16).unwrap();
        let full = check_cache(&model, 3, 17).unwrap_err().to_string();
        assert!(full.contains("the cache is full"), "{full}");
    }
}
