//! How buffers fill a device's memory over a run.

use ir::id::Id as _;
use ir::plan::{Action, Program};

use super::Times;

/// Bytes of buffers on one device over time.
#[derive(Clone, Debug, Default)]
pub struct Curve {
    /// Each holds until the next one's time.
    pub levels: Vec<Level>,
    /// When the run began and ended.
    pub start: u64,
    /// When the run ended.
    pub end: u64,
}

/// Bytes from one moment on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Level {
    /// From when.
    pub time: u64,
    /// Results of computations.
    pub activation_bytes: u64,
    /// Copies that came from other devices, and results of collectives.
    pub staging_bytes: u64,
}

/// One buffer: who makes it and who ends it.
#[derive(Clone, Debug)]
pub(super) struct Lifetime {
    device: usize,
    bytes: u64,
    is_staging: bool,
    first: usize,
    last: Option<usize>,
}

impl Level {
    /// All bytes.
    pub fn bytes(&self) -> u64 {
        self.activation_bytes.saturating_add(self.staging_bytes)
    }
}

impl Curve {
    /// The most bytes at one time.
    pub fn peak(&self) -> u64 {
        self.levels.iter().map(Level::bytes).max().unwrap_or(0)
    }
}

/// Buffers that a step of the program writes.
pub(super) fn lifetimes(program: &Program) -> Vec<Lifetime> {
    let mut written: Vec<Option<(usize, bool)>> = vec![None; program.buffers.len()];
    let mut freed: Vec<Option<usize>> = vec![None; program.buffers.len()];
    for (id, step) in program.steps.iter() {
        for buffer in &step.writes {
            if let Some(place @ None) = written.get_mut(buffer.index()) {
                *place = Some((id.index(), !matches!(step.action, Action::Run(_))));
            }
        }
        for buffer in &step.frees {
            if let Some(place) = freed.get_mut(buffer.index()) {
                *place = Some(id.index());
            }
        }
    }
    let mut lifetimes = Vec::new();
    for (id, buffer) in program.buffers.iter() {
        if let Some((first, is_staging)) = written[id.index()] {
            lifetimes.push(Lifetime {
                device: buffer.device.index(),
                bytes: buffer.ty.bytes(program.max),
                is_staging,
                first,
                last: freed[id.index()],
            });
        }
    }
    lifetimes
}

/// One curve for each device. A buffer counts from the start of its first step to the end of its last.
pub(super) fn curves(
    buffers: &[Lifetime],
    times: &[Option<Times>],
    devices: usize,
    start: u64,
    end: u64,
) -> Vec<Curve> {
    let mut events: Vec<Vec<(u64, bool, i128)>> = vec![Vec::new(); devices];
    for buffer in buffers {
        let Some(events) = events.get_mut(buffer.device) else { continue };
        let Some(first) = times.get(buffer.first).copied().flatten() else { continue };
        let bytes = i128::from(buffer.bytes);
        events.push((first.start, buffer.is_staging, bytes));
        if let Some(last) = buffer.last.and_then(|step| times.get(step).copied().flatten()) {
            events.push((last.end.max(first.start), buffer.is_staging, -bytes));
        }
    }
    events.into_iter().map(|events| curve(events, start, end)).collect()
}

fn curve(mut events: Vec<(u64, bool, i128)>, start: u64, end: u64) -> Curve {
    // What ends is given back before what begins at the same moment takes it.
    events.sort_by_key(|&(time, _, bytes)| (time, bytes));
    let (mut activation, mut staging) = (0_i128, 0_i128);
    let mut levels = vec![Level { time: start, ..Level::default() }];
    for (time, is_staging, bytes) in events {
        *(if is_staging { &mut staging } else { &mut activation }) += bytes;
        let clamp = |bytes: i128| u64::try_from(bytes.max(0)).unwrap_or(u64::MAX);
        let level =
            Level { time, activation_bytes: clamp(activation), staging_bytes: clamp(staging) };
        match levels.last_mut() {
            Some(last) if last.time == time => *last = level,
            _ => levels.push(level),
        }
    }
    Curve { levels, start, end }
}
