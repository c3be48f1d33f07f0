//! How each element type of the cache is multiplied: what a row becomes, and what a unit is.
//!
//! Queries meet keys, and softmax weights meet values, in the same way: a row of operands, each broadcast,
//! times units of 16 lanes (see the cache's layout), summed over the row.

use super::super::cache::Element;
use super::super::lanes::{LANES, Lanes};

/// One element type's arithmetic.
///
/// Operands of a row are followed by one more, its bias, which the sum starts from.
pub(super) trait Packing {
    const ELEMENT: Element;
    /// Elements of a row in one operand, and of a lane in one unit.
    const PER_UNIT: usize;
    /// Vectors that a sum takes.
    const SUM_VECTORS: usize;
    type Operand: Copy;
    type Unit<L: Lanes>: Copy;
    type Sum<L: Lanes>: Copy;
    const ZERO: Self::Operand;

    /// Reads one unit.
    ///
    /// # Safety
    /// `from` points to 16 × `PER_UNIT` stored elements.
    unsafe fn load<L: Lanes>(from: *const u8) -> Self::Unit<L>;
    fn start<L: Lanes>(bias: Self::Operand) -> Self::Sum<L>;
    fn add_keys<L: Lanes>(
        sum: Self::Sum<L>,
        unit: Self::Unit<L>,
        row: Self::Operand,
    ) -> Self::Sum<L>;
    fn add_values<L: Lanes>(
        sum: Self::Sum<L>,
        unit: Self::Unit<L>,
        row: Self::Operand,
    ) -> Self::Sum<L>;
    fn finish<L: Lanes>(sum: Self::Sum<L>) -> L;

    /// Makes operands of a query, and its bias; returns the factor that the products lack.
    ///
    /// # Safety
    /// `row` is a multiple of 16 long, and `to` has room for its operands and the bias.
    unsafe fn pack_query<L: Lanes>(row: &[f32], to: *mut Self::Operand) -> f32;
    /// Makes operands of softmax weights, none below 0; returns the factor that the products lack.
    ///
    /// # Safety
    /// `row` is a multiple of 16 long, and `to` has room for its operands.
    unsafe fn pack_weights<L: Lanes>(row: &[f32], to: *mut Self::Operand) -> f32;
}

/// 32-bit floats, multiplied as such.
pub(super) struct F32;
/// Halves, widened and multiplied as 32-bit floats.
pub(super) struct F16;
/// Bfloat16 times rows rounded to bfloat16, summed in 32 bits.
pub(super) struct Bf16;
/// Bytes times rows of 15 bits, held as high and low bytes: exact integer sums, and a row error of 2⁻¹⁵.
pub(super) struct Int8;

/// What floats of one element a unit have in common.
macro_rules! wide_packing {
    ($name:ident, $load:expr) => {
        impl Packing for $name {
            const ELEMENT: Element = Element::$name;
            const PER_UNIT: usize = 1;
            const SUM_VECTORS: usize = 1;
            type Operand = f32;
            type Unit<L: Lanes> = L;
            type Sum<L: Lanes> = L;
            const ZERO: f32 = 0.0;

            #[inline(always)]
            unsafe fn load<L: Lanes>(from: *const u8) -> L {
                // SAFETY: the caller says that a unit can be read.
                unsafe { $load(from.cast()) }
            }
            #[inline(always)]
            fn start<L: Lanes>(_bias: f32) -> L {
                L::splat(0.0)
            }
            #[inline(always)]
            fn add_keys<L: Lanes>(sum: L, unit: L, row: f32) -> L {
                unit.mul_add(L::splat(row), sum)
            }
            #[inline(always)]
            fn add_values<L: Lanes>(sum: L, unit: L, row: f32) -> L {
                unit.mul_add(L::splat(row), sum)
            }
            #[inline(always)]
            fn finish<L: Lanes>(sum: L) -> L {
                sum
            }
            #[inline(always)]
            unsafe fn pack_query<L: Lanes>(row: &[f32], to: *mut f32) -> f32 {
                // SAFETY: there is room for the row.
                unsafe { to.copy_from_nonoverlapping(row.as_ptr(), row.len()) };
                1.0
            }
            #[inline(always)]
            unsafe fn pack_weights<L: Lanes>(row: &[f32], to: *mut f32) -> f32 {
                // SAFETY: there is room for the row.
                unsafe { to.copy_from_nonoverlapping(row.as_ptr(), row.len()) };
                1.0
            }
        }
    };
}

wide_packing!(F32, L::load);
wide_packing!(F16, L::load_f16);

impl Packing for Bf16 {
    const ELEMENT: Element = Element::Bf16;
    const PER_UNIT: usize = 2;
    const SUM_VECTORS: usize = 1;
    type Operand = u32;
    type Unit<L: Lanes> = L::Words;
    type Sum<L: Lanes> = L;
    const ZERO: u32 = 0;

    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const u8) -> L::Words {
        // SAFETY: the caller says that a unit can be read.
        unsafe { L::load_words(from.cast()) }
    }
    #[inline(always)]
    fn start<L: Lanes>(_bias: u32) -> L {
        L::splat(0.0)
    }
    #[inline(always)]
    fn add_keys<L: Lanes>(sum: L, unit: L::Words, row: u32) -> L {
        sum.dot_bf16(unit, L::splat_word(row))
    }
    #[inline(always)]
    fn add_values<L: Lanes>(sum: L, unit: L::Words, row: u32) -> L {
        sum.dot_bf16(unit, L::splat_word(row))
    }
    #[inline(always)]
    fn finish<L: Lanes>(sum: L) -> L {
        sum
    }
    #[inline(always)]
    unsafe fn pack_query<L: Lanes>(row: &[f32], to: *mut u32) -> f32 {
        // SAFETY: as this function's.
        unsafe { Self::pack_weights::<L>(row, to) }
    }
    #[inline(always)]
    unsafe fn pack_weights<L: Lanes>(row: &[f32], to: *mut u32) -> f32 {
        for start in (0..row.len()).step_by(LANES) {
            // SAFETY: 16 floats can be read, and there is room for as many halves.
            unsafe {
                L::load(row.as_ptr().add(start)).store_bf16(to.cast::<u16>().add(start));
            }
        }
        1.0
    }
}

impl Packing for Int8 {
    const ELEMENT: Element = Element::Int8;
    const PER_UNIT: usize = 4;
    const SUM_VECTORS: usize = 2;
    /// High and low bytes of four elements.
    type Operand = [u32; 2];
    type Unit<L: Lanes> = L::Words;
    type Sum<L: Lanes> = [L::Words; 2];
    const ZERO: [u32; 2] = [0; 2];

    #[inline(always)]
    unsafe fn load<L: Lanes>(from: *const u8) -> L::Words {
        // SAFETY: the caller says that a unit can be read.
        unsafe { L::load_words(from.cast()) }
    }
    #[inline(always)]
    fn start<L: Lanes>(bias: [u32; 2]) -> [L::Words; 2] {
        [L::splat_word(bias[0]), L::splat_word(bias[1])]
    }
    #[inline(always)]
    fn add_keys<L: Lanes>(sum: [L::Words; 2], unit: L::Words, row: [u32; 2]) -> [L::Words; 2] {
        [
            L::dot_bytes(sum[0], unit, L::splat_word(row[0])),
            L::dot_bytes(sum[1], unit, L::splat_word(row[1])),
        ]
    }
    #[inline(always)]
    fn add_values<L: Lanes>(sum: [L::Words; 2], unit: L::Words, row: [u32; 2]) -> [L::Words; 2] {
        [
            L::dot_bytes(sum[0], L::splat_word(row[0]), unit),
            L::dot_bytes(sum[1], L::splat_word(row[1]), unit),
        ]
    }
    #[inline(always)]
    fn finish<L: Lanes>(sum: [L::Words; 2]) -> L {
        L::from_integers(sum[0]).mul_add(L::splat(128.0), L::from_integers(sum[1]))
    }
    #[inline(always)]
    unsafe fn pack_query<L: Lanes>(row: &[f32], to: *mut [u32; 2]) -> f32 {
        // High bytes of queries are signed: 127 · 128 + 127 is the most they reach.
        // SAFETY: as this function's.
        let factor = unsafe { pack_bytes::<L>(row, 16383.0, to) };
        let mut sums = [0_i32; 2];
        for i in 0..row.len() / 4 {
            // SAFETY: these operands were written just now.
            let [high, low] = unsafe { *to.add(i) };
            for (byte_high, byte_low) in high.to_le_bytes().into_iter().zip(low.to_le_bytes()) {
                sums[0] += i32::from(byte_high as i8);
                sums[1] += i32::from(byte_low as i8);
            }
        }
        // Keys are stored 128 higher.
        let bias = sums.map(|sum| (-128 * sum) as u32);
        // SAFETY: there is room for the bias.
        unsafe { to.add(row.len() / 4).write(bias) };
        factor
    }
    #[inline(always)]
    unsafe fn pack_weights<L: Lanes>(row: &[f32], to: *mut [u32; 2]) -> f32 {
        // SAFETY: as this function's.
        unsafe { pack_bytes::<L>(row, 32767.0, to) }
    }
}

/// Scales `row` so that its largest magnitude becomes `limit`, and writes each whole number `n` as bytes
/// `n >> 7` and `n & 127`; returns the factor back, which is no number where an element is infinite or none.
///
/// # Safety
/// `row` is a multiple of 16 long, and `to` has room for a fourth as many operands.
#[inline(always)]
unsafe fn pack_bytes<L: Lanes>(row: &[f32], limit: f32, to: *mut [u32; 2]) -> f32 {
    let (mut largest, mut spoilt) = (L::splat(0.0), L::splat(0.0));
    for start in (0..row.len()).step_by(LANES) {
        // SAFETY: 16 floats can be read.
        let floats = unsafe { L::load(row.as_ptr().add(start)) };
        largest = floats.abs().max(largest);
        // Zero, and no number for what is none or infinite.
        spoilt = spoilt.add(floats.sub(floats));
    }
    let largest = largest.largest() + spoilt.sum();
    let inverse = L::splat(if largest > 0.0 { limit / largest } else { 0.0 });
    for start in (0..row.len()).step_by(LANES) {
        let [mut high, mut low] = [[0_u32; 4]; 2];
        // SAFETY: 16 floats can be read, and 16 bytes fit each array.
        unsafe {
            let scaled = L::load(row.as_ptr().add(start)).mul(inverse);
            scaled.split_bytes(high.as_mut_ptr().cast(), low.as_mut_ptr().cast());
        }
        for i in 0..4 {
            // SAFETY: there is room for the row's operands.
            unsafe { to.add(start / 4 + i).write([high[i], low[i]]) };
        }
    }
    largest / limit
}
