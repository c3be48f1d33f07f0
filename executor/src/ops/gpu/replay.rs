//! Launches of whole runs that were captured once, replayed in later runs of the same kind.

#![expect(unsafe_code, reason = "replayed launches find their memory by address")]

use std::collections::BTreeMap;
use std::sync::{Mutex, Once};

use anyhow::{Context as _, Result, anyhow};
use cubecl::client::Graph;

use super::inputs::reach;
use crate::batch::Batch;
use crate::kernels::gpu::attention::Reach;
use crate::kernels::gpu::device::Gpu;
use crate::locked;

/// Under what the captured graph of a run is found: what decides which launches it makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct GraphKey {
    program: usize,
    /// Attention of one token each is another kernel, which writes the cache, too.
    is_decode: bool,
    tokens: usize,
    sequences: usize,
    /// Wanted rows.
    rows: usize,
    /// Whether it gives shortlists.
    is_listed: bool,
    /// How far back attention looks.
    reach: Reach,
}

/// Captured runs.
#[derive(Default)]
pub(super) struct Replays {
    captured: BTreeMap<GraphKey, Graph>,
}

/// One capture at a time: CUDA lets no other thread take memory meanwhile.
static CAPTURING: Mutex<()> = Mutex::new(());

impl GraphKey {
    /// That of a run of a program.
    pub(crate) fn of(program: usize, batch: &Batch) -> Self {
        Self {
            program,
            is_decode: batch.is_decode(),
            tokens: batch.tokens().len(),
            sequences: batch.parts().len(),
            rows: batch.rows().len(),
            is_listed: batch.inverse_temperatures().is_some(),
            reach: reach(batch),
        }
    }

    /// Tokens of the run.
    pub(crate) fn tokens(self) -> usize {
        self.tokens
    }
}

impl Replays {
    /// Whether runs of a kind are captured.
    pub(super) fn holds(&self, key: GraphKey) -> bool {
        self.captured.contains_key(&key)
    }

    /// Queues a captured run.
    ///
    /// # Errors
    /// When the device refuses.
    pub(super) fn replay(&self, key: GraphKey) -> Result<()> {
        let graph = self.captured.get(&key).context("runs of this kind are not captured")?;
        // SAFETY: the launches use weights, reached tables, caches, inputs, scratch, buffers, letters and exchanges, which live as long
        // as the state that owns this, or as those of the GPUs that sum with it. Their memory is used by this lane's
        // thread, which captured them, by the host as letters say, and by other GPUs as the flags of exchanges say.
        unsafe { graph.replay() }.context("replaying a captured run")
    }

    /// Begins the run whose launches are captured when it is over: what is not compiled yet is compiled by it.
    pub(super) fn prepare(&self, gpu: &Gpu) {
        if let Err(error) = gpu.client.graph_prepare() {
            tracing::debug!("a run's launches will not be captured: {error:?}");
        }
    }

    /// Ends what [`Replays::prepare()`] began for a run that is not captured.
    pub(super) fn abandon(&self, gpu: &Gpu) {
        // CubeCL takes back what was prepared and never began, and says so with an error.
        drop(gpu.client.stop_capture());
    }

    /// Captures what `queue` queues, while nothing is queued on any GPU of this process. `None` where the device cannot, or
    /// `queue` says why something is not captured: then runs go on being queued launch by launch.
    ///
    /// # Errors
    /// Those of `queue`.
    pub(super) fn capture(
        gpu: &Gpu,
        queue: impl FnOnce() -> Result<Result<()>>,
    ) -> Result<Option<Graph>> {
        let _alone = locked(&CAPTURING);
        let mut queued = Ok(());
        let captured = gpu.capture(|| {
            queued = queue()?;
            Ok(())
        });
        // What was captured before a failure is gone when others may capture.
        let captured = captured.inspect_err(|_| drop(gpu.sync()))?;
        let captured = captured.map_err(|error| anyhow!("{error:?}"));
        let captured = captured.and_then(|graph| queued.map(|()| graph));
        // Devices in software capture nothing.
        static TOLD: Once = Once::new();
        let told = captured.inspect_err(|error| {
            let tell =
                || tracing::warn!("launches are not captured, so runs take longer: {error:#}");
            if gpu.is_cuda() {
                TOLD.call_once(tell);
            }
        });
        Ok(told.ok())
    }

    /// Drops what was captured of runs of a kind, if anything, and waits until its memory is free for others.
    ///
    /// # Errors
    /// When the device failed.
    pub(super) fn discard(&mut self, gpu: &Gpu, key: GraphKey) -> Result<()> {
        let Some(graph) = self.captured.remove(&key) else { return Ok(()) };
        let _alone = locked(&CAPTURING);
        drop(graph);
        gpu.sync()
    }

    /// Keeps what was captured of a run of a kind of which nothing is held.
    pub(super) fn keep(&mut self, key: GraphKey, graph: Graph) {
        self.captured.insert(key, graph);
    }
}
