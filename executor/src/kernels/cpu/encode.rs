//! Activations in the form that a kernel multiplies: normalised, rounded or quantised, rows interleaved in *strips*.
//!
//! A strip is a few rows that a kernel takes at once. Along the columns, one step of a strip holds, for each of
//! its rows in turn:
//!
//! | encoding | columns of a step | a row's step |
//! | --- | --- | --- |
//! | `Float`, `Rounded` | 1 | an f32 (rounded to bf16) |
//! | `Pairs` | 2 | two bf16 |
//! | `Tiles` | 32 | 32 bf16 |
//! | `ByteTiles` | 64 | 64 signed bytes |
//! | `Blocks` | 32 | words of four signed bytes, `[group][row]`; then `[row]` f32 scales; then for each row minus the sum of its bytes times the code of zero |
//!
//! Every row takes the same bytes, so strip `s` starts at its first row times [`Encoding::row_bytes`]. Strips of tiles
//! whose products are in blocks lie in *blocks*: of [`BLOCK_COLUMNS`] columns those of all its strips, one behind the
//! other, then of the next columns. Products of blocks go through them in that order, and strides of powers of two
//! would leave them few places in a cache. For each row, the bytes of a block's columns have one scale, an f32: behind
//! the bytes of a block lie the scales of its rows, then the bytes of the next columns.

#![expect(unsafe_code, reason = "members write disjoint parts of one buffer")]

mod step;

use super::disjoint::DisjointMut;
use super::isa::Isa;
use super::lanes::{Kernel, Lanes, vectorize};
use super::norm::{Moments, Norm, moments, norm_with};
use super::pack::BLOCK_PAIR;
use super::product::BLOCK_COLUMNS;
use super::quantize::BLOCK;
use super::tile::{LINE, MOST_ROWS};
use crate::team::{Phase, Team};
use step::{put, put_bytes};

/// How activations are encoded for a format at a level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Encoding {
    Float,
    Rounded,
    Pairs,
    Tiles,
    ByteTiles,
    /// `offset` is the code of zero of the weights.
    Blocks {
        offset: i32,
    },
}

/// Some rows that are encoded together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Strip {
    pub(super) first: usize,
    pub(super) rows: usize,
    /// First row and number of rows of the block that it lies in; the strip itself where products are not in blocks.
    pub(super) block: (usize, usize),
}

/// Everything that is read while rows are encoded.
pub(super) struct Rows<'a> {
    pub(super) isa: Isa,
    pub(super) encoding: Encoding,
    pub(super) x: &'a [f32],
    pub(super) columns: usize,
    pub(super) norm: Option<Norm<'a>>,
    /// The row of `x` behind each encoded row; the same one if there is no list.
    pub(super) sources: Option<&'a [u32]>,
}

/// Columns that are encoded at once: a multiple of every step, and small beside the first cache.
const CHUNK: usize = BLOCK_PAIR;
/// Columns of one claim when there are few strips: some µs of work, and whole blocks' columns.
const SEGMENT: usize = 4 * BLOCK_COLUMNS;
/// Columns of a claim that is a whole strip. Twice as many are still a number.
pub(super) const WHOLE: usize = usize::MAX / 2;

impl Encoding {
    /// Columns with their padding: at least that of the formats that the encoding is for.
    pub(super) fn padded(self, columns: usize) -> usize {
        match self {
            Encoding::Float => columns,
            Encoding::Rounded
            | Encoding::Pairs
            | Encoding::Tiles
            | Encoding::ByteTiles
            | Encoding::Blocks { .. } => columns.next_multiple_of(BLOCK_PAIR),
        }
    }

    /// Whether products are made in tiles.
    pub(super) fn is_tiles(self) -> bool {
        match self {
            Encoding::Tiles | Encoding::ByteTiles => true,
            Encoding::Float | Encoding::Rounded | Encoding::Pairs | Encoding::Blocks { .. } => {
                false
            }
        }
    }

    /// Bytes of an encoded row.
    pub(super) fn row_bytes(self, columns: usize) -> usize {
        let scales = match self {
            Encoding::ByteTiles => columns.div_ceil(BLOCK_COLUMNS) * size_of::<f32>(),
            Encoding::Float
            | Encoding::Rounded
            | Encoding::Pairs
            | Encoding::Tiles
            | Encoding::Blocks { .. } => 0,
        };
        // A block's rows start in lines of their own, as the rows of tiles should.
        self.bytes(self.padded(columns)) + scales.next_multiple_of(LINE)
    }

    /// Bytes of some columns of a row, whole steps of them.
    pub(super) fn bytes(self, columns: usize) -> usize {
        match self {
            Encoding::Float | Encoding::Rounded => columns * 4,
            Encoding::Pairs | Encoding::Tiles => columns * 2,
            Encoding::ByteTiles => columns,
            Encoding::Blocks { .. } => columns / BLOCK * (BLOCK + 4 + 4),
        }
    }

    /// Where a strip's columns from `start` on, of all `columns`, lie behind row 0: up to the end, or for tiles up
    /// to the next multiple of [`BLOCK_COLUMNS`].
    pub(super) fn offset(self, strip: Strip, columns: usize, start: usize) -> usize {
        let row_bytes = self.row_bytes(columns);
        if !self.is_tiles() {
            return strip.first * row_bytes + strip.rows * self.bytes(start);
        }
        let columns = self.padded(columns);
        let first = start - start % BLOCK_COLUMNS;
        let width = BLOCK_COLUMNS.min(columns.saturating_sub(first));
        let (block_first, block_rows) = strip.block;
        let inside = (strip.first - block_first) * width + strip.rows * (start - first);
        block_first * row_bytes + self.bytes(block_rows * first + inside)
    }

    /// Where the scales of a strip's rows lie behind row 0, of the bytes of the columns from `start` on.
    pub(super) fn scales_offset(self, strip: Strip, columns: usize, start: usize) -> usize {
        debug_assert!(self == Encoding::ByteTiles, "others have no scales of their own");
        let (block_first, block_rows) = strip.block;
        let index = start / BLOCK_COLUMNS * block_rows + strip.first - block_first;
        let bytes = block_rows * self.bytes(self.padded(columns));
        block_first * self.row_bytes(columns) + bytes + index * size_of::<f32>()
    }
}

impl Rows<'_> {
    /// Encodes `count` columns from `start` of one strip, or those up to the end: [`WHOLE`] are all of any.
    ///
    /// # Safety
    /// `encoded` is where row 0 is encoded, all rows of the strip have room behind it, and no one else
    /// reads or writes this segment of this strip.
    pub(super) unsafe fn encode(
        &self,
        strip: Strip,
        start: usize,
        count: usize,
        encoded: DisjointMut<'_, u8>,
    ) {
        vectorize(self.isa, Encode { rows: self, strip, start, count, encoded });
    }
}

/// The encoding of some strips, dealt out to a team.
pub(super) struct Encoder<'a> {
    strips: &'a [Strip],
    /// In how many pieces, of how many columns, each strip is encoded: whole strips if there are enough of them.
    pieces: usize,
    segment: usize,
    phase: Phase<'a>,
}

impl<'a> Encoder<'a> {
    /// For one run of the team, of rows of `columns` columns.
    pub(super) fn new(team: &'a Team, columns: usize, strips: &'a [Strip]) -> Self {
        let are_enough = team.members() == 1 || strips.len() >= 4 * team.members();
        let (pieces, segment) =
            if are_enough { (1, WHOLE) } else { (columns.div_ceil(SEGMENT).max(1), SEGMENT) };
        Self { strips, pieces, segment, phase: team.phase(strips.len() * pieces, 1) }
    }

    /// One member's share of the work; returns when all of it is done.
    ///
    /// # Safety
    /// `encoded` is where row 0 is encoded, the rows of all strips have room behind it and lie apart, all members
    /// encode the same, and no one else reads or writes there meanwhile.
    pub(super) unsafe fn encode(&self, rows: &Rows<'_>, encoded: DisjointMut<'_, u8>) {
        let mut turn = self.phase.begin();
        while let Some(range) = turn.claim() {
            for task in range {
                let (strip, piece) = (self.strips[task / self.pieces], task % self.pieces);
                // SAFETY: the caller's; every piece is claimed once.
                unsafe { rows.encode(strip, piece * self.segment, self.segment, encoded) };
            }
        }
        turn.finish();
    }
}

/// One call of [`Rows::encode`], with what its caller vouches for.
struct Encode<'a> {
    rows: &'a Rows<'a>,
    strip: Strip,
    start: usize,
    count: usize,
    encoded: DisjointMut<'a, u8>,
}

impl Kernel for Encode<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { rows, strip, start, count, encoded } = self;
        let end = rows.encoding.padded(rows.columns).min(start + count);
        let mut sources = [Source { x: &[], moments: Moments::default() }; MOST_ROWS];
        for (row, source) in sources[..strip.rows].iter_mut().enumerate() {
            let index = match rows.sources {
                Some(sources) => sources[strip.first + row] as usize,
                None => strip.first + row,
            };
            source.x = &rows.x[index * rows.columns..(index + 1) * rows.columns];
            if let Some(norm) = &rows.norm {
                source.moments = moments::<L>(norm, source.x);
            }
        }
        let sources = &sources[..strip.rows];
        if rows.encoding == Encoding::ByteTiles {
            for column in (start..end).step_by(BLOCK_COLUMNS) {
                let width = BLOCK_COLUMNS.min(end - column);
                for (row, source) in sources.iter().enumerate() {
                    let values: [f32; BLOCK_COLUMNS] = source.values::<L, _>(rows, column);
                    // SAFETY: the segment is this call's alone and lies in the strip, for whose rows there is room.
                    unsafe {
                        let at = |offset| encoded.pointer().add(offset);
                        let to = at(rows.encoding.offset(strip, rows.columns, column));
                        let scales = at(rows.encoding.scales_offset(strip, rows.columns, column));
                        let scale = put_bytes(to, strip.rows, row, &values, width);
                        scales.cast::<f32>().add(row).write(scale);
                    }
                }
            }
            return;
        }
        // Rows inside columns: what neighbouring rows write shares cache lines.
        for column in (start..end).step_by(CHUNK) {
            let width = CHUNK.min(end - column);
            for (row, source) in sources.iter().enumerate() {
                let values = source.values::<L, _>(rows, column);
                // SAFETY: the segment is this call's alone and lies in the strip, for whose rows there is room.
                unsafe {
                    let to =
                        encoded.pointer().add(rows.encoding.offset(strip, rows.columns, column));
                    put::<L>(rows.encoding, to, strip.rows, row, &values, width);
                }
            }
        }
    }
}

/// A row of activations, and what its norm does to every element.
#[derive(Clone, Copy)]
struct Source<'a> {
    x: &'a [f32],
    moments: Moments,
}

impl Source<'_> {
    /// Some columns from `column` on, normalised. Padding stays zero, also where a norm subtracts something.
    #[inline(always)]
    fn values<L: Lanes, const COUNT: usize>(&self, rows: &Rows<'_>, column: usize) -> [f32; COUNT] {
        let present = column.min(rows.columns)..(column + COUNT).min(rows.columns);
        let x = &self.x[present.clone()];
        let mut values = [0.0; COUNT];
        match &rows.norm {
            Some(norm) => {
                let norm = norm.at(present.start);
                norm_with::<L>(&norm, self.moments, x, &mut values[..x.len()]);
            }
            None => match x.as_array::<COUNT>() {
                Some(whole) => values = *whole,
                None => values[..x.len()].copy_from_slice(x),
            },
        }
        values
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_keep_rows_apart() {
        let x: Vec<f32> = (0..2 * 40).map(|i| (i as f32 * 0.37).sin()).collect();
        let rows = Rows {
            isa: Isa::Portable,
            encoding: Encoding::Blocks { offset: 8 },
            x: &x,
            columns: 40,
            norm: None,
            sources: None,
        };
        let mut encoded = vec![0_u32; 2 * rows.encoding.row_bytes(40) / 4];
        let to = DisjointMut::new(bytemuck::cast_slice_mut(&mut encoded));
        // SAFETY: the buffer has room for two rows and is used here only.
        unsafe { rows.encode(Strip { first: 0, rows: 2, block: (0, 2) }, 0, SEGMENT, to) };
        for row in 0..2 {
            for column in 0..64 {
                let block = &encoded[column / 32 * 20..][..20];
                let word = block[column % 32 / 4 * 2 + row].to_le_bytes();
                let scale = f32::from_bits(block[16 + row]);
                let value = f32::from(word[column % 4].cast_signed()) * scale;
                let wanted = if column < 40 { x[row * 40 + column] } else { 0.0 };
                assert!((value - wanted).abs() <= scale * 0.5001, "{row} {column}");
            }
            let sum: i32 = encoded[..20][row..16]
                .iter()
                .step_by(2)
                .flat_map(|word| word.to_le_bytes())
                .map(|byte| i32::from(byte.cast_signed()))
                .sum();
            assert_eq!(encoded[18 + row].cast_signed(), -8 * sum);
        }
    }
}
