//! The kernel for AMX: tiles of bf16.
//!
//! A strip of up to 32 rows and a panel of two vectors are 2 × 2 tiles of sums; every loaded tile is used twice.
//! Rust has no stable intrinsics for tiles, so this is assembly.

use std::arch::asm;

use super::{Operands, Tile};
use crate::kernels::cpu::pack::{PANEL, TILE_DEPTH, VECTOR};

/// Rows of a tile.
const TILE_ROWS: usize = 16;
/// Bytes of a tile's row.
const TILE_ROW_BYTES: usize = 64;

/// The operand of `ldtilecfg`.
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Weights packed in pairs of bf16, activations encoded in tiles.
///
/// # Safety
/// That of [`super::Kernel::multiply`]; the process has permission to use tiles.
pub(super) unsafe fn tiles(operands: Operands, tile: &mut Tile) {
    let Operands { panel, vectors, strip, rows, columns } = operands;
    let upper = rows.min(TILE_ROWS);
    let lower = rows - upper;
    // Registers 0 to 3 are sums, 4 and 5 activations, 6 and 7 weights. Shapes must not be empty, and those of
    // a lower half that does not exist are not used.
    let (upper_rows, lower_rows) = (upper as u8, lower.max(1) as u8);
    let mut shapes =
        Shapes { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    shapes.row_bytes[..8].fill(TILE_ROW_BYTES as u16);
    shapes.rows[..8].copy_from_slice(&[
        upper_rows, upper_rows, lower_rows, lower_rows, upper_rows, lower_rows, 16, 16,
    ]);
    let steps = columns / TILE_DEPTH;
    // SAFETY: the loop reads `steps` steps of the strip and the panel and writes `rows` rows of the tile;
    // nothing else uses the tile registers, and they are released at the end.
    unsafe {
        asm!(
            "ldtilecfg [{shapes}]",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "test {steps}, {steps}",
            "jz 5f",
            "2:",
            "tileloadd tmm6, [{w} + {w_stride}*1]",
            "tileloadd tmm4, [{x} + {x_stride}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "cmp {w_stride}, 64",
            "je 3f",
            "tileloadd tmm7, [{w} + {w_stride}*1 + 64]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "3:",
            "test {lower}, {lower}",
            "jz 4f",
            "tileloadd tmm5, [{x} + {x_stride}*1 + 1024]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "cmp {w_stride}, 64",
            "je 4f",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "4:",
            "add {x}, {x_step}",
            "add {w}, {w_step}",
            "dec {steps}",
            "jnz 2b",
            "5:",
            "tilestored [{out} + {out_stride}*1], tmm0",
            "tilestored [{out} + {out_stride}*1 + 64], tmm1",
            "test {lower}, {lower}",
            "jz 6f",
            "tilestored [{out} + {out_stride}*1 + 2048], tmm2",
            "tilestored [{out} + {out_stride}*1 + 2112], tmm3",
            "6:",
            "tilerelease",
            shapes = in(reg) &raw const shapes,
            steps = inout(reg) steps => _,
            w = inout(reg) panel => _,
            w_stride = in(reg) vectors * VECTOR * 4,
            w_step = in(reg) vectors * VECTOR * TILE_DEPTH * 2,
            x = inout(reg) strip => _,
            x_stride = in(reg) TILE_ROW_BYTES,
            x_step = in(reg) rows * TILE_ROW_BYTES,
            lower = in(reg) lower,
            out = in(reg) tile.as_mut_ptr(),
            out_stride = in(reg) PANEL * 4,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}
