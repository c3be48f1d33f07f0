//! A linear as arguments of its kernels.

use anyhow::{Result, bail, ensure};
use cubecl::prelude::{Float, Sequence, SequenceArg, Size, TensorMap, TensorMapArg, Tiled};
use ir::op::Then;
use ir::tensor::DType;

use super::input::InputLaunch;
use super::total::{Output, OutputLaunch, Shape};
use super::{FLOAT_TOKENS, Linear, MAX_FUSED_TOKENS, MAX_PACKED_TOKENS, matrix, takes_many_floats};
use crate::kernels::gpu::device::Span;
use crate::kernels::gpu::given::given;
use crate::kernels::gpu::matrix::Matrix;
use crate::kernels::gpu::portion::BLOCK;
use crate::kernels::gpu::warpgroup::RightOperands;
use crate::kernels::gpu::words::{Words, read_size};

impl<'a> Linear<'a> {
    pub(super) fn check(&self) -> Result<()> {
        let Some(first) = self.matrices.first() else { bail!("a linear has no matrix") };
        let most = match () {
            () if self.is_narrow() => MAX_PACKED_TOKENS,
            () if self.matrices.iter().all(|matrix| takes_many_floats(matrix)) => MAX_FUSED_TOKENS,
            () => FLOAT_TOKENS,
        };
        ensure!(
            (1..=most).contains(&self.tokens),
            "a launch takes 1 to {most} tokens, not {}",
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
        ensure!(
            self.made == DType::F32 || self.is_narrow() && self.sum.is_none(),
            "{} rows of {} make no outputs of {}",
            self.tokens,
            self.element,
            self.made
        );
        if let Some(made) = self.made_order {
            let fits = |order: RightOperands| {
                (order.stacks, order.tokens) == (made.stacks, made.tokens)
                    && self.made == DType::Bf16
                    && outputs == 1
                    && first.rows().is_multiple_of(BLOCK)
                    && self.residual.is_none()
            };
            ensure!(
                self.order.is_some_and(fits),
                "{outputs} outputs of {} features in {} do not lie as {made:?}",
                first.rows(),
                self.made
            );
        }
        if let Some(sum) = self.sum {
            sum.check()?;
            let count = self.tokens * first.rows();
            ensure!(
                outputs == 1 && sum.has_flags_for(count),
                "a linear of {outputs} outputs sends no {count} numbers by itself"
            );
        }
        Ok(())
    }

    /// The sums of cubes with matrix instructions, for `tokens` tokens each.
    pub(super) fn shape_of_lanes(&self, tokens: usize, bands: usize, splits: usize) -> Shape {
        Shape {
            tokens,
            matrices: self.matrices_of_output(),
            rows: matrix::LANE_ROWS,
            slots: bands * matrix::LANE_SLOTS,
            groups: splits,
            is_normed: self.norm.is_some(),
            ..Shape::ONE
        }
    }

    /// That of the norm, where there is one.
    pub(super) fn epsilon(&self) -> f32 {
        self.norm.map_or(0.0, |norm| norm.epsilon)
    }

    pub(super) fn is_narrow(&self) -> bool {
        self.element == DType::Bf16
    }

    pub(super) fn matrices_of_output(&self) -> usize {
        if matches!(self.then, Then::Gate(_)) { 2 } else { 1 }
    }

    /// Each output's matrices, with their biases.
    pub(super) fn parts(&self) -> impl Iterator<Item = (&'a [&'a Matrix], &'a [Option<&'a Span>])> {
        let matrices = self.matrices_of_output();
        self.matrices.chunks(matrices).zip(self.biases.chunks(matrices))
    }

    /// A cube for each `tile` rows of each output.
    pub(super) fn cubes(&self, tile: usize) -> u32 {
        self.parts().map(|(matrices, _)| matrices[0].rows().div_ceil(tile) as u32).sum()
    }

    pub(super) fn input<N: Size>(&self, covered: usize) -> InputLaunch<N> {
        let columns = self.matrices[0].columns();
        let size = read_size(columns);
        let vectors = |span: &Span, rows: usize| {
            span.argument(rows * columns / size, size * size_of::<f32>())
        };
        let scale = self.norm.and_then(|norm| norm.scale).map(|scale| vectors(scale, 1));
        let given = given([scale.is_some()]);
        InputLaunch::new(
            vectors(self.x, self.tokens),
            scale.into(),
            self.norm.map_or(0.0, |norm| norm.scale_offset),
            columns,
            covered,
            self.norm.is_some(),
            given,
        )
    }

    pub(super) fn weights(&self) -> SequenceArg<Sequence<Box<[Words]>>> {
        let loads = |matrix: &&Matrix| matrix.data().loads();
        self.parts().map(|(matrices, _)| matrices.iter().map(loads).collect()).collect()
    }

    /// The matrices as the device copies boxes of them.
    pub(super) fn boxes(
        &self,
        of: impl Fn(&Matrix) -> TensorMapArg<Tiled>,
    ) -> SequenceArg<Sequence<TensorMap<u32, Tiled>>> {
        self.parts()
            .map(|(matrices, _)| matrices.iter().map(|&matrix| of(matrix)).collect())
            .collect()
    }

    pub(super) fn outputs<F: Float>(&self) -> SequenceArg<Output<F>> {
        let floats = |span: &Span, count: usize| span.argument(count, size_of::<f32>());
        let others = [self.residual.is_some(), self.sum.is_some()];
        let output = |((matrices, biases), out): ((&[&Matrix], &[Option<&Span>]), &&Span)| {
            let rows = matrices[0].rows();
            let tokens = self.made_order.map_or(self.tokens, RightOperands::count);
            OutputLaunch::new(
                out.argument(tokens * rows, self.made.bytes() as usize),
                biases.iter().map(|bias| bias.map(|bias| floats(bias, rows)).into()).collect(),
                self.residual.map(|residual| floats(residual, self.tokens * rows)).into(),
                self.sum.map(|sum| sum.meeting(self.tokens * rows)).into(),
                rows,
                given(biases.iter().map(Option::is_some).chain(others)),
            )
        };
        self.parts().zip(self.outputs).map(output).collect()
    }
}
