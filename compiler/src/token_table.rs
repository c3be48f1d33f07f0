//! Tables of tokens that a NUMA node holds, while GPUs share the layers or form stages.
//!
//! A lookup reads a row for each token, which takes hardly longer over a link ([`crate::reach`]); the table takes as much
//! of the GPUs' memory as blocks do. So where their memory is short, a placement without the table may be better.

use std::cmp::Reverse;

use ir::dag::Node;
use ir::id::{DeviceId, NodeId, WeightId};
use ir::model::Model;
use ir::op::Op;

use crate::options::Request;
use crate::part::WeightKey;
use crate::place::Placement;
use crate::task::Task;

/// One part in so many of the weights is the least that is worth the time of placing the model twice.
const LEAST_PART: u64 = 25;

/// The nodes that look tokens up in tables which nothing else reads, each with its table. A table that is also the
/// head's matrix would have to be there twice.
pub(crate) fn lookups(model: &Model) -> impl Iterator<Item = (NodeId, WeightId)> {
    let nodes = || model.layers.nodes();
    let is_read = move |table: WeightId| {
        let mut others = nodes().filter(|(_, node)| !matches!(node.work, Op::Embed { .. }));
        others.any(|(_, node)| node.work.weights().contains(&table))
    };
    let lookup = |(id, node): (NodeId, &Node<Op>)| {
        if let Op::Embed { table, .. } = node.work { Some((id, table)) } else { None }
    };
    nodes().filter_map(lookup).filter(move |&(_, table)| !is_read(table))
}

/// The NUMA node that such tables are tried on: of those with the memory the one with the most and fastest links to
/// GPUs. `None` where there are not several GPUs, which alone can share layers or form stages (what stays beside one
/// is searched with the table among it), where the request names devices or a pin says what is where, and where tables
/// are small.
pub(crate) fn home(task: &Task<'_>) -> Option<DeviceId> {
    let machine = &task.target.machine;
    let ids = || machine.devices.ids();
    let most = match task.target.request {
        Request::Any => usize::MAX,
        // The first ranks are the first GPUs.
        Request::PipelineRanks(ranks) | Request::TensorParallelRanks(ranks) => ranks,
        Request::Pipeline(_) | Request::TensorParallel(_) => return None,
    };
    let gpus = ids().filter(|&id| machine.devices[id].kind.is_gpu());
    let gpus: Vec<DeviceId> = gpus.take(most).collect();
    let is_pinned = |id: NodeId| task.target.is_pinned(&task.model.layers.node(id).name);
    if gpus.len() < 2 || lookups(task.model).any(|(id, _)| is_pinned(id)) {
        return None;
    }
    let is_large = |home: DeviceId| {
        let weights = task.model.weights.iter();
        let all = weights.map(|(id, _)| WeightKey::whole(task, id, home).bytes(task));
        let bytes = bytes(task, home);
        bytes > 0 && bytes >= all.sum::<u64>() / LEAST_PART
    };
    let link = |home: DeviceId| {
        let links = gpus.iter().filter_map(|&gpu| machine.link(home, gpu));
        let rates: Vec<f64> = links.map(|link| link.bytes_per_sec).collect();
        (rates.len(), rates.iter().sum::<f64>() as u64)
    };
    let is_home = |&id: &DeviceId| {
        let device = &machine.devices[id];
        !device.kind.is_gpu() && link(id).0 > 0 && bytes(task, id) <= device.memory_bytes
    };
    let homes = ids().filter(is_home);
    homes.max_by_key(|&id| (link(id), Reverse(id))).filter(|&home| is_large(home))
}

/// Whether a GPU has less left in a placement than the tables take, so that what it has may depend on them.
pub(crate) fn is_room_short(task: &Task<'_>, placement: &Placement) -> bool {
    let devices = &task.target.machine.devices;
    let mut gpus = devices.ids().filter(|&id| devices[id].kind.is_gpu());
    gpus.any(|gpu| placement.devices[gpu].free_bytes() < bytes(task, gpu))
}

/// Bytes of the tables on a device.
fn bytes(task: &Task<'_>, device: DeviceId) -> u64 {
    let of_table =
        |(_, table): (NodeId, WeightId)| WeightKey::whole(task, table, device).bytes(task);
    lookups(task.model).map(of_table).sum()
}
