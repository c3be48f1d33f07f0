//! Between tensors of Burn's GPU backend and what kernels take: pieces of device memory.

use anyhow::{Context as _, Result, ensure};
use burn::tensor::{DType, Shape};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use ir::tensor::DType as Stored;

use crate::kernels::gpu::device::{Gpu, Span};

/// A tensor whose elements a kernel reads: all but the last axis together are rows.
pub(super) struct Operand {
    pub(super) span: Span,
    pub(super) rows: usize,
    pub(super) columns: usize,
}

impl Gpu {
    /// The GPU that holds a tensor.
    pub(super) fn of(tensor: &CubeTensor) -> Self {
        Self { device: tensor.device.clone(), client: tensor.client.clone() }
    }

    /// A new tensor of these rows, and where it lies. It holds whatever was there.
    pub(super) fn fresh(&self, rows: usize, columns: usize, dtype: DType) -> (CubeTensor, Span) {
        let shape = Shape::new([rows, columns]);
        let handle = self.client.empty(rows * columns * dtype.size());
        let span = Span::of(handle.clone());
        let (client, device) = (self.client.clone(), self.device.clone());
        (CubeTensor::new_contiguous(client, device, shape, handle, dtype), span)
    }

    /// Memory for as long as the span lives and launches use it. It holds whatever was there.
    pub(super) fn scratch(&self, bytes: usize) -> Span {
        Span::of(self.client.empty(bytes.max(1)))
    }
}

impl Operand {
    fn new(tensor: CubeTensor, dtype: DType) -> Result<Self> {
        ensure!(
            tensor.dtype == dtype,
            "a tensor has elements of {:?}, not {dtype:?}",
            tensor.dtype
        );
        let tensor = into_contiguous(tensor);
        let columns = tensor.meta.shape().last().copied().context("a tensor has no axis")?;
        let all = tensor.meta.shape().num_elements();
        ensure!(all > 0, "a tensor is empty");
        Ok(Self { span: Span::of(tensor.handle), rows: all / columns, columns })
    }

    /// An activation, or a vector.
    ///
    /// # Errors
    /// When it is empty or not f32.
    pub(super) fn floats(tensor: CubeTensor) -> Result<Self> {
        Self::new(tensor, DType::F32)
    }

    /// Numbers.
    ///
    /// # Errors
    /// When there are none, or they are not i32.
    pub(super) fn ints(tensor: CubeTensor) -> Result<Self> {
        Self::new(tensor, DType::I32)
    }

    /// Elements of all rows.
    pub(super) fn count(&self) -> usize {
        self.rows * self.columns
    }

    /// Its memory, if it has `count` elements.
    ///
    /// # Errors
    /// When it has not; `what` says what it is.
    pub(super) fn sized(&self, count: usize, what: &str) -> Result<&Span> {
        ensure!(self.count() == count, "{what}: {} elements instead of {count}", self.count());
        Ok(&self.span)
    }
}

/// What floats of Burn's are for kernels.
///
/// # Errors
/// For others than those of 16 and 32 bits.
pub(super) fn stored(dtype: DType) -> Result<Stored> {
    let known = [(DType::F32, Stored::F32), (DType::F16, Stored::F16), (DType::BF16, Stored::Bf16)];
    let found = known.into_iter().find(|(burn, _)| *burn == dtype);
    found.map(|(_, stored)| stored).with_context(|| format!("{dtype:?} is none of f32, f16, bf16"))
}
