//! One part of a context with vector arithmetic: for caches and devices that matrix instructions do not serve.
//!
//! A team of lanes holds one token's key at a time, a few elements a lane; every team has a softmax of its own, and the
//! teams of a cube are merged at the end.

use cubecl::prelude::*;

use super::matrix::is_own_head;
use super::split::{Split, parts};
use crate::kernels::gpu::attention::Shape;
use crate::kernels::gpu::attention::paging::cache_row;
use crate::kernels::gpu::attention::scores::{UNSEEN, score, weight};
use crate::kernels::gpu::overlap::follow;

/// Planes of a cube.
pub(super) const PLANES: u32 = 4;
/// Tokens that a team loads at once, for its loads to overlap.
const AHEAD: u32 = 4;
/// Query heads of a cube: their queries and sums are held in registers.
const MOST_HEADS: u32 = 8;

/// Which tokens, elements and heads the lanes of a cube hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Lanes {
    /// Lanes of a plane.
    pub plane: u32,
    /// Elements of a vector.
    pub vector: u32,
    /// Lanes that share a token, a power of two.
    pub team: u32,
    /// Vectors of a token that a lane holds.
    pub per_lane: u32,
    /// Query heads of a cube.
    pub heads: u32,
    /// Cubes for all query heads of a key head.
    pub chunks: u32,
}

impl Lanes {
    pub(super) fn new(shape: Shape, plane: u32, vector: u32) -> Self {
        let vectors = shape.head_dim / vector;
        let team = vectors.next_power_of_two().min(plane);
        let chunks = shape.group.div_ceil(MOST_HEADS);
        let heads = shape.group.div_ceil(chunks);
        Self { plane, vector, team, per_lane: vectors.div_ceil(team), heads, chunks }
    }
}

/// Cubes: key heads times chunks of their query heads, splits, tokens.
#[cube(launch_unchecked)]
pub(super) fn decode<F: Float, N: Size>(
    queries: &[Vector<f32, N>],
    keys: &[Vector<F, N>],
    values: &[Vector<F, N>],
    sequences: &[i32],
    positions: &[i32],
    blocks: &[i32],
    partial: &mut [f32],
    stats: &mut [f32],
    inner: f32,
    outer: f32,
    max_blocks: u32,
    #[comptime] shape: Shape,
    #[comptime] split: Split,
    #[comptime] lanes: Lanes,
    #[comptime] cuda: bool,
    #[define(F)] _element: ElemType,
) {
    let plane = comptime!(lanes.plane);
    let vector = comptime!(lanes.vector);
    let team = comptime!(lanes.team);
    let per_lane = comptime!(lanes.per_lane);
    let heads = comptime!(lanes.heads);
    let chunks = comptime!(lanes.chunks);
    let vectors = comptime!(shape.head_dim / vector);
    let teams = comptime!(plane / team * PLANES);
    let token = CUBE_POS_Z;
    let part = CUBE_POS_Y;
    let kv_head = CUBE_POS_X / chunks;
    let chunk = CUBE_POS_X % chunks;
    let lane = UNIT_POS_X % team;
    let member = UNIT_POS_Y * comptime!(plane / team) + UNIT_POS_X / team;

    follow();
    let sequence = sequences[token as usize];
    let range = parts(sequence, positions[token as usize], split);
    let start = range.base + part * range.share;
    let stop = u32::min(start + range.share, range.end);
    // Query heads before the first or behind the last are computed as zeros and not stored.
    let in_group = chunk * heads;
    let first_head = i32::cast_from(kv_head * comptime!(shape.group) + in_group)
        - comptime!(shape.first_head as i32);
    let unit = UNIT_POS_Y * plane + UNIT_POS_X;

    if start >= stop {
        if comptime!(split.is_whole()) {
            let mut element = unit;
            while element < comptime!(heads * shape.head_dim) {
                let head = element / comptime!(shape.head_dim);
                let at = first_head + i32::cast_from(head);
                if is_own_head(at, in_group + head, shape) {
                    let row = token * comptime!(shape.heads) + u32::cast_from(at);
                    let first = row * comptime!(shape.head_dim);
                    partial[(first + element % comptime!(shape.head_dim)) as usize] = 0.0;
                }
                element += comptime!(plane * PLANES);
            }
        }
        terminate!();
    }
    let first_block = u32::cast_from(sequence) * max_blocks;

    let mut query = Array::<Vector<f32, N>>::new(comptime!((heads * per_lane) as usize));
    let mut sums = Array::<Vector<f32, N>>::new(comptime!((heads * per_lane) as usize));
    let mut largest = Array::<f32>::new(heads as usize);
    let mut total = Array::<f32>::new(heads as usize);
    #[unroll]
    for head in 0..heads {
        largest[head as usize] = UNSEEN;
        total[head as usize] = 0.0;
        let at = first_head + head as i32;
        let exists = is_own_head(at, in_group + head, shape);
        #[unroll]
        for i in 0..per_lane {
            let index = comptime!((head * per_lane + i) as usize);
            let place = lane + i * team;
            query[index] = Vector::zeroed();
            sums[index] = Vector::zeroed();
            if exists && place < vectors {
                let row = token * comptime!(shape.heads) + u32::cast_from(at);
                query[index] = queries[(row * vectors + place) as usize];
            }
        }
    }

    let mut key = Array::<Vector<F, N>>::new(comptime!((AHEAD * per_lane) as usize));
    let mut value = Array::<Vector<F, N>>::new(comptime!((AHEAD * per_lane) as usize));
    let mut scores = Array::<f32>::new(comptime!((AHEAD * heads) as usize));
    let mut next = start;
    while next < stop {
        #[unroll]
        for ahead in 0..AHEAD {
            let position = u32::min(next + ahead * teams + member, stop - 1);
            let row = cache_row(blocks, first_block, position, kv_head, shape) * vectors;
            #[unroll]
            for i in 0..per_lane {
                // Lanes without elements of their own read some that are there.
                let place = u32::min(lane + i * team, comptime!(vectors - 1));
                key[comptime!((ahead * per_lane + i) as usize)] = keys[(row + place) as usize];
                value[comptime!((ahead * per_lane + i) as usize)] = values[(row + place) as usize];
            }
        }
        #[unroll]
        for ahead in 0..AHEAD {
            let position = next + ahead * teams + member;
            let seen = position >= range.begin && position < stop;
            #[unroll]
            for head in 0..heads {
                let mut products = Vector::<f32, N>::zeroed();
                #[unroll]
                for i in 0..per_lane {
                    products += query[comptime!((head * per_lane + i) as usize)]
                        * Vector::<f32, N>::cast_from(
                            key[comptime!((ahead * per_lane + i) as usize)],
                        );
                }
                let product = team_sum(Vector::vector_sum(products), team);
                scores[comptime!((ahead * heads + head) as usize)] =
                    select(seen, score(product, inner, outer, shape.capped), UNSEEN);
            }
        }
        #[unroll]
        for head in 0..heads {
            let index = head as usize;
            let mut above = largest[index];
            #[unroll]
            for ahead in 0..AHEAD {
                above = above.max(scores[comptime!((ahead * heads + head) as usize)]);
            }
            let kept = weight(largest[index] - above, cuda);
            largest[index] = above;
            total[index] *= kept;
            #[unroll]
            for i in 0..per_lane {
                let index = comptime!((head * per_lane + i) as usize);
                sums[index] *= Vector::<f32, N>::new(kept);
            }
            #[unroll]
            for ahead in 0..AHEAD {
                let score = scores[comptime!((ahead * heads + head) as usize)];
                let share = select(score > UNSEEN, weight(score - above, cuda), 0.0f32);
                total[index] += share;
                #[unroll]
                for i in 0..per_lane {
                    sums[comptime!((head * per_lane + i) as usize)] += Vector::<f32, N>::new(share)
                        * Vector::<f32, N>::cast_from(
                            value[comptime!((ahead * per_lane + i) as usize)],
                        );
                }
            }
        }
        next += comptime!(AHEAD * teams);
    }

    // Teams meet head by head in shared memory.
    let mut met = Shared::<[f32]>::new_slice(comptime!((teams * shape.head_dim) as usize));
    let mut met_stats = Shared::<[f32]>::new_slice(comptime!((2 * teams) as usize));
    #[unroll]
    for head in 0..heads {
        if lane == 0 {
            met_stats[(2 * member) as usize] = largest[head as usize];
            met_stats[(2 * member + 1) as usize] = total[head as usize];
        }
        #[unroll]
        for i in 0..per_lane {
            let place = lane + i * team;
            if place < vectors {
                #[unroll]
                for element in 0..vector {
                    met[(member * comptime!(shape.head_dim) + place * vector + element) as usize] =
                        sums[comptime!((head * per_lane + i) as usize)].extract(element as usize);
                }
            }
        }
        sync_cube();
        let mut above = UNSEEN.runtime();
        for other in 0..teams {
            above = above.max(met_stats[(2 * other) as usize]);
        }
        let at = first_head + head as i32;
        let exists = is_own_head(at, in_group + head, shape);
        if exists {
            let row = (token * comptime!(shape.heads) + u32::cast_from(at))
                * comptime!(split.splits)
                + part;
            let mut all = 0.0f32;
            for other in 0..teams {
                let kept = weight(met_stats[(2 * other) as usize] - above, cuda);
                all += met_stats[(2 * other + 1) as usize] * kept;
            }
            let mut element = unit;
            while element < comptime!(shape.head_dim) {
                let mut sum = 0.0f32;
                for other in 0..teams {
                    let kept = weight(met_stats[(2 * other) as usize] - above, cuda);
                    sum += met[(other * comptime!(shape.head_dim) + element) as usize] * kept;
                }
                if comptime!(split.is_whole()) {
                    sum /= all;
                }
                partial[(row * comptime!(shape.head_dim) + element) as usize] = sum;
                element += comptime!(plane * PLANES);
            }
            if unit == 0 && comptime!(!split.is_whole()) {
                stats[(2 * row) as usize] = above;
                stats[(2 * row + 1) as usize] = all;
            }
        }
        sync_cube();
    }
}

/// The sum over the lanes of a team.
#[cube]
fn team_sum(value: f32, #[comptime] team: u32) -> f32 {
    let mut sum = value;
    let steps = comptime!(team.trailing_zeros());
    #[unroll]
    for step in 0..steps {
        sum += plane_shuffle_xor(sum, comptime!(1u32 << step));
    }
    sum
}
