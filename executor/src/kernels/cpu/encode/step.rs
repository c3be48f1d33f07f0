//! Where the values of one row go in a strip, and what becomes of them on the way.

#![expect(unsafe_code, reason = "members write disjoint parts of one buffer")]

use super::{CHUNK, Encoding};
use crate::kernels::cpu::lanes::{LANES, Lanes, to_bf16};
use crate::kernels::cpu::pack::TILE_DEPTH;
use crate::kernels::cpu::product::BLOCK_COLUMNS;
use crate::kernels::cpu::quantize::BLOCK;

/// Added to a small number, it leaves that number rounded to the nearest whole one in the low bits.
const ROUNDER: f32 = 12_582_912.0;

/// Writes the first `width` of a row's `values` to where they belong behind `to`, where their columns start in
/// a strip of `rows` rows.
///
/// # Safety
/// The strip has room for these columns of all its rows, and nobody else accesses this row's part of it.
#[inline(always)]
pub(super) unsafe fn put<L: Lanes>(
    encoding: Encoding,
    to: *mut u8,
    rows: usize,
    row: usize,
    values: &[f32; CHUNK],
    width: usize,
) {
    // SAFETY: all offsets are those of the module's table, within the strip; vectors that say so are AVX-512's.
    unsafe {
        match encoding {
            Encoding::Float => {
                let mut words = [0_u32; CHUNK];
                for i in 0..CHUNK {
                    words[i] = values[i].to_bits();
                }
                scatter(&words[..width], rows, to.cast::<u32>().add(row));
            }
            Encoding::Rounded => {
                let mut words = [0_u32; CHUNK];
                for i in 0..CHUNK {
                    words[i] = u32::from(to_bf16(values[i])) << 16;
                }
                scatter(&words[..width], rows, to.cast::<u32>().add(row));
            }
            Encoding::Pairs => {
                let mut words = [0_u32; CHUNK / 2];
                for (word, pair) in words.iter_mut().zip(values.as_chunks::<2>().0) {
                    *word = u32::from(to_bf16(pair[0])) | u32::from(to_bf16(pair[1])) << 16;
                }
                scatter(&words[..width / 2], rows, to.cast::<u32>().add(row));
            }
            Encoding::Tiles => {
                for (i, tile) in values[..width].as_chunks::<TILE_DEPTH>().0.iter().enumerate() {
                    let to = to.cast::<[u16; TILE_DEPTH]>().add(i * rows + row);
                    let mut row = [0_u16; TILE_DEPTH];
                    for i in 0..TILE_DEPTH {
                        row[i] = to_bf16(tile[i]);
                    }
                    to.write(row);
                }
            }
            Encoding::ByteTiles => unreachable!("bytes of tiles have `put_bytes`"),
            Encoding::Blocks { offset } => {
                for (i, block) in values.as_chunks::<BLOCK>().0.iter().enumerate() {
                    let to = to.cast::<u32>().add(i * rows * (BLOCK / 4 + 2) + row);
                    #[cfg(target_arch = "x86_64")]
                    let words = if L::HAS_AVX512 {
                        quantized_wide(block, offset)
                    } else {
                        quantized(block, offset)
                    };
                    #[cfg(not(target_arch = "x86_64"))]
                    let words = quantized(block, offset);
                    scatter(&words, rows, to);
                }
            }
        }
    }
}

/// Columns of a step of bytes.
const BYTES_STEP: usize = 64;

/// Writes the first `width` of a row's `values` as bytes between -127 and 127 to where they belong behind `to`, where
/// their columns start in a strip of `rows` rows of tiles. Returns the bytes' scale.
///
/// # Safety
/// The strip has room for these columns of all its rows, and nobody else accesses this row's part of it.
#[inline(always)]
pub(super) unsafe fn put_bytes(
    to: *mut u8,
    rows: usize,
    row: usize,
    values: &[f32; BLOCK_COLUMNS],
    width: usize,
) -> f32 {
    // Magnitudes compare as their bits do; what is not a number is above all and spoils the scale, as it should.
    let mut most = [0_u32; LANES];
    for part in values.as_chunks::<LANES>().0 {
        for i in 0..LANES {
            most[i] = most[i].max(part[i].abs().to_bits());
        }
    }
    let largest = f32::from_bits(most.into_iter().fold(0, u32::max));
    let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
    for (i, step) in values[..width].as_chunks::<BYTES_STEP>().0.iter().enumerate() {
        let mut bytes = [0_u8; BYTES_STEP];
        for i in 0..BYTES_STEP {
            let shifted = step[i] * inverse + ROUNDER;
            bytes[i] = shifted.to_bits().wrapping_sub(ROUNDER.to_bits()) as u8;
        }
        // SAFETY: the strip has a step of 64 bytes for each of its rows.
        unsafe { to.cast::<[u8; BYTES_STEP]>().add(i * rows + row).write(bytes) };
    }
    largest / 127.0
}

/// Writes one row's words into a strip of `rows` rows.
///
/// # Safety
/// `to` is the place of the first one, and the strip has room for all.
#[inline(always)]
unsafe fn scatter(words: &[u32], rows: usize, to: *mut u32) {
    // SAFETY: the caller's.
    unsafe {
        if rows == 1 {
            to.copy_from_nonoverlapping(words.as_ptr(), words.len());
        } else {
            for (i, &word) in words.iter().enumerate() {
                to.add(i * rows).write(word);
            }
        }
    }
}

/// A block as bytes between -127 and 127 in words, then its scale, then minus `offset` times the bytes' sum.
#[inline(always)]
fn quantized(values: &[f32; BLOCK], offset: i32) -> [u32; BLOCK / 4 + 2] {
    // Magnitudes compare as their bits do; what is not a number is above all and spoils the scale, as it should.
    let mut largest = [0_u32; BLOCK];
    for i in 0..BLOCK {
        largest[i] = values[i].abs().to_bits();
    }
    let mut width = BLOCK / 2;
    while width > 0 {
        for i in 0..width {
            largest[i] = largest[i].max(largest[i + width]);
        }
        width /= 2;
    }
    let largest = f32::from_bits(largest[0]);
    let scale = largest / 127.0;
    let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
    let mut codes = [0_i32; BLOCK];
    for i in 0..BLOCK {
        let shifted = values[i] * inverse + ROUNDER;
        codes[i] = shifted.to_bits().wrapping_sub(ROUNDER.to_bits()).cast_signed();
    }
    let mut sums = codes;
    let mut width = BLOCK / 2;
    while width > 0 {
        for i in 0..width {
            sums[i] = sums[i].wrapping_add(sums[i + width]);
        }
        width /= 2;
    }
    let mut words = [0_u32; BLOCK / 4 + 2];
    let mut bytes = [0_u8; BLOCK];
    for i in 0..BLOCK {
        bytes[i] = codes[i] as u8;
    }
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<4>().0) {
        *word = u32::from_le_bytes(*bytes);
    }
    words[BLOCK / 4] = scale.to_bits();
    words[BLOCK / 4 + 1] = sums[0].wrapping_mul(-offset).cast_unsigned();
    words
}

/// What [`quantized`] gives, several times as fast as what the compiler makes of it.
///
/// # Safety
/// The processor has AVX-512 F, BW, DQ and VL.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn quantized_wide(values: &[f32; BLOCK], offset: i32) -> [u32; BLOCK / 4 + 2] {
    use std::arch::x86_64::*;
    let mut words = [0_u32; BLOCK / 4 + 2];
    // SAFETY: a block is two registers of floats, and its codes are two of bytes.
    unsafe {
        let low = _mm512_loadu_ps(values.as_ptr());
        let high = _mm512_loadu_ps(values.as_ptr().add(BLOCK / 2));
        // As integers, so that what is not a number is above all.
        let magnitude = |x| _mm512_castps_si512(_mm512_abs_ps(x));
        let largest = _mm512_max_epu32(magnitude(low), magnitude(high));
        let largest = f32::from_bits(_mm512_reduce_max_epu32(largest));
        let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
        let inverse = _mm512_set1_ps(inverse);
        let low = _mm512_cvtps_epi32(_mm512_mul_ps(low, inverse));
        let high = _mm512_cvtps_epi32(_mm512_mul_ps(high, inverse));
        let to = words.as_mut_ptr().cast::<__m128i>();
        _mm_storeu_si128(to, _mm512_cvtepi32_epi8(low));
        _mm_storeu_si128(to.add(1), _mm512_cvtepi32_epi8(high));
        let total = _mm512_reduce_add_epi32(_mm512_add_epi32(low, high));
        words[BLOCK / 4] = (largest / 127.0).to_bits();
        words[BLOCK / 4 + 1] = total.wrapping_mul(-offset).cast_unsigned();
    }
    words
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use crate::kernels::cpu::isa::Isa;

    /// Some blocks whose scales and their inverses are normal numbers.
    fn blocks() -> impl Iterator<Item = [f32; BLOCK]> {
        (0..1000).filter_map(|seed| {
            let size = (seed as f32 - 500.0).exp2();
            let is_plain = size.is_normal() && (size / 1e3).is_normal() && (size * 1e3).is_finite();
            is_plain.then(|| std::array::from_fn(|i| ((i * seed) as f32).sin() * size))
        })
    }

    fn scale(words: &[u32; BLOCK / 4 + 2]) -> f32 {
        f32::from_bits(words[BLOCK / 4])
    }

    fn spoilt() -> [f32; BLOCK] {
        std::array::from_fn(|i| if i == 5 { f32::NAN } else { 1.0 })
    }

    #[test]
    fn bytes_are_half_a_step_from_their_values_and_the_sum_is_theirs() {
        for block in blocks() {
            let words = quantized(&block, 8);
            let bytes: Vec<i8> = words[..BLOCK / 4]
                .iter()
                .flat_map(|word| word.to_le_bytes().map(u8::cast_signed))
                .collect();
            for (value, &byte) in block.iter().zip(&bytes) {
                let off = (f32::from(byte) * scale(&words) - value).abs();
                assert!(off <= 0.51 * scale(&words), "{byte} for {value}");
            }
            let sum: i32 = bytes.iter().map(|&byte| i32::from(byte)).sum();
            assert_eq!(words[BLOCK / 4 + 1].cast_signed(), -8 * sum);
        }
        assert!(scale(&quantized(&spoilt(), 8)).is_nan());
    }

    #[test]
    fn both_ways_of_quantising_agree() {
        if Isa::detect() < Isa::Avx512 {
            eprintln!("skipped: this processor has no AVX-512");
            return;
        }
        let wide = |block: &[f32; BLOCK]| {
            // SAFETY: the level was detected.
            unsafe { quantized_wide(block, 8) }
        };
        for block in blocks() {
            assert_eq!(wide(&block), quantized(&block, 8), "{block:?}");
        }
        assert!(scale(&wide(&spoilt())).is_nan());
    }
}
