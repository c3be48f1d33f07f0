//! The layers of a plan as rows: one for each transformer block, alike ones folded into one.

use std::collections::{BTreeMap, BTreeSet};

use ir::graph::{Cause, Reason};
use ir::id::{CacheId, DeviceId, Id as _, WeightId};
use ir::machine::Machine;
use ir::plan::{Action, Phase, Plan, Program};

use crate::task::Task;

/// One block, or several alike ones.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Row {
    /// Ranges of blocks, first and last; none before and after the blocks.
    blocks: Vec<(u32, u32)>,
    /// Whether blocks came before.
    is_head: bool,
    /// Weights and caches.
    pub(super) bytes: u64,
    /// What happens in a prefill of the most tokens.
    pub(super) prefill: Work,
    /// What happens in a decode step of one sequence.
    pub(super) decode: Work,
    /// Of its first layer that was decided about.
    pub(super) cause: Cause,
}

/// Who computes a row in one phase, and how long that takes.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Work {
    /// Who computes, in the order they come up.
    on: Vec<DeviceId>,
    /// Homes of the weights that are fetched, of tables that are reached, and of caches that are borrowed.
    from: BTreeSet<DeviceId>,
    /// Work of the busiest device: members of a shared row work in step.
    pub(super) nanos: u64,
}

impl Row {
    /// `block 3`, `blocks 0-7`, `blocks 0, 2, 4`.
    pub(super) fn name(&self) -> String {
        /// Ranges that are written out: what a line of a table has room for.
        const MOST_RANGES: usize = 4;
        let range = |&(first, last): &(u32, u32)| match first == last {
            true => first.to_string(),
            false => format!("{first}-{last}"),
        };
        let ranges: Vec<String> = self.blocks.iter().map(range).collect();
        match self.blocks.as_slice() {
            [] if self.is_head => "head".into(),
            [] => "embedding".into(),
            [(first, last)] if first == last => format!("block {first}"),
            [.., last] if self.blocks.len() > MOST_RANGES => {
                let count: u32 = self.blocks.iter().map(|(first, last)| last - first + 1).sum();
                let begin = ranges[..MOST_RANGES - 1].join(", ");
                format!("blocks {begin}, … {} ({count})", range(last))
            }
            [..] => format!("blocks {}", ranges.join(", ")),
        }
    }

    /// Whether a phase fetches weights, reaches tables or borrows caches.
    pub(super) fn comes_from_elsewhere(&self) -> bool {
        !self.prefill.from.is_empty() || !self.decode.from.is_empty()
    }

    /// `gpu0`; `gpu0←numa0, decode gpu0+numa0` where a phase fetches weights or computes elsewhere.
    pub(super) fn devices(&self, machine: &Machine) -> String {
        let names = |devices: &mut dyn Iterator<Item = &DeviceId>| {
            let names: Vec<&str> = devices.map(|&device| super::name(machine, device)).collect();
            names.join("+")
        };
        let place = |work: &Work| {
            let on = names(&mut work.on.iter());
            if work.from.is_empty() {
                return on;
            }
            format!("{on}←{}", names(&mut work.from.iter()))
        };
        let (prefill, decode) = (place(&self.prefill), place(&self.decode));
        if prefill == decode || self.decode.on.is_empty() {
            return prefill;
        }
        format!("{prefill}, decode {decode}")
    }
}

/// What a row is about: a block, or what stands before or behind all blocks.
type Key = (Option<u32>, bool);

/// One row for each block, in the order they run.
pub(super) fn rows(plan: &Plan) -> Vec<Row> {
    let Some(prefill) = plan.programs.first() else { return Vec::new() };
    let decode = plan.programs.iter().find(|program| program.phase == Phase::Decode);
    let mut rows: Vec<(Key, Row)> = Vec::new();
    let mut keys: BTreeMap<&str, Key> = BTreeMap::new();
    // Weights may be fetched before anything is computed, so that only computations tell the order.
    for step in prefill.steps.rows().iter().filter(|step| matches!(step.action, Action::Run(_))) {
        let block = Task::block(&step.name);
        let is_head = block.is_none() && rows.iter().any(|((block, _), _)| block.is_some());
        let key = *keys.entry(&step.name).or_insert((block, is_head));
        if !rows.iter().any(|(known, _)| *known == key) {
            let row = Row {
                blocks: key.0.map(|block| (block, block)).into_iter().collect(),
                is_head: key.1,
                bytes: 0,
                prefill: Work::default(),
                decode: Work::default(),
                cause: Cause { reason: Reason::FollowsInput, runner_up: None },
            };
            rows.push((key, row));
        }
    }
    for (key, row) in &mut rows {
        let is_here = |name: &str| keys.get(name) == Some(key);
        let mut held = Held::default();
        row.prefill = work(plan, prefill, &is_here, &mut held);
        row.decode = decode.map(|d| work(plan, d, &is_here, &mut held)).unwrap_or_default();
        row.bytes = held.bytes(plan);
        row.cause = held.cause.unwrap_or_else(|| row.cause.clone());
    }
    rows.into_iter().map(|(_, row)| row).collect()
}

/// Rows that differ in nothing but their numbers and times become one row with the sums of all.
pub(super) fn folded(rows: Vec<Row>) -> Vec<Row> {
    let mut folded: Vec<(Row, u64)> = Vec::new();
    for row in rows {
        let known = folded.iter_mut().find(|(known, each)| {
            let are_blocks = !known.blocks.is_empty() && !row.blocks.is_empty();
            let same_place = |a: &Work, b: &Work| a.on == b.on && a.from == b.from;
            are_blocks
                && *each == row.bytes
                && same_place(&known.prefill, &row.prefill)
                && same_place(&known.decode, &row.decode)
                && is_alike(&known.cause, &row.cause)
        });
        let Some((known, _)) = known else {
            let each = row.bytes;
            folded.push((row, each));
            continue;
        };
        match known.blocks.last_mut() {
            Some((_, last)) if *last + 1 == row.blocks[0].0 => *last += 1,
            Some(_) | None => known.blocks.extend(row.blocks),
        }
        known.bytes += row.bytes;
        known.prefill.nanos += row.prefill.nanos;
        known.decode.nanos += row.decode.nanos;
        if let (Some(sum), Some(term)) = (&mut known.cause.runner_up, &row.cause.runner_up) {
            sum.gap_nanos += term.gap_nanos;
        }
    }
    folded.into_iter().map(|(row, _)| row).collect()
}

/// The same but for numbers.
fn is_alike(a: &Cause, b: &Cause) -> bool {
    let devices = |cause: &Cause| cause.runner_up.as_ref().map(|other| other.devices.clone());
    let same_reason = match (&a.reason, &b.reason) {
        (Reason::Memory { device: a, .. }, Reason::Memory { device: b, .. }) => a == b,
        (a, b) => a == b,
    };
    same_reason && devices(a) == devices(b)
}

/// What the steps of a row hold, and why.
#[derive(Default)]
struct Held {
    weights: BTreeSet<WeightId>,
    caches: BTreeSet<CacheId>,
    cause: Option<Cause>,
}

impl Held {
    fn bytes(&self, plan: &Plan) -> u64 {
        let weights = self.weights.iter().filter_map(|&id| plan.weights.get(id));
        let caches = self.caches.iter().filter_map(|&id| plan.caches.get(id));
        let (blocks, block_tokens) = (plan.model.blocks, plan.model.block_tokens);
        weights.map(|weight| plan.weight_bytes(weight)).sum::<u64>()
            + caches.map(|cache| cache.bytes(blocks, block_tokens)).sum::<u64>()
    }

    /// Notes the cause of a step that was decided about; what lies between decisions follows.
    fn explain(&mut self, cause: Option<&Cause>) {
        // Of a block that is torn apart the part that was pinned, or found no room, is what asks for an explanation.
        let rank = |cause: &Cause| match cause.reason {
            Reason::Pinned { .. } => 2,
            Reason::Memory { .. } => 1,
            Reason::Fastest | Reason::Requested | Reason::FollowsInput | Reason::Mismatch => 0,
        };
        let Some(cause) = cause.filter(|cause| cause.reason != Reason::FollowsInput) else {
            return;
        };
        if self.cause.as_ref().is_none_or(|known| rank(known) < rank(cause)) {
            self.cause = Some(cause.clone());
        }
    }
}

/// What a program does in the row that `is_here` tells by the names of steps.
fn work(plan: &Plan, program: &Program, is_here: &dyn Fn(&str) -> bool, held: &mut Held) -> Work {
    let mut work = Work::default();
    let mut busy = vec![0u64; plan.machine.devices.len()];
    for lane in &program.lanes {
        let steps = lane.steps.iter().filter_map(|&id| program.steps.get(id));
        for step in steps.filter(|step| is_here(&step.name)) {
            match &step.action {
                Action::Run(op) => {
                    if !work.on.contains(&lane.device) {
                        work.on.push(lane.device);
                    }
                    held.weights.extend(op.weights());
                    held.caches.extend(op.cache());
                    work.from.extend(plan.borrowed(op, lane.device).map(|cache| cache.device));
                    work.from.extend(plan.reached(op, lane.device).map(|table| table.device));
                    held.explain(plan.causes.get(step.cause));
                }
                Action::Move { .. } => (),
                Action::Fetch { weight, .. } => {
                    work.from.extend(plan.weights.get(*weight).map(|weight| weight.device));
                    // It is done beside what the device computes.
                    continue;
                }
            }
            if let Some(busy) = busy.get_mut(lane.device.index()) {
                *busy += step.estimate_nanos;
            }
        }
    }
    work.nanos = busy.into_iter().max().unwrap_or(0);
    work
}
