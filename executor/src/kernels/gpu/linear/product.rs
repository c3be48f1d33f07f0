//! A unit's products of its part of a panel with a few rows of activations.
//!
//! Sums are `[token][row]` of the unit's slot, squares `[token]`.

use cubecl::prelude::*;
use ir::tensor::Format;

use super::input::Input;
use crate::kernels::cpu::pack::BLOCK_PAIR;
use crate::kernels::gpu::bf12::ENLARGED;
use crate::kernels::gpu::panel::{
    BLOCK_OFFSET, LOADS, Panel, Walk, block_factor, decode_codes, decode_floats, load_scales,
    load_task, task_column,
};
use crate::kernels::gpu::words::{Four, Words};

/// The words of a task.
#[cube]
pub(in crate::kernels::gpu) fn load_words(
    weights: &[Words],
    walk: Walk,
    task: usize,
    #[comptime] panel: Panel,
) -> Array<Words> {
    let mut words = Array::<Words>::new(LOADS);
    load_task(weights, walk, task, &mut words, 0usize, panel);
    words
}

/// Adds the products of the task that has these words, to `sums[first_sum..]`.
///
/// The rows of activations are `first_row` and those after it.
#[cube]
#[expect(clippy::too_many_arguments, reason = "a kernel's parts have no state of their own")]
pub(in crate::kernels::gpu) fn multiply_words<N: Size>(
    input: &Input<N>,
    first_row: usize,
    weights: &[Words],
    walk: Walk,
    task: usize,
    words: &Array<Words>,
    sums: &mut Array<f32>,
    #[comptime] first_sum: usize,
    squares: &mut Array<f32>,
    #[comptime] tokens: usize,
    #[comptime] panel: Panel,
) {
    let column = task_column(task, panel);
    if comptime!(panel.blocks() == 0) {
        multiply_floats(input, first_row, column, words, sums, first_sum, squares, tokens, panel);
    } else {
        multiply_blocks(
            input, first_row, column, weights, walk, task, words, sums, first_sum, squares, tokens,
            panel,
        );
    }
}

#[cube]
#[expect(clippy::too_many_arguments, reason = "a kernel's parts have no state of their own")]
fn multiply_floats<N: Size>(
    input: &Input<N>,
    first_row: usize,
    column: usize,
    words: &Array<Words>,
    sums: &mut Array<f32>,
    #[comptime] first_sum: usize,
    squares: &mut Array<f32>,
    #[comptime] tokens: usize,
    #[comptime] panel: Panel,
) {
    let rows = comptime!(panel.rows());
    let columns = comptime!(panel.task_columns());
    let mut values = Array::<f32>::new(comptime!(rows * columns));
    decode_floats(words, 0usize, &mut values, 0usize, panel);
    #[unroll]
    for four in 0..columns / 4 {
        let factors = input.factors(column + 4 * four);
        #[unroll]
        for token in 0..tokens {
            let mut x = input.four(first_row + token, column + 4 * four, factors, squares, token);
            if comptime!(matches!(panel.format, Format::Bf12)) {
                x *= Four::new(ENLARGED);
            }
            multiply_four(&values, 4 * four, columns, x, sums, first_sum + token * rows, rows);
        }
    }
}

/// Adds the products of four columns of each row: `values[from + row * stride..]`.
#[cube]
pub(super) fn multiply_four(
    values: &Array<f32>,
    #[comptime] from: usize,
    #[comptime] stride: usize,
    x: Four,
    sums: &mut Array<f32>,
    #[comptime] to: usize,
    #[comptime] rows: usize,
) {
    #[unroll]
    for row in 0..rows {
        let mut sum = sums[to + row];
        #[unroll]
        for i in 0..4usize {
            sum += values[from + row * stride + i] * x.extract(i);
        }
        sums[to + row] = sum;
    }
}

/// The elements of a block are `scale · factor · (decoded - offset)`. Scale, factor and offset are applied to
/// sums: that of the products, less the offset times that of the activations.
#[cube]
#[expect(clippy::too_many_arguments, reason = "a kernel's parts have no state of their own")]
fn multiply_blocks<N: Size>(
    input: &Input<N>,
    first_row: usize,
    column: usize,
    weights: &[Words],
    walk: Walk,
    task: usize,
    words: &Array<Words>,
    sums: &mut Array<f32>,
    #[comptime] first_sum: usize,
    squares: &mut Array<f32>,
    #[comptime] tokens: usize,
    #[comptime] panel: Panel,
) {
    let rows = comptime!(panel.rows());
    #[unroll]
    for block in 0..panel.blocks() {
        let mut scales = Array::<f32>::new(rows);
        load_scales(weights, walk, task, &mut scales, 0usize, block, panel);
        let mut products = zeros(tokens * rows);
        let mut inputs = zeros(tokens);
        #[unroll]
        for load in 0..LOADS {
            let mut values = Array::<f32>::new(rows * 4);
            decode_codes(words[load], &mut values, 0usize, 4usize, block, panel);
            let column = column + block * BLOCK_PAIR / 2 + 4 * load;
            let factors = input.factors(column);
            #[unroll]
            for token in 0..tokens {
                let x = input.four(first_row + token, column, factors, squares, token);
                inputs[token] +=
                    x.extract(0usize) + x.extract(1usize) + x.extract(2usize) + x.extract(3usize);
                multiply_four(&values, 0usize, 4usize, x, &mut products, token * rows, rows);
            }
        }
        let factor = comptime!(block_factor(panel.format));
        #[unroll]
        for sum in 0..tokens * rows {
            sums[first_sum + sum] +=
                scales[sum % rows] * factor * (products[sum] - BLOCK_OFFSET * inputs[sum / rows]);
        }
    }
}

/// Registers that start at zero.
#[cube]
pub(in crate::kernels::gpu) fn zeros(#[comptime] count: usize) -> Array<f32> {
    let mut zeros = Array::<f32>::new(count);
    #[unroll]
    for i in 0..count {
        zeros[i] = 0.0;
    }
    zeros
}
