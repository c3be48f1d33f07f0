//! Operations that pick rows: of a table by token or position, of an activation by what is wanted.

use anyhow::{Context as _, Result, ensure};
use ir::id::WeightId;

use super::{Input, Output, State};
use crate::batch::Batch;
use crate::kernels::cpu::rows;
use crate::slots::Value;
use crate::team::Team;

/// Rows of a table for the batch's tokens.
pub(super) fn embed(
    team: &Team,
    state: &State,
    table: WeightId,
    scale: f32,
    batch: &Batch,
) -> Result<Output> {
    let table = state.weights.lookup(table)?;
    let (tokens, features) = (batch.tokens(), table.columns());
    ensure!(
        tokens.iter().all(|&token| (token as usize) < table.rows()),
        "a token lies beyond the table of {} rows",
        table.rows()
    );
    let mut out = Output::new(team, tokens.len(), features)?;
    rows::for_each_row(team, features, out.floats(), |first, rows| {
        for (row, &token) in rows.chunks_exact_mut(features).zip(&tokens[first / features..]) {
            table.read_row(token as usize, row);
            if scale != 1.0 {
                row.iter_mut().for_each(|x| *x *= scale);
            }
        }
    });
    Ok(out)
}

/// `x` plus the rows of a table for the batch's positions.
pub(super) fn add_position(
    team: &Team,
    state: &State,
    table: WeightId,
    offset: u32,
    x: &Input,
    batch: &Batch,
) -> Result<Output> {
    let table = state.weights.lookup(table)?;
    let (positions, features) = (batch.positions(), table.columns());
    ensure!(
        positions.iter().all(|&position| ((position + offset) as usize) < table.rows()),
        "a position lies beyond the table of {} rows",
        table.rows()
    );
    let x = x.floats()?;
    ensure!(x.len() == positions.len() * features, "positions have other features");
    let mut out = Output::new(team, positions.len(), features)?;
    rows::for_each_row(team, features, out.floats(), |first, rows| {
        let places = rows.chunks_exact_mut(features).zip(&positions[first / features..]);
        for ((row, &position), x) in places.zip(x[first..].chunks_exact(features)) {
            table.read_row((position + offset) as usize, row);
            row.iter_mut().zip(x).for_each(|(row, x)| *row += x);
        }
    });
    Ok(out)
}

/// The wanted rows of `x`; all of them are `x` itself.
pub(super) fn select_rows(team: &Team, inputs: Vec<Value>, batch: &Batch) -> Result<Value> {
    let value = inputs.into_iter().next().context("the input is missing")?;
    let wanted = batch.rows();
    if wanted.len() == batch.tokens().len() {
        return Ok(value);
    }
    let x = Input::of(value)?;
    ensure!(wanted.iter().all(|&row| (row as usize) < x.rows()), "a wanted row does not exist");
    let mut out = Output::new(team, wanted.len(), x.columns())?;
    rows::select_rows(x.columns(), x.floats()?, wanted, out.floats());
    Ok(out.into_floats())
}
