//! What each operation of a plan does on a device: with kernels of ours, or in plain Burn form.

pub(crate) mod plain;

use anyhow::Result;
use ir::op::Op;
use ir::plan::Plan;

use crate::batch::Batch;
use crate::bind::Device;
use crate::slots::Value;

/// What an operation may read besides its inputs and its device's weights.
#[derive(Clone, Copy)]
pub(crate) struct Scope<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) batch: &'a Batch,
}

/// Computes one operation; its outputs in order.
pub(crate) fn run(
    op: &Op,
    device: &mut Device,
    scope: Scope<'_>,
    inputs: &[Value],
) -> Result<Vec<Value>> {
    match device.pool.clone() {
        Some(pool) => pool.install(|| plain::run(op, device, scope, inputs)),
        None => plain::run(op, device, scope, inputs),
    }
}
