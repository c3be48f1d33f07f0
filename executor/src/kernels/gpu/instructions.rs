//! Matrix instructions of NVIDIA GPUs, 16 × 8 × 16 with 16-bit elements and f32 sums.
//!
//! Of each operand a lane holds what PTX's `mma.m16n8k16` lays down, with `g = lane / 4` and `t = lane % 4`:
//! - left, 16 rows: pairs of columns `2 t` of row `g`, of row `g + 8`, then columns `2 t + 8` of both;
//! - right, 8 columns: pairs of rows `2 t` of column `g`, then rows `2 t + 8`;
//! - sums: columns `2 t` and `2 t + 1` of row `g`, then of row `g + 8`.

use cubecl::ir::FloatKind;
use cubecl::ir::features::MmaConfig;
use cubecl::prelude::*;
use ir::tensor::DType;

use super::device::{Gpu, element};
use super::registers::held;

/// Lanes of a plane.
pub(super) const PLANE: u32 = 32;

/// 16 bytes: 8 elements.
pub(super) type Packed = Vector<u32, Const<4>>;
/// The sums of a lane.
pub(super) type Sums = Vector<f32, Const<4>>;

impl Gpu {
    /// Whether matrix instructions multiply elements of this type.
    pub(super) fn multiplies(&self, dtype: DType) -> bool {
        let kind = element(dtype);
        let wanted = MmaConfig {
            a_type: kind,
            b_type: kind,
            cd_type: ElemType::Float(FloatKind::F32),
            m: 16,
            n: 8,
            k: 16,
        };
        let features = &self.client.properties().features.matmul;
        self.is_cuda() && features.mma.contains(&wanted) && features.ldmatrix.contains(&kind)
    }
}

/// `left · right + sums`.
#[cube]
pub(super) fn multiply(
    left: Packed,
    right: Vector<u32, Const<2>>,
    sums: Sums,
    #[comptime] bf16: bool,
) -> Sums {
    let element = comptime!(if bf16 { "bf16" } else { "f16" });
    let left = held::<Packed>(left);
    let right = held::<Vector<u32, Const<2>>>(right);
    let sums = held::<Sums>(sums);
    let result: Sums;
    gpu_asm!(
        "mma.sync.aligned.m16n8k16.row.col.f32.{element}.{element}.f32 {d}, {a}, {b}, {c};",
        element = const element,
        a = in(_) left, b = in(_) right, c = in(_) sums, d = out(_) result,
        options(pure, nomem),
    );
    result
}

/// The sums of a lane, of whole numbers.
pub(super) type Counts = Vector<i32, Const<4>>;

/// `left · right + sums` of bytes, 16 × 8 × 32: those on the right have signs, those on the left may.
///
/// A register holds four neighbouring columns of the left operand, or rows of the right one, where one of 16-bit
/// elements holds two.
#[cube]
pub(super) fn multiply_bytes(
    left: Packed,
    right: Vector<u32, Const<2>>,
    sums: Counts,
    #[comptime] has_signs: bool,
) -> Counts {
    let element = comptime!(if has_signs { "s8" } else { "u8" });
    let left = held::<Packed>(left);
    let right = held::<Vector<u32, Const<2>>>(right);
    let sums = held::<Counts>(sums);
    let result: Counts;
    gpu_asm!(
        "mma.sync.aligned.m16n8k32.row.col.s32.{element}.s8.s32 {d}, {a}, {b}, {c};",
        element = const element,
        a = in(_) left, b = in(_) right, c = in(_) sums, d = out(_) result,
        options(pure, nomem),
    );
    result
}

/// Two numbers as neighbouring elements.
#[cube]
pub(super) fn pack(first: f32, second: f32, #[comptime] bf16: bool) -> u32 {
    let first = held::<f32>(first);
    let second = held::<f32>(second);
    let element = comptime!(if bf16 { "bf16x2" } else { "f16x2" });
    let pair: u32;
    gpu_asm!(
        "cvt.rn.{element}.f32 {d}, {high}, {low};",
        element = const element,
        high = in(_) second, low = in(_) first, d = out(_) pair,
        options(pure, nomem),
    );
    pair
}

/// The lower, or the upper, elements of two pairs.
#[cube]
pub(super) fn interleave(first: u32, second: u32, #[comptime] upper: bool) -> u32 {
    choose_bytes(first, second, comptime!(if upper { 0x7632u32 } else { 0x5410 }))
}

/// The first, or the last, two bytes of a word as the lower halves of 16-bit elements whose other bits are zero.
#[cube]
pub(super) fn spread(word: u32, #[comptime] pair: usize) -> u32 {
    let word = held::<u32>(word);
    let order = comptime!(if pair == 0 { 0x4140 } else { 0x4342 });
    let pair: u32;
    gpu_asm!(
        "prmt.b32 {d}, {a}, 0, {order};",
        order = const order,
        a = in(_) word, d = out(_) pair,
        options(pure, nomem),
    );
    pair
}

/// A pair that has one of a pair's 16-bit elements twice, the lower or the upper: the instruction that takes it does so.
#[cube]
pub(super) fn twice(pair: u32, #[comptime] upper: usize) -> u32 {
    let pair = held::<u32>(pair);
    let half = comptime!(format!("half{upper}"));
    let both: u32;
    gpu_asm!(
        "{{ .reg .b16 half<2>; mov.b32 {{half0, half1}}, {pair}; mov.b32 {both}, {{{half}, {half}}}; }}",
        half = const half, pair = in(_) pair, both = out(_) both,
        options(pure, nomem),
    );
    both
}

/// Four of the eight bytes of two words, lowest first: each as a hexadecimal digit of `order`.
#[cube]
pub(super) fn choose_bytes(first: u32, second: u32, #[comptime] order: u32) -> u32 {
    let first = held::<u32>(first);
    let second = held::<u32>(second);
    let bytes: u32;
    gpu_asm!(
        "prmt.b32 {d}, {a}, {b}, {order};",
        order = const order,
        a = in(_) first, b = in(_) second, d = out(_) bytes,
        options(pure, nomem),
    );
    bytes
}

/// The products of two pairs of bf16.
#[cube]
pub(super) fn multiply_pairs(first: u32, second: u32) -> u32 {
    // Zeros that keep the sign of a product.
    fma_pairs(first, second, 0x8000_8000u32.runtime())
}

/// The products of two pairs of bf16, each added to one of a third.
#[cube]
pub(super) fn fma_pairs(first: u32, second: u32, third: u32) -> u32 {
    let first = held::<u32>(first);
    let second = held::<u32>(second);
    let third = held::<u32>(third);
    let sums: u32;
    gpu_asm!(
        "fma.rn.bf16x2 {d}, {a}, {b}, {c};",
        a = in(_) first, b = in(_) second, c = in(_) third, d = out(_) sums,
        options(pure, nomem),
    );
    sums
}

/// The left operand of four registers.
#[cube]
pub(super) fn left(a: u32, b: u32, c: u32, d: u32) -> Packed {
    let mut operand = Packed::empty();
    operand.insert(0usize, a);
    operand.insert(1usize, b);
    operand.insert(2usize, c);
    operand.insert(3usize, d);
    operand
}

/// The right operand of two registers.
#[cube]
pub(super) fn right(a: u32, b: u32) -> Vector<u32, Const<2>> {
    let mut operand = Vector::<u32, Const<2>>::empty();
    operand.insert(0usize, a);
    operand.insert(1usize, b);
    operand
}

/// The largest of the four lanes that share rows.
#[cube]
pub(super) fn quad_max(value: f32) -> f32 {
    let value = value.max(plane_shuffle_xor(value, 1u32));
    value.max(plane_shuffle_xor(value, 2u32))
}

/// The sum over the four lanes that share rows.
#[cube]
pub(super) fn quad_sum(value: f32) -> f32 {
    let value = value + plane_shuffle_xor(value, 1u32);
    value + plane_shuffle_xor(value, 2u32)
}
