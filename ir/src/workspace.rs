//! Scratch memory of GPUs, read off a plan: the compiler counts it, the executor allocates it once.
//!
//! - Every part is as large as the largest use of it in any program, and no two parts overlap.
//! - NUMA nodes have none: their kernels use buffers.

use crate::id::{DeviceId, Id as _, Table};
use crate::machine::DeviceKind;
use crate::op::{Attention, Op};
use crate::plan::{Action, Phase, Plan, Program, Step};
use crate::tensor::Dim;

/// Up to so many rows a linear reads a packed matrix as it is; for more it unpacks the matrix first.
pub const UNPACKED_ROWS: u32 = 8;
/// Parts of the context that decode attention works on at once; each leaves a term of the result.
pub const ATTENTION_SPLITS: u32 = 64;
/// Bytes of each kind of scratch on one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Workspace {
    /// One matrix as 16-bit floats, row after row: a packed one before the vendor library multiplies with it.
    pub matrix_bytes: u64,
    /// The input of a linear as 16-bit floats.
    pub input_bytes: u64,
    /// Queries after their rotation, and the terms of decode attention with their maxima and sums.
    pub attention_bytes: u64,
    /// What lies between the matrices of a mixture's chosen experts.
    pub experts_bytes: u64,
    /// What a run is told: tokens, positions, sequences, rows and cache blocks.
    pub run_bytes: u64,
    /// Sines and cosines of all positions.
    pub rotation_bytes: u64,
    /// The vendor library's own.
    pub library_bytes: u64,
}

impl Workspace {
    /// Bytes of all parts; at most `u64::MAX`.
    pub fn bytes(&self) -> u64 {
        let Self {
            matrix_bytes,
            input_bytes,
            attention_bytes,
            experts_bytes,
            run_bytes,
            rotation_bytes,
            library_bytes,
        } = *self;
        [
            matrix_bytes,
            input_bytes,
            attention_bytes,
            experts_bytes,
            run_bytes,
            rotation_bytes,
            library_bytes,
        ]
        .into_iter()
        .fold(0, u64::saturating_add)
    }
}

/// The workspace of each device; empty for those that are no GPU or have no lane.
pub fn workspaces(plan: &Plan) -> Table<DeviceId, Workspace> {
    let mut spaces: Table<DeviceId, Workspace> =
        plan.machine.devices.ids().map(|_| Workspace::default()).collect();
    for program in &plan.programs {
        for lane in &program.lanes {
            let Some(device) = plan.machine.devices.get(lane.device) else { continue };
            let DeviceKind::Gpu { library_bytes, .. } = device.kind else { continue };
            let space = &mut spaces.rows_mut()[lane.device.index()];
            raise(&mut space.run_bytes, run_bytes(plan, program));
            for step in lane.steps.iter().filter_map(|&step| program.steps.get(step)) {
                if let Action::Run(op) = &step.action {
                    let need = Need { plan, program, step, device: lane.device, library_bytes };
                    need.add(op, space);
                }
            }
        }
    }
    spaces
}

fn raise(most: &mut u64, bytes: u64) {
    *most = bytes.max(*most);
}

fn product(sizes: &[u32], element_bytes: u64) -> u64 {
    sizes.iter().map(|&size| u64::from(size)).fold(element_bytes, u64::saturating_mul)
}

fn run_bytes(plan: &Plan, program: &Program) -> u64 {
    let blocks = plan.model.context.div_ceil(plan.model.block_tokens.max(1));
    // Id, position and sequence of each token; each wanted row; beginning, length and blocks of each sequence.
    product(&[3, program.max.tokens], 4)
        .saturating_add(product(&[program.max.rows], 4))
        .saturating_add(product(&[program.max_sequences, blocks.saturating_add(2)], 4))
}

/// One computation.
struct Need<'a> {
    plan: &'a Plan,
    program: &'a Program,
    step: &'a Step,
    device: DeviceId,
    library_bytes: u64,
}

impl Need<'_> {
    fn add(&self, op: &Op, space: &mut Workspace) {
        match op {
            Op::Linear(_) => self.add_product(op, space),
            Op::Experts(experts) => {
                self.add_product(op, space);
                let gate = self.plan.weights.get(experts.gate);
                let inner = gate.and_then(|gate| gate.shape.get(1)).copied().unwrap_or(0);
                let used = self.size(1, 1);
                raise(&mut space.experts_bytes, product(&[self.size(0, 0), used, inner], 4));
            }
            Op::Attention(attention) => self.add_attention(attention, space),
            Op::Embed { .. }
            | Op::AddPosition { .. }
            | Op::Norm(_)
            | Op::Activate(_)
            | Op::Gate(_)
            | Op::Add
            | Op::SigmoidGate
            | Op::Route { .. }
            | Op::SelectRows
            | Op::SoftCap { .. } => (),
        }
    }

    /// What multiplying the first read with the operation's matrices takes.
    fn add_product(&self, op: &Op, space: &mut Workspace) {
        let (rows, features) = (self.size(0, 0), self.size(0, 1));
        raise(&mut space.input_bytes, product(&[rows, features], 2));
        if rows <= UNPACKED_ROWS {
            return;
        }
        raise(&mut space.library_bytes, self.library_bytes);
        for weight in op.weights().into_iter().filter_map(|id| self.plan.weights.get(id)) {
            let is_packed = weight.format.block() > 1 || weight.device != self.device;
            if let [.., outputs, inputs] = *weight.shape
                && is_packed
            {
                raise(&mut space.matrix_bytes, product(&[outputs, inputs], 2));
            }
        }
    }

    fn add_attention(&self, attention: &Attention, space: &mut Workspace) {
        let Attention { heads, head_dim, .. } = *attention;
        let tokens = self.program.max.tokens;
        let queries = product(&[tokens, heads, head_dim], 4);
        let terms = match self.program.phase {
            Phase::Prefill => 0,
            // A value, the largest score and the sum of exponentials.
            Phase::Decode => {
                product(&[tokens, heads, ATTENTION_SPLITS, head_dim.saturating_add(2)], 4)
            }
        };
        raise(&mut space.attention_bytes, queries.saturating_add(terms));
        if let Some(rope) = attention.rope.and_then(|rope| self.plan.ropes.get(rope)) {
            raise(&mut space.rotation_bytes, product(&[self.plan.model.context, rope.dims], 4));
        }
    }

    /// Size of an axis of a buffer that is read.
    fn size(&self, read: usize, axis: usize) -> u32 {
        let buffer = self.step.reads.get(read).and_then(|&id| self.program.buffers.get(id));
        let dim = buffer.and_then(|buffer| buffer.ty.shape.get(axis));
        dim.map_or(0, |dim: &Dim| dim.size(self.program.max))
    }
}
