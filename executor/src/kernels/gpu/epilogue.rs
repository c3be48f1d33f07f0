//! What follows the products of a linear, where a vendor library multiplied.

#![expect(unsafe_code, reason = "kernels are launched without checks of every index")]

use anyhow::{Result, ensure};
use cubecl::prelude::{Cast as _, *};
use ir::op::Then;
use ir::tensor::DType;

use super::activation::activate;
use super::device::{Gpu, Span, element};
use super::given::given;
use super::words::read_size;

/// Units of a cube; any whole number of planes would do.
const UNITS: usize = 256;

/// Products, and what becomes of them: `then(products + biases) + residual`.
#[derive(Clone, Copy, Debug)]
pub struct Epilogue<'a> {
    /// `[tokens, features]` of `element`, those of the gate where there is one; `None` where they lie in `out`.
    pub products: Option<&'a Span>,
    /// The products that a gate is multiplied with, `[tokens, features]` of `element`.
    pub up: Option<&'a Span>,
    /// Of products and `out`; all in between is f32.
    pub element: DType,
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
    /// `[tokens, features]` of `element`; none of the inputs.
    pub out: &'a Span,
}

impl Gpu {
    /// Queues an epilogue.
    ///
    /// # Errors
    /// When its parts do not fit together.
    pub fn epilogue(&self, epilogue: &Epilogue<'_>) -> Result<()> {
        let Epilogue { products, up, element: held, tokens, features, biases, then, .. } =
            *epilogue;
        let is_gated = matches!(then, Then::Gate(_));
        ensure!(
            up.is_some() == is_gated && biases.len() == 1 + usize::from(is_gated),
            "{} products and {} biases do not fit {then:?}",
            1 + usize::from(up.is_some()),
            biases.len()
        );
        let size = read_size(features);
        let vectors = tokens * features / size;
        let vectors_of = |span: &Span, count: usize, dtype: DType| {
            span.argument(count / size, size * dtype.bytes() as usize)
        };
        let floats = |span: &Span, count: usize| vectors_of(span, count, DType::F32);
        let all = |span: &Span| vectors_of(span, tokens * features, held);
        let others = [products.is_some(), up.is_some(), epilogue.residual.is_some()];
        let given = given(others.into_iter().chain(biases.iter().map(Option::is_some)));
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
                epilogue.residual.map(|residual| floats(residual, tokens * features)).into(),
                all(epilogue.out),
                features / size,
                then,
                given,
                element(held),
            );
        }
        Ok(())
    }
}

/// Activations, in vectors.
type Vectors<E, N> = Box<[Vector<E, N>]>;

/// Each unit writes a vector.
#[cube(launch_unchecked)]
fn finish<E: Float, N: Size>(
    products: &ComptimeOption<Vectors<E, N>>,
    up: &ComptimeOption<Vectors<E, N>>,
    biases: &Sequence<ComptimeOption<Vectors<f32, N>>>,
    residual: &ComptimeOption<Vectors<f32, N>>,
    out: &mut [Vector<E, N>],
    row_vectors: usize,
    #[comptime] then: Then,
    #[comptime] _given: u32,
    #[define(E)] _held: ElemType,
) {
    let at = ABSOLUTE_POS;
    if at < out.len() {
        let mut sum = value_at(&biases[0], at % row_vectors);
        #[comptime]
        match products.clone() {
            ComptimeOption::Some(products) => sum += Vector::cast_from(products[at]),
            ComptimeOption::None => sum += Vector::cast_from(out[at]),
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
        out[at] = Vector::cast_from(sum + value_at(residual, at));
    }
}

/// A vector; zeros where there is none.
#[cube]
fn value_at<E: Float, N: Size>(
    values: &ComptimeOption<Vectors<E, N>>,
    at: usize,
) -> Vector<f32, N> {
    #[comptime]
    match values.clone() {
        ComptimeOption::Some(values) => Vector::cast_from(values[at]),
        ComptimeOption::None => Vector::zeroed(),
    }
}

#[cfg(test)]
mod tests {
    use half::f16;
    use ir::op::Activation;

    use super::*;
    use crate::kernels::cpu::testing::{Random, distance};
    use crate::kernels::gpu::linear::tests::activation_in_64_bits;
    use crate::kernels::gpu::testing::gpu;

    fn check(gpu: &Gpu, features: usize, then: Then, biased: bool, residual: bool, element: DType) {
        const TOKENS: usize = 3;
        let count = TOKENS * features;
        let inputs = if matches!(then, Then::Gate(_)) { 2 } else { 1 };
        let narrow = |x: &f32| f16::from_f32(*x);
        let is_narrow = element == DType::F16;
        let held = |values: &[f32]| {
            if is_narrow {
                gpu.upload(&values.iter().map(narrow).collect::<Vec<_>>())
            } else {
                gpu.upload(values)
            }
        };
        // Numbers that 16 bits hold, too.
        let values = |seed, count| -> Vec<f32> {
            Random(seed).floats(count).iter().map(|x| narrow(x).to_f32()).collect()
        };
        let products: Vec<_> = (0..inputs).map(|i| values(3 + i, count)).collect();
        let biases: Vec<_> = (0..inputs).map(|i| values(13 + i, features)).collect();
        let residuals = values(23, count);
        let product_spans: Vec<Span> = products.iter().map(|values| held(values)).collect();
        let bias_spans: Vec<Span> = biases.iter().map(|values| gpu.upload(values)).collect();
        let (residual_span, out) = (gpu.upload(&residuals), gpu.poisoned(count * 4));
        let finish = |products, out| -> Vec<f32> {
            gpu.epilogue(&Epilogue {
                products,
                up: product_spans.get(1),
                element,
                tokens: TOKENS,
                features,
                biases: &bias_spans.iter().map(|bias| biased.then_some(bias)).collect::<Vec<_>>(),
                then,
                residual: residual.then_some(&residual_span),
                out,
            })
            .unwrap();
            if is_narrow {
                gpu.download::<f16>(out, count).iter().map(|x| x.to_f32()).collect()
            } else {
                gpu.download(out, count)
            }
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
        let most = if is_narrow { 5e-4 } else { 1e-6 };
        assert!(distance < most, "{distance} away: {features} features, {then:?}, {element}");
    }

    #[test]
    fn every_form() {
        let Some(gpu) = gpu() else { return };
        use Activation::{Gelu, GeluTanh, Relu, Silu};
        let elements = [DType::F32, DType::F16].into_iter().filter(|&dtype| gpu.knows(dtype));
        for (element, features) in elements.flat_map(|element| [(element, 128), (element, 37)]) {
            for activation in [Relu, Silu, Gelu, GeluTanh] {
                check(&gpu, features, Then::Activate(activation), true, false, element);
                check(&gpu, features, Then::Gate(activation), false, true, element);
            }
            check(&gpu, features, Then::Nothing, false, true, element);
            check(&gpu, features, Then::Gate(Silu), true, true, element);
        }
    }
}
