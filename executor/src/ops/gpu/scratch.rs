//! Device memory that lasts no longer than an operation.

use anyhow::{Context as _, Result, ensure};
use ir::id::{BufferId, DeviceId};
use ir::op::{Attention, Linear, Op, Products, Then};
use ir::plan::{Action, Plan, Program};
use ir::tensor::Format;

use crate::kernels::gpu::device::{ALIGNMENT, Gpu, Span};
use crate::kernels::gpu::experts::workspace_bytes;
use crate::kernels::gpu::linear::MAX_TOKENS;

/// What operations of one device need at most; one works at a time.
pub(super) struct Scratch {
    /// An operation's input as its matrices take it.
    pub(super) input: Span,
    /// A matrix, unpacked.
    pub(super) matrix: Span,
    /// Products before what follows them; queries before attention; an expert's inner activations; what a
    /// movement brings.
    pub(super) inner: Span,
    /// What the splits of a context leave.
    pub(super) partial: Span,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sizes {
    input: usize,
    matrix: usize,
    inner: usize,
    partial: usize,
}

impl Scratch {
    pub(super) fn new(plan: &Plan, device: DeviceId, gpu: &Gpu, has_vendor: bool) -> Result<Self> {
        let partial = |op: &Attention, tokens| gpu.decode_workspace_bytes(op, tokens);
        let sizes = Sizes::of(plan, device, has_vendor, partial);
        let take = |bytes| gpu.allocate(bytes).context("scratch memory");
        Ok(Self {
            input: take(sizes.input)?,
            matrix: take(sizes.matrix)?,
            inner: take(sizes.inner)?,
            partial: take(sizes.partial)?,
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

impl Sizes {
    fn of(
        plan: &Plan,
        device: DeviceId,
        has_vendor: bool,
        partial_bytes: impl Fn(&Attention, usize) -> usize,
    ) -> Self {
        let mut most = Self::default();
        for program in &plan.programs {
            let lanes = program.lanes.iter().filter(|lane| lane.device == device);
            for &id in lanes.flat_map(|lane| &lane.steps) {
                let step = &program.steps[id];
                let own = match &step.action {
                    Action::Run(op) => Self::of_op(plan, program, op, has_vendor, &partial_bytes),
                    Action::Move { .. } => Self::of_move(program, &step.reads),
                };
                most = Self {
                    input: most.input.max(own.input),
                    matrix: most.matrix.max(own.matrix),
                    inner: most.inner.max(own.inner),
                    partial: most.partial.max(own.partial),
                };
            }
        }
        most
    }

    fn of_op(
        plan: &Plan,
        program: &Program,
        op: &Op,
        has_vendor: bool,
        partial_bytes: impl Fn(&Attention, usize) -> usize,
    ) -> Self {
        let tokens = program.max.tokens as usize;
        match op.products() {
            Some(Products::Linear(linear)) => Self::of_linear(plan, tokens, linear, has_vendor),
            Some(Products::Attention(attention)) => Self {
                inner: tokens * (attention.heads * attention.head_dim) as usize * size_of::<f32>(),
                partial: partial_bytes(attention, program.max_sequences as usize),
                ..Self::default()
            },
            Some(Products::Experts(experts)) => {
                let shape = &plan.weights[experts.gate].shape;
                let [held, intermediate, features] = [0, 1, 2].map(|axis| shape[axis] as usize);
                // Each token's chosen experts, at most all of them.
                let used = held.min(MOST_USED);
                let inner = workspace_bytes(tokens, used, held, features, intermediate);
                Self { inner, ..Self::default() }
            }
            None => Self::default(),
        }
    }

    /// The largest term or part, which comes from another device before it is added or placed.
    fn of_move(program: &Program, reads: &[BufferId]) -> Self {
        let bytes = reads.iter().map(|&id| program.buffers[id].ty.bytes(program.max) as usize);
        Self { inner: bytes.max().unwrap_or(0), ..Self::default() }
    }

    fn of_linear(plan: &Plan, tokens: usize, linear: &Linear, has_vendor: bool) -> Self {
        let matrices = linear.weights.iter().map(|&id| &plan.weights[id]);
        let mut sizes = Self::default();
        for weight in matrices {
            let [rows, columns] = [0, 1].map(|axis| weight.shape[axis] as usize);
            // Without the vendor's library products are made in f32.
            let wide =
                if weight.format == Format::F32 || !has_vendor { size_of::<f32>() } else { 2 };
            // A norm that does not come with the matrix leaves f32.
            let few = tokens.min(MAX_TOKENS) * columns * size_of::<f32>();
            sizes.input = sizes.input.max(few);
            if tokens > MAX_TOKENS {
                sizes.input = sizes.input.max(tokens * columns * wide);
                sizes.matrix = sizes.matrix.max(rows * columns * wide);
                let product = (tokens * rows * size_of::<f32>()).next_multiple_of(ALIGNMENT);
                let products = if matches!(linear.then, Then::Gate(_)) { 2 } else { 1 };
                sizes.inner = sizes.inner.max(products * product);
            }
        }
        sizes
    }
}

/// More experts than any published mixture uses for a token.
const MOST_USED: usize = 16;
