//! Attention of few tokens with long contexts: each context is split over cubes, whose results are merged.
//!
//! - The split of a context follows from its length, which is read on the device; the number of splits is fixed.
//! - Short contexts are one split each, which leaves attention itself: nothing is merged.
//! - The query heads that share a key head are computed together, so that the cache is read once.
//! - A split leaves, for each head, the largest score, the sum of weights, and the sum of weighted values.

#![expect(unsafe_code, reason = "kernels are launched without checks of every index")]

mod matrix;
mod merge;
mod newest;
mod portable;
mod split;

#[cfg(test)]
mod tests;

use cubecl::prelude::*;
use ir::op::Attention;
use ir::tensor::DType;
use ir::workspace;

use self::split::Split;
use super::append::Append;
use super::{Cache, Factors, Reach, SHORT_CONTEXT, Shape, Tokens};
use crate::kernels::gpu::ahead::{Region, argument};
use crate::kernels::gpu::device::{Gpu, Span, element};
use crate::kernels::gpu::instructions::PLANE;
use crate::kernels::gpu::order::Order;
use crate::kernels::gpu::warpgroup::RightOperands;

/// Attention of one token of each sequence, or of few.
pub struct Decode<'a> {
    /// Heads, scale, window and cap.
    pub attention: &'a Attention,
    /// Keys and values, those of the run's tokens among them.
    pub cache: Cache<'a>,
    /// The run; `parts` is not read.
    pub tokens: Tokens<'a>,
    /// f32 `[tokens, heads · head_dim]`, as `append` left them; not read where something is fresh.
    pub queries: &'a Span,
    /// What is appended first, one token of each sequence, where [`Gpu::decode_appends`].
    pub fresh: Option<&'a Append<'a>>,
    /// What is asked for ahead, where matrix instructions serve.
    pub ahead: &'a [Region],
    /// At least `partial_bytes` of [`workspace::Workspace`].
    pub workspace: &'a Span,
    /// How attention lies where that is not row after row: in bf16, where [`Gpu::decode_appends`].
    pub order: Option<RightOperands>,
}

/// Where splits leave their results.
struct Partial {
    /// f32 `[tokens, heads, splits, head_dim]`: weighted values; attention, as it is asked for, where there is one
    /// split.
    values: Span,
    /// f32 `[tokens, heads, splits, 2]`: largest score, sum of weights; nothing where there is one split.
    stats: Span,
}

impl Partial {
    /// Bytes of the values and of the stats.
    fn bytes(attention: &Attention, tokens: usize, splits: usize) -> [usize; 2] {
        let terms = workspace::attention_terms(attention, tokens as u32, splits as u32);
        terms.map(|bytes| bytes as usize)
    }
}

impl Gpu {
    /// Whether decode can append in its own launch.
    pub fn decode_appends(&self, attention: &Attention, cache: &Cache<'_>) -> bool {
        matrix::serves(attention.head_dim) && self.multiplies(cache.element)
    }

    /// Writes attention to `out`, f32 `[tokens, heads · head_dim]` or as the call says; rows that pad the run become
    /// zeros.
    pub fn decode(&self, call: &Decode<'_>, out: &Span) {
        self.decode_split(call, self.splits(call.attention, &call.tokens), out);
    }

    fn decode_split(&self, call: &Decode<'_>, splits: usize, out: &Span) {
        let shape = Shape::new(call.attention, &call.cache);
        let split = Split { splits: splits as u32, window: shape.window };
        let [values, stats] = Partial::bytes(call.attention, call.tokens.tokens, splits);
        let is_whole = splits == 1;
        let partial = Partial {
            values: if is_whole { out.clone() } else { call.workspace.part(0, values) },
            stats: call.workspace.part(values, stats),
        };
        if self.decode_appends(call.attention, &call.cache) {
            self.decode_matrix(call, shape, split, &partial);
        } else {
            assert!(
                call.fresh.is_none() && call.order.is_none(),
                "decode appends on no device without matrix instructions, and writes no operands"
            );
            self.decode_portable(call, shape, split, &partial);
        }
        if !is_whole {
            self.merge(call, shape, split, &partial, out);
        }
    }

    /// Into how many parts each context of a run is split: short ones into one, others into as many as fill the
    /// multiprocessors once.
    fn splits(&self, attention: &Attention, tokens: &Tokens<'_>) -> usize {
        /// Cubes that a multiprocessor holds at once: 128 units of up to 168 registers, heads of 128 elements.
        const CUBES: usize = 3;
        let is_narrow = attention.window.is_some_and(|window| window as usize <= SHORT_CONTEXT);
        if tokens.reach == Reach::Short || is_narrow {
            return 1;
        }
        let tokens = tokens.tokens;
        let most = workspace::attention_splits(attention.kv_heads, tokens as u32) as usize;
        let cubes = self.processors() as usize * CUBES;
        (cubes / (attention.kv_heads as usize * tokens.max(1))).clamp(1, most)
    }

    fn decode_matrix(&self, call: &Decode<'_>, shape: Shape, split: Split, partial: &Partial) {
        let Decode { cache, tokens, .. } = call;
        let is_bf16 = cache.element == DType::Bf16;
        let kept = matrix::Rows::new(shape, split, is_bf16, tokens.tokens, self.processors());
        let rows = tokens.tokens * shape.heads as usize;
        let cached = shape.cached(cache.blocks) / 8;
        let factors = Factors::new(call.attention);
        let operands = call.order.filter(|_| split.is_whole());
        let order = Order::of(operands);
        let made = order.element();
        let made_rows = operands
            .map_or(rows * split.splits as usize, |order| order.count() * shape.heads as usize);
        let across = shape.kv_heads * kept.chunks;
        // Cubes beyond the splits ask for what comes next, so that every processor takes part in that.
        let is_asking = !call.ahead.is_empty();
        let wanted = if is_asking { self.processors() } else { 0 };
        let asking = wanted.div_ceil(across * tokens.tokens as u32);
        let queries = call.fresh.map_or(call.queries, |append| append.queries);
        // SAFETY: every index lies within its argument: heads, splits and tokens by the grid, cache rows because the
        // batch was checked against the cache's blocks.
        unsafe {
            matrix::decode::launch_unchecked(
                &self.client,
                CubeCount::Static(across, split.splits.max(asking), tokens.tokens as u32),
                CubeDim::new_2d(PLANE, kept.planes),
                queries.argument(rows * shape.head_dim as usize, 4),
                call.fresh.map(Append::fresh).into(),
                cache.keys.argument(cached, 16),
                cache.values.argument(cached, 16),
                tokens.sequence.argument(tokens.tokens, 4),
                tokens.position.argument(tokens.tokens, 4),
                tokens.blocks.argument(tokens.sequences * tokens.max_blocks, 4),
                partial.values.argument(made_rows * shape.head_dim as usize, made.bytes() as usize),
                partial.stats.argument(rows * split.splits as usize * 2, 4),
                argument(call.ahead),
                factors.inner,
                factors.outer,
                tokens.max_blocks as u32,
                shape,
                split,
                kept,
                order,
                element(made),
            );
        }
    }

    fn decode_portable(&self, call: &Decode<'_>, shape: Shape, split: Split, partial: &Partial) {
        let Decode { cache, tokens, .. } = call;
        let element_bytes = cache.element.bytes() as usize;
        let lanes =
            portable::Lanes::new(shape, self.plane(), self.vector_size(element_bytes, shape));
        let (rows, size) = (tokens.tokens * shape.heads as usize, lanes.vector as usize);
        let head_dim = shape.head_dim as usize;
        let cached = shape.cached(cache.blocks) / size;
        let factors = Factors::new(call.attention);
        // SAFETY: every index lies within its argument: heads, splits and tokens by the grid, cache rows because the
        // batch was checked against the cache's blocks.
        unsafe {
            portable::decode::launch_unchecked(
                &self.client,
                CubeCount::Static(
                    shape.kv_heads * lanes.chunks,
                    split.splits,
                    tokens.tokens as u32,
                ),
                CubeDim::new_2d(lanes.plane, portable::PLANES),
                size,
                call.queries.argument(rows * head_dim / size, 4 * size),
                cache.keys.argument(cached, element_bytes * size),
                cache.values.argument(cached, element_bytes * size),
                tokens.sequence.argument(tokens.tokens, 4),
                tokens.position.argument(tokens.tokens, 4),
                tokens.blocks.argument(tokens.sequences * tokens.max_blocks, 4),
                partial.values.argument(rows * split.splits as usize * head_dim, 4),
                partial.stats.argument(rows * split.splits as usize * 2, 4),
                factors.inner,
                factors.outer,
                tokens.max_blocks as u32,
                shape,
                split,
                lanes,
                self.is_cuda(),
                element(cache.element),
            );
        }
    }

    /// Elements that are loaded at once: 16 bytes, but no more than 4 where vectors are those of WGSL.
    fn vector_size(&self, element_bytes: usize, shape: Shape) -> u32 {
        let most = if self.is_cuda() { 16 / element_bytes as u32 } else { 4 };
        most.min(1 << shape.head_dim.trailing_zeros())
    }
}
