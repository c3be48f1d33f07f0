//! Walking along a panel of a packed matrix (see [`crate::kernels::cpu::pack`]) with loads of 16 bytes.
//!
//! - A load holds four rows; in f16, where a column's neighbours in memory are rows, eight.
//! - Loads that lie side by side and cover the rows of a panel are its *slots*.
//! - A *task* is four loads of one slot that follow one another along the columns, so that its columns of the
//!   activations are neighbours. Units beside one another take neighbouring slots, then neighbouring tasks.

use cubecl::prelude::*;
use ir::tensor::Format;

use super::bf12::small_pair;
use super::matrix::LOAD_BYTES;
use super::words::{Words, half_of};
use crate::kernels::cpu::bf12::{STEP_COLUMNS, STEP_WORDS};
use crate::kernels::cpu::pack::{BLOCK_PAIR, PANEL, VECTOR, packed_bytes, padded};

/// Loads of a task: enough independent ones for a cube of 16 planes to keep 32 KB on their way.
pub(super) const LOADS: usize = 4;

/// What is known of a panel when a kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Panel {
    pub(super) format: Format,
    pub(super) columns: usize,
}

impl Panel {
    /// Rows of a load.
    pub(super) fn rows(self) -> usize {
        if matches!(self.format, Format::F16) { 8 } else { 4 }
    }

    /// Loads side by side in a panel of two vectors.
    pub(super) fn slots(self) -> usize {
        PANEL / self.rows()
    }

    /// Loads side by side in a vector of a panel.
    pub(super) fn vector_slots(self) -> usize {
        self.slots() * VECTOR / PANEL
    }

    /// Columns of a task, all of one block pair where there are blocks.
    pub(super) fn task_columns(self) -> usize {
        match self.format {
            Format::F32 | Format::F16 => LOADS,
            Format::Bf16 => 2 * LOADS,
            Format::Bf12 => STEP_COLUMNS,
            Format::Q8 => 4 * LOADS,
            Format::Q4 => 8 * LOADS,
        }
    }

    /// Loads of a task.
    pub(super) fn loads(self) -> usize {
        if matches!(self.format, Format::Bf12) { STEP_WORDS } else { LOADS }
    }

    /// Tasks of a slot.
    pub(super) fn tasks(self) -> usize {
        self.padded().div_ceil(self.task_columns())
    }

    /// Columns that the tasks of a slot cover.
    pub(super) fn covered(self) -> usize {
        self.tasks() * self.task_columns()
    }

    /// Loads from the start of one panel to the next.
    pub(super) fn stride(self) -> usize {
        packed_bytes(self.format, PANEL, self.columns) / LOAD_BYTES
    }

    /// Blocks that a task has a part of; 0 in formats without.
    pub(super) fn blocks(self) -> usize {
        match self.format {
            Format::F32 | Format::F16 | Format::Bf16 | Format::Bf12 => 0,
            Format::Q8 => 1,
            Format::Q4 => 2,
        }
    }

    /// The columns that the panels hold, with their padding.
    pub(super) fn padded(self) -> usize {
        padded(self.format, self.columns)
    }

    /// Loads of one vector's step of a block pair, scales included.
    pub(super) fn pair_stride(self) -> usize {
        packed_bytes(self.format, PANEL, BLOCK_PAIR) / LOAD_BYTES / 2
    }

    /// Tasks of a block pair.
    fn pair_tasks(self) -> usize {
        BLOCK_PAIR / self.task_columns()
    }
}

/// Loads of one vector's scales in a step of blocks: two halves for each row.
pub(super) const SCALE_LOADS: usize = VECTOR * 4 / LOAD_BYTES;

/// Where a unit walks.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Walk {
    /// The first load of the panel, from the start of the binding.
    pub(super) start: usize,
    /// Vectors of the panel: 2, or 1 at the end of a matrix.
    pub(super) vectors: usize,
    /// Which of the loads side by side.
    pub(super) slot: usize,
}

/// The vectors of a panel of a matrix of `rows` rows.
#[cube]
pub(super) fn panel_vectors(rows: usize, panel: usize) -> usize {
    let left = rows - panel * PANEL;
    select(left > VECTOR, 2usize, 1usize)
}

/// Where a unit walks in a vector of a matrix of `rows` rows, whose first panel has that number in the binding.
#[cube]
pub(super) fn vector_walk(
    first_panel: usize,
    vector: usize,
    rows: usize,
    unit: usize,
    #[comptime] panel: Panel,
) -> Walk {
    let number = vector / comptime!(PANEL / VECTOR);
    let of_panel = vector % comptime!(PANEL / VECTOR);
    let slots = comptime!(panel.vector_slots());
    Walk {
        start: (first_panel + number) * comptime!(panel.stride()),
        vectors: panel_vectors(rows, number),
        slot: of_panel * slots + unit % slots,
    }
}

/// Loads a task's words to `words[first..]`.
#[cube]
pub(super) fn load_task(
    weights: &[Words],
    walk: Walk,
    task: usize,
    words: &mut Array<Words>,
    #[comptime] first: usize,
    #[comptime] panel: Panel,
) {
    let slots = walk.vectors * comptime!(panel.slots() / 2);
    let (base, step) = if comptime!(panel.blocks() > 0) {
        let tasks = comptime!(panel.pair_tasks());
        let pair = (task / tasks) * comptime!(panel.pair_stride()) + SCALE_LOADS;
        (pair * walk.vectors, (task % tasks) * LOADS)
    } else if comptime!(matches!(panel.format, Format::Bf12)) {
        // Behind the exponents of the rows.
        (slots, task * STEP_WORDS)
    } else {
        (0usize.runtime(), task * LOADS)
    };
    #[unroll]
    for i in 0..panel.loads() {
        let step = if comptime!(panel.covered() > panel.padded()) {
            // The last task reaches beyond the columns: what it loads there meets zeros.
            min(step + i, comptime!(panel.padded() - 1))
        } else {
            step + i
        };
        words[first + i] = weights[walk.start + base + step * slots + walk.slot];
    }
}

/// Loads the words of half a task of blocks, the first two or the others, to `words[..2]`.
#[cube]
pub(super) fn load_half(
    weights: &[Words],
    walk: Walk,
    task: usize,
    half: usize,
    words: &mut Array<Words>,
    #[comptime] panel: Panel,
) {
    let slots = walk.vectors * comptime!(panel.slots() / 2);
    let tasks = comptime!(panel.pair_tasks());
    let pair = (task / tasks) * comptime!(panel.pair_stride()) + SCALE_LOADS;
    let step = (task % tasks) * LOADS + half * comptime!(LOADS / 2);
    #[unroll]
    for i in 0..comptime!(LOADS / 2) {
        words[i] = weights[walk.start + pair * walk.vectors + (step + i) * slots + walk.slot];
    }
}

/// Loads the scales of one of a task's blocks, for each row of the slot, to `scales[first..]`.
#[cube]
pub(super) fn load_scales(
    weights: &[Words],
    walk: Walk,
    task: usize,
    scales: &mut Array<f32>,
    #[comptime] first: usize,
    #[comptime] block: usize,
    #[comptime] panel: Panel,
) {
    let tasks = comptime!(panel.pair_tasks());
    let pair = (task / tasks) * comptime!(panel.pair_stride()) * walk.vectors;
    let of_pair =
        if comptime!(panel.blocks() == 1) { (task % tasks) * 2 / tasks } else { block.runtime() };
    // Halves of eight rows are loaded, of which four are this slot's.
    let block_start = of_pair * walk.vectors * comptime!(SCALE_LOADS / 2);
    let words = weights[walk.start + pair + block_start + walk.slot / 2];
    let is_upper = walk.slot % 2 == 1;
    #[unroll]
    for i in 0..2usize {
        let word = select(is_upper, words.extract(2 + i), words.extract(i));
        scales[first + 2 * i] = half_of(word, 0usize, Format::F16);
        scales[first + 2 * i + 1] = half_of(word, 1usize, Format::F16);
    }
}

/// The first column of a task.
#[cube]
pub(super) fn task_column(task: usize, #[comptime] panel: Panel) -> usize {
    if comptime!(panel.blocks() == 2) {
        // Two blocks at once: a task has a part of each.
        let tasks = comptime!(panel.pair_tasks());
        (task / tasks) * BLOCK_PAIR + (task % tasks) * comptime!(panel.task_columns() / 2)
    } else {
        task * comptime!(panel.task_columns())
    }
}

/// Decodes a task's words, in a format without blocks, to `values[row][column]`; in 12 bits without what the row's
/// exponents are above (see [`crate::kernels::gpu::bf12`]).
#[cube]
pub(super) fn decode_floats(
    words: &Array<Words>,
    #[comptime] first: usize,
    values: &mut Array<f32>,
    #[comptime] first_value: usize,
    #[comptime] panel: Panel,
) {
    let columns = comptime!(panel.task_columns());
    // A pair of columns of 12 bits is what a load of 16 is.
    #[unroll]
    for load in 0..LOADS {
        let loaded = if comptime!(matches!(panel.format, Format::Bf12)) {
            small_pair(words, first, load)
        } else {
            words[first + load]
        };
        #[unroll]
        for i in 0..4usize {
            let word = loaded.extract(i);
            match comptime!(panel.format) {
                Format::F32 => {
                    values[first_value + i * columns + load] = f32::reinterpret(word);
                }
                Format::F16 => {
                    let at = first_value + 2 * i * columns + load;
                    values[at] = half_of(word, 0usize, Format::F16);
                    values[at + columns] = half_of(word, 1usize, Format::F16);
                }
                Format::Bf16 | Format::Bf12 => {
                    let at = first_value + i * columns + 2 * load;
                    values[at] = half_of(word, 0usize, Format::Bf16);
                    values[at + 1] = half_of(word, 1usize, Format::Bf16);
                }
                Format::Q8 | Format::Q4 => comptime!(unreachable!("blocks are decoded apart")),
            }
        }
    }
}

/// Decodes four neighbouring columns of a block from a load to `values[row][column]`, as what an element is
/// before its offset and scale: see [`BLOCK_OFFSET`].
///
/// A code becomes the upper bits of the mantissa of a number from 1 to 2, which takes a shift and a mask.
#[cube]
pub(super) fn decode_codes(
    words: Words,
    values: &mut Array<f32>,
    #[comptime] first_value: usize,
    #[comptime] row_stride: usize,
    #[comptime] block: usize,
    #[comptime] panel: Panel,
) {
    let bits = comptime!(if panel.blocks() == 1 { 8u32 } else { 4 });
    let mask = comptime!(((1u32 << bits) - 1) << (23 - bits));
    #[unroll]
    for row in 0..4usize {
        let word = words.extract(row);
        #[unroll]
        for column in 0..4usize {
            let lowest = comptime!((8 * column + 4 * block) as u32);
            let shifted = if comptime!(lowest > 23 - bits) {
                word >> comptime!(lowest - (23 - bits))
            } else {
                word << comptime!(23 - bits - lowest)
            };
            values[first_value + row_stride * row + column] =
                f32::reinterpret((shifted & mask) | 0x3f80_0000u32);
        }
    }
}

/// What [`decode_codes()`] gives for an element of zero: a code of half its range.
pub(super) const BLOCK_OFFSET: f32 = 1.5;

/// What a decoded element less [`BLOCK_OFFSET`] is multiplied with, beside its scale.
pub(super) fn block_factor(format: Format) -> f32 {
    if matches!(format, Format::Q8) { 256.0 } else { 16.0 }
}
