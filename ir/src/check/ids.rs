//! Every id names a row.

use std::fmt::Display;

use crate::check::{Scope, Violation};
use crate::graph::{Cause, Reason};
use crate::id::{Id, Table};
use crate::layout::Move;
use crate::plan::{Action, Plan};

/// Ids in the plan's own tables.
pub(super) fn check_tables(plan: &Plan, found: &mut Vec<Violation>) {
    let devices = &plan.machine.devices;
    for (index, link) in plan.machine.links.iter().enumerate() {
        for device in [link.from, link.to] {
            row(devices, device, found, || format!("link {index}"));
        }
    }
    for (id, weight) in plan.weights.iter() {
        row(devices, weight.device, found, || format!("{id} ({})", weight.name));
        for source in &weight.sources {
            row(&plan.files, source.file, found, || format!("{id} ({})", weight.name));
        }
    }
    for (id, cache) in plan.caches.iter() {
        row(devices, cache.device, found, || format!("{id} ({})", cache.name));
    }
    for (id, Cause { reason, runner_up }) in plan.causes.iter() {
        if let Reason::Memory { device, .. } = reason {
            row(devices, *device, found, || format!("cause {id}"));
        }
        for &device in runner_up.iter().flat_map(|runner_up| &runner_up.devices) {
            row(devices, device, found, || format!("cause {id}"));
        }
    }
    for candidate in &plan.forecast.candidates {
        if let Some((device, _)) = candidate.missing {
            row(devices, device, found, || format!("candidate {:?}", candidate.name));
        }
    }
}

/// Ids in one program.
pub(super) fn check_program(scope: Scope<'_>, found: &mut Vec<Violation>) {
    let Scope { plan, program } = scope;
    let devices = &plan.machine.devices;
    for (id, buffer) in program.buffers.iter() {
        row(devices, buffer.device, found, || format!("{id} of {}", program.name));
    }
    for (index, lane) in program.lanes.iter().enumerate() {
        let holder = || format!("lane {index} of {}", program.name);
        row(devices, lane.device, found, holder);
        for &step in &lane.steps {
            row(&program.steps, step, found, holder);
        }
    }
    row(&program.buffers, program.output, found, || format!("output of {}", program.name));
    for (id, step) in program.steps.iter() {
        let holder = || scope.name(id).to_string();
        for &buffer in step.reads.iter().chain(&step.writes).chain(&step.frees) {
            row(&program.buffers, buffer, found, holder);
        }
        for &wait in &step.waits {
            row(&program.steps, wait, found, holder);
        }
        row(&plan.causes, step.cause, found, holder);
        match &step.action {
            Action::Run(op) => {
                for weight in op.weights() {
                    row(&plan.weights, weight, found, holder);
                }
                if let Some(cache) = op.cache() {
                    row(&plan.caches, cache, found, holder);
                }
                if let Some(rope) = op.rope() {
                    row(&plan.ropes, rope, found, holder);
                }
            }
            Action::Fetch { weight, offset: _ } => row(&plan.weights, *weight, found, holder),
            Action::Move { movement: Move::Transfer { from, to }, .. } => {
                row(devices, *from, found, holder);
                row(devices, *to, found, holder);
            }
            Action::Move { movement: Move::Broadcast { from }, .. } => {
                row(devices, *from, found, holder);
            }
            Action::Move {
                movement:
                    Move::AllReduce
                    | Move::AllGather { .. }
                    | Move::ReduceScatter { .. }
                    | Move::Slice { .. },
                ..
            } => (),
        }
    }
}

fn row<I: Id + Display, T>(
    table: &Table<I, T>,
    id: I,
    found: &mut Vec<Violation>,
    holder: impl Fn() -> String,
) {
    if table.get(id).is_none() {
        found.push(Violation::Dangling { holder: holder(), id: id.to_string() });
    }
}
