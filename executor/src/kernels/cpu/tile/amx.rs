//! The kernels for AMX: tiles of bf16 and of bytes.
//!
//! A strip of up to 32 rows and a panel of two vectors are 2 × 2 tiles of sums; every loaded tile is used twice.
//! Rust has no stable intrinsics for tiles, so this is assembly.

use std::arch::asm;
use std::arch::x86_64::*;

use super::bytes::{GroupScales, Sums};
use super::{Listed, Operands, Tile};
use crate::kernels::cpu::pack::{PANEL, TILE_DEPTH, VECTOR};

/// Rows of a tile.
pub(super) const TILE_ROWS: usize = 16;
/// Bytes of a tile's row.
pub(super) const TILE_ROW_BYTES: usize = 64;

/// The operand of `ldtilecfg`.
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Shapes the registers for strips of `rows` rows: 0 to 3 are sums, 4 and 5 activations, 6 and 7 weights.
///
/// # Safety
/// The process has permission to use tiles, and [`release`] follows on this thread.
pub(super) unsafe fn shape(rows: usize) {
    let upper = rows.min(TILE_ROWS);
    // Shapes must not be empty, and those of a lower half that does not exist are not used.
    let (upper, lower) = (upper as u8, (rows - upper).max(1) as u8);
    let mut shapes =
        Shapes { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    shapes.row_bytes[..8].fill(TILE_ROW_BYTES as u16);
    shapes.rows[..8].copy_from_slice(&[upper, upper, lower, lower, upper, lower, 16, 16]);
    // SAFETY: the operand is 64 bytes of a valid configuration.
    unsafe {
        asm!("ldtilecfg [{shapes}]", shapes = in(reg) &raw const shapes, options(nostack, readonly));
    }
}

/// Gives the registers back.
///
/// # Safety
/// No tile is in use.
pub(super) unsafe fn release() {
    // SAFETY: the caller's.
    unsafe { asm!("tilerelease", options(nostack, nomem)) };
}

/// Asks the first cache for eight lines from an address on.
macro_rules! prefetch_lines {
    ($at:literal) => {
        concat!(
            concat!("prefetcht0 [", $at, "]\n"),
            concat!("prefetcht0 [", $at, " + 64]\n"),
            concat!("prefetcht0 [", $at, " + 128]\n"),
            concat!("prefetcht0 [", $at, " + 192]\n"),
            concat!("prefetcht0 [", $at, " + 256]\n"),
            concat!("prefetcht0 [", $at, " + 320]\n"),
            concat!("prefetcht0 [", $at, " + 384]\n"),
            concat!("prefetcht0 [", $at, " + 448]"),
        )
    };
}

/// Multiplies a strip with a panel by the instruction named, and writes the sums, which go on from those there if
/// `$goes_on`.
///
/// A step is 64 bytes of each of the strip's rows, and 16 rows of the panel's vectors. Where another program has the
/// core's other thread, tiles are not loaded while products are made. So the first cache is asked meanwhile for the
/// rows of the next step, and for what lies at `next`, as much as the sums take where there are 8 steps.
macro_rules! multiply {
    ($instruction:literal, $operands:expr, $step_columns:expr, $goes_on:expr, $sums:expr) => {{
        let Operands { panel, vectors, strip, rows, columns, next } = $operands;
        asm!(
            "test {goes_on}, {goes_on}",
            "jnz 7f",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "jmp 8f",
            "7:",
            "tileloadd tmm0, [{sums} + {sums_stride}*1]",
            "tileloadd tmm1, [{sums} + {sums_stride}*1 + 64]",
            "test {lower}, {lower}",
            "jz 8f",
            "tileloadd tmm2, [{sums} + {sums_stride}*1 + 2048]",
            "tileloadd tmm3, [{sums} + {sums_stride}*1 + 2112]",
            "8:",
            "test {steps}, {steps}",
            "jz 5f",
            "cmp {w_stride}, 64",
            "je 2f",
            "test {lower}, {lower}",
            "jz 2f",
            // All four tiles are there. Loads ahead of the products wait less for each other.
            "9:",
            "tileloadd tmm6, [{w} + {w_stride}*1]",
            "tileloadd tmm4, [{x} + {x_stride}*1]",
            "tileloadd tmm7, [{w} + {w_stride}*1 + 64]",
            "tileloadd tmm5, [{x} + {x_stride}*1 + 1024]",
            concat!($instruction, " tmm0, tmm4, tmm6"),
            prefetch_lines!("{x} + 2048"),
            concat!($instruction, " tmm1, tmm4, tmm7"),
            prefetch_lines!("{x} + 2560"),
            concat!($instruction, " tmm2, tmm5, tmm6"),
            prefetch_lines!("{x} + 3072"),
            prefetch_lines!("{x} + 3584"),
            concat!($instruction, " tmm3, tmm5, tmm7"),
            prefetch_lines!("{next}"),
            "add {x}, {x_step}",
            "add {w}, {w_step}",
            "add {next}, 512",
            "dec {steps}",
            "jnz 9b",
            "jmp 5f",
            // Some are not.
            "2:",
            "tileloadd tmm6, [{w} + {w_stride}*1]",
            "tileloadd tmm4, [{x} + {x_stride}*1]",
            concat!($instruction, " tmm0, tmm4, tmm6"),
            "cmp {w_stride}, 64",
            "je 3f",
            "tileloadd tmm7, [{w} + {w_stride}*1 + 64]",
            concat!($instruction, " tmm1, tmm4, tmm7"),
            "3:",
            "test {lower}, {lower}",
            "jz 4f",
            "tileloadd tmm5, [{x} + {x_stride}*1 + 1024]",
            concat!($instruction, " tmm2, tmm5, tmm6"),
            "cmp {w_stride}, 64",
            "je 4f",
            concat!($instruction, " tmm3, tmm5, tmm7"),
            "4:",
            "add {x}, {x_step}",
            "add {w}, {w_step}",
            "dec {steps}",
            "jnz 2b",
            "5:",
            "tilestored [{sums} + {sums_stride}*1], tmm0",
            "tilestored [{sums} + {sums_stride}*1 + 64], tmm1",
            "test {lower}, {lower}",
            "jz 6f",
            "tilestored [{sums} + {sums_stride}*1 + 2048], tmm2",
            "tilestored [{sums} + {sums_stride}*1 + 2112], tmm3",
            "6:",
            goes_on = in(reg) usize::from($goes_on),
            steps = inout(reg) columns / $step_columns => _,
            w = inout(reg) panel => _,
            w_stride = in(reg) vectors * VECTOR * 4,
            w_step = in(reg) vectors * TILE_ROWS * TILE_ROW_BYTES,
            x = inout(reg) strip => _,
            x_stride = in(reg) TILE_ROW_BYTES,
            x_step = in(reg) rows * TILE_ROW_BYTES,
            lower = in(reg) rows.saturating_sub(TILE_ROWS),
            next = inout(reg) next => _,
            sums = in(reg) $sums,
            sums_stride = in(reg) PANEL * 4,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }};
}

/// Weights in pairs of bf16, activations encoded in tiles.
///
/// # Safety
/// That of [`super::Registers::multiply`]; the registers are [shaped](shape) for the strip's rows.
pub(super) unsafe fn multiply(operands: Operands, goes_on: bool, sums: &mut Tile) {
    // SAFETY: the loop reads the columns of the strip and the panel, and reads and writes the rows of the sums.
    unsafe { multiply!("tdpbf16ps", operands, TILE_DEPTH, goes_on, sums.as_mut_ptr()) }
}

/// Weights and activations in bytes; the sums of whole tiles, not scaled.
///
/// # Safety
/// That of [`super::Registers::multiply`]; the registers are [shaped](shape) for the strip's rows.
pub(super) unsafe fn multiply_bytes(operands: Operands, sums: &mut Sums) {
    // SAFETY: the loop reads the columns of the strip and the panel, and writes the rows of the sums.
    unsafe { multiply!("tdpbssd", operands, 2 * TILE_DEPTH, false, sums.0.as_mut_ptr()) }
}

/// Rows and listed columns of bf16.
///
/// # Safety
/// That of [`super::Registers::multiply_listed`]; the registers are [shaped](shape) for the rows.
pub(super) unsafe fn multiply_listed(listed: Listed<'_>) {
    let Listed { rows, row_bytes, count, steps, column_bytes, sums, sums_width, goes_on } = listed;
    // SAFETY: the loop reads the rows and the columns of each step, and reads and writes the rows' sums.
    unsafe {
        asm!(
            "test {goes_on}, {goes_on}",
            "jnz 7f",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "jmp 8f",
            "7:",
            "tileloadd tmm0, [{sums} + {sums_stride}*1]",
            "tileloadd tmm1, [{sums} + {sums_stride}*1 + 64]",
            "test {lower}, {lower}",
            "jz 8f",
            "tileloadd tmm2, [{lower_sums} + {sums_stride}*1]",
            "tileloadd tmm3, [{lower_sums} + {sums_stride}*1 + 64]",
            "8:",
            "test {left}, {left}",
            "jz 5f",
            "2:",
            "mov {w}, [{steps}]",
            "tileloadd tmm6, [{w} + {w_stride}*1]",
            "mov {w}, [{steps} + 8]",
            "tileloadd tmm4, [{x} + {x_stride}*1]",
            "tileloadd tmm7, [{w} + {w_stride}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "test {lower}, {lower}",
            "jz 4f",
            "tileloadd tmm5, [{lower_x} + {x_stride}*1]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "4:",
            "add {steps}, 16",
            "add {x}, 64",
            "add {lower_x}, 64",
            "dec {left}",
            "jnz 2b",
            "5:",
            "tilestored [{sums} + {sums_stride}*1], tmm0",
            "tilestored [{sums} + {sums_stride}*1 + 64], tmm1",
            "test {lower}, {lower}",
            "jz 6f",
            "tilestored [{lower_sums} + {sums_stride}*1], tmm2",
            "tilestored [{lower_sums} + {sums_stride}*1 + 64], tmm3",
            "6:",
            goes_on = in(reg) usize::from(goes_on),
            left = inout(reg) steps.len() => _,
            steps = inout(reg) steps.as_ptr() => _,
            w = out(reg) _,
            w_stride = in(reg) column_bytes,
            x = inout(reg) rows => _,
            lower_x = inout(reg) rows.wrapping_add(TILE_ROWS * row_bytes) => _,
            x_stride = in(reg) row_bytes,
            lower = in(reg) count.saturating_sub(TILE_ROWS),
            sums = in(reg) sums,
            lower_sums = in(reg) sums.wrapping_add(TILE_ROWS * sums_width),
            sums_stride = in(reg) sums_width * 4,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// Scales sums and adds them to `to`, if that goes on.
///
/// # Safety
/// The scales are there for all rows, and the processor has AVX-512.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn add_scaled(
    sums: &Sums,
    (rows, vectors): (usize, usize),
    scales: GroupScales,
    goes_on: bool,
    to: &mut Tile,
) {
    // SAFETY: the caller's; rows of sums have two vectors.
    unsafe {
        let mut lane_scales = [_mm512_setzero_ps(); 2];
        for (vector, lanes) in lane_scales[..vectors].iter_mut().enumerate() {
            *lanes = _mm512_loadu_ps(scales.panel.add(vector * VECTOR));
        }
        for (row, (sums, to)) in sums.0.iter().zip(to).enumerate().take(rows) {
            let row_scale = _mm512_set1_ps(scales.strip.add(row).read());
            for (vector, lanes) in lane_scales[..vectors].iter().enumerate() {
                let sum = _mm512_load_si512(sums[vector * VECTOR..].as_ptr().cast());
                let (sum, scale) = (_mm512_cvtepi32_ps(sum), _mm512_mul_ps(row_scale, *lanes));
                let to = to[vector * VECTOR..].as_mut_ptr();
                let before = if goes_on { _mm512_loadu_ps(to) } else { _mm512_setzero_ps() };
                _mm512_storeu_ps(to, _mm512_fmadd_ps(sum, scale, before));
            }
        }
    }
}
