//! Memory that experts take beside their inputs and outputs, as a function of nothing but the shape.

use crate::kernels::gpu::linear::MAX_TOKENS;

/// Where the parts start: as every piece of a GPU's memory does.
const ALIGNMENT: usize = 256;
/// Slots of the smallest tile.
pub(super) const LEAST_TILE: usize = 16;
/// Numbers that describe a tile.
pub(super) const TILE_NUMBERS: usize = 3;

/// Bytes of each part of a workspace, which follow one another in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Parts {
    /// `u32[experts + 1]`: how many slots come before each expert's, then how many there are.
    pub(super) starts: usize,
    /// `u32[slots]`: slots, expert after expert.
    pub(super) order: usize,
    /// `u32[tiles, 3]`: expert, first of its slots in that order, and how many; none where there is no such tile.
    pub(super) tiles: usize,
    /// `[tokens, features]` of 16 bits: the input as matrix instructions take it.
    pub(super) input: usize,
    /// `[slots, intermediate]` of up to 32 bits: gated rows, in order.
    pub(super) gated: usize,
    /// `f32[slots, features]`: what `down` makes of them, token after token.
    pub(super) products: usize,
}

impl Parts {
    pub(super) fn new(
        tokens: usize,
        used: usize,
        experts: usize,
        features: usize,
        intermediate: usize,
    ) -> Self {
        let slots = tokens * used;
        let aligned = |bytes: usize| bytes.next_multiple_of(ALIGNMENT);
        Self {
            starts: aligned((experts + 1) * size_of::<u32>()),
            order: aligned(slots * size_of::<u32>()),
            tiles: aligned(
                most_tiles(slots, experts, LEAST_TILE) * TILE_NUMBERS * size_of::<u32>(),
            ),
            input: aligned(tokens * features * size_of::<u16>()),
            gated: aligned(slots * intermediate * size_of::<f32>()),
            products: aligned(slots * features * size_of::<f32>()),
        }
    }

    pub(super) fn in_order(self) -> [usize; 6] {
        [self.starts, self.order, self.tiles, self.input, self.gated, self.products]
    }
}

/// Bytes of workspace for experts of so many tokens. With fewer tokens it is less.
///
/// See [`grouped_workspace_bytes()`] for what the numbers are.
pub fn workspace_bytes(
    tokens: usize,
    used: usize,
    experts: usize,
    features: usize,
    intermediate: usize,
) -> usize {
    if tokens <= MAX_TOKENS {
        tokens * used * intermediate * size_of::<f32>()
    } else {
        grouped_workspace_bytes(tokens, used, experts, features, intermediate)
    }
}

/// Bytes of workspace for experts of many tokens. With fewer tokens it is less.
///
/// `experts` are those held on the device, `used` those chosen for a token, `features` and `intermediate` the
/// columns and rows of a gate as it is held.
pub fn grouped_workspace_bytes(
    tokens: usize,
    used: usize,
    experts: usize,
    features: usize,
    intermediate: usize,
) -> usize {
    Parts::new(tokens, used, experts, features, intermediate).in_order().iter().sum()
}

/// Tiles of so many slots, however the slots are divided among the experts.
pub(super) fn most_tiles(slots: usize, experts: usize, tile: usize) -> usize {
    slots / tile + experts.min(slots)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_counted_once() {
        let slots = 16_384;
        let expected = 768 // 129 starts
            + slots * 4
            + (slots / 16 + 128) * 12
            + 2048 * 2048 * 2
            + slots * 768 * 4
            + slots * 2048 * 4;
        assert_eq!(grouped_workspace_bytes(2048, 8, 128, 2048, 768), expected);
    }
}
