//! What follows the products of a linear, where a vendor library multiplied.

#![expect(unsafe_code, reason = "kernels are launched without checks of every index")]

use anyhow::{Result, ensure};
use cubecl::prelude::*;
use ir::op::Then;

use super::activation::activate;
use super::device::{Gpu, Span};
use super::words::read_size;

/// Units of a cube; any whole number of planes would do.
const UNITS: usize = 256;

/// Products, and what becomes of them: `then(products + biases) + residual`.
#[derive(Clone, Copy, Debug)]
pub struct Epilogue<'a> {
    /// `f32[tokens, features]`, those of the gate where there is one; `None` where they lie in `out`.
    pub products: Option<&'a Span>,
    /// The products that a gate is multiplied with, `f32[tokens, features]`.
    pub up: Option<&'a Span>,
    /// Rows.
    pub tokens: usize,
    /// Columns.
    pub features: usize,
    /// One, or for gate and up: each `f32[features]`.
    pub biases: &'a [Option<&'a Span>],
    /// Applied to the sums.
    pub then: Then,
    /// Added at the end, `f32[tokens, features]`.
    pub residual: Option<&'a Span>,
    /// `f32[tokens, features]`; none of the inputs.
    pub out: &'a Span,
}

impl Gpu {
    /// Queues an epilogue.
    ///
    /// # Errors
    /// When its parts do not fit together.
    pub fn epilogue(&self, epilogue: &Epilogue<'_>) -> Result<()> {
        let Epilogue { products, up, tokens, features, biases, then, residual, out } = *epilogue;
        let is_gated = matches!(then, Then::Gate(_));
        ensure!(
            up.is_some() == is_gated && biases.len() == 1 + usize::from(is_gated),
            "{} products and {} biases do not fit {then:?}",
            1 + usize::from(up.is_some()),
            biases.len()
        );
        let size = read_size(features);
        let vectors = tokens * features / size;
        let floats =
            |span: &Span, count: usize| span.argument(count / size, size * size_of::<f32>());
        let all = |span: &Span| floats(span, tokens * features);
        let biases = biases.iter().map(|bias| bias.map(|bias| floats(bias, features)).into());
        // SAFETY: the spans are as long as the shape says, and the kernel stays within it.
        unsafe {
            finish::launch_unchecked(
                &self.client,
                CubeCount::new_1d(vectors.div_ceil(UNITS) as u32),
                CubeDim::new_1d(UNITS as u32),
                size,
                products.map(all).into(),
                up.map(all).into(),
                biases.collect(),
                residual.map(all).into(),
                all(out),
                features / size,
                then,
            );
        }
        Ok(())
    }
}

/// Activations, in vectors.
type Vectors<N> = Box<[Vector<f32, N>]>;

/// Each unit writes a vector.
#[cube(launch_unchecked)]
fn finish<N: Size>(
    products: &ComptimeOption<Vectors<N>>,
    up: &ComptimeOption<Vectors<N>>,
    biases: &Sequence<ComptimeOption<Vectors<N>>>,
    residual: &ComptimeOption<Vectors<N>>,
    out: &mut [Vector<f32, N>],
    row_vectors: usize,
    #[comptime] then: Then,
) {
    let at = ABSOLUTE_POS;
    if at < out.len() {
        let mut sum = value_at(&biases[0], at % row_vectors);
        #[comptime]
        match products.clone() {
            ComptimeOption::Some(products) => sum += products[at],
            ComptimeOption::None => sum += out[at],
        }
        match then {
            Then::Nothing => {}
            Then::Activate(activation) =>
            {
                #[unroll]
                for i in 0..N::value() {
                    sum.insert(i, activate(sum.extract(i), activation));
                }
            }
            Then::Gate(activation) => {
                let up = value_at(up, at) + value_at(&biases[1], at % row_vectors);
                #[unroll]
                for i in 0..N::value() {
                    sum.insert(i, activate(sum.extract(i), activation) * up.extract(i));
                }
            }
        }
        out[at] = sum + value_at(residual, at);
    }
}

/// A vector; zeros where there is none.
#[cube]
fn value_at<N: Size>(values: &ComptimeOption<Vectors<N>>, at: usize) -> Vector<f32, N> {
    #[comptime]
    match values.clone() {
        ComptimeOption::Some(values) => values[at],
        ComptimeOption::None => Vector::zeroed(),
    }
}

#[cfg(test)]
mod tests {
    use ir::op::Activation;

    use super::*;
    use crate::kernels::cpu::testing::{Random, distance};
    use crate::kernels::gpu::linear::tests::activation_in_64_bits;
    use crate::kernels::gpu::testing::gpu;

    fn check(gpu: &Gpu, features: usize, then: Then, biased: bool, residual: bool) {
        const TOKENS: usize = 3;
        let count = TOKENS * features;
        let inputs = if matches!(then, Then::Gate(_)) { 2 } else { 1 };
        let values = |seed, count| Random(seed).floats(count);
        let products: Vec<_> = (0..inputs).map(|i| values(3 + i, count)).collect();
        let biases: Vec<_> = (0..inputs).map(|i| values(13 + i, features)).collect();
        let residuals = values(23, count);
        let [product_spans, bias_spans] = [&products, &biases]
            .map(|all| all.iter().map(|values| gpu.upload(values)).collect::<Vec<Span>>());
        let (residual_span, out) = (gpu.upload(&residuals), gpu.poisoned(count * 4));
        let finish = |products, out| {
            gpu.epilogue(&Epilogue {
                products,
                up: product_spans.get(1),
                tokens: TOKENS,
                features,
                biases: &bias_spans.iter().map(|bias| biased.then_some(bias)).collect::<Vec<_>>(),
                then,
                residual: residual.then_some(&residual_span),
                out,
            })
            .unwrap();
            gpu.download::<f32>(out, count)
        };
        let apart = finish(Some(&product_spans[0]), &out);
        let in_place = finish(None, &product_spans[0]);
        assert_eq!(in_place, apart, "{features} features, {then:?}");
        let expected: Vec<f64> = (0..count)
            .map(|at| {
                let sum = |i: usize| {
                    let bias = if biased { biases[i][at % features] } else { 0.0 };
                    f64::from(products[i][at]) + f64::from(bias)
                };
                let value = match then {
                    Then::Nothing => sum(0),
                    Then::Activate(activation) => activation_in_64_bits(activation, sum(0)),
                    Then::Gate(activation) => activation_in_64_bits(activation, sum(0)) * sum(1),
                };
                value + if residual { f64::from(residuals[at]) } else { 0.0 }
            })
            .collect();
        let distance = distance(&apart, &expected);
        assert!(distance < 1e-6, "{distance} away: {features} features, {then:?}");
    }

    #[test]
    fn every_form() {
        let Some(gpu) = gpu() else { return };
        use Activation::{Gelu, GeluTanh, Relu, Silu};
        for features in [128, 37] {
            for activation in [Relu, Silu, Gelu, GeluTanh] {
                check(&gpu, features, Then::Activate(activation), true, false);
                check(&gpu, features, Then::Gate(activation), false, true);
            }
            check(&gpu, features, Then::Nothing, false, true);
            check(&gpu, features, Then::Gate(Silu), true, true);
        }
    }
}
