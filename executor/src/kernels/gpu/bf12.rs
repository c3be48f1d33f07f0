//! Weights in 12 bits, see [`crate::kernels::cpu::bf12`]: as small floats that matrix instructions take, and unpacked.
//!
//! What a row's exponents are above is a factor of its sums. Small floats are as small as bf16 gets; so that their sums
//! are not, activations are larger by 2^64.

#![expect(unsafe_code, reason = "kernels are launched without checks of every index")]
#![expect(clippy::needless_range_loop, reason = "what is unrolled counts")]

use anyhow::Result;
use cubecl::prelude::*;
use ir::tensor::Format;

use super::device::{Gpu, element};
use super::matrix::{LOAD_BYTES, Matrix, float_bytes, float_type};
use super::words::Words;
use crate::kernels::cpu::bf12::{FOURTH, PAIR, STEP_COLUMNS, STEP_WORDS};
use crate::kernels::cpu::pack::{PANEL, VECTOR, packed_bytes, padded};

/// Units of a cube; any whole number of planes would do.
const UNITS: usize = 256;
/// Rows of a load.
const ROWS: usize = 4;
/// Loads of a vector's word.
pub(super) const VECTOR_LOADS: usize = VECTOR / ROWS;

/// What activations are multiplied with: 2^64.
pub(super) const ENLARGED: f32 = (1_u128 << 64) as f32;
/// What takes a base to the exponent of an f32 that makes good for its absence in weights and for [`ENLARGED`].
const BASE_TO_FACTOR: u32 = 127 - 64;

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
#[cube]
pub(super) fn row_factors(bases: Words) -> Array<f32> {
    let mut factors = Array::<f32>::new(ROWS);
    #[unroll]
    for row in 0..ROWS {
        let base = (bases.extract(row) >> 7u32) & 255u32;
        factors[row] = f32::reinterpret((base + BASE_TO_FACTOR) << 23u32);
    }
    factors
}

/// What is known of a panel when the unpacking kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Panel {
    columns: usize,
}

impl Panel {
    fn steps(self) -> usize {
        padded(Format::Bf12, self.columns) / STEP_COLUMNS
    }

    /// Units of a panel of two vectors.
    fn units(self) -> usize {
        self.steps() * PANEL / ROWS
    }

    /// Loads from the start of one panel to the next.
    fn stride(self) -> usize {
        packed_bytes(Format::Bf12, PANEL, self.columns) / LOAD_BYTES
    }
}

impl Gpu {
    /// Queues the writing of a matrix in 12 bits to `unpacked`, which has its shape and is row-major.
    pub(super) fn unpack_bf12(&self, matrix: &Matrix, unpacked: &Matrix) -> Result<()> {
        let (rows, columns, format) = (matrix.rows(), matrix.columns(), unpacked.format());
        let panel = Panel { columns };
        let size = LOAD_BYTES / float_bytes(format)?;
        let units = rows.div_ceil(PANEL) * panel.units();
        let out = unpacked.data();
        // SAFETY: the spans are as long as the shapes say, and the kernel stays within those.
        unsafe {
            unpack_bf12::launch_unchecked(
                &self.client,
                CubeCount::new_1d(units.div_ceil(UNITS) as u32),
                CubeDim::new_1d(UNITS as u32),
                size,
                matrix.data().loads(),
                out.argument(rows * columns / size, LOAD_BYTES),
                rows,
                panel,
                element(float_type(format)?),
            );
        }
        Ok(())
    }
}

/// Each unit writes a step of four rows.
#[cube(launch_unchecked)]
fn unpack_bf12<F: Float, N: Size>(
    weights: &[Words],
    out: &mut [Vector<F, N>],
    rows: usize,
    #[comptime] panel: Panel,
    #[define(F)] _element: ElemType,
) {
    let size = N::value();
    let number = ABSOLUTE_POS / comptime!(panel.units());
    let unit = ABSOLUTE_POS % comptime!(panel.units());
    if number * PANEL < rows {
        let vectors = select(rows - number * PANEL > VECTOR, 2usize, 1usize);
        let slots = vectors * VECTOR_LOADS;
        let (step, slot) = (unit / slots, unit % slots);
        if step < comptime!(panel.steps()) {
            let start = number * comptime!(panel.stride()) + slot;
            let bases = weights[start];
            let mut words = Array::<Words>::new(STEP_WORDS);
            #[unroll]
            for k in 0..STEP_WORDS {
                words[k] = weights[start + (1 + step * STEP_WORDS + k) * slots];
            }
            let mut values = Array::<f32>::new(comptime!(ROWS * STEP_COLUMNS));
            #[unroll]
            for pair in 0..comptime!(STEP_COLUMNS / 2) {
                let pairs = small_pair(&words, 0usize, pair);
                #[unroll]
                for row in 0..ROWS {
                    let base = (bases.extract(row) >> 7u32) & 255u32;
                    let both = pairs.extract(row);
                    let at = comptime!(row * STEP_COLUMNS + 2 * pair);
                    values[at] = widen(both << 16u32, base);
                    values[at + 1] = widen(both & 0xffff_0000u32, base);
                }
            }
            #[unroll]
            for of_row in 0..ROWS {
                #[unroll]
                for store in 0..comptime!(STEP_COLUMNS / size) {
                    let row = number * PANEL + slot * ROWS + of_row;
                    let column = step * STEP_COLUMNS + comptime!(store * size);
                    if row < rows && column < panel.columns {
                        let mut vector = Vector::<F, N>::empty();
                        #[unroll]
                        for i in 0..size {
                            let from = comptime!(of_row * STEP_COLUMNS + store * size + i);
                            vector.insert(i, F::cast_from(values[from]));
                        }
                        out[(row * panel.columns + column) / size] = vector;
                    }
                }
            }
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
