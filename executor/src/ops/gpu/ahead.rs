//! What the launches of a step ask for ahead: the start of the matrices of the linear that comes next.

use anyhow::Result;
use ir::id::StepId;
use ir::op::{self, Op, Products, Then};
use ir::plan::{Action, Program};

use super::state::State;
use crate::kernels::gpu::ahead::{ATTENTION_AHEAD_BYTES, LINEAR_AHEAD_BYTES, Region};
use crate::kernels::gpu::linear::FLOAT_TOKENS;
use crate::kernels::gpu::matrix::Matrix;

impl State {
    /// What a step of `tokens` tokens asks for when `after` follows it in its lane.
    pub(super) fn ahead(
        &self,
        op: &Op,
        program: &Program,
        after: &[StepId],
        tokens: usize,
    ) -> Result<Vec<Region>> {
        let most = match op.products() {
            Some(Products::Attention(_)) => ATTENTION_AHEAD_BYTES,
            Some(Products::Linear(_)) => LINEAR_AHEAD_BYTES,
            Some(Products::Experts(_)) | None => return Ok(Vec::new()),
        };
        if tokens > FLOAT_TOKENS || !self.gpu.asks_ahead() {
            return Ok(Vec::new());
        }
        let Some(next) = next_linear(program, after) else { return Ok(Vec::new()) };
        // A matrix that is fetched is in the window only when its step begins.
        let matrices: Result<Vec<&Matrix>> =
            next.weights.iter().map(|&id| self.weights.matrix(id)).collect();
        let Ok(matrices) = matrices else { return Ok(Vec::new()) };
        let lengths: Vec<usize> = matrices.iter().map(|matrix| matrix.data().bytes()).collect();
        let starts = starts(&lengths, matches!(next.then, Then::Gate(_)), most);
        let regions = matrices.iter().zip(starts).filter(|(_, bytes)| *bytes > 0);
        regions.map(|(matrix, bytes)| Region::new(matrix.data(), bytes)).collect()
    }
}

/// The next linear, unless experts come first: which of their weights are read is known late, and they read much.
fn next_linear<'a>(program: &'a Program, after: &[StepId]) -> Option<&'a op::Linear> {
    let mut actions = after.iter().map(|&id| &program.steps[id].action);
    let next = actions.find_map(|action| match action {
        Action::Run(op @ (Op::Linear(_) | Op::Experts(_))) => Some(op),
        Action::Run(_) | Action::Move { .. } | Action::Fetch { .. } => None,
    });
    if let Some(Op::Linear(linear)) = next { Some(linear) } else { None }
}

/// How much of each matrix is asked for, `most` in all: gate and up are read side by side, other matrices one after
/// another.
fn starts(lengths: &[usize], is_gated: bool, most: usize) -> Vec<usize> {
    let each = if is_gated { most / lengths.len().max(1) } else { most };
    let mut left = most;
    let start = |&length: &usize| {
        let start = length.min(each).min(left);
        left -= start;
        start
    };
    lengths.iter().map(start).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_first_is_asked_for() {
        assert_eq!(starts(&[100, 100, 100], false, 150), [100, 50, 0]);
        assert_eq!(starts(&[100, 100], true, 150), [75, 75]);
        assert_eq!(starts(&[20, 100], true, 150), [20, 75]);
        assert!(starts(&[], true, 150).is_empty());
    }
}
