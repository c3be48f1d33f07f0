//! Which bytes of a file the rows of a matrix are.

use std::iter;
use std::ops::Range;

use anyhow::{Result, bail, ensure};
use ir::weight::{Source, Stride};

/// A source of one or two axes, seen as rows of columns.
pub(super) struct View<'a> {
    pub(super) rows: usize,
    pub(super) columns: usize,
    row_axis: &'a [Stride],
    column_axis: &'a [Stride],
    /// Columns that lie side by side.
    run: usize,
}

impl<'a> View<'a> {
    pub(super) fn of(source: &'a Source) -> Result<Self> {
        let (row_axis, column_axis): (&[Stride], &[Stride]) = match source.axes.as_slice() {
            [columns] => (&[], columns),
            [rows, columns] => (rows, columns),
            axes => bail!("a view of {} axes is read as a matrix", axes.len()),
        };
        let size = |axis: &[Stride]| axis.iter().map(|stride| stride.size as usize).product();
        let run = match column_axis {
            [.., Stride { size, stride: 1 }] => *size as usize,
            _ => 1,
        };
        let (rows, columns) = (size(row_axis), size(column_axis));
        ensure!(rows > 0 && columns > 0, "a view of nothing is read as a matrix");
        Ok(Self { rows, columns, row_axis, column_axis, run })
    }

    /// Whether neighbouring columns lie apart.
    pub(super) fn is_transposed(&self) -> bool {
        self.run == 1 && self.columns > 1
    }

    /// The elements of rows, row-major: those that lie side by side, `most` at a time.
    fn runs(&self, rows: Range<usize>, most: usize) -> impl Iterator<Item = Range<usize>> + Clone {
        let run_of = move |start: usize| {
            let end = start + self.run;
            (start..end).step_by(most).map(move |start| start..end.min(start.saturating_add(most)))
        };
        rows.flat_map(move |row| {
            let start = offset(self.row_axis, row);
            let columns = (0..self.columns).step_by(self.run);
            columns.flat_map(move |column| run_of(start + offset(self.column_axis, column)))
        })
    }

    /// Runs that one read brings, and what it reads: up to `most` elements, with up to `skipped` between two runs.
    pub(super) fn stretches(
        &self,
        rows: Range<usize>,
        most: usize,
        skipped: usize,
    ) -> impl Iterator<Item = (Range<usize>, impl Iterator<Item = Range<usize>>)> {
        let mut runs = self.runs(rows, most).peekable();
        iter::from_fn(move || {
            let from_here = runs.clone();
            let mut stretch = runs.next()?;
            let mut count = 1;
            while let Some(run) = runs.next_if(|run| {
                let is_near =
                    (stretch.end..=stretch.end.saturating_add(skipped)).contains(&run.start);
                is_near && run.end - stretch.start <= most
            }) {
                stretch.end = run.end;
                count += 1;
            }
            Some((stretch, from_here.take(count)))
        })
    }
}

/// Elements from the first of an axis to number `index`; inner strides run fastest.
fn offset(axis: &[Stride], mut index: usize) -> usize {
    let mut offset = 0;
    for stride in axis.iter().rev() {
        offset += index % stride.size as usize * stride.stride as usize;
        index /= stride.size as usize;
    }
    offset
}
