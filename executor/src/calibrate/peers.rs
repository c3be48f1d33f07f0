//! How fast GPUs reach each other: timed by the sums that plans make, in exchanges and by the vendor's library.

#![expect(unsafe_code, reason = "launches reach the memory of other GPUs by address")]

use anyhow::{Context as _, Result, ensure};
use cubecl::client::Graph;
use cudarc::driver::CudaContext;
use ir::machine::{Collectives, Rates};
use ir::tensor::DType;
use ir::workspace::Exchange;

use super::gpu::replay;
use super::links::Speed;
use super::typical;
use crate::kernels::gpu::device::{Gpu, Span};
use crate::kernels::gpu::peers::{Exchanges, Group, Sum};
use crate::peers::{grant, reaches};

/// Numbers of one token's activations in an 8 B model, and of 2048 tokens'.
const FEW: usize = 4096;
const MANY: usize = 2048 * FEW;
/// Terms of one token pass with flags, those of many in pieces.
const EXCHANGE: Exchange = Exchange { piece_bytes: 4 << 20, flagged_bytes: 128 << 10 };

/// The link between two GPUs, so that its cost model gives the time of a sum of few and of many numbers; `None` where
/// they do not reach each other's memory.
///
/// # Errors
/// When a GPU has no memory to measure with, captures nothing, or fails.
pub(super) fn between_gpus(gpus: [(&Gpu, usize); 2], rates: &Rates) -> Result<Option<Speed>> {
    let [(first, a), (second, b)] = gpus;
    if !reaches(a, b)? || !reaches(b, a)? {
        return Ok(None);
    }
    grant(a, b)?;
    grant(b, a)?;
    let members = [Member::new(first)?, Member::new(second)?];
    let addresses = [members[0].exchange.address()?, members[1].exchange.address()?];
    let members = members.map(|member| Member { addresses, ..member });
    let mut turn = 0;
    let few = sum_nanos(&members, FEW, 64, &mut turn)?;
    let many = sum_nanos(&members, MANY, 4, &mut turn)?;
    // A sum reads the terms of both, and writes.
    let local =
        |count: usize| (3 * count * size_of::<f32>()) as f64 / rates.read_bytes_per_sec * 1e9;
    let bytes = ((MANY - FEW) * size_of::<f32>()) as f64;
    let crossing = (many - few - local(MANY - FEW)).max(1.0);
    let bytes_per_sec = bytes / crossing * 1e9;
    let rest = (FEW * size_of::<f32>()) as f64 / bytes_per_sec * 1e9 + local(FEW);
    let latency_nanos = (few - rates.step_nanos - rest).max(1.0);
    Ok(Some(Speed { bytes_per_sec, latency_nanos }))
}

/// Sums of all GPUs by the vendor's library; `None` where it is not installed.
///
/// # Errors
/// When a GPU has no memory to measure with, or fails.
pub(super) fn by_library(gpus: &[(&Gpu, usize)]) -> Result<Option<Collectives>> {
    if gpus.len() < 2 {
        return Ok(None);
    }
    if !gpus.iter().all(|(gpu, _)| gpu.has_collectives()) {
        tracing::warn!(
            "there is no libnccl.so, so plans will sum over GPUs without NCCL: install its development package, or \
             link that name to libnccl.so.2 in a folder of LD_LIBRARY_PATH, and calibrate again"
        );
        return Ok(None);
    }
    let ordinals: Vec<usize> = gpus.iter().map(|(_, ordinal)| *ordinal).collect();
    let spans = gpus.iter().map(|(gpu, _)| gpu.allocate(MANY * size_of::<f32>()));
    let spans = spans.collect::<Result<Vec<Span>>>()?;
    let sum = |count: usize, sums: usize| -> Result<()> {
        for ((gpu, _), span) in gpus.iter().zip(&spans) {
            for _ in 0..sums {
                gpu.sum_by_library(&ordinals, span, span, count)?;
            }
        }
        gpus.iter().try_for_each(|(gpu, _)| gpu.sync())
    };
    let free = || -> Result<Vec<usize>> {
        let free = |ordinal: &usize| -> Result<usize> {
            let context = CudaContext::new(*ordinal).context("opening the GPU's context")?;
            Ok(context.mem_get_info().context("asking for free memory")?.0)
        };
        ordinals.iter().map(free).collect()
    };
    let before = free()?;
    // The first sums bring the GPUs together and take memory. One that failed shows in what it wrote.
    sum(MANY, 1)?;
    sum(FEW, 1)?;
    for ((gpu, _), span) in gpus.iter().zip(&spans) {
        gpu.read(&span.part(0, size_of::<f32>())).context("summing with NCCL")?;
    }
    let taken = before.iter().zip(free()?).map(|(before, after)| before.saturating_sub(after));
    let reserved_bytes = taken.max().unwrap_or(0) as u64;
    let few = typical(|| sum(FEW, 64))? / 64.0;
    let many = typical(|| sum(MANY, 8))? / 8.0;
    let members = gpus.len() as f64;
    let bytes = 2.0 * (members - 1.0) / members * ((MANY - FEW) * size_of::<f32>()) as f64;
    let bytes_per_sec = bytes / (many - few).max(1.0) * 1e9;
    Ok(Some(Collectives { bytes_per_sec, latency_nanos: few, reserved_bytes }))
}

/// One GPU of a sum.
struct Member<'a> {
    gpu: &'a Gpu,
    exchange: Span,
    /// Where the exchanges of both lie.
    addresses: [u64; 2],
    /// `u32[1]`: the number of the run.
    turn: Span,
    term: Span,
    out: Span,
}

impl<'a> Member<'a> {
    fn new(gpu: &'a Gpu) -> Result<Self> {
        let exchange = gpu.allocate(EXCHANGE.bytes(2) as usize)?;
        gpu.clear_exchange(&exchange)?;
        let numbers = || gpu.allocate(MANY * size_of::<f32>());
        let (term, out) = (numbers()?, numbers()?);
        let turn = gpu.allocate(4)?;
        Ok(Self { gpu, exchange, addresses: [0; 2], turn, term, out })
    }

    /// Queues the next run: `sums` sums of `count` numbers.
    fn queue(&self, rank: usize, count: usize, sums: u32) -> Result<()> {
        self.gpu.start_sums(&self.exchange)?;
        // SAFETY: both GPUs may reach both exchanges, which are made for two members and such pieces, and live until
        // all sums have ended.
        let exchanges = unsafe { Exchanges::new(&self.addresses) };
        for number in 0..sums {
            let group = Group {
                exchanges: exchanges.clone(),
                rank: rank as u32,
                exchange: EXCHANGE,
                turn: self.turn.clone(),
                number,
            };
            let (term, out, of_term) = (&self.term, &self.out, DType::F32);
            self.gpu.sum_over_peers(&group, &Sum { term, of_term, residual: None, out, count })?;
        }
        Ok(())
    }
}

/// Nanoseconds of one of `sums` sums of `count` numbers, captured and replayed as plans make them. `turn` counts runs.
fn sum_nanos(members: &[Member<'_>; 2], count: usize, sums: u32, turn: &mut u32) -> Result<f64> {
    let mut start = || {
        *turn += 1;
        members.iter().try_for_each(|member| member.gpu.write(&member.turn, &turn.to_ne_bytes()))
    };
    // The first launches compile the kernels.
    start()?;
    for (rank, member) in members.iter().enumerate() {
        member.queue(rank, count, sums)?;
        member.gpu.flush()?;
    }
    members.iter().try_for_each(|member| member.gpu.sync())?;
    let capture = |(rank, member): (usize, &Member<'_>)| -> Result<Graph> {
        let gpu = member.gpu;
        gpu.client.graph_prepare().context("preparing a capture")?;
        gpu.capture(|| member.queue(rank, count, sums))?.context("capturing sums")
    };
    let graphs = members.iter().enumerate().map(capture).collect::<Result<Vec<_>>>()?;
    let nanos = typical(|| {
        start()?;
        graphs.iter().try_for_each(replay)?;
        members.iter().try_for_each(|member| member.gpu.sync())
    })?;
    for member in members {
        let lost = member.gpu.lost_member(&member.exchange, *turn)?;
        ensure!(lost.is_none(), "a GPU did not come to a sum in time");
    }
    Ok(nanos / f64::from(sums))
}
