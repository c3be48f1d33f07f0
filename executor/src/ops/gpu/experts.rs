//! A mixture's experts.

use anyhow::{Context as _, Result};
use ir::id::WeightId;
use ir::op;

use super::scratch::Scratch;
use super::state::{Operands, State};
use crate::kernels::gpu::experts::Experts;
use crate::kernels::gpu::matrix::Stack;
use crate::ops::Scope;

impl State {
    /// The weighted sum of the chosen experts.
    pub(super) fn experts(
        &self,
        op: &op::Experts,
        scope: Scope<'_>,
        operands: &Operands,
    ) -> Result<()> {
        let [x, ids, weights, fetched @ ..] = operands.inputs.as_slice() else {
            anyhow::bail!("experts read {} tensors", operands.inputs.len());
        };
        let out = operands.outputs.first().context("experts write nothing")?;
        let mut fetched = fetched.iter();
        let mut stack = |id: WeightId| -> Result<Stack> {
            let weight = &scope.plan.weights[id];
            if weight.device == self.device {
                return self.weights.stack(id).cloned();
            }
            let buffer = fetched.next().with_context(|| format!("{id} was not fetched"))?;
            let [experts, rows, columns] = [0, 1, 2].map(|axis| weight.shape[axis] as usize);
            Stack::new(weight.format, experts, rows, columns, buffer.span.clone())
        };
        let (gate, up, down) = (stack(op.gate)?, stack(op.up)?, stack(op.down)?);
        let used = ids.columns;
        let inner = x.rows * used * gate.rows() * size_of::<f32>();
        let call = Experts {
            x: &x.span,
            tokens: x.rows,
            used,
            ids: &ids.span,
            weights: &weights.span,
            first_expert: 0,
            gate: &gate,
            up: &up,
            down: &down,
            activation: op.activation,
            workspace: &Scratch::first(&self.scratch.inner, inner)?,
            out: &out.span,
        };
        self.gpu.experts(&call)
    }
}
