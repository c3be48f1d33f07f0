//! One or two rows of floats as whole numbers of four bytes, which are right operands of matrix instructions.
//!
//! - A block's largest element is less than 2³⁰; all of it have the same unit, a power of two. What an element less
//!   than 2⁻⁷ of the largest one lacks of an f32's bits is less than 2⁻³⁰ of that one.
//! - A number's bytes have signs and are columns of an operand, the highest first. An operand holds two tokens; where
//!   there is one, it is there twice.
//! - A cube converts all columns before it multiplies, for all of its planes.

use cubecl::prelude::*;

use super::input::Input;
use super::rights::{PLANE, Right};
use super::total::{Shape, Totals};
use crate::kernels::gpu::instructions::choose_bytes;
use crate::kernels::gpu::panel::Panel;
use crate::kernels::gpu::portion::BLOCK;
use crate::kernels::gpu::words::Four;

/// Bytes of a number.
pub(super) const DIGITS: usize = 4;
/// Tokens of an operand.
pub(super) const DIGIT_TOKENS: usize = 8 / DIGITS;
/// Columns that a unit converts at a time: those of a lane in a block.
const EIGHT: usize = 8;
/// The exponent of the smallest largest element whose unit has an inverse, as f32 has it.
const LEAST_EXPONENT: u32 = 30;
/// Exponents of a largest element and of the unit's inverse together: 127 twice and one below 30.
const EXPONENTS: u32 = 2 * 127 + 29;

/// Columns that are converted, in whole blocks.
fn padded(panel: Panel) -> usize {
    panel.padded().next_multiple_of(BLOCK)
}

/// Blocks of a row.
fn blocks(panel: Panel) -> usize {
    padded(panel) / BLOCK
}

/// Bytes of shared memory for `tokens` tokens.
pub(super) fn digit_bytes(tokens: usize, panel: Panel) -> usize {
    tokens * (padded(panel) * DIGITS + blocks(panel) * size_of::<f32>())
}

/// The rows of a cube.
#[derive(CubeType)]
pub(super) struct Digits {
    /// `[token][block][t][byte]`: four columns, four more.
    staged: Shared<[Right]>,
    /// What the numbers of a block count, `[token][block]`.
    units: Shared<[f32]>,
    /// Sums of squares of each plane, `[token][plane]`.
    squares: Shared<[f32]>,
    /// Where a lane finds its first operand.
    from: usize,
    /// Which of an operand's tokens a lane's sums are of.
    token: usize,
}

#[cube]
impl Digits {
    /// Room for the rows of a cube.
    pub(super) fn new(
        lane: usize,
        #[comptime] planes: usize,
        #[comptime] tokens: usize,
        #[comptime] panel: Panel,
    ) -> Digits {
        let token = lane / (4 * DIGITS) % tokens;
        let byte = lane / 4 % DIGITS;
        Digits {
            staged: Shared::new_slice(comptime!(tokens * padded(panel) / 2)),
            units: Shared::new_slice(comptime!(tokens * blocks(panel))),
            squares: Shared::new_slice(comptime!(tokens * planes)),
            from: token * comptime!(padded(panel) / 2) + lane % 4 * DIGITS + byte,
            token: lane % 4 / 2 * comptime!(tokens - 1),
        }
    }

    /// Converts the input; all planes of a cube do so together.
    pub(super) fn convert<N: Size>(
        &mut self,
        input: &Input<N>,
        totals: &mut Totals,
        #[comptime] planes: usize,
        #[comptime] shape: Shape,
        #[comptime] panel: Panel,
    ) {
        let unit = UNIT_POS as usize;
        let plane = unit / PLANE;
        let lane = unit % PLANE;
        let units = comptime!(planes * PLANE);
        let eights = comptime!(padded(panel) / EIGHT);
        #[unroll]
        for token in 0..shape.tokens {
            let mut squares = f32::new(0.0);
            // Planes stay together, since four lanes share a block.
            for round in 0..comptime!(eights.div_ceil(units)) {
                let eight = round * units + unit;
                let column = eight.min(comptime!(eights - 1)) * EIGHT;
                let mut first = input.load_four(token, column);
                let mut second = input.load_four(token, column + 4);
                if comptime!(input.is_normed) {
                    if eight < eights {
                        squares += square(first) + square(second);
                    }
                    first *= input.factors(column);
                    second *= input.factors(column + 4);
                }
                let mut largest = largest_bits(first).max(largest_bits(second));
                largest = largest.max(plane_shuffle_xor(largest, 1u32));
                largest = largest.max(plane_shuffle_xor(largest, 2u32));
                let exponent = (largest >> 23u32).max(LEAST_EXPONENT);
                let inverse = f32::reinterpret((EXPONENTS - exponent) << 23u32);
                if eight < eights {
                    let first = digits(first, inverse);
                    let second = digits(second, inverse);
                    let at = comptime!(token * padded(panel) / 2) + eight * DIGITS;
                    #[unroll]
                    for byte in 0..DIGITS {
                        let mut both = Right::empty();
                        both.insert(0usize, first[byte]);
                        both.insert(1usize, second[byte]);
                        self.staged[at + byte] = both;
                    }
                    let count =
                        f32::reinterpret((exponent - comptime!(LEAST_EXPONENT - 1)) << 23u32);
                    let count = select(exponent < 255u32, count, f32::new(f32::NAN));
                    // All four lanes write the same.
                    self.units[comptime!(token * blocks(panel)) + eight / 4] = count;
                }
            }
            if comptime!(shape.is_normed) {
                let squares = plane_sum(squares);
                if lane == 0 {
                    self.squares[comptime!(token * planes) + plane] = squares;
                }
            }
        }
        sync_cube();
        if comptime!(shape.is_normed) && unit == 0 {
            #[unroll]
            for token in 0..shape.tokens {
                let mut sum = f32::new(0.0);
                #[unroll]
                for plane in 0..planes {
                    sum += self.squares[comptime!(token * planes + plane)];
                }
                totals.put_square(0usize, 0usize, token, sum, shape);
                #[unroll]
                for group in 1..shape.groups {
                    totals.put_square(group, 0usize, token, 0.0, shape);
                }
            }
        }
    }

    /// The operand of a block.
    pub(super) fn operand(&self, block: usize) -> Right {
        self.staged[self.from + block * comptime!(BLOCK / 2)]
    }

    /// What the numbers of a block count, for a lane's token.
    pub(super) fn unit(&self, block: usize, #[comptime] panel: Panel) -> f32 {
        self.units[self.token * comptime!(blocks(panel)) + block]
    }
}

/// The sum of four squares.
#[cube]
fn square(x: Four) -> f32 {
    let mut sum = f32::new(0.0);
    #[unroll]
    for i in 0..4usize {
        sum += x.extract(i) * x.extract(i);
    }
    sum
}

/// The bits of the largest of four: what is not a number is larger than any.
#[cube]
fn largest_bits(x: Four) -> u32 {
    let mut largest = 0u32.runtime();
    #[unroll]
    for i in 0..4usize {
        largest = largest.max(u32::reinterpret(x.extract(i)) & 0x7fff_ffffu32);
    }
    largest
}

/// Four columns as their bytes, `[byte]`, the highest first.
#[cube]
fn digits(x: Four, inverse: f32) -> Array<u32> {
    let mut numbers = Array::<u32>::new(4usize);
    #[unroll]
    for i in 0..4usize {
        let number = u32::reinterpret(i32::cast_from(x.extract(i) * inverse));
        // Each byte but the highest becomes one with a sign, and the next one makes up for that.
        numbers[i] = (number + 0x0080_8080u32) ^ 0x0080_8080u32;
    }
    let mut bytes = Array::<u32>::new(DIGITS);
    #[unroll]
    for half in 0..2usize {
        // Two bytes of the first two columns, then of the others.
        let order = comptime!(if half == 0 { 0x7362u32 } else { 0x5140 });
        let first = choose_bytes(numbers[0], numbers[1], order);
        let second = choose_bytes(numbers[2], numbers[3], order);
        bytes[comptime!(2 * half)] = choose_bytes(first, second, 0x7632u32);
        bytes[comptime!(2 * half + 1)] = choose_bytes(first, second, 0x5410u32);
    }
    bytes
}
