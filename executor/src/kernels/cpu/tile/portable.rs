//! Kernels in plain Rust, with loops of fixed lengths that compilers turn into vectors of any width.

#![expect(
    clippy::needless_range_loop,
    reason = "loops of fixed length over several arrays at once become registers"
)]

use std::slice;

use ir::tensor::Format;

use super::{GROUPS, Listed, Operands, SUM_STEPS, Tile};
use crate::kernels::cpu::pack::{PANEL, TILE_DEPTH, VECTOR};
use crate::kernels::cpu::quantize::BLOCK;

/// # Safety
/// That of [`super::Kernel::multiply`].
pub(super) unsafe fn multiply(format: Format, operands: Operands, tile: &mut Tile) {
    // SAFETY: the caller's; one step of a vector is 16 times the bytes read here.
    unsafe {
        match format {
            Format::F32 => floats::<4, 1>(operands, tile, |bytes| [f32::from_le_bytes(bytes)]),
            Format::F16 => floats::<2, 1>(operands, tile, |bytes| [widen(bytes)]),
            Format::Bf16 => floats::<4, 2>(operands, tile, pair),
            Format::Bf12 => unreachable!("12 bits are unpacked first"),
            Format::Q8 => blocks(operands, tile, 8),
            Format::Q4 => blocks(operands, tile, 4),
        }
    }
}

/// What the tiles of [`super::Registers`] hold, term by term.
///
/// # Safety
/// That of [`super::Registers::multiply`].
pub(super) unsafe fn tiles(operands: Operands, goes_on: bool, sums: &mut Tile) {
    let Operands { panel, vectors, strip, rows, columns, next: _ } = operands;
    // SAFETY: the caller's; a step of bf16 is a word of two columns for each lane and row.
    let (panel, strip) = unsafe {
        (
            slice::from_raw_parts(panel.cast::<[u8; 4]>(), columns / 2 * vectors * VECTOR),
            slice::from_raw_parts(strip.cast::<[u8; 4]>(), columns / 2 * rows),
        )
    };
    let words = TILE_DEPTH / 2;
    for (row, sums) in sums[..rows].iter_mut().enumerate() {
        if !goes_on {
            sums.fill(0.0);
        }
        for word in 0..columns / 2 {
            let x = pair(strip[(word / words * rows + row) * words + word % words]);
            let weights = &panel[word * vectors * VECTOR..][..vectors * VECTOR];
            for (sum, &weight) in sums.iter_mut().zip(weights) {
                let weight = pair(weight);
                *sum += x[0] * weight[0] + x[1] * weight[1];
            }
        }
    }
}

/// What tiles make of columns that are listed, term by term.
///
/// # Safety
/// That of [`super::Registers::multiply_listed`].
pub(super) unsafe fn listed(listed: Listed<'_>) {
    for row in 0..listed.count {
        for column in 0..2 * VECTOR {
            // SAFETY: the caller's.
            unsafe {
                let sum = listed.sums.add(row * listed.sums_width + column);
                let mut total = if listed.goes_on { sum.read() } else { 0.0 };
                for (step, tiles) in listed.steps.iter().enumerate() {
                    let row = listed.rows.add(row * listed.row_bytes).cast::<[u8; 4]>();
                    let row = row.add(step * TILE_DEPTH / 2);
                    let tile = tiles[column / VECTOR];
                    for word in 0..TILE_DEPTH / 2 {
                        let weights = tile.add(word * listed.column_bytes).cast::<[u8; 4]>();
                        let weights = pair(weights.add(column % VECTOR).read());
                        let x = pair(row.add(word).read());
                        total += x[0] * weights[0] + x[1] * weights[1];
                    }
                }
                sum.write(total);
            }
        }
    }
}

/// Two bf16 as f32.
fn pair(bytes: [u8; 4]) -> [f32; 2] {
    let bits = u32::from_le_bytes(bytes);
    [f32::from_bits(bits << 16), f32::from_bits(bits & 0xffff_0000)]
}

/// An f16 as f32, without the branches that keep loops from becoming vectors.
#[inline(always)]
fn widen(bytes: [u8; 2]) -> f32 {
    let half = u32::from(u16::from_le_bytes(bytes));
    let magnitude = (half & 0x7fff) << 13;
    // The exponents' biases differ by 112; the product is right for subnormal numbers too.
    let finite = (f32::from_bits(magnitude) * f32::from_bits((127 + 112) << 23)).to_bits();
    let bits = if half & 0x7c00 == 0x7c00 { magnitude | 0x7f80_0000 } else { finite };
    f32::from_bits(bits | (half & 0x8000) << 16)
}

/// Weights of which `BYTES` bytes hold `DEPTH` columns of a row; `widen` reads them.
#[inline(always)]
unsafe fn floats<const BYTES: usize, const DEPTH: usize>(
    operands: Operands,
    tile: &mut Tile,
    widen: impl Fn([u8; BYTES]) -> [f32; DEPTH],
) {
    let Operands { panel, vectors, strip, rows, columns, next: _ } = operands;
    let (panel, strip) = (panel.cast::<[[u8; BYTES]; VECTOR]>(), strip.cast::<f32>());
    tile[..rows].fill([0.0; PANEL]);
    let steps = columns / DEPTH;
    for start in (0..steps).step_by(SUM_STEPS) {
        for vector in 0..vectors {
            let mut sums = [[0.0_f32; VECTOR]; 4];
            for step in start..steps.min(start + SUM_STEPS) {
                // SAFETY: the panel has `steps` steps of its vectors.
                let packed = unsafe { panel.add(step * vectors + vector).read() };
                let mut weights = [[0.0; VECTOR]; DEPTH];
                for lane in 0..VECTOR {
                    let wide = widen(packed[lane]);
                    for part in 0..DEPTH {
                        weights[part][lane] = wide[part];
                    }
                }
                for (row, sums) in sums[..rows].iter_mut().enumerate() {
                    for (part, weights) in weights.iter().enumerate() {
                        // SAFETY: the strip has `columns` steps of `rows` floats.
                        let x = unsafe { strip.add((step * DEPTH + part) * rows + row).read() };
                        for lane in 0..VECTOR {
                            sums[lane] += weights[lane] * x;
                        }
                    }
                }
            }
            for (total, sums) in tile.iter_mut().zip(&sums[..rows]) {
                let total = &mut total[vector * VECTOR..][..VECTOR];
                total.iter_mut().zip(sums).for_each(|(total, sum)| *total += sum);
            }
        }
    }
}

unsafe fn blocks(operands: Operands, tile: &mut Tile, bits: usize) {
    let Operands { panel, vectors, strip, rows, columns, next: _ } = operands;
    let lanes = vectors * VECTOR;
    let step_bytes = lanes * (4 + 2 * BLOCK * bits / 8);
    let strip = strip.cast::<u32>();
    tile[..rows].fill([0.0; PANEL]);
    for block in 0..columns / BLOCK {
        let half = block % 2;
        // SAFETY: the layouts of `pack` and `encode`; every index is below their sizes.
        unsafe {
            let step = panel.add(block / 2 * step_bytes);
            let scales = step.cast::<[[u8; 2]; VECTOR]>().add(half * vectors);
            let codes = step.add(lanes * 4).cast::<[[u8; 4]; VECTOR]>();
            let x = strip.add(block * rows * (GROUPS + 2));
            for vector in 0..vectors {
                let scales = scales.add(vector).read();
                for row in 0..rows {
                    let x_scale = f32::from_bits(x.add(GROUPS * rows + row).read());
                    let start = x.add((GROUPS + 1) * rows + row).read().cast_signed();
                    let mut sums = [start; VECTOR];
                    for group in 0..GROUPS {
                        let at = if bits == 8 { half * GROUPS + group } else { group };
                        let words = codes.add(at * vectors + vector).read();
                        let x = x.add(group * rows + row).read().to_le_bytes();
                        let x = x.map(|byte| i32::from(byte.cast_signed()));
                        for lane in 0..VECTOR {
                            for i in 0..4 {
                                let code = match (bits, half) {
                                    (8, _) => words[lane][i],
                                    (_, 0) => words[lane][i] & 15,
                                    _ => words[lane][i] >> 4,
                                };
                                sums[lane] += i32::from(code) * x[i];
                            }
                        }
                    }
                    let totals = &mut tile[row][vector * VECTOR..][..VECTOR];
                    for lane in 0..VECTOR {
                        totals[lane] += sums[lane] as f32 * (widen(scales[lane]) * x_scale);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use half::f16;

    #[test]
    fn halves_are_widened_exactly() {
        for bits in 0..=u16::MAX {
            let (found, wanted) = (super::widen(bits.to_le_bytes()), f16::from_bits(bits).to_f32());
            assert!(found == wanted || found.is_nan() && wanted.is_nan(), "{bits:x}");
        }
    }
}
