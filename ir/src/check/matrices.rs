//! Which matrices make what devices hand on, so that what is made of the same can be compared.

use std::collections::BTreeMap;

use crate::id::{BufferId, WeightId};
use crate::op::Op;
use crate::plan::{Action, Plan, Program, Weight};

/// The matrix that makes the features of each buffer, where a linear does; of a gate the first of two.
pub(super) fn matrices(program: &Program) -> BTreeMap<BufferId, WeightId> {
    let mut matrices = BTreeMap::new();
    for step in program.steps.rows() {
        let Action::Run(Op::Linear(linear)) = &step.action else { continue };
        for (&buffer, &weight) in step.writes.iter().zip(&linear.weights) {
            matrices.entry(buffer).or_insert(weight);
        }
    }
    matrices
}

/// Whether two weights hold the same part of one weight of the model, be it on two devices and in two formats.
pub(super) fn are_alike(plan: &Plan, one: WeightId, other: WeightId) -> bool {
    let part = |id: WeightId| {
        let weight = plan.weights.get(id);
        weight.map(|Weight { name, shape, sources, .. }| (name, shape, sources))
    };
    // Ids that name nothing are reported elsewhere.
    one == other || part(one).zip(part(other)).is_none_or(|(one, other)| one == other)
}
