//! What is done with a tile of products on its way to the output: bias, activation or gate, residual.

#![expect(unsafe_code, reason = "members write disjoint columns of one output")]

use ir::op::{Activation, Then};

use super::isa::Isa;
use super::pack::{PANEL, Shared};
use super::tile::Tile;

/// Where a tile goes and what is added on the way.
#[derive(Clone, Copy)]
pub(super) struct Target<'a> {
    /// `[rows, columns]`, row after row.
    pub(super) out: Shared<f32>,
    pub(super) columns: usize,
    /// One term for each column; of a gate, for the gate and for what it multiplies.
    pub(super) biases: [Option<&'a [f32]>; 2],
    pub(super) then: Then,
    /// Of the shape of the output.
    pub(super) residual: Option<&'a [f32]>,
}

impl Target<'_> {
    /// Finishes the first `rows` rows of `tile` and writes them from `first_row` and `first_column` on.
    ///
    /// `other` holds the products that a gate multiplies.
    ///
    /// # Safety
    /// No one else touches these elements of the output.
    pub(super) unsafe fn write(
        &self,
        isa: Isa,
        tile: &mut Tile,
        other: &mut Tile,
        rows: usize,
        (first_row, first_column): (usize, usize),
    ) {
        // SAFETY: the caller's; the level is one of this processor's.
        unsafe {
            match isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 | Isa::Avx512Bf16Vnni | Isa::Amx => {
                    write_avx512(self, tile, other, rows, first_row, first_column);
                }
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => write_avx2(self, tile, other, rows, first_row, first_column),
                #[cfg(not(target_arch = "x86_64"))]
                Isa::Avx2 | Isa::Avx512 | Isa::Avx512Bf16Vnni | Isa::Amx => isa.is_missing(),
                Isa::Portable => write(self, tile, other, rows, first_row, first_column),
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn write_avx2(
    target: &Target<'_>,
    tile: &mut Tile,
    other: &mut Tile,
    rows: usize,
    first_row: usize,
    first_column: usize,
) {
    // SAFETY: the caller's.
    unsafe { write(target, tile, other, rows, first_row, first_column) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn write_avx512(
    target: &Target<'_>,
    tile: &mut Tile,
    other: &mut Tile,
    rows: usize,
    first_row: usize,
    first_column: usize,
) {
    // SAFETY: the caller's.
    unsafe { write(target, tile, other, rows, first_row, first_column) }
}

/// The body of [`Target::write`], compiled for each level.
#[inline(always)]
unsafe fn write(
    target: &Target<'_>,
    tile: &mut Tile,
    other: &mut Tile,
    rows: usize,
    first_row: usize,
    first_column: usize,
) {
    let columns = first_column..(first_column + PANEL).min(target.columns);
    for row in 0..rows {
        let (values, other) = (&mut tile[row], &mut other[row]);
        if let Some(bias) = target.biases[0] {
            add(values, &bias[columns.clone()]);
        }
        match target.then {
            Then::Nothing => {}
            Then::Activate(activation) => activate(activation, values),
            Then::Gate(activation) => {
                activate(activation, values);
                if let Some(bias) = target.biases[1] {
                    add(other, &bias[columns.clone()]);
                }
                values.iter_mut().zip(other.iter()).for_each(|(value, other)| *value *= other);
            }
        }
        let start = (first_row + row) * target.columns + first_column;
        if let Some(residual) = target.residual {
            add(values, &residual[start..start + columns.len()]);
        }
        // SAFETY: the output has `columns` elements in each row, and these are this call's alone.
        unsafe {
            let out = target.out.pointer().add(start);
            out.copy_from_nonoverlapping(values.as_ptr(), columns.len());
        }
    }
}

#[inline(always)]
fn add(values: &mut [f32; PANEL], terms: &[f32]) {
    values.iter_mut().zip(terms).for_each(|(value, term)| *value += term);
}

#[inline(always)]
fn activate(activation: Activation, values: &mut [f32; PANEL]) {
    match activation {
        Activation::Relu => each(values, |x| x.max(0.0)),
        Activation::Silu => each(values, |x| x / (1.0 + exp(-x))),
        Activation::Gelu => {
            each(values, |x| 0.5 * x * (1.0 + erf(x * std::f32::consts::FRAC_1_SQRT_2)))
        }
        Activation::GeluTanh => each(values, |x| {
            // tanh(y) = 1 - 2 / (1 + e^2y), so that 0.5 (1 + tanh(y)) is a sigmoid of 2y.
            const SQRT_8_OVER_PI: f32 = 1.595_769;
            x / (1.0 + exp(-SQRT_8_OVER_PI * (x + 0.044_715 * x * x * x)))
        }),
    }
}

#[inline(always)]
fn each(values: &mut [f32; PANEL], of: impl Fn(f32) -> f32) {
    values.iter_mut().for_each(|value| *value = of(*value));
}

/// `e^x` within 2 units in the last place, without a branch so that loops of it become vectors.
#[inline(always)]
fn exp(x: f32) -> f32 {
    // Beyond these the result is zero or infinite in f32. What is not a number passes.
    let x = if x < -104.0 { -104.0 } else { x };
    let x = if x > 89.0 { 89.0 } else { x };
    let power = (x * std::f32::consts::LOG2_E).round_ties_even();
    // ln 2 in two parts; the first has few enough bits for its product with `power` to be exact.
    let rest = x - power * 0.693_359_4 - power * -2.121_944_4e-4;
    // Taylor's series: below |ln 2 / 2| the seventh power leaves 2e-8.
    let series = 1.0 / 720.0 * rest + 1.0 / 120.0;
    let series = series * rest + 1.0 / 24.0;
    let series = series * rest + 1.0 / 6.0;
    let series = series * rest + 0.5;
    let value = series * rest * rest + rest + 1.0;
    // Two factors, because the least results need a power below that of any normal number.
    let half = (power * 0.5).round_ties_even();
    value * two_to(half) * two_to(power - half)
}

/// `2^power` for whole numbers between -126 and 127.
#[inline(always)]
fn two_to(power: f32) -> f32 {
    // 1.5 · 2^23 puts the whole number into the low bits of the sum.
    let bits = (power + 12_582_912.0).to_bits();
    f32::from_bits(bits.wrapping_add(127) << 23)
}

/// The error function within 3e-7, by formula 7.1.26 of Abramowitz and Stegun: its own error is 1.5e-7.
#[inline(always)]
fn erf(x: f32) -> f32 {
    let size = x.abs();
    let t = 1.0 / (1.0 + 0.327_591_1 * size);
    let series = 1.061_405_4 * t - 1.453_152_1;
    let series = series * t + 1.421_413_8;
    let series = series * t - 0.284_496_74;
    let series = series * t + 0.254_829_6;
    (1.0 - series * t * exp(-size * size)).copysign(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponentials_are_within_two_units() {
        for i in -10_400..8_800 {
            let x = i as f32 * 0.01;
            let wanted = f64::from(x).exp();
            let found = f64::from(exp(x));
            let unit = (wanted * 2.0_f64.powi(-23)).max(2.0_f64.powi(-149));
            assert!((found - wanted).abs() <= 2.0 * unit, "{x}: {found} {wanted}");
        }
        assert!(exp(f32::NAN).is_nan());
        assert_eq!((exp(-1e9), exp(1e9)), (0.0, f32::INFINITY));
    }

    #[test]
    fn the_error_function_is_within_3e_7() {
        // Values of a table in ten digits.
        for (x, wanted) in [
            (0.0, 0.0),
            (0.1, 0.112_462_916_0),
            (0.5, 0.520_499_877_8),
            (1.0, 0.842_700_792_9),
            (1.5, 0.966_105_146_5),
            (2.0, 0.995_322_265_0),
            (3.0, 0.999_977_909_5),
        ] {
            assert!((f64::from(erf(x)) - wanted).abs() < 3e-7);
            assert_eq!(erf(-x), -erf(x));
        }
    }
}
