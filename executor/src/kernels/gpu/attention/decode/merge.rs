//! The parts of every token's context become one.

use cubecl::prelude::*;

use super::split::{Split, parts};
use super::{Decode, Partial};
use crate::kernels::gpu::attention::Shape;
use crate::kernels::gpu::attention::scores::{UNSEEN, weight};
use crate::kernels::gpu::device::{Gpu, Span};

impl Gpu {
    pub(super) fn merge(
        &self,
        call: &Decode<'_>,
        shape: Shape,
        split: Split,
        partial: &Partial,
        out: &Span,
    ) {
        let tokens = &call.tokens;
        let rows = tokens.tokens * shape.heads as usize;
        let head_dim = shape.head_dim as usize;
        // SAFETY: every index lies within its argument by the grid, and parts are no more than splits.
        unsafe {
            merge::launch_unchecked(
                &self.client,
                CubeCount::Static(tokens.tokens as u32, shape.heads, 1),
                CubeDim::new_1d(shape.head_dim),
                partial.values.argument(rows * split.splits as usize * head_dim, 4),
                partial.stats.argument(rows * split.splits as usize * 2, 4),
                tokens.sequence.argument(tokens.tokens, 4),
                tokens.position.argument(tokens.tokens, 4),
                out.argument(rows * head_dim, 4),
                shape,
                split,
                self.is_cuda(),
            );
        }
    }
}

/// Cubes: tokens, heads; one unit an element.
#[cube(launch_unchecked)]
fn merge(
    partial: &[f32],
    stats: &[f32],
    sequences: &[i32],
    positions: &[i32],
    out: &mut [f32],
    #[comptime] shape: Shape,
    #[comptime] split: Split,
    #[comptime] cuda: bool,
) {
    let token = CUBE_POS_X;
    let row = token * comptime!(shape.heads) + CUBE_POS_Y;
    let element = UNIT_POS_X;
    let range = parts(sequences[token as usize], positions[token as usize], split);
    let mut count = 0u32;
    if range.end > range.base {
        count = (range.end - range.base).div_ceil(range.share);
    }
    let first = row * comptime!(split.splits);
    let mut above = UNSEEN.runtime();
    for part in first..first + count {
        above = above.max(stats[(2 * part) as usize]);
    }
    let mut total = 0.0f32;
    let mut sum = 0.0f32;
    for part in first..first + count {
        let kept = weight(stats[(2 * part) as usize] - above, cuda);
        total += stats[(2 * part + 1) as usize] * kept;
        sum += partial[(part * comptime!(shape.head_dim) + element) as usize] * kept;
    }
    let mut merged = 0.0f32;
    if count > 0 {
        merged = sum / total;
    }
    out[(row * comptime!(shape.head_dim) + element) as usize] = merged;
}
