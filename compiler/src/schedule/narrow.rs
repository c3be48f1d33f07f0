//! Values that GPUs hold in 16 bits: those between two linears of many tokens, and terms of their sums.
//!
//! Matrix instructions take them in bfloat16 anyway. Held so, they and the products of a gate take half the memory and
//! half the time of being written and read, and nothing narrows them in between: of a block with 8 B weights and 2048
//! tokens 350 instead of 820 MB go by. (Runs of few tokens in such a program make them in f32 and narrow them.)
//!
//! Terms in 16 bits cross between GPUs in half the time. What a block adds to comes behind the sum then, in f32 on each
//! GPU: as part of a term it would be rounded with every block.

use std::collections::HashMap;

use anyhow::Result;
use ir::dag::Node;
use ir::graph::{Placed, PlacedGraph, Work};
use ir::id::{DeviceId, NodeId, Table, ValueId};
use ir::layout::{Layout, Move, Share};
use ir::op::{Op, Then};
use ir::plan::Phase;
use ir::tensor::{DType, Dim, TensorType};
use ir::workspace::{MAX_FUSED_ROWS, product_format, summed_together};

use super::movement::is_librarys;
use crate::bind::BoundPart;
use crate::cost::is_peer_sum;
use crate::elide_moves::held;
use crate::insert_moves::satisfies;
use crate::target::{Batch, Target};

/// What devices hold in 16 bits in a program.
#[derive(Default)]
pub(super) struct Narrow {
    /// The type of the elements of each such value on each such device.
    pub(super) types: HashMap<(ValueId, DeviceId), DType>,
    /// What is added behind the sums of such terms, under these terms.
    pub(super) residuals: HashMap<ValueId, ValueId>,
}

impl Narrow {
    /// That of a program for that batch.
    ///
    /// # Errors
    /// When no link leads from one GPU to another that it shares a layer with.
    pub(super) fn of(
        target: &Target,
        graph: &PlacedGraph,
        parts: &Table<NodeId, Vec<BoundPart>>,
        batch: &Batch,
    ) -> Result<Self> {
        let mut narrow = Self::default();
        // Runs of fewer tokens take the input in f32.
        if batch.phase != Phase::Prefill || batch.extent.tokens <= MAX_FUSED_ROWS {
            return Ok(narrow);
        }
        let readers = graph.readers();
        for (id, node) in graph.nodes() {
            let Work::Compute(Op::Linear(linear)) = &node.work.work else { continue };
            let &[value] = &node.outputs[..] else { continue };
            if graph.value(value).ty.shape.first() != Some(&Dim::Tokens) {
                continue;
            }
            let readers = &readers[value];
            let is_read_so = || readers.iter().all(|&reader| is_input(graph, reader, value));
            let is_inner = linear.then != Then::Nothing && !linear.residual;
            if is_inner && !graph.outputs().contains(&value) && is_read_so() {
                let readers = || readers.iter().flat_map(|&reader| &parts[reader]);
                for part in &parts[id] {
                    let here = readers().filter(|reader| reader.device == part.device);
                    let mut here = here.peekable();
                    let are_read = here.peek().is_some();
                    let mut all = [part].into_iter().chain(here);
                    if are_read && all.all(|part| multiplies_bf16(target, part)) {
                        narrow.types.insert((value, part.device), DType::Bf16);
                    }
                }
            }
            if linear.residual
                && let &[reader] = &readers[..]
                && parts[id].iter().all(|part| multiplies_bf16(target, part))
                && is_term(target, graph, node, graph.node(reader), batch)?
            {
                let devices = node.work.layouts[0].devices.iter();
                narrow.types.extend(devices.map(|&device| ((value, device), DType::Bf16)));
                narrow.residuals.insert(value, node.inputs[1]);
            }
        }
        Ok(narrow)
    }
}

/// Whether what a linear with a residual makes are terms that GPUs sum among themselves, all of which have that residual,
/// and no faster by the vendor's library of collectives.
fn is_term(
    target: &Target,
    graph: &PlacedGraph,
    linear: &Node<Placed>,
    reader: &Node<Placed>,
    batch: &Batch,
) -> Result<bool> {
    let Layout { devices, share } = &linear.work.layouts[0];
    let ty = &graph.value(linear.outputs[0]).ty;
    let is_summed = matches!(reader.work.work, Work::Move(Move::AllReduce))
        && [&reader.work.needs[0], &reader.work.layouts[0]]
            .iter()
            .all(|layout| layout.devices == *devices);
    let narrow = TensorType { dtype: DType::Bf16, shape: ty.shape.clone() }.bytes(batch.extent);
    let incoming: Vec<(DeviceId, u64)> = devices.iter().map(|&device| (device, narrow)).collect();
    Ok(*share == Share::Partial
        && is_summed
        && ty.features(batch.extent).is_multiple_of(summed_together(DType::Bf16))
        && satisfies(held(graph, linear.inputs[1]), &Layout::whole(devices))
        && is_peer_sum(&target.machine, &Move::AllReduce, &incoming)
        && !is_librarys(target, &incoming, ty.bytes(batch.extent))?)
}

/// Whether a node is a linear that multiplies the value as it is, and reads it for nothing else.
fn is_input(graph: &PlacedGraph, node: NodeId, value: ValueId) -> bool {
    let node = graph.node(node);
    let Work::Compute(Op::Linear(linear)) = &node.work.work else { return false };
    let count = node.inputs.iter().filter(|&&input| input == value).count();
    linear.norm.is_none() && node.inputs.first() == Some(&value) && count == 1
}

/// Whether a part of a linear is a GPU's, whose library multiplies its matrices in bfloat16. In f16, products before an
/// activation could be out of range.
fn multiplies_bf16(target: &Target, part: &BoundPart) -> bool {
    let kind = &target.machine.devices[part.device].kind;
    let mut matrices = part.weights.iter().filter(|held| held.shape.len() > 1);
    kind.has_library()
        && matrices.all(|held| product_format(held.format, true).float() == Some(DType::Bf16))
}
