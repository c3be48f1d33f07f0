//! What may stay beside GPUs: blocks with what they take and cost on a NUMA node, and tables that are as well there.

use std::collections::BTreeSet;
use std::ops::Range;

use ir::dag::Node;
use ir::id::{DeviceId, Few, NodeId, Table, ValueId, WeightId};
use ir::op::Op;

use crate::cost::{fetch_nanos, fetch_share};
use crate::part::WeightKey;
use crate::place::prices::Prices;
use crate::shards::shard;
use crate::task::Task;
use crate::window::aligned;

/// What of a block stays on a NUMA node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::place::hosted) enum Kept {
    /// A mixture's experts.
    Experts,
    /// The MLPs that are in shards.
    Mlps,
    /// All linears and experts, with what lies between them.
    Matrices,
}

/// A block that may stay.
pub(super) struct Block {
    /// The stage that it belongs to.
    pub(super) stage: usize,
    /// Its nodes in the order they run; those without a matrix go with the others.
    pub(super) nodes: Vec<Member>,
    /// Bytes of its matrices at home, at most.
    pub(super) bytes: u64,
    /// Bytes of them on the stage's GPU.
    pub(super) gpu_bytes: u64,
    /// Its nodes with caches.
    pub(super) attentions: Vec<NodeId>,
}

pub(super) struct Member {
    pub(super) node: NodeId,
    /// Of a shard, the host that it is for.
    pub(super) host: Option<usize>,
    /// Bytes of its matrices at home, at most.
    pub(super) bytes: u64,
    /// Bytes of its matrices in a fetch window, at most.
    pub(super) window_bytes: u64,
    /// What fetching them takes while the home computes.
    pub(super) fetch_nanos: f64,
    /// What the home takes for them in decode.
    pub(super) home_nanos: f64,
}

/// The nodes of a model that nobody pinned, beside GPUs.
pub(super) struct Beside<'a> {
    pub(super) prices: &'a Prices<'a>,
    /// GPUs, each with a range of units.
    pub(super) stages: &'a [(DeviceId, Range<usize>)],
    pub(super) hosts: &'a [DeviceId],
}

impl<'a> Beside<'a> {
    fn nodes(&self) -> impl Iterator<Item = (NodeId, &'a Node<Op>)> {
        let &Prices { task, pins, .. } = self.prices;
        task.model.layers.nodes().filter(|(id, _)| pins[*id].is_none())
    }

    /// The stage of a node.
    pub(super) fn stage_of(&self, node: NodeId) -> Option<usize> {
        let unit = self.prices.units.of[node];
        self.stages.iter().position(|(_, units)| units.contains(&unit))
    }

    /// Layers of a stage whose caches its GPU has as long as none stays with hosts.
    pub(super) fn attentions(&self, stage: usize) -> usize {
        let &Prices { task, pins, .. } = self.prices;
        let nodes = task.model.layers.nodes();
        let attentions = nodes.filter(|(_, node)| matches!(node.work, Op::Attention(_)));
        let is_on_gpu = |id: NodeId| match &pins[id] {
            Some((device, _)) => *device == self.stages[stage].0,
            None => self.stage_of(id) == Some(stage),
        };
        attentions.filter(|(id, _)| is_on_gpu(*id)).count()
    }

    /// The lookups whose tables no other node of their stage uses, with those tables.
    pub(super) fn lookups(&self) -> Vec<(NodeId, WeightId)> {
        let &Prices { task, pins, .. } = self.prices;
        let lookup = |(id, node): (NodeId, &Node<Op>)| {
            let table = node.work.table()?;
            // Another stage's GPU has one of its own.
            let is_elsewhere =
                |user: NodeId| pins[user].is_none() && self.stage_of(user) != self.stage_of(id);
            let mut users =
                task.model.layers.nodes().filter(|(_, node)| node.work.weights().contains(&table));
            users.all(|(user, _)| user == id || is_elsewhere(user)).then_some((id, table))
        };
        self.nodes().filter_map(lookup).collect()
    }

    /// The blocks that may stay; `None` where no host computes their format or none is where a shard is to go.
    pub(super) fn blocks(&self, kept: Kept) -> Option<Vec<Block>> {
        let &Prices { task, units, .. } = self.prices;
        let all = task.model.layers.nodes();
        let shards: BTreeSet<usize> =
            all.filter_map(|(_, node)| Some(shard(&node.name)?.1)).collect();
        // What is in no shard goes to any of them; the best stands for all.
        let mut home_nanos = vec![None; self.hosts.len()];
        for &host in shards.iter().chain([&0]) {
            let home = *self.hosts.get(host)?;
            home_nanos[host] = Some(self.prices.decode_nanos(home)?);
        }
        let mut blocks: Vec<Option<Block>> = (0..units.len()).map(|_| None).collect();
        for (id, node) in self.nodes() {
            if !self.may_stay(node, kept, !shards.is_empty()) || Task::block(&node.name).is_none() {
                continue;
            }
            let block = blocks[units.of[id]].get_or_insert(Block {
                stage: self.stage_of(id)?,
                nodes: Vec::new(),
                bytes: 0,
                gpu_bytes: 0,
                attentions: Vec::new(),
            });
            let host = shard(&node.name).map_or(0, |(_, shard)| shard);
            self.add(block, id, node, [host, shards.len()], home_nanos[host].as_ref()?)?;
        }
        for (id, node) in self.nodes() {
            if let (Op::Attention(_), Some(block)) = (&node.work, &mut blocks[units.of[id]]) {
                block.attentions.push(id);
            }
        }
        Some(blocks.into_iter().flatten().filter(|block| block.bytes > 0).collect())
    }

    /// Whether a node is of the kind that stays. Where some layers are in shards, those are the ones to stay.
    fn may_stay(&self, node: &Node<Op>, kept: Kept, has_shards: bool) -> bool {
        let is_shard = shard(&node.name).is_some();
        match kept {
            // Where experts are split, the first are those to have on the GPU.
            Kept::Experts => {
                let Op::Experts(experts) = &node.work else { return false };
                experts.part.is_none_or(|part| part.first > 0) && (!has_shards || is_shard)
            }
            Kept::Mlps => matches!(node.work, Op::Linear(_)) && is_shard,
            // Shards are added up where both sums arrive soonest.
            Kept::Matrices => {
                let is_lookup = node.work.table().is_some();
                !is_lookup && !matches!(node.work, Op::Attention(_)) && !self.sums_shards(node)
            }
        }
    }

    /// Whether a node adds up shards.
    fn sums_shards(&self, node: &Node<Op>) -> bool {
        let graph = &self.prices.task.model.layers;
        let is_shard =
            |&input: &ValueId| shard(&graph.node(graph.value(input).producer).name).is_some();
        matches!(node.work, Op::Add) && node.inputs.iter().any(is_shard)
    }

    /// Adds a node to its block: of `host`, beside `shards` that are computed at the same time, which takes
    /// `home_nanos` for each node. `None` where no link leads from there to the GPU.
    fn add(
        &self,
        block: &mut Block,
        id: NodeId,
        node: &Node<Op>,
        [host, shards]: [usize; 2],
        home_nanos: &Table<NodeId, u64>,
    ) -> Option<()> {
        let task = self.prices.task;
        let (home, gpu) = (self.hosts[host], self.stages[block.stage].0);
        let is_shard = shard(&node.name).is_some();
        let mut member = Member {
            node: id,
            host: is_shard.then_some(host),
            bytes: 0,
            window_bytes: 0,
            fetch_nanos: 0.0,
            home_nanos: home_nanos[id] as f64 / if is_shard { shards as f64 } else { 1.0 },
        };
        let weights = if node.work.takes_fetched() { node.work.weights() } else { Few::new() };
        for weight in weights {
            if task.model.weights[weight].shape.len() < 2 {
                continue;
            }
            // Homes may hold it in different formats; the largest is what there must be room for.
            let packed =
                |&device: &DeviceId| WeightKey::whole(task, weight, device).packed_bytes(task);
            let bytes = self.hosts.iter().map(packed).max().unwrap_or(0);
            block.bytes += bytes;
            block.gpu_bytes += packed(&gpu);
            member.bytes += bytes;
            member.window_bytes += aligned(bytes);
            let alone = fetch_nanos(task.target, home, gpu, bytes).ok()?;
            member.fetch_nanos += alone / fetch_share(task.target, home, gpu);
        }
        block.nodes.push(member);
        Some(())
    }
}
