//! A model on its way to a target, with the facts about it that several stages ask for.

use ir::id::{Table, WeightId};
use ir::model::Model;
use ir::op::Op;

use crate::target::Target;

/// One compilation.
#[derive(Clone, Debug)]
pub(crate) struct Task<'a> {
    /// The model, with its layers fused.
    pub(crate) model: &'a Model,
    /// What is aimed at.
    pub(crate) target: &'a Target,
    /// Weights that a block format would harm out of proportion to the bytes it saves.
    pub(crate) sensitive: Table<WeightId, bool>,
}

impl<'a> Task<'a> {
    /// Reads the facts from the graph.
    pub(crate) fn new(model: &'a Model, target: &'a Target) -> Self {
        let mut sensitive: Table<WeightId, bool> =
            model.weights.rows().iter().map(|weight| weight.shape.first() == Some(&1)).collect();
        for (_, node) in model.layers.nodes() {
            if let Op::AddPosition { table, .. } = node.work {
                sensitive[table] = true;
            }
            if let Op::Route { .. } = node.work {
                let router = model.layers.node(model.layers.value(node.inputs[0]).producer);
                for weight in router.work.weights() {
                    sensitive[weight] = true;
                }
            }
        }
        Self { model, target, sensitive }
    }

    /// How many devices the target has.
    pub(crate) fn devices(&self) -> usize {
        self.target.machine.devices.len()
    }

    /// One row for each device.
    pub(crate) fn per_device<T: Clone>(&self, row: T) -> Table<ir::id::DeviceId, T> {
        vec![row; self.devices()].into_iter().collect()
    }

    /// The number of the transformer block that a node's name gives: its first component that is a number.
    pub(crate) fn block(name: &str) -> Option<u32> {
        name.split('.').find_map(|component| component.parse().ok())
    }
}
