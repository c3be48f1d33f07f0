//! Kernels in plain Rust.

use half::f16;
use ir::tensor::Format;

use super::{Operands, SUM_STEPS, Tile};
use crate::kernels::cpu::pack::{PANEL, VECTOR};
use crate::kernels::cpu::quantize::BLOCK;

/// # Safety
/// That of [`super::Kernel::multiply`].
pub(super) unsafe fn multiply(format: Format, operands: Operands, tile: &mut Tile) {
    // SAFETY: the caller's.
    unsafe {
        match format {
            Format::F32 => {
                floats(operands, tile, |panel, index| panel.cast::<f32>().add(index).read())
            }
            Format::F16 => {
                floats(operands, tile, |panel, index| {
                    panel.cast::<f16>().add(index).read().to_f32()
                });
            }
            Format::Bf16 => floats(operands, tile, |panel, index| {
                // Columns come in pairs: `[step][lane][2]`.
                let lanes = operands.vectors * VECTOR;
                let (column, lane) = (index / lanes, index % lanes);
                let at = (column / 2 * lanes + lane) * 2 + column % 2;
                f32::from_bits(u32::from(panel.cast::<u16>().add(at).read()) << 16)
            }),
            Format::Q8 => blocks(operands, tile, 8),
            Format::Q4 => blocks(operands, tile, 4),
        }
    }
}

/// `weight(panel, column · lanes + lane)` reads one weight.
unsafe fn floats(operands: Operands, tile: &mut Tile, weight: impl Fn(*const u8, usize) -> f32) {
    let Operands { panel, vectors, strip, rows, columns } = operands;
    let (lanes, strip) = (vectors * VECTOR, strip.cast::<f32>());
    tile[..rows].fill([0.0; PANEL]);
    for start in (0..columns).step_by(SUM_STEPS) {
        let mut sums = [[0.0_f32; PANEL]; 4];
        for column in start..columns.min(start + SUM_STEPS) {
            for lane in 0..lanes {
                let weight = weight(panel, column * lanes + lane);
                for (row, sums) in sums[..rows].iter_mut().enumerate() {
                    // SAFETY: the strip has `columns` steps of `rows` floats.
                    sums[lane] += weight * unsafe { strip.add(column * rows + row).read() };
                }
            }
        }
        for (total, sums) in tile.iter_mut().zip(&sums[..rows]) {
            total.iter_mut().zip(sums).for_each(|(total, sum)| *total += sum);
        }
    }
}

unsafe fn blocks(operands: Operands, tile: &mut Tile, bits: usize) {
    let Operands { panel, vectors, strip, rows, columns } = operands;
    let lanes = vectors * VECTOR;
    let step_bytes = lanes * (4 + 2 * BLOCK * bits / 8);
    let strip = strip.cast::<u32>();
    tile[..rows].fill([0.0; PANEL]);
    for block in 0..columns / BLOCK {
        let half = block % 2;
        for row in 0..rows {
            // SAFETY: the layouts of `pack` and `encode`; every index is below their sizes.
            unsafe {
                let step = panel.add(block / 2 * step_bytes);
                let codes = step.add(lanes * 4);
                let x = strip.add(block * rows * (BLOCK / 4 + 2));
                let x_scale = f32::from_bits(x.add(BLOCK / 4 * rows + row).read());
                let start = x.add((BLOCK / 4 + 1) * rows + row).read().cast_signed();
                for lane in 0..lanes {
                    let scale = step.cast::<f16>().add(half * lanes + lane).read().to_f32();
                    let mut sum = start;
                    for group in 0..BLOCK / 4 {
                        let at = if bits == 8 { half * BLOCK / 4 + group } else { group };
                        let word = codes.cast::<[u8; 4]>().add(at * lanes + lane).read();
                        let x = x.add(group * rows + row).read().to_le_bytes();
                        for (code, x) in word.into_iter().zip(x) {
                            let code = match (bits, half) {
                                (8, _) => code,
                                (_, 0) => code & 15,
                                _ => code >> 4,
                            };
                            sum += i32::from(code) * i32::from(x.cast_signed());
                        }
                    }
                    tile[row][lane] += sum as f32 * (scale * x_scale);
                }
            }
        }
    }
}
