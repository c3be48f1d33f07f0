//! When the steps of replayed runs were done, for traces: each leaves the device's clock in pinned memory.
//!
//! - A step that waits for a letter leaves it twice: when the letter is there, and when the step is done.
//! - The device's clock is set against the recorder's by what must have come before what: a run's launches after the
//!   host queued them, a letter's arrival after the host delivered it, what the host hears of after it was sent.

#![expect(unsafe_code, reason = "the clock lies in memory that a GPU writes, too")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use anyhow::{Context as _, Result};
use cudarc::driver::CudaContext;
use ir::id::{Id as _, StepId};
use ir::plan::Plan;
use ir::trace::Span;

use crate::kernels::gpu::device::Gpu;
use crate::kernels::gpu::mail::Place;
use crate::memory::Region;
use crate::pinned::Pinned;
use crate::trace::Recorder;

/// Bytes of a stamp: the device's nanoseconds, then the turn of the run that left it.
const STAMP_BYTES: usize = 16;

/// The stamps of one GPU.
pub(super) struct Stamps {
    pinned: Pinned,
    region: Arc<Region>,
    recorder: Arc<Recorder>,
    /// What the recorder's nanoseconds are more than the device's, at least and at most.
    ahead: Bounds,
    /// When the replayed run under way was queued; `None` where none is.
    began: Option<u64>,
    /// When the host delivered letters of it, and when it heard of steps.
    delivered: Vec<(StepId, u64)>,
    heard: Vec<(StepId, u64)>,
}

/// Moments of a run that leave a stamp.
#[derive(Clone, Copy)]
pub(super) enum Moment {
    /// Its launches begin.
    Start,
    /// A step's letter is there.
    Arrival(StepId),
    /// A step is done.
    End(StepId),
}

/// A difference of clocks, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Bounds {
    least: i128,
    most: i128,
}

impl Bounds {
    const ANY: Self = Self { least: i128::MIN, most: i128::MAX };

    /// What both allow; what the other does where they contradict each other, since clocks drift.
    fn narrowed_by(self, other: Self) -> Self {
        let (least, most) = (self.least.max(other.least), self.most.min(other.most));
        if least <= most { Self { least, most } } else { other }
    }

    /// The recorder's time when the device's clock was at `device`.
    fn recorded(self, device: u64) -> u64 {
        let ahead = self.least.midpoint(self.most);
        u64::try_from(i128::from(device) + ahead).unwrap_or(0)
    }
}

impl Moment {
    /// Number of its stamp.
    fn index(self) -> usize {
        match self {
            Self::Start => 0,
            Self::Arrival(step) => 1 + 2 * step.index(),
            Self::End(step) => 2 + 2 * step.index(),
        }
    }
}

impl Stamps {
    /// Room for the stamps of any run of a plan; `None` where the GPU is not driven through CUDA.
    ///
    /// # Errors
    /// When the system lets nobody pin as much.
    pub(super) fn new(plan: &Plan, gpu: &Gpu, recorder: Arc<Recorder>) -> Result<Option<Self>> {
        let Some(ordinal) = gpu.ordinal() else { return Ok(None) };
        let steps = plan.programs.iter().map(|program| program.steps.len()).max().unwrap_or(0);
        let region = Arc::new(Region::new((1 + 2 * steps) * STAMP_BYTES)?);
        let context = CudaContext::new(ordinal).context("opening the GPU's context")?;
        let pinned = Pinned::alone(&context, &region).context("pinning memory for times")?;
        Ok(Some(Self {
            pinned,
            region,
            recorder,
            ahead: Bounds::ANY,
            began: None,
            delivered: Vec::new(),
            heard: Vec::new(),
        }))
    }

    /// Where a moment leaves its stamp.
    pub(super) fn place(&self, moment: Moment) -> Place {
        let address = self.pinned.address() + (moment.index() * STAMP_BYTES) as u64;
        // SAFETY: the stamp lies in the region, which is pinned as long as the state that launches; it is one of a step
        // of the plan that the region is made for.
        unsafe { Place::new(address + 8, address) }
    }

    /// Notes that a replayed run is being queued.
    pub(super) fn begin(&mut self) {
        self.delivered.clear();
        self.heard.clear();
        self.began = Some(self.recorder.now());
    }

    /// Notes that a letter is being delivered.
    pub(super) fn deliver(&mut self, step: StepId) {
        if self.began.is_some() {
            self.delivered.push((step, self.recorder.now()));
        }
    }

    /// Notes that the host has heard of a step.
    pub(super) fn hear(&mut self, step: StepId) {
        if self.began.is_some() {
            self.heard.push((step, self.recorder.now()));
        }
    }

    /// What a lane did in the replayed run, which is over.
    ///
    /// # Errors
    /// When a step left no stamp.
    pub(super) fn spans(
        &mut self,
        (run, turn, lane): (u32, u32, u32),
        steps: &[StepId],
    ) -> Result<Vec<Span>> {
        let ended = self.recorder.now();
        let began = self.began.take().context("no run was replayed")?;
        let left = |moment| self.left(moment, turn).context("a step left no time");
        let start = left(Moment::Start)?;
        let ends = steps.iter().map(|&step| left(Moment::End(step)));
        let ends: Vec<u64> = ends.collect::<Result<_>>()?;
        // The recorder's time is at least that of what came before, at most that of what came after.
        let mut least = i128::from(began) - i128::from(start);
        let mut most = i128::from(ended) - i128::from(*ends.last().unwrap_or(&start));
        for &(step, at) in &self.delivered {
            least = least.max(i128::from(at) - i128::from(left(Moment::Arrival(step))?));
        }
        for &(step, at) in &self.heard {
            most = most.min(i128::from(at) - i128::from(left(Moment::End(step))?));
        }
        self.ahead = self.ahead.narrowed_by(Bounds { least, most });
        let mut ready = self.ahead.recorded(start);
        let span = |(&step, end): (&StepId, u64)| {
            let arrival = self.left(Moment::Arrival(step), turn);
            let start = arrival.map_or(ready, |arrival| self.ahead.recorded(arrival).max(ready));
            let end = self.ahead.recorded(end).max(start);
            let span = Span { run, step, lane, ready, start, end };
            ready = end;
            span
        };
        Ok(steps.iter().zip(ends).map(span).collect())
    }

    /// The device's nanoseconds that a moment of a run left; `None` where it left none.
    fn left(&self, moment: Moment, turn: u32) -> Option<u64> {
        // SAFETY: the stamp lies in the region, and the device writes it at its own pace: both are only used as atomics.
        let (nanos, left_by) = unsafe {
            let stamp = self.region.as_ptr().add(moment.index() * STAMP_BYTES);
            (AtomicU64::from_ptr(stamp.cast()), AtomicU32::from_ptr(stamp.add(8).cast()))
        };
        (left_by.load(Ordering::Acquire) == turn).then(|| nanos.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_are_set_by_what_came_before_and_after() {
        let first = Bounds::ANY.narrowed_by(Bounds { least: -20, most: 10 });
        let both = first.narrowed_by(Bounds { least: 0, most: 40 });
        assert_eq!(both, Bounds { least: 0, most: 10 });
        assert_eq!(both.recorded(100), 105);
        // A clock that has drifted.
        assert_eq!(both.narrowed_by(Bounds { least: 12, most: 16 }).recorded(100), 114);
    }
}
