//! Values that GPUs hold in 16 bits: those between two linears of many tokens.
//!
//! Matrix instructions take them in bfloat16 anyway. Held so, they and the products of a gate take half the memory and
//! half the time of being written and read, and nothing narrows them in between: of a block with 8 B weights and 2048
//! tokens 350 instead of 820 MB go by. (Runs of few tokens in such a program make them in f32 and narrow them.)

use std::collections::HashMap;

use ir::graph::{PlacedGraph, Work};
use ir::id::{DeviceId, NodeId, Table, ValueId};
use ir::op::{Op, Then};
use ir::plan::Phase;
use ir::tensor::{DType, Dim};
use ir::workspace::{MAX_FUSED_ROWS, product_format};

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
