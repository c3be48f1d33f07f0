//! A few tokens through matrices that share their input, with what surrounds them, in one launch.
//!
//! The limit is how fast the matrices are read, so every kernel keeps many independent loads on their way. Where there
//! are matrix instructions, they leave time to decode blocks and to read the matrices once for all tokens.
//! A root-mean-square norm in front costs nothing: its factors are multiplied with the inputs, and what they are
//! divided by is a factor of the sums.

#![expect(unsafe_code, reason = "kernels are launched without checks of every index")]

mod arguments;
mod bytes;
mod digits;
mod fours;
pub(super) mod input;
mod matrix;
pub(super) mod panels;
pub(super) mod product;
mod rights;
pub(super) mod rows;
mod tiles;
pub(super) mod total;

#[cfg(test)]
pub(super) mod tests;

use anyhow::{Result, ensure};
use cubecl::prelude::{CubeCount, CubeDim};
use ir::op::Then;
use ir::tensor::{DType, Format};
use ir::workspace::{MAX_PACKED_ROWS, most_float_rows, most_fused_rows, product_format};

use self::bytes::ByteShare;
use self::digits::{DIGIT_TOKENS, digit_bytes};
use self::matrix::Share;
use self::panels::PanelShare;
use self::rights::WHOLE_TOKENS;
use self::rows::RowShare;
use self::total::Shape;
use super::ahead::{Region, argument};
use super::device::{Gpu, Span};
use super::matrix::{Layout, Matrix};
use super::peers::Group;
use super::warpgroup::RightOperands;
use super::words::read_size;
use crate::kernels::cpu::pack::{PANEL, VECTOR};

/// Tokens of floats that a cube takes at most: with more, sums no longer fit a unit's registers.
pub const FLOAT_TOKENS: usize = ir::workspace::FLOAT_ROWS as usize;
/// Tokens that one launch takes at most, of bf16 with matrices in 16 bits, or of floats with small ones: with more, a
/// library's tiles of 128 rows read the activations less often.
pub const MAX_FUSED_TOKENS: usize = ir::workspace::MAX_FUSED_ROWS as usize;
/// The same of bf16 with packed matrices.
const MAX_PACKED_TOKENS: usize = MAX_PACKED_ROWS as usize;
/// Weights of a matrix, at most, of which [`MAX_FUSED_TOKENS`] tokens of floats are taken, some after others: their
/// sums take an H200 5 µs at least, as a call of a library does, and a cache holds the matrix. Routers have as many.
const MOST_SMALL_WEIGHTS: usize = 2 << 20;

/// Planes that share a panel: with a task of each of their units on its way, 32 KB. Memory that delivers
/// 4.8 TB/s after about 0.7 µs to each of 132 processors needs 25 KB from each.
pub(super) const PANEL_PLANES: usize = 16;
/// Planes whose registers fit a processor where blocks are multiplied as bytes: a lane of an H200 needs 72.
const BYTE_PLANES: usize = 28;
/// Planes of a cube of that kind which share rows, where more cubes come than fit at a time.
const BYTE_SPLITS: usize = 4;
/// Planes whose registers fit a processor where blocks or floats are multiplied as floats, 40 for each of a plane's
/// units: cubes are as large as lets all of them be there at once. (Of a gate of 896, seven for some processors of an
/// H200, 6 planes each take 10 to 15 % less time than 8, of which only six cubes fit.)
const VECTOR_PLANES: usize = 48;
/// The fewest planes of such a cube, where there are many.
const LEAST_VECTOR_PLANES: usize = 4;
/// Planes of a cube that reads row-major matrices.
const ROW_PLANES: usize = 8;
/// Rows of row-major matrices that a plane reads at a time: with fewer, more planes fit a processor.
const PLANE_ROWS: usize = 2;
/// Planes of a processor below which rows are split: with two loads of each on their way, 40 KB.
const WANTED_PLANES: usize = 40;

/// A normalisation by the root mean square, in front of a linear.
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm<'a> {
    /// Factors, `f32[columns]`.
    pub scale: Option<&'a Span>,
    /// Added to every factor.
    pub scale_offset: f32,
    /// Added to the mean of the squares.
    pub epsilon: f32,
}

/// Matrices of one format, layout and number of columns, with what surrounds them: see [`ir::op::Linear`].
#[derive(Clone, Copy, Debug)]
pub struct Linear<'a> {
    /// `[tokens, columns]`, or in that order.
    pub x: &'a Span,
    /// Of `x`: f32, or bf16 where [`Gpu::takes_narrow()`] says so.
    pub element: DType,
    /// How `x` lies where that is not row after row: in bf16, as [`Gpu::right_operands()`] says.
    pub order: Option<RightOperands>,
    /// Rows of `x`: 1 to [`FLOAT_TOKENS`]; more in bf16, as [`Gpu::takes_narrow()`] says, and to [`MAX_FUSED_TOKENS`] of
    /// floats with small matrices.
    pub tokens: usize,
    /// Applied to `x` first, which is f32 then.
    pub norm: Option<RmsNorm<'a>>,
    /// What `x` is multiplied with.
    pub matrices: &'a [&'a Matrix],
    /// One for each matrix, `f32[rows]`.
    pub biases: &'a [Option<&'a Span>],
    /// Applied to the products.
    pub then: Then,
    /// Added to the only output, `f32[tokens, rows]`.
    pub residual: Option<&'a Span>,
    /// One for each matrix, or one for gate and up, `[tokens, rows]` of `made`. None of the inputs.
    pub outputs: &'a [&'a Span],
    /// Of the outputs: f32, or with `x` in bf16 any float that the device knows, where they are summed up with no others.
    pub made: DType,
    /// How the only output lies where that is not row after row, for as many tokens as `x` in its order: then it is made
    /// in bf16, and nothing is added to it.
    pub made_order: Option<RightOperands>,
    /// Where the only output is summed up with those of other GPUs: all of it is sent with flags.
    pub sum: Option<&'a Group>,
    /// What it asks for ahead at its end; of bf16 nothing is asked for, since memory does not idle then.
    pub ahead: &'a [Region],
}

impl Gpu {
    /// Queues a linear.
    ///
    /// # Errors
    /// When its parts do not fit together.
    pub fn linear(&self, linear: &Linear<'_>) -> Result<()> {
        linear.check()?;
        let first = linear.matrices[0];
        ensure!(
            linear.order.is_none()
                || linear.is_narrow() && linear.order == self.right_operands(first, linear.tokens),
            "{} rows of {} do not lie for a matrix in {} as {:?}",
            linear.tokens,
            linear.element,
            first.format(),
            linear.order
        );
        if linear.is_narrow() {
            ensure!(
                self.takes_narrow(first, linear.tokens) && linear.norm.is_none(),
                "a matrix of {} columns in {} is not multiplied with {} tokens of bf16 here",
                first.columns(),
                first.format(),
                linear.tokens
            );
            match linear.order {
                Some(operands) => self.multiply_groups(linear, operands),
                None => self.multiply_tiles(linear, self.tile_share(linear)),
            }
            return Ok(());
        }
        match first.layout() {
            _ if linear.tokens > FLOAT_TOKENS => {
                self.multiply_rows(linear, self.row_splits(linear))
            }
            _ if self.has_digits(linear) => self.multiply_blocks(linear),
            _ if self.has_portions(linear) => self.multiply_portions(linear),
            Layout::Panels => self.multiply_panels(linear),
            Layout::RowMajor => self.multiply_rows(linear, self.row_splits(linear)),
        }
        Ok(())
    }

    /// Whether a linear of that matrix takes activations of so many tokens in bf16, as a library would take them.
    pub fn takes_narrow(&self, matrix: &Matrix, tokens: usize) -> bool {
        self.multiplies(DType::Bf16)
            && product_format(matrix.format(), true) == Format::Bf16
            && tokens <= self.most_narrow(matrix)
            && matrix.columns().is_multiple_of(8)
    }

    /// The most tokens in bf16 that a matrix is multiplied with as it lies.
    pub fn most_narrow(&self, matrix: &Matrix) -> usize {
        most_fused_rows(matrix.format(), self.has_groups(matrix)) as usize
    }

    /// The most tokens of floats that matrices of one linear are better multiplied with as such.
    pub fn most_floats<'a>(&self, matrices: impl IntoIterator<Item = &'a Matrix> + Clone) -> usize {
        let has_groups = matrices.clone().into_iter().all(|matrix| self.has_groups(matrix));
        let held = |matrix: &Matrix| (matrix.format(), (matrix.rows() * matrix.columns()) as u64);
        most_float_rows(matrices.into_iter().map(held), has_groups) as usize
    }

    /// The most rows in bf16 that all of these matrices are multiplied with as they lie; `None` where one is not.
    pub fn most_narrow_of<'a>(
        &self,
        matrices: impl IntoIterator<Item = &'a Matrix> + Clone,
    ) -> Option<usize> {
        let most = matrices.clone().into_iter().map(|matrix| self.most_narrow(matrix)).min()?;
        matrices.into_iter().all(|matrix| self.takes_narrow(matrix, most)).then_some(most)
    }

    /// Whether a linear of f32 is one for matrix instructions: they take bf16, and columns in fours.
    fn has_portions(&self, linear: &Linear<'_>) -> bool {
        let first = linear.matrices[0];
        let fits = match (first.layout(), first.format()) {
            (Layout::Panels, Format::Q8 | Format::Q4 | Format::Bf16) => true,
            // One token needs a part of the instructions that a processor has time for, and no conversion.
            (Layout::RowMajor, Format::Bf16) | (Layout::Panels, Format::Bf12) => linear.tokens > 1,
            (_, Format::F32 | Format::F16)
            | (Layout::RowMajor, Format::Bf12 | Format::Q8 | Format::Q4) => false,
        };
        fits && first.columns().is_multiple_of(4) && self.multiplies(DType::Bf16)
    }

    /// Whether a linear with portions is one for matrix instructions of bytes, which more tokens than an operand holds
    /// would keep from waiting for memory: all rows must fit shared memory at once, with room for a second cube.
    fn has_digits(&self, linear: &Linear<'_>) -> bool {
        let first = linear.matrices[0];
        let panel = first.panel();
        let most = self.client.properties().hardware.max_shared_memory_size / 2;
        self.has_portions(linear)
            && matches!(first.format(), Format::Q8 | Format::Q4)
            && linear.tokens <= DIGIT_TOKENS
            && digit_bytes(linear.tokens, panel) <= most
    }

    fn multiply_blocks(&self, linear: &Linear<'_>) {
        let share = self.byte_share(linear);
        let shape = linear.shape_of_lanes(linear.tokens, share.bands, share.splits);
        let planes = share.planes();
        // SAFETY: the spans are as long as the shapes say, and the kernel stays within those.
        unsafe {
            bytes::multiply_blocks::launch_unchecked(
                &self.client,
                CubeCount::new_1d(linear.cubes(share.bands * PANEL)),
                CubeDim::new_1d((planes * rights::PLANE) as u32),
                read_size(share.panel.columns),
                linear.input(share.panel.padded()),
                linear.weights(),
                linear.outputs(),
                argument(linear.ahead),
                linear.epsilon(),
                linear.then,
                shape,
                share,
            );
        }
    }

    /// How the planes of a cube share its matrices, rows and columns: all cubes at a time where that leaves each enough
    /// planes, else cubes whose planes of other rows convert the same activations.
    fn byte_share(&self, linear: &Linear<'_>) -> ByteShare {
        let first = linear.matrices[0];
        let panel = first.panel();
        let matrices = linear.matrices_of_output();
        let of_processor = linear.cubes(PANEL).div_ceil(self.processors()) as usize;
        let planes = (BYTE_PLANES / of_processor).min(PANEL_PLANES);
        let (bands, splits) =
            if planes < 2 * matrices { (2, BYTE_SPLITS) } else { (1, planes / matrices) };
        // A processor's only cube has registers for more on its way. Portions of q4 have two blocks.
        let stages = match first.format() {
            _ if of_processor == 1 => 4,
            Format::Q4 => 2,
            Format::F32 | Format::F16 | Format::Bf16 | Format::Bf12 | Format::Q8 => 3,
        };
        ByteShare { panel, matrices, bands, splits, stages }
    }

    fn multiply_portions(&self, linear: &Linear<'_>) {
        let share = self.portion_share(linear);
        let shape = linear.shape_of_lanes(linear.tokens, share.bands, share.splits);
        // SAFETY: the spans are as long as the shapes say, and the kernel stays within those.
        unsafe {
            matrix::multiply_portions::launch_unchecked(
                &self.client,
                CubeCount::new_1d(linear.cubes(share.bands * PANEL)),
                CubeDim::new_2d(rights::PLANE as u32, (share.bands * share.splits) as u32),
                read_size(share.panel.columns),
                linear.input(share.covered()),
                linear.weights(),
                linear.outputs(),
                argument(linear.ahead),
                linear.epsilon(),
                linear.then,
                shape,
                share,
            );
        }
    }

    /// How the planes of a cube share its rows and their columns.
    fn portion_share(&self, linear: &Linear<'_>) -> Share {
        let first = linear.matrices[0];
        let wanted = 2 * self.processors();
        // Planes beside one another read the same activations, which few tokens have little of.
        let most_bands: &[usize] = if linear.tokens < WHOLE_TOKENS { &[] } else { &[4, 2] };
        let has_enough = |&&bands: &&usize| linear.cubes(bands * PANEL) >= wanted;
        let bands = most_bands.iter().find(has_enough).copied().unwrap_or(1);
        // Cubes that end at different times keep memory busy, where there are enough of them and where two fit the
        // registers of a processor. More tokens need more of those, and more time for what is on its way.
        let is_large = linear.cubes(bands * PANEL) < wanted || linear.tokens > WHOLE_TOKENS;
        let planes = if is_large { PANEL_PLANES } else { PANEL_PLANES / 2 };
        Share {
            panel: first.panel(),
            layout: first.layout(),
            bands,
            // The planes of a gate have twice as many loads on their way.
            splits: planes / linear.matrices_of_output() / bands,
            stages: if linear.tokens > WHOLE_TOKENS { 2 } else { 3 },
        }
    }

    fn multiply_panels(&self, linear: &Linear<'_>) {
        let first = linear.matrices[0];
        let panel = first.panel();
        let matrices = linear.matrices_of_output();
        let plane = self.plane() as usize;
        let cubes = linear.cubes(VECTOR);
        let of_processor = cubes.div_ceil(self.processors()) as usize;
        let planes = (VECTOR_PLANES / of_processor).clamp(LEAST_VECTOR_PLANES, PANEL_PLANES);
        let planes = planes / matrices * matrices;
        let slots = panel.vector_slots();
        let shape = Shape {
            tokens: linear.tokens,
            matrices,
            rows: panel.rows(),
            slots,
            groups: planes / matrices * plane / plane.max(slots),
            is_normed: linear.norm.is_some(),
            ..Shape::ONE
        };
        let share = PanelShare { panel, planes, plane };
        // SAFETY: the spans are as long as the shapes say, and the kernel stays within those.
        unsafe {
            panels::multiply_panels::launch_unchecked(
                &self.client,
                CubeCount::new_1d(cubes),
                CubeDim::new_1d((planes * plane) as u32),
                read_size(panel.columns),
                linear.input(panel.covered()),
                linear.weights(),
                linear.outputs(),
                argument(linear.ahead),
                linear.epsilon(),
                linear.then,
                shape,
                share,
            );
        }
    }

    fn multiply_rows(&self, linear: &Linear<'_>, splits: usize) {
        let first = linear.matrices[0];
        let matrices = linear.matrices_of_output();
        let tokens = linear.tokens.min(FLOAT_TOKENS);
        let share = RowShare {
            format: first.format(),
            columns: first.columns(),
            splits,
            bands: ROW_PLANES / splits,
            plane: self.plane() as usize,
            has_all_tokens: tokens == linear.tokens,
        };
        let shape = Shape {
            tokens,
            matrices,
            rows: PLANE_ROWS / matrices,
            slots: share.bands,
            groups: splits,
            is_normed: linear.norm.is_some(),
            ..Shape::ONE
        };
        // SAFETY: as above.
        unsafe {
            rows::multiply_rows::launch_unchecked(
                &self.client,
                CubeCount::new_2d(
                    linear.cubes(share.bands * shape.rows),
                    linear.tokens.div_ceil(tokens) as u32,
                ),
                CubeDim::new_2d(self.plane(), ROW_PLANES as u32),
                read_size(share.columns),
                linear.input(share.columns),
                linear.weights(),
                linear.outputs(),
                linear.tokens as u32,
                argument(linear.ahead),
                linear.epsilon(),
                linear.then,
                shape,
                share,
            );
        }
    }

    /// Planes that share the same rows of row-major matrices.
    fn row_splits(&self, linear: &Linear<'_>) -> usize {
        let rows: usize = linear.matrices.iter().map(|matrix| matrix.rows()).sum();
        let planes = rows.div_ceil(PLANE_ROWS);
        let wanted = WANTED_PLANES * self.processors() as usize;
        wanted.div_ceil(planes).next_power_of_two().min(ROW_PLANES)
    }
}

/// Whether a linear of that matrix takes up to [`MAX_FUSED_TOKENS`] tokens of floats, and not only [`FLOAT_TOKENS`].
pub fn takes_many_floats(matrix: &Matrix) -> bool {
    matrix.layout() == Layout::RowMajor && matrix.rows() * matrix.columns() <= MOST_SMALL_WEIGHTS
}
