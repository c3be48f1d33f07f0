//! Weights on their way from the NUMA nodes that hold them to the window of a GPU.
//!
//! - What a run may fetch is pinned once, when the plan is loaded, where it lies: a pinned page is read over the link
//!   at its full rate, beside all computing.
//! - Copies are queued on a stream of their own, few at a time, so that a run that is aborted has few to wait for.
//!   Activations on their way to the same GPU do not stand behind them: launches take those from pinned memory.

#![expect(unsafe_code, reason = "host memory is copied by the driver's C interface")]

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use anyhow::{Context as _, Result};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, result, sys};
use ir::id::{DeviceId, WeightId};
use ir::plan::{Action, Plan};

use crate::kernels::cpu::pack::PackedMatrix;
use crate::kernels::gpu::device::{Gpu, Span};
use crate::memory::Region;
use crate::pinned::Pinned;

/// Bytes that are copied at once, at most: most weights as a whole, 2.5 ms of a PCIe 5 link. Each piece begins tens of
/// microseconds late while a node's cores read the same memory and launches look for letters: pieces of 2 MiB made
/// decode a fifth slower on an H200.
const PIECE_BYTES: usize = 128 << 20;
/// Pieces that are queued at once: while the host learns of the end of one, the link works on the others.
const QUEUED_PIECES: usize = 3;

/// A weight at home: one matrix, or one for each expert of a stack, which lie one right behind the other.
pub(crate) type Home = Arc<[PackedMatrix]>;

/// The weights that are fetched, at home.
pub(crate) type Homes = BTreeMap<WeightId, Home>;

/// Where a GPU wants what is fetched.
pub(crate) struct Window {
    pub(crate) gpu: Gpu,
    pub(crate) span: Span,
}

/// Brings weights to one GPU.
pub(crate) struct Fetcher {
    /// `None` where the GPU is not driven through CUDA: then copies are made one by one. It stands first, as fields are
    /// dropped in this order: it waits for its copies, which go from the homes to the window.
    link: Option<Link>,
    window: Window,
    homes: Homes,
}

/// A weight on its way.
pub(crate) struct Fetch(Option<Arc<CudaEvent>>);

/// The way from pinned host memory to one GPU.
pub(crate) struct Link {
    stream: Arc<CudaStream>,
    pinned: Vec<Pinned>,
    /// The ends of the pieces that are queued.
    queued: VecDeque<Arc<CudaEvent>>,
}

/// The weights that any run brings to a GPU.
pub(crate) fn fetched(plan: &Plan, gpu: DeviceId) -> impl Iterator<Item = WeightId> {
    plan.programs.iter().flat_map(move |program| {
        let lanes = program.lanes.iter().filter(move |lane| lane.device == gpu);
        lanes.flat_map(|lane| &lane.steps).filter_map(|&step| {
            let Action::Fetch { weight, .. } = program.steps[step].action else { return None };
            Some(weight)
        })
    })
}

impl Fetcher {
    /// Pins the weights at home.
    ///
    /// # Errors
    /// When the driver has no more streams. Pages that cannot be pinned are copied all the same, slowly.
    pub(crate) fn new(window: Window, homes: Homes) -> Result<Self> {
        let Some(ordinal) = window.gpu.ordinal() else {
            return Ok(Self { window, homes, link: None });
        };
        let mut link = Link::new(ordinal)?;
        for matrix in homes.values().filter_map(|home| home.first()) {
            if let Err(error) = link.pin(matrix.region()) {
                tracing::warn!("weights are fetched slowly: {error:#}");
                break;
            }
        }
        Ok(Self { window, homes, link: Some(link) })
    }

    /// Waits until nothing is on its way.
    pub(crate) fn finish(&mut self) {
        if let Some(link) = &mut self.link {
            // A context that has failed copies nothing any more.
            let _ = link.wait();
        }
    }

    /// Copies a weight to byte `offset` of the window, all but the last pieces, which are queued; `between` is called
    /// after each piece.
    ///
    /// # Errors
    /// When the weight is not at home here, or the driver refuses.
    pub(crate) fn start(
        &mut self,
        weight: WeightId,
        offset: u64,
        between: impl FnMut(),
    ) -> Result<Fetch> {
        let home = self.homes.get(&weight).with_context(|| format!("{weight} is not fetched"))?;
        let contents: &[u8] = home.first().map_or(&[], |first| first.region().as_slice());
        let place = self.window.span.part(offset as usize, contents.len());
        let Some(link) = &mut self.link else {
            self.window.gpu.write(&place, contents)?;
            self.window.gpu.sync()?;
            return Ok(Fetch(None));
        };
        // SAFETY: the target lies in the window, whose bytes nobody reads until the step that this belongs to has
        // ended. Window and source are held by `self`, which drops its link before both, and that waits for its copies.
        unsafe { link.copy(place.address()?, contents, between) }
            .with_context(|| format!("copying {weight} to the GPU"))?;
        Ok(Fetch(link.queued.back().cloned()))
    }
}

impl Link {
    /// A link with a stream of its own.
    ///
    /// # Errors
    /// When there is no such GPU, or it has no more streams.
    pub(crate) fn new(ordinal: usize) -> Result<Self> {
        let context = CudaContext::new(ordinal).context("opening the GPU's context")?;
        let stream = context.new_stream().context("making a stream for weights")?;
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the old mode is written to a variable of this function. This thread takes no part in captures, and
        // what it does to its own stream does not disturb those of others.
        unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) }
            .result()
            .context("leaving captures of other threads alone")?;
        Ok(Self { stream, pinned: Vec::new(), queued: VecDeque::new() })
    }

    /// Keeps a region's pages where they are for as long as the link lives.
    ///
    /// # Errors
    /// When the system lets nobody pin as much.
    pub(crate) fn pin(&mut self, region: &Arc<Region>) -> Result<()> {
        self.pinned.extend(Pinned::new(self.stream.context(), region)?);
        Ok(())
    }

    /// Queues copies to an address of the GPU, each once there is room for it; `between` is called after each.
    ///
    /// # Safety
    /// The target has as many bytes, which nobody uses until the copies have ended, and the source lives until then.
    ///
    /// # Errors
    /// When the driver refuses.
    pub(crate) unsafe fn copy(
        &mut self,
        mut target: u64,
        source: &[u8],
        mut between: impl FnMut(),
    ) -> Result<()> {
        self.stream.context().bind_to_thread().context("binding the GPU's context")?;
        for piece in source.chunks(PIECE_BYTES) {
            while self.queued.len() >= QUEUED_PIECES
                && let Some(first) = self.queued.pop_front()
            {
                first.synchronize()?;
            }
            // SAFETY: as the caller says.
            unsafe { result::memcpy_htod_async(target, piece, self.stream.cu_stream()) }?;
            self.queued.push_back(Arc::new(self.stream.record_event(None)?));
            target += piece.len() as u64;
            between();
        }
        Ok(())
    }

    /// Waits for all copies.
    ///
    /// # Errors
    /// When the device failed.
    pub(crate) fn wait(&mut self) -> Result<()> {
        self.queued.clear();
        self.stream.synchronize().context("copying to the GPU")
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // A context that has failed copies nothing any more.
        let _ = self.stream.synchronize();
        self.pinned.clear();
    }
}

impl Fetch {
    /// Whether the weight is there.
    pub(crate) fn is_done(&self) -> bool {
        self.0.as_ref().is_none_or(|event| event.is_complete())
    }

    /// Waits until the weight is there.
    ///
    /// # Errors
    /// When the device failed.
    pub(crate) fn wait(self) -> Result<()> {
        match self.0 {
            Some(event) => event.synchronize().context("copying weights to the GPU"),
            None => Ok(()),
        }
    }
}
