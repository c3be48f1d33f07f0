//! Rows of bf16 activations with the matrix instructions of a warpgroup: weights go from shared memory to
//! registers, and one instruction multiplies them with up to 128 tokens, which it reads in shared memory by itself.
//!
//! - A cube is a group of four planes, each of which takes 32 rows of one matrix. All take the same columns, step after
//!   step. A fifth plane lets the device copy whole steps to shared memory, some ahead: columns of the activations, which
//!   lie as right operands do, and boxes of the weights, whose lines are those of panels or of rows. (Where panels lie
//!   as they do in memory, a quarter of a plane reads from a quarter of the banks.)
//! - Weights of the first steps are on their way before the launch before is over.
//! - Weights that lie row after row are left operands where they are copied to: see [`rows`].
//! - A plane decodes a block while the products of the one before are under way, and loads the next meanwhile.
//! - Where rows are too few for all processors, cubes of a cluster share out the columns. Each writes some of the
//!   outputs, from sums in the shared memory of all, always in the same order.
//! - Tokens of more than one operand are stacks, of which each has cubes of its own.

mod copies;
mod rows;
mod share;

use cubecl::prelude::*;
use ir::op::Then;
use ir::tensor::Format;
use ir::workspace::{OperandRows, WARPGROUP_COLUMNS};

use self::copies::{Panels, copy_first_weights, copy_steps};
use self::rows::{multiply_rows, put_rows};
use self::share::{ALIGNMENT, GroupShare, held_rows, loads_before, panel_lines, step_lines};
use super::{Place, put, scale_sums};
use crate::kernels::cpu::pack::PANEL;
use crate::kernels::gpu::bf12::ENLARGED;
use crate::kernels::gpu::device::{BoxLines, Gpu, element};
use crate::kernels::gpu::instructions::{Packed, Sums};
use crate::kernels::gpu::linear::Linear;
use crate::kernels::gpu::linear::matrix::{LANE_ROWS, LANE_SLOTS, lane_walk};
use crate::kernels::gpu::linear::rights::PLANE;
use crate::kernels::gpu::linear::total::{Output, Shape, Totals, finish_outputs};
use crate::kernels::gpu::matrix::{LOAD_BYTES, Layout, Matrix};
use crate::kernels::gpu::order::Order;
use crate::kernels::gpu::overlap::follow;
use crate::kernels::gpu::panel::Walk;
use crate::kernels::gpu::portion::{BLOCK, Lines, Portion, make_good};
use crate::kernels::gpu::staged::STEP;
use crate::kernels::gpu::warpgroup::{
    GROUP, LINE_BYTES, RightOperands, TURN_LINES, arrive, clear_sums, declare_sums, make_barrier,
    multiply_group, read_sum, right_operand, shared_address, show_barriers, sync_cluster,
    sync_group, wait_for_products, wait_for_turn,
};
use crate::kernels::gpu::words::Words;

/// What plans take for a step, by which they know which matrices are multiplied so.
const _: () = assert!(STEP == WARPGROUP_COLUMNS as usize);
/// Rows of 16-byte vectors of a right operand in a block: eight columns each.
const EIGHTS: usize = BLOCK / 8;
/// Left operands of a block: two pairs of rows, each of two times 16 columns.
const BLOCK_OPERANDS: usize = 4;
/// Numbers between the sums of tokens: a lane's lie two tokens apart from those of its neighbours, and it puts four rows
/// at once or, of weights that lie row after row, one.
const SUM_PADDING: usize = 4;
/// The most outputs that a unit finishes at a time, by themselves and in fours.
const MOST_AT_ONCE: usize = 7;
const MOST_FOURS_AT_ONCE: usize = 2;

/// A matrix as boxes of a step of `bands` panels, or of as many rows.
fn boxes(matrix: &Matrix, bands: usize) -> TensorMapArg<Tiled> {
    let panel = matrix.panel();
    match matrix.layout() {
        Layout::Panels => {
            let of_box = BoxLines { layers: bands, lines: step_lines(panel) };
            // A line where none is whole: nobody copies it.
            let (panels, lines) = match held_rows(matrix) / PANEL {
                0 => (1, 1),
                panels => (panels, panel_lines(panel)),
            };
            matrix.data().boxes(panels, lines, LINE_BYTES / 4, of_box)
        }
        Layout::RowMajor => {
            let of_box = BoxLines { layers: 1, lines: bands * PANEL };
            matrix.data().boxes(1, matrix.rows(), matrix.columns() / 2, of_box)
        }
    }
}

impl Gpu {
    /// How the rows of `tokens` tokens lie for a matrix that [`Gpu::takes_narrow()`], where they do not lie row after
    /// row.
    pub fn right_operands(&self, matrix: &Matrix, tokens: usize) -> Option<RightOperands> {
        let takes = self.takes_narrow(matrix, tokens) && self.has_groups(matrix);
        let factor = if matches!(matrix.format(), Format::Bf12) { ENLARGED } else { 1.0 };
        let rows = OperandRows::of(tokens as u32).filter(|_| takes)?;
        let (stacks, tokens) = (rows.stacks as usize, rows.rows as usize);
        let is_spread = matrix.layout() == Layout::Panels;
        Some(RightOperands { stacks, tokens, is_spread, factor })
    }

    /// Whether groups of planes multiply a matrix.
    pub(crate) fn has_groups(&self, matrix: &Matrix) -> bool {
        self.has_warpgroups() && matrix.columns().is_multiple_of(STEP)
    }

    /// Queues a linear of activations that lie as right operands.
    pub(in crate::kernels::gpu::linear) fn multiply_groups(
        &self,
        linear: &Linear<'_>,
        operands: RightOperands,
    ) {
        let share = self.group_share(linear, operands);
        let tile = share.tile;
        let shape = linear.shape_of_lanes(tile.tokens, tile.bands, 1);
        let units = (GROUP + 1) * PLANE * tile.teams;
        let in_fours = linear.sum.is_none()
            && linear.matrices.iter().all(|matrix| matrix.rows().is_multiple_of(4));
        let (values, most) = if in_fours { (4, MOST_FOURS_AT_ONCE) } else { (1, MOST_AT_ONCE) };
        let of_unit = (tile.bands * PANEL * tile.tokens).div_ceil(units * values);
        let at_once = of_unit.min(most);
        let order = Order::of(linear.made_order);
        let (cubes, padding) = (tile.teams, SUM_PADDING);
        let shape = Shape { cubes, at_once, in_fours, order, padding, ..shape };
        let vectors = operands.count() * tile.panel.columns * 2 / LOAD_BYTES;
        // SAFETY: the spans are as long as the shapes say, and the kernel stays within those.
        unsafe {
            multiply_groups::launch_unchecked(
                &self.client,
                CubeCount::new_3d(
                    linear.cubes(tile.bands * PANEL),
                    operands.stacks as u32,
                    tile.teams as u32,
                ),
                CubeDim::new_2d(PLANE as u32, GROUP as u32 + 1),
                linear.x.argument(vectors, LOAD_BYTES),
                linear.weights(),
                linear.boxes(|matrix| boxes(matrix, tile.bands)),
                linear.outputs(),
                linear.then,
                shape,
                share,
                element(linear.made),
            );
        }
    }
}

/// Addresses of stages.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Ring {
    /// Of the first vector.
    vectors: u32,
    /// Of the first barrier: for each stage there is one of what was copied, then one of what was read.
    barriers: u32,
}

/// Writes every output: cubes take bands of its rows, output after output; along the second axis other tokens, along the
/// third, in clusters, other columns.
#[cube(launch_unchecked, cluster_dim = CubeDim::new_3d(1, 1, share.tile.teams as u32))]
fn multiply_groups<F: Float>(
    input: &[Packed],
    weights: &Sequence<Sequence<Box<[Words]>>>,
    boxes: &Sequence<Sequence<TensorMap<u32, Tiled>>>,
    outputs: &mut Sequence<Output<F>>,
    #[comptime] then: Then,
    #[comptime] shape: Shape,
    #[comptime] share: GroupShare,
    #[define(F)] _made: ElemType,
) {
    let cube = CUBE_POS_X as usize;
    let lane = UNIT_POS_X as usize;
    // Said so, all units of a plane are known to do the same: loops and addresses need no registers of each.
    let plane = plane_broadcast(UNIT_POS_Y, 0u32) as usize;
    let tile_share = comptime!(share.tile);
    let tile = comptime!(tile_share.bands * PANEL);
    let memory = Shared::<[u32]>::new_aligned_slice(comptime!(share.words(shape)), ALIGNMENT);
    let staged = memory.as_vectorized().with_vector_size::<Const<4>>();
    let mut totals = Totals::at(memory.clone(), &outputs[0], shape);
    let barriers = Shared::<[u64]>::new_slice(comptime!(share.stages * 2));
    let ring = Ring {
        vectors: shared_address::<u32>(&memory[0..1]),
        barriers: shared_address::<u64>(&barriers[0..1]),
    };
    if plane == GROUP && lane < comptime!(share.stages * 2) {
        let arrivals = select(lane % 2 == 1, comptime!(GROUP as u32).runtime(), 1u32);
        make_barrier(ring.barriers + lane as u32 * 8, arrivals);
        show_barriers();
    }
    sync_cube();
    declare_sums(comptime!(share.sums()));
    let mut first_cube = 0usize.runtime();
    #[unroll]
    for output in 0..outputs.len() {
        let rows = outputs.index(output).rows;
        let cubes = rows.div_ceil(tile);
        if cube >= first_cube && cube < first_cube + cubes {
            let band = plane % tile_share.bands;
            // Bands beyond the last row are computed, of the last one or of zeros, and not written.
            let first_panel = (cube - first_cube) * tile_share.bands;
            let last_panel = rows.div_ceil(PANEL) - 1;
            let number = (first_panel + band).min(last_panel);
            let place = Place {
                rows,
                row: number * PANEL + lane / 4 * LANE_ROWS,
                walk: lane_walk(number, rows, lane, tile_share.panel),
                lane,
                matrix: plane / tile_share.bands,
                team: 0usize.runtime(),
                member: plane * PLANE + lane,
                first_token: 0usize.runtime(),
                last_token: comptime!(tile_share.tokens - 1).runtime(),
            };
            if plane < GROUP {
                match comptime!(tile_share.layout) {
                    Layout::Panels => multiply_band(staged, ring, plane, place, share),
                    Layout::RowMajor => multiply_rows(ring, lane, share),
                }
                // All have read what lies where the sums come to lie.
                sync_group();
                let mut sums = Array::<Sums>::new(comptime!(tile_share.groups() * 2));
                take_sums(&mut sums, share);
                make_good(&mut sums, comptime!(tile_share.groups() * 2), tile_share.panel);
                if comptime!(matches!(tile_share.panel.format, Format::Bf12)) {
                    scale_sums(&weights[output], &mut sums, place, tile_share);
                }
                match comptime!(tile_share.layout) {
                    Layout::Panels => {
                        let slot = band * LANE_SLOTS + lane / 4;
                        put(&mut totals, &sums, slot, place, shape, tile_share);
                    }
                    Layout::RowMajor => put_rows(&mut totals, &sums, plane, lane, shape, share),
                }
            } else {
                let panels = Panels { rows, first: first_panel, last: last_panel };
                copy_first_weights(&weights[output], &boxes[output], ring, panels, share);
                follow();
                copy_steps(input, &weights[output], &boxes[output], ring, panels, share);
            }
        }
        first_cube += cubes;
    }
    sync_plane();
    if comptime!(tile_share.teams > 1) {
        sync_cluster();
    } else {
        sync_cube();
    }
    let columns = comptime!(tile_share.panel.columns);
    let first_token = CUBE_POS_Y as usize * comptime!(tile_share.tokens);
    finish_outputs(&totals, outputs, first_token, 0.0, tile, columns, then, shape);
    if comptime!(tile_share.teams > 1) {
        // Others may still read this cube's sums.
        sync_plane();
        sync_cluster();
    }
}

/// Makes the products of a plane: of its first pairs of rows for all tokens, then of the others.
///
/// Operands of a block are decoded while the products of the one before are under way: what is loaded lies a block
/// ahead of what is decoded, that one a block ahead of what is multiplied.
#[cube]
fn multiply_band(
    staged: &[Words],
    ring: Ring,
    plane: usize,
    place: Place,
    #[comptime] share: GroupShare,
) {
    let tile = comptime!(share.tile);
    clear_sums(comptime!(share.sums()));
    // The vector of this plane's panel in the first stage.
    let own = plane * comptime!(share.panel_loads()) + comptime!(share.x_vectors());
    let operand = right_operand(ring.vectors, tile.tokens);
    let is_split = comptime!(tile.portions() > 1);
    let lines = Lines::new(
        ring.vectors + own as u32 * LOAD_BYTES as u32,
        // Stages are whole turns of lines.
        plane * comptime!(step_lines(tile.panel)) % TURN_LINES,
        place.walk.slot,
        place.lane % 4,
        comptime!(tile.portions()),
        tile.panel,
    );
    let mut portion = Portion::new(tile.panel);
    let mut first = Array::<Packed>::new(BLOCK_OPERANDS);
    let mut second = Array::<Packed>::new(BLOCK_OPERANDS);
    let mut stage = 0usize.runtime();
    let mut turn = 0u32.runtime();
    let mut step = CUBE_POS_Z as usize;
    wait_for_turn(ring.barriers, turn);
    load_staged(&mut portion, staged, own, &lines, stage, place, 0usize, share);
    decode(&portion, &mut first, 0usize, place, share);
    if is_split {
        load_staged(&mut portion, staged, own, &lines, stage, place, 1usize, share);
    }
    let mut read_stage = 0usize.runtime();
    while step < comptime!(share.steps()) {
        let right = operand + (stage * comptime!(share.stage())) as u32;
        multiply_group(&first, right, tile.tokens);
        // Operands take the registers of those two blocks before.
        wait_for_products(1u32);
        sync_plane();
        // As far as this plane is concerned, the stage of the step before can be filled again.
        if place.lane == 0 && step >= tile.teams {
            arrive(ring.barriers + read_stage as u32 * 16 + 8);
        }
        // Behind the last step is that one again: nobody reads it.
        let next_step = step + tile.teams;
        let is_over = next_step >= comptime!(share.steps());
        let is_last = stage + 1 == share.stages;
        read_stage = stage;
        turn = select(is_last && !is_over, 1u32 - turn, turn);
        stage = select(is_over, stage, select(is_last, 0usize, stage + 1));
        wait_for_turn(ring.barriers + stage as u32 * 16, turn);
        decode(&portion, &mut second, comptime!(1 - is_split as usize), place, share);
        load_staged(&mut portion, staged, own, &lines, stage, place, 0usize, share);
        multiply_group(&second, right + comptime!((EIGHTS * tile.tokens) as u32), tile.tokens);
        wait_for_products(1u32);
        decode(&portion, &mut first, 0usize, place, share);
        if is_split {
            load_staged(&mut portion, staged, own, &lines, stage, place, 1usize, share);
        }
        step = next_step;
    }
    wait_for_products(0u32);
}

/// Makes a block of a portion operands.
#[cube]
fn decode(
    portion: &Portion,
    operands: &mut Array<Packed>,
    #[comptime] block: usize,
    place: Place,
    #[comptime] share: GroupShare,
) {
    let decoded = portion.scaled_codes(block, place.walk.slot, share.tile.panel);
    #[unroll]
    for i in 0..BLOCK_OPERANDS {
        operands[i] = decoded[i];
    }
}

/// Loads a portion of the step of a stage from shared memory, where the plane's panel begins at `own`.
#[cube]
fn load_staged(
    portion: &mut Portion,
    staged: &[Words],
    own: usize,
    lines: &Lines,
    stage: usize,
    place: Place,
    #[comptime] part: usize,
    #[comptime] share: GroupShare,
) {
    let panel = comptime!(share.tile.panel);
    if comptime!(share.has_lines) {
        let stage = stage as u32 * comptime!((share.stage() * LOAD_BYTES) as u32);
        portion.load_lines(lines, stage, part, panel);
    } else {
        // As if a whole panel lay there.
        let start = own + stage * comptime!(share.stage())
            - comptime!(loads_before(panel)) * place.walk.vectors;
        let walk = Walk { start, vectors: place.walk.vectors, slot: place.walk.slot };
        portion.load(staged, walk, place.lane % 4, part.runtime(), panel);
    }
}

/// Takes a lane's sums from where instructions left them.
#[cube]
fn take_sums(sums: &mut Array<Sums>, #[comptime] share: GroupShare) {
    let groups = comptime!(share.tile.groups());
    #[unroll]
    for at in 0..comptime!(groups * 2) {
        let mut sum = Sums::empty();
        #[unroll]
        for i in 0..4usize {
            sum.insert(i, read_sum(comptime!((at % 2 * groups + at / 2) * 4 + i)));
        }
        sums[at] = sum;
    }
}
