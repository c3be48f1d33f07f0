//! Lanes as two AVX registers.

use std::arch::x86_64::*;

use super::{Kernel, Lanes};

/// Sixteen floats in two registers; `BYTES` says that the processor has dot products of bytes (AVX-VNNI).
#[derive(Clone, Copy)]
pub(super) struct Avx2<const BYTES: bool>(__m256, __m256);

/// Runs `kernel` on AVX registers, with fused multiplication.
pub(super) fn run<K: Kernel>(kernel: K) -> K::Output {
    assert!(has_avx2(), "avx2 is not a level of this processor");
    // SAFETY: the processor has the features.
    unsafe { run_compiled(kernel) }
}

/// Runs `kernel` on AVX registers, with fused multiplication and dot products of bytes.
pub(super) fn run_with_bytes<K: Kernel>(kernel: K) -> K::Output {
    let has_bytes = is_x86_feature_detected!("avxvnni");
    assert!(has_avx2() && has_bytes, "avx2 with vnni is not a level of this processor");
    // SAFETY: the processor has the features.
    unsafe { run_with_bytes_compiled(kernel) }
}

fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
}

#[target_feature(enable = "avx2,fma,f16c")]
fn run_compiled<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Avx2<false>>()
}

#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
fn run_with_bytes_compiled<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Avx2<true>>()
}

/// The value of an expression of intrinsics.
macro_rules! vector {
    ($value:expr) => {{
        // SAFETY: values of this type exist only below `run`, where the processor has the features; pointers
        // are as the caller of an unsafe function says.
        unsafe { $value }
    }};
}

/// Both halves through one intrinsic.
macro_rules! halves {
    ($intrinsic:ident, $($value:expr),+) => {
        Self(vector!($intrinsic($($value.0),+)), vector!($intrinsic($($value.1),+)))
    };
}

impl<const BYTES: bool> Lanes for Avx2<BYTES> {
    type Words = (__m256i, __m256i);
    const REGISTERS: usize = 8;

    #[inline(always)]
    fn splat(value: f32) -> Self {
        let half = vector!(_mm256_set1_ps(value));
        Self(half, half)
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        Self(vector!(_mm256_loadu_ps(from)), vector!(_mm256_loadu_ps(from.add(8))))
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        Self(
            vector!(_mm256_cvtph_ps(_mm_loadu_si128(from.cast()))),
            vector!(_mm256_cvtph_ps(_mm_loadu_si128(from.add(8).cast()))),
        )
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        vector!({
            _mm256_storeu_ps(to, self.0);
            _mm256_storeu_ps(to.add(8), self.1);
        });
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16) {
        let (low, high) = (round_to_bf16(self.0), round_to_bf16(self.1));
        vector!({
            // Packing works within 128-bit halves; the permutation puts the four quarters in order.
            let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(low, high));
            _mm256_storeu_si256(to.cast(), packed);
        });
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        halves!(_mm256_add_ps, self, other)
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        halves!(_mm256_sub_ps, self, other)
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        halves!(_mm256_mul_ps, self, other)
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        halves!(_mm256_div_ps, self, other)
    }
    #[inline(always)]
    fn mul_add(self, factor: Self, term: Self) -> Self {
        halves!(_mm256_fmadd_ps, self, factor, term)
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        halves!(_mm256_max_ps, self, other)
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        halves!(_mm256_min_ps, self, other)
    }
    #[inline(always)]
    fn abs(self) -> Self {
        let sign = Self::splat(-0.0);
        halves!(_mm256_andnot_ps, sign, self)
    }
    #[inline(always)]
    fn with_sign(self, sign: Self) -> Self {
        let mask = Self::splat(-0.0);
        let (magnitude, sign) = (self.abs(), halves!(_mm256_and_ps, mask, sign));
        halves!(_mm256_or_ps, magnitude, sign)
    }
    #[inline(always)]
    fn round(self) -> Self {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        Self(
            vector!(_mm256_round_ps::<NEAREST>(self.0)),
            vector!(_mm256_round_ps::<NEAREST>(self.1)),
        )
    }
    #[inline(always)]
    fn round_to_f16(self) -> Self {
        Self(
            vector!(_mm256_cvtph_ps(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0))),
            vector!(_mm256_cvtph_ps(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.1))),
        )
    }
    #[inline(always)]
    fn scale_by_power(self, power: Self) -> Self {
        Self(scale(self.0, power.0), scale(self.1, power.1))
    }
    #[inline(always)]
    fn select_less(a: Self, b: Self, yes: Self, no: Self) -> Self {
        let (low, high) = (
            vector!(_mm256_cmp_ps::<_CMP_LT_OQ>(a.0, b.0)),
            vector!(_mm256_cmp_ps::<_CMP_LT_OQ>(a.1, b.1)),
        );
        let less = Self(low, high);
        halves!(_mm256_blendv_ps, no, yes, less)
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        vector!({
            let eight = _mm256_add_ps(self.0, self.1);
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        })
    }
    #[inline(always)]
    fn largest(self) -> f32 {
        vector!({
            let eight = _mm256_max_ps(self.0, self.1);
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        })
    }

    #[inline(always)]
    fn splat_word(value: u32) -> Self::Words {
        let half = vector!(_mm256_set1_epi32(value as i32));
        (half, half)
    }
    #[inline(always)]
    unsafe fn load_words(from: *const u32) -> Self::Words {
        (vector!(_mm256_loadu_si256(from.cast())), vector!(_mm256_loadu_si256(from.add(8).cast())))
    }
    #[inline(always)]
    fn dot_bf16(self, words: Self::Words, other: Self::Words) -> Self {
        Self(dot_bf16(self.0, words.0, other.0), dot_bf16(self.1, words.1, other.1))
    }
    #[inline(always)]
    fn dot_bytes(sum: Self::Words, unsigned: Self::Words, signed: Self::Words) -> Self::Words {
        if BYTES {
            return (
                vector!(_mm256_dpbusd_avx_epi32(sum.0, unsigned.0, signed.0)),
                vector!(_mm256_dpbusd_avx_epi32(sum.1, unsigned.1, signed.1)),
            );
        }
        (dot_bytes(sum.0, unsigned.0, signed.0), dot_bytes(sum.1, unsigned.1, signed.1))
    }
    #[inline(always)]
    fn from_integers(words: Self::Words) -> Self {
        Self(vector!(_mm256_cvtepi32_ps(words.0)), vector!(_mm256_cvtepi32_ps(words.1)))
    }
    #[inline(always)]
    unsafe fn split_bytes(self, high: *mut u8, low: *mut u8) {
        vector!({
            let (first, last) = (_mm256_cvtps_epi32(self.0), _mm256_cvtps_epi32(self.1));
            let (byte, low_bits) = (_mm256_set1_epi32(255), _mm256_set1_epi32(127));
            let first_high = _mm256_and_si256(_mm256_srai_epi32::<7>(first), byte);
            let last_high = _mm256_and_si256(_mm256_srai_epi32::<7>(last), byte);
            store_bytes(high, first_high, last_high);
            let first_low = _mm256_and_si256(first, low_bits);
            store_bytes(low, first_low, _mm256_and_si256(last, low_bits));
        });
    }
    #[inline(always)]
    fn prefetch(from: *const u8) {
        vector!(_mm_prefetch::<_MM_HINT_T0>(from.cast()));
    }
}

/// The nearest bfloat16 of each float, in the lower half of its word.
#[inline(always)]
fn round_to_bf16(values: __m256) -> __m256i {
    vector!({
        let bits = _mm256_castps_si256(values);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
        let rounded = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, bias));
        let quiet = _mm256_or_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(0x40));
        let is_nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(values, values));
        _mm256_blendv_epi8(rounded, quiet, is_nan)
    })
}

/// `value · 2^power` in two factors, because one exponent cannot reach from the largest to the smallest float.
#[inline(always)]
fn scale(value: __m256, power: __m256) -> __m256 {
    vector!({
        let power = _mm256_cvtps_epi32(power);
        let first = _mm256_srai_epi32::<1>(power);
        let bias = _mm256_set1_epi32(127);
        let low = _mm256_slli_epi32::<23>(_mm256_add_epi32(first, bias));
        let rest = _mm256_sub_epi32(power, first);
        let high = _mm256_slli_epi32::<23>(_mm256_add_epi32(rest, bias));
        _mm256_mul_ps(_mm256_mul_ps(value, _mm256_castsi256_ps(low)), _mm256_castsi256_ps(high))
    })
}

#[inline(always)]
fn dot_bf16(sum: __m256, words: __m256i, other: __m256i) -> __m256 {
    vector!({
        let upper = _mm256_set1_epi32(0xffff_0000_u32 as i32);
        let low = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words));
        let other_low = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(other));
        let high = _mm256_castsi256_ps(_mm256_and_si256(words, upper));
        let other_high = _mm256_castsi256_ps(_mm256_and_si256(other, upper));
        _mm256_fmadd_ps(high, other_high, _mm256_fmadd_ps(low, other_low, sum))
    })
}

/// Even and odd bytes apart as 16-bit integers, whose pairs of products fit 32 bits.
#[inline(always)]
fn dot_bytes(sum: __m256i, unsigned: __m256i, signed: __m256i) -> __m256i {
    vector!({
        let even = _mm256_madd_epi16(
            _mm256_and_si256(unsigned, _mm256_set1_epi16(0xff)),
            _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(signed)),
        );
        let odd =
            _mm256_madd_epi16(_mm256_srli_epi16::<8>(unsigned), _mm256_srai_epi16::<8>(signed));
        _mm256_add_epi32(sum, _mm256_add_epi32(even, odd))
    })
}

/// Writes 16 words, none above 255, as bytes.
///
/// # Safety
/// 16 bytes can be written to `to`.
#[inline(always)]
unsafe fn store_bytes(to: *mut u8, first: __m256i, last: __m256i) {
    vector!({
        // Packing works within 128-bit halves; the permutation puts the four quarters in order.
        let halves = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(first, last));
        let (low, high) = (_mm256_castsi256_si128(halves), _mm256_extracti128_si256::<1>(halves));
        _mm_storeu_si128(to.cast(), _mm_packus_epi16(low, high));
    });
}
