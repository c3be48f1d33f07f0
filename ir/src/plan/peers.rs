//! What GPUs do among themselves: sums and moves that they can make without the host.

use super::{Action, Algorithm, Plan, Program, Step};
use crate::id::{BufferId, DeviceId, StepId};
use crate::layout::Move;
use crate::op::Op;
use crate::tensor::{DType, TensorType};
use crate::workspace::{EXCHANGE_MEMBERS, MOST_JOINED_TERM_BYTES};

impl Plan {
    /// Whether a step is one GPU's part of a sum over GPUs alone, which they can make without the host where they reach
    /// each other's memory.
    pub fn is_peer_sum(&self, program: &Program, step: &Step) -> bool {
        self.is_sum_of_gpus(program, step, Algorithm::Direct)
    }

    /// Whether a step is one GPU's part of a sum that the vendor's library makes.
    pub fn is_library_sum(&self, program: &Program, step: &Step) -> bool {
        self.is_sum_of_gpus(program, step, Algorithm::Library)
    }

    /// All such steps, each with its program.
    pub fn library_sums(&self) -> impl Iterator<Item = (&Program, &Step)> {
        self.programs.iter().flat_map(move |program| {
            let steps = program.steps.rows().iter();
            let sums = steps.filter(move |step| self.is_library_sum(program, step));
            sums.map(move |step| (program, step))
        })
    }

    fn is_sum_of_gpus(&self, program: &Program, step: &Step, by: Algorithm) -> bool {
        let Action::Move { movement: Move::AllReduce, algorithm, .. } = step.action else {
            return false;
        };
        let device = |buffer: &BufferId| program.buffers.get(*buffer).map(|buffer| buffer.device);
        let is_member = |(index, buffer): (usize, &BufferId)| {
            let is_new =
                !step.reads[..index].iter().any(|earlier| device(earlier) == device(buffer));
            is_new && self.gpu_of(program, *buffer).is_some()
        };
        algorithm == by
            && (2..=EXCHANGE_MEMBERS).contains(&step.reads.len())
            && step.reads.iter().enumerate().all(is_member)
    }

    /// Whether a GPU may make the sum that follows a step of its lane in the same launch: one over GPUs, of the only
    /// output of a linear, in small terms. The caller sees to it that nothing else reads that output.
    pub fn may_join_sum(&self, program: &Program, lane: &[StepId], position: usize) -> bool {
        let Some([linear, sum]) = neighbours(program, lane, position) else { return false };
        let &[term] = linear.writes.as_slice() else { return false };
        let ty = program.buffers.get(term).map(|term| &term.ty);
        let is_small = |ty: &TensorType| {
            ty.dtype == DType::F32 && ty.bytes(program.max) <= MOST_JOINED_TERM_BYTES
        };
        matches!(linear.action, Action::Run(Op::Linear(_)))
            && sum.reads.contains(&term)
            && self.is_peer_sum(program, sum)
            && ty.is_some_and(is_small)
    }

    /// Whether a GPU may add something to the sum that a step of its lane is, as the next step does, in the same launch.
    /// The caller sees to it that nothing else reads that sum.
    pub fn may_join_add(&self, program: &Program, lane: &[StepId], position: usize) -> bool {
        let Some([sum, add]) = neighbours(program, lane, position) else { return false };
        let &[written] = sum.writes.as_slice() else { return false };
        matches!(add.action, Action::Run(Op::Add))
            && add.reads.len() == 2
            && add.reads.iter().filter(|&&read| read == written).count() == 1
            && self.is_peer_sum(program, sum)
    }

    /// The buffers of other GPUs that a GPU's step moves as they are, each with its GPU, where it reads no others:
    /// where GPUs reach each other's memory, such a buffer is read where it lies, which therefore is its place until
    /// the run is over.
    pub fn peer_moved(&self, program: &Program, step: &Step) -> Vec<(BufferId, DeviceId)> {
        let Action::Move {
            movement: Move::Transfer { .. } | Move::Broadcast { .. } | Move::AllGather { .. },
            ..
        } = step.action
        else {
            return Vec::new();
        };
        let &[out] = step.writes.as_slice() else { return Vec::new() };
        let Some(to) = self.gpu_of(program, out) else { return Vec::new() };
        let read = |&buffer: &BufferId| Some((buffer, self.gpu_of(program, buffer)?));
        let read: Option<Vec<_>> = step.reads.iter().map(read).collect();
        read.into_iter().flatten().filter(|(_, from)| *from != to).collect()
    }

    /// The device of a buffer, if it is a GPU.
    fn gpu_of(&self, program: &Program, buffer: BufferId) -> Option<DeviceId> {
        let device = program.buffers.get(buffer)?.device;
        self.machine.devices.get(device).filter(|device| device.kind.is_gpu()).map(|_| device)
    }
}

/// The step at that position of a lane, and the next.
fn neighbours<'a>(program: &'a Program, lane: &[StepId], position: usize) -> Option<[&'a Step; 2]> {
    let step = |position: usize| program.steps.get(*lane.get(position)?);
    Some([step(position)?, step(position + 1)?])
}
