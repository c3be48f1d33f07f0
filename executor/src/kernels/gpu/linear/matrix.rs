//! A few rows of activations with matrix instructions: weights are left operands, activations right ones.
//!
//! - A plane takes 32 rows of each matrix of an output and some of their columns, portion after portion; what it
//!   loads is a portion or two ahead of what it multiplies.
//! - Blocks are multiplied as codes, whose scales are applied to the sums of a block.
//! - Planes that share rows add their sums through shared memory, always in the same order.

use cubecl::prelude::*;
use ir::op::Then;
use ir::tensor::Format;

use super::input::Input;
use super::rights::{Conversion, OPERAND_TOKENS, Right, load_operands, parts};
use super::total::{Output, Shape, Totals, finish_outputs};
use crate::kernels::cpu::pack::{PANEL, VECTOR};
use crate::kernels::gpu::ahead::{Regions, ask_at_the_end};
use crate::kernels::gpu::bf12::row_factors;
use crate::kernels::gpu::instructions::{Sums, multiply, right};
use crate::kernels::gpu::matrix::Layout;
use crate::kernels::gpu::panel::{Panel, Walk, panel_vectors};
use crate::kernels::gpu::portion::{Portion, portion_blocks, portion_columns, portions};
use crate::kernels::gpu::words::Words;

/// Rows of a lane's sums: neighbours.
pub(super) const LANE_ROWS: usize = 4;
/// Lanes of a plane that have different rows.
pub(super) const LANE_SLOTS: usize = PANEL / LANE_ROWS;

/// How the matrices of a launch are shared out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Share {
    /// As far as it does not depend on the layout.
    pub(super) panel: Panel,
    pub(super) layout: Layout,
    /// Planes of a cube that take other rows.
    pub(super) bands: usize,
    /// Planes of a cube that share the same rows.
    pub(super) splits: usize,
    /// Portions that a plane has in registers.
    pub(super) stages: usize,
    /// Whether activations are bf16, with as many tokens as operands have places.
    pub(super) is_narrow: bool,
}

impl Share {
    /// Columns that portions cover.
    pub(super) fn covered(self) -> usize {
        portions(self.panel) * portion_columns(self.panel)
    }

    /// Operands of different tokens.
    fn groups(self, tokens: usize) -> usize {
        if self.is_narrow { tokens / OPERAND_TOKENS } else { 1 }
    }

    /// Operands of the same tokens.
    fn parts(self, tokens: usize) -> usize {
        if self.is_narrow { 1 } else { parts(tokens) }
    }
}

/// Writes every output: cubes take bands of its rows, output after output; along the second axis, other tokens.
#[cube(launch_unchecked)]
pub(super) fn multiply_portions<N: Size>(
    input: &Input<N>,
    weights: &Sequence<Sequence<Box<[Words]>>>,
    outputs: &mut Sequence<Output>,
    ahead: &Regions,
    tokens: u32,
    epsilon: f32,
    #[comptime] then: Then,
    #[comptime] shape: Shape,
    #[comptime] share: Share,
) {
    let cube = CUBE_POS_X as usize;
    let lane = UNIT_POS_X as usize;
    let plane = UNIT_POS_Y as usize;
    let tile = comptime!(share.bands * PANEL);
    let first_token = CUBE_POS_Y as usize * shape.tokens;
    let mut totals = Totals::new(&outputs[0], shape);
    let planes = comptime!(if share.is_narrow { 0 } else { share.bands * share.splits });
    let mut conversion = Conversion::new(lane, plane, planes, shape.tokens, share.panel);
    let mut first_cube = 0usize.runtime();
    #[unroll]
    for output in 0..outputs.len() {
        let rows = outputs.index(output).rows;
        let cubes = rows.div_ceil(tile);
        if cube >= first_cube && cube < first_cube + cubes {
            let number = (cube - first_cube) * share.bands + plane % share.bands;
            if number * PANEL < rows {
                let vectors = panel_vectors(rows, number);
                let walk = Walk {
                    start: number * comptime!(share.panel.stride()),
                    vectors,
                    // Rows beyond the last are computed as others and not written.
                    slot: lane / 4 % (vectors * comptime!(VECTOR / LANE_ROWS)),
                };
                let place = Place {
                    rows,
                    row: number * PANEL + lane / 4 * LANE_ROWS,
                    walk,
                    split: plane / share.bands,
                    lane,
                    first_token,
                    last_token: tokens as usize - 1,
                };
                let mut sums =
                    Array::<Sums>::new(comptime!(shape.matrices * share.groups(shape.tokens) * 2));
                multiply_band(
                    input,
                    &weights[output],
                    &mut conversion,
                    place,
                    &mut sums,
                    shape,
                    share,
                );
                put(&mut totals, &conversion, &sums, plane % share.bands, place, shape, share);
            }
        }
        first_cube += cubes;
    }
    ask_at_the_end(ahead, UNIT_POS_Y, CUBE_DIM_Y);
    sync_cube();
    finish_outputs(&totals, outputs, first_token, epsilon, tile, share.panel.columns, then, shape);
}

/// What a lane takes.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Place {
    /// Of each matrix.
    rows: usize,
    /// The first of its own.
    row: usize,
    /// Where it walks in panels.
    walk: Walk,
    /// Which of the planes that share them it is.
    split: usize,
    lane: usize,
    first_token: usize,
    /// Of all cubes.
    last_token: usize,
}

/// Sets `sums[matrix][group][pair of rows]` to the products of a plane.
#[cube]
fn multiply_band<N: Size>(
    input: &Input<N>,
    weights: &Sequence<Box<[Words]>>,
    conversion: &mut Conversion,
    place: Place,
    sums: &mut Array<Sums>,
    #[comptime] shape: Shape,
    #[comptime] share: Share,
) {
    let count = comptime!(portions(share.panel));
    #[unroll]
    for sum in 0..comptime!(shape.matrices * share.groups(shape.tokens) * 2) {
        sums[sum] = Sums::zeroed();
    }
    let mut stages = Sequence::<Portion>::new();
    #[unroll]
    for _ in 0..comptime!(share.stages * shape.matrices) {
        stages.push(Portion::new(share.panel));
    }
    let mut bases = Array::<Words>::new(shape.matrices);
    if comptime!(matches!(share.panel.format, Format::Bf12)) {
        #[unroll]
        for matrix in 0..shape.matrices {
            bases[matrix] = weights[matrix][place.walk.start + place.walk.slot];
        }
    }
    let mut number = place.split;
    #[unroll]
    for stage in 0..comptime!(share.stages - 1) {
        load_stage(&mut stages, weights, place, number + stage * share.splits, stage, shape, share);
    }
    if comptime!(!share.is_narrow) && number < count {
        conversion.load(input, number, shape.tokens, share.panel);
    }
    while number < count {
        #[unroll]
        for stage in 0..share.stages {
            if number < count {
                let ahead = number + comptime!((share.stages - 1) * share.splits);
                let free = comptime!((stage + share.stages - 1) % share.stages);
                load_stage(&mut stages, weights, place, ahead, free, shape, share);
                if comptime!(!share.is_narrow) {
                    conversion.convert(input, shape.tokens, share.panel);
                    sync_plane();
                    if number + share.splits < count {
                        let next = number + share.splits;
                        conversion.load(input, next, shape.tokens, share.panel);
                    }
                }
                multiply_stage(
                    input, &stages, conversion, place, number, sums, stage, shape, share,
                );
                if comptime!(!share.is_narrow) {
                    // The place of what was converted is free for the next portion.
                    sync_plane();
                }
                number += share.splits;
            }
        }
    }
    if comptime!(matches!(share.panel.format, Format::Bf12)) {
        #[unroll]
        for matrix in 0..shape.matrices {
            let factors = row_factors(bases[matrix]);
            #[unroll]
            for pair in 0..2usize {
                let at = comptime!(matrix * 2 + pair);
                let mut sum = sums[at];
                #[unroll]
                for i in 0..4usize {
                    sum.insert(i, sum.extract(i) * factors[comptime!(2 * pair + i / 2)]);
                }
                sums[at] = sum;
            }
        }
    }
}

/// Loads a portion of each matrix, if there is one of that number.
#[cube]
fn load_stage(
    stages: &mut Sequence<Portion>,
    weights: &Sequence<Box<[Words]>>,
    place: Place,
    number: usize,
    #[comptime] stage: usize,
    #[comptime] shape: Shape,
    #[comptime] share: Share,
) {
    let t = place.lane % 4;
    if number < comptime!(portions(share.panel)) {
        #[unroll]
        for matrix in 0..shape.matrices {
            let portion = stages.index_mut(comptime!(stage * shape.matrices + matrix));
            match comptime!(share.layout) {
                Layout::Panels => {
                    portion.load(&weights[matrix], place.walk, t, number, share.panel);
                }
                Layout::RowMajor => {
                    let (rows, row) = (place.rows, place.row);
                    portion.load_rows(&weights[matrix], rows, row, t, number, share.panel);
                }
            }
        }
    }
}

/// Adds the products of the portion of a stage.
#[cube]
#[expect(clippy::too_many_arguments, reason = "a kernel's parts have no state of their own")]
fn multiply_stage<N: Size>(
    input: &Input<N>,
    stages: &Sequence<Portion>,
    conversion: &mut Conversion,
    place: Place,
    number: usize,
    sums: &mut Array<Sums>,
    #[comptime] stage: usize,
    #[comptime] shape: Shape,
    #[comptime] share: Share,
) {
    let (g, t) = (place.lane / 4, place.lane % 4);
    let groups = comptime!(share.groups(shape.tokens));
    let parts = comptime!(share.parts(shape.tokens));
    let blocks = comptime!(portion_blocks(share.panel));
    #[unroll]
    for block in 0..blocks {
        // `[group][part][step]`; either there are groups or there are parts.
        let mut operands = Array::<Right>::new(comptime!(groups * parts * 2));
        if comptime!(share.is_narrow) {
            #[unroll]
            for group in 0..groups {
                let token = place.first_token + comptime!(group * OPERAND_TOKENS) + g;
                let token = token.min(place.last_token);
                let words = load_operands(input, token, t, number * blocks + block, share.panel);
                operands[comptime!(2 * group)] =
                    right(words.extract(0usize), words.extract(1usize));
                operands[comptime!(2 * group + 1)] =
                    right(words.extract(2usize), words.extract(3usize));
            }
        } else {
            #[unroll]
            for part in 0..parts {
                #[unroll]
                for step in 0..2usize {
                    operands[comptime!(2 * part + step)] =
                        conversion.operand(part, block, step, share.panel);
                }
            }
        }
        #[unroll]
        for matrix in 0..shape.matrices {
            let portion = stages.index(comptime!(stage * shape.matrices + matrix));
            let codes = portion.codes(block, share.panel);
            #[unroll]
            for group in 0..groups {
                #[unroll]
                for pair in 0..2usize {
                    let at = comptime!((matrix * groups + group) * 2 + pair);
                    let mut sum = sums[at];
                    if comptime!(share.panel.blocks() > 0) {
                        sum = Sums::zeroed();
                    }
                    #[unroll]
                    for part in 0..parts {
                        #[unroll]
                        for step in 0..2usize {
                            let operand = operands[comptime!((group * parts + part) * 2 + step)];
                            sum = multiply(codes[comptime!(2 * step + pair)], operand, sum, true);
                        }
                    }
                    if comptime!(share.panel.blocks() > 0) {
                        let scales = portion.scales(block, place.walk.slot);
                        let mut total = sums[at];
                        #[unroll]
                        for i in 0..4usize {
                            let scale = scales[comptime!(2 * pair + i / 2)];
                            total.insert(i, fma(scale, sum.extract(i), total.extract(i)));
                        }
                        sum = total;
                    }
                    sums[at] = sum;
                }
            }
        }
    }
}

/// Puts a lane's sums, of four rows and of two tokens of each operand, and the plane's sums of squares.
#[cube]
fn put(
    totals: &mut Totals,
    conversion: &Conversion,
    sums: &Array<Sums>,
    band: usize,
    place: Place,
    #[comptime] shape: Shape,
    #[comptime] share: Share,
) {
    let (g, t) = (place.lane / 4, place.lane % 4);
    let groups = comptime!(share.groups(shape.tokens));
    let slot = band * LANE_SLOTS + g;
    #[unroll]
    for value in 0..comptime!(shape.matrices * groups) {
        let (upper, lower) = (sums[comptime!(2 * value)], sums[comptime!(2 * value + 1)]);
        #[unroll]
        for column in 0..2usize {
            let mut rows = Array::<f32>::new(LANE_ROWS);
            rows[0] = upper.extract(column);
            rows[1] = upper.extract(comptime!(2 + column));
            rows[2] = lower.extract(column);
            rows[3] = lower.extract(comptime!(2 + column));
            if comptime!(share.parts(shape.tokens) == 1 && !share.is_narrow) {
                // The lower parts' sums are those of the last four columns.
                #[unroll]
                for row in 0..LANE_ROWS {
                    rows[row] += plane_shuffle_xor(rows[row], 2u32);
                }
            }
            let token = comptime!(value % groups * OPERAND_TOKENS + column) + 2 * t;
            if token < shape.tokens {
                let matrix = comptime!(value / groups);
                totals.put_token(place.split, slot, matrix, token, &rows, shape);
            }
        }
    }
    if comptime!(shape.is_normed) {
        conversion.put_squares(totals, place.split, band * LANE_SLOTS, shape, share.panel);
    }
}
