//! The engine: sequences of tokens, turned into batches and runs.
//!
//! - A sequence owns its cache blocks until it is closed.
//! - What a run caches is counted when the run is started: lanes work through runs in order.

mod blocks;
mod feed;
mod generate;
mod measure;

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;

use anyhow::{Context as _, Result, ensure};
use ir::op::Rope;
use ir::plan::Plan;

use self::blocks::Blocks;
use self::feed::Wants;
pub use self::generate::{Choice, Chooser, Timings};
pub use self::measure::Perplexity;
use crate::executor::Executor;

/// Sequences over one executor.
pub struct Engine {
    executor: Executor,
    blocks: Blocks,
    sequences: BTreeMap<SequenceId, Sequence>,
    next: u64,
    /// Stages that can work on different runs of a prompt at a time.
    stages: usize,
    /// Whether runs of short prompts are padded to few lengths.
    pads_prompts: bool,
}

/// Names an open sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(u64);

/// Tokens, and how many of them are cached.
#[derive(Default)]
struct Sequence {
    tokens: Vec<u32>,
    cached: usize,
    /// Tokens of the sequence when the latest of its keys were rotated.
    rope_length: usize,
    blocks: Vec<u32>,
}

impl Sequence {
    /// Takes what is cached for missing where its keys were rotated otherwise than those to come.
    fn forget_other_keys(&mut self, ropes: &[Rope]) {
        let [before, now] = [self.rope_length, self.tokens.len()].map(|length| length as u32);
        if !ropes.iter().all(|rope| rope.frequencies.keep_keys(before, now)) {
            self.cached = 0;
        }
        self.rope_length = self.tokens.len();
    }
}

impl Engine {
    /// An engine with an empty cache.
    pub fn new(executor: Executor) -> Self {
        let model = &executor.plan().model;
        let blocks = Blocks::new(model.blocks, model.block_tokens);
        let stages = feed::stages(executor.plan());
        let pads_prompts = executor.pads_prompts();
        Self { executor, blocks, sequences: BTreeMap::new(), next: 0, stages, pads_prompts }
    }

    /// The plan that is run.
    pub fn plan(&self) -> &Plan {
        self.executor.plan()
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

    /// Forgets all tokens beyond the first `length`; they need not be fed again.
    pub fn truncate(&mut self, id: SequenceId, length: usize) {
        if let Some(sequence) = self.sequences.get_mut(&id) {
            sequence.tokens.truncate(length);
            sequence.cached = sequence.cached.min(length);
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
    /// they were before.
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
