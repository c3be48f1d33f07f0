//! The memory of one GPU: taken in one piece when a plan is loaded, so that nothing is rounded up twice and nothing is
//! left to chance later.

use anyhow::{Context as _, Result, ensure};
use cudarc::driver::CudaContext;
use ir::forecast::DeviceForecast;
use ir::workspace::Workspace;

use crate::kernels::gpu::device::{ALIGNMENT, Gpu, Span};

/// Kernels of ours that are loaded when they are launched first, of what a plan counts for a context: the rest is taken
/// when a plan's memory is.
const KERNELS_BYTES: usize = 48 << 20;

/// What is left of it.
pub(super) struct Memory {
    all: Span,
    used: usize,
}

impl Memory {
    /// Takes all that is `counted` for a device, but for what the driver takes by itself, and its scratch memory. Of
    /// that, `context_bytes` are counted for its context.
    ///
    /// # Errors
    /// When there is not as much, with what the driver takes later.
    pub(super) fn new(
        counted: &DeviceForecast,
        context_bytes: u64,
        space: &Workspace,
        gpu: &Gpu,
    ) -> Result<Self> {
        let parts = [
            counted.weight_bytes,
            counted.cache_bytes,
            counted.buffer_bytes,
            counted.fetch_bytes,
            space.bytes(),
        ];
        let bytes: usize =
            parts.into_iter().map(|part| (part as usize).next_multiple_of(ALIGNMENT)).sum();
        if let Some(ordinal) = gpu.ordinal() {
            let context = CudaContext::new(ordinal).context("opening the GPU's context")?;
            let (free, _) = context.mem_get_info().context("asking for free memory")?;
            // Captured launches and sums by the vendor's library.
            let later = counted.reserved_bytes.saturating_sub(context_bytes) as usize;
            let later = later.saturating_add(KERNELS_BYTES);
            ensure!(
                bytes.saturating_add(later) <= free,
                "the plan takes {bytes} bytes, the driver {later} more for launches, and {free} are free: end other \
                 programs on this GPU, or compile with a smaller --gpu-memory"
            );
        }
        Ok(Self { all: gpu.allocate(bytes).with_context(|| format!("{bytes} bytes"))?, used: 0 })
    }

    /// Hands out a piece.
    ///
    /// # Errors
    /// When more is taken than the plan counts.
    pub(super) fn take(&mut self, bytes: usize) -> Result<Span> {
        let taken = bytes.next_multiple_of(ALIGNMENT);
        let left = self.all.bytes() - self.used;
        ensure!(taken <= left, "{bytes} bytes are taken of {left} that the plan has left");
        let span = self.all.part(self.used, taken);
        self.used += taken;
        Ok(span)
    }
}
