//! A mixture's experts.

use anyhow::{Context as _, Result};
use ir::id::WeightId;
use ir::op::{self, Op};

use super::scratch::Scratch;
use super::state::{Operands, State};
use crate::kernels::gpu::experts::Experts;
use crate::kernels::gpu::matrix::Stack;
use crate::ops::Scope;

impl State {
    /// The weighted sum of the chosen experts.
    pub(super) fn experts(
        &self,
        op: &Op,
        experts: &op::Experts,
        scope: Scope<'_>,
        operands: &Operands,
    ) -> Result<()> {
        let [x, ids, weights, ..] = operands.inputs.as_slice() else {
            anyhow::bail!("experts read {} tensors", operands.inputs.len());
        };
        let out = operands.outputs.first().context("experts write nothing")?;
        let fetched = self.fetched(op, scope, operands)?;
        let stack = |id: WeightId| match fetched.get(&id) {
            None => self.weights.stack(id).cloned(),
            Some(span) => {
                let weight = &scope.plan.weights[id];
                let [experts, rows, columns] = [0, 1, 2].map(|axis| weight.shape[axis] as usize);
                Stack::new(weight.format, experts, rows, columns, span.clone())
            }
        };
        let (gate, up, down) = (stack(experts.gate)?, stack(experts.up)?, stack(experts.down)?);
        let used = ids.columns;
        let mut call = Experts {
            x: &x.span,
            tokens: x.rows,
            used,
            ids: &ids.span,
            weights: &weights.span,
            first_expert: experts.first().cast_signed(),
            gate: &gate,
            up: &up,
            down: &down,
            activation: experts.activation,
            workspace: &self.scratch.inner,
            out: &out.span,
        };
        let workspace = Scratch::first(&self.scratch.inner, call.sizes().bytes() as usize)?;
        call.workspace = &workspace;
        self.gpu.experts(&call)
    }
}
