//! Where tokens lie in the paged cache, and which of them a token sees.

use cubecl::prelude::*;

use super::Shape;

/// The row of `position` of a sequence in a cache of rows of one head, `[blocks, kv_heads, block_tokens]`.
#[cube]
pub(super) fn cache_row(
    blocks: &[i32],
    first_block: u32,
    position: u32,
    kv_head: u32,
    #[comptime] shape: Shape,
) -> u32 {
    let size = comptime!(shape.block_tokens);
    let block = u32::cast_from(blocks[(first_block + position / size) as usize]);
    (block * comptime!(shape.kv_heads) + kv_head) * size + position % size
}

/// The first position that the token at `position` sees.
#[cube]
pub(super) fn first_seen(position: u32, #[comptime] window: u32) -> u32 {
    let mut first = 0u32;
    if comptime!(window < u32::MAX) && position >= window {
        first = position + 1u32 - window;
    }
    first
}
