//! One or two rows of floats with matrix instructions of bytes: blocks of weights are left operands as they lie, whole
//! numbers of four bytes right ones (see [`super::digits`]).
//!
//! - A plane takes 32 rows of one matrix and some of their columns, portion after portion; what it loads is portions
//!   ahead of what it multiplies, and the first of it is on its way while activations are converted.
//! - Products of a block are exact; its scales are applied to their sums.
//! - Planes that share rows add their sums through shared memory, always in the same order.

use cubecl::prelude::*;
use ir::op::Then;

use super::digits::Digits;
use super::input::Input;
use super::matrix::{LANE_ROWS, LANE_SLOTS, lane_walk};
use super::rights::PLANE;
use super::total::{Output, Shape, Totals, finish_outputs};
use crate::kernels::cpu::pack::PANEL;
use crate::kernels::gpu::ahead::{Regions, ask_at_the_end};
use crate::kernels::gpu::instructions::{Counts, left, multiply_bytes};
use crate::kernels::gpu::overlap::follow;
use crate::kernels::gpu::panel::{Panel, Walk};
use crate::kernels::gpu::portion::{
    Portion, Trail, byte_offsets, byte_unit, portion_blocks, portions,
};
use crate::kernels::gpu::words::Words;

/// How the matrices of a launch are shared out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ByteShare {
    pub(super) panel: Panel,
    /// Of one output; planes beside one another take other matrices.
    pub(super) matrices: usize,
    /// Planes of a cube that take other rows.
    pub(super) bands: usize,
    /// Planes of a cube that share the same rows.
    pub(super) splits: usize,
    /// Portions that a plane has in registers.
    pub(super) stages: usize,
}

impl ByteShare {
    /// Planes of a cube.
    pub(super) fn planes(self) -> usize {
        self.matrices * self.bands * self.splits
    }
}

/// Writes every output: cubes take bands of its rows, output after output.
#[cube(launch_unchecked)]
pub(super) fn multiply_blocks<N: Size>(
    input: &Input<N>,
    weights: &Sequence<Sequence<Box<[Words]>>>,
    outputs: &mut Sequence<Output<f32>>,
    ahead: &Regions,
    epsilon: f32,
    #[comptime] then: Then,
    #[comptime] shape: Shape,
    #[comptime] share: ByteShare,
) {
    let cube = CUBE_POS_X as usize;
    let lane = UNIT_POS as usize % PLANE;
    let plane = UNIT_POS as usize / PLANE;
    let planes = comptime!(share.planes());
    let tile = comptime!(share.bands * PANEL);
    let mut totals = Totals::new(&outputs[0], shape);
    let mut digits = Digits::new(lane, planes, shape.tokens, share.panel);
    let mut first_cube = 0usize.runtime();
    #[unroll]
    for output in 0..outputs.len() {
        let rows = outputs.index(output).rows;
        let cubes = rows.div_ceil(tile);
        if cube >= first_cube && cube < first_cube + cubes {
            let band = plane / share.matrices % share.bands;
            let number = (cube - first_cube) * share.bands + band;
            // Bands beyond the last row are computed as the last one and not written.
            let number = number.min(rows.div_ceil(PANEL) - 1);
            let place = Place {
                walk: lane_walk(number, rows, lane, share.panel),
                t: lane % 4,
                matrix: plane % share.matrices,
                split: plane / comptime!(share.matrices * share.bands),
                slot: band * LANE_SLOTS + lane / 4,
            };
            multiply_band(input, &weights[output], &mut digits, &mut totals, place, shape, share);
        }
        first_cube += cubes;
    }
    ask_at_the_end(ahead, plane as u32, comptime!(planes as u32).runtime());
    sync_cube();
    finish_outputs(&totals, outputs, 0usize, epsilon, tile, share.panel.columns, then, shape);
}

/// What a lane takes.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Place {
    /// Where it walks in panels.
    walk: Walk,
    /// Which of the four lanes of a row it is.
    t: usize,
    /// Of the output's.
    matrix: usize,
    /// Which of the planes that share rows it is.
    split: usize,
    /// Of the cube's sums.
    slot: usize,
}

/// Puts the products of a plane.
#[cube]
fn multiply_band<N: Size>(
    input: &Input<N>,
    weights: &Sequence<Box<[Words]>>,
    digits: &mut Digits,
    totals: &mut Totals,
    place: Place,
    #[comptime] shape: Shape,
    #[comptime] share: ByteShare,
) {
    let count = comptime!(portions(share.panel));
    let blocks = comptime!(portion_blocks(share.panel));
    let mut stages = Sequence::<Portion>::new();
    #[unroll]
    for _ in 0..share.stages {
        stages.push(Portion::new(share.panel));
    }
    let mut trail = Trail::new(place.walk, place.t, place.split, share.splits, share.panel);
    #[unroll]
    for stage in 0..comptime!(share.stages - 1) {
        load_stage(&mut stages, weights, place.matrix, &mut trail, stage, share);
    }
    // The compiler moves loads behind the wait for the launch before, but not behind a barrier.
    sync_cube();
    follow();
    digits.convert(input, totals, comptime!(share.planes()), shape, share.panel);
    // `[block][row]`: blocks' bytes differ in what they count.
    let mut sums = Array::<f32>::new(comptime!(blocks * LANE_ROWS));
    #[unroll]
    for sum in 0..comptime!(blocks * LANE_ROWS) {
        sums[sum] = 0.0;
    }
    let mut number = place.split;
    while number < count {
        #[unroll]
        for stage in 0..share.stages {
            if number < count {
                let free = comptime!((stage + share.stages - 1) % share.stages);
                load_stage(&mut stages, weights, place.matrix, &mut trail, free, share);
                multiply_stage(&stages, &*digits, place, number, &mut sums, stage, share);
                number += share.splits;
            }
        }
    }
    put(totals, &sums, place, shape, share);
}

/// Loads a trail's next portion, if there is one.
#[cube]
fn load_stage(
    stages: &mut Sequence<Portion>,
    weights: &Sequence<Box<[Words]>>,
    of_plane: usize,
    trail: &mut Trail,
    #[comptime] stage: usize,
    #[comptime] share: ByteShare,
) {
    if trail.number < comptime!(portions(share.panel)) {
        let portion = stages.index_mut(stage);
        if comptime!(share.matrices == 1) {
            portion.load_next(&weights[0], &*trail, share.panel);
        } else {
            #[unroll]
            for matrix in 0..share.matrices {
                if of_plane == matrix {
                    portion.load_next(&weights[matrix], &*trail, share.panel);
                }
            }
        }
    }
    trail.advance(share.splits);
}

/// Adds the products of the portion of a stage.
#[cube]
fn multiply_stage(
    stages: &Sequence<Portion>,
    digits: &Digits,
    place: Place,
    number: usize,
    sums: &mut Array<f32>,
    #[comptime] stage: usize,
    #[comptime] share: ByteShare,
) {
    let panel = comptime!(share.panel);
    let blocks = comptime!(portion_blocks(panel));
    let portion = stages.index(stage);
    #[unroll]
    for block in 0..blocks {
        let scales = portion.scales(block, place.walk.slot);
        let offsets = comptime!(byte_offsets(panel.format, block)).runtime();
        let offsets = left(offsets, offsets, offsets, offsets);
        let operand = digits.operand(number * blocks + block);
        let unit = digits.unit(number * blocks + block, panel);
        let offset = multiply_bytes(offsets, operand, Counts::zeroed(), true);
        #[unroll]
        for pair in 0..2usize {
            let bytes = portion.bytes(pair, block, panel);
            let counts = multiply_bytes(bytes, operand, offset, false);
            #[unroll]
            for half in 0..2usize {
                let row = comptime!(2 * pair + half);
                let at = comptime!(block * LANE_ROWS + row);
                // A lane has two neighbouring bytes of a number.
                let count = counts.extract(comptime!(2 * half)) * 256i32
                    + counts.extract(comptime!(2 * half + 1));
                sums[at] = fma(scales[row] * unit, f32::cast_from(count), sums[at]);
            }
        }
    }
}

/// Puts a lane's sums of four rows for a token.
#[cube]
fn put(
    totals: &mut Totals,
    sums: &Array<f32>,
    place: Place,
    #[comptime] shape: Shape,
    #[comptime] share: ByteShare,
) {
    let blocks = comptime!(portion_blocks(share.panel));
    let mut rows = Array::<f32>::new(LANE_ROWS);
    #[unroll]
    for row in 0..LANE_ROWS {
        let mut sum = f32::new(0.0);
        #[unroll]
        for block in 0..blocks {
            let part = sums[comptime!(block * LANE_ROWS + row)];
            sum += part * comptime!(1.0 / byte_unit(share.panel.format, block) as f32);
        }
        rows[row] = sum * 65536.0 + plane_shuffle_xor(sum, 1u32);
    }
    #[unroll]
    for token in 0..shape.tokens {
        if place.t == comptime!(2 * token) {
            #[unroll]
            for matrix in 0..share.matrices {
                if place.matrix == matrix {
                    let token = token.runtime();
                    totals.put_token(place.split, place.slot, matrix, token, &rows, shape);
                }
            }
        }
    }
}
