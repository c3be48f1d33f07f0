//! A mixture's experts.

use anyhow::{Context as _, Result};
use ir::op;

use super::scratch::Scratch;
use super::state::{Operands, State};
use crate::kernels::gpu::experts::{Experts, workspace_bytes};

impl State {
    /// The weighted sum of the chosen experts.
    pub(super) fn experts(&self, op: &op::Experts, operands: &Operands) -> Result<()> {
        let [x, ids, weights] = operands.inputs.as_slice() else {
            anyhow::bail!("experts read {} tensors", operands.inputs.len());
        };
        let out = operands.outputs.first().context("experts write nothing")?;
        let [gate, up, down] = [op.gate, op.up, op.down].map(|stack| self.weights.stack(stack));
        let (gate, up, down) = (gate?, up?, down?);
        let used = ids.columns;
        let inner = workspace_bytes(x.rows, used, gate.experts(), gate.columns(), gate.rows());
        let call = Experts {
            x: &x.span,
            tokens: x.rows,
            used,
            ids: &ids.span,
            weights: &weights.span,
            first_expert: 0,
            gate,
            up,
            down,
            activation: op.activation,
            workspace: &Scratch::first(&self.scratch.inner, inner)?,
            out: &out.span,
        };
        self.gpu.experts(&call)
    }
}
