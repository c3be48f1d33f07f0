//! Host memory that a GPU's driver keeps where it is, so that the GPU reaches it without the host.

#![expect(unsafe_code, reason = "host memory is pinned by the driver's C interface")]

use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use anyhow::{Context as _, Result, ensure};
use cudarc::driver::{CudaContext, sys};

use crate::memory::Region;

/// A region whose pages are pinned for as long as it lives.
pub(crate) struct Pinned {
    context: Arc<CudaContext>,
    region: Arc<Region>,
    /// Where the GPUs see the first byte.
    address: u64,
}

impl Pinned {
    /// `None` where another GPU's lane has pinned the region.
    ///
    /// # Errors
    /// When the system lets nobody pin as much.
    pub(crate) fn new(context: &Arc<CudaContext>, region: &Arc<Region>) -> Result<Option<Self>> {
        ensure!(region.bytes() > 0, "there is nothing to pin");
        context.bind_to_thread().context("binding the GPU's context")?;
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the region is mapped, and `self` holds it until its pages are pinned no more.
        let done =
            unsafe { sys::cuMemHostRegister_v2(region.as_ptr().cast(), region.bytes(), flags) };
        if done == sys::CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED {
            return Ok(None);
        }
        done.result().with_context(|| format!("pinning {} bytes", region.bytes()))?;
        let (context, held) = (Arc::clone(context), Arc::clone(region));
        let mut pinned = Self { context, region: held, address: 0 };
        // SAFETY: the region has just been pinned, and the address is written to a number of this function.
        unsafe {
            sys::cuMemHostGetDevicePointer_v2(&raw mut pinned.address, region.as_ptr().cast(), 0)
        }
        .result()
        .context("asking where the GPU sees host memory")?;
        Ok(Some(pinned))
    }

    /// The same of a region that no other lane pins.
    ///
    /// # Errors
    /// As there, or when it is pinned already.
    pub(crate) fn alone(context: &Arc<CudaContext>, region: &Arc<Region>) -> Result<Self> {
        Self::new(context, region)?.context("the memory is pinned already")
    }

    /// Where the GPUs see the first byte.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// The word that starts at that byte, as a flag between the host and a GPU.
    ///
    /// # Panics
    /// When it lies beyond the region, or at no multiple of its size.
    pub(crate) fn flag(&self, start: usize) -> &AtomicU32 {
        let is_inside =
            start.checked_add(size_of::<u32>()).is_some_and(|end| end <= self.region.bytes());
        assert!(
            is_inside && start.is_multiple_of(size_of::<u32>()),
            "a flag lies beyond its memory"
        );
        // SAFETY: the word lies in the region, at a multiple of its size, and is only used as an atomic; the GPU's
        // loads and stores of it are whole, too.
        unsafe { AtomicU32::from_ptr(self.region.as_ptr().add(start).cast()) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let start = self.region.as_ptr().cast();
        // The thread may be one that has nothing else to do with GPUs.
        let bound = self.context.bind_to_thread();
        // SAFETY: it was pinned by `new`.
        let done = bound.and_then(|()| unsafe { sys::cuMemHostUnregister(start) }.result());
        if let Err(error) = done {
            // A context that has failed keeps nothing.
            tracing::debug!("memory stays pinned: {error}");
        }
    }
}
