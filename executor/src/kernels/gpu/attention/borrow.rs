//! Keys and values that cross between a cache at home on a NUMA node, which lies in pinned memory in the order of that
//! node's kernels, and a GPU's window, which lies row after row.
//!
//! A cube moves one tile of 16 tokens of one head, which both hold in one piece; a unit moves 16 bytes at a time over
//! the link, in the order they lie there.

#![expect(unsafe_code, reason = "kernels are given addresses of host memory")]

use std::ops::Range;

use cubecl::ir::UIntKind;
use cubecl::prelude::*;

use super::super::addressed::{load_four, store_four};
use super::super::words::Four;
use crate::kernels::cpu::cache::{CacheShape, Side, TILE_TOKENS};
use crate::kernels::gpu::device::{Gpu, Span};

/// Units of a cube.
const UNITS: u32 = 128;
/// Bytes that a unit moves at once.
const UNIT_BYTES: usize = size_of::<[f32; 4]>();

/// Tokens of one sequence and where they lie.
pub struct Crossing<'a> {
    /// Where the GPU sees the first byte of the keys or the values at home.
    pub address: u64,
    /// `[blocks, kv_heads, block_tokens, head_dim]` on the GPU.
    pub window: &'a Span,
    /// Sizes of the cache; elements are floats.
    pub shape: &'a CacheShape,
    /// Keys or values.
    pub side: Side,
    /// `i32[all_blocks]`: blocks of all sequences.
    pub blocks: &'a Span,
    /// Length of `blocks`.
    pub all_blocks: usize,
    /// Where those of the sequence begin.
    pub first_block: usize,
    /// The tokens, as counted from the start of the sequence.
    pub tokens: Range<usize>,
}

/// What the kernels are built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Layout {
    kv_heads: u32,
    block_tokens: u32,
    head_dim: u32,
    /// Bytes of an element.
    bytes: u32,
    /// Elements that lie together at home.
    per_unit: u32,
    is_keys: bool,
}

impl Gpu {
    /// Queues bringing tokens from home, with the others of the tiles that they lie in.
    ///
    /// # Safety
    /// Until the launch has ended, the GPU reaches keys or values of this shape at the address, and nobody writes these
    /// tiles there.
    pub unsafe fn bring(&self, call: &Crossing<'_>) {
        let tiles = tiles(&call.tokens);
        // SAFETY: tiles lie within the blocks of the sequence, which exist in both places, as the caller says.
        unsafe {
            bring::launch_unchecked(
                &self.client,
                call.cubes(&tiles),
                CubeDim::new_1d(UNITS),
                call.window.argument(call.elements(), call.shape.element.bytes()),
                call.blocks.argument(call.all_blocks, size_of::<i32>()),
                call.address,
                call.first_block as u32,
                tiles.start as u32,
                call.layout(),
                call.element(),
            );
        }
    }

    /// Queues giving tokens back to their home, with those before them in the tiles that they lie in, and zeros behind
    /// them.
    ///
    /// # Safety
    /// Until the launch has ended, the GPU reaches keys or values of this shape at the address, and nobody else uses
    /// these tiles there.
    pub unsafe fn give_back(&self, call: &Crossing<'_>) {
        let tiles = tiles(&call.tokens);
        // SAFETY: as above.
        unsafe {
            give_back::launch_unchecked(
                &self.client,
                call.cubes(&tiles),
                CubeDim::new_1d(UNITS),
                call.window.argument(call.elements(), call.shape.element.bytes()),
                call.blocks.argument(call.all_blocks, size_of::<i32>()),
                call.address,
                call.first_block as u32,
                tiles.start as u32,
                call.tokens.end as u32,
                call.layout(),
                call.element(),
            );
        }
    }
}

impl Crossing<'_> {
    fn layout(&self) -> Layout {
        let CacheShape { kv_heads, block_tokens, head_dim, element, .. } = *self.shape;
        Layout {
            kv_heads: kv_heads as u32,
            block_tokens: block_tokens as u32,
            head_dim: head_dim as u32,
            bytes: element.bytes() as u32,
            per_unit: element.per_unit() as u32,
            is_keys: self.side == Side::Keys,
        }
    }

    /// Elements of the window.
    fn elements(&self) -> usize {
        let CacheShape { blocks, kv_heads, block_tokens, head_dim, .. } = *self.shape;
        blocks * kv_heads * block_tokens * head_dim
    }

    fn cubes(&self, tiles: &Range<usize>) -> CubeCount {
        CubeCount::Static(tiles.len() as u32, self.shape.kv_heads as u32, 1)
    }

    /// The type that an element's bits are moved as.
    fn element(&self) -> ElemType {
        ElemType::UInt(if self.shape.element.bytes() == 2 { UIntKind::U16 } else { UIntKind::U32 })
    }
}

/// The tiles that tokens lie in.
fn tiles(tokens: &Range<usize>) -> Range<usize> {
    tokens.start / TILE_TOKENS..tokens.end.div_ceil(TILE_TOKENS)
}

impl Layout {
    fn tile_bytes(self) -> u32 {
        TILE_TOKENS as u32 * self.head_dim * self.bytes
    }
}

/// Where a cube's tile lies: in bytes from the start at home, and the element of its first row in the window.
#[derive(CubeType, Clone, Copy)]
struct Tile {
    home: u64,
    row: u32,
}

#[cube]
fn tile_of(blocks: &[i32], first_block: u32, tile: u32, #[comptime] layout: Layout) -> Tile {
    let tiles = comptime!(layout.block_tokens / TILE_TOKENS as u32);
    let head = CUBE_POS_Y;
    let block = u32::cast_from(blocks[(first_block + tile / tiles) as usize]);
    // Tiles of a head follow each other, heads of a block, and blocks, in both places.
    let number = (block * comptime!(layout.kv_heads) + head) * tiles + tile % tiles;
    Tile {
        home: u64::cast_from(number) * u64::cast_from(comptime!(layout.tile_bytes())),
        row: number * comptime!(TILE_TOKENS as u32 * layout.head_dim),
    }
}

/// Token and dimension of an element at home, as the token's slot in the tile times the head's size and the dimension.
#[cube]
fn place_of(element: u32, #[comptime] layout: Layout) -> u32 {
    let per_unit = comptime!(layout.per_unit);
    let head_dim = comptime!(layout.head_dim);
    let within = element % per_unit;
    let unit = element / per_unit;
    if comptime!(layout.is_keys) {
        let slot = unit % comptime!(TILE_TOKENS as u32);
        slot * head_dim + unit / comptime!(TILE_TOKENS as u32) * per_unit + within
    } else {
        (unit / head_dim * per_unit + within) * head_dim + unit % head_dim
    }
}

#[cube(launch_unchecked)]
fn bring<N: Int>(
    window: &mut [N],
    blocks: &[i32],
    address: u64,
    first_block: u32,
    first_tile: u32,
    #[comptime] layout: Layout,
    #[define(N)] _element: ElemType,
) {
    let tile = tile_of(blocks, first_block, first_tile + CUBE_POS_X, layout);
    let in_word = comptime!(4 / layout.bytes);
    let mut at = UNIT_POS;
    while at < comptime!(layout.tile_bytes() / UNIT_BYTES as u32) {
        let four = load_four(address + tile.home + u64::cast_from(at) * 16);
        #[unroll]
        for i in 0..4usize {
            let word = u32::reinterpret(four.extract(i));
            #[unroll]
            for part in 0..in_word {
                let element = (at * 4 + comptime!(i as u32)) * in_word + part;
                let bits = word >> (part * 16);
                window[(tile.row + place_of(element, layout)) as usize] = N::cast_from(bits);
            }
        }
        at += CUBE_DIM;
    }
}

#[cube(launch_unchecked)]
fn give_back<N: Int>(
    window: &[N],
    blocks: &[i32],
    address: u64,
    first_block: u32,
    first_tile: u32,
    end: u32,
    #[comptime] layout: Layout,
    #[define(N)] _element: ElemType,
) {
    let number = first_tile + CUBE_POS_X;
    let tile = tile_of(blocks, first_block, number, layout);
    let in_word = comptime!(4 / layout.bytes);
    // Elements of the tile's rows that hold tokens.
    let held = (end - number * comptime!(TILE_TOKENS as u32)) * comptime!(layout.head_dim);
    let mut at = UNIT_POS;
    while at < comptime!(layout.tile_bytes() / UNIT_BYTES as u32) {
        let mut four = Four::zeroed();
        #[unroll]
        for i in 0..4usize {
            let mut word = 0u32;
            #[unroll]
            for part in 0..in_word {
                let element = (at * 4 + comptime!(i as u32)) * in_word + part;
                let place = place_of(element, layout);
                if place < held {
                    word |= u32::cast_from(window[(tile.row + place) as usize]) << (part * 16);
                }
            }
            four.insert(i, f32::reinterpret(word));
        }
        store_four(address + tile.home + u64::cast_from(at) * 16, four);
        at += CUBE_DIM;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::kernels::cpu::cache::Element;
    use crate::kernels::gpu::testing::cuda;
    use crate::memory::Region;
    use crate::pinned::Pinned;

    /// Every element is its number at home, and in the window that of the same token and dimension.
    fn check(element: Element, head_dim: usize) {
        let Some((gpu, context)) = cuda() else { return };
        let shape = CacheShape { element, blocks: 5, kv_heads: 3, block_tokens: 32, head_dim };
        let (blocks, tokens) = ([9, 4, 1, 3_i32], 75);
        let (bytes, all) = (element.bytes(), 5 * 3 * 32 * head_dim);
        let mut region = Region::new(shape.region_bytes()).unwrap();
        let number = |i: usize| (i as u32).wrapping_mul(2_654_435_761).to_le_bytes();
        for i in 0..all {
            region.as_mut_slice::<u8>()[i * bytes..][..bytes].copy_from_slice(&number(i)[..bytes]);
        }
        let region = Arc::new(region);
        let pinned = Pinned::alone(&context, &region).unwrap();
        let listed = gpu.upload(&blocks);
        let of_sequence: Vec<u32> = blocks[1..].iter().map(|&block| block as u32).collect();
        for side in [Side::Keys, Side::Values] {
            let places = |token: usize, head: usize, dim: usize| {
                let block = of_sequence[token / 32] as usize;
                let row = (block * 3 + head) * 32 + token % 32;
                let home = shape.element_offset(side, &of_sequence, head, token, dim);
                (home / bytes, row * head_dim + dim)
            };
            let each = |range: Range<usize>| {
                range.flat_map(|token| {
                    (0..3).flat_map(move |head| (0..head_dim).map(move |dim| (token, head, dim)))
                })
            };
            let window = gpu.poisoned(all * bytes);
            let crossing = |tokens: Range<usize>| Crossing {
                address: pinned.address(),
                window: &window,
                shape: &shape,
                side,
                blocks: &listed,
                all_blocks: blocks.len(),
                first_block: 1,
                tokens,
            };
            let before = region.as_slice::<u8>().to_vec();
            // SAFETY: the region is pinned and has this shape, and nobody uses it while launches run.
            unsafe { gpu.bring(&crossing(0..tokens)) };
            let brought: Vec<u8> = gpu.download(&window, all * bytes);
            for (token, head, dim) in each(0..tokens) {
                let (home, here) = places(token, head, dim);
                let (home, here) = (&before[home * bytes..], &brought[here * bytes..]);
                assert_eq!(home[..bytes], here[..bytes], "{side:?} {token} {head} {dim}");
            }
            // Back go other bits, from the middle of a tile on.
            let changed: Vec<u8> = brought.iter().map(|byte| !byte).collect();
            gpu.write(&window, &changed).unwrap();
            // SAFETY: as above.
            unsafe { gpu.give_back(&crossing(53..tokens)) };
            gpu.sync().unwrap();
            let after = region.as_slice::<u8>();
            for (token, head, dim) in each(0..80) {
                let (home, here) = places(token, head, dim);
                let expected = match token {
                    0..48 => &before[home * bytes..],
                    48..75 => &changed[here * bytes..],
                    _ => &[0; 4][..],
                };
                let found = &after[home * bytes..][..bytes];
                assert_eq!(found, &expected[..bytes], "{side:?} {token} {head} {dim}");
            }
            // SAFETY: the region is as long, and nobody else uses it now.
            unsafe { region.as_ptr().copy_from_nonoverlapping(before.as_ptr(), before.len()) };
        }
    }

    #[test]
    fn what_is_brought_and_given_back_is_what_lies_at_home() {
        for element in [Element::F32, Element::F16, Element::Bf16] {
            for head_dim in [64, 128, 80] {
                check(element, head_dim);
            }
        }
    }
}
