//! The kernels as an extension of Burn's CPU backend: what language models compute beside what Burn does, with what
//! surrounds it in the same pass.
//!
//! - Operations take and return tensors of the backend: activations `f32[rows, features]`, ids `i32[rows, used]`.
//! - Tensors are read where they lie, unless they do not lie row after row; results are in memory of the team's arena.
//! - The plain form of each, in Burn's own operations, is in `ops/plain`: tests give both the same inputs.
//!
//! All of them fail when sizes do not fit together, a tensor has elements of another type, or there is no memory for a
//! result; and they panic as their kernels say.

mod flex;
mod tensors;

use anyhow::Result;
use burn::backend::Backend;
use burn::backend::tensor::{FloatTensor, IntTensor};
use ir::op::Activation;

pub(crate) use self::tensors::{Input, Output};
use super::attention::Attention;
use super::cache::Cache;
use super::experts::Experts;
use super::isa::Isa;
use super::linear::Linear;
use super::norm::Norm;
use super::table::Lookup;
use crate::team::Team;

/// What computes: threads on cores of one NUMA node, at one level of their instruction set.
#[derive(Clone, Copy)]
pub struct Cores<'a> {
    /// The threads.
    pub team: &'a Team,
    /// The level.
    pub isa: Isa,
}

/// Operations of language models on tensors of a backend.
pub trait Kernels: Backend {
    /// Rows of a table, times `scale`: `[rows, columns]`.
    ///
    /// # Errors
    /// See above; also when there is no such row.
    fn look_up(
        cores: Cores<'_>,
        table: Lookup<'_>,
        rows: &[u32],
        scale: f32,
    ) -> Result<FloatTensor<Self>>;

    /// `x` plus as many rows of a table, each `offset` further than said.
    ///
    /// # Errors
    /// See above; also when there is no such row.
    fn add_rows(
        cores: Cores<'_>,
        x: FloatTensor<Self>,
        table: Lookup<'_>,
        rows: &[u32],
        offset: u32,
    ) -> Result<FloatTensor<Self>>;

    /// Those rows of `x`.
    ///
    /// # Errors
    /// See above; also when there is no such row.
    fn select_rows(
        cores: Cores<'_>,
        x: FloatTensor<Self>,
        rows: &[u32],
    ) -> Result<FloatTensor<Self>>;

    /// `norm(x)`, or `norm(x) + residual`.
    ///
    /// # Errors
    /// See above.
    fn norm(
        cores: Cores<'_>,
        x: FloatTensor<Self>,
        norm: &Norm<'_>,
        residual: Option<FloatTensor<Self>>,
    ) -> Result<FloatTensor<Self>>;

    /// A linear with what surrounds it; one output for each weight, or one of a gate. Unlike the kernel it takes weights
    /// of several formats, one dispatch for neighbours of one.
    ///
    /// # Errors
    /// See above.
    fn linear(
        cores: Cores<'_>,
        linear: Linear<'_, FloatTensor<Self>>,
    ) -> Result<Vec<FloatTensor<Self>>>;

    /// Appends keys and values to `cache`; what queries see there, `[tokens, heads · head_dim]`. Rows behind those of
    /// the last sequence are zeros.
    ///
    /// # Errors
    /// See above.
    fn attention(
        cores: Cores<'_>,
        attention: Attention<'_, FloatTensor<Self>>,
        cache: &mut Cache<'_>,
    ) -> Result<FloatTensor<Self>>;

    /// The best `used` experts by `logits: [tokens, experts]`, and their softmax weights; with `renormalise` divided by
    /// their sum.
    ///
    /// # Errors
    /// See above; also when more are used than there are, or none.
    fn route(
        cores: Cores<'_>,
        logits: FloatTensor<Self>,
        used: usize,
        renormalise: bool,
    ) -> Result<(IntTensor<Self>, FloatTensor<Self>)>;

    /// The weighted sum of the chosen experts, `[tokens, features]`.
    ///
    /// # Errors
    /// See above.
    fn experts(
        cores: Cores<'_>,
        experts: Experts<'_, FloatTensor<Self>, IntTensor<Self>>,
    ) -> Result<FloatTensor<Self>>;

    /// `activation(x)`.
    ///
    /// # Errors
    /// See above.
    fn activate(
        cores: Cores<'_>,
        activation: Activation,
        x: FloatTensor<Self>,
    ) -> Result<FloatTensor<Self>>;

    /// `activation(gate) · up`.
    ///
    /// # Errors
    /// See above.
    fn gate(
        cores: Cores<'_>,
        activation: Activation,
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
    ) -> Result<FloatTensor<Self>>;

    /// `sigmoid(gate) · x` for `gate: [tokens, 1]`.
    ///
    /// # Errors
    /// See above.
    fn sigmoid_gate(
        cores: Cores<'_>,
        gate: FloatTensor<Self>,
        x: FloatTensor<Self>,
    ) -> Result<FloatTensor<Self>>;

    /// `a + b`, by the team.
    ///
    /// # Errors
    /// See above.
    fn add_by_team(
        cores: Cores<'_>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
    ) -> Result<FloatTensor<Self>>;

    /// `cap · tanh(x / cap)`.
    ///
    /// # Errors
    /// See above.
    fn soft_cap(cores: Cores<'_>, cap: f32, x: FloatTensor<Self>) -> Result<FloatTensor<Self>>;
}

#[cfg(test)]
mod tests;
