//! Steps that move values between devices.

use anyhow::Result;
use ir::dag::Node;
use ir::graph::{Placed, PlacedGraph};
use ir::id::{BufferId, CauseId, DeviceId, ValueId};
use ir::layout::Move;
use ir::plan::{Action, Buffer, Queue};

use super::Draft;
use crate::cost::move_nanos;
use crate::groups::{groups, terms};

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
        let action =
            |collective, slice| Action::Move { movement: movement.clone(), collective, slice };
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
            Move::AllReduce | Move::AllGather { .. } | Move::ReduceScatter { .. } => {
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
        let action = |collective| Action::Move {
            movement: Move::AllReduce,
            collective: Some(collective),
            slice: None,
        };
        // What each member holds: its term, then the sum of its group.
        let mut held: Vec<BufferId> =
            members.iter().map(|&device| self.buffer(input, device)).collect();
        for group in groups.iter().filter(|group| group.len() > 1) {
            let collective = self.next_collective();
            let terms: Vec<BufferId> = group.iter().map(|&member| held[member]).collect();
            for &member in group {
                let (device, ty) = (members[member], self.buffers[terms[0]].ty.clone());
                let sum = self.buffers.push(Buffer { device, ty });
                self.uses.push(Vec::new());
                self.push_move(node, device, action(collective), terms.clone(), sum, cause)?;
                held[member] = sum;
            }
        }
        let collective = self.next_collective();
        for (member, &device) in layout.devices.iter().enumerate() {
            let own = groups.iter().position(|group| group.contains(&member));
            let terms = terms(groups, own.expect("groups hold all members"), member);
            let reads = terms.into_iter().map(|term| held[term]).collect();
            self.move_step(graph, node, action(collective), reads, device, member, cause)?;
        }
        Ok(())
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
        let bytes = |buffer: BufferId| self.buffers[buffer].ty.bytes(self.batch.extent);
        let incoming: Vec<(DeviceId, u64)> =
            reads.iter().map(|&buffer| (self.buffers[buffer].device, bytes(buffer))).collect();
        let Action::Move { movement, .. } = &action else {
            unreachable!("a movement makes moves only")
        };
        let nanos = move_nanos(self.task.target, device, movement, &incoming, bytes(to))?;
        let lane = (device, Queue::Compute);
        self.step(&node.name, lane, action, reads, vec![to], nanos, cause);
        Ok(())
    }
}
