//! Caches at home on NUMA nodes: the node attends to them in place, and GPUs may borrow them.
//!
//! - One step uses a cache at a time. Within a run the plan says so: a program has one step for each cache. Where GPUs
//!   borrow caches, lanes begin a run when the one before has ended.
//! - What GPUs borrow is pinned, so that they reach it by address. Where that cannot be, elements are copied by the
//!   host.

#![expect(unsafe_code, reason = "lanes of different devices use a cache in turn")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use anyhow::{Context as _, Result};
use cudarc::driver::CudaContext;
use ir::id::{CacheId, DeviceId};
use ir::plan::Plan;

use crate::kernels::cpu::cache::{Cache, CacheShape, Side};
use crate::locked;
use crate::memory::Region;
use crate::pinned::Pinned;

/// One layer's keys and values on a NUMA node.
pub(crate) struct HomeCache {
    pinned: OnceLock<[Pinned; 2]>,
    shape: CacheShape,
    keys: Arc<Region>,
    values: Arc<Region>,
}

/// The caches of all NUMA nodes of a plan, as their lanes make them.
#[derive(Default)]
pub(crate) struct HomeCaches(Mutex<BTreeMap<CacheId, Arc<HomeCache>>>);

impl HomeCaches {
    /// Adds a cache that a node has made.
    pub(crate) fn add(&self, id: CacheId, cache: &Arc<HomeCache>) {
        self.lock().insert(id, Arc::clone(cache));
    }

    /// A cache that a GPU borrows.
    ///
    /// # Errors
    /// When no node has made it.
    pub(crate) fn get(&self, plan: &Plan, id: CacheId) -> Result<Arc<HomeCache>> {
        let cache = self.lock().get(&id).cloned();
        cache.with_context(|| format!("nobody has made the cache of {}", plan.caches[id].name))
    }

    /// Pins what the GPU of this ordinal borrows.
    ///
    /// # Errors
    /// When a cache has not been made, or there is no such GPU.
    pub(crate) fn pin(&self, plan: &Plan, gpu: DeviceId, ordinal: Option<usize>) -> Result<()> {
        // Several programs borrow a cache.
        let borrowed: BTreeSet<CacheId> = plan.borrowed_by(gpu).collect();
        let caches = borrowed.into_iter().map(|id| self.get(plan, id));
        let caches = caches.collect::<Result<Vec<Arc<HomeCache>>>>()?;
        let (Some(ordinal), false) = (ordinal, caches.is_empty()) else { return Ok(()) };
        let context = CudaContext::new(ordinal).context("opening the GPU's context")?;
        for cache in caches {
            if let Err(error) = cache.pin(&context) {
                tracing::warn!("caches are borrowed slowly: {error:#}");
                break;
            }
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<CacheId, Arc<HomeCache>>> {
        locked(&self.0)
    }
}

impl HomeCache {
    /// A cache over two regions.
    ///
    /// # Errors
    /// When they do not fit the shape.
    pub(crate) fn new(shape: CacheShape, mut keys: Region, mut values: Region) -> Result<Self> {
        Cache::new(shape, keys.as_mut_slice(), values.as_mut_slice())?;
        let (keys, values) = (Arc::new(keys), Arc::new(values));
        Ok(Self { pinned: OnceLock::new(), shape, keys, values })
    }

    /// Its sizes.
    pub(crate) fn shape(&self) -> &CacheShape {
        &self.shape
    }

    /// The cache for the time of one step of its node.
    ///
    /// # Safety
    /// Nobody else uses the cache as long as the result lives: this step is the only one that does, as the module says.
    pub(crate) unsafe fn view(&self) -> Result<Cache<'_>> {
        // SAFETY: the caller has the cache alone.
        let [keys, values] = unsafe { [all(&self.keys), all(&self.values)] };
        Cache::new(self.shape, keys, values)
    }

    /// Where GPUs see the first byte of the keys or the values; `None` where they are not pinned.
    pub(crate) fn address(&self, side: Side) -> Option<u64> {
        Some(side.of(self.pinned.get()?.each_ref()).address())
    }

    /// Hands all bytes of the keys or the values to `with`, for the time of one step of a GPU.
    ///
    /// # Safety
    /// As [`HomeCache::view`], until `with` returns.
    pub(crate) unsafe fn with_bytes<T>(&self, side: Side, with: impl FnOnce(&mut [u8]) -> T) -> T {
        let region: &Arc<Region> = side.of([&self.keys, &self.values]);
        // SAFETY: the caller has the cache alone.
        with(unsafe { all(region) })
    }

    fn pin(&self, context: &Arc<CudaContext>) -> Result<()> {
        if self.pinned.get().is_some() {
            return Ok(());
        }
        let both = [Pinned::alone(context, &self.keys)?, Pinned::alone(context, &self.values)?];
        // One thread pins all.
        drop(self.pinned.set(both));
        Ok(())
    }
}

/// All bytes of a region.
///
/// # Safety
/// Nobody else uses them as long as the result lives.
#[expect(clippy::mut_from_ref, reason = "the caller says that nobody else uses the bytes")]
unsafe fn all(region: &Region) -> &mut [u8] {
    // SAFETY: the region is mapped and initialised, and the caller has it alone.
    unsafe { std::slice::from_raw_parts_mut(region.as_ptr(), region.bytes()) }
}
