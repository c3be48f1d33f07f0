//! A team: the threads of one device, each bound to a logical CPU, that do one piece of work together.
//!
//! - A dispatch costs one store for the caller and one cache line a member while the workers spin.
//! - Idle workers spin for [`SPIN`], give way again and again for [`IDLE`], and then park; a worker that notices
//!   that its CPU is wanted by somebody else parks at once until that has stopped.
//! - A member that panics ends the run: the panic goes on in the caller, and no barrier hangs.

#![expect(unsafe_code, reason = "workers borrow the caller's closure for the length of one run")]

mod shares;

use std::any::Any;
use std::cell::UnsafeCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use hwlocality::Topology;
use hwlocality::bitmap::BitmapIndex;
use hwlocality::cpu::binding::CpuBindingFlags;
use hwlocality::cpu::cpuset::CpuSet;

pub use self::shares::{Claim, Shares};
use crate::memory::Arena;
use crate::waiting::{NAP, SPIN, give_way, spin_for};

/// How long an idle worker gives way before it parks: longer than a lane waits for a GPU within one run, since
/// waking some ten threads takes a millisecond and more on virtual machines.
const IDLE: Duration = Duration::from_millis(20);
/// How long a waiter inside a run gives way before it sleeps instead.
const PATIENCE: Duration = Duration::from_millis(2);

/// The threads of one device; the thread that made the team is member 0.
pub struct Team {
    shared: Arc<Shared>,
    workers: Vec<Worker>,
    arena: Arena,
}

/// Contiguous chunks of `0..count`, claimed by whoever is free.
pub struct Chunks {
    next: Padded<AtomicUsize>,
    count: usize,
    grain: usize,
}

/// A point inside a run that no member passes before all have reached it.
pub struct Barrier<'a> {
    team: &'a Shared,
    arrived: Padded<AtomicUsize>,
    generation: Padded<AtomicUsize>,
}

/// Parts of the work of a run, each of some tasks, that other work follows: no member waits for parts that it does not
/// need.
pub struct Parts<'a> {
    team: &'a Shared,
    /// Tasks of each part that are not done, and one more until what follows is done, too.
    left: Vec<AtomicUsize>,
}

struct Worker {
    thread: Thread,
    handle: Option<JoinHandle<()>>,
}

/// Keeps what different threads write on different pairs of cache lines.
#[repr(align(128))]
struct Padded<T>(T);

struct Shared {
    /// Counts runs; a change tells the workers to look at `work`.
    epoch: Padded<AtomicU64>,
    work: UnsafeCell<Option<Work>>,
    seats: Vec<Padded<Seat>>,
    busy: AtomicBool,
    closing: AtomicBool,
    panicked: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// What one worker tells the caller.
struct Seat {
    /// The last run that this worker has finished.
    done: AtomicU64,
    parked: AtomicBool,
}

/// The caller's closure, its lifetime erased.
#[derive(Clone, Copy)]
struct Work(*const (dyn Fn(usize) + Sync));

// SAFETY: `work` is written only by the caller while no worker runs (all `done` equal `epoch`) and
// read by workers only after they have seen the new epoch, which the caller stores afterwards.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `work` points to a `Sync` closure and is used only while its run lasts.
unsafe impl Send for Shared {}

impl Team {
    /// Spawns `cpus.len() - 1` workers, each bound to one logical CPU, and binds the calling thread,
    /// which becomes member 0, to the first.
    ///
    /// # Errors
    /// When `cpus` is empty, or a CPU does not exist or cannot be bound to.
    pub fn new(cpus: &[u32]) -> anyhow::Result<Self> {
        ensure!(!cpus.is_empty(), "a team needs at least one cpu");
        let topology = Arc::new(Topology::new().context("reading the machine's topology")?);
        let seats = (1..cpus.len())
            .map(|_| Padded(Seat { done: AtomicU64::new(0), parked: AtomicBool::new(false) }))
            .collect();
        let shared = Arc::new(Shared {
            epoch: Padded(AtomicU64::new(0)),
            work: UnsafeCell::new(None),
            seats,
            busy: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            panic: Mutex::new(None),
        });
        bind(&topology, &cpus[..1])?;
        let mut team = Self { shared, workers: Vec::new(), arena: Arena::default() };
        for (member, &cpu) in cpus.iter().enumerate().skip(1) {
            let (report, bound) = mpsc::channel();
            let (shared, topology) = (Arc::clone(&team.shared), Arc::clone(&topology));
            let handle = thread::Builder::new()
                .name(format!("cpu{cpu}"))
                .spawn(move || {
                    let result = bind(&topology, &[cpu]);
                    drop(topology);
                    let is_bound = result.is_ok();
                    let is_wanted = report.send(result).is_ok();
                    if is_bound && is_wanted {
                        shared.serve(member);
                    }
                })
                .with_context(|| format!("starting a thread for cpu {cpu}"))?;
            team.workers.push(Worker { thread: handle.thread().clone(), handle: Some(handle) });
            bound.recv().with_context(|| format!("starting a thread for cpu {cpu}"))??;
        }
        Ok(team)
    }

    /// Threads of the team, the caller's included.
    pub fn members(&self) -> usize {
        self.shared.seats.len() + 1
    }

    /// Memory for what lives as long as a step or a few, recycled so that steps do not fault pages in.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// Runs `work(member)` once on every member and returns when all are done.
    ///
    /// # Panics
    /// When a member panics, or a run of this team is under way: a run holds no other.
    pub fn run(&self, work: impl Fn(usize) + Sync) {
        let was_busy = self.shared.busy.swap(true, Ordering::Acquire);
        assert!(!was_busy, "a team does one run at a time");
        let outcome = if self.workers.is_empty() {
            catch_unwind(AssertUnwindSafe(|| work(0)))
        } else {
            self.dispatch(&work)
        };
        self.shared.busy.store(false, Ordering::Release);
        if let Err(payload) = outcome {
            resume_unwind(payload);
        }
    }

    /// The part of `0..count` that is `member`'s when each gets one contiguous range, cut at multiples of `grain`.
    pub fn split(&self, member: usize, count: usize, grain: usize) -> Range<usize> {
        let (members, grains) = (self.members(), count.div_ceil(grain));
        let cut = |member: usize| (member * grains / members * grain).min(count);
        cut(member)..cut(member + 1)
    }

    /// Runs `work` on every chunk of `0..count`, `grain` long each; free members claim the next one.
    pub fn for_each_chunk(&self, count: usize, grain: usize, work: impl Fn(Range<usize>) + Sync) {
        let chunks = Chunks::new(count, grain);
        self.run(|_| {
            while let Some(range) = chunks.claim() {
                work(range);
            }
        });
    }

    /// A barrier for the members of one run of this team.
    pub fn barrier(&self) -> Barrier<'_> {
        Barrier {
            team: &self.shared,
            arrived: Padded(AtomicUsize::new(0)),
            generation: Padded(AtomicUsize::new(0)),
        }
    }

    /// `count` tasks in shares, for one run of this team.
    pub fn shares(&self, count: usize) -> Shares {
        Shares::new((0..self.members()).map(|member| self.split(member, count, 1)))
    }

    /// `count` parts of `tasks` tasks each, for one run of this team.
    pub fn parts(&self, count: usize, tasks: usize) -> Parts<'_> {
        let left = (0..count).map(|_| AtomicUsize::new(tasks + 1)).collect();
        Parts { team: &self.shared, left }
    }

    fn dispatch(&self, work: &(dyn Fn(usize) + Sync)) -> thread::Result<()> {
        let shared = &*self.shared;
        let epoch = shared.epoch.0.load(Ordering::Relaxed) + 1;
        // SAFETY: only the lifetime changes; this function does not return before every worker has
        // finished with the closure.
        let erased: *const (dyn Fn(usize) + Sync + 'static) =
            unsafe { std::mem::transmute(std::ptr::from_ref(work)) };
        // SAFETY: `busy` keeps other callers out and all workers have finished the last run.
        unsafe { *shared.work.get() = Some(Work(erased)) };
        // Sequentially consistent with `Seat::parked`: either the worker sees the epoch before it
        // parks, or this thread sees that it has parked.
        shared.epoch.0.store(epoch, Ordering::SeqCst);
        for (worker, seat) in self.workers.iter().zip(&shared.seats) {
            if seat.0.parked.load(Ordering::SeqCst) {
                worker.thread.unpark();
            }
        }
        shared.perform(0, work);
        for seat in &shared.seats {
            wait_until(|| seat.0.done.load(Ordering::Acquire) == epoch);
        }
        if shared.panicked.load(Ordering::Acquire) {
            shared.panicked.store(false, Ordering::Relaxed);
            if let Some(payload) = shared.panic().take() {
                return Err(payload);
            }
        }
        Ok(())
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::SeqCst);
        for worker in &mut self.workers {
            worker.thread.unpark();
            if let Some(handle) = worker.handle.take() {
                // A worker catches every panic of the work, so there is nothing to learn here.
                let _ = handle.join();
            }
        }
    }
}

impl Chunks {
    /// Chunks of `grain`, the last one shorter where `grain` does not divide `count`.
    pub fn new(count: usize, grain: usize) -> Self {
        assert!(grain > 0, "a chunk holds something");
        Self { next: Padded(AtomicUsize::new(0)), count, grain }
    }

    /// The next chunk that nobody has yet.
    pub fn claim(&self) -> Option<Range<usize>> {
        let start = self.next.0.fetch_add(self.grain, Ordering::Relaxed);
        (start < self.count).then(|| start..self.count.min(start + self.grain))
    }
}

impl Barrier<'_> {
    /// Returns when all members have called it; what they wrote before is then visible to all.
    ///
    /// # Panics
    /// When another member has panicked and so will never come.
    pub fn wait(&self) {
        let members = self.team.seats.len() + 1;
        let generation = self.generation.0.load(Ordering::Relaxed);
        if self.arrived.0.fetch_add(1, Ordering::AcqRel) + 1 == members {
            self.arrived.0.store(0, Ordering::Relaxed);
            self.generation.0.store(generation.wrapping_add(1), Ordering::Release);
            return;
        }
        wait_until(|| {
            self.generation.0.load(Ordering::Acquire) != generation
                || self.team.panicked.load(Ordering::Relaxed)
        });
        let is_complete = self.generation.0.load(Ordering::Acquire) != generation;
        assert!(is_complete, "another member of the team panicked");
    }
}

impl Parts<'_> {
    /// Notes that a task of a part is done. Whether it was the last one: then what all of them wrote is visible, and the
    /// caller does what follows.
    pub fn finish_task(&self, part: usize) -> bool {
        self.left[part].fetch_sub(1, Ordering::AcqRel) == 2
    }

    /// Lets those pass who wait for a part, by whoever has done what follows its last task.
    pub fn open(&self, part: usize) {
        self.left[part].store(0, Ordering::Release);
    }

    /// Returns when a part is open; what was written before is then visible.
    ///
    /// # Panics
    /// When another member has panicked, so that the part may never be open.
    pub fn wait(&self, part: usize) {
        let is_open = || self.left[part].load(Ordering::Acquire) == 0;
        wait_until(|| is_open() || self.team.panicked.load(Ordering::Relaxed));
        assert!(is_open(), "another member of the team panicked");
    }
}

impl Shared {
    /// A worker's life: wait for a run, take part, say so.
    fn serve(&self, member: usize) {
        let seat = &self.seats[member - 1].0;
        let mut seen = 0;
        let mut spin = SPIN;
        while self.wait_for_run(seat, seen, &mut spin) {
            seen += 1;
            // SAFETY: the epoch has changed, so the caller has written `work` and will not write it
            // again before this member's `done`.
            let work = unsafe { *self.work.get() };
            if let Some(Work(work)) = work {
                // SAFETY: the caller keeps the closure alive until this member's `done`.
                self.perform(member, unsafe { &*work });
            }
            seat.done.store(seen, Ordering::Release);
        }
    }

    /// Waits for the epoch after `seen`; false when the team is closing.
    fn wait_for_run(&self, seat: &Seat, seen: u64, spin: &mut Duration) -> bool {
        let is_called =
            || self.epoch.0.load(Ordering::SeqCst) != seen || self.closing.load(Ordering::SeqCst);
        if !spin_for(*spin, is_called) {
            // Spinning costs nothing on a CPU of one's own and everything on a shared one.
            let is_shared = give_way(IDLE, is_called);
            *spin = if is_shared { Duration::ZERO } else { SPIN };
            while !is_called() {
                seat.parked.store(true, Ordering::SeqCst);
                if !is_called() {
                    thread::park();
                }
                seat.parked.store(false, Ordering::SeqCst);
            }
        }
        self.epoch.0.load(Ordering::SeqCst) != seen
    }

    fn perform(&self, member: usize, work: &(dyn Fn(usize) + Sync)) {
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| work(member))) {
            // The first payload is the cause; what barriers raise after it is not.
            self.panic().get_or_insert(payload);
            self.panicked.store(true, Ordering::Release);
        }
    }

    fn panic(&self) -> MutexGuard<'_, Option<Box<dyn Any + Send>>> {
        self.panic.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Binds the calling thread to logical CPUs.
pub(crate) fn bind(topology: &Topology, cpus: &[u32]) -> anyhow::Result<()> {
    let mut set = CpuSet::new();
    for &cpu in cpus {
        let index = BitmapIndex::try_from(cpu as usize)
            .ok()
            .filter(|&index| topology.cpuset().is_set(index))
            .with_context(|| format!("cpu {cpu} does not exist or may not be used"))?;
        set.set(index);
    }
    topology
        .bind_cpu(&set, CpuBindingFlags::THREAD)
        .with_context(|| format!("binding a thread to cpus {cpus:?}"))
}

/// Waits for other members, which are busy or have lost their CPU: spins, then gives way, then sleeps.
fn wait_until(is_done: impl Fn() -> bool) {
    if spin_for(SPIN, &is_done) {
        return;
    }
    let start = Instant::now();
    while !is_done() {
        if start.elapsed() < PATIENCE {
            thread::yield_now();
        } else {
            thread::sleep(NAP);
        }
    }
}

#[cfg(test)]
mod tests;
