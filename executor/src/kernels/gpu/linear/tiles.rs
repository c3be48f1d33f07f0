//! Some tens of rows of bf16 activations with matrix instructions: weights go from panels to registers, activations
//! through shared memory. Hopper GPUs take rows of whole steps and packed weights as [`groups`] say.
//!
//! - Weights of 16 bits may also lie row after row.
//! - A plane takes 32 rows of one matrix for all tokens, and some of the columns, step after step; what it loads of the
//!   weights is portions ahead of what it multiplies.
//! - Planes of other rows and matrices that take the same columns are a *team*, which copies those columns of the
//!   activations once, with one barrier of its own a step.
//! - Teams add their sums through shared memory, always in the same order.

mod groups;
mod share;

use cubecl::prelude::*;
use ir::op::Then;
use ir::tensor::Format;

use self::share::TileShare;
use super::Linear;
use super::matrix::{LANE_ROWS, LANE_SLOTS, lane_walk};
use super::rights::{OPERAND_TOKENS, PLANE};
use super::total::{Output, Shape, Totals, finish_outputs};
use crate::kernels::cpu::pack::PANEL;
use crate::kernels::gpu::bf12::{ENLARGED_PAIR, row_factors, scaled};
use crate::kernels::gpu::device::{Gpu, element};
use crate::kernels::gpu::instructions::{Packed, Sums, multiply_pairs};
use crate::kernels::gpu::matrix::{LOAD_BYTES, Layout};
use crate::kernels::gpu::panel::Walk;
use crate::kernels::gpu::portion::{
    Portion, add_block, four_rows, make_good, portion_blocks, portions,
};
use crate::kernels::gpu::registers::held;
use crate::kernels::gpu::staged::{
    STAGES, STRIDE, VECTORS, copy_vector, end_copies, stage_after, stage_before, wait_for_copies,
};
use crate::kernels::gpu::words::Words;

impl Gpu {
    /// Queues a linear of bf16 activations.
    pub(super) fn multiply_tiles(&self, linear: &Linear<'_>, share: TileShare) {
        let shape = linear.shape_of_lanes(share.tokens, share.bands, share.teams);
        let columns = share.panel.columns;
        // SAFETY: the spans are as long as the shapes say, and the kernel stays within those.
        unsafe {
            multiply_tiles::launch_unchecked(
                &self.client,
                CubeCount::new_2d(
                    linear.cubes(share.bands * PANEL),
                    linear.tokens.div_ceil(share.tokens) as u32,
                ),
                CubeDim::new_2d(PLANE as u32, share.planes() as u32),
                linear.x.argument(linear.tokens * columns * 2 / LOAD_BYTES, LOAD_BYTES),
                linear.weights(),
                linear.outputs(),
                linear.tokens as u32,
                linear.then,
                shape,
                share,
                element(linear.made),
            );
        }
    }
}

/// Writes every output: cubes take bands of its rows, output after output; along the second axis, other tokens.
#[cube(launch_unchecked)]
pub(super) fn multiply_tiles<F: Float>(
    input: &[Packed],
    weights: &Sequence<Sequence<Box<[Words]>>>,
    outputs: &mut Sequence<Output<F>>,
    tokens: u32,
    #[comptime] then: Then,
    #[comptime] shape: Shape,
    #[comptime] share: TileShare,
    #[define(F)] _made: ElemType,
) {
    let cube = CUBE_POS_X as usize;
    let lane = UNIT_POS_X as usize;
    let plane = UNIT_POS_Y as usize;
    let tile = comptime!(share.bands * PANEL);
    let first_token = CUBE_POS_Y as usize * share.tokens;
    let mut totals = Totals::new(&outputs[0], shape);
    let mut staged = Shared::<[Packed]>::new_aligned_slice(
        comptime!(share.teams * STAGES * share.stage()),
        16usize,
    );
    let mut first_cube = 0usize.runtime();
    #[unroll]
    for output in 0..outputs.len() {
        let rows = outputs.index(output).rows;
        let cubes = rows.div_ceil(tile);
        if cube >= first_cube && cube < first_cube + cubes {
            let band = plane / share.matrices % share.bands;
            // Bands beyond the last row are computed as the last one and not written.
            let number = (cube - first_cube) * share.bands + band;
            let number = number.min(rows.div_ceil(PANEL) - 1);
            let place = Place {
                rows,
                row: number * PANEL + lane / 4 * LANE_ROWS,
                walk: lane_walk(number, rows, lane, share.panel),
                lane,
                matrix: plane % share.matrices,
                team: plane / comptime!(share.members()),
                member: plane % comptime!(share.members()) * PLANE + lane,
                first_token,
                last_token: tokens as usize - 1,
            };
            let mut sums = Array::<Sums>::new(comptime!(share.groups() * 2));
            multiply_band(input, &weights[output], &mut staged, place, &mut sums, share);
            make_good(&mut sums, comptime!(share.groups() * 2), share.panel);
            put(&mut totals, &sums, band * LANE_SLOTS + lane / 4, place, shape, share);
        }
        first_cube += cubes;
    }
    sync_cube();
    finish_outputs(&totals, outputs, first_token, 0.0, tile, share.panel.columns, then, shape);
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
    lane: usize,
    /// Of the output's.
    matrix: usize,
    team: usize,
    /// Which unit of its team it is.
    member: usize,
    first_token: usize,
    /// Of all cubes.
    last_token: usize,
}

/// Sets `sums[group][pair of rows]` to the products of a plane.
#[cube]
fn multiply_band(
    input: &[Packed],
    weights: &Sequence<Box<[Words]>>,
    staged: &mut Shared<[Packed]>,
    place: Place,
    sums: &mut Array<Sums>,
    #[comptime] share: TileShare,
) {
    #[unroll]
    for sum in 0..comptime!(share.groups() * 2) {
        sums[sum] = Sums::zeroed();
    }
    let of_team = place.team * comptime!(STAGES * share.stage());
    #[unroll]
    for round in 0..comptime!(STAGES - 1) {
        let to = of_team + comptime!(round * share.stage());
        copy_step(input, staged, to, round.runtime(), place, share);
    }
    let mut kept = Sequence::<Portion>::new();
    #[unroll]
    for _ in 0..share.kept() {
        kept.push(Portion::new(share.panel));
    }
    #[unroll]
    for index in 0..comptime!(share.kept() - 1) {
        load_portion(&mut kept, weights, place, 0usize.runtime(), index, index, share);
    }
    let of_step = comptime!(share.portions());
    let unrolled = comptime!(share.kept() / of_step);
    let mut stage = 0usize.runtime();
    let mut round = 0usize.runtime();
    while round < comptime!(share.rounds()) {
        #[unroll]
        for turn in 0..unrolled {
            if round < comptime!(share.rounds()) {
                wait_for_copies();
                sync_team(place.team, share);
                let behind = stage_before(stage, share.stage());
                let next = round + comptime!(STAGES - 1);
                copy_step(input, staged, of_team + behind, next, place, share);
                #[unroll]
                for part in 0..of_step {
                    let now = comptime!(turn * of_step + part);
                    let ahead = comptime!(share.kept() - 1);
                    let free = comptime!((now + ahead) % share.kept());
                    load_portion(
                        &mut kept,
                        weights,
                        place,
                        round,
                        comptime!(part + ahead),
                        free,
                        share,
                    );
                    multiply_portion(
                        &kept,
                        &*staged,
                        of_team + stage,
                        place,
                        sums,
                        part,
                        now,
                        share,
                    );
                }
                stage = stage_after(stage, share.stage());
                round += 1;
            }
        }
    }
    if comptime!(matches!(share.panel.format, Format::Bf12)) {
        scale_sums(weights, sums, place, share);
    }
}

/// Multiplies sums of weights in 12 bits with what their rows' exponents are above.
#[cube]
fn scale_sums(
    weights: &Sequence<Box<[Words]>>,
    sums: &mut Array<Sums>,
    place: Place,
    #[comptime] share: TileShare,
) {
    let mut bases = Words::empty();
    #[unroll]
    for matrix in 0..share.matrices {
        if place.matrix == matrix {
            bases = weights[matrix][place.walk.start + place.walk.slot];
        }
    }
    let factors = row_factors(bases);
    #[unroll]
    for at in 0..comptime!(share.groups() * 2) {
        let mut sum = sums[at];
        #[unroll]
        for i in 0..4usize {
            let row = comptime!(2 * (at % 2) + i / 2);
            sum.insert(i, scaled(sum.extract(i), factors[row]));
        }
        sums[at] = sum;
    }
}

/// Starts to copy a team's columns of a step; those behind the last become zeros.
#[cube]
fn copy_step(
    input: &[Packed],
    staged: &mut Shared<[Packed]>,
    to: usize,
    round: usize,
    place: Place,
    #[comptime] share: TileShare,
) {
    let step = round * share.teams + place.team;
    #[unroll]
    for i in 0..comptime!(share.copies()) {
        let index = place.member + comptime!(i * share.members() * PLANE);
        let (token, at) = (index / VECTORS, index % VECTORS);
        let vector = step * VECTORS + at;
        let is_inside = vector < comptime!(share.panel.columns / 8);
        // Tokens behind the last are copies of that one.
        let row = (place.first_token + token).min(place.last_token);
        let from = select(is_inside, row * comptime!(share.panel.columns / 8) + vector, 0usize);
        let to = to + token * STRIDE + at;
        let is_whole = comptime!((share.tokens * VECTORS).is_multiple_of(share.members() * PLANE));
        if is_whole || index < comptime!(share.tokens * VECTORS) {
            copy_vector(input, from, is_inside, staged, to);
        }
    }
    end_copies();
}

/// Loads the portion of that number, counted from a round's first; behind a team's last, any portion.
#[cube]
fn load_portion(
    kept: &mut Sequence<Portion>,
    weights: &Sequence<Box<[Words]>>,
    place: Place,
    round: usize,
    #[comptime] ahead: usize,
    #[comptime] to: usize,
    #[comptime] share: TileShare,
) {
    let (rounds, part) = comptime!((ahead / share.portions(), ahead % share.portions()));
    let step = (round + rounds) * share.teams + place.team;
    let number = step * comptime!(share.portions()) + part;
    let number = number.min(comptime!(portions(share.panel) - 1).runtime());
    let portion = kept.index_mut(to);
    #[unroll]
    for matrix in 0..share.matrices {
        if comptime!(share.matrices == 1) {
            load_from(&weights[matrix], portion, place, number, share);
        } else {
            if place.matrix == matrix {
                load_from(&weights[matrix], portion, place, number, share);
            }
        }
    }
}

/// Loads the portion of that number of a matrix.
#[cube]
fn load_from(
    matrix: &[Words],
    portion: &mut Portion,
    place: Place,
    number: usize,
    #[comptime] share: TileShare,
) {
    let t = place.lane % 4;
    match comptime!(share.layout) {
        Layout::Panels => portion.load(matrix, place.walk, t, number, share.panel),
        Layout::RowMajor => {
            portion.load_rows(matrix, place.rows, place.row, t, number, share.panel);
        }
    }
}

/// Adds the products of a portion that is kept.
#[cube]
#[expect(clippy::too_many_arguments, reason = "a kernel's parts have no state of their own")]
fn multiply_portion(
    kept: &Sequence<Portion>,
    staged: &Shared<[Packed]>,
    stage: usize,
    place: Place,
    sums: &mut Array<Sums>,
    #[comptime] part: usize,
    #[comptime] now: usize,
    #[comptime] share: TileShare,
) {
    let panel = comptime!(share.panel);
    let blocks = comptime!(portion_blocks(panel));
    let portion = kept.index(now);
    #[unroll]
    for block in 0..blocks {
        let operands = portion.scaled_codes(block, place.walk.slot, panel);
        let from = stage
            + place.lane / 4 * STRIDE
            + place.lane % 4
            + comptime!(4 * (part * blocks + block));
        #[unroll]
        for group in 0..share.groups() {
            let mut x = staged[from + comptime!(group * OPERAND_TOKENS * STRIDE)];
            if comptime!(matches!(panel.format, Format::Bf12)) {
                #[unroll]
                for i in 0..4usize {
                    x.insert(i, multiply_pairs(x.extract(i), ENLARGED_PAIR.runtime()));
                }
            }
            add_block(&operands, x, sums, group, true);
        }
    }
}

/// Waits until all units of a team are here.
#[cube]
fn sync_team(team: usize, #[comptime] share: TileShare) {
    if comptime!(share.members() == 1) {
        sync_plane();
    } else {
        // Barrier 0 is the cube's.
        let barrier = held::<u32>(team as u32 + 1u32);
        let units = comptime!((share.members() * PLANE) as u32);
        gpu_asm!("bar.sync {barrier}, {units};", units = const units, barrier = in(_) barrier);
    }
}

/// Puts a lane's sums, of four rows and of two tokens of each group.
#[cube]
fn put(
    totals: &mut Totals,
    sums: &Array<Sums>,
    slot: usize,
    place: Place,
    #[comptime] shape: Shape,
    #[comptime] share: TileShare,
) {
    #[unroll]
    for group in 0..comptime!(share.groups()) {
        let (upper, lower) = (sums[comptime!(2 * group)], sums[comptime!(2 * group + 1)]);
        #[unroll]
        for column in 0..2usize {
            let rows = four_rows(upper, lower, column);
            let token = comptime!(group * OPERAND_TOKENS + column) + 2 * (place.lane % 4);
            totals.put_token(place.team, slot, place.matrix, token, &rows, shape);
        }
    }
}
