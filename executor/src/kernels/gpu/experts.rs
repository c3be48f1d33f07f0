//! Experts of a mixture: each token through the gated MLPs that its router chose.
//!
//! A *slot* is one token at one of its experts. For few tokens each slot reads its expert's matrices by itself; for
//! many, slots are grouped by expert first.

mod few;
mod grouped;

#[cfg(test)]
mod tests;

use anyhow::{Result, ensure};
use ir::op::Activation;
use ir::workspace::experts as workspace;

use super::device::{Gpu, Span};
use super::linear::FLOAT_TOKENS;
use super::matrix::Stack;

/// The inputs and outputs of a layer of experts.
#[derive(Clone, Copy, Debug)]
pub struct Experts<'a> {
    /// `f32[tokens, features]`.
    pub x: &'a Span,
    /// Rows of `x`.
    pub tokens: usize,
    /// The router's choice, `i32[tokens, used]`. Experts that are not held here count for nothing.
    pub ids: &'a Span,
    /// What each chosen expert's output is multiplied with, `f32[tokens, used]`.
    pub weights: &'a Span,
    /// Experts chosen for a token.
    pub used: usize,
    /// The id of the first expert of each stack.
    pub first_expert: i32,
    /// Matrices of `[intermediate, features]`.
    pub gate: &'a Stack,
    /// Of the same shape and format.
    pub up: &'a Stack,
    /// Matrices of `[features, intermediate]`.
    pub down: &'a Stack,
    /// Of the gate.
    pub activation: Activation,
    /// At least the bytes of [`Experts::sizes`].
    pub workspace: &'a Span,
    /// `f32[tokens, features]`.
    pub out: &'a Span,
}

impl Experts<'_> {
    /// What the workspace depends on.
    pub fn sizes(&self) -> workspace::Experts {
        workspace::Experts {
            tokens: self.tokens as u32,
            used: self.used as u32,
            experts: self.gate.experts() as u32,
            features: self.gate.columns() as u32,
            intermediate: self.gate.rows() as u32,
        }
    }
}

impl Gpu {
    /// Queues a layer of experts.
    ///
    /// # Errors
    /// When its parts do not fit together.
    pub fn experts(&self, experts: &Experts<'_>) -> Result<()> {
        let Experts { gate, up, down, tokens, used, .. } = *experts;
        let (features, intermediate) = (gate.columns(), gate.rows());
        ensure!(tokens > 0 && used > 0, "{tokens} tokens use {used} experts");
        ensure!(
            (up.format(), up.rows(), up.columns()) == (gate.format(), intermediate, features)
                && (down.rows(), down.columns()) == (features, intermediate)
                && [up, down].iter().all(|stack| stack.experts() == gate.experts()),
            "the experts' stacks differ in shape or format"
        );
        if tokens <= FLOAT_TOKENS {
            self.experts_of_few(experts);
            Ok(())
        } else {
            self.experts_of_many(experts)
        }
    }
}
