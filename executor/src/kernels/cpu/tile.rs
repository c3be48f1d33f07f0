//! Products of one strip of activations with one panel of weights: the kernels, and the choice among them.
//!
//! A kernel writes `tile[row][lane]`, the products of the strip's rows with the panel's rows, in f32.
//! Each product is summed along the columns in an order that depends on the level and the format only, so a row's
//! result is the same whatever rows are multiplied with it and whoever does it. (Level AMX has two kernels,
//! see [`Kernel::choose`]; there the number of rows decides between two orders. So it does for the rare subnormal
//! elements of 12 bits, which follow their step where they are decoded on the way.)

#![expect(unsafe_code, reason = "kernels read packed weights and activations by address")]

/// The instance of a kernel for a number of rows and of vectors, and for another constant if it has one.
#[cfg(target_arch = "x86_64")]
macro_rules! instance {
    ($kernel:ident, $rows:literal, $vectors:literal, [$($constant:expr)?]) => {
        $kernel::<$rows, $vectors, $({ $constant })?>
    };
}

#[cfg(target_arch = "x86_64")]
mod ahead;
#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod bytes;
#[cfg(target_arch = "x86_64")]
mod few;
mod portable;
mod registers;
#[cfg(target_arch = "x86_64")]
mod unpack;

use std::ops::Range;
use std::slice;

use ir::packing;
use ir::tensor::Format;

use super::bf12;
use super::encode::{Encoding, Strip};
use super::isa::Isa;
use super::pack::{PANEL, VECTOR};
use super::product::BLOCK_STRIPS;
use super::quantize::{BLOCK, OFFSET_4, OFFSET_8};

pub(super) use bytes::{GROUP_BYTES, GroupScales, ROOM_BYTES};
pub(super) use registers::{LISTED_STEPS, Listed, Registers};

/// Steps after which kernels of floats start a new sum: the error of a sum grows with its length, and
/// adding up sums of this length costs below 1 % of the products.
const SUM_STEPS: usize = 256;

/// Bytes of a line of memory.
pub(super) const LINE: usize = 64;
/// Words of four columns in a block.
const GROUPS: usize = BLOCK / 4;

/// Most rows of blocks that AVX-512 VNNI takes in strips of eight. Prompts of 512 tokens are 1.12 to 1.15 times as fast
/// in strips of six on two cores of Zen 5.
const MOST_ROWS_BY_EIGHT: usize = 24;
/// Most rows of blocks that vectors multiply where there are tiles. On two Granite Rapids cores 8 sequences are 1.8
/// times as fast by vectors, and prompts of 512 tokens 1.25 to 1.29 times as fast by tiles.
const MOST_BLOCK_ROWS_BY_VECTORS: usize = 24;
/// Most rows that vectors multiply with bf16 where there are tiles. On two Granite Rapids cores vectors read 31.4 GB/s
/// of a matrix for one row and 21.8 for 8, tiles 28.9 for 8.
const MOST_BF16_ROWS_BY_VECTORS: usize = 2;
/// The same with 12 bits, which are unpacked for tiles: vectors read 29.0 GB/s for one row and 14.9 for 8, tiles 21.2
/// for 8.
const MOST_BF12_ROWS_BY_VECTORS: usize = 4;
/// Most rows that tiles of bf16 and of 12 bits multiply along one panel after the other. On 16 cores of Emerald Rapids
/// prompts of 36 to 128 tokens are 1.2 to 1.6 times as fast so as in blocks, of 256 1.1 times; of 512 they were as fast
/// in 16 bits and slower in 12.
pub(super) const MOST_ROWS_ALONG_PANELS: usize = 256;
/// Most rows for which kernels without dot products of bf16 decode 12 bits on the way. With that, and with panels asked
/// for ahead, one sequence decodes 53.7 instead of 27.4 tok/s.
const MOST_DECODED_ROWS: usize = 8;

/// Most rows for which dot products of bf16 decode 12 bits on the way, in strips of eight: the sums of twelve rows
/// leave too few registers for it. On two cores of Zen 5 prompts of 10, 12, 20 and 24 tokens are 1.3 to 1.9 times as
/// fast so.
const MOST_ROWS_DECODED_IN_PAIRS: usize = 32;

/// Most rows of any kernel's strip.
pub(super) const MOST_ROWS: usize = packing::STRIP_ROWS as usize;

/// What a kernel writes.
pub(super) type Tile = [[f32; PANEL]; MOST_ROWS];

/// One way of multiplying.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kernel {
    pub(super) isa: Isa,
    pub(super) format: Format,
    pub(super) encoding: Encoding,
    /// Most rows of a strip.
    pub(super) rows: usize,
    /// Whether columns are unpacked first, see [`Kernel::unpacked`].
    pub(super) unpacks: bool,
    /// Whether products are made a block of panels and strips at a time; else a panel is multiplied along all its
    /// columns.
    pub(super) in_blocks: bool,
}

/// Where a kernel reads.
#[derive(Clone, Copy)]
pub(super) struct Operands {
    /// First byte of the panel, or of some of its columns.
    pub(super) panel: *const u8,
    /// Vectors of the panel, 1 or 2.
    pub(super) vectors: usize,
    /// First byte of the encoded strip.
    pub(super) strip: *const u8,
    /// Rows of the strip.
    pub(super) rows: usize,
    /// Columns, padded as panels and strips are.
    pub(super) columns: usize,
    /// What is read after the panel, by tiles the sums that go on next; anything that is near where nothing is.
    pub(super) next: *const u8,
}

/// Some columns of a panel as they are packed.
#[derive(Clone, Copy)]
pub(super) struct Source {
    pub(super) start: *const u8,
    pub(super) bytes: usize,
}

impl Source {
    /// Lines of memory.
    pub(super) fn lines(self) -> usize {
        self.bytes.div_ceil(LINE)
    }

    /// Asks memory for some of the lines.
    pub(super) fn prefetch(self, lines: Range<usize>) {
        #[cfg(target_arch = "x86_64")]
        for line in lines.start..lines.end.min(self.lines()) {
            ahead::prefetch_l2(self.start.wrapping_add(line * LINE));
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = lines;
    }
}

impl Kernel {
    /// The kernel for `tokens` rows at a level.
    pub(super) fn choose(isa: Isa, format: Format, tokens: usize) -> Self {
        // A strip's sums and two vectors of weights have to fit in the registers.
        let (float_rows, block_rows) = match isa {
            Isa::Portable => (4, 4),
            Isa::Avx2 | Isa::Avx2Vnni => (4, 8),
            // Of six rows of blocks two vectors fit together, and each element of activations is loaded once for both;
            // eight are fewer strips of few rows.
            Isa::Avx512Vnni | Isa::Avx512Bf16Vnni if tokens > MOST_ROWS_BY_EIGHT => (12, 6),
            Isa::Avx512 | Isa::Avx512Vnni | Isa::Avx512Bf16Vnni | Isa::Amx => (12, 8),
        };
        let (encoding, rows) = match format {
            Format::F32 | Format::F16 => (Encoding::Float, float_rows),
            // With very few rows vectors are as fast as memory, which waits for tiles and for what is unpacked for
            // them.
            Format::Bf16 if isa == Isa::Amx && tokens > MOST_BF16_ROWS_BY_VECTORS => {
                (Encoding::Tiles, MOST_ROWS)
            }
            Format::Bf12 if isa == Isa::Amx && tokens > MOST_BF12_ROWS_BY_VECTORS => {
                (Encoding::Tiles, MOST_ROWS)
            }
            Format::Bf12 if isa >= Isa::Avx512Bf16Vnni && tokens <= MOST_ROWS_DECODED_IN_PAIRS => {
                (Encoding::Pairs, 8)
            }
            Format::Bf16 | Format::Bf12 if isa >= Isa::Avx512Bf16Vnni => {
                (Encoding::Pairs, float_rows)
            }
            // Without dot products of bf16 the AVX2 kernel decodes 12 bits.
            Format::Bf12 if isa >= Isa::Avx512 && tokens <= MOST_DECODED_ROWS => {
                (Encoding::Rounded, 4)
            }
            Format::Bf16 | Format::Bf12 => (Encoding::Rounded, float_rows),
            Format::Q8 | Format::Q4 if isa == Isa::Amx && tokens > MOST_BLOCK_ROWS_BY_VECTORS => {
                (Encoding::ByteTiles, MOST_ROWS)
            }
            Format::Q8 => (Encoding::Blocks { offset: OFFSET_8 }, block_rows),
            Format::Q4 => (Encoding::Blocks { offset: OFFSET_4 }, block_rows),
        };
        let in_blocks = match encoding {
            Encoding::Tiles => tokens > MOST_ROWS_ALONG_PANELS,
            Encoding::ByteTiles => true,
            Encoding::Float | Encoding::Rounded | Encoding::Pairs | Encoding::Blocks { .. } => {
                false
            }
        };
        let unpacks = match format {
            Format::F32 | Format::F16 | Format::Bf16 => false,
            // A few strips decode on the way; more would each do it again.
            Format::Bf12 => match encoding {
                Encoding::Pairs => tokens > MOST_ROWS_DECODED_IN_PAIRS,
                Encoding::Rounded => tokens > MOST_DECODED_ROWS || isa == Isa::Portable,
                Encoding::Tiles => in_blocks,
                Encoding::ByteTiles | Encoding::Float | Encoding::Blocks { .. } => true,
            },
            Format::Q8 | Format::Q4 => encoding == Encoding::ByteTiles,
        };
        Self { isa, format, encoding, rows, unpacks, in_blocks }
    }

    /// Cuts `rows` rows, the first one `first`, in strips: for vectors as even as they get; for tiles whole ones, which
    /// fill their registers, and where products are made so, in blocks.
    pub(super) fn strips(self, first: usize, rows: usize) -> impl Iterator<Item = Strip> {
        let count = rows.div_ceil(self.rows);
        (0..count).map(move |strip| {
            if self.encoding.is_tiles() {
                let start = strip * self.rows;
                let count = self.rows.min(rows - start);
                let block = if self.in_blocks {
                    let block_rows = BLOCK_STRIPS * self.rows;
                    let block = start - start % block_rows;
                    (first + block, block_rows.min(rows - block))
                } else {
                    (first + start, count)
                };
                Strip { first: first + start, rows: count, block }
            } else {
                let cut = |strip: usize| first + strip * rows / count;
                let (first, rows) = (cut(strip), cut(strip + 1) - cut(strip));
                Strip { first, rows, block: (first, rows) }
            }
        })
    }

    /// Some columns of a panel as they are multiplied: as they lie, or what becomes of them in `room`.
    ///
    /// # Safety
    /// The panel is one of a matrix of `columns` columns in this kernel's format, `part` are whole steps of them (of
    /// tiles of bytes a group), and the room is enough for those.
    pub(super) unsafe fn unpacked(
        self,
        panel: *const u8,
        vectors: usize,
        columns: usize,
        part: Range<usize>,
        room: *mut u8,
    ) -> *const u8 {
        // SAFETY: the caller's.
        unsafe {
            match self.format {
                Format::Bf12 if self.unpacks => {
                    let panel = bf12::Panel::at(panel, vectors, columns);
                    let words = part.len() / 2 * vectors * VECTOR;
                    let to = slice::from_raw_parts_mut(room.cast::<[u16; 2]>(), words);
                    unpack_bf12(self.isa, panel, part, to);
                    room
                }
                Format::Q8 | Format::Q4 if self.unpacks => {
                    let packed = panel.wrapping_add(self.step_bytes(vectors, part.start));
                    unpack_bytes(self.isa, self.format, packed, vectors, part.len(), room);
                    room
                }
                Format::F32
                | Format::F16
                | Format::Bf16
                | Format::Bf12
                | Format::Q8
                | Format::Q4 => panel.wrapping_add(self.step_bytes(vectors, part.start)),
            }
        }
    }

    /// What [`Kernel::unpacked`] reads of a panel.
    pub(super) fn source(self, panel: *const u8, vectors: usize, part: Range<usize>) -> Source {
        let place = if self.format == Format::Bf12 {
            bf12::place(vectors, part)
        } else {
            self.step_bytes(vectors, part.start)..self.step_bytes(vectors, part.end)
        };
        Source { start: panel.wrapping_add(place.start), bytes: place.len() }
    }

    /// Bytes of `columns` columns of a panel, whole steps of them.
    fn step_bytes(self, vectors: usize, columns: usize) -> usize {
        debug_assert!(self.format != Format::Bf12 || columns == 0, "steps have a head in front");
        self.format.bytes(PANEL as u64, columns as u64) as usize / 2 * vectors
    }

    /// What vectors multiply: the format, or what it is unpacked to.
    fn multiplied(self) -> Format {
        if self.unpacks { Format::Bf16 } else { self.format }
    }

    /// Asks the memory for the start of a panel that is multiplied soon.
    pub(super) fn prefetch(self, panel: *const u8) {
        #[cfg(target_arch = "x86_64")]
        if self.isa >= Isa::Avx2 && !self.unpacks {
            ahead::prefetch_start(panel);
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = panel;
    }

    /// Multiplies one strip with one panel, by vectors.
    ///
    /// # Safety
    /// The operands are readable, encoded for this kernel's encoding and packed in its format or unpacked, and
    /// the processor has the level.
    pub(super) unsafe fn multiply(self, operands: Operands, tile: &mut Tile) {
        debug_assert!(operands.rows <= self.rows && operands.vectors <= 2);
        debug_assert!(!self.encoding.is_tiles(), "tiles have registers of their own");
        // SAFETY: the caller's.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            match (self.isa, self.encoding) {
                (Isa::Portable, _) => {}
                // Without VNNI blocks run on the AVX2 kernel.
                (Isa::Avx2 | Isa::Avx2Vnni, _) | (Isa::Avx512, Encoding::Blocks { .. }) => {
                    return avx2::multiply(self.isa, self.multiplied(), operands, tile);
                }
                (Isa::Avx512 | Isa::Avx512Vnni, Encoding::Rounded)
                    if self.multiplied() == Format::Bf12 =>
                {
                    return avx2::multiply(self.isa, Format::Bf12, operands, tile);
                }
                (Isa::Avx512 | Isa::Avx512Vnni | Isa::Avx512Bf16Vnni | Isa::Amx, _) => {
                    return avx512::multiply(self.multiplied(), self.encoding, operands, tile);
                }
            }
            portable::multiply(self.multiplied(), operands, tile);
        }
    }
}

/// Some columns of a panel in 12 bits as those of a bf16 panel.
fn unpack_bf12(isa: Isa, panel: bf12::Panel<'_>, columns: Range<usize>, to: &mut [[u16; 2]]) {
    match isa {
        Isa::Portable => bf12::unpack(panel, columns, to),
        // SAFETY: kernels are chosen for levels that the processor has.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 | Isa::Avx2Vnni => unsafe { unpack::bf12_by_avx2(panel, columns, to) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx512Vnni | Isa::Avx512Bf16Vnni | Isa::Amx => unsafe {
            unpack::bf12_by_avx512(panel, columns, to);
        },
        #[cfg(not(target_arch = "x86_64"))]
        _ => bf12::unpack(panel, columns, to),
    }
}

/// A group of a panel of blocks as bytes with their scales.
///
/// # Safety
/// That of [`bytes::unpack`]; and the processor has the level.
unsafe fn unpack_bytes(
    isa: Isa,
    format: Format,
    panel: *const u8,
    vectors: usize,
    columns: usize,
    to: *mut u8,
) {
    // SAFETY: the caller's.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        if isa >= Isa::Avx512 {
            return unpack::bytes_by_avx512(format, panel, vectors, columns, to);
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = isa;
        bytes::unpack(format, panel, vectors, columns, to);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strips_cover_all_rows() {
        for (encoding, most, in_blocks) in [
            (Encoding::Float, 12, false),
            (Encoding::Tiles, MOST_ROWS, false),
            (Encoding::Tiles, MOST_ROWS, true),
            (Encoding::ByteTiles, MOST_ROWS, true),
        ] {
            let kernel = Kernel {
                isa: Isa::Portable,
                format: Format::Bf16,
                encoding,
                rows: most,
                unpacks: false,
                in_blocks,
            };
            for rows in 1..200 {
                let strips: Vec<Strip> = kernel.strips(5, rows).collect();
                assert_eq!(strips.len(), rows.div_ceil(most));
                let mut next = 5;
                for (i, strip) in strips.iter().enumerate() {
                    assert_eq!(strip.first, next);
                    let is_whole = strip.rows == most || i + 1 == strips.len();
                    let is_even = strip.rows <= most && strip.rows + 1 >= strips[0].rows;
                    assert!(in_blocks || strip.block == (strip.first, strip.rows));
                    assert!(if encoding.is_tiles() { is_whole } else { is_even });
                    next += strip.rows;
                }
                assert_eq!(next, 5 + rows);
            }
        }
    }
}
