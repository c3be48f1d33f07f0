//! One device's part of a placed computation: its operation, weights and tensors.

use anyhow::{Context as _, Result};
use ir::dag::Node;
use ir::graph::{Placed, PlacedGraph};
use ir::id::{DeviceId, Few, WeightId};
use ir::layout::{Layout, Share};
use ir::op::Op;
use ir::packing::{held_bytes, packed_type};
use ir::split;
use ir::tensor::{Dim, Extent, Format, TensorType};
use ir::weight::Slice;

use crate::task::Task;

/// What one device does of a node.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    /// Who does it.
    pub(crate) device: DeviceId,
    /// The operation with this device's counts; weights and caches are still named as in the model.
    pub(crate) op: Op,
    /// What is held for each of `op.weights()`.
    pub(crate) weights: Few<WeightKey>,
    /// How many of the node's inputs are read, from the first.
    pub(crate) reads: usize,
}

/// What a device holds of a weight: equal keys are held once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct WeightKey {
    /// The model's weight.
    pub(crate) weight: WeightId,
    /// Where it is held.
    pub(crate) device: DeviceId,
    /// How it is held.
    pub(crate) format: Format,
    /// The part of it that is held; `None` is all of it.
    pub(crate) slice: Option<Slice>,
}

/// The parts of all devices that take part in a computation.
pub(crate) fn parts(
    task: &Task<'_>,
    node: &Node<Placed>,
    op: &Op,
) -> impl Iterator<Item = Result<Part>> {
    let devices = &node.work.layouts[0].devices;
    (0..devices.len()).map(move |member| part(task, node, op, member))
}

fn part(task: &Task<'_>, node: &Node<Placed>, op: &Op, member: usize) -> Result<Part> {
    let device = node.work.layouts[0].devices[member];
    let local = split::local(op, &node.work, member)
        .with_context(|| format!("sharing {} between devices", node.name))?;
    let weights = local
        .weights
        .into_iter()
        .map(|(weight, slice)| {
            let is_matrix = task.model.weights[weight].shape.len() > 1;
            let home = node.work.home.filter(|_| is_matrix).unwrap_or(device);
            let format = task.format(weight, home);
            WeightKey { weight, device: home, format, slice }
        })
        .collect();
    let has_residual = matches!(op, Op::Linear(linear) if linear.residual);
    let reads = node.inputs.len() - usize::from(has_residual && !local.reads_residual);
    Ok(Part { device, op: local.op, weights, reads })
}

impl WeightKey {
    /// All of a weight, as that device holds it.
    pub(crate) fn whole(task: &Task<'_>, weight: WeightId, device: DeviceId) -> Self {
        Self { weight, device, format: task.format(weight, device), slice: None }
    }

    /// Sizes of what is held.
    pub(crate) fn shape(&self, task: &Task<'_>) -> Few<u32> {
        let mut shape = Few::from_slice(&task.model.weights[self.weight].shape);
        if let Some(slice) = self.slice {
            shape[usize::from(slice.axis)] = slice.size;
        }
        shape
    }

    /// Bytes of what is held.
    pub(crate) fn bytes(&self, task: &Task<'_>) -> u64 {
        let kind = &task.target.machine.devices[self.device].kind;
        held_bytes(kind, self.format, &self.shape(task))
    }

    /// The type of a buffer that it is fetched to.
    pub(crate) fn packed_type(&self, task: &Task<'_>) -> TensorType {
        packed_type(self.format, &self.shape(task)).expect("only matrices are held elsewhere")
    }

    /// Bytes of such a buffer.
    pub(crate) fn packed_bytes(&self, task: &Task<'_>) -> u64 {
        self.packed_type(task).bytes(Extent { tokens: 1, rows: 1 })
    }
}

/// What a member of a layout holds of a value.
pub(crate) fn local_type(ty: &TensorType, layout: &Layout, member: usize) -> TensorType {
    let mut ty = ty.clone();
    if let Share::Split { axis, parts } = &layout.share {
        ty.shape[usize::from(*axis)] = Dim::Fixed(parts[member]);
    }
    ty
}

/// The computations of a placed graph.
pub(crate) fn computations(graph: &PlacedGraph) -> impl Iterator<Item = (&Node<Placed>, &Op)> {
    graph.nodes().filter_map(|(_, node)| match &node.work.work {
        ir::graph::Work::Compute(op) => Some((node, op)),
        ir::graph::Work::Move(_) => None,
    })
}
