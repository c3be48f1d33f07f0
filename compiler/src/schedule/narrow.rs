//! Values that GPUs hold in 16 bits: those between two linears of many tokens.
//!
//! Matrix instructions take them in 16 bits anyway. Held so, they and the products of a gate take half the memory and half
//! the time of being written and read, and nothing narrows them in between: of a block with 8 B weights and 2048 tokens
//! 350 instead of 820 MB go by.

use std::collections::HashMap;

use ir::graph::{PlacedGraph, Work};
use ir::id::{DeviceId, NodeId, Table, ValueId};
use ir::op::{Op, Then};
use ir::plan::Phase;
use ir::tensor::{DType, Dim};
use ir::workspace::{NARROW_ROWS, product_format};

use crate::bind::BoundPart;
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
    if batch.phase != Phase::Prefill || batch.extent.tokens <= NARROW_ROWS {
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
        for device in parts[id].iter().map(|part| part.device) {
            let readers = readers[value].iter().flat_map(|&reader| &parts[reader]);
            let parts: Vec<_> = readers.filter(|part| part.device == device).collect();
            if let Some(dtype) = taken(target, &parts) {
                narrow.insert((value, device), dtype);
            }
        }
    }
    narrow
}

/// Whether a node is a linear that multiplies the value as it is, and reads it for nothing else.
fn is_input(graph: &PlacedGraph, node: NodeId, value: ValueId) -> bool {
    let node = graph.node(node);
    let Work::Compute(Op::Linear(linear)) = &node.work.work else { return false };
    let count = node.inputs.iter().filter(|&&input| input == value).count();
    linear.norm.is_none() && node.inputs.first() == Some(&value) && count == 1
}

/// The elements of 16 bits that a GPU's parts of linears take, where all take the same.
fn taken(target: &Target, parts: &[&BoundPart]) -> Option<DType> {
    let kind = |part: &BoundPart| &target.machine.devices[part.device].kind;
    let matrices = parts.iter().flat_map(|part| &part.weights).filter(|held| held.shape.len() > 1);
    let mut dtypes = matrices.map(|held| product_format(held.format, true).float());
    let first = dtypes.next()?.filter(|dtype| matches!(dtype, DType::F16 | DType::Bf16))?;
    let all_alike = dtypes.all(|dtype| dtype == Some(first));
    (all_alike && parts.iter().all(|part| kind(part).has_library())).then_some(first)
}
