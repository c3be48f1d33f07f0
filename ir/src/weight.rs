//! Where a weight's elements lie in the files of a checkpoint.

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

use crate::id::FileId;
use crate::tensor::DType;

/// A strided view of one stored tensor: everything a reader needs besides the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// The file it is in.
    pub file: FileId,
    /// The stored element type.
    pub dtype: DType,
    /// Byte position in the file of the view's first element.
    pub offset: u64,
    /// One entry for each axis of the weight. An axis is usually one stride; it is two, outer first,
    /// where a checkpoint interleaves what the model keeps apart (GPT-NeoX's fused query, key and value).
    pub axes: Vec<Vec<Stride>>,
}

/// `size` steps of `stride` elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stride {
    /// Number of steps.
    pub size: u32,
    /// Elements from one to the next.
    pub stride: u64,
}

/// A part of one axis of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Slice {
    /// Which axis, outermost 0.
    pub axis: u8,
    /// First element along it.
    pub start: u32,
    /// Number of elements along it.
    pub size: u32,
}

impl Source {
    /// A whole stored tensor in row-major order.
    pub fn contiguous(file: FileId, dtype: DType, offset: u64, shape: &[u32]) -> Self {
        let mut stride = 1;
        let mut axes: Vec<Vec<Stride>> = shape
            .iter()
            .rev()
            .map(|&size| {
                let axis = vec![Stride { size, stride }];
                stride *= u64::from(size);
                axis
            })
            .collect();
        axes.reverse();
        Self { file, dtype, offset, axes }
    }

    /// Sizes of the axes, each at most `u32::MAX`.
    pub fn shape(&self) -> Vec<u32> {
        let size =
            |axis: &Vec<Stride>| axis.iter().map(|stride| stride.size).fold(1, u32::saturating_mul);
        self.axes.iter().map(size).collect()
    }

    /// The view with its axes exchanged; for matrices stored `[inputs, outputs]`.
    #[must_use]
    pub fn transposed(mut self) -> Self {
        self.axes.reverse();
        self
    }

    /// The view of a part of one axis.
    ///
    /// Fails when the part does not exist, or cuts an interleaved axis inside its inner run.
    pub fn sliced(&self, slice: Slice) -> Result<Self> {
        let mut view = self.clone();
        let axis = usize::from(slice.axis);
        ensure!(axis < view.axes.len(), "a weight of {} axes has no axis {axis}", view.axes.len());
        let strides = &mut view.axes[axis];
        let total: u32 = strides.iter().map(|stride| stride.size).product();
        ensure!(
            slice.size > 0 && slice.start.checked_add(slice.size).is_some_and(|end| end <= total),
            "elements {}..+{} of an axis of {total}",
            slice.start,
            slice.size
        );
        let inner: u32 = strides[1..].iter().map(|stride| stride.size).product();
        ensure!(
            slice.start.is_multiple_of(inner) && slice.size.is_multiple_of(inner),
            "elements {}..+{} cut an axis interleaved in runs of {inner}",
            slice.start,
            slice.size
        );
        view.offset += u64::from(slice.start / inner) * strides[0].stride * self.dtype.bytes();
        strides[0].size = slice.size / inner;
        Ok(view)
    }

    /// The view of one element of the outermost axis, without that axis.
    ///
    /// Fails as [`Source::sliced`].
    pub fn part(&self, index: u32) -> Result<Self> {
        let mut part = self.sliced(Slice { axis: 0, start: index, size: 1 })?;
        part.axes.remove(0);
        Ok(part)
    }

    /// Byte ranges of the file that hold the view's first and last element: `[start, end)`.
    pub fn span(&self) -> (u64, u64) {
        let reach: u64 = self
            .axes
            .iter()
            .flatten()
            .map(|stride| u64::from(stride.size.saturating_sub(1)).saturating_mul(stride.stride))
            .fold(0, u64::saturating_add);
        let bytes = reach.saturating_add(1).saturating_mul(self.dtype.bytes());
        (self.offset, self.offset.saturating_add(bytes))
    }
}
