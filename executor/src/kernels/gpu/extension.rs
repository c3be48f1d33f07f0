//! The kernels as an extension of Burn's GPU backend: what language models compute beside what Burn does, for any program
//! that uses Burn.
//!
//! - Operations take tensors of the backend and return new ones, in the order of the device's launches: activations
//!   `f32[rows, features]`, ids and other numbers `i32`.
//! - Lanes queue the same kernels on places that a plan gives, so that their launches can be captured, and many tokens
//!   by the vendor's library.
//! - The plain form of each, in Burn's own operations, is in the tests.
//!
//! All of them fail when sizes do not fit together or a tensor has elements of another type.

#![expect(unsafe_code, reason = "who attends answers for the numbers that say where in a cache")]

mod cube;
mod linear;
mod tensors;

#[cfg(test)]
mod tests;

use anyhow::Result;
use burn::backend::Backend;
use burn::backend::tensor::{FloatTensor, IntTensor};
use ir::op::{self, Activation, NormKind, Pairing, Then};

use super::matrix::{Matrix, Stack};

/// A normalisation of each row: see [`ir::op::Norm`].
#[derive(Clone, Debug)]
pub struct Norm<B: Backend> {
    /// What is divided out.
    pub kind: NormKind,
    /// Factors, `f32[features]`.
    pub scale: Option<FloatTensor<B>>,
    /// Terms, `f32[features]`.
    pub bias: Option<FloatTensor<B>>,
    /// Added to every factor.
    pub scale_offset: f32,
    /// Added to the variance.
    pub epsilon: f32,
}

/// A linear: output `i` is `then(norm(x) · matrices[i]ᵀ + biases[i]) + residual`.
#[derive(Clone, Debug)]
pub struct Linear<'a, B: Backend> {
    /// `f32[tokens, columns]`.
    pub x: FloatTensor<B>,
    /// Applied to each row of `x` first.
    pub norm: Option<Norm<B>>,
    /// Of one number of columns; a gate and what it multiplies are alike in all.
    pub matrices: &'a [&'a Matrix],
    /// One for each matrix, `f32[rows]`.
    pub biases: &'a [Option<FloatTensor<B>>],
    /// Applied to the products.
    pub then: Then,
    /// Added to the only output, `f32[tokens, rows]`.
    pub residual: Option<FloatTensor<B>>,
}

/// Attention over a paged cache, to which keys and values are appended first.
#[derive(Clone, Debug)]
pub struct Attention<'a, B: Backend> {
    /// Heads, scale, window, cap and norms of heads; what it names of a plan is not looked at.
    pub form: &'a op::Attention,
    /// `f32[tokens, heads · head_dim]`.
    pub queries: FloatTensor<B>,
    /// `f32[tokens, kv_heads · head_dim]`.
    pub keys: FloatTensor<B>,
    /// `f32[tokens, kv_heads · head_dim]`.
    pub values: FloatTensor<B>,
    /// Weights of the norm of each query head and each key head: factors and terms, `f32[head_dim]`.
    pub head_norms: [[Option<FloatTensor<B>>; 2]; 2],
    /// Rotation of queries and keys.
    pub rotation: Option<Rotation<B>>,
    /// Keys and values cached, `[blocks, kv_heads, block_tokens, head_dim]` of f32, f16 or bf16, `block_tokens` a
    /// multiple of 16. They are written where they lie, also for those who share them.
    pub cache: [FloatTensor<B>; 2],
    /// Which tokens these are.
    pub tokens: Tokens<B>,
}

/// What a run is about: see [`super::attention::Tokens`].
#[derive(Clone, Debug)]
pub struct Tokens<B: Backend> {
    /// `i32[tokens]`: the sequence of each row; −1 for a row that pads the run.
    pub sequence: IntTensor<B>,
    /// `i32[tokens]`: where the row stands in its sequence.
    pub position: IntTensor<B>,
    /// `i32[sequences, 3]`: first row, rows, and tokens cached before.
    pub parts: IntTensor<B>,
    /// `i32[sequences, most blocks]`: the cache blocks of each sequence, in order; those in use exist.
    pub blocks: IntTensor<B>,
    /// Tokens of the longest sequence, new ones included.
    pub longest: usize,
    /// Whether each sequence has one row.
    pub is_decode: bool,
}

/// A rotary embedding: see [`super::attention::append::Rotation`].
#[derive(Clone, Debug)]
pub struct Rotation<B: Backend> {
    /// Which elements turn together.
    pub pairing: Pairing,
    /// `f32[rows, dims]`: of each row `dims / 2` cosines, then as many sines, for as many leading elements of a head.
    pub table: FloatTensor<B>,
    /// `i32[tokens]`: the row of each token.
    pub rows: IntTensor<B>,
}

/// A mixture's experts: see [`super::experts::Experts`].
#[derive(Clone, Debug)]
pub struct Experts<'a, B: Backend> {
    /// `f32[tokens, features]`.
    pub x: FloatTensor<B>,
    /// `i32[tokens, used]`.
    pub ids: IntTensor<B>,
    /// `f32[tokens, used]`.
    pub weights: FloatTensor<B>,
    /// The id of the first expert of each stack.
    pub first_expert: i32,
    /// Matrices of gate, up and down.
    pub stacks: [&'a Stack; 3],
    /// Of the gate.
    pub activation: Activation,
}

/// Operations of language models on tensors of a backend.
pub trait Kernels: Backend {
    /// A matrix of `weight: [rows, columns]`, which is read where it lies: in f32, f16 or bf16, rows of whole 16 bytes.
    /// Other formats are packed by [`crate::kernels::cpu::pack`].
    ///
    /// # Errors
    /// See above.
    fn matrix(weight: FloatTensor<Self>) -> Result<Matrix>;

    /// Rows of a table, times `scale`: `[rows, columns]`. Rows must exist.
    ///
    /// # Errors
    /// See above.
    fn look_up(table: &Matrix, rows: IntTensor<Self>, scale: f32) -> Result<FloatTensor<Self>>;

    /// `x` plus as many rows of a table, each `offset` further than said. Rows must exist.
    ///
    /// # Errors
    /// See above.
    fn add_rows(
        x: FloatTensor<Self>,
        table: &Matrix,
        rows: IntTensor<Self>,
        offset: u32,
    ) -> Result<FloatTensor<Self>>;

    /// Those rows of `x`, which must exist.
    ///
    /// # Errors
    /// See above.
    fn select_rows(x: FloatTensor<Self>, rows: IntTensor<Self>) -> Result<FloatTensor<Self>>;

    /// `norm(x)`, or `norm(x) + residual`.
    ///
    /// # Errors
    /// See above.
    fn norm(
        x: FloatTensor<Self>,
        norm: &Norm<Self>,
        residual: Option<FloatTensor<Self>>,
    ) -> Result<FloatTensor<Self>>;

    /// A linear with what surrounds it; one output for each matrix, or one of a gate. Up to 8 tokens are multiplied in
    /// f32 in one launch; more in bf16, some at a time, where there are matrix instructions for that, else in
    /// f32.
    ///
    /// # Errors
    /// See above.
    fn linear(linear: Linear<'_, Self>) -> Result<Vec<FloatTensor<Self>>>;

    /// What queries see, `[tokens, heads · head_dim]`; rows that pad the run are zeros.
    ///
    /// # Errors
    /// See above.
    ///
    /// # Panics
    /// When heads have no key heads, or 32 bits do not reach the end of the cache.
    ///
    /// # Safety
    /// The numbers of [`Tokens`] and [`Rotation`] lie on the device and are not looked at: sequences, the blocks of
    /// every position, and rows of the table must exist, and no block is written by two sequences.
    unsafe fn attention(attention: Attention<'_, Self>) -> Result<FloatTensor<Self>>;

    /// The best `used` experts by `logits: [tokens, experts]`, and their softmax weights; with `renormalise` divided by
    /// their sum.
    ///
    /// # Errors
    /// See above; also when more are used than there are, or none.
    fn route(
        logits: FloatTensor<Self>,
        used: usize,
        renormalise: bool,
    ) -> Result<(IntTensor<Self>, FloatTensor<Self>)>;

    /// The weighted sum of the chosen experts, `[tokens, features]`.
    ///
    /// # Errors
    /// See above.
    fn experts(experts: Experts<'_, Self>) -> Result<FloatTensor<Self>>;

    /// `activation(x)`, or `activation(x) · up`.
    ///
    /// # Errors
    /// See above.
    fn activate(
        activation: Activation,
        x: FloatTensor<Self>,
        up: Option<FloatTensor<Self>>,
    ) -> Result<FloatTensor<Self>>;

    /// `sigmoid(gate) · x` for `gate: [tokens, 1]`.
    ///
    /// # Errors
    /// See above.
    fn sigmoid_gate(gate: FloatTensor<Self>, x: FloatTensor<Self>) -> Result<FloatTensor<Self>>;

    /// `cap · tanh(x / cap)`.
    ///
    /// # Errors
    /// See above.
    fn soft_cap(cap: f32, x: FloatTensor<Self>) -> Result<FloatTensor<Self>>;

    /// The 128 most likely tokens of each row of logits, `[rows, vocabulary]`, at one over a temperature for each row:
    /// `[rows, 260]`, of each row the logits in falling order, the tokens' numbers, and what all tokens weigh (see
    /// [`super::shortlist`]). The most likely one is the greedy choice.
    ///
    /// # Errors
    /// See above; also for rows of no more than 1,024.
    fn shortlist(
        logits: FloatTensor<Self>,
        inverse_temperatures: FloatTensor<Self>,
    ) -> Result<FloatTensor<Self>>;
}
