//! A unit's products of its part of a panel with a few rows of activations.
//!
//! Sums are `[matrix][token][row]` of the unit's slot, squares `[token]`.

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

/// Adds the products of one task.
///
/// The rows of activations are `first_row` and those after it; the unit has the same place in each of `weights`.
#[cube]
#[expect(clippy::too_many_arguments, reason = "a kernel's parts have no state of their own")]
pub(in crate::kernels::gpu) fn multiply_task<N: Size>(
    input: &Input<N>,
    first_row: usize,
    weights: &Sequence<Box<[Words]>>,
    walk: Walk,
    task: usize,
    sums: &mut Array<f32>,
    squares: &mut Array<f32>,
    #[comptime] tokens: usize,
    #[comptime] panel: Panel,
) {
    let matrices = comptime!(weights.len());
    let mut words = Array::<Words>::new(matrices * LOADS);
    #[unroll]
    for matrix in 0..matrices {
        load_task(&weights[matrix], walk, task, &mut words, matrix * LOADS, panel);
    }
    let column = task_column(task, panel);
    if comptime!(panel.blocks() == 0) {
        multiply_floats(input, first_row, column, &words, sums, squares, matrices, tokens, panel);
    } else {
        multiply_blocks(
            input, first_row, column, weights, walk, task, &words, sums, squares, tokens, panel,
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
    squares: &mut Array<f32>,
    #[comptime] matrices: usize,
    #[comptime] tokens: usize,
    #[comptime] panel: Panel,
) {
    let rows = comptime!(panel.rows());
    let columns = comptime!(panel.task_columns());
    let mut values = Array::<f32>::new(comptime!(matrices * rows * columns));
    #[unroll]
    for matrix in 0..matrices {
        decode_floats(words, matrix * LOADS, &mut values, matrix * rows * columns, panel);
    }
    #[unroll]
    for four in 0..columns / 4 {
        let factors = input.factors(column + 4 * four);
        #[unroll]
        for token in 0..tokens {
            let mut x = input.four(first_row + token, column + 4 * four, factors, squares, token);
            if comptime!(matches!(panel.format, Format::Bf12)) {
                x *= Four::new(ENLARGED);
            }
            #[unroll]
            for matrix in 0..matrices {
                let (first, to) =
                    (matrix * rows * columns + 4 * four, (matrix * tokens + token) * rows);
                multiply_four(&values, first, columns, x, sums, to, rows);
            }
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
    weights: &Sequence<Box<[Words]>>,
    walk: Walk,
    task: usize,
    words: &Array<Words>,
    sums: &mut Array<f32>,
    squares: &mut Array<f32>,
    #[comptime] tokens: usize,
    #[comptime] panel: Panel,
) {
    let matrices = comptime!(weights.len());
    let rows = comptime!(panel.rows());
    #[unroll]
    for block in 0..panel.blocks() {
        let mut scales = Array::<f32>::new(matrices * rows);
        #[unroll]
        for matrix in 0..matrices {
            load_scales(&weights[matrix], walk, task, &mut scales, matrix * rows, block, panel);
        }
        let mut products = zeros(matrices * tokens * rows);
        let mut inputs = zeros(tokens);
        #[unroll]
        for load in 0..LOADS {
            let mut values = Array::<f32>::new(matrices * rows * 4);
            #[unroll]
            for matrix in 0..matrices {
                let words = words[matrix * LOADS + load];
                decode_codes(words, &mut values, matrix * rows * 4, 4usize, block, panel);
            }
            let column = column + block * BLOCK_PAIR / 2 + 4 * load;
            let factors = input.factors(column);
            #[unroll]
            for token in 0..tokens {
                let x = input.four(first_row + token, column, factors, squares, token);
                inputs[token] +=
                    x.extract(0usize) + x.extract(1usize) + x.extract(2usize) + x.extract(3usize);
                #[unroll]
                for matrix in 0..matrices {
                    let to = (matrix * tokens + token) * rows;
                    multiply_four(&values, matrix * rows * 4, 4usize, x, &mut products, to, rows);
                }
            }
        }
        let factor = comptime!(block_factor(panel.format));
        #[unroll]
        for sum in 0..matrices * tokens * rows {
            let scale = scales[sum / (tokens * rows) * rows + sum % rows];
            let token = sum / rows % tokens;
            sums[sum] += scale * factor * (products[sum] - BLOCK_OFFSET * inputs[token]);
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
