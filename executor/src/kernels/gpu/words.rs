//! Elements as kernels read them: weights from the bits of 32-bit words, activations in fours.

use cubecl::prelude::*;
use half::f16;
use ir::tensor::Format;

use super::device::has_ptx;

/// What a unit loads at once: 16 bytes.
pub(super) type Words = Vector<u32, Const<4>>;
/// Four neighbouring columns of activations.
pub(super) type Four = Vector<f32, Const<4>>;

/// One of the two 16-bit elements of a word; the lower comes first.
///
/// Shaders cannot view a word as halves, and take f16 by its bits: some six instructions where CUDA has one.
#[cube]
pub(super) fn half_of(word: u32, #[comptime] upper: usize, #[comptime] format: Format) -> f32 {
    let shifted = if comptime!(upper == 0) { word << 16u32 } else { word };
    let properties = comptime::device_properties();
    if comptime!(matches!(format, Format::Bf16)) {
        f32::reinterpret(shifted & 0xffff_0000u32)
    } else if comptime!(has_ptx(&properties)) {
        let pair = Vector::<f16, Const<2>>::reinterpret(word);
        f32::cast_from(pair.extract(upper))
    } else {
        f16_by_bits(shifted)
    }
}

/// The f16 in the upper half of a word.
#[cube]
fn f16_by_bits(word: u32) -> f32 {
    // Sign, exponent and mantissa where f32 has them; then its bias, which is larger by 112.
    let bits = u32::reinterpret(i32::reinterpret(word) >> 3i32) & 0x8fff_e000u32;
    let finite = u32::reinterpret(f32::reinterpret(bits) * TWO_TO_112);
    // What is infinite or not a number has every bit of its exponent set, in f32 too.
    let is_finite = (bits & 0x0f80_0000u32) < 0x0f80_0000u32;
    f32::reinterpret(select(is_finite, finite, bits | 0x7f80_0000u32))
}

const TWO_TO_112: f32 = (1_u128 << 112) as f32;

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

/// The size of vectors that [`read_four()`] takes.
pub(super) fn read_size(columns: usize) -> usize {
    if columns.is_multiple_of(4) { 4 } else { 1 }
}
