//! Steps that move values between devices.

use anyhow::{Context as _, Result};
use ir::dag::Node;
use ir::graph::{Placed, PlacedGraph};
use ir::id::{BufferId, CauseId, DeviceId, ValueId};
use ir::layout::Move;
use ir::op::Op;
use ir::plan::{Action, Algorithm, Buffer, Phase, Queue};
use ir::workspace::{EXCHANGE_MEMBERS, MOST_FLAGGED_TERM_BYTES};

use super::Draft;
use crate::cost::{library_sum_nanos, move_nanos};
use crate::groups::{groups, terms};

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
        let action = |collective, slice| {
            let (movement, algorithm) = (movement.clone(), Algorithm::Direct);
            Action::Move { movement, collective, slice, algorithm }
        };
        match movement {
            Move::Transfer { from, to } => {
                let action = action(None, None);
                let reads = vec![self.buffer(input, *from)];
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
                    let reads = vec![self.buffer(input, *from)];
                    self.move_step(graph, node, action, reads, device, member, cause)?;
                }
            }
            Move::AllReduce if let Some(groups) = self.groups(graph, input, members)? => {
                self.sum_by_groups(graph, node, &groups, cause)?;
            }
            Move::AllReduce => {
                let terms: Vec<BufferId> =
                    members.iter().map(|&device| self.buffer(input, device)).collect();
                let action = self.sum(&terms)?;
                for (member, &device) in layout.devices.iter().enumerate() {
                    let (action, terms) = (action.clone(), terms.clone());
                    self.move_step(graph, node, action, terms, device, member, cause)?;
                }
            }
            Move::AllGather { .. } | Move::ReduceScatter { .. } => {
                let collective = self.next_collective();
                let reads: Vec<BufferId> =
                    members.iter().map(|&device| self.buffer(input, device)).collect();
                for (member, &device) in layout.devices.iter().enumerate() {
                    let action = action(Some(collective), layout.slice(member));
                    let reads = reads.clone();
                    self.move_step(graph, node, action, reads, device, member, cause)?;
                }
            }
            Move::Slice { .. } => {
                for (member, &device) in layout.devices.iter().enumerate() {
                    let action = action(None, layout.slice(member));
                    let reads = vec![self.buffer(input, device)];
                    self.move_step(graph, node, action, reads, device, member, cause)?;
                }
            }
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
        groups(self.task.target, members, graph.value(terms).ty.bytes(self.batch.extent))
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
        // What each member holds: its term, then the sum of its group.
        let mut held: Vec<BufferId> =
            members.iter().map(|&device| self.buffer(input, device)).collect();
        for group in groups.iter().filter(|group| group.len() > 1) {
            let terms: Vec<BufferId> = group.iter().map(|&member| held[member]).collect();
            let action = self.sum(&terms)?;
            for &member in group {
                let (device, ty) = (members[member], self.buffers[terms[0]].ty.clone());
                let sum = self.buffers.push(Buffer { device, ty });
                self.uses.push(Vec::new());
                self.push_move(node, device, action.clone(), terms.clone(), sum, cause)?;
                held[member] = sum;
            }
        }
        // Members read other copies of the same sums, so each adds for itself.
        let action = Action::Move {
            movement: Move::AllReduce,
            collective: Some(self.next_collective()),
            slice: None,
            algorithm: Algorithm::Direct,
        };
        for (member, &device) in layout.devices.iter().enumerate() {
            let own = groups.iter().position(|group| group.contains(&member));
            let terms = terms(groups, own.expect("groups hold all members"), member);
            let reads = terms.into_iter().map(|term| held[term]).collect();
            self.move_step(graph, node, action.clone(), reads, device, member, cause)?;
        }
        Ok(())
    }

    /// A new sum of terms, each on a device of its own, made in the way that is predicted to be faster.
    fn sum(&mut self, terms: &[BufferId]) -> Result<Action> {
        let (target, bytes) = (self.task.target, |&term| self.buffer_bytes(term));
        let device = |&term: &BufferId| self.buffers[term].device;
        let incoming: Vec<(DeviceId, u64)> =
            terms.iter().map(|term| (device(term), bytes(term))).collect();
        let is_gpu = |(device, _): &(DeviceId, u64)| target.machine.devices[*device].kind.is_gpu();
        let largest = terms.iter().map(bytes).max().context("a sum has no terms")?;
        let mut algorithm = Algorithm::Direct;
        if self.batch.phase == Phase::Prefill
            && incoming.iter().all(is_gpu)
            && terms.len() <= EXCHANGE_MEMBERS
            && let Some(by_library) = library_sum_nanos(target, terms.len(), largest)
        {
            let direct = |&(to, _)| move_nanos(target, to, &Move::AllReduce, &incoming, largest);
            let direct: Vec<f64> = incoming.iter().map(direct).collect::<Result<_>>()?;
            if direct.into_iter().fold(0.0, f64::max) > by_library * LIBRARY_GAIN {
                algorithm = Algorithm::Library;
            }
        }
        let collective = Some(self.next_collective());
        Ok(Action::Move { movement: Move::AllReduce, collective, slice: None, algorithm })
    }

    /// Whether a device makes a sum in the launch of the linear whose output it adds: see
    /// [`ir::plan::Plan::may_join_sum`].
    fn is_joined(&self, device: DeviceId, movement: &Move, terms: &[BufferId], bytes: u64) -> bool {
        let is_gpu = |term: &BufferId| {
            self.task.target.machine.devices[self.buffers[*term].device].kind.is_gpu()
        };
        let is_of_linear = |term: &BufferId| {
            let writer = self.uses[*term].first().map(|&writer| &self.steps[writer].action);
            matches!(writer, Some(Action::Run(Op::Linear(_))))
        };
        let own = terms.iter().find(|&&term| self.buffers[term].device == device);
        matches!(movement, Move::AllReduce)
            && bytes <= MOST_FLAGGED_TERM_BYTES
            && terms.iter().all(is_gpu)
            && own.is_some_and(is_of_linear)
    }

    /// Bytes of a buffer in the batch that is priced.
    fn buffer_bytes(&self, buffer: BufferId) -> u64 {
        self.buffers[buffer].ty.bytes(self.batch.extent)
    }

    #[expect(clippy::too_many_arguments, reason = "one call site each for the kinds of movement")]
    fn move_step(
        &mut self,
        graph: &PlacedGraph,
        node: &Node<Placed>,
        action: Action,
        reads: Vec<BufferId>,
        device: DeviceId,
        member: usize,
        cause: CauseId,
    ) -> Result<()> {
        let written = self.new_buffer(graph, node.outputs[0], &node.work.layouts[0], member);
        self.push_move(node, device, action, reads, written, cause)
    }

    /// The receiver copies, in the queue that uses the copy: the sender is done when its value is where others can read it.
    fn push_move(
        &mut self,
        node: &Node<Placed>,
        device: DeviceId,
        action: Action,
        reads: Vec<BufferId>,
        to: BufferId,
        cause: CauseId,
    ) -> Result<()> {
        let incoming: Vec<(DeviceId, u64)> = reads
            .iter()
            .map(|&buffer| (self.buffers[buffer].device, self.buffer_bytes(buffer)))
            .collect();
        let Action::Move { movement, algorithm, .. } = &action else {
            unreachable!("a movement makes moves only")
        };
        let (target, written) = (self.task.target, self.buffer_bytes(to));
        let nanos = match algorithm {
            Algorithm::Direct => {
                let whole = move_nanos(target, device, movement, &incoming, written)?;
                let launch = target.machine.devices[device].rates.step_nanos;
                if self.is_joined(device, movement, &reads, written) {
                    whole - launch
                } else {
                    whole
                }
            }
            Algorithm::Library => library_sum_nanos(target, reads.len(), written)
                .context("a library that the machine lacks was chosen")?,
        };
        let lane = (device, Queue::Compute);
        self.step(&node.name, lane, action, reads, vec![to], nanos, cause);
        Ok(())
    }
}
