//! Which weights and caches placed graphs put on each device, each once.

use std::collections::HashMap;

use anyhow::Result;
use ir::id::{CacheId, DeviceId, Table, WeightId};
use ir::op::Op;
use ir::plan::Cache;

use crate::graphs::Graphs;
use crate::part::{Part, WeightKey, computations, parts};
use crate::target::BLOCK_TOKENS;
use crate::task::Task;

/// Everything that devices hold from load to exit.
#[derive(Clone, Debug)]
pub(crate) struct Bound {
    /// The plan's weights.
    pub(crate) weights: Table<WeightId, WeightKey>,
    /// The plan's caches.
    pub(crate) caches: Table<CacheId, Cache>,
    /// Bytes of weights on each device.
    pub(crate) weight_bytes: Table<DeviceId, u64>,
    /// Bytes of one block of all caches on each device.
    pub(crate) block_bytes: Table<DeviceId, u64>,
    weight_ids: HashMap<WeightKey, WeightId>,
    cache_ids: HashMap<(CacheId, DeviceId), CacheId>,
}

/// Collects what the computations of all graphs hold.
pub(crate) fn bind(task: &Task<'_>, graphs: &Graphs) -> Result<Bound> {
    let mut bound = Bound {
        weights: Table::default(),
        caches: Table::default(),
        weight_bytes: task.per_device(0),
        block_bytes: task.per_device(0),
        weight_ids: HashMap::new(),
        cache_ids: HashMap::new(),
    };
    for (node, op) in graphs.iter().flat_map(computations) {
        for part in parts(task, node, op)? {
            for &key in &part.weights {
                bound.hold_weight(task, key);
            }
            if let Op::Attention(attention) = &part.op {
                let cache = Cache {
                    name: node.name.clone(),
                    device: part.device,
                    dtype: task.target.kv_types[part.device],
                    kv_heads: attention.kv_heads,
                    head_dim: attention.head_dim,
                };
                bound.hold_cache(attention.cache, cache);
            }
        }
    }
    Ok(bound)
}

impl Bound {
    /// The operation of a part on the plan's weights and caches.
    pub(crate) fn op(&self, part: &Part) -> Op {
        let mut keys = part.weights.iter();
        let mut op = part.op.clone().map_weights(|_| {
            let key = keys.next().expect("a part has a key for each of its weights");
            self.weight(key)
        });
        if let Op::Attention(attention) = &mut op {
            attention.cache = self.cache_ids[&(attention.cache, part.device)];
        }
        op
    }

    /// The plan's row for a weight.
    pub(crate) fn weight(&self, key: &WeightKey) -> WeightId {
        self.weight_ids[key]
    }

    fn hold_weight(&mut self, task: &Task<'_>, key: WeightKey) {
        if !self.weight_ids.contains_key(&key) {
            let id = self.weights.push(key);
            self.weight_ids.insert(key, id);
            self.weight_bytes[key.device] += key.bytes(task);
        }
    }

    fn hold_cache(&mut self, of: CacheId, cache: Cache) {
        let key = (of, cache.device);
        if !self.cache_ids.contains_key(&key) {
            self.block_bytes[cache.device] += cache.bytes(1, BLOCK_TOKENS);
            let id = self.caches.push(cache);
            self.cache_ids.insert(key, id);
        }
    }
}
