//! Heads of queries, keys and values on their way to attention: normalised, rotated, keys and values cached.

#![expect(unsafe_code, reason = "kernels are launched without checks of every index")]

#[cfg(test)]
mod tests;

use cubecl::prelude::*;
use ir::op::{Attention, Pairing};

use super::heads::Fresh;
use super::paging::cache_row;
use super::{Cache, Shape, Tokens};
use crate::kernels::gpu::device::{Gpu, Span, element};

/// Planes of a cube, each with a head.
const PLANES: u32 = 4;

/// What is appended, and what is done to it before.
pub struct Append<'a> {
    /// Heads, norms and rotation; their weights are those below.
    pub attention: &'a Attention,
    /// Where keys and values go.
    pub cache: Cache<'a>,
    /// Where in it.
    pub tokens: Tokens<'a>,
    /// f32 `[tokens, heads · head_dim]`.
    pub queries: &'a Span,
    /// f32 `[tokens, kv_heads · head_dim]`.
    pub keys: &'a Span,
    /// f32 `[tokens, kv_heads · head_dim]`.
    pub values: &'a Span,
    /// Weights of the norm of each query head.
    pub query_norm: NormWeights<'a>,
    /// Weights of the norm of each key head.
    pub key_norm: NormWeights<'a>,
    /// The rotation, where there is one.
    pub rotation: Option<Rotation<'a>>,
}

/// Weights of a norm over one head, f32 `[head_dim]` each.
#[derive(Clone, Copy, Default)]
pub struct NormWeights<'a> {
    /// Elementwise factor.
    pub scale: Option<&'a Span>,
    /// Elementwise term.
    pub bias: Option<&'a Span>,
}

/// The rotation of a run's tokens.
#[derive(Clone, Copy)]
pub struct Rotation<'a> {
    /// Which elements turn together.
    pub pairing: Pairing,
    /// Leading elements of a head that turn.
    pub dims: u32,
    /// f32 `[table_rows, dims]`: of each row `dims / 2` cosines, then as many sines.
    pub table: &'a Span,
    /// Rows of the table.
    pub table_rows: usize,
    /// `i32[tokens]`: the row of each token.
    pub rows: &'a Span,
}

impl Gpu {
    /// Puts keys and values into the cache, and queries, ready for attention, into `out`:
    /// f32 `[tokens, heads · head_dim]`, which is none of the inputs.
    pub fn append(&self, call: &Append<'_>, out: &Span) {
        let attention = call.attention;
        let shape = Shape::new(attention, &call.cache);
        let (cache, tokens) = (&call.cache, &call.tokens);
        let plane = self.plane();
        let heads = shape.heads + 2 * shape.kv_heads;
        let queries = tokens.tokens * (shape.heads * shape.head_dim) as usize;
        let cached = shape.cached(cache.blocks);
        let element_bytes = cache.element.bytes() as usize;
        // SAFETY: every index lies within its argument: heads and tokens by the grid, cache rows because the batch
        // was checked against the cache's blocks, table rows because they are rows of the table.
        unsafe {
            append::launch_unchecked(
                &self.client,
                CubeCount::Static(tokens.tokens as u32, heads.div_ceil(PLANES), 1),
                CubeDim::new_2d(plane, PLANES),
                call.queries.argument(queries, 4),
                call.fresh(),
                out.argument(queries, 4),
                cache.keys.argument(cached, element_bytes),
                cache.values.argument(cached, element_bytes),
                tokens.sequence.argument(tokens.tokens, 4),
                tokens.position.argument(tokens.tokens, 4),
                tokens.blocks.argument(tokens.sequences * tokens.max_blocks, 4),
                tokens.max_blocks as u32,
                shape,
                plane,
                element(cache.element),
            );
        }
    }
}

/// One plane a head: query heads first, then key heads, then value heads.
#[cube(launch_unchecked)]
fn append<F: Float>(
    queries: &[f32],
    fresh: &Fresh,
    out: &mut [f32],
    keys: &mut [F],
    values: &mut [F],
    sequences: &[i32],
    positions: &[i32],
    blocks: &[i32],
    max_blocks: u32,
    #[comptime] shape: Shape,
    #[comptime] plane: u32,
    #[define(F)] _element: ElemType,
) {
    let heads = comptime!(shape.heads);
    let kv_heads = comptime!(shape.kv_heads);
    let head_dim = comptime!(shape.head_dim);
    let per_lane = comptime!(head_dim.div_ceil(plane));
    let token = CUBE_POS_X;
    let lane = UNIT_POS_X;
    let head = CUBE_POS_Y * CUBE_DIM_Y + UNIT_POS_Y;

    // Which row of which input; a plane beyond the last head reads nothing.
    let is_query = head < heads;
    let is_key = head >= heads && head < heads + kv_heads;
    let is_value = head >= heads + kv_heads && head < heads + 2 * kv_heads;
    let mut kv_head = 0u32;
    if is_key {
        kv_head = head - heads;
    }
    if is_value {
        kv_head = head - heads - kv_heads;
    }
    let query_row = (token * heads + head) * head_dim;
    let row = (token * kv_heads + kv_head) * head_dim;

    let mut held = Array::<f32>::new(per_lane as usize);
    #[unroll]
    for i in 0..per_lane {
        let at = lane + i * plane;
        let mut value = 0.0f32;
        if at < head_dim {
            if is_query {
                value = queries[(query_row + at) as usize];
            }
            if is_key {
                value = fresh.keys[(row + at) as usize];
            }
            if is_value {
                value = fresh.values[(row + at) as usize];
            }
        }
        held[i as usize] = value;
    }

    if is_query {
        fresh.query_norm.apply(&mut held, lane, head_dim, plane);
    }
    if is_key {
        fresh.key_norm.apply(&mut held, lane, head_dim, plane);
    }

    #[comptime]
    match &fresh.turn {
        ComptimeOption::Some(turn) => {
            let mut exchange = Shared::<[f32]>::new_slice(comptime!((PLANES * head_dim) as usize));
            let base = UNIT_POS_Y * head_dim;
            #[unroll]
            for i in 0..per_lane {
                let at = lane + i * plane;
                if at < head_dim {
                    exchange[(base + at) as usize] = held[i as usize];
                }
            }
            sync_cube();
            #[unroll]
            for i in 0..per_lane {
                let at = lane + i * plane;
                if at < head_dim && !is_value {
                    let angle = turn.angle(token, at);
                    held[i as usize] = held[i as usize] * angle.cos
                        + exchange[(base + angle.other) as usize] * angle.sin;
                }
            }
        }
        ComptimeOption::None => {}
    }

    let sequence = sequences[token as usize];
    if sequence >= 0 {
        let position = u32::cast_from(positions[token as usize]);
        let first_block = u32::cast_from(sequence) * max_blocks;
        let cached = cache_row(blocks, first_block, position, kv_head, shape) * head_dim;
        #[unroll]
        for i in 0..per_lane {
            let at = lane + i * plane;
            if at < head_dim {
                if is_query {
                    out[(query_row + at) as usize] = held[i as usize];
                }
                if is_key {
                    keys[(cached + at) as usize] = F::cast_from(held[i as usize]);
                }
                if is_value {
                    values[(cached + at) as usize] = F::cast_from(held[i as usize]);
                }
            }
        }
    }
}
