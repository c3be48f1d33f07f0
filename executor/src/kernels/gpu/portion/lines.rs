//! Portions of boxes that the device copied to shared memory: lines of a whole panel, 128 bytes each, in which loads change
//! places so that a plane reads from all banks.

use cubecl::prelude::*;

use super::{Portion, PortionExpand, portion_words};
use crate::kernels::gpu::matrix::LOAD_BYTES;
use crate::kernels::gpu::panel::Panel;
use crate::kernels::gpu::warpgroup::{LINE_BYTES, TURN_LINES, load_four, load_two};
use crate::kernels::gpu::words::Words;

/// Loads side by side in a line of a box: those of a panel's rows.
const SLOTS: usize = LINE_BYTES / LOAD_BYTES;

/// Where a lane finds its portions of a step of a whole panel in the first stage, in bytes of shared memory.
#[derive(CubeType)]
pub(in crate::kernels::gpu) struct Lines {
    /// `[part][load]`.
    loads: Array<u32>,
    /// `[part][block]`: scales of the lane's four rows.
    scales: Array<u32>,
}

/// Where a panel lies.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Spot {
    /// The panel's first byte.
    first: u32,
    /// The number of its first line in a turn of lines.
    turn: u32,
}

#[cube]
impl Spot {
    /// Where load `place` of the line lies that is `beyond` lines behind line `line`.
    fn load(&self, #[comptime] line: usize, beyond: u32, place: u32) -> u32 {
        let number =
            (self.turn + comptime!((line % TURN_LINES) as u32) + beyond) % TURN_LINES as u32;
        let of_line = (place ^ number) * LOAD_BYTES as u32;
        self.first + comptime!((line * LINE_BYTES) as u32) + beyond * LINE_BYTES as u32 + of_line
    }
}

#[cube]
impl Lines {
    /// Those of `parts` portions of a step: of the lane with those rows and columns (see [`super`]), where the panel's
    /// first byte is `first` and its first line is line `turn` of a turn.
    pub(in crate::kernels::gpu) fn new(
        first: u32,
        turn: usize,
        slot: usize,
        t: usize,
        #[comptime] parts: usize,
        #[comptime] panel: Panel,
    ) -> Lines {
        let (of_part, blocks) = comptime!((portion_words(panel), panel.blocks()));
        // Scales fill the first line of blocks.
        let before = comptime!(usize::from(blocks > 0));
        let spot = Spot { first, turn: turn as u32 };
        let (slot, t) = (slot as u32, t as u32);
        let mut loads = Array::<u32>::new(comptime!(parts * of_part));
        let mut scales = Array::<u32>::new(comptime!(parts * blocks.max(1)));
        #[unroll]
        for part in 0..parts {
            let line = comptime!(before + part * 4 * of_part);
            #[unroll]
            for i in 0..of_part {
                let beyond = t * comptime!(of_part as u32) + comptime!(i as u32);
                loads[comptime!(part * of_part + i)] = spot.load(line, beyond, slot);
            }
            #[unroll]
            for block in 0..blocks {
                let half = comptime!(((part + block) * SLOTS / 2) as u32) + slot / 2;
                let of_load = slot % 2 * comptime!(LOAD_BYTES as u32 / 2);
                scales[comptime!(part * blocks + block)] =
                    spot.load(0usize, 0u32.runtime(), half) + of_load;
            }
        }
        Lines { loads, scales }
    }
}

#[cube]
impl Portion {
    /// Loads portion `part` of a step of 64 columns of a whole panel from the lines of a box in shared memory (see
    /// [`crate::kernels::gpu::warpgroup`]), `stage` bytes behind the first stage.
    pub(in crate::kernels::gpu) fn load_lines(
        &mut self,
        lines: &Lines,
        stage: u32,
        #[comptime] part: usize,
        #[comptime] panel: Panel,
    ) {
        let (loads, blocks) = comptime!((portion_words(panel), panel.blocks()));
        #[unroll]
        for i in 0..loads {
            self.words[i] = load_four(lines.loads[comptime!(part * loads + i)] + stage);
        }
        #[unroll]
        for block in 0..blocks {
            let two = load_two(lines.scales[comptime!(part * blocks + block)] + stage);
            // In both halves: whichever rows are the lane's.
            let mut halves = Words::empty();
            #[unroll]
            for i in 0..4usize {
                halves.insert(i, two.extract(comptime!(i % 2)));
            }
            self.scales[block] = halves;
        }
    }
}
