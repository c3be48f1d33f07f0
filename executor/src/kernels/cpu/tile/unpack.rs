//! Panels of blocks unpacked to panels of bf16, for tiles.
//!
//! Tiles multiply bytes too, but their sums would have to leave the tiles for every block to be scaled, which
//! costs more than the tiles save. Unpacked once, a panel serves all rows.

use std::arch::x86_64::*;

use ir::tensor::Format;

use crate::kernels::cpu::pack::{BLOCK_PAIR, VECTOR};
use crate::kernels::cpu::quantize::{BLOCK, OFFSET_4, OFFSET_8};

/// Writes a panel of `format`, q8 or q4, as the bf16 panel of the same columns, which `padded` to 64.
///
/// # Safety
/// The panel is packed in the format, `to` has room, and the processor has AVX-512 and its bf16.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16,avx512vl")]
pub(super) unsafe fn unpack(
    format: Format,
    panel: *const u8,
    vectors: usize,
    columns: usize,
    to: *mut u8,
) {
    let (bits, offset) = if format == Format::Q8 { (8, OFFSET_8) } else { (4, OFFSET_4) };
    let offset = _mm512_set1_epi32(offset);
    let mask = _mm512_set1_epi32((1 << bits) - 1);
    let step_bytes = vectors * VECTOR * (4 + BLOCK_PAIR * bits / 8);
    for pair in 0..columns / BLOCK_PAIR {
        for vector in 0..vectors {
            for block in 0..BLOCK_PAIR / BLOCK {
                // SAFETY: the layout of `pack`.
                unsafe {
                    let step = panel.add(pair * step_bytes);
                    let scales = step.add((block * vectors + vector) * VECTOR * 2);
                    let scales = _mm512_cvtph_ps(_mm256_loadu_si256(scales.cast()));
                    let groups = BLOCK / 4;
                    let first = if bits == 8 { block * groups } else { 0 };
                    let low = if bits == 8 { 0 } else { 4 * block as u32 };
                    for group in 0..groups {
                        let at = vectors * VECTOR * 4
                            + ((first + group) * vectors + vector) * VECTOR * 4;
                        let word = _mm512_loadu_si512(step.add(at).cast());
                        let word = _mm512_srl_epi32(word, _mm_cvtsi32_si128(low as i32));
                        let widen = |word| {
                            let code = _mm512_sub_epi32(_mm512_and_si512(word, mask), offset);
                            let value = _mm512_mul_ps(_mm512_cvtepi32_ps(code), scales);
                            let half = _mm512_cvtneps_pbh(value);
                            _mm512_cvtepu16_epi32(std::mem::transmute::<__m256bh, __m256i>(half))
                        };
                        let columns = [
                            widen(word),
                            widen(_mm512_srli_epi32::<8>(word)),
                            widen(_mm512_srli_epi32::<16>(word)),
                            widen(_mm512_srli_epi32::<24>(word)),
                        ];
                        for (i, [even, odd]) in columns.as_chunks::<2>().0.iter().enumerate() {
                            let both = _mm512_or_si512(*even, _mm512_slli_epi32::<16>(*odd));
                            let step = ((pair * 2 + block) * groups + group) * 2 + i;
                            let to = to.add((step * vectors + vector) * VECTOR * 4);
                            _mm512_storeu_si512(to.cast(), both);
                        }
                    }
                }
            }
        }
    }
}
