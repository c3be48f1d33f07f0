//! Kernels for AVX-512, with and without its bf16 and 8-bit dot products.
//!
//! A strip of up to 12 rows and a panel of two vectors have 24 sums in registers: each vector of weights is
//! used twelve times and each row's element twice, so the multipliers are the limit. Blocks need an integer and
//! a float sum each, which leaves room for 6 rows; of 8 the float sums, used once a block, lie in the first cache:
//! to multiply one vector after the other instead would load each row's elements twice, and loads be the limit.

#![expect(
    clippy::needless_range_loop,
    reason = "loops of fixed length over several arrays at once become registers"
)]

use std::arch::x86_64::*;

use ir::tensor::Format;

use super::ahead::{Ahead, prefetch};
use super::unpack::{based_pairs, small_pairs, subnormal};
use super::{GROUPS, Operands, SUM_STEPS, Tile};
use crate::kernels::cpu::bf12;
use crate::kernels::cpu::encode::Encoding;
use crate::kernels::cpu::pack::{BLOCK_PAIR, VECTOR};

macro_rules! by_shape {
    ($kernel:ident, $operands:expr, $tile:expr, [$($rows:literal)*], $constant:tt) => {
        match ($operands.rows, $operands.vectors) {
            $(
                ($rows, 1) => instance!($kernel, $rows, 1, $constant)($operands, $tile),
                ($rows, 2) => instance!($kernel, $rows, 2, $constant)($operands, $tile),
            )*
            (rows, vectors) => unreachable!("a strip of {rows} rows with {vectors} vectors"),
        }
    };
}

const F32: u8 = 0;
const F16: u8 = 1;
const BF16: u8 = 2;

/// # Safety
/// That of [`super::Kernel::multiply`].
pub(super) unsafe fn multiply(
    format: Format,
    encoding: Encoding,
    operands: Operands,
    tile: &mut Tile,
) {
    // SAFETY: the caller's.
    unsafe {
        match format {
            Format::F32 => by_shape!(floats, operands, tile, [1 2 3 4 5 6 7 8 9 10 11 12], [F32]),
            Format::F16 => by_shape!(floats, operands, tile, [1 2 3 4 5 6 7 8 9 10 11 12], [F16]),
            Format::Bf16 if encoding == Encoding::Pairs => {
                by_shape!(pairs, operands, tile, [1 2 3 4 5 6 7 8 9 10 11 12], [])
            }
            Format::Bf16 => by_shape!(floats, operands, tile, [1 2 3 4 5 6 7 8 9 10 11 12], [BF16]),
            Format::Bf12 => by_shape!(small_floats, operands, tile, [1 2 3 4 5 6 7 8], []),
            Format::Q8 => by_shape!(blocks, operands, tile, [1 2 3 4 5 6 7 8], [8]),
            Format::Q4 => by_shape!(blocks, operands, tile, [1 2 3 4 5 6 7 8], [4]),
        }
    }
}

/// Adds sums to the tile, or starts it.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn add_up<const R: usize, const V: usize>(
    sums: &[[__m512; V]; R],
    tile: &mut Tile,
    is_first: bool,
) {
    for row in 0..R {
        for vector in 0..V {
            // SAFETY: a tile's row has two vectors.
            unsafe {
                let to = tile[row].as_mut_ptr().add(vector * VECTOR);
                let sum = sums[row][vector];
                let total = if is_first { sum } else { _mm512_add_ps(_mm512_loadu_ps(to), sum) };
                _mm512_storeu_ps(to, total);
            }
        }
    }
}

/// Weights in f32, f16 or bf16; activations in f32.
#[target_feature(enable = "avx512f")]
unsafe fn floats<const R: usize, const V: usize, const KIND: u8>(
    operands: Operands,
    tile: &mut Tile,
) {
    // Columns of a step: bf16 come in pairs.
    let depth = if KIND == BF16 { 2 } else { 1 };
    let vector_bytes = if KIND == F16 { 32 } else { 64 };
    let (mut w, mut x) = (operands.panel, operands.strip.cast::<f32>());
    let steps = operands.columns / depth;
    let step_bytes = V * vector_bytes;
    let ahead = Ahead::new((w, steps * step_bytes), step_bytes, operands.next);
    for start in (0..steps.max(1)).step_by(SUM_STEPS) {
        let mut sums = [[_mm512_setzero_ps(); V]; R];
        for _ in start..steps.min(start + SUM_STEPS) {
            let distance = ahead.distance(w);
            // SAFETY: the panel and the strip have `steps` steps.
            unsafe {
                for part in 0..depth {
                    let mut weights = [_mm512_setzero_ps(); V];
                    for vector in 0..V {
                        let from = w.wrapping_add(vector * vector_bytes);
                        if part == 0 {
                            prefetch(from.wrapping_add(distance));
                        }
                        weights[vector] = match KIND {
                            F32 => _mm512_loadu_ps(from.cast()),
                            F16 => _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())),
                            _ => {
                                let pair = _mm512_loadu_si512(from.cast());
                                _mm512_castsi512_ps(if part == 0 {
                                    _mm512_slli_epi32::<16>(pair)
                                } else {
                                    _mm512_and_si512(
                                        pair,
                                        _mm512_set1_epi32(0xffff_0000_u32 as i32),
                                    )
                                })
                            }
                        };
                    }
                    for row in 0..R {
                        let x = _mm512_set1_ps(x.add(part * R + row).read());
                        for vector in 0..V {
                            sums[row][vector] =
                                _mm512_fmadd_ps(weights[vector], x, sums[row][vector]);
                        }
                    }
                }
                w = w.add(V * vector_bytes);
                x = x.add(depth * R);
            }
        }
        // SAFETY: the processor has the features.
        unsafe { add_up(&sums, tile, start == 0) };
    }
}

/// Weights and activations in pairs of bf16.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn pairs<const R: usize, const V: usize>(operands: Operands, tile: &mut Tile) {
    let (mut w, mut x) = (operands.panel, operands.strip.cast::<i32>());
    let steps = operands.columns / 2;
    let ahead = Ahead::new((w, steps * V * 64), V * 64, operands.next);
    for start in (0..steps.max(1)).step_by(SUM_STEPS) {
        let mut sums = [[_mm512_setzero_ps(); V]; R];
        for _ in start..steps.min(start + SUM_STEPS) {
            let distance = ahead.distance(w);
            // SAFETY: the panel and the strip have `steps` steps.
            unsafe {
                let mut weights = [_mm512_setzero_si512(); V];
                for vector in 0..V {
                    let from = w.wrapping_add(vector * 64);
                    prefetch(from.wrapping_add(distance));
                    weights[vector] = _mm512_loadu_si512(from.cast());
                }
                for row in 0..R {
                    let x = _mm512_set1_epi32(x.add(row).read());
                    for vector in 0..V {
                        sums[row][vector] = _mm512_dpbf16_ps(
                            sums[row][vector],
                            std::mem::transmute::<__m512i, __m512bh>(weights[vector]),
                            std::mem::transmute::<__m512i, __m512bh>(x),
                        );
                    }
                }
                w = w.add(V * 64);
                x = x.add(R);
            }
        }
        // SAFETY: the processor has the features.
        unsafe { add_up(&sums, tile, start == 0) };
    }
}

/// A vector's words of a panel in 12 bits.
#[inline]
#[target_feature(enable = "avx512f")]
fn load_words(from: &[u8; bf12::VECTOR_BYTES]) -> __m512i {
    // SAFETY: they are as many as a load takes.
    unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
}

/// Weights in 12 bits, activations in pairs of bf16.
///
/// The few small floats that are subnormal are added by themselves.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn small_floats<const R: usize, const V: usize>(operands: Operands, tile: &mut Tile) {
    /// Pairs of columns of a step.
    const PAIRS: usize = bf12::STEP_COLUMNS / 2;
    // SAFETY: the caller's: a panel in 12 bits.
    let panel = unsafe { bf12::Panel::at(operands.panel, V, operands.columns) };
    let mut bases = [_mm512_setzero_si512(); V];
    for vector in 0..V {
        bases[vector] = load_words(panel.bases(vector));
    }
    let x = operands.strip.cast::<i32>();
    let words = panel.words(0..operands.columns);
    let step_bytes = bf12::STEP_WORDS * V * bf12::VECTOR_BYTES;
    let ahead = Ahead::new((words.as_ptr().cast(), size_of_val(words)), step_bytes, operands.next);
    for (at, words) in words.chunks(SUM_STEPS / PAIRS * bf12::STEP_WORDS * V).enumerate() {
        let mut x = x.wrapping_add(at * SUM_STEPS * R);
        let mut sums = [[_mm512_setzero_ps(); V]; R];
        for words in words.chunks_exact(bf12::STEP_WORDS * V) {
            let distance = ahead.distance(words.as_ptr().cast());
            for vector in 0..V {
                let words_of = |k: usize| {
                    let words = &words[k * V + vector];
                    prefetch(words.as_ptr().wrapping_add(distance));
                    load_words(words)
                };
                let small = small_pairs([0, 1, 2].map(words_of));
                let (pairs, has_small) = based_pairs(small, bases[vector]);
                // SAFETY: the strip has as many columns as the panel.
                unsafe {
                    for pair in 0..PAIRS {
                        let weights = std::mem::transmute::<__m512i, __m512bh>(pairs[pair]);
                        for row in 0..R {
                            let x = _mm512_set1_epi32(x.add(pair * R + row).read());
                            let x = std::mem::transmute::<__m512i, __m512bh>(x);
                            sums[row][vector] = _mm512_dpbf16_ps(sums[row][vector], weights, x);
                        }
                    }
                    if has_small {
                        let step = [0, 1, 2].map(|k| &words[k * V + vector]);
                        let of_vector = sums.map(|sums| sums[vector]);
                        let of_vector = add_subnormal(step, panel.bases(vector), x, of_vector);
                        for row in 0..R {
                            sums[row][vector] = of_vector[row];
                        }
                    }
                }
            }
            x = x.wrapping_add(PAIRS * R);
        }
        // SAFETY: the processor has the features.
        unsafe { add_up(&sums, tile, at == 0) };
    }
}

/// The sums with the products of a step's subnormal small floats. It reads the step again: handing registers over would
/// cost all steps something.
///
/// # Safety
/// `x` has the step's columns.
#[cold]
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn add_subnormal<const R: usize>(
    words: [&[u8; bf12::VECTOR_BYTES]; bf12::STEP_WORDS],
    bases: &[u8; bf12::VECTOR_BYTES],
    x: *const i32,
    mut sums: [__m512; R],
) -> [__m512; R] {
    let bases = load_words(bases);
    for (pair, words) in small_pairs(words.map(|words| load_words(words))).into_iter().enumerate() {
        for (half, weights) in subnormal(words, bases).into_iter().enumerate() {
            for row in 0..R {
                // SAFETY: the caller's.
                let x = unsafe { x.add(pair * R + row).read() };
                let x = if half == 0 { x << 16 } else { x & 0xffff_0000_u32.cast_signed() };
                let x = _mm512_castsi512_ps(_mm512_set1_epi32(x));
                sums[row] = _mm512_fmadd_ps(weights, x, sums[row]);
            }
        }
    }
    sums
}

/// Weights in blocks of 8 or 4 bits, activations in blocks of 8.
///
/// Codes are unsigned, so a block's dot product starts from minus the offset times the sum of the activations.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn blocks<const R: usize, const V: usize, const BITS: usize>(
    operands: Operands,
    tile: &mut Tile,
) {
    let (mut w, mut x) = (operands.panel, operands.strip.cast::<i32>());
    let low_nibbles = _mm512_set1_epi8(15);
    let mut totals = [[_mm512_setzero_ps(); V]; R];
    let code_bytes = if BITS == 8 { 2 * GROUPS } else { GROUPS } * V * 64;
    let (pairs, pair_bytes) = (operands.columns / BLOCK_PAIR, V * 64 + code_bytes);
    let ahead = Ahead::new((w, pairs * pair_bytes), pair_bytes, operands.next);
    for _ in 0..pairs {
        let distance = ahead.distance(w);
        for vector in 0..V {
            prefetch(w.wrapping_add(vector * 64 + distance));
        }
        for half in 0..2 {
            // SAFETY: the layouts of `pack` and `encode`.
            unsafe {
                let mut sums = [[_mm512_setzero_si512(); V]; R];
                for row in 0..R {
                    let start = _mm512_set1_epi32(x.add((GROUPS + 1) * R + row).read());
                    sums[row] = [start; V];
                }
                let first = if BITS == 8 { half * GROUPS } else { 0 };
                let codes = w.add(V * 64 + first * V * 64);
                for group in 0..GROUPS {
                    let mut weights = [_mm512_setzero_si512(); V];
                    for vector in 0..V {
                        let from = codes.add((group * V + vector) * 64);
                        if BITS == 8 || half == 0 {
                            prefetch(from.wrapping_add(distance));
                        }
                        let word = _mm512_loadu_si512(from.cast());
                        weights[vector] = match (BITS, half) {
                            (8, _) => word,
                            (_, 0) => _mm512_and_si512(word, low_nibbles),
                            _ => _mm512_and_si512(_mm512_srli_epi16::<4>(word), low_nibbles),
                        };
                    }
                    for row in 0..R {
                        let x = _mm512_set1_epi32(x.add(group * R + row).read());
                        for vector in 0..V {
                            sums[row][vector] =
                                _mm512_dpbusd_epi32(sums[row][vector], weights[vector], x);
                        }
                    }
                }
                let mut scales = [_mm512_setzero_ps(); V];
                for vector in 0..V {
                    let from = w.add((half * V + vector) * 32);
                    scales[vector] = _mm512_cvtph_ps(_mm256_loadu_si256(from.cast()));
                }
                for row in 0..R {
                    let x_scale = x.cast::<f32>().add(GROUPS * R + row).read();
                    let x_scale = _mm512_set1_ps(x_scale);
                    for vector in 0..V {
                        let total = &mut totals[row][vector];
                        *total = _mm512_fmadd_ps(
                            _mm512_cvtepi32_ps(sums[row][vector]),
                            _mm512_mul_ps(scales[vector], x_scale),
                            *total,
                        );
                    }
                }
            }
            x = x.wrapping_add((GROUPS + 2) * R);
        }
        w = w.wrapping_add(pair_bytes);
    }
    // SAFETY: the processor has the features.
    unsafe { add_up(&totals, tile, true) };
}
