//! Tiles with matrix instructions, after FlashAttention-2 (Dao 2023): scores, weights and sums stay in registers.
//!
//! - A plane has one or two stacks of 16 queries of the tile; the keys and values of a step are in shared memory for
//!   all planes. What is read there once for both stacks leaves the memory time for another cube's reads: with two
//!   stacks queries are read there, too, and two cubes share a processor.
//! - While one step is computed the next is copied: there are two stages, and one barrier a step.
//! - Rows of a stage are 16 bytes longer than a head, so that eight rows at a time are read from different banks.

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::barrier::copy_async_checked;
use cubecl::prelude::*;
use half::bf16;

use super::tiles::{Tile, tile};
use crate::kernels::gpu::attention::Shape;
use crate::kernels::gpu::attention::paging::{cache_row, first_seen};
use crate::kernels::gpu::attention::scores::{LEAST, UNSEEN, score, weight};
use crate::kernels::gpu::instructions::{
    PLANE, Packed, Sums, left, multiply, pack, quad_max, quad_sum, right,
};

/// Queries of a stack, those of a left operand.
const STACK_ROWS: u32 = 16;
/// Queries of the largest tiles.
pub(super) const MOST_ROWS: u32 = 128;

/// Whether heads are of a size that fits the operands and the registers.
pub(super) fn serves(head_dim: u32) -> bool {
    head_dim.is_multiple_of(16) && head_dim <= 256
}

/// Keys of a step: with twice as many, registers hold more scores than they gain (6 % slower on an H200).
const COLUMNS: u32 = 32;

/// How a cube works, and what it has in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Step {
    /// Stacks of queries of a plane.
    stacks: u32,
    /// Planes of a cube.
    planes: u32,
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
    /// What suits heads of `head_dim` elements on a device with `shared_bytes` of shared memory: two stacks where two
    /// cubes fit, else one. Longer heads leave registers for one.
    ///
    /// Where all of `cubes` cubes of [`MOST_ROWS`] queries find a place at once, the one that sees most is waited for,
    /// and a step of one stack is over sooner; where there are as few as processors have room for twice, so are smaller
    /// ones. (On an H200 16 heads of 512 tokens take 17 instead of 23 µs, of 2,048 82 instead of 103, 32 heads of 1,024
    /// 48 instead of 56.)
    pub(super) fn new(head_dim: u32, shared_bytes: usize, cubes: u32, processors: u32) -> Self {
        let two = Self::of(head_dim, 2, 4);
        let fits = head_dim <= 128 && 2 * two.bytes() <= shared_bytes;
        match cubes {
            _ if 2 * cubes <= processors => Self::of(head_dim, 1, 4),
            _ if fits && cubes > 2 * processors => two,
            _ => Self::of(head_dim, 1, 8),
        }
    }

    /// A step of `planes` planes with `stacks` stacks.
    pub(super) fn of(head_dim: u32, stacks: u32, planes: u32) -> Self {
        let vectors = head_dim / 8;
        let stride = vectors + 1;
        let side = COLUMNS * stride;
        Self { stacks, planes, vectors, stride, side, stage: 2 * side }
    }

    /// Planes of a cube.
    pub(super) fn planes(self) -> u32 {
        self.planes
    }

    /// Queries of a tile.
    pub(super) fn rows(self) -> u32 {
        self.planes * self.plane_rows()
    }

    /// Queries of a plane.
    fn plane_rows(self) -> u32 {
        STACK_ROWS * self.stacks
    }

    /// Whether queries are in shared memory, behind both stages; otherwise registers hold them.
    fn shares_queries(self) -> bool {
        self.stacks > 1
    }

    /// 16-byte vectors of shared memory.
    fn shared(self) -> u32 {
        let queries = if self.shares_queries() { self.rows() * self.stride } else { 0 };
        2 * self.stage + queries
    }

    pub(super) fn bytes(self) -> usize {
        self.shared() as usize * size_of::<[u32; 4]>()
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
    #[comptime] step: Step,
    #[comptime] bf16: bool,
) {
    let stacks = comptime!(step.stacks);
    let pairs = comptime!(shape.head_dim / 2);
    let depths = comptime!(shape.head_dim / 16);
    let column_tiles = comptime!(COLUMNS / 8);
    let element_tiles = comptime!(shape.head_dim / 8);
    let lane = UNIT_POS_X;
    let plane = UNIT_POS_Y;
    let g = lane / 4;
    let t = lane % 4;
    let head = CUBE_POS_X;
    let kv_head = (head + comptime!(shape.first_head)) / comptime!(shape.group);
    let tile = tile(sequence_parts, sequences, CUBE_POS_Y, step.rows(), shape.window);
    if tile.rows == 0 {
        terminate!();
    }
    let first_block = tile.sequence * max_blocks;
    let end = tile.position + tile.rows;
    let start = tile.begin / COLUMNS * COLUMNS;

    let mut staged =
        Shared::<[Packed]>::new_aligned_slice(comptime!(step.shared() as usize), 16usize);
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

    // Rows `g` and `g + 8` of each stack; those behind the last are computed as the last and not stored.
    let row = plane * comptime!(step.plane_rows()) + g;
    let mut held = Array::<Packed>::new(depths as usize);
    if comptime!(step.shares_queries()) {
        share_queries(queries, &mut staged, tile, head, shape, step, bf16);
    } else {
        let from = query_row(tile, row, head, shape) + t;
        let from_lower = query_row(tile, row + 8, head, shape) + t;
        #[unroll]
        for depth in 0..depths {
            held[depth as usize] = left(
                packed_pair(queries, from + 8 * depth, bf16),
                packed_pair(queries, from_lower + 8 * depth, bf16),
                packed_pair(queries, from + 8 * depth + 4, bf16),
                packed_pair(queries, from_lower + 8 * depth + 4, bf16),
            );
        }
    }
    // Which row of the queries a lane points at: 16 rows by 16 elements.
    let query_at = (plane * comptime!(step.plane_rows()) + lane % 16) * step.stride
        + lane / 16
        + comptime!(2 * step.stage);

    // Which row of a stage a lane points at when it loads four 8 × 8 operands: for keys a pair of column tiles by 16
    // elements, for values a pair of element tiles by 16 tokens, transposed.
    let key_row = (lane / 16 * 8 + lane % 8) * step.stride + lane / 8 % 2;
    let value_row = (lane / 8 % 2 * 8 + lane % 8) * step.stride + lane / 16 + step.side;

    // `[stack][tile of elements]`, and for rows `g` and `g + 8` of each stack.
    let mut sums = Array::<Sums>::new(comptime!((stacks * element_tiles) as usize));
    #[unroll]
    for i in 0..comptime!(stacks * element_tiles) {
        sums[i as usize] = Sums::zeroed();
    }
    let mut largest = Array::<f32>::new(comptime!((2 * stacks) as usize));
    let mut total = Array::<f32>::new(comptime!((2 * stacks) as usize));
    #[unroll]
    for half in 0..comptime!((2 * stacks) as usize) {
        largest[half] = LEAST;
        total[half] = 0.0;
    }
    let position = tile.position + row;
    let first_position = tile.position + plane * comptime!(step.plane_rows());
    let last_position = first_position + comptime!(step.plane_rows() - 1);
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
        if next + COLUMNS < end {
            copy_step(
                keys,
                values,
                blocks,
                &mut staged,
                step.stage - stage,
                next + COLUMNS,
                end,
                first_block,
                kv_head,
                shape,
                step,
            );
        }
        // No row of the plane may see any key of the step.
        if next <= last_position && next + COLUMNS > first_begin {
            // `[stack][tile of columns]`.
            let mut scores = Array::<Sums>::new(comptime!((stacks * column_tiles) as usize));
            #[unroll]
            for i in 0..comptime!(stacks * column_tiles) {
                scores[i as usize] = Sums::zeroed();
            }
            #[unroll]
            for depth in 0..depths {
                let mut query = Array::<Packed>::new(stacks as usize);
                if comptime!(step.shares_queries()) {
                    #[unroll]
                    for stack in 0..stacks {
                        let at = comptime!(stack * STACK_ROWS * step.stride + 2 * depth);
                        query[stack as usize] = load(&staged, query_at + at, false);
                    }
                } else {
                    query[0] = held[depth as usize];
                }
                #[unroll]
                for pair in 0..comptime!(column_tiles / 2) {
                    let at = stage + key_row + comptime!(16 * pair * step.stride + 2 * depth);
                    let operands = load(&staged, at, false);
                    #[unroll]
                    for stack in 0..stacks {
                        let first = comptime!((stack * column_tiles + 2 * pair) as usize);
                        multiply_pair(&mut scores, first, query[stack as usize], operands, bf16);
                    }
                }
            }
            if comptime!(shape.capped) {
                #[unroll]
                for i in 0..comptime!(stacks * column_tiles) {
                    let mut capped = Sums::empty();
                    #[unroll]
                    for j in 0..4usize {
                        capped.insert(j, score(scores[i as usize].extract(j), inner, outer, true));
                    }
                    scores[i as usize] = capped;
                }
            }
            if next + COLUMNS - 1 > first_position || next < last_begin {
                #[unroll]
                for i in 0..comptime!(stacks * column_tiles) {
                    let mut seen = Sums::empty();
                    #[unroll]
                    for j in 0..4u32 {
                        let at = position + comptime!(i / column_tiles * STACK_ROWS + j / 2 * 8);
                        let column = next + comptime!(8 * (i % column_tiles) + j % 2) + 2 * t;
                        let begin = first_seen(at, shape.window);
                        let inside = column <= at && column >= begin;
                        let value = scores[i as usize].extract(j as usize);
                        seen.insert(j as usize, select(inside, value, UNSEEN));
                    }
                    scores[i as usize] = seen;
                }
            }

            let mut kept = Array::<f32>::new(comptime!((2 * stacks) as usize));
            #[unroll]
            for half in 0..comptime!((2 * stacks) as usize) {
                let first = comptime!(half / 2 * column_tiles as usize);
                let mut above = scores[first].extract(comptime!(2 * (half % 2)));
                #[unroll]
                for i in 0..column_tiles as usize {
                    above = above.max(scores[first + i].extract(comptime!(2 * (half % 2))));
                    above = above.max(scores[first + i].extract(comptime!(2 * (half % 2) + 1)));
                }
                let above = largest[half].max(quad_max(above) * factor);
                kept[half] = weight(largest[half] - above, true);
                largest[half] = above;
                total[half] *= kept[half];
            }
            #[unroll]
            for i in 0..comptime!(stacks * element_tiles) {
                let mut sum = sums[i as usize];
                #[unroll]
                for j in 0..4usize {
                    let half = comptime!((i / element_tiles * 2) as usize + j / 2);
                    sum.insert(j, sum.extract(j) * kept[half]);
                }
                sums[i as usize] = sum;
            }
            #[unroll]
            for depth in 0..comptime!(COLUMNS / 16) {
                // The weights of 16 columns are laid down as the left operand of their values already.
                let mut weights = Array::<Packed>::new(stacks as usize);
                #[unroll]
                for stack in 0..stacks {
                    let mut shares = Array::<u32>::new(4usize);
                    #[unroll]
                    for i in 0..2u32 {
                        let scores =
                            scores[comptime!((stack * column_tiles + 2 * depth + i) as usize)];
                        #[unroll]
                        for half in 0..2usize {
                            let of_stack = comptime!(2 * stack as usize + half);
                            let first = scores.extract(comptime!(2 * half)) * factor;
                            let second = scores.extract(comptime!(2 * half + 1)) * factor;
                            let first = weight(first - largest[of_stack], true);
                            let second = weight(second - largest[of_stack], true);
                            total[of_stack] += first + second;
                            shares[comptime!(2 * i as usize + half)] = pack(first, second, bf16);
                        }
                    }
                    weights[stack as usize] = left(shares[0], shares[1], shares[2], shares[3]);
                }
                #[unroll]
                for pair in 0..comptime!(element_tiles / 2) {
                    let at = stage + value_row + comptime!(16 * depth * step.stride + 2 * pair);
                    let operands = load(&staged, at, true);
                    #[unroll]
                    for stack in 0..stacks {
                        let first = comptime!((stack * element_tiles + 2 * pair) as usize);
                        multiply_pair(&mut sums, first, weights[stack as usize], operands, bf16);
                    }
                }
            }
        }
        stage = step.stage - stage;
        next += COLUMNS;
    }

    #[unroll]
    for half in 0..comptime!(2 * stacks) {
        let inverse = 1.0 / quad_sum(total[half as usize]);
        let of_tile = row + comptime!(8 * half);
        if of_tile < tile.rows {
            let to = ((tile.row + of_tile) * comptime!(shape.heads) + head) * pairs + t;
            #[unroll]
            for i in 0..element_tiles {
                let sum = sums[comptime!((half / 2 * element_tiles + i) as usize)];
                let mut pair = Vector::<f32, Const<2>>::empty();
                #[unroll]
                for j in 0..2usize {
                    let of_sum = comptime!((half % 2 * 2) as usize + j);
                    pair.insert(j, sum.extract(of_sum) * inverse);
                }
                out[(to + 4 * i) as usize] = pair;
            }
        }
    }
}

/// Adds the products of a left operand with a pair of neighbouring right ones to `sums[first]` and the one behind it.
#[cube]
fn multiply_pair(
    sums: &mut Array<Sums>,
    #[comptime] first: usize,
    operand: Packed,
    pair: Packed,
    #[comptime] bf16: bool,
) {
    let lower = right(pair.extract(0usize), pair.extract(1usize));
    let upper = right(pair.extract(2usize), pair.extract(3usize));
    sums[first] = multiply(operand, lower, sums[first], bf16);
    sums[first + 1] = multiply(operand, upper, sums[first + 1], bf16);
}

/// Puts the queries of a plane behind the stages.
#[cube]
fn share_queries(
    queries: &[Vector<f32, Const<2>>],
    staged: &mut Shared<[Packed]>,
    tile: Tile,
    head: u32,
    #[comptime] shape: Shape,
    #[comptime] step: Step,
    #[comptime] bf16: bool,
) {
    let all = comptime!(step.plane_rows() * step.vectors);
    #[unroll]
    for i in 0..comptime!(all.div_ceil(PLANE)) {
        let at = UNIT_POS_X + i * PLANE;
        if comptime!((i + 1) * PLANE <= all) || at < all {
            let row = UNIT_POS_Y * comptime!(step.plane_rows()) + at / step.vectors;
            let vector = at % step.vectors;
            let from = query_row(tile, row, head, shape) + 4 * vector;
            let to = comptime!(2 * step.stage) + row * step.stride + vector;
            staged[to as usize] = left(
                packed_pair(queries, from, bf16),
                packed_pair(queries, from + 1, bf16),
                packed_pair(queries, from + 2, bf16),
                packed_pair(queries, from + 3, bf16),
            );
        }
    }
}

/// A pair of elements of a query.
#[cube]
fn packed_pair(queries: &[Vector<f32, Const<2>>], at: u32, #[comptime] bf16: bool) -> u32 {
    let pair = queries[at as usize];
    pack(pair.extract(0usize), pair.extract(1usize), bf16)
}

/// The first pair of elements of a query.
#[cube]
fn query_row(tile: Tile, row: u32, head: u32, #[comptime] shape: Shape) -> u32 {
    let row = tile.row + u32::min(row, tile.rows - 1);
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
    let units = comptime!(PLANE * step.planes());
    let all = comptime!(COLUMNS * step.vectors);
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
