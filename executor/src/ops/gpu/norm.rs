//! Norms that stand alone, rows that are picked, and elementwise operations.

use anyhow::{Context as _, Result};
use ir::id::WeightId;
use ir::op::{self, Activation, Then};
use ir::tensor::{DType, Format};

use super::state::{Operand, State};
use crate::kernels::gpu::cast::{Cast, Norm};
use crate::kernels::gpu::device::Span;
use crate::kernels::gpu::epilogue::Epilogue;
use crate::kernels::gpu::rows::Gather;

impl State {
    /// `norm(x)`, or `norm(x) + residual`.
    pub(super) fn norm(
        &self,
        norm: &op::Norm,
        x: &Operand,
        residual: Option<&Operand>,
        out: &Operand,
    ) -> Result<()> {
        let call = Cast {
            x: &x.span,
            element: DType::F32,
            tokens: x.rows,
            features: x.columns,
            norm: Some(self.norm_weights(norm)?),
            residual: residual.map(|residual| &residual.span),
            format: Format::F32,
            order: None,
            out: &out.span,
        };
        self.gpu.cast(&call)
    }

    /// A norm with its weights.
    pub(super) fn norm_weights<'a>(&'a self, norm: &op::Norm) -> Result<Norm<'a>> {
        Ok(Norm {
            kind: norm.kind,
            scale: self.weights.optional(norm.scale)?,
            bias: self.weights.optional(norm.bias)?,
            epsilon: norm.epsilon,
            scale_offset: norm.scale_offset,
        })
    }

    /// `activation(x)`, or `activation(x) · up`.
    pub(super) fn activate(
        &self,
        kind: Activation,
        x: &Operand,
        up: Option<&Operand>,
        out: &Operand,
    ) -> Result<()> {
        let call = Epilogue {
            products: Some(&x.span),
            up: up.map(|up| &up.span),
            element: DType::F32,
            tokens: x.rows,
            features: x.columns,
            biases: &[None, None][..1 + usize::from(up.is_some())],
            then: if up.is_some() { Then::Gate(kind) } else { Then::Activate(kind) },
            residual: None,
            out: &out.span,
        };
        self.gpu.epilogue(&call)
    }

    /// Rows of a table, in f32.
    pub(super) fn gather(
        &self,
        table: WeightId,
        rows: &Span,
        offset: u32,
        scale: f32,
        base: Option<&Span>,
        out: &Operand,
    ) -> Result<()> {
        let call = Gather { rows, offset, scale, base, count: out.rows, features: out.columns };
        if let Some(table) = self.tables.get(&table) {
            return self.gpu.gather_reached(table.reached(), &call, &out.span);
        }
        let table = self.weights.matrix(table).context("the table of rows")?;
        self.gpu.gather(table, &call, &out.span)
    }

    /// The wanted rows of `x`.
    pub(super) fn select_rows(&self, x: &Operand, out: &Operand) {
        let wanted = self.inputs.wanted();
        let call = Gather {
            rows: &wanted,
            offset: 0,
            scale: 1.0,
            base: None,
            count: out.rows,
            features: out.columns,
        };
        self.gpu.select(&x.span, x.rows, &call, &out.span);
    }
}
