//! What a run tells a device: lists of 32-bit integers, one behind the other.

use super::{aligned, product};
use crate::plan::{Plan, Program};

/// The most of each thing that a run tells a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunSizes {
    /// Tokens of all sequences.
    pub tokens: u32,
    /// Rows whose logits are wanted.
    pub rows: u32,
    /// Sequences.
    pub sequences: u32,
    /// Cache blocks of one sequence.
    pub blocks: u32,
}

/// One of the lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunPart {
    /// Id of each token.
    Token,
    /// The position of each token in its sequence.
    Position,
    /// The sequence of each token.
    Sequence,
    /// Which rows are wanted.
    Wanted,
    /// One over the temperature of each wanted row, where the run gives shortlists.
    InverseTemperature,
    /// First token, tokens and past of each sequence.
    Parts,
    /// Numbers from 0 on: the rows of a rotation table that is made for one run.
    Counting,
    /// One more than the run's number: flags are 0 at first.
    Turn,
    /// The cache blocks of each sequence: by far the most, so that a run of few sequences tells little.
    Blocks,
}

impl RunSizes {
    /// The largest over all programs.
    pub fn of(plan: &Plan) -> Self {
        let most = |size: fn(&Program) -> u32| plan.programs.iter().map(size).max().unwrap_or(0);
        Self {
            tokens: most(|program| program.max.tokens),
            rows: most(|program| program.max.rows),
            sequences: most(|program| program.max_sequences),
            blocks: plan.model.context.div_ceil(plan.model.block_tokens.max(1)),
        }
    }

    /// Bytes of all lists.
    pub fn bytes(self) -> u64 {
        RunPart::ALL.into_iter().map(|part| part.bytes(self)).fold(0, u64::saturating_add)
    }
}

impl RunPart {
    /// All lists, in the order in which they lie. The blocks are the last, so that what a run of few sequences has no
    /// use for is left out.
    pub const ALL: [Self; 9] = [
        Self::Token,
        Self::Position,
        Self::Sequence,
        Self::Wanted,
        Self::InverseTemperature,
        Self::Parts,
        Self::Counting,
        Self::Turn,
        Self::Blocks,
    ];

    /// The most integers in it.
    pub fn count(self, sizes: RunSizes) -> u64 {
        let RunSizes { tokens, rows, sequences, blocks } = sizes;
        match self {
            Self::Token | Self::Position | Self::Sequence | Self::Counting => u64::from(tokens),
            Self::Wanted => u64::from(rows),
            Self::InverseTemperature => u64::from(sequences),
            Self::Parts => product(&[sequences], 3),
            Self::Blocks => product(&[sequences, blocks], 1),
            Self::Turn => 1,
        }
    }

    /// Where it starts, in bytes.
    pub fn start(self, sizes: RunSizes) -> u64 {
        let before = Self::ALL.into_iter().take_while(|part| *part != self);
        before.map(|part| part.bytes(sizes)).fold(0, u64::saturating_add)
    }

    /// Its bytes, with what lies behind it up to the next one.
    pub fn bytes(self, sizes: RunSizes) -> u64 {
        aligned(self.count(sizes).saturating_mul(4))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_blocks_come_last() {
        assert_eq!(RunPart::ALL.last(), Some(&RunPart::Blocks));
    }
}
