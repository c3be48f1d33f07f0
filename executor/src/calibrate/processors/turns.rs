//! Rates of what reads weights, linears and experts. Each is measured a little at a time, in turn with the others and
//! with reads of all memory beside it: a machine that others use is not as fast at all times, and what is compared must
//! have met the same.

use std::time::Duration;

use anyhow::Result;
use ir::machine::{LinearRate, RatePoint};
use ir::tensor::Format;

use super::{COLUMNS, Memory, many_rows};
use crate::calibrate::work::{Mixture, MixtureTokens, USED, made_up_matrix, multiply};
use crate::calibrate::{made_up, median, timed};
use crate::kernels::cpu::isa::Isa;
use crate::kernels::cpu::pack::PackedMatrix;
use crate::team::Team;

/// Rows of the matrix that arithmetic bounds.
const FEW_ROWS: usize = 4096;
/// Tokens at which linears are measured with the large matrix, and with the small one.
const FEW_TOKENS: [u32; 6] = [1, 2, 4, 8, 16, 32];
const MANY_TOKENS: [u32; 3] = [64, 128, 512];
/// Formats that mixtures are held in.
const EXPERT_FORMATS: [Format; 5] =
    [Format::F32, Format::F16, Format::Bf16, Format::Q8, Format::Q4];
/// Experts of the measured mixture, of which a token chooses half.
const EXPERTS: usize = 2 * USED;
/// Tokens that share an expert, in the mean.
const SHARING: [u32; 8] = [1, 2, 4, 8, 16, 32, 64, 128];
/// From so many tokens on, arithmetic bounds what they are multiplied with, wherever that is read from: small matrices
/// of linears, and all of a mixture's, which AMX multiplies by fewer as fast as they are read.
const LINEARS_BOUND_BY_ARITHMETIC: u32 = 64;
const EXPERTS_BOUND_BY_ARITHMETIC: u32 = 128;
/// Times that each is measured, and what each of them takes but for its last round.
const VISITS: usize = 5;
const VISIT_TIME: Duration = Duration::from_millis(15);

/// What was measured.
pub(super) struct Streaming {
    /// Bytes per second of reading memory: a quarter of the time less, in the middle, and a quarter of the time more.
    pub(super) read_bytes_per_sec: [f64; 3],
    /// In all formats.
    pub(super) linear: Vec<LinearRate>,
    /// By the tokens that share an expert.
    pub(super) shared_experts: Vec<LinearRate>,
}

/// Measures a team's rates. A step takes `step_nanos` beside what it reads, which rates leave out.
///
/// # Errors
/// When there is no memory.
pub(super) fn streaming(
    team: &Team,
    isa: Isa,
    memory: &Memory,
    step_nanos: f64,
) -> Result<Streaming> {
    let mut linears = Vec::new();
    for format in Format::ALL {
        for (rows, tokens) in
            [(many_rows(format, memory), &FEW_TOKENS[..]), (FEW_ROWS, &MANY_TOKENS)]
        {
            let work = LinearWork::new(made_up_matrix(team, format, rows, COLUMNS)?, tokens);
            linears.push(Measured::new(format, work, LINEARS_BOUND_BY_ARITHMETIC));
        }
    }
    let mut mixtures = Vec::new();
    for format in EXPERT_FORMATS {
        let work = ExpertWork::new(Mixture::new(team, format, EXPERTS)?);
        mixtures.push(Measured::new(format, work, EXPERTS_BOUND_BY_ARITHMETIC));
    }
    let turns = FEW_TOKENS.len().max(MANY_TOKENS.len()).max(SHARING.len());
    let mut reads = Vec::new();
    for turn in (0..VISITS).flat_map(|_| 0..turns) {
        let read = timed(1, Duration::ZERO, || memory.read(team))?;
        reads.push(read);
        linears.iter_mut().try_for_each(|linear| linear.visit(team, isa, memory, (turn, read)))?;
        mixtures
            .iter_mut()
            .try_for_each(|mixture| mixture.visit(team, isa, memory, (turn, read)))?;
    }
    reads.sort_by(f64::total_cmp);
    // That many quarters of the way from the shortest.
    let quarter = |quarters: usize| reads[reads.len() * quarters / 4];
    let read = quarter(2);
    let rate = |quarters| memory.bytes as f64 / quarter(quarters).max(1.0) * 1e9;
    let mut linear: Vec<LinearRate> = Vec::new();
    for measured in &linears {
        let points = measured.points(memory, read, step_nanos);
        match linear.last_mut().filter(|rate| rate.format == measured.format) {
            Some(rate) => rate.points.extend(points),
            None => linear.push(LinearRate { format: measured.format, points }),
        }
    }
    let shared_experts = mixtures.iter().map(|measured| LinearRate {
        format: measured.format,
        points: measured.points(memory, read, step_nanos),
    });
    Ok(Streaming {
        read_bytes_per_sec: [3, 2, 1].map(rate),
        linear,
        shared_experts: shared_experts.collect(),
    })
}

/// What is measured for some numbers of tokens.
trait Work {
    /// For each number of tokens that number, and the weights that are worked through.
    fn points(&self) -> Vec<(u32, u64)>;

    /// Does it for the tokens of a point.
    fn run(&mut self, team: &Team, isa: Isa, point: usize) -> Result<()>;
}

/// A matrix that is multiplied.
struct LinearWork {
    matrix: PackedMatrix,
    tokens: &'static [u32],
    x: Vec<f32>,
    out: Vec<f32>,
}

/// A mixture whose experts are chosen.
struct ExpertWork {
    mixture: Mixture,
    tokens: Vec<MixtureTokens>,
}

/// Work, and how long it took.
struct Measured<W> {
    format: Format,
    work: W,
    /// From so many tokens on it may be repeated in a cache.
    bound_from: u32,
    points: Vec<Point>,
}

/// A number of tokens.
struct Point {
    tokens: u32,
    /// Worked through at a time.
    weights: u64,
    visits: Vec<Visit>,
}

/// What some work took, and reading all memory before it, in nanoseconds.
struct Visit {
    nanos: f64,
    read: f64,
}

impl LinearWork {
    fn new(matrix: PackedMatrix, tokens: &'static [u32]) -> Self {
        let most = tokens.iter().copied().max().unwrap_or(1) as usize;
        let out = vec![0.0; most * matrix.rows()];
        Self { x: (0..most * matrix.columns()).map(made_up).collect(), matrix, tokens, out }
    }
}

impl Work for LinearWork {
    fn points(&self) -> Vec<(u32, u64)> {
        let weights = (self.matrix.rows() * self.matrix.columns()) as u64;
        self.tokens.iter().map(|&tokens| (tokens, weights)).collect()
    }

    fn run(&mut self, team: &Team, isa: Isa, point: usize) -> Result<()> {
        let tokens = self.tokens[point] as usize;
        let x = &self.x[..tokens * self.matrix.columns()];
        let out = &mut self.out[..tokens * self.matrix.rows()];
        multiply(team, isa, &self.matrix, x, tokens, out)
    }
}

impl ExpertWork {
    fn new(mixture: Mixture) -> Self {
        Self { mixture, tokens: SHARING.into_iter().map(sharing).collect() }
    }
}

impl Work for ExpertWork {
    fn points(&self) -> Vec<(u32, u64)> {
        let weights = |tokens: &MixtureTokens| tokens.chosen() as u64 * self.mixture.weights();
        SHARING.into_iter().zip(self.tokens.iter().map(weights)).collect()
    }

    fn run(&mut self, team: &Team, isa: Isa, point: usize) -> Result<()> {
        self.mixture.compute(team, isa, &mut self.tokens[point])
    }
}

/// Tokens of which `share` choose each expert in the mean: half of the experts as many more, and half as many fewer, as
/// is that number's square root, by which they would differ if each chose at random. One shares none.
fn sharing(share: u32) -> MixtureTokens {
    if share == 1 {
        return MixtureTokens::new(1, |_, rank| rank);
    }
    let (tokens, most) = (2 * share as usize, (share + share.isqrt()) as usize);
    MixtureTokens::new(tokens, |token, rank| if token < most { rank } else { USED + rank })
}

impl<W: Work> Measured<W> {
    fn new(format: Format, work: W, bound_from: u32) -> Self {
        let point = |(tokens, weights)| Point { tokens, weights, visits: Vec::new() };
        let points = work.points().into_iter().map(point).collect();
        Self { format, work, bound_from, points }
    }

    /// Measures the point of that turn, if there is one, after all memory was read in `read` nanoseconds.
    fn visit(
        &mut self,
        team: &Team,
        isa: Isa,
        memory: &Memory,
        (turn, read): (usize, f64),
    ) -> Result<()> {
        let Some(point) = self.points.get_mut(turn) else { return Ok(()) };
        let bytes = self.format.bytes(1, point.weights) as usize;
        let may_repeat = point.tokens >= self.bound_from || memory.is_above_caches(bytes);
        let time = if may_repeat { VISIT_TIME } else { Duration::ZERO };
        let nanos = timed(1, time, || self.work.run(team, isa, turn))?;
        point.visits.push(Visit { nanos, read });
        Ok(())
    }

    /// The rates while memory takes `read` nanoseconds to be read, beside steps of `step_nanos`.
    fn points(&self, memory: &Memory, read: f64, step_nanos: f64) -> Vec<RatePoint> {
        let point = |Point { tokens, weights, visits }: &Point| {
            // Reading as much as the weights have.
            let part = self.format.bytes(1, *weights) as f64 / memory.bytes as f64;
            let nanos: Vec<f64> = visits.iter().map(|visit| visit.nanos).collect();
            let beside: Vec<f64> = visits.iter().map(|visit| visit.read * part).collect();
            let nanos = usual_nanos(&nanos, &beside, read * part);
            // What is left of little more than a step is all noise.
            let nanos = (nanos - step_nanos).max(nanos / 2.0);
            let weights_per_sec = *weights as f64 / nanos * 1e9;
            RatePoint { tokens: *tokens, weights_per_sec, nanos: 0.0 }
        };
        self.points.iter().map(point).collect()
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
