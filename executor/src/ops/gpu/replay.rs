//! Launches that were captured once, replayed in later runs of the same size and reach.

#![expect(unsafe_code, reason = "replayed launches find their memory by address")]

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context as _, Result};
use cubecl::client::Graph;
use ir::id::StepId;

use crate::kernels::gpu::attention::Reach;
use crate::kernels::gpu::device::Gpu;

/// What decides which launches a stretch makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) program: usize,
    /// The first of its steps.
    pub(super) step: StepId,
    pub(super) tokens: usize,
    pub(super) sequences: usize,
    /// Wanted rows.
    pub(super) rows: usize,
    /// How far back attention looks.
    pub(super) reach: Reach,
}

/// Captured stretches.
#[derive(Default)]
pub(super) struct Replays {
    captured: BTreeMap<Key, Captured>,
}

enum Captured {
    /// How often it could not be captured.
    NotYet(u32),
    Ready(Graph),
}

/// Attempts before a stretch is launched step by step for good.
const ATTEMPTS: u32 = 3;

/// One capture at a time: CUDA lets no other thread take memory meanwhile.
static CAPTURING: Mutex<()> = Mutex::new(());

impl Replays {
    /// Queues a captured stretch; false where it is not captured.
    ///
    /// # Errors
    /// When the device refuses.
    pub(super) fn replay(&self, key: Key) -> Result<bool> {
        let Some(Captured::Ready(graph)) = self.captured.get(&key) else { return Ok(false) };
        // SAFETY: the launches use weights, caches, inputs, scratch and buffers, which live as long as the state
        // that owns this; their memory is used by this lane's thread alone, which captured them.
        unsafe { graph.replay() }.context("replaying captured steps")?;
        Ok(true)
    }

    /// Queues a stretch with `queue` and, where the device can, captures it for the next time.
    ///
    /// # Errors
    /// Those of `queue`.
    pub(super) fn capture(
        &mut self,
        gpu: &Gpu,
        key: Key,
        mut queue: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        let failures = match self.captured.get(&key) {
            Some(Captured::NotYet(failures)) => *failures,
            Some(Captured::Ready(_)) | None => 0,
        };
        if failures >= ATTEMPTS {
            return queue();
        }
        let lock = CAPTURING.lock().unwrap_or_else(PoisonError::into_inner);
        let prepared = gpu.client.graph_prepare();
        // The first time compiles what is not compiled yet; it is the run itself.
        queue()?;
        let started = prepared.and_then(|()| gpu.client.start_capture());
        let captured = match started {
            Ok(()) => {
                let queued = queue();
                let captured = gpu.client.stop_capture();
                queued?;
                captured
            }
            Err(error) => Err(error),
        };
        drop(lock);
        let captured = match captured {
            Ok(graph) => Captured::Ready(graph),
            Err(error) => {
                tracing::debug!("steps could not be captured: {error:?}");
                Captured::NotYet(failures + 1)
            }
        };
        self.captured.insert(key, captured);
        Ok(())
    }
}
