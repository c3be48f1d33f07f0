//! Which weights and caches placed graphs put on each device, each once, and what the devices do with them.

use std::collections::HashSet;

use anyhow::Result;
use ir::dag::Node;
use ir::graph::{Placed, Work};
use ir::id::{CacheId, DeviceId, Few, NodeId, Table, WeightId};
use ir::op::{Attention, Op};
use ir::plan::Cache;
use ir::tensor::TensorType;

use crate::cost::Held;
use crate::graphs::{Graphs, Phases};
use crate::part::{Part, WeightKey, parts};
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
    /// Whose cache it borrows, or whose table it reaches.
    pub(crate) other_home: Option<DeviceId>,
    /// How many of the node's inputs are read, from the first.
    pub(crate) reads: usize,
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
    let mut binder = Binder {
        task,
        unpacked: &graphs.unpacked,
        weights: Table::default(),
        caches: Table::default(),
        rows_of_weight: task.model.weights.ids().map(|_| Few::new()).collect(),
        rows_of_cache: task.model.caches.ids().map(|_| Few::new()).collect(),
    };
    let parts = graphs.placed.as_ref().try_map(|graph| {
        let nodes = graph.nodes().map(|(_, node)| match &node.work.work {
            Work::Compute(op) => {
                parts(task, node, op).map(|part| part.map(|part| binder.bind(node, part))).collect()
            }
            Work::Move(_) => Ok(Vec::new()),
        });
        nodes.collect()
    })?;
    Ok(Bound { weights: binder.weights, caches: binder.caches, parts })
}

/// The plan's tables while parts are bound to them.
struct Binder<'a> {
    task: &'a Task<'a>,
    unpacked: &'a HashSet<WeightKey>,
    weights: Table<WeightId, WeightKey>,
    caches: Table<CacheId, Cache>,
    /// For each of the model's weights its rows in the plan: one for each of its parts and holders.
    rows_of_weight: Table<WeightId, Few<WeightId>>,
    /// For each of the model's caches its rows in the plan: one for each holder.
    rows_of_cache: Table<CacheId, Few<CacheId>>,
}

impl Binder<'_> {
    fn bind(&mut self, node: &Node<Placed>, part: Part) -> BoundPart {
        let Part { device, mut op, weights: keys, reads } = part;
        let ids: Few<WeightId> = keys.iter().map(|key| self.weight(key)).collect();
        let mut renamed = ids.iter();
        op.rename_weights(|_| *renamed.next().expect("a part has a key for each of its weights"));
        if let Op::Attention(attention) = &mut op {
            self.bind_cache(attention, node.work.home.unwrap_or(device), &node.name);
        }
        let fetched = keys.iter().zip(&ids);
        let fetched = fetched.filter(|(key, _)| op.takes_fetched() && key.device != device);
        let fetched = fetched.map(|(key, &weight)| Fetched {
            weight,
            home: key.device,
            ty: key.packed_type(self.task),
        });
        let held = |key: &WeightKey| Held {
            format: key.format,
            shape: key.shape(self.task),
            also_unpacked: self.unpacked.contains(key),
        };
        BoundPart {
            device,
            other_home: node.work.home.filter(|_| !op.takes_fetched()),
            weights: keys.iter().map(held).collect(),
            fetched: fetched.collect(),
            op,
            reads,
        }
    }

    /// The row of what is held of a weight.
    fn weight(&mut self, key: &WeightKey) -> WeightId {
        let rows = &mut self.rows_of_weight[key.weight];
        let known = rows.iter().copied().find(|&row| self.weights[row] == *key);
        known.unwrap_or_else(|| {
            let row = self.weights.push(*key);
            rows.push(row);
            row
        })
    }

    /// Lets attention name the row of the cache that the device has for it.
    fn bind_cache(&mut self, attention: &mut Attention, device: DeviceId, name: &str) {
        let rows = &mut self.rows_of_cache[attention.cache];
        let known = rows.iter().copied().find(|&row| self.caches[row].device == device);
        attention.cache = known.unwrap_or_else(|| {
            let row = self.caches.push(Cache {
                name: name.to_owned(),
                device,
                dtype: self.task.target.kv_types[device],
                kv_heads: attention.kv_heads,
                head_dim: attention.head_dim,
            });
            rows.push(row);
            row
        });
    }
}
