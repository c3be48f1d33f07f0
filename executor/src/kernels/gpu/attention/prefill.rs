//! Attention of many tokens of each sequence, tile of queries by tile of keys.
//!
//! - A cube computes one head of some consecutive tokens of one sequence and walks the keys that they see.
//! - Tiles are numbered over all sequences; which tokens a number stands for is found on the device.

#![expect(unsafe_code, reason = "kernels are launched without checks of every index")]

mod matrix;
mod portable;
mod tiles;

#[cfg(test)]
mod tests;

use cubecl::prelude::*;
use ir::op::Attention;
use ir::tensor::DType;

use super::{Cache, Factors, Shape, Tokens};
use crate::kernels::gpu::device::{Gpu, Span, element};
use crate::kernels::gpu::instructions::PLANE;

/// Attention of any number of tokens of each sequence.
pub struct Prefill<'a> {
    /// Heads, scale, window and cap.
    pub attention: &'a Attention,
    /// Keys and values, those of the run's tokens among them.
    pub cache: Cache<'a>,
    /// The run; `sequence` and `position` are not read.
    pub tokens: Tokens<'a>,
    /// f32 `[tokens, heads · head_dim]`, as `append` left them.
    pub queries: &'a Span,
}

impl Gpu {
    /// Writes attention to `out`, f32 `[tokens, heads · head_dim]`; rows that pad the run are left as they are.
    pub fn prefill(&self, call: &Prefill<'_>, out: &Span) {
        let head_dim = call.attention.head_dim;
        if matrix::serves(head_dim) && self.multiplies(call.cache.element) {
            let most = self.client.properties().hardware.max_shared_memory_size;
            let cubes = call.attention.heads * tiles(&call.tokens, matrix::MOST_ROWS);
            let step = matrix::Step::new(head_dim, most, cubes, self.processors());
            self.prefill_matrix(call, out, step);
        } else {
            self.prefill_portable(call, out);
        }
    }

    fn prefill_matrix(&self, call: &Prefill<'_>, out: &Span, step: matrix::Step) {
        let Prefill { attention, cache, tokens, queries } = call;
        let shape = Shape::new(attention, cache);
        let cached = shape.cached(cache.blocks) / 8;
        let elements = tokens.tokens * (shape.heads * shape.head_dim) as usize;
        let factors = Factors::new(attention);
        // SAFETY: every index lies within its argument: rows because parts lie within the run, cache rows because
        // the batch was checked against the cache's blocks.
        unsafe {
            matrix::prefill::launch_unchecked(
                &self.client,
                grid(shape, tokens, step.rows()),
                CubeDim::new_2d(PLANE, step.planes()),
                queries.argument(elements / 2, 8),
                cache.keys.argument(cached, 16),
                cache.values.argument(cached, 16),
                tokens.parts.argument(tokens.sequences * 3, 4),
                tokens.blocks.argument(tokens.sequences * tokens.max_blocks, 4),
                out.argument(elements / 2, 8),
                factors.inner,
                factors.outer,
                tokens.sequences as u32,
                tokens.max_blocks as u32,
                shape,
                step,
                cache.element == DType::Bf16,
            );
        }
    }

    fn prefill_portable(&self, call: &Prefill<'_>, out: &Span) {
        let Prefill { attention, cache, tokens, queries } = call;
        let shape = Shape::new(attention, cache);
        let (cached, element_bytes) = (shape.cached(cache.blocks), cache.element.bytes() as usize);
        let elements = tokens.tokens * (shape.heads * shape.head_dim) as usize;
        let factors = Factors::new(attention);
        // SAFETY: every index lies within its argument: rows because parts lie within the run, cache rows because
        // the batch was checked against the cache's blocks.
        unsafe {
            portable::prefill::launch_unchecked(
                &self.client,
                grid(shape, tokens, portable::ROWS),
                CubeDim::new_2d(portable::SIDE, portable::SIDE),
                queries.argument(elements, 4),
                cache.keys.argument(cached, element_bytes),
                cache.values.argument(cached, element_bytes),
                tokens.parts.argument(tokens.sequences * 3, 4),
                tokens.blocks.argument(tokens.sequences * tokens.max_blocks, 4),
                out.argument(elements, 4),
                factors.inner,
                factors.outer,
                tokens.sequences as u32,
                tokens.max_blocks as u32,
                shape,
                self.is_cuda(),
                element(cache.element),
            );
        }
    }
}

/// Heads, and tiles.
fn grid(shape: Shape, tokens: &Tokens<'_>, rows: u32) -> CubeCount {
    CubeCount::Static(shape.heads, tiles(tokens, rows), 1)
}

/// Tiles of `rows` tokens: as many as the run has at most, however it is divided among sequences.
fn tiles(tokens: &Tokens<'_>, rows: u32) -> u32 {
    (tokens.tokens / rows as usize + tokens.sequences.min(tokens.tokens)) as u32
}
