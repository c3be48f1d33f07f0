//! Device memory that lasts no longer than an operation.

use anyhow::{Context as _, Result, ensure};
use ir::workspace::Workspace;

use super::memory::Memory;
use crate::kernels::gpu::device::Span;

/// What operations of one device need at most; one works at a time.
pub(super) struct Scratch {
    /// An operation's input as its matrices take it.
    pub(super) input: Span,
    /// A matrix, unpacked.
    pub(super) matrix: Span,
    /// Products that a gate is multiplied with; outputs of 16 bits that are made in f32 first; queries before
    /// attention; an expert's inner activations; what a movement brings.
    pub(super) inner: Span,
    /// What the splits of a context leave.
    pub(super) partial: Span,
}

impl Scratch {
    pub(super) fn new(space: &Workspace, memory: &mut Memory) -> Result<Self> {
        let mut take = |bytes| memory.take(bytes as usize).context("scratch memory");
        Ok(Self {
            input: take(space.input_bytes)?,
            matrix: take(space.matrix_bytes)?,
            inner: take(space.inner_bytes)?,
            partial: take(space.partial_bytes)?,
        })
    }

    /// The first bytes of a part of it.
    pub(super) fn first(span: &Span, bytes: usize) -> Result<Span> {
        ensure!(
            bytes <= span.bytes(),
            "an operation needs {bytes} of {} scratch bytes",
            span.bytes()
        );
        Ok(span.part(0, bytes))
    }
}
