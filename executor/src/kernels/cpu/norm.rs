//! Normalisation of rows: root mean square or layer, over a whole row or over each head of it.

use ir::op::NormKind;

use super::isa::Isa;
use super::lanes::{Kernel, LANES, Lanes, vectorize};
use super::rows::for_each_row;
use crate::team::Team;

/// A normalisation over `features` elements, with its weights.
#[derive(Clone, Copy, Debug)]
pub struct Norm<'a> {
    /// What is divided out.
    pub kind: NormKind,
    /// Elementwise factor, `[features]`.
    pub scale: Option<&'a [f32]>,
    /// Elementwise term, `[features]`.
    pub bias: Option<&'a [f32]>,
    /// Added to the variance.
    pub epsilon: f32,
    /// Added to every scale; 1 in the Gemma families.
    pub scale_offset: f32,
}

/// Normalises every `features` elements of `x`, `[tokens, n · features]`, and adds `residual` of the same shape.
pub fn norm(
    team: &Team,
    isa: Isa,
    norm: &Norm,
    features: usize,
    x: &[f32],
    residual: Option<&[f32]>,
    out: &mut [f32],
) {
    assert!(x.len() == out.len() && residual.is_none_or(|r| r.len() == x.len()), "one shape");
    for_each_row(team, features, out, |first, out| {
        let range = first..first + out.len();
        let residual = residual.map(|residual| &residual[range.clone()]);
        vectorize(isa, NormRows { norm, features, x: &x[range.clone()], residual, out });
    });
}

struct NormRows<'a> {
    norm: &'a Norm<'a>,
    features: usize,
    x: &'a [f32],
    residual: Option<&'a [f32]>,
    out: &'a mut [f32],
}

impl Kernel for NormRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let rows = self.x.chunks_exact(self.features).zip(self.out.chunks_exact_mut(self.features));
        for (i, (x, out)) in rows.enumerate() {
            norm_row::<L>(self.norm, x, out);
            if let Some(residual) = self.residual {
                let residual = &residual[i * self.features..(i + 1) * self.features];
                for (out, residual) in out.chunks_mut(LANES).zip(residual.chunks(LANES)) {
                    L::read(out).add(L::read(residual)).write(out);
                }
            }
        }
    }
}

/// What a norm subtracts from every element of a row, and what it then multiplies by.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Moments {
    mean: f32,
    factor: f32,
}

impl Norm<'_> {
    /// The norm for the elements of a row from `column` on.
    #[inline(always)]
    pub(super) fn at(&self, column: usize) -> Self {
        Self {
            scale: self.scale.map(|scale| &scale[column..]),
            bias: self.bias.map(|bias| &bias[column..]),
            ..*self
        }
    }
}

/// Normalises one row.
#[inline(always)]
pub(super) fn norm_row<L: Lanes>(norm: &Norm, x: &[f32], out: &mut [f32]) {
    norm_with::<L>(norm, moments::<L>(norm, x), x, out);
}

/// The moments of one row.
#[inline(always)]
pub(super) fn moments<L: Lanes>(norm: &Norm, x: &[f32]) -> Moments {
    let count = x.len() as f32;
    let mean = match norm.kind {
        NormKind::Rms => 0.0,
        NormKind::Layer => sum::<L>(x) / count,
    };
    let variance = sum_of_squares::<L>(x, mean) / count;
    Moments { mean, factor: 1.0 / (variance + norm.epsilon).sqrt() }
}

/// Normalises elements of a row whose moments are known.
#[inline(always)]
pub(super) fn norm_with<L: Lanes>(norm: &Norm, moments: Moments, x: &[f32], out: &mut [f32]) {
    let (mean, factor) = (L::splat(moments.mean), L::splat(moments.factor));
    let offset = L::splat(norm.scale_offset);
    for (i, (x, out)) in x.chunks(LANES).zip(out.chunks_mut(LANES)).enumerate() {
        let mut value = L::read(x).sub(mean).mul(factor);
        if let Some(scale) = norm.scale {
            value = value.mul(L::read(&scale[i * LANES..]).add(offset));
        }
        if let Some(bias) = norm.bias {
            value = value.add(L::read(&bias[i * LANES..]));
        }
        value.write(out);
    }
}

/// The sum of a row, in four vectors so that additions overlap.
#[inline(always)]
fn sum<L: Lanes>(x: &[f32]) -> f32 {
    let mut sums = [L::splat(0.0); 4];
    for x in x.chunks(4 * LANES) {
        for (sum, x) in sums.iter_mut().zip(x.chunks(LANES)) {
            *sum = sum.add(L::read(x));
        }
    }
    sums[0].add(sums[1]).add(sums[2].add(sums[3])).sum()
}

/// The sum of `(x - mean)²`.
#[inline(always)]
fn sum_of_squares<L: Lanes>(x: &[f32], mean: f32) -> f32 {
    let mut sums = [L::splat(0.0); 4];
    let (wide, rest) = x.split_at(x.len() / LANES * LANES);
    for x in wide.chunks(4 * LANES) {
        for (sum, x) in sums.iter_mut().zip(x.chunks(LANES)) {
            let distance = L::read(x).sub(L::splat(mean));
            *sum = distance.mul_add(distance, *sum);
        }
    }
    // Padding must not count as zeros, which are not at the mean.
    let rest: f32 = rest.iter().map(|x| (x - mean) * (x - mean)).sum();
    sums[0].add(sums[1]).add(sums[2].add(sums[3])).sum() + rest
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Random, distance, with_team};
    use super::*;

    fn expected(norm: &Norm, x: &[f32]) -> Vec<f64> {
        let x: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
        let count = x.len() as f64;
        let mean = match norm.kind {
            NormKind::Rms => 0.0,
            NormKind::Layer => x.iter().sum::<f64>() / count,
        };
        let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count;
        let root = (variance + f64::from(norm.epsilon)).sqrt();
        let weight =
            |weights: Option<&[f32]>, i: usize, other| weights.map_or(other, |w| w[i].into());
        let offset = f64::from(norm.scale_offset);
        let normal = x.iter().enumerate().map(|(i, x)| {
            let scale = norm.scale.map_or(1.0, |_| weight(norm.scale, i, 0.0) + offset);
            (x - mean) / root * scale + weight(norm.bias, i, 0.0)
        });
        normal.collect()
    }

    fn check(kind: NormKind, tokens: usize, groups: usize, features: usize) {
        let mut random = Random(77);
        let (scale, bias) = (random.floats(features), random.floats(features));
        let x: Vec<f32> =
            random.floats(tokens * groups * features).iter().map(|x| x * 3.0 + 5.0).collect();
        let residual = random.floats(x.len());
        for (scale, bias, residual, scale_offset) in [
            (None, None, None, 0.0),
            (Some(&scale[..]), None, Some(&residual[..]), 1.0),
            (Some(&scale[..]), Some(&bias[..]), None, 0.0),
        ] {
            let wanted = Norm { kind, scale, bias, epsilon: 1e-5, scale_offset };
            let mut reference = Vec::new();
            x.chunks_exact(features).for_each(|row| reference.extend(expected(&wanted, row)));
            for (value, residual) in reference.iter_mut().zip(residual.unwrap_or(&[])) {
                *value += f64::from(*residual);
            }
            with_team(2, |team| {
                for isa in Isa::available() {
                    let mut out = vec![f32::NAN; x.len()];
                    norm(team, isa, &wanted, features, &x, residual, &mut out);
                    let error = distance(&out, &reference);
                    assert!(error < 2e-6, "{isa}, {kind:?}, {features} features: off by {error}");
                }
            });
        }
    }

    #[test]
    fn rows_of_any_length_match_the_reference() {
        for kind in [NormKind::Rms, NormKind::Layer] {
            for (tokens, groups, features) in
                [(1, 1, 1), (3, 1, 15), (2, 4, 16), (5, 3, 33), (70, 1, 576), (9, 2, 2048)]
            {
                check(kind, tokens, groups, features);
            }
        }
    }
}
