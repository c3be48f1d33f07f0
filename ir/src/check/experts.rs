//! Expert ids that reach a mixture come from a router over no more experts than it has, or over those that it is a part
//! of; and the parts behind a router are all of its experts, each once.

use std::collections::{BTreeMap, BTreeSet};

use crate::check::order::Order;
use crate::check::{Scope, Violation};
use crate::id::{BufferId, StepId};
use crate::op::{Experts, Op};
use crate::plan::{Action, Step};
use crate::tensor::Dim;

/// A router's name; the first of the experts behind it that a mixture has, and the one after the last.
type Part<'a> = (&'a str, (u32, u32));

/// What ids in a buffer are chosen among.
#[derive(Clone, Copy)]
struct Choice<'a> {
    /// The router's name, which it has on all devices that choose alike.
    router: &'a str,
    /// Ids are below it.
    experts: u32,
}

/// The mixtures behind a router.
struct Mixtures {
    router: StepId,
    experts: u32,
    /// The first expert of each and the one after its last. What is cut in shards has the same experts in each of them.
    parts: BTreeSet<(u32, u32)>,
}

pub(super) fn check(scope: Scope<'_>, order: &Order, found: &mut Vec<Violation>) {
    let program = scope.program;
    let mut choices: BTreeMap<BufferId, Choice<'_>> = BTreeMap::new();
    let mut mixtures: BTreeMap<&str, Mixtures> = BTreeMap::new();
    for &id in &order.steps {
        let step = &program.steps[id];
        match &step.action {
            Action::Run(Op::Route { .. }) => {
                let logits = step.reads.first().and_then(|&logits| program.buffers.get(logits));
                if let Some(&Dim::Fixed(experts)) = logits.and_then(|logits| logits.ty.shape.last())
                    && let Some(&ids) = step.writes.first()
                {
                    let router = &*step.name;
                    choices.insert(ids, Choice { router, experts });
                    let parts = BTreeSet::new();
                    mixtures.entry(router).or_insert(Mixtures { router: id, experts, parts });
                }
            }
            Action::Run(Op::Experts(op)) => match part_of_choices(scope, op, step, &choices) {
                Ok(Some((router, part))) => {
                    mixtures.entry(router).and_modify(|mixtures| {
                        mixtures.parts.insert(part);
                    });
                }
                Ok(None) => (),
                Err(problem) => {
                    found.push(Violation::Shape { step: scope.name(id), problem });
                }
            },
            Action::Run(_) | Action::Fetch { .. } => (),
            Action::Move { .. } => {
                let read: Option<Vec<Choice<'_>>> =
                    step.reads.iter().map(|buffer| choices.get(buffer).copied()).collect();
                let most = read.and_then(|read| read.into_iter().max_by_key(|read| read.experts));
                choices.extend(step.writes.iter().zip(most).map(|(&buffer, most)| (buffer, most)));
            }
        }
    }
    for Mixtures { router, experts, parts } in mixtures.values() {
        if let Some(problem) = parts_problem(*experts, parts) {
            found.push(Violation::Shape { step: scope.name(*router), problem });
        }
    }
}

/// The router that a mixture gets its ids from and the experts that it computes; `None` where ids that name nothing,
/// which is reported elsewhere, leave it open.
fn part_of_choices<'a>(
    scope: Scope<'_>,
    op: &Experts,
    step: &Step,
    choices: &BTreeMap<BufferId, Choice<'a>>,
) -> Result<Option<Part<'a>>, String> {
    let gate = scope.plan.weights.get(op.gate);
    let Some(&experts) = gate.and_then(|gate| gate.shape.first()) else { return Ok(None) };
    let Some(choice) = step.reads.get(1).and_then(|ids| choices.get(ids)) else {
        return Err("its expert ids come from no router".into());
    };
    let part = match op.part {
        // Of all experts there may be more than are chosen among.
        None => (choice.experts <= experts).then_some((0, choice.experts)),
        Some(part) => {
            let end = part.first.checked_add(experts).filter(|&end| end <= choice.experts);
            end.map(|end| (part.first, end))
        }
    };
    match part {
        Some(part) => Ok(Some((choice.router, part))),
        None => Err(format!("a router over {} experts feeds {experts}", choice.experts)),
    }
}

/// Parts that overlap, or that do not follow each other from the first expert to the last.
fn parts_problem(experts: u32, parts: &BTreeSet<(u32, u32)>) -> Option<String> {
    let mut end = 0;
    let follow = parts.iter().all(|&(first, behind)| {
        let follows = first == end;
        end = behind;
        follows
    });
    // A router without any mixture does no harm, and one of the wrong size is reported with the mixture.
    if parts.is_empty() || (follow && end == experts) {
        return None;
    }
    let parts: Vec<String> =
        parts.iter().map(|(first, behind)| format!("{first}..{behind}")).collect();
    Some(format!("mixtures have experts {} of its {experts}", parts.join(" and ")))
}
