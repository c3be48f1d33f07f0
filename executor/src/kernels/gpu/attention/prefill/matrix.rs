//! Tiles with matrix instructions, after FlashAttention-2 (Dao 2023): scores, weights and sums stay in registers.
//!
//! - A plane has 16 queries of the tile; the keys and values of a step are in shared memory for all planes.
//! - While one step is computed the next is copied: there are two stages, and one barrier a step.
//! - Rows of a stage are 16 bytes longer than a head, so that eight rows at a time are read from different banks.

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::barrier::copy_async_checked;
use cubecl::prelude::*;
use half::bf16;

use super::tiles::tile;
use crate::kernels::gpu::attention::Shape;
use crate::kernels::gpu::attention::paging::{cache_row, first_seen};
use crate::kernels::gpu::attention::scores::{UNSEEN, score, weight};
use crate::kernels::gpu::instructions::{
    Packed, Sums, left, multiply, pack, quad_max, quad_sum, right,
};

/// Lanes of a plane.
pub(super) const PLANE: u32 = 32;
/// Planes of a cube.
pub(super) const PLANES: u32 = 8;
/// Queries of a plane.
const PLANE_ROWS: u32 = 16;
/// Queries of a tile.
pub(super) const ROWS: u32 = PLANES * PLANE_ROWS;

/// Whether heads are of a size that fits the operands and the registers.
pub(super) fn serves(head_dim: u32) -> bool {
    head_dim.is_multiple_of(16) && head_dim <= 256
}

/// Sizes of a step and of its place in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Step {
    /// Keys of a step: fewer where longer heads leave fewer registers.
    columns: u32,
    /// 16-byte vectors of a head.
    vectors: u32,
    /// 16-byte vectors from row to row.
    stride: u32,
    /// 16-byte vectors from keys to values.
    side: u32,
    /// 16-byte vectors from stage to stage.
    stage: u32,
}

impl Step {
    fn new(shape: Shape) -> Self {
        let columns = if shape.head_dim > 128 { 32 } else { 64 };
        let vectors = shape.head_dim / 8;
        let stride = vectors + 1;
        Self { columns, vectors, stride, side: columns * stride, stage: 2 * columns * stride }
    }
}

/// Cubes: heads, tiles.
#[cube(launch_unchecked)]
pub(super) fn prefill(
    queries: &[Vector<f32, Const<2>>],
    keys: &[Packed],
    values: &[Packed],
    sequence_parts: &[i32],
    blocks: &[i32],
    out: &mut [Vector<f32, Const<2>>],
    inner: f32,
    outer: f32,
    sequences: u32,
    max_blocks: u32,
    #[comptime] shape: Shape,
    #[comptime] bf16: bool,
) {
    let step = comptime!(Step::new(shape));
    let pairs = comptime!(shape.head_dim / 2);
    let depths = comptime!(shape.head_dim / 16);
    let column_tiles = comptime!(step.columns / 8);
    let element_tiles = comptime!(shape.head_dim / 8);
    let lane = UNIT_POS_X;
    let plane = UNIT_POS_Y;
    let g = lane / 4;
    let t = lane % 4;
    let head = CUBE_POS_X;
    let kv_head = (head + comptime!(shape.first_head)) / comptime!(shape.group);
    let tile = tile(sequence_parts, sequences, CUBE_POS_Y, ROWS, shape.window);
    if tile.rows == 0 {
        terminate!();
    }
    let first_block = tile.sequence * max_blocks;
    let end = tile.position + tile.rows;
    let start = tile.begin / step.columns * step.columns;

    let mut staged =
        Shared::<[Packed]>::new_aligned_slice(comptime!((2 * step.stage) as usize), 16usize);
    copy_step(
        keys,
        values,
        blocks,
        &mut staged,
        0u32,
        start,
        end,
        first_block,
        kv_head,
        shape,
        step,
    );

    // Rows `g` and `g + 8` of the plane; those behind the last are computed as the last and not stored.
    let row = plane * PLANE_ROWS + g;
    let mut query = Array::<Packed>::new(depths as usize);
    let from = query_row(tile.row, tile.rows, row, head, shape) + t;
    let from_lower = query_row(tile.row, tile.rows, row + 8, head, shape) + t;
    #[unroll]
    for depth in 0..depths {
        let a = queries[(from + 8 * depth) as usize];
        let b = queries[(from_lower + 8 * depth) as usize];
        let c = queries[(from + 8 * depth + 4) as usize];
        let d = queries[(from_lower + 8 * depth + 4) as usize];
        query[depth as usize] = left(
            pack(a.extract(0usize), a.extract(1usize), bf16),
            pack(b.extract(0usize), b.extract(1usize), bf16),
            pack(c.extract(0usize), c.extract(1usize), bf16),
            pack(d.extract(0usize), d.extract(1usize), bf16),
        );
    }

    // Which row of a stage a lane points at when it loads four 8 × 8 operands: for keys a pair of column tiles by 16
    // elements, for values a pair of element tiles by 16 tokens, transposed.
    let key_row = (lane / 16 * 8 + lane % 8) * step.stride + lane / 8 % 2;
    let value_row = (lane / 8 % 2 * 8 + lane % 8) * step.stride + lane / 16 + step.side;

    let mut sums = Array::<Sums>::new(element_tiles as usize);
    #[unroll]
    for i in 0..element_tiles {
        sums[i as usize] = Sums::zeroed();
    }
    let mut largest = Array::<f32>::new(2usize);
    let mut total = Array::<f32>::new(2usize);
    #[unroll]
    for half in 0..2usize {
        largest[half] = UNSEEN;
        total[half] = 0.0;
    }
    let position = tile.position + row;
    let first_position = tile.position + plane * PLANE_ROWS;
    let last_position = first_position + comptime!(PLANE_ROWS - 1);
    let first_begin = first_seen(first_position, shape.window);
    let last_begin = first_seen(last_position, shape.window);
    // A capped score is one already; others become one where their weight is worked out.
    let mut factor = inner;
    if comptime!(shape.capped) {
        factor = 1.0;
    }

    let mut stage = 0u32;
    let mut next = start;
    while next < end {
        await_copies();
        sync_cube();
        if next + step.columns < end {
            copy_step(
                keys,
                values,
                blocks,
                &mut staged,
                step.stage - stage,
                next + step.columns,
                end,
                first_block,
                kv_head,
                shape,
                step,
            );
        }
        // No row of the plane may see any key of the step.
        if next <= last_position && next + step.columns > first_begin {
            let mut scores = Array::<Sums>::new(column_tiles as usize);
            #[unroll]
            for i in 0..column_tiles {
                scores[i as usize] = Sums::zeroed();
            }
            #[unroll]
            for depth in 0..depths {
                #[unroll]
                for pair in 0..comptime!(column_tiles / 2) {
                    let at = stage + key_row + comptime!(16 * pair * step.stride + 2 * depth);
                    let operands = load(&staged, at, false);
                    let first = comptime!((2 * pair) as usize);
                    let second = comptime!((2 * pair + 1) as usize);
                    scores[first] = multiply(
                        query[depth as usize],
                        right(operands.extract(0usize), operands.extract(1usize)),
                        scores[first],
                        bf16,
                    );
                    scores[second] = multiply(
                        query[depth as usize],
                        right(operands.extract(2usize), operands.extract(3usize)),
                        scores[second],
                        bf16,
                    );
                }
            }
            if comptime!(shape.capped) {
                #[unroll]
                for i in 0..column_tiles {
                    let mut capped = Sums::empty();
                    #[unroll]
                    for j in 0..4usize {
                        capped.insert(j, score(scores[i as usize].extract(j), inner, outer, true));
                    }
                    scores[i as usize] = capped;
                }
            }
            if next + step.columns - 1 > first_position || next < last_begin {
                #[unroll]
                for i in 0..column_tiles {
                    let mut seen = Sums::empty();
                    #[unroll]
                    for j in 0..4u32 {
                        let at = position + comptime!(j / 2 * 8);
                        let column = next + 8 * i + 2 * t + comptime!(j % 2);
                        let begin = first_seen(at, shape.window);
                        let inside = column <= at && column >= begin;
                        let value = scores[i as usize].extract(j as usize);
                        seen.insert(j as usize, select(inside, value, UNSEEN));
                    }
                    scores[i as usize] = seen;
                }
            }

            let mut kept = Array::<f32>::new(2usize);
            #[unroll]
            for half in 0..2usize {
                let mut above = scores[0].extract(comptime!(2 * half));
                #[unroll]
                for i in 0..column_tiles {
                    above = above.max(scores[i as usize].extract(comptime!(2 * half)));
                    above = above.max(scores[i as usize].extract(comptime!(2 * half + 1)));
                }
                let above = largest[half].max(quad_max(above) * factor);
                kept[half] = weight(largest[half] - above, true);
                largest[half] = above;
                total[half] *= kept[half];
            }
            #[unroll]
            for i in 0..element_tiles {
                let mut sum = sums[i as usize];
                #[unroll]
                for j in 0..4usize {
                    sum.insert(j, sum.extract(j) * kept[comptime!(j / 2)]);
                }
                sums[i as usize] = sum;
            }
            #[unroll]
            for depth in 0..comptime!(step.columns / 16) {
                // The weights of 16 columns are laid down as the left operand of their values already.
                let mut shares = Array::<u32>::new(4usize);
                #[unroll]
                for i in 0..2u32 {
                    let scores = scores[comptime!((2 * depth + i) as usize)];
                    #[unroll]
                    for half in 0..2usize {
                        let first = scores.extract(comptime!(2 * half)) * factor;
                        let second = scores.extract(comptime!(2 * half + 1)) * factor;
                        let first = weight(first - largest[half], true);
                        let second = weight(second - largest[half], true);
                        total[half] += first + second;
                        shares[comptime!(2 * i as usize + half)] = pack(first, second, bf16);
                    }
                }
                let share = left(shares[0], shares[1], shares[2], shares[3]);
                #[unroll]
                for pair in 0..comptime!(element_tiles / 2) {
                    let at = stage + value_row + comptime!(16 * depth * step.stride + 2 * pair);
                    let operands = load(&staged, at, true);
                    let first = comptime!((2 * pair) as usize);
                    let second = comptime!((2 * pair + 1) as usize);
                    sums[first] = multiply(
                        share,
                        right(operands.extract(0usize), operands.extract(1usize)),
                        sums[first],
                        bf16,
                    );
                    sums[second] = multiply(
                        share,
                        right(operands.extract(2usize), operands.extract(3usize)),
                        sums[second],
                        bf16,
                    );
                }
            }
        }
        stage = step.stage - stage;
        next += step.columns;
    }

    #[unroll]
    for half in 0..2u32 {
        let inverse = 1.0 / quad_sum(total[half as usize]);
        if row + 8 * half < tile.rows {
            let to = ((tile.row + row + 8 * half) * comptime!(shape.heads) + head) * pairs + t;
            #[unroll]
            for i in 0..element_tiles {
                let mut pair = Vector::<f32, Const<2>>::empty();
                pair.insert(
                    0usize,
                    sums[i as usize].extract(comptime!((2 * half) as usize)) * inverse,
                );
                pair.insert(
                    1usize,
                    sums[i as usize].extract(comptime!((2 * half + 1) as usize)) * inverse,
                );
                out[(to + 4 * i) as usize] = pair;
            }
        }
    }
}

/// The first pair of elements of a query.
#[cube]
fn query_row(first: u32, rows: u32, row: u32, head: u32, #[comptime] shape: Shape) -> u32 {
    let row = first + u32::min(row, rows - 1);
    (row * comptime!(shape.heads) + head) * comptime!(shape.head_dim / 2)
}

/// Starts to copy keys and values of a step; those behind the last become zeros.
#[cube]
fn copy_step(
    keys: &[Packed],
    values: &[Packed],
    blocks: &[i32],
    staged: &mut Shared<[Packed]>,
    stage: u32,
    next: u32,
    end: u32,
    first_block: u32,
    kv_head: u32,
    #[comptime] shape: Shape,
    #[comptime] step: Step,
) {
    let units = comptime!(PLANE * PLANES);
    let all = comptime!(step.columns * step.vectors);
    let unit = UNIT_POS_Y * PLANE + UNIT_POS_X;
    #[unroll]
    for i in 0..comptime!(all.div_ceil(units)) {
        let at = unit + i * units;
        if comptime!((i + 1) * units <= all) || at < all {
            let column = at / step.vectors;
            let vector = at % step.vectors;
            let position = u32::min(next + column, end - 1);
            let count = select(next + column < end, 1u32, 0u32);
            let row = cache_row(blocks, first_block, position, kv_head, shape);
            let from = (row * step.vectors + vector) as usize;
            let until = from + count as usize;
            let to = (stage + column * step.stride + vector) as usize;
            let value_to = to + comptime!(step.side as usize);
            copy_async_checked(&keys[from..until], &mut staged[to..to + 1], comptime!(4u32));
            copy_async_checked(
                &values[from..until],
                &mut staged[value_to..value_to + 1],
                comptime!(4u32),
            );
        }
    }
    gpu_asm!("cp.async.commit_group;");
}

/// Waits until what this unit has copied is there.
#[cube]
fn await_copies() {
    gpu_asm!("cp.async.wait_group 0;");
}

/// Four 8 × 8 operands, each transposed or not, whose rows the lanes point at.
#[cube]
fn load(staged: &Shared<[Packed]>, at: u32, #[comptime] transposed: bool) -> Packed {
    // Only the shape of its registers matters here, and that is the same for all elements of 16 bits.
    let definition = MmaDefinition::<bf16, bf16, f32>::new(16usize, 8usize, 16usize);
    let row = &staged[at as usize..(at + 1) as usize];
    let operands = definition.load_matrix::<_, Const<1>>(row, MatrixIdent::A, 4usize, transposed);
    operands.into_vector::<Const<4>>()
}
