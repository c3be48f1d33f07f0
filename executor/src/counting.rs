//! Counting what the routers of a mixture choose.

use std::sync::Mutex;

use ir::counts::{ExpertCounts, VERSION};
use ir::id::StepId;
use ir::plan::{Plan, Program};

use crate::locked;

/// Counts that all lanes add to.
#[derive(Debug, Default)]
pub struct ExpertCounter(Mutex<ExpertCounts>);

impl ExpertCounter {
    /// What was counted until now with a plan.
    pub fn counts(&self, plan: &Plan) -> ExpertCounts {
        let counts = locked(&self.0).clone();
        ExpertCounts { version: VERSION, model: plan.model.name.clone(), ..counts }
    }

    /// Adds what a router chose, `[tokens, used]`. Devices that share a layer all choose the same; the first counts.
    pub(crate) fn add(&self, program: &Program, step: StepId, chosen: &[i32]) {
        let name = &program.steps[step].name;
        let of_router = |id: &StepId| {
            let other = &program.steps[*id];
            other.name == *name && other.writes.len() == program.steps[step].writes.len()
        };
        if program.steps.ids().find(of_router) != Some(step) {
            return;
        }
        let logits = program.steps[step].reads.first();
        let experts = logits.and_then(|&logits| program.buffers[logits].ty.shape.last());
        let Some(&ir::tensor::Dim::Fixed(experts)) = experts else { return };
        let chosen = chosen.iter().filter_map(|&expert| usize::try_from(expert).ok());
        let mut counts = locked(&self.0);
        counts.add(name, experts as usize, chosen);
    }
}
