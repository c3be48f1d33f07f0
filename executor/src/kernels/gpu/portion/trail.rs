//! Where a lane finds its portions.

use cubecl::prelude::*;

use super::portion_columns;
use crate::kernels::cpu::pack::BLOCK_PAIR;
use crate::kernels::gpu::panel::{Panel, SCALE_LOADS, Walk};

/// Where a lane finds one portion of blocks after another, a fixed number of portions apart: what it adds to go on is
/// all that it computes.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(in crate::kernels::gpu) struct Trail {
    /// The next portion's.
    pub(in crate::kernels::gpu) number: usize,
    /// Its first words, and its scales, were portions all alike.
    pub(super) words: usize,
    pub(super) scales: usize,
    /// Loads between two of a lane's words.
    pub(super) row: usize,
    /// Loads from portion to portion.
    stride: usize,
}

#[cube]
impl Trail {
    /// From portion `number` on, `step` portions at a time.
    pub(in crate::kernels::gpu) fn new(
        walk: Walk,
        t: usize,
        number: usize,
        #[comptime] step: usize,
        #[comptime] panel: Panel,
    ) -> Trail {
        let portion = comptime!(panel.pair_stride() * portion_columns(panel) / BLOCK_PAIR);
        let start = walk.start + number * portion * walk.vectors;
        Trail {
            number,
            words: start + (SCALE_LOADS + 8 * t) * walk.vectors + walk.slot,
            scales: start + walk.slot / 2,
            row: 4 * walk.vectors,
            stride: comptime!(step * portion) * walk.vectors,
        }
    }

    /// Goes on.
    pub(in crate::kernels::gpu) fn advance(&mut self, #[comptime] step: usize) {
        self.number += step;
        self.words += self.stride;
        self.scales += self.stride;
    }
}
