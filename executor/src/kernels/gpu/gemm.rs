//! Many tokens through one matrix, for devices without a vendor library.

#![expect(unsafe_code, reason = "kernels are launched without checks of every index")]

use anyhow::{Result, ensure};
use cubecl::prelude::*;
use ir::tensor::Format;

use super::device::{Gpu, Span};
use super::linear::rows::decode_row;
use super::matrix::{Layout, Matrix};
use super::words::{Words, read_four, read_size};

/// Tokens, and outputs, of a cube.
const TILE: usize = 64;
/// Columns between two barriers.
const DEPTH: usize = 16;
/// Tokens, and outputs, of a unit.
const UNIT_TILE: usize = 4;
/// Units along each side of a cube's tile.
const SIDE: usize = TILE / UNIT_TILE;

impl Gpu {
    /// Queues `out = x · matrixᵀ` for `x: f32[tokens, columns]` and a row-major matrix; `out: f32[tokens, rows]`.
    ///
    /// # Errors
    /// When the matrix is in panels: [`Gpu::unpack`] it first.
    pub fn gemm(&self, x: &Span, tokens: usize, matrix: &Matrix, out: &Span) -> Result<()> {
        ensure!(
            matrix.layout() == Layout::RowMajor,
            "panels are unpacked before they are multiplied"
        );
        let (rows, columns) = (matrix.rows(), matrix.columns());
        let size = read_size(columns);
        let data = matrix.data();
        // SAFETY: the spans are as long as the shapes say, and the kernel stays within those.
        unsafe {
            multiply_tiles::launch_unchecked(
                &self.client,
                CubeCount::new_2d(rows.div_ceil(TILE) as u32, tokens.div_ceil(TILE) as u32),
                CubeDim::new_1d((SIDE * SIDE) as u32),
                size,
                x.argument(tokens * columns / size, size * size_of::<f32>()),
                data.loads(),
                out.argument(tokens * rows, size_of::<f32>()),
                tokens,
                rows,
                columns,
                matrix.format(),
            );
        }
        Ok(())
    }
}

/// A cube for each tile of the output. Both inputs pass through shared memory, `[column][row of the tile]`.
#[cube(launch_unchecked)]
fn multiply_tiles<N: Size>(
    x: &[Vector<f32, N>],
    weights: &[Words],
    out: &mut [f32],
    tokens: usize,
    rows: usize,
    #[comptime] columns: usize,
    #[comptime] format: Format,
) {
    let first_row = CUBE_POS_X as usize * TILE;
    let first_token = CUBE_POS_Y as usize * TILE;
    let unit = UNIT_POS as usize;
    let (unit_row, unit_token) = (unit % SIDE * UNIT_TILE, unit / SIDE * UNIT_TILE);
    let mut x_tile = Shared::<[f32]>::new_slice(DEPTH * TILE);
    let mut weight_tile = Shared::<[f32]>::new_slice(DEPTH * TILE);
    let mut sums = Array::<f32>::new(UNIT_TILE * UNIT_TILE);
    #[unroll]
    for i in 0..UNIT_TILE * UNIT_TILE {
        sums[i] = 0.0;
    }
    for first_column in range_stepped(0usize, columns, DEPTH) {
        let token = unit % TILE;
        let column = unit / TILE * 4;
        let covered = comptime!(columns.next_multiple_of(DEPTH));
        let token_in_x = (first_token + token).min(tokens - 1);
        let four = read_four(x, token_in_x, first_column + column, columns, covered);
        #[unroll]
        for i in 0..4usize {
            x_tile[(column + i) * TILE + token] = four.extract(i);
        }
        load_weights(weights, first_row, rows, first_column, &mut weight_tile, columns, format);
        sync_cube();
        #[unroll]
        for column in 0..DEPTH {
            #[unroll]
            for token in 0..UNIT_TILE {
                let x = x_tile[column * TILE + unit_token + token];
                #[unroll]
                for row in 0..UNIT_TILE {
                    let weight = weight_tile[column * TILE + unit_row + row];
                    sums[token * UNIT_TILE + row] += x * weight;
                }
            }
        }
        sync_cube();
    }
    #[unroll]
    for i in 0..UNIT_TILE * UNIT_TILE {
        let token = first_token + unit_token + comptime!(i / UNIT_TILE);
        let row = first_row + unit_row + comptime!(i % UNIT_TILE);
        if token < tokens && row < rows {
            out[token * rows + row] = sums[i];
        }
    }
}

/// A tile of the matrix, zeros beyond its columns.
#[cube]
fn load_weights(
    weights: &[Words],
    first_row: usize,
    rows: usize,
    first_column: usize,
    tile: &mut Shared<[f32]>,
    #[comptime] columns: usize,
    #[comptime] format: Format,
) {
    let load_columns = comptime!(if matches!(format, Format::F32) { 4usize } else { 8 });
    let unit = UNIT_POS as usize;
    let row = unit % TILE;
    let column = unit / TILE * load_columns;
    if column < DEPTH {
        let mut values = Array::<f32>::new(load_columns);
        if first_column + column < columns {
            let row_in_matrix = (first_row + row).min(rows - 1);
            let at = (row_in_matrix * columns + first_column + column) / load_columns;
            decode_row(weights[at], &mut values, 0usize, format);
        } else {
            #[unroll]
            for i in 0..load_columns {
                values[i] = 0.0;
            }
        }
        #[unroll]
        for i in 0..load_columns {
            tile[(column + i) * TILE + row] = values[i];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::cpu::testing::{Random, distance};
    use crate::kernels::gpu::matrix::testing::{panels, row_major};
    use crate::kernels::gpu::testing::gpu;

    fn check(gpu: &Gpu, format: Format, tokens: usize, rows: usize, columns: usize) {
        let x = Random(3).floats(tokens * columns);
        let sample = row_major(gpu, format, rows, columns, 5);
        let out = gpu.poisoned(tokens * rows * 4);
        gpu.gemm(&gpu.upload(&x), tokens, &sample.matrix, &out).unwrap();
        let mut expected = Vec::new();
        for x in x.chunks_exact(columns) {
            for row in sample.values.chunks_exact(columns) {
                expected.push(row.iter().zip(x).map(|(a, &b)| a * f64::from(b)).sum::<f64>());
            }
        }
        let distance = distance(&gpu.download(&out, tokens * rows), &expected);
        assert!(distance < 2e-6, "{distance} away: {format}, {tokens} · {rows} · {columns}");
    }

    #[test]
    fn tiles_whole_and_cut() {
        let Some(gpu) = gpu() else { return };
        for format in [Format::F32, Format::F16, Format::Bf16] {
            for (tokens, rows, columns) in [(64, 64, 64), (67, 130, 40), (9, 5, 24)] {
                check(&gpu, format, tokens, rows, columns);
            }
        }
    }

    #[test]
    fn panels_are_refused() {
        let Some(gpu) = gpu() else { return };
        let matrix = panels(&gpu, Format::F32, 16, 32, 1).matrix;
        let span = gpu.poisoned(1 << 12);
        assert!(gpu.gemm(&span, 16, &matrix, &span).is_err());
    }
}
