//! Which part of a token's context each split takes.

use cubecl::prelude::*;

use crate::kernels::gpu::attention::paging::first_seen;

/// A part is a multiple of this many tokens, and no shorter but at the end.
pub(super) const LEAST: u32 = 32;

/// Tokens that lie together in the cache however large its blocks are; parts start at a multiple of it.
pub(super) const RUN: u32 = 16;

/// How contexts are split.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Split {
    /// Parts at most.
    pub splits: u32,
    /// Tokens seen at most.
    pub window: u32,
}

impl Split {
    /// Whether the only part of a context is all of it.
    pub(super) fn is_whole(self) -> bool {
        self.splits == 1
    }
}

/// What a token sees and how it is split.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Parts {
    /// The first token that is seen.
    pub begin: u32,
    /// Where parts start to be counted: at or before `begin`.
    pub base: u32,
    /// Behind the last token that is seen.
    pub end: u32,
    /// Tokens of a part.
    pub share: u32,
}

/// The parts of the context of a token; none for one that pads the run.
#[cube]
pub(super) fn parts(sequence: i32, position: i32, #[comptime] split: Split) -> Parts {
    let mut begin = 0u32;
    let mut end = 0u32;
    if sequence >= 0 {
        let position = u32::cast_from(position);
        begin = first_seen(position, split.window);
        end = position + 1;
    }
    let base = begin / RUN * RUN;
    let splits = comptime!(split.splits);
    let share = (end - base).div_ceil(splits).div_ceil(LEAST) * LEAST;
    Parts { begin, base, end, share }
}
