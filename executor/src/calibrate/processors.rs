//! Rates of the processors of a NUMA node.

mod attention;
mod turns;

use std::hint::black_box;

use anyhow::Result;
use ir::machine::{Device, RateSource, Rates};
use ir::tensor::{DType, Format};

use super::work::{made_up_matrix, multiply};
use super::{last_caches, median, nanos, touch, typical};
use crate::kernels::cpu::cache::Element;
use crate::kernels::cpu::isa::Isa;
use crate::kernels::cpu::pack::{PANEL, PackedMatrix};
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
/// Rounds of what is measured with memory being read in between.
const COLD_ROUNDS: usize = 5;
/// How many times as fast memory may be a quarter of the time as it is another before the user is told.
const UNEVEN: f64 = 1.25;
/// Types of caches, the usual one first.
const CACHES_OF: [(DType, Element); 4] = [
    (DType::Bf16, Element::Bf16),
    (DType::F16, Element::F16),
    (DType::F32, Element::F32),
    (DType::I8, Element::Int8),
];
/// The least bytes that are streamed.
const STREAMED_BYTES: usize = 512 << 20;

/// The rates of a device's processors, which are the team's. Nothing fetches while they are measured.
pub(super) fn device_rates(team: &Team, isa: Isa, device: &Device) -> Result<Rates> {
    let memory = Memory::new(team, last_caches(device))?;
    let step_nanos = step_nanos(team, isa, &memory)?;
    let measured = turns::streaming(team, isa, &memory, step_nanos)?;
    let [least, read_bytes_per_sec, most] = measured.read_bytes_per_sec;
    if most > UNEVEN * least {
        tracing::warn!(
            "{}: memory was read at {:.0} to {:.0} GB/s while its rates were measured, and so will plans find it: if \
             something else ran meanwhile, calibrate again without it",
            device.name,
            least / 1e9,
            most / 1e9
        );
    }
    let [usual, others @ ..] =
        CACHES_OF.map(|(kv_type, element)| attention::rates(team, isa, &memory, kv_type, element));
    let usual = usual?;
    let others = others.into_iter().map(|other| Ok(other?.rate)).collect::<Result<_>>()?;
    Ok(Rates {
        source: RateSource::Calibrated,
        read_bytes_per_sec,
        step_nanos,
        linear: measured.linear,
        experts: Vec::new(),
        shared_experts: measured.shared_experts,
        attention_nanos: (usual.nanos - step_nanos).max(0.0),
        attention_flops_per_sec: usual.rate.attention_flops_per_sec,
        prompt_score_nanos: usual.rate.prompt_score_nanos,
        cache_bytes_per_sec: usual.rate.cache_bytes_per_sec,
        score_nanos: usual.rate.score_nanos,
        other_caches: others,
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
pub(super) struct Memory {
    region: Region,
    bytes: usize,
    /// Bytes of the last-level caches.
    cached: usize,
}

impl Memory {
    pub(super) fn new(team: &Team, cached: usize) -> Result<Self> {
        let bytes = STREAMED_BYTES.max(CACHES * cached);
        let mut region = Region::new(bytes)?;
        touch(team, region.as_mut_slice());
        Ok(Self { region, bytes, cached })
    }

    /// Lets all members read their parts.
    pub(super) fn read(&self, team: &Team) -> Result<()> {
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
        self.cached > 0 && bytes >= CACHES * self.cached
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
                let nanos = nanos(|| part(index))?;
                if round > 0 {
                    times.push(nanos);
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
    let matrix = made_up_matrix(team, Format::Bf16, many_rows(Format::Bf16, memory), COLUMNS)?;
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
