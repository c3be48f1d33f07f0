//! The experts of mixtures that are chosen most often, as nodes of their own beside the others.
//!
//! - Experts are put in the order of their counts, and the router's rows with them, so that a node's experts are
//!   neighbours by id. Both nodes read all choices, and what they make is added up.
//! - The first node then stays on a GPU where there is room, and the home of the others computes less.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result, ensure};
use ir::counts::ExpertCounts;
use ir::dag::Node;
use ir::id::{NodeId, ValueId, WeightId};
use ir::model::{Model, ModelWeight};
use ir::op::{ExpertPart, Experts, Op};
use ir::weight::Source;

use crate::part::WeightKey;
use crate::place::Room;
use crate::place::units::Units;
use crate::rewrite::Rewrite;
use crate::task::Task;

/// The part of all choices that is expected to fall on all experts alike: texts differ from the one that was counted.
const OTHER_TEXT: f64 = 0.1;

/// The experts of one mixture by falling counts.
struct Ranked {
    /// The node whose row of logits is the router's.
    router: NodeId,
    /// Their ids in the checkpoint.
    order: Vec<u32>,
    /// The part of all choices that fell on each, in that order.
    loads: Vec<f64>,
}

/// Fails where the counts are those of another model, or there is nothing to count.
pub(crate) fn check_counts(model: &Model, counts: &ExpertCounts) -> Result<()> {
    let ranked = ranked(model, counts)?;
    ensure!(
        !ranked.is_empty(),
        "the model has no experts, and the counts are of those of {}: leave --expert-counts out",
        counts.model
    );
    let routers: BTreeSet<NodeId> = ranked.values().map(|ranked| ranked.router).collect();
    ensure!(
        routers.len() == counts.routers.len(),
        "the counts are of {} routers of {}, and the model has {}: count its own with `hybrid-exec --count-experts`",
        counts.routers.len(),
        counts.model,
        routers.len()
    );
    Ok(())
}

/// The model with as many of the most used experts of each mixture in a node of their own as there is room for beside
/// everything else; `None` where there is none to speak of. Mixtures stay whole that are not free: a pin is for all of
/// one.
///
/// # Errors
/// When the counts are those of another model.
pub(crate) fn split(
    task: &Task<'_>,
    counts: &ExpertCounts,
    rooms: &[Room],
    is_free: impl Fn(&str) -> bool,
) -> Result<Option<Model>> {
    let mut ranked = ranked(task.model, counts)?;
    ranked.retain(|&id, _| is_free(&task.model.layers.node(id).name));
    let firsts = firsts(task, &ranked, rooms)?;
    if firsts.values().all(|&first| first == 0) {
        return Ok(None);
    }
    let mut model = task.model.clone();
    let mut rewrite = Rewrite::new(&task.model.layers);
    // Routers come before their experts.
    let mut reordered: BTreeMap<NodeId, &Ranked> = BTreeMap::new();
    for (id, ranked) in &ranked {
        if firsts[id] > 0 {
            reordered.insert(ranked.router, ranked);
        }
    }
    for (id, node) in task.model.layers.nodes() {
        match (&node.work, ranked.get(&id), firsts.get(&id)) {
            (Op::Experts(experts), Some(ranked), Some(&first)) if first > 0 => {
                let made = push_parts(&mut model, &mut rewrite, node, experts, ranked, first)?;
                rewrite.rename(&node.outputs, &[made]);
            }
            _ => {
                let mut op = node.work.clone();
                if let Some(ranked) = reordered.get(&id) {
                    op = op.map_weights(|weight| reorder_rows(&mut model, weight, &ranked.order));
                }
                rewrite.push(node.name.clone(), op, &node.inputs, &node.outputs)?;
            }
        }
    }
    model.layers = rewrite.finish();
    Ok(Some(model))
}

/// The experts of every mixture by their counts.
fn ranked(model: &Model, counts: &ExpertCounts) -> Result<BTreeMap<NodeId, Ranked>> {
    let graph = &model.layers;
    let mut all = BTreeMap::new();
    for (id, node) in graph.nodes() {
        let Op::Experts(experts) = &node.work else { continue };
        let route = graph.node(graph.value(node.inputs[1]).producer);
        let router = graph.value(route.inputs[0]).producer;
        let of_router = counts.routers.get(&*route.name).with_context(|| {
            format!("the counts of experts are of {}, which has no {}", counts.model, route.name)
        })?;
        let there = model.weights[experts.gate].shape[0];
        ensure!(
            of_router.len() == there as usize,
            "{} counts {} experts, and there are {there}",
            route.name,
            of_router.len()
        );
        let mut order: Vec<u32> = (0..there).collect();
        order.sort_by_key(|&expert| (Reverse(of_router[expert as usize]), expert));
        // The counts of a file may be as large as they are wrong. Where none was counted, all are alike.
        let sum = of_router.iter().map(|&count| count as f64).sum::<f64>();
        let even = 1.0 / f64::from(there);
        let load = |&expert: &u32| {
            let counted = if sum > 0.0 { of_router[expert as usize] as f64 / sum } else { even };
            OTHER_TEXT * even + (1.0 - OTHER_TEXT) * counted
        };
        let loads = order.iter().map(load).collect();
        all.insert(id, Ranked { router, order, loads });
    }
    Ok(all)
}

/// How many of each mixture's experts come first: those with the most choices for which there is room.
fn firsts(
    task: &Task<'_>,
    ranked: &BTreeMap<NodeId, Ranked>,
    rooms: &[Room],
) -> Result<BTreeMap<NodeId, u32>> {
    let units = Units::new(task.model);
    let mut firsts: BTreeMap<NodeId, u32> = ranked.keys().map(|&id| (id, 0)).collect();
    for room in rooms {
        // Loads only fall along an order, so taking the most loaded takes each order from its start.
        let mut candidates = Vec::new();
        for (&id, ranked) in ranked.iter().filter(|(id, _)| room.units.contains(&units.of[**id])) {
            let Op::Experts(experts) = &task.model.layers.node(id).work else { continue };
            let bytes = expert_bytes(task, experts, room);
            let loads = ranked.loads.iter().enumerate();
            candidates.extend(loads.map(|(rank, &load)| (load, rank, id, bytes)));
        }
        candidates.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
        let mut left = room.bytes;
        for (_, _, id, bytes) in candidates {
            if bytes > left {
                break;
            }
            left -= bytes;
            *firsts.entry(id).or_default() += 1;
        }
    }
    Ok(firsts)
}

/// Bytes that one expert takes on the GPU of a room, rounded up.
fn expert_bytes(task: &Task<'_>, experts: &Experts, room: &Room) -> u64 {
    let stacks = [experts.gate, experts.up, experts.down].map(|weight| {
        let key = WeightKey::whole(task, weight, room.device);
        key.bytes(task).div_ceil(u64::from(task.model.weights[weight].shape[0]))
    });
    stacks.iter().sum()
}

/// Adds the two parts of a mixture and their sum; the sum's value.
fn push_parts(
    model: &mut Model,
    rewrite: &mut Rewrite<'_>,
    node: &Node<Op>,
    experts: &Experts,
    ranked: &Ranked,
    first: u32,
) -> Result<ValueId> {
    let ty = model.layers.value(node.outputs[0]).ty.clone();
    let inputs = rewrite.renamed(&node.inputs);
    let all = ranked.order.len() as u32;
    let mut part = |name: &str, range: std::ops::Range<u32>| -> Result<ValueId> {
        let (start, end) = (range.start as usize, range.end as usize);
        let load = ranked.loads[start..end].iter().sum::<f64>().min(1.0);
        let op = Op::Experts(Experts {
            part: Some(ExpertPart { first: range.start, load: load as f32 }),
            ..experts.clone()
        });
        let op = op.map_weights(|stack| {
            reorder(model, stack, &ranked.order[start..end], |old| format!("{old} ({name} used)"))
        });
        rewrite.add(format!("{}.{name}_used", node.name), op, &inputs, ty.clone())
    };
    let most = part("most", 0..first)?;
    if first == all {
        return Ok(most);
    }
    let least = part("least", first..all)?;
    rewrite.add(format!("{}.sum", node.name), Op::Add, &[most, least], ty)
}

/// The weight with some of the rows of its first axis, in that order, where it is a router's; others stay.
fn reorder_rows(model: &mut Model, weight: WeightId, order: &[u32]) -> WeightId {
    let shape = &model.weights[weight].shape;
    if shape.first() != Some(&(order.len() as u32)) {
        return weight;
    }
    reorder(model, weight, order, str::to_owned)
}

/// A new weight of the named rows of the first axis, in that order.
fn reorder(
    model: &mut Model,
    weight: WeightId,
    order: &[u32],
    name: impl Fn(&str) -> String,
) -> WeightId {
    let old = &model.weights[weight];
    let mut shape = old.shape.clone();
    shape[0] = order.len() as u32;
    let is_whole = old.sources.first().is_some_and(|source| source.axes.len() == old.shape.len());
    let row = |&row: &u32| -> Source {
        if is_whole {
            old.sources[0].part(row).expect("counts are of as many experts as there are")
        } else {
            old.sources[row as usize].clone()
        }
    };
    let sources = order.iter().map(row).collect();
    let new = ModelWeight { name: name(&old.name), shape, stored: old.stored, sources };
    model.weights.push(new)
}
