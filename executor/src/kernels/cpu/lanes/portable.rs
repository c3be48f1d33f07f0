//! Lanes as an array, for any processor; compilers turn most of it into what vectors there are.

use std::array;

use super::{LANES, Lanes, to_bf16};

/// Sixteen floats in an array.
#[derive(Clone, Copy)]
pub(super) struct Portable([f32; LANES]);

impl Portable {
    #[inline(always)]
    fn zip(self, other: Self, combine: impl Fn(f32, f32) -> f32) -> Self {
        Self(array::from_fn(|lane| combine(self.0[lane], other.0[lane])))
    }
}

impl Lanes for Portable {
    type Words = [u32; LANES];
    const REGISTERS: usize = 4;

    #[inline(always)]
    fn splat(value: f32) -> Self {
        Self([value; LANES])
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller says that 16 floats can be read.
        Self(unsafe { from.cast::<[f32; LANES]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        // SAFETY: the caller says that 16 halves can be read.
        let bits = unsafe { from.cast::<[u16; LANES]>().read_unaligned() };
        Self(bits.map(|bits| half::f16::from_bits(bits).to_f32()))
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller says that 16 floats can be written.
        unsafe { to.cast::<[f32; LANES]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16) {
        // SAFETY: the caller says that 16 bfloat16 can be written.
        unsafe { to.cast::<[u16; LANES]>().write_unaligned(self.0.map(to_bf16)) }
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        self.zip(other, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        self.zip(other, |a, b| a / b)
    }
    /// Rounded twice: `f32::mul_add` is a library call where the target has no such instruction.
    #[inline(always)]
    fn mul_add(self, factor: Self, term: Self) -> Self {
        self.mul(factor).add(term)
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        self.zip(other, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        self.zip(other, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn abs(self) -> Self {
        Self(self.0.map(f32::abs))
    }
    #[inline(always)]
    fn with_sign(self, sign: Self) -> Self {
        self.zip(sign, f32::copysign)
    }
    #[inline(always)]
    fn round(self) -> Self {
        Self(self.0.map(f32::round_ties_even))
    }
    #[inline(always)]
    fn round_to_f16(self) -> Self {
        Self(self.0.map(|value| half::f16::from_f32(value).to_f32()))
    }
    #[inline(always)]
    fn scale_by_power(self, power: Self) -> Self {
        // Two factors, because one exponent cannot reach from the largest to the smallest float.
        self.zip(power, |value, power| {
            let (power, first) = (power as i32, power as i32 >> 1);
            let factor = |power: i32| f32::from_bits(((power + 127) as u32) << 23);
            value * factor(first) * factor(power - first)
        })
    }
    #[inline(always)]
    fn select_less(a: Self, b: Self, yes: Self, no: Self) -> Self {
        Self(array::from_fn(|lane| if a.0[lane] < b.0[lane] { yes.0[lane] } else { no.0[lane] }))
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        let [mut a, mut b] = [[0.0; 8]; 2];
        a.copy_from_slice(&self.0[..8]);
        b.copy_from_slice(&self.0[8..]);
        let eight: [f32; 8] = array::from_fn(|i| a[i] + b[i]);
        let four: [f32; 4] = array::from_fn(|i| eight[i] + eight[i + 4]);
        (four[0] + four[2]) + (four[1] + four[3])
    }
    #[inline(always)]
    fn largest(self) -> f32 {
        self.0.into_iter().fold(f32::NEG_INFINITY, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn splat_word(value: u32) -> Self::Words {
        [value; LANES]
    }
    #[inline(always)]
    unsafe fn load_words(from: *const u32) -> Self::Words {
        // SAFETY: the caller says that 16 words can be read.
        unsafe { from.cast::<[u32; LANES]>().read_unaligned() }
    }
    #[inline(always)]
    fn dot_bf16(self, words: Self::Words, other: Self::Words) -> Self {
        Self(array::from_fn(|lane| {
            let (a, b) = (words[lane], other[lane]);
            let low = f32::from_bits(a << 16) * f32::from_bits(b << 16);
            let high = f32::from_bits(a & 0xffff_0000) * f32::from_bits(b & 0xffff_0000);
            self.0[lane] + low + high
        }))
    }
    #[inline(always)]
    fn dot_bytes(sum: Self::Words, unsigned: Self::Words, signed: Self::Words) -> Self::Words {
        array::from_fn(|lane| {
            let products = unsigned[lane].to_le_bytes().into_iter().zip(signed[lane].to_le_bytes());
            products.fold(sum[lane], |sum, (a, b)| {
                sum.wrapping_add_signed(i32::from(a) * i32::from(b as i8))
            })
        })
    }
    #[inline(always)]
    fn from_integers(words: Self::Words) -> Self {
        Self(words.map(|word| word as i32 as f32))
    }
    #[inline(always)]
    unsafe fn split_bytes(self, high: *mut u8, low: *mut u8) {
        let whole = self.0.map(|value| value.round_ties_even() as i32);
        // SAFETY: the caller says that 16 bytes can be written to each.
        unsafe {
            high.cast::<[u8; LANES]>().write(whole.map(|n| (n >> 7) as u8));
            low.cast::<[u8; LANES]>().write(whole.map(|n| (n & 127) as u8));
        }
    }
    #[inline(always)]
    fn prefetch(_from: *const u8) {}
}
