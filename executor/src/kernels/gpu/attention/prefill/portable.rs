//! Tiles with f32 arithmetic in shared memory and registers: for caches and devices that matrix instructions do not
//! serve, and the measure of those that they do.

use cubecl::prelude::*;

use super::tiles::tile;
use crate::kernels::gpu::attention::Shape;
use crate::kernels::gpu::attention::paging::{cache_row, first_seen};
use crate::kernels::gpu::attention::scores::{UNSEEN, score, weight};

/// Units along either axis of a cube.
pub(super) const SIDE: u32 = 16;
/// Query rows of a unit.
const UNIT_ROWS: u32 = 4;
/// Key columns of a unit.
const UNIT_COLUMNS: u32 = 2;
/// Queries of a tile.
pub(super) const ROWS: u32 = SIDE * UNIT_ROWS;
/// Keys of a tile.
const COLUMNS: u32 = SIDE * UNIT_COLUMNS;
/// Elements of a head that are in shared memory at a time.
const DEPTH: u32 = 32;

/// Cubes: heads, tiles. Unit `(x, y)` has queries `4 y ..` and keys `x, x + 16`, and later elements `x, x + 16, …`.
#[cube(launch_unchecked)]
pub(super) fn prefill<F: Float>(
    queries: &[f32],
    keys: &[F],
    values: &[F],
    sequence_parts: &[i32],
    blocks: &[i32],
    out: &mut [f32],
    inner: f32,
    outer: f32,
    sequences: u32,
    max_blocks: u32,
    #[comptime] shape: Shape,
    #[comptime] cuda: bool,
    #[define(F)] _element: ElemType,
) {
    let head_dim = comptime!(shape.head_dim);
    let depths = comptime!(head_dim.div_ceil(DEPTH));
    let units = comptime!(SIDE * SIDE);
    let x = UNIT_POS_X;
    let y = UNIT_POS_Y;
    let unit = y * SIDE + x;
    let head = CUBE_POS_X;
    let kv_head = (head + comptime!(shape.first_head)) / comptime!(shape.group);
    let tile = tile(sequence_parts, sequences, CUBE_POS_Y, ROWS, shape.window);
    if tile.rows == 0 {
        terminate!();
    }
    let first_block = tile.sequence * max_blocks;
    let end = tile.position + tile.rows;

    // Elements are followed by rows, so that the rows of a unit lie side by side.
    let mut left = Shared::<[f32]>::new_slice(comptime!((DEPTH * ROWS) as usize));
    let mut right = Shared::<[f32]>::new_slice(comptime!((DEPTH * COLUMNS) as usize));
    let mut shares = Shared::<[f32]>::new_slice(comptime!((ROWS * COLUMNS) as usize));

    // Two elements of a unit in each slice of a head.
    let per_row = comptime!(depths * 2);
    let mut sums = Array::<f32>::new(comptime!((UNIT_ROWS * per_row) as usize));
    let mut largest = Array::<f32>::new(UNIT_ROWS as usize);
    let mut total = Array::<f32>::new(UNIT_ROWS as usize);
    #[unroll]
    for r in 0..UNIT_ROWS {
        largest[r as usize] = UNSEEN;
        total[r as usize] = 0.0;
        #[unroll]
        for i in 0..per_row {
            sums[comptime!((r * per_row + i) as usize)] = 0.0;
        }
    }

    let mut scores = Array::<f32>::new(comptime!((UNIT_ROWS * UNIT_COLUMNS) as usize));
    let mut next = tile.begin / COLUMNS * COLUMNS;
    while next < end {
        #[unroll]
        for i in 0..comptime!(UNIT_ROWS * UNIT_COLUMNS) {
            scores[i as usize] = 0.0;
        }
        for depth in 0..depths {
            let mut at = unit;
            while at < comptime!(DEPTH * ROWS) {
                let row = at / DEPTH;
                let element = depth * DEPTH + at % DEPTH;
                let mut value = 0.0f32;
                if row < tile.rows && element < head_dim {
                    let from = ((tile.row + row) * comptime!(shape.heads) + head) * head_dim;
                    value = queries[(from + element) as usize];
                }
                left[(at % DEPTH * ROWS + row) as usize] = value;
                at += units;
            }
            let mut at = unit;
            while at < comptime!(DEPTH * COLUMNS) {
                let column = at / DEPTH;
                let element = depth * DEPTH + at % DEPTH;
                let mut value = 0.0f32;
                if next + column < end && element < head_dim {
                    let row = cache_row(blocks, first_block, next + column, kv_head, shape);
                    value = f32::cast_from(keys[(row * head_dim + element) as usize]);
                }
                right[(at % DEPTH * COLUMNS + column) as usize] = value;
                at += units;
            }
            sync_cube();
            for element in 0..DEPTH {
                #[unroll]
                for r in 0..UNIT_ROWS {
                    let query = left[(element * ROWS + y * UNIT_ROWS + r) as usize];
                    #[unroll]
                    for c in 0..UNIT_COLUMNS {
                        scores[comptime!((r * UNIT_COLUMNS + c) as usize)] +=
                            query * right[(element * COLUMNS + x + c * SIDE) as usize];
                    }
                }
            }
            sync_cube();
        }

        #[unroll]
        for r in 0..UNIT_ROWS {
            let position = tile.position + y * UNIT_ROWS + r;
            let begin = first_seen(position, shape.window);
            #[unroll]
            for c in 0..UNIT_COLUMNS {
                let index = comptime!((r * UNIT_COLUMNS + c) as usize);
                let column = x + c * SIDE;
                let seen = next + column <= position && next + column >= begin;
                let value = select(seen, score(scores[index], inner, outer, shape.capped), UNSEEN);
                scores[index] = value;
                shares[((y * UNIT_ROWS + r) * COLUMNS + column) as usize] = value;
            }
        }
        sync_cube();
        let mut kept = Array::<f32>::new(UNIT_ROWS as usize);
        #[unroll]
        for r in 0..UNIT_ROWS {
            let mut above = largest[r as usize];
            for column in 0..COLUMNS {
                above = above.max(shares[((y * UNIT_ROWS + r) * COLUMNS + column) as usize]);
            }
            kept[r as usize] = weight(largest[r as usize] - above, cuda);
            largest[r as usize] = above;
            total[r as usize] *= kept[r as usize];
        }
        sync_cube();
        #[unroll]
        for r in 0..UNIT_ROWS {
            #[unroll]
            for c in 0..UNIT_COLUMNS {
                let value = scores[comptime!((r * UNIT_COLUMNS + c) as usize)];
                let share =
                    select(value > UNSEEN, weight(value - largest[r as usize], cuda), 0.0f32);
                shares[((y * UNIT_ROWS + r) * COLUMNS + x + c * SIDE) as usize] = share;
            }
        }
        #[unroll]
        for depth in 0..depths {
            let mut at = unit;
            while at < comptime!(DEPTH * COLUMNS) {
                let column = at / DEPTH;
                let element = depth * DEPTH + at % DEPTH;
                let mut value = 0.0f32;
                if next + column < end && element < head_dim {
                    let row = cache_row(blocks, first_block, next + column, kv_head, shape);
                    value = f32::cast_from(values[(row * head_dim + element) as usize]);
                }
                right[at as usize] = value;
                at += units;
            }
            sync_cube();
            #[unroll]
            for r in 0..UNIT_ROWS {
                let first = comptime!((r * per_row + 2 * depth) as usize);
                let second = comptime!((r * per_row + 2 * depth + 1) as usize);
                sums[first] *= kept[r as usize];
                sums[second] *= kept[r as usize];
            }
            for column in 0..COLUMNS {
                let a = right[(column * DEPTH + x) as usize];
                let b = right[(column * DEPTH + x + SIDE) as usize];
                #[unroll]
                for r in 0..UNIT_ROWS {
                    let share = shares[((y * UNIT_ROWS + r) * COLUMNS + column) as usize];
                    sums[comptime!((r * per_row + 2 * depth) as usize)] += share * a;
                    sums[comptime!((r * per_row + 2 * depth + 1) as usize)] += share * b;
                    if comptime!(depth == 0) {
                        total[r as usize] += share;
                    }
                }
            }
            sync_cube();
        }
        next += COLUMNS;
    }

    #[unroll]
    for r in 0..UNIT_ROWS {
        let row = y * UNIT_ROWS + r;
        if row < tile.rows {
            let to = ((tile.row + row) * comptime!(shape.heads) + head) * head_dim;
            #[unroll]
            for i in 0..per_row {
                let element = x + i * SIDE;
                if element < head_dim {
                    out[(to + element) as usize] =
                        sums[comptime!((r * per_row + i) as usize)] / total[r as usize];
                }
            }
        }
    }
}
