//! The paged caches of one GPU.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use ir::id::{CacheId, DeviceId};
use ir::plan::Plan;
use ir::tensor::DType;

use super::memory::Memory;
use crate::kernels::gpu::attention::Cache;
use crate::kernels::gpu::device::Span;

/// Keys and values of the layers of one device.
pub(super) struct Caches {
    caches: BTreeMap<CacheId, Held>,
    blocks: usize,
    block_tokens: usize,
}

struct Held {
    keys: Span,
    values: Span,
    element: DType,
}

impl Caches {
    /// Takes the memory of every cache that the plan puts on a device.
    pub(super) fn new(plan: &Plan, device: DeviceId, memory: &mut Memory) -> Result<Self> {
        let (blocks, block_tokens) = (plan.model.blocks, plan.model.block_tokens);
        let mut caches = BTreeMap::new();
        for (id, cache) in plan.caches.iter().filter(|(_, cache)| cache.device == device) {
            let bytes = cache.bytes(blocks, block_tokens) as usize / 2;
            let mut take =
                || memory.take(bytes).with_context(|| format!("the cache of {}", cache.name));
            let (keys, values) = (take()?, take()?);
            caches.insert(id, Held { keys, values, element: cache.dtype });
        }
        Ok(Self { caches, blocks: blocks as usize, block_tokens: block_tokens as usize })
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
