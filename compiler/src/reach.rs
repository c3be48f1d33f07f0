//! Tables on NUMA nodes whose rows GPUs look up where they lie.
//!
//! A lookup reads one row for each token: some kilobytes, which a GPU reads over its link while a node would still be
//! told of the tokens. So where all that read a lookup of a node are GPUs, each of them makes the lookup itself: no
//! value crosses, nobody waits for the node, and GPUs that have all else replay whole prompts.

use ir::dag::Node;
use ir::graph::Placed;
use ir::id::{DeviceId, Few, NodeId, Table};
use ir::layout::{Layout, Share};
use ir::op::Op;

use crate::graphs::Phases;
use crate::task::Task;

/// Lets GPUs reach tables that they alone read from, in all phases. Nodes that are asked for compute.
pub(crate) fn reach_tables(task: &Task<'_>, nodes: &mut Phases<Table<NodeId, Placed>>) {
    let is_lookup = |(_, node): &(NodeId, &Node<Op>)| node.work.table().is_some();
    let lookups = task.model.layers.nodes().filter(is_lookup).map(|(id, _)| id);
    let lookups: Vec<NodeId> = lookups.collect();
    // A lookup may read another one's rows.
    for &id in lookups.iter().rev() {
        let reached = nodes.iter_mut().map(|placed| reachable(task, placed, id));
        let Some(reached) = reached.collect::<Option<Vec<_>>>() else { continue };
        for (placed, (home, layout)) in nodes.iter_mut().zip(reached) {
            let Placed { needs, layouts, home: its_home, .. } = &mut placed[id];
            needs.iter_mut().chain(layouts).for_each(|held| *held = layout.clone());
            *its_home = Some(home);
        }
    }
}

/// The NUMA node of a lookup, and the GPUs that may make it themselves.
fn reachable(
    task: &Task<'_>,
    placed: &Table<NodeId, Placed>,
    id: NodeId,
) -> Option<(DeviceId, Layout)> {
    let &[home] = placed[id].layouts.first()?.devices.as_slice() else { return None };
    let machine = &task.target.machine;
    let is_gpu = |device: DeviceId| machine.devices[device].kind.is_gpu();
    let layers = &task.model.layers;
    let node = layers.node(id);
    if is_gpu(home) || task.target.is_requested(home) || task.target.is_pinned(&node.name) {
        return None;
    }
    let table = node.work.table()?;
    let mut gpus: Few<DeviceId> = Few::new();
    for (other, its_node) in layers.nodes().filter(|(other, _)| *other != id) {
        if its_node.work.weights().contains(&table) {
            return None;
        }
        let needs = its_node.inputs.iter().zip(&placed[other].needs);
        for (_, need) in needs.filter(|(input, _)| node.outputs.contains(input)) {
            if need.share != Share::Whole {
                return None;
            }
            let new = need.devices.iter().copied().filter(|device| !gpus.contains(device));
            gpus.extend(new.collect::<Few<DeviceId>>());
        }
    }
    let can_reach = |&gpu: &DeviceId| is_gpu(gpu) && machine.link(home, gpu).is_some();
    (!gpus.is_empty() && gpus.iter().all(can_reach)).then(|| (home, Layout::whole(&gpus)))
}
