//! Lanes as one AVX-512 register.

use std::arch::x86_64::*;

use super::{Kernel, Lanes};

/// Sixteen floats in a register; the processor may have dot products of bytes (AVX-512 VNNI), and of bfloat16 as well
/// (AVX-512 BF16).
#[derive(Clone, Copy)]
pub(super) struct Avx512<const BYTES: bool, const BF16: bool>(__m512);

/// Runs `kernel` on AVX-512 registers.
pub(super) fn run<K: Kernel>(kernel: K) -> K::Output {
    assert!(has_avx512(), "avx512 is not a level of this processor");
    // SAFETY: the processor has the features.
    unsafe { run_compiled(kernel) }
}

/// Runs `kernel` on AVX-512 registers with dot products of bytes.
pub(super) fn run_with_bytes<K: Kernel>(kernel: K) -> K::Output {
    let has_bytes = is_x86_feature_detected!("avx512vnni");
    assert!(has_avx512() && has_bytes, "avx512 with vnni is not a level of this processor");
    // SAFETY: the processor has the features.
    unsafe { run_with_bytes_compiled(kernel) }
}

/// Runs `kernel` on AVX-512 registers with dot products of bfloat16 and of bytes.
pub(super) fn run_with_both<K: Kernel>(kernel: K) -> K::Output {
    let has_both = is_x86_feature_detected!("avx512bf16") && is_x86_feature_detected!("avx512vnni");
    assert!(has_avx512() && has_both, "avx512 with bf16 and vnni is not a level of this processor");
    // SAFETY: the processor has the features.
    unsafe { run_with_both_compiled(kernel) }
}

fn has_avx512() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")]
fn run_compiled<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Avx512<false, false>>()
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c,avx512vnni")]
fn run_with_bytes_compiled<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Avx512<true, false>>()
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c,avx512bf16,avx512vnni")]
fn run_with_both_compiled<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Avx512<true, true>>()
}

/// The value of an expression of intrinsics.
macro_rules! vector {
    ($value:expr) => {{
        // SAFETY: values of this type exist only below `run`, where the processor has the features; pointers
        // are as the caller of an unsafe function says.
        unsafe { $value }
    }};
}

impl<const BYTES: bool, const BF16: bool> Lanes for Avx512<BYTES, BF16> {
    type Words = __m512i;
    const REGISTERS: usize = 32;
    const HAS_AVX512: bool = true;

    #[inline(always)]
    fn splat(value: f32) -> Self {
        Self(vector!(_mm512_set1_ps(value)))
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        Self(vector!(_mm512_loadu_ps(from)))
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        Self(vector!(_mm512_cvtph_ps(_mm256_loadu_si256(from.cast()))))
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        vector!(_mm512_storeu_ps(to, self.0));
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16) {
        let halves: __m256i = if BF16 {
            vector!(std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(self.0)))
        } else {
            vector!({
                let bits = _mm512_castps_si512(self.0);
                let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
                let bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
                let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, bias));
                let quiet = _mm512_or_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(0x40));
                let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self.0, self.0);
                _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, is_nan, quiet))
            })
        };
        vector!(_mm256_storeu_si256(to.cast(), halves));
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        Self(vector!(_mm512_add_ps(self.0, other.0)))
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        Self(vector!(_mm512_sub_ps(self.0, other.0)))
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        Self(vector!(_mm512_mul_ps(self.0, other.0)))
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        Self(vector!(_mm512_div_ps(self.0, other.0)))
    }
    #[inline(always)]
    fn mul_add(self, factor: Self, term: Self) -> Self {
        Self(vector!(_mm512_fmadd_ps(self.0, factor.0, term.0)))
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        Self(vector!(_mm512_max_ps(self.0, other.0)))
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        Self(vector!(_mm512_min_ps(self.0, other.0)))
    }
    #[inline(always)]
    fn abs(self) -> Self {
        Self(vector!(_mm512_abs_ps(self.0)))
    }
    #[inline(always)]
    fn with_sign(self, sign: Self) -> Self {
        Self(vector!({
            let mask = _mm512_set1_ps(-0.0);
            _mm512_or_ps(_mm512_andnot_ps(mask, self.0), _mm512_and_ps(mask, sign.0))
        }))
    }
    #[inline(always)]
    fn round(self) -> Self {
        Self(vector!(_mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(
            self.0
        )))
    }
    #[inline(always)]
    fn round_to_f16(self) -> Self {
        Self(vector!(_mm512_cvtph_ps(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0))))
    }
    #[inline(always)]
    fn scale_by_power(self, power: Self) -> Self {
        Self(vector!(_mm512_scalef_ps(self.0, power.0)))
    }
    #[inline(always)]
    fn select_less(a: Self, b: Self, yes: Self, no: Self) -> Self {
        Self(vector!(_mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a.0, b.0), no.0, yes.0)))
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        vector!({
            let high = _mm512_extractf32x8_ps::<1>(self.0);
            let eight = _mm256_add_ps(_mm512_castps512_ps256(self.0), high);
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        })
    }
    #[inline(always)]
    fn largest(self) -> f32 {
        vector!({
            let high = _mm512_extractf32x8_ps::<1>(self.0);
            let eight = _mm256_max_ps(_mm512_castps512_ps256(self.0), high);
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        })
    }

    #[inline(always)]
    fn splat_word(value: u32) -> Self::Words {
        vector!(_mm512_set1_epi32(value as i32))
    }
    #[inline(always)]
    unsafe fn load_words(from: *const u32) -> Self::Words {
        vector!(_mm512_loadu_si512(from.cast()))
    }
    #[inline(always)]
    fn dot_bf16(self, words: Self::Words, other: Self::Words) -> Self {
        if BF16 {
            return Self(vector!(_mm512_dpbf16_ps(
                self.0,
                std::mem::transmute::<__m512i, __m512bh>(words),
                std::mem::transmute::<__m512i, __m512bh>(other)
            )));
        }
        Self(vector!({
            let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
            let low = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words));
            let other_low = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(other));
            let high = _mm512_castsi512_ps(_mm512_and_si512(words, upper));
            let other_high = _mm512_castsi512_ps(_mm512_and_si512(other, upper));
            _mm512_fmadd_ps(high, other_high, _mm512_fmadd_ps(low, other_low, self.0))
        }))
    }
    #[inline(always)]
    fn dot_bytes(sum: Self::Words, unsigned: Self::Words, signed: Self::Words) -> Self::Words {
        if BYTES {
            return vector!(_mm512_dpbusd_epi32(sum, unsigned, signed));
        }
        vector!({
            // Even and odd bytes apart as 16-bit integers, whose pairs of products fit 32 bits.
            let even_mask = _mm512_set1_epi16(0xff);
            let even = _mm512_madd_epi16(
                _mm512_and_si512(unsigned, even_mask),
                _mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(signed)),
            );
            let odd =
                _mm512_madd_epi16(_mm512_srli_epi16::<8>(unsigned), _mm512_srai_epi16::<8>(signed));
            _mm512_add_epi32(sum, _mm512_add_epi32(even, odd))
        })
    }
    #[inline(always)]
    fn from_integers(words: Self::Words) -> Self {
        Self(vector!(_mm512_cvtepi32_ps(words)))
    }
    #[inline(always)]
    unsafe fn split_bytes(self, high: *mut u8, low: *mut u8) {
        vector!({
            let whole = _mm512_cvtps_epi32(self.0);
            let low_bits = _mm512_and_si512(whole, _mm512_set1_epi32(127));
            _mm_storeu_si128(high.cast(), _mm512_cvtepi32_epi8(_mm512_srai_epi32::<7>(whole)));
            _mm_storeu_si128(low.cast(), _mm512_cvtepi32_epi8(low_bits));
        });
    }
    #[inline(always)]
    fn prefetch(from: *const u8) {
        vector!(_mm_prefetch::<_MM_HINT_T0>(from.cast()));
    }
}
