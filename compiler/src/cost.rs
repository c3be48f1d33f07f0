//! Predicted times, from the machine's rates alone.

mod moves;

use anyhow::{Context as _, Result, bail};
use ir::id::{DeviceId, Few};
use ir::machine::{CacheRate, DeviceKind, LinearRate};
use ir::op::{Attention, Experts, Linear, Op, Products, Then};
use ir::packing::gpu_has_panels;
use ir::plan::Phase;
use ir::tensor::{DType, Extent, Format, TensorType};
use ir::workspace::{
    FLOAT_ROWS, MAX_FUSED_ROWS, OperandRows, broken_loads, has_warpgroups_for, most_float_rows,
    most_rows_on, product_format,
};

pub(crate) use self::moves::{
    Behind, Way, fetch_nanos, fetch_share, is_peer_sum, library_sum_nanos, move_nanos,
};
use crate::target::{Batch, Target};

/// What a link carries while a GPU loads one word of the host's memory that lies apart from others: 512 rows of 576 such
/// words took an H200 450 µs, whose link carries 50 GB/s.
const LONE_WORD_BYTES: u64 = 76;
/// Nanoseconds of the way to a table on a node and back: on that GPU one row took 3 µs more than a step of its own.
const REACHING_NANOS: f64 = 3e3;
/// What the attention of a prompt takes on a GPU beside a step and its keys, and for each key that is taken after another.
/// Measured on an H200 with 16 to 2,048 tokens, and counted for any GPU: see benches/RESULTS.md, attention of few heads.
const PROMPT_NANOS: f64 = 1e3;
const PROMPT_KEY_NANOS: f64 = 27.0;

/// What one device computes with, as a price needs it.
#[derive(Clone, Debug)]
pub(crate) struct Operands<'a> {
    /// Each of the operation's weights, in their order.
    pub(crate) weights: &'a [Held],
    /// Tensors read.
    pub(crate) reads: Few<&'a TensorType>,
    /// Tensors written.
    pub(crate) writes: Few<&'a TensorType>,
    /// Whether the matrices were fetched, packed as another device holds them.
    pub(crate) is_fetched: bool,
    /// Whose cache is borrowed, or whose table is reached.
    pub(crate) other_home: Option<DeviceId>,
}

impl Operands<'_> {
    /// The weights that rows are multiplied with.
    fn matrices(&self) -> impl Iterator<Item = &Held> + Clone {
        self.weights.iter().filter(|held| held.shape.len() > 1)
    }
}

/// How a device, or the home that it fetches from, holds a weight.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    /// Its format.
    pub(crate) format: Format,
    /// Its shape, or that of the part that is held.
    pub(crate) shape: Few<u32>,
    /// Whether it is held unpacked as well, for products of many rows.
    pub(crate) also_unpacked: bool,
}

impl Held {
    /// Its elements.
    fn elements(&self) -> u64 {
        self.shape.iter().map(|&size| u64::from(size)).product()
    }

    /// Columns of its rows.
    fn columns(&self) -> u32 {
        self.shape.last().copied().unwrap_or(1)
    }
}

/// Nanoseconds of one computation on a device. Fails when the device does not compute a weight's format, or not in rows
/// of so many features.
pub(crate) fn run_nanos(
    target: &Target,
    device: DeviceId,
    op: &Op,
    operands: &Operands<'_>,
    batch: &Batch,
) -> Result<f64> {
    let rates = &target.machine.devices[device].rates;
    let streamed = |bytes: u64| nanos_at(bytes as f64, rates.read_bytes_per_sec);
    let tensors = operands.reads.iter().chain(&operands.writes);
    let activations = streamed(tensors.map(|ty| ty.bytes(batch.extent)).sum());
    let kind = &target.machine.devices[device].kind;
    let is_gpu = kind.is_gpu();
    let matrices = |tokens: u32| -> Result<f64> {
        let (mut nanos, mut beside) = (0.0, 0f64);
        for held in operands.matrices() {
            // Prompts take unpacked copies, decodes what they can as it lies.
            let most = most_rows_on(kind, held.format, held.columns());
            let most = match batch.phase {
                Phase::Prefill if held.also_unpacked => most.min(MAX_FUSED_ROWS),
                Phase::Prefill | Phase::Decode => most,
            };
            let is_unpacked = held.also_unpacked && tokens > most;
            let format = if is_unpacked {
                product_format(held.format, kind.has_library())
            } else {
                held.format
            };
            let rate = linear_rate(target, device, format)?;
            let rows = if tokens > most { tokens } else { multiplied_rows(kind, held, tokens) };
            nanos += nanos_at(held.elements() as f64, rate.weights_per_sec(rows));
            // All matrices go through one launch, but for those of the vendor's library.
            let own = rate.nanos(rows);
            let is_alone = tokens > if is_gpu { most } else { FLOAT_ROWS };
            beside = if is_alone { beside + own } else { beside.max(own) };
        }
        Ok(nanos + beside)
    };
    let work = match op.products() {
        Some(Products::Linear(linear)) => {
            let rows = rows_of(operands.reads[0], batch.extent);
            if is_gpu {
                let features = operands.reads[0].features(batch.extent);
                let held = operands.matrices().map(|held| held.format);
                let broken = broken_loads(linear, held, (rows, features), kind.has_library());
                if let Some(format) = broken {
                    let name = target.name(device);
                    bail!("{name} does not multiply rows of {features} features in {format}");
                }
            }
            let is_cast = is_gpu && is_cast_apart(kind, linear, operands, batch);
            let cast = f64::from(u32::from(is_cast)) * rates.step_nanos;
            let beside = cast
                + if is_gpu && rows > FLOAT_ROWS {
                    streamed(pass_bytes(linear, operands, batch))
                } else {
                    activations
                };
            matrices(rows)? + beside + streamed(unpacked_bytes(kind, operands, batch))
        }
        Some(Products::Attention(attention)) => {
            let home = operands.other_home.unwrap_or(device);
            let kv_type = target.kv_types[home];
            let cache = kv_type.head_bytes(attention.head_dim);
            let crossing = match operands.other_home {
                Some(home) => borrowing_nanos(target, [home, device], attention, cache, batch)?,
                None => 0.0,
            };
            let rate = rates.attention(kv_type);
            let attending = attention_nanos(attention, is_gpu, cache, batch, rate);
            // Of many tokens, a GPU first rotates all heads and caches keys and values.
            let is_prompt = batch.extent.tokens > batch.sequences;
            attending
                + crossing
                + match (is_gpu, is_prompt) {
                    (true, true) => rates.step_nanos + streamed(append_bytes(operands, batch)),
                    (false, true) => 0.0,
                    (_, false) => rates.attention_nanos,
                }
        }
        Some(Products::Experts(experts)) => {
            experts_nanos(target, device, experts, operands, batch)? + activations
        }
        // Tables are read only where tokens point: as many rows as are written.
        None => {
            let crossing = match operands.other_home {
                Some(home) => reaching_nanos(target, [home, device], operands, batch)?,
                None => 0.0,
            };
            activations + crossing
        }
    };
    Ok(rates.step_nanos + work)
}

/// Rows that kernels of a device's own multiply by a matrix for so many: with the instructions of warpgroups all that
/// their operands have room for.
fn multiplied_rows(kind: &DeviceKind, held: &Held, rows: u32) -> u32 {
    let are_operands = rows > FLOAT_ROWS && has_warpgroups_for(kind, held.columns());
    OperandRows::of(rows).filter(|_| are_operands).map_or(rows, OperandRows::count)
}

/// Whether a GPU casts the input of a linear in a launch of its own: that of more rows than it takes as floats, where
/// they are normalised or in another format than products. What a decode hands from linear to linear and from attention
/// to linear comes as the matrix instructions of warpgroups take it, where it has room for that. (So does what a prompt
/// of some tokens hands from gate and up to down; that is counted a cast too many.)
fn is_cast_apart(
    kind: &DeviceKind,
    linear: &Linear,
    operands: &Operands<'_>,
    batch: &Batch,
) -> bool {
    let x = operands.reads[0];
    let rows = rows_of(x, batch.extent);
    let has_warpgroups = operands.matrices().all(|held| has_warpgroups_for(kind, held.columns()));
    let sizes = operands.matrices().map(|held| (held.format, held.elements()));
    if rows <= most_float_rows(sizes, has_warpgroups) {
        return false;
    }
    let is_own = |held: &Held| rows <= most_rows_on(kind, held.format, held.columns());
    // Operands lie where as many rows of f32 would.
    let has_room = OperandRows::of(rows).is_some_and(|operands| operands.count() <= 2 * rows);
    let is_handed_on = batch.phase == Phase::Decode
        && has_warpgroups
        && has_room
        && !operands.is_fetched
        && operands.matrices().all(is_own);
    let is_other = |held: &Held| product_format(held.format, true).float() != Some(x.dtype);
    linear.norm.is_some() || !is_handed_on && operands.matrices().any(is_other)
}

/// Bytes that a GPU moves before and after the products of a linear of many rows: the input is narrowed to 16 bits if
/// it is not held so, and what follows a product reads it again.
fn pass_bytes(linear: &Linear, operands: &Operands<'_>, batch: &Batch) -> u64 {
    let x = operands.reads[0];
    let input = if x.dtype == DType::F32 { x.bytes(batch.extent) } else { 0 };
    let outputs: u64 = operands.writes.iter().map(|ty| ty.bytes(batch.extent)).sum();
    let has_bias = linear.biases.iter().any(Option::is_some);
    let after = match linear.then {
        Then::Gate(_) => 3 * outputs,
        Then::Activate(_) => 2 * outputs,
        Then::Nothing if has_bias => 2 * outputs,
        // The library adds a residual on the way.
        Then::Nothing if linear.residual => outputs,
        Then::Nothing => 0,
    };
    input + input / 2 + after
}

/// Bytes that a GPU moves before the attention of a prompt: queries, keys and values are read, queries written again,
/// and keys and values into the cache, which takes 16 bits for each of their elements.
fn append_bytes(operands: &Operands<'_>, batch: &Batch) -> u64 {
    let bytes = |ty: &&TensorType| ty.bytes(batch.extent);
    let (queries, others) = operands.reads.split_first().map_or((0, 0), |(queries, others)| {
        (bytes(queries), others.iter().map(bytes).sum::<u64>())
    });
    2 * queries + others + others / 2
}

/// Bytes read and written to unpack fetched matrices of floats: products of up to [`most_rows_on()`] take panels as they
/// are.
fn unpacked_bytes(kind: &DeviceKind, operands: &Operands<'_>, batch: &Batch) -> u64 {
    if !operands.is_fetched {
        return 0;
    }
    let rows = rows_of(operands.reads[0], batch.extent);
    // Rates of the others are those of panels.
    let is_unpacked = |held: &&Held| {
        let most = most_rows_on(kind, held.format, held.columns());
        held.format.float().is_some() && rows > most
    };
    let matrices = operands.matrices().filter(is_unpacked);
    let bytes = matrices.map(|held| held.format.bytes(1, held.elements()) + 2 * held.elements());
    bytes.sum()
}

/// Nanoseconds of bringing what is cached from a cache's home to a GPU and what is new back.
///
/// Fails when no links lead there and back.
fn borrowing_nanos(
    target: &Target,
    [home, gpu]: [DeviceId; 2],
    attention: &Attention,
    head_bytes: u64,
    batch: &Batch,
) -> Result<f64> {
    let token_bytes = 2 * head_bytes * u64::from(attention.kv_heads);
    let seen = batch.past.min(attention.window.unwrap_or(u32::MAX));
    let cached = u64::from(seen) * u64::from(batch.sequences);
    let tokens = [(home, gpu, cached), (gpu, home, u64::from(batch.extent.tokens))];
    let crossings = tokens.into_iter().filter(|(_, _, tokens)| *tokens > 0);
    let nanos =
        crossings.map(|(from, to, tokens)| fetch_nanos(target, from, to, tokens * token_bytes));
    nanos.sum()
}

/// Nanoseconds of reaching a row of a home's table for each row that is written.
///
/// Fails when no link leads there.
fn reaching_nanos(
    target: &Target,
    [home, gpu]: [DeviceId; 2],
    operands: &Operands<'_>,
    batch: &Batch,
) -> Result<f64> {
    let link = target.machine.need_link(home, gpu)?;
    let rows = rows_of(operands.writes[0], batch.extent);
    let bytes_of = |held: &Held| {
        let columns = u64::from(held.columns());
        let bytes = held.format.bytes(1, columns);
        match gpu_has_panels(held.format, &held.shape) {
            false => bytes,
            // A word has an element of each of two rows.
            true if held.format == Format::F16 => LONE_WORD_BYTES * columns,
            true => LONE_WORD_BYTES * bytes.div_ceil(size_of::<u32>() as u64),
        }
    };
    let bytes: u64 = operands.matrices().map(bytes_of).sum();
    Ok(REACHING_NANOS + nanos_at((u64::from(rows) * bytes) as f64, link.bytes_per_sec))
}

/// Nanoseconds of `amount` at a rate per second.
pub(crate) fn nanos_at(amount: f64, per_sec: f64) -> f64 {
    if amount == 0.0 { 0.0 } else { amount / per_sec * 1e9 }
}

/// Rows of a tensor.
pub(crate) fn rows_of(ty: &TensorType, extent: Extent) -> u32 {
    ty.shape.first().map_or(1, |dim| dim.size(extent)).max(1)
}

fn linear_rate(target: &Target, device: DeviceId, format: Format) -> Result<&LinearRate> {
    let device = &target.machine.devices[device];
    // A machine file may be older than 12 bits, which a GPU meets where it fetches from a calibrated node.
    let rate = device.rates.linear(format).or_else(|| {
        let is_fetched = format == Format::Bf12 && device.kind.is_gpu();
        device.rates.linear(Format::Bf16).filter(|_| is_fetched)
    });
    rate.with_context(|| {
        format!(
            "{} does not compute {format}: the machine file gives no rate for it; calibrate again, or choose another \
             --format",
            device.name
        )
    })
}

fn attention_nanos(
    attention: &Attention,
    is_gpu: bool,
    head_bytes: u64,
    batch: &Batch,
    rate: CacheRate,
) -> f64 {
    let (sequences, past) = (f64::from(batch.sequences), f64::from(batch.past));
    let fed = f64::from(batch.extent.tokens) / sequences;
    let seen = sequences * attention.seen(fed, past);
    let scores = seen * f64::from(attention.heads);
    if fed <= 1.0 {
        // Decode reads the keys and values that a token sees, once for all query heads that share them.
        let bytes = 2.0 * f64::from(attention.kv_heads) * head_bytes as f64;
        return nanos_at(seen * bytes, rate.cache_bytes_per_sec) + scores * rate.score_nanos;
    }
    // A multiplication and an addition for each element of the score, and the same for those of the value.
    let flops = scores * 4.0 * f64::from(attention.head_dim);
    let nanos = nanos_at(flops, rate.attention_flops_per_sec) + scores * rate.prompt_score_nanos;
    if !is_gpu {
        return nanos;
    }
    // So long where heads and tokens keep it busy; the keys that the last token sees are taken one after another.
    let keys = attention.window.map_or(fed + past, |window| f64::from(window).min(fed + past));
    PROMPT_NANOS + nanos.hypot(keys * PROMPT_KEY_NANOS)
}

fn experts_nanos(
    target: &Target,
    device: DeviceId,
    op: &Experts,
    operands: &Operands<'_>,
    batch: &Batch,
) -> Result<f64> {
    let fed = rows_of(operands.reads[0], batch.extent);
    let tokens = f64::from(fed);
    let load = op.part.map_or(1.0, |part| f64::from(part.load));
    let used = load * f64::from(operands.reads[1].features(batch.extent));
    if used == 0.0 {
        return Ok(0.0);
    }
    let rates = &target.machine.devices[device].rates;
    let mut nanos = 0.0;
    let mut beside = 0f64;
    for Held { format, shape, .. } in operands.weights {
        if let Some(rate) = rates.experts(*format).filter(|_| fed <= FLOAT_ROWS) {
            let elements = used * f64::from(shape[1]) * f64::from(shape[2]);
            nanos += nanos_at(elements, rate.weights_per_sec(fed));
            beside = beside.max(rate.nanos(fed));
            continue;
        }
        let chosen = Experts::chosen(f64::from(shape[0]), used, tokens);
        let rows = (tokens * used / chosen).round().max(1.0) as u32;
        let elements = chosen * f64::from(shape[1]) * f64::from(shape[2]);
        let rate = match rates.shared_experts(*format) {
            Some(rate) => rate,
            None => linear_rate(target, device, *format)?,
        };
        nanos += nanos_at(elements, rate.weights_per_sec(rows));
        beside = beside.max(rate.nanos(rows));
    }
    Ok(nanos + beside)
}
