//! Kernels for AVX2 with FMA and F16C: a vector of weights is two registers.
//!
//! A strip of 4 rows has eight sums in registers, so the two vectors of a panel take turns; of one or two rows they are
//! multiplied together, as they come from memory.

#![expect(
    clippy::needless_range_loop,
    reason = "loops of fixed length over several arrays at once become registers"
)]

mod blocks;

use std::arch::x86_64::*;

use ir::tensor::Format;

use super::ahead::{Ahead, prefetch_lines};
use super::unpack::{based_pairs_by_avx2, small_pairs_by_avx2, subnormal_by_avx2};
use super::{Operands, SUM_STEPS, Tile};
use crate::kernels::cpu::bf12;
use crate::kernels::cpu::isa::Isa;
use crate::kernels::cpu::pack::VECTOR;

const F32: u8 = 0;
const F16: u8 = 1;
const BF16: u8 = 2;

/// Calls a kernel for the operands' number of rows: where it is among `few`, one that takes both vectors of a panel
/// together.
macro_rules! by_rows {
    ($kernel:ident, $operands:expr, $tile:expr, few [$($few:literal)*], [$($rows:literal)*], $constant:tt) => {
        match ($operands.rows, $operands.vectors) {
            $(($few, 2) => instance!($kernel, $few, 2, $constant)($operands, $tile),)*
            $(($rows, _) => instance!($kernel, $rows, 1, $constant)($operands, $tile),)*
            (rows, _) => unreachable!("a strip of {rows} rows"),
        }
    };
}

/// # Safety
/// That of [`super::Kernel::multiply`].
pub(super) unsafe fn multiply(isa: Isa, format: Format, operands: Operands, tile: &mut Tile) {
    // SAFETY: the caller's.
    unsafe {
        match format {
            Format::F32 => by_rows!(floats, operands, tile, few [1 2], [1 2 3 4], [F32]),
            Format::F16 => by_rows!(floats, operands, tile, few [1 2], [1 2 3 4], [F16]),
            Format::Bf16 => by_rows!(floats, operands, tile, few [1 2], [1 2 3 4], [BF16]),
            Format::Bf12 => {
                by_rows!(small_floats, operands, tile, few [1 2], [1 2 3 4], []);
            }
            Format::Q8 | Format::Q4 => blocks::multiply(isa, format, operands, tile),
        }
    }
}

/// Weights in f32, f16 or bf16; activations in f32. `V` vectors are multiplied together.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn floats<const R: usize, const V: usize, const KIND: u8>(
    operands: Operands,
    tile: &mut Tile,
) {
    let depth = if KIND == BF16 { 2 } else { 1 };
    let vector_bytes = if KIND == F16 { 32 } else { 64 };
    let steps = operands.columns / depth;
    let step_bytes = operands.vectors * vector_bytes;
    let panel = (operands.panel, steps * step_bytes);
    let ahead = Ahead::new(panel, step_bytes, operands.next);
    for first in (0..operands.vectors).step_by(V) {
        let mut w = operands.panel;
        let mut x = operands.strip.cast::<f32>();
        for start in (0..steps.max(1)).step_by(SUM_STEPS) {
            let mut sums = [[[_mm256_setzero_ps(); 2]; V]; R];
            for _ in start..steps.min(start + SUM_STEPS) {
                if first == 0 {
                    prefetch_lines(w.wrapping_add(ahead.distance(w)), step_bytes);
                }
                // SAFETY: the panel and the strip have `steps` steps.
                unsafe {
                    for part in 0..depth {
                        let mut weights = [[_mm256_setzero_ps(); 2]; V];
                        for vector in 0..V {
                            for side in 0..2 {
                                let at = (first + vector) * vector_bytes + side * vector_bytes / 2;
                                let from = w.add(at);
                                weights[vector][side] = match KIND {
                                    F32 => _mm256_loadu_ps(from.cast()),
                                    F16 => _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
                                    _ => half(_mm256_loadu_si256(from.cast()), part),
                                };
                            }
                        }
                        for row in 0..R {
                            let x = _mm256_set1_ps(x.add(part * R + row).read());
                            for vector in 0..V {
                                for side in 0..2 {
                                    let sum = &mut sums[row][vector][side];
                                    *sum = _mm256_fmadd_ps(weights[vector][side], x, *sum);
                                }
                            }
                        }
                    }
                    w = w.wrapping_add(step_bytes);
                    x = x.add(depth * R);
                }
            }
            // SAFETY: the processor has the features.
            unsafe { add_up(&sums, tile, first, start == 0) };
        }
    }
}

/// The even or odd columns of pairs of bf16, as floats.
#[inline]
#[target_feature(enable = "avx2")]
fn half(pairs: __m256i, part: usize) -> __m256 {
    _mm256_castsi256_ps(if part == 0 {
        _mm256_slli_epi32::<16>(pairs)
    } else {
        _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff_0000_u32.cast_signed()))
    })
}

/// Weights in 12 bits, activations in f32.
///
/// The few small floats that are subnormal are added by themselves.
#[target_feature(enable = "avx2,fma")]
unsafe fn small_floats<const R: usize, const V: usize>(operands: Operands, tile: &mut Tile) {
    let vectors = operands.vectors;
    // SAFETY: the caller's: a panel in 12 bits.
    let panel = unsafe { bf12::Panel::at(operands.panel, vectors, operands.columns) };
    let load = |from: &[u8; bf12::VECTOR_BYTES], side: usize| {
        // SAFETY: half of a vector's words are as many as a load takes.
        unsafe { _mm256_loadu_si256(from.as_ptr().add(side * bf12::VECTOR_BYTES / 2).cast()) }
    };
    let words = panel.words(0..operands.columns);
    let step_bytes = bf12::STEP_WORDS * vectors * bf12::VECTOR_BYTES;
    let steps = (words.as_ptr().cast(), size_of_val(words));
    let ahead = Ahead::new(steps, step_bytes, operands.next);
    let sum_columns = 2 * SUM_STEPS;
    let sum_words = sum_columns / bf12::STEP_COLUMNS * bf12::STEP_WORDS * vectors;
    for first in (0..vectors).step_by(V) {
        for (at, words) in words.chunks(sum_words).enumerate() {
            let mut x = operands.strip.cast::<f32>().wrapping_add(at * sum_columns * R);
            let mut sums = [[[_mm256_setzero_ps(); 2]; V]; R];
            for words in words.chunks_exact(bf12::STEP_WORDS * vectors) {
                if first == 0 {
                    let step = words.as_ptr().cast::<u8>();
                    prefetch_lines(step.wrapping_add(ahead.distance(step)), step_bytes);
                }
                for vector in 0..V {
                    let bases = panel.bases(first + vector);
                    for side in 0..2 {
                        let load = |from| load(from, side);
                        let step = [0, 1, 2].map(|k| load(&words[k * vectors + first + vector]));
                        let small = small_pairs_by_avx2(step);
                        let (pairs, has_small) = based_pairs_by_avx2(small, load(bases));
                        for column in 0..bf12::STEP_COLUMNS {
                            let weights = half(pairs[column / 2], column % 2);
                            for row in 0..R {
                                // SAFETY: the strip has as many columns as the panel.
                                let x = unsafe { x.add(column * R + row).read() };
                                let sum = &mut sums[row][vector][side];
                                *sum = _mm256_fmadd_ps(weights, _mm256_set1_ps(x), *sum);
                            }
                        }
                        if has_small {
                            let mut of_side = sums.map(|sums| sums[vector][side]);
                            // SAFETY: the strip has the step's columns.
                            unsafe { add_subnormal(step, load(bases), x, &mut of_side) };
                            for row in 0..R {
                                sums[row][vector][side] = of_side[row];
                            }
                        }
                    }
                }
                x = x.wrapping_add(bf12::STEP_COLUMNS * R);
            }
            // SAFETY: the processor has the features.
            unsafe { add_up(&sums, tile, first, at == 0) };
        }
    }
}

/// Adds the products of a step's subnormal small floats.
///
/// # Safety
/// `x` has the step's columns.
#[cold]
#[inline(never)]
#[target_feature(enable = "avx2,fma")]
unsafe fn add_subnormal<const R: usize>(
    words: [__m256i; bf12::STEP_WORDS],
    bases: __m256i,
    x: *const f32,
    sums: &mut [__m256; R],
) {
    for (pair, small) in small_pairs_by_avx2(words).into_iter().enumerate() {
        for (half, weights) in subnormal_by_avx2(small, bases).into_iter().enumerate() {
            for (row, sum) in sums.iter_mut().enumerate() {
                // SAFETY: the caller's.
                let x = unsafe { x.add((2 * pair + half) * R + row).read() };
                *sum = _mm256_fmadd_ps(weights, _mm256_set1_ps(x), *sum);
            }
        }
    }
}

/// Adds sums to vectors of the tile, from `first` on, or starts them.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn add_up<const R: usize, const V: usize>(
    sums: &[[[__m256; 2]; V]; R],
    tile: &mut Tile,
    first: usize,
    is_first: bool,
) {
    for row in 0..R {
        for vector in 0..V {
            for side in 0..2 {
                // SAFETY: a tile's row has two vectors of two registers.
                unsafe {
                    let at = (first + vector) * VECTOR + side * VECTOR / 2;
                    let to = tile[row].as_mut_ptr().add(at);
                    let sum = sums[row][vector][side];
                    let total =
                        if is_first { sum } else { _mm256_add_ps(_mm256_loadu_ps(to), sum) };
                    _mm256_storeu_ps(to, total);
                }
            }
        }
    }
}
