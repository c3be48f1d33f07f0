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
use super::rights::{Conversion, Right, parts};
use super::total::{Output, Shape, Totals, finish_outputs};
use crate::kernels::cpu::pack::{PANEL, VECTOR};
use crate::kernels::gpu::ahead::{Regions, ask_at_the_end};
use crate::kernels::gpu::bf12::{row_factors, scaled};
use crate::kernels::gpu::instructions::{Sums, multiply};
use crate::kernels::gpu::matrix::Layout;
use crate::kernels::gpu::overlap::follow;
use crate::kernels::gpu::panel::{Panel, Walk, panel_vectors};
use crate::kernels::gpu::portion::{
    Portion, four_rows, make_good, portion_blocks, portion_columns, portions,
};
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
}

impl Share {
    /// Columns that portions cover.
    pub(super) fn covered(self) -> usize {
        portions(self.panel) * portion_columns(self.panel)
    }
}

/// Writes every output: cubes take bands of its rows, output after output.
#[cube(launch_unchecked)]
pub(super) fn multiply_portions<N: Size>(
    input: &Input<N>,
    weights: &Sequence<Sequence<Box<[Words]>>>,
    outputs: &mut Sequence<Output<f32>>,
    ahead: &Regions,
    epsilon: f32,
    #[comptime] then: Then,
    #[comptime] shape: Shape,
    #[comptime] share: Share,
) {
    let cube = CUBE_POS_X as usize;
    let lane = UNIT_POS_X as usize;
    let plane = UNIT_POS_Y as usize;
    let tile = comptime!(share.bands * PANEL);
    let mut totals = Totals::new(&outputs[0], shape);
    let planes = comptime!(share.bands * share.splits);
    let mut conversion = Conversion::new(lane, plane, planes, shape.tokens, share.panel);
    let mut first_cube = 0usize.runtime();
    #[unroll]
    for output in 0..outputs.len() {
        let rows = outputs.index(output).rows;
        let cubes = rows.div_ceil(tile);
        if cube >= first_cube && cube < first_cube + cubes {
            let number = (cube - first_cube) * share.bands + plane % share.bands;
            if number * PANEL < rows {
                let place = Place {
                    rows,
                    row: number * PANEL + lane / 4 * LANE_ROWS,
                    walk: lane_walk(number, rows, lane, share.panel),
                    split: plane / share.bands,
                    lane,
                };
                let mut sums = Array::<Sums>::new(comptime!(shape.matrices * 2));
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
    finish_outputs(&totals, outputs, 0usize, epsilon, tile, share.panel.columns, then, shape);
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
}

/// Sets `sums[matrix][pair of rows]` to the products of a plane.
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
    for sum in 0..comptime!(shape.matrices * 2) {
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
    follow();
    if number < count {
        conversion.load(input, number, shape.tokens, share.panel);
    }
    while number < count {
        #[unroll]
        for stage in 0..share.stages {
            if number < count {
                let ahead = number + comptime!((share.stages - 1) * share.splits);
                let free = comptime!((stage + share.stages - 1) % share.stages);
                load_stage(&mut stages, weights, place, ahead, free, shape, share);
                conversion.convert(input, shape.tokens, share.panel);
                sync_plane();
                if number + share.splits < count {
                    let next = number + share.splits;
                    conversion.load(input, next, shape.tokens, share.panel);
                }
                multiply_stage(&stages, &*conversion, place, sums, stage, shape, share);
                // The place of what was converted is free for the next portion.
                sync_plane();
                number += share.splits;
            }
        }
    }
    make_good(sums, comptime!(shape.matrices * 2), share.panel);
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
                    let row = comptime!(2 * pair + i / 2);
                    sum.insert(i, scaled(sum.extract(i), factors[row]));
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
fn multiply_stage(
    stages: &Sequence<Portion>,
    conversion: &Conversion,
    place: Place,
    sums: &mut Array<Sums>,
    #[comptime] stage: usize,
    #[comptime] shape: Shape,
    #[comptime] share: Share,
) {
    let parts = comptime!(parts(shape.tokens));
    let blocks = comptime!(portion_blocks(share.panel));
    #[unroll]
    for block in 0..blocks {
        // `[part][step]`.
        let mut operands = Array::<Right>::new(comptime!(parts * 2));
        #[unroll]
        for at in 0..comptime!(parts * 2) {
            operands[at] =
                conversion.operand(comptime!(at / 2), block, comptime!(at % 2), share.panel);
        }
        #[unroll]
        for matrix in 0..shape.matrices {
            let portion = stages.index(comptime!(stage * shape.matrices + matrix));
            let codes = portion.codes(block, share.panel);
            #[unroll]
            for pair in 0..2usize {
                let at = comptime!(matrix * 2 + pair);
                let mut sum = sums[at];
                if comptime!(share.panel.blocks() > 0) {
                    sum = Sums::zeroed();
                }
                #[unroll]
                for operand in 0..comptime!(parts * 2) {
                    let code = codes[comptime!(2 * (operand % 2) + pair)];
                    sum = multiply(code, operands[operand], sum, true);
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

/// Puts a lane's sums, of four rows and two tokens, and the plane's sums of squares.
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
    let slot = band * LANE_SLOTS + g;
    #[unroll]
    for matrix in 0..shape.matrices {
        #[unroll]
        for column in 0..2usize {
            let (upper, lower) = (sums[comptime!(2 * matrix)], sums[comptime!(2 * matrix + 1)]);
            let mut rows = four_rows(upper, lower, column);
            if comptime!(parts(shape.tokens) == 1) {
                // The lower parts' sums are those of the last four columns.
                #[unroll]
                for row in 0..LANE_ROWS {
                    rows[row] += plane_shuffle_xor(rows[row], 2u32);
                }
            }
            let token = comptime!(column) + 2 * t;
            if token < shape.tokens {
                totals.put_token(place.split, slot, matrix, token, &rows, shape);
            }
        }
    }
    if comptime!(shape.is_normed) {
        conversion.put_squares(totals, place.split, band * LANE_SLOTS, shape, share.panel);
    }
}

/// Where a lane walks in panel `number`. Rows beyond the last are computed as others and not written.
#[cube]
pub(super) fn lane_walk(number: usize, rows: usize, lane: usize, #[comptime] panel: Panel) -> Walk {
    let vectors = panel_vectors(rows, number);
    Walk {
        start: number * comptime!(panel.stride()),
        vectors,
        slot: lane / 4 % (vectors * comptime!(VECTOR / LANE_ROWS)),
    }
}
