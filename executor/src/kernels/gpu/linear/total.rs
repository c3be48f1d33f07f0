//! From the sums of a cube's units to outputs: through shared memory, then what follows the products.

use cubecl::prelude::*;
use ir::op::Then;

use crate::kernels::gpu::activation::activate;
use crate::kernels::gpu::order::Order;
use crate::kernels::gpu::peers::small::Meeting;
use crate::kernels::gpu::warpgroup::load_of_cube;

/// One output of a linear.
#[derive(CubeType, CubeLaunch)]
pub(in crate::kernels::gpu) struct Output<F: Float> {
    /// `[tokens, rows]`, or as [`Order`] says; its length is that of the whole span, which may have room for more tokens.
    pub(in crate::kernels::gpu) out: Box<[F]>,
    /// One for each matrix, `[rows]`.
    pub(in crate::kernels::gpu) biases: Sequence<ComptimeOption<Box<[f32]>>>,
    /// Added to the output, `[tokens, rows]`, with as much room.
    pub(in crate::kernels::gpu) residual: ComptimeOption<Box<[f32]>>,
    /// Where the output, in f32, is summed up with those of other GPUs, which have as many rows.
    pub(in crate::kernels::gpu) meeting: ComptimeOption<Meeting>,
    /// Features of a token.
    pub(in crate::kernels::gpu) rows: usize,
    /// Which biases, `residual` and `meeting` there are: see [`crate::kernels::gpu::given`].
    #[expect(dead_code, reason = "kernels are told apart by it")]
    #[cube(comptime)]
    pub(in crate::kernels::gpu) given: u32,
}

#[cube]
impl<F: Float> Output<F> {
    /// The number of the run whose sum this is; 0 where it is none.
    fn turn(&self) -> u32 {
        #[comptime]
        match self.meeting.clone() {
            ComptimeOption::Some(meeting) => meeting.turn(),
            ComptimeOption::None => 0u32.runtime(),
        }
    }
}

/// Which output a unit makes.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Place {
    token: usize,
    /// Of the output.
    row: usize,
    /// The same of the tile.
    of_tile: usize,
    /// Among all tokens' outputs.
    at: usize,
}

/// `index % rows`: CubeCL 0.11.3 takes a remainder by 1 for the number itself where it learns of the 1 late.
#[cube]
fn remainder(index: usize, rows: usize) -> usize {
    index - index / rows * rows
}

/// A cube's sums in shared memory. Groups of units hold sums of the same rows, which are to be added.
#[derive(CubeType)]
pub(in crate::kernels::gpu) struct Totals {
    /// `[matrix][token][group][row]`: the bits of floats, so that their place can be that of what was copied before.
    pub(in crate::kernels::gpu) sums: Shared<[u32]>,
    /// `[token][group][copy]`; every copy of a group is the same.
    pub(in crate::kernels::gpu) squares: Shared<[f32]>,
    /// The number of the run, where the output is summed up with others: read early, it is there at the end.
    turn: u32,
}

/// What is known of a cube's sums when a kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::kernels::gpu) struct Shape {
    /// Rows of activations.
    pub(in crate::kernels::gpu) tokens: usize,
    /// Matrices of one output: 2 with a gate.
    pub(in crate::kernels::gpu) matrices: usize,
    /// Rows of a unit's sums.
    pub(in crate::kernels::gpu) rows: usize,
    /// Units that hold different rows, side by side, in a full tile.
    pub(in crate::kernels::gpu) slots: usize,
    /// Groups of a full tile.
    pub(in crate::kernels::gpu) groups: usize,
    /// Cubes of a cluster, along the third axis: their groups hold sums of the same rows, too, in full tiles, and each
    /// cube writes some of the outputs.
    pub(in crate::kernels::gpu) cubes: usize,
    /// Outputs, or fours of them, that a unit finishes at a time, so that it waits for what they are made of once: more
    /// than one in full tiles only.
    pub(in crate::kernels::gpu) at_once: usize,
    /// Whether a unit finishes four neighbouring rows together: in full tiles of one group, whose outputs have a multiple
    /// of four rows and are summed up with no others. See [`super::fours`].
    pub(in crate::kernels::gpu) in_fours: bool,
    /// How outputs that are finished in fours lie.
    pub(in crate::kernels::gpu) order: Order,
    /// Numbers between the sums of tokens that belong to none, so that units that put them meet other banks.
    pub(in crate::kernels::gpu) padding: usize,
    /// Whether the inputs are divided by their root mean square.
    pub(in crate::kernels::gpu) is_normed: bool,
}

impl Shape {
    /// One token, matrix, row and group; cubes by themselves, whose units finish one output at a time.
    pub(in crate::kernels::gpu) const ONE: Self = Self {
        tokens: 1,
        matrices: 1,
        rows: 1,
        slots: 1,
        groups: 1,
        cubes: 1,
        at_once: 1,
        in_fours: false,
        order: Order::Rows,
        padding: 0,
        is_normed: false,
    };

    /// The sums of one unit.
    pub(in crate::kernels::gpu) fn values(self) -> usize {
        self.matrices * self.tokens * self.rows
    }

    /// Sums of a token.
    fn sum_cells(self) -> usize {
        self.groups * self.slots * self.rows
    }

    /// Numbers from the sums of a token to those of the next.
    pub(super) fn stride(self) -> usize {
        self.sum_cells() + self.padding
    }

    /// Sums of a cube.
    pub(in crate::kernels::gpu) fn cells(self) -> usize {
        self.matrices * self.tokens * self.stride()
    }

    fn square_cells(self) -> usize {
        self.groups * self.slots
    }
}

#[cube]
impl Totals {
    /// Room for a cube's sums of an output, or of several that are summed up with no others.
    pub(in crate::kernels::gpu) fn new<F: Float>(
        output: &Output<F>,
        #[comptime] shape: Shape,
    ) -> Totals {
        Totals::at(Shared::new_slice(comptime!(shape.cells())), output, shape)
    }

    /// The same, in that memory.
    pub(in crate::kernels::gpu) fn at<F: Float>(
        sums: Shared<[u32]>,
        output: &Output<F>,
        #[comptime] shape: Shape,
    ) -> Totals {
        let square_cells =
            comptime!(if shape.is_normed { shape.tokens * shape.square_cells() } else { 1 });
        Totals { sums, squares: Shared::new_slice(square_cells), turn: output.turn() }
    }

    /// Puts a unit's sums of one matrix, `[token][row]` from `sums[first]` on, as one of the `slots` units of its
    /// group.
    pub(in crate::kernels::gpu) fn put(
        &mut self,
        group: usize,
        slot: usize,
        #[comptime] matrix: usize,
        sums: &Array<f32>,
        #[comptime] first: usize,
        #[comptime] shape: Shape,
    ) {
        let cell = group * shape.slots + slot;
        #[unroll]
        for token in 0..shape.tokens {
            #[unroll]
            for row in 0..shape.rows {
                let value = comptime!(matrix * shape.tokens + token);
                let at = comptime!(value * shape.stride()) + cell * shape.rows + row;
                self.sums[at] = u32::reinterpret(sums[comptime!(first + token * shape.rows + row)]);
            }
        }
    }

    /// Puts a unit's sums of squares, as one of the `slots` units of its group.
    pub(in crate::kernels::gpu) fn put_squares(
        &mut self,
        group: usize,
        slot: usize,
        squares: &Array<f32>,
        #[comptime] shape: Shape,
    ) {
        if comptime!(shape.is_normed) {
            #[unroll]
            for token in 0..shape.tokens {
                self.put_square(group, slot, token, squares[token], shape);
            }
        }
    }

    /// Puts a unit's sums of one matrix for one token, as one of the `slots` units of its group.
    pub(in crate::kernels::gpu) fn put_token(
        &mut self,
        group: usize,
        slot: usize,
        matrix: usize,
        token: usize,
        sums: &Array<f32>,
        #[comptime] shape: Shape,
    ) {
        let first = (matrix * shape.tokens + token) * comptime!(shape.stride());
        #[unroll]
        for row in 0..shape.rows {
            let at = first + (group * shape.slots + slot) * shape.rows + row;
            self.sums[at] = u32::reinterpret(sums[row]);
        }
    }

    /// Puts the sum of a row of the only group, for one token.
    pub(in crate::kernels::gpu) fn put_row(
        &mut self,
        row: usize,
        #[comptime] matrix: usize,
        token: usize,
        sum: f32,
        #[comptime] shape: Shape,
    ) {
        let first = (comptime!(matrix * shape.tokens) + token) * comptime!(shape.stride());
        self.sums[first + row] = u32::reinterpret(sum);
    }

    /// Puts a group's sum of squares for one token, as that of a slot.
    pub(in crate::kernels::gpu) fn put_square(
        &mut self,
        group: usize,
        slot: usize,
        token: usize,
        square: f32,
        #[comptime] shape: Shape,
    ) {
        let cells = comptime!(shape.square_cells());
        self.squares[token * cells + group * shape.slots + slot] = square;
    }

    /// Writes an output's rows from `first_row` on, for all tokens that it has, as rows `first_token` and those after
    /// it.
    ///
    /// A tile of fewer than the shape's slots has as many more groups.
    #[expect(clippy::too_many_arguments, reason = "a kernel's parts have no state of their own")]
    pub(in crate::kernels::gpu) fn finish<F: Float>(
        &self,
        output: &mut Output<F>,
        first_row: usize,
        first_token: usize,
        slots: usize,
        epsilon: f32,
        #[comptime] columns: usize,
        #[comptime] then: Then,
        #[comptime] shape: Shape,
    ) {
        let rows = slots * shape.rows;
        let mut first = UNIT_POS as usize;
        if comptime!(shape.cubes > 1) {
            first += (CUBE_POS_Z * CUBE_DIM) as usize;
        }
        let units = CUBE_DIM as usize * shape.cubes;
        let count = rows * shape.tokens;
        let at_once = comptime!(shape.at_once);
        for start in range_stepped(first, count, units * at_once) {
            let mut values = Array::<f32>::new(at_once);
            #[unroll]
            for i in 0..at_once {
                // Beyond the last is that one once more, as far as nobody waits for it.
                let index = start + comptime!(i) * units;
                let index = if comptime!(at_once > 1) { index.min(count - 1) } else { index };
                let (token, row) = (index / rows, first_row + remainder(index, rows));
                let at = (first_token + token) * output.rows + row;
                if comptime!(at_once > 1) {
                    let (row, at) = (row.min(output.rows - 1), at.min(output.out.len() - 1));
                    let place = Place { token, row, of_tile: row - first_row, at };
                    values[i] =
                        self.value(&*output, place, rows, slots, epsilon, columns, then, shape);
                } else {
                    if row < output.rows && at < output.out.len() {
                        let place = Place { token, row, of_tile: row - first_row, at };
                        values[i] =
                            self.value(&*output, place, rows, slots, epsilon, columns, then, shape);
                    }
                }
            }
            #[unroll]
            for i in 0..at_once {
                let index = start + comptime!(i) * units;
                let row = first_row + remainder(index, rows);
                let at = (first_token + index / rows) * output.rows + row;
                if index < count && row < output.rows && at < output.out.len() {
                    let mut value = values[i];
                    #[comptime]
                    match output.meeting.clone() {
                        ComptimeOption::Some(meeting) => {
                            // What pads the tokens is no part of any term.
                            if meeting.has(at as u32) {
                                value = meeting.sum(self.turn, at as u32, value);
                            }
                        }
                        ComptimeOption::None => {}
                    }
                    output.out[at] = F::cast_from(value);
                }
            }
        }
    }

    /// An output without those of other GPUs.
    #[expect(clippy::too_many_arguments, reason = "a kernel's parts have no state of their own")]
    fn value<F: Float>(
        &self,
        output: &Output<F>,
        place: Place,
        rows: usize,
        slots: usize,
        epsilon: f32,
        #[comptime] columns: usize,
        #[comptime] then: Then,
        #[comptime] shape: Shape,
    ) -> f32 {
        let Place { token, row, of_tile, at } = place;
        let factor = self.factor(token, slots, epsilon, columns, shape);
        let mut value =
            factor * self.sum(0usize, token, of_tile, rows, shape) + bias(&output.biases[0], row);
        match then {
            Then::Nothing => {}
            Then::Activate(activation) => value = activate(value, activation),
            Then::Gate(activation) => {
                let up = factor * self.sum(1usize, token, of_tile, rows, shape)
                    + bias(&output.biases[1], row);
                value = activate(value, activation) * up;
            }
        }
        #[comptime]
        match output.residual.clone() {
            ComptimeOption::Some(residual) => value += residual[at],
            ComptimeOption::None => {}
        }
        value
    }

    /// One over the root mean square of a token's inputs; 1 where there is no norm.
    fn factor(
        &self,
        token: usize,
        slots: usize,
        epsilon: f32,
        #[comptime] columns: usize,
        #[comptime] shape: Shape,
    ) -> f32 {
        if comptime!(shape.is_normed) {
            let cells = comptime!(shape.square_cells());
            let mut squares = f32::new(0.0);
            for cell in range_stepped(0usize, cells, slots) {
                squares += self.squares[token * cells + cell];
            }
            (squares * comptime!(1.0 / columns as f32) + epsilon).inverse_sqrt()
        } else {
            f32::new(1.0)
        }
    }

    /// The sum of a row of a tile of `rows` rows.
    fn sum(
        &self,
        #[comptime] matrix: usize,
        token: usize,
        row: usize,
        rows: usize,
        #[comptime] shape: Shape,
    ) -> f32 {
        let first = (matrix * shape.tokens + token) * comptime!(shape.stride());
        let mut sum = f32::new(0.0);
        if comptime!(shape.cubes == 1 && shape.at_once == 1) {
            for cell in range_stepped(row, comptime!(shape.sum_cells()), rows) {
                sum += f32::reinterpret(self.sums[first + cell]);
            }
        } else {
            // Loads of other cubes take long: all at once.
            #[unroll]
            for group in 0..comptime!(shape.cubes * shape.groups) {
                let (rank, group) = comptime!((group / shape.groups, group % shape.groups));
                let at = first + row + comptime!(group * shape.slots * shape.rows);
                if comptime!(shape.cubes == 1) {
                    sum += f32::reinterpret(self.sums[at]);
                } else {
                    sum += f32::reinterpret(load_of_cube(&self.sums[at..at + 1], rank as u32));
                }
            }
        }
        sum
    }
}

/// Writes the rows of a cube, once all of its sums are put: cubes take tiles of `tile` rows, output after output.
#[cube]
#[expect(clippy::too_many_arguments, reason = "a kernel's parts have no state of their own")]
pub(in crate::kernels::gpu) fn finish_outputs<F: Float>(
    totals: &Totals,
    outputs: &mut Sequence<Output<F>>,
    first_token: usize,
    epsilon: f32,
    #[comptime] tile: usize,
    #[comptime] columns: usize,
    #[comptime] then: Then,
    #[comptime] shape: Shape,
) {
    let cube = CUBE_POS_X as usize;
    let mut first_cube = 0usize.runtime();
    #[unroll]
    for output in 0..outputs.len() {
        let cubes = outputs.index(output).rows.div_ceil(tile);
        if cube >= first_cube && cube < first_cube + cubes {
            let first_row = (cube - first_cube) * tile;
            // Known, so that nothing is divided by it at run time.
            let slots = comptime!(shape.slots);
            let output = outputs.index_mut(output);
            if comptime!(shape.in_fours) {
                totals.finish_fours(output, first_row, first_token, then, shape);
            } else {
                totals.finish(output, first_row, first_token, slots, epsilon, columns, then, shape);
            }
        }
        first_cube += cubes;
    }
}

#[cube]
fn bias(bias: &ComptimeOption<Box<[f32]>>, row: usize) -> f32 {
    #[comptime]
    match bias.clone() {
        ComptimeOption::Some(bias) => bias[row],
        ComptimeOption::None => f32::new(0.0),
    }
}
