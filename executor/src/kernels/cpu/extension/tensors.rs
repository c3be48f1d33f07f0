//! Between tensors of the `flex` backend and what kernels take: slices in, buffers out.

use anyhow::{Context as _, Result, ensure};
use burn::tensor::{DType, Shape};
use burn_flex::{FlexTensor, Layout};

use crate::memory::Buffer;
use crate::team::Team;

/// A tensor whose elements a kernel reads: `[rows, columns]`, row after row.
pub(crate) struct Input {
    tensor: FlexTensor,
    rows: usize,
    columns: usize,
}

/// A tensor that a kernel writes: `[rows, columns]` of 32 bits, row after row. It holds whatever was there.
pub(crate) struct Output {
    buffer: Buffer,
    rows: usize,
    columns: usize,
}

impl Input {
    /// Shares the tensor's elements; copies them only where they do not lie row after row.
    pub(crate) fn of(tensor: FlexTensor) -> Self {
        let tensor = if tensor.is_contiguous() { tensor } else { tensor.to_contiguous() };
        let [rows, columns] = tensor.layout().shape().dims();
        Self { tensor, rows, columns }
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn columns(&self) -> usize {
        self.columns
    }

    pub(crate) fn floats(&self) -> Result<&[f32]> {
        self.tensor.as_slice().context("an activation is not f32")
    }

    pub(crate) fn ints(&self) -> Result<&[i32]> {
        self.tensor.as_slice().context("ids are not i32")
    }
}

impl Output {
    pub(crate) fn new(team: &Team, rows: usize, columns: usize) -> Result<Self> {
        ensure!(columns > 0, "a tensor has no columns");
        let buffer = team.arena().take(rows * columns * size_of::<f32>())?;
        Ok(Self { buffer, rows, columns })
    }

    pub(crate) fn floats(&mut self) -> &mut [f32] {
        self.buffer.as_mut_slice()
    }

    pub(crate) fn ints(&mut self) -> &mut [i32] {
        self.buffer.as_mut_slice()
    }

    pub(crate) fn into_floats(self) -> FlexTensor {
        self.into_tensor(DType::F32)
    }

    pub(crate) fn into_ints(self) -> FlexTensor {
        self.into_tensor(DType::I32)
    }

    fn into_tensor(self, dtype: DType) -> FlexTensor {
        let layout = Layout::contiguous(Shape::new([self.rows, self.columns]));
        FlexTensor::new(self.buffer.into_burn(), layout, dtype)
    }
}
