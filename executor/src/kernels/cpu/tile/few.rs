//! Tiles of AMX for few rows, whose weights come straight from memory: one panel along all its columns.
//!
//! Dot products of vectors are the limit from a few rows on (of bf16 one takes two cycles, for each row), while tiles
//! multiply sixteen rows as fast as one. What is left is to keep memory busy: a panel is read in its order, and is
//! asked for ahead; where it has to be unpacked, that is done a step ahead of the tiles, so that both go on at once.
//! Further strips find it in a cache.
//!
//! Sums of bf16 stay in the tile registers from step to step, between which the compiler's code runs. It has no use for
//! them: nothing here is compiled for AMX.

use std::arch::asm;
use std::mem::MaybeUninit;

use ir::tensor::Format;

use super::ahead::{Ahead, prefetch_lines};
use super::amx::{TILE_ROW_BYTES, TILE_ROWS};
use super::unpack::bf12_steps;
use super::{Operands, Tile};
use crate::kernels::cpu::bf12;
use crate::kernels::cpu::pack::{PANEL, TILE_DEPTH};

/// How far ahead of their use weights are asked for. Distances of whole steps were slower in 12 bits.
const AHEAD_BYTES: usize = 1152;

/// Pairs of bf16 of a step: those of a tile.
const STEP_PAIRS: usize = TILE_DEPTH / 2;

/// Multiplies a strip of up to 32 rows, encoded in tiles, with a panel of bf16 or of 12 bits.
///
/// # Safety
/// That of [`super::Registers::multiply_along`]; the registers are [shaped](super::amx::shape) for the strip's rows.
pub(super) unsafe fn multiply(format: Format, operands: Operands, tile: &mut Tile) {
    // SAFETY: the caller's.
    unsafe {
        match (format, operands.vectors) {
            (Format::Bf12, 1) => small_floats::<1>(operands, tile),
            (Format::Bf12, _) => small_floats::<2>(operands, tile),
            (_, 1) => pairs::<1>(operands, tile),
            (_, _) => pairs::<2>(operands, tile),
        }
    }
}

/// Weights in pairs of bf16.
#[target_feature(enable = "avx512f")]
unsafe fn pairs<const V: usize>(operands: Operands, tile: &mut Tile) {
    let Operands { panel, strip, rows, columns, next, .. } = operands;
    let steps = columns / TILE_DEPTH;
    let step_bytes = V * STEP_PAIRS * TILE_ROW_BYTES;
    let ahead = Ahead::at(AHEAD_BYTES, (panel, steps * step_bytes), next);
    // SAFETY: the panel and the strip have `steps` steps, and the tile has room for their rows.
    unsafe {
        clear();
        for step in 0..steps {
            let w = panel.add(step * step_bytes);
            prefetch_lines(w.wrapping_add(ahead.distance(w)), step_bytes);
            multiply_step::<V>(w, strip.add(step * rows * TILE_ROW_BYTES), rows);
        }
        store(rows, tile);
    }
}

/// Weights in 12 bits, unpacked a step ahead of the tiles that they are multiplied in.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn small_floats<const V: usize>(operands: Operands, tile: &mut Tile) {
    /// Pairs of two steps, so that one can be multiplied while the other is unpacked.
    #[repr(align(64))]
    struct Room([[[u16; 2]; STEP_PAIRS * PANEL]; 2]);

    let Operands { strip, rows, columns, next, .. } = operands;
    // SAFETY: the caller's: a panel in 12 bits.
    let panel = unsafe { bf12::Panel::at(operands.panel, V, columns) };
    let words = panel.words(0..columns);
    let (start, bytes) = (words.as_ptr().cast::<u8>(), size_of_val(words));
    let steps = columns / TILE_DEPTH;
    let step_bytes = TILE_DEPTH / bf12::STEP_COLUMNS * bf12::STEP_WORDS * V * bf12::VECTOR_BYTES;
    let ahead = Ahead::at(AHEAD_BYTES, (start, bytes), next);
    let mut room = MaybeUninit::<Room>::uninit();
    let room = room.as_mut_ptr();
    // SAFETY: the panel and the strip have `steps` steps, the tile has room for their rows, and the room for two steps,
    // of which only what was unpacked is read.
    unsafe {
        clear();
        for turn in 0..=steps {
            if turn < steps {
                let from = start.wrapping_add(turn * step_bytes);
                let to = (&raw mut (*room).0[turn % 2]).cast();
                let steps = TILE_DEPTH / bf12::STEP_COLUMNS;
                let distance = ahead.distance(from);
                bf12_steps::<V>(&panel, from.cast(), steps, Some(distance), to);
            }
            if let Some(step) = turn.checked_sub(1) {
                let w = (&raw const (*room).0[step % 2]).cast();
                multiply_step::<V>(w, strip.add(step * rows * TILE_ROW_BYTES), rows);
            }
        }
        store(rows, tile);
    }
}

/// Starts sums of zero in tiles 0 to 3.
#[inline(always)]
unsafe fn clear() {
    // SAFETY: the registers are shaped.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            options(nostack, nomem),
        );
    }
}

/// Adds the products of one step, of pairs of bf16, to the sums.
///
/// # Safety
/// The step's pairs and rows can be read.
#[inline(always)]
unsafe fn multiply_step<const V: usize>(w: *const u8, x: *const u8, rows: usize) {
    macro_rules! step {
        ($($line:literal),*) => {
            asm!(
                $($line),*,
                w = in(reg) w,
                w_stride = in(reg) V * TILE_ROW_BYTES,
                x = in(reg) x,
                x_stride = in(reg) TILE_ROW_BYTES,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, readonly),
            )
        };
    }
    // SAFETY: the caller's.
    unsafe {
        match (V, rows > TILE_ROWS) {
            (1, false) => step!(
                "tileloadd tmm6, [{w} + {w_stride}*1]",
                "tileloadd tmm4, [{x} + {x_stride}*1]",
                "tdpbf16ps tmm0, tmm4, tmm6"
            ),
            (1, true) => step!(
                "tileloadd tmm6, [{w} + {w_stride}*1]",
                "tileloadd tmm4, [{x} + {x_stride}*1]",
                "tileloadd tmm5, [{x} + {x_stride}*1 + 1024]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm2, tmm5, tmm6"
            ),
            (_, false) => step!(
                "tileloadd tmm6, [{w} + {w_stride}*1]",
                "tileloadd tmm4, [{x} + {x_stride}*1]",
                "tileloadd tmm7, [{w} + {w_stride}*1 + 64]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7"
            ),
            (_, true) => step!(
                "tileloadd tmm6, [{w} + {w_stride}*1]",
                "tileloadd tmm4, [{x} + {x_stride}*1]",
                "tileloadd tmm7, [{w} + {w_stride}*1 + 64]",
                "tileloadd tmm5, [{x} + {x_stride}*1 + 1024]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7"
            ),
        }
    }
}

/// Writes the sums of `rows` rows to `tile`.
#[inline(always)]
unsafe fn store(rows: usize, tile: &mut Tile) {
    let (to, stride) = (tile.as_mut_ptr(), size_of_val(&tile[0]));
    // SAFETY: a tile has all rows of both vectors; what a missing vector's sums are is written and not read.
    unsafe {
        asm!(
            "tilestored [{to} + {stride}*1], tmm0",
            "tilestored [{to} + {stride}*1 + 64], tmm1",
            to = in(reg) to,
            stride = in(reg) stride,
            options(nostack),
        );
        if rows > TILE_ROWS {
            asm!(
                "tilestored [{to} + {stride}*1 + 2048], tmm2",
                "tilestored [{to} + {stride}*1 + 2112], tmm3",
                to = in(reg) to,
                stride = in(reg) stride,
                options(nostack),
            );
        }
    }
}
