//! The tensors of one run: one slot for each buffer of its program.
//!
//! - A slot is filled by the step that writes its buffer and emptied by the step that frees it.
//! - The checker has proved that no two lanes use a slot at a time, so its lock is never waited for.

use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context as _, Result};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use ir::id::{BufferId, Id as _};

/// A tensor of a run.
#[derive(Clone, Debug)]
pub(crate) enum Value {
    /// `f32[rows, features]`.
    Float(Tensor<2>),
    /// `i32[rows, features]`: ids of chosen experts.
    Int(Tensor<2, Int>),
}

/// One slot for each buffer.
pub(crate) struct Slots {
    slots: Vec<Mutex<Option<Value>>>,
}

impl Slots {
    pub(crate) fn new(buffers: usize) -> Self {
        Self { slots: (0..buffers).map(|_| Mutex::new(None)).collect() }
    }

    /// The tensor in a buffer; no elements are copied.
    pub(crate) fn read(&self, buffer: BufferId) -> Result<Value> {
        self.slot(buffer).clone().with_context(|| format!("{buffer} is read while it is empty"))
    }

    pub(crate) fn write(&self, buffer: BufferId, value: Value) {
        *self.slot(buffer) = Some(value);
    }

    /// Ends a buffer.
    pub(crate) fn take(&self, buffer: BufferId) -> Option<Value> {
        self.slot(buffer).take()
    }

    /// Ends all buffers.
    pub(crate) fn clear(&self) {
        for slot in &self.slots {
            slot.lock().unwrap_or_else(PoisonError::into_inner).take();
        }
    }

    fn slot(&self, buffer: BufferId) -> MutexGuard<'_, Option<Value>> {
        self.slots[buffer.index()].lock().unwrap_or_else(PoisonError::into_inner)
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
