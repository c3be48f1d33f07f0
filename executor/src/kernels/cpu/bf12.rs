//! Panels of bfloat16 in 12 bits.
//!
//! Weights use few of the 256 exponents: those of a row lie within some binades of its largest. So an element is a
//! small float of its own: sign, four bits of exponent above the row's base, and the seven bits of mantissa that bf16
//! has. It is the bf16 itself down to 2^-14 of the row's largest; below that precision fades out as that of subnormal
//! numbers does, so that no element is further away than 2^-22 of the largest. That is 0.75 of the bytes, which few
//! rows of activations wait for. (DFloat11, arXiv:2504.11651, found as much room in exponents; its codes of unlike
//! lengths cost more to decode than memory allows here.)
//!
//! A panel starts with a word for each row: its base exponent where bf16 has exponents, in both halves. Then, for each
//! eight columns, three words of each row of a vector, `[word][vector][16]`:
//!
//! - Word `k` has columns `2 k` and `2 k + 1` in its halves: sign at bit 15, exponent and mantissa in bits 10 to 0.
//! - Bits 14 to 11 of the halves of words 0, 1 and 2 are the upper, middle and lower four bits of columns 6 and 7.
//!
//! So three of four pairs of columns are one mask away from pairs of bf16 with small exponents.

#![expect(unsafe_code, reason = "panels are read by address")]

use std::ops::Range;
use std::slice;

use half::bf16;

use super::pack::{PANEL, TILE_DEPTH, VECTOR};

/// Columns of a step.
pub(in crate::kernels) const STEP_COLUMNS: usize = 8;
/// Words of a row in a step.
pub(in crate::kernels) const STEP_WORDS: usize = 3;
/// Bytes of a vector's words.
pub(super) const VECTOR_BYTES: usize = VECTOR * 4;
/// What three of four pairs of a step are masked with.
pub(in crate::kernels) const PAIR: u32 = 0x87ff_87ff;
/// Bits of an exponent, in both halves of a word.
pub(super) const EXPONENTS: u32 = 0x0780_0780;
/// The fourth pair: of which word, how far it is shifted (to the left where negative), and what it is masked with then.
pub(in crate::kernels) const FOURTH: [(usize, i32, u32); 4] =
    [(0, -1, 0x8000_8000), (0, 3, 0x0700_0700), (1, 7, 0x00f0_00f0), (2, 11, 0x000f_000f)];
/// Bits of a mantissa.
const MANTISSA_BITS: u32 = 7;
/// Columns that are narrowed at a time, whole steps: those of a panel's rows stay in the first cache.
const NARROWED: usize = 64;
/// The largest exponent of an element above its row's base.
const MOST_EXPONENT: u16 = 15;

/// A panel to be read.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct Panel<'a> {
    bytes: &'a [u8],
    vectors: usize,
}

impl<'a> Panel<'a> {
    /// The panel of `vectors` vectors that starts with `bytes`.
    pub(in crate::kernels) fn new(bytes: &'a [u8], vectors: usize) -> Self {
        Self { bytes, vectors }
    }

    /// The panel at an address.
    ///
    /// # Safety
    /// At `panel` lies a packed panel of `vectors` vectors and `columns` columns, padded or not, for as long as it is
    /// used.
    pub(super) unsafe fn at(panel: *const u8, vectors: usize, columns: usize) -> Self {
        let steps = columns.next_multiple_of(TILE_DEPTH) / STEP_COLUMNS;
        let bytes = (1 + steps * STEP_WORDS) * vectors * VECTOR_BYTES;
        // SAFETY: the caller's.
        Self::new(unsafe { slice::from_raw_parts(panel, bytes) }, vectors)
    }

    /// Vectors of 16 rows, 1 or 2.
    pub(super) fn vectors(&self) -> usize {
        self.vectors
    }

    /// The base exponents of a vector's rows, a word each.
    pub(super) fn bases(&self, vector: usize) -> &'a [u8; VECTOR_BYTES] {
        &self.bytes.as_chunks().0[vector]
    }

    /// The words of some columns, whole steps of them: `[step][word][vector]`.
    pub(super) fn words(&self, columns: Range<usize>) -> &'a [[u8; VECTOR_BYTES]] {
        let place = place(self.vectors, columns);
        self.bytes[place].as_chunks().0
    }

    /// The element of a row and column, as bf16.
    pub(in crate::kernels) fn bits(&self, row: usize, column: usize) -> u16 {
        let (words, _) = self.bytes.as_chunks::<4>();
        let lanes = self.vectors * VECTOR;
        let word = |at: usize| u32::from_le_bytes(words[at * lanes + row]);
        let first = 1 + column / STEP_COLUMNS * STEP_WORDS;
        let base = (word(0) >> MANTISSA_BITS) as u8;
        let pair = match column % STEP_COLUMNS / 2 {
            3 => fourth([0, 1, 2].map(|i| word(first + i))),
            pair => word(first + pair) & PAIR,
        };
        widen((pair >> (16 * (column % 2))) as u16, base)
    }
}

/// Which bytes of a panel its columns are, whole steps of them.
pub(super) fn place(vectors: usize, columns: Range<usize>) -> Range<usize> {
    let at = |column: usize| (1 + column / STEP_COLUMNS * STEP_WORDS) * vectors * VECTOR_BYTES;
    at(columns.start)..at(columns.end)
}

/// Packs a panel of rows of equal length, which are rounded to bf16. `packed` is zeros at first, which is the padding
/// of rows and columns.
pub(super) fn pack<'a>(
    row: impl Fn(usize) -> Option<&'a [f32]>,
    vectors: usize,
    packed: &mut [u8],
) {
    let (words, _) = packed.as_chunks_mut::<4>();
    let lanes = vectors * VECTOR;
    let (bases, words) = words.split_at_mut(lanes);
    let mut rows = Vec::with_capacity(lanes);
    for (row, to) in (0..lanes).map_while(row).zip(bases) {
        let base = (largest(row) >> MANTISSA_BITS).saturating_sub(MOST_EXPONENT);
        *to = both(base << MANTISSA_BITS, base << MANTISSA_BITS).to_le_bytes();
        rows.push((row, base));
    }
    let columns = rows.first().map_or(0, |(row, _)| row.len());
    let mut narrowed = [[0; NARROWED]; PANEL];
    for first in (0..columns).step_by(NARROWED) {
        let block = first..columns.min(first + NARROWED);
        for ((row, base), to) in rows.iter().zip(&mut narrowed) {
            // What is left of the block before meets no element any more.
            to[block.len()..].fill(0);
            narrow_all(&row[block.clone()], *base, to);
        }
        let steps =
            words[first / STEP_COLUMNS * STEP_WORDS * lanes..].chunks_mut(STEP_WORDS * lanes);
        for (step, words) in steps.take(block.len().div_ceil(STEP_COLUMNS)).enumerate() {
            for (lane, narrowed) in narrowed[..rows.len()].iter().enumerate() {
                for (k, word) in step_words(&narrowed.as_chunks().0[step]).into_iter().enumerate() {
                    words[k * lanes + lane] = word.to_le_bytes();
                }
            }
        }
    }
}

/// A pair of halves, the lower first.
fn both(lower: u16, upper: u16) -> u32 {
    u32::from(upper) << 16 | u32::from(lower)
}

/// The words of a row in a step.
fn step_words(elements: &[u16; STEP_COLUMNS]) -> [u32; STEP_WORDS] {
    // An element of the fourth pair has its sign above the upper three bits of what follows.
    let fourth = both(elements[6], elements[7]);
    let dense = fourth >> 4 & 0x0800_0800 | fourth & 0x07ff_07ff;
    [0, 1, 2].map(|k| {
        let quarters = dense >> (8 - 4 * k) & 0x000f_000f;
        both(elements[2 * k], elements[2 * k + 1]) | quarters << 11
    })
}

/// The bits of the largest of some numbers, as bf16 without its sign.
fn largest(row: &[f32]) -> u16 {
    let magnitudes = row.iter().map(|&x| (bf16::from_f32(x).to_bits() & 0x7fff).cast_signed());
    magnitudes.fold(0, i16::max).cast_unsigned()
}

/// Narrows neighbouring elements: those that keep all of their bits at once, where there are others each by itself.
fn narrow_all(row: &[f32], base: u16, to: &mut [u16]) {
    let mut least = i16::MAX;
    for (x, to) in row.iter().zip(&mut *to) {
        let bits = bf16::from_f32(*x).to_bits();
        let magnitude = bits & 0x7fff;
        least = least.min(magnitude.cast_signed());
        *to = bits & 0x8000 | magnitude.wrapping_sub(base << MANTISSA_BITS) & 0x7fff;
    }
    if least.cast_unsigned() >> MANTISSA_BITS <= base {
        for (x, to) in row.iter().zip(to) {
            *to = narrow(bf16::from_f32(*x).to_bits(), base);
        }
    }
}

/// Writes columns of a panel, whole steps of them, as those of a bf16 panel, which `to` has room for.
pub(super) fn unpack(panel: Panel<'_>, columns: Range<usize>, to: &mut [[u16; 2]]) {
    let lanes = panel.vectors * VECTOR;
    for (pair, to) in (columns.start / 2..columns.end / 2).zip(to.chunks_exact_mut(lanes)) {
        for (row, to) in to.iter_mut().enumerate() {
            *to = [panel.bits(row, 2 * pair), panel.bits(row, 2 * pair + 1)];
        }
    }
}

/// The last pair of a step's words.
fn fourth(words: [u32; STEP_WORDS]) -> u32 {
    let part = |(word, shift, mask): (usize, i32, u32)| {
        let word = words[word];
        (if shift < 0 { word << -shift } else { word >> shift }) & mask
    };
    FOURTH.map(part).into_iter().fold(0, |all, part| all | part)
}

/// A bf16 as half of a pair: sign, exponent above the base, mantissa. Smaller ones are rounded to nearest, ties to
/// even.
fn narrow(bits: u16, base: u16) -> u16 {
    let (sign, exponent, mantissa) = (bits & 0x8000, bits >> 7 & 0xff, bits & 0x7f);
    let small = if exponent > base {
        (exponent - base) << MANTISSA_BITS | mantissa
    } else {
        // What subnormal numbers of the base are multiples of; where bf16 is subnormal there is no hidden bit.
        let whole = if exponent == 0 { mantissa << 1 } else { 0x80 | mantissa };
        let shift = u32::from((base + 1 - exponent).min(MOST_EXPONENT));
        let kept = whole >> shift;
        let lost = whole & ((1 << shift) - 1);
        let half = 1 << (shift - 1);
        kept + u16::from(lost > half || lost == half && kept % 2 == 1)
    };
    sign | small
}

/// Half of a pair as the bf16 that it stands for.
fn widen(half: u16, base: u8) -> u16 {
    let (sign, small) = (half & 0x8000, half & 0x07ff);
    if small >> MANTISSA_BITS > 0 {
        sign | (small + (u16::from(base) << MANTISSA_BITS))
    } else {
        // Exact: no more than seven bits, of which the lowest is what the lowest of a subnormal bf16 is, or more.
        let value = f64::from(small) * 2_f64.powi(i32::from(base) - 133);
        sign | bf16::from_f64(value).to_bits()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows of elements whose exponents, from the largest on, halve in number, and some zeros.
    fn made_up(rows: usize, columns: usize) -> Vec<u16> {
        let mut state = 7_u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 8
        };
        let element = |i: usize| {
            let exponent =
                (120 + i / columns % 9) as u16 - (next().leading_zeros() - 8).min(23) as u16;
            let rest = next() as u16;
            if next() % 50 == 0 { rest & 0x8000 } else { rest & 0x807f | exponent << 7 }
        };
        (0..rows * columns).map(element).collect()
    }

    fn packed(rows: usize, columns: usize, bits: &[u16]) -> (usize, Vec<u8>) {
        let vectors = rows.div_ceil(VECTOR);
        let steps = columns.next_multiple_of(TILE_DEPTH) / STEP_COLUMNS;
        let mut bytes = vec![0; (1 + steps * STEP_WORDS) * vectors * VECTOR_BYTES];
        let wide: Vec<f32> = bits.iter().map(|&bits| bf16::from_bits(bits).to_f32()).collect();
        pack(|row| wide.get(row * columns..(row + 1) * columns), vectors, &mut bytes);
        (vectors, bytes)
    }

    #[test]
    fn large_elements_come_back_and_small_ones_are_near() {
        for (rows, columns) in [(32, 512), (16, 96), (5, 40), (20, 33), (32, 1100)] {
            let wanted = made_up(rows, columns);
            let (vectors, bytes) = packed(rows, columns, &wanted);
            let panel = Panel::new(&bytes, vectors);
            let mut below = 0;
            for (row, wanted) in wanted.chunks(columns).enumerate() {
                let value = |bits: u16| bf16::from_bits(bits).to_f64();
                let largest = wanted.iter().map(|&bits| value(bits).abs()).fold(0.0, f64::max);
                let binade = 2_f64.powf(largest.log2().floor());
                for (column, &wanted) in wanted.iter().enumerate() {
                    let found = panel.bits(row, column);
                    if value(wanted).abs() >= binade * 2_f64.powi(-14) || value(wanted) == 0.0 {
                        assert_eq!(found, wanted, "{row} {column} of {rows} by {columns}");
                    } else {
                        let distance = (value(found) - value(wanted)).abs();
                        assert!(distance <= binade * 2_f64.powi(-22), "{row} {column}");
                        below += 1;
                    }
                }
            }
            assert!(rows * columns < 10_000 || below > 0);
        }
    }

    #[test]
    fn padding_is_zero() {
        let (vectors, bytes) = packed(5, 33, &made_up(5, 33));
        let panel = Panel::new(&bytes, vectors);
        assert!((5..16).all(|row| (0..64).all(|column| panel.bits(row, column) == 0)));
        assert!((33..64).all(|column| (0..16).all(|row| panel.bits(row, column) == 0)));
    }

    #[test]
    fn numbers_at_the_ends_are_kept() {
        // Subnormal numbers, the smallest normal one, infinity, and what is no number.
        let rows = [
            [0x0001, 0x0041, 0x8080, 0x0780],
            [0x7f80, 0xff80, 0x7fc1, 0x7900],
            [0x0000, 0x8000, 0x0000, 0x0000],
        ];
        let (vectors, bytes) = packed(3, 4, rows.as_flattened());
        let panel = Panel::new(&bytes, vectors);
        for (row, wanted) in rows.iter().enumerate() {
            for (column, &wanted) in wanted.iter().enumerate() {
                assert_eq!(panel.bits(row, column), wanted, "{row} {column}");
            }
        }
    }

    #[test]
    fn whole_steps_are_unpacked_as_each_element() {
        let (vectors, bytes) = packed(32, 96, &made_up(32, 96));
        let panel = Panel::new(&bytes, vectors);
        let mut pairs = vec![[7; 2]; 32 * 32];
        unpack(panel, 32..96, &mut pairs);
        for (i, pair) in pairs.iter().enumerate() {
            let (row, column) = (i % 32, 32 + i / 32 * 2);
            assert_eq!(*pair, [panel.bits(row, column), panel.bits(row, column + 1)]);
        }
    }
}
