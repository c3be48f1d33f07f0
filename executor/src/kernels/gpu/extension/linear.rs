//! Linears on tensors: few tokens in f32, more in bf16 or as matrices unpacked to f32.

use anyhow::{Result, bail, ensure};
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use ir::op::{NormKind, Then};
use ir::tensor::{DType as Stored, Format};

use super::cube::NormOperands;
use super::tensors::Operand;
use super::{Linear, Norm};
use crate::kernels::gpu::cast::Cast;
use crate::kernels::gpu::device::{ALIGNMENT, Gpu, Span};
use crate::kernels::gpu::epilogue::Epilogue;
use crate::kernels::gpu::linear::{self, FLOAT_TOKENS, RmsNorm};
use crate::kernels::gpu::matrix::{Layout, Matrix};
use crate::kernels::gpu::warpgroup::RightOperands;
use crate::kernels::launches;

/// A linear whose operands are known to fit.
struct Call<'a> {
    gpu: Gpu,
    x: Operand,
    norm: Option<(Norm<CubeBackend>, NormOperands)>,
    matrices: &'a [&'a Matrix],
    biases: Vec<Option<Operand>>,
    then: Then,
    residual: Option<Operand>,
    outputs: Vec<Span>,
}

/// The outputs of a linear.
pub(super) fn linear(linear: Linear<'_, CubeBackend>) -> Result<Vec<CubeTensor>> {
    let Linear { x, norm, matrices, biases, then, residual } = linear;
    let gpu = Gpu::of(&x);
    let x = Operand::floats(x)?;
    let Some(first) = matrices.first() else { bail!("a linear has no matrix") };
    let is_gated = matches!(then, Then::Gate(_));
    ensure!(
        matrices.iter().all(|matrix| matrix.columns() == x.columns),
        "{} features come to matrices of {} columns",
        x.columns,
        first.columns()
    );
    ensure!(biases.len() == matrices.len(), "a linear has no place for every bias");
    ensure!(!is_gated || matrices.len() == 2, "a gated linear has {} matrices", matrices.len());
    let made = if is_gated { &matrices[..1] } else { matrices };
    ensure!(residual.is_none() || made.len() == 1, "a term is added to {} outputs", made.len());
    let biases = biases.iter().zip(matrices).map(|(bias, matrix)| -> Result<Option<Operand>> {
        let bias = bias.clone().map(Operand::floats).transpose()?;
        bias.iter().try_for_each(|bias| bias.sized(matrix.rows(), "a bias").map(drop))?;
        Ok(bias)
    });
    let biases = biases.collect::<Result<Vec<_>>>()?;
    let residual = residual.map(Operand::floats).transpose()?;
    let term = residual.as_ref().map(|term| term.sized(x.rows * first.rows(), "what is added"));
    term.transpose()?;
    let norm = norm.map(|norm| NormOperands::of(&norm, x.columns).map(|weights| (norm, weights)));
    let norm = norm.transpose()?;
    let made = made.iter().map(|matrix| gpu.fresh(x.rows, matrix.rows(), DType::F32));
    let (tensors, outputs): (Vec<_>, Vec<_>) = made.unzip();
    let call = Call { gpu, x, norm, matrices, biases, then, residual, outputs };
    if call.x.rows <= FLOAT_TOKENS {
        call.few()?;
    } else if let Some(most) = call.rows_at_a_time() {
        for first in (0..call.x.rows).step_by(most) {
            call.narrow(first, most.min(call.x.rows - first))?;
        }
    } else {
        call.many()?;
    }
    Ok(tensors)
}

impl Call<'_> {
    /// Rows that are multiplied at a time in bf16: `None` where there are no matrix instructions for that, or parts of
    /// that many rows do not start where kernels want them.
    fn rows_at_a_time(&self) -> Option<usize> {
        let most = self.gpu.most_narrow_of(self.matrices.iter().copied())?.min(self.x.rows);
        let mut widths = self.matrices.iter().map(|matrix| matrix.rows()).chain([self.x.columns]);
        let is_aligned = |width: usize| (most * width * size_of::<f32>()).is_multiple_of(ALIGNMENT);
        (most == self.x.rows || widths.all(is_aligned)).then_some(most)
    }

    /// Few tokens, in f32.
    fn few(&self) -> Result<()> {
        let mut rms = None;
        let mut input = self.x.span.clone();
        if let Some((norm, weights)) = &self.norm {
            let weights = weights.norm(norm);
            if norm.kind == NormKind::Rms && norm.bias.is_none() {
                let (scale_offset, epsilon) = (norm.scale_offset, norm.epsilon);
                rms = Some(RmsNorm { scale: weights.scale, scale_offset, epsilon });
            } else {
                input = self.cast(0, self.x.rows, Format::F32, None)?;
            }
        }
        self.launch(0, self.x.rows, |_| Ok((input.clone(), Stored::F32, None)), rms)
    }

    /// Some tokens, in bf16.
    fn narrow(&self, first: usize, rows: usize) -> Result<()> {
        let input = |matrix: &Matrix| {
            let order = self.gpu.right_operands(matrix, rows);
            Ok((self.cast(first, rows, Format::Bf16, order)?, Stored::Bf16, order))
        };
        self.launch(first, rows, input, None)
    }

    /// One launch for neighbours of one kind, whose input `input` makes.
    fn launch(
        &self,
        start: usize,
        rows: usize,
        input: impl Fn(&Matrix) -> Result<(Span, Stored, Option<RightOperands>)>,
        norm: Option<RmsNorm<'_>>,
    ) -> Result<()> {
        let biases: Vec<_> =
            self.biases.iter().map(|bias| bias.as_ref().map(|bias| &bias.span)).collect();
        let outputs = self.outputs.iter().zip(self.matrices);
        let outputs: Vec<Span> =
            outputs.map(|(out, matrix)| part(out, matrix.rows(), start, rows)).collect();
        let residual =
            self.residual.as_ref().map(|term| part(&term.span, term.columns, start, rows));
        let kind = |matrix: &&Matrix| (matrix.format(), matrix.layout());
        for part in launches(self.matrices, self.then, kind) {
            let (x, element, order) = input(self.matrices[part.start])?;
            let spans: Vec<&Span> =
                outputs[part.start..part.end.min(outputs.len())].iter().collect();
            self.gpu.linear(&linear::Linear {
                x: &x,
                element,
                order,
                tokens: rows,
                norm,
                matrices: &self.matrices[part.clone()],
                biases: &biases[part],
                then: self.then,
                residual: residual.as_ref(),
                outputs: &spans,
                made: Stored::F32,
                made_order: None,
                sum: None,
                ahead: &[],
            })?;
        }
        Ok(())
    }

    /// Many tokens, in f32.
    fn many(&self) -> Result<()> {
        let tokens = self.x.rows;
        let input = match self.norm {
            Some(_) => self.cast(0, tokens, Format::F32, None)?,
            None => self.x.span.clone(),
        };
        let product = |matrix: &Matrix| -> Result<Span> {
            let (rows, columns) = (matrix.rows(), matrix.columns());
            let unpacked = match matrix.layout() {
                Layout::RowMajor => matrix.clone(),
                Layout::Panels => {
                    let bytes = Layout::RowMajor.bytes(Format::F32, rows, columns)?;
                    self.gpu.unpack(matrix, Format::F32, &self.gpu.scratch(bytes))?
                }
            };
            let out = self.gpu.scratch(tokens * rows * size_of::<f32>());
            self.gpu.gemm(&input, tokens, &unpacked, &out)?;
            Ok(out)
        };
        let bias = |index: usize| self.biases[index].as_ref().map(|bias| &bias.span);
        let is_gated = matches!(self.then, Then::Gate(_));
        for (index, out) in self.outputs.iter().enumerate() {
            let products = product(self.matrices[index])?;
            let up = is_gated.then(|| product(self.matrices[1])).transpose()?;
            let biases = [bias(index), if is_gated { bias(1) } else { None }];
            self.gpu.epilogue(&Epilogue {
                products: Some(&products),
                up: up.as_ref(),
                element: Stored::F32,
                tokens,
                features: self.matrices[index].rows(),
                biases: &biases[..1 + usize::from(is_gated)],
                then: self.then,
                residual: self.residual.as_ref().map(|term| &term.span),
                out,
            })?;
        }
        Ok(())
    }

    /// Some rows of the input, normalised, in another format and order.
    fn cast(
        &self,
        first: usize,
        rows: usize,
        format: Format,
        order: Option<RightOperands>,
    ) -> Result<Span> {
        let columns = self.x.columns;
        let made = order.map_or(rows, RightOperands::count);
        let element_bytes = if format == Format::F32 { 4 } else { 2 };
        let out = self.gpu.scratch(made * columns * element_bytes);
        let x = part(&self.x.span, columns, first, rows);
        let norm = self.norm.as_ref().map(|(norm, weights)| weights.norm(norm));
        let plain = Cast::plain(&x, [rows, columns], format, &out);
        self.gpu.cast(&Cast { norm, order, ..plain })?;
        Ok(out)
    }
}

/// Some rows of floats.
fn part(span: &Span, columns: usize, first: usize, rows: usize) -> Span {
    let row = columns * size_of::<f32>();
    span.part(first * row, rows * row)
}
