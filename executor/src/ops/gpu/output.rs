//! What a run's caller gets: all logits, or lists of the most likely tokens while the logits stay on the device.

use std::borrow::Cow;

use anyhow::{Context as _, Result};
use ir::id::BufferId;
use ir::plan::Program;
use ir::smallvec;
use ir::tensor::{DType, Dim, TensorType};
use ir::workspace::shortlist::{self, LIST_WORDS};

use super::scratch::Scratch;
use super::state::State;
use crate::kernels::gpu::device::Span;
use crate::ops::Scope;

/// The type of what leaves the device of a buffer that others, or the caller, read.
pub(super) fn sent_type<'a>(
    schedule: &'a Program,
    buffer: BufferId,
    scope: Scope<'_>,
) -> Cow<'a, TensorType> {
    let ty = &schedule.buffers[buffer].ty;
    if is_listed(buffer, schedule, scope) {
        let shape = smallvec![Dim::Rows, Dim::Fixed(LIST_WORDS)];
        Cow::Owned(TensorType { dtype: DType::F32, shape })
    } else {
        Cow::Borrowed(ty)
    }
}

fn is_listed(buffer: BufferId, schedule: &Program, scope: Scope<'_>) -> bool {
    buffer == schedule.output
        && scope.batch.inverse_temperatures().is_some()
        && shortlist::is_listed(scope.plan.model.vocabulary)
}

impl State {
    /// What is sent of a buffer, after queueing what makes it.
    pub(super) fn queue_sent(
        &self,
        schedule: &Program,
        program: usize,
        buffer: BufferId,
        scope: Scope<'_>,
    ) -> Result<Span> {
        let operand = self.operand(schedule, program, buffer, scope)?;
        if !is_listed(buffer, schedule, scope) {
            return Ok(operand.span);
        }
        let (rows, vocabulary) = (operand.rows, operand.columns);
        let bytes = shortlist::bytes(rows as u32, vocabulary as u32) as usize;
        let scratch = Scratch::first(&self.scratch.inner, bytes).context("lists of tokens")?;
        let inverse_temperatures = self.inputs.inverse_temperatures();
        Ok(self.gpu.shortlist(&operand.span, [rows, vocabulary], &inverse_temperatures, &scratch))
    }
}
