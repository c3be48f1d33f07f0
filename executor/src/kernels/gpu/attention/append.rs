//! Heads of queries, keys and values on their way to attention: normalised, rotated, keys and values cached.

#![expect(unsafe_code, reason = "kernels are launched without checks of every index")]

#[cfg(test)]
mod tests;

use cubecl::prelude::*;
use ir::op::{Attention, NormKind, Pairing};

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

/// What is done to a head before its rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    Nothing,
    Rms,
    Layer,
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
        let head_dim = shape.head_dim as usize;
        let [queries, keys] =
            [shape.heads, shape.kv_heads].map(|heads| tokens.tokens * heads as usize * head_dim);
        let cached = shape.cached(cache.blocks);
        let element_bytes = cache.element.bytes() as usize;
        let weights = |span: Option<&Span>| span.map(|span| span.argument(head_dim, 4)).into();
        let numbers = |norm: &Option<ir::op::Norm>| match norm {
            None => (Kind::Nothing, 0.0, 0.0),
            Some(norm) => {
                let kind = match norm.kind {
                    NormKind::Rms => Kind::Rms,
                    NormKind::Layer => Kind::Layer,
                };
                (kind, norm.epsilon, norm.scale_offset)
            }
        };
        let (query_kind, query_epsilon, query_offset) = numbers(&attention.q_norm);
        let (key_kind, key_epsilon, key_offset) = numbers(&attention.k_norm);
        let rotation = call.rotation;
        // SAFETY: every index lies within its argument: heads and tokens by the grid, cache rows because the batch
        // was checked against the cache's blocks, table rows because they are rows of the table.
        unsafe {
            append::launch_unchecked(
                &self.client,
                CubeCount::Static(tokens.tokens as u32, heads.div_ceil(PLANES), 1),
                CubeDim::new_2d(plane, PLANES),
                call.queries.argument(queries, 4),
                call.keys.argument(keys, 4),
                call.values.argument(keys, 4),
                out.argument(queries, 4),
                cache.keys.argument(cached, element_bytes),
                cache.values.argument(cached, element_bytes),
                tokens.sequence.argument(tokens.tokens, 4),
                tokens.position.argument(tokens.tokens, 4),
                tokens.blocks.argument(tokens.sequences * tokens.max_blocks, 4),
                rotation
                    .map(|rotation| {
                        rotation.table.argument(rotation.table_rows * rotation.dims as usize, 4)
                    })
                    .into(),
                rotation.map(|rotation| rotation.rows.argument(tokens.tokens, 4)).into(),
                weights(call.query_norm.scale),
                weights(call.query_norm.bias),
                weights(call.key_norm.scale),
                weights(call.key_norm.bias),
                query_epsilon,
                query_offset,
                key_epsilon,
                key_offset,
                tokens.max_blocks as u32,
                shape,
                query_kind,
                key_kind,
                rotation.map_or(0, |rotation| rotation.dims),
                rotation.is_some_and(|rotation| rotation.pairing == Pairing::Halves),
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
    new_keys: &[f32],
    new_values: &[f32],
    out: &mut [f32],
    keys: &mut [F],
    values: &mut [F],
    sequences: &[i32],
    positions: &[i32],
    blocks: &[i32],
    table: ComptimeOption<&[f32]>,
    table_rows: ComptimeOption<&[i32]>,
    query_scale: ComptimeOption<&[f32]>,
    query_bias: ComptimeOption<&[f32]>,
    key_scale: ComptimeOption<&[f32]>,
    key_bias: ComptimeOption<&[f32]>,
    query_epsilon: f32,
    query_offset: f32,
    key_epsilon: f32,
    key_offset: f32,
    max_blocks: u32,
    #[comptime] shape: Shape,
    #[comptime] query_kind: Kind,
    #[comptime] key_kind: Kind,
    #[comptime] dims: u32,
    #[comptime] halves: bool,
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
                value = new_keys[(row + at) as usize];
            }
            if is_value {
                value = new_values[(row + at) as usize];
            }
        }
        held[i as usize] = value;
    }

    if is_query {
        normalise(
            &mut held,
            query_scale,
            query_bias,
            query_epsilon,
            query_offset,
            lane,
            query_kind,
            head_dim,
            plane,
        );
    }
    if is_key {
        normalise(
            &mut held,
            key_scale,
            key_bias,
            key_epsilon,
            key_offset,
            lane,
            key_kind,
            head_dim,
            plane,
        );
    }

    if comptime!(dims > 0) {
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
        let table = table.unwrap();
        let table_row = u32::cast_from(table_rows.unwrap()[token as usize]) * dims;
        let pairs = comptime!(dims / 2);
        #[unroll]
        for i in 0..per_lane {
            let at = lane + i * plane;
            if at < dims && !is_value {
                let mut pair = at / 2;
                let mut other = at ^ 1;
                let mut is_first = at.is_multiple_of(2);
                if comptime!(halves) {
                    pair = at % pairs;
                    is_first = at < pairs;
                    other = (at + pairs) % dims;
                }
                let cos = table[(table_row + pair) as usize];
                let sin = table[(table_row + pairs + pair) as usize];
                let signed = select(is_first, -sin, sin);
                held[i as usize] =
                    held[i as usize] * cos + exchange[(base + other) as usize] * signed;
            }
        }
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

/// Normalises the head that a plane holds.
#[cube]
fn normalise(
    held: &mut Array<f32>,
    scale: ComptimeOption<&[f32]>,
    bias: ComptimeOption<&[f32]>,
    epsilon: f32,
    offset: f32,
    lane: u32,
    #[comptime] kind: Kind,
    #[comptime] head_dim: u32,
    #[comptime] plane: u32,
) {
    let per_lane = comptime!(head_dim.div_ceil(plane));
    let count = comptime!(head_dim as f32);
    if comptime!(kind == Kind::Layer) {
        let mut sum = 0.0f32;
        #[unroll]
        for i in 0..per_lane {
            sum += held[i as usize];
        }
        let mean = plane_sum(sum) / count;
        #[unroll]
        for i in 0..per_lane {
            if lane + i * plane < head_dim {
                held[i as usize] -= mean;
            }
        }
    }
    if comptime!(kind != Kind::Nothing) {
        let mut squares = 0.0f32;
        #[unroll]
        for i in 0..per_lane {
            squares += held[i as usize] * held[i as usize];
        }
        let factor = (plane_sum(squares) / count + epsilon).inverse_sqrt();
        #[unroll]
        for i in 0..per_lane {
            let at = lane + i * plane;
            if at < head_dim {
                let mut value = held[i as usize] * factor;
                #[comptime]
                match scale {
                    ComptimeOption::Some(scale) => value *= scale[at as usize] + offset,
                    ComptimeOption::None => {}
                }
                #[comptime]
                match bias {
                    ComptimeOption::Some(bias) => value += bias[at as usize],
                    ComptimeOption::None => {}
                }
                held[i as usize] = value;
            }
        }
    }
}
