//! Blocks of 32 neighbouring elements of one row, held as small integers with one scale.
//!
//! Element `i` of a block is `scale · (codes[i] - offset)`; codes are unsigned because the dot products
//! of the processors multiply unsigned by signed bytes.
//!
//! - 8 bits: offset 128, codes 1 to 255, the largest magnitude of the block is 127 steps.
//! - 4 bits: offset 8, codes 0 to 15; the scale may be negative, so that the element of largest magnitude
//!   gets code 0, eight steps from the offset.

use half::f16;

/// Elements of a block.
pub(super) const BLOCK: usize = 32;
/// What the code of zero is in 8 bits.
pub(super) const OFFSET_8: i32 = 128;
/// What the code of zero is in 4 bits.
pub(super) const OFFSET_4: i32 = 8;

/// A quantised block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Block {
    pub(super) scale: f16,
    pub(super) codes: [u8; BLOCK],
}

/// The block of 8-bit codes nearest to `values`.
pub(super) fn quantize_8(values: &[f32; BLOCK]) -> Block {
    let scale = f16::from_f32(largest(values).abs() / 127.0);
    Block { scale, codes: codes(values, scale, OFFSET_8, 1.0, 255.0) }
}

/// The block of 4-bit codes with the least squared error among a few scales.
pub(super) fn quantize_4(values: &[f32; BLOCK]) -> Block {
    let extreme = largest(values);
    let mut best = Block { scale: f16::ZERO, codes: [OFFSET_4 as u8; BLOCK] };
    let mut least = error(values, &best);
    // The largest element at eight steps wastes none of the codes; a little more or less of a step often
    // fits the others better. Each guess is then refined to the best scale for its codes.
    for steps in [-8.0, -7.4, -8.6, -9.2, 7.5] {
        let mut scale = f16::from_f32(extreme / steps);
        for _ in 0..2 {
            let block = Block { scale, codes: codes(values, scale, OFFSET_4, 0.0, 15.0) };
            let deviation = error(values, &block);
            if deviation < least {
                (best, least) = (block, deviation);
            }
            scale = best_scale(values, &block);
        }
    }
    best
}

/// The element of largest magnitude, with its sign.
fn largest(values: &[f32; BLOCK]) -> f32 {
    values.iter().fold(0.0, |best: f32, &value| if value.abs() > best.abs() { value } else { best })
}

fn codes(values: &[f32; BLOCK], scale: f16, offset: i32, least: f32, most: f32) -> [u8; BLOCK] {
    let scale = scale.to_f32();
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    values.map(|value| (value * inverse + offset as f32).round_ties_even().clamp(least, most) as u8)
}

/// The scale with the least squared error for codes already chosen.
fn best_scale(values: &[f32; BLOCK], block: &Block) -> f16 {
    let (mut product, mut square) = (0.0, 0.0);
    for (value, &code) in values.iter().zip(&block.codes) {
        let step = (i32::from(code) - OFFSET_4) as f32;
        product += value * step;
        square += step * step;
    }
    f16::from_f32(if square == 0.0 { 0.0 } else { product / square })
}

fn error(values: &[f32; BLOCK], block: &Block) -> f32 {
    let scale = block.scale.to_f32();
    let deviation = |(value, &code): (&f32, &u8)| {
        let difference = value - scale * (i32::from(code) - OFFSET_4) as f32;
        difference * difference
    };
    values.iter().zip(&block.codes).map(deviation).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wave(seed: f32, size: f32) -> [f32; BLOCK] {
        std::array::from_fn(|i| ((i as f32 * 1.7 + seed).sin() + (i as f32 * seed).cos()) * size)
    }

    #[test]
    fn eight_bits_are_within_half_a_step() {
        for seed in 0..50 {
            let values = wave(seed as f32, 0.02);
            let block = quantize_8(&values);
            let scale = block.scale.to_f32();
            for (value, code) in values.iter().zip(block.codes) {
                let back = scale * (i32::from(code) - OFFSET_8) as f32;
                // The scale itself is rounded to 11 bits.
                assert!((value - back).abs() <= scale * 0.57, "{value} {back} {scale}");
            }
        }
    }

    #[test]
    fn four_bits_beat_the_plain_choice_of_scale() {
        for seed in 0..50 {
            let values = wave(seed as f32, 0.02);
            let scale = f16::from_f32(largest(&values) / -8.0);
            let plain = Block { scale, codes: codes(&values, scale, OFFSET_4, 0.0, 15.0) };
            assert!(error(&values, &quantize_4(&values)) <= error(&values, &plain));
        }
    }

    #[test]
    fn zeros_stay_zeros() {
        let zeros = [0.0; BLOCK];
        assert_eq!(quantize_8(&zeros).codes, [128; BLOCK]);
        assert_eq!(quantize_4(&zeros).codes, [8; BLOCK]);
    }

    #[test]
    fn values_on_the_grid_are_kept() {
        let grid: [f32; BLOCK] = std::array::from_fn(|i| (i as f32 % 16.0 - 8.0) * 0.5);
        let block = quantize_4(&grid);
        assert_eq!(error(&grid, &block), 0.0);
    }
}
