//! The layers of a plan as rows: one for each transformer block, alike neighbours folded into one.

use std::collections::BTreeSet;

use ir::graph::{Cause, Reason};
use ir::id::{DeviceId, Id as _};
use ir::machine::Machine;
use ir::op::Op;
use ir::plan::{Action, Phase, Plan, Program};

use crate::task::Task;

/// One block, or several alike ones that follow each other.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Row {
    /// First and last block; `None` before and after the blocks.
    blocks: Option<(u32, u32)>,
    /// Whether blocks came before.
    is_head: bool,
    /// Who computes in it, in the order they come up.
    on: Vec<DeviceId>,
    /// Weights and caches.
    pub(super) bytes: u64,
    /// Time in a prefill of the largest extent.
    pub(super) prefill_nanos: u64,
    /// Time in a decode step of one sequence.
    pub(super) decode_nanos: u64,
    /// Of its first layer that was decided about.
    pub(super) cause: Cause,
}

impl Row {
    pub(super) fn name(&self) -> String {
        match self.blocks {
            Some((first, last)) if first == last => format!("block {first}"),
            Some((first, last)) => format!("blocks {first}-{last}"),
            None if self.is_head => "head".into(),
            None => "embedding".into(),
        }
    }

    pub(super) fn devices(&self, machine: &Machine) -> String {
        let names: Vec<&str> = self.on.iter().map(|&device| super::name(machine, device)).collect();
        names.join("+")
    }
}

/// One row for each block, in the order they run.
pub(super) fn rows(plan: &Plan) -> Vec<Row> {
    let Some(prefill) = plan.programs.first() else { return Vec::new() };
    let decode = plan.programs.iter().find(|program| program.phase == Phase::Decode);
    let mut rows: Vec<Row> = Vec::new();
    let mut row_of = Vec::new();
    for (_, step) in prefill.steps.iter() {
        let block = Task::block(&step.name);
        let is_head = block.is_none() && rows.iter().any(|row| row.blocks.is_some());
        let known = rows
            .iter()
            .position(|row| row.blocks.map(|(first, _)| first) == block && row.is_head == is_head);
        row_of.push(known.unwrap_or_else(|| {
            rows.push(Row {
                blocks: block.map(|block| (block, block)),
                is_head,
                on: Vec::new(),
                bytes: 0,
                prefill_nanos: 0,
                decode_nanos: 0,
                cause: Cause { reason: Reason::FollowsInput, runner_up: None },
            });
            rows.len() - 1
        }));
    }
    for (index, row) in rows.iter_mut().enumerate() {
        fill(plan, prefill, &row_of, index, row);
        row.prefill_nanos = busiest(plan, prefill, &row_of, index);
        // Programs over one placement have the same steps.
        let alike = decode.filter(|decode| decode.steps.len() == row_of.len());
        row.decode_nanos = alike.map_or(0, |decode| busiest(plan, decode, &row_of, index));
    }
    rows
}

/// Neighbours that differ in nothing but their numbers and times become one row with the sums of both.
pub(super) fn folded(rows: Vec<Row>) -> Vec<Row> {
    let mut folded: Vec<(Row, u64)> = Vec::new();
    for row in rows {
        let last = folded.last_mut().filter(|(last, each)| {
            let follows = last.blocks.zip(row.blocks).is_some_and(|(a, b)| a.1 + 1 == b.0);
            follows && last.on == row.on && *each == row.bytes && is_alike(&last.cause, &row.cause)
        });
        let Some((last, _)) = last else {
            let each = row.bytes;
            folded.push((row, each));
            continue;
        };
        last.blocks = last.blocks.zip(row.blocks).map(|(a, b)| (a.0, b.1));
        last.bytes += row.bytes;
        last.prefill_nanos += row.prefill_nanos;
        last.decode_nanos += row.decode_nanos;
        if let (Some(sum), Some(term)) = (&mut last.cause.runner_up, &row.cause.runner_up) {
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

fn fill(plan: &Plan, program: &Program, row_of: &[usize], index: usize, row: &mut Row) {
    let (mut weights, mut caches) = (BTreeSet::new(), BTreeSet::new());
    let mut decided = false;
    for lane in &program.lanes {
        for &id in &lane.steps {
            let Some(step) = program.steps.get(id).filter(|_| row_of[id.index()] == index) else {
                continue;
            };
            let Action::Run(op) = &step.action else { continue };
            if !row.on.contains(&lane.device) {
                row.on.push(lane.device);
            }
            weights.extend(op.weights());
            if let Op::Attention(attention) = op {
                caches.insert(attention.cache);
            }
            if let Some(cause) = plan.causes.get(step.cause)
                && !decided
                && cause.reason != Reason::FollowsInput
            {
                row.cause = cause.clone();
                decided = true;
            }
        }
    }
    let model = &plan.model;
    row.bytes = weights.into_iter().filter_map(|id| plan.weights.get(id)).map(|w| w.bytes()).sum();
    row.bytes += caches
        .into_iter()
        .filter_map(|id| plan.caches.get(id))
        .map(|cache| cache.bytes(model.blocks, model.block_tokens))
        .sum::<u64>();
}

/// The work of the row's busiest device: members of a shared row work in step.
fn busiest(plan: &Plan, program: &Program, row_of: &[usize], index: usize) -> u64 {
    let mut busy = vec![0u64; plan.machine.devices.len()];
    for lane in &program.lanes {
        for &id in lane.steps.iter().filter(|id| row_of.get(id.index()) == Some(&index)) {
            let nanos = program.steps.get(id).map_or(0, |step| step.estimate_nanos);
            if let Some(busy) = busy.get_mut(lane.device.index()) {
                *busy += nanos;
            }
        }
    }
    busy.into_iter().max().unwrap_or(0)
}
