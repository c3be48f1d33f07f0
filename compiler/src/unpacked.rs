//! Packed matrices that GPUs hold row after row as well, in memory that the plan leaves over.
//!
//! Decode reads fewest bytes of a packed matrix, but for prompts of more tokens than a GPU multiplies with it as it lies
//! it is unpacked in every run before the vendor's library does, which takes as long for few tokens as for many: of 8 B
//! weights on an H200 some 7 ms, beside the 13 ms of the products of 512 tokens.

use std::collections::HashSet;

use anyhow::Result;
use ir::forecast::{DeviceForecast, ProgramForecast};
use ir::id::{DeviceId, StepId, WeightId};
use ir::op::Op;
use ir::plan::{Action, Phase, Plan, Program};
use ir::workspace::{MAX_FUSED_ROWS, WORKSPACE_ALIGNMENT};

use crate::bind::bind;
use crate::cost::rows_of;
use crate::emit::emit;
use crate::graphs::Graphs;
use crate::part::WeightKey;
use crate::place::missing;
use crate::prompts;
use crate::target::Batch;
use crate::task::Task;

/// A gain of prefill below this part of it is not worth the memory.
const WORTH: u64 = 50;
/// One part in so many of a GPU's memory is left free: other programs may come to need it before the plan is run.
const FREE: u64 = 10;

/// The forecast of prefill, the first program of `plan`, if GPUs hold the copies that they have room for beside what
/// `plan` counts; `None` where they have room for none or prefill gains too little. What [`plan`] makes of all programs
/// decides in the end.
pub(crate) fn prefill(
    task: &Task<'_>,
    mut graphs: Graphs,
    plan: &Plan,
) -> Result<Option<ProgramForecast>> {
    graphs.unpacked = with_room(task, &graphs, plan)?;
    if graphs.unpacked.is_empty() {
        return Ok(None);
    }
    let with = emit(task, &graphs, &[task.target.prefill()])?;
    let prefill = with.forecast.programs.into_iter().next();
    Ok(prefill.filter(|prefill| is_worth_it(&plan.forecast.programs[0], prefill)))
}

/// The plan of `graphs` with all programs, and the batch of each, in which GPUs hold as many of their packed matrices
/// unpacked as well as they have room for, where prompts are predicted to be done sooner by that.
pub(crate) fn plan(task: &Task<'_>, graphs: &mut Graphs) -> Result<(Plan, Vec<Batch>)> {
    let without = prompts::plan(task, graphs)?;
    graphs.unpacked = with_room(task, graphs, &without.0)?;
    if !graphs.unpacked.is_empty() {
        let with = prompts::plan(task, graphs)?;
        let [before, after] = [&without, &with].map(|(plan, _)| &plan.forecast.programs[0]);
        if missing(&with.0).is_none() && is_worth_it(before, after) {
            return Ok(with);
        }
        graphs.unpacked.clear();
    }
    Ok(without)
}

/// Whether prompts are done so much sooner with copies that these are worth their memory.
fn is_worth_it(without: &ProgramForecast, with: &ProgramForecast) -> bool {
    with.nanos < without.nanos - without.nanos / WORTH
}

/// The packed matrices that prompts multiply many rows with, the first of each GPU that it has room for.
fn with_room(task: &Task<'_>, graphs: &Graphs, plan: &Plan) -> Result<HashSet<WeightKey>> {
    let most = |device: &DeviceForecast| device.capacity_bytes - device.capacity_bytes / FREE;
    let mut room = plan.forecast.devices.clone();
    let has_room = |(id, device): (DeviceId, &DeviceForecast)| {
        task.target.machine.devices[id].kind.is_gpu() && device.needed_bytes() < most(device)
    };
    if !room.iter().any(has_room) {
        return Ok(HashSet::new());
    }
    let keys = bind(task, graphs)?.weights;
    let mut chosen = HashSet::new();
    for program in plan.programs.iter().filter(|program| program.phase == Phase::Prefill) {
        for lane in &program.lanes {
            for &weight in lane.steps.iter().flat_map(|&step| multiplied(program, step)) {
                let (key, held) = (keys[weight], &plan.weights[weight]);
                if held.device != lane.device || chosen.contains(&key) {
                    continue;
                }
                let Some(bytes) = plan.unpacked_bytes(held) else { continue };
                let device = &mut room[held.device];
                let bytes = bytes.next_multiple_of(WORKSPACE_ALIGNMENT);
                if bytes <= most(device).saturating_sub(device.needed_bytes()) {
                    device.weight_bytes += bytes;
                    chosen.insert(key);
                }
            }
        }
    }
    Ok(chosen)
}

/// The matrices that a step multiplies many rows with.
fn multiplied(program: &Program, step: StepId) -> &[WeightId] {
    let step = &program.steps[step];
    let rows = step.reads.first().map(|&x| rows_of(&program.buffers[x].ty, program.max));
    match &step.action {
        Action::Run(Op::Linear(linear)) if rows > Some(MAX_FUSED_ROWS) => &linear.weights,
        Action::Run(_) | Action::Move { .. } | Action::Fetch { .. } => &[],
    }
}
