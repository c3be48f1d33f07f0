//! Types of moves: what arrives is what was sent, cut or joined as the movement says.

use anyhow::{Context as _, Result, bail, ensure};

use super::{same, types};
use crate::layout::Move;
use crate::plan::Algorithm;
use crate::tensor::{DType, Dim, TensorType};
use crate::workspace::summed_together;

pub(super) fn check(
    movement: &Move,
    algorithm: Algorithm,
    is_collective: bool,
    may_be_narrow: bool,
    slice: Option<(u32, u32)>,
    reads: &[&TensorType],
    writes: &[&TensorType],
) -> Result<()> {
    let (joins, cuts) = match movement {
        Move::Transfer { .. } => (false, false),
        Move::Broadcast { .. } | Move::AllReduce | Move::AllGather { .. } => (true, false),
        Move::ReduceScatter { .. } => (true, true),
        Move::Slice { .. } => (false, true),
    };
    let is_moved = |ty: &TensorType| matches!(ty.dtype, DType::F32 | DType::I32);
    let is_term = |ty: &TensorType| may_be_narrow && matches!(ty.dtype, DType::Bf16 | DType::F16);
    let others = reads.iter().filter(|ty| !is_moved(ty) && !is_term(ty));
    if let Some(other) = others.chain(writes.iter().filter(|ty| !is_moved(ty))).next() {
        bail!("{movement} of {other}");
    }
    ensure!(is_collective == joins, "{movement} with the wrong kind of membership");
    ensure!(slice.is_some() == cuts, "{movement} with slice {slice:?}");
    ensure!(is_collective || algorithm.is_direct(), "{movement} by a library of collectives");
    match *movement {
        Move::Transfer { from, to } => {
            ensure!(from != to, "{movement} goes nowhere");
            let ([x], [y]) = types(reads, writes)?;
            same(x, y)
        }
        Move::Broadcast { .. } => {
            let ([x], [y]) = types(reads, writes)?;
            same(x, y)
        }
        Move::AllReduce => same(&sum(reads)?, one(writes)?),
        Move::ReduceScatter { axis } => sliced(&sum(reads)?, one(writes)?, axis, slice),
        Move::Slice { axis } => {
            let ([x], [y]) = types(reads, writes)?;
            ensure!(x.dtype.is_float(), "{movement} of {x}");
            sliced(x, y, axis, slice)
        }
        Move::AllGather { axis } => {
            let whole = one(writes)?;
            let mut total = 0u64;
            ensure!(!reads.is_empty(), "a gathering of nothing");
            for part in reads {
                let size = fixed(part, axis)?;
                same(&with_axis(part, axis, fixed(whole, axis)?), whole)?;
                total += u64::from(size);
            }
            ensure!(
                total == u64::from(fixed(whole, axis)?),
                "{total} elements are gathered to {whole}"
            );
            Ok(())
        }
    }
}

/// What GPUs ask for beyond that: a sum stays whole, and what they make of it without the host comes in whole loads.
pub(super) fn check_on_gpu(
    movement: &Move,
    is_sum_of_gpus: bool,
    reads: &[&TensorType],
) -> Result<()> {
    match movement {
        Move::ReduceScatter { .. } => bail!("{movement} on a GPU, which makes whole sums"),
        Move::AllReduce if is_sum_of_gpus => {
            let term = reads.first().context("a sum of nothing")?;
            let together = summed_together(term.dtype);
            ensure!(
                fixed(term, 1)?.is_multiple_of(together),
                "GPUs sum numbers in rows of a multiple of {together}, not {term}"
            );
            Ok(())
        }
        Move::AllReduce
        | Move::Transfer { .. }
        | Move::Broadcast { .. }
        | Move::AllGather { .. }
        | Move::Slice { .. } => Ok(()),
    }
}

/// The type of a sum of terms: of terms in 16 bits it is f32.
fn sum(terms: &[&TensorType]) -> Result<TensorType> {
    let first = terms.first().context("a sum of nothing")?;
    ensure!(terms.len() > 1, "a sum of one term");
    ensure!(first.dtype.is_float(), "a sum of {first}");
    terms.iter().try_for_each(|term| same(first, term))?;
    Ok(TensorType { dtype: DType::F32, shape: first.shape.clone() })
}

fn one<'a>(writes: &[&'a TensorType]) -> Result<&'a TensorType> {
    ensure!(writes.len() == 1, "{} writes instead of 1", writes.len());
    Ok(writes[0])
}

fn sliced(
    whole: &TensorType,
    part: &TensorType,
    axis: u8,
    slice: Option<(u32, u32)>,
) -> Result<()> {
    let (start, size) = slice.context("a cut without a slice")?;
    let total = fixed(whole, axis)?;
    ensure!(
        size > 0 && start.checked_add(size).is_some_and(|end| end <= total),
        "elements {start}..+{size} of {whole}"
    );
    same(&with_axis(whole, axis, size), part)
}

/// Size of an axis that is known when the plan is made.
fn fixed(ty: &TensorType, axis: u8) -> Result<u32> {
    match ty.shape.get(usize::from(axis)) {
        Some(&Dim::Fixed(size)) => Ok(size),
        Some(Dim::Tokens | Dim::Rows) | None => {
            bail!("{ty} has no axis {axis} that could be cut")
        }
    }
}

/// The type with another size of one of its fixed axes.
fn with_axis(ty: &TensorType, axis: u8, size: u32) -> TensorType {
    let mut ty = ty.clone();
    if let Some(dim) = ty.shape.get_mut(usize::from(axis)) {
        *dim = Dim::Fixed(size);
    }
    ty
}
