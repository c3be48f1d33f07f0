//! Steps that move values between devices.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use ir::dag::Node;
use ir::graph::{Placed, PlacedGraph};
use ir::id::{BufferId, CauseId, DeviceId, Few, Id as _, StepId, ValueId};
use ir::layout::Move;
use ir::op::Op;
use ir::plan::{Action, Algorithm, Phase, Queue};
use ir::smallvec;
use ir::tensor::DType;
use ir::workspace::{EXCHANGE_MEMBERS, MOST_JOINED_TERM_BYTES, summed_together};

use super::Draft;
use crate::cost::{Behind, Way, is_peer_sum, library_sum_nanos, move_nanos, nanos_at};
use crate::groups::{groups, terms};
use crate::part::local_type;
use crate::target::Target;

/// The vendor's library has to be so much faster than a direct sum: its buffers take memory.
const LIBRARY_GAIN: f64 = 1.1;

impl Draft<'_> {
    /// Adds one step for each device that a movement brings a value to.
    pub(super) fn movement(
        &mut self,
        graph: &PlacedGraph,
        node: &Node<Placed>,
        movement: &Move,
        cause: CauseId,
    ) -> Result<()> {
        let (input, output) = (node.inputs[0], node.outputs[0]);
        let layout = &node.work.layouts[0];
        let members = &node.work.needs[0].devices;
        let algorithm = Algorithm::Direct;
        let action = |collective, slice| {
            let movement = movement.clone();
            Action::Move { movement, collective, slice, algorithm }
        };
        match movement {
            Move::Transfer { from, to } => {
                let action = action(None, None);
                let reads = smallvec![self.buffer(input, *from)];
                self.move_step(graph, node, action, reads, *to, 0, cause)?;
            }
            Move::Broadcast { from } => {
                let collective = self.next_collective();
                for (member, &device) in layout.devices.iter().enumerate() {
                    // Whoever holds the value keeps the buffer it has.
                    if let Some(buffer) = self.find_buffer(input, device) {
                        self.held[output].push((device, buffer));
                        continue;
                    }
                    let action = action(Some(collective), None);
                    let reads = smallvec![self.buffer(input, *from)];
                    self.move_step(graph, node, action, reads, device, member, cause)?;
                }
            }
            Move::AllReduce if let Some(&residual) = self.narrow.residuals.get(&input) => {
                self.sum_before(graph, node, residual, cause)?;
            }
            Move::AllReduce if let Some(groups) = self.groups(graph, input, members)? => {
                self.sum_by_groups(graph, node, &groups, cause)?;
            }
            Move::AllReduce | Move::AllGather { .. } | Move::ReduceScatter { .. } => {
                let collective = Some(self.next_collective());
                let reads: Few<BufferId> =
                    members.iter().map(|&device| self.buffer(input, device)).collect();
                let algorithm = self.algorithm(movement, &reads)?;
                for (member, &device) in layout.devices.iter().enumerate() {
                    let (movement, slice) = (movement.clone(), layout.slice(member));
                    let action = Action::Move { movement, collective, slice, algorithm };
                    let reads = reads.clone();
                    self.move_step(graph, node, action, reads, device, member, cause)?;
                }
            }
            Move::Slice { .. } => {
                for (member, &device) in layout.devices.iter().enumerate() {
                    let action = action(None, layout.slice(member));
                    let reads = smallvec![self.buffer(input, device)];
                    self.move_step(graph, node, action, reads, device, member, cause)?;
                }
            }
        }
        Ok(())
    }

    /// A sum of terms in 16 bits, to which each member then adds the residual.
    fn sum_before(
        &mut self,
        graph: &PlacedGraph,
        node: &Node<Placed>,
        residual: ValueId,
        cause: CauseId,
    ) -> Result<()> {
        let (term, layout) = (node.inputs[0], &node.work.layouts[0]);
        let collective = Some(self.next_collective());
        let reads: Few<BufferId> =
            layout.devices.iter().map(|&device| self.buffer(term, device)).collect();
        for (member, &device) in layout.devices.iter().enumerate() {
            let ty = local_type(&graph.value(node.outputs[0]).ty, layout, member);
            let read_bytes = ty.bytes(self.batch.extent) as f64;
            let sum = self.push_buffer(device, ty);
            let (movement, algorithm) = (Move::AllReduce, Algorithm::Direct);
            let action = Action::Move { movement, collective, slice: None, algorithm };
            self.push_move(node, device, action, reads.clone(), sum, cause)?;
            let reads = smallvec![sum, self.buffer(residual, device)];
            let written = self.new_buffer(graph, node.outputs[0], layout, member);
            // In the launch of the sum: see `ir::plan::Plan::may_join_add`.
            let rates = &self.task.target.machine.devices[device].rates;
            let nanos = nanos_at(read_bytes, rates.read_bytes_per_sec);
            let (lane, action) = ((device, Queue::Compute), Action::Run(Op::Add));
            self.step(&node.name, lane, action, reads, smallvec![written], nanos, cause);
        }
        Ok(())
    }

    /// The groups that a sum is made by, where that is faster than at once.
    fn groups(
        &self,
        graph: &PlacedGraph,
        terms: ValueId,
        members: &[DeviceId],
    ) -> Result<Option<Vec<Vec<usize>>>> {
        let bytes = graph.value(terms).ty.bytes(self.batch.extent);
        groups(self.task.target, members, bytes, self.is_by_letters(members.iter().copied()))
    }

    /// A sum within each group of members, then over the groups.
    fn sum_by_groups(
        &mut self,
        graph: &PlacedGraph,
        node: &Node<Placed>,
        groups: &[Vec<usize>],
        cause: CauseId,
    ) -> Result<()> {
        let (input, layout) = (node.inputs[0], &node.work.layouts[0]);
        let members = &node.work.needs[0].devices;
        let action = |collective, algorithm| Action::Move {
            movement: Move::AllReduce,
            collective: Some(collective),
            slice: None,
            algorithm,
        };
        // What each member holds: its term, then the sum of its group.
        let mut held: Vec<BufferId> =
            members.iter().map(|&device| self.buffer(input, device)).collect();
        for group in groups.iter().filter(|group| group.len() > 1) {
            let collective = self.next_collective();
            let terms: Few<BufferId> = group.iter().map(|&member| held[member]).collect();
            let algorithm = self.algorithm(&Move::AllReduce, &terms)?;
            for &member in group {
                let (device, ty) = (members[member], self.buffers[terms[0]].ty.clone());
                let sum = self.push_buffer(device, ty);
                let action = action(collective, algorithm);
                self.push_move(node, device, action, terms.clone(), sum, cause)?;
                held[member] = sum;
            }
        }
        let collective = self.next_collective();
        for (member, &device) in layout.devices.iter().enumerate() {
            let own = groups.iter().position(|group| group.contains(&member));
            let terms = terms(groups, own.expect("groups hold all members"), member);
            let reads = terms.into_iter().map(|term| held[term]).collect();
            // Members read other copies of the same sums, so each adds for itself.
            let action = action(collective, Algorithm::Direct);
            self.move_step(graph, node, action, reads, device, member, cause)?;
        }
        Ok(())
    }

    /// How a collective over those buffers is made: in the way that is predicted to be faster.
    fn algorithm(&self, movement: &Move, reads: &[BufferId]) -> Result<Algorithm> {
        let (target, incoming) = (self.task.target, self.incoming(reads));
        let largest = incoming.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0);
        let may_be_librarys = matches!(movement, Move::AllReduce)
            && self.batch.phase == Phase::Prefill
            && reads.len() <= EXCHANGE_MEMBERS
            && self.are_gpus(&incoming);
        let is_faster = may_be_librarys && is_librarys(target, &incoming, largest)?;
        Ok(if is_faster { Algorithm::Library } else { Algorithm::Direct })
    }

    /// Whether a device makes a sum in the launch of the linear whose output it adds: see
    /// [`ir::plan::Plan::may_join_sum`].
    fn is_joined(
        &self,
        device: DeviceId,
        movement: &Move,
        reads: &[BufferId],
        incoming: &[(DeviceId, u64)],
    ) -> bool {
        let own = reads.iter().find(|&&term| self.buffers[term].device == device);
        let writer = own.and_then(|&term| self.uses[term].first());
        let is_linear = writer.is_some_and(|&writer| {
            let step = &self.steps[writer];
            matches!(step.action, Action::Run(Op::Linear(_))) && step.writes.len() == 1
        });
        is_linear
            && writer.copied() == self.last_step(device)
            && reads.iter().all(|&term| self.buffers[term].ty.dtype == DType::F32)
            && incoming.iter().all(|(_, bytes)| *bytes <= MOST_JOINED_TERM_BYTES)
            && is_peer_sum(&self.task.target.machine, movement, incoming)
    }

    /// Fails where GPUs would make a sum by themselves of rows that they cannot add up.
    fn check_peer_sum(
        &self,
        movement: &Move,
        incoming: &[(DeviceId, u64)],
        sum: BufferId,
    ) -> Result<()> {
        let ty = &self.buffers[sum].ty;
        let (features, together) = (ty.features(self.batch.extent), summed_together(DType::F32));
        ensure!(
            !is_peer_sum(&self.task.target.machine, movement, incoming)
                || features.is_multiple_of(together),
            "GPUs add up rows of a multiple of {together} features, not of {features}: they cannot share this layer"
        );
        Ok(())
    }

    /// The step that a device computes last so far.
    fn last_step(&self, device: DeviceId) -> Option<StepId> {
        let lane = self.lanes.get(&(device, Queue::Compute))?;
        self.lane_of.rows().iter().rposition(|of_step| of_step == lane).map(StepId::from_index)
    }

    /// How something comes to a device.
    fn way(&self, device: DeviceId, reads: &[BufferId], incoming: &[(DeviceId, u64)]) -> Way {
        let devices = incoming.iter().map(|(from, _)| *from).chain([device]);
        Way {
            by_letters: self.is_by_letters(devices),
            behind: self.behind(device, reads, incoming),
        }
    }

    /// Whether what crosses between those devices are letters alone: GPUs capture decodes, and what they fetch is in
    /// the way of letters.
    fn is_by_letters(&self, mut devices: impl Iterator<Item = DeviceId>) -> bool {
        let is_busy = |device| self.fetchers.contains_key(&device);
        self.batch.phase == Phase::Decode && !devices.any(is_busy)
    }

    /// What a device was brought by its last step from the same devices.
    fn behind(&self, device: DeviceId, reads: &[BufferId], incoming: &[(DeviceId, u64)]) -> Behind {
        let last = self.last_step(device).map(|last| &self.steps[last]);
        let Some(last) = last.filter(|last| matches!(last.action, Action::Move { .. })) else {
            return Behind::Nothing;
        };
        let senders = |incoming: &[(DeviceId, u64)]| -> BTreeSet<DeviceId> {
            incoming.iter().map(|(from, _)| *from).filter(|&from| from != device).collect()
        };
        let (theirs, ours) = (senders(&self.incoming(&last.reads)), senders(incoming));
        if ours.is_empty() || theirs != ours {
            return Behind::Nothing;
        }
        let writers = |reads: &[BufferId]| -> BTreeSet<StepId> {
            reads.iter().filter_map(|&buffer| self.uses[buffer].first().copied()).collect()
        };
        if writers(reads).is_subset(&writers(&last.reads)) {
            Behind::SameStep
        } else {
            Behind::Earlier
        }
    }

    /// Where buffers lie, and their bytes in the batch that is priced.
    fn incoming(&self, reads: &[BufferId]) -> Vec<(DeviceId, u64)> {
        let buffers = reads.iter().map(|&buffer| &self.buffers[buffer]);
        buffers.map(|buffer| (buffer.device, buffer.ty.bytes(self.batch.extent))).collect()
    }

    fn are_gpus(&self, incoming: &[(DeviceId, u64)]) -> bool {
        let devices = &self.task.target.machine.devices;
        incoming.iter().all(|(device, _)| devices[*device].kind.is_gpu())
    }

    #[expect(clippy::too_many_arguments, reason = "one call site each for the kinds of movement")]
    fn move_step(
        &mut self,
        graph: &PlacedGraph,
        node: &Node<Placed>,
        action: Action,
        reads: Few<BufferId>,
        device: DeviceId,
        member: usize,
        cause: CauseId,
    ) -> Result<()> {
        let written = self.new_buffer(graph, node.outputs[0], &node.work.layouts[0], member);
        self.push_move(node, device, action, reads, written, cause)
    }

    /// The receiver copies, in the queue that uses the copy: the sender is done when its value is where others can read
    /// it.
    fn push_move(
        &mut self,
        node: &Node<Placed>,
        device: DeviceId,
        action: Action,
        reads: Few<BufferId>,
        to: BufferId,
        cause: CauseId,
    ) -> Result<()> {
        let incoming = self.incoming(&reads);
        let Action::Move { movement, algorithm, .. } = &action else {
            unreachable!("a movement makes moves only")
        };
        let target = self.task.target;
        let written = self.buffers[to].ty.bytes(self.batch.extent);
        let nanos = match algorithm {
            Algorithm::Direct => {
                self.check_peer_sum(movement, &incoming, to).with_context(|| node.name.clone())?;
                let is_joined = self.is_joined(device, movement, &reads, &incoming);
                let launch = target.machine.devices[device].rates.step_nanos;
                let saved = if is_joined { launch } else { 0.0 };
                let way = self.way(device, &reads, &incoming);
                move_nanos(target, device, movement, &incoming, written, way)? - saved
            }
            Algorithm::Library => library_sum_nanos(target, reads.len(), written)
                .context("a library that the machine lacks was chosen")?,
        };
        let lane = (device, Queue::Compute);
        self.step(&node.name, lane, action, reads, smallvec![to], nanos, cause);
        Ok(())
    }
}

/// Whether the vendor's library sums terms of GPUs so much faster than these do by themselves that it is worth its
/// buffers: terms of these sizes by themselves, and by the library terms as large as the sum, of `bytes` bytes.
pub(super) fn is_librarys(
    target: &Target,
    incoming: &[(DeviceId, u64)],
    bytes: u64,
) -> Result<bool> {
    let Some(by_library) = library_sum_nanos(target, incoming.len(), bytes) else {
        return Ok(false);
    };
    let way = Way::alone(false);
    let direct =
        |&(to, _): &(DeviceId, u64)| move_nanos(target, to, &Move::AllReduce, incoming, bytes, way);
    let direct: Vec<f64> = incoming.iter().map(direct).collect::<Result<_>>()?;
    Ok(direct.into_iter().fold(0.0, f64::max) > by_library * LIBRARY_GAIN)
}
