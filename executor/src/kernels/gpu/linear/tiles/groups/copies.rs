//! The plane of a cube that lets steps be copied to shared memory, each when there is room for it.

use cubecl::prelude::*;

use super::Ring;
use super::share::{GroupShare, loads_before, panel_lines, step_lines, step_loads};
use crate::kernels::cpu::pack::PANEL;
use crate::kernels::gpu::instructions::Packed;
use crate::kernels::gpu::matrix::{LOAD_BYTES, Layout};
use crate::kernels::gpu::panel::panel_vectors;
use crate::kernels::gpu::warpgroup::{
    GROUP, LINE_BYTES, announce, copy_box, copy_in_bulk, wait_for_turn,
};
use crate::kernels::gpu::words::Words;

/// The panels of a cube.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Panels {
    /// Of each matrix.
    pub(super) rows: usize,
    pub(super) first: usize,
    /// Of the matrix.
    pub(super) last: usize,
}

/// Lets the weights of a cube's first steps be copied, which no launch writes.
#[cube]
pub(super) fn copy_first_weights(
    weights: &Sequence<Box<[Words]>>,
    boxes: &Sequence<TensorMap<u32, Tiled>>,
    ring: Ring,
    panels: Panels,
    #[comptime] share: GroupShare,
) {
    #[unroll]
    for stage in 0..share.early_steps() {
        let step = CUBE_POS_Z as usize + comptime!(stage * share.tile.teams);
        copy_weights(weights, boxes, ring, panels, step, stage.runtime(), share);
    }
}

/// Lets all steps of a cube be copied but for its first weights, each when there is room for it.
#[cube]
pub(super) fn copy_steps(
    input: &[Packed],
    weights: &Sequence<Box<[Words]>>,
    boxes: &Sequence<TensorMap<u32, Tiled>>,
    ring: Ring,
    panels: Panels,
    #[comptime] share: GroupShare,
) {
    let first = CUBE_POS_Z as usize;
    let early = comptime!(share.early_steps());
    #[unroll]
    for stage in 0..early {
        let step = first + comptime!(stage * share.tile.teams);
        copy_activations(input, ring, step, stage.runtime(), share);
    }
    let mut stage = early.runtime();
    // The turn before the first counts as over.
    let mut turn = 1u32.runtime();
    let mut step = first + comptime!(early * share.tile.teams);
    while step < comptime!(share.steps()) {
        wait_for_turn(ring.barriers + stage as u32 * 16 + 8, turn);
        copy_weights(weights, boxes, ring, panels, step, stage, share);
        copy_activations(input, ring, step, stage, share);
        stage += 1;
        if stage == share.stages {
            stage = 0usize;
            turn = 1u32 - turn;
        }
        step += share.tile.teams;
    }
}

/// Announces all of a step that is copied to a stage, and lets the weights of the cube's panels be.
#[cube]
fn copy_weights(
    weights: &Sequence<Box<[Words]>>,
    boxes: &Sequence<TensorMap<u32, Tiled>>,
    ring: Ring,
    panels: Panels,
    step: usize,
    stage: usize,
    #[comptime] share: GroupShare,
) {
    let x_bytes = comptime!((share.x_vectors() * LOAD_BYTES) as u32);
    let barrier = ring.barriers + stage as u32 * 16;
    let to = ring.vectors + (stage * comptime!(share.stage() * LOAD_BYTES)) as u32 + x_bytes;
    if comptime!(!share.has_lines) {
        copy_panels(weights, barrier, to, panels, step, share);
    } else {
        let bytes = comptime!((share.weight_loads() * LOAD_BYTES) as u32 + x_bytes);
        announce(barrier, bytes.runtime());
        copy_boxes(boxes, barrier, to, panels, step, share);
    }
}

/// Lets a step of the activations be copied to a stage, which has been announced.
#[cube]
fn copy_activations(
    input: &[Packed],
    ring: Ring,
    step: usize,
    stage: usize,
    #[comptime] share: GroupShare,
) {
    let bytes = comptime!((share.x_vectors() * LOAD_BYTES) as u32).runtime();
    let barrier = ring.barriers + stage as u32 * 16;
    let to = ring.vectors + (stage * comptime!(share.stage() * LOAD_BYTES)) as u32;
    let first = (CUBE_POS_Y as usize * share.steps() + step) * comptime!(share.x_vectors());
    copy_in_bulk(&input[first..first + 1], to, bytes, barrier);
}

/// Lets the weights of a step be copied from whole panels or from rows: a box of each matrix. Of what is behind the last,
/// zeros are copied.
#[cube]
fn copy_boxes(
    boxes: &Sequence<TensorMap<u32, Tiled>>,
    barrier: u32,
    to: u32,
    panels: Panels,
    step: usize,
    #[comptime] share: GroupShare,
) {
    let tile = comptime!(share.tile);
    let (word, line, layer) = match comptime!(tile.layout) {
        Layout::Panels => {
            let lines = comptime!(step_lines(tile.panel));
            let before = comptime!(panel_lines(tile.panel) - share.steps() * lines);
            (0usize.runtime(), before + step * lines, panels.first)
        }
        Layout::RowMajor => {
            (step * comptime!(LINE_BYTES / 4), panels.first * PANEL, 0usize.runtime())
        }
    };
    #[unroll]
    for matrix in 0..tile.matrices {
        let of_matrix = comptime!(matrix * tile.bands * share.panel_loads() * LOAD_BYTES);
        let to = to + comptime!(of_matrix as u32);
        copy_box(&boxes[matrix], word as u32, line as u32, layer as u32, to, barrier);
    }
}

/// Lets the weights of a step be copied from panels as they lie, and announces them with its activations.
#[cube]
fn copy_panels(
    weights: &Sequence<Box<[Words]>>,
    barrier: u32,
    to: u32,
    panels: Panels,
    step: usize,
    #[comptime] share: GroupShare,
) {
    let tile = comptime!(share.tile);
    // Of a vector of rows; a panel has two, but for the last.
    let loads = comptime!(step_loads(tile.panel));
    let mut vectors = 0usize.runtime();
    #[unroll]
    for band in 0..tile.bands {
        vectors += panel_vectors(panels.rows, (panels.first + band).min(panels.last));
    }
    let bytes = vectors * comptime!(tile.matrices * loads * LOAD_BYTES);
    announce(barrier, bytes as u32 + comptime!((share.x_vectors() * LOAD_BYTES) as u32));
    #[unroll]
    for member in 0..GROUP {
        let (matrix, band) = comptime!((member / tile.bands, member % tile.bands));
        let number = (panels.first + band).min(panels.last);
        let vectors = panel_vectors(panels.rows, number);
        let before = comptime!(loads_before(tile.panel));
        let from = number * comptime!(tile.panel.stride()) + (before + step * loads) * vectors;
        let to = to + comptime!((member * share.panel_loads() * LOAD_BYTES) as u32);
        let bytes = vectors * comptime!(loads * LOAD_BYTES);
        copy_in_bulk(&weights[matrix][from..from + 1], to, bytes as u32, barrier);
    }
}
