//! Tiles with products of f32: input and weights pass through shared memory.

use cubecl::prelude::*;
use ir::op::Then;

use crate::kernels::cpu::pack::{BLOCK_PAIR, PANEL};
use crate::kernels::gpu::activation::activate;
use crate::kernels::gpu::panel::{LOADS, Panel, Walk, load_task, panel_vectors, task_column};
use crate::kernels::gpu::unpack::{decode_part, part_columns};
use crate::kernels::gpu::words::{Words, read_four};

/// Slots of a tile.
pub(super) const TILE: usize = 32;
/// Slots, and rows of a panel, of a unit.
const UNIT_TILE: usize = 4;
/// Units along each side of a cube's tile.
const SIDE: usize = TILE / UNIT_TILE;
/// Units of a cube, which computes a panel of a tile.
pub(super) const UNITS: usize = SIDE * SIDE;
/// Columns between two barriers.
const DEPTH: usize = BLOCK_PAIR;

/// Cubes: panels, tiles. See `Pass` for what is read and written.
#[cube(launch_unchecked)]
pub(super) fn multiply_tiles<N: Size>(
    input: &[Vector<f32, N>],
    weights: &Sequence<Box<[Words]>>,
    tiles: &[u32],
    order: &[u32],
    out: &mut [f32],
    rows: usize,
    used: usize,
    #[comptime] then: Then,
    #[comptime] panel: Panel,
) {
    let tile = 3 * CUBE_POS_Y as usize;
    let number = CUBE_POS_X as usize;
    let expert = tiles[tile] as usize;
    let first = tiles[tile + 1] as usize;
    let count = tiles[tile + 2] as usize;
    if count == 0 {
        terminate!();
    }
    let matrices = comptime!(weights.len());
    let is_gate = comptime!(matrices == 2);
    let columns = comptime!(panel.columns);
    let unit = UNIT_POS as usize;
    let (unit_row, unit_slot) = (unit % SIDE * UNIT_TILE, unit / SIDE * UNIT_TILE);
    let vectors = panel_vectors(rows, number);
    let start = (expert * rows.div_ceil(PANEL) + number) * comptime!(panel.stride());

    let mut x_tile = Shared::<[f32]>::new_slice(comptime!(DEPTH * TILE));
    let mut weight_tile = Shared::<[f32]>::new_slice(comptime!(matrices * DEPTH * PANEL));
    let values = comptime!(UNIT_TILE * UNIT_TILE);
    let mut sums = Array::<f32>::new(comptime!(matrices * values));
    #[unroll]
    for i in 0..comptime!(matrices * values) {
        sums[i] = 0.0;
    }

    // Which row a unit copies to the tile; those beyond the last slot are copies of that one.
    let copied = first + (unit % TILE).min(count - 1);
    let mut row = copied;
    if is_gate {
        row = order[copied] as usize / used;
    }
    for step in 0..comptime!(columns.div_ceil(DEPTH)) {
        let first_column = step * DEPTH;
        #[unroll]
        for i in 0..comptime!(DEPTH * TILE / 4 / UNITS) {
            let column = (unit / TILE + i * comptime!(UNITS / TILE)) * 4;
            let covered = comptime!(columns.next_multiple_of(DEPTH));
            let four = read_four(input, row, first_column + column, columns, covered);
            #[unroll]
            for j in 0..4usize {
                x_tile[(column + j) * TILE + unit % TILE] = four.extract(j);
            }
        }
        #[unroll]
        for matrix in 0..matrices {
            let to = comptime!(matrix * DEPTH * PANEL);
            let loads = &weights[matrix];
            decode_step(loads, start, vectors, step, &mut weight_tile, to, panel);
        }
        sync_cube();
        for column in 0..DEPTH {
            #[unroll]
            for slot in 0..UNIT_TILE {
                let x = x_tile[column * TILE + unit_slot + slot];
                #[unroll]
                for i in 0..comptime!(matrices * UNIT_TILE) {
                    let (matrix, row) = comptime!((i / UNIT_TILE, i % UNIT_TILE));
                    let from = comptime!(matrix * DEPTH * PANEL) + column * PANEL + unit_row + row;
                    let sum = comptime!(matrix * values + slot * UNIT_TILE + row);
                    sums[sum] += x * weight_tile[from];
                }
            }
        }
        sync_cube();
    }
    #[unroll]
    for i in 0..values {
        let slot = unit_slot + comptime!(i / UNIT_TILE);
        let row = number * PANEL + unit_row + comptime!(i % UNIT_TILE);
        if slot < count && row < rows {
            match then {
                Then::Nothing => {
                    out[order[first + slot] as usize * rows + row] = sums[i];
                }
                Then::Activate(activation) => {
                    out[order[first + slot] as usize * rows + row] = activate(sums[i], activation);
                }
                Then::Gate(activation) => {
                    let value = activate(sums[i], activation) * sums[comptime!(values + i)];
                    out[(first + slot) * rows + row] = value;
                }
            }
        }
    }
}

/// Decodes the columns of a step to `tile[to..]`, `[column][row of the panel]`.
#[cube]
fn decode_step(
    weights: &[Words],
    start: usize,
    vectors: usize,
    step: usize,
    tile: &mut Shared<[f32]>,
    #[comptime] to: usize,
    #[comptime] panel: Panel,
) {
    let slots = vectors * comptime!(panel.slots() / 2);
    let tasks = comptime!(DEPTH / panel.task_columns());
    let columns = comptime!(part_columns(panel));
    for index in range_stepped(UNIT_POS as usize, tasks * slots, UNITS) {
        let walk = Walk { start, vectors, slot: index % slots };
        // What lies beyond the columns meets zeros, so that any number does.
        let task = (step * tasks + index / slots).min(comptime!(panel.tasks() - 1).runtime());
        let mut words = Array::<Words>::new(LOADS);
        load_task(weights, walk, task, &mut words, 0usize, panel);
        let first_column = task_column(index / slots, panel);
        #[unroll]
        for part in 0..comptime!(panel.blocks().max(1)) {
            let mut values = Array::<f32>::new(comptime!(panel.rows() * columns));
            decode_part(weights, walk, task, &words, &mut values, part, columns, panel);
            #[unroll]
            for i in 0..comptime!(panel.rows() * columns) {
                let (row, column) = comptime!((i / columns, part * BLOCK_PAIR / 2 + i % columns));
                let at =
                    (first_column + column) * PANEL + walk.slot * comptime!(panel.rows()) + row;
                tile[comptime!(to) + at] = values[i];
            }
        }
    }
}
