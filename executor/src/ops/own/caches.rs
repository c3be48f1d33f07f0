//! The paged caches of one device, in the layout of the attention kernel.

#![expect(unsafe_code, reason = "lanes of different devices use a cache in turn")]

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context as _, Result, bail};
use ir::id::{CacheId, DeviceId};
use ir::plan::Plan;
use ir::tensor::DType;

use crate::home_caches::{HomeCache, HomeCaches};
use crate::kernels::cpu::cache::{Cache, CacheShape, Element};
use crate::kernels::cpu::rows::for_each_row;
use crate::memory::Region;
use crate::team::Team;

/// Floats of a page of 4 KiB.
const PAGE_FLOATS: usize = 1024;

/// Keys and values of the layers of one device.
pub(crate) struct Caches {
    caches: BTreeMap<CacheId, Arc<HomeCache>>,
}

impl Caches {
    /// Makes every cache that the plan puts on a device, and adds it to `homes`; its team touches them first.
    pub(super) fn new(
        plan: &Plan,
        device: DeviceId,
        team: &Team,
        homes: &HomeCaches,
    ) -> Result<Self> {
        let mut caches = BTreeMap::new();
        for (id, cache) in plan.caches.iter().filter(|(_, cache)| cache.device == device) {
            let context = || format!("making the cache of {}", cache.name);
            let element = match cache.dtype {
                DType::F32 => Element::F32,
                DType::F16 => Element::F16,
                DType::Bf16 => Element::Bf16,
                DType::I8 => Element::Int8,
                DType::I32 | DType::U8 => bail!("{} is to hold integers", cache.name),
            };
            let shape = CacheShape {
                element,
                blocks: plan.model.blocks as usize,
                kv_heads: cache.kv_heads as usize,
                block_tokens: plan.model.block_tokens as usize,
                head_dim: cache.head_dim as usize,
            };
            let region = || touched(shape.region_bytes(), team).with_context(context);
            let cache = HomeCache::new(shape, region()?, region()?).with_context(context)?;
            let cache = Arc::new(cache);
            homes.add(id, &cache);
            caches.insert(id, cache);
        }
        Ok(Self { caches })
    }

    /// A cache for the time of one step.
    pub(super) fn view(&mut self, cache: CacheId) -> Result<Cache<'_>> {
        let held = self.caches.get(&cache);
        let held = held.with_context(|| format!("{cache} is not on this device"))?;
        // SAFETY: plans let one step use a cache at a time, and the result keeps this device's other steps out.
        unsafe { held.view() }
    }
}

/// A region of zeros whose pages the team's members have touched.
fn touched(bytes: usize, team: &Team) -> Result<Region> {
    let whole_pages = bytes.next_multiple_of(PAGE_FLOATS * size_of::<f32>());
    let mut region = team.regions().take(whole_pages)?;
    for_each_row(team, PAGE_FLOATS, region.as_mut_slice::<f32>(), |_, pages| pages.fill(0.0));
    Ok(region)
}
