//! Blocks as left operands: codes times their scales, or codes alone.
//!
//! - A byte that is the lower half of a bf16 whose other bits are zero stands for so many times 2^-133: without an
//!   exponent up to 127, and with the least one from there on. One instruction multiplies two of them with what takes
//!   them to where they belong and adds what the code that stands for zero comes to, negative; it rounds once.
//! - Scales are those of f16. So that they are numbers of bf16 times 2^133 as well, operands are smaller by 2^24, and
//!   their sums are made good by [`make_good()`].

use cubecl::prelude::*;
use ir::tensor::Format;

use super::{Portion, PortionExpand};
use crate::kernels::gpu::instructions::{
    Packed, Sums, fma_pairs, left, multiply_pairs, pack, spread, twice,
};
use crate::kernels::gpu::panel::Panel;

/// What a byte that is a bf16 stands for, as a power of two.
const BYTE_EXPONENT: i32 = -133;
/// What operands of blocks are smaller by, as a power of two.
const SMALLER: i32 = 24;

/// What a step of a code is in [`Portion::bytes()`] of a block.
pub(in crate::kernels::gpu) fn byte_unit(format: Format, block: usize) -> u32 {
    if matches!(format, Format::Q4) && block == 1 { 16 } else { 1 }
}

/// What is added to each of [`Portion::bytes()`] so that the code that stands for zero becomes zero, as bytes with
/// signs.
pub(in crate::kernels::gpu) fn byte_offsets(format: Format, block: usize) -> u32 {
    if matches!(format, Format::Q4) && block == 0 { 0xf8f8_f8f8 } else { 0x8080_8080 }
}

/// The code that stands for zero.
fn zero_code(format: Format) -> u32 {
    if matches!(format, Format::Q4) { 8 } else { 128 }
}

/// A power of two as bf16, twice.
fn power_pair(exponent: i32) -> u32 {
    ((127 + exponent) as u32) << 7 | ((127 + exponent) as u32) << 23
}

/// What takes the bytes of a block that are pairs of bf16 to its codes, smaller by 2^[`SMALLER`].
fn unit_pair(format: Format, block: usize) -> u32 {
    power_pair(-BYTE_EXPONENT - SMALLER - byte_unit(format, block).ilog2() as i32)
}

/// The code that stands for zero, negative and smaller by 2^[`SMALLER`].
fn zero_pair(format: Format) -> u32 {
    power_pair(zero_code(format).ilog2() as i32 - SMALLER) | 0x8000_8000
}

#[cube]
impl Portion {
    /// The left operands of a block. Those of block formats are codes, exact and smaller by 2^[`SMALLER`]: their scales
    /// are for the sums.
    pub(in crate::kernels::gpu) fn codes(
        &self,
        #[comptime] block: usize,
        #[comptime] panel: Panel,
    ) -> Array<Packed> {
        let mut operands = Array::<Packed>::new(4usize);
        if comptime!(panel.blocks() > 0) {
            let unit = comptime!(unit_pair(panel.format, block)).runtime();
            let zero = comptime!(zero_pair(panel.format)).runtime();
            #[unroll]
            for rows in 0..2usize {
                self.put_codes(&mut operands, unit, zero, rows, block, panel);
            }
        } else {
            #[unroll]
            for step in 0..2usize {
                self.put_floats(&mut operands, step, panel);
            }
        }
        operands
    }

    /// The left operands of a block. Those of block formats are codes multiplied with their scales, both in bf16, and
    /// smaller by what [`make_good()`] makes good.
    pub(in crate::kernels::gpu) fn scaled_codes(
        &self,
        #[comptime] block: usize,
        slot: usize,
        #[comptime] panel: Panel,
    ) -> Array<Packed> {
        if comptime!(panel.blocks() > 0) {
            let mut operands = Array::<Packed>::new(4usize);
            let scales = self.scales(block, slot);
            #[unroll]
            for rows in 0..2usize {
                let of_rows = pack(scales[2 * rows], scales[comptime!(2 * rows + 1)], true);
                let unit = comptime!(unit_pair(panel.format, block)).runtime();
                let zero = comptime!(zero_pair(panel.format)).runtime();
                let (unit, zero) = (multiply_pairs(of_rows, unit), multiply_pairs(of_rows, zero));
                self.put_codes(&mut operands, unit, zero, rows, block, panel);
            }
            operands
        } else {
            self.codes(block, panel)
        }
    }

    /// Puts the operands of a pair of rows, each of which has its half of `unit` and of `zero`.
    fn put_codes(
        &self,
        operands: &mut Array<Packed>,
        unit: u32,
        zero: u32,
        #[comptime] rows: usize,
        #[comptime] block: usize,
        #[comptime] panel: Panel,
    ) {
        let bytes = self.bytes(rows, block, panel);
        #[unroll]
        for step in 0..2usize {
            let mut operand = Packed::empty();
            #[unroll]
            for columns in 0..2usize {
                #[unroll]
                for row in 0..2usize {
                    let pair = spread(bytes.extract(comptime!(2 * step + row)), columns);
                    let code = fma_pairs(pair, twice(unit, row), twice(zero, row));
                    operand.insert(comptime!(2 * columns + row), code);
                }
            }
            operands[comptime!(2 * step + rows)] = operand;
        }
    }

    /// The left operand of a block for a pair of rows as unsigned bytes: [`byte_unit()`] for each step of a code.
    pub(in crate::kernels::gpu) fn bytes(
        &self,
        #[comptime] rows: usize,
        #[comptime] block: usize,
        #[comptime] panel: Panel,
    ) -> Packed {
        let mask = comptime!(match (panel.format, block) {
            (Format::Q4, 0) => 0x0f0f_0f0fu32,
            (Format::Q4, _) => 0xf0f0_f0f0,
            _ => 0xffff_ffff,
        });
        let (upper, lower) = comptime!((2 * rows, 2 * rows + 1));
        left(
            self.words[0].extract(upper) & mask,
            self.words[0].extract(lower) & mask,
            self.words[1].extract(upper) & mask,
            self.words[1].extract(lower) & mask,
        )
    }
}

/// Makes good in `count` sums that operands of blocks are smaller than what they stand for.
#[cube]
pub(in crate::kernels::gpu) fn make_good(
    sums: &mut Array<Sums>,
    #[comptime] count: usize,
    #[comptime] panel: Panel,
) {
    if comptime!(panel.blocks() > 0) {
        #[unroll]
        for at in 0..count {
            sums[at] *= Sums::new(comptime!((1u32 << SMALLER) as f32));
        }
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    /// The lower one of a pair.
    fn lower(pair: u32) -> f64 {
        bf16::from_bits(pair as u16).to_f64()
    }

    #[test]
    fn bytes_become_codes_times_any_scale_rounded_once() {
        let smaller = 2f64.powi(-SMALLER);
        for (format, block) in [(Format::Q8, 0), (Format::Q4, 0), (Format::Q4, 1)] {
            let (unit, zero) = (unit_pair(format, block), zero_pair(format));
            assert_eq!([unit >> 16, zero >> 16], [unit & 0xffff, zero & 0xffff]);
            let codes = 2 * zero_code(format);
            for bits in (0..=f16::MAX.to_bits()).flat_map(|bits| [bits, bits | 0x8000]) {
                let scale = bf16::from_f32(f16::from_bits(bits).to_f32()).to_f64();
                let [unit, zero] = [unit, zero].map(|pair| {
                    let scaled = bf16::from_f64(scale * lower(pair));
                    assert_eq!(scaled.to_f64(), scale * lower(pair), "{format}, scale {scale}");
                    scaled.to_f64()
                });
                for code in 0..codes {
                    let byte = lower(code * byte_unit(format, block));
                    let made = bf16::from_f64(byte * unit + zero);
                    let code = f64::from(code) - f64::from(codes / 2);
                    let wanted = bf16::from_f64(code * scale).to_f64() * smaller;
                    assert_eq!(made.to_f64(), wanted, "{format}, {code} times {scale}");
                }
            }
        }
    }
}
