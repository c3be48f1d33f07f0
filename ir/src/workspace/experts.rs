//! Memory that a mixture's experts take beside their inputs and outputs on a GPU.

use super::{FLOAT_ROWS, aligned, product};

/// Slots of the smallest tile; a slot is one token at one of its experts.
const LEAST_TILE: u32 = 8;
/// Numbers that describe a tile.
pub const TILE_NUMBERS: u32 = 3;

/// What the workspace depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Experts {
    /// Tokens of a run.
    pub tokens: u32,
    /// Experts chosen for a token.
    pub used: u32,
    /// Experts held on the device.
    pub experts: u32,
    /// Columns of a gate.
    pub features: u32,
    /// Rows of a gate, as it is held.
    pub intermediate: u32,
}

/// Bytes of each part of a workspace for many tokens; the parts follow one another in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts {
    /// `u32[experts + 1]`: how many slots come before each expert's, then how many there are.
    pub starts: u64,
    /// `u32[slots]`: slots, expert after expert.
    pub order: u64,
    /// `u32[tiles, 3]`: expert, first of its slots in that order, and how many; none where there is no such tile.
    pub tiles: u64,
    /// `[tokens, features]` of 16 bits: the input as matrix instructions take it.
    pub input: u64,
    /// `[slots, intermediate]` of up to 32 bits: gated rows, in order.
    pub gated: u64,
    /// `f32[slots, features]`: what `down` makes of them, token after token.
    pub products: u64,
}

impl Experts {
    /// Bytes of the whole workspace; with fewer tokens it is less.
    pub fn bytes(self) -> u64 {
        let Self { tokens, used, intermediate, .. } = self;
        if tokens <= FLOAT_ROWS {
            // Gated rows alone: each slot reads its expert's matrices by itself.
            return product(&[tokens, used, intermediate], 4);
        }
        self.parts().in_order().into_iter().fold(0, u64::saturating_add)
    }

    /// The parts of the workspace for many tokens.
    pub fn parts(self) -> Parts {
        let Self { tokens, used, experts, features, intermediate } = self;
        let tiles = self.most_tiles(LEAST_TILE).saturating_mul(u64::from(TILE_NUMBERS) * 4);
        Parts {
            starts: aligned(product(&[experts.saturating_add(1)], 4)),
            order: aligned(product(&[tokens, used], 4)),
            tiles: aligned(tiles),
            input: aligned(product(&[tokens, features], 2)),
            gated: aligned(product(&[tokens, used, intermediate], 4)),
            products: aligned(product(&[tokens, used, features], 4)),
        }
    }

    /// The most tiles of `tile` slots that there are, however the slots are divided among the experts.
    pub fn most_tiles(self, tile: u32) -> u64 {
        let slots = product(&[self.tokens, self.used], 1);
        (slots / u64::from(tile)).saturating_add(u64::from(self.experts).min(slots))
    }
}

impl Parts {
    /// The parts as they follow one another.
    pub fn in_order(self) -> [u64; 6] {
        [self.starts, self.order, self.tiles, self.input, self.gated, self.products]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_counted_once() {
        let slots = 16_384;
        let expected = 768 // 129 starts
            + slots * 4
            + (slots / 8 + 128) * 12
            + 2048 * 2048 * 2
            + slots * 768 * 4
            + slots * 2048 * 4;
        let sizes =
            Experts { tokens: 2048, used: 8, experts: 128, features: 2048, intermediate: 768 };
        assert_eq!(sizes.bytes(), expected);
    }
}
