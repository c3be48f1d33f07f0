//! What one device does of an operation that several share: its slices of the weights and its own counts.

use std::iter;

use anyhow::{Result, bail, ensure};

use crate::graph::Placed;
use crate::id::{Few, WeightId};
use crate::layout::{Layout, Share};
use crate::op::{Experts, Linear, Op, Then};
use crate::weight::Slice;

/// One device's part of a shared operation.
#[derive(Clone, Debug, PartialEq)]
pub struct Local {
    /// The operation with this device's counts; its weights still carry the names of the whole ones.
    pub op: Op,
    /// Each of `op.weights()` with the slice of it that this device holds; `None` is all of it.
    pub weights: Few<(WeightId, Option<Slice>)>,
    /// Whether the residual, the last input, is read here. One device adds it to a partial sum.
    pub reads_residual: bool,
}

impl Local {
    /// `slices` are those of the operation's weights, in their order.
    fn new(op: Op, slices: impl IntoIterator<Item = Option<Slice>>, reads_residual: bool) -> Self {
        let weights = op.weights().into_iter().zip(slices).collect();
        Self { op, weights, reads_residual }
    }
}

/// What device number `member` of a placed computation does.
///
/// Fails when the operation cannot be shared in the way its layouts say.
pub fn local(op: &Op, placed: &Placed, member: usize) -> Result<Local> {
    let output = &placed.layouts[0];
    let alone = output.devices.len() == 1;
    let whole = |op: Op| Local::new(op, iter::repeat(None), true);
    if alone
        || placed.layouts.iter().all(|layout| layout.share == Share::Whole)
            && placed.inner.is_empty()
    {
        return Ok(whole(op.clone()));
    }
    match op {
        Op::Linear(linear) => local_linear(linear, placed, member),
        Op::Attention(attention) => {
            let mut attention = attention.clone();
            let (start, size) = columns(output, member)?;
            let head_dim = attention.head_dim;
            ensure!(
                start.is_multiple_of(head_dim) && size.is_multiple_of(head_dim),
                "attention is cut inside a head"
            );
            attention.heads = size / head_dim;
            match columns(&placed.needs[1], member) {
                Ok((_, kv_size)) => attention.kv_heads = kv_size / head_dim,
                // Keys and values are whole everywhere; this device's first query head may lie inside a group.
                Err(_) => attention.first_head = start / head_dim,
            }
            Ok(whole(Op::Attention(attention)))
        }
        Op::Experts(Experts { .. }) => {
            ensure!(!placed.inner.is_empty(), "experts are shared without parts");
            let start = placed.inner[..member].iter().sum();
            let size = placed.inner[member];
            let rows = Some(Slice { axis: 1, start, size });
            let columns = Some(Slice { axis: 2, start, size });
            Ok(Local::new(op.clone(), [rows, rows, columns], true))
        }
        // Elementwise work on whatever slice its inputs are.
        Op::Activate(_) | Op::Gate(_) | Op::Add | Op::SoftCap { .. } => Ok(whole(op.clone())),
        Op::Embed { .. } => {
            let (start, size) = columns(output, member)?;
            Ok(Local::new(op.clone(), [Some(Slice { axis: 1, start, size })], true))
        }
        Op::AddPosition { .. }
        | Op::Norm(_)
        | Op::SigmoidGate
        | Op::Route { .. }
        | Op::SelectRows => {
            bail!("{op} cannot be shared between devices")
        }
    }
}

fn local_linear(linear: &Linear, placed: &Placed, member: usize) -> Result<Local> {
    let mut local = linear.clone();
    let mut slices: Few<Option<Slice>> = Few::new();
    let norms = linear.norm.iter().flat_map(|norm| norm.scale.iter().chain(&norm.bias)).count();
    slices.resize(norms, None);
    if placed.layouts[0].share == Share::Partial {
        let Ok((start, size)) = columns(&placed.needs[0], member) else {
            bail!("a linear makes partial sums of a whole input");
        };
        ensure!(
            norms == 0 && linear.then == Then::Nothing,
            "a partial sum is normalised or activated"
        );
        slices.extend(linear.weights.iter().map(|_| Some(Slice { axis: 1, start, size })));
        // One device adds what must be added once.
        if member > 0 {
            local.biases.iter_mut().for_each(|bias| *bias = None);
            local.residual = false;
        }
        slices.extend(local.biases.iter().flatten().map(|_: &WeightId| None));
        return Ok(Local::new(Op::Linear(local), slices, member == 0));
    }
    let rows = |index: usize| -> Result<Option<Slice>> {
        let layout = if matches!(linear.then, Then::Gate(_)) {
            &placed.layouts[0]
        } else {
            &placed.layouts[index]
        };
        Ok(match &layout.share {
            Share::Whole => None,
            Share::Split { .. } => {
                let (start, size) = columns(layout, member)?;
                Some(Slice { axis: 0, start, size })
            }
            Share::Partial => bail!("outputs of one linear are partial and not"),
        })
    };
    for index in 0..linear.weights.len() {
        slices.push(rows(index)?);
    }
    for index in 0..linear.weights.len() {
        if linear.biases[index].is_some() {
            slices.push(rows(index)?);
        }
    }
    Ok(Local::new(Op::Linear(local), slices, true))
}

/// A member's slice of the features, where they are cut.
fn columns(layout: &Layout, member: usize) -> Result<(u32, u32)> {
    match (&layout.share, layout.slice(member)) {
        (Share::Split { axis: 1, .. }, Some(slice)) => Ok(slice),
        _ => bail!("{layout} does not cut the features"),
    }
}
