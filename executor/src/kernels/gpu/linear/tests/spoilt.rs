//! Products of weights that are infinite, no number or very large.

use ir::op::Then;
use ir::tensor::{DType, Format};

use super::{FLOAT_TOKENS, Linear, MAX_FUSED_TOKENS, activations};
use crate::kernels::gpu::device::Gpu;
use crate::kernels::gpu::matrix::testing::{Sample, panels_of, row_major_of, spoilt};
use crate::kernels::gpu::testing::gpu;

const ROWS: usize = 41;
const COLUMNS: usize = 256;

/// Checks the products of a matrix: of what is infinite or no number there is none.
fn check(gpu: &Gpu, sample: &Sample, element: DType, tokens: usize) {
    let Sample { matrix, values } = sample;
    let (x, x_values) = activations(gpu, element, tokens * COLUMNS);
    let is_narrow = element == DType::Bf16;
    let order = gpu.right_operands(matrix, tokens).filter(|_| is_narrow);
    let x = order.map_or(x.clone(), |order| gpu.ordered(&x, [tokens, COLUMNS], order));
    // A number, so that an element that no kernel wrote shows where there is to be none.
    let out = gpu.upload(&vec![0.0_f32; tokens * ROWS]);
    gpu.linear(&Linear {
        x: &x,
        element,
        order,
        tokens,
        norm: None,
        matrices: &[matrix],
        biases: &[None],
        then: Then::Nothing,
        residual: None,
        outputs: &[&out],
        made: DType::F32,
        made_order: None,
        ahead: &[],
        sum: None,
    })
    .unwrap();
    // Blocks are scaled in bf16 for activations in bf16.
    let tolerance = if is_narrow { 6e-3 } else { 1e-5 };
    for (at, actual) in gpu.download::<f32>(&out, tokens * ROWS).into_iter().enumerate() {
        let (token, row) = (at / ROWS, at % ROWS);
        let x = &x_values[token * COLUMNS..][..COLUMNS];
        let weights = &values[row * COLUMNS..][..COLUMNS];
        let products = x.iter().zip(weights).map(|(&x, weight)| f64::from(x) * weight);
        let expected: f64 = products.clone().sum();
        let terms: f64 = products.map(f64::abs).sum();
        let is_right = if (expected as f32).is_finite() {
            (f64::from(actual) - expected).abs() <= tolerance * terms
        } else {
            !actual.is_finite()
        };
        let (format, layout) = (matrix.format(), matrix.layout());
        assert!(
            is_right,
            "{actual} is not {expected}: {layout:?} {format}, row {row}, token {token} of {tokens}"
        );
    }
}

fn check_narrow(gpu: &Gpu, sample: &Sample) {
    for tokens in [1, 9, 32, 33, MAX_FUSED_TOKENS] {
        if gpu.takes_narrow(&sample.matrix, tokens) {
            check(gpu, sample, DType::Bf16, tokens);
        }
    }
}

#[test]
fn products_are_numbers_where_weights_are() {
    let Some(gpu) = gpu() else { return };
    let weights = spoilt(ROWS, COLUMNS, 3);
    for format in Format::ALL {
        let sample = panels_of(&gpu, format, ROWS, COLUMNS, &weights);
        for tokens in [1, 2, 3, FLOAT_TOKENS] {
            check(&gpu, &sample, DType::F32, tokens);
        }
        check_narrow(&gpu, &sample);
        if format.float().is_some() {
            let sample = row_major_of(&gpu, format, ROWS, COLUMNS, &weights);
            for tokens in [1, 2, FLOAT_TOKENS, MAX_FUSED_TOKENS] {
                check(&gpu, &sample, DType::F32, tokens);
            }
            check_narrow(&gpu, &sample);
        }
    }
}
