//! How long what crosses between a node and a GPU is on its way while a GPU replays captured launches: letters in pinned
//! memory, as decodes exchange them.

#![expect(unsafe_code, reason = "kernels are given addresses of host memory")]

use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use cudarc::driver::CudaContext;
use hwlocality::Topology;
use ir::letters::FLAG_BYTES;

use super::gpu::replay;
use super::{median, on_thread};
use crate::kernels::gpu::device::Gpu;
use crate::kernels::gpu::mail::{Place, UNIT_BYTES};
use crate::memory::Region;
use crate::pinned::Pinned;
use crate::team::bind;
use crate::waiting::spin_for;

/// Letters there and back of one replay.
const LETTERS: usize = 64;
/// Replays that are timed, after one that warms up.
const REPLAYS: u32 = 15;
/// How long an answer is looked for.
const LOOKING: Duration = Duration::from_secs(1);

/// Nanoseconds of a letter with next to nothing in it, one way: the launch that takes or sends it, and the host's thread,
/// on one of the processors `driving`, that sees it and answers. `None` where the GPU captures no launches, or does not
/// answer.
///
/// # Errors
/// When no memory can be pinned, or the GPU fails.
pub(super) fn letter_nanos(gpu: &Gpu, driving: &[u32]) -> Result<Option<f64>> {
    let Some(ordinal) = gpu.ordinal() else { return Ok(None) };
    on_thread(|| {
        let topology = Topology::new().context("reading the machine's topology")?;
        bind(&topology, driving)?;
        Letters::new(gpu, ordinal)?.nanos()
    })
}

/// Letters that go to a GPU and back, one after the other: a flag each way for each, and one value each way.
struct Letters<'a> {
    gpu: &'a Gpu,
    pinned: Pinned,
}

impl<'a> Letters<'a> {
    fn new(gpu: &'a Gpu, ordinal: usize) -> Result<Self> {
        // Nothing but zeros: letters of turn 0 have all arrived.
        let region = Arc::new(Region::new(Self::value(2))?);
        let context = CudaContext::new(ordinal).context("opening the GPU's context")?;
        let pinned = Pinned::alone(&context, &region).context("pinning memory for letters")?;
        Ok(Self { gpu, pinned })
    }

    /// Where the flag of a letter lies, there or back.
    fn flag(letter: usize, is_back: bool) -> usize {
        (2 * letter + usize::from(is_back)) * FLAG_BYTES as usize
    }

    /// Where the values lie, there and back, behind all flags.
    fn value(number: usize) -> usize {
        Self::flag(LETTERS, false) + number * FLAG_BYTES as usize
    }

    fn place(&self, letter: usize, is_back: bool) -> Place {
        let address = |start: usize| self.pinned.address() + start as u64;
        // SAFETY: both lie in what is pinned, whose pages stay pinned until the launches have ended; flags say which side may
        // use the value.
        unsafe {
            Place::new(
                address(Self::flag(letter, is_back)),
                address(Self::value(usize::from(is_back))),
            )
        }
    }

    fn raised(&self, letter: usize, is_back: bool) -> &AtomicU32 {
        self.pinned.flag(Self::flag(letter, is_back))
    }

    fn nanos(&self) -> Result<Option<f64>> {
        let (span, turn) = (self.gpu.allocate(UNIT_BYTES)?, self.gpu.allocate(size_of::<u32>())?);
        let queue = || {
            for letter in 0..LETTERS {
                self.gpu.take(self.place(letter, false), &span, UNIT_BYTES, &turn);
                self.gpu.post(&span, UNIT_BYTES, self.place(letter, true), &turn);
            }
            Ok(())
        };
        self.gpu.write(&turn, &0u32.to_ne_bytes())?;
        let unmeasured = |error: &dyn Display| {
            tracing::warn!(
                "letters are not measured, and are forecast as other transfers: {error}"
            );
        };
        let captured = match self.gpu.client.graph_prepare() {
            Ok(()) => {
                queue()?;
                self.gpu.sync()?;
                self.gpu.capture(queue)?
            }
            Err(error) => Err(error),
        };
        let graph = match captured {
            Ok(graph) => graph,
            Err(error) => {
                unmeasured(&error);
                return Ok(None);
            }
        };
        let mut times = Vec::new();
        for number in 1..=REPLAYS + 1 {
            self.gpu.write(&turn, &number.to_ne_bytes())?;
            replay(&graph)?;
            let answered = self.answer(number);
            // The launches must end, whatever came back.
            (0..LETTERS)
                .for_each(|letter| self.raised(letter, false).store(number, Ordering::Release));
            self.gpu.sync()?;
            let Some(answered) = answered else {
                unmeasured(&"the GPU did not answer one within a second");
                return Ok(None);
            };
            if number > 1 {
                times.extend(answered);
            }
        }
        Ok(Some((median(times) / 2.0).max(1.0)))
    }

    /// Sends all letters of a turn, each when the one before has come back. Nanoseconds there and back of all but the
    /// first, which waits for the replay to begin; `None` where one does not come back.
    fn answer(&self, turn: u32) -> Option<Vec<f64>> {
        let mut times = Vec::with_capacity(LETTERS);
        for letter in 0..LETTERS {
            let start = Instant::now();
            self.raised(letter, false).store(turn, Ordering::Release);
            let back = self.raised(letter, true);
            let is_back = spin_for(LOOKING, || back.load(Ordering::Acquire) == turn);
            if !is_back {
                return None;
            }
            times.push(start.elapsed().as_nanos() as f64);
        }
        times.remove(0);
        Some(times)
    }
}

#[cfg(test)]
mod tests {
    use ir::machine::{Device, DeviceKind};

    use super::*;
    use crate::kernels::gpu::testing::gpu;

    #[test]
    fn letters_take_microseconds() {
        let Some(gpu) = gpu() else { return };
        if gpu.ordinal().is_none() {
            eprintln!("skipped: only CUDA devices reach pinned memory by address");
            return;
        }
        let machine = probe::machine(None).unwrap();
        let first = |device: &Device| match &device.kind {
            DeviceKind::Numa { cpus, .. } => cpus.first().copied(),
            DeviceKind::Gpu { .. } => None,
        };
        let cpu = machine.devices.rows().iter().find_map(first).expect("a node has processors");
        let nanos = letter_nanos(&gpu, &[cpu]).unwrap().expect("CUDA captures launches");
        // One way: 2.8 to 3.4 µs were measured on H200s; a copy that is waited for takes 12 to 15.
        assert!((500.0..8_000.0).contains(&nanos), "{nanos}");
    }
}
