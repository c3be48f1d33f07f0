//! Which weights and caches placed graphs put on each device, each once, and what the devices do with them.

use std::collections::HashMap;

use anyhow::Result;
use ir::graph::Work;
use ir::id::{CacheId, DeviceId, NodeId, Table, WeightId};
use ir::op::Op;
use ir::plan::Cache;
use ir::tensor::TensorType;

use crate::cost::Held;
use crate::graphs::{Graphs, Phases};
use crate::part::{WeightKey, parts};
use crate::task::Task;

/// Everything that devices hold from load to exit, and what all programs compute with it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Bound {
    /// The plan's weights.
    pub(crate) weights: Table<WeightId, WeightKey>,
    /// The plan's caches.
    pub(crate) caches: Table<CacheId, Cache>,
    /// For each graph what each device does of each node; nothing for movements.
    pub(crate) parts: Phases<Table<NodeId, Vec<BoundPart>>>,
}

/// What one device does of a node, in the plan's terms.
#[derive(Clone, Debug)]
pub(crate) struct BoundPart {
    /// Who does it.
    pub(crate) device: DeviceId,
    /// The operation on the plan's weights and caches.
    pub(crate) op: Op,
    /// How each of its weights is held.
    pub(crate) weights: Vec<Held>,
    /// Those of them that are fetched.
    pub(crate) fetched: Vec<Fetched>,
    /// Whose cache it borrows.
    pub(crate) borrows_from: Option<DeviceId>,
    /// Which of the node's inputs are read.
    pub(crate) reads: Vec<usize>,
}

/// A weight that a device fetches.
#[derive(Clone, Debug)]
pub(crate) struct Fetched {
    /// The plan's row for it.
    pub(crate) weight: WeightId,
    /// Its home.
    pub(crate) home: DeviceId,
    /// The type of a buffer that it is fetched to.
    pub(crate) ty: TensorType,
}

/// Collects what the computations of all graphs hold and do.
pub(crate) fn bind(task: &Task<'_>, graphs: &Graphs) -> Result<Bound> {
    let mut bound = Bound::default();
    let mut weight_ids: HashMap<WeightKey, WeightId> = HashMap::new();
    let mut cache_ids: HashMap<(CacheId, DeviceId), CacheId> = HashMap::new();
    bound.parts = graphs.placed.try_map(|graph| {
        let mut all = Table::default();
        for (_, node) in graph.nodes() {
            let parts = match &node.work.work {
                Work::Compute(op) => parts(task, node, op)?,
                Work::Move(_) => Vec::new(),
            };
            let mut bound_parts = Vec::with_capacity(parts.len());
            for part in parts {
                let mut id = |key: &WeightKey| {
                    *weight_ids.entry(*key).or_insert_with(|| bound.weights.push(*key))
                };
                let mut keys = part.weights.iter();
                let mut op = part.op.map_weights(|_| {
                    id(keys.next().expect("a part has a key for each of its weights"))
                });
                let is_fetched = |key: &&WeightKey| key.device != part.device;
                let fetched = part.weights.iter().filter(is_fetched).map(|key| Fetched {
                    weight: id(key),
                    home: key.device,
                    ty: key.packed_type(task),
                });
                let fetched = fetched.collect();
                if let Op::Attention(attention) = &mut op {
                    let device = node.work.home.unwrap_or(part.device);
                    let cache = || Cache {
                        name: node.name.to_string(),
                        device,
                        dtype: task.target.kv_types[device],
                        kv_heads: attention.kv_heads,
                        head_dim: attention.head_dim,
                    };
                    let held = cache_ids.entry((attention.cache, device));
                    attention.cache = *held.or_insert_with(|| bound.caches.push(cache()));
                }
                let held = |key: &WeightKey| Held {
                    format: key.format,
                    shape: key.shape(task),
                    also_unpacked: graphs.unpacked.contains(key),
                };
                bound_parts.push(BoundPart {
                    device: part.device,
                    borrows_from: node.work.home.filter(|_| op.cache().is_some()),
                    op,
                    weights: part.weights.iter().map(held).collect(),
                    fetched,
                    reads: part.reads,
                });
            }
            all.push(bound_parts);
        }
        Ok(all)
    })?;
    Ok(bound)
}
