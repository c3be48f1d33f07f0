//! Weights in 12 bits, see [`crate::kernels::cpu::bf12`]: as small floats that matrix instructions take, and unpacked.
//!
//! What a row's exponents are above is a factor of its sums. Small floats are as small as bf16 gets; so that their sums
//! are not, activations are larger by 2^64.

#![expect(clippy::needless_range_loop, reason = "what is unrolled counts")]

use cubecl::prelude::*;

use super::words::Words;
use crate::kernels::cpu::bf12::{FOURTH, PAIR, STEP_COLUMNS, STEP_WORDS};
use crate::kernels::cpu::pack::VECTOR;

/// Rows of a load.
const ROWS: usize = 4;
/// Loads of a vector's word.
pub(super) const VECTOR_LOADS: usize = VECTOR / ROWS;

/// What activations are multiplied with: 2^64.
pub(super) const ENLARGED: f32 = (1_u128 << 64) as f32;
/// The same, in both halves of a pair of bf16.
pub(super) const ENLARGED_PAIR: u32 = (ENLARGED.to_bits() >> 16) * 0x1_0001;
/// What takes a base to the exponent of an f32 that makes good for its absence in weights and for [`ENLARGED`].
const BASE_TO_FACTOR: u32 = 127 - 64;
/// The largest base of which that is an exponent of a number.
const MOST_BASE: u32 = 254 - BASE_TO_FACTOR;
/// The base of rows with what is infinite or not a number, whose exponent is 255; that of others is smaller.
const SPOILT_BASE: u32 = 255 - 15;

/// What a sum is multiplied with, one after the other: of rows of very large numbers, both together are beyond f32.
pub(super) type Factors = Vector<f32, Const<2>>;

/// A pair of columns of a step, of a load's four rows: small floats. The step's words start at `words[first]`.
#[cube]
pub(super) fn small_pair(
    words: &Array<Words>,
    #[comptime] first: usize,
    #[comptime] pair: usize,
) -> Words {
    let mut pairs = Words::empty();
    #[unroll]
    for row in 0..ROWS {
        let mut both = 0u32.runtime();
        if comptime!(pair < STEP_WORDS) {
            both = words[first + pair].extract(row) & PAIR;
        } else {
            #[unroll]
            for part in 0..4usize {
                let (word, shift, mask) = comptime!(FOURTH[part]);
                let word = words[first + word].extract(row);
                let shifted = if comptime!(shift < 0) {
                    word << comptime!(-shift as u32)
                } else {
                    word >> comptime!(shift as u32)
                };
                both |= shifted & mask;
            }
        }
        pairs.insert(row, both);
    }
    pairs
}

/// What the sums of a load's four rows are multiplied with; `bases` are the words in front of a panel.
///
/// It is no number for a row with what is infinite or not a number, since small floats do not tell those apart.
#[cube]
pub(super) fn row_factors(bases: Words) -> Array<Factors> {
    let mut factors = Array::<Factors>::new(ROWS);
    #[unroll]
    for row in 0..ROWS {
        let base = (bases.extract(row) >> 7u32) & 255u32;
        let beyond = select(base > MOST_BASE, base - MOST_BASE, 0u32);
        let first = (base - beyond + BASE_TO_FACTOR) << 23u32;
        let second = select(base < SPOILT_BASE, (beyond + 127u32) << 23u32, 0x7fc0_0000u32);
        let mut both = Factors::empty();
        both.insert(0usize, f32::reinterpret(first));
        both.insert(1usize, f32::reinterpret(second));
        factors[row] = both;
    }
    factors
}

/// A sum with the factors of its row.
#[cube]
pub(super) fn scaled(sum: f32, factors: Factors) -> f32 {
    sum * factors.extract(0usize) * factors.extract(1usize)
}

/// Makes what a step was decoded to without its bases, `values[row][column]`, the numbers that it stands for.
#[cube]
pub(super) fn add_bases(values: &mut Array<f32>, bases: Words) {
    #[unroll]
    for row in 0..ROWS {
        let base = (bases.extract(row) >> 7u32) & 255u32;
        #[unroll]
        for column in 0..STEP_COLUMNS {
            let at = comptime!(row * STEP_COLUMNS + column);
            values[at] = widen(u32::reinterpret(values[at]), base);
        }
    }
}

/// A small float, in the upper half of a word, as the number that it stands for.
#[cube]
fn widen(word: u32, base: u32) -> f32 {
    let small = word & 0x7fff_ffffu32;
    let sign = word & 0x8000_0000u32;
    // Those without an exponent are multiples of 2^(base - 133), those of the least bases next to nothing.
    let exponent = select(base > 6u32, base - 6u32, 0u32);
    let multiple = f32::cast_from(small >> 16u32) * f32::reinterpret(exponent << 23u32);
    let normal = small + (base << 23u32);
    let is_normal = small >= comptime!(1u32 << 23);
    f32::reinterpret(sign | select(is_normal, normal, u32::reinterpret(multiple)))
}
