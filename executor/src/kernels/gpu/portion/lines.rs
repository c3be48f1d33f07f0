//! Portions of boxes that the device copied to shared memory: lines of a whole panel, 128 bytes each, in which loads change
//! places so that a plane reads from all banks.

use cubecl::prelude::*;

use super::{Portion, PortionExpand, portion_words};
use crate::kernels::gpu::matrix::LOAD_BYTES;
use crate::kernels::gpu::panel::Panel;
use crate::kernels::gpu::warpgroup::{LINE_BYTES, TURN_LINES};
use crate::kernels::gpu::words::Words;

/// Loads side by side in a line of a box: those of a panel's rows.
const SLOTS: usize = LINE_BYTES / LOAD_BYTES;

/// Lines of a portion in a box, but for those of scales.
fn portion_lines(panel: Panel) -> usize {
    4 * portion_words(panel)
}

/// A step of a whole panel in a box, and what a lane reads of it.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(in crate::kernels::gpu) struct Lines {
    /// Its first load.
    pub(in crate::kernels::gpu) first: usize,
    /// The number of its first line in a turn of lines.
    pub(in crate::kernels::gpu) turn: usize,
    /// The lane's load of a line.
    pub(in crate::kernels::gpu) slot: usize,
    /// The lane's columns: see [`super`].
    pub(in crate::kernels::gpu) t: usize,
}

#[cube]
impl Lines {
    /// Where load `place` of a line lies.
    fn load(&self, line: usize, place: usize) -> usize {
        self.first + (line * SLOTS + (place ^ ((self.turn + line) % TURN_LINES)))
    }
}

#[cube]
impl Portion {
    /// Loads portion `part` of a step of 64 columns of a whole panel from the lines of a box in shared memory (see
    /// [`crate::kernels::gpu::warpgroup`]).
    pub(in crate::kernels::gpu) fn load_lines(
        &mut self,
        staged: &[Words],
        lines: Lines,
        #[comptime] part: usize,
        #[comptime] panel: Panel,
    ) {
        let is_block = comptime!(panel.blocks() > 0);
        // Scales fill the first line of blocks.
        let before = comptime!(usize::from(is_block) + part * portion_lines(panel));
        let loads = comptime!(portion_words(panel));
        #[unroll]
        for i in 0..loads {
            self.words[i] = staged[lines.load(before + loads * lines.t + i, lines.slot)];
        }
        if is_block {
            #[unroll]
            for block in 0..comptime!(panel.blocks()) {
                let half = comptime!((part + block) * SLOTS / 2) + lines.slot / 2;
                self.scales[block] = staged[lines.load(0usize.runtime(), half)];
            }
        }
    }
}
