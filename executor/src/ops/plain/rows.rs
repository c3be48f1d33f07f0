//! Operations that pick rows: of a table by token or position, of an activation by what is wanted.

use anyhow::Result;
use burn::tensor::{DType, Device as BurnDevice, Int, Tensor, TensorData};
use ir::id::WeightId;

use super::State;
use crate::batch::Batch;

pub(super) fn embed(
    state: &State,
    table: WeightId,
    scale: f32,
    batch: &Batch,
) -> Result<Tensor<2>> {
    let rows = state.tensor(table)?.select(0, ids(batch.tokens(), &state.burn));
    Ok(if scale == 1.0 { rows } else { rows * scale })
}

pub(super) fn add_position(
    state: &State,
    table: WeightId,
    offset: u32,
    x: Tensor<2>,
    batch: &Batch,
) -> Result<Tensor<2>> {
    let positions: Vec<u32> = batch.positions().iter().map(|position| position + offset).collect();
    Ok(x + state.tensor(table)?.select(0, ids(&positions, &state.burn)))
}

pub(super) fn select_rows(x: Tensor<2>, batch: &Batch) -> Tensor<2> {
    let rows = ids(batch.rows(), &x.device());
    x.select(0, rows)
}

/// Row numbers as a tensor.
pub(super) fn ids(rows: &[u32], device: &BurnDevice) -> Tensor<1, Int> {
    let rows: Vec<i32> = rows.iter().map(|&row| row as i32).collect();
    let count = rows.len();
    Tensor::from_data(TensorData::new(rows, [count]), (device, DType::I32))
}
