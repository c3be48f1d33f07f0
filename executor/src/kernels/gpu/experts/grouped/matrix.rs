//! Tiles with matrix instructions: weights go from panels to registers, the tile's input through shared memory.
//!
//! - A plane computes 32 rows for all slots of the tile, so that a tile's cubes decode every weight once. With two
//!   stacks these are 16 rows of the gate and the same of up, which are neighbours within the plane.
//! - Input passes shared memory with one barrier a step; weights are loaded some portions ahead: more where there are
//!   few slots, since memory is what these wait for.

use cubecl::prelude::*;
use ir::op::Then;

use crate::kernels::cpu::pack::PANEL;
use crate::kernels::gpu::activation::activate;
use crate::kernels::gpu::instructions::{self, Packed, Sums, pack};
use crate::kernels::gpu::panel::{Panel, Walk, panel_vectors};
use crate::kernels::gpu::portion::{Portion, add_block, four_rows, make_good, portion_blocks};
use crate::kernels::gpu::staged::{
    STAGES, STEP, STRIDE, VECTORS, copy_vector, end_copies, stage_after, stage_before,
    wait_for_copies,
};
use crate::kernels::gpu::words::Words;

/// Lanes of a plane.
pub(super) const PLANE: usize = instructions::PLANE as usize;
/// Planes of a cube: with 64 slots a lane needs about 160 registers, and three such cubes fit a multiprocessor.
pub(super) const PLANES: usize = 4;
/// Rows of a plane, of all stacks.
const PLANE_ROWS: usize = PANEL;
/// What is known of a tile when a kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Tile {
    /// A multiple of 8.
    pub(super) slots: usize,
    /// Whether elements are bf16, not f16.
    pub(super) is_bf16: bool,
    /// Whether gated rows are.
    pub(super) makes_bf16: bool,
}

impl Tile {
    /// Portions that a plane has in registers, of `portions` in a step: of few slots there are registers for more.
    fn kept(self, portions: usize) -> usize {
        match (self.slots, portions) {
            (..=32, 1) => 3,
            (..=32, _) => 4,
            _ => 2,
        }
    }

    /// 16-byte vectors from stage to stage.
    fn stage(self) -> usize {
        self.slots * STRIDE
    }

    /// 16-byte vectors that are copied in a step.
    fn vectors(self) -> usize {
        self.slots * VECTORS
    }

    /// How many of them a unit copies, at most, from as many slots.
    fn copies(self) -> usize {
        self.vectors().div_ceil(PLANE * PLANES)
    }
}

/// Whether rows of `columns` elements are whole vectors.
pub(super) fn serves(columns: usize) -> bool {
    columns.is_multiple_of(8)
}

/// Slots of a tile where experts have `mean` on average: few enough that most tiles are full, and at most as many as
/// registers hold sums of.
pub(super) fn tile(mean: usize) -> usize {
    match mean {
        0..=5 => 8,
        6..=12 => 16,
        13..=40 => 32,
        _ => 64,
    }
}

/// Rows of each of `stacks` stacks that a cube computes.
pub(super) fn rows_of_cube(stacks: usize) -> usize {
    PLANES * PLANE_ROWS / stacks
}

/// Cubes: rows of the stacks, tiles. See `Pass` for what is read and written.
///
/// Of four neighbouring rows `out` takes f32, or pairs of 16 bits with two stacks.
#[cube(launch_unchecked)]
pub(super) fn multiply_tiles<N: Size>(
    input: &[Packed],
    weights: &Sequence<Box<[Words]>>,
    tiles: &[u32],
    order: &[u32],
    out: &mut [Vector<u32, N>],
    rows: usize,
    used: usize,
    #[comptime] then: Then,
    #[comptime] tile: Tile,
    #[comptime] panel: Panel,
) {
    let number = 3 * CUBE_POS_Y as usize;
    let expert = tiles[number] as usize;
    let first = tiles[number + 1] as usize;
    let count = tiles[number + 2] as usize;
    if count == 0 {
        terminate!();
    }
    let is_gate = comptime!(weights.len() == 2);
    let lane = UNIT_POS_X as usize;
    let plane = UNIT_POS_Y as usize;
    let (g, t) = (lane / 4, lane % 4);
    let steps = comptime!(panel.columns.div_ceil(STEP));

    // Which rows of the tile a unit copies; those beyond the last slot are copies of that one.
    let unit = plane * PLANE + lane;
    let mut copied = Array::<usize>::new(comptime!(tile.copies()));
    #[unroll]
    for i in 0..comptime!(tile.copies()) {
        let slot = unit / VECTORS + comptime!(i * PLANE * PLANES / VECTORS);
        let slot = first + slot.min(count - 1);
        let mut row = slot;
        if is_gate {
            row = order[slot] as usize / used;
        }
        copied[i] = row * comptime!(panel.columns / 8);
    }
    let mut staged =
        Shared::<[Packed]>::new_aligned_slice(comptime!(STAGES * tile.stage()), 16usize);
    #[unroll]
    for step in 0..comptime!(STAGES - 1) {
        if comptime!(step < steps) {
            copy_step(
                input,
                &mut staged,
                &copied,
                comptime!(step * tile.stage()).runtime(),
                step.runtime(),
                tile,
                panel,
            );
        }
        end_copies();
    }

    // Four neighbouring rows of a stack are the lane's; those beyond the last are computed as others and not stored.
    let is_up = is_gate && g >= 4;
    let mut place = CUBE_POS_X as usize * comptime!(PLANES * 8) + plane * 8 + g;
    if is_gate {
        place = CUBE_POS_X as usize * comptime!(PLANES * 4) + plane * 4 + g % 4;
    }
    let row = 4 * place;
    let panels = rows.div_ceil(PANEL);
    let panel_number = (row / PANEL).min(panels - 1);
    let vectors = panel_vectors(rows, panel_number);
    let walk = Walk {
        start: (expert * panels + panel_number) * comptime!(panel.stride()),
        vectors,
        slot: place % (4 * vectors),
    };

    let mut sums = Array::<Sums>::new(comptime!(tile.slots / 4));
    #[unroll]
    for i in 0..comptime!(tile.slots / 4) {
        sums[i] = Sums::zeroed();
    }
    let blocks = comptime!(portion_blocks(panel));
    let portions = comptime!(STEP / 32 / blocks);
    let last_portion = comptime!(steps * portions - 1);
    let count_kept = comptime!(tile.kept(portions));
    let mut kept = Sequence::<Portion>::new();
    #[unroll]
    for index in 0..count_kept {
        let mut portion = Portion::new(panel);
        if comptime!(index + 1 < count_kept) {
            let number = comptime!(index.min(last_portion)).runtime();
            load(&mut portion, weights, is_up, walk, t, number, panel);
        }
        kept.push(portion);
    }
    let mut stage = 0usize.runtime();
    let mut step = 0usize.runtime();
    while step < steps {
        #[unroll]
        for turn in 0..comptime!(count_kept / portions) {
            if step < steps {
                wait_for_copies();
                sync_cube();
                if step + comptime!(STAGES - 1) < steps {
                    let behind = stage_before(stage, tile.stage());
                    let next = step + comptime!(STAGES - 1);
                    copy_step(input, &mut staged, &copied, behind, next, tile, panel);
                }
                end_copies();
                #[unroll]
                for part in 0..portions {
                    let now = comptime!(turn * portions + part);
                    let free = comptime!((now + count_kept - 1) % count_kept);
                    let following = step * portions + comptime!(part + count_kept - 1);
                    let following = following.min(last_portion.runtime());
                    load(kept.index_mut(free), weights, is_up, walk, t, following, panel);
                    #[unroll]
                    for block in 0..blocks {
                        let operands = kept.index(now).scaled_codes(block, walk.slot, panel);
                        let from = stage + g * STRIDE + t + comptime!(4 * (part * blocks + block));
                        #[unroll]
                        for i in 0..comptime!(tile.slots / 8) {
                            let x = staged[from + comptime!(8 * i * STRIDE)];
                            add_block(&operands, x, &mut sums, i, tile.is_bf16);
                        }
                    }
                }
                stage = stage_after(stage, tile.stage());
                step += 1;
            }
        }
    }

    make_good(&mut sums, comptime!(tile.slots / 4), panel);
    #[unroll]
    for i in 0..comptime!(tile.slots / 8) {
        let sums_of_pair = (sums[comptime!(2 * i)], sums[comptime!(2 * i + 1)]);
        let even = four_rows(sums_of_pair.0, sums_of_pair.1, 0usize);
        let odd = four_rows(sums_of_pair.0, sums_of_pair.1, 1usize);
        let slot = comptime!(8 * i) + 2 * t;
        match then {
            Then::Nothing => {
                store(out, order, first, slot, count, row, rows, &even);
                store(out, order, first, slot + 1, count, row, rows, &odd);
            }
            Then::Activate(_) => comptime!(unreachable!("experts are gated or not at all")),
            Then::Gate(activation) => {
                // Of two slots the gate's lane computes the first, up's lane the second.
                let slot = slot + select(is_up, 1usize, 0usize);
                let mut values = Array::<f32>::new(4usize);
                #[unroll]
                for j in 0..4usize {
                    let kept = select(is_up, odd[j], even[j]);
                    let sent = select(is_up, even[j], odd[j]);
                    let other = plane_shuffle_xor(sent, 16u32);
                    let gate = select(is_up, other, kept);
                    let up = select(is_up, kept, other);
                    values[j] = activate(gate, activation) * up;
                }
                if slot < count && row < rows {
                    let mut packed = Vector::<u32, N>::empty();
                    packed.insert(0usize, pack(values[0], values[1], tile.makes_bf16));
                    packed.insert(1usize, pack(values[2], values[3], tile.makes_bf16));
                    out[((first + slot) * rows + row) / 4] = packed;
                }
            }
        }
    }
}

/// Loads a portion of the lane's stack.
#[cube]
fn load(
    portion: &mut Portion,
    weights: &Sequence<Box<[Words]>>,
    is_up: bool,
    walk: Walk,
    t: usize,
    number: usize,
    #[comptime] panel: Panel,
) {
    if comptime!(weights.len() == 2) {
        if is_up {
            portion.load(&weights[1], walk, t, number, panel);
        } else {
            portion.load(&weights[0], walk, t, number, panel);
        }
    } else {
        portion.load(&weights[0], walk, t, number, panel);
    }
}

/// Starts to copy a step of the tile's input; columns behind the last become zeros.
#[cube]
fn copy_step(
    input: &[Packed],
    staged: &mut Shared<[Packed]>,
    rows: &Array<usize>,
    stage: usize,
    step: usize,
    #[comptime] tile: Tile,
    #[comptime] panel: Panel,
) {
    let unit = UNIT_POS_Y as usize * PLANE + UNIT_POS_X as usize;
    let vector = step * VECTORS + unit % VECTORS;
    let is_inside = vector < comptime!(panel.columns / 8);
    let vector = select(is_inside, vector, 0usize);
    #[unroll]
    for i in 0..comptime!(tile.copies()) {
        let slot = unit / VECTORS + comptime!(i * PLANE * PLANES / VECTORS);
        let from = rows[i] + vector;
        let to = stage + slot * STRIDE + unit % VECTORS;
        let is_whole = comptime!(tile.vectors().is_multiple_of(PLANE * PLANES));
        if is_whole || slot < tile.slots {
            copy_vector(input, from, is_inside, staged, to);
        }
    }
}

/// Stores four rows of a slot of the tile, where the slots are, if there is such a slot and such rows.
#[cube]
fn store<N: Size>(
    out: &mut [Vector<u32, N>],
    order: &[u32],
    first: usize,
    slot: usize,
    count: usize,
    row: usize,
    rows: usize,
    values: &Array<f32>,
) {
    if slot < count && row < rows {
        let mut words = Vector::<u32, N>::empty();
        #[unroll]
        for i in 0..4usize {
            words.insert(i, u32::reinterpret(values[i]));
        }
        out[(order[first + slot] as usize * rows + row) / 4] = words;
    }
}
