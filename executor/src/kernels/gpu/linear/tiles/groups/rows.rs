//! Weights in 16 bits that lie row after row: left operands in shared memory, as they are copied there.
//!
//! - An operand is 64 rows of a step's columns. Of an output with one matrix, a box holds two; with a gate, each of the
//!   two matrices has a box.
//! - A lane has rows `16 plane + lane / 4` of each, and those eight behind.

use cubecl::prelude::*;

use super::Ring;
use super::share::GroupShare;
use crate::kernels::cpu::pack::PANEL;
use crate::kernels::gpu::instructions::Sums;
use crate::kernels::gpu::linear::total::{Shape, Totals};
use crate::kernels::gpu::matrix::LOAD_BYTES;
use crate::kernels::gpu::warpgroup::{
    GROUP, arrive, clear_sums, left_operand, multiply_boxes, right_operand, wait_for_products,
    wait_for_turn,
};

/// Rows of an operand.
const OPERAND_ROWS: usize = 2 * PANEL;

/// Makes the products of a group.
#[cube]
pub(super) fn multiply_rows(ring: Ring, lane: usize, #[comptime] share: GroupShare) {
    let tokens = comptime!(share.tile.tokens);
    clear_sums(comptime!(share.sums()));
    let right = right_operand(ring.vectors, tokens);
    let left = left_operand(ring.vectors + comptime!((share.x_vectors() * LOAD_BYTES) as u32));
    let mut stage = 0usize.runtime();
    let mut turn = 0u32.runtime();
    let mut step = CUBE_POS_Z as usize;
    while step < comptime!(share.steps()) {
        let barrier = ring.barriers + stage as u32 * 16;
        let at = (stage * comptime!(share.stage())) as u32;
        wait_for_turn(barrier, turn);
        multiply_boxes(left + at, right + at, tokens);
        wait_for_products(0u32);
        if lane == 0 {
            arrive(barrier + 8);
        }
        stage += 1;
        if stage == share.stages {
            stage = 0usize;
            turn = 1u32 - turn;
        }
        step += share.tile.teams;
    }
}

/// Puts a lane's sums.
#[cube]
pub(super) fn put_rows(
    totals: &mut Totals,
    sums: &Array<Sums>,
    plane: usize,
    lane: usize,
    #[comptime] shape: Shape,
    #[comptime] share: GroupShare,
) {
    let first = plane * comptime!(OPERAND_ROWS / GROUP) + lane / 4;
    #[unroll]
    for group in 0..comptime!(share.tile.groups()) {
        #[unroll]
        for half in 0..2usize {
            let (matrix, of_matrix) = comptime!((half % shape.matrices, half / shape.matrices));
            let of_lane = sums[comptime!(2 * group + half)];
            #[unroll]
            for i in 0..4usize {
                let row = first + comptime!(of_matrix * OPERAND_ROWS + i / 2 * 8);
                let token = comptime!(group * 8 + i % 2) + lane % 4 * 2;
                totals.put_row(row, matrix, token, of_lane.extract(i), shape);
            }
        }
    }
}
