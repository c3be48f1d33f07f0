//! Rates of the processors of a NUMA node.

use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::Result;
use ir::machine::{Device, LinearRate, RatePoint, RateSource, Rates};
use ir::tensor::Format;

use super::work::{Layer, multiply, prompt_flops};
use super::{last_caches, made_up, median, timed, touch, typical};
use crate::kernels::cpu::cache::Element;
use crate::kernels::cpu::isa::Isa;
use crate::kernels::cpu::pack::{PANEL, PackedMatrix, pack};
use crate::memory::Region;
use crate::team::Team;

/// Columns of the measured matrices: the features of a 1 B to 3 B model.
const COLUMNS: usize = 2048;
/// The least rows of the matrix that memory bounds.
const MANY_ROWS: usize = 65_536;
/// How many times as large as the caches is what is read until memory is measured again.
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
/// Times that each linear is measured in turn with the others, and what each of them takes but for its last round.
const VISITS: usize = 5;
const VISIT_TIME: Duration = Duration::from_millis(15);
/// Rounds of what is measured with memory being read in between.
const COLD_ROUNDS: usize = 5;
/// How many times as fast memory may be a quarter of the time as it is another before the user is told.
const UNEVEN: f64 = 1.25;
/// The least bytes that are streamed.
const STREAMED_BYTES: usize = 512 << 20;

/// The rates of a device's processors, which are the team's. Nothing fetches while they are measured.
pub(super) fn device_rates(team: &Team, isa: Isa, device: &Device) -> Result<Rates> {
    let memory = Memory::new(team, last_caches(device))?;
    let ([least, read_bytes_per_sec, most], linear) = streaming_rates(team, isa, &memory)?;
    if most > UNEVEN * least {
        tracing::warn!(
            "{}: memory was read at {:.0} to {:.0} GB/s while its rates were measured, and so will plans find it: if \
             something else ran meanwhile, calibrate again without it",
            device.name,
            least / 1e9,
            most / 1e9
        );
    }
    Ok(Rates {
        source: RateSource::Calibrated,
        read_bytes_per_sec,
        step_nanos: step_nanos(team, isa, &memory)?,
        linear,
        experts: Vec::new(),
        shared_experts: Vec::new(),
        attention_nanos: 0.0,
        attention_flops_per_sec: attention_rate(team, isa)?,
        cache_bytes_per_sec: cache_rate(team, isa, &memory)?,
        beside_fetch: device.rates.beside_fetch,
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

    /// Whether no cache holds `bytes` bytes that have been read, so that they can be read again at once.
    fn is_above_caches(&self, bytes: usize) -> bool {
        bytes >= CACHES * self.cached
    }

    /// Median times, in nanoseconds, of parts of some work, before each of which memory is read, so that no cache holds
    /// what the part reads.
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

/// Bytes per second of reading memory, a quarter of the time less, in the middle, and a quarter of the time more; and
/// rates of linears in all formats. Each is measured a little at a time, in turn with the others and with reads of all
/// that memory beside it: a machine that others use is not as fast at all times, and what is compared must have met the
/// same.
fn streaming_rates(team: &Team, isa: Isa, memory: &Memory) -> Result<([f64; 3], Vec<LinearRate>)> {
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
    reads.sort_by(f64::total_cmp);
    // That many quarters of the way from the shortest.
    let quarter = |quarters: usize| reads[reads.len() * quarters / 4];
    let read = quarter(2);
    let mut rates: Vec<LinearRate> = Vec::new();
    for kernel in kernels {
        let points = kernel.points(memory, read);
        match rates.last_mut().filter(|rate| rate.format == kernel.format) {
            Some(rate) => rate.points.extend(points),
            None => rates.push(LinearRate { format: kernel.format, points }),
        }
    }
    let rate = |quarters| memory.bytes as f64 / quarter(quarters).max(1.0) * 1e9;
    Ok(([3, 2, 1].map(rate), rates))
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

/// Nanoseconds of a kernel while reading what it reads takes `usual` of them. Where memory bounds it and was not as
/// fast in all visits, each is judged by what reading took beside it.
fn usual_nanos(visits: &[f64], reads: &[f64], usual: f64) -> f64 {
    /// A kernel that reads as fast as this part of plain reads waits for memory.
    const WAITING: f64 = 0.7;
    /// Where the slowest visit took more than this times as long as the fastest, memory's speed has changed.
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
