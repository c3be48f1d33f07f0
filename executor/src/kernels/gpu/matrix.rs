//! Weight matrices in device memory.

#[cfg(test)]
pub(super) mod testing;

use anyhow::{Context as _, Result, ensure};
use ir::tensor::{DType, Format};

use super::device::Span;
use super::panel::Panel;
use crate::kernels::cpu::pack::{PANEL, packed_bytes};

/// Bytes that one unit loads at once.
pub(super) const LOAD_BYTES: usize = ir::packing::LOAD_BYTES as usize;

/// How the elements of a matrix follow one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// Row after row, as checkpoints store them and vendor libraries take them: floats, in rows of whole
    /// 16 bytes.
    RowMajor,
    /// The panels that the CPU's kernels read, in any format: see [`crate::kernels::cpu::pack`].
    Panels,
}

/// A matrix of `rows` outputs and `columns` inputs.
#[derive(Clone, Debug)]
pub struct Matrix {
    format: Format,
    layout: Layout,
    rows: usize,
    columns: usize,
    data: Span,
}

/// The matrices of a layer's experts: panels, one expert after another.
#[derive(Clone, Debug)]
pub struct Stack {
    format: Format,
    experts: usize,
    rows: usize,
    columns: usize,
    data: Span,
}

impl Layout {
    /// Bytes of a matrix.
    ///
    /// # Errors
    /// When the layout cannot hold it.
    pub fn bytes(self, format: Format, rows: usize, columns: usize) -> Result<usize> {
        match self {
            Self::Panels => Ok(packed_bytes(format, rows, columns)),
            Self::RowMajor => {
                let row_bytes = columns * float_bytes(format)?;
                ensure!(
                    row_bytes.is_multiple_of(LOAD_BYTES),
                    "rows of {columns} columns in {format} are no multiple of {LOAD_BYTES} bytes: keep them in panels"
                );
                Ok(rows * row_bytes)
            }
        }
    }
}

impl Matrix {
    /// A matrix at the start of `data`.
    ///
    /// # Errors
    /// When the layout cannot hold it, or `data` is too short.
    pub fn new(
        format: Format,
        layout: Layout,
        rows: usize,
        columns: usize,
        data: Span,
    ) -> Result<Self> {
        let bytes = layout.bytes(format, rows, columns)?;
        ensure!(rows > 0 && columns > 0, "a matrix of {rows} by {columns} is empty");
        ensure!(
            bytes <= data.bytes(),
            "a matrix of {rows} by {columns} in {format} takes {bytes} bytes, and there are {}",
            data.bytes()
        );
        Ok(Self { format, layout, rows, columns, data })
    }

    /// Some of its rows, where it lies in panels; they begin with a pair of panels, as parts of memory must.
    ///
    /// # Errors
    /// When there are no such rows.
    pub fn rows_from(&self, first: usize, rows: usize) -> Result<Self> {
        ensure!(
            self.layout == Layout::Panels
                && first.is_multiple_of(2 * PANEL)
                && first + rows <= self.rows,
            "rows {first}..+{rows} of a matrix of {} are no pairs of panels",
            self.rows
        );
        let start = packed_bytes(self.format, first, self.columns);
        let data = self.data.part(start, self.data.bytes() - start);
        Self::new(self.format, self.layout, rows, self.columns, data)
    }

    /// How the elements are held.
    pub fn format(&self) -> Format {
        self.format
    }

    /// How they follow one another.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Outputs.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Its panels, where it lies in panels.
    pub(super) fn panel(&self) -> Panel {
        Panel { format: self.format, columns: self.columns }
    }

    /// Where it lies.
    pub fn data(&self) -> &Span {
        &self.data
    }
}

impl Stack {
    /// The matrices of `experts` experts at the start of `data`, each of `rows` outputs and `columns` inputs.
    ///
    /// # Errors
    /// When `data` is too short.
    pub fn new(
        format: Format,
        experts: usize,
        rows: usize,
        columns: usize,
        data: Span,
    ) -> Result<Self> {
        let bytes = experts * packed_bytes(format, rows, columns);
        ensure!(
            experts * rows * columns > 0,
            "a stack of {experts} matrices of {rows} by {columns} is empty"
        );
        ensure!(
            bytes <= data.bytes(),
            "{experts} matrices of {rows} by {columns} in {format} take {bytes} bytes, and there are {}",
            data.bytes()
        );
        Ok(Self { format, experts, rows, columns, data })
    }

    /// How the elements are held.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Matrices.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Outputs of each.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs of each.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Their panels.
    pub(super) fn panel(&self) -> Panel {
        Panel { format: self.format, columns: self.columns }
    }

    /// Where they lie.
    pub fn data(&self) -> &Span {
        &self.data
    }
}

/// Bytes of an element of a format without blocks.
pub(super) fn float_bytes(format: Format) -> Result<usize> {
    Ok(float_type(format)?.bytes() as usize)
}

/// The type of the elements of a format without blocks.
pub(super) fn float_type(format: Format) -> Result<DType> {
    format.float().with_context(|| {
        format!("blocks of {format} have no row-major layout: keep them in panels")
    })
}
