//! Weights, as they lie, to left operands of matrix instructions.
//!
//! - The order in which a product runs through its columns is free, as is which row of a result is which row of a
//!   matrix. Lane `4 g + t` multiplies columns `32 b + 8 t ..` of block `b`: the first four of them in one
//!   instruction, the others in the next.
//! - Its rows are four neighbours, those of a 16-byte load: the first two are rows `g` and `g + 8` of one operand, the
//!   others of a second one.
//! - A *portion* is what a lane loads at once: a block of 32 columns, two in q4.
//! - Blocks become operands multiplied with their scales in bf16, or as *codes*, exact, whose scales are for the sums of
//!   a block. Both are smaller than what they stand for, which their sums make good.

mod codes;
mod lines;
mod trail;

use cubecl::prelude::*;
use half::f16;
use ir::tensor::Format;

pub(super) use self::codes::{byte_offsets, byte_unit, make_good};
pub(super) use self::lines::Lines;
pub(super) use self::trail::Trail;
use super::bf12::{VECTOR_LOADS, small_pair};
use super::instructions::{Packed, Sums, interleave, left, multiply, right};
use super::panel::{Panel, SCALE_LOADS, Walk};
use super::words::Words;
use crate::kernels::cpu::bf12::{STEP_COLUMNS, STEP_WORDS};
use crate::kernels::cpu::pack::BLOCK_PAIR;

/// Columns of a block, whatever the format.
pub(super) const BLOCK: usize = BLOCK_PAIR / 2;

/// Blocks of a portion.
pub(super) fn portion_blocks(panel: Panel) -> usize {
    panel.blocks().max(1)
}

/// Columns of a portion.
pub(super) fn portion_columns(panel: Panel) -> usize {
    BLOCK * portion_blocks(panel)
}

/// Portions that cover the columns of a matrix.
pub(super) fn portions(panel: Panel) -> usize {
    panel.columns.div_ceil(portion_columns(panel))
}

/// Words of a portion, in fours.
pub(super) fn portion_words(panel: Panel) -> usize {
    match panel.format {
        Format::Q8 | Format::Q4 => 2,
        Format::Bf16 | Format::F16 => 4,
        Format::Bf12 => STEP_WORDS,
        Format::F32 => unreachable!("f32 is not multiplied as 16-bit elements"),
    }
}

/// A lane's part of a portion.
#[derive(CubeType)]
pub(super) struct Portion {
    /// `[load][row]`; in f16 `[columns 2 i, 2 i + 1][column][pair of rows]`.
    words: Array<Words>,
    /// `[block]`: f16 scales of eight rows, of which four are the lane's, or those four twice. They are told apart when
    /// they are used: until then nothing waits for them.
    scales: Array<Words>,
}

#[cube]
impl Portion {
    /// Room for a portion.
    pub(super) fn new(#[comptime] panel: Panel) -> Portion {
        Portion {
            words: Array::new(comptime!(portion_words(panel))),
            scales: Array::new(comptime!(portion_blocks(panel))),
        }
    }

    /// Loads portion `number`; `walk.slot` counts in four rows, `t` is the lane's.
    pub(super) fn load(
        &mut self,
        weights: &[Words],
        walk: Walk,
        t: usize,
        number: usize,
        #[comptime] panel: Panel,
    ) {
        match comptime!(panel.format) {
            Format::Q8 => {
                let pair = walk.start + number / 2 * comptime!(panel.pair_stride()) * walk.vectors;
                let block = number % 2;
                let first = pair + SCALE_LOADS * walk.vectors;
                #[unroll]
                for i in 0..2usize {
                    let group = block * 8 + 2 * t + i;
                    self.words[i] = weights[first + group * 4 * walk.vectors + walk.slot];
                }
                self.load_scales(weights, pair, block, walk, 0usize);
            }
            Format::Q4 => {
                let pair = walk.start + number * comptime!(panel.pair_stride()) * walk.vectors;
                let first = pair + SCALE_LOADS * walk.vectors;
                #[unroll]
                for i in 0..2usize {
                    let group = 2 * t + i;
                    self.words[i] = weights[first + group * 4 * walk.vectors + walk.slot];
                }
                #[unroll]
                for block in 0..2usize {
                    self.load_scales(weights, pair, block.runtime(), walk, block);
                }
            }
            Format::Bf16 => {
                // Columns beyond the last meet zeros: any number does.
                let last = comptime!(panel.padded() / 2 - 1);
                #[unroll]
                for i in 0..4usize {
                    let columns = min(number * comptime!(BLOCK / 2) + 4 * t + i, last.runtime());
                    self.words[i] = weights[walk.start + columns * 4 * walk.vectors + walk.slot];
                }
            }
            Format::F16 => {
                let last = comptime!(panel.padded() - 1);
                let is_upper = walk.slot % 2 == 1;
                #[unroll]
                for i in 0..4usize {
                    let mut both = Words::empty();
                    #[unroll]
                    for j in 0..2usize {
                        let column =
                            min(number * BLOCK + 8 * t + comptime!(2 * i + j), last.runtime());
                        let at = walk.start + column * 2 * walk.vectors + walk.slot / 2;
                        let rows = weights[at];
                        #[unroll]
                        for k in 0..2usize {
                            let word = select(is_upper, rows.extract(2 + k), rows.extract(k));
                            both.insert(comptime!(2 * j + k), word);
                        }
                    }
                    self.words[i] = both;
                }
            }
            Format::Bf12 => {
                let last = comptime!(panel.padded() / STEP_COLUMNS - 1);
                let step = min(number * comptime!(BLOCK / STEP_COLUMNS) + t, last.runtime());
                #[unroll]
                for k in 0..STEP_WORDS {
                    let word = (1 + step * STEP_WORDS + k) * VECTOR_LOADS;
                    self.words[k] = weights[walk.start + word * walk.vectors + walk.slot];
                }
            }
            Format::F32 => comptime!(unreachable!("f32 is not multiplied as 16-bit elements")),
        }
    }

    /// Loads a trail's next portion.
    pub(super) fn load_next(&mut self, weights: &[Words], trail: &Trail, #[comptime] panel: Panel) {
        let (mut words, mut scales) = (trail.words, trail.scales);
        if comptime!(panel.blocks() == 1) {
            // Scales of both blocks lie before the first: the second's are further from its words.
            let half = trail.number % 2 * (trail.row / 2);
            words -= half;
            scales -= half * comptime!(BLOCK / 2);
        }
        self.words[0] = weights[words];
        self.words[1] = weights[words + trail.row];
        #[unroll]
        for block in 0..comptime!(panel.blocks()) {
            self.scales[block] = weights[scales + comptime!(block) * (trail.row / 2)];
        }
    }

    /// Loads the portion of that number of four rows of a row-major matrix in bf16, as it is loaded from panels. Rows
    /// behind the last are copies of that one.
    pub(super) fn load_rows(
        &mut self,
        weights: &[Words],
        rows: usize,
        first_row: usize,
        t: usize,
        number: usize,
        #[comptime] panel: Panel,
    ) {
        // Columns beyond the last meet zeros: any number does.
        let loads = comptime!(panel.columns / 8);
        let load = min(number * comptime!(BLOCK / 8) + t, comptime!(loads - 1).runtime());
        let mut pairs = Array::<Words>::new(4usize);
        #[unroll]
        for row in 0..4usize {
            pairs[row] = weights[min(first_row + row, rows - 1) * loads + load];
        }
        #[unroll]
        for i in 0..4usize {
            let mut words = Words::empty();
            #[unroll]
            for row in 0..4usize {
                words.insert(row, pairs[row].extract(i));
            }
            self.words[i] = words;
        }
    }

    /// Loads the scales of a block of a pair.
    fn load_scales(
        &mut self,
        weights: &[Words],
        pair: usize,
        block: usize,
        walk: Walk,
        #[comptime] to: usize,
    ) {
        self.scales[to] =
            weights[pair + block * walk.vectors * comptime!(SCALE_LOADS / 2) + walk.slot / 2];
    }

    /// The scales of a slot's four rows in a block.
    pub(super) fn scales(&self, #[comptime] block: usize, slot: usize) -> Array<f32> {
        let halves = self.scales[block];
        let is_upper = slot % 2 == 1;
        let mut scales = Array::<f32>::new(4usize);
        #[unroll]
        for i in 0..2usize {
            let pair = select(is_upper, halves.extract(2 + i), halves.extract(i));
            let pair = Vector::<f16, Const<2>>::reinterpret(pair);
            scales[comptime!(2 * i)] = f32::cast_from(pair.extract(0usize));
            scales[comptime!(2 * i + 1)] = f32::cast_from(pair.extract(1usize));
        }
        scales
    }

    /// A load of a format without blocks; in 12 bits what would be one of bf16.
    fn floats(&self, #[comptime] index: usize, #[comptime] panel: Panel) -> Words {
        if comptime!(matches!(panel.format, Format::Bf12)) {
            small_pair(&self.words, 0usize, index)
        } else {
            self.words[index]
        }
    }

    /// The operands of a step in a format without blocks.
    fn put_floats(
        &self,
        operands: &mut Array<Packed>,
        #[comptime] step: usize,
        #[comptime] panel: Panel,
    ) {
        let first = self.floats(comptime!(2 * step), panel);
        let second = self.floats(comptime!(2 * step + 1), panel);
        #[unroll]
        for rows in 0..2usize {
            operands[comptime!(2 * step + rows)] = match comptime!(panel.format) {
                Format::F16 => {
                    let (a, b) = (first.extract(rows), first.extract(comptime!(2 + rows)));
                    let (c, d) = (second.extract(rows), second.extract(comptime!(2 + rows)));
                    left(
                        interleave(a, b, false),
                        interleave(a, b, true),
                        interleave(c, d, false),
                        interleave(c, d, true),
                    )
                }
                Format::Bf16 | Format::Bf12 => left(
                    first.extract(comptime!(2 * rows)),
                    first.extract(comptime!(2 * rows + 1)),
                    second.extract(comptime!(2 * rows)),
                    second.extract(comptime!(2 * rows + 1)),
                ),
                Format::F32 | Format::Q8 | Format::Q4 => {
                    comptime!(unreachable!("blocks are decoded apart"))
                }
            };
        }
    }
}

/// Adds the products of a block's left operands with `x`, the same columns of eight rows of activations, to
/// `sums[eight][pair of rows]`.
#[cube]
pub(super) fn add_block(
    operands: &Array<Packed>,
    x: Packed,
    sums: &mut Array<Sums>,
    #[comptime] eight: usize,
    #[comptime] is_bf16: bool,
) {
    let first = right(x.extract(0usize), x.extract(1usize));
    let second = right(x.extract(2usize), x.extract(3usize));
    #[unroll]
    for pair in 0..2usize {
        let at = comptime!(2 * eight + pair);
        let sum = multiply(operands[pair], first, sums[at], is_bf16);
        sums[at] = multiply(operands[comptime!(2 + pair)], second, sum, is_bf16);
    }
}

/// Of the sums of two pairs of rows those of four neighbouring rows, for the first or the second of a lane's two rows
/// of activations.
#[cube]
pub(super) fn four_rows(upper: Sums, lower: Sums, #[comptime] of_two: usize) -> Array<f32> {
    let mut rows = Array::<f32>::new(4usize);
    rows[0] = upper.extract(of_two);
    rows[1] = upper.extract(comptime!(2 + of_two));
    rows[2] = lower.extract(of_two);
    rows[3] = lower.extract(comptime!(2 + of_two));
    rows
}
