//! What each operation of a plan does on a device: with kernels of ours, or in plain Burn form.

pub(crate) mod gpu;
pub(crate) mod own;
pub(crate) mod plain;

#[cfg(test)]
pub(crate) mod tests;

use anyhow::Result;
use ir::op::Op;
use ir::plan::Plan;

use crate::batch::Batch;
use crate::bind::{Cpu, CpuForm};
use crate::slots::Value;

/// What an operation may read besides its inputs and its device's weights.
#[derive(Clone, Copy)]
pub(crate) struct Scope<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) batch: &'a Batch,
    /// Number of the run, by which what holds for all its steps is kept.
    pub(crate) run: u32,
}

/// Computes one operation on a NUMA node; its outputs in order.
pub(crate) fn run(
    op: &Op,
    cpu: &mut Cpu,
    scope: Scope<'_>,
    inputs: Vec<Value>,
) -> Result<Vec<Value>> {
    match &mut cpu.form {
        CpuForm::Own(state) => own::run(op, &cpu.team, state, scope, inputs),
        CpuForm::Plain(state) => {
            let pool = state.pool.clone();
            pool.install(|| plain::run(op, state, scope, &inputs))
        }
    }
}
