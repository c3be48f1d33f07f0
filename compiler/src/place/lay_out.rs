//! How each node of a graph is shared by the devices of its group.
//!
//! A linear whose products attention, a gate or the logits take is cut by rows; the linear after it by columns,
//! which leaves partial sums. Heads are cut in whole groups where there are enough key heads, else keys and values
//! are whole on every device. Everything else is computed by all devices of the group alike.

use anyhow::{Context as _, Result};
use ir::dag::Node;
use ir::graph::{Cause, Placed, Reason, Work};
use ir::id::{DeviceId, Few, NodeId, Table, ValueId};
use ir::layout::{Layout, Share};
use ir::model::Model;
use ir::op::{Attention, Linear, Op, Then};

use crate::place::group::Group;

/// Places every node on its group. Fails when heads cannot be divided between the devices of a group.
pub(crate) fn lay_out(
    model: &Model,
    groups: &[Group],
    group_of: &Table<NodeId, usize>,
) -> Result<Table<NodeId, Placed>> {
    let cuts = cuts(model, groups, group_of)?;
    let graph = &model.layers;
    let mut held: Table<ValueId, Option<Layout>> = graph.values().ids().map(|_| None).collect();
    let mut placed = Table::default();
    for (id, node) in graph.nodes() {
        let group = &groups[group_of[id]];
        let work = place_node(model, node, group, &cuts, &held)
            .with_context(|| format!("sharing {}", node.name))?;
        for (&value, layout) in node.outputs.iter().zip(&work.layouts) {
            held[value] = Some(layout.clone());
        }
        placed.push(work);
    }
    Ok(placed)
}

/// Lets nodes that take fetched weights fetch them from the home that `home` gives, and attention borrow caches.
pub(crate) fn set_homes(
    nodes: &mut Table<NodeId, Placed>,
    home: impl Fn(NodeId) -> Option<DeviceId>,
) {
    for (id, placed) in nodes.ids().zip(nodes.rows_mut()) {
        if matches!(&placed.work, Work::Compute(op) if op.takes_fetched() || op.cache().is_some()) {
            placed.home = home(id);
        }
    }
}

/// For each value the parts its features are cut into, where they are.
type Cuts = Table<ValueId, Option<Few<u32>>>;

fn place_node(
    model: &Model,
    node: &Node<Op>,
    group: &Group,
    cuts: &Cuts,
    held: &Table<ValueId, Option<Layout>>,
) -> Result<Placed> {
    let whole = Layout::whole(&group.devices);
    let leader = Layout::on(group.devices[0]);
    let split = |parts: &Few<u32>| Layout {
        devices: group.devices.clone(),
        share: Share::Split { axis: 1, parts: parts.clone() },
    };
    let cut = |value: ValueId| cuts[value].as_ref().map_or(whole.clone(), &split);
    let all = |layout: &Layout, count: usize| vec![layout.clone(); count];
    let (inputs, outputs) = (node.inputs.len(), node.outputs.len());
    let mut inner = Few::new();
    let (needs, layouts) = if group.devices.len() == 1 {
        (all(&whole, inputs), all(&whole, outputs))
    } else {
        match &node.work {
            // What cannot be shared is done once.
            Op::Embed { .. } | Op::AddPosition { .. } => {
                (all(&leader, inputs), all(&leader, outputs))
            }
            Op::Linear(linear) => {
                let mut needs = all(&whole, inputs);
                let held = held[node.inputs[0]].as_ref();
                if node.outputs.iter().any(|&value| cuts[value].is_some()) {
                    (needs, node.outputs.iter().map(|&value| cut(value)).collect())
                } else if let Some(columns) = held.filter(|held| is_cut(linear, held, group)) {
                    needs[0] = columns.clone();
                    let sum = Layout { devices: group.devices.clone(), share: Share::Partial };
                    (needs, all(&sum, outputs))
                } else {
                    (needs, all(&whole, outputs))
                }
            }
            Op::Attention(_) | Op::Gate(_) | Op::Activate(_) | Op::SoftCap { .. } => (
                node.inputs.iter().map(|&value| cut(value)).collect(),
                node.outputs.iter().map(|&value| cut(value)).collect(),
            ),
            Op::Experts(experts) => {
                let intermediate = model.weights[experts.gate].shape[1];
                if let Some(parts) = group.feature_parts(intermediate) {
                    inner = parts;
                    let sum = Layout { devices: group.devices.clone(), share: Share::Partial };
                    (all(&whole, inputs), all(&sum, outputs))
                } else {
                    (all(&whole, inputs), all(&whole, outputs))
                }
            }
            Op::Norm(_) | Op::Add | Op::SigmoidGate | Op::Route { .. } | Op::SelectRows => {
                (all(&whole, inputs), all(&whole, outputs))
            }
        }
    };
    let is_bound = !node.work.weights().is_empty() || node.work.cache().is_some();
    let reason = if is_bound { Reason::Fastest } else { Reason::FollowsInput };
    Ok(Placed {
        work: Work::Compute(node.work.clone()),
        needs,
        layouts,
        inner,
        home: None,
        cause: Cause { reason, runner_up: None },
    })
}

/// Whether a linear can work on the columns that its input is cut into.
fn is_cut(linear: &Linear, held: &Layout, group: &Group) -> bool {
    held.devices == group.devices
        && matches!(held.share, Share::Split { axis: 1, .. })
        && linear.norm.is_none()
        && linear.then == Then::Nothing
}

/// The cuts that attention, gates and the logits ask for.
fn cuts(model: &Model, groups: &[Group], group_of: &Table<NodeId, usize>) -> Result<Cuts> {
    let graph = &model.layers;
    let mut cuts: Cuts = graph.values().ids().map(|_| None).collect();
    // Whether a linear of the same group makes the value, so that it can be made in parts.
    let made_by_linear = |value: ValueId, group: usize| {
        let maker = graph.value(value).producer;
        group_of[maker] == group
            && matches!(&graph.node(maker).work, Op::Linear(linear) if !linear.residual)
    };
    let features = |value: ValueId| match graph.value(value).ty.shape.last() {
        Some(ir::tensor::Dim::Fixed(features)) => *features,
        Some(ir::tensor::Dim::Tokens | ir::tensor::Dim::Rows) | None => 0,
    };
    for (id, node) in graph.nodes() {
        let group = &groups[group_of[id]];
        if group.devices.len() == 1 {
            continue;
        }
        if let Op::Attention(attention) = &node.work {
            cut_heads(node, attention, group, &mut cuts)?;
        } else if let Op::Linear(linear) = &node.work {
            if linear.then != Then::Nothing && !linear.residual {
                cuts[node.outputs[0]] = group.feature_parts(features(node.outputs[0]));
            }
        } else if matches!(node.work, Op::Gate(_) | Op::Activate(_))
            && node.inputs.iter().all(|&value| made_by_linear(value, group_of[id]))
        {
            let parts = group.feature_parts(features(node.outputs[0]));
            for &value in node.inputs.iter().chain(&node.outputs) {
                cuts[value] = parts.clone();
            }
        }
    }
    for &logits in graph.outputs() {
        cut_logits(model, groups, group_of, &mut cuts, logits);
    }
    Ok(cuts)
}

/// Cuts queries by heads, keys and values by the heads that these read.
fn cut_heads(node: &Node<Op>, attention: &Attention, group: &Group, cuts: &mut Cuts) -> Result<()> {
    let scaled = |parts: Few<u32>, factor: u32| -> Few<u32> {
        parts.into_iter().map(|part| part * factor).collect()
    };
    let head_dim = attention.head_dim;
    // Where it can be, in parts whose columns of the next matrix are whole loads of 16 bytes, in 16 bits: GPUs want
    // them.
    let parts = |heads: u32, features: u32| {
        let whole = [1, 2, 4, 8].into_iter().find(|grain| (grain * features).is_multiple_of(8));
        whole.into_iter().chain([1]).find_map(|grain| group.parts(heads, grain))
    };
    let heads = if let Some(parts) = parts(attention.kv_heads, attention.group * head_dim) {
        for &value in &node.inputs[1..] {
            cuts[value] = Some(scaled(parts.clone(), head_dim));
        }
        scaled(parts, attention.group)
    } else {
        parts(attention.heads, head_dim).with_context(|| {
            let devices = group.devices.len();
            let heads = match attention.heads {
                1 => "1 attention head is".to_owned(),
                heads => format!("{heads} attention heads are"),
            };
            format!("{heads} too few for {devices} devices to share")
        })?
    };
    let features = scaled(heads, head_dim);
    cuts[node.inputs[0]] = Some(features.clone());
    cuts[node.outputs[0]] = Some(features);
    Ok(())
}

/// Cuts the vocabulary: the last linear's rows and what follows it elementwise.
fn cut_logits(
    model: &Model,
    groups: &[Group],
    group_of: &Table<NodeId, usize>,
    cuts: &mut Cuts,
    logits: ValueId,
) {
    let graph = &model.layers;
    let mut chain = vec![logits];
    loop {
        let value = chain[chain.len() - 1];
        let maker = graph.value(value).producer;
        let group = group_of[maker];
        if group != group_of[graph.value(logits).producer] || groups[group].devices.len() == 1 {
            return;
        }
        let node = graph.node(maker);
        if matches!(node.work, Op::SoftCap { .. }) {
            chain.push(node.inputs[0]);
        } else if matches!(&node.work, Op::Linear(linear) if !linear.residual) {
            let parts = groups[group].feature_parts(model.vocabulary);
            for &value in &chain {
                cuts[value] = parts.clone();
            }
            return;
        } else {
            return;
        }
    }
}
