//! Expert ids that reach a mixture come from a router over no more experts than it has, or over those that it is a part
//! of.

use std::collections::BTreeMap;

use crate::check::order::Order;
use crate::check::{Scope, Violation};
use crate::id::BufferId;
use crate::op::Op;
use crate::plan::Action;
use crate::tensor::Dim;

pub(super) fn check(scope: Scope<'_>, order: &Order, found: &mut Vec<Violation>) {
    let Scope { plan, program } = scope;
    // Ids in a buffer are below its bound.
    let mut bounds: BTreeMap<BufferId, u32> = BTreeMap::new();
    for &id in &order.steps {
        let step = &program.steps[id];
        match &step.action {
            Action::Run(Op::Route { .. }) => {
                let logits = step.reads.first().and_then(|&logits| program.buffers.get(logits));
                if let Some(&Dim::Fixed(experts)) = logits.and_then(|logits| logits.ty.shape.last())
                    && let Some(&ids) = step.writes.first()
                {
                    bounds.insert(ids, experts);
                }
            }
            Action::Run(Op::Experts(op)) => {
                let Some(experts) = plan.weights.get(op.gate).and_then(|gate| gate.shape.first())
                else {
                    continue;
                };
                let bound = step.reads.get(1).and_then(|ids| bounds.get(ids));
                // Of some experts no more are asked for than there are; of all, all are.
                let fits = |&bound: &u32| match op.part {
                    Some(part) => part.first.checked_add(*experts).is_some_and(|end| end <= bound),
                    None => bound <= *experts,
                };
                if !bound.is_some_and(fits) {
                    let problem = match bound {
                        Some(bound) => format!("a router over {bound} experts feeds {experts}"),
                        None => "its expert ids come from no router".into(),
                    };
                    found.push(Violation::Shape { step: scope.name(id), problem });
                }
            }
            Action::Run(_) | Action::Fetch { .. } => (),
            Action::Move { .. } => {
                let read: Option<Vec<u32>> =
                    step.reads.iter().map(|buffer| bounds.get(buffer).copied()).collect();
                if let Some(bound) = read.and_then(|bounds| bounds.into_iter().max()) {
                    bounds.extend(step.writes.iter().map(|&buffer| (buffer, bound)));
                }
            }
        }
    }
}
