//! Elements in and out of 32-bit words, by their bits: so every format also works where the driver lacks its type.

use cubecl::prelude::*;
use half::f16;
use ir::tensor::Format;

/// What a unit loads at once: 16 bytes.
pub(super) type Words = Vector<u32, Const<4>>;
/// Four neighbouring columns of activations.
pub(super) type Four = Vector<f32, Const<4>>;

/// One of the two 16-bit elements of a word; the lower comes first.
#[cube]
pub(super) fn half_of(word: u32, #[comptime] upper: usize, #[comptime] format: Format) -> f32 {
    if comptime!(matches!(format, Format::Bf16)) {
        if comptime!(upper == 0) {
            f32::reinterpret(word << 16u32)
        } else {
            f32::reinterpret(word & 0xffff_0000u32)
        }
    } else {
        f32::cast_from(Vector::<f16, Const<2>>::reinterpret(word).extract(upper))
    }
}

/// Two elements in a word, rounded to nearest even.
#[cube]
pub(super) fn two_halves(lower: f32, upper: f32, #[comptime] format: Format) -> u32 {
    if comptime!(matches!(format, Format::Bf16)) {
        bf16_bits(lower) | (bf16_bits(upper) << 16u32)
    } else {
        let mut both = Vector::<f16, Const<2>>::empty();
        both.insert(0usize, f16::cast_from(lower));
        both.insert(1usize, f16::cast_from(upper));
        u32::reinterpret(both)
    }
}

#[cube]
fn bf16_bits(value: f32) -> u32 {
    let bits = u32::reinterpret(value);
    let rounded = (bits + 0x7fffu32 + ((bits >> 16u32) & 1u32)) >> 16u32;
    // Rounding could carry what is not a number into zero.
    let is_number = (bits & 0x7fff_ffffu32) <= 0x7f80_0000u32;
    select(is_number, rounded, 0x7fc0u32)
}

/// Four neighbouring columns of a row of activations, zeros beyond its end.
///
/// `x` is in vectors of four where rows are whole vectors, else in single elements.
#[cube]
pub(super) fn read_four<N: Size>(
    x: &[Vector<f32, N>],
    row: usize,
    column: usize,
    #[comptime] columns: usize,
    #[comptime] padded: usize,
) -> Four {
    let mut four = Four::zeroed();
    if comptime!(columns.is_multiple_of(4)) {
        if comptime!(padded == columns) {
            four = Four::cast_from(x[(row * columns + column) / 4]);
        } else {
            if column < columns {
                four = Four::cast_from(x[(row * columns + column) / 4]);
            }
        }
    } else {
        #[unroll]
        for i in 0..4usize {
            if column + i < columns {
                four.insert(i, f32::cast_from(x[row * columns + column + i]));
            }
        }
    }
    four
}

/// The size of vectors that [`read_four`] takes.
pub(super) fn read_size(columns: usize) -> usize {
    if columns.is_multiple_of(4) { 4 } else { 1 }
}
