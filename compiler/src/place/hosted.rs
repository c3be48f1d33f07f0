//! Arrangements of a model that is larger than the GPUs' memory: matrices that stay on NUMA nodes.
//!
//! - Several GPUs are stages, each with a share of the layers like its share of the memory.
//! - GPUs keep all attention and its caches, so that only activations of linears cross the links, but for caches that
//!   are better with the nodes: those attend in decode, and GPUs borrow the caches in prefill.
//! - In each phase either the node computes with a matrix in place or its stage's GPU fetches it. Prefill has enough
//!   arithmetic to hide fetches behind; decode fetches as much as the link carries while the node computes.
//! - Blocks that stay are spread evenly over the model, and so are fetches among them: the link then works without
//!   a pause, through a window that holds a few matrices.

mod search;
mod share;

use std::collections::BTreeSet;

use ir::dag::Node;
use ir::id::{DeviceId, NodeId, Table};
use ir::machine::Device;
use ir::op::Op;
use ir::plan::Phase;
use ir::tensor::Format;
use rayon::prelude::*;

pub(crate) use self::search::Wanted;
use self::search::{Kept, Search};
use crate::cost::nanos_at;
use crate::place::arrangement::Arrangement;
use crate::place::prices::{Prices, Times};
use crate::place::{Offer, Room, are_alike, is_numa};
use crate::task::Task;

/// Of several sets of GPUs so many are searched: those that seem best by a rough search of each.
const MOST_SEARCHED: usize = 2;

/// What stays beside the GPUs of an arrangement.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Hosted {
    /// The nodes whose weights or caches are not on a GPU.
    pub(crate) nodes: Table<NodeId, Option<Hosting>>,
    /// Bytes of each GPU's fetch window.
    pub(crate) window_bytes: Table<DeviceId, u64>,
    /// What it is, for people.
    pub(crate) name: String,
}

/// Where a node's weights are, or its cache, and who computes with them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Hosting {
    /// The NUMA node.
    pub(crate) home: DeviceId,
    /// Whether the GPU fetches them in prefill, or borrows the cache; else the home computes.
    is_fetched_in_prefill: bool,
    /// The same for decode.
    is_fetched_in_decode: bool,
}

impl Hosting {
    /// Whether the GPU fetches the weights in that phase; else the home computes.
    pub(crate) fn is_fetched(&self, phase: Phase) -> bool {
        match phase {
            Phase::Prefill => self.is_fetched_in_prefill,
            Phase::Decode => self.is_fetched_in_decode,
        }
    }
}

/// Every arrangement of this kind that is wanted, priced. Those that are impossible are left out.
pub(crate) fn offers(
    prices: &Prices<'_>,
    gpu_sets: &[Vec<DeviceId>],
    is_rough: bool,
    wanted: Wanted,
) -> Vec<Offer> {
    let of_set = |gpus: &Vec<DeviceId>, is_rough: bool| {
        let mut offers: Vec<Offer> = Vec::new();
        for kept in [Kept::Experts, Kept::Mlps, Kept::Matrices] {
            let Some(search) = Search::new(prices, gpus, kept) else { continue };
            let found = search.offers(is_rough, wanted);
            let fitting = found.iter().filter(|offer| offer.fits());
            let first = fitting.min_by_key(|offer| offer.score);
            // What leaves no room to fetch ahead may be worse than if more stays.
            let is_enough = first.is_some_and(|first| is_rough || search.has_windows(first));
            offers.extend(found);
            if is_enough {
                break;
            }
        }
        offers
    };
    if let [only] = gpu_sets {
        return of_set(only, is_rough);
    }
    let mut found: Vec<(&Vec<DeviceId>, Vec<Offer>)> =
        gpu_sets.par_iter().map(|gpus| (gpus, of_set(gpus, true))).collect();
    // A rough search may find nothing that fits where the whole one does: behind those of which something fits come those
    // that lack least, and those without an offer are last.
    found.sort_by_key(|(_, offers)| {
        let best = offers.iter().map(Offer::rank).min();
        (best.is_none(), best)
    });
    let seem_best = found.par_iter_mut().take(MOST_SEARCHED);
    seem_best.for_each(|(gpus, offers)| *offers = of_set(gpus, false));
    found.into_iter().flat_map(|(_, offers)| offers).collect()
}

/// What GPUs have left when all experts of a mixture are beside them; empty where an arrangement keeps none there.
pub(crate) fn rooms(prices: &Prices<'_>, arrangement: &Arrangement) -> Vec<Room> {
    let Some(hosted) = &arrangement.hosted else { return Vec::new() };
    let is_experts = |(id, node): (NodeId, &Node<Op>)| {
        hosted.nodes[id].is_some() && matches!(node.work, Op::Experts(_))
    };
    // The window may be too small for what stays in other arrangements alone.
    if !prices.task.model.layers.nodes().any(is_experts) {
        return Vec::new();
    }
    let gpus: Vec<DeviceId> =
        arrangement.stages.iter().map(|(group, _)| group.devices[0]).collect();
    let search = Search::new(prices, &gpus, Kept::Experts);
    search.map_or_else(Vec::new, |search| search.rooms(hosted))
}

/// The GPUs that arrangements of this kind are for: all of them, those with at least as much memory as each, all of
/// each kind, and one of each kind.
pub(crate) fn gpu_sets(task: &Task<'_>) -> Vec<Vec<DeviceId>> {
    let all: Vec<DeviceId> = gpus(task).collect();
    let kinds = kinds_of_gpus(task);
    let ones = kinds.iter().map(|kind| vec![kind[0]]);
    let memory = |gpu: DeviceId| task.target.machine.devices[gpu].memory_bytes;
    // A small one may hold too little to be worth a stage, or nothing.
    let as_large = |kind: &Vec<DeviceId>| -> Vec<DeviceId> {
        all.iter().copied().filter(|&gpu| memory(gpu) >= memory(kind[0])).collect()
    };
    let large = kinds.iter().map(as_large);
    let mut sets: Vec<Vec<DeviceId>> = Vec::new();
    let several = [all.clone()].into_iter().chain(large).chain(kinds.iter().cloned());
    for set in several.filter(|set| set.len() > 1) {
        // Where all are of one kind, these are the same.
        if !sets.contains(&set) {
            sets.push(set);
        }
    }
    sets.extend(ones);
    sets
}

/// GPUs that a NUMA node is linked with.
fn gpus(task: &Task<'_>) -> impl Iterator<Item = DeviceId> {
    let has_host = |id: &DeviceId| !is_numa(task, *id) && !hosts(task, &[*id]).is_empty();
    task.target.machine.devices.ids().filter(has_host)
}

/// Those of one kind together.
fn kinds_of_gpus(task: &Task<'_>) -> Vec<Vec<DeviceId>> {
    let machine = &task.target.machine;
    let mut kinds: Vec<Vec<DeviceId>> = Vec::new();
    for id in gpus(task) {
        match kinds.iter_mut().find(|kind| are_alike(machine, kind[0], id)) {
            Some(kind) => kind.push(id),
            None => kinds.push(vec![id]),
        }
    }
    kinds
}

/// NUMA nodes that are linked with all of these GPUs both ways and compute the formats that they hold matrices in, the
/// best first.
pub(crate) fn hosts(task: &Task<'_>, gpus: &[DeviceId]) -> Vec<DeviceId> {
    let machine = &task.target.machine;
    let is_linked = |id: DeviceId| {
        let mut gpus = gpus.iter();
        gpus.all(|&gpu| machine.link(id, gpu).is_some() && machine.link(gpu, id).is_some())
    };
    let computes = |id: DeviceId| {
        let weights = task.model.weights.iter().filter(|(_, weight)| weight.shape.len() > 1);
        let formats: BTreeSet<Format> =
            weights.map(|(weight, _)| task.format(weight, id)).collect();
        formats.into_iter().all(|format| machine.devices[id].rates.linear(format).is_some())
    };
    let is_host = |&id: &DeviceId| is_numa(task, id) && is_linked(id) && computes(id);
    let mut hosts: Vec<DeviceId> = machine.devices.ids().filter(is_host).collect();
    hosts.sort_by_key(|&host| cost_beside(task, host, gpus));
    hosts
}

/// Bytes of a host that matrices may fill: a tenth of its memory is for buffers, letters and caches.
pub(crate) fn fillable_bytes(host: &Device) -> u64 {
    host.memory_bytes - host.memory_bytes / 10
}

/// Hosts whose costs differ by no more than one part in so many are about as good.
const ALIKE: u64 = 10;

/// What a gigabyte of matrices costs that stays on a node beside a GPU: prefill fetches it, decode reads it there.
pub(super) fn host_cost(task: &Task<'_>, host: DeviceId, gpu: DeviceId) -> u64 {
    let machine = &task.target.machine;
    let nanos = |bytes_per_sec: f64| nanos_at(1e9, bytes_per_sec) as u64;
    // Without a link none is a host.
    let link = machine.link(host, gpu).map_or(1.0, |link| link.bytes_per_sec);
    let times = Times {
        prefill: nanos(link),
        decode: nanos(machine.devices[host].rates.read_bytes_per_sec),
    };
    times.request(task.target)
}

/// The same beside each of these GPUs.
fn cost_beside(task: &Task<'_>, host: DeviceId, gpus: &[DeviceId]) -> u64 {
    gpus.iter().map(|&gpu| host_cost(task, host, gpu)).fold(0, u64::saturating_add)
}

/// Whether it costs about as much that matrices stay on one node as on the other beside these GPUs.
pub(crate) fn hosts_alike(task: &Task<'_>, gpus: &[DeviceId], a: DeviceId, b: DeviceId) -> bool {
    let [a, b] = [a, b].map(|host| cost_beside(task, host, gpus));
    a.abs_diff(b) <= a.min(b) / ALIKE
}
