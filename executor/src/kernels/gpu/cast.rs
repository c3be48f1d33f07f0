//! Rows of activations in a float format, normalised on the way: the input of a vendor library, or a norm by itself.

#![expect(unsafe_code, reason = "kernels are launched without checks of every index")]

mod operands;

use anyhow::Result;
use cubecl::prelude::{Cast as _, *};
use ir::op::NormKind;
use ir::tensor::{DType, Format};

use super::device::{Gpu, Span, element};
use super::given::given;
use super::matrix::{float_bytes, float_type};
use super::warpgroup::RightOperands;
use super::words::read_size;

/// Units of a cube, which takes a row.
const UNITS: usize = 256;

/// A normalisation: see [`ir::op::Norm`].
#[derive(Clone, Copy, Debug)]
pub struct Norm<'a> {
    /// What is divided out.
    pub kind: NormKind,
    /// Factors, `f32[features]`.
    pub scale: Option<&'a Span>,
    /// Terms, `f32[features]`.
    pub bias: Option<&'a Span>,
    /// Added to every factor.
    pub scale_offset: f32,
    /// Added to the variance.
    pub epsilon: f32,
}

impl Norm<'_> {
    /// Which operands it has.
    fn given(&self) -> [bool; 2] {
        [self.scale.is_some(), self.bias.is_some()]
    }
}

/// `out = norm(x) + residual`, in a float format.
#[derive(Clone, Copy, Debug)]
pub struct Cast<'a> {
    /// `[tokens, features]` of `element`.
    pub x: &'a Span,
    /// Of `x`.
    pub element: DType,
    /// Rows.
    pub tokens: usize,
    /// Columns.
    pub features: usize,
    /// Applied to each row.
    pub norm: Option<Norm<'a>>,
    /// Added, `f32[tokens, features]`.
    pub residual: Option<&'a Span>,
    /// Of the output.
    pub format: Format,
    /// Where the output is not row after row: then its format is bf16, there are whole blocks of 32 features, nothing
    /// is added, and the device has matrix instructions.
    pub order: Option<RightOperands>,
    /// `[tokens, features]`, or in that order; none of the inputs.
    pub out: &'a Span,
}

impl<'a> Cast<'a> {
    /// Rows of f32, `[tokens, features]`, as they are in another format.
    pub fn plain(
        x: &'a Span,
        [tokens, features]: [usize; 2],
        format: Format,
        out: &'a Span,
    ) -> Self {
        let element = DType::F32;
        Self { x, element, tokens, features, norm: None, residual: None, format, order: None, out }
    }
}

impl Gpu {
    /// Queues a cast.
    ///
    /// # Errors
    /// When the format has blocks, or the order asks for what is not there.
    pub fn cast(&self, cast: &Cast<'_>) -> Result<()> {
        if let Some(order) = cast.order {
            return self.cast_operands(cast, order);
        }
        let Cast { x, element: taken, tokens, features, norm, residual, format, order: _, out } =
            *cast;
        let size = read_size(features);
        let element_bytes = float_bytes(format)?;
        let floats = |span: &Span, rows: usize| {
            span.argument(rows * features / size, size * size_of::<f32>())
        };
        let row = |span: Option<&Span>| span.map(|span| floats(span, 1)).into();
        // SAFETY: the spans are as long as the shape says, and the kernel stays within it.
        unsafe {
            cast_rows::launch_unchecked(
                &self.client,
                CubeCount::new_1d(tokens as u32),
                CubeDim::new_1d(UNITS as u32),
                size,
                x.argument(tokens * features / size, size * taken.bytes() as usize),
                row(norm.and_then(|norm| norm.scale)),
                row(norm.and_then(|norm| norm.bias)),
                residual.map(|residual| floats(residual, tokens)).into(),
                out.argument(tokens * features / size, size * element_bytes),
                norm.map_or(0.0, |norm| norm.scale_offset),
                norm.map_or(0.0, |norm| norm.epsilon),
                features / size,
                norm.map(|norm| norm.kind),
                given([residual.is_some()].into_iter().chain(norm.iter().flat_map(Norm::given))),
                self.plane() as usize,
                element(taken),
                element(float_type(format)?),
            );
        }
        Ok(())
    }
}

/// A cube for each row, whose units take every `UNITS`-th vector.
#[cube(launch_unchecked)]
fn cast_rows<X: Float, F: Float, N: Size>(
    x: &[Vector<X, N>],
    scale: &ComptimeOption<Box<[Vector<f32, N>]>>,
    bias: &ComptimeOption<Box<[Vector<f32, N>]>>,
    residual: &ComptimeOption<Box<[Vector<f32, N>]>>,
    out: &mut [Vector<F, N>],
    scale_offset: f32,
    epsilon: f32,
    #[comptime] vectors: usize,
    #[comptime] norm: Option<NormKind>,
    #[comptime] _given: u32,
    #[comptime] plane: usize,
    #[define(X)] _taken: ElemType,
    #[define(F)] _made: ElemType,
) {
    let first = CUBE_POS_X as usize * vectors;
    let size = N::value();
    let features = comptime!((vectors * size) as f32);
    let mut mean = f32::new(0.0);
    let mut factor = f32::new(1.0);
    if comptime!(matches!(norm, Some(NormKind::Layer))) {
        mean = row_sum(x, first, 0.0, false, vectors, plane) / features;
    }
    if comptime!(norm.is_some()) {
        let squares = row_sum(x, first, mean, true, vectors, plane);
        factor = (squares / features + epsilon).inverse_sqrt();
    }
    for i in range_stepped(UNIT_POS as usize, vectors, UNITS) {
        let taken = Vector::<f32, N>::cast_from(x[first + i]);
        let (scale, bias) = affine(i, scale, bias, scale_offset);
        let mut value = normed(taken, mean, factor, scale, bias);
        #[comptime]
        match residual.clone() {
            ComptimeOption::Some(residual) => value += residual[first + i],
            ComptimeOption::None => {}
        }
        out[first + i] = Vector::<F, N>::cast_from(value);
    }
}

/// A vector of a row, normalised.
#[cube]
fn normed<N: Size>(
    taken: Vector<f32, N>,
    mean: f32,
    factor: f32,
    scale: Vector<f32, N>,
    bias: Vector<f32, N>,
) -> Vector<f32, N> {
    (taken - Vector::new(mean)) * Vector::new(factor) * scale + bias
}

/// What vector number `at` of a row is multiplied with, and what is added then.
#[cube]
fn affine<N: Size>(
    at: usize,
    scale: &ComptimeOption<Box<[Vector<f32, N>]>>,
    bias: &ComptimeOption<Box<[Vector<f32, N>]>>,
    scale_offset: f32,
) -> (Vector<f32, N>, Vector<f32, N>) {
    let scale = #[comptime]
    match scale.clone() {
        ComptimeOption::Some(scale) => scale[at] + Vector::new(scale_offset),
        ComptimeOption::None => Vector::new(1.0),
    };
    let bias = #[comptime]
    match bias.clone() {
        ComptimeOption::Some(bias) => bias[at],
        ComptimeOption::None => Vector::new(0.0),
    };
    (scale, bias)
}

/// The sum of a row's elements less `mean`, or of their squares: for every unit of the cube.
#[cube]
fn row_sum<X: Float, N: Size>(
    x: &[Vector<X, N>],
    first: usize,
    mean: f32,
    #[comptime] squared: bool,
    #[comptime] vectors: usize,
    #[comptime] plane: usize,
) -> f32 {
    let mut sum = f32::new(0.0);
    for i in range_stepped(UNIT_POS as usize, vectors, UNITS) {
        let value = Vector::<f32, N>::cast_from(x[first + i]) - Vector::new(mean);
        #[unroll]
        for i in 0..N::value() {
            let element = value.extract(i);
            sum += if comptime!(squared) { element * element } else { element };
        }
    }
    cube_sum(sum, UNITS, plane, 0usize)
}

/// The sum of what the units of a cube of `units` have: for each of them. Shared memory has room for as many numbers at
/// least.
#[cube]
fn cube_sum(
    term: f32,
    #[comptime] units: usize,
    #[comptime] plane: usize,
    #[comptime] room: usize,
) -> f32 {
    let sum = plane_sum(term);
    let planes = comptime!(units / plane);
    let mut sums = Shared::<[f32]>::new_slice(comptime!(planes.max(room)));
    let unit_of_plane = UNIT_POS as usize % plane;
    if unit_of_plane == 0 {
        sums[UNIT_POS as usize / plane] = sum;
    }
    sync_cube();
    let mut total = f32::new(0.0);
    for i in 0..planes {
        total += sums[i];
    }
    total
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::kernels::cpu::testing::{Random, distance};
    use crate::kernels::gpu::matrix::testing::float_formats;
    use crate::kernels::gpu::testing::gpu;

    pub(super) const TOKENS: usize = 3;
    pub(super) const EPSILON: f32 = 1e-3;

    /// Rows, in plain loops, of norms whose scales are offset by 1.
    pub(super) fn expected(
        x: &[f32],
        features: usize,
        kind: Option<NormKind>,
        scale: Option<&[f32]>,
        bias: Option<&[f32]>,
        residual: Option<&[f32]>,
    ) -> Vec<f64> {
        let mut out = Vec::new();
        for (token, x) in x.chunks_exact(features).enumerate() {
            let x: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
            let mean = match kind {
                Some(NormKind::Layer) => x.iter().sum::<f64>() / features as f64,
                Some(NormKind::Rms) | None => 0.0,
            };
            let squares: f64 = x.iter().map(|x| (x - mean).powi(2)).sum();
            let root = (squares / features as f64 + f64::from(EPSILON)).sqrt();
            for (i, x) in x.iter().enumerate() {
                let value = if kind.is_some() { (x - mean) / root } else { *x };
                let scale = scale.map_or(1.0, |scale| f64::from(scale[i]) + 1.0);
                let bias = bias.map_or(0.0, |bias| f64::from(bias[i]));
                let residual =
                    residual.map_or(0.0, |residual| f64::from(residual[token * features + i]));
                out.push(value * scale + bias + residual);
            }
        }
        out
    }

    fn check(gpu: &Gpu, features: usize, kind: Option<NormKind>, affine: bool, format: Format) {
        let count = TOKENS * features;
        // Far from zero, so that a mean that is not subtracted shows.
        let x: Vec<f32> = Random(3).floats(count).iter().map(|x| x + 2.0).collect();
        let [scale, bias] = [5, 7].map(|seed| Random(seed).floats(features));
        let residual = Random(9).floats(count);
        let [scale_span, bias_span, residual_span] =
            [&scale, &bias, &residual].map(|values| gpu.upload(values));
        let out = gpu.poisoned(count * 4);
        gpu.cast(&Cast {
            x: &gpu.upload(&x),
            element: DType::F32,
            tokens: TOKENS,
            features,
            norm: kind.map(|kind| Norm {
                kind,
                scale: affine.then_some(&scale_span),
                bias: affine.then_some(&bias_span),
                scale_offset: 1.0,
                epsilon: EPSILON,
            }),
            residual: affine.then_some(&residual_span),
            format,
            order: None,
            out: &out,
        })
        .unwrap();
        let normed = affine && kind.is_some();
        let expected = expected(
            &x,
            features,
            kind,
            normed.then_some(&scale[..]),
            normed.then_some(&bias[..]),
            affine.then_some(&residual[..]),
        );
        let (actual, tolerance): (Vec<f32>, _) = match format {
            Format::F16 => {
                let narrow = gpu.download::<f16>(&out, count);
                (narrow.into_iter().map(f16::to_f32).collect(), 5e-4)
            }
            Format::Bf16 => {
                let narrow = gpu.download::<bf16>(&out, count);
                (narrow.into_iter().map(bf16::to_f32).collect(), 4e-3)
            }
            Format::F32 | Format::Bf12 | Format::Q8 | Format::Q4 => {
                (gpu.download(&out, count), 2e-6)
            }
        };
        let distance = distance(&actual, &expected);
        assert!(distance < tolerance, "{distance} away: {features} features, {kind:?}, {format}");
    }

    #[test]
    fn from_16_bits() {
        let Some(gpu) = gpu() else { return };
        if !gpu.knows(DType::F16) {
            eprintln!("skipped: no numbers of 16 bits");
            return;
        }
        for features in [64, 37] {
            let count = TOKENS * features;
            let x: Vec<f16> = Random(3).floats(count).iter().map(|&x| f16::from_f32(x)).collect();
            let out = gpu.poisoned(count * 4);
            gpu.cast(&Cast {
                x: &gpu.upload(&x),
                element: DType::F16,
                tokens: TOKENS,
                features,
                norm: None,
                residual: None,
                format: Format::F32,
                order: None,
                out: &out,
            })
            .unwrap();
            let wide: Vec<f32> = x.iter().map(|x| x.to_f32()).collect();
            assert_eq!(gpu.download::<f32>(&out, count), wide);
        }
    }

    #[test]
    fn every_norm_and_format() {
        let Some(gpu) = gpu() else { return };
        for kind in [None, Some(NormKind::Rms), Some(NormKind::Layer)] {
            for affine in [false, true] {
                for format in float_formats(&gpu) {
                    check(&gpu, 1100, kind, affine, format);
                    check(&gpu, 64, kind, affine, format);
                    check(&gpu, 37, kind, affine, format);
                }
            }
        }
    }
}
