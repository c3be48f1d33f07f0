//! Takes away moves whose result is already there.
//!
//! A pass here never adds a move that the graph did not have; at most it replaces two by one.

use anyhow::Result;
use ir::dag::Node;
use ir::graph::{Placed, PlacedGraph, Work};
use ir::id::{Few, Id as _, Table, ValueId};
use ir::layout::{Layout, Move};
use ir::smallvec;
use ir::tensor::TensorType;

use crate::Pass;
use crate::insert_moves::satisfies;

/// The elisions, in the order they run.
pub const PLACED_PASSES: &[Pass<PlacedGraph>] = &[
    Pass { name: "cancel_gathers", run: cancel_gathers },
    Pass { name: "share_moves", run: share_moves },
    Pass { name: "scatter_sums", run: scatter_sums },
    Pass { name: "drop_unread_moves", run: drop_unread_moves },
];

/// A gather that is sliced again into the same parts is the value before it.
pub fn cancel_gathers(graph: PlacedGraph) -> Result<PlacedGraph> {
    if !graph.nodes().any(|(_, node)| matches!(node.work.work, Work::Move(Move::Slice { .. }))) {
        return Ok(graph);
    }
    rebuild(graph, |node, inputs, made| {
        let Work::Move(Move::Slice { .. }) = node.work.work else { return Rebuilt::Keep };
        let gather = made.node(made.value(inputs[0]).producer);
        let is_gather = matches!(gather.work.work, Work::Move(Move::AllGather { .. }));
        if is_gather && gather.work.needs[0] == node.work.layouts[0] {
            return Rebuilt::Use(gather.inputs[0]);
        }
        Rebuilt::Keep
    })
}

/// A value that an earlier move brought where it is needed is not moved again.
pub fn share_moves(graph: PlacedGraph) -> Result<PlacedGraph> {
    // For each value made by no move, its copies, itself among them.
    let mut copies: Table<ValueId, Few<ValueId>> = Table::with_capacity(graph.values().len());
    let mut origin: Table<ValueId, ValueId> = Table::with_capacity(graph.values().len());
    rebuild(graph, |node, inputs, made| {
        while origin.len() < made.values().len() {
            let value = ValueId::from_index(origin.len());
            let maker = made.node(made.value(value).producer);
            let root = match maker.work.work {
                Work::Move(_) => origin[maker.inputs[0]],
                Work::Compute(_) => value,
            };
            origin.push(root);
            copies.push(Few::new());
            copies[root].push(value);
        }
        if let Work::Compute(_) = node.work.work {
            return Rebuilt::Keep;
        }
        let serves = |copy: &&ValueId| satisfies(held(made, **copy), &node.work.layouts[0]);
        let there = copies[origin[inputs[0]]].iter().find(serves);
        there.map_or(Rebuilt::Keep, |&copy| Rebuilt::Use(copy))
    })
}

/// How a value of the graph is held.
pub(crate) fn held(graph: &PlacedGraph, value: ValueId) -> &Layout {
    let maker = graph.node(graph.value(value).producer);
    let output = maker.outputs.iter().position(|&output| output == value);
    &maker.work.layouts[output.expect("a value's maker makes it")]
}

/// A sum of which only slices are read is made in slices.
pub fn scatter_sums(graph: PlacedGraph) -> Result<PlacedGraph> {
    let readers = graph.readers();
    let mut is_scattered: Vec<bool> = Vec::new();
    for (_, node) in graph.nodes() {
        let is_sum = matches!(node.work.work, Work::Move(Move::AllReduce));
        let readers = node.outputs.iter().flat_map(|&output| &readers[output]);
        let are_slices = readers
            .clone()
            .all(|&reader| matches!(graph.node(reader).work.work, Work::Move(Move::Slice { .. })));
        let is_returned = node.outputs.iter().any(|output| graph.outputs().contains(output));
        is_scattered.push(is_sum && are_slices && readers.count() > 0 && !is_returned);
    }
    let mut replaced: Table<ValueId, bool> = graph.values().ids().map(|_| false).collect();
    for (id, node) in graph.nodes() {
        if is_scattered[id.index()] {
            replaced[node.outputs[0]] = true;
        }
    }
    if !is_scattered.contains(&true) {
        return Ok(graph);
    }
    rebuild(graph, |node, inputs, made| {
        let Work::Move(Move::Slice { axis }) = node.work.work else { return Rebuilt::Keep };
        if !replaced[node.inputs[0]] {
            return Rebuilt::Keep;
        }
        let sum = made.node(made.value(inputs[0]).producer);
        let work = Placed {
            work: Work::Move(Move::ReduceScatter { axis }),
            needs: sum.work.needs.clone(),
            ..node.work.clone()
        };
        Rebuilt::Replace(Box::new(work), smallvec![sum.inputs[0]])
    })
}

/// A move whose result nobody reads is not made.
pub fn drop_unread_moves(graph: PlacedGraph) -> Result<PlacedGraph> {
    let mut is_read: Table<ValueId, bool> = graph.values().ids().map(|_| false).collect();
    for &output in graph.outputs() {
        is_read[output] = true;
    }
    let nodes: Vec<_> = graph.nodes().collect();
    for (_, node) in nodes.iter().rev() {
        let is_needed = node.outputs.iter().any(|&output| is_read[output]);
        if is_needed || matches!(node.work.work, Work::Compute(_)) {
            for &input in &node.inputs {
                is_read[input] = true;
            }
        }
    }
    let is_unread =
        |node: &Node<Placed>| matches!(node.work.work, Work::Move(_)) && !is_read[node.outputs[0]];
    if !graph.nodes().any(|(_, node)| is_unread(node)) {
        return Ok(graph);
    }
    rebuild(graph, |node, inputs, _| {
        // Nothing that is kept refers to what stands in for its result.
        if is_unread(node) { Rebuilt::Use(inputs[0]) } else { Rebuilt::Keep }
    })
}

/// What becomes of a node.
enum Rebuilt {
    Keep,
    /// Its only output is this value of the new graph.
    Use(ValueId),
    /// Other work on other inputs, which are values of the new graph.
    Replace(Box<Placed>, Few<ValueId>),
}

/// Builds a graph anew; `decide` sees each node with its inputs in the new graph, and the new graph.
fn rebuild(
    graph: PlacedGraph,
    mut decide: impl FnMut(&Node<Placed>, &[ValueId], &PlacedGraph) -> Rebuilt,
) -> Result<PlacedGraph> {
    let mut made = PlacedGraph::with_capacity(graph.len(), graph.values().len());
    let mut renamed: Table<ValueId, ValueId> = Table::with_capacity(graph.values().len());
    let outputs = graph.outputs().to_vec();
    let (nodes, mut values) = graph.into_tables();
    for node in nodes.into_rows() {
        let inputs: Few<ValueId> = node.inputs.iter().map(|&value| renamed[value]).collect();
        let (work, inputs) = match decide(&node, &inputs, &made) {
            Rebuilt::Keep => (node.work, inputs),
            Rebuilt::Replace(work, inputs) => (*work, inputs),
            Rebuilt::Use(value) => {
                renamed.push(value);
                continue;
            }
        };
        let types = node.outputs.iter().map(|&value| {
            let ty = &mut values[value].ty;
            TensorType { dtype: ty.dtype, shape: std::mem::take(&mut ty.shape) }
        });
        for &output in made.add(node.name, work, inputs, types)? {
            renamed.push(output);
        }
    }
    for output in outputs {
        made.return_value(renamed[output]);
    }
    Ok(made)
}
