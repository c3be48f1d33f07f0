//! The weights of one GPU: floats row after row, as vendor libraries take them; blocks in the CPU's panels.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use anyhow::{Context as _, Result, bail};
use ir::id::{Table, WeightId};
use ir::packing::gpu_has_panels;
use ir::plan::Weight;
use ir::tensor::Format;
use ir::workspace::product_format;

use super::memory::Memory;
use super::upload::Upload;
use crate::checkpoint::{self, Checkpoint, matrices};
use crate::kernels::cpu::pack::{PANEL, pack_rows, packed_bytes};
use crate::kernels::gpu::device::{Gpu, Span};
use crate::kernels::gpu::matrix::{Layout, Matrix, Stack};
use crate::ops::own::weight_dims;

/// What a GPU holds of the plan's weights.
pub(super) struct Weights {
    held: Table<WeightId, Held>,
    /// Those that are held unpacked as well, for products of many rows.
    unpacked: BTreeMap<WeightId, Matrix>,
    /// Those that are yet to be, and in which format.
    to_unpack: Vec<(WeightId, Format)>,
    upload: Upload,
    has_library: Option<bool>,
}

enum Held {
    Elsewhere,
    Vector(Span),
    Matrix(Matrix),
    Stack(Stack),
}

impl Weights {
    /// Products of many rows are made with or without the vendor's library; `None` where the plan expects otherwise, and
    /// counts other bytes for unpacked matrices than they would take.
    pub(super) fn new(gpu: &Gpu, has_library: Option<bool>) -> Result<Self> {
        Ok(Self {
            has_library,
            held: Table::default(),
            unpacked: BTreeMap::new(),
            to_unpack: Vec::new(),
            upload: Upload::new(gpu)?,
        })
    }

    /// Adds the plan's next weight, which is on another device.
    pub(super) fn skip(&mut self) {
        self.held.push(Held::Elsewhere);
    }

    /// Adds the plan's next weight, in memory that `take` gives.
    pub(super) fn hold(
        &mut self,
        gpu: &Gpu,
        mut take: impl FnMut(usize) -> Result<Span>,
        weight: &Weight,
        checkpoint: &Checkpoint,
    ) -> Result<()> {
        let sources = matrices(weight)?;
        let (rows, columns) = weight_dims(weight);
        let first = sources.first().context("it has no source")?;
        if weight.shape.len() < 2 {
            let mut vector = vec![0.0_f32; columns];
            checkpoint.matrix(first, 1, columns)?.read(0..1, &mut vector)?;
            let span = take(columns * size_of::<f32>())?;
            gpu.write(&span, bytemuck::cast_slice(&vector))?;
            self.held.push(Held::Vector(span));
            return Ok(());
        }
        let format = weight.format;
        let is_stack = weight.shape.len() > 2;
        let layout = layout_of(weight);
        let bytes = layout.bytes(format, rows, columns)?;
        let span = take(sources.len() * bytes)?;
        let failed = OnceLock::new();
        let read = |source| {
            let matrix = checkpoint.matrix(source, rows, columns)?;
            Ok(Read::new(matrix, format, columns, &failed))
        };
        let matrices = sources.iter().map(read).collect::<Result<Vec<Read<'_>>>>()?;
        match (layout, matrices.as_slice()) {
            (Layout::RowMajor, [matrix]) => {
                self.upload.rows(gpu, &span, rows, bytes / rows, matrix)?;
            }
            (Layout::RowMajor | Layout::Panels, matrices) => {
                self.upload.panels(gpu, &span, rows, matrices)?;
            }
        }
        drop(matrices);
        failed.into_inner().map_or(Ok(()), Err)?;
        let id = self.held.push(if is_stack {
            Held::Stack(Stack::new(format, sources.len(), rows, columns, span)?)
        } else {
            Held::Matrix(Matrix::new(format, layout, rows, columns, span)?)
        });
        if let Some(has_library) = self.has_library.filter(|_| weight.also_unpacked) {
            self.to_unpack.push((id, product_format(format, has_library)));
        }
        Ok(())
    }

    /// Waits until every weight is there, and gives back what loading needed.
    pub(super) fn finish_loading(&mut self, gpu: &Gpu, memory: &mut Memory) -> Result<()> {
        self.upload.finish()?;
        // Behind all others, so that what decode reads lies together.
        for (id, format) in std::mem::take(&mut self.to_unpack) {
            let matrix = self.matrix(id)?;
            let bytes = Layout::RowMajor.bytes(format, matrix.rows(), matrix.columns())?;
            let unpacked = gpu.unpack(matrix, format, &memory.take(bytes)?)?;
            self.unpacked.insert(id, unpacked);
        }
        gpu.sync()
    }

    /// A scale or a bias, in f32.
    pub(super) fn vector(&self, weight: WeightId) -> Result<&Span> {
        match self.held.get(weight) {
            Some(Held::Vector(vector)) => Ok(vector),
            Some(Held::Matrix(_) | Held::Stack(_)) => {
                bail!("{weight} is a matrix and is read as a vector")
            }
            Some(Held::Elsewhere) | None => bail!("{weight} is not on this device"),
        }
    }

    /// A scale or a bias where there is one.
    pub(super) fn optional(&self, weight: Option<WeightId>) -> Result<Option<&Span>> {
        weight.map(|id| self.vector(id)).transpose()
    }

    /// A matrix `[outputs, inputs]`.
    pub(super) fn matrix(&self, weight: WeightId) -> Result<&Matrix> {
        match self.held.get(weight) {
            Some(Held::Matrix(matrix)) => Ok(matrix),
            Some(Held::Vector(_)) => bail!("{weight} is a vector and is read as a matrix"),
            Some(Held::Stack(_)) => bail!("{weight} is a stack and is read as one matrix"),
            Some(Held::Elsewhere) | None => bail!("{weight} is not on this device"),
        }
    }

    /// A matrix row after row, where it is held so beside how it is packed.
    pub(super) fn unpacked(&self, weight: WeightId) -> Option<&Matrix> {
        self.unpacked.get(&weight)
    }

    /// The matrices of a layer's experts.
    pub(super) fn stack(&self, weight: WeightId) -> Result<&Stack> {
        match self.held.get(weight) {
            Some(Held::Stack(stack)) => Ok(stack),
            Some(Held::Vector(_) | Held::Matrix(_)) => bail!("{weight} is not a stack"),
            Some(Held::Elsewhere) | None => bail!("{weight} is not on this device"),
        }
    }
}

/// A matrix of the checkpoint and what becomes of it.
pub(super) struct Read<'a> {
    matrix: checkpoint::Matrix<'a>,
    format: Format,
    columns: usize,
    /// Why something could not be read; the first is told.
    failed: &'a OnceLock<anyhow::Error>,
}

/// How a GPU holds a weight that is no vector.
pub(super) fn layout_of(weight: &Weight) -> Layout {
    match gpu_has_panels(weight.format, &weight.shape) {
        false => Layout::RowMajor,
        true => Layout::Panels,
    }
}

impl<'a> Read<'a> {
    /// What becomes of `matrix`; why something of it cannot be read is told in `failed`.
    pub(super) fn new(
        matrix: checkpoint::Matrix<'a>,
        format: Format,
        columns: usize,
        failed: &'a OnceLock<anyhow::Error>,
    ) -> Self {
        Self { matrix, format, columns, failed }
    }

    /// Writes rows in the matrix's float format, one after another.
    pub(super) fn rows(&self, rows: std::ops::Range<usize>, bytes: &mut [u8]) {
        let is_copied =
            self.format.float().map(|dtype| self.matrix.copy(dtype, rows.clone(), bytes));
        match is_copied.transpose() {
            Ok(None | Some(false)) => (),
            Ok(Some(true)) => return,
            Err(error) => return drop(self.failed.set(error)),
        }
        let values = self.values(rows);
        match self.format {
            Format::F32 => bytes.copy_from_slice(bytemuck::cast_slice(&values)),
            Format::F16 => narrow(&values, bytes, |x| half::f16::from_f32(x).to_le_bytes()),
            Format::Bf16 => narrow(&values, bytes, |x| half::bf16::from_f32(x).to_le_bytes()),
            Format::Bf12 | Format::Q8 | Format::Q4 => {
                unreachable!("{} lies in panels", self.format)
            }
        }
    }

    /// Writes whole panels, the first of which begins with row `rows.start`.
    pub(super) fn panels(&self, rows: std::ops::Range<usize>, bytes: &mut [u8]) {
        let values = self.values(rows);
        pack_rows(self.format, self.columns, &values, bytes);
    }

    /// Bytes of a panel.
    pub(super) fn panel_bytes(&self) -> usize {
        packed_bytes(self.format, PANEL, self.columns)
    }

    fn values(&self, rows: std::ops::Range<usize>) -> Vec<f32> {
        let mut values = vec![0.0; rows.len() * self.columns];
        if let Err(error) = self.matrix.read(rows, &mut values) {
            drop(self.failed.set(error));
        }
        values
    }
}

fn narrow(values: &[f32], bytes: &mut [u8], convert: impl Fn(f32) -> [u8; 2]) {
    let (places, _) = bytes.as_chunks_mut::<2>();
    places.iter_mut().zip(values).for_each(|(place, &value)| *place = convert(value));
}
