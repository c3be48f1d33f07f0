//! Rows picked by number: of a table for tokens and positions, of an activation for what is wanted.

mod panels;

use anyhow::{Context as _, Result, ensure};
use cubecl::prelude::*;
use ir::tensor::DType;

use self::panels::{Table, gather_panels};
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

impl Gpu {
    /// `out[i] = table[rows[i] + offset] · scale (+ base[i])`, in f32.
    ///
    /// # Errors
    /// When its rows are of another width than those made.
    pub fn gather(&self, table: &Matrix, call: &Gather<'_>, out: &Span) -> Result<()> {
        ensure!(
            table.columns() == call.features,
            "rows of {} elements are picked from a table of {}",
            call.features,
            table.columns()
        );
        match table.layout() {
            Layout::RowMajor => {
                let dtype = table.format().float().context("blocks are held in panels")?;
                self.pick(table.data(), table.rows(), dtype, call, out);
            }
            Layout::Panels => self.pick_from_panels(table, call, out),
        }
        Ok(())
    }

    /// `out[i] = x[rows[i] + offset] · scale (+ base[i])` for f32 `x: [x_rows, features]`.
    pub fn select(&self, x: &Span, x_rows: usize, call: &Gather<'_>, out: &Span) {
        self.pick(x, x_rows, DType::F32, call, out);
    }

    fn pick_from_panels(&self, table: &Matrix, call: &Gather<'_>, out: &Span) {
        let shape = Table { format: table.format(), columns: table.columns() };
        let all = call.count * shape.words();
        let (count, dim) = self.grid(all);
        let floats = |span: &Span| span.argument(call.count * call.features, size_of::<f32>());
        gather_panels::launch(
            &self.client,
            count,
            dim,
            table.data().argument(table.data().bytes() / size_of::<u32>(), size_of::<u32>()),
            call.rows.argument(call.count, size_of::<u32>()),
            call.base.map(floats).into(),
            floats(out),
            call.scale,
            call.offset,
            table.rows(),
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
    use half::f16;
    use ir::tensor::Format;

    use super::super::testing::gpu;
    use super::*;

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
