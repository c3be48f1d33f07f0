//! A few rows of activations through row-major matrices: each plane takes a few rows of a matrix, or a share of
//! their columns where there are too few rows to keep every processor busy. Cubes take more tokens than fit a unit's
//! registers side by side, each with all of the matrix.

use cubecl::prelude::*;
use ir::op::Then;
use ir::tensor::Format;

use super::input::Input;
use super::product::{multiply_four, zeros};
use super::total::{Output, Shape, Totals, finish_outputs};
use crate::kernels::gpu::ahead::{Regions, ask_at_the_end};
use crate::kernels::gpu::overlap::follow;
use crate::kernels::gpu::words::{Words, half_of};

/// What is known of a row-major matrix, and of how it is shared out, when a kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct RowShare {
    pub(super) format: Format,
    pub(super) columns: usize,
    /// Planes of a cube that share the same rows.
    pub(super) splits: usize,
    /// Planes of a cube that take other rows.
    pub(super) bands: usize,
    /// Units of a plane.
    pub(super) plane: usize,
    /// Whether a cube takes all tokens.
    pub(super) has_all_tokens: bool,
}

impl RowShare {
    /// Columns of a load.
    pub(super) fn load_columns(self) -> usize {
        if matches!(self.format, Format::F32) { 4 } else { 8 }
    }
}

/// Writes every output: cubes take bands of its rows, output after output; along the second axis, other tokens.
#[cube(launch_unchecked)]
pub(super) fn multiply_rows<N: Size>(
    input: &Input<N>,
    weights: &Sequence<Sequence<Box<[Words]>>>,
    outputs: &mut Sequence<Output<f32>>,
    tokens: u32,
    ahead: &Regions,
    epsilon: f32,
    #[comptime] then: Then,
    #[comptime] shape: Shape,
    #[comptime] share: RowShare,
) {
    let cube = CUBE_POS_X as usize;
    let plane = UNIT_POS_Y as usize;
    let tile = comptime!(share.bands * shape.rows);
    let first_token = CUBE_POS_Y as usize * shape.tokens;
    follow();
    let mut totals = Totals::new(&outputs[0], shape);
    let mut first_cube = 0usize.runtime();
    #[unroll]
    for output in 0..outputs.len() {
        let rows = outputs.index(output).rows;
        let cubes = rows.div_ceil(tile);
        if cube >= first_cube && cube < first_cube + cubes {
            let band = plane % share.bands;
            let split = plane / share.bands;
            let place = Place {
                first_token,
                last_token: tokens as usize - 1,
                first_row: (cube - first_cube) * tile + band * shape.rows,
                rows,
                first_load: split * share.plane + UNIT_POS_X as usize,
            };
            let mut sums = zeros(shape.values());
            let mut squares = zeros(shape.tokens);
            let weights = &weights[output];
            multiply_band(input, weights, place, &mut sums, &mut squares, shape, share);
            #[unroll]
            for value in 0..shape.values() {
                sums[value] = plane_sum(sums[value]);
            }
            if comptime!(shape.is_normed) {
                #[unroll]
                for token in 0..shape.tokens {
                    squares[token] = plane_sum(squares[token]);
                }
            }
            if UNIT_POS_X == 0 {
                #[unroll]
                for matrix in 0..shape.matrices {
                    let first = comptime!(matrix * shape.tokens * shape.rows);
                    totals.put(split, band, matrix, &sums, first, shape);
                }
                totals.put_squares(split, band, &squares, shape);
            }
        }
        first_cube += cubes;
    }
    ask_at_the_end(ahead, UNIT_POS_Y, CUBE_DIM_Y);
    sync_cube();
    finish_outputs(&totals, outputs, first_token, epsilon, tile, share.columns, then, shape);
}

/// What a unit takes.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Place {
    first_token: usize,
    /// Of all cubes.
    last_token: usize,
    first_row: usize,
    /// Of each matrix.
    rows: usize,
    first_load: usize,
}

/// Adds a unit's products with the rows of its plane.
#[cube]
fn multiply_band<N: Size>(
    input: &Input<N>,
    weights: &Sequence<Box<[Words]>>,
    place: Place,
    sums: &mut Array<f32>,
    squares: &mut Array<f32>,
    #[comptime] shape: Shape,
    #[comptime] share: RowShare,
) {
    let columns = comptime!(share.load_columns());
    let loads = comptime!(share.columns / columns);
    let values_of_matrix = comptime!(shape.rows * columns);
    for load in range_stepped(place.first_load, loads, share.splits * share.plane) {
        let mut words = Array::<Words>::new(shape.matrices * shape.rows);
        #[unroll]
        for matrix in 0..shape.matrices {
            #[unroll]
            for row in 0..shape.rows {
                // Rows beyond the end are never written.
                let row_in_matrix = (place.first_row + row).min(place.rows - 1);
                words[matrix * shape.rows + row] = weights[matrix][row_in_matrix * loads + load];
            }
        }
        let mut values = Array::<f32>::new(shape.matrices * values_of_matrix);
        #[unroll]
        for row in 0..shape.matrices * shape.rows {
            decode_row(words[row], &mut values, row * columns, share.format);
        }
        #[unroll]
        for four in 0..columns / 4 {
            let column = load * columns + 4 * four;
            let factors = input.factors(column);
            #[unroll]
            for token in 0..shape.tokens {
                let x = if comptime!(share.has_all_tokens) {
                    input.four(token.runtime(), column, factors, squares, token)
                } else {
                    // Tokens behind the last are copies of that one.
                    let row = (place.first_token + token).min(place.last_token);
                    input.four(row, column, factors, squares, token)
                };
                #[unroll]
                for matrix in 0..shape.matrices {
                    let from = matrix * values_of_matrix + 4 * four;
                    let to = (matrix * shape.tokens + token) * shape.rows;
                    multiply_four(&values, from, columns, x, sums, to, shape.rows);
                }
            }
        }
    }
}

/// The neighbouring columns of a load to `values[first..]`.
#[cube]
pub(in crate::kernels::gpu) fn decode_row(
    words: Words,
    values: &mut Array<f32>,
    #[comptime] first: usize,
    #[comptime] format: Format,
) {
    #[unroll]
    for i in 0..4usize {
        let word = words.extract(i);
        if comptime!(matches!(format, Format::F32)) {
            values[first + i] = f32::reinterpret(word);
        } else {
            values[first + 2 * i] = half_of(word, 0usize, format);
            values[first + 2 * i + 1] = half_of(word, 1usize, format);
        }
    }
}
