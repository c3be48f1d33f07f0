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
use ir::graph::{PlacedGraph, Work};
use ir::id::{DeviceId, NodeId, Table, ValueId};
use ir::layout::{Layout, Move, Share};
use ir::op::{Op, Then};
use ir::plan::Phase;
use ir::tensor::{DType, Dim, TensorType};
use ir::workspace::{MAX_FUSED_ROWS, product_format, summed_together};

use super::movement::LIBRARY_GAIN;
use crate::bind::BoundPart;
use crate::cost::{Way, is_peer_sum, library_sum_nanos, move_nanos};
use crate::target::{Batch, Target};

/// The values that a device holds in 16 bits in a program for that batch, with the type of their elements.
pub(super) fn values(
    target: &Target,
    graph: &PlacedGraph,
    parts: &Table<NodeId, Vec<BoundPart>>,
    batch: &Batch,
) -> HashMap<(ValueId, DeviceId), DType> {
    let mut narrow = HashMap::new();
    // Runs of fewer tokens take the input in f32.
    if batch.phase != Phase::Prefill || batch.extent.tokens <= MAX_FUSED_ROWS {
        return narrow;
    }
    let readers = graph.readers();
    for (id, node) in graph.nodes() {
        let Work::Compute(Op::Linear(linear)) = &node.work.work else { continue };
        let &[value] = &node.outputs[..] else { continue };
        let is_inner = linear.then != Then::Nothing && !linear.residual;
        let has_tokens = graph.value(value).ty.shape.first() == Some(&Dim::Tokens);
        let is_read_so = readers[value].iter().all(|&reader| is_input(graph, reader, value));
        if !(is_inner && has_tokens && is_read_so) || graph.outputs().contains(&value) {
            continue;
        }
        for part in &parts[id] {
            let readers = readers[value].iter().flat_map(|&reader| &parts[reader]);
            let mut here = readers.filter(|reader| reader.device == part.device).peekable();
            let are_read = here.peek().is_some();
            if are_read && [part].into_iter().chain(here).all(|part| multiplies_bf16(target, part))
            {
                narrow.insert((value, part.device), DType::Bf16);
            }
        }
    }
    narrow
}

/// What is added behind sums that GPUs make of terms in 16 bits, under those terms, in a program for that batch: where
/// every GPU has it, and the vendor's library of collectives is not faster.
pub(super) fn residuals_behind_sums(
    target: &Target,
    graph: &PlacedGraph,
    parts: &Table<NodeId, Vec<BoundPart>>,
    batch: &Batch,
) -> Result<HashMap<ValueId, ValueId>> {
    let mut behind = HashMap::new();
    if batch.phase != Phase::Prefill || batch.extent.tokens <= MAX_FUSED_ROWS {
        return Ok(behind);
    }
    let readers = graph.readers();
    for (id, node) in graph.nodes() {
        let Work::Compute(Op::Linear(linear)) = &node.work.work else { continue };
        let (&[value], &[_, residual]) = (&node.outputs[..], &node.inputs[..]) else { continue };
        let layout = &node.work.layouts[0];
        let ty = &graph.value(value).ty;
        let is_term = linear.residual
            && ty.shape.first() == Some(&Dim::Tokens)
            && layout.share == Share::Partial
            && ty.features(batch.extent).is_multiple_of(summed_together(DType::Bf16))
            && readers[value].len() == 1
            && readers[value].iter().all(|&reader| is_sum_for(graph, reader, &layout.devices));
        let are_narrow = || parts[id].iter().all(|part| multiplies_bf16(target, part));
        if !is_term || !are_narrow() || !is_everywhere(graph, residual, &layout.devices) {
            continue;
        }
        let narrow = TensorType { dtype: DType::Bf16, shape: ty.shape.clone() }.bytes(batch.extent);
        let incoming: Vec<(DeviceId, u64)> =
            layout.devices.iter().map(|&device| (device, narrow)).collect();
        if !is_peer_sum(&target.machine, &Move::AllReduce, &incoming) {
            continue;
        }
        let bytes = ty.bytes(batch.extent);
        let direct = layout.devices.iter().map(|&device| {
            let way = Way::alone(false);
            move_nanos(target, device, &Move::AllReduce, &incoming, bytes, way)
        });
        let slowest = direct.collect::<Result<Vec<f64>>>()?.into_iter().fold(0.0, f64::max);
        let by_library = library_sum_nanos(target, incoming.len(), bytes);
        if by_library.is_none_or(|library| slowest <= library * LIBRARY_GAIN) {
            behind.insert(value, residual);
        }
    }
    Ok(behind)
}

/// Whether a node sums what these devices hold, and brings them the sum.
fn is_sum_for(graph: &PlacedGraph, node: NodeId, devices: &[DeviceId]) -> bool {
    let placed = &graph.node(node).work;
    matches!(placed.work, Work::Move(Move::AllReduce))
        && placed.needs[0].devices[..] == *devices
        && placed.layouts[0].devices[..] == *devices
}

/// Whether each of these devices holds all of a value.
fn is_everywhere(graph: &PlacedGraph, value: ValueId, devices: &[DeviceId]) -> bool {
    let maker = graph.node(graph.value(value).producer);
    let layout = maker.outputs.iter().position(|&output| output == value);
    layout.is_some_and(|at| {
        let Layout { devices: holders, share, .. } = &maker.work.layouts[at];
        *share == Share::Whole && devices.iter().all(|device| holders.contains(device))
    })
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
