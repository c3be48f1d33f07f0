//! Rows picked by number: of a table for tokens and positions, of an activation for what is wanted.

#![expect(unsafe_code, reason = "a kernel is given an address of host memory")]

mod panels;

use anyhow::{Context as _, Result, ensure};
use cubecl::prelude::*;
use ir::tensor::{DType, Format};

use self::panels::{Table, gather_words};
use super::device::{Gpu, Span, element};
use super::matrix::{Layout, Matrix};
use super::overlap::follow;
use super::words::read_size;

/// Which rows of a table are picked, and what becomes of them.
pub struct Gather<'a> {
    /// Row numbers of 32 bits, one for each row made.
    pub rows: &'a Span,
    /// Added to each row number.
    pub offset: u32,
    /// Factor on every element.
    pub scale: f32,
    /// f32 of the shape of the result, added to it.
    pub base: Option<&'a Span>,
    /// Rows made.
    pub count: usize,
    /// Elements of a row.
    pub features: usize,
}

impl Gather<'_> {
    /// Fails where rows of so many elements are of another width than those made.
    fn check_width(&self, columns: usize) -> Result<()> {
        let features = self.features;
        ensure!(
            columns == features,
            "rows of {features} elements are picked from a table of {columns}"
        );
        Ok(())
    }
}

/// A table in memory of the host that a GPU reaches by address.
#[derive(Clone, Copy, Debug)]
pub struct Reached {
    address: u64,
    shape: Table,
    rows: usize,
}

impl Reached {
    /// A table of `rows` rows of `columns` elements, as a GPU's [`Matrix`] lies.
    ///
    /// # Safety
    /// The table lies at that address, as the GPU knows it, and stays there unchanged as long as launches with it may
    /// run; all rows that these look up are rows of it.
    pub unsafe fn new(
        address: u64,
        (format, layout): (Format, Layout),
        rows: usize,
        columns: usize,
    ) -> Self {
        Self { address, shape: Table { format, layout, columns, is_reached: true }, rows }
    }
}

/// Where the words of a table are.
#[derive(Clone, Copy)]
enum Words<'a> {
    Of(&'a Span),
    At(u64),
}

impl Gpu {
    /// `out[i] = table[rows[i] + offset] · scale (+ base[i])`, in f32.
    ///
    /// # Errors
    /// When its rows are of another width than those made.
    pub fn gather(&self, table: &Matrix, call: &Gather<'_>, out: &Span) -> Result<()> {
        call.check_width(table.columns())?;
        match table.layout() {
            Layout::RowMajor => {
                let dtype = table.format().float().context("blocks are held in panels")?;
                self.pick(table.data(), table.rows(), dtype, call, out);
            }
            Layout::Panels => {
                let shape = Table {
                    format: table.format(),
                    layout: Layout::Panels,
                    columns: table.columns(),
                    is_reached: false,
                };
                self.pick_words(shape, table.rows(), Words::Of(table.data()), call, out);
            }
        }
        Ok(())
    }

    /// The same of a table that the GPU reaches.
    ///
    /// # Errors
    /// As there.
    pub fn gather_reached(&self, table: &Reached, call: &Gather<'_>, out: &Span) -> Result<()> {
        let Reached { address, shape, rows } = *table;
        call.check_width(shape.columns)?;
        self.pick_words(shape, rows, Words::At(address), call, out);
        Ok(())
    }

    /// `out[i] = x[rows[i] + offset] · scale (+ base[i])` for f32 `x: [x_rows, features]`.
    pub fn select(&self, x: &Span, x_rows: usize, call: &Gather<'_>, out: &Span) {
        self.pick(x, x_rows, DType::F32, call, out);
    }

    fn pick_words(
        &self,
        shape: Table,
        table_rows: usize,
        words: Words<'_>,
        call: &Gather<'_>,
        out: &Span,
    ) {
        let all = call.count * shape.words();
        let (count, dim) = self.grid(all);
        let floats = |span: &Span| span.argument(call.count * call.features, size_of::<f32>());
        let (words, address) = match words {
            Words::Of(span) => {
                let all = span.bytes() / size_of::<u32>();
                (Some(span.argument(all, size_of::<u32>())), 0)
            }
            Words::At(address) => (None, address),
        };
        gather_words::launch(
            &self.client,
            count,
            dim,
            words.into(),
            address,
            call.rows.argument(call.count, size_of::<u32>()),
            call.base.map(floats).into(),
            floats(out),
            call.scale,
            call.offset,
            table_rows,
            all,
            shape,
        );
    }

    fn pick(&self, x: &Span, x_rows: usize, dtype: DType, call: &Gather<'_>, out: &Span) {
        let (size, features) = (read_size(call.features), call.features);
        let (vectors, all) = (features / size, call.count * features / size);
        let (count, dim) = self.grid(all);
        let floats = |span: &Span| span.argument(all, size * size_of::<f32>());
        gather::launch(
            &self.client,
            count,
            dim,
            size,
            x.argument(x_rows * vectors, size * dtype.bytes() as usize),
            call.rows.argument(call.count, size_of::<u32>()),
            call.base.map(floats).into(),
            floats(out),
            call.scale,
            call.offset,
            vectors as u32,
            all as u32,
            element(dtype),
        );
    }
}

#[cube(launch)]
fn gather<F: Float, N: Size>(
    table: &[Vector<F, N>],
    rows: &[u32],
    base: ComptimeOption<&[Vector<f32, N>]>,
    out: &mut [Vector<f32, N>],
    scale: f32,
    offset: u32,
    vectors: u32,
    all: u32,
    #[define(F)] _element: ElemType,
) {
    follow();
    let at = ABSOLUTE_POS as u32;
    if at < all {
        let row = rows[(at / vectors) as usize] + offset;
        let picked = Vector::<f32, N>::cast_from(table[(row * vectors + at % vectors) as usize]);
        let mut value = picked * Vector::<f32, N>::new(scale);
        #[comptime]
        match base {
            ComptimeOption::Some(base) => value += base[at as usize],
            ComptimeOption::None => {}
        }
        out[at as usize] = value;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use half::f16;
    use ir::tensor::Format;

    use super::super::matrix::testing::{Sample, panels, row_major};
    use super::super::testing::{cuda, gpu};
    use super::*;
    use crate::memory::Region;
    use crate::pinned::Pinned;

    /// Rows of a table in memory of the host are those of the table on the device, bit for bit.
    #[test]
    fn tables_are_reached() {
        let Some((gpu, context)) = cuda() else { return };
        let floats = [Format::F32, Format::F16, Format::Bf16];
        let mut samples: Vec<Sample> =
            floats.iter().map(|&format| row_major(&gpu, format, 41, 72, 3)).collect();
        for format in Format::ALL.into_iter().filter(|&format| format != Format::Bf12) {
            samples.extend(
                [(41, 72), (64, 128), (50, 37)]
                    .map(|(rows, columns)| panels(&gpu, format, rows, columns, 3)),
            );
        }
        for (Sample { matrix, .. }, with_base) in
            samples.iter().flat_map(|it| [(it, false), (it, true)])
        {
            let (format, layout, features) = (matrix.format(), matrix.layout(), matrix.columns());
            let count = 4 * features;
            let base = gpu.upload(&(0..count).map(|i| i as f32).collect::<Vec<f32>>());
            let call = Gather {
                rows: &gpu.upload(&[38_u32, 0, 31, 2]),
                offset: 2,
                scale: 1.5,
                base: with_base.then_some(&base),
                count: 4,
                features,
            };
            let bytes = gpu.read(matrix.data()).unwrap();
            let mut region = Region::new(bytes.len()).unwrap();
            region.as_mut_slice::<u8>().copy_from_slice(&bytes);
            let pinned = Pinned::alone(&context, &Arc::new(region)).unwrap();
            // SAFETY: the table lies there until the results have been read.
            let table = unsafe {
                Reached::new(pinned.address(), (format, layout), matrix.rows(), features)
            };
            let [own, reached] = [(); 2].map(|()| gpu.poisoned(count * 4));
            gpu.gather(matrix, &call, &own).unwrap();
            gpu.gather_reached(&table, &call, &reached).unwrap();
            let [own, reached] = [own, reached].map(|out| gpu.download::<u32>(&out, count));
            assert_eq!(own, reached, "{format}, {layout:?}, {features} features");
        }
    }

    #[test]
    fn rows_are_picked_scaled_and_added() {
        let Some(gpu) = gpu() else { return };
        for features in [8, 24, 64] {
            let table: Vec<f16> =
                (0..5 * features).map(|i| f16::from_f32((i as f32 * 0.37).sin())).collect();
            let base: Vec<f32> = (0..4 * features).map(|i| i as f32).collect();
            let rows = [2_u32, 0, 2, 1];
            let out = gpu.poisoned(4 * features * 4);
            let base_span = gpu.upload(&base);
            for with_base in [false, true] {
                let (format, layout) = (Format::F16, Layout::RowMajor);
                let data = gpu.upload(&table);
                let held = Matrix::new(format, layout, 5, features, data).unwrap();
                let wanted = gpu.upload(&rows);
                let call = Gather {
                    rows: &wanted,
                    offset: 2,
                    scale: 1.5,
                    base: with_base.then_some(&base_span),
                    count: 4,
                    features,
                };
                gpu.gather(&held, &call, &out).unwrap();
                let expected: Vec<f32> = (0..4 * features)
                    .map(|i| {
                        let row = rows[i / features] as usize + 2;
                        let picked = table[row * features + i % features].to_f32() * 1.5;
                        picked + if with_base { base[i] } else { 0.0 }
                    })
                    .collect();
                assert_eq!(gpu.download::<f32>(&out, 4 * features), expected, "{features}");
            }
        }
    }
}
