//! Outputs of full tiles, four neighbouring rows at a time: a fourth of the loads from other cubes, and of the launches'
//! last instructions.

use cubecl::prelude::*;
use ir::op::Then;

use super::total::{Output, Shape, Totals, TotalsExpand};
use crate::kernels::gpu::activation::activate;
use crate::kernels::gpu::order::{Order, element_of};
use crate::kernels::gpu::warpgroup::load_four_of_cube;
use crate::kernels::gpu::words::Four;

#[cube]
impl Totals {
    /// Writes an output's rows from `first_row` on, for all tokens that it has, as rows `first_token` and those after
    /// it.
    pub(super) fn finish_fours<F: Float>(
        &self,
        output: &mut Output<F>,
        first_row: usize,
        first_token: usize,
        #[comptime] then: Then,
        #[comptime] shape: Shape,
    ) {
        let fours = comptime!(shape.slots * shape.rows / 4);
        let count = comptime!(fours * shape.tokens);
        let at_once = comptime!(shape.at_once);
        let mut first = UNIT_POS as usize;
        if comptime!(shape.cubes > 1) {
            first += (CUBE_POS_Z * CUBE_DIM) as usize;
        }
        let units = CUBE_DIM as usize * shape.cubes;
        let rows = output.rows;
        let last = output.out.len() / rows - 1 - first_token;
        for start in range_stepped(first, count, units * at_once) {
            let mut values = Array::<Four>::new(at_once);
            #[unroll]
            for i in 0..at_once {
                // Beyond the last is that one once more: nobody waits for it.
                let index = (start + comptime!(i) * units).min(count - 1);
                let token = (index / fours).min(last);
                let row = (first_row + index % fours * 4).min(rows - 4);
                let at = (first_token + token) * rows + row;
                values[i] = self.four(&*output, token, row, first_row, at, then, shape);
            }
            #[unroll]
            for i in 0..at_once {
                let index = start + comptime!(i) * units;
                let (token, row) = (index / fours, first_row + index % fours * 4);
                if index < count && row < rows && token <= last {
                    put_four(output, values[i], first_token + token, row, shape);
                }
            }
        }
    }

    /// Outputs of four rows from `row` on, which are number `at` and those after it.
    #[expect(clippy::too_many_arguments, reason = "a kernel's parts have no state of their own")]
    fn four<F: Float>(
        &self,
        output: &Output<F>,
        token: usize,
        row: usize,
        first_row: usize,
        at: usize,
        #[comptime] then: Then,
        #[comptime] shape: Shape,
    ) -> Four {
        let mut values = self.sum_of_four(0usize, token, row - first_row, shape);
        values = add_bias(values, &output.biases[0], row);
        match then {
            Then::Nothing => {}
            Then::Activate(activation) =>
            {
                #[unroll]
                for i in 0..4usize {
                    values.insert(i, activate(values.extract(i), activation));
                }
            }
            Then::Gate(activation) => {
                let up = self.sum_of_four(1usize, token, row - first_row, shape);
                let up = add_bias(up, &output.biases[1], row);
                #[unroll]
                for i in 0..4usize {
                    values.insert(i, activate(values.extract(i), activation) * up.extract(i));
                }
            }
        }
        #[comptime]
        match output.residual.clone() {
            ComptimeOption::Some(residual) => {
                let residual = residual.as_vectorized().with_vector_size::<Const<4>>();
                values += residual[at / 4];
            }
            ComptimeOption::None => {}
        }
        values
    }

    /// The sums of four rows of a tile.
    fn sum_of_four(
        &self,
        #[comptime] matrix: usize,
        token: usize,
        row: usize,
        #[comptime] shape: Shape,
    ) -> Four {
        let at = (matrix * shape.tokens + token) * comptime!(shape.stride()) + row;
        if comptime!(shape.cubes == 1) {
            let sums = self.sums.as_vectorized().with_vector_size::<Const<4>>();
            Four::reinterpret(sums[at / 4])
        } else {
            let mut sum = Four::zeroed();
            // Loads of other cubes take long: all at once.
            #[unroll]
            for rank in 0..comptime!(shape.cubes as u32) {
                sum += Four::reinterpret(load_four_of_cube(&self.sums[at..at + 4], rank.runtime()));
            }
            sum
        }
    }
}

/// Puts four neighbouring features of a token.
#[cube]
fn put_four<F: Float>(
    output: &mut Output<F>,
    values: Four,
    token: usize,
    row: usize,
    #[comptime] shape: Shape,
) {
    let order = comptime!(shape.order);
    if comptime!(matches!(order, Order::Operands { is_spread: true, .. })) {
        // Only pairs are neighbours.
        let values = values * Four::new(comptime!(order.factor()));
        let out = output.out.as_vectorized_mut().with_vector_size_mut::<Const<2>>();
        #[unroll]
        for pair in 0..2usize {
            let mut two = Vector::<f32, Const<2>>::empty();
            two.insert(0usize, values.extract(comptime!(2 * pair)));
            two.insert(1usize, values.extract(comptime!(2 * pair + 1)));
            let at = element_of(token, row + comptime!(2 * pair), output.rows, order);
            out[at / 2] = Vector::<F, Const<2>>::cast_from(two);
        }
    } else {
        let at = element_of(token, row, output.rows, order);
        let out = output.out.as_vectorized_mut().with_vector_size_mut::<Const<4>>();
        out[at / 4] = Vector::<F, Const<4>>::cast_from(values);
    }
}

#[cube]
fn add_bias(values: Four, bias: &ComptimeOption<Box<[f32]>>, row: usize) -> Four {
    #[comptime]
    match bias.clone() {
        ComptimeOption::Some(bias) => {
            let bias = bias.as_vectorized().with_vector_size::<Const<4>>();
            values + bias[row / 4]
        }
        ComptimeOption::None => values,
    }
}
