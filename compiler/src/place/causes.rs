//! Why each node is where it is, and where it would be next.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use ir::dag::Node;
use ir::forecast::DeviceForecast;
use ir::graph::{Cause, Reason, RunnerUp};
use ir::id::{DeviceId, NodeId, Table, WeightId};
use ir::op::{Op, Products};
use ir::plan::Phase;

use crate::graphs::Graphs;
use crate::options::{Options, Request};
use crate::part::WeightKey;
use crate::place::arrangement::Arrangement;
use crate::place::group::Group;
use crate::place::prices::{Priced, Prices, busiest, judged_decode_program, unit_of_name};
use crate::place::units::Units;
use crate::place::{Layouts, Offer, Pins, Placement};
use crate::task::Task;

/// Writes the cause of every node that holds weights or a cache.
///
/// The runner-up of a unit is the single device that it would move to at the least cost, handovers included,
/// with everything else where it is; the gap is one decode step's. Where a unit alone gains nothing elsewhere, but a
/// whole arrangement would that lacks memory, the runner-up is the device that lacks it, without handovers. What is
/// pinned has none.
pub(crate) fn explain(
    options: &Options,
    prices: &Prices<'_>,
    placement: &mut Placement,
) -> Result<()> {
    let &Prices { task, units, pins, .. } = prices;
    let Placement { layouts, arrangement, better, devices, .. } = placement;
    let arrangement = &*arrangement;
    let price = |group: &Group| prices.price(group);
    let others: Vec<Priced> = task
        .target
        .machine
        .devices
        .ids()
        .filter_map(|device| price(&Group::one(device)).ok())
        .collect();
    let known = |group: &Group| others.iter().find(|priced| priced.group == *group).cloned();
    // A group may be unable to share the whole model, as this one shares it: without what is pinned elsewhere.
    let stages: Option<Vec<Priced>> = arrangement
        .stages
        .iter()
        .map(|(group, _)| known(group).or_else(|| price(group).ok()))
        .collect();
    let taken: Table<DeviceId, u64> =
        devices.rows().iter().map(DeviceForecast::needed_bytes).collect();
    let mut causes = Vec::new();
    for unit in 0..units.len() {
        let Some(stages) = &stages else {
            let is_asked = options.request != Request::Any;
            let reason = if is_asked { Reason::Requested } else { Reason::Fastest };
            causes.push(Cause { reason, runner_up: None });
            continue;
        };
        let on: BTreeSet<DeviceId> = layouts
            .nodes
            .prefill
            .iter()
            .filter(|(id, _)| units.of[*id] == unit)
            .flat_map(|(_, placed)| placed.layouts[0].devices.iter().copied())
            .collect();
        // Where the unit is alone already is no other place.
        let elsewhere: Vec<&Priced> =
            others.iter().filter(|other| !on.iter().eq(&other.group.devices)).collect();
        let mut cause = unit_cause(prices, options, arrangement, stages, &elsewhere, &taken, unit);
        if cause.reason == Reason::Fastest
            && options.request == Request::Any
            && let Some(better) = better
            && let Some(together) =
                limit(task, arrangement, better, stages, &elsewhere, &taken, unit)
        {
            cause = together;
        }
        causes.push(cause);
    }
    let torn = torn_units(task, units, pins);
    let staying = staying(prices, arrangement, layouts)?;
    for nodes in layouts.nodes.iter_mut() {
        for (id, placed) in nodes.ids().zip(nodes.rows_mut()) {
            if placed.cause.reason == Reason::FollowsInput {
                continue;
            }
            let unit = units.of[id];
            let is_hosted =
                arrangement.hosted.as_ref().is_some_and(|hosted| hosted.nodes[id].is_some());
            placed.cause = if is_hosted {
                let gpu = arrangement.group_of(unit).devices[0];
                hosted_cause(task, &taken, gpu, &staying[unit])
            } else {
                causes[unit].clone()
            };
            match &pins[id] {
                Some((_, Some(pattern))) => {
                    placed.cause.reason = Reason::Pinned { pattern: pattern.clone() };
                }
                Some((home, None)) => {
                    let node = task.model.layers.node(id);
                    let group = arrangement.group_of(unit);
                    placed.cause = table_cause(task, &taken, group, *home, node);
                }
                None => {}
            }
            // Prices are without what is pinned.
            if pins[id].is_some() || torn.contains(&unit) {
                placed.cause.runner_up = None;
            }
        }
    }
    Ok(())
}

/// Units of which a pin tears a part away: what the whole unit would take elsewhere says nothing about its parts.
fn torn_units(task: &Task<'_>, units: &Units, pins: &Pins) -> BTreeSet<usize> {
    let mut pinned: BTreeMap<usize, Option<DeviceId>> = BTreeMap::new();
    let mut torn = BTreeSet::new();
    for (id, _) in task.model.layers.nodes() {
        let device = pins[id].as_ref().map(|(device, _)| *device);
        if *pinned.entry(units.of[id]).or_insert(device) != device {
            torn.insert(units.of[id]);
        }
    }
    torn
}

/// What keeps a unit from where it would be in a better arrangement: a device that lacks memory for all of it.
fn limit(
    task: &Task<'_>,
    arrangement: &Arrangement,
    better: &Offer,
    stages: &[Priced],
    elsewhere: &[&Priced],
    taken: &Table<DeviceId, u64>,
    unit: usize,
) -> Option<Cause> {
    let (device, missing_of_all) = better.candidate.missing?;
    if !better.arrangement.group_of(unit).devices.contains(&device) {
        return None;
    }
    let there = elsewhere.iter().find(|other| other.group.devices[0] == device)?;
    let missing_bytes = match lacks(task, taken, there, unit) {
        0 => missing_of_all,
        missing_bytes => missing_bytes,
    };
    let here = stages.iter().find(|stage| stage.group == *arrangement.group_of(unit))?;
    let gap_nanos = there.times[unit].decode as i64 - here.times[unit].decode as i64;
    let runner_up = Some(RunnerUp { devices: vec![device], gap_nanos });
    Some(Cause { reason: Reason::Memory { device, missing_bytes }, runner_up })
}

/// Bytes that a single device lacks for one unit more.
fn lacks(task: &Task<'_>, taken: &Table<DeviceId, u64>, other: &Priced, unit: usize) -> u64 {
    let device = other.group.devices[0];
    // A device that has no stage yet needs its buffers too.
    let buffers = if taken[device] == 0 { other.buffers[0] } else { 0 };
    shortage(task, taken, device, buffers + other.bytes[unit][0])
}

/// What of a unit stays beside the GPU of its stage.
#[derive(Clone)]
struct Staying {
    /// Its bytes, were it on the GPU.
    bytes: u64,
    /// What a decode step would take longer with all of the unit there; `None` where that cannot be told.
    gap_nanos: Option<i64>,
}

/// For each unit what stays: weights, and caches that hosts attend to.
fn staying(
    prices: &Prices<'_>,
    arrangement: &Arrangement,
    layouts: &Layouts,
) -> Result<Vec<Staying>> {
    let &Prices { task, units, .. } = prices;
    let Some(hosted) = &arrangement.hosted else { return Ok(Vec::new()) };
    let mut all = vec![Staying { bytes: 0, gap_nanos: None }; units.len()];
    let nodes = || task.model.layers.nodes();
    // Vectors may be those of what the GPU does as well, and of what is fetched they alone are there.
    let is_matrix = |weight: WeightId| task.model.weights[weight].shape.len() > 1;
    let is_there = |id: NodeId, weight: WeightId| {
        let hosting = hosted.nodes[id];
        hosting.is_none_or(|hosting| !is_matrix(weight) && hosting.is_fetched(Phase::Prefill))
    };
    let weights_of = |(id, node): (NodeId, &Node<Op>)| {
        node.work.weights().into_iter().map(move |weight| (id, weight))
    };
    let there = nodes().flat_map(weights_of).filter(|&(id, weight)| is_there(id, weight));
    let mut counted: BTreeSet<WeightId> = there.map(|(_, weight)| weight).collect();
    for (id, node) in nodes() {
        if hosted.nodes[id].is_none() {
            continue;
        }
        let gpu = arrangement.group_of(units.of[id]).devices[0];
        let weights = node.work.weights();
        let more = weights.iter().filter(|&&weight| counted.insert(weight));
        let bytes: u64 = more.map(|&weight| WeightKey::whole(task, weight, gpu).bytes(task)).sum();
        let cache = match node.work.products() {
            Some(Products::Attention(attention)) => {
                task.target.cache_bytes(gpu, (attention.kv_heads, attention.head_dim))
            }
            Some(Products::Linear(_) | Products::Experts(_)) | None => 0,
        };
        all[units.of[id]].bytes += bytes + cache;
    }
    let graphs = Graphs::new(task, layouts.clone(), &mut |_, _| ())?;
    let decode = judged_decode_program(task, &graphs)?;
    let all_devices: Vec<DeviceId> = task.target.machine.devices.ids().collect();
    let unit_of = unit_of_name(task, units, |_| true);
    let here = busiest(task, units, &decode, &all_devices, &unit_of);
    for (unit, staying) in all.iter_mut().enumerate() {
        let gpu = arrangement.group_of(unit).devices[0];
        let Some(times) = prices.decode_nanos(gpu) else { continue };
        let of_unit = times.iter().filter(|(id, _)| units.of[*id] == unit);
        let there: u64 = of_unit.map(|(_, nanos)| nanos).sum();
        staying.gap_nanos = Some(there as i64 - here[unit] as i64);
    }
    Ok(all)
}

/// Why some of a unit stays beside the GPU of its stage: that has no room for it, with everything else where it is.
fn hosted_cause(
    task: &Task<'_>,
    taken: &Table<DeviceId, u64>,
    gpu: DeviceId,
    staying: &Staying,
) -> Cause {
    let runner_up = staying.gap_nanos.map(|gap_nanos| RunnerUp { devices: vec![gpu], gap_nanos });
    let reason = lack((gpu, shortage(task, taken, gpu, staying.bytes)));
    Cause { reason, runner_up }
}

/// Why a NUMA node holds the table of tokens: the devices of the next stage have no room for the table, with everything else
/// where it is; else everything is fastest so.
fn table_cause(
    task: &Task<'_>,
    taken: &Table<DeviceId, u64>,
    group: &Group,
    home: DeviceId,
    node: &Node<Op>,
) -> Cause {
    let lacks = |&device: &DeviceId| {
        let weights = node.work.weights().into_iter();
        let bytes = weights.map(|weight| WeightKey::whole(task, weight, device).bytes(task)).sum();
        (device, shortage(task, taken, device, bytes))
    };
    let others = group.devices.iter().filter(|&&device| device != home);
    let most = others.map(lacks).max_by_key(|&(device, missing)| (missing, Reverse(device)));
    Cause { reason: most.map_or(Reason::Fastest, lack), runner_up: None }
}

/// Why something is elsewhere than on a device that lacks so many bytes for it.
fn lack((device, missing_bytes): (DeviceId, u64)) -> Reason {
    if missing_bytes > 0 { Reason::Memory { device, missing_bytes } } else { Reason::Fastest }
}

/// Bytes that a device lacks for so many more.
fn shortage(task: &Task<'_>, taken: &Table<DeviceId, u64>, device: DeviceId, more: u64) -> u64 {
    let capacity = task.target.machine.devices[device].memory_bytes;
    taken[device].saturating_add(more).saturating_sub(capacity)
}

fn unit_cause(
    prices: &Prices<'_>,
    options: &Options,
    arrangement: &Arrangement,
    chosen: &[Priced],
    others: &[&Priced],
    taken: &Table<DeviceId, u64>,
    unit: usize,
) -> Cause {
    let &Prices { task, ref handovers, .. } = prices;
    let stage = |unit: usize| {
        let stage = arrangement.stages.iter().position(|(_, range)| range.contains(&unit));
        stage.expect("stages cover all units")
    };
    let own = stage(unit);
    let leader = |stage: usize| arrangement.stages[stage].0.devices[0];
    let last = arrangement.stages.last().map_or(0, |(_, range)| range.end) - 1;
    // What handing over into and out of the unit takes, were it on `device`.
    let around = |device| -> Option<i64> {
        let mut nanos = 0;
        if unit > 0 {
            nanos += handovers.between(leader(stage(unit - 1)), device)?.decode as i64;
        }
        if unit < last {
            nanos += handovers.between(device, leader(stage(unit + 1)))?.decode as i64;
        }
        Some(nanos)
    };
    let here = chosen[own].times[unit].decode as i64 + around(leader(own)).unwrap_or(0);
    let mut options_elsewhere: Vec<(i64, &Priced)> = others
        .iter()
        .filter_map(|&other| {
            let there = other.times[unit].decode as i64 + around(other.group.devices[0])?;
            Some((there - here, other))
        })
        .collect();
    options_elsewhere.sort_by_key(|(gap, other)| (*gap, other.group.devices[0]));
    let runner_up = |&(gap_nanos, other): &(i64, &Priced)| RunnerUp {
        devices: other.group.devices.to_vec(),
        gap_nanos,
    };
    let lacks = |other: &Priced| lacks(task, taken, other, unit);
    if options.request != Request::Any {
        let runner_up = options_elsewhere.first().map(runner_up);
        return Cause { reason: Reason::Requested, runner_up };
    }
    let faster = options_elsewhere.iter().find(|(gap, other)| *gap < 0 && lacks(other) > 0);
    if let Some(best @ (_, other)) = faster {
        let (device, missing_bytes) = (other.group.devices[0], lacks(other));
        let reason = Reason::Memory { device, missing_bytes };
        return Cause { reason, runner_up: Some(runner_up(best)) };
    }
    let next = options_elsewhere.iter().find(|(gap, _)| *gap >= 0).map(runner_up);
    Cause { reason: Reason::Fastest, runner_up: next }
}
