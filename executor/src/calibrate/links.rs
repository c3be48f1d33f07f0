//! How fast devices reach each other's memory.

#![expect(unsafe_code, reason = "pinned memory is copied by the driver")]

use std::mem;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Instant;

use anyhow::{Context as _, Result, anyhow, ensure};
use hwlocality::Topology;

use super::processors::Memory;
use super::{Pieces, median, nanos, on_team, touch, typical};
use crate::fetch::Link;
use crate::kernels::gpu::device::Gpu;
use crate::locked;
use crate::memory::Region;
use crate::team::{Team, bind};

/// One direction of a link.
#[derive(Clone, Copy, Debug)]
pub(super) struct Speed {
    pub(super) bytes_per_sec: f64,
    /// Of an empty message.
    pub(super) latency_nanos: f64,
}

/// The bus between a NUMA node and a GPU.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bus {
    pub(super) to_gpu: Speed,
    pub(super) from_gpu: Speed,
    /// Share of its rate that the way to the GPU keeps while the node's cores read their memory, where both could be
    /// told.
    pub(super) beside_reads: Option<f64>,
    /// Share of its rate at which the node reads its memory while the GPU fetches from there.
    pub(super) beside_fetch: f64,
}

/// Weights are copied from pinned memory, and activations are moved, as runs do that. Processors `driving` drive what
/// copies while the team reads.
pub(super) fn bus(
    (gpu, ordinal): (&Gpu, usize),
    team: &Team,
    driving: &[u32],
    cached: usize,
) -> Result<Bus> {
    const BYTES: usize = 128 << 20;
    /// Activations of one token.
    const FEW_BYTES: usize = 16 << 10;
    /// How often the node reads alone and beside copies.
    const PAIRS: usize = 15;
    let mut source = Region::new(BYTES)?;
    touch(team, source.as_mut_slice());
    let source = Arc::new(source);
    let target = gpu.allocate(BYTES)?;
    let mut link = Link::new(ordinal)?;
    link.pin(&source)?;
    let (address, contents) = (target.address()?, source.as_slice::<u8>());
    let copies = Mutex::new(Vec::new());
    let mut copy = || {
        let start = Instant::now();
        // SAFETY: both are as long, nobody reads the target, and the copies end before they do.
        unsafe { link.copy(address, contents, || ()) }?;
        link.wait()?;
        locked(&copies).push(start..Instant::now());
        Ok(())
    };
    let copying_alone = typical(&mut copy)?;
    let to_gpu = BYTES as f64 / copying_alone * 1e9;
    let from_gpu = BYTES as f64 / typical(|| gpu.read(&target).map(drop))? * 1e9;
    let few = target.part(0, FEW_BYTES);
    let back = typical(|| gpu.read(&few).map(drop))?;
    let both = typical(|| {
        gpu.write(&few, &contents[..FEW_BYTES])?;
        gpu.read(&few).map(drop)
    })?;
    let topology = Topology::new().context("reading the machine's topology")?;
    let memory = Memory::new(team, cached)?;
    let (mut reading, mut copying) = (Vec::new(), Vec::new());
    // In turn: a machine that others use is not as fast at all times.
    for _ in 0..PAIRS {
        let alone = nanos(|| memory.read(team))?;
        // By itself it would share the processor of the member that began it, which all others wait for.
        let prepare = || bind(&topology, driving);
        let read = || {
            let start = Instant::now();
            memory.read(team).map(|()| start..Instant::now())
        };
        let read = beside(prepare, &mut copy, read)?;
        reading.push(alone / (read.end - read.start).as_nanos() as f64);
        let within = mem::take(&mut *locked(&copies)).into_iter();
        let within = within.filter(|copy| read.start <= copy.start && copy.end <= read.end);
        copying.extend(within.map(|copy| (copy.end - copy.start).as_nanos() as f64));
    }
    let beside_reads = (!copying.is_empty()).then(|| (copying_alone / median(copying)).min(1.0));
    Ok(Bus {
        to_gpu: Speed { bytes_per_sec: to_gpu, latency_nanos: (both - back).max(1.0) },
        from_gpu: Speed { bytes_per_sec: from_gpu, latency_nanos: back },
        beside_reads,
        beside_fetch: median(reading).min(1.0),
    })
}

/// Does `work` while another thread, after it has prepared, copies again and again.
fn beside<T>(
    prepare: impl FnOnce() -> Result<()> + Send,
    mut copy: impl FnMut() -> Result<()> + Send,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let has_ended = AtomicBool::new(false);
    let (begins, begun) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let copies = scope.spawn(|| {
            // Gone also where the first copy fails.
            let begins = begins;
            prepare()?;
            copy()?;
            drop(begins);
            while !has_ended.load(Ordering::Relaxed) {
                copy()?;
            }
            Ok::<(), anyhow::Error>(())
        });
        begun.recv().unwrap_or_default();
        let done = work();
        has_ended.store(true, Ordering::Relaxed);
        copies.join().map_err(|_| anyhow!("a thread panicked"))??;
        done
    })
}

/// From memory that one device's cores have touched to
/// memory of another's.
pub(super) fn between_nodes(from: &[u32], to: &[u32]) -> Result<Speed> {
    const BYTES: usize = 64 << 20;
    let mut source = Region::new(BYTES)?;
    on_team(from, |team| {
        touch(team, source.as_mut_slice());
        Ok(())
    })?;
    let words: &[u64] = source.as_slice();
    let nanos = on_team(to, |team| {
        let mut target = Region::new(BYTES)?;
        touch(team, target.as_mut_slice());
        let slots = Pieces::of(team, target.as_mut_slice());
        typical(|| {
            slots.fill(team, |range, piece| piece.copy_from_slice(&words[range]));
            Ok(())
        })
    })?;
    Ok(Speed {
        bytes_per_sec: BYTES as f64 / nanos * 1e9,
        latency_nanos: round_trip_nanos(from, to)? / 2.0,
    })
}

/// Time from one device's thread to the other's and back through a flag in shared memory.
fn round_trip_nanos(from: &[u32], to: &[u32]) -> Result<f64> {
    const TURNS: u32 = 2000;
    ensure!(!from.is_empty() && !to.is_empty(), "a device has no cores");
    let flag = AtomicU32::new(0);
    // Raised by the side that ends, so that nobody waits for a device whose team did not start.
    let is_over = AtomicBool::new(false);
    let wait = |value: u32| {
        let mut looks = 0u32;
        while flag.load(Ordering::Acquire) != value && !is_over.load(Ordering::Relaxed) {
            std::hint::spin_loop();
            looks += 1;
            // Two devices may share a core; then only one of them can look at a time.
            if looks.is_multiple_of(1 << 12) {
                thread::yield_now();
            }
        }
    };
    thread::scope(|scope| {
        let echo = scope.spawn(|| {
            let echoed = on_team(&to[..1], |_| {
                for turn in 0..TURNS {
                    wait(2 * turn + 1);
                    flag.store(2 * turn + 2, Ordering::Release);
                }
                Ok(())
            });
            is_over.fetch_or(echoed.is_err(), Ordering::Relaxed);
            echoed
        });
        let nanos = on_team(&from[..1], |_| {
            let start = Instant::now();
            for turn in 0..TURNS {
                flag.store(2 * turn + 1, Ordering::Release);
                wait(2 * turn + 2);
            }
            Ok(start.elapsed().as_nanos() as f64 / f64::from(TURNS))
        });
        is_over.store(true, Ordering::Relaxed);
        echo.join().map_err(|_| anyhow!("a thread panicked"))??;
        nanos
    })
}
