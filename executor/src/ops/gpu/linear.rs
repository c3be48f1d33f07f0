//! Linears: few tokens by kernels that read the matrices as they lie, many by the vendor's library; without it in parts
//! of some tokens, or in f32 where there are no matrix instructions.

use std::slice;

use anyhow::{Context as _, Result, ensure};
use ir::id::WeightId;
use ir::op::{self, NormKind, Op, Then};
use ir::tensor::{DType, Format};
use ir::workspace::{piece_rows, product_format};

use super::scratch::Scratch;
use super::state::{Operand, Operands, State};
use crate::kernels::gpu::cast::Cast;
use crate::kernels::gpu::device::{ALIGNMENT, Gpu, Span};
use crate::kernels::gpu::epilogue::Epilogue;
use crate::kernels::gpu::linear::{
    FLOAT_TOKENS, Linear, MAX_FUSED_TOKENS, RmsNorm, takes_many_floats,
};
use crate::kernels::gpu::matrix::{Layout, Matrix};
use crate::kernels::gpu::vendor::Product;
use crate::kernels::gpu::warpgroup::RightOperands;
use crate::kernels::launches;
use crate::ops::Scope;

impl State {
    /// The outputs of a linear.
    pub(super) fn linear(
        &mut self,
        op: &Op,
        linear: &op::Linear,
        scope: Scope<'_>,
        operands: &Operands,
    ) -> Result<()> {
        let x = operands.inputs.first().context("the input is missing")?;
        let residual = match (linear.residual, operands.inputs.get(1)) {
            (false, _) => None,
            (true, residual) => Some(residual.context("the residual is missing")?),
        };
        let fetched = self.fetched(op, scope, operands)?;
        let matrix = |id: &WeightId| match fetched.get(id) {
            None => self.weights.matrix(*id).cloned(),
            Some(span) => {
                let weight = &scope.plan.weights[*id];
                let [rows, columns] = [0, 1].map(|axis| weight.shape[axis] as usize);
                Matrix::new(weight.format, Layout::Panels, rows, columns, span.clone())
            }
        };
        let matrices = linear.weights.iter().map(matrix).collect::<Result<Vec<Matrix>>>()?;
        ensure!(matrices.len() == linear.biases.len(), "a linear has no place for every bias");
        let outputs = &operands.outputs;
        let made = if matches!(linear.then, Then::Gate(_)) { 1 } else { matrices.len() };
        ensure!(outputs.len() == made, "a linear writes {} outputs", outputs.len());
        let own = self.own_element(x.rows, x.dtype, linear, &matrices, scope);
        let most = self.rows_at_a_time(x, residual, outputs, &matrices).filter(|_| own.is_none());
        // Kernels that take floats, and those that stand in for the library, write floats.
        let writes_floats = match own {
            Some(element) => element == DType::F32,
            None => most.is_none() && self.vendor.is_none(),
        };
        let narrow = outputs.first().filter(|out| writes_floats && out.dtype != DType::F32);
        let wide = narrow.map(|out| self.wide(linear, out)).transpose()?;
        let targets = wide.as_ref().map_or(&outputs[..], slice::from_ref);
        if let Some(element) = own {
            self.few(linear, x, element, residual, &matrices, targets, operands)?;
        } else if let Some(most) = most {
            for first in (0..x.rows).step_by(most) {
                let part = |operand: &Operand| operand.rows_from(first, most);
                let (x, residual) = (part(x), residual.map(part));
                let targets: Vec<Operand> = targets.iter().map(part).collect();
                let alone = Operands::default();
                self.few(linear, &x, DType::Bf16, residual.as_ref(), &matrices, &targets, &alone)?;
            }
        } else {
            let with_unpacked = linear.weights.iter().zip(matrices);
            let unpacked = |(&id, matrix)| self.weights.unpacked(id).cloned().unwrap_or(matrix);
            let matrices: Vec<Matrix> = with_unpacked.map(unpacked).collect();
            self.many(linear, x, residual, &matrices, targets)?;
        }
        match (&wide, narrow) {
            (Some(wide), Some(out)) => self.gpu.cast(&cast(wide, out.dtype.into(), &out.span)),
            _ => Ok(()),
        }
    }

    /// Where an output is made in f32 first: in the scratch for inner values, behind what its gate is multiplied with.
    fn wide(&self, linear: &op::Linear, out: &Operand) -> Result<Operand> {
        let &Operand { rows, columns, .. } = out;
        let bytes = (rows * columns * size_of::<f32>()).next_multiple_of(ALIGNMENT);
        let has_up = self.vendor.is_none() && matches!(linear.then, Then::Gate(_));
        let start = if has_up { bytes } else { 0 };
        let span = Scratch::first(&self.scratch.inner, start + bytes)?.part(start, bytes);
        Ok(Operand { span, dtype: DType::F32, rows, columns, order: None })
    }

    /// The type in which the GPU's own kernels take `rows` rows of type `dtype` with these matrices of a linear as they
    /// lie; `None` where the vendor's library multiplies them, or what stands in for it.
    pub(super) fn own_element<'a>(
        &self,
        rows: usize,
        dtype: DType,
        linear: &op::Linear,
        matrices: impl IntoIterator<Item = &'a Matrix> + Clone,
        scope: Scope<'_>,
    ) -> Option<DType> {
        let takes_narrow = |matrix: &Matrix| self.gpu.takes_narrow(matrix, rows);
        // What is held unpacked as well the library reads as it is in prompts; decodes are forecast without.
        let is_unpacked = |&id: &WeightId| self.weights.unpacked(id).is_some();
        let is_own = rows <= MAX_FUSED_TOKENS
            || scope.batch.is_decode()
            || !linear.weights.iter().any(is_unpacked);
        let are_narrow = is_own && matrices.clone().into_iter().all(takes_narrow);
        let are_floats = !are_narrow || rows <= self.gpu.most_floats(matrices.clone());
        match rows {
            ..=FLOAT_TOKENS if dtype == DType::F32 && are_floats => Some(DType::F32),
            _ if are_narrow => Some(DType::Bf16),
            ..=MAX_FUSED_TOKENS
                if dtype == DType::F32 && matrices.into_iter().all(takes_many_floats) =>
            {
                Some(DType::F32)
            }
            _ => None,
        }
    }

    /// Rows that are multiplied at a time where there is no vendor's library: as many as matrix instructions take with
    /// matrices as they lie. `None` where there are none for them, or parts of that many rows do not start where
    /// kernels want them.
    fn rows_at_a_time(
        &self,
        x: &Operand,
        residual: Option<&Operand>,
        outputs: &[Operand],
        matrices: &[Matrix],
    ) -> Option<usize> {
        let most = self.gpu.most_narrow_of(matrices)?;
        let is_aligned = |operand: &Operand| (most * operand.row_bytes()).is_multiple_of(ALIGNMENT);
        let mut operands = [x].into_iter().chain(residual).chain(outputs);
        (self.vendor.is_none() && operands.all(is_aligned)).then_some(most)
    }

    #[expect(clippy::too_many_arguments, reason = "they are a linear's parts")]
    fn few(
        &self,
        op: &op::Linear,
        x: &Operand,
        element: DType,
        residual: Option<&Operand>,
        matrices: &[Matrix],
        outputs: &[Operand],
        operands: &Operands,
    ) -> Result<()> {
        let mut input = x.span.clone();
        let is_narrow = element == DType::Bf16;
        let mut rms = None;
        match &op.norm {
            _ if is_narrow => (),
            None => (),
            Some(norm) if norm.kind == NormKind::Rms && norm.bias.is_none() => {
                let scale = self.weights.optional(norm.scale)?;
                let (scale_offset, epsilon) = (norm.scale_offset, norm.epsilon);
                rms = Some(RmsNorm { scale, scale_offset, epsilon });
            }
            Some(_) => input = self.cast_input(op, x, Format::F32, None)?,
        }
        // How the input lies as it was narrowed last, or as the linear before made it.
        let mut narrowed = x.order.map(Some);
        let biases = self.biases(op)?;
        let all: Vec<&Matrix> = matrices.iter().collect();
        for part in launches(&all, op.then, |matrix| (matrix.format(), matrix.layout())) {
            let made = &outputs[part.start..part.end.min(outputs.len())];
            let first = made.first().context("a linear writes nothing")?;
            let made_order = first.order;
            let spans: Vec<&Span> = made.iter().map(|out| &out.span).collect();
            let order = self.gpu.right_operands(all[part.start], x.rows).filter(|_| is_narrow);
            if is_narrow && narrowed != Some(order) {
                ensure!(x.order.is_none(), "the input lies as {:?}, not as {order:?}", x.order);
                input = self.cast_input(op, x, Format::Bf16, order)?;
                narrowed = Some(order);
            }
            self.gpu.linear(&Linear {
                x: &input,
                element,
                order,
                tokens: x.rows,
                norm: rms,
                matrices: &all[part.clone()],
                biases: &biases[part.clone()],
                then: op.then,
                residual: residual.map(|residual| &residual.span),
                outputs: &spans,
                made: if made_order.is_some() { DType::Bf16 } else { first.dtype },
                made_order,
                sum: operands.sum.as_ref(),
                ahead: if part.end == all.len() { &operands.ahead } else { &[] },
            })?;
        }
        Ok(())
    }

    fn many(
        &mut self,
        op: &op::Linear,
        x: &Operand,
        residual: Option<&Operand>,
        matrices: &[Matrix],
        outputs: &[Operand],
    ) -> Result<()> {
        let is_gated = matches!(op.then, Then::Gate(_));
        let mut converted: Option<(Format, Span)> = None;
        for (index, matrix) in matrices.iter().enumerate() {
            let format = product_format(matrix.format(), self.vendor.is_some());
            let input = match &converted {
                Some((held, span)) if *held == format => span.clone(),
                _ => self.cast_input(op, x, format, None)?,
            };
            converted = Some((format, input.clone()));
            let out = &outputs[if is_gated { 0 } else { index }];
            // Only the vendor's library adds a term on the way.
            let is_direct = op.then == Then::Nothing
                && op.biases[index].is_none()
                && (residual.is_none() || self.vendor.is_some());
            // What follows the products takes them where they lie, and those of `up` from beside them.
            let is_up = is_gated && index == 1;
            let target = if is_up { self.beside(out)? } else { out.clone() };
            let term = residual.filter(|_| is_direct).map(|residual| residual.span.clone());
            ensure!(
                term.is_none() || out.dtype == DType::F32,
                "a residual is added to products in f32, not to {}",
                out.dtype
            );
            self.product(&input, matrix, format, term.as_ref(), &target)?;
            if is_direct || (is_gated && !is_up) {
                continue;
            }
            let biases = self.biases(op)?;
            let call = Epilogue {
                products: None,
                up: is_up.then_some(&target.span),
                element: out.dtype,
                tokens: x.rows,
                features: matrix.rows(),
                biases: if is_gated { &biases } else { &biases[index..=index] },
                then: op.then,
                residual: residual.map(|residual| &residual.span),
                out: &out.span,
            };
            self.gpu.epilogue(&call)?;
        }
        Ok(())
    }

    /// Room for the products that those of a gate, in `out`, are multiplied with.
    fn beside(&self, out: &Operand) -> Result<Operand> {
        let bytes = out.rows * out.columns * out.dtype.bytes() as usize;
        let span = Scratch::first(&self.scratch.inner, bytes.next_multiple_of(ALIGNMENT))?;
        Ok(Operand { span, ..out.clone() })
    }

    /// `out = x · matrixᵀ (+ term)`; a term, and an output of 16 bits, are for the vendor's library.
    fn product(
        &mut self,
        x: &Span,
        matrix: &Matrix,
        format: Format,
        term: Option<&Span>,
        out: &Operand,
    ) -> Result<()> {
        let (inputs, outputs) = (matrix.columns(), matrix.rows());
        let (tokens, made, out) = (out.rows, out.dtype, &out.span);
        let Some(vendor) = &self.vendor else {
            let unpacked = match matrix.layout() {
                Layout::RowMajor => None,
                Layout::Panels => Some(unpack(&self.gpu, &self.scratch, matrix, format)?),
            };
            return self.gpu.gemm(x, tokens, unpacked.as_ref().unwrap_or(matrix), out);
        };
        let element = format.float().context("a product is made of floats")?;
        let multiply = |matrix: &Matrix, out: &Span, term: Option<&Span>| {
            let (w, stride, outputs) = (matrix.data(), outputs, matrix.rows());
            let product =
                Product { x, w, element, term, out, made, stride, tokens, inputs, outputs };
            vendor.multiply(&product)
        };
        if matrix.layout() == Layout::RowMajor {
            return multiply(matrix, out, term);
        }
        let piece = piece_rows(outputs as u32, inputs as u32) as usize;
        for first in (0..outputs).step_by(piece) {
            let rows = matrix.rows_from(first, piece.min(outputs - first))?;
            let rows = unpack(&self.gpu, &self.scratch, &rows, format)?;
            let from = |span: &Span| {
                let start = first * made.bytes() as usize;
                span.part(start, span.bytes() - start)
            };
            multiply(&rows, &from(out), term.map(from).as_ref())?;
        }
        Ok(())
    }

    /// `x`, normalised, in the format and the order that the linear wants.
    fn cast_input(
        &self,
        op: &op::Linear,
        x: &Operand,
        format: Format,
        order: Option<RightOperands>,
    ) -> Result<Span> {
        if format.float() == Some(x.dtype) && op.norm.is_none() && order.is_none() {
            return Ok(x.span.clone());
        }
        let rows = order.map_or(x.rows, RightOperands::count);
        let bytes = Layout::RowMajor.bytes(format, rows, x.columns)?;
        let out = Scratch::first(&self.scratch.input, bytes)?;
        let norm = op.norm.as_ref().map(|norm| self.norm_weights(norm)).transpose()?;
        self.gpu.cast(&Cast { norm, order, ..cast(x, format, &out) })?;
        Ok(out)
    }

    fn biases(&self, op: &op::Linear) -> Result<Vec<Option<&Span>>> {
        op.biases.iter().map(|&bias| self.weights.optional(bias)).collect()
    }
}

/// `x` in another format.
pub(super) fn cast<'a>(x: &'a Operand, format: Format, out: &'a Span) -> Cast<'a> {
    let element = x.dtype;
    Cast { element, ..Cast::plain(&x.span, [x.rows, x.columns], format, out) }
}

/// A packed matrix, row after row.
fn unpack(gpu: &Gpu, scratch: &Scratch, matrix: &Matrix, format: Format) -> Result<Matrix> {
    let bytes = Layout::RowMajor.bytes(format, matrix.rows(), matrix.columns())?;
    gpu.unpack(matrix, format, &Scratch::first(&scratch.matrix, bytes)?)
}
