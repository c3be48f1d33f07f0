//! A model on its way to a target, with the facts about it that several stages ask for.

use ir::id::{DeviceId, Table, WeightId};
use ir::model::{Model, ModelWeight};
use ir::op::{Linear, Op, Then};
use ir::tensor::Format;

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
    /// Matrices of linears that gain by 12 bits where they would be held in bfloat16.
    saves_in_bf12: Table<WeightId, bool>,
    /// Weights that rows are looked up in.
    tables: Table<WeightId, bool>,
    /// For each matrix of a gate the one that it is multiplied together with, in one format.
    partners: Table<WeightId, Option<WeightId>>,
}

impl<'a> Task<'a> {
    /// Reads the facts from the graph.
    pub(crate) fn new(model: &'a Model, target: &'a Target) -> Self {
        let mut sensitive: Table<WeightId, bool> =
            model.weights.rows().iter().map(|weight| matches!(*weight.shape, [1, _])).collect();
        let none = || model.weights.rows().iter().map(|_| false).collect::<Table<WeightId, bool>>();
        let (mut saves_in_bf12, mut tables) = (none(), none());
        let mut partners: Table<WeightId, Option<WeightId>> =
            model.weights.rows().iter().map(|_| None).collect();
        for (_, node) in model.layers.nodes() {
            let pair = if let Op::Experts(experts) = &node.work {
                Some([experts.gate, experts.up])
            } else if let Op::Linear(Linear { weights, then: Then::Gate(_), .. }) = &node.work {
                weights.as_array().copied()
            } else {
                None
            };
            if let Some([gate, up]) = pair {
                (partners[gate], partners[up]) = (Some(up), Some(gate));
            }
            if let Op::Linear(linear) = &node.work {
                for &weight in &linear.weights {
                    saves_in_bf12[weight] = gains_by_bf12(&model.weights[weight]);
                }
            }
            if let Op::Embed { table, .. } = node.work {
                tables[table] = true;
            }
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
        Self { model, target, sensitive, saves_in_bf12, tables, partners }
    }

    /// How a weight is held on a device.
    ///
    /// Vectors are 32-bit, and so are sensitive weights: they decide which weights are read at all (routers) or scale a
    /// whole branch, and are less than a thousandth of their layer. The matrices of a gate have one format: where they
    /// are stored in two, the one that holds both exactly.
    pub(crate) fn format(&self, weight: WeightId, device: DeviceId) -> Format {
        let ModelWeight { shape, stored, .. } = &self.model.weights[weight];
        if shape.len() < 2 || self.sensitive[weight] {
            return Format::F32;
        }
        let is_mixed = self.partners[weight]
            .is_some_and(|partner| self.model.weights[partner].stored != *stored);
        let as_stored = if is_mixed { Format::F32 } else { Format::from(*stored) };
        match self.target.formats[device].unwrap_or(as_stored) {
            Format::Bf16 | Format::Bf12 => {
                // Rows are not looked up in 12 bits on GPUs.
                let kind = &self.target.machine.devices[device].kind;
                let is_table = self.tables[weight] && kind.is_gpu();
                let is_bf12 =
                    self.saves_in_bf12[weight] && self.target.has_bf12[device] && !is_table;
                if is_bf12 { Format::Bf12 } else { Format::Bf16 }
            }
            format @ (Format::F32 | Format::F16 | Format::Q8 | Format::Q4) => format,
        }
    }

    /// How many devices the target has.
    pub(crate) fn devices(&self) -> usize {
        self.target.machine.devices.len()
    }

    /// One row for each device.
    pub(crate) fn per_device<T: Clone>(&self, row: T) -> Table<DeviceId, T> {
        vec![row; self.devices()].into_iter().collect()
    }

    /// The number of the transformer block that a node's name gives: its first component that is a number.
    pub(crate) fn block(name: &str) -> Option<u32> {
        name.split('.').find_map(|component| component.parse().ok())
    }
}

/// Whether 12 bits hold a matrix in fewer bytes, in rows that GPUs unpack to whole loads.
fn gains_by_bf12(weight: &ModelWeight) -> bool {
    /// The word in front of a row is less than a hundredth of it.
    const LEAST_COLUMNS: u32 = 256;
    matches!(*weight.shape, [_, columns] if columns >= LEAST_COLUMNS && columns % 8 == 0)
}
