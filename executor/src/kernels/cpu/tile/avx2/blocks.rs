//! Weights in blocks of 8 or 4 bits times activations in blocks of 8, for AVX2 with and without its dot products of
//! bytes.
//!
//! The four registers of a panel's step are *sides*. A strip of few rows takes all of them together, as they come from
//! memory; the more rows it has the fewer sides, down to one, so that a block's sums stay in the registers. The sums of
//! whole rows, which change once a block, need not.
//!
//! Without dot products [`Products`] multiplies pairs of bytes into 16 bits. Products of 4-bit codes are so small that
//! a block's sums fit in them; those of 8-bit codes fit one by one, if both are signed.

use std::arch::x86_64::*;
use std::hint::black_box;

use ir::tensor::Format;

use crate::kernels::cpu::isa::Isa;
use crate::kernels::cpu::pack::{BLOCK_PAIR, VECTOR};
use crate::kernels::cpu::tile::ahead::{Ahead, prefetch_lines};
use crate::kernels::cpu::tile::{GROUPS, Operands, Tile};

/// Most sides of a panel: two vectors of two registers.
const MOST_SIDES: usize = 4;
/// Bytes of a side, a register.
const SIDE: usize = 32;

/// Multiplies a strip of at most 8 rows with a panel of blocks, by dot products where the level is that of AVX-VNNI.
///
/// # Safety
/// That of [`crate::kernels::cpu::tile::Kernel::multiply`].
pub(super) unsafe fn multiply(isa: Isa, format: Format, operands: Operands, tile: &mut Tile) {
    /// Calls a kernel for a number of rows, with how many sides of a panel of one vector, or of two, it takes together.
    macro_rules! by_shape {
        ($kernel:ident, $bits:literal, [$($rows:literal: $one:literal $two:literal,)*]) => {
            match (operands.rows, operands.vectors) {
                $(
                    ($rows, 1) => $kernel::<$rows, 1, $one, $bits>(operands, tile),
                    ($rows, 2) => $kernel::<$rows, 2, $two, $bits>(operands, tile),
                )*
                (rows, vectors) => unreachable!("a strip of {rows} rows with {vectors} vectors"),
            }
        };
        ($kernel:ident, $bits:literal) => {
            by_shape!($kernel, $bits, [
                1: 2 4, 2: 2 4, 3: 2 2, 4: 2 2, 5: 1 1, 6: 1 1, 7: 1 1, 8: 1 1,
            ])
        };
    }
    // SAFETY: the caller's.
    unsafe {
        match (format, isa == Isa::Avx2Vnni) {
            (Format::Q8, false) => by_shape!(by_products, 8),
            (Format::Q4, false) => by_shape!(by_products, 4),
            (Format::Q8, true) => by_shape!(by_dots, 8),
            (Format::Q4, true) => by_shape!(by_dots, 4),
            (Format::F32 | Format::F16 | Format::Bf16 | Format::Bf12, _) => {
                unreachable!("{format} has no blocks")
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn by_products<const R: usize, const V: usize, const S: usize, const BITS: usize>(
    operands: Operands,
    tile: &mut Tile,
) {
    // SAFETY: the caller's.
    unsafe { blocks::<Products, R, V, S, BITS>(operands, tile) };
}

#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
unsafe fn by_dots<const R: usize, const V: usize, const S: usize, const BITS: usize>(
    operands: Operands,
    tile: &mut Tile,
) {
    // SAFETY: the caller's.
    unsafe { blocks::<Dots, R, V, S, BITS>(operands, tile) };
}

/// How the products of a block are summed: of eight rows of codes of `BITS` bits with one row of signed bytes.
///
/// # Safety
/// All functions need the instructions that the implementation is for.
trait Sums {
    /// Weights as they are multiplied.
    type Weights: Copy;

    /// A sum of nothing. `correction` is minus the code of zero times the sum of the row's bytes.
    unsafe fn start<const BITS: usize>(correction: i32) -> __m256i;
    /// Gets unsigned codes ready.
    unsafe fn weights<const BITS: usize>(codes: __m256i) -> Self::Weights;
    /// Adds the products of one word of each row of weights with `x`, one word of activations in all lanes.
    unsafe fn add<const BITS: usize>(sum: __m256i, weights: Self::Weights, x: __m256i) -> __m256i;
    /// The sums in 32 bits.
    unsafe fn finish<const BITS: usize>(sum: __m256i, correction: i32) -> __m256i;
}

/// Products of pairs of bytes, in 16 bits.
struct Products;

impl Sums for Products {
    /// The second are the magnitudes of the first; 4-bit codes, which have no sign, are twice the same.
    type Weights = [__m256i; 2];

    #[inline(always)]
    unsafe fn start<const BITS: usize>(_: i32) -> __m256i {
        // SAFETY: the caller's.
        unsafe { _mm256_setzero_si256() }
    }

    #[inline(always)]
    unsafe fn weights<const BITS: usize>(codes: __m256i) -> [__m256i; 2] {
        if BITS == 4 {
            return [codes; 2];
        }
        // SAFETY: the caller's.
        unsafe {
            // Less the code of zero: from -127 on.
            let signed = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
            [signed, _mm256_abs_epi8(signed)]
        }
    }

    #[inline(always)]
    unsafe fn add<const BITS: usize>(sum: __m256i, weights: [__m256i; 2], x: __m256i) -> __m256i {
        let [weights, magnitudes] = weights;
        // SAFETY: the caller's.
        unsafe {
            if BITS == 4 {
                // Eight times 2 · 15 · 127 is below 2^15.
                _mm256_add_epi16(sum, _mm256_maddubs_epi16(weights, x))
            } else {
                // 2 · 127 · 127 is, too.
                let pairs = _mm256_maddubs_epi16(magnitudes, _mm256_sign_epi8(x, weights));
                _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
            }
        }
    }

    #[inline(always)]
    unsafe fn finish<const BITS: usize>(sum: __m256i, correction: i32) -> __m256i {
        // SAFETY: the caller's.
        unsafe {
            if BITS == 4 {
                let sum = _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
                _mm256_add_epi32(sum, _mm256_set1_epi32(correction))
            } else {
                sum
            }
        }
    }
}

/// Dot products of four bytes, in 32 bits (AVX-VNNI).
struct Dots;

impl Sums for Dots {
    type Weights = __m256i;

    #[inline(always)]
    unsafe fn start<const BITS: usize>(correction: i32) -> __m256i {
        // SAFETY: the caller's.
        unsafe { _mm256_set1_epi32(correction) }
    }

    #[inline(always)]
    unsafe fn weights<const BITS: usize>(codes: __m256i) -> __m256i {
        codes
    }

    #[inline(always)]
    unsafe fn add<const BITS: usize>(sum: __m256i, weights: __m256i, x: __m256i) -> __m256i {
        // SAFETY: the caller's.
        unsafe { _mm256_dpbusd_avx_epi32(sum, weights, x) }
    }

    #[inline(always)]
    unsafe fn finish<const BITS: usize>(sum: __m256i, _: i32) -> __m256i {
        sum
    }
}

/// `R` rows times a panel of `V` vectors, `S` sides of it at a time.
///
/// # Safety
/// That of [`multiply`]; and it is inlined where the instructions of `D` are.
#[inline(always)]
unsafe fn blocks<D: Sums, const R: usize, const V: usize, const S: usize, const BITS: usize>(
    operands: Operands,
    tile: &mut Tile,
) {
    let code_bytes = if BITS == 8 { 2 * GROUPS } else { GROUPS } * V * 2 * SIDE;
    let (pairs, pair_bytes) = (operands.columns / BLOCK_PAIR, V * 2 * SIDE + code_bytes);
    let ahead = Ahead::new((operands.panel, pairs * pair_bytes), pair_bytes, operands.next);
    let (mut w, mut x) = (operands.panel, operands.strip.cast::<i32>());
    // SAFETY: the layouts of `pack` and `encode`.
    unsafe {
        let low_nibbles = _mm256_set1_epi8(15);
        let mut totals = [[_mm256_setzero_ps(); MOST_SIDES]; R];
        for _ in 0..pairs {
            prefetch_lines(w.wrapping_add(ahead.distance(w)), pair_bytes);
            for half in 0..2 {
                let corrections = x.add((GROUPS + 1) * R);
                let block = if BITS == 8 { half * GROUPS } else { 0 };
                let codes = w.add((1 + block) * V * 2 * SIDE);
                for start in (0..2 * V).step_by(S) {
                    let mut sums = [[_mm256_setzero_si256(); S]; R];
                    for row in 0..R {
                        sums[row] = [D::start::<BITS>(corrections.add(row).read()); S];
                    }
                    // Of many rows all groups at once would need more registers than there are.
                    let groups = if R > 2 { black_box(GROUPS) } else { GROUPS };
                    for group in 0..groups {
                        let codes = codes.add((group * V * 2 + start) * SIDE);
                        let weights: [D::Weights; S] = std::array::from_fn(|side| {
                            let word = _mm256_loadu_si256(codes.add(side * SIDE).cast());
                            D::weights::<BITS>(match (BITS, half) {
                                (8, _) => word,
                                (_, 0) => _mm256_and_si256(word, low_nibbles),
                                _ => _mm256_and_si256(_mm256_srli_epi16::<4>(word), low_nibbles),
                            })
                        });
                        for row in 0..R {
                            let x = _mm256_set1_epi32(x.add(group * R + row).read());
                            for side in 0..S {
                                let sum = &mut sums[row][side];
                                *sum = D::add::<BITS>(*sum, weights[side], x);
                            }
                        }
                    }
                    for side in 0..S {
                        let from = w.add((half * V * 2 + start + side) * SIDE / 2);
                        let scale = _mm256_cvtph_ps(_mm_loadu_si128(from.cast()));
                        for row in 0..R {
                            let correction = corrections.add(row).read();
                            let sum = D::finish::<BITS>(sums[row][side], correction);
                            let x_scale = x.cast::<f32>().add(GROUPS * R + row).read();
                            let scale = _mm256_mul_ps(scale, _mm256_set1_ps(x_scale));
                            let total = &mut totals[row][start + side];
                            *total = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, *total);
                        }
                    }
                }
                x = x.add((GROUPS + 2) * R);
            }
            w = w.wrapping_add(pair_bytes);
        }
        for row in 0..R {
            for side in 0..2 * V {
                let to = tile[row].as_mut_ptr().add(side * VECTOR / 2);
                _mm256_storeu_ps(to, totals[row][side]);
            }
        }
    }
}
