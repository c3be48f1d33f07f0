//! Measures how fast this machine's devices and links are, with the kernels that plans run.
//!
//! Every figure is the median of a few rounds: what plans will find, also on a machine that others use too.

mod gpu;
mod links;
mod peers;
pub mod work;

use std::hint::black_box;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};
use ir::id::DeviceId;
use ir::machine::{Device, DeviceKind, LinearRate, Machine, RatePoint, RateSource, Rates};
use ir::tensor::Format;

use crate::bind::spared_beside_gpus;
use crate::kernels::cpu::cache::Element;
use crate::kernels::cpu::isa::Isa;
use crate::kernels::cpu::pack::{PANEL, PackedMatrix, pack};
use crate::kernels::gpu::device::Gpu;
use crate::memory::Region;
use crate::team::Team;
use work::{Layer, multiply, prompt_flops};

/// Columns of the measured matrices: the features of a 1 B to 3 B model.
const COLUMNS: usize = 2048;
/// The least rows of the matrix that memory bounds.
const MANY_ROWS: usize = 65_536;
/// What is read until memory is measured again is so many times as large as the caches.
const CACHES: usize = 3;
/// Caches up to this size are exceeded by every matrix; larger ones by what is read between two visits to one.
const SMALL_CACHES: usize = 64 << 20;
/// The least time of a step: a team's threads see each other's cache lines twice.
const LEAST_STEP_NANOS: f64 = 500.0;
/// Rows of the matrix that arithmetic bounds.
const FEW_ROWS: usize = 4096;
/// Tokens at which linears are measured with the large matrix, and with the small one.
const FEW_TOKENS: [u32; 6] = [1, 2, 4, 8, 16, 32];
const MANY_TOKENS: [u32; 3] = [64, 128, 512];
/// Rounds of a measurement end at the first of these: enough of them, or enough of them for the time that has passed.
const MOST_ROUNDS: usize = 15;
const LEAST_ROUNDS: usize = 3;
const MOST_TIME: Duration = Duration::from_millis(150);
/// Times that each linear is measured in turn with the others, and what each of them takes but for its last round.
const VISITS: usize = 5;
/// Rounds of what is measured with memory being read in between.
const COLD_ROUNDS: usize = 5;
const VISIT_TIME: Duration = Duration::from_millis(15);
/// The least bytes that are streamed.
const STREAMED_BYTES: usize = 512 << 20;

/// Replaces the rates of all devices of `machine`, of their links and of sums by the vendor's library by measured ones.
/// GPUs that do not reach each other's memory do so by way of the fastest NUMA node.
/// `progress` is told what is measured next.
///
/// # Errors
/// When a device cannot be bound or has no memory to measure with.
pub fn calibrate(machine: &mut Machine, isa: Isa, mut progress: impl FnMut(&str)) -> Result<()> {
    let nodes = machine.devices.ids().filter_map(|id| Some((id, computing(machine, id)?)));
    let devices: Vec<(DeviceId, Vec<u32>)> = nodes.collect();
    for (id, cpus) in &devices {
        let name = machine.devices[*id].name.clone();
        progress(&name);
        // Nothing fetches while processors are measured.
        let beside_fetch = machine.devices[*id].rates.beside_fetch;
        let cached = last_caches(&machine.devices[*id]);
        let rates = on_team(cpus, |team| device_rates(team, isa, cached, beside_fetch))
            .with_context(|| format!("measuring {name}"))?;
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
    let mut opened = Vec::new();
    for &(id, ordinal) in &gpus {
        let name = machine.devices[id].name.clone();
        progress(&name);
        let gpu = Gpu::cuda(ordinal).with_context(|| format!("opening {name}"))?;
        let rates = gpu::rates(&gpu, gpu::Sizes::FULL);
        machine.devices[id].rates = rates.with_context(|| format!("measuring {name}"))?;
        for (node, cpus) in &devices {
            let label = label(machine, *node, id);
            progress(&label);
            let cached = last_caches(&machine.devices[*node]);
            let bus = on_team(cpus, |team| links::bus(&gpu, ordinal, team, cached));
            let bus = bus.with_context(|| format!("measuring {label}"))?;
            set(machine, *node, id, bus.to_gpu);
            set(machine, id, *node, bus.from_gpu);
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

/// Bytes per second that the cores of a NUMA node read from its memory at the moment; `None` for a GPU.
///
/// # Errors
/// When they cannot be bound or there is no memory to measure with.
pub fn reads_now(machine: &Machine, id: DeviceId) -> Result<Option<f64>> {
    let Some(cpus) = computing(machine, id) else { return Ok(None) };
    let cached = last_caches(&machine.devices[id]);
    on_team(&cpus, |team| read_rate(team, cached)).map(Some)
}

/// The processors of a NUMA node that compute. Beside GPUs those are fewer than all, and slower: that is what most plans
/// of such a machine use.
fn computing(machine: &Machine, id: DeviceId) -> Option<Vec<u32>> {
    let has_gpus = machine.devices.rows().iter().any(|device| device.kind.is_gpu());
    match &machine.devices[id].kind {
        DeviceKind::Numa { cpus, .. } => {
            let spared = if has_gpus { spared_beside_gpus(cpus.len()) } else { 0 };
            Some(cpus[..cpus.len() - spared].to_vec())
        }
        DeviceKind::Gpu { .. } => None,
    }
}

fn label(machine: &Machine, from: DeviceId, to: DeviceId) -> String {
    format!("{} to {}", machine.devices[from].name, machine.devices[to].name)
}

fn set(machine: &mut Machine, from: DeviceId, to: DeviceId, speed: links::Speed) {
    for link in machine.links.iter_mut().filter(|link| link.from == from && link.to == to) {
        link.bytes_per_sec = speed.bytes_per_sec;
        link.latency_nanos = speed.latency_nanos;
    }
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
    thread::scope(|scope| {
        let measured = scope.spawn(|| work(&Team::new(cpus)?)).join();
        measured.map_err(|_| anyhow!("a kernel panicked"))?
    })
}

/// Bytes of a device's last-level caches.
fn last_caches(device: &Device) -> usize {
    let caches = device.cpu_caches.iter();
    let last = caches.max_by_key(|cache| cache.level);
    last.map_or(0, |cache| cache.bytes as usize * cache.count as usize)
}

fn device_rates(team: &Team, isa: Isa, cached: usize, beside_fetch: f64) -> Result<Rates> {
    let memory = Memory::new(team, cached)?;
    let (read_bytes_per_sec, linear) = streaming_rates(team, isa, &memory)?;
    Ok(Rates {
        source: RateSource::Calibrated,
        read_bytes_per_sec,
        step_nanos: step_nanos(team, isa, &memory)?,
        linear,
        experts: Vec::new(),
        attention_nanos: 0.0,
        attention_flops_per_sec: attention_rate(team, isa)?,
        cache_bytes_per_sec: cache_rate(team, isa, &memory)?,
        beside_fetch,
    })
}

/// Bytes per second of all members reading memory that none of them has cached; the last-level caches hold
/// `cached` bytes.
pub fn read_rate(team: &Team, cached: usize) -> Result<f64> {
    let memory = Memory::new(team, cached)?;
    let nanos = typical(|| memory.read(team))?;
    Ok(memory.bytes as f64 / nanos * 1e9)
}

/// Memory that no cache holds.
struct Memory {
    region: Region,
    bytes: usize,
    /// Bytes of the last-level caches.
    cached: usize,
}

impl Memory {
    fn new(team: &Team, cached: usize) -> Result<Self> {
        let bytes = STREAMED_BYTES.max(CACHES * cached);
        let mut region = Region::new(bytes)?;
        touch(team, region.as_mut_slice());
        Ok(Self { region, bytes, cached })
    }

    /// Lets all members read their parts.
    fn read(&self, team: &Team) -> Result<()> {
        let words: &[u64] = self.region.as_slice();
        team.run(|member| {
            let mut sums = [0u64; 8];
            for chunk in words[team.split(member, words.len(), 512)].chunks_exact(8) {
                for (sum, word) in sums.iter_mut().zip(chunk) {
                    *sum ^= word;
                }
            }
            black_box(sums);
        });
        Ok(())
    }

    /// Bytes of what is measured by itself: more than small caches hold.
    fn least_bytes(&self) -> usize {
        CACHES * self.cached.min(SMALL_CACHES)
    }

    /// Whether no cache holds what has so many bytes, so that it can be read again at once.
    fn is_above_caches(&self, bytes: usize) -> bool {
        bytes >= CACHES * self.cached
    }

    /// Median times, in nanoseconds, of parts of some work, before each of which memory is read, so that no cache holds what
    /// the part reads.
    fn cold<const PARTS: usize>(
        &self,
        team: &Team,
        mut part: impl FnMut(usize) -> Result<()>,
    ) -> Result<[f64; PARTS]> {
        let mut times = [const { Vec::new() }; PARTS];
        // The first round warms up.
        for round in 0..=COLD_ROUNDS {
            for (index, times) in times.iter_mut().enumerate() {
                self.read(team)?;
                let start = Instant::now();
                part(index)?;
                if round > 0 {
                    times.push(start.elapsed().as_nanos() as f64);
                }
            }
        }
        Ok(times.map(median))
    }
}

/// Time of a step beside what it reads: how much longer a matrix takes by small parts, one step each, than at once.
/// Memory idles while one step ends and the next is begun.
fn step_nanos(team: &Team, isa: Isa, memory: &Memory) -> Result<f64> {
    /// 1 MiB a part: the smaller matrices of a layer.
    const PART_PANELS: usize = 8;
    let matrix = packed(team, Format::Bf16, many_rows(Format::Bf16, memory), COLUMNS)?;
    let firsts = (0..matrix.rows() / PANEL / PART_PANELS).map(|part| part * PART_PANELS);
    let parts: Vec<PackedMatrix> = firsts.map(|first| matrix.part(first, PART_PANELS)).collect();
    let (x, mut out) = (vec![0.1; COLUMNS], vec![0.0; matrix.rows()]);
    let few = PART_PANELS * PANEL;
    // In turn: a machine that others use is not as fast at all times.
    let [whole, by_parts] = memory.cold(team, |way| {
        if way == 0 {
            multiply(team, isa, &matrix, &x, 1, &mut out)
        } else {
            parts.iter().try_for_each(|part| multiply(team, isa, part, &x, 1, &mut out[..few]))
        }
    })?;
    Ok(((by_parts - whole) / parts.len() as f64).max(LEAST_STEP_NANOS))
}

/// Rows of a matrix that memory bounds.
fn many_rows(format: Format, memory: &Memory) -> usize {
    let row_bytes = format.bytes(1, COLUMNS as u64) as usize;
    MANY_ROWS.max((memory.least_bytes() / row_bytes).next_multiple_of(PANEL))
}

/// Bytes per second of reading memory, and rates of linears in all formats. Each is measured a little at a time, in turn
/// with the others and with reads of all that memory beside it: a machine that others use is not as fast at all times, and
/// what is compared must have met the same.
fn streaming_rates(team: &Team, isa: Isa, memory: &Memory) -> Result<(f64, Vec<LinearRate>)> {
    let mut kernels = Vec::new();
    for format in Format::ALL {
        kernels.push(Measured::new(team, format, many_rows(format, memory), &FEW_TOKENS)?);
        kernels.push(Measured::new(team, format, FEW_ROWS, &MANY_TOKENS)?);
    }
    let most = MANY_TOKENS.iter().copied().max().unwrap_or(1) as usize;
    let x: Vec<f32> = (0..most * COLUMNS).map(made_up).collect();
    let mut out = vec![0.0; kernels.iter().map(Measured::outputs).max().unwrap_or(0)];
    let turns = kernels.iter().map(|kernel| kernel.visits.len()).max().unwrap_or(0);
    let mut reads = Vec::new();
    for turn in (0..VISITS).flat_map(|_| 0..turns) {
        let read = timed(1, Duration::ZERO, || memory.read(team))?;
        reads.push(read);
        for kernel in &mut kernels {
            let may_repeat =
                kernel.matrix.rows() == FEW_ROWS || memory.is_above_caches(kernel.matrix.bytes());
            let time = if may_repeat { VISIT_TIME } else { Duration::ZERO };
            if let Some((tokens, visits)) = kernel.visits.get_mut(turn) {
                let count = *tokens as usize;
                let (x, out) = (&x[..count * COLUMNS], &mut out[..count * kernel.matrix.rows()]);
                let multiplied = || multiply(team, isa, &kernel.matrix, x, count, out);
                visits.push(Visit { nanos: timed(1, time, multiplied)?, read });
            }
        }
    }
    let read = median(reads);
    let mut rates: Vec<LinearRate> = Vec::new();
    for kernel in kernels {
        let points = kernel.points(memory, read);
        match rates.last_mut().filter(|rate| rate.format == kernel.format) {
            Some(rate) => rate.points.extend(points),
            None => rates.push(LinearRate { format: kernel.format, points }),
        }
    }
    Ok((memory.bytes as f64 / read.max(1.0) * 1e9, rates))
}

/// A matrix that is multiplied by some numbers of tokens, visit after visit.
struct Measured {
    format: Format,
    matrix: PackedMatrix,
    /// For each number of tokens.
    visits: Vec<(u32, Vec<Visit>)>,
}

/// What a linear took, and reading all memory before it, in nanoseconds.
struct Visit {
    nanos: f64,
    read: f64,
}

impl Measured {
    fn new(team: &Team, format: Format, rows: usize, tokens: &[u32]) -> Result<Self> {
        let matrix = packed(team, format, rows, COLUMNS)?;
        let visits = tokens.iter().map(|&tokens| (tokens, Vec::new())).collect();
        Ok(Self { format, matrix, visits })
    }

    fn outputs(&self) -> usize {
        let most = self.visits.iter().map(|(tokens, _)| *tokens).max().unwrap_or(1);
        self.matrix.rows() * most as usize
    }

    /// The rates while memory takes `read` nanoseconds to be read.
    fn points(&self, memory: &Memory, read: f64) -> Vec<RatePoint> {
        let (rows, columns) = (self.matrix.rows() as u64, COLUMNS as u64);
        // Reading as much as the matrix has.
        let part = self.format.bytes(rows, columns) as f64 / memory.bytes as f64;
        let point = |(tokens, visits): &(u32, Vec<Visit>)| {
            let nanos: Vec<f64> = visits.iter().map(|visit| visit.nanos).collect();
            let beside: Vec<f64> = visits.iter().map(|visit| visit.read * part).collect();
            let nanos = usual_nanos(&nanos, &beside, read * part);
            let weights_per_sec = (rows * columns) as f64 / nanos * 1e9;
            RatePoint { tokens: *tokens, weights_per_sec, nanos: 0.0 }
        };
        self.visits.iter().map(point).collect()
    }
}

/// Nanoseconds of a kernel while reading what it reads takes `usual` of them. Where memory bounds it and was not as fast
/// in all visits, each is judged by what reading took beside it.
fn usual_nanos(visits: &[f64], reads: &[f64], usual: f64) -> f64 {
    /// A kernel that reads as fast as this part of plain reads waits for memory.
    const WAITING: f64 = 0.7;
    /// The slowest visit took so many times as long as the fastest: memory's speed changed.
    const UNSTEADY: f64 = 1.25;
    let ratio = median(visits.iter().zip(reads).map(|(nanos, read)| nanos / read).collect());
    let fastest = visits.iter().copied().fold(f64::INFINITY, f64::min);
    let is_unsteady = visits.iter().any(|&nanos| nanos > UNSTEADY * fastest);
    let waits = ratio * WAITING <= 1.0;
    (if waits && is_unsteady { ratio * usual } else { median(visits.to_vec()) }).max(1.0)
}

fn packed(team: &Team, format: Format, rows: usize, columns: usize) -> Result<PackedMatrix> {
    pack(team, format, rows, columns, &|range, values| {
        for (i, value) in values.iter_mut().enumerate() {
            *value = made_up(range.start * columns + i);
        }
    })
}

/// Operations per second of a prefill of 512 tokens.
fn attention_rate(team: &Team, isa: Isa) -> Result<f64> {
    const TOKENS: usize = 512;
    let mut layer = Layer::new(team, Element::Bf16, TOKENS)?;
    let nanos = typical(|| layer.attend(team, isa, TOKENS, 0))?;
    Ok(prompt_flops(TOKENS) / nanos * 1e9)
}

/// Bytes of keys and values per second when one token looks back.
fn cache_rate(team: &Team, isa: Isa, memory: &Memory) -> Result<f64> {
    const PAST: usize = 4095;
    /// Together 134 MB.
    const LAYERS: usize = 8;
    let first = Layer::new(team, Element::Bf16, PAST + 1)?;
    // No layer is still in a small cache when its turn comes again.
    let count = LAYERS.max(memory.least_bytes().div_ceil(first.bytes()));
    let others = (1..count).map(|_| Layer::new(team, Element::Bf16, PAST + 1));
    let mut layers = [Ok(first)].into_iter().chain(others).collect::<Result<Vec<_>>>()?;
    let [nanos] = memory
        .cold(team, |_| layers.iter_mut().try_for_each(|layer| layer.attend(team, isa, 1, PAST)))?;
    let bytes: usize = layers.iter().map(Layer::bytes).sum();
    Ok(bytes as f64 / nanos.max(1.0) * 1e9)
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
            let mut piece =
                self.0[member].lock().unwrap_or_else(std::sync::PoisonError::into_inner);
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

/// Median time of rounds, in nanoseconds: up to [`MOST_ROUNDS`], as many as that time holds and at least so many.
fn timed(least: usize, most_time: Duration, mut round: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut times = Vec::with_capacity(MOST_ROUNDS);
    let begun = Instant::now();
    while times.len() < least || times.len() < MOST_ROUNDS && begun.elapsed() < most_time {
        let start = Instant::now();
        round()?;
        times.push(start.elapsed().as_nanos() as f64);
    }
    Ok(median(times).max(1.0))
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

#[cfg(test)]
mod tests {
    use super::usual_nanos;

    #[test]
    fn a_kernel_that_waits_for_memory_is_timed_at_its_usual_speed() {
        // Memory was twice as fast in two of three visits, and so was the kernel, which reads nine tenths as fast.
        let (visits, reads) = ([100.0, 50.0, 50.0], [90.0, 45.0, 45.0]);
        assert!((usual_nanos(&visits, &reads, 90.0) - 100.0).abs() < 1e-9);
        assert!((usual_nanos(&visits, &reads, 45.0) - 50.0).abs() < 1e-9);
        // Where all visits met the same, what reads met says less.
        assert!((usual_nanos(&[52.0, 50.0, 51.0], &[90.0, 45.0, 45.0], 90.0) - 51.0).abs() < 1e-9);
    }

    #[test]
    fn a_kernel_that_computes_for_longer_is_not() {
        let (visits, reads) = ([300.0, 400.0, 305.0], [90.0, 45.0, 45.0]);
        assert!((usual_nanos(&visits, &reads, 90.0) - 305.0).abs() < 1e-9);
    }
}
