//! Activations in 16 bits.

use ir::op::{Activation, Then};
use ir::tensor::{DType, Format};

use super::{Case, Linear, MAX_FUSED_TOKENS, PLAIN, check};
use crate::kernels::cpu::pack::PANEL;
use crate::kernels::gpu::bf12::ENLARGED;
use crate::kernels::gpu::device::{Gpu, Span};
use crate::kernels::gpu::matrix::Layout;
use crate::kernels::gpu::matrix::testing::{panels, row_major};
use crate::kernels::gpu::testing::gpu;
use crate::kernels::gpu::warpgroup::RightOperands;

#[test]
fn activations_in_16_bits_with_panels_of_bf16() {
    check_narrow(Format::Bf16, Layout::Panels);
}

#[test]
fn activations_in_16_bits_with_rows_of_bf16() {
    check_narrow(Format::Bf16, Layout::RowMajor);
}

#[test]
fn activations_in_16_bits_with_12_bits() {
    check_narrow(Format::Bf12, Layout::Panels);
}

#[test]
fn activations_in_16_bits_with_q8() {
    check_narrow(Format::Q8, Layout::Panels);
}

#[test]
fn activations_in_16_bits_with_q4() {
    check_narrow(Format::Q4, Layout::Panels);
}

/// Checks linears of all kinds of numbers of tokens of bf16, as far as they are taken.
fn check_narrow(format: Format, layout: Layout) {
    let Some(gpu) = gpu() else { return };
    if !gpu.takes_narrow(&panels(&gpu, Format::Q8, 16, 64, 1).matrix, 1) {
        eprintln!("skipped: the device has no matrix instructions");
        return;
    }
    // Few; one operand of each size; two and three operands.
    let few = [1, 8, 9, 16];
    let more = [17, 32, 33, 65, MAX_FUSED_TOKENS, MAX_FUSED_TOKENS + 1, 300];
    for tokens in few.into_iter().chain(more) {
        let case = Case { format, layout, element: DType::Bf16, tokens, ..PLAIN };
        check_narrow_case(&gpu, case);
    }
}

fn check_narrow_case(gpu: &Gpu, case: Case<'_>) {
    let Case { format, layout, tokens, .. } = case;
    let takes = |columns: usize| {
        let sample = match layout {
            Layout::Panels => panels(gpu, format, PANEL, columns, 1),
            Layout::RowMajor => row_major(gpu, format, PANEL, columns, 1),
        };
        gpu.takes_narrow(&sample.matrix, tokens)
    };
    let shapes = [(64, 256), (16, 128), (41, 96), (100, 72), (7, 1000), (33, 64)];
    for (rows, columns) in shapes.into_iter().filter(|&(_, columns)| takes(columns)) {
        check(gpu, Case { rows: &[rows], columns, ..case }, None);
    }
    if !takes(PLAIN.columns) {
        return;
    }
    let case = Case { biased: true, ..case };
    let gate = Then::Gate(Activation::Silu);
    check(gpu, Case { rows: &[40, 40], then: gate, residual: true, ..case }, None);
    check(gpu, Case { rows: &[70, 16, 33], ..case }, None);
    // Columns that several cubes share.
    for columns in [1040, 1088, 4096].into_iter().filter(|&columns| takes(columns)) {
        check(gpu, Case { rows: &[300], columns, residual: true, ..case }, None);
    }
    check(gpu, Case { rows: &[130, 130], columns: 2048, then: gate, ..case }, None);
    // Whole panels, some of which the last rows do not fill.
    if [33, MAX_FUSED_TOKENS].contains(&tokens) && layout == Layout::Panels {
        for (rows, columns) in [(320, 1088), (312, 4096)] {
            check(gpu, Case { rows: &[rows], columns, residual: true, ..case }, None);
        }
        check(gpu, Case { rows: &[160, 160], columns: 2048, then: gate, ..case }, None);
        check(gpu, Case { rows: &[96, 32, 160], ..case }, None);
        let rows = 4 * PANEL * gpu.processors() as usize + PANEL;
        check(gpu, Case { rows: &[rows], columns: 1024, ..case }, None);
    }
    // Clusters of two, three, five, six and seven cubes, with uneven shares of the columns.
    if tokens == 33 && format == Format::Q4 {
        for columns in [512, 832, 1344, 1600, 1856] {
            check(gpu, Case { rows: &[300], columns, ..case }, None);
        }
    }
    // Too many tiles for two cubes each, so that each takes all columns, and its stages in turns.
    if (17..=MAX_FUSED_TOKENS).contains(&tokens) {
        let rows = 4 * PANEL * gpu.processors() as usize + 7;
        check(gpu, Case { rows: &[rows], columns: 1024, ..case }, None);
    }
}

/// Checks outputs that lie as operands of matrices of each layout against those of `half`, which are the same in rows.
pub(super) fn check_operands(gpu: &Gpu, linear: &Linear<'_>, order: RightOperands, half: &Span) {
    let features = linear.matrices[0].rows();
    for (is_spread, factor) in [(true, 1.0), (true, ENLARGED), (false, 1.0)] {
        let order = RightOperands { is_spread, factor, ..order };
        let out = gpu.poisoned(order.count() * features * 2);
        let (made, made_order) = (DType::Bf16, Some(order));
        gpu.linear(&Linear { outputs: &[&out], made, made_order, ..*linear }).unwrap();
        gpu.assert_ordered(&out, half, [linear.tokens, features], order, "a linear");
    }
}
