//! One part of a context with matrix instructions: the query heads of a key head are the rows of the left operand.
//!
//! - Every plane takes 16 tokens at a time and keeps a softmax of its own; the planes of a cube are merged at the end.
//! - Keys and values go from the cache to registers in 16-byte loads, as they lie. That fits the operands because the
//!   order in which a product runs through its elements is free, as is which column of a result is which element:
//!   lane `t` multiplies elements `32 c + 8 t ..` of queries and keys, and column `g` of product `j` over values is
//!   element `64 s + 8 g + j`.

use cubecl::prelude::{Cast as _, *};

use super::newest::{Place, find_angles, prepare};
use super::split::{RUN, Split, parts};
use crate::kernels::gpu::ahead::{Regions, ask_at_once, ask_for_line};
use crate::kernels::gpu::attention::Shape;
use crate::kernels::gpu::attention::heads::{Angle, Fresh};
use crate::kernels::gpu::attention::paging::cache_row;
use crate::kernels::gpu::attention::scores::{UNSEEN, score, weight};
use crate::kernels::gpu::instructions::{
    PLANE, Packed, Sums, interleave, left, multiply, pack, quad_max, quad_sum, right,
};
use crate::kernels::gpu::order::{Order, element_of};
use crate::kernels::gpu::overlap::follow;

/// Planes that a cube may have: the most where it has all of a short context, most of which take one turn then, half as
/// many where it has a part of one, and the fewest where there are more cubes than find places.
const PLANES: [u32; 3] = [8, 4, 2];
/// Planes that a multiprocessor holds at once, of up to 168 registers: heads of 128 elements.
const PLANES_AT_ONCE: u32 = 12;
/// Shared memory that a cube may use on every device.
const SHARED_BYTES: u32 = 32 << 10;

/// Whether heads are of a size that fits the operands and the registers.
pub(super) fn serves(head_dim: u32) -> bool {
    head_dim.is_multiple_of(32) && head_dim <= 256
}

/// How the query heads of a key head are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Rows {
    /// Query heads of a cube.
    pub heads: u32,
    /// Cubes for all query heads of a key head.
    pub chunks: u32,
    /// Planes of a cube.
    pub planes: u32,
    /// Whether elements are bf16, not f16.
    pub bf16: bool,
}

impl Rows {
    /// For `tokens` contexts on a device of so many multiprocessors. Cubes that wait for others to end wait once more for
    /// all that they load: so planes are as many as let all cubes run at once.
    pub(super) fn new(
        shape: Shape,
        split: Split,
        bf16: bool,
        tokens: usize,
        processors: u32,
    ) -> Self {
        // Sums of 16 rows of longer heads are more than the registers hold.
        let most = if shape.head_dim > 128 { 8 } else { 16 };
        let chunks = shape.group.div_ceil(most);
        let heads = shape.group.div_ceil(chunks);
        let cubes = shape.kv_heads * chunks * split.splits * tokens as u32;
        let fits = |planes: u32| {
            let met_bytes = planes * heads * shape.head_dim * size_of::<f32>() as u32;
            let is_short = split.is_whole() && met_bytes <= SHARED_BYTES;
            (planes <= PLANES[1] || is_short) && cubes * planes <= processors * PLANES_AT_ONCE
        };
        let planes = PLANES.into_iter().find(|&planes| fits(planes)).unwrap_or(PLANES[2]);
        Self { heads, chunks, planes, bf16 }
    }

    /// Halves of the left operand with heads: rows 8 to 15 are zeros where there are no more heads than 8.
    fn halves(self) -> u32 {
        if self.heads > 8 { 2 } else { 1 }
    }
}

/// Cubes: key heads times chunks of their query heads, splits and what only asks ahead, tokens.
#[cube(launch_unchecked)]
pub(super) fn decode<F: Float>(
    queries: &[f32],
    fresh: &ComptimeOption<Fresh>,
    keys: &mut [Packed],
    values: &mut [Packed],
    sequences: &[i32],
    positions: &[i32],
    blocks: &[i32],
    partial: &mut [F],
    stats: &mut [f32],
    ahead: &Regions,
    inner: f32,
    outer: f32,
    max_blocks: u32,
    #[comptime] shape: Shape,
    #[comptime] split: Split,
    #[comptime] rows: Rows,
    #[comptime] order: Order,
    #[define(F)] _made: ElemType,
) {
    let features = comptime!((shape.heads * shape.head_dim) as usize);
    let head_dim = comptime!(shape.head_dim);
    let heads = comptime!(rows.heads);
    let bf16 = comptime!(rows.bf16);
    let halves = comptime!(rows.halves());
    let quarters = comptime!(head_dim / 32);
    let slices = comptime!(head_dim.div_ceil(64));
    let vectors = comptime!(head_dim / 8);
    let token = CUBE_POS_Z;
    let part = CUBE_POS_Y;
    let kv_head = CUBE_POS_X / comptime!(rows.chunks);
    let in_group = CUBE_POS_X % comptime!(rows.chunks) * heads;
    let plane = UNIT_POS_Y;
    let g = UNIT_POS_X / 4;
    let t = UNIT_POS_X % 4;

    ask_at_once(ahead, plane, rows.planes.runtime());
    // What a run was given, and what earlier runs cached, was there before the launch before began.
    let sequence = sequences[token as usize];
    let range = parts(sequence, positions[token as usize], split);
    let start = range.base + part * range.share;
    let stop = u32::min(start + range.share, range.end);
    let first_block = u32::cast_from(sequence.max(0i32)) * max_blocks;
    // Of a token that sees nothing, that of the first sequence: nobody reads what lies there.
    let newest = u32::max(range.end, 1u32) - 1;
    let newest_row = cache_row(blocks, first_block, newest, kv_head, shape);
    let mut next = start + plane * RUN;
    let first = u32::min(next, newest);
    let mut first_row = cache_row(blocks, first_block, first, kv_head, shape);
    if next < stop {
        let row = (first_row + u32::min(UNIT_POS_X / 2, newest - next)) * vectors;
        let at = (row + UNIT_POS_X % 2 * comptime!(vectors / 2)) as usize;
        ask_for_line(&keys[at..at + 1]);
        ask_for_line(&values[at..at + 1]);
    }
    let mut angles = Sequence::<Angle>::new();
    #[comptime]
    match fresh {
        ComptimeOption::Some(fresh) => find_angles(fresh, token, &mut angles, shape, rows),
        ComptimeOption::None => {}
    }
    // The compiler moves loads behind the wait for the launch before, but not behind a barrier.
    sync_cube();
    follow();

    // Query heads before the first or behind the last are computed as zeros and not stored.
    let first_head = i32::cast_from(kv_head * comptime!(shape.group) + in_group)
        - comptime!(shape.first_head as i32);

    if start >= stop {
        if comptime!(split.is_whole()) && part == 0 {
            let mut at = plane * PLANE + UNIT_POS_X;
            while at < comptime!(heads * head_dim) {
                let slot = at / head_dim;
                let head = first_head + i32::cast_from(slot);
                if is_head(head, slot, in_group, shape, rows) {
                    let feature = u32::cast_from(head) * head_dim + at % head_dim;
                    partial[element_of(token as usize, feature as usize, features, order)] =
                        F::new(0.0);
                }
                at += comptime!(rows.planes * PLANE);
            }
        }
        terminate!();
    }

    let place = Place {
        token,
        kv_head,
        first_head,
        in_group,
        newest: newest_row,
        has_newest: stop == range.end,
    };
    let mut query = Array::<Packed>::new(comptime!((2 * quarters) as usize));
    #[comptime]
    match fresh {
        ComptimeOption::Some(fresh) => {
            let prepared = prepare(fresh, queries, keys, values, &angles, place, shape, rows);
            left_operands(&prepared, 0i32, place, &mut query, shape, rows);
        }
        ComptimeOption::None => {
            let first_row = i32::cast_from(token * comptime!(shape.heads)) + first_head;
            left_operands(queries, first_row, place, &mut query, shape, rows);
        }
    }

    let mut sums = Array::<Sums>::new(comptime!((8 * slices) as usize));
    #[unroll]
    for i in 0..comptime!(8 * slices) {
        sums[i as usize] = Sums::zeroed();
    }
    let mut largest = Array::<f32>::new(2usize);
    let mut total = Array::<f32>::new(2usize);
    #[unroll]
    for half in 0..2usize {
        largest[half] = UNSEEN;
        total[half] = 0.0;
    }

    let mut key = Array::<Packed>::new(comptime!((2 * quarters) as usize));
    let mut value = Array::<Packed>::new(comptime!((4 * slices) as usize));
    while next < stop {
        // The tokens behind the last are read as the last: they weigh nothing, but must be numbers.
        let last = stop - 1 - next;
        #[unroll]
        for half in 0..2u32 {
            let row = (first_row + u32::min(8 * half + g, last)) * vectors;
            #[unroll]
            for quarter in 0..quarters {
                key[comptime!((half * quarters + quarter) as usize)] =
                    keys[(row + 4 * quarter + t) as usize];
            }
        }
        #[unroll]
        for pick in 0..4u32 {
            let token = 2 * t + comptime!(pick / 2 * 8 + pick % 2);
            let row = (first_row + u32::min(token, last)) * vectors;
            #[unroll]
            for slice in 0..slices {
                // Of the last slice some elements may be none.
                let place = u32::min(8 * slice + g, comptime!(vectors - 1));
                value[comptime!((slice * 4 + pick) as usize)] = values[(row + place) as usize];
            }
        }

        let mut scores = Array::<Sums>::new(2usize);
        #[unroll]
        for half in 0..2u32 {
            let mut product = Sums::zeroed();
            #[unroll]
            for quarter in 0..quarters {
                let packed = key[comptime!((half * quarters + quarter) as usize)];
                product = multiply(
                    query[comptime!((2 * quarter) as usize)],
                    right(packed.extract(0usize), packed.extract(1usize)),
                    product,
                    bf16,
                );
                product = multiply(
                    query[comptime!((2 * quarter + 1) as usize)],
                    right(packed.extract(2usize), packed.extract(3usize)),
                    product,
                    bf16,
                );
            }
            let mut seen = Sums::empty();
            #[unroll]
            for i in 0..4usize {
                let position = next + 8 * half + 2 * t + comptime!(i as u32 % 2);
                let inside = position >= range.begin && position < stop;
                let scored = score(product.extract(i), inner, outer, shape.capped);
                seen.insert(i, select(inside, scored, UNSEEN));
            }
            scores[half as usize] = seen;
        }

        let mut kept = Array::<f32>::new(2usize);
        let mut shares = Array::<u32>::new(4usize);
        #[unroll]
        for row in 0..2usize {
            kept[row] = 1.0;
            shares[row] = 0u32;
            shares[comptime!(row + 2)] = 0u32;
            if comptime!((row as u32) < halves) {
                let a = scores[0].extract(comptime!(2 * row));
                let b = scores[0].extract(comptime!(2 * row + 1));
                let c = scores[1].extract(comptime!(2 * row));
                let d = scores[1].extract(comptime!(2 * row + 1));
                let above = quad_max(a.max(b).max(c.max(d))).max(largest[row]);
                kept[row] = weight(largest[row] - above, true);
                largest[row] = above;
                let a = weight(a - above, true);
                let b = weight(b - above, true);
                let c = weight(c - above, true);
                let d = weight(d - above, true);
                total[row] = total[row] * kept[row] + (a + b + c + d);
                shares[row] = pack(a, b, bf16);
                shares[comptime!(row + 2)] = pack(c, d, bf16);
            }
        }
        let share = left(shares[0], shares[1], shares[2], shares[3]);
        #[unroll]
        for slice in 0..slices {
            #[unroll]
            for j in 0..8u32 {
                let index = comptime!((8 * slice + j) as usize);
                let mut words = Array::<u32>::new(2usize);
                #[unroll]
                for pair in 0..2u32 {
                    let first = value[comptime!((slice * 4 + 2 * pair) as usize)];
                    let second = value[comptime!((slice * 4 + 2 * pair + 1) as usize)];
                    words[pair as usize] = interleave(
                        first.extract(comptime!((j / 2) as usize)),
                        second.extract(comptime!((j / 2) as usize)),
                        comptime!(j % 2 == 1),
                    );
                }
                let mut sum = sums[index];
                sum.insert(0usize, sum.extract(0usize) * kept[0]);
                sum.insert(1usize, sum.extract(1usize) * kept[0]);
                if comptime!(halves == 2) {
                    sum.insert(2usize, sum.extract(2usize) * kept[1]);
                    sum.insert(3usize, sum.extract(3usize) * kept[1]);
                }
                sums[index] = multiply(share, right(words[0], words[1]), sum, bf16);
            }
        }
        next += comptime!(rows.planes * RUN);
        if next < stop {
            first_row = cache_row(blocks, first_block, next, kv_head, shape);
        }
    }

    // Planes meet in shared memory.
    let mut met = Shared::<[f32]>::new_slice(comptime!((rows.planes * heads * head_dim) as usize));
    let mut met_stats = Shared::<[f32]>::new_slice(comptime!((rows.planes * heads * 2) as usize));
    #[unroll]
    for half in 0..halves {
        let slot = g + 8 * half;
        let sum = quad_sum(total[half as usize]);
        if slot < heads {
            let row = plane * heads + slot;
            if t == 0 {
                met_stats[(2 * row) as usize] = largest[half as usize];
                met_stats[(2 * row + 1) as usize] = sum;
            }
            #[unroll]
            for slice in 0..slices {
                #[unroll]
                for i in 0..2u32 {
                    // Column `2 t + i` of product `j`.
                    let first = 64 * slice + 8 * (2 * t + i);
                    if first < head_dim {
                        #[unroll]
                        for j in 0..8u32 {
                            met[(row * head_dim + first + j) as usize] = sums
                                [comptime!((8 * slice + j) as usize)]
                            .extract(comptime!((2 * half + i) as usize));
                        }
                    }
                }
            }
        }
    }
    sync_cube();
    let mut at = plane * PLANE + UNIT_POS_X;
    while at < comptime!(heads * head_dim) {
        let slot = at / head_dim;
        let head = first_head + i32::cast_from(slot);
        if is_head(head, slot, in_group, shape, rows) {
            let mut above = UNSEEN.runtime();
            #[unroll]
            for other in 0..comptime!(rows.planes) {
                above = above.max(met_stats[(2 * (other * heads + slot)) as usize]);
            }
            let mut sum = 0.0f32;
            let mut all = 0.0f32;
            #[unroll]
            for other in 0..comptime!(rows.planes) {
                let row = other * heads + slot;
                let kept = weight(met_stats[(2 * row) as usize] - above, true);
                sum += met[(row * head_dim + at % head_dim) as usize] * kept;
                all += met_stats[(2 * row + 1) as usize] * kept;
            }
            if comptime!(split.is_whole()) {
                let feature = u32::cast_from(head) * head_dim + at % head_dim;
                partial[element_of(token as usize, feature as usize, features, order)] =
                    F::cast_from(sum / all * comptime!(order.factor()));
            } else {
                let row = (token * comptime!(shape.heads) + u32::cast_from(head))
                    * comptime!(split.splits)
                    + part;
                partial[(row * head_dim + at % head_dim) as usize] = F::cast_from(sum);
                if at.is_multiple_of(head_dim) {
                    stats[(2 * row) as usize] = above;
                    stats[(2 * row + 1) as usize] = all;
                }
            }
        }
        at += comptime!(rows.planes * PLANE);
    }
}

/// The query heads of a cube as operands: row `first_row` of `from` is the first.
#[cube]
fn left_operands(
    from: &[f32],
    first_row: i32,
    place: Place,
    query: &mut Array<Packed>,
    #[comptime] shape: Shape,
    #[comptime] rows: Rows,
) {
    let g = UNIT_POS_X / 4;
    let t = UNIT_POS_X % 4;
    #[unroll]
    for quarter in 0..comptime!(shape.head_dim / 32) {
        #[unroll]
        for half in 0..2u32 {
            // Registers of two rows: `g`, and `g + 8` where it is a head.
            let mut pairs = Array::<u32>::new(4usize);
            #[unroll]
            for other in 0..2u32 {
                pairs[comptime!((2 * other) as usize)] = 0u32;
                pairs[comptime!((2 * other + 1) as usize)] = 0u32;
                if comptime!(other < rows.halves()) {
                    let slot = g + 8 * other;
                    let head = place.first_head + i32::cast_from(slot);
                    if is_head(head, slot, place.in_group, shape, rows) {
                        let row = u32::cast_from(first_row + i32::cast_from(slot));
                        let at = row * comptime!(shape.head_dim) + quarter * 32 + t * 8 + half * 4;
                        #[unroll]
                        for pair in 0..2u32 {
                            pairs[comptime!((2 * other + pair) as usize)] = pack(
                                from[(at + 2 * pair) as usize],
                                from[(at + 2 * pair + 1) as usize],
                                rows.bf16,
                            );
                        }
                    }
                }
            }
            query[comptime!((2 * quarter + half) as usize)] =
                left(pairs[0], pairs[2], pairs[1], pairs[3]);
        }
    }
}

/// Whether a row of a cube is a query head of this device and of its key head.
#[cube]
pub(super) fn is_head(
    head: i32,
    slot: u32,
    in_group: u32,
    #[comptime] shape: Shape,
    #[comptime] rows: Rows,
) -> bool {
    slot < rows.heads && is_own_head(head, in_group + slot, shape)
}

/// Whether a query head, number `in_group` of those of a key head, is one of this device and of that key head.
#[cube]
pub(super) fn is_own_head(head: i32, in_group: u32, #[comptime] shape: Shape) -> bool {
    let heads = comptime!(shape.heads as i32);
    in_group < shape.group && head >= 0 && head < heads
}
