//! Making a layer graph from another one.

use std::sync::Arc;

use anyhow::Result;
use ir::dag::Node;
use ir::graph::LayerGraph;
use ir::id::{Few, NodeId, Table, ValueId};
use ir::op::Op;
use ir::tensor::TensorType;

/// Who reads each value; being a result of the graph counts as a use.
pub(crate) struct Uses {
    readers: Table<ValueId, Few<NodeId>>,
    returned: Table<ValueId, usize>,
}

impl Uses {
    pub(crate) fn of(graph: &LayerGraph) -> Self {
        let mut returned: Table<ValueId, usize> = graph.values().ids().map(|_| 0).collect();
        for &output in graph.outputs() {
            returned[output] += 1;
        }
        Self { readers: graph.readers(), returned }
    }

    pub(crate) fn count(&self, value: ValueId) -> usize {
        self.readers[value].len() + self.returned[value]
    }

    /// The one node that reads all of these values, each once.
    pub(crate) fn sole_reader(&self, values: &[ValueId]) -> Option<NodeId> {
        let reader = *self.readers[*values.first()?].first()?;
        let all = values.iter().all(|&v| self.count(v) == 1 && self.readers[v][0] == reader);
        all.then_some(reader)
    }
}

/// A new graph that takes over the values of an old one.
pub(crate) struct Rewrite<'a> {
    old: &'a LayerGraph,
    new: LayerGraph,
    renamed: Table<ValueId, Option<ValueId>>,
}

impl<'a> Rewrite<'a> {
    pub(crate) fn new(old: &'a LayerGraph) -> Self {
        Self {
            old,
            new: LayerGraph::default(),
            renamed: old.values().ids().map(|_| None).collect(),
        }
    }

    /// Adds a node as it was.
    pub(crate) fn copy(&mut self, node: &Node<Op>) -> Result<()> {
        self.push(node.name.clone(), node.work.clone(), &node.inputs, &node.outputs)
    }

    /// Adds a node; inputs and outputs are values of the old graph.
    pub(crate) fn push(
        &mut self,
        name: Arc<str>,
        op: Op,
        inputs: &[ValueId],
        outputs: &[ValueId],
    ) -> Result<()> {
        let inputs = self.renamed(inputs);
        let types: Vec<_> = outputs.iter().map(|&v| self.old.value(v).ty.clone()).collect();
        let made = self.new.push(name, op, &inputs, &types)?;
        self.rename(outputs, &made);
        Ok(())
    }

    /// Adds a node with one output that the old graph may lack; inputs and output are values of the new graph.
    pub(crate) fn add(
        &mut self,
        name: String,
        op: Op,
        inputs: &[ValueId],
        ty: TensorType,
    ) -> Result<ValueId> {
        Ok(self.new.push(name, op, inputs, &[ty])?[0])
    }

    /// What values of the old graph are in the new one.
    pub(crate) fn renamed(&self, old: &[ValueId]) -> Few<ValueId> {
        let renamed = |&value| self.renamed[value].expect("a rewrite reads a value it took away");
        old.iter().map(renamed).collect()
    }

    /// Lets values of the new graph stand for those of the old one.
    pub(crate) fn rename(&mut self, old: &[ValueId], new: &[ValueId]) {
        for (&old, &new) in old.iter().zip(new) {
            self.renamed[old] = Some(new);
        }
    }

    /// Whether the node's values were made by another that swallowed it.
    pub(crate) fn is_made(&self, node: &Node<Op>) -> bool {
        node.outputs.iter().all(|&value| self.renamed[value].is_some())
    }

    pub(crate) fn finish(mut self) -> LayerGraph {
        for &output in self.old.outputs() {
            let output = self.renamed[output].expect("a rewrite took a result away");
            self.new.return_value(output);
        }
        self.new
    }
}
