//! A few tokens through matrices that share their input, with what surrounds them, in one launch.
//!
//! The limit is how fast the matrices are read, so every kernel keeps many independent loads on their way.
//! A root-mean-square norm in front costs nothing: its factors are multiplied with the inputs, and what they are
//! divided by is a factor of the sums.

#![expect(unsafe_code, reason = "kernels are launched without checks of every index")]

pub(super) mod input;
pub(super) mod panels;
pub(super) mod product;
pub(super) mod rows;
pub(super) mod total;

#[cfg(test)]
pub(super) mod tests;

use anyhow::{Result, bail, ensure};
use cubecl::prelude::{CubeCount, CubeDim, Sequence, SequenceArg, Size};
use ir::op::Then;

use self::input::InputLaunch;
use self::rows::RowShare;
use self::total::{Output, OutputLaunch, Shape};
use super::ahead::{Region, argument};
use super::device::{Gpu, Span};
use super::matrix::{Layout, Matrix};
use super::panel::Panel;
use super::words::{Words, read_size};
use crate::kernels::cpu::pack::PANEL;

/// Tokens that one launch takes at most: with more, sums no longer fit a unit's registers.
pub const MAX_TOKENS: usize = ir::workspace::UNPACKED_ROWS as usize;

/// Planes that share a panel: with a task of each of their units on its way, 32 KB. Memory that delivers
/// 4.8 TB/s after about 0.7 µs to each of 132 processors needs 25 KB from each.
pub(super) const PANEL_PLANES: usize = 16;
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
    /// `f32[tokens, columns]`.
    pub x: &'a Span,
    /// Rows of `x`: 1 to [`MAX_TOKENS`].
    pub tokens: usize,
    /// Applied to `x` first.
    pub norm: Option<RmsNorm<'a>>,
    /// What `x` is multiplied with.
    pub matrices: &'a [&'a Matrix],
    /// One for each matrix, `f32[rows]`.
    pub biases: &'a [Option<&'a Span>],
    /// Applied to the products.
    pub then: Then,
    /// Added to the only output, `f32[tokens, rows]`.
    pub residual: Option<&'a Span>,
    /// One for each matrix, or one for gate and up, `f32[tokens, rows]`. None of the inputs.
    pub outputs: &'a [&'a Span],
    /// What it asks for ahead at its end.
    pub ahead: &'a [Region],
}

impl Gpu {
    /// Queues a linear.
    ///
    /// # Errors
    /// When its parts do not fit together.
    pub fn linear(&self, linear: &Linear<'_>) -> Result<()> {
        linear.check()?;
        match linear.matrices[0].layout() {
            Layout::Panels => self.multiply_panels(linear),
            Layout::RowMajor => self.multiply_rows(linear, self.row_splits(linear)),
        }
        Ok(())
    }

    fn multiply_panels(&self, linear: &Linear<'_>) {
        let first = linear.matrices[0];
        let panel = Panel { format: first.format(), columns: first.columns() };
        let matrices = linear.matrices_of_output();
        let plane = self.plane() as usize;
        let cubes = linear.cubes(PANEL);
        // A processor with one cube or two wants large ones, whose units have registers for one token.
        let is_sparse = cubes < 2 * self.processors() && linear.tokens == 1;
        let planes = if is_sparse { 2 * PANEL_PLANES } else { PANEL_PLANES };
        // The units of a gate have twice as many loads on their way.
        let units = planes / matrices * plane;
        let shape = Shape {
            tokens: linear.tokens,
            matrices,
            rows: panel.rows(),
            slots: panel.slots(),
            groups: units / plane.max(panel.slots()),
            is_normed: linear.norm.is_some(),
        };
        // SAFETY: the spans are as long as the shapes say, and the kernel stays within those.
        unsafe {
            panels::multiply_panels::launch_unchecked(
                &self.client,
                CubeCount::new_1d(cubes),
                CubeDim::new_1d(units as u32),
                read_size(panel.columns),
                linear.input(panel.covered()),
                linear.weights(),
                linear.outputs(),
                argument(linear.ahead),
                linear.norm.map_or(0.0, |norm| norm.epsilon),
                linear.then,
                shape,
                panel,
                plane,
            );
        }
    }

    fn multiply_rows(&self, linear: &Linear<'_>, splits: usize) {
        let first = linear.matrices[0];
        let matrices = linear.matrices_of_output();
        let share = RowShare {
            format: first.format(),
            columns: first.columns(),
            splits,
            bands: ROW_PLANES / splits,
            plane: self.plane() as usize,
        };
        let shape = Shape {
            tokens: linear.tokens,
            matrices,
            rows: PLANE_ROWS / matrices,
            slots: share.bands,
            groups: splits,
            is_normed: linear.norm.is_some(),
        };
        // SAFETY: as above.
        unsafe {
            rows::multiply_rows::launch_unchecked(
                &self.client,
                CubeCount::new_1d(linear.cubes(share.bands * shape.rows)),
                CubeDim::new_2d(self.plane(), ROW_PLANES as u32),
                read_size(share.columns),
                linear.input(share.columns),
                linear.weights(),
                linear.outputs(),
                argument(linear.ahead),
                linear.norm.map_or(0.0, |norm| norm.epsilon),
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

impl<'a> Linear<'a> {
    fn check(&self) -> Result<()> {
        let Some(first) = self.matrices.first() else { bail!("a linear has no matrix") };
        ensure!(
            (1..=MAX_TOKENS).contains(&self.tokens),
            "a launch takes 1 to {MAX_TOKENS} tokens, not {}",
            self.tokens
        );
        for matrix in self.matrices {
            ensure!(
                (matrix.format(), matrix.layout(), matrix.columns())
                    == (first.format(), first.layout(), first.columns()),
                "the matrices of one launch differ in format, layout or columns"
            );
        }
        ensure!(self.biases.len() == self.matrices.len(), "every matrix has its bias or none");
        if let Then::Gate(_) = self.then {
            ensure!(
                self.matrices.len() == 2 && self.matrices[1].rows() == first.rows(),
                "a gate takes two matrices of one shape"
            );
        }
        let outputs = self.matrices.len() / self.matrices_of_output();
        ensure!(
            self.outputs.len() == outputs,
            "{} spans for {outputs} outputs",
            self.outputs.len()
        );
        ensure!(self.residual.is_none() || outputs == 1, "a residual is added to one output");
        Ok(())
    }

    fn matrices_of_output(&self) -> usize {
        if matches!(self.then, Then::Gate(_)) { 2 } else { 1 }
    }

    /// Each output's matrices, with their biases.
    fn parts(&self) -> impl Iterator<Item = (&'a [&'a Matrix], &'a [Option<&'a Span>])> {
        let matrices = self.matrices_of_output();
        self.matrices.chunks(matrices).zip(self.biases.chunks(matrices))
    }

    /// A cube for each `tile` rows of each output.
    fn cubes(&self, tile: usize) -> u32 {
        self.parts().map(|(matrices, _)| matrices[0].rows().div_ceil(tile) as u32).sum()
    }

    fn input<N: Size>(&self, covered: usize) -> InputLaunch<N> {
        let columns = self.matrices[0].columns();
        let size = read_size(columns);
        let vectors = |span: &Span, rows: usize| {
            span.argument(rows * columns / size, size * size_of::<f32>())
        };
        let scale = self.norm.and_then(|norm| norm.scale).map(|scale| vectors(scale, 1));
        InputLaunch::new(
            vectors(self.x, self.tokens),
            scale.into(),
            self.norm.map_or(0.0, |norm| norm.scale_offset),
            columns,
            covered,
            self.norm.is_some(),
        )
    }

    fn weights(&self) -> SequenceArg<Sequence<Box<[Words]>>> {
        let loads = |matrix: &&Matrix| matrix.data().loads();
        self.parts().map(|(matrices, _)| matrices.iter().map(loads).collect()).collect()
    }

    fn outputs(&self) -> SequenceArg<Output> {
        let floats = |span: &Span, count: usize| span.argument(count, size_of::<f32>());
        let output = |((matrices, biases), out): ((&[&Matrix], &[Option<&Span>]), &&Span)| {
            let rows = matrices[0].rows();
            OutputLaunch::new(
                floats(out, self.tokens * rows),
                biases.iter().map(|bias| bias.map(|bias| floats(bias, rows)).into()).collect(),
                self.residual.map(|residual| floats(residual, self.tokens * rows)).into(),
                rows,
            )
        };
        self.parts().zip(self.outputs).map(output).collect()
    }
}
