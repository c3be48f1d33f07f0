//! What a GPU makes for one linear alone, such as the inner values of an MLP or a decode's attention: where that linear
//! takes some tokens with matrix instructions, it is written as they want it, and nothing is cast in between.

use std::collections::BTreeMap;

use ir::id::{BufferId, DeviceId, StepId, Table};
use ir::op::{Linear, Products};
use ir::plan::{Action, Program, Queue};
use ir::tensor::DType;

use super::state::{Operand, State};
use crate::kernels::gpu::matrix::Matrix;
use crate::kernels::gpu::warpgroup::RightOperands;
use crate::ops::Scope;

/// The step that writes a buffer, alone, and the linear that alone reads it, as its input and without a norm.
#[derive(Clone, Copy)]
struct Between {
    writer: StepId,
    reader: StepId,
}

/// The buffers of a program that one device makes for one of its linears.
pub(super) struct InnerValues(BTreeMap<BufferId, Between>);

impl InnerValues {
    /// Those of a device; `exported` says which buffers others read.
    pub(super) fn new(
        program: &Program,
        device: DeviceId,
        exported: &Table<BufferId, bool>,
    ) -> Self {
        let lane = program.lane(device, Queue::Compute);
        let steps = lane.map_or(&[][..], |lane| &lane.steps);
        let inner = steps.iter().filter_map(|&writer| {
            let &[buffer] = &program.steps[writer].writes[..] else { return None };
            let makes_operands = match products(program, writer)? {
                Products::Linear(linear) => !linear.residual,
                Products::Attention(_) => true,
                Products::Experts(_) => false,
            };
            let mut others = program.steps.iter().filter(|&(id, step)| {
                id != writer && (step.reads.contains(&buffer) || step.writes.contains(&buffer))
            });
            let (reader, step) = others.next().filter(|_| makes_operands && !exported[buffer])?;
            let times = step.reads.iter().filter(|&&read| read == buffer).count();
            let is_input = times == 1 && step.reads.first() == Some(&buffer);
            let is_alone = others.next().is_none() && !step.writes.contains(&buffer);
            let is_here = steps.contains(&reader) && linear(program, reader)?.norm.is_none();
            let is_between = is_input && is_alone && is_here;
            is_between.then_some((buffer, Between { writer, reader }))
        });
        Self(inner.collect())
    }
}

fn products(program: &Program, step: StepId) -> Option<Products<'_>> {
    match &program.steps[step].action {
        Action::Run(op) => op.products(),
        Action::Move { .. } | Action::Fetch { .. } => None,
    }
}

fn linear(program: &Program, step: StepId) -> Option<&Linear> {
    match products(program, step)? {
        Products::Linear(linear) => Some(linear),
        Products::Attention(_) | Products::Experts(_) => None,
    }
}

impl State {
    /// How a buffer of a run lies that is made for one linear, if not row after row.
    pub(super) fn inner_order(
        &self,
        schedule: &Program,
        (program, buffer): (usize, BufferId),
        operand: &Operand,
        scope: Scope<'_>,
    ) -> Option<RightOperands> {
        let Between { writer, reader } = *self.inner[program].0.get(&buffer)?;
        let rows = operand.rows;
        match products(schedule, writer)? {
            Products::Attention(attention) => {
                let cache = self.caches.cache(attention.cache).ok()?;
                let is_right =
                    scope.batch.is_decode() && self.gpu.decode_appends(attention, &cache);
                is_right.then_some(())?;
            }
            Products::Linear(linear) => {
                let given = *schedule.steps[writer].reads.first()?;
                let dtype = schedule.buffers[given].ty.dtype;
                self.taken_order(linear, rows, dtype, scope)?;
            }
            Products::Experts(_) => return None,
        }
        let order = self.taken_order(linear(schedule, reader)?, rows, operand.dtype, scope)?;
        let bytes = order.count() * operand.columns * DType::Bf16.bytes() as usize;
        (bytes <= operand.span.bytes()).then_some(order)
    }

    /// How `rows` rows, in buffers of type `dtype`, lie for all matrices of a linear, if not row after row.
    fn taken_order(
        &self,
        linear: &Linear,
        rows: usize,
        dtype: DType,
        scope: Scope<'_>,
    ) -> Option<RightOperands> {
        // Matrices that are fetched are not held: they take what is cast for them.
        let matrices = linear.weights.iter().map(|&id| self.weights.matrix(id));
        let matrices = matrices.collect::<Result<Vec<&Matrix>, _>>().ok()?;
        let own = self.own_element(rows, dtype, linear, matrices.iter().copied(), scope);
        let mut orders = matrices.iter().map(|matrix| self.gpu.right_operands(matrix, rows));
        let first = orders.next()?.filter(|_| own == Some(DType::Bf16))?;
        orders.all(|order| order == Some(first)).then_some(first)
    }
}
