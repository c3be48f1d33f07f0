//! A team: the threads of one device, each bound to a logical CPU, that do one piece of work together.
//!
//! - A dispatch costs one store for the caller and one cache line a member while the workers spin.
//! - Work that members take piece by piece waits for nobody who has not begun: a worker *enters* a run, and the caller,
//!   once nothing is left to take, keeps the others out and waits for those inside. A member that loses its CPU in
//!   the middle of a piece holds the run up until the scheduler gives it back.
//! - Idle workers spin for [`SPIN`], give way again and again for [`IDLE`], and then park; a worker that notices
//!   that its CPU is wanted by somebody else parks at once until that has stopped.
//! - A worker that lost its CPU in a run stays away until nobody else wants that CPU; a caller that did changes CPUs
//!   with a worker.
//! - A member that panics ends the run: the panic goes on in the caller, and nobody waits for what it held.

#![expect(unsafe_code, reason = "workers borrow the caller's closure for the length of one run")]

mod chunks;
mod delays;
mod parts;
mod phase;
mod seat;
mod shares;

use std::any::Any;
use std::cell::UnsafeCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, mpsc};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use hwlocality::bitmap::BitmapIndex;
use hwlocality::cpu::binding::CpuBindingFlags;
use hwlocality::cpu::cpuset::CpuSet;
use hwlocality::{AsThreadId as _, Topology};

pub use self::chunks::Chunks;
use self::delays::{Delays, LONG};
pub use self::parts::Parts;
pub use self::phase::{Phase, Turn};
use self::seat::{Rest, Seat};
pub use self::shares::{Claim, Shares};
use crate::locked;
use crate::memory::{Arena, Regions};
use crate::waiting::{NAP, SPIN, give_way, spin_for};

/// How long an idle worker gives way before it parks: longer than a lane waits for a GPU within one run, since
/// waking some ten threads takes a millisecond and more on virtual machines. Also how long a worker that was away looks
/// whether its CPU is its own again: two slices of 8 ms, as Linux gives them at 250 ticks a second, and some more.
const IDLE: Duration = Duration::from_millis(20);
/// How long a waiter inside a run gives way before it sleeps instead.
const PATIENCE: Duration = Duration::from_millis(2);
/// How long a worker leaves its CPU to others before it looks again: several slices, since coming back too early costs
/// everybody one.
const AWAY: Duration = Duration::from_millis(50);

/// The threads of one device; the thread that made the team is member 0.
pub struct Team {
    shared: Arc<Shared>,
    workers: Vec<Worker>,
    arena: Arena,
    regions: Box<Regions>,
    places: Box<Mutex<Places>>,
}

/// Where members are bound, and how the caller's CPU is shared.
struct Places {
    topology: Arc<Topology>,
    /// The CPU of each member.
    cpus: Vec<u32>,
    delays: Option<Delays>,
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
    /// Whether the run needs every member.
    needs_all: AtomicBool,
    work: UnsafeCell<Option<Work>>,
    seats: Vec<Padded<Seat>>,
    busy: AtomicBool,
    closing: AtomicBool,
    panicked: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// The caller's closure, its lifetime erased.
#[derive(Clone, Copy)]
struct Work(*const (dyn Fn(usize) + Sync));

// SAFETY: `work` is written only by the caller while no worker is inside a run, and read by workers only inside one:
// they have then seen its epoch, which the caller stores after `work`, and the caller waits for them before it writes
// again.
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
        let seats = (1..cpus.len()).map(|_| Padded(Seat::default())).collect();
        let shared = Arc::new(Shared {
            epoch: Padded(AtomicU64::new(0)),
            needs_all: AtomicBool::new(false),
            work: UnsafeCell::new(None),
            seats,
            busy: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            panic: Mutex::new(None),
        });
        bind(&topology, &cpus[..1])?;
        let places = Places {
            topology: Arc::clone(&topology),
            cpus: cpus.to_vec(),
            delays: Delays::of_this_thread(),
        };
        let places = Box::new(Mutex::new(places));
        let mut team = Self {
            shared,
            workers: Vec::new(),
            arena: Arena::default(),
            regions: Box::default(),
            places,
        };
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

    /// Where weights and caches get their memory.
    pub fn regions(&self) -> &Regions {
        &self.regions
    }

    /// Runs `work(member)` once on every member and returns when all are done.
    ///
    /// # Panics
    /// When a member panics, or a run of this team is under way: a run holds no other.
    pub fn run(&self, work: impl Fn(usize) + Sync) {
        self.start(true, &work);
    }

    /// Runs `work(member)` on this thread and on other members that are free, and returns when all of them are done.
    ///
    /// Which members come, and when, is not known: `work` takes what there is to do piece by piece until nothing is
    /// left, from [`Chunks`], [`Shares`] or a [`Phase`].
    ///
    /// # Panics
    /// As [`Team::run`].
    pub fn work_off(&self, work: impl Fn(usize) + Sync) {
        self.start(false, &work);
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
        self.work_off(|_| {
            while let Some(range) = chunks.claim() {
                work(range);
            }
        });
    }

    /// The chunks of `0..count`, `grain` long each, for one run of this team that does other work after them.
    pub fn phase(&self, count: usize, grain: usize) -> Phase<'_> {
        Phase::new(&self.shared, count, grain)
    }

    /// `count` tasks in shares, for one run of this team.
    pub fn shares(&self, count: usize) -> Shares {
        Shares::new((0..self.members()).map(|member| self.split(member, count, 1)))
    }

    /// `count` parts of `tasks` tasks each, for one run of this team.
    pub fn parts(&self, count: usize, tasks: usize) -> Parts<'_> {
        Parts::new(&self.shared, count, tasks)
    }

    fn start(&self, needs_all: bool, work: &(dyn Fn(usize) + Sync)) {
        let was_busy = self.shared.busy.swap(true, Ordering::Acquire);
        assert!(!was_busy, "a team does one run at a time");
        let outcome = if self.workers.is_empty() {
            catch_unwind(AssertUnwindSafe(|| work(0)))
        } else {
            self.dispatch(needs_all, work)
        };
        self.shared.busy.store(false, Ordering::Release);
        if let Err(payload) = outcome {
            resume_unwind(payload);
        }
    }

    fn dispatch(&self, needs_all: bool, work: &(dyn Fn(usize) + Sync)) -> thread::Result<()> {
        let shared = &*self.shared;
        let start = Instant::now();
        let run = shared.epoch.0.load(Ordering::Relaxed) + 1;
        // SAFETY: only the lifetime changes; this function does not return before every worker has
        // left the run or is kept out of it.
        let erased: *const (dyn Fn(usize) + Sync + 'static) =
            unsafe { std::mem::transmute(std::ptr::from_ref(work)) };
        // SAFETY: `busy` keeps other callers out, and no worker is inside a run.
        unsafe { *shared.work.get() = Some(Work(erased)) };
        shared.needs_all.store(needs_all, Ordering::Relaxed);
        // Sequentially consistent with `Seat::rest`: either the worker sees the epoch before it
        // parks, or this thread sees that it has parked.
        shared.epoch.0.store(run, Ordering::SeqCst);
        for (worker, seat) in self.workers.iter().zip(&shared.seats) {
            match seat.0.rest() {
                Rest::Parked => worker.thread.unpark(),
                Rest::Away if needs_all => worker.thread.unpark(),
                Rest::Awake | Rest::Away => {}
            }
        }
        shared.perform(0, work);
        for Padded(seat) in &shared.seats {
            if needs_all || !seat.close(run) {
                wait_until(|| seat.is_over(run));
            }
        }
        if start.elapsed() > LONG {
            self.leave_a_shared_cpu();
        }
        if shared.panicked.load(Ordering::Acquire) {
            shared.panicked.store(false, Ordering::Relaxed);
            if let Some(payload) = shared.panic().take() {
                return Err(payload);
            }
        }
        Ok(())
    }

    /// Changes CPUs with a worker when somebody else takes this thread's, which every run needs; the worker will stay
    /// away.
    fn leave_a_shared_cpu(&self) {
        let mut places = locked(&self.places);
        let Places { topology, cpus, delays } = &mut *places;
        if !delays.as_mut().is_some_and(Delays::are_long) {
            return;
        }
        let is_here = |seat: &Padded<Seat>| !matches!(seat.0.rest(), Rest::Away);
        let Some(index) = self.shared.seats.iter().position(is_here) else { return };
        let Some(handle) = &self.workers[index].handle else { return };
        let bind_worker = |cpu| -> anyhow::Result<()> {
            let set = set_of(topology, &[cpu])?;
            let flags = CpuBindingFlags::empty();
            Ok(topology.bind_thread_cpu(handle.as_thread_id(), &set, flags)?)
        };
        let (own, other) = (cpus[0], cpus[index + 1]);
        // The worker first, so that this thread never waits behind it. Where threads cannot be bound, all stay.
        if bind_worker(own).is_ok() {
            if bind(topology, &[other]).is_ok() {
                cpus.swap(0, index + 1);
            } else {
                // It was bound there before.
                let _ = bind_worker(other);
            }
        }
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

impl Shared {
    /// A worker's life: wait for a run, take part unless it is over, say so.
    fn serve(&self, member: usize) {
        let seat = &self.seats[member - 1].0;
        let mut seen = 0;
        let mut spin = SPIN;
        let mut delays = Delays::of_this_thread();
        while let Some(run) = self.wait_for_run(seat, seen, &mut spin) {
            seen = run;
            if !seat.enter(run) {
                continue;
            }
            let start = Instant::now();
            // SAFETY: this member is inside the run, so the caller has written `work` and will not write it again
            // before this member leaves.
            let work = unsafe { *self.work.get() };
            if let Some(Work(work)) = work {
                // SAFETY: the caller keeps the closure alive until this member leaves.
                self.perform(member, unsafe { &*work });
            }
            seat.leave(run);
            if start.elapsed() > LONG && delays.as_mut().is_some_and(Delays::are_long) {
                self.stay_away(seat, seen);
            }
        }
    }

    /// Waits for a run after `seen`; none when the team is closing.
    fn wait_for_run(&self, seat: &Seat, seen: u64, spin: &mut Duration) -> Option<u64> {
        let is_called =
            || self.epoch.0.load(Ordering::SeqCst) != seen || self.closing.load(Ordering::SeqCst);
        if !spin_for(*spin, is_called) {
            // Spinning costs nothing on a CPU of one's own and everything on a shared one.
            let is_shared = give_way(IDLE, is_called);
            *spin = if is_shared { Duration::ZERO } else { SPIN };
            while !is_called() {
                seat.set_rest(Rest::Parked);
                if !is_called() {
                    thread::park();
                }
                seat.set_rest(Rest::Awake);
            }
        }
        let run = self.epoch.0.load(Ordering::SeqCst);
        (run != seen).then_some(run)
    }

    /// Leaves the CPU to others until none of them wants it any more, or a run needs all.
    fn stay_away(&self, seat: &Seat, seen: u64) {
        let is_needed = || {
            let is_called = self.epoch.0.load(Ordering::SeqCst) != seen;
            (is_called && self.needs_all.load(Ordering::Relaxed))
                || self.closing.load(Ordering::SeqCst)
        };
        seat.set_rest(Rest::Away);
        while !is_needed() {
            thread::park_timeout(AWAY);
            if !give_way(IDLE, is_needed) {
                break;
            }
        }
        seat.set_rest(Rest::Awake);
    }

    fn perform(&self, member: usize, work: &(dyn Fn(usize) + Sync)) {
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| work(member))) {
            // The first payload is the cause; members that wait for this one panic because of it.
            self.panic().get_or_insert(payload);
            self.panicked.store(true, Ordering::Release);
        }
    }

    fn panic(&self) -> MutexGuard<'_, Option<Box<dyn Any + Send>>> {
        locked(&self.panic)
    }
}

/// Binds the calling thread to logical CPUs.
pub(crate) fn bind(topology: &Topology, cpus: &[u32]) -> anyhow::Result<()> {
    topology
        .bind_cpu(&set_of(topology, cpus)?, CpuBindingFlags::THREAD)
        .with_context(|| format!("binding a thread to cpus {cpus:?}"))
}

fn set_of(topology: &Topology, cpus: &[u32]) -> anyhow::Result<CpuSet> {
    let mut set = CpuSet::new();
    for &cpu in cpus {
        let index = BitmapIndex::try_from(cpu as usize)
            .ok()
            .filter(|&index| topology.cpuset().is_set(index))
            .with_context(|| format!("cpu {cpu} does not exist or may not be used"))?;
        set.set(index);
    }
    Ok(set)
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
