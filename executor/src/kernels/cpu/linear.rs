//! Linear layers: activations through one or more packed matrices, with what surrounds them, in one dispatch.

#![expect(
    unsafe_code,
    reason = "members write disjoint parts of the encoded input and of the outputs"
)]

use anyhow::{Context as _, ensure};
use ir::op::Then;

use super::disjoint::DisjointMut;
use super::encode::{Encoder, Rows, Strip};
use super::epilogue::Target;
use super::isa::Isa;
use super::pack::PackedMatrix;
use super::product::{Deal, Product, Rooms};
use super::tile::Kernel;
use crate::team::Team;

pub use super::norm::Norm;

/// A linear layer's inputs: output `i` is `then(norm(x) · weights[i]ᵀ + biases[i]) + residual`.
///
/// In bf16 the input is rounded to bf16 after the norm; for q8 and q4 it is quantised to 8 bits in blocks of 32, or
/// for tiles in groups of 256 columns, as weights then are, too; sums are in f32.
///
/// Activations are of type `X`: slices for the kernel, tensors for [`super::extension`].
#[derive(Clone, Copy)]
pub struct Linear<'a, X = &'a [f32]> {
    /// `[tokens, inputs]`, row after row.
    pub x: X,
    /// Rows of `x`.
    pub tokens: usize,
    /// Applied to each row of `x` first.
    pub norm: Option<Norm<'a>>,
    /// Matrices `[outputs, inputs]` of one format.
    pub weights: &'a [&'a PackedMatrix],
    /// One for each weight, `[outputs]`; none at all may also be an empty list.
    pub biases: &'a [Option<&'a [f32]>],
    /// Applied to the products; for `Gate` the weights are the gate and what it multiplies.
    pub then: Then,
    /// `[tokens, outputs]`, added to the only output.
    pub residual: Option<X>,
}

/// Computes the outputs, each `[tokens, outputs]` row after row: one for each weight, or one of a gate.
///
/// Results are the same, bit for bit, from run to run and for any number of members.
///
/// # Errors
/// When sizes do not fit together, or there is no memory for the encoded input.
pub fn linear(
    team: &Team,
    isa: Isa,
    linear: &Linear<'_>,
    outs: &mut [&mut [f32]],
) -> anyhow::Result<()> {
    check(linear, outs)?;
    match linear.weights.first() {
        Some(first) if linear.tokens > 0 => {
            let kernel = Kernel::choose(isa.checked(), first.format(), linear.tokens);
            linear_by(team, kernel, linear, outs)
        }
        _ => Ok(()),
    }
}

/// A linear whose sizes fit, by one kernel.
fn linear_by(
    team: &Team,
    kernel: Kernel,
    linear: &Linear<'_>,
    outs: &mut [&mut [f32]],
) -> anyhow::Result<()> {
    let columns = linear.weights[0].columns();
    let rows = Rows {
        isa: kernel.isa,
        encoding: kernel.encoding,
        x: linear.x,
        columns,
        norm: linear.norm,
        sources: None,
    };
    let strips: Vec<Strip> = kernel.strips(0, linear.tokens).collect();
    let mut encoded = team
        .arena()
        .take(linear.tokens * kernel.encoding.row_bytes(columns))
        .context("encoding the input of a linear")?;
    let encoded = DisjointMut::new(encoded.as_mut_slice::<u8>());
    let rooms = Rooms::new(team, &[kernel], strips.len(), columns)?;

    let targets: Vec<Target<'_>> = outs
        .iter_mut()
        .enumerate()
        .map(|(i, out)| Target {
            out: DisjointMut::new(out),
            columns: linear.weights[i].rows(),
            biases: [bias(linear, i), bias(linear, i + 1)],
            then: linear.then,
            residual: linear.residual,
        })
        .collect();
    let panels: Vec<usize> =
        linear.weights[..targets.len()].iter().map(|weight| weight.panels()).collect();
    let encoder = Encoder::new(team, columns, &strips);
    let is_gate = matches!(linear.then, Then::Gate(_));
    let deal = Deal::new(kernel, &panels, is_gate, strips.len(), team.members());
    let multiplying = team.shares(deal.tasks());
    let first_panel = |task: usize| {
        let (matrix, panels, _) = deal.task(task);
        linear.weights[matrix].panel(panels.start)
    };
    team.work_off(|member| {
        // Encoding hides what the first panel waits for.
        if let Some(first) = multiplying.first(member) {
            kernel.prefetch(first_panel(first));
        }
        // SAFETY: the buffer has room for all rows, and is read after this.
        unsafe { encoder.encode(&rows, encoded) };
        let mut workplace = rooms.of(member);
        while let Some(claim) = multiplying.claim(member) {
            let (matrix, panels, strips_of) = deal.task(claim.task);
            let product = Product {
                kernel,
                weights: &linear.weights[matrix..],
                panels,
                encoded,
                target: &targets[matrix],
                next: claim.next.map(first_panel),
            };
            // SAFETY: the input is encoded, and every panel's columns are claimed once for every strip.
            unsafe { product.finish(&strips[strips_of], &mut workplace) };
        }
    });
    Ok(())
}

fn bias<'a>(linear: &Linear<'a>, i: usize) -> Option<&'a [f32]> {
    linear.biases.get(i).copied().flatten()
}

fn check(linear: &Linear<'_>, outs: &[&mut [f32]]) -> anyhow::Result<()> {
    let wanted = match linear.then {
        Then::Nothing | Then::Activate(_) => linear.weights.len(),
        Then::Gate(_) => {
            ensure!(linear.weights.len() == 2, "a gate of {} matrices", linear.weights.len());
            1
        }
    };
    ensure!(outs.len() == wanted, "{} outputs of a linear that has {wanted}", outs.len());
    let Some(&first) = linear.weights.first() else { return Ok(()) };
    let columns = first.columns();
    ensure!(
        linear.x.len() == linear.tokens * columns,
        "an input of {} elements for {} tokens of {columns}",
        linear.x.len(),
        linear.tokens
    );
    for (i, weight) in linear.weights.iter().enumerate() {
        ensure!(
            weight.columns() == columns && weight.format() == first.format(),
            "matrices of {columns} and {} columns, in {} and {}, share an input",
            weight.columns(),
            first.format(),
            weight.format()
        );
        let bias_len = bias(linear, i).map_or(weight.rows(), <[f32]>::len);
        ensure!(bias_len == weight.rows(), "a bias of {bias_len} for {} outputs", weight.rows());
    }
    for (out, weight) in outs.iter().zip(linear.weights) {
        ensure!(
            out.len() == linear.tokens * weight.rows(),
            "an output of {} elements for {} tokens of {}",
            out.len(),
            linear.tokens,
            weight.rows()
        );
    }
    if wanted < linear.weights.len() {
        ensure!(
            first.rows() == linear.weights[1].rows(),
            "a gate of {} and {} rows",
            first.rows(),
            linear.weights[1].rows()
        );
    }
    if let Some(residual) = linear.residual {
        ensure!(
            outs.len() == 1 && residual.len() == outs[0].len(),
            "a residual of {} elements for {} outputs",
            residual.len(),
            outs.len()
        );
    }
    if let Some(norm) = linear.norm {
        for len in [norm.scale, norm.bias].into_iter().flatten().map(<[f32]>::len) {
            ensure!(len == columns, "a norm of {len} for {columns} columns");
        }
    }
    Ok(())
}

#[cfg(test)]
pub(super) mod tests;
