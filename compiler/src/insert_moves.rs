//! Makes movement explicit: where an input is held otherwise than it is needed, moves bring it there.
//!
//! Right and wasteful: every edge gets its own moves. [`crate::elide_moves`] takes the superfluous ones away.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use ir::graph::{Cause, LayerGraph, Placed, PlacedGraph, Reason, Work};
use ir::id::{Few, NodeId, Table, ValueId};
use ir::layout::{Layout, Share, moves};

/// The placed graph of a layer graph, given what becomes of each of its nodes. The result is whole on the first device
/// that holds it.
pub fn insert_moves(graph: &LayerGraph, placed: Table<NodeId, Placed>) -> Result<PlacedGraph> {
    let mut inserted = Inserted {
        // With some moves.
        graph: PlacedGraph::with_capacity(2 * graph.len(), 2 * graph.values().len()),
        held: graph.values().ids().map(|_| None).collect(),
    };
    for ((_, node), work) in graph.nodes().zip(placed.into_rows()) {
        let mut inputs = Few::new();
        for (&value, need) in node.inputs.iter().zip(&work.needs) {
            let input = inserted.bring(&node.name, value, need)?;
            inputs.push(input);
        }
        let types = node.outputs.iter().map(|&v| graph.value(v).ty.clone());
        let layouts = work.layouts.clone();
        let outputs = inserted.graph.add(node.name.clone(), work, inputs, types)?;
        for ((&old, &new), layout) in node.outputs.iter().zip(outputs).zip(layouts) {
            inserted.held[old] = Some((new, layout));
        }
    }
    for &output in graph.outputs() {
        let name = &graph.node(graph.value(output).producer).name;
        let first = inserted.held(output).1.devices[0];
        let output = inserted.bring(name, output, &Layout::on(first))?;
        inserted.graph.return_value(output);
    }
    Ok(inserted.graph)
}

struct Inserted {
    graph: PlacedGraph,
    /// For each value of the layer graph, the value that its node made and how it is held.
    held: Table<ValueId, Option<(ValueId, Layout)>>,
}

impl Inserted {
    fn held(&self, value: ValueId) -> &(ValueId, Layout) {
        self.held[value].as_ref().expect("a graph makes values before it reads them")
    }

    /// The value as it is needed, after the moves that takes.
    fn bring(&mut self, name: &Arc<str>, value: ValueId, need: &Layout) -> Result<ValueId> {
        let (made, layout) = self.held(value);
        if layout == need {
            return Ok(*made);
        }
        let (mut value, mut have) = (*made, layout.clone());
        let steps = moves(&have, need)
            .with_context(|| format!("{name} needs {need} of a value held {have}"))?;
        for (movement, layout) in steps {
            let work = Placed {
                work: Work::Move(movement),
                needs: vec![have],
                layouts: vec![layout.clone()],
                inner: Few::new(),
                home: None,
                cause: Cause { reason: Reason::Mismatch, runner_up: None },
            };
            let ty = self.graph.value(value).ty.clone();
            value = self.graph.push_one(name.clone(), work, &[value], ty)?;
            have = layout;
        }
        Ok(value)
    }
}

/// Whether every device that `need` names holds, under `have`, what it needs.
pub fn satisfies(have: &Layout, need: &Layout) -> bool {
    have == need
        || have.share == Share::Whole
            && need.share == Share::Whole
            && need.devices.iter().all(|device| have.devices.contains(device))
}
