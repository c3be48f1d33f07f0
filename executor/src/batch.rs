//! What one run is fed: the tokens of one or several sequences, laid out one after another.

use std::collections::BTreeSet;

use anyhow::{Result, bail, ensure};
use ir::plan::{ModelInfo, Program};
use ir::tensor::Extent;

/// Implicit input of every operation of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    tokens: Vec<u32>,
    positions: Vec<u32>,
    parts: Vec<Part>,
    rows: Vec<u32>,
    inverse_temperatures: Option<Vec<f32>>,
}

/// The tokens of one sequence that a run is fed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Index of its first token in the batch.
    pub first_token: usize,
    /// Number of its tokens in the batch.
    pub tokens: usize,
    /// Number of its tokens that are cached already.
    pub past: usize,
    /// Length that rotary frequencies which follow the length are worked out for: that of the
    /// sequence when this request's prefill ends; one more than the position when it decodes.
    pub rope_length: usize,
    /// Cache blocks that hold its tokens, in order; enough for `past + tokens`.
    pub blocks: Vec<u32>,
}

impl Batch {
    /// Appends tokens of a sequence of which `past` tokens are cached in `blocks`. Logits are wanted of
    /// the last of them only, or of all.
    pub fn push(
        &mut self,
        tokens: &[u32],
        past: usize,
        rope_length: usize,
        blocks: &[u32],
        wants_all: bool,
    ) {
        let first_token = self.tokens.len();
        self.tokens.extend_from_slice(tokens);
        self.positions.extend((past..past + tokens.len()).map(|position| position as u32));
        let end = self.tokens.len();
        let first_wanted = if wants_all { first_token } else { end.saturating_sub(1) };
        self.rows.extend((first_wanted..end).map(|row| row as u32));
        self.parts.push(Part {
            first_token,
            tokens: tokens.len(),
            past,
            rope_length,
            blocks: blocks.to_vec(),
        });
    }

    /// Appends tokens of no sequence up to `count` in all, so that runs of prompts of other lengths make the same
    /// launches. Nobody reads what is made of them.
    pub fn pad(&mut self, count: usize) {
        let count = count.max(self.tokens.len());
        self.tokens.resize(count, 0);
        self.positions.resize(count, 0);
    }

    /// Lets a device that can give the most likely tokens of each wanted row instead of its logits;
    /// `inverse_temperatures` has one over the temperature that they will be weighed at, for each wanted row.
    pub fn allow_shortlists(&mut self, inverse_temperatures: Vec<f32>) {
        self.inverse_temperatures = Some(inverse_temperatures);
    }

    /// Number of tokens that belong to sequences; others follow them.
    pub fn fed(&self) -> usize {
        self.parts.iter().map(|part| part.tokens).sum()
    }

    /// Whether one token of each sequence is fed.
    pub fn is_decode(&self) -> bool {
        self.parts.iter().all(|part| part.tokens == 1)
    }

    /// Token ids.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// For each token its position in its sequence.
    pub fn positions(&self) -> &[u32] {
        &self.positions
    }

    /// Sequences in the order of their tokens.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Indices of the tokens whose logits are wanted.
    pub fn rows(&self) -> &[u32] {
        &self.rows
    }

    /// One over the temperature of each wanted row, where shortlists will do.
    pub fn inverse_temperatures(&self) -> Option<&[f32]> {
        self.inverse_temperatures.as_deref()
    }

    /// Sizes of the run.
    pub fn extent(&self) -> Extent {
        Extent { tokens: self.tokens.len() as u32, rows: self.rows.len() as u32 }
    }

    /// Whether a program of a model takes it: kernels go to the rows of tokens, positions and blocks without looking.
    pub(crate) fn check(&self, program: &Program, model: &ModelInfo) -> Result<()> {
        let (extent, name) = (self.extent(), &program.name);
        ensure!(extent.tokens > 0 && extent.rows > 0, "a run of {name} is fed no tokens");
        ensure!(
            extent.tokens <= program.max.tokens && extent.rows <= program.max.rows,
            "{name} takes {} tokens and {} rows, not {} and {}",
            program.max.tokens,
            program.max.rows,
            extent.tokens,
            extent.rows
        );
        ensure!(
            self.parts.len() <= program.max_sequences as usize,
            "{name} takes {} sequences, not {}",
            program.max_sequences,
            self.parts.len()
        );
        if let Some(inverse_temperatures) = &self.inverse_temperatures {
            ensure!(
                inverse_temperatures.len() == self.rows.len()
                    && inverse_temperatures.len() <= self.parts.len(),
                "{} temperatures are given for {} rows of {} sequences",
                inverse_temperatures.len(),
                self.rows.len(),
                self.parts.len()
            );
        }
        let vocabulary = model.vocabulary;
        if let Some(token) = self.tokens.iter().find(|&&token| token >= vocabulary) {
            bail!("token id {token} is not in the vocabulary of {vocabulary}");
        }
        self.check_blocks(model)
    }

    /// Whether each sequence has blocks that exist, and each block that is written belongs to one of them.
    fn check_blocks(&self, model: &ModelInfo) -> Result<()> {
        let block_tokens = model.block_tokens as usize;
        let mut written = BTreeSet::new();
        for part in &self.parts {
            let length = part.past + part.tokens;
            ensure!(
                length <= model.context as usize,
                "{length} tokens of a sequence are more than the context of {}",
                model.context
            );
            ensure!(
                part.tokens > 0 && length <= part.blocks.len() * block_tokens,
                "{length} tokens of a sequence lie beyond its {} cache blocks",
                part.blocks.len()
            );
            if let Some(block) = part.blocks.iter().find(|&&block| block >= model.blocks) {
                bail!("there are {} cache blocks, and none with id {block}", model.blocks);
            }
            for &block in &part.blocks[part.past / block_tokens..length.div_ceil(block_tokens)] {
                ensure!(written.insert(block), "cache block {block} would be written twice");
            }
        }
        Ok(())
    }
}
