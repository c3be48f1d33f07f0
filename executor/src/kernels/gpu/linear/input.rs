//! Rows of activations as a linear reads them: with a norm's factors on the way.

use cubecl::prelude::*;

use crate::kernels::gpu::words::{Four, read_four};

/// The input of a linear, `[rows, columns]`.
#[derive(CubeType, CubeLaunch)]
pub(in crate::kernels::gpu) struct Input<N: Size> {
    /// The activations.
    pub(in crate::kernels::gpu) x: Box<[Vector<f32, N>]>,
    /// The norm's factors, `[columns]`.
    pub(in crate::kernels::gpu) scale: ComptimeOption<Box<[Vector<f32, N>]>>,
    /// Added to each of them.
    pub(in crate::kernels::gpu) scale_offset: f32,
    /// Columns of a row.
    #[cube(comptime)]
    pub(in crate::kernels::gpu) columns: usize,
    /// Columns that are asked for, beyond a row's end too.
    #[cube(comptime)]
    pub(in crate::kernels::gpu) covered: usize,
    /// Whether there is a norm.
    #[cube(comptime)]
    pub(in crate::kernels::gpu) is_normed: bool,
    /// Whether there is `scale`: see [`crate::kernels::gpu::given`].
    #[expect(dead_code, reason = "kernels are told apart by it")]
    #[cube(comptime)]
    pub(in crate::kernels::gpu) given: u32,
}

#[cube]
impl<N: Size> Input<N> {
    /// The norm's factors for four columns; ones where it has none.
    pub(in crate::kernels::gpu) fn factors(&self, column: usize) -> Four {
        self.offset_factors(self.load_factors(column))
    }

    /// The norm's factors for four columns, before the offset is added.
    pub(in crate::kernels::gpu) fn load_factors(&self, column: usize) -> Four {
        #[comptime]
        match self.scale.clone() {
            ComptimeOption::Some(scale) => {
                let columns = comptime!(self.columns);
                let covered = comptime!(self.covered);
                read_four(&scale, 0usize, column, columns, covered)
            }
            ComptimeOption::None => Four::new(1.0),
        }
    }

    /// The norm's factors that were loaded as those.
    pub(in crate::kernels::gpu) fn offset_factors(&self, loaded: Four) -> Four {
        #[comptime]
        match self.scale.clone() {
            ComptimeOption::Some(_) => loaded + Four::new(self.scale_offset),
            ComptimeOption::None => loaded,
        }
    }

    /// Four columns of a row, as they are.
    pub(in crate::kernels::gpu) fn load_four(&self, row: usize, column: usize) -> Four {
        let columns = comptime!(self.columns);
        let covered = comptime!(self.covered);
        read_four(&self.x, row, column, columns, covered)
    }

    /// Four columns of a row, multiplied with the norm's factors; the sum of their squares is added to
    /// `squares[token]`.
    pub(in crate::kernels::gpu) fn four(
        &self,
        row: usize,
        column: usize,
        factors: Four,
        squares: &mut Array<f32>,
        #[comptime] token: usize,
    ) -> Four {
        let x = self.load_four(row, column);
        if comptime!(self.is_normed) {
            #[unroll]
            for i in 0..4usize {
                squares[token] += x.extract(i) * x.extract(i);
            }
            x * factors
        } else {
            x
        }
    }
}
