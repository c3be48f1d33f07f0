//! Attention to one layer: its devices have all of its heads between them, and every program attends to a cache as
//! those before it do, for what one has cached the others read.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use crate::check::matrices::{are_alike, matrices};
use crate::check::{Scope, Violation};
use crate::id::{CacheId, Id as _, StepId, WeightId};
use crate::op::{Attention, Op};
use crate::plan::{Action, Plan, Program, Step};

/// How a program attends to a cache.
struct Attending<'a> {
    /// Index of the program.
    program: usize,
    attention: &'a Attention,
    /// The matrices that make queries, keys and values, where linears do.
    made_with: [Option<WeightId>; 3],
}

/// The heads of each layer in one program.
pub(super) fn check(scope: Scope<'_>, found: &mut Vec<Violation>) {
    let mut layers: BTreeMap<&str, Vec<(StepId, &Attention)>> = BTreeMap::new();
    for (id, _, attention) in attending(scope.program) {
        // A cache that does not exist is reported elsewhere.
        if let Some(cache) = scope.plan.caches.get(attention.cache) {
            layers.entry(cache.name.as_str()).or_default().push((id, attention));
        }
    }
    for mut parts in layers.into_values() {
        parts.sort_by_key(|(_, attention)| attention.first_head);
        if let Some(problem) = heads_problem(&parts) {
            found.push(Violation::Shape { step: scope.name(parts[0].0), problem });
        }
    }
}

/// What programs do with the caches that they share.
pub(super) fn check_programs(plan: &Plan, found: &mut Vec<Violation>) {
    let mut known: BTreeMap<CacheId, Attending<'_>> = BTreeMap::new();
    for (index, program) in plan.programs.iter().enumerate() {
        let matrices = matrices(program);
        for (id, step, attention) in attending(program) {
            let matrix = |read: usize| step.reads.get(read).and_then(|read| matrices.get(read));
            let made_with = [0, 1, 2].map(|read| matrix(read).copied());
            let now = Attending { program: index, attention, made_with };
            match known.entry(attention.cache) {
                Entry::Vacant(entry) => {
                    entry.insert(now);
                }
                // Two writers in one program are reported elsewhere.
                Entry::Occupied(entry) if entry.get().program == index => (),
                Entry::Occupied(entry) => {
                    if let Some(problem) = difference(plan, entry.get(), &now) {
                        let step = Scope { plan, program }.name(id);
                        found.push(Violation::Shape { step, problem });
                    }
                }
            }
        }
    }
}

/// The steps of a program that attend.
pub(super) fn attending(program: &Program) -> impl Iterator<Item = (StepId, &Step, &Attention)> {
    program.steps.iter().filter_map(|(id, step)| match &step.action {
        Action::Run(Op::Attention(attention)) => Some((id, step, attention)),
        Action::Run(_) | Action::Move { .. } | Action::Fetch { .. } => None,
    })
}

/// What is wrong with a layer's heads, in the order of query heads: each device has all query heads of its own key
/// heads, or all have the same key heads and divide the query heads of these.
fn heads_problem(parts: &[(StepId, &Attention)]) -> Option<String> {
    let ops = || parts.iter().map(|&(_, attention)| attention);
    let first = ops().next()?;
    let of_keys = |part: &Attention| u64::from(part.kv_heads) * u64::from(part.group);
    let has_own = |part: &Attention| part.first_head == 0 && u64::from(part.heads) == of_keys(part);
    let is_divided = |part: &Attention| part.kv_heads == first.kv_heads;
    let mut end = 0;
    let follows = |part: &Attention| {
        let follows = u64::from(part.first_head) == end;
        end += u64::from(part.heads);
        follows
    };
    let are_divided = ops().all(is_divided) && ops().all(follows) && end == of_keys(first);
    if ops().all(|part| part.group == first.group) && (are_divided || ops().all(has_own)) {
        return None;
    }
    let heads = ops().map(|part| {
        let first = u64::from(part.first_head);
        format!("{first}..{}", first + u64::from(part.heads))
    });
    let heads: Vec<String> = heads.collect();
    let keys: Vec<String> = ops().map(|part| part.kv_heads.to_string()).collect();
    Some(format!(
        "query heads {}, in groups of {}, have {} key heads",
        heads.join(" and "),
        first.group,
        keys.join(" and ")
    ))
}

/// What a program does otherwise with a cache than one before it.
fn difference(plan: &Plan, before: &Attending<'_>, now: &Attending<'_>) -> Option<String> {
    let name = &plan.programs[before.program].name;
    // Norms are held by each device that attends.
    let norms = |attending: &Attending<'_>| {
        let op = Op::Attention(attending.attention.clone());
        (op.weights(), op.map_weights(|_| WeightId::from_index(0)))
    };
    let ((norms_before, op_before), (norms_now, op_now)) = (norms(before), norms(now));
    let mut pairs = norms_before.into_iter().zip(norms_now);
    if op_before != op_now || !pairs.all(|(one, other)| are_alike(plan, one, other)) {
        let cache = now.attention.cache;
        return Some(format!("it attends to {cache} otherwise than {name} does"));
    }
    let made_with = before.made_with.into_iter().zip(now.made_with);
    for (what, made_with) in ["queries", "keys", "values"].into_iter().zip(made_with) {
        // What is moved before it is read may be cut or joined.
        if let (Some(one), Some(other)) = made_with
            && !are_alike(plan, one, other)
        {
            return Some(format!("its {what} are made with another matrix than those of {name}"));
        }
    }
    None
}
