//! Measures how fast this machine's devices and links are, with the kernels that plans run.
//!
//! Every figure is the median of a few rounds: what plans will find, also on a machine that others use too.

mod compiled;
mod gpu;
mod letters;
mod links;
mod peers;
mod processors;
pub mod work;

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};
use ir::id::DeviceId;
use ir::machine::{Device, DeviceKind, Link, Machine, Rates};

use crate::cpus::beside_all_gpus;
use crate::kernels::cpu::isa::Isa;
use crate::kernels::gpu::device::Gpu;
use crate::locked;
use crate::team::Team;
use processors::device_rates;

pub use compiled::{Share, compile, compiling, spared, unbind};
pub use processors::read_rate;

/// Rounds of a measurement end at the first of these: enough of them, or enough of them for the time that has passed.
const MOST_ROUNDS: usize = 15;
const LEAST_ROUNDS: usize = 3;
const MOST_TIME: Duration = Duration::from_millis(150);

/// Replaces the rates of all devices of `machine`, of their links and of sums by the vendor's library by measured ones.
/// GPUs that do not reach each other's memory do so by way of the fastest NUMA node.
/// `progress` is told what is measured next; `before_gpus` is called once nothing but GPUs is left to measure.
///
/// # Errors
/// When a device cannot be bound or has no memory to measure with.
pub fn calibrate(
    machine: &mut Machine,
    isa: Isa,
    mut progress: impl FnMut(&str),
    before_gpus: impl FnOnce(),
) -> Result<()> {
    let nodes = machine.devices.ids().filter_map(|id| Some((id, computing(machine, id)?)));
    let devices: Vec<(DeviceId, Vec<u32>)> = nodes.collect();
    for (at, (id, cpus)) in devices.iter().enumerate() {
        let device = &machine.devices[*id];
        progress(&device.name);
        let rates = match alike(machine, &devices[..at], (*id, cpus))? {
            Some(other) => Rates {
                beside_fetch: device.rates.beside_fetch,
                ..machine.devices[other].rates.clone()
            },
            None => on_team(cpus, |team| device_rates(team, isa, device))
                .with_context(|| format!("measuring {}", device.name))?,
        };
        machine.devices[*id].rates = rates;
    }
    for (from, from_cpus) in &devices {
        for (to, to_cpus) in devices.iter().filter(|(to, _)| to != from) {
            let label = label(machine, *from, *to);
            progress(&label);
            let speed = links::between_nodes(from_cpus, to_cpus);
            set(machine, *from, *to, speed.with_context(|| format!("measuring {label}"))?);
        }
    }
    let gpus: Vec<(DeviceId, usize)> = machine
        .devices
        .iter()
        .filter_map(|(id, device)| match &device.kind {
            DeviceKind::Gpu { ordinal, .. } => Some((id, *ordinal as usize)),
            DeviceKind::Numa { .. } => None,
        })
        .collect();
    before_gpus();
    let mut opened = Vec::new();
    for &(id, ordinal) in &gpus {
        let name = machine.devices[id].name.clone();
        progress(&name);
        let gpu = Gpu::cuda(ordinal).with_context(|| format!("opening {name}"))?;
        if let DeviceKind::Gpu { has_warpgroups, .. } = &mut machine.devices[id].kind {
            *has_warpgroups = gpu.has_warpgroups();
        }
        let rates = gpu::rates(&gpu, gpu::Sizes::FULL);
        machine.devices[id].rates = rates.with_context(|| format!("measuring {name}"))?;
        for (node, cpus) in &devices {
            let label = label(machine, *node, id);
            progress(&label);
            let cached = last_caches(&machine.devices[*node]);
            let driving = driving(machine, *node);
            let bus = on_team(cpus, |team| links::bus((&gpu, ordinal), team, &driving, cached));
            let bus = bus.with_context(|| format!("measuring {label}"))?;
            set(machine, *node, id, bus.to_gpu);
            links_of(machine, *node, id).for_each(|link| link.beside_reads = bus.beside_reads);
            set(machine, id, *node, bus.from_gpu);
            let letter = letters::letter_nanos(&gpu, &driving)
                .with_context(|| format!("measuring letters, {label}"))?;
            for (from, to) in [(*node, id), (id, *node)] {
                links_of(machine, from, to).for_each(|link| link.letter_nanos = letter);
            }
            // The GPU that is nearest disturbs a node most.
            let beside_fetch = &mut machine.devices[*node].rates.beside_fetch;
            *beside_fetch = if opened.is_empty() {
                bus.beside_fetch
            } else {
                beside_fetch.min(bus.beside_fetch)
            };
        }
        opened.push((id, ordinal, gpu));
    }
    for (at, (first, a, one)) in opened.iter().enumerate() {
        for (second, b, other) in &opened[at + 1..] {
            let label = label(machine, *first, *second);
            progress(&label);
            let rates = &machine.devices[*first].rates;
            let speed = peers::between_gpus([(one, *a), (other, *b)], rates);
            if let Some(speed) = speed.with_context(|| format!("measuring {label}"))? {
                set(machine, *first, *second, speed);
                set(machine, *second, *first, speed);
            } else {
                for (from, to) in [(*first, *second), (*second, *first)] {
                    let nodes = devices.iter().map(|(node, _)| *node);
                    let speeds = nodes.filter_map(|node| through(machine, [from, node, to]));
                    let fastest = speeds.max_by(|a, b| a.bytes_per_sec.total_cmp(&b.bytes_per_sec));
                    fastest.into_iter().for_each(|speed| set(machine, from, to, speed));
                }
            }
        }
    }
    let gpus: Vec<(&Gpu, usize)> = opened.iter().map(|(_, ordinal, gpu)| (gpu, *ordinal)).collect();
    if gpus.len() > 1 {
        progress("NCCL");
    }
    machine.collectives = peers::by_library(&gpus).unwrap_or_else(|error| {
        tracing::warn!("NCCL does not work here, so plans will not use it: {error:#}");
        None
    });
    Ok(())
}

/// The first device of those measured that is like another: with as many processors, the same caches, and memory that
/// is read as fast. What it does is not measured once more: most machines have several such nodes.
fn alike(
    machine: &Machine,
    measured: &[(DeviceId, Vec<u32>)],
    (id, cpus): (DeviceId, &[u32]),
) -> Result<Option<DeviceId>> {
    /// Rates that differ by no more than this part are the same: runs on one node differ by as much.
    const ALIKE: f64 = 0.1;
    /// Comparisons, in turn: a machine that others use is not as fast at all times.
    const TURNS: usize = 3;
    let caches = |id: DeviceId| &machine.devices[id].cpu_caches;
    let is_like = |other: &&(DeviceId, Vec<u32>)| {
        other.1.len() == cpus.len() && caches(other.0) == caches(id)
    };
    for (other, other_cpus) in measured.iter().filter(is_like) {
        let reads =
            |cpus: &[u32]| on_team(cpus, |team| read_rate(team, last_caches(&machine.devices[id])));
        let ratios = (0..TURNS).map(|_| Ok(reads(cpus)? / reads(other_cpus)?));
        let ratio = median(ratios.collect::<Result<_>>()?);
        if (ratio - 1.0).abs() <= ALIKE {
            return Ok(Some(*other));
        }
    }
    Ok(None)
}

/// Bytes per second that the cores of a NUMA node read from its memory at the moment; `None` for a GPU.
///
/// # Errors
/// When they cannot be bound or there is no memory to measure with.
pub fn reads_now(machine: &Machine, id: DeviceId) -> Result<Option<f64>> {
    let Some(cpus) = computing(machine, id) else { return Ok(None) };
    let cached = last_caches(&machine.devices[id]);
    on_team(&cpus, |team| read_rate(team, cached)).map(Some)
}

/// The processors of a NUMA node that compute. Beside GPUs those are fewer than all, and slower: that is what most
/// plans of such a machine use.
fn computing(machine: &Machine, id: DeviceId) -> Option<Vec<u32>> {
    let [computing, _] = beside_all_gpus(machine, cpus(&machine.devices[id])?);
    Some(computing.to_vec())
}

/// The processors of a NUMA node for the threads that drive GPUs: those that do not compute beside them, or all.
fn driving(machine: &Machine, id: DeviceId) -> Vec<u32> {
    let cpus = cpus(&machine.devices[id]).unwrap_or_default();
    let [_, spared] = beside_all_gpus(machine, cpus);
    if spared.is_empty() { cpus } else { spared }.to_vec()
}

/// The processors of a NUMA node; `None` for a GPU.
fn cpus(device: &Device) -> Option<&[u32]> {
    match &device.kind {
        DeviceKind::Numa { cpus, .. } => Some(cpus),
        DeviceKind::Gpu { .. } => None,
    }
}

fn label(machine: &Machine, from: DeviceId, to: DeviceId) -> String {
    format!("{} to {}", machine.devices[from].name, machine.devices[to].name)
}

fn set(machine: &mut Machine, from: DeviceId, to: DeviceId, speed: links::Speed) {
    for link in links_of(machine, from, to) {
        link.bytes_per_sec = speed.bytes_per_sec;
        link.latency_nanos = speed.latency_nanos;
        (link.letter_nanos, link.beside_reads) = (None, None);
    }
}

fn links_of(
    machine: &mut Machine,
    from: DeviceId,
    to: DeviceId,
) -> impl Iterator<Item = &mut Link> {
    machine.links.iter_mut().filter(move |link| link.from == from && link.to == to)
}

/// A path whose halves are taken one after the other; `None` where one of them is missing.
fn through(machine: &Machine, [from, by, to]: [DeviceId; 3]) -> Option<links::Speed> {
    let (first, second) = (machine.link(from, by)?, machine.link(by, to)?);
    Some(links::Speed {
        bytes_per_sec: 1.0 / (1.0 / first.bytes_per_sec + 1.0 / second.bytes_per_sec),
        latency_nanos: first.latency_nanos + second.latency_nanos,
    })
}

/// Runs `work` on a thread of its own with a team: a team binds the thread that makes it.
fn on_team<T: Send>(cpus: &[u32], work: impl FnOnce(&Team) -> Result<T> + Send) -> Result<T> {
    on_thread(|| work(&Team::new(cpus)?))
}

/// Runs `work` on a thread of its own, which it may bind.
fn on_thread<T: Send>(work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    thread::scope(|scope| {
        let measured = scope.spawn(work).join();
        measured.map_err(|_| anyhow!("a kernel panicked"))?
    })
}

/// Bytes of a device's last-level caches.
pub fn last_caches(device: &Device) -> usize {
    let caches = device.cpu_caches.iter();
    let last = caches.max_by_key(|cache| cache.level);
    last.map_or(0, |cache| cache.bytes as usize * cache.count as usize)
}

/// A slice cut into one piece for each member of a team.
struct Pieces<'a>(Vec<std::sync::Mutex<(std::ops::Range<usize>, &'a mut [u64])>>);

impl<'a> Pieces<'a> {
    fn of(team: &Team, mut words: &'a mut [u64]) -> Self {
        let count = words.len();
        let piece = |member| {
            let range = team.split(member, count, 512);
            let (piece, rest) = std::mem::take(&mut words).split_at_mut(range.len());
            words = rest;
            std::sync::Mutex::new((range, piece))
        };
        Self((0..team.members()).map(piece).collect())
    }

    fn fill(&self, team: &Team, fill: impl Fn(std::ops::Range<usize>, &mut [u64]) + Sync) {
        team.run(|member| {
            let mut piece = locked(&self.0[member]);
            let (range, piece) = &mut *piece;
            fill(range.clone(), piece);
        });
    }
}

/// Writes every page from the member that will read it.
fn touch(team: &Team, words: &mut [u64]) {
    Pieces::of(team, words).fill(team, |_, piece| piece.fill(0));
}

/// Median time of a few rounds, in nanoseconds, after one that warms up.
fn typical(mut round: impl FnMut() -> Result<()>) -> Result<f64> {
    round()?;
    timed(LEAST_ROUNDS, MOST_TIME, round)
}

/// Median time of rounds, in nanoseconds: of up to [`MOST_ROUNDS`], as many as begin in `most_time`, and of at least
/// `least`.
fn timed(least: usize, most_time: Duration, mut round: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut times = Vec::with_capacity(MOST_ROUNDS);
    let begun = Instant::now();
    while times.len() < least || times.len() < MOST_ROUNDS && begun.elapsed() < most_time {
        times.push(nanos(&mut round)?);
    }
    Ok(median(times).max(1.0))
}

/// Time of some work, in nanoseconds.
fn nanos(work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed().as_nanos() as f64)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Some number between −0.1 and 0.1 with as many different bits as weights have: what a GPU draws, and so its clock,
/// depends on how many bits change.
fn made_up(i: usize) -> f32 {
    let mixed = (i as u32).wrapping_mul(2_654_435_761);
    let mixed = (mixed ^ mixed >> 15).wrapping_mul(0x2c1b_3c6d);
    mixed.cast_signed() as f32 / (10.0 * i32::MAX as f32)
}
