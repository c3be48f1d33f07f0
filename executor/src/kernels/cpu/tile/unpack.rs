//! Panels of blocks unpacked to panels of bf16, for tiles.
//!
//! Tiles multiply bytes too, but their sums would have to leave the tiles for every block to be scaled, which
//! costs more than the tiles save. Unpacked once, a panel serves all rows.

use std::arch::x86_64::*;

use ir::tensor::Format;

use crate::kernels::cpu::pack::{BLOCK_PAIR, VECTOR};
use crate::kernels::cpu::quantize::{BLOCK, OFFSET_4, OFFSET_8};

/// Writes columns of a panel of `format`, q8 or q4, as those of a bf16 panel; `columns` is a multiple of 64.
///
/// # Safety
/// The columns are packed in the format, `to` has room, and the processor has AVX-512 and its bf16.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16,avx512vl")]
pub(super) unsafe fn unpack(
    format: Format,
    panel: *const u8,
    vectors: usize,
    columns: usize,
    to: *mut u8,
) {
    // Codes as floats; of q4 a table of all of them, whose index is the low four bits of a lane.
    let table: [f32; 16] = std::array::from_fn(|code| (code as i32 - OFFSET_4) as f32);
    // SAFETY: the table has sixteen floats.
    let table = unsafe { _mm512_loadu_ps(table.as_ptr()) };
    let byte = _mm512_set1_epi32(255);
    let zero = _mm512_set1_ps(OFFSET_8 as f32);
    let interleave: [u16; 32] = std::array::from_fn(|i| (i / 2 + i % 2 * 16) as u16);
    // SAFETY: it has 32 words.
    let interleave = unsafe { _mm512_loadu_si512(interleave.as_ptr().cast()) };
    let is_q8 = format == Format::Q8;
    let code_bytes = if is_q8 { BLOCK_PAIR } else { BLOCK_PAIR / 2 };
    let step_bytes = vectors * VECTOR * (4 + code_bytes);
    let groups = BLOCK / 4;
    for pair in 0..columns / BLOCK_PAIR {
        for vector in 0..vectors {
            for block in 0..BLOCK_PAIR / BLOCK {
                // SAFETY: the layout of `pack`.
                unsafe {
                    let step = panel.add(pair * step_bytes);
                    let scales = step.add((block * vectors + vector) * VECTOR * 2);
                    let scales = _mm512_cvtph_ps(_mm256_loadu_si256(scales.cast()));
                    // A code of eight bits times a half is exact in f32, and so is what is subtracted.
                    let shift = _mm512_mul_ps(scales, zero);
                    let codes = step.add(vectors * VECTOR * 4);
                    let to = to.add((pair * 2 + block) * groups * 2 * vectors * VECTOR * 4);
                    for group in 0..groups {
                        let at = |group| (group * vectors + vector) * VECTOR * 4;
                        let columns = if is_q8 {
                            let word = codes.add(at(block * groups + group));
                            let word = _mm512_loadu_si512(word.cast());
                            let widen = |word| {
                                let code = _mm512_cvtepi32_ps(_mm512_and_si512(word, byte));
                                _mm512_fmsub_ps(code, scales, shift)
                            };
                            [
                                widen(word),
                                widen(_mm512_srli_epi32::<8>(word)),
                                widen(_mm512_srli_epi32::<16>(word)),
                                widen(_mm512_srli_epi32::<24>(word)),
                            ]
                        } else {
                            let word = _mm512_loadu_si512(codes.add(at(group)).cast());
                            let word = if block == 0 { word } else { _mm512_srli_epi32::<4>(word) };
                            let widen =
                                |word| _mm512_mul_ps(_mm512_permutexvar_ps(word, table), scales);
                            [
                                widen(word),
                                widen(_mm512_srli_epi32::<8>(word)),
                                widen(_mm512_srli_epi32::<16>(word)),
                                widen(_mm512_srli_epi32::<24>(word)),
                            ]
                        };
                        for (i, &[even, odd]) in columns.as_chunks::<2>().0.iter().enumerate() {
                            let halves = _mm512_cvtne2ps_pbh(odd, even);
                            let halves = std::mem::transmute::<__m512bh, __m512i>(halves);
                            let both = _mm512_permutexvar_epi16(interleave, halves);
                            let at = ((group * 2 + i) * vectors + vector) * VECTOR * 4;
                            _mm512_storeu_si512(to.add(at).cast(), both);
                        }
                    }
                }
            }
        }
    }
}
