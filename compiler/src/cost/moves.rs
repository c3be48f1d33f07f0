//! Predicted times of what crosses between devices.

use anyhow::Result;
use ir::id::DeviceId;
use ir::layout::Move;
use ir::letters::SHARED_COPY_BYTES;
use ir::machine::{Device, Machine};
use ir::workspace::{CROSSINGS_NANOS, EXCHANGE_MEMBERS, MOST_PIECE_BYTES, most_flagged_term_bytes};

use super::nanos_at;
use crate::target::Target;

/// What one thread copies of a value that cores have just written, or that a GPU has sent. Measured on an H200's host,
/// as the next: see benches/RESULTS.md.
const LONE_COPY_BYTES_PER_SEC: f64 = 7.5e9;
/// What several threads copy.
const SHARED_COPY_BYTES_PER_SEC: f64 = 12.5e9;
/// Pieces of the larger sum by which links are measured, of 2,048 rows; the other is of one row, with flags.
const MEASURED_PIECES: f64 = 8.0;

/// How what a device is brought follows other things.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Way {
    /// Whether GPUs replay captured launches and fetch nothing, so that letters take what links say of these.
    pub(crate) by_letters: bool,
    /// What it comes right behind of, from the same devices.
    pub(crate) behind: Behind,
}

impl Way {
    /// Behind nothing.
    pub(crate) fn alone(by_letters: bool) -> Self {
        Self { by_letters, behind: Behind::Nothing }
    }
}

/// What something comes right behind of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Behind {
    /// Nothing from the same devices.
    Nothing,
    /// Another value, of earlier steps.
    Earlier,
    /// Another value of the same step.
    SameStep,
}

/// Nanoseconds of one device's part of a movement.
///
/// `incoming` are the bytes read from each device, its own included; `written` is what it holds afterwards. What comes
/// right behind another value from the same devices was under way with it, and wakes nobody; a letter was if both are of
/// one step, and a GPU has a launch for each. Sums of GPUs alone count flags, or what pieces take.
/// Fails when no link leads from a device that is read.
pub(crate) fn move_nanos(
    target: &Target,
    device: DeviceId,
    movement: &Move,
    incoming: &[(DeviceId, u64)],
    written: u64,
    way: Way,
) -> Result<f64> {
    let Device { rates, kind, .. } = &target.machine.devices[device];
    let (mut latency, mut crossing, mut slowest) = (0f64, 0.0, f64::INFINITY);
    // Launches of GPUs that send or take letters.
    let mut launch = None;
    for &(from, bytes) in incoming.iter().filter(|(from, _)| *from != device) {
        let link = target.machine.need_link(from, device)?;
        let sender = &target.machine.devices[from];
        let crosses = sender.kind.is_gpu() != kind.is_gpu();
        let letter = link.letter_nanos.filter(|_| way.by_letters && crosses);
        // Messages of several peers are under way at once; their bytes share the receiver's port.
        latency = latency.max(letter.unwrap_or(link.latency_nanos));
        crossing += nanos_at(bytes as f64, link.bytes_per_sec);
        slowest = slowest.min(link.bytes_per_sec);
        if crosses {
            crossing += copy_nanos(bytes);
        }
        if letter.is_some() {
            let gpu = if kind.is_gpu() { rates } else { &sender.rates };
            launch = Some(gpu.step_nanos.max(launch.unwrap_or(0.0)));
        }
    }
    let (local, sum) = match movement {
        // The link writes what it brings.
        Move::Transfer { .. } | Move::Broadcast { .. } => (0, 0.0),
        // Every term is read once more to be added or placed.
        Move::AllReduce
        | Move::AllGather { .. }
        | Move::ReduceScatter { .. }
        | Move::Slice { .. } => {
            (incoming.iter().map(|(_, bytes)| bytes).sum::<u64>() + written, rates.step_nanos)
        }
    };
    let beginning = match (launch, way.behind, kind.is_gpu()) {
        // A letter's time has the launch that takes or sends it; the host's thread is no step of a team.
        (Some(_), Behind::Nothing | Behind::Earlier, _) => latency + sum,
        (Some(launch), Behind::SameStep, _) => launch + sum,
        (None, Behind::Nothing, _) => rates.step_nanos + latency,
        (None, Behind::Earlier | Behind::SameStep, true) => rates.step_nanos,
        (None, Behind::Earlier | Behind::SameStep, false) => 0.0,
    };
    let largest = incoming.iter().map(|&(_, bytes)| bytes).max().unwrap_or(0);
    let more = match is_peer_sum(&target.machine, movement, incoming) {
        // Whatever terms are made of, each number goes in f32, as what is written, with a flag beside it.
        true if written <= most_flagged_term_bytes(incoming.len(), slowest) => {
            crossing * (2.0 * written as f64 / largest.max(1) as f64 - 1.0)
        }
        true => piece_nanos(largest),
        false => 0.0,
    };
    Ok(beginning + crossing + more + nanos_at(local as f64, rates.read_bytes_per_sec))
}

/// Whether a movement is a sum that GPUs make by themselves: see [`ir::plan::Plan::is_peer_sum`].
pub(crate) fn is_peer_sum(
    machine: &Machine,
    movement: &Move,
    incoming: &[(DeviceId, u64)],
) -> bool {
    matches!(movement, Move::AllReduce)
        && (2..=EXCHANGE_MEMBERS).contains(&incoming.len())
        && incoming.iter().all(|&(device, _)| machine.devices[device].kind.is_gpu())
}

/// What terms of so many bytes take longer in pieces than links say.
fn piece_nanos(bytes: u64) -> f64 {
    let pieces = bytes as f64 / MOST_PIECE_BYTES as f64;
    CROSSINGS_NANOS * (1.0 - pieces / MEASURED_PIECES).max(0.0)
}

/// Nanoseconds in which a GPU's lane copies a value into a letter, or out of one.
fn copy_nanos(bytes: u64) -> f64 {
    let is_shared = bytes >= SHARED_COPY_BYTES;
    let rate = if is_shared { SHARED_COPY_BYTES_PER_SEC } else { LONE_COPY_BYTES_PER_SEC };
    nanos_at(bytes as f64, rate)
}

/// Nanoseconds of a sum over so many GPUs, of terms of `bytes` bytes, by the vendor's library; `None` where the machine
/// has none.
///
/// Each GPU adds up one part of the terms and passes that on, so 2·(n − 1)/n of a term crosses each link, where a
/// direct sum has n − 1 terms cross.
pub(crate) fn library_sum_nanos(target: &Target, members: usize, bytes: u64) -> Option<f64> {
    let collectives = target.machine.collectives.as_ref()?;
    let members = members as f64;
    let crossing = 2.0 * (members - 1.0) / members * bytes as f64;
    Some(collectives.latency_nanos + nanos_at(crossing, collectives.bytes_per_sec))
}

/// Nanoseconds of bringing a weight from its home to a GPU, while nothing else reads the home's memory.
///
/// Fails when no link leads there.
pub(crate) fn fetch_nanos(
    target: &Target,
    home: DeviceId,
    device: DeviceId,
    bytes: u64,
) -> Result<f64> {
    let link = target.machine.need_link(home, device)?;
    Ok(link.latency_nanos + nanos_at(bytes as f64, link.bytes_per_sec))
}

/// Part of its rate that a link from a home keeps while the home's cores read their memory.
pub(crate) fn fetch_share(target: &Target, home: DeviceId, device: DeviceId) -> f64 {
    let measured = target.machine.link(home, device).and_then(|link| link.beside_reads);
    measured.unwrap_or(target.machine.devices[home].rates.beside_fetch)
}
