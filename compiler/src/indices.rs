//! How large a run may be for GPUs, whose kernels count the elements of what they read and write in 32 bits.

use ir::model::Model;
use ir::op::Op;
use ir::tensor::{Dim, Extent, TensorType};

/// The most tokens of a run.
pub(crate) fn most_tokens(model: &Model) -> u32 {
    let graph = &model.layers;
    let of_experts = graph.nodes().filter_map(|(_, node)| {
        let Op::Experts(experts) = &node.work else { return None };
        let [_, inner, features] = *model.weights[experts.gate].shape else { return None };
        // A token has a row at each of the experts that it chose.
        let used = row_elements(&graph.value(node.inputs[1]).ty);
        Some(used * u64::from(inner.max(features)))
    });
    most_rows_of(of_experts.chain(widths(model, Dim::Tokens)))
}

/// The most rows of logits of a run.
pub(crate) fn most_rows(model: &Model) -> u32 {
    most_rows_of(widths(model, Dim::Rows))
}

/// Elements of a row of each value that has such rows.
fn widths(model: &Model, rows: Dim) -> impl Iterator<Item = u64> {
    let types = model.layers.values().rows().iter().map(|value| &value.ty);
    types.filter(move |ty| ty.shape.first() == Some(&rows)).map(row_elements)
}

fn row_elements(ty: &TensorType) -> u64 {
    u64::from(ty.features(Extent { tokens: 1, rows: 1 }))
}

/// The most rows, whatever their width.
fn most_rows_of(widths: impl Iterator<Item = u64>) -> u32 {
    let widest = widths.max().unwrap_or(1).max(1);
    u32::try_from(u64::from(u32::MAX) / widest).unwrap_or(u32::MAX).max(1)
}
