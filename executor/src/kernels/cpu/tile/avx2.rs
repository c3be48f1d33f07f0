//! Kernels for AVX2 with FMA and F16C: a vector of weights is two registers.
//!
//! A strip of 4 rows has eight sums in registers. The two vectors of a panel take turns.

#![expect(
    clippy::needless_range_loop,
    reason = "loops of fixed length over several arrays at once become registers"
)]

use std::arch::x86_64::*;

use ir::tensor::Format;

use super::{Operands, SUM_STEPS, Tile};
use crate::kernels::cpu::pack::{BLOCK_PAIR, VECTOR};
use crate::kernels::cpu::quantize::BLOCK;

const F32: u8 = 0;
const F16: u8 = 1;
const BF16: u8 = 2;

macro_rules! by_rows {
    ($kernel:ident, $operands:expr, $tile:expr, [$($rows:literal)*], $constant:expr) => {
        match $operands.rows {
            $($rows => $kernel::<$rows, { $constant }>($operands, $tile),)*
            rows => unreachable!("a strip of {rows} rows"),
        }
    };
}

/// # Safety
/// That of [`super::Kernel::multiply`].
pub(super) unsafe fn multiply(format: Format, operands: Operands, tile: &mut Tile) {
    // SAFETY: the caller's.
    unsafe {
        match format {
            Format::F32 => by_rows!(floats, operands, tile, [1 2 3 4], F32),
            Format::F16 => by_rows!(floats, operands, tile, [1 2 3 4], F16),
            Format::Bf16 => by_rows!(floats, operands, tile, [1 2 3 4], BF16),
            Format::Bf12 => unreachable!("12 bits are unpacked first"),
            Format::Q8 => by_rows!(blocks, operands, tile, [1 2], 8),
            Format::Q4 => by_rows!(blocks, operands, tile, [1 2], 4),
        }
    }
}

/// Weights in f32, f16 or bf16; activations in f32.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn floats<const R: usize, const KIND: u8>(operands: Operands, tile: &mut Tile) {
    let depth = if KIND == BF16 { 2 } else { 1 };
    let vector_bytes = if KIND == F16 { 32 } else { 64 };
    let steps = operands.columns / depth;
    for vector in 0..operands.vectors {
        let mut w = operands.panel.wrapping_add(vector * vector_bytes);
        let mut x = operands.strip.cast::<f32>();
        for start in (0..steps.max(1)).step_by(SUM_STEPS) {
            let mut sums = [[_mm256_setzero_ps(); 2]; R];
            for _ in start..steps.min(start + SUM_STEPS) {
                // SAFETY: the panel and the strip have `steps` steps.
                unsafe {
                    for part in 0..depth {
                        let mut weights = [_mm256_setzero_ps(); 2];
                        for side in 0..2 {
                            let from = w.add(side * vector_bytes / 2);
                            weights[side] = match KIND {
                                F32 => _mm256_loadu_ps(from.cast()),
                                F16 => _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
                                _ => {
                                    let pair = _mm256_loadu_si256(from.cast());
                                    _mm256_castsi256_ps(if part == 0 {
                                        _mm256_slli_epi32::<16>(pair)
                                    } else {
                                        _mm256_and_si256(
                                            pair,
                                            _mm256_set1_epi32(0xffff_0000_u32 as i32),
                                        )
                                    })
                                }
                            };
                        }
                        for row in 0..R {
                            let x = _mm256_set1_ps(x.add(part * R + row).read());
                            for side in 0..2 {
                                sums[row][side] =
                                    _mm256_fmadd_ps(weights[side], x, sums[row][side]);
                            }
                        }
                    }
                    w = w.wrapping_add(operands.vectors * vector_bytes);
                    x = x.add(depth * R);
                }
            }
            // SAFETY: the processor has the features.
            unsafe { add_up(&sums, tile, vector, start == 0) };
        }
    }
}

/// Weights in blocks of 8 or 4 bits, activations in blocks of 8.
///
/// Products of unsigned and signed bytes are summed in 32 bits: the byte instruction would saturate.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn blocks<const R: usize, const BITS: usize>(operands: Operands, tile: &mut Tile) {
    const GROUPS: usize = BLOCK / 4;
    let vectors = operands.vectors;
    let code_bytes = if BITS == 8 { 2 * GROUPS } else { GROUPS } * vectors * 64;
    let (bytes, nibbles) = (_mm256_set1_epi16(255), _mm256_set1_epi8(15));
    for vector in 0..vectors {
        let (mut w, mut x) = (operands.panel, operands.strip.cast::<i32>());
        let mut totals = [[_mm256_setzero_ps(); 2]; R];
        for _ in 0..operands.columns / BLOCK_PAIR {
            for half in 0..2 {
                // SAFETY: the layouts of `pack` and `encode`.
                unsafe {
                    let mut sums = [[_mm256_setzero_si256(); 2]; R];
                    for row in 0..R {
                        let start = _mm256_set1_epi32(x.add((GROUPS + 1) * R + row).read());
                        sums[row] = [start; 2];
                    }
                    let first = if BITS == 8 { half * GROUPS } else { 0 };
                    let codes = w.add(vectors * 64 + (first * vectors + vector) * 64);
                    for group in 0..GROUPS {
                        for side in 0..2 {
                            let from = codes.add(group * vectors * 64 + side * 32);
                            let word = _mm256_loadu_si256(from.cast());
                            let word = match (BITS, half) {
                                (8, _) => word,
                                (_, 0) => _mm256_and_si256(word, nibbles),
                                _ => _mm256_and_si256(_mm256_srli_epi16::<4>(word), nibbles),
                            };
                            let even = _mm256_and_si256(word, bytes);
                            let odd = _mm256_srli_epi16::<8>(word);
                            for row in 0..R {
                                let x = _mm256_set1_epi32(x.add(group * R + row).read());
                                let x_even = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(x));
                                let x_odd = _mm256_srai_epi16::<8>(x);
                                let products = _mm256_add_epi32(
                                    _mm256_madd_epi16(even, x_even),
                                    _mm256_madd_epi16(odd, x_odd),
                                );
                                sums[row][side] = _mm256_add_epi32(sums[row][side], products);
                            }
                        }
                    }
                    for side in 0..2 {
                        let from = w.add((half * vectors + vector) * 32 + side * 16);
                        let scale = _mm256_cvtph_ps(_mm_loadu_si128(from.cast()));
                        for row in 0..R {
                            let x_scale =
                                _mm256_set1_ps(x.cast::<f32>().add(GROUPS * R + row).read());
                            totals[row][side] = _mm256_fmadd_ps(
                                _mm256_cvtepi32_ps(sums[row][side]),
                                _mm256_mul_ps(scale, x_scale),
                                totals[row][side],
                            );
                        }
                    }
                    x = x.add((GROUPS + 2) * R);
                }
            }
            w = w.wrapping_add(vectors * 64 + code_bytes);
        }
        // SAFETY: the processor has the features.
        unsafe { add_up(&totals, tile, vector, true) };
    }
}

/// Adds sums to one vector of the tile, or starts it.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn add_up<const R: usize>(
    sums: &[[__m256; 2]; R],
    tile: &mut Tile,
    vector: usize,
    is_first: bool,
) {
    for row in 0..R {
        for side in 0..2 {
            // SAFETY: a tile's row has two vectors of two registers.
            unsafe {
                let to = tile[row].as_mut_ptr().add(vector * VECTOR + side * VECTOR / 2);
                let sum = sums[row][side];
                let total = if is_first { sum } else { _mm256_add_ps(_mm256_loadu_ps(to), sum) };
                _mm256_storeu_ps(to, total);
            }
        }
    }
}
