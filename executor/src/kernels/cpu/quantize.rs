//! Blocks of 32 neighbouring elements of one row, held as small integers with one scale.
//!
//! Element `i` of a block is `scale · (codes[i] - offset)`; codes are unsigned because the dot products
//! of the processors multiply unsigned by signed bytes.
//!
//! - 8 bits: offset 128, codes 1 to 255, the largest magnitude of the block is 127 steps.
//! - 4 bits: offset 8, codes 0 to 15; the scale may be negative, so that the element of largest magnitude
//!   gets code 0, eight steps from the offset.
//!
//! A block with an element that is infinite or not a number has no number for its scale, so that no product of it is
//! one.
//!
//! Sixteen rows are quantised at a time, a row in each lane. Nothing is rounded but as a single element would be, so
//! that a matrix has the same bits on every processor.

use half::f16;

use super::lanes::{Kernel, LANES, Lanes};

/// Elements of a block.
pub(super) const BLOCK: usize = 32;
/// What the code of zero is in 8 bits.
pub(super) const OFFSET_8: i32 = 128;
/// What the code of zero is in 4 bits.
pub(super) const OFFSET_4: i32 = 8;
/// Steps of a 4-bit block's scale that are tried for the element of largest magnitude: eight waste none of the codes,
/// a little more or less often fits the others better. Beside each guess the best scale for its codes is tried.
const STEPS_4: [f32; 5] = [-8.0, -7.4, -8.6, -9.2, 7.5];

/// The same columns of sixteen rows: `[column][row]`.
pub(super) type Columns = [[f32; LANES]; BLOCK];

/// A quantised block of each of sixteen rows.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Blocks {
    pub(super) scales: [f16; LANES],
    /// `[column][row]`.
    pub(super) codes: [[u8; LANES]; BLOCK],
}

/// The blocks of 8-bit codes nearest to the elements.
pub(super) struct Quantize8<'a>(pub(super) &'a Columns);

/// The blocks of 4-bit codes with the least squared error among a few scales.
pub(super) struct Quantize4<'a>(pub(super) &'a Columns);

impl Kernel for Quantize8<'_> {
    type Output = Blocks;
    #[inline(always)]
    fn run<L: Lanes>(self) -> Blocks {
        let scale = extreme::<L>(self.0).abs().div(L::splat(127.0)).round_to_f16();
        blocks(self.0, scale.add(spoilt(self.0)), [-127.0, 127.0], OFFSET_8)
    }
}

impl Kernel for Quantize4<'_> {
    type Output = Blocks;
    #[inline(always)]
    fn run<L: Lanes>(self) -> Blocks {
        let zero = L::splat(0.0);
        let extreme = extreme::<L>(self.0);
        let mut best = zero;
        let mut least = fit::<L>(self.0, best).error;
        for steps in STEPS_4 {
            let mut scale = extreme.div(L::splat(steps)).round_to_f16();
            for _ in 0..2 {
                let Fit { error, product, square } = fit(self.0, scale);
                best = L::select_less(error, least, scale, best);
                least = L::select_less(error, least, error, least);
                scale = L::select_less(zero, square, product.div(square), zero).round_to_f16();
            }
        }
        // Where no scale is a number of 16 bits, none was tried that fits.
        let is_held =
            |scale| L::select_less(extreme.abs(), L::splat(BEYOND_4), scale, L::splat(f32::NAN));
        blocks(self.0, is_held(best).add(spoilt(self.0)), RANGE_4, OFFSET_4)
    }
}

/// From this magnitude on no scale is tried that half precision holds: the first number that it does not, times the
/// most of [`STEPS_4`].
const BEYOND_4: f32 = 65_520.0 * 9.2;
/// The least and the largest 4-bit code, less the offset.
const RANGE_4: [f32; 2] = [-8.0, 7.0];

/// How well 4-bit codes at some scale fit.
struct Fit<L> {
    /// The squared error.
    error: L,
    /// The products of elements and codes.
    product: L,
    /// The squares of codes.
    square: L,
}

#[inline(always)]
fn fit<L: Lanes>(columns: &Columns, scale: L) -> Fit<L> {
    let inverse = inverse(scale);
    let zero = L::splat(0.0);
    let mut fit = Fit { error: zero, product: zero, square: zero };
    for column in columns {
        let value = L::read(column);
        let code = code(value, inverse, RANGE_4);
        let difference = value.sub(scale.mul(code));
        fit.error = fit.error.add(difference.mul(difference));
        fit.product = fit.product.add(value.mul(code));
        fit.square = fit.square.add(code.mul(code));
    }
    fit
}

/// The elements of largest magnitude, with their signs.
#[inline(always)]
fn extreme<L: Lanes>(columns: &Columns) -> L {
    columns.iter().fold(L::splat(0.0), |best, column| {
        let value = L::read(column);
        L::select_less(best.abs(), value.abs(), value, best)
    })
}

/// Zero, and no number where an element is none or infinite: then the block has no scale.
#[inline(always)]
fn spoilt<L: Lanes>(columns: &Columns) -> L {
    let zero = L::splat(0.0);
    columns.iter().fold(zero, |sum, column| sum.add(L::read(column).mul(zero)))
}

/// One over a scale; zero for zero.
#[inline(always)]
fn inverse<L: Lanes>(scale: L) -> L {
    let zero = L::splat(0.0);
    L::select_less(zero, scale.abs(), L::splat(1.0).div(scale), zero)
}

/// The code of a value, less the offset.
#[inline(always)]
fn code<L: Lanes>(value: L, inverse: L, [least, most]: [f32; 2]) -> L {
    value.mul(inverse).round().max(L::splat(least)).min(L::splat(most))
}

#[inline(always)]
fn blocks<L: Lanes>(columns: &Columns, scale: L, range: [f32; 2], offset: i32) -> Blocks {
    let inverse = inverse(scale);
    let mut scales = [0.0; LANES];
    scale.write(&mut scales);
    let mut codes = [[0; LANES]; BLOCK];
    let offset = L::splat(offset as f32);
    for (column, codes) in columns.iter().zip(&mut codes) {
        let mut wide = [0.0; LANES];
        code(L::read(column), inverse, range).add(offset).write(&mut wide);
        *codes = wide.map(|code| code as u8);
    }
    Blocks { scales: scales.map(f16::from_f32), codes }
}

#[cfg(test)]
pub(super) mod tests {
    use std::array;
    use std::ops::Range;

    use ir::tensor::Format;

    use super::super::isa::Isa;
    use super::super::lanes::vectorize;
    use super::super::pack::pack;
    use super::super::testing::{Random, with_team};
    use super::*;

    type Rows = [[f32; BLOCK]; LANES];

    /// A block of one row.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub(in super::super) struct Block {
        pub(in super::super) scale: f16,
        pub(in super::super) codes: [u8; BLOCK],
    }

    /// One row quantised, element by element.
    pub(in super::super) fn quantize_8(values: &[f32; BLOCK]) -> Block {
        let scale = f16::from_f32(largest(values).abs() / 127.0);
        Block { scale, codes: codes(values, scale, OFFSET_8, [-127.0, 127.0]) }
    }

    /// One row quantised, element by element.
    pub(in super::super) fn quantize_4(values: &[f32; BLOCK]) -> Block {
        let extreme = largest(values);
        let mut best = Block { scale: f16::ZERO, codes: [OFFSET_4 as u8; BLOCK] };
        let mut least = error(values, &best);
        for steps in STEPS_4 {
            let mut scale = f16::from_f32(extreme / steps);
            for _ in 0..2 {
                let block = Block { scale, codes: codes(values, scale, OFFSET_4, RANGE_4) };
                let deviation = error(values, &block);
                if deviation < least {
                    (best, least) = (block, deviation);
                }
                scale = best_scale(values, &block);
            }
        }
        best
    }

    fn largest(values: &[f32; BLOCK]) -> f32 {
        values
            .iter()
            .fold(0.0, |best: f32, &value| if value.abs() > best.abs() { value } else { best })
    }

    fn codes(
        values: &[f32; BLOCK],
        scale: f16,
        offset: i32,
        [least, most]: [f32; 2],
    ) -> [u8; BLOCK] {
        let scale = scale.to_f32();
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        let code = |value: f32| (value * inverse).round_ties_even().clamp(least, most);
        values.map(|value| (code(value) + offset as f32) as u8)
    }

    /// The scale with the least squared error for codes already chosen.
    fn best_scale(values: &[f32; BLOCK], block: &Block) -> f16 {
        let (mut product, mut square) = (0.0, 0.0);
        for (value, &code) in values.iter().zip(&block.codes) {
            let step = (i32::from(code) - OFFSET_4) as f32;
            product += value * step;
            square += step * step;
        }
        f16::from_f32(if square == 0.0 { 0.0 } else { product / square })
    }

    fn error(values: &[f32; BLOCK], block: &Block) -> f32 {
        let scale = block.scale.to_f32();
        let mut error = 0.0;
        for (value, &code) in values.iter().zip(&block.codes) {
            let difference = value - scale * (i32::from(code) - OFFSET_4) as f32;
            error += difference * difference;
        }
        error
    }

    fn wave(seed: f32, size: f32) -> [f32; BLOCK] {
        array::from_fn(|i| ((i as f32 * 1.7 + seed).sin() + (i as f32 * seed).cos()) * size)
    }

    /// Sixteen waves of small weights, from this seed on.
    fn waves(seed: usize) -> Rows {
        array::from_fn(|row| wave((seed + row) as f32, 0.02))
    }

    fn by_columns(rows: &Rows) -> Columns {
        array::from_fn(|column| rows.map(|row| row[column]))
    }

    /// The block of each row.
    fn by_rows(blocks: &Blocks) -> [Block; LANES] {
        array::from_fn(|lane| Block {
            scale: blocks.scales[lane],
            codes: blocks.codes.map(|codes| codes[lane]),
        })
    }

    /// What the kernel of 8 bits makes of sixteen rows.
    fn in_8_bits(isa: Isa, rows: &Rows) -> [Block; LANES] {
        by_rows(&vectorize(isa, Quantize8(&by_columns(rows))))
    }

    /// What the kernel of 4 bits makes of sixteen rows.
    fn in_4_bits(isa: Isa, rows: &Rows) -> [Block; LANES] {
        by_rows(&vectorize(isa, Quantize4(&by_columns(rows))))
    }

    #[test]
    fn sixteen_rows_are_quantised_as_each_alone() {
        let mut rows: Rows = array::from_fn(|row| wave(row as f32, 10_f32.powi(row as i32 - 9)));
        rows[3] = [0.0; BLOCK];
        rows[4] = array::from_fn(|i| (i as f32 % 16.0 - 8.0) * 0.5);
        for isa in Isa::available() {
            assert_eq!(in_8_bits(isa, &rows), rows.map(|row| quantize_8(&row)), "with {isa}");
            for (row, block) in rows.iter().zip(in_4_bits(isa, &rows)) {
                // Beyond that there is no scale.
                assert_eq!(block.scale.is_nan(), largest(row).abs() >= BEYOND_4, "with {isa}");
                assert!(block.scale.is_nan() || block == quantize_4(row), "{block:?} with {isa}");
            }
        }
    }

    #[test]
    fn a_block_too_large_for_half_precision_is_not_taken_for_zeros() {
        let sizes = [1e5, 4.9e5, 7e5, 1e7, 1e30];
        let mut rows = waves(0);
        rows.iter_mut().zip(sizes).for_each(|(row, size)| row[17] = -size);
        for isa in Isa::available() {
            for (block, size) in in_4_bits(isa, &rows).iter().zip(sizes) {
                let held = block.scale.to_f32() * (i32::from(block.codes[17]) - OFFSET_4) as f32;
                let is_near = (held / -size - 1.0).abs() < 0.1;
                assert!(is_near || !held.is_finite(), "{held} for {size} with {isa}");
            }
        }
    }

    #[test]
    fn a_block_with_what_is_no_number_has_no_scale() {
        let mut rows = waves(0);
        let spoilt = [(2, f32::NAN), (5, f32::INFINITY), (9, f32::NEG_INFINITY)];
        spoilt.iter().for_each(|&(row, value)| rows[row][17] = value);
        for isa in Isa::available() {
            for blocks in [in_8_bits(isa, &rows), in_4_bits(isa, &rows)] {
                for (row, block) in blocks.iter().enumerate() {
                    let is_spoilt = spoilt.iter().any(|&(spoilt, _)| spoilt == row);
                    assert_eq!(block.scale.is_nan(), is_spoilt, "row {row} with {isa}");
                }
            }
        }
    }

    #[test]
    fn eight_bits_are_within_half_a_step() {
        for isa in Isa::available() {
            for rows in [0, 16, 32, 48].map(waves) {
                for (values, block) in rows.iter().zip(in_8_bits(isa, &rows)) {
                    let scale = block.scale.to_f32();
                    for (value, code) in values.iter().zip(block.codes) {
                        let back = scale * (i32::from(code) - OFFSET_8) as f32;
                        // The scale itself is rounded to 11 bits.
                        assert!((value - back).abs() <= scale * 0.57, "{value} {back} {scale}");
                    }
                }
            }
        }
    }

    #[test]
    fn four_bits_beat_the_plain_choice_of_scale() {
        for isa in Isa::available() {
            for rows in [0, 16, 32, 48].map(waves) {
                for (values, block) in rows.iter().zip(in_4_bits(isa, &rows)) {
                    let scale = f16::from_f32(largest(values) / -8.0);
                    let plain = Block { scale, codes: codes(values, scale, OFFSET_4, RANGE_4) };
                    assert!(error(values, &block) <= error(values, &plain), "{isa}");
                }
            }
        }
    }

    #[test]
    fn zeros_stay_zeros() {
        let zeros = [[0.0; BLOCK]; LANES];
        for isa in Isa::available() {
            assert!(in_8_bits(isa, &zeros).iter().all(|block| block.codes == [128; BLOCK]));
            assert!(in_4_bits(isa, &zeros).iter().all(|block| block.codes == [8; BLOCK]));
        }
    }

    #[test]
    fn values_on_the_grid_are_kept() {
        let grid: [f32; BLOCK] = array::from_fn(|i| (i as f32 % 16.0 - 8.0) * 0.5);
        for isa in Isa::available() {
            for block in in_4_bits(isa, &[grid; LANES]) {
                assert_eq!(error(&grid, &block), 0.0, "{isa}");
            }
        }
    }

    /// Normally distributed numbers as small as weights, by Marsaglia's polar method.
    fn normal_numbers(count: usize) -> Vec<f32> {
        let mut random = Random(1);
        let mut numbers = Vec::new();
        while numbers.len() < count {
            let [x, y] = [0; 2].map(|_| random.float());
            let square = x * x + y * y;
            if square > 0.0 && square < 1.0 {
                let factor = 0.02 * (-2.0 * square.ln() / square).sqrt();
                numbers.extend([x * factor, y * factor]);
            }
        }
        numbers.truncate(count);
        numbers
    }

    /// The README says 0.53 and 8.1 %.
    #[test]
    fn a_matrix_of_normal_numbers_is_off_by_half_a_percent_or_eight() {
        const ROWS: usize = 100;
        const COLUMNS: usize = 1024;
        let numbers = normal_numbers(ROWS * COLUMNS);
        with_team(2, |team| {
            let fill = |rows: Range<usize>, values: &mut [f32]| {
                values.copy_from_slice(&numbers[rows.start * COLUMNS..rows.end * COLUMNS]);
            };
            for (format, most) in [(Format::Q8, 0.0055), (Format::Q4, 0.083)] {
                let matrix = pack(team, format, ROWS, COLUMNS, &fill).unwrap();
                let mut row = [0.0; COLUMNS];
                let (mut squares, mut errors) = (0.0, 0.0);
                for (index, numbers) in numbers.chunks_exact(COLUMNS).enumerate() {
                    matrix.read_row(index, &mut row);
                    for (&number, &back) in numbers.iter().zip(&row) {
                        squares += f64::from(number).powi(2);
                        errors += f64::from(number - back).powi(2);
                    }
                }
                let share = (errors / squares).sqrt();
                assert!(share < most, "{format} is off by {share}");
            }
        });
    }
}
