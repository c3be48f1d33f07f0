//! Whether MLPs and experts are cut in shards, which, and how.

use std::collections::BTreeSet;

use anyhow::Result;
use ir::id::{DeviceId, NodeId, WeightId};
use ir::model::Model;
use ir::op::Op;
use ir::plan::Phase;
use rayon::prelude::*;

use super::shortage::Lacking;
use super::{Cut, cut, features, shard};
use crate::options::{Options, Request};
use crate::part::WeightKey;
use crate::place::group::filled;
use crate::place::{Among, Placement, fillable_bytes, hosts, hosts_alike, place};
use crate::target::Target;
use crate::task::Task;

/// `(spread, pieces)`: a layer that is cut leaves `spread` times the share to the hosts that it would if all layers
/// were cut, in `pieces` pieces. A little above 1 nearly all layers are cut: how much above leaves room for windows and
/// for what is in no layer. With 2 about half of them are. The more are cut, the less GPUs wait while NUMA nodes
/// compute, and the more activations cross.
const SPREADS: [(f64, usize); 3] = [(1.04, 1), (1.15, 1), (2.0, 2)];
/// The same where hosts keep all caches.
const SPREADS_BESIDE_CACHES: [f64; 2] = [1.05, 1.15];
/// Only if that leaves hosts so much less to compute.
const LESS_BESIDE_CACHES: f64 = 0.9;
/// Parts of what the best way leaves free on GPUs that they may have in addition, the first that fits: what they need
/// beside weights changes a little with it.
const REFILLED: [f64; 2] = [0.95, 0.6];
/// The least share of all layers that is worth another try.
const LEAST_REFILLED: f64 = 0.003;
/// Pieces of a layer that stays, in all: a GPU then needs smaller windows, and may fetch some of them while others are
/// computed. Beside an H200, twice as many take more launches and are no faster.
const PIECES: usize = 4;
/// The least share of a layer that is worth launches of its own.
const LEAST_RESIDENT: f64 = 0.05;
/// The least share of a layer that is worth a NUMA node's steps.
const LEAST_OF_NODE: f64 = 0.02;

/// The model and placement with MLPs and experts in shards, where NUMA nodes compute beside GPUs and that is predicted
/// best; as they are otherwise.
pub(crate) fn with_shards(
    model: Model,
    placement: Placement,
    target: &Target,
    options: &Options,
) -> Result<(Model, Placement)> {
    let task = Task::new(&model, target);
    let gpus = placement.gpus(&task);
    let beside = placement.beside_gpus(&task);
    if options.request != Request::Any || gpus.is_empty() || beside.is_empty() {
        return Ok((model, placement));
    }
    // A pin is for the whole layer.
    let is_free = |layer: &str| !target.is_pinned(layer);
    let elsewhere = |name: &str| !is_free(name) && beside.contains(name);
    let lacking = Lacking::of(&task, &placement, &gpus, elsewhere);
    let Some((ways, whole)) = ways(&task, &gpus, &beside, lacking, is_free)? else {
        return Ok((model, placement));
    };
    let try_way = |way: &Way| sharded(&model, target, options, &gpus, &way.cut(), is_free);
    let found = ways.par_iter().map(try_way).collect::<Result<Vec<_>>>()?;
    let found = ways.iter().zip(found).filter_map(|(way, found)| Some((way, found?)));
    let Some((way, mut best)) = found.min_by_key(|(_, (_, placed))| placed.score) else {
        return Ok((model, placement));
    };
    for part in REFILLED {
        let Some(fuller) = way.with_more_resident(&best.1, &gpus, part / whole) else { continue };
        if fuller.cut().is_alike(&way.cut(), &features(&model)) {
            break;
        }
        let Some(found) = try_way(&fuller)? else { continue };
        if found.1.score < best.1.score {
            best = found;
        }
        break;
    }
    let (in_shards, placed) = best;
    Ok(match placed.score < placement.score {
        true => (in_shards, placed.chosen_over(placement)),
        false => (model, placement),
    })
}

/// A way to cut layers.
#[derive(Clone, Debug)]
struct Way {
    /// NUMA nodes, by their numbers among the hosts, and each one's share of what stays.
    nodes: Vec<(usize, f64)>,
    /// Shards that each node has of a layer.
    pieces: usize,
    /// The share of a layer that is a GPU's own.
    resident: f64,
}

impl Way {
    fn cut(&self) -> Cut {
        Cut::new(&self.nodes, self.pieces, self.resident)
    }

    /// The same with what these GPUs have left in a placement, of which each byte holds that share of all layers, where
    /// that is worth a try.
    fn with_more_resident(
        &self,
        placed: &Placement,
        gpus: &[DeviceId],
        of_byte: f64,
    ) -> Option<Self> {
        let free = gpus.iter().map(|&gpu| placed.devices[gpu].free_bytes()).min()?;
        let more = free as f64 * gpus.len() as f64 * of_byte;
        let resident = self.resident + more;
        let is_worth_it = self.resident > 0.0 && more >= LEAST_REFILLED && resident < 1.0 - more;
        is_worth_it.then(|| Self { resident, ..self.clone() })
    }
}

/// The ways to cut that are worth comparing beside these GPUs, where they lack so many bytes; and the bytes of all
/// layers that can be cut on a GPU. `None` where nothing can be cut or stays.
fn ways(
    task: &Task<'_>,
    gpus: &[DeviceId],
    beside: &BTreeSet<String>,
    lacking: Lacking,
    is_free: impl Fn(&str) -> bool,
) -> Result<Option<(Vec<Way>, f64)>> {
    let devices = &task.target.machine.devices;
    let hosts = hosts(task, gpus);
    let (Some(&gpu), Some(&host)) = (gpus.first(), hosts.first()) else { return Ok(None) };
    // In how many shards does not matter here.
    let Some(model) = cut(task.model, &Cut::new(&[(0, 1.0)], 1, 0.0), is_free)? else {
        return Ok(None);
    };
    let of_layers =
        |device| bytes(&Task::new(&model, task.target), device, |name| shard(name).is_some());
    let whole = of_layers(gpu);
    let share = lacking.bytes / whole;
    let beside_caches = (lacking.bytes - lacking.cache_bytes) / whole;
    let stays = |host: DeviceId| {
        let blocks = bytes(task, host, |name| beside.contains(name));
        blocks.max(share.min(1.0) * of_layers(host))
    };
    // Tables that rows are looked up in may be all that is there.
    if stays(host) == 0.0 {
        return Ok(None);
    }
    let node = |&host: &DeviceId| {
        let device = &devices[host];
        (device.rates.read_bytes_per_sec, fillable_bytes(device) as f64 / stays(host))
    };
    let nodes = |hosts: &[DeviceId]| shares(&hosts.iter().map(node).collect::<Vec<_>>());
    let mut ways = ways_among(&nodes(&hosts), share, beside_caches);
    // What crosses to another may take longer than its part of the work.
    let is_near = |other: &&DeviceId| hosts_alike(task, gpus, host, **other);
    let near: Vec<DeviceId> = hosts.iter().take_while(is_near).copied().collect();
    if near.len() < hosts.len() {
        ways.extend(ways_among(&nodes(&near), share, beside_caches));
    }
    let features = features(task.model);
    let mut distinct: Vec<Way> = Vec::new();
    for way in ways {
        // Shares that differ by little may come to the same parts.
        if distinct.iter().all(|known| !known.cut().is_alike(&way.cut(), &features)) {
            distinct.push(way);
        }
    }
    Ok(Some((distinct, whole)))
}

/// The ways with these shares of NUMA nodes. If all layers are cut, that share of them stays, or the other one if all
/// caches stay as well.
fn ways_among(nodes: &[(usize, f64)], share: f64, beside_caches: f64) -> Vec<Way> {
    if nodes.is_empty() {
        return Vec::new();
    }
    let in_pieces = |pieces: usize, resident: f64| {
        let of_node = (pieces / nodes.len()).max(1);
        Way { nodes: nodes.to_vec(), pieces: of_node, resident }
    };
    let staying = SPREADS.map(|(spread, pieces)| (spread * share, pieces));
    let is_less = beside_caches < LESS_BESIDE_CACHES * share;
    let with_caches = SPREADS_BESIDE_CACHES.into_iter().filter(|_| is_less);
    let with_caches = with_caches.map(|spread| (spread * beside_caches, 1));
    let most = 1.0 - LEAST_RESIDENT;
    let mut residents: Vec<Way> = Vec::new();
    for (staying, pieces) in staying.into_iter().chain(with_caches) {
        // Little may be resident, but something.
        let staying = if share < most && pieces == 1 { staying.min(most) } else { staying };
        let is_new = residents.iter().all(|way| way.resident != 1.0 - staying);
        if staying > 0.0 && staying <= most && is_new {
            residents.push(in_pieces(pieces, 1.0 - staying));
        }
    }
    let several = (nodes.len() > 1).then(|| in_pieces(nodes.len(), 0.0));
    // One node's shard is in two pieces at least.
    let pieces = in_pieces(PIECES.max(2 * nodes.len()), 0.0);
    several.into_iter().chain([pieces]).chain(residents).collect()
}

/// The share of what stays that each node gets, with its number: as it reads, but no more than it has memory for, and
/// the rest to the others. A node is the rate at which it reads and the share that fits its memory. One that would get
/// next to nothing is left out; all are where they have too little memory together.
fn shares(nodes: &[(f64, f64)]) -> Vec<(usize, f64)> {
    let (rates, most): (Vec<f64>, Vec<f64>) = nodes.iter().copied().unzip();
    let shares = filled(&rates, &most).unwrap_or_default();
    shares.into_iter().enumerate().filter(|(_, share)| *share >= LEAST_OF_NODE).collect()
}

/// Bytes of the matrices of those nodes at a home.
fn bytes(task: &Task<'_>, home: DeviceId, is_one: impl Fn(&str) -> bool) -> f64 {
    let nodes = task.model.layers.nodes().map(|(_, node)| node);
    let nodes = nodes.filter(|node| node.work.takes_fetched() && is_one(&node.name));
    let weights = nodes.flat_map(|node| node.work.weights());
    let packed = |weight: WeightId| WeightKey::whole(task, weight, home).packed_bytes(task) as f64;
    weights.filter(|&weight| task.model.weights[weight].shape.len() > 1).map(packed).sum()
}

/// The model cut so, with the best placement beside those GPUs; `None` where nothing can be cut or nothing fits.
fn sharded(
    model: &Model,
    target: &Target,
    options: &Options,
    gpus: &[DeviceId],
    by: &Cut,
    is_free: impl Fn(&str) -> bool,
) -> Result<Option<(Model, Placement)>> {
    // What is cut in vain costs a GPU some launches, so only what stays is cut in the end: and a block more of each
    // stage, since uncut layers need more scratch memory.
    let Some(all) = cut(model, by, &is_free)? else { return Ok(None) };
    let all_task = Task::new(&all, target);
    // Where shards fit nowhere, there is what fits uncut.
    let Ok(rough) = place(&all_task, options, Among::RoughlyBeside(gpus)) else { return Ok(None) };
    let beside = rough.beside_gpus(&all_task);
    let stays: BTreeSet<&str> = beside.iter().filter_map(|name| Some(shard(name)?.0)).collect();
    let blocks: BTreeSet<u32> = stays.iter().filter_map(|layer| Task::block(layer)).collect();
    let spare = |gpu: &DeviceId| {
        let of_stage = attended_blocks(&all_task, &rough, *gpu);
        of_stage.into_iter().find(|block| !blocks.contains(block))
    };
    let spare: BTreeSet<u32> = gpus.iter().filter_map(spare).collect();
    let is_cut = |layer: &str| {
        let is_spare = Task::block(layer).is_some_and(|block| spare.contains(&block));
        stays.contains(layer) || is_spare && is_free(layer)
    };
    let Some(cut) = cut(model, by, is_cut)? else { return Ok(None) };
    let placed = place(&Task::new(&cut, target), options, Among::Beside(gpus));
    Ok(placed.ok().map(|placed| (cut, placed)))
}

/// The blocks whose attention a GPU computes, in prefill at least: those of its stage, whatever stays beside it, but
/// for caches that it cannot borrow.
fn attended_blocks(task: &Task<'_>, placement: &Placement, gpu: DeviceId) -> BTreeSet<u32> {
    let phases = [Phase::Prefill, Phase::Decode].map(|phase| placement.layouts.nodes.of(phase));
    let is_there = |id: NodeId| {
        let layouts = phases.iter().flat_map(|nodes| &nodes[id].layouts);
        layouts.into_iter().any(|to| to.devices.contains(&gpu))
    };
    let attentions =
        task.model.layers.nodes().filter(|(_, node)| matches!(node.work, Op::Attention(_)));
    attentions
        .filter(|(id, _)| is_there(*id))
        .filter_map(|(_, node)| Task::block(&node.name))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_keep_what_gpus_have_room_for() {
        let residents = |share, beside_caches| -> Vec<f64> {
            let ways = ways_among(&[(0, 1.0)], share, beside_caches);
            ways.iter().map(|way| (way.resident * 1e4).round() / 1e4).collect()
        };
        // In pieces; then nearly all layers, and half of them.
        assert_eq!(residents(0.4, 0.39), [0.0, 0.584, 0.54, 0.2]);
        // Caches that stay leave hosts less to compute.
        assert_eq!(residents(0.4, 0.2), [0.0, 0.584, 0.54, 0.2, 0.79, 0.77]);
        // Nearly all stays, or all.
        assert_eq!(residents(0.87, 0.86), [0.0, 0.0952, 0.05]);
        assert_eq!(residents(0.96, 0.95), [0.0]);
        assert_eq!(residents(-0.1, -0.2), [0.0]);
    }

    #[test]
    fn nodes_share_as_they_read_within_their_memory() {
        let near = |nodes: &[(f64, f64)], expected: &[(usize, f64)]| {
            let found = shares(nodes);
            assert_eq!(found.len(), expected.len(), "{found:?}");
            for (found, expected) in found.iter().zip(expected) {
                assert_eq!(found.0, expected.0);
                assert!((found.1 - expected.1).abs() < 1e-12, "{found:?}, not {expected:?}");
            }
        };
        near(&[(3.0, 9.0), (1.0, 9.0)], &[(0, 0.75), (1, 0.25)]);
        near(&[(1.0, 0.2), (1.0, 9.0)], &[(0, 0.2), (1, 0.8)]);
        // What the first has no room for fills the second, and the third gets the rest.
        near(&[(1.0, 0.1), (1.0, 0.4), (1.0, 9.0)], &[(0, 0.1), (1, 0.4), (2, 0.5)]);
        // A node without memory is none.
        near(&[(1.0, 0.0), (1.0, 9.0)], &[(1, 1.0)]);
        near(&[(1.0, 0.4), (1.0, 0.4)], &[]);
        near(&[], &[]);
        // Where nothing stays everything fits.
        near(&[(1.0, f64::INFINITY)], &[(0, 1.0)]);
    }
}
