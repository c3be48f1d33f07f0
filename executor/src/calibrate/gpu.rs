//! How fast a GPU is, with the kernels that plans run.
//!
//! Launches are queued in rows and waited for once, so that what is measured is the device and not the host.

mod attention;
mod experts;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use half::bf16;
use ir::machine::{LinearRate, RatePoint, RateSource, Rates};
use ir::op::Then;
use ir::tensor::{DType, Format};
use ir::workspace::{self, most_float_rows};

use self::experts::EXPERT_FORMATS;
use super::compiled::{Share, Turns};
use super::{made_up, typical};
use crate::kernels::cpu::pack::{PANEL, pack_rows, packed_bytes};
use crate::kernels::gpu::cast::Cast;
use crate::kernels::gpu::device::{Gpu, Span};
use crate::kernels::gpu::linear::{FLOAT_TOKENS, Linear, MAX_FUSED_TOKENS};
use crate::kernels::gpu::matrix::{Layout, Matrix};
use crate::kernels::gpu::vendor::{Library, Product, Vendor, WORKSPACE_BYTES};

/// How large measured things are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    /// Columns of matrices: the features of an 8 B model.
    columns: usize,
    /// Bytes of a matrix that is read alone, and twice those of matrices that are read in turn: several times a
    /// second-level cache.
    streamed_bytes: usize,
    /// Rows of matrices of a layer's size.
    rows: usize,
    /// Tokens at which linears are measured.
    tokens: &'static [u32],
    /// Features and inner features of a mixture, and its experts: a power of two, too many to stay near.
    mixture: [usize; 3],
    /// Tokens of an attended prompt.
    prompt: usize,
    /// Launches in a row.
    launches: usize,
}

impl Sizes {
    /// Those of a real GPU.
    pub(super) const FULL: Self = Self {
        columns: 4096,
        streamed_bytes: 256 << 20,
        rows: 14336,
        tokens: &[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048],
        mixture: [2048, 768, 128],
        prompt: 2048,
        launches: 20,
    };
    /// Those of a device in software.
    #[cfg(test)]
    const SMALL: Self = Self {
        columns: 128,
        streamed_bytes: 64 << 10,
        rows: 96,
        tokens: &[1, 8, 16],
        mixture: [128, 64, 32],
        prompt: 64,
        launches: 2,
    };
}

/// How long products are made in a row: as long as prompts take, in which clocks settle.
const SUSTAINED: Duration = Duration::from_millis(60);

/// Made-up numbers before they come again: a prime, so that rows of activations and of floats are all unlike; packed
/// matrices have as many whole panels of unlike rows. What matrix instructions draw depends on how many bits change
/// from one operand to the next.
const UNLIKE: usize = 1_000_003;

/// How many times fewer rows small matrices have than those of a layer's size.
const SMALLER: usize = 16;
/// Matrices of one size at most.
const MOST_MATRICES: usize = 64;

struct Meter<'a> {
    gpu: &'a Gpu,
    vendor: Option<Vendor>,
    sizes: Sizes,
    turns: Turns,
}

/// The rates of a GPU.
///
/// # Errors
/// When it has no memory to measure with, or fails.
pub(super) fn rates(gpu: &Gpu, sizes: Sizes) -> Result<Rates> {
    Meter::new(gpu, sizes, None)?.rates()
}

/// Compiles the kernels of a share of what [`rates()`] launches.
///
/// # Errors
/// As there.
pub(super) fn compile(gpu: &Gpu, sizes: Sizes, share: Share) -> Result<()> {
    Meter::new(gpu, sizes, Some(share))?.rates().map(drop)
}

impl<'a> Meter<'a> {
    fn new(gpu: &'a Gpu, sizes: Sizes, compiled: Option<Share>) -> Result<Self> {
        let library =
            gpu.ordinal().map(|ordinal| Library::load(gpu, ordinal)).transpose()?.flatten();
        let vendor = library
            .map(|library| anyhow::Ok(Vendor::new(gpu, library, gpu.allocate(WORKSPACE_BYTES)?)));
        Ok(Self { gpu, vendor: vendor.transpose()?, sizes, turns: Turns::new(compiled) })
    }
}

impl Meter<'_> {
    fn rates(&mut self) -> Result<Rates> {
        let read_bytes_per_sec = self.read_rate()?;
        let step_nanos = self.step_nanos(read_bytes_per_sec)?;
        let linear = Format::ALL.into_iter().map(|format| self.linear(format, step_nanos));
        let linear = linear.collect::<Result<_>>()?;
        let (mut experts, mut shared_experts) = (Vec::new(), Vec::new());
        for format in EXPERT_FORMATS {
            let mixture = self.mixture(format)?;
            experts.push(self.experts(&mixture, step_nanos)?);
            shared_experts.push(self.shared_experts(&mixture, step_nanos)?);
        }
        let (cache_bytes_per_sec, attention_nanos) = self.cache(step_nanos)?;
        Ok(Rates {
            source: RateSource::Calibrated,
            read_bytes_per_sec,
            step_nanos,
            linear,
            experts,
            shared_experts,
            attention_nanos,
            prompt_score_nanos: 0.0,
            score_nanos: 0.0,
            attention_flops_per_sec: self.attention_flops()?,
            cache_bytes_per_sec,
            other_caches: Vec::new(),
            beside_fetch: 1.0,
        })
    }

    /// Nanoseconds of one launch of many, captured and replayed as decode steps are.
    fn time(&self, launches: usize, mut launch: impl FnMut() -> Result<()>) -> Result<f64> {
        let first = || {
            launch()?;
            self.gpu.sync()
        };
        if !self.turns.begin(first)? {
            return Ok(1.0);
        }
        let graph = match self.gpu.client.graph_prepare() {
            Ok(()) => self.gpu.capture(|| (0..launches).try_for_each(|_| launch()))?,
            Err(error) => Err(error),
        };
        let nanos = typical(|| {
            match &graph {
                Ok(graph) => replay(graph)?,
                // A device that captures nothing launches step by step.
                Err(_) => (0..launches).try_for_each(|_| launch())?,
            }
            self.gpu.sync()
        })?;
        Ok(nanos / launches as f64)
    }

    /// Time of a step beside what it reads: what a linear of one token takes with matrices of a layer's size, less the
    /// time in which a large one is read. Memory idles while one launch ends and the next begins.
    fn step_nanos(&self, read_bytes_per_sec: f64) -> Result<f64> {
        /// The matrices together are as large as the large one, so that none is still near when its turn comes again.
        const MATRICES: usize = 16;
        let row_bytes = Format::Bf16.bytes(1, self.sizes.columns as u64) as usize;
        let rows = (self.sizes.streamed_bytes / MATRICES / row_bytes).next_multiple_of(PANEL);
        let matrices = self.matrices(Format::Bf16, rows, MATRICES)?;
        let whole = self.few(&matrices, 1, 4 * MATRICES)?;
        Ok((whole - (rows * row_bytes) as f64 / read_bytes_per_sec * 1e9).max(self.empty_nanos()?))
    }

    /// Time of a step that has next to nothing to do.
    fn empty_nanos(&self) -> Result<f64> {
        const STEPS: usize = 200;
        let span = self.gpu.allocate(256)?;
        self.time(STEPS, || {
            self.gpu.add(&span, &span, &span, 64);
            Ok(())
        })
    }

    /// Nanoseconds of a linear of few tokens, with one matrix after the other; their input is in the form that matrices of
    /// a layer's size take.
    fn few(&self, matrices: &[Matrix], tokens: usize, launches: usize) -> Result<f64> {
        let rows = matrices.iter().map(Matrix::rows).max().unwrap_or(0);
        let out = self.gpu.allocate(tokens * rows * size_of::<f32>())?;
        let count = tokens * self.sizes.columns;
        let has_groups = self.gpu.has_groups(&matrices[0]);
        let of_layer = (self.sizes.rows * self.sizes.columns) as u64;
        let most_floats = most_float_rows([(matrices[0].format(), of_layer)], has_groups);
        let order = self.gpu.right_operands(&matrices[0], tokens);
        let order = order.filter(|_| tokens > most_floats as usize);
        let (element, x) = match order {
            Some(order) => (DType::Bf16, self.narrow(order.count() * self.sizes.columns)?),
            None if tokens <= FLOAT_TOKENS => (DType::F32, self.floats(count)?),
            None => (DType::Bf16, self.narrow(count)?),
        };
        let mut turns = matrices.iter().cycle();
        self.time(launches, || {
            let matrix = turns.next().context("there are matrices")?;
            self.gpu.linear(&Linear {
                x: &x,
                element,
                order,
                tokens,
                norm: None,
                matrices: &[matrix],
                biases: &[None],
                then: Then::Nothing,
                residual: None,
                outputs: &[&out],
                made: DType::F32,
                made_order: None,
                ahead: &[],
                sum: None,
            })
        })
    }

    /// Bytes per second at which a large matrix is read.
    fn read_rate(&self) -> Result<f64> {
        let Sizes { columns, streamed_bytes, launches, .. } = self.sizes;
        let row_bytes = Format::Bf16.bytes(1, columns as u64) as usize;
        let rows = (streamed_bytes / row_bytes).next_multiple_of(PANEL);
        let matrix = self.matrices(Format::Bf16, rows, 1)?;
        Ok((rows * row_bytes) as f64 / self.few(&matrix, 1, launches)? * 1e9)
    }

    /// The rates of a format, from matrices of a layer's size, and at some numbers of tokens from small ones: what does
    /// not grow with the matrix is beside its weights. Matrices are as many as a cache does not hold.
    fn linear(&mut self, format: Format, step_nanos: f64) -> Result<LinearRate> {
        let Sizes { columns, streamed_bytes, rows, tokens, .. } = self.sizes;
        let sizes = [rows, (rows / SMALLER).next_multiple_of(PANEL)];
        let matrices = |rows: usize| {
            let bytes = format.bytes(rows as u64, columns as u64) as usize;
            let count = (streamed_bytes / 2).div_ceil(bytes).clamp(2, MOST_MATRICES);
            self.matrices(format, rows, count)
        };
        let [large, small] = [matrices(sizes[0])?, matrices(sizes[1])?];
        // The library takes the first that are too many as they lie, in another time.
        let most = self.gpu.most_narrow(&large[0]);
        let more = (self.vendor.is_some() && self.gpu.takes_narrow(&large[0], most))
            .then_some(most as u32 + 1);
        let tokens: BTreeSet<u32> = tokens.iter().copied().chain(more).collect();
        let tokens: Vec<u32> = tokens.into_iter().collect();
        let weights = sizes.map(|rows| (rows * columns) as f64);
        let whole = tokens.iter().map(|&tokens| self.whole(&large, tokens));
        let whole = whole.collect::<Result<Vec<f64>>>()?;
        let (first, last) = (tokens[0], tokens[tokens.len() - 1]);
        let mut ends = Vec::new();
        for (&tokens, &nanos) in tokens.iter().zip(&whole) {
            if [first, FLOAT_TOKENS as u32, last].contains(&tokens) {
                let nanos = [nanos, self.whole(&small, tokens)?];
                let (weights_per_sec, nanos) = rate(weights, nanos, step_nanos);
                ends.push(RatePoint { tokens, weights_per_sec, nanos });
            }
        }
        let ends = LinearRate { format, points: ends };
        let between = |(&tokens, &whole): (&u32, &f64)| {
            let nanos = ends.nanos(tokens);
            let growing = (whole - step_nanos - nanos).max(whole / 2.0);
            RatePoint { tokens, weights_per_sec: weights[0] / growing * 1e9, nanos }
        };
        Ok(LinearRate { format, points: tokens.iter().zip(&whole).map(between).collect() })
    }

    /// Nanoseconds of a linear of `tokens` tokens, with one matrix after the other.
    fn whole(&mut self, matrices: &[Matrix], tokens: u32) -> Result<f64> {
        let tokens = tokens as usize;
        let takes_narrow = |tokens: usize| self.gpu.takes_narrow(&matrices[0], tokens);
        let launches = self.sizes.launches.next_multiple_of(matrices.len());
        if tokens <= FLOAT_TOKENS || takes_narrow(tokens) {
            return self.few(matrices, tokens, launches);
        }
        let most = self.gpu.most_narrow(&matrices[0]);
        if self.vendor.is_none() && takes_narrow(most) {
            // In parts, of which all but the last are as large as can be.
            return Ok(self.few(matrices, most, launches)? * tokens.div_ceil(most) as f64);
        }
        let out = self.gpu.allocate(tokens * matrices[0].rows() * size_of::<f32>())?;
        self.product(&matrices[0], tokens, &out)
    }

    /// Nanoseconds of a product of many tokens, with what a run launches before it: the unpacking of a packed matrix;
    /// and, where tokens are few, the cast of activations for one that is not, which takes a good part of what reading
    /// the matrix takes.
    fn product(&mut self, matrix: &Matrix, tokens: usize, out: &Span) -> Result<f64> {
        if self.turns.leave() {
            return Ok(1.0);
        }
        let (inputs, outputs) = (matrix.columns(), matrix.rows());
        let format = workspace::product_format(matrix.format(), self.vendor.is_some());
        let element = format.float().context("products are made in floats")?;
        let place = self.gpu.allocate(Layout::RowMajor.bytes(format, outputs, inputs)?)?;
        let x = if format == Format::F32 {
            self.floats(tokens * inputs)?
        } else {
            self.narrow(tokens * inputs)?
        };
        let is_cast = matrix.layout() == Layout::RowMajor
            && tokens <= MAX_FUSED_TOKENS
            && format != Format::F32;
        let floats = is_cast.then(|| self.floats(tokens * inputs)).transpose()?;
        let (gpu, launches) = (self.gpu.clone(), self.sizes.launches);
        let work = |launches: usize| {
            let start = Instant::now();
            for _ in 0..launches {
                if let Some(floats) = &floats {
                    gpu.cast(&Cast::plain(floats, [tokens, inputs], format, &x))?;
                }
                let unpacked = match matrix.layout() {
                    Layout::RowMajor => None,
                    Layout::Panels => Some(gpu.unpack(matrix, format, &place)?),
                };
                let matrix = unpacked.as_ref().unwrap_or(matrix);
                let w = matrix.data();
                match &self.vendor {
                    Some(vendor) => {
                        let (x, term, stride) = (&x, None, outputs);
                        let made = DType::F32;
                        let product = Product {
                            x,
                            w,
                            element,
                            term,
                            out,
                            made,
                            stride,
                            tokens,
                            inputs,
                            outputs,
                        };
                        vendor.multiply(&product)?;
                    }
                    None => gpu.gemm(&x, tokens, matrix, out)?,
                }
            }
            gpu.sync()?;
            let elapsed = start.elapsed();
            self.vendor.as_ref().map_or(Ok(()), Vendor::check)?;
            anyhow::Ok(elapsed)
        };
        if !self.turns.begin(|| work(1).map(drop))? {
            return Ok(1.0);
        }
        let repeats = SUSTAINED.div_duration_f64(work(launches)?).ceil().max(1.0) as usize;
        Ok(work(repeats * launches)?.as_nanos() as f64 / (repeats * launches) as f64)
    }

    /// Alike matrices as plans hold them, of made-up weights.
    fn matrices(&self, format: Format, rows: usize, count: usize) -> Result<Vec<Matrix>> {
        let columns = self.sizes.columns;
        let layout = if format.float().is_some() { Layout::RowMajor } else { Layout::Panels };
        let bytes = layout.bytes(format, rows, columns)?;
        let pattern = match format {
            Format::F32 => bytemuck::pod_collect_to_vec(&unlike()),
            Format::F16 => narrowed(|x| half::f16::from_f32(x).to_le_bytes()),
            Format::Bf16 => narrowed(|x| bf16::from_f32(x).to_le_bytes()),
            Format::Bf12 | Format::Q8 | Format::Q4 => self.packed(format, rows, columns),
        };
        let matrix = |_| Matrix::new(format, layout, rows, columns, self.filled(bytes, &pattern)?);
        (0..count).map(matrix).collect()
    }

    /// Whole panels of made-up weights, of at most `rows` rows before the last panel is filled up.
    fn packed(&self, format: Format, rows: usize, columns: usize) -> Vec<u8> {
        let rows = rows.min(UNLIKE / columns).next_multiple_of(PANEL);
        let values: Vec<f32> = (0..rows * columns).map(made_up).collect();
        let mut panels = vec![0; packed_bytes(format, rows, columns)];
        pack_rows(format, columns, &values, &mut panels);
        panels
    }

    fn floats(&self, count: usize) -> Result<Span> {
        self.filled(count * size_of::<f32>(), bytemuck::cast_slice(&unlike()))
    }

    /// 16-bit numbers that are small both as f16 and as bf16.
    fn narrow(&self, count: usize) -> Result<Span> {
        self.filled(count * 2, &narrowed(|x| bf16::from_f32(x / 1e3).to_le_bytes()))
    }

    /// Memory with a pattern in it, as often as it takes.
    fn filled(&self, bytes: usize, pattern: &[u8]) -> Result<Span> {
        const WORD: usize = size_of::<u32>();
        let span = self.gpu.allocate(bytes)?;
        if bytes <= pattern.len() {
            self.gpu.write(&span, &pattern[..bytes])?;
        } else {
            let times = if pattern.len().is_multiple_of(WORD) { 1 } else { WORD };
            let pattern = pattern.repeat(times);
            let from = self.gpu.allocate(pattern.len())?;
            self.gpu.write(&from, &pattern)?;
            self.gpu.repeat(&from, pattern.len() / WORD, &span, bytes.div_ceil(WORD));
        }
        Ok(span)
    }
}

/// Work per second, and the time beside it and beyond that of a step, from the times of much and of little work: what
/// grows with the work is the rate.
fn rate([much, little]: [f64; 2], nanos: [f64; 2], step_nanos: f64) -> (f64, f64) {
    let growth = (nanos[0] - nanos[1]) / (much - little);
    // Times that hardly grow are those of another state of the device.
    let growth = growth.max(nanos[0] / much / 2.0);
    let beside = (nanos[0] - growth * much - step_nanos).max(0.0);
    (1e9 / growth, beside)
}

/// Numbers for rows of any usual length to differ.
fn unlike() -> Vec<f32> {
    (0..UNLIKE).map(made_up).collect()
}

fn narrowed(narrow: impl Fn(f32) -> [u8; 2]) -> Vec<u8> {
    unlike().into_iter().flat_map(narrow).collect()
}

#[expect(unsafe_code, reason = "replayed launches find their memory by address")]
pub(super) fn replay(graph: &cubecl::client::Graph) -> Result<()> {
    // SAFETY: the launches use spans that live as long as the measurement.
    unsafe { graph.replay() }.context("replaying captured steps")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::gpu::testing::gpu;

    #[test]
    fn every_rate_is_measured() {
        let Some(gpu) = gpu() else { return };
        let rates = rates(&gpu, Sizes::SMALL).unwrap();
        let tokens = |rate: &LinearRate| rate.points.iter().map(|point| point.tokens).collect();
        let measured: Vec<BTreeSet<u32>> = rates.linear.iter().map(tokens).collect();
        assert_eq!(measured.len(), Format::ALL.len());
        let asked: BTreeSet<u32> = Sizes::SMALL.tokens.iter().copied().collect();
        // The first that are the library's, which no device in software has, are more.
        let most = asked.len() + usize::from(gpu.is_cuda());
        let is_whole = |tokens: &BTreeSet<u32>| tokens.is_superset(&asked) && tokens.len() <= most;
        assert!(measured.iter().all(is_whole), "{measured:?}");
        let mixtures: Vec<RatePoint> = rates
            .experts
            .iter()
            .chain(&rates.shared_experts)
            .flat_map(|rate| rate.points.clone())
            .collect();
        assert_eq!(mixtures.len(), EXPERT_FORMATS.len() * (2 + 4));
        let points = rates.linear.iter().flat_map(|rate| &rate.points).chain(&mixtures);
        let beside: Vec<f64> =
            points.clone().map(|point| point.nanos).chain([rates.attention_nanos]).collect();
        assert!(beside.iter().all(|nanos| nanos.is_finite() && *nanos >= 0.0), "{beside:?}");
        let others = [
            rates.read_bytes_per_sec,
            rates.step_nanos,
            rates.attention_flops_per_sec,
            rates.cache_bytes_per_sec,
        ];
        let all: Vec<f64> = points.map(|point| point.weights_per_sec).chain(others).collect();
        assert!(all.iter().all(|rate| rate.is_finite() && *rate > 0.0), "{all:?}");
    }

    #[test]
    fn shares_of_what_is_compiled_are_all_of_it() {
        const SHARES: u32 = 3;
        let Some(gpu) = gpu() else { return };
        let mut measured = Meter::new(&gpu, Sizes::SMALL, None).unwrap();
        measured.rates().unwrap();
        for number in 0..SHARES {
            let share = Share { number, shares: SHARES };
            let mut compiled = Meter::new(&gpu, Sizes::SMALL, Some(share)).unwrap();
            compiled.rates().unwrap();
            assert_eq!(compiled.turns.begun(), measured.turns.begun(), "share {number}");
        }
    }
}
