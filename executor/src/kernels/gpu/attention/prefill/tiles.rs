//! Which tokens a tile of queries is made of, and which keys they see.

use cubecl::prelude::*;

use crate::kernels::gpu::attention::paging::first_seen;

/// Some consecutive tokens of one sequence.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Tile {
    /// Whose tokens; that of no sequence where there is no such tile.
    pub sequence: u32,
    /// Row of its first token in the run.
    pub row: u32,
    /// Tokens of the tile, 0 where there is no such tile.
    pub rows: u32,
    /// Position of its first token.
    pub position: u32,
    /// The first position that any of its tokens sees.
    pub begin: u32,
}

/// The tile of a number. Of each sequence the last tiles, which see most, come first.
#[cube]
pub(super) fn tile(
    parts: &[i32],
    sequences: u32,
    number: u32,
    #[comptime] rows: u32,
    #[comptime] window: u32,
) -> Tile {
    let mut sequence = sequences;
    let mut left = number;
    let mut from_end = 0u32;
    for candidate in 0..sequences {
        let tokens = u32::cast_from(parts[(3 * candidate + 1) as usize]);
        let tiles = tokens.div_ceil(rows);
        if sequence == sequences {
            if left < tiles {
                sequence = candidate;
                from_end = tiles - 1 - left;
            } else {
                left -= tiles;
            }
        }
    }
    let mut row = 0u32;
    let mut count = 0u32;
    let mut position = 0u32;
    if sequence < sequences {
        let first = from_end * rows;
        count =
            u32::min(rows.runtime(), u32::cast_from(parts[(3 * sequence + 1) as usize]) - first);
        row = u32::cast_from(parts[(3 * sequence) as usize]) + first;
        position = u32::cast_from(parts[(3 * sequence + 2) as usize]) + first;
    }
    let begin = first_seen(position, window);
    Tile { sequence, row, rows: count, position, begin }
}
