//! Panels unpacked by vectors, once for all rows that they are multiplied with.
//!
//! Of blocks, for tiles: to bytes, see [`super::bytes`].
//!
//! Of 12 bits (see [`crate::kernels::cpu::bf12`]), for all levels: to bf16. Masks make pairs of small floats, to whose
//! exponents those of their rows are added. The few that are subnormal are put by themselves.

use std::arch::x86_64::*;
use std::ops::Range;

use ir::tensor::Format;

use super::ahead::prefetch_lines;
use super::bytes::{GROUP_BLOCKS, GROUP_BYTES, Rounding};
use crate::kernels::cpu::bf12;
use crate::kernels::cpu::pack::{BLOCK_PAIR, VECTOR};
use crate::kernels::cpu::quantize::{BLOCK, OFFSET_4, OFFSET_8};

/// [`super::bytes::unpack`] with AVX-512.
///
/// # Safety
/// That of [`super::bytes::unpack`]; and the processor has AVX-512 with its operations on bytes.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn bytes_by_avx512(
    format: Format,
    panel: *const u8,
    vectors: usize,
    columns: usize,
    to: *mut u8,
) {
    /// `a & b | c` of three operands.
    const AND_OR: i32 = 0xea;
    let Rounding { offset: _, shift: _, most, ratio } = Rounding::of(format);
    let is_q8 = format == Format::Q8;
    let code_bytes = if is_q8 { BLOCK_PAIR } else { BLOCK_PAIR / 2 };
    let step_bytes = vectors * VECTOR * (4 + code_bytes);
    let (low, zeros) = (_mm512_set1_epi16(255), _mm512_set1_epi16((OFFSET_4 << 4) as i16));
    let (nibbles, flip) = (_mm512_set1_epi16(0xf0), _mm512_set1_epi8(OFFSET_8 as i8));
    let groups = BLOCK / 4;
    let blocks = columns / BLOCK;
    for vector in 0..vectors {
        let mut multipliers = [_mm512_setzero_si512(); GROUP_BLOCKS];
        // SAFETY: the layout of `pack`, and the room has a scale for each row.
        unsafe {
            let scale = |block: usize| {
                let step = panel.add(block / 2 * step_bytes);
                let scales = step.add((block % 2 * vectors + vector) * VECTOR * 2);
                _mm512_cvtph_ps(_mm256_loadu_si256(scales.cast()))
            };
            // As integers, so that what is not a number is above all.
            let mut largest = _mm512_setzero_si512();
            for block in 0..blocks {
                let magnitude = _mm512_castps_si512(_mm512_abs_ps(scale(block)));
                largest = _mm512_max_epu32(largest, magnitude);
            }
            let largest = _mm512_castsi512_ps(largest);
            let is_some = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(largest, _mm512_setzero_ps());
            let inverse = _mm512_maskz_div_ps(is_some, _mm512_set1_ps(most), largest);
            for (block, multiplier) in multipliers[..blocks].iter_mut().enumerate() {
                let whole = _mm512_cvtps_epi32(_mm512_mul_ps(scale(block), inverse));
                let pair = _mm512_slli_epi32::<16>(whole);
                let lower = _mm512_and_si512(whole, _mm512_set1_epi32(0xffff));
                *multiplier = _mm512_or_si512(pair, lower);
            }
            let of_group = _mm512_div_ps(largest, _mm512_set1_ps(ratio));
            _mm512_storeu_ps(to.add(GROUP_BYTES).cast::<f32>().add(vector * VECTOR), of_group);
        }
        for (block, &multiplier) in multipliers[..blocks].iter().enumerate() {
            // SAFETY: as above, and for as many bytes.
            unsafe {
                let codes = panel.add(block / 2 * step_bytes + vectors * VECTOR * 4);
                let at = |group: usize| (group * vectors + vector) * VECTOR * 4;
                for group in 0..groups {
                    let (even, odd) = if is_q8 {
                        let word = codes.add(at(block % 2 * groups + group));
                        let word = _mm512_xor_si512(_mm512_loadu_si512(word.cast()), flip);
                        let even = _mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(word));
                        (even, _mm512_srai_epi16::<8>(word))
                    } else {
                        // Sixteen times the code, below its even or odd byte.
                        let word = _mm512_loadu_si512(codes.add(at(group)).cast());
                        let (even, odd) = if block % 2 == 0 {
                            (_mm512_slli_epi16::<4>(word), _mm512_srli_epi16::<4>(word))
                        } else {
                            (word, _mm512_srli_epi16::<8>(word))
                        };
                        let signed =
                            |word| _mm512_sub_epi16(_mm512_and_si512(word, nibbles), zeros);
                        (signed(even), signed(odd))
                    };
                    let even = _mm512_mulhrs_epi16(even, multiplier);
                    let odd = _mm512_slli_epi16::<8>(_mm512_mulhrs_epi16(odd, multiplier));
                    let both = _mm512_ternarylogic_epi32::<AND_OR>(even, low, odd);
                    _mm512_storeu_si512(to.add(at(block * groups + group)).cast(), both);
                }
            }
        }
    }
}

/// Pairs of columns of a step.
const STEP_PAIRS: usize = bf12::STEP_COLUMNS / 2;

/// Pairs of columns of a vector's step in 12 bits: small floats, whose exponents are above the row's base.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn small_pairs(words: [__m512i; 3]) -> [__m512i; 4] {
    /// `a | b & c` of three operands.
    const OR_AND: i32 = 0xf8;
    let mask = |bits: u32| _mm512_set1_epi32(bits.cast_signed());
    let [sign, upper, middle, lower] = bf12::FOURTH.map(|(_, _, bits)| mask(bits));
    let fourth = _mm512_and_si512(_mm512_slli_epi32::<1>(words[0]), sign);
    let from = _mm512_srli_epi32::<3>(words[0]);
    let fourth = _mm512_ternarylogic_epi32::<OR_AND>(fourth, from, upper);
    let from = _mm512_srli_epi32::<7>(words[1]);
    let fourth = _mm512_ternarylogic_epi32::<OR_AND>(fourth, from, middle);
    let from = _mm512_srli_epi32::<11>(words[2]);
    let fourth = _mm512_ternarylogic_epi32::<OR_AND>(fourth, from, lower);
    let pair = |word| _mm512_and_si512(word, mask(bf12::PAIR));
    [pair(words[0]), pair(words[1]), pair(words[2]), fourth]
}

/// Those pairs as bf16, with zeros for subnormal small floats; and whether there are such, or zeros.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn based_pairs(small: [__m512i; 4], bases: __m512i) -> ([__m512i; 4], bool) {
    let exponents = _mm512_set1_epi32(bf12::EXPONENTS.cast_signed());
    let mut all = u32::MAX;
    let based = small.map(|pair| {
        let normal = _mm512_test_epi16_mask(pair, exponents);
        all &= normal;
        _mm512_maskz_add_epi16(normal, pair, bases)
    });
    (based, all != u32::MAX)
}

/// The subnormal small floats of a pair of columns, as numbers: those of each column, zeros where there is another.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn subnormal(pair: __m512i, bases: __m512i) -> [__m512; 2] {
    let exponents = _mm512_set1_epi32(bf12::EXPONENTS.cast_signed());
    let is_small = _mm512_testn_epi16_mask(pair, exponents);
    let pair = _mm512_maskz_mov_epi16(is_small, pair);
    // Those of base 0 are multiples of 2^-133.
    let base = _mm512_and_si512(_mm512_srli_epi32::<7>(bases), _mm512_set1_epi32(255));
    let exponent = _mm512_sub_epi32(base, _mm512_set1_epi32(133));
    let unit = _mm512_scalef_ps(_mm512_set1_ps(1.0), _mm512_cvtepi32_ps(exponent));
    [_mm512_slli_epi32::<16>(pair), pair].map(|word| {
        let sign = _mm512_and_si512(word, _mm512_set1_epi32(i32::MIN));
        let count = _mm512_and_si512(_mm512_srli_epi32::<16>(word), _mm512_set1_epi32(0x7f));
        let size = _mm512_mul_ps(_mm512_cvtepi32_ps(count), unit);
        _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(size), sign))
    })
}

/// [`bf12::unpack`] with AVX-512.
///
/// # Safety
/// The processor has it.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn bf12_by_avx512(
    panel: bf12::Panel<'_>,
    columns: Range<usize>,
    to: &mut [[u16; 2]],
) {
    let words = panel.words(columns.clone());
    let steps = columns.len() / bf12::STEP_COLUMNS;
    assert_eq!(
        to.len(),
        steps * STEP_PAIRS * panel.vectors() * VECTOR,
        "pairs of a panel's columns"
    );
    let to = to.as_mut_ptr().cast();
    // SAFETY: there are words of `steps` steps, and room for their pairs.
    unsafe {
        if panel.vectors() == 1 {
            bf12_steps::<1>(&panel, words.as_ptr(), steps, None, to);
        } else {
            bf12_steps::<2>(&panel, words.as_ptr(), steps, None, to);
        }
    }
}

/// Unpacks steps of a panel in 12 bits, whose words start at `words`, and asks for what lies `ahead` bytes on, if that
/// is given.
///
/// # Safety
/// The panel has `V` vectors, `words` points to `steps` of its steps, `to` has room for their pairs, and the processor
/// has the features.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn bf12_steps<const V: usize>(
    panel: &bf12::Panel<'_>,
    mut words: *const [u8; bf12::VECTOR_BYTES],
    steps: usize,
    ahead: Option<usize>,
    mut to: *mut __m512i,
) {
    // SAFETY: a vector's words are as many as a load takes, and so are its pairs.
    unsafe {
        let load = |from: *const [u8; bf12::VECTOR_BYTES]| _mm512_loadu_si512(from.cast());
        let bases: [__m512i; V] = std::array::from_fn(|vector| load(panel.bases(vector)));
        for _ in 0..steps {
            if let Some(ahead) = ahead {
                let bytes = bf12::STEP_WORDS * V * bf12::VECTOR_BYTES;
                prefetch_lines(words.cast::<u8>().wrapping_add(ahead), bytes);
            }
            for (vector, &bases) in bases.iter().enumerate() {
                let small = small_pairs([0, 1, 2].map(|k| load(words.add(k * V + vector))));
                let (mut pairs, has_small) = based_pairs(small, bases);
                if has_small {
                    for (pair, small) in pairs.iter_mut().zip(small) {
                        // Exact in bf16, so the upper halves are all.
                        let [even, odd] = subnormal(small, bases).map(|x| _mm512_castps_si512(x));
                        let odd = _mm512_and_si512(odd, _mm512_set1_epi32(-1 << 16));
                        let both = _mm512_or_si512(_mm512_srli_epi32::<16>(even), odd);
                        *pair = _mm512_or_si512(*pair, both);
                    }
                }
                for (pair, words) in pairs.into_iter().enumerate() {
                    _mm512_storeu_si512(to.add(pair * V + vector), words);
                }
            }
            words = words.add(bf12::STEP_WORDS * V);
            to = to.add(STEP_PAIRS * V);
        }
    }
}

/// [`small_pairs`] of half a vector.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn small_pairs_by_avx2([a, b, c]: [__m256i; 3]) -> [__m256i; 4] {
    let mask = |bits: u32| _mm256_set1_epi32(bits.cast_signed());
    let [sign, upper, middle, lower] = bf12::FOURTH.map(|(_, _, bits)| mask(bits));
    let fourth = _mm256_or_si256(
        _mm256_or_si256(
            _mm256_and_si256(_mm256_slli_epi32::<1>(a), sign),
            _mm256_and_si256(_mm256_srli_epi32::<3>(a), upper),
        ),
        _mm256_or_si256(
            _mm256_and_si256(_mm256_srli_epi32::<7>(b), middle),
            _mm256_and_si256(_mm256_srli_epi32::<11>(c), lower),
        ),
    );
    let pair = |word| _mm256_and_si256(word, mask(bf12::PAIR));
    [pair(a), pair(b), pair(c), fourth]
}

/// Which elements of a pair are subnormal small floats, or zeros: all of their bits.
#[inline]
#[target_feature(enable = "avx2")]
fn smallest_by_avx2(pair: __m256i) -> __m256i {
    let exponents = _mm256_set1_epi32(bf12::EXPONENTS.cast_signed());
    _mm256_cmpeq_epi16(_mm256_and_si256(pair, exponents), _mm256_setzero_si256())
}

/// [`based_pairs`] of half a vector.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn based_pairs_by_avx2(small: [__m256i; 4], bases: __m256i) -> ([__m256i; 4], bool) {
    let are_smallest = small.map(|pair| smallest_by_avx2(pair));
    let [a, b, c, d] = are_smallest;
    let any = _mm256_or_si256(_mm256_or_si256(a, b), _mm256_or_si256(c, d));
    let based = |i: usize| _mm256_andnot_si256(are_smallest[i], _mm256_add_epi16(small[i], bases));
    ([based(0), based(1), based(2), based(3)], _mm256_testz_si256(any, any) == 0)
}

/// [`subnormal`] of half a vector.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn subnormal_by_avx2(pair: __m256i, bases: __m256i) -> [__m256; 2] {
    let pair = _mm256_and_si256(pair, smallest_by_avx2(pair));
    // Those of base 0 are multiples of 2^-133, which is 2^-126 times 2^-7.
    let base = _mm256_and_si256(_mm256_srli_epi32::<7>(bases), _mm256_set1_epi32(255));
    let unit = _mm256_slli_epi32::<23>(_mm256_add_epi32(base, _mm256_set1_epi32(1)));
    let rest = _mm256_set1_ps(1.0 / 128.0);
    [_mm256_slli_epi32::<16>(pair), pair].map(|word| {
        let sign = _mm256_and_si256(word, _mm256_set1_epi32(i32::MIN));
        let count = _mm256_and_si256(_mm256_srli_epi32::<16>(word), _mm256_set1_epi32(0x7f));
        let size = _mm256_mul_ps(_mm256_cvtepi32_ps(count), _mm256_castsi256_ps(unit));
        _mm256_or_ps(_mm256_mul_ps(size, rest), _mm256_castsi256_ps(sign))
    })
}

/// [`bf12::unpack`] with AVX2: half a vector at a time.
///
/// # Safety
/// The processor has it.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn bf12_by_avx2(
    panel: bf12::Panel<'_>,
    columns: Range<usize>,
    to: &mut [[u16; 2]],
) {
    let vectors = panel.vectors();
    let words = panel.words(columns.clone()).chunks_exact(bf12::STEP_WORDS * vectors);
    let steps = words.zip(to.chunks_exact_mut(STEP_PAIRS * vectors * VECTOR));
    for (words, to) in steps {
        for vector in 0..vectors {
            for side in 0..2 {
                // SAFETY: half of a vector's words are as many as a load takes, and so are half of its pairs.
                unsafe {
                    let load = |from: &[u8; bf12::VECTOR_BYTES]| {
                        let from = from.as_ptr().add(side * bf12::VECTOR_BYTES / 2);
                        _mm256_loadu_si256(from.cast())
                    };
                    let words = [0, 1, 2].map(|k| load(&words[k * vectors + vector]));
                    let small = small_pairs_by_avx2(words);
                    let bases = load(panel.bases(vector));
                    let (mut pairs, has_small) = based_pairs_by_avx2(small, bases);
                    if has_small {
                        for (pair, small) in pairs.iter_mut().zip(small) {
                            // Exact in bf16, so the upper halves are all.
                            let halves = subnormal_by_avx2(small, bases);
                            let [even, odd] = halves.map(|x| _mm256_castps_si256(x));
                            let odd = _mm256_and_si256(odd, _mm256_set1_epi32(-1 << 16));
                            let both = _mm256_or_si256(_mm256_srli_epi32::<16>(even), odd);
                            *pair = _mm256_or_si256(*pair, both);
                        }
                    }
                    for (pair, words) in pairs.into_iter().enumerate() {
                        let to = &mut to[(pair * vectors + vector) * VECTOR..][..VECTOR];
                        let to = to.as_mut_ptr().add(side * VECTOR / 2);
                        _mm256_storeu_si256(to.cast(), words);
                    }
                }
            }
        }
    }
}
