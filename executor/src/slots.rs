//! The tensors of one run: one slot for each buffer of its program.
//!
//! - A slot is filled by the step that writes its buffer, and emptied when every lane that writes or reads the buffer
//!   has come past its last step that does. That is no later than the step that the plan lets free it, and holds where
//!   the host does not see that step's waits: GPUs that sum among themselves wait for each other on the devices.
//! - The checker has proved that no two lanes use a slot at a time, so its lock is never waited for.

use std::mem;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use anyhow::{Context as _, Result, anyhow};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_flex::{Flex, FlexTensor};
use ir::id::{BufferId, StepId, Table};
use ir::plan::Program;

use crate::locked;

/// A tensor of a run.
#[derive(Clone, Debug)]
pub(crate) enum Value {
    /// `f32[rows, features]`.
    Float(Tensor<2>),
    /// `i32[rows, features]`: ids of chosen experts.
    Int(Tensor<2, Int>),
}

/// Which lanes use the buffers of a program, and how long.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Uses {
    /// For each step the buffers that no later step of its lane writes or reads.
    last: Table<StepId, Vec<BufferId>>,
    /// For each buffer the lanes that write or read it; the output is the caller's, too.
    lanes: Table<BufferId, usize>,
}

/// One slot for each buffer.
pub(crate) struct Slots {
    uses: Arc<Uses>,
    slots: Table<BufferId, Slot>,
}

struct Slot {
    value: Mutex<Option<Value>>,
    /// Those that have yet to come past their last use of it.
    lanes_left: AtomicUsize,
}

impl Uses {
    pub(crate) fn of(program: &Program) -> Self {
        let mut last: Table<StepId, Vec<BufferId>> =
            program.steps.ids().map(|_| Vec::new()).collect();
        let mut lanes: Table<BufferId, usize> = program.buffers.ids().map(|_| 0).collect();
        lanes[program.output] += 1;
        for lane in &program.lanes {
            let mut used: Table<BufferId, bool> = program.buffers.ids().map(|_| false).collect();
            for &id in lane.steps.iter().rev() {
                let step = &program.steps[id];
                for &buffer in step.reads.iter().chain(&step.writes) {
                    if !mem::replace(&mut used[buffer], true) {
                        last[id].push(buffer);
                        lanes[buffer] += 1;
                    }
                }
            }
        }
        Self { last, lanes }
    }
}

impl Slots {
    pub(crate) fn new(uses: &Arc<Uses>) -> Self {
        let slot =
            |&lanes: &usize| Slot { value: Mutex::default(), lanes_left: AtomicUsize::new(lanes) };
        Self { uses: Arc::clone(uses), slots: uses.lanes.rows().iter().map(slot).collect() }
    }

    /// The tensor in a buffer; no elements are copied.
    pub(crate) fn read(&self, buffer: BufferId) -> Result<Value> {
        self.slot(buffer).clone().with_context(|| format!("{buffer} is read while it is empty"))
    }

    pub(crate) fn write(&self, buffer: BufferId, value: Value) {
        *self.slot(buffer) = Some(value);
    }

    /// Ends what no lane uses any more once this step's lane has come past it, as it does once.
    pub(crate) fn pass(&self, step: StepId) {
        for &buffer in &self.uses.last[step] {
            if self.slots[buffer].lanes_left.fetch_sub(1, Ordering::AcqRel) == 1 {
                self.take(buffer);
            }
        }
    }

    /// Ends a buffer.
    pub(crate) fn take(&self, buffer: BufferId) -> Option<Value> {
        self.slot(buffer).take()
    }

    /// Ends all buffers.
    pub(crate) fn clear(&self) {
        for buffer in self.slots.ids() {
            self.take(buffer);
        }
    }

    fn slot(&self, buffer: BufferId) -> MutexGuard<'_, Option<Value>> {
        locked(&self.slots[buffer].value)
    }
}

impl Value {
    /// An activation in the host's memory.
    pub(crate) fn of_floats(values: Vec<f32>, rows: usize, columns: usize) -> Self {
        let data = TensorData::new(values, [rows, columns]);
        Value::Float(Tensor::from_data(data, &Device::flex()))
    }

    /// Ids in the host's memory.
    pub(crate) fn of_ints(values: Vec<i32>, rows: usize, columns: usize) -> Self {
        let data = TensorData::new(values, [rows, columns]);
        Value::Int(Tensor::from_data(data, (&Device::flex(), DType::I32)))
    }

    /// An activation of Burn's `flex` backend.
    pub(crate) fn of_flex(tensor: FlexTensor) -> Self {
        Value::Float(Tensor::from_primitive::<Flex>(tensor))
    }

    /// Ids of Burn's `flex` backend.
    pub(crate) fn of_flex_ints(tensor: FlexTensor) -> Self {
        Value::Int(Tensor::<2, Int>::from_primitive::<Flex>(tensor))
    }

    /// Its tensor, if it is one of Burn's `flex` backend.
    pub(crate) fn into_flex(self) -> Result<FlexTensor> {
        let tensor = match self {
            Value::Float(tensor) => tensor.try_into_primitive::<Flex>(),
            Value::Int(tensor) => tensor.try_into_primitive::<Flex>(),
        };
        tensor.map_err(|error| anyhow!("a tensor is not of flex: {error:?}"))
    }

    /// How many elements it has.
    pub(crate) fn elements(&self) -> usize {
        match self {
            Value::Float(tensor) => tensor.shape().num_elements(),
            Value::Int(tensor) => tensor.shape().num_elements(),
        }
    }

    /// Its elements of 32 bits, row after row.
    pub(crate) fn into_data(self) -> TensorData {
        match self {
            Value::Float(tensor) => tensor.into_data(),
            Value::Int(tensor) => tensor.into_data(),
        }
    }

    /// The activation in it.
    pub(crate) fn float(&self) -> Result<&Tensor<2>> {
        match self {
            Value::Float(tensor) => Ok(tensor),
            Value::Int(_) => anyhow::bail!("ids are read as an activation"),
        }
    }

    /// The ids in it.
    pub(crate) fn int(&self) -> Result<&Tensor<2, Int>> {
        match self {
            Value::Int(tensor) => Ok(tensor),
            Value::Float(_) => anyhow::bail!("an activation is read as ids"),
        }
    }
}

#[cfg(test)]
mod tests {
    use ::tests::machines::{gpu, linked, numa};
    use ::tests::toys::Toy;
    use compiler::options::parse_tensor_parallel;
    use ir::plan::Plan;

    use super::*;
    use crate::kernels::cpu::testing::Random;

    /// A plan whose layers two GPUs and two NUMA nodes share.
    fn shared_plan() -> Plan {
        let options = compiler::Options {
            request: parse_tensor_parallel("4").unwrap(),
            ..compiler::Options::default()
        };
        let devices = (0..2).map(|ordinal| gpu(ordinal, 1 << 30));
        let machine = linked(devices.chain((0..2).map(|node| numa(node, 1 << 30))).collect());
        let model = Toy::llama().model().unwrap();
        compiler::compile(&model, &machine, &options, &mut |_, _| ()).unwrap()
    }

    /// Lets lanes go through a run in one of the orders that are possible; `waits` says for what a step waits. Whether
    /// what a step frees is gone when its lane has come past it is checked where that is `exact`.
    fn go_through<'a>(
        plan: &Plan,
        program: &'a Program,
        random: &mut Random,
        is_exact: bool,
        waits: impl Fn(StepId) -> &'a [StepId],
    ) {
        let slots = Slots::new(&Arc::new(Uses::of(program)));
        let mut positions = vec![0; program.lanes.len()];
        let mut done: Table<StepId, bool> = program.steps.ids().map(|_| false).collect();
        let next = |positions: &[usize], lane: usize| {
            program.lanes[lane].steps.get(positions[lane]).copied()
        };
        loop {
            let ready: Vec<(usize, StepId)> = (0..positions.len())
                .filter_map(|lane| Some((lane, next(&positions, lane)?)))
                .filter(|&(_, id)| waits(id).iter().all(|&wait| done[wait]))
                .collect();
            if ready.is_empty() {
                break;
            }
            let (lane, id) = ready[random.next() as usize % ready.len()];
            let step = &program.steps[id];
            if !plan.is_peer_sum(program, step) {
                for &buffer in &step.reads {
                    slots.read(buffer).unwrap();
                }
            }
            for &buffer in &step.writes {
                slots.write(buffer, Value::of_floats(vec![0.0], 1, 1));
            }
            slots.pass(id);
            if is_exact {
                step.frees.iter().for_each(|&buffer| assert!(slots.read(buffer).is_err()));
            }
            positions[lane] += 1;
            done[id] = true;
        }
        assert!((0..positions.len()).all(|lane| next(&positions, lane).is_none()));
        let left: Vec<BufferId> =
            program.buffers.ids().filter(|&buffer| slots.read(buffer).is_ok()).collect();
        assert_eq!(left, [program.output]);
    }

    #[test]
    fn buffers_end_no_later_than_planned() {
        let plan = shared_plan();
        for program in &plan.programs {
            for seed in 1..20 {
                go_through(&plan, program, &mut Random(seed), true, |id| &program.steps[id].waits);
            }
        }
    }

    #[test]
    fn buffers_are_there_for_their_readers_where_gpus_wait_for_each_other_unseen() {
        let plan = shared_plan();
        let has_sums = |program: &Program| {
            program.steps.rows().iter().any(|step| plan.is_peer_sum(program, step))
        };
        assert!(plan.programs.iter().all(has_sums));
        for program in &plan.programs {
            for seed in 1..20 {
                go_through(&plan, program, &mut Random(seed), false, |id| {
                    let step = &program.steps[id];
                    if plan.is_peer_sum(program, step) { &[] } else { &step.waits }
                });
            }
        }
    }
}
