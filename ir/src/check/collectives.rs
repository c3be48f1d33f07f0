//! A collective is one alike step on each member, issued by all in one order. Members of a sum may read their own
//! copies of what several of them have summed before; nothing else reads the terms of a sum, which are parts of a
//! value.

use std::collections::{BTreeMap, BTreeSet};

use crate::check::matrices::matrices;
use crate::check::order::{LanePosition, MAX_LANES};
use crate::check::{Scope, Violation};
use crate::id::{BufferId, CollectiveId, DeviceId, StepId, Table, WeightId};
use crate::layout::Move;
use crate::plan::{Action, Phase, Plan, Program, Step, Weight};
use crate::tensor::Dim;

/// The steps of one collective that are in lanes.
type Members = Vec<(StepId, LanePosition)>;

pub(super) fn check(
    scope: Scope<'_>,
    positions: &Table<StepId, Option<LanePosition>>,
    found: &mut Vec<Violation>,
) {
    check_terms(scope, found);
    let mut collectives: BTreeMap<CollectiveId, Members> = BTreeMap::new();
    for (id, step) in scope.program.steps.iter() {
        if let Action::Move { collective: Some(collective), .. } = step.action
            && let Some(at) = positions[id]
        {
            collectives.entry(collective).or_default().push((id, at));
        }
    }
    let (sums, matrices) = (sums(scope), matrices(scope.program));
    for (&collective, members) in &collectives {
        let problem = members_problem(scope, members, &sums, &matrices).map(str::to_owned);
        let problem = problem.or_else(|| gpus_problem(scope, members, positions));
        if let Some(problem) = problem {
            let program = scope.program.name.clone();
            found.push(Violation::Collective { program, collective, problem });
        }
    }
    if scope.program.lanes.len() <= MAX_LANES {
        check_order(scope, &collectives, found);
    }
}

/// Terms of sums that something else reads.
fn check_terms(scope: Scope<'_>, found: &mut Vec<Violation>) {
    let steps = scope.program.steps.rows().iter();
    let terms: BTreeSet<BufferId> =
        steps.filter(|step| is_sum(step)).flat_map(|step| &step.reads).copied().collect();
    for (id, step) in scope.program.steps.iter().filter(|(_, step)| !is_sum(step)) {
        for &buffer in step.reads.iter().filter(|&buffer| terms.contains(buffer)) {
            let problem = format!("it reads {buffer}, which is a term of a sum");
            found.push(Violation::Shape { step: scope.name(id), problem });
        }
    }
}

fn is_sum(step: &Step) -> bool {
    matches!(
        step.action,
        Action::Move { movement: Move::AllReduce | Move::ReduceScatter { .. }, .. }
    )
}

/// The sum over all of its members that each buffer holds.
fn sums(scope: Scope<'_>) -> BTreeMap<BufferId, CollectiveId> {
    let mut sums = BTreeMap::new();
    for step in scope.program.steps.rows() {
        if let Action::Move { movement: Move::AllReduce, collective: Some(sum), .. } = step.action {
            sums.extend(step.writes.iter().map(|&buffer| (buffer, sum)));
        }
    }
    sums
}

fn members_problem(
    scope: Scope<'_>,
    members: &Members,
    sums: &BTreeMap<BufferId, CollectiveId>,
    matrices: &BTreeMap<BufferId, WeightId>,
) -> Option<&'static str> {
    let program = scope.program;
    let (first, _) = members[0];
    let step = &program.steps[first];
    let Action::Move { movement, algorithm, .. } = &step.action else { return None };
    let devices: Vec<DeviceId> =
        members.iter().map(|(_, at)| program.lanes[at.lane].device).collect();
    let distinct: BTreeSet<DeviceId> = devices.iter().copied().collect();
    if distinct.len() != devices.len() {
        return Some("a device takes part twice");
    }
    // Of a sum that several devices have, each may read the copy that is nearest.
    let is_same = |(a, b): (&BufferId, &BufferId)| {
        a == b || sums.get(a).is_some_and(|sum| sums.get(b) == Some(sum))
    };
    let alike = members.iter().all(|&(id, _)| {
        let other = &program.steps[id];
        let same = matches!(
            &other.action,
            Action::Move { movement: m, algorithm: a, .. } if m == movement && a == algorithm
        );
        same && other.reads.len() == step.reads.len()
            && other.reads.iter().zip(&step.reads).all(is_same)
    });
    if !alike {
        return Some("its steps differ in what they do or read");
    }
    let plan = scope.plan;
    if !algorithm.is_direct() {
        let are_sums = members.iter().all(|(id, _)| {
            let step = &program.steps[*id];
            plan.is_library_sum(program, step) && step.reads.len() == members.len()
        });
        if !are_sums || program.phase != Phase::Prefill {
            return Some("a library makes sums of all their GPUs' terms, in prefill");
        }
        if plan.machine.collectives.is_none() {
            return Some("the machine has no library that makes it");
        }
    }
    match movement {
        // Those that hold the value already take no part.
        Move::Broadcast { .. } => return None,
        Move::AllReduce | Move::AllGather { .. } | Move::ReduceScatter { .. } => (),
        // A matter of shapes: neither is a collective.
        Move::Transfer { .. } | Move::Slice { .. } => return None,
    }
    let holders = |id: StepId| holders(program, &program.steps[id]);
    // Each adds a term of its own, or of its own group.
    let are_members = members.iter().zip(&devices).all(|(&(id, _), own)| {
        let holders = holders(id);
        let is_once = holders.iter().filter(|holder| *holder == own).count() == 1;
        is_once && holders.iter().all(|device| distinct.contains(device))
    });
    let holders = holders(first);
    let may_be_fewer = matches!(movement, Move::AllReduce);
    if !are_members
        || holders.len() > devices.len()
        || (!may_be_fewer && holders.len() < devices.len())
    {
        return Some("the devices that hold its terms are not those that take part");
    }
    if matches!(movement, Move::AllGather { .. }) && !follow_rows(plan, &step.reads, matrices) {
        return Some("its parts are not in the order of the rows that make them");
    }
    if let Move::ReduceScatter { axis } = movement {
        return scatter_problem(scope, members, &holders, *axis);
    }
    None
}

/// Whether parts are in the order in which one matrix has the rows that make them, where they are made of one.
fn follow_rows(plan: &Plan, parts: &[BufferId], matrices: &BTreeMap<BufferId, WeightId>) -> bool {
    let rows = |part: &BufferId| plan.weights.get(*matrices.get(part)?);
    // Rows that come from several places have no order there.
    let start = |rows: &Weight| match rows.sources.as_slice() {
        [only] => Some((only.file, only.offset)),
        _ => None,
    };
    let made_of: Option<Vec<&Weight>> = parts.iter().map(rows).collect();
    made_of.unwrap_or_default().windows(2).all(|pair| {
        let [one, next] = [pair[0], pair[1]];
        one.name != next.name || start(one).zip(start(next)).is_none_or(|(one, next)| one < next)
    })
}

/// GPUs that sum without the host count such sums and leave each other terms by the places that they have among the
/// members, in all programs, of which several may be under way: those that ever sum together always do.
pub(super) fn check_groups(plan: &Plan, found: &mut Vec<Violation>) {
    let mut groups = BTreeMap::new();
    for program in &plan.programs {
        for step in program.steps.rows() {
            let Action::Move { collective: Some(collective), .. } = step.action else { continue };
            if !plan.is_peer_sum(program, step) {
                continue;
            }
            let group = holders(program, step);
            let mut is_other = |device: &DeviceId| {
                groups.entry(*device).or_insert_with(|| group.clone()) != &group
            };
            // Every device is looked at, so that what is found does not depend on their order.
            if group.iter().filter(|device| is_other(device)).count() > 0 {
                let problem = "GPUs that sum among themselves do so with the same others".into();
                let program = program.name.clone();
                found.push(Violation::Collective { program, collective, problem });
                return;
            }
        }
    }
}

/// The devices whose values a step reads, in that order.
fn holders(program: &Program, step: &Step) -> Vec<DeviceId> {
    let buffers = step.reads.iter().filter_map(|&buffer| program.buffers.get(buffer));
    buffers.map(|buffer| buffer.device).collect()
}

/// What GPUs ask for that sum without the host: they wait for each other alone.
fn gpus_problem(
    scope: Scope<'_>,
    members: &Members,
    positions: &Table<StepId, Option<LanePosition>>,
) -> Option<String> {
    let Scope { plan, program } = scope;
    for &(id, _) in members {
        let step = &program.steps[id];
        if !plan.is_peer_sum(program, step) && !plan.is_library_sum(program, step) {
            continue;
        }
        let group = holders(program, step);
        // What they do up to the sum is over when the sum is.
        let is_implied = |wait: StepId| {
            let Some(Some(wait)) = positions.get(wait) else { return true };
            let is_later = |at: &LanePosition| at.lane == wait.lane && at.position >= wait.position;
            let in_group = |at: &LanePosition| group.contains(&program.lanes[at.lane].device);
            members.iter().any(|(_, at)| in_group(at) && is_later(at))
        };
        if let Some(&wait) = step.waits.iter().find(|wait| !is_implied(**wait)) {
            let (id, wait) = (scope.name(id), scope.name(wait));
            return Some(format!("{id} waits for {wait}, which no member of the sum does"));
        }
    }
    None
}

/// The slices of a scattered sum follow each other along the axis in the order of the terms, and leave nothing out.
fn scatter_problem(
    scope: Scope<'_>,
    members: &Members,
    holders: &[DeviceId],
    axis: u8,
) -> Option<&'static str> {
    let program = scope.program;
    let &(first, _) = members.first()?;
    let term = program.steps[first].reads.first().and_then(|&term| program.buffers.get(term))?;
    let slices: BTreeMap<DeviceId, (u32, u32)> = members
        .iter()
        .filter_map(|&(id, at)| match program.steps[id].action {
            Action::Move { slice: Some(slice), .. } => Some((program.lanes[at.lane].device, slice)),
            Action::Move { slice: None, .. } | Action::Run(_) | Action::Fetch { .. } => None,
        })
        .collect();
    let mut end = 0;
    for holder in holders {
        let &(start, size) = slices.get(holder)?;
        if u64::from(start) != end {
            return Some("its slices do not follow each other");
        }
        end += u64::from(size);
    }
    // That it is a number of elements is a matter of shapes.
    let axis = term.ty.shape.get(usize::from(axis));
    let is_short = matches!(axis, Some(&Dim::Fixed(all)) if end < u64::from(all));
    is_short.then_some("its slices leave some of the sum out")
}

fn check_order(
    scope: Scope<'_>,
    collectives: &BTreeMap<CollectiveId, Members>,
    found: &mut Vec<Violation>,
) {
    let program = scope.program;
    for (index, lane) in program.lanes.iter().enumerate() {
        // For each later lane the last place of a collective that both have issued so far.
        let mut reached: BTreeMap<usize, (usize, CollectiveId)> = BTreeMap::new();
        for step in &lane.steps {
            let Some(Action::Move { collective: Some(second), .. }) =
                program.steps.get(*step).map(|step| &step.action)
            else {
                continue;
            };
            let Some(members) = collectives.get(second) else { continue };
            for &(_, at) in members.iter().filter(|(_, at)| at.lane > index) {
                let last = reached.entry(at.lane).or_insert((at.position, *second));
                if last.0 > at.position {
                    let (program, first, second) = (program.name.clone(), last.1, *second);
                    found.push(Violation::CollectiveOrder { program, first, second });
                } else {
                    *last = (at.position, *second);
                }
            }
        }
    }
}
