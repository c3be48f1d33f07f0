//! Products of one strip of activations with one panel of weights: the kernels, and the choice among them.
//!
//! A kernel writes `tile[row][lane]`, the products of the strip's rows with the panel's rows, in f32.
//! Each product is summed along the columns in an order that depends on the level and the format only, so a row's
//! result is the same whatever rows are multiplied with it and whoever does it. (Level AMX has two kernels,
//! see [`Kernel::choose`]; there the number of rows decides between two orders.)

#![expect(unsafe_code, reason = "kernels read packed weights and activations by address")]

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;
#[cfg(target_arch = "x86_64")]
mod unpack;

use ir::tensor::Format;

use super::encode::Encoding;
use super::isa::Isa;
use super::pack::{PANEL, padded};
use super::quantize::{OFFSET_4, OFFSET_8};

/// Steps after which kernels of floats start a new sum: the error of a sum grows with its length, and
/// adding up sums of this length costs below 1 % of the products.
const SUM_STEPS: usize = 256;

/// Most rows of any kernel's strip.
pub(super) const MOST_ROWS: usize = 32;

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
    /// Whether panels are unpacked to bf16 first, see [`Kernel::unpack`].
    pub(super) unpacks: bool,
}

/// Where a kernel reads.
#[derive(Clone, Copy)]
pub(super) struct Operands {
    /// First byte of the panel.
    pub(super) panel: *const u8,
    /// Vectors of the panel, 1 or 2.
    pub(super) vectors: usize,
    /// First byte of the encoded strip.
    pub(super) strip: *const u8,
    /// Rows of the strip.
    pub(super) rows: usize,
    /// Columns, padded as panels and strips are.
    pub(super) columns: usize,
}

impl Kernel {
    /// The kernel for `tokens` rows at a level.
    pub(super) fn choose(isa: Isa, format: Format, tokens: usize) -> Self {
        // A strip's sums and two vectors of weights have to fit in the registers.
        let (float_rows, block_rows) = match isa {
            Isa::Portable => (4, 4),
            Isa::Avx2 => (4, 2),
            // Without VNNI blocks run on the AVX2 kernel.
            Isa::Avx512 => (12, 2),
            Isa::Avx512Bf16Vnni | Isa::Amx => (12, 6),
        };
        let (encoding, rows) = match format {
            Format::F32 | Format::F16 => (Encoding::Float, float_rows),
            // Below 13 rows one strip of vectors reads the weights once, as fast as memory gives them.
            Format::Bf16 if isa == Isa::Amx && tokens > 12 => (Encoding::Tiles, MOST_ROWS),
            Format::Bf16 if isa >= Isa::Avx512Bf16Vnni => (Encoding::Pairs, float_rows),
            Format::Bf16 => (Encoding::Rounded, float_rows),
            // By the counts of instructions, unpacking a panel costs what vectors need for some 20 rows.
            Format::Q8 | Format::Q4 if isa == Isa::Amx && tokens > 24 => {
                (Encoding::Tiles, MOST_ROWS)
            }
            Format::Q8 => (Encoding::Blocks { offset: OFFSET_8 }, block_rows),
            Format::Q4 => (Encoding::Blocks { offset: OFFSET_4 }, block_rows),
        };
        let unpacks = encoding == Encoding::Tiles && format != Format::Bf16;
        Self { isa, format, encoding, rows, unpacks }
    }

    /// Bytes of an unpacked panel; none if this kernel takes panels as they are.
    pub(super) fn unpacked_bytes(self, columns: usize) -> usize {
        if self.unpacks { padded(self.format, columns) * PANEL * 2 } else { 0 }
    }

    /// The panel that this kernel reads: `panel`, or what becomes of it in `room`.
    ///
    /// # Safety
    /// The panel is packed in this kernel's format, and the room has [`Kernel::unpacked_bytes`].
    pub(super) unsafe fn unpack(
        self,
        panel: *const u8,
        vectors: usize,
        columns: usize,
        room: *mut u8,
    ) -> *const u8 {
        #[cfg(target_arch = "x86_64")]
        if self.unpacks {
            let columns = padded(self.format, columns);
            // SAFETY: the caller's; a level with tiles has AVX-512 and its bf16.
            unsafe { unpack::unpack(self.format, panel, vectors, columns, room) };
            return room;
        }
        let _ = (vectors, columns, room);
        panel
    }

    /// Multiplies one strip with one panel.
    ///
    /// # Safety
    /// The operands are readable, encoded for this kernel's encoding and packed in its format or unpacked, and
    /// the processor has the level.
    pub(super) unsafe fn multiply(self, operands: Operands, tile: &mut Tile) {
        debug_assert!(operands.rows <= self.rows && operands.vectors <= 2);
        // SAFETY: the caller's.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            match (self.isa, self.encoding) {
                (Isa::Portable, _) => {}
                (_, Encoding::Pairs) => {
                    return avx512::multiply(Format::Bf16, self.encoding, operands, tile);
                }
                (_, Encoding::Tiles) => return amx::tiles(operands, tile),
                (Isa::Avx2, _) | (Isa::Avx512, Encoding::Blocks { .. }) => {
                    return avx2::multiply(self.format, operands, tile);
                }
                (Isa::Avx512 | Isa::Avx512Bf16Vnni | Isa::Amx, _) => {
                    return avx512::multiply(self.format, self.encoding, operands, tile);
                }
            }
            portable::multiply(self.format, operands, tile);
        }
    }
}
