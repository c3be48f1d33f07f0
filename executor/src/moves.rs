//! Movement between devices that share the host's memory: each member reads the others' buffers and makes its own.
//!
//! - Sums go in the order of the members, so every member gets the same bits.
//! - A transfer copies: what a device reads often must lie in its own memory.

use anyhow::{Context as _, Result, bail, ensure};
use burn::tensor::{Int, Tensor};
use ir::layout::Move;

use crate::bind::Device;
use crate::slots::Value;

/// One member's part of a movement of the members' values `inputs`.
pub(crate) fn run(
    movement: &Move,
    slice: Option<(u32, u32)>,
    device: &Device,
    inputs: &[Value],
) -> Result<Value> {
    let first = inputs.first().context("a movement reads nothing")?;
    Ok(match movement {
        Move::Transfer { .. } | Move::Broadcast { .. } => match first {
            Value::Float(x) => Value::Float(x.clone().to_device(&device.burn)),
            Value::Int(x) => Value::Int(x.clone().to_device(&device.burn)),
        },
        Move::AllReduce => Value::Float(sum(inputs, device)?),
        Move::ReduceScatter { axis } => Value::Float(cut(sum(inputs, device)?, *axis, slice)?),
        Move::AllGather { axis } => match first {
            Value::Float(_) => {
                let parts = inputs
                    .iter()
                    .map(|value| Ok(value.float()?.clone().to_device(&device.burn)))
                    .collect::<Result<Vec<Tensor<2>>>>()?;
                Value::Float(Tensor::cat(parts, usize::from(*axis)))
            }
            Value::Int(_) => {
                let parts = inputs
                    .iter()
                    .map(|value| Ok(value.int()?.clone().to_device(&device.burn)))
                    .collect::<Result<Vec<Tensor<2, Int>>>>()?;
                Value::Int(Tensor::cat(parts, usize::from(*axis)))
            }
        },
        Move::Slice { axis } => Value::Float(cut(first.float()?.clone(), *axis, slice)?),
    })
}

/// The sum of all terms, first member first.
fn sum(terms: &[Value], device: &Device) -> Result<Tensor<2>> {
    let mut terms = terms.iter().map(|term| Ok(term.float()?.clone().to_device(&device.burn)));
    let first = terms.next().context("a sum has no terms")??;
    terms.try_fold(first, |sum, term: Result<Tensor<2>>| Ok(sum + term?))
}

fn cut(x: Tensor<2>, axis: u8, slice: Option<(u32, u32)>) -> Result<Tensor<2>> {
    let Some((start, size)) = slice else { bail!("a movement that cuts names no slice") };
    ensure!(axis < 2, "an activation has no axis {axis}");
    Ok(x.narrow(usize::from(axis), start as usize, size as usize))
}
