//! The head with a host: one row of a prompt passes there, and decode reads its matrix as fast as any other that stays,
//! so that a small GPU has the room for matrices that prompts would fetch.

use ir::id::{DeviceId, NodeId, WeightId};
use ir::op::Op;

use super::blocks::{Beside, Kept};
use super::{Frame, Search, best};
use crate::part::WeightKey;
use crate::place::Offer;
use crate::place::hosted::{Hosted, Hosting};
use crate::task::Task;

/// Beside what fits with a window for a matrix, a head that takes less than one part in so many of its GPU's memory
/// stays there.
const LARGE: u64 = 8;

/// What makes the logits.
pub(super) struct Head {
    /// Its linear and what follows it.
    nodes: Vec<NodeId>,
    matrices: Vec<WeightId>,
    /// The stage that it belongs to.
    stage: usize,
    /// Nodes that look rows of its matrix up and are with it: on another device the matrix would be there twice.
    lookups: Vec<NodeId>,
}

impl Head {
    /// `None` where it is pinned or part of a block. `without` are lookups that leave without it.
    pub(super) fn new(beside: &Beside<'_>, without: &[(NodeId, WeightId)]) -> Option<Self> {
        let prices = beside.prices;
        let graph = &prices.task.model.layers;
        let &[logits] = graph.outputs() else { return None };
        let mut nodes = Vec::new();
        let mut value = logits;
        let matrices = loop {
            let id = graph.value(value).producer;
            let node = graph.node(id);
            if prices.pins[id].is_some() || Task::block(&node.name).is_some() {
                return None;
            }
            nodes.push(id);
            if let Op::Linear(linear) = &node.work {
                break linear.weights.to_vec();
            }
            let Op::SoftCap { .. } = &node.work else { return None };
            value = node.inputs[0];
        };
        let stage = beside.stage_of(*nodes.last()?)?;
        let looks_up = |id: NodeId| {
            let is_there = |work: &Op| work.weights().iter().any(|table| matrices.contains(table));
            let Op::Embed { .. } = graph.node(id).work else { return false };
            prices.pins[id].is_none()
                && is_there(&graph.node(id).work)
                && without.iter().all(|(lookup, _)| *lookup != id)
        };
        let lookups = graph.nodes().map(|(id, _)| id).filter(|&id| looks_up(id)).collect();
        Some(Self { nodes, matrices, stage, lookups })
    }

    /// Whether it has a host.
    pub(super) fn stays(&self, hosted: &Hosted) -> bool {
        self.nodes.iter().any(|&node| hosted.nodes[node].is_some())
    }
}

impl Search<'_> {
    /// Frames in which the head stays beside what is best without it; beside anything where nothing fits because
    /// of its GPU, if there is nothing else that may stay.
    pub(super) fn with_head(
        &self,
        found: &[(Frame, Offer)],
        rungs: &[usize],
        is_rough: bool,
    ) -> Vec<Frame> {
        let Some(head) = self.head.as_ref().filter(|_| !is_rough) else { return Vec::new() };
        let gpu = self.stages[head.stage].0;
        let capacity = self.task.target.machine.devices[gpu].memory_bytes;
        let is_large = self.head_bytes(head, gpu) > capacity / LARGE;
        let mut lacking = found.iter().filter_map(|(_, offer)| offer.candidate.missing);
        let is_lacking = lacking.any(|(device, _)| device == gpu);
        let windows = self.windows_beside(found, rungs, is_rough);
        let stays = |frame: Frame| Frame { head_stays: true, ..frame };
        match best(found) {
            Some(_) if windows.len() == 1 && !is_large => Vec::new(),
            Some((frame, _)) => {
                let with = |windows| stays(Frame { windows, ..frame.clone() });
                windows.into_iter().map(with).collect()
            }
            None if self.kept != Kept::Matrices || !is_lacking => Vec::new(),
            None => {
                let bases = windows.into_iter().map(|windows| stays(self.without_caches(windows)));
                let each = |base: Frame| {
                    let caches = self.with_caches(&base, is_rough);
                    [base].into_iter().chain(caches)
                };
                bases.flat_map(each).collect()
            }
        }
    }

    /// Bytes of its matrices on a device.
    fn head_bytes(&self, head: &Head, device: DeviceId) -> u64 {
        let bytes =
            |&weight: &WeightId| WeightKey::whole(self.task, weight, device).bytes(self.task);
        head.matrices.iter().map(bytes).sum()
    }

    /// Gives the head a host.
    pub(super) fn host_head(&self, free: &mut [u64], mut host: impl FnMut(NodeId, Hosting)) {
        let Some(head) = &self.head else { return };
        let at = self.host_for(free, head.stage, self.head_bytes(head, self.hosts[0]));
        let home = self.hosts[at];
        free[at] = free[at].saturating_sub(self.head_bytes(head, home));
        for &node in head.nodes.iter().chain(&head.lookups) {
            host(node, Hosting { home, is_fetched_in_prefill: false, is_fetched_in_decode: false });
        }
    }
}
