//! Movement between devices that share the host's memory: each member reads the others' buffers and makes its own.
//!
//! - Sums go in the order of the members, so every member gets the same bits.
//! - A transfer copies what is large: what a device reads often must lie in its own memory.

use anyhow::{Context as _, Result, bail, ensure};
use burn::tensor::{Int, Tensor};
use ir::layout::Move;

use crate::bind::{Cpu, CpuForm};
use crate::kernels::cpu::extension::{Input, Output};
use crate::kernels::cpu::rows::for_each_row;
use crate::slots::Value;
use crate::team::Team;

/// Bytes below which a value is read where it is: its lines reach a cache sooner than a team starts to copy them.
const READ_IN_PLACE_BYTES: usize = 64 << 10;

/// One member's part of a movement of the members' values `inputs`.
pub(crate) fn run(
    movement: &Move,
    slice: Option<(u32, u32)>,
    cpu: &Cpu,
    inputs: Vec<Value>,
) -> Result<Value> {
    if let (Move::Transfer { .. } | Move::Broadcast { .. }, Some(first)) =
        (movement, inputs.first())
        && first.elements() * size_of::<f32>() < READ_IN_PLACE_BYTES
    {
        return Ok(first.clone());
    }
    let has_ids = inputs.iter().any(|value| matches!(value, Value::Int(_)));
    match &cpu.form {
        // Ids are few, and every member may read them where they are.
        CpuForm::Own(_) if !has_ids => own(movement, slice, &cpu.team, inputs),
        CpuForm::Own(_) | CpuForm::Plain(_) => plain(movement, slice, &inputs),
    }
}

/// Rows and columns that a member keeps of the whole.
#[derive(Clone, Copy)]
struct Window {
    rows: (usize, usize),
    columns: (usize, usize),
}

fn own(
    movement: &Move,
    slice: Option<(u32, u32)>,
    team: &Team,
    inputs: Vec<Value>,
) -> Result<Value> {
    let input = |value: Value| value.into_flex().map(Input::of);
    let inputs = inputs.into_iter().map(input).collect::<Result<Vec<_>>>()?;
    let first = inputs.first().context("a movement reads nothing")?;
    let whole = Window { rows: (0, first.rows()), columns: (0, first.columns()) };
    let cut = |axis: u8| -> Result<Window> {
        let Some((start, size)) = slice else { bail!("a movement that cuts names no slice") };
        let part = (start as usize, size as usize);
        match axis {
            0 => Ok(Window { rows: part, ..whole }),
            1 => Ok(Window { columns: part, ..whole }),
            _ => bail!("an activation has no axis {axis}"),
        }
    };
    let out = match movement {
        Move::Transfer { .. } | Move::Broadcast { .. } => sum(team, &inputs[..1], whole)?,
        Move::Slice { axis } => sum(team, &inputs[..1], cut(*axis)?)?,
        Move::AllReduce => sum(team, &inputs, whole)?,
        Move::ReduceScatter { axis } => sum(team, &inputs, cut(*axis)?)?,
        Move::AllGather { axis: 0 } => stack(team, &inputs)?,
        Move::AllGather { .. } => join(team, &inputs)?,
    };
    Ok(Value::of_flex(out.into_floats()))
}

/// The sum of a window of all terms, first member first.
fn sum(team: &Team, terms: &[Input], window: Window) -> Result<Output> {
    let Window { rows: (first_row, rows), columns: (first_column, columns) } = window;
    let (height, width) = terms.first().map_or((0, 0), |term| (term.rows(), term.columns()));
    ensure!(
        first_row + rows <= height && first_column + columns <= width,
        "a member's slice lies outside of the whole"
    );
    let slices = terms.iter().map(Input::floats).collect::<Result<Vec<_>>>()?;
    ensure!(slices.iter().all(|term| term.len() == height * width), "terms differ in shape");
    let mut out = Output::new(team, rows, columns)?;
    for_each_row(team, columns, out.floats(), |at, out| {
        for (row, out) in (first_row + at / columns..).zip(out.chunks_exact_mut(columns)) {
            let start = row * width + first_column;
            let mut terms = slices.iter().map(|term| &term[start..start + columns]);
            if let Some(term) = terms.next() {
                out.copy_from_slice(term);
            }
            for term in terms {
                out.iter_mut().zip(term).for_each(|(sum, term)| *sum += term);
            }
        }
    });
    Ok(out)
}

/// All parts, one below the other.
fn stack(team: &Team, parts: &[Input]) -> Result<Output> {
    let columns = parts.first().map_or(0, Input::columns);
    let mut out = Output::new(team, parts.iter().map(Input::rows).sum(), columns)?;
    let mut rest = out.floats();
    for part in parts {
        let part = part.floats()?;
        ensure!(part.len() <= rest.len(), "parts differ in width");
        let (place, below) = rest.split_at_mut(part.len());
        place.copy_from_slice(part);
        rest = below;
    }
    ensure!(rest.is_empty(), "parts differ in width");
    Ok(out)
}

/// All parts, side by side.
fn join(team: &Team, parts: &[Input]) -> Result<Output> {
    let rows = parts.first().map_or(0, Input::rows);
    ensure!(parts.iter().all(|part| part.rows() == rows), "parts differ in height");
    let columns = parts.iter().map(Input::columns).sum();
    let slices = parts
        .iter()
        .map(|part| Ok((part.columns(), part.floats()?)))
        .collect::<Result<Vec<(usize, &[f32])>>>()?;
    let mut out = Output::new(team, rows, columns)?;
    for_each_row(team, columns, out.floats(), |at, out| {
        for (row, mut rest) in (at / columns..).zip(out.chunks_exact_mut(columns)) {
            for (width, part) in &slices {
                let (place, right) = rest.split_at_mut(*width);
                place.copy_from_slice(&part[row * width..(row + 1) * width]);
                rest = right;
            }
        }
    });
    Ok(out)
}

/// The same in Burn's operations. Tensors of one process can be shared, so nothing is copied to be moved.
fn plain(movement: &Move, slice: Option<(u32, u32)>, inputs: &[Value]) -> Result<Value> {
    let first = inputs.first().context("a movement reads nothing")?;
    let total = || -> Result<Tensor<2>> {
        let mut terms = inputs.iter().map(|term| term.float().cloned());
        let first = terms.next().context("a sum has no terms")??;
        terms.try_fold(first, |sum, term: Result<Tensor<2>>| Ok(sum + term?))
    };
    let cut = |x: Tensor<2>, axis: u8| -> Result<Value> {
        let Some((start, size)) = slice else { bail!("a movement that cuts names no slice") };
        ensure!(axis < 2, "an activation has no axis {axis}");
        Ok(Value::Float(x.narrow(usize::from(axis), start as usize, size as usize)))
    };
    match movement {
        Move::Transfer { .. } | Move::Broadcast { .. } => Ok(first.clone()),
        Move::AllReduce => Ok(Value::Float(total()?)),
        Move::ReduceScatter { axis } => cut(total()?, *axis),
        Move::AllGather { axis } => Ok(match first {
            Value::Float(_) => {
                let parts = inputs.iter().map(|value| value.float().cloned());
                let parts = parts.collect::<Result<Vec<Tensor<2>>>>()?;
                Value::Float(Tensor::cat(parts, usize::from(*axis)))
            }
            Value::Int(_) => {
                let parts = inputs.iter().map(|value| value.int().cloned());
                let parts = parts.collect::<Result<Vec<Tensor<2, Int>>>>()?;
                Value::Int(Tensor::cat(parts, usize::from(*axis)))
            }
        }),
        Move::Slice { axis } => cut(first.float()?.clone(), *axis),
    }
}
