//! The paged caches of one GPU, and the window of those that it borrows from NUMA nodes.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use ir::id::{CacheId, DeviceId};
use ir::plan::Plan;
use ir::tensor::DType;

use super::memory::Memory;
use crate::home_caches::{HomeCache, HomeCaches};
use crate::kernels::gpu::attention::Cache;
use crate::kernels::gpu::device::Span;

/// Keys and values of the layers of one device.
pub(super) struct Caches {
    caches: BTreeMap<CacheId, Held>,
    blocks: usize,
    block_tokens: usize,
    /// Where what is borrowed is at home.
    homes: Arc<HomeCaches>,
}

struct Held {
    keys: Span,
    values: Span,
    element: DType,
}

impl Caches {
    /// Takes the memory of every cache that the plan puts on a device, and of a window of `borrowed_bytes` bytes for
    /// keys and as many for values.
    pub(super) fn new(
        plan: &Plan,
        device: DeviceId,
        homes: Arc<HomeCaches>,
        borrowed_bytes: u64,
        memory: &mut Memory,
    ) -> Result<Self> {
        let (blocks, block_tokens) = (plan.model.blocks, plan.model.block_tokens);
        let mut caches = BTreeMap::new();
        for (id, cache) in plan.caches.iter().filter(|(_, cache)| cache.device == device) {
            let bytes = cache.bytes(blocks, block_tokens) as usize / 2;
            let mut take =
                || memory.take(bytes).with_context(|| format!("the cache of {}", cache.name));
            let (keys, values) = (take()?, take()?);
            caches.insert(id, Held { keys, values, element: cache.dtype });
        }
        if borrowed_bytes > 0 {
            let mut take = || memory.take(borrowed_bytes as usize).context("borrowed caches");
            let (keys, values) = (take()?, take()?);
            for id in plan.borrowed_by(device) {
                let (keys, values) = (keys.clone(), values.clone());
                caches.insert(id, Held { keys, values, element: plan.caches[id].dtype });
            }
        }
        Ok(Self { caches, blocks: blocks as usize, block_tokens: block_tokens as usize, homes })
    }

    /// Where a cache is at home that is borrowed; `None` for one that is on this device.
    pub(super) fn home(
        &self,
        plan: &Plan,
        device: DeviceId,
        id: CacheId,
    ) -> Result<Option<Arc<HomeCache>>> {
        let is_borrowed = plan.caches.get(id).is_some_and(|cache| cache.device != device);
        is_borrowed.then(|| self.homes.get(plan, id)).transpose()
    }

    /// One layer's keys and values.
    pub(super) fn cache(&self, id: CacheId) -> Result<Cache<'_>> {
        let held = self.caches.get(&id).with_context(|| format!("{id} is not on this device"))?;
        Ok(Cache {
            keys: &held.keys,
            values: &held.values,
            element: held.element,
            blocks: self.blocks,
            block_tokens: self.block_tokens,
        })
    }
}
