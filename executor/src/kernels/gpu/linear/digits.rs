//! A few rows of floats as whole numbers of four bytes, which are right operands of matrix instructions.
//!
//! - A token's largest element is less than 2³⁰; all have the same unit, a power of two. What an element less than
//!   2⁻⁷ of the largest one lacks of an f32's bits is less than 2⁻³⁰ of that one.
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

/// Shared memory of so many tokens.
pub(super) fn digit_bytes(tokens: usize, panel: Panel) -> usize {
    tokens * padded(panel) * DIGITS
}

/// The rows of a cube.
#[derive(CubeType)]
pub(super) struct Digits {
    /// `[token][block][t][byte]`: four columns, four more.
    staged: Shared<[Right]>,
    /// Bits of the largest of each plane, `[token][plane]`.
    largest: Shared<[u32]>,
    /// Sums of squares, likewise.
    squares: Shared<[f32]>,
    /// What a token's numbers count, `[token]`.
    units: Array<f32>,
    /// Where a lane finds its first operand.
    from: usize,
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
        let token = lane / (4 * DIGITS) % comptime!(tokens.min(DIGIT_TOKENS));
        let byte = lane / 4 % DIGITS;
        Digits {
            staged: Shared::new_slice(comptime!(tokens * padded(panel) / 2)),
            largest: Shared::new_slice(comptime!(tokens * planes)),
            squares: Shared::new_slice(comptime!(tokens * planes)),
            units: Array::new(tokens),
            from: token * comptime!(padded(panel) / 2) + lane % 4 * DIGITS + byte,
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
        let eights = comptime!(padded(panel) / EIGHT);
        #[unroll]
        for token in 0..shape.tokens {
            let mut largest = 0u32.runtime();
            let mut squares = f32::new(0.0);
            for eight in range_stepped(unit, eights, comptime!(planes * PLANE)) {
                #[unroll]
                for half in 0..2usize {
                    let column = eight * EIGHT + comptime!(4 * half);
                    let mut x = input.load_four(token, column);
                    if comptime!(input.is_normed) {
                        #[unroll]
                        for i in 0..4usize {
                            squares += x.extract(i) * x.extract(i);
                        }
                        x *= input.factors(column);
                    }
                    #[unroll]
                    for i in 0..4usize {
                        // By bits, what is not a number is larger than any.
                        largest = largest.max(u32::reinterpret(x.extract(i)) & 0x7fff_ffffu32);
                    }
                }
            }
            let largest = plane_max(largest);
            if comptime!(shape.is_normed) {
                squares = plane_sum(squares);
            }
            if lane == 0 {
                self.largest[comptime!(token * planes) + plane] = largest;
                self.squares[comptime!(token * planes) + plane] = squares;
            }
        }
        sync_cube();
        #[unroll]
        for token in 0..shape.tokens {
            let largest = self.largest[comptime!(token * planes) + lane % planes];
            let exponent = (plane_max(largest) >> 23u32).max(LEAST_EXPONENT);
            let inverse = f32::reinterpret((EXPONENTS - exponent) << 23u32);
            let is_finite = exponent < 255u32;
            let count = f32::reinterpret((exponent - comptime!(LEAST_EXPONENT - 1)) << 23u32);
            self.units[token] = select(is_finite, count, f32::new(f32::NAN));
            for eight in range_stepped(unit, eights, comptime!(planes * PLANE)) {
                let at = comptime!(token * padded(panel) / 2) + eight * DIGITS;
                let column = eight * EIGHT;
                let first = digits(input, token, column, inverse);
                let second = digits(input, token, column + 4, inverse);
                #[unroll]
                for byte in 0..DIGITS {
                    let mut both = Right::empty();
                    both.insert(0usize, first[byte]);
                    both.insert(1usize, second[byte]);
                    self.staged[at + byte] = both;
                }
            }
            if comptime!(shape.is_normed) && unit == 0 {
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
        sync_cube();
    }

    /// The operand of a block for that group of tokens; of a last one there may be only half.
    pub(super) fn operand(
        &self,
        block: usize,
        #[comptime] group: usize,
        #[comptime] shape: Shape,
        #[comptime] panel: Panel,
    ) -> Right {
        let mut from = self.from;
        if comptime!(shape.tokens > DIGIT_TOKENS && (group + 1) * DIGIT_TOKENS > shape.tokens) {
            from %= comptime!(padded(panel) / 2);
        }
        from += comptime!(group * DIGIT_TOKENS * padded(panel) / 2);
        self.staged[from + block * comptime!(BLOCK / 2)]
    }

    /// What the numbers of a token count.
    pub(super) fn unit(&self, #[comptime] token: usize) -> f32 {
        self.units[token]
    }
}

/// Four columns as their bytes, `[byte]`, the highest first.
#[cube]
fn digits<N: Size>(input: &Input<N>, token: usize, column: usize, inverse: f32) -> Array<u32> {
    let mut x = input.load_four(token, column);
    if comptime!(input.is_normed) {
        x *= input.factors(column);
    }
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
