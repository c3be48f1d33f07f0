//! Causal attention of grouped heads over the paged cache of one layer.
//!
//! - A run appends first: heads are normalised and turned, keys and values go into the cache, queries into a span.
//! - Then it attends: `decode` splits the context of few tokens, `prefill` works on tiles of many.
//! - With matrix instructions, `decode` appends by itself.
//! - What a run is about (sequences, positions, lengths, blocks) is read from device memory, so that launches depend
//!   on nothing but the shape of the largest run they serve, and on its reach.
//! - Scores are kept times log2(e): weights are powers of two of their distance to the largest.

pub mod append;
pub mod borrow;
pub mod decode;
mod heads;
mod paging;
pub mod prefill;
mod scores;

#[cfg(test)]
pub(super) mod testing;

use ir::op::Attention;
use ir::tensor::DType;

use super::device::Span;

/// Keys and values of one layer, each `[blocks, kv_heads, block_tokens, head_dim]`.
#[derive(Clone, Copy)]
pub struct Cache<'a> {
    /// Keys, rotated.
    pub keys: &'a Span,
    /// Values.
    pub values: &'a Span,
    /// Type of their elements: f32, f16 or bf16.
    pub element: DType,
    /// Blocks that all sequences share.
    pub blocks: usize,
    /// Tokens of a block, a multiple of 16.
    pub block_tokens: usize,
}

/// What a run is about, in device memory; all numbers are `i32`.
#[derive(Clone, Copy)]
pub struct Tokens<'a> {
    /// Rows of the activations.
    pub tokens: usize,
    /// Rows of `parts` and `blocks`.
    pub sequences: usize,
    /// `[tokens]`: the sequence of each row; −1 for a row that pads the run.
    pub sequence: &'a Span,
    /// `[tokens]`: where the row stands in its sequence.
    pub position: &'a Span,
    /// `[sequences, 3]`: first row, rows, and tokens cached before; no rows for one that pads the run.
    pub parts: &'a Span,
    /// `[sequences, max_blocks]`: the cache blocks of each sequence, in order.
    pub blocks: &'a Span,
    /// Blocks of the longest sequence.
    pub max_blocks: usize,
    /// How far its tokens look back at most.
    pub reach: Reach,
}

/// How long the contexts of a run are: launches that are captured for one reach serve no other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reach {
    /// No context is longer than [`SHORT_CONTEXT`].
    Short,
    /// Contexts have any length.
    Long,
}

/// Tokens of a context that is not split. To read four times 64 tokens one after another takes a cube about as long
/// as it takes to launch a merge and to wait for it, two to three microseconds on an H200.
pub const SHORT_CONTEXT: usize = 256;

impl Reach {
    /// That of a run whose longest context, new tokens included, has `longest` tokens.
    pub fn of(longest: usize) -> Self {
        if longest <= SHORT_CONTEXT { Self::Short } else { Self::Long }
    }
}

/// What a kernel is built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shape {
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    group: u32,
    first_head: u32,
    block_tokens: u32,
    /// The largest number where every earlier token is seen.
    window: u32,
    capped: bool,
}

/// Factors that make a score of a product of query and key.
#[derive(Clone, Copy, Debug)]
struct Factors {
    inner: f32,
    outer: f32,
}

impl Shape {
    /// # Panics
    /// When the cache is one that no 32-bit index reaches the end of, or heads have no keys.
    fn new(attention: &Attention, cache: &Cache<'_>) -> Self {
        let Attention { heads, kv_heads, head_dim, group, first_head, .. } = *attention;
        assert!(
            cache.block_tokens > 0 && cache.block_tokens.is_multiple_of(16),
            "a cache block holds {} tokens, not a multiple of 16",
            cache.block_tokens
        );
        assert!(
            u64::from(first_head) + u64::from(heads) <= u64::from(kv_heads) * u64::from(group),
            "{heads} query heads from {first_head} on have {kv_heads} key heads for {group} each"
        );
        let elements = cache.blocks * cache.block_tokens * (kv_heads * head_dim) as usize;
        assert!(elements < 1 << 32, "a cache of {elements} elements is beyond 32-bit indices");
        Self {
            heads,
            kv_heads,
            head_dim,
            group,
            first_head,
            block_tokens: cache.block_tokens as u32,
            window: attention.window.unwrap_or(u32::MAX),
            capped: attention.soft_cap.is_some(),
        }
    }

    /// Elements of the keys, or of the values.
    fn cached(&self, blocks: usize) -> usize {
        blocks * (self.kv_heads * self.block_tokens * self.head_dim) as usize
    }
}

impl Factors {
    fn new(attention: &Attention) -> Self {
        let log2_e = std::f32::consts::LOG2_E;
        match attention.soft_cap {
            Some(cap) => Self { inner: attention.scale / cap, outer: cap * log2_e },
            None => Self { inner: attention.scale * log2_e, outer: 1.0 },
        }
    }
}
