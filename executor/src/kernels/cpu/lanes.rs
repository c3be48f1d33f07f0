//! Sixteen floats at a time: the one vector type that kernels are written for.
//!
//! - A kernel is written once, generic over `Lanes`, and `vectorize` runs it at the level asked for.
//! - Types of this module other than `Portable` are used only below `vectorize`, which has checked the processor;
//!   that is what makes their operations sound.
//! - Every function on the way from `vectorize` to an operation is `#[inline(always)]`: only then are the
//!   operations compiled with the features of the entry they end up in.

#![expect(
    unsafe_code,
    reason = "loads and stores through pointers, and instructions of one processor"
)]

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

use super::isa::Isa;

/// Lanes of a vector.
pub(crate) const LANES: usize = 16;

/// Sixteen floats, and sixteen 32-bit words of packed smaller elements.
///
/// Functions that take pointers read or write exactly what they say there, at any alignment.
pub(crate) trait Lanes: Copy {
    /// Sixteen 32-bit words.
    type Words: Copy;
    /// Vectors that fit in the registers beside what a multiplication needs.
    const REGISTERS: usize;
    /// Whether there are values of this type only where the processor has AVX-512 F, BW, DQ and VL.
    #[cfg(target_arch = "x86_64")]
    const HAS_AVX512: bool = false;

    fn splat(value: f32) -> Self;
    /// Reads 16 floats.
    ///
    /// # Safety
    /// `from` points to 16 floats.
    unsafe fn load(from: *const f32) -> Self;
    /// Reads 16 IEEE halves.
    ///
    /// # Safety
    /// `from` points to 16 halves.
    unsafe fn load_f16(from: *const u16) -> Self;
    /// Writes 16 floats.
    ///
    /// # Safety
    /// `to` has room for 16 floats.
    unsafe fn store(self, to: *mut f32);
    /// Writes 16 bfloat16, rounded to nearest even.
    ///
    /// # Safety
    /// `to` has room for 16 bfloat16.
    unsafe fn store_bf16(self, to: *mut u16);

    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn div(self, other: Self) -> Self;
    /// `self * factor + term`, rounded once where the processor can.
    fn mul_add(self, factor: Self, term: Self) -> Self;
    /// The larger; `other` where either is not a number.
    fn max(self, other: Self) -> Self;
    /// The smaller; `other` where either is not a number.
    fn min(self, other: Self) -> Self;
    fn abs(self) -> Self;
    /// The magnitude of `self` with the sign of `sign`.
    fn with_sign(self, sign: Self) -> Self;
    fn round(self) -> Self;
    /// The nearest IEEE half, ties to even.
    fn round_to_f16(self) -> Self;
    /// `self · 2^power` for whole `power` between -252 and 252.
    fn scale_by_power(self, power: Self) -> Self;
    /// Per lane: `a < b ? yes : no`.
    fn select_less(a: Self, b: Self, yes: Self, no: Self) -> Self;
    /// The sum of all lanes, always in the same order.
    fn sum(self) -> f32;
    /// The largest lane.
    fn largest(self) -> f32;

    fn splat_word(value: u32) -> Self::Words;
    /// Reads 16 words.
    ///
    /// # Safety
    /// `from` points to 16 words.
    unsafe fn load_words(from: *const u32) -> Self::Words;
    /// Adds to each lane the products of its two bfloat16 with those of `other`.
    fn dot_bf16(self, words: Self::Words, other: Self::Words) -> Self;
    /// Adds to each lane, as `i32`, the four products of its unsigned bytes with the signed ones of `signed`.
    fn dot_bytes(sum: Self::Words, unsigned: Self::Words, signed: Self::Words) -> Self::Words;
    /// Each lane, an `i32`, as a float.
    fn from_integers(words: Self::Words) -> Self;
    /// Writes each lane, a whole number `n` between -2¹⁴ and 2¹⁵ when rounded, as bytes `n >> 7` and `n & 127`.
    ///
    /// # Safety
    /// `high` and `low` each have room for 16 bytes.
    unsafe fn split_bytes(self, high: *mut u8, low: *mut u8);
    /// Asks for the cache line of `from`.
    fn prefetch(from: *const u8);

    /// The first 16 floats of `from`, or all with zeros behind.
    #[inline(always)]
    fn read(from: &[f32]) -> Self {
        if from.len() >= LANES {
            // SAFETY: there are 16 floats.
            return unsafe { Self::load(from.as_ptr()) };
        }
        let mut padded = [0.0; LANES];
        padded[..from.len()].copy_from_slice(from);
        // SAFETY: there are 16 floats.
        unsafe { Self::load(padded.as_ptr()) }
    }

    /// Writes all lanes, or as many as `to` has room for.
    #[inline(always)]
    fn write(self, to: &mut [f32]) {
        if to.len() >= LANES {
            // SAFETY: there is room for 16 floats.
            return unsafe { self.store(to.as_mut_ptr()) };
        }
        let mut padded = [0.0; LANES];
        // SAFETY: there is room for 16 floats.
        unsafe { self.store(padded.as_mut_ptr()) };
        let room = to.len();
        to.copy_from_slice(&padded[..room]);
    }
}

/// Something to compute on vectors.
pub(crate) trait Kernel {
    type Output;
    /// Must be `#[inline(always)]`, as all it calls with `L`.
    fn run<L: Lanes>(self) -> Self::Output;
}

/// Runs `kernel` with the instructions of `isa`.
///
/// # Panics
/// When this processor lacks them.
#[inline]
pub(crate) fn vectorize<K: Kernel>(isa: Isa, kernel: K) -> K::Output {
    match isa {
        Isa::Portable => kernel.run::<portable::Portable>(),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => avx2::run(kernel),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2Vnni => avx2::run_with_bytes(kernel),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => avx512::run(kernel),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Vnni => avx512::run_with_bytes(kernel),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Bf16Vnni | Isa::Amx => avx512::run_with_both(kernel),
        #[cfg(not(target_arch = "x86_64"))]
        _ => panic!("{isa} is not a level of this processor"),
    }
}

/// The bfloat16 nearest to `value`, ties to even; what is not a number stays so.
#[inline(always)]
pub(crate) fn to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
    if value.is_nan() { (bits >> 16) as u16 | 0x40 } else { rounded }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::testing::Random;
    use super::*;

    #[test]
    fn rounding_is_to_nearest_even() {
        let mut random = Random(1);
        for _ in 0..100_000 {
            let value = f32::from_bits(random.next() as u32);
            assert_eq!(to_bf16(value), bf16::from_f32(value).to_bits(), "{value}");
        }
        assert_eq!(to_bf16(f32::INFINITY), bf16::INFINITY.to_bits());
    }
}
