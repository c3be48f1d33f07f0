//! The one graph structure, used for layers and again for placed work.

use std::fmt;
use std::sync::Arc;

use anyhow::{Result, ensure};

use crate::id::{Few, Id, NodeId, Table, ValueId};
use crate::tensor::TensorType;

/// A dataflow graph whose nodes do `W`.
///
/// A node may read only values that already exist, so the order of `nodes` is
/// a topological order and a cycle cannot be written down. Nothing is removed
/// or reordered: a pass that changes the graph builds a new one.
#[derive(Clone, Debug, PartialEq)]
pub struct Dag<W> {
    nodes: Table<NodeId, Node<W>>,
    values: Table<ValueId, Value>,
    outputs: Vec<ValueId>,
}

/// One piece of work and the values it reads and makes.
#[derive(Clone, Debug, PartialEq)]
pub struct Node<W> {
    /// The checkpoint's own name for this layer, kept to the end: in every graph that is made of this one.
    pub name: Arc<str>,
    /// What is done.
    pub work: W,
    /// Values read, in the order the work expects.
    pub inputs: Few<ValueId>,
    /// Values made.
    pub outputs: Few<ValueId>,
}

/// A tensor flowing along the edges of a graph.
#[derive(Clone, Debug, PartialEq)]
pub struct Value {
    /// Element type and shape of the whole value, however it is split.
    pub ty: TensorType,
    /// The node that computes it.
    pub producer: NodeId,
}

impl<W> Dag<W> {
    /// An empty graph with room for as many nodes and values.
    pub fn with_capacity(nodes: usize, values: usize) -> Self {
        Self {
            nodes: Table::with_capacity(nodes),
            values: Table::with_capacity(values),
            outputs: Vec::new(),
        }
    }

    /// Adds a node and the values it makes. Fails when an input does not exist yet.
    pub fn push(
        &mut self,
        name: impl Into<Arc<str>>,
        work: W,
        inputs: &[ValueId],
        outputs: &[TensorType],
    ) -> Result<Vec<ValueId>> {
        let added = self.add(name.into(), work, inputs.into(), outputs.iter().cloned())?;
        Ok(added.to_vec())
    }

    /// The same of what need not be copied. Large models are placed by making many graphs of one.
    pub fn add(
        &mut self,
        name: Arc<str>,
        work: W,
        inputs: Few<ValueId>,
        outputs: impl Iterator<Item = TensorType>,
    ) -> Result<&[ValueId]> {
        for &input in &inputs {
            ensure!(self.values.get(input).is_some(), "{name} reads {input}, which does not exist");
        }
        let producer = NodeId::from_index(self.nodes.len());
        let outputs = outputs.map(|ty| self.values.push(Value { ty, producer })).collect();
        let id = self.nodes.push(Node { name, work, inputs, outputs });
        Ok(&self.nodes[id].outputs)
    }

    /// Adds a node that makes one value.
    pub fn push_one(
        &mut self,
        name: impl Into<Arc<str>>,
        work: W,
        inputs: &[ValueId],
        output: TensorType,
    ) -> Result<ValueId> {
        Ok(self.add(name.into(), work, inputs.into(), std::iter::once(output))?[0])
    }

    /// Makes a value a result of the graph.
    pub fn return_value(&mut self, value: ValueId) {
        self.outputs.push(value);
    }

    /// Results of the graph.
    pub fn outputs(&self) -> &[ValueId] {
        &self.outputs
    }

    /// Nodes in topological order.
    pub fn nodes(&self) -> impl Iterator<Item = (NodeId, &Node<W>)> {
        self.nodes.iter()
    }

    /// Number of nodes.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Whether there is no node.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// The node of that id.
    pub fn node(&self, node: NodeId) -> &Node<W> {
        &self.nodes[node]
    }

    /// The value of that id.
    pub fn value(&self, value: ValueId) -> &Value {
        &self.values[value]
    }

    /// All values.
    pub fn values(&self) -> &Table<ValueId, Value> {
        &self.values
    }

    /// Nodes and values, for building another graph of them.
    pub fn into_tables(self) -> (Table<NodeId, Node<W>>, Table<ValueId, Value>) {
        (self.nodes, self.values)
    }

    /// For each value the nodes that read it, in order; a node that reads it twice is there twice.
    pub fn readers(&self) -> Table<ValueId, Few<NodeId>> {
        let mut readers: Table<ValueId, Few<NodeId>> =
            self.values.ids().map(|_| Few::new()).collect();
        for (id, node) in self.nodes() {
            for &input in &node.inputs {
                readers[input].push(id);
            }
        }
        readers
    }
}

impl<W> Default for Dag<W> {
    fn default() -> Self {
        Self { nodes: Table::default(), values: Table::default(), outputs: Vec::new() }
    }
}

/// One line a node: `v3: f32[tokens, 64] = linear w2 (v2)  ; layers.0.q`.
impl<W: fmt::Display> fmt::Display for Dag<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (_, node) in self.nodes() {
            let outputs: Vec<String> =
                node.outputs.iter().map(|&v| format!("{v}: {}", self.values[v].ty)).collect();
            let outputs = outputs.join(", ");
            writeln!(f, "{outputs} = {} ({})  ; {}", node.work, list(&node.inputs), node.name)?;
        }
        writeln!(f, "return {}", list(&self.outputs))
    }
}

/// Items with commas between them, as every text form writes them.
pub(crate) fn list<T: fmt::Display>(items: &[T]) -> String {
    items.iter().map(T::to_string).collect::<Vec<_>>().join(", ")
}
