//! Activations in the form that a kernel multiplies: normalised, rounded or quantised, rows interleaved in *strips*.
//!
//! A strip is a few rows that a kernel takes at once. Along the columns, one step of a strip holds, for each of
//! its rows in turn:
//!
//! | encoding | columns of a step | a row's step |
//! | --- | --- | --- |
//! | `Float`, `Rounded` | 1 | an f32 (rounded to bf16) |
//! | `Pairs` | 2 | two bf16 |
//! | `Tiles` | 32 | 32 bf16 |
//! | `Blocks` | 32 | words of four signed bytes, `[group][row]`; then `[row]` f32 scales; then for each row minus the sum of its bytes times the code of zero |
//!
//! Every row takes the same bytes, so strip `s` starts at its first row times [`Encoding::row_bytes`].

#![expect(unsafe_code, reason = "members write disjoint parts of one buffer")]
use ir::op::NormKind;

use super::isa::Isa;
use super::pack::{BLOCK_PAIR, Shared, TILE_DEPTH};
use super::quantize::BLOCK;
use super::tile::MOST_ROWS;

/// What a linear does with its input first.
#[derive(Clone, Copy, Debug)]
pub struct Norm<'a> {
    /// What is divided out.
    pub kind: NormKind,
    /// Elementwise factor, one for each column.
    pub scale: Option<&'a [f32]>,
    /// Elementwise term, one for each column.
    pub bias: Option<&'a [f32]>,
    /// Added to the variance.
    pub epsilon: f32,
    /// Added to every scale.
    pub scale_offset: f32,
}

/// How activations are encoded for a format at a level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Encoding {
    Float,
    Rounded,
    Pairs,
    Tiles,
    /// `offset` is the code of zero of the weights.
    Blocks {
        offset: i32,
    },
}

/// Some rows that are encoded together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Strip {
    pub(super) first: usize,
    pub(super) rows: usize,
}

/// Everything that is read while rows are encoded.
pub(super) struct Rows<'a> {
    pub(super) isa: Isa,
    pub(super) encoding: Encoding,
    pub(super) x: &'a [f32],
    pub(super) columns: usize,
    pub(super) norm: Option<Norm<'a>>,
    /// The row of `x` behind each encoded row; the same one if there is no list.
    pub(super) sources: Option<&'a [u32]>,
}

/// Columns that are encoded at once: a multiple of every step, and small beside the first cache.
const CHUNK: usize = BLOCK_PAIR;
/// Added to a small number, it leaves that number rounded to the nearest whole one in the low bits.
const ROUNDER: f32 = 12_582_912.0;
/// Columns of one claim when there are few strips: some µs of work.
pub(super) const SEGMENT: usize = 16 * CHUNK;

impl Encoding {
    /// Columns with their padding: at least that of the formats that the encoding is for.
    pub(super) fn padded(self, columns: usize) -> usize {
        match self {
            Encoding::Float => columns,
            // Tiles also meet panels unpacked from blocks, which are padded as blocks are.
            Encoding::Rounded | Encoding::Pairs | Encoding::Tiles | Encoding::Blocks { .. } => {
                columns.next_multiple_of(BLOCK_PAIR)
            }
        }
    }

    /// Bytes of an encoded row.
    pub(super) fn row_bytes(self, columns: usize) -> usize {
        let columns = self.padded(columns);
        match self {
            Encoding::Float | Encoding::Rounded => columns * 4,
            Encoding::Pairs | Encoding::Tiles => columns * 2,
            Encoding::Blocks { .. } => columns / BLOCK * (BLOCK + 4 + 4),
        }
    }
}

/// Cuts `rows` rows, the first one `first`, in strips of at most `most`, as even as they get.
pub(super) fn strips(first: usize, rows: usize, most: usize) -> impl Iterator<Item = Strip> {
    let count = rows.div_ceil(most);
    let cut = move |strip: usize| first + strip * rows / count;
    (0..count).map(move |strip| Strip { first: cut(strip), rows: cut(strip + 1) - cut(strip) })
}

impl Rows<'_> {
    /// Encodes the columns from `start`, at most [`SEGMENT`] or to the end, of one strip.
    ///
    /// # Safety
    /// `encoded` is where row 0 is encoded, all rows of the strip have room behind it, and no one else
    /// reads or writes this segment of this strip.
    pub(super) unsafe fn encode(
        &self,
        strip: Strip,
        start: usize,
        count: usize,
        encoded: Shared<u8>,
    ) {
        // SAFETY: the caller's; and the level is one of this processor's.
        unsafe {
            match self.isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 | Isa::Avx512Bf16Vnni | Isa::Amx => {
                    encode_avx512(self, strip, start, count, encoded);
                }
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => encode_avx2(self, strip, start, count, encoded),
                #[cfg(not(target_arch = "x86_64"))]
                Isa::Avx2 | Isa::Avx512 | Isa::Avx512Bf16Vnni | Isa::Amx => self.isa.is_missing(),
                Isa::Portable => encode::<false>(self, strip, start, count, encoded),
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn encode_avx2(
    rows: &Rows<'_>,
    strip: Strip,
    start: usize,
    count: usize,
    encoded: Shared<u8>,
) {
    // SAFETY: the caller's.
    unsafe { encode::<false>(rows, strip, start, count, encoded) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn encode_avx512(
    rows: &Rows<'_>,
    strip: Strip,
    start: usize,
    count: usize,
    encoded: Shared<u8>,
) {
    // SAFETY: the caller's.
    unsafe { encode::<true>(rows, strip, start, count, encoded) }
}

/// The body of [`Rows::encode`], compiled for each level; `WIDE` where there is AVX-512.
#[inline(always)]
unsafe fn encode<const WIDE: bool>(
    rows: &Rows<'_>,
    strip: Strip,
    start: usize,
    count: usize,
    encoded: Shared<u8>,
) {
    let end = rows.encoding.padded(rows.columns).min(start + count);
    let row_bytes = rows.encoding.row_bytes(rows.columns);
    // SAFETY: the caller gives room for all rows of the strip.
    let base = unsafe { encoded.pointer().add(strip.first * row_bytes) };
    let mut sources = [Source { x: &[], shift: 0.0, factor: 1.0 }; MOST_ROWS];
    for (row, source) in sources[..strip.rows].iter_mut().enumerate() {
        let index = match rows.sources {
            Some(sources) => sources[strip.first + row] as usize,
            None => strip.first + row,
        };
        source.x = &rows.x[index * rows.columns..(index + 1) * rows.columns];
        if let Some(norm) = rows.norm {
            (source.shift, source.factor) = moments(source.x, norm.kind, norm.epsilon);
        }
    }
    // Rows inside columns: what neighbouring rows write shares cache lines.
    for column in (start..end).step_by(CHUNK) {
        for (row, source) in sources[..strip.rows].iter().enumerate() {
            let present = column.min(rows.columns)..(column + CHUNK).min(rows.columns);
            let mut values = match source.x[present.clone()].as_array::<CHUNK>() {
                Some(whole) => *whole,
                None => {
                    let mut values = [0.0; CHUNK];
                    values[..present.len()].copy_from_slice(&source.x[present.clone()]);
                    values
                }
            };
            if let Some(norm) = rows.norm {
                normalise(&mut values, norm, present, source.shift, source.factor);
            }
            let width = CHUNK.min(end - column);
            // SAFETY: the segment is this call's alone and lies in the strip.
            unsafe { put::<WIDE>(rows.encoding, base, strip.rows, row, column, &values, width) };
        }
    }
}

/// A row of activations, and what its norm subtracts and then multiplies.
#[derive(Clone, Copy)]
struct Source<'a> {
    x: &'a [f32],
    shift: f32,
    factor: f32,
}

/// What is subtracted from, and what is then multiplied to, every element of a row.
#[inline(always)]
fn moments(x: &[f32], kind: NormKind, epsilon: f32) -> (f32, f32) {
    let count = x.len() as f32;
    let shift = match kind {
        NormKind::Rms => 0.0,
        NormKind::Layer => sum(x, |value| value) / count,
    };
    let variance = sum(x, |value| (value - shift) * (value - shift)) / count;
    (shift, 1.0 / (variance + epsilon).sqrt())
}

/// The sum of `of(x)`, in an order that does not depend on the width of registers.
#[inline(always)]
fn sum(x: &[f32], of: impl Fn(f32) -> f32) -> f32 {
    const LANES: usize = 32;
    let mut sums = [0.0_f32; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            sums[lane] += of(chunk[lane]);
        }
    }
    for (sum, &value) in sums.iter_mut().zip(rest) {
        *sum += of(value);
    }
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            sums[lane] += sums[lane + width];
        }
        width /= 2;
    }
    sums[0]
}

#[inline(always)]
fn normalise(
    values: &mut [f32; CHUNK],
    norm: Norm<'_>,
    columns: std::ops::Range<usize>,
    shift: f32,
    factor: f32,
) {
    for value in values.iter_mut() {
        *value = (*value - shift) * factor;
    }
    if let Some(scale) = norm.scale {
        for (value, scale) in values.iter_mut().zip(&scale[columns.clone()]) {
            *value *= scale + norm.scale_offset;
        }
    }
    if let Some(bias) = norm.bias {
        for (value, bias) in values.iter_mut().zip(&bias[columns.clone()]) {
            *value += bias;
        }
    }
    // Padding stays zero although something was subtracted from it.
    values[columns.len()..].fill(0.0);
}

/// Writes the first `width` of a row's `values`, the first of them of column `column`, to where they belong
/// in a strip of `rows` rows.
#[inline(always)]
unsafe fn put<const WIDE: bool>(
    encoding: Encoding,
    base: *mut u8,
    rows: usize,
    row: usize,
    column: usize,
    values: &[f32; CHUNK],
    width: usize,
) {
    // SAFETY: all offsets are those of the module's table, within the strip.
    unsafe {
        match encoding {
            Encoding::Float => {
                let mut words = [0_u32; CHUNK];
                for i in 0..CHUNK {
                    words[i] = values[i].to_bits();
                }
                scatter(&words[..width], rows, base.cast::<u32>().add(column * rows + row));
            }
            Encoding::Rounded => {
                let mut words = [0_u32; CHUNK];
                for i in 0..CHUNK {
                    words[i] = round_to_bf16(values[i]) << 16;
                }
                scatter(&words[..width], rows, base.cast::<u32>().add(column * rows + row));
            }
            Encoding::Pairs => {
                let mut words = [0_u32; CHUNK / 2];
                for (word, pair) in words.iter_mut().zip(values.as_chunks::<2>().0) {
                    *word = round_to_bf16(pair[0]) | round_to_bf16(pair[1]) << 16;
                }
                scatter(&words[..width / 2], rows, base.cast::<u32>().add(column / 2 * rows + row));
            }
            Encoding::Tiles => {
                for (i, tile) in values[..width].as_chunks::<TILE_DEPTH>().0.iter().enumerate() {
                    let step = column / TILE_DEPTH + i;
                    let to = base.cast::<[u16; TILE_DEPTH]>().add(step * rows + row);
                    let mut row = [0_u16; TILE_DEPTH];
                    for i in 0..TILE_DEPTH {
                        row[i] = round_to_bf16(tile[i]) as u16;
                    }
                    to.write(row);
                }
            }
            Encoding::Blocks { offset } => {
                for (i, block) in values.as_chunks::<BLOCK>().0.iter().enumerate() {
                    let step = column / BLOCK + i;
                    let to = base.cast::<u32>().add(step * rows * (BLOCK / 4 + 2) + row);
                    #[cfg(target_arch = "x86_64")]
                    let words =
                        if WIDE { quantized_wide(block, offset) } else { quantized(block, offset) };
                    #[cfg(not(target_arch = "x86_64"))]
                    let words = quantized(block, offset);
                    scatter(&words, rows, to);
                }
            }
        }
    }
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

/// The nearest bfloat16, ties to even, in the lower half.
#[inline(always)]
fn round_to_bf16(value: f32) -> u32 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    // Rounding could turn what is not a number into an infinity.
    if value.is_nan() { bits >> 16 | 0x40 } else { rounded }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn strips_are_even_and_cover_all_rows() {
        for rows in 1..200 {
            for most in [1, 4, 6, 12] {
                let strips: Vec<Strip> = strips(5, rows, most).collect();
                assert_eq!(strips.len(), rows.div_ceil(most));
                let mut next = 5;
                for strip in &strips {
                    assert_eq!(strip.first, next);
                    assert!(strip.rows <= most && strip.rows + 1 >= strips[0].rows);
                    next += strip.rows;
                }
                assert_eq!(next, 5 + rows);
            }
        }
    }

    #[test]
    fn rounding_is_to_nearest_even() {
        let mut bits = 1_u32;
        for _ in 0..100_000 {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let value = f32::from_bits(bits);
            assert_eq!(round_to_bf16(value) as u16, bf16::from_f32(value).to_bits(), "{value}");
        }
        assert_eq!(round_to_bf16(f32::INFINITY) as u16, bf16::INFINITY.to_bits());
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn both_ways_of_quantising_agree() {
        if Isa::detect() < Isa::Avx512 {
            return;
        }
        for seed in 0..1000 {
            let size = (seed as f32 - 500.0).exp2();
            let block = std::array::from_fn(|i| ((i * seed) as f32).sin() * size);
            // SAFETY: the level was detected.
            let wide = unsafe { quantized_wide(&block, 8) };
            if size.is_normal() && (size / 1e3).is_normal() && (size * 1e3).is_finite() {
                assert_eq!(wide, quantized(&block, 8), "{seed}");
            }
        }
        let mut spoilt = [1.0; BLOCK];
        spoilt[5] = f32::NAN;
        let scale = |words: [u32; 10]| f32::from_bits(words[8]);
        // SAFETY: the level was detected.
        assert!(scale(unsafe { quantized_wide(&spoilt, 8) }).is_nan());
        assert!(scale(quantized(&spoilt, 8)).is_nan());
    }

    #[test]
    fn blocks_keep_rows_apart() {
        let x: Vec<f32> = (0..2 * 40).map(|i| (i as f32 * 0.37).sin()).collect();
        let rows = Rows {
            isa: Isa::Portable,
            encoding: Encoding::Blocks { offset: 8 },
            x: &x,
            columns: 40,
            norm: None,
            sources: None,
        };
        let mut encoded = vec![0_u32; 2 * rows.encoding.row_bytes(40) / 4];
        let to = Shared(encoded.as_mut_ptr().cast::<u8>());
        // SAFETY: the buffer has room for two rows and is used here only.
        unsafe { rows.encode(Strip { first: 0, rows: 2 }, 0, SEGMENT, to) };
        for row in 0..2 {
            for column in 0..64 {
                let block = &encoded[column / 32 * 20..][..20];
                let word = block[column % 32 / 4 * 2 + row].to_le_bytes();
                let scale = f32::from_bits(block[16 + row]);
                let value = f32::from(word[column % 4].cast_signed()) * scale;
                let wanted = if column < 40 { x[row * 40 + column] } else { 0.0 };
                assert!((value - wanted).abs() <= scale * 0.5001, "{row} {column}");
            }
            let sum: i32 = encoded[..20][row..16]
                .iter()
                .step_by(2)
                .flat_map(|word| word.to_le_bytes())
                .map(|byte| i32::from(byte.cast_signed()))
                .sum();
            assert_eq!(encoded[18 + row].cast_signed(), -8 * sum);
        }
    }
}
