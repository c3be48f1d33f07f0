//! The pieces that pipelines are cut between: what comes before the blocks, each block, what comes after.

use ir::id::{NodeId, Table};
use ir::model::Model;

use crate::task::Task;

/// The units of a model, in the order they run.
#[derive(Clone, Debug)]
pub(crate) struct Units {
    count: usize,
    /// The unit of each node. Never falls along the order of nodes that read each other.
    pub(crate) of: Table<NodeId, usize>,
}

impl Units {
    /// Reads the blocks from the names of nodes.
    pub(crate) fn new(model: &Model) -> Self {
        let graph = &model.layers;
        let mut of: Table<NodeId, usize> = Table::default();
        let mut block_of_unit: Vec<Option<u32>> = Vec::new();
        for (_, node) in graph.nodes() {
            let block = Task::block(&node.name);
            // A unit runs after whatever it reads.
            let earliest =
                node.inputs.iter().map(|&value| of[graph.value(value).producer]).max().unwrap_or(0);
            let known = block.and_then(|_| block_of_unit.iter().position(|&b| b == block));
            let unit = match (known, block) {
                (Some(unit), _) if unit >= earliest => unit,
                (_, None)
                    if !block_of_unit.is_empty() && !is_after_blocks(&block_of_unit, earliest) =>
                {
                    earliest
                }
                (_, block) => {
                    block_of_unit.push(block);
                    block_of_unit.len() - 1
                }
            };
            of.push(unit);
        }
        Self { count: block_of_unit.len(), of }
    }

    /// Number of units.
    pub(crate) fn len(&self) -> usize {
        self.count
    }
}

/// Whether a node without a number that reads this unit opens the head.
fn is_after_blocks(block_of_unit: &[Option<u32>], unit: usize) -> bool {
    block_of_unit[unit].is_some()
}
