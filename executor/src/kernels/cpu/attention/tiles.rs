//! Attention of many query rows over one span of keys, by products of tiles of bf16.
//!
//! The cache of bfloat16 lies as tiles take their second operand: sixteen tokens of 32 elements of their keys are a
//! tile, and so are 32 tokens of sixteen elements of their values, where those follow each other in a block. What
//! does not, or ends inside, is copied for all rows once. Softmax and masks are those of vectors.

use std::ops::Range;

use super::super::cache::{Element, TILE_TOKENS};
use super::super::isa::Isa;
use super::super::lanes::{LANES, Lanes};
use super::super::pack::TILE_DEPTH;
use super::super::tile::{LISTED_STEPS, Listed, MOST_ROWS, Registers};
use super::packing::Packing;
use super::span::{Rows, SPAN_TILES, SPAN_TOKENS, Scores, Span, weigh};

/// Fewer rows leave most of a tile idle, and wait for memory.
pub(in super::super) const LEAST_ROWS: usize = 16;
/// Tokens whose values are one step of a product.
const CHUNK_TOKENS: usize = TILE_DEPTH;
/// Cache tiles of such tokens.
const CHUNK_TILES: usize = CHUNK_TOKENS / TILE_TOKENS;
/// Bytes of a row of a tile, 32 elements.
const ROW_BYTES: usize = 2 * TILE_DEPTH;
/// Bytes of an element of two tokens.
const PAIR_BYTES: usize = 4;
/// Elements of a head, or tokens, that one product of two tiles writes.
const WIDTH: usize = 2 * LANES;

/// A row of a tile, where loads like it best.
#[repr(align(64))]
#[derive(Clone, Copy)]
struct Line(#[expect(dead_code, reason = "lines are read and written by address")] [u8; ROW_BYTES]);

const EMPTY: Line = Line([0; ROW_BYTES]);

/// A row of a tile at any place.
type Bytes = [u8; ROW_BYTES];

/// What one member multiplies by tiles with.
pub(super) struct Room {
    registers: Registers,
    head_dim: usize,
    /// Queries of a piece, `[row][head_dim]` in bf16.
    queries: Vec<Line>,
    /// Products and then weights of some rows, `[row][token]`.
    scores: Vec<[f32; SPAN_TOKENS]>,
    /// The weights in bf16.
    weights: Vec<Line>,
    /// Values that do not lie as tiles take them, as if they did.
    values: Vec<Line>,
}

impl Room {
    /// For heads of `head_dim` elements at a level, if it multiplies them by tiles.
    pub(super) fn new<P: Packing>(isa: Isa, head_dim: usize) -> Option<Self> {
        let has_steps =
            head_dim.is_multiple_of(TILE_DEPTH) && head_dim / TILE_DEPTH <= LISTED_STEPS;
        (P::ELEMENT == Element::Bf16 && has_steps).then(|| Self {
            registers: Registers::new(isa),
            head_dim,
            queries: Vec::new(),
            scores: vec![[0.0; SPAN_TOKENS]; MOST_ROWS],
            weights: vec![EMPTY; MOST_ROWS * SPAN_TOKENS / TILE_DEPTH],
            values: vec![EMPTY; SPAN_TOKENS * head_dim / TILE_DEPTH],
        })
    }

    /// Takes over the queries of `rows`, if they are enough.
    pub(super) fn take<P: Packing>(&mut self, rows: &Rows<P>) -> bool {
        let count = rows.factors.len();
        if count < LEAST_ROWS {
            return false;
        }
        let lines = self.head_dim / TILE_DEPTH;
        self.queries.clear();
        self.queries.resize(count * lines, EMPTY);
        for (row, to) in self.queries.chunks_exact_mut(lines).enumerate() {
            let from = rows.queries[row * rows.stride()..][..self.head_dim / P::PER_UNIT].as_ptr();
            // SAFETY: operands of bf16 are two elements each, and lines hold all of a row.
            unsafe { from.cast::<Bytes>().copy_to_nonoverlapping(to.as_mut_ptr().cast(), lines) };
        }
        true
    }
}

/// Lets all `rows` see `span`, whose tokens end at `end`.
///
/// # Safety
/// That of [`super::span::attend`], for elements of bfloat16; and the room has taken the rows.
#[inline(always)]
pub(super) unsafe fn attend<L: Lanes, P: Packing>(
    rows: &mut Rows<P>,
    room: &mut Room,
    span: &Span,
    end: usize,
    scores: Scores,
) {
    // SAFETY: the caller's.
    let chunks = unsafe { room.chunks(span, end) };
    for first in (0..rows.factors.len()).step_by(MOST_ROWS) {
        let count = MOST_ROWS.min(rows.factors.len() - first);
        // Rows are in the order of their tokens: the first sees the earliest, the last the latest.
        let (start, end) = (rows.visible[first].0, rows.visible[first + count - 1].1);
        let end = end.min(span.first + span.tiles * TILE_TOKENS);
        if start.max(span.first) >= end {
            continue;
        }
        let first_tile = start.saturating_sub(span.first) / TILE_TOKENS;
        let last_tile = (end - span.first).div_ceil(TILE_TOKENS);
        let whole = first_tile / CHUNK_TILES..last_tile.div_ceil(CHUNK_TILES);
        // SAFETY: the rows and tiles exist.
        unsafe {
            for chunk in whole.clone() {
                room.multiply_keys(first, count, span, chunk);
            }
            let seen = first_tile * TILE_TOKENS..last_tile * TILE_TOKENS;
            let packed = whole.start * CHUNK_TOKENS..whole.end * CHUNK_TOKENS;
            for row in 0..count {
                let before = rows.largest[first + row];
                let weights = &mut room.scores[row];
                let (row, at) = (first + row, row * SPAN_TOKENS / TILE_DEPTH + whole.start);
                let shrink =
                    weigh::<L, P>(rows, row, span, first_tile, &mut weights[..seen.end], scores);
                weights[packed.start..seen.start].fill(0.0);
                weights[seen.end..packed.end].fill(0.0);
                let to = room.weights[at..].as_mut_ptr();
                P::pack_weights::<L>(&weights[packed.clone()], to.cast());
                if rows.largest[row] != before {
                    let sums = &mut rows.sums[row * rows.width..(row + 1) * rows.width];
                    for sums in sums.chunks_exact_mut(LANES) {
                        L::read(sums).mul(shrink).write(sums);
                    }
                }
            }
            for dims in (0..room.head_dim).step_by(WIDTH) {
                let sums = rows.sums.as_mut_ptr().add(first * rows.width + dims);
                room.add_values(count, whole.clone(), &chunks, dims, (sums, rows.width));
            }
        }
    }
}

impl Room {
    /// Where the values of each chunk of a span lie as tiles take them.
    ///
    /// # Safety
    /// The span's tiles exist, with heads of this room's size.
    unsafe fn chunks(&mut self, span: &Span, end: usize) -> [*const u8; SPAN_TILES / CHUNK_TILES] {
        let lines = self.head_dim / TILE_DEPTH * TILE_TOKENS;
        let tile_bytes = lines * ROW_BYTES;
        let mut chunks = [std::ptr::null(); SPAN_TILES / CHUNK_TILES];
        let rooms = self.values.chunks_exact_mut(CHUNK_TILES * lines);
        for (chunk, (at, room)) in chunks.iter_mut().zip(rooms).enumerate() {
            let tiles = chunk * CHUNK_TILES..span.tiles.min((chunk + 1) * CHUNK_TILES);
            if tiles.is_empty() {
                break;
            }
            let values = &span.values[tiles.clone()];
            let is_whole = span.first + (chunk + 1) * CHUNK_TOKENS <= end
                && values.windows(2).all(|two| two[0].wrapping_add(tile_bytes) == two[1]);
            if is_whole {
                *at = values[0];
                continue;
            }
            for (tile, to) in tiles.zip(room.chunks_exact_mut(lines)) {
                let tokens = TILE_TOKENS.min(end - span.first - tile * TILE_TOKENS);
                // What lies behind the last token could be infinite, and spoil a product with zero.
                let present = tokens.next_multiple_of(2) * self.head_dim * 2 / ROW_BYTES;
                to[present..].fill(EMPTY);
                let from = span.values[tile].cast::<Bytes>();
                // SAFETY: the tile has as many lines.
                unsafe { from.copy_to_nonoverlapping(to.as_mut_ptr().cast(), present) };
            }
            for to in room.chunks_exact_mut(lines).skip(values.len()) {
                to.fill(EMPTY);
            }
            *at = room.as_ptr().cast();
        }
        chunks
    }

    /// Writes the products of rows from `first` on with the keys of a chunk.
    ///
    /// # Safety
    /// The rows and at least the chunk's first tile exist.
    unsafe fn multiply_keys(&mut self, first: usize, count: usize, span: &Span, chunk: usize) {
        let lines = self.head_dim / TILE_DEPTH;
        let tile = chunk * CHUNK_TILES;
        // Products with a tile that is not there are not used.
        let tiles = [tile, (tile + 1).min(span.tiles - 1)].map(|tile| span.keys[tile]);
        let mut steps = [[std::ptr::null(); 2]; LISTED_STEPS];
        for (step, columns) in steps[..lines].iter_mut().enumerate() {
            *columns = tiles.map(|keys| keys.wrapping_add(step * LANES * ROW_BYTES));
        }
        let listed = Listed {
            rows: self.queries[first * lines..].as_ptr().cast(),
            row_bytes: lines * ROW_BYTES,
            count,
            steps: &steps[..lines],
            column_bytes: ROW_BYTES,
            sums: self.scores.as_mut_ptr().cast::<f32>().wrapping_add(chunk * CHUNK_TOKENS),
            sums_width: SPAN_TOKENS,
            goes_on: false,
        };
        // SAFETY: the caller's.
        unsafe { self.registers.multiply_listed(listed) };
    }

    /// Adds the weighted values of `seen` of the chunks, their elements from `dims` on, to rows of sums of that width.
    ///
    /// # Safety
    /// The weights of those chunks are packed, and all exist.
    unsafe fn add_values(
        &mut self,
        count: usize,
        seen: Range<usize>,
        chunks: &[*const u8; SPAN_TILES / CHUNK_TILES],
        dims: usize,
        (sums, sums_width): (*mut f32, usize),
    ) {
        let steps = chunks.map(|chunk| {
            [0, 1].map(|vector| chunk.wrapping_add((dims + vector * LANES) * PAIR_BYTES))
        });
        let listed = Listed {
            rows: self.weights[seen.start..].as_ptr().cast(),
            row_bytes: SPAN_TOKENS * 2,
            count,
            steps: &steps[seen],
            column_bytes: self.head_dim * PAIR_BYTES,
            sums,
            sums_width,
            goes_on: true,
        };
        // SAFETY: the caller's.
        unsafe { self.registers.multiply_listed(listed) };
    }
}
