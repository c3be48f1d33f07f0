//! From panels to rows, in a float format: what a vendor library multiplies with.

#![expect(unsafe_code, reason = "kernels are launched without checks of every index")]

use anyhow::{Result, ensure};
use cubecl::prelude::*;
use ir::tensor::Format;

use super::bf12::add_bases;
use super::device::{Gpu, Span, element};
use super::matrix::{Layout, Matrix, float_bytes, float_type};
use super::panel::{
    BLOCK_OFFSET, LOADS, Panel, Walk, block_factor, decode_codes, decode_floats, load_half,
    load_scales, load_task, panel_vectors, task_column,
};
use super::words::Words;
use crate::kernels::cpu::pack::{BLOCK_PAIR, PANEL};

/// Units of a cube; any whole number of planes would do.
const UNITS: usize = 256;

impl Gpu {
    /// Queues the writing of a matrix in panels to the start of `out`, row after row in a float format.
    ///
    /// # Errors
    /// When it is not in panels, the format has blocks, or the rows do not fit.
    pub fn unpack(&self, matrix: &Matrix, format: Format, out: &Span) -> Result<Matrix> {
        ensure!(matrix.layout() == Layout::Panels, "only panels are unpacked");
        let (rows, columns) = (matrix.rows(), matrix.columns());
        let unpacked = Matrix::new(format, Layout::RowMajor, rows, columns, out.clone())?;
        let panel = Panel { format: matrix.format(), columns };
        let size = store_size(panel, format);
        let units = rows.div_ceil(PANEL) * pieces(panel) * panel.slots();
        let data = matrix.data();
        // SAFETY: the spans are as long as the shapes say, and the kernel stays within those.
        unsafe {
            unpack::launch_unchecked(
                &self.client,
                CubeCount::new_1d(units.div_ceil(UNITS) as u32),
                CubeDim::new_1d(UNITS as u32),
                size,
                data.loads(),
                out.argument(rows * columns / size, size * float_bytes(format)?),
                rows,
                panel,
                element(float_type(format)?),
            );
        }
        Ok(unpacked)
    }
}

/// Neighbouring columns of a task: of one block where there are blocks.
pub(super) fn part_columns(panel: Panel) -> usize {
    panel.task_columns() / panel.blocks().max(1)
}

/// Elements that a unit stores at once: 16 bytes where a piece has as many neighbouring columns.
fn store_size(panel: Panel, format: Format) -> usize {
    match format {
        Format::F32 => 4,
        Format::F16 | Format::Bf16 | Format::Bf12 | Format::Q8 | Format::Q4 => {
            8.min(piece_columns(panel))
        }
    }
}

/// Pieces of a task: half a task of blocks has eight neighbouring columns, so that units beside one another store
/// bytes beside one another.
fn pieces_of_task(panel: Panel) -> usize {
    if panel.blocks() > 0 { 2 } else { 1 }
}

/// Pieces of a slot.
fn pieces(panel: Panel) -> usize {
    panel.tasks() * pieces_of_task(panel)
}

/// Neighbouring columns of a piece.
fn piece_columns(panel: Panel) -> usize {
    part_columns(panel) / pieces_of_task(panel)
}

/// Each unit writes a piece.
#[cube(launch_unchecked)]
fn unpack<F: Float, N: Size>(
    weights: &[Words],
    out: &mut [Vector<F, N>],
    rows: usize,
    #[comptime] panel: Panel,
    #[define(F)] _element: ElemType,
) {
    let units_of_panel = comptime!(pieces(panel) * panel.slots());
    let number = ABSOLUTE_POS / units_of_panel;
    let unit = ABSOLUTE_POS % units_of_panel;
    if number * PANEL < rows {
        let vectors = panel_vectors(rows, number);
        let slots = vectors * comptime!(panel.slots() / 2);
        let piece = unit / slots;
        let walk = Walk { start: number * panel.stride(), vectors, slot: unit % slots };
        if piece < comptime!(pieces(panel)) {
            let first_row = number * PANEL + walk.slot * panel.rows();
            unpack_piece(weights, walk, piece, first_row, rows, out, panel);
        }
    }
}

#[cube]
fn unpack_piece<F: Float, N: Size>(
    weights: &[Words],
    walk: Walk,
    piece: usize,
    first_row: usize,
    rows: usize,
    out: &mut [Vector<F, N>],
    #[comptime] panel: Panel,
) {
    let size = N::value();
    let columns = comptime!(piece_columns(panel));
    let task = piece / comptime!(pieces_of_task(panel));
    let of_task = piece % comptime!(pieces_of_task(panel));
    let mut words = Array::<Words>::new(LOADS);
    if comptime!(panel.blocks() > 0) {
        load_half(weights, walk, task, of_task, &mut words, panel);
    } else {
        load_task(weights, walk, task, &mut words, 0usize, panel);
    }
    #[unroll]
    for part in 0..comptime!(panel.blocks().max(1)) {
        let mut values = Array::<f32>::new(comptime!(panel.rows() * columns));
        decode_part(weights, walk, task, &words, &mut values, part, columns, panel);
        let first_column =
            task_column(task, panel) + of_task * columns + comptime!(part * BLOCK_PAIR / 2);
        #[unroll]
        for row in 0..comptime!(panel.rows()) {
            #[unroll]
            for store in 0..comptime!(columns / size) {
                let column = first_column + comptime!(store * size);
                if first_row + row < rows && column < panel.columns {
                    let from = comptime!(row * columns + store * size);
                    let at = (first_row + row) * panel.columns + column;
                    out[at / size] = neighbours(&values, from);
                }
            }
        }
    }
}

/// Decodes a task, or some neighbouring columns of one of its blocks, element by element to `values[row][column]`.
#[cube]
pub(super) fn decode_part(
    weights: &[Words],
    walk: Walk,
    task: usize,
    words: &Array<Words>,
    values: &mut Array<f32>,
    #[comptime] block: usize,
    #[comptime] columns: usize,
    #[comptime] panel: Panel,
) {
    if comptime!(panel.blocks() == 0) {
        decode_floats(words, 0usize, values, 0usize, panel);
        if comptime!(matches!(panel.format, Format::Bf12)) {
            add_bases(values, weights[walk.start + walk.slot]);
        }
    } else {
        decode_block(weights, walk, task, words, values, block, columns, panel);
    }
}

/// Decodes some neighbouring columns of a block.
#[cube]
fn decode_block(
    weights: &[Words],
    walk: Walk,
    task: usize,
    words: &Array<Words>,
    values: &mut Array<f32>,
    #[comptime] block: usize,
    #[comptime] columns: usize,
    #[comptime] panel: Panel,
) {
    let mut scales = Array::<f32>::new(panel.rows());
    load_scales(weights, walk, task, &mut scales, 0usize, block, panel);
    #[unroll]
    for load in 0..comptime!(columns / 4) {
        decode_codes(words[load], values, 4 * load, columns, block, panel);
    }
    #[unroll]
    for row in 0..comptime!(panel.rows()) {
        // Products of both have few enough bits to be exact.
        let scale = scales[row] * comptime!(block_factor(panel.format));
        let offset = scale * -BLOCK_OFFSET;
        #[unroll]
        for column in 0..columns {
            let at = comptime!(row * columns + column);
            values[at] = fma(values[at], scale, offset);
        }
    }
}

/// Elements `values[first..]`, as many as a vector takes.
#[cube]
fn neighbours<F: Float, N: Size>(values: &Array<f32>, #[comptime] first: usize) -> Vector<F, N> {
    let mut vector = Vector::<F, N>::empty();
    #[unroll]
    for i in 0..N::value() {
        vector.insert(i, F::cast_from(values[first + i]));
    }
    vector
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::kernels::gpu::matrix::testing::{float_formats, panels, panels_of, spoilt};
    use crate::kernels::gpu::testing::gpu;

    fn check(gpu: &Gpu, from: Format, to: Format, rows: usize, columns: usize) {
        let sample = panels(gpu, from, rows, columns, 3);
        let count = rows * columns;
        let out = gpu.poisoned(count * 4);
        let unpacked = gpu.unpack(&sample.matrix, to, &out).unwrap();
        assert_eq!((unpacked.layout(), unpacked.format()), (Layout::RowMajor, to));
        let actual: Vec<f32> = match to {
            Format::F32 => gpu.download(&out, count),
            Format::F16 => gpu.download::<f16>(&out, count).into_iter().map(f16::to_f32).collect(),
            Format::Bf16 => {
                gpu.download::<bf16>(&out, count).into_iter().map(bf16::to_f32).collect()
            }
            Format::Bf12 | Format::Q8 | Format::Q4 => panic!("{to} has no rows"),
        };
        for (i, (&actual, &expected)) in actual.iter().zip(&sample.values).enumerate() {
            let expected = match to {
                Format::F16 => f16::from_f64(expected).to_f32(),
                Format::Bf16 => bf16::from_f64(expected).to_f32(),
                Format::F32 | Format::Bf12 | Format::Q8 | Format::Q4 => expected as f32,
            };
            assert_eq!(actual, expected, "{from} to {to}, {rows} by {columns}: element {i}");
        }
    }

    #[test]
    fn every_element_is_kept_or_rounded_to_nearest() {
        let Some(gpu) = gpu() else { return };
        for from in Format::ALL {
            for to in float_formats(&gpu) {
                for (rows, columns) in [(64, 128), (41, 72), (7, 40)] {
                    check(&gpu, from, to, rows, columns);
                }
            }
        }
    }

    #[test]
    fn what_is_infinite_or_no_number_stays_so() {
        let Some(gpu) = gpu() else { return };
        let (rows, columns) = (41, 72);
        let wide = spoilt(rows, columns, 3);
        for from in Format::ALL {
            let sample = panels_of(&gpu, from, rows, columns, &wide);
            let out = gpu.upload(&vec![0.0_f32; rows * columns]);
            gpu.unpack(&sample.matrix, Format::F32, &out).unwrap();
            let actual = gpu.download::<f32>(&out, rows * columns);
            for (i, (&actual, &expected)) in actual.iter().zip(&sample.values).enumerate() {
                let expected = expected as f32;
                let is_kept = actual == expected || actual.is_nan() && expected.is_nan();
                assert!(is_kept, "{actual} is not {expected}: {from}, element {i}");
            }
        }
    }

    #[test]
    fn pieces_are_the_rows_of_the_whole() {
        let Some(gpu) = gpu() else { return };
        let (rows, columns, piece) = (150, 72, 64);
        for format in Format::ALL {
            let sample = panels(&gpu, format, rows, columns, 3);
            let mut actual = Vec::new();
            for first in (0..rows).step_by(piece) {
                let some = sample.matrix.rows_from(first, piece.min(rows - first)).unwrap();
                let out = gpu.poisoned(some.rows() * columns * 4);
                gpu.unpack(&some, Format::F32, &out).unwrap();
                actual.extend(gpu.download::<f32>(&out, some.rows() * columns));
            }
            let expected: Vec<f32> = sample.values.iter().map(|&value| value as f32).collect();
            assert_eq!(actual, expected, "{format}");
            assert!(
                sample.matrix.rows_from(32, 32).is_err()
                    && sample.matrix.rows_from(128, 32).is_err()
            );
        }
    }

    #[test]
    fn rows_that_libraries_cannot_take_are_refused() {
        let Some(gpu) = gpu() else { return };
        let matrix = panels(&gpu, Format::F16, 16, 36, 1).matrix;
        let out = gpu.poisoned(1 << 12);
        assert!(gpu.unpack(&matrix, Format::F16, &out).is_err());
        assert!(gpu.unpack(&matrix, Format::Q8, &out).is_err());
    }
}
