//! Fuses layers that one kernel computes in one pass; none of it changes the meaning.
//!
//! Each pass leaves a node's name to the linear it keeps, so that pins find it.

use anyhow::Result;
use ir::dag::Node;
use ir::graph::LayerGraph;
use ir::id::{Few, NodeId, Table, ValueId};
use ir::op::{Linear, Op, Then};

use crate::Pass;
use crate::rewrite::{Rewrite, Uses};

/// The fusions, in the order they run.
pub const LAYER_PASSES: &[Pass<LayerGraph>] = &[
    Pass { name: "merge_linears", run: merge_linears },
    Pass { name: "fold_norms", run: fold_norms },
    Pass { name: "fold_gates", run: fold_gates },
    Pass { name: "fold_residuals", run: fold_residuals },
    Pass { name: "fold_norm_residuals", run: fold_norm_residuals },
];

/// Linears of one input that one attention or gate reads become one linear with several weights.
pub fn merge_linears(graph: LayerGraph) -> Result<LayerGraph> {
    let uses = Uses::of(&graph);
    let mut merged: Table<NodeId, Vec<NodeId>> = graph.nodes().map(|_| Vec::new()).collect();
    for (_, reader) in graph.nodes() {
        if !matches!(reader.work, Op::Attention(_) | Op::Gate(_)) {
            continue;
        }
        let makers: Vec<NodeId> = reader
            .inputs
            .iter()
            .filter(|&&value| uses.count(value) == 1)
            .map(|&value| graph.value(value).producer)
            .filter(|&node| plain_linear(graph.node(node)).is_some())
            .collect();
        for &first in &makers {
            let same: Vec<NodeId> = makers
                .iter()
                .copied()
                .filter(|&other| graph.node(other).inputs == graph.node(first).inputs)
                .collect();
            // The reader's first operand comes first, so that a gate stands before its up.
            if same.len() > 1 && same[0] == first {
                let earliest = same.iter().copied().min().expect("there is more than one");
                merged[earliest] = same;
            }
        }
    }
    let mut skipped: Table<NodeId, bool> = graph.nodes().map(|_| false).collect();
    for id in merged.ids() {
        for &other in merged[id].iter().filter(|&&other| other != id) {
            skipped[other] = true;
        }
    }
    let mut rewrite = Rewrite::new(&graph);
    for (id, node) in graph.nodes() {
        let group = &merged[id];
        if skipped[id] {
            continue;
        }
        if group.is_empty() {
            rewrite.copy(node)?;
            continue;
        }
        let mut linear =
            Linear { weights: Few::new(), biases: Few::new(), ..plain(graph.node(group[0])) };
        let mut outputs = Vec::new();
        let mut name = String::new();
        for &member in group {
            let Linear { weights, biases, .. } = plain(graph.node(member));
            linear.weights.extend(weights);
            linear.biases.extend(biases);
            outputs.extend(&graph.node(member).outputs);
            join_name(&mut name, &graph.node(member).name);
        }
        rewrite.push(name.into(), Op::Linear(linear), &node.inputs, &outputs)?;
    }
    Ok(rewrite.finish())
}

/// A norm read only by one linear is computed in front of it.
pub fn fold_norms(graph: LayerGraph) -> Result<LayerGraph> {
    let uses = Uses::of(&graph);
    // For each norm the linear that it can be computed in front of.
    let reader = |norm: &Node<Op>| -> Option<&Node<Op>> {
        let reader = graph.node(uses.sole_reader(&norm.outputs)?);
        let is_foldable = matches!(norm.work, Op::Norm(_)) && norm.inputs.len() == 1;
        (is_foldable && is_normable(reader, norm.outputs[0])).then_some(reader)
    };
    let mut rewrite = Rewrite::new(&graph);
    for (_, node) in graph.nodes() {
        if reader(node).is_some() {
            continue;
        }
        let in_front = node.inputs.first().map(|&value| graph.node(graph.value(value).producer));
        let folded = in_front.filter(|norm| reader(norm).is_some());
        let (Op::Linear(linear), Some(Node { work: Op::Norm(norm), inputs, .. })) =
            (&node.work, folded)
        else {
            rewrite.copy(node)?;
            continue;
        };
        let op = Op::Linear(Linear { norm: Some(norm.clone()), ..linear.clone() });
        let inputs = [&inputs[..], &node.inputs[1..]].concat();
        rewrite.push(node.name.clone(), op, &inputs, &node.outputs)?;
    }
    Ok(rewrite.finish())
}

/// A gate or an activation of a linear's products is applied behind it.
pub fn fold_gates(graph: LayerGraph) -> Result<LayerGraph> {
    let uses = Uses::of(&graph);
    // For each linear the reader that it swallows.
    let swallowed = |id: NodeId| -> Option<(&Node<Op>, Then)> {
        let node = graph.node(id);
        let Op::Linear(Linear { then: Then::Nothing, residual: false, .. }) = &node.work else {
            return None;
        };
        let reader = graph.node(uses.sole_reader(&node.outputs)?);
        if reader.inputs != node.outputs {
            None
        } else if let Op::Gate(activation) = reader.work {
            Some((reader, Then::Gate(activation)))
        } else if let Op::Activate(activation) = reader.work {
            Some((reader, Then::Activate(activation)))
        } else {
            None
        }
    };
    let mut rewrite = Rewrite::new(&graph);
    for (id, node) in graph.nodes() {
        if let Some((reader, then)) = swallowed(id) {
            let Op::Linear(linear) = &node.work else { unreachable!("only linears swallow") };
            let op = Op::Linear(Linear { then, ..linear.clone() });
            rewrite.push(node.name.clone(), op, &node.inputs, &reader.outputs)?;
        } else if !rewrite.is_made(node) {
            rewrite.copy(node)?;
        }
    }
    Ok(rewrite.finish())
}

/// A sum with a linear's only output is done by that linear, as its residual.
pub fn fold_residuals(graph: LayerGraph) -> Result<LayerGraph> {
    fold_adds(graph, |node, inputs| {
        let Op::Linear(linear) = &node.work else { return None };
        (!linear.residual && node.outputs.len() == 1 && inputs == 1)
            .then(|| Op::Linear(Linear { residual: true, ..linear.clone() }))
    })
}

/// A sum with a norm is done by that norm.
pub fn fold_norm_residuals(graph: LayerGraph) -> Result<LayerGraph> {
    fold_adds(graph, |node, inputs| {
        (matches!(node.work, Op::Norm(_)) && inputs == 1).then(|| node.work.clone())
    })
}

/// Replaces a maker and the `Add` that alone reads it by `fused(maker)` with the other operand as last input.
///
/// The new node stands where the `Add` stood: the other operand may be made after the maker.
fn fold_adds(
    graph: LayerGraph,
    fused: impl Fn(&Node<Op>, usize) -> Option<Op>,
) -> Result<LayerGraph> {
    let uses = Uses::of(&graph);
    let mut maker_of: Table<NodeId, Option<NodeId>> = graph.nodes().map(|_| None).collect();
    let mut swallowed: Table<NodeId, bool> = graph.nodes().map(|_| false).collect();
    for (id, node) in graph.nodes() {
        if !matches!(node.work, Op::Add) || node.inputs[0] == node.inputs[1] {
            continue;
        }
        // Of two makers the later one, which waits for the other anyway in the order of nodes.
        let maker = node
            .inputs
            .iter()
            .filter(|&&value| uses.count(value) == 1)
            .map(|&value| graph.value(value).producer)
            .filter(|&maker| fused(graph.node(maker), graph.node(maker).inputs.len()).is_some())
            .max();
        if let Some(maker) = maker {
            maker_of[id] = Some(maker);
            swallowed[maker] = true;
        }
    }
    let mut rewrite = Rewrite::new(&graph);
    for (id, node) in graph.nodes() {
        if swallowed[id] {
            continue;
        }
        let Some(maker) = maker_of[id].map(|maker| graph.node(maker)) else {
            rewrite.copy(node)?;
            continue;
        };
        let op = fused(maker, maker.inputs.len()).expect("it was fusable when it was chosen");
        let other = node.inputs.iter().copied().find(|value| !maker.outputs.contains(value));
        let mut inputs = maker.inputs.clone();
        inputs.push(other.expect("an add of two different values"));
        rewrite.push(maker.name.clone(), op, &inputs, &node.outputs)?;
    }
    Ok(rewrite.finish())
}

/// A linear that can still take `value` through a norm.
fn is_normable(node: &Node<Op>, value: ValueId) -> bool {
    matches!(&node.work, Op::Linear(linear) if linear.norm.is_none())
        && node.inputs.first() == Some(&value)
}

/// The linear of a node with one weight and nothing in front or behind.
fn plain_linear(node: &Node<Op>) -> Option<&Linear> {
    let Op::Linear(linear) = &node.work else { return None };
    let is_plain = linear.norm.is_none()
        && linear.weights.len() == 1
        && linear.then == Then::Nothing
        && !linear.residual;
    is_plain.then_some(linear)
}

fn plain(node: &Node<Op>) -> Linear {
    plain_linear(node).expect("only plain linears are merged").clone()
}

/// `a.q_proj` and `a.k_proj` make `a.q_proj+k_proj`.
fn join_name(name: &mut String, next: &str) {
    if name.is_empty() {
        name.push_str(next);
        return;
    }
    name.push('+');
    name.push_str(next.rsplit('.').next().expect("a split has at least one part"));
}
