//! How much of the layers that can be cut GPUs have no memory for.

use std::collections::BTreeSet;

use ir::forecast::DeviceForecast;
use ir::id::{DeviceId, WeightId};

use crate::part::WeightKey;
use crate::place::Placement;
use crate::task::Task;

/// What GPUs have no memory for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lacking {
    /// Bytes that they lack for the whole model with its caches, windows aside; 0 where they lack none.
    pub(super) bytes: f64,
    /// Bytes of the caches.
    pub(super) cache_bytes: f64,
}

impl Lacking {
    /// Of these GPUs, which count together: each has a share of the layers like its share of the memory. What they need
    /// beside weights and caches is what they do in `placement`. `elsewhere` are nodes that are not for them.
    pub(super) fn of(
        task: &Task<'_>,
        placement: &Placement,
        gpus: &[DeviceId],
        elsewhere: impl Fn(&str) -> bool,
    ) -> Self {
        let Some(&gpu) = gpus.first() else { return Self { bytes: 0.0, cache_bytes: 0.0 } };
        let nodes = task.model.layers.nodes().map(|(_, node)| node);
        let nodes = nodes.filter(|node| !elsewhere(&node.name));
        let (mut weights, mut caches): (BTreeSet<WeightId>, u64) = (BTreeSet::new(), 0);
        for node in nodes {
            // Rows are as well looked up by a host.
            if node.work.table().is_none() {
                weights.extend(node.work.weights());
            }
            if let Some(cache) = node.work.cache() {
                let cache = &task.model.caches[cache];
                caches += task.target.cache_bytes(gpu, (cache.kv_heads, cache.head_dim));
            }
        }
        let held = |weight: WeightId| WeightKey::whole(task, weight, gpu).bytes(task);
        let whole: u64 = weights.into_iter().map(held).sum::<u64>() + caches;
        let room = |&gpu: &DeviceId| {
            let DeviceForecast { weight_bytes, cache_bytes, fetch_bytes, capacity_bytes, .. } =
                placement.devices[gpu];
            let beside =
                placement.devices[gpu].needed_bytes() - weight_bytes - cache_bytes - fetch_bytes;
            capacity_bytes.saturating_sub(beside)
        };
        let room = gpus.iter().map(room).fold(0, u64::saturating_add);
        Self { bytes: whole.saturating_sub(room) as f64, cache_bytes: caches as f64 }
    }
}
