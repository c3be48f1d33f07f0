//! Tables whose rows are looked up and multiplied with nothing: row after row, so that a row is read in one piece.

#![expect(unsafe_code, reason = "members write disjoint rows of one table")]

use anyhow::{Context as _, bail};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use ir::tensor::Format;

use super::disjoint::DisjointMut;
use super::pack::{Fill, PANEL, PackedMatrix};
use crate::memory::Region;
use crate::team::{Chunks, Team};

/// Rows that a member fills at a time: the most that a [`Fill`] writes.
const GRAIN: usize = PANEL;

/// A table `[rows, columns]` of floats.
pub struct RowTable {
    format: Format,
    rows: usize,
    columns: usize,
    region: Region,
}

/// A matrix whose rows are looked up.
#[derive(Clone, Copy)]
pub enum Lookup<'a> {
    /// Nothing else is done with it.
    Rows(&'a RowTable),
    /// A head shares it, or it is held in blocks.
    Packed(&'a PackedMatrix),
}

impl RowTable {
    /// Fills a table; free members of the team fill, and so touch first, some rows each.
    ///
    /// # Errors
    /// When there is no memory, or the format is one of blocks.
    pub fn new(
        team: &Team,
        format: Format,
        rows: usize,
        columns: usize,
        fill: &Fill<'_>,
    ) -> anyhow::Result<Self> {
        let element_bytes = match format {
            Format::F32 => 4,
            Format::F16 | Format::Bf16 => 2,
            Format::Bf12 | Format::Q8 | Format::Q4 => {
                bail!("a table of {format} is no table of floats")
            }
        };
        let row_bytes = columns * element_bytes;
        let mut region = team
            .regions()
            .take(rows * row_bytes)
            .with_context(|| format!("a table of {rows} by {columns} in {format}"))?;
        let table = DisjointMut::new(region.as_mut_slice::<u8>());
        let chunks = Chunks::new(rows, GRAIN);
        team.work_off(|_| {
            let mut wide = vec![0.0; GRAIN * columns];
            while let Some(range) = chunks.claim() {
                let wide = &mut wide[..range.len() * columns];
                // SAFETY: every row is claimed once.
                let bytes = unsafe { table.part(range.start * row_bytes..range.end * row_bytes) };
                fill(range, wide);
                match format {
                    Format::F16 => {
                        bytemuck::cast_slice_mut::<u8, f16>(bytes).convert_from_f32_slice(wide)
                    }
                    Format::Bf16 => {
                        bytemuck::cast_slice_mut::<u8, bf16>(bytes).convert_from_f32_slice(wide)
                    }
                    Format::F32 | Format::Bf12 | Format::Q8 | Format::Q4 => {
                        bytes.copy_from_slice(bytemuck::cast_slice(wide));
                    }
                }
            }
        });
        Ok(Self { format, rows, columns, region })
    }

    /// Rows of the table.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Elements of a row.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Writes row `row` to `out`, one element for each column.
    ///
    /// # Panics
    /// When there is no such row, or `out` has another length.
    pub fn read_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows && out.len() == self.columns, "row {row} of {}", self.rows);
        let range = row * self.columns..(row + 1) * self.columns;
        match self.format {
            Format::F16 => self.region.as_slice::<f16>()[range].convert_to_f32_slice(out),
            Format::Bf16 => self.region.as_slice::<bf16>()[range].convert_to_f32_slice(out),
            Format::F32 | Format::Bf12 | Format::Q8 | Format::Q4 => {
                out.copy_from_slice(&self.region.as_slice::<f32>()[range]);
            }
        }
    }
}

impl Lookup<'_> {
    /// Rows of the table.
    pub fn rows(self) -> usize {
        match self {
            Lookup::Rows(table) => table.rows(),
            Lookup::Packed(matrix) => matrix.rows(),
        }
    }

    /// Elements of a row.
    pub fn columns(self) -> usize {
        match self {
            Lookup::Rows(table) => table.columns(),
            Lookup::Packed(matrix) => matrix.columns(),
        }
    }

    /// Writes a row to `out`, one element for each column.
    ///
    /// # Panics
    /// When there is no such row, or `out` has another length.
    pub fn read_row(self, row: usize, out: &mut [f32]) {
        match self {
            Lookup::Rows(table) => table.read_row(row, out),
            Lookup::Packed(matrix) => matrix.read_row(row, out),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::super::testing::with_team;
    use super::*;

    #[test]
    fn rows_of_all_floats_come_back() {
        // More rows than a grain, and a rest; multiples of 1/4 below 64 are the same in all formats.
        let (rows, columns) = (2 * GRAIN + 5, 23);
        let value = |row: usize, column: usize| ((row * 37 + column * 11) % 256) as f32 / 4.0;
        with_team(2, |team| {
            for format in [Format::F32, Format::F16, Format::Bf16] {
                let fill = |range: Range<usize>, values: &mut [f32]| {
                    let places = range.flat_map(|row| (0..columns).map(move |at| (row, at)));
                    values.iter_mut().zip(places).for_each(|(to, (row, at))| *to = value(row, at));
                };
                let table = RowTable::new(team, format, rows, columns, &fill).unwrap();
                for row in 0..rows {
                    let mut out = vec![f32::NAN; columns];
                    table.read_row(row, &mut out);
                    assert!(out.iter().enumerate().all(|(at, &x)| x == value(row, at)), "{format}");
                }
            }
            assert!(RowTable::new(team, Format::Q8, 1, 32, &|_, _| ()).is_err());
        });
    }
}
