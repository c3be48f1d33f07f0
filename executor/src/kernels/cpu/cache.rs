//! The paged cache of one layer's keys and values.
//!
//! - Blocks of `block_tokens` tokens are numbered from 0; a sequence lists the blocks that hold it, in order.
//! - Keys and values are one region each, `[blocks][kv_heads][block_tokens][head_dim]` as a plan counts bytes.
//! - Within a head of a block, 16 tokens are a tile and every 32 bits of storage a unit of `P` elements
//!   (1 of 32 or 16 bits, 2 of bfloat16, 4 bytes), so that one vector load feeds one dot product instruction:
//!   keys are `[tile][head_dim / P][16 tokens][P dims]`, values `[tile][16 / P tokens][head_dim][P tokens]`.
//!   Blocks can be copied whole; nothing else depends on the order inside.
//! - Bytes carry one 32-bit scale for each token and head, `[kv_heads][block_tokens]` behind a block's elements.
//! - The slots behind a sequence's last token, up to a multiple of `P`, hold zeros: what another sequence left
//!   there could be infinite, and spoil a product with zero.

#![expect(unsafe_code, reason = "elements are written through pointers that members share")]

use std::marker::PhantomData;

use anyhow::ensure;
use half::f16;

use super::lanes::to_bf16;

/// Tokens that lie side by side in one vector.
pub const TILE_TOKENS: usize = 16;
/// Bytes behind the last block that the widest load of a narrow head may touch.
const SLACK_BYTES: usize = 64;

/// How a cached number is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// 32-bit floats.
    F32,
    /// IEEE halves.
    F16,
    /// Bfloat16.
    Bf16,
    /// Signed bytes with one scale for each token and head.
    Int8,
}

/// The sizes of a layer's cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheShape {
    /// How a number is stored.
    pub element: Element,
    /// Blocks, shared by all sequences.
    pub blocks: usize,
    /// Heads of keys and of values on this device.
    pub kv_heads: usize,
    /// Tokens of a block, a multiple of 16.
    pub block_tokens: usize,
    /// Elements of a head.
    pub head_dim: usize,
}

/// The cache of one layer, for the time of one run.
pub struct Cache<'a> {
    shape: CacheShape,
    keys: *mut u8,
    values: *mut u8,
    regions: PhantomData<&'a mut [u8]>,
}

/// Keys or values of one run's tokens, on their way into the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Keys.
    Keys,
    /// Values.
    Values,
}

// SAFETY: a `Cache` stands for two exclusively borrowed byte slices; its methods say what may not overlap.
unsafe impl Send for Cache<'_> {}
// SAFETY: as above; shared access writes only through `append`, whose callers keep to different tiles.
unsafe impl Sync for Cache<'_> {}

impl Side {
    /// That of the keys, or that of the values.
    #[inline(always)]
    pub(crate) fn of<T>(self, [keys, values]: [T; 2]) -> T {
        match self {
            Side::Keys => keys,
            Side::Values => values,
        }
    }
}

impl Element {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Element::F32 => 4,
            Element::F16 | Element::Bf16 => 2,
            Element::Int8 => 1,
        }
    }

    /// Elements that one lane multiplies at once.
    pub(crate) fn per_unit(self) -> usize {
        match self {
            Element::F32 | Element::F16 => 1,
            Element::Bf16 => 2,
            Element::Int8 => 4,
        }
    }
}

impl CacheShape {
    /// Bytes of the keys, or the values, of one block.
    pub fn block_bytes(&self) -> usize {
        let scale_bytes = if self.element == Element::Int8 { 4 } else { 0 };
        self.kv_heads * self.block_tokens * (self.head_dim * self.element.bytes() + scale_bytes)
    }

    /// Bytes of the region of keys, and of that of values.
    pub fn region_bytes(&self) -> usize {
        self.blocks * self.block_bytes() + SLACK_BYTES
    }

    /// Bytes of one tile of one head.
    pub(super) fn tile_bytes(&self) -> usize {
        TILE_TOKENS * self.head_dim * self.element.bytes()
    }

    /// Where the tile of `token` (as counted from the start of `blocks`' sequence) begins.
    #[inline(always)]
    pub(super) fn tile_offset(&self, blocks: &[u32], kv_head: usize, token: usize) -> usize {
        let block = blocks[token / self.block_tokens] as usize;
        let tiles = self.block_tokens / TILE_TOKENS;
        let tile = kv_head * tiles + token % self.block_tokens / TILE_TOKENS;
        block * self.block_bytes() + tile * self.tile_bytes()
    }

    /// Where an element of `token` (counted as above) lies.
    pub(crate) fn element_offset(
        &self,
        side: Side,
        blocks: &[u32],
        kv_head: usize,
        token: usize,
        dim: usize,
    ) -> usize {
        let slot = token % TILE_TOKENS;
        let at = slot_of(side, self.element.per_unit(), self.head_dim, slot, dim);
        self.tile_offset(blocks, kv_head, token) + at * self.element.bytes()
    }

    /// Where the scales of the tile of `token` begin, for bytes.
    #[inline(always)]
    pub(super) fn scale_offset(&self, blocks: &[u32], kv_head: usize, token: usize) -> usize {
        let block = blocks[token / self.block_tokens] as usize;
        let elements = self.kv_heads * self.block_tokens * self.head_dim;
        let slot =
            kv_head * self.block_tokens + token % self.block_tokens / TILE_TOKENS * TILE_TOKENS;
        block * self.block_bytes() + elements + slot * size_of::<f32>()
    }
}

impl<'a> Cache<'a> {
    /// A cache of `shape` over two regions of at least `shape.region_bytes()`, aligned to 4 bytes.
    ///
    /// # Errors
    /// When a region is too small or unaligned, or the shape is one that cannot be stored.
    pub fn new(
        shape: CacheShape,
        keys: &'a mut [u8],
        values: &'a mut [u8],
    ) -> anyhow::Result<Self> {
        let CacheShape { element, block_tokens, head_dim, .. } = shape;
        ensure!(
            block_tokens > 0 && block_tokens.is_multiple_of(TILE_TOKENS),
            "a cache block of {block_tokens} tokens is not a multiple of {TILE_TOKENS}"
        );
        ensure!(
            head_dim > 0 && head_dim.is_multiple_of(element.per_unit()),
            "a head of {head_dim} elements cannot be cached as {element:?}"
        );
        for region in [&*keys, &*values] {
            let (has, needs) = (region.len(), shape.region_bytes());
            ensure!(has >= needs, "a cache region has {has} bytes and needs {needs}");
            ensure!(region.as_ptr().cast::<f32>().is_aligned(), "a cache region is not aligned");
        }
        let (keys, values) = (keys.as_mut_ptr(), values.as_mut_ptr());
        Ok(Self { shape, keys, values, regions: PhantomData })
    }

    /// The sizes.
    pub fn shape(&self) -> &CacheShape {
        &self.shape
    }

    /// The first byte of the keys' or the values' region.
    #[inline(always)]
    pub(super) fn base(&self, side: Side) -> *mut u8 {
        side.of([self.keys, self.values])
    }

    /// Stores `rows`, `[tokens, head_dim]`, as tokens `first..` of the sequence in `blocks`; all lie in one tile.
    ///
    /// # Safety
    /// Nobody else accesses this tile of this head at the same time.
    #[inline(always)]
    pub(crate) unsafe fn append(
        &self,
        side: Side,
        blocks: &[u32],
        kv_head: usize,
        first: usize,
        rows: &[f32],
    ) {
        let CacheShape { element, blocks: all, head_dim, .. } = self.shape;
        let tokens = rows.len() / head_dim;
        let slot = first % TILE_TOKENS;
        assert!(slot + tokens <= TILE_TOKENS && kv_head < self.shape.kv_heads, "rows fit a tile");
        assert!((blocks[first / self.shape.block_tokens] as usize) < all, "the block exists");
        let offset = self.shape.tile_offset(blocks, kv_head, first);
        // SAFETY: the block exists, so its tile lies in the region, and the caller has it alone.
        unsafe {
            let tile = self.base(side).add(offset);
            match element {
                Element::F32 => store(tile.cast(), side, 1, slot, head_dim, rows, |value| value),
                Element::F16 => {
                    store(tile.cast(), side, 1, slot, head_dim, rows, |value| {
                        f16::from_f32(value).to_bits()
                    });
                }
                Element::Bf16 => store(tile.cast(), side, 2, slot, head_dim, rows, to_bf16),
                Element::Int8 => {
                    let scales = self.shape.scale_offset(blocks, kv_head, first);
                    let scales = self.base(side).add(scales).cast::<f32>();
                    for (token, row) in rows.chunks_exact(head_dim).enumerate() {
                        let scale = scale_of(row);
                        scales.add(slot + token).write(scale);
                        let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
                        // Keys are the unsigned factor of their product, so they are stored 128 higher.
                        let offset = if side == Side::Keys { 128.0 } else { 0.0 };
                        store(tile.cast(), side, 4, slot + token, head_dim, row, |value| {
                            ((value * inverse).round_ties_even() + offset) as i32 as u8
                        });
                    }
                }
            }
        }
    }
}

/// What one step of a row's bytes stands for; no number if an element is none.
fn scale_of(row: &[f32]) -> f32 {
    // Magnitudes compare as their bits do, and what is not a number is above all.
    let largest = row.iter().map(|value| value.abs().to_bits()).max();
    f32::from_bits(largest.unwrap_or(0)) / 127.0
}

/// Which element of a tile a token's is.
#[inline(always)]
fn slot_of(side: Side, per_unit: usize, head_dim: usize, slot: usize, dim: usize) -> usize {
    match side {
        Side::Keys => dim / per_unit * TILE_TOKENS * per_unit + slot * per_unit + dim % per_unit,
        Side::Values => slot / per_unit * head_dim * per_unit + dim * per_unit + slot % per_unit,
    }
}

/// Writes `rows` into `tile` from `slot` on, and zeros into what is left of the last unit.
///
/// # Safety
/// `tile` points to 16 × `head_dim` elements that nobody else accesses.
#[inline(always)]
unsafe fn store<T: Copy + Default>(
    tile: *mut T,
    side: Side,
    per_unit: usize,
    slot: usize,
    head_dim: usize,
    rows: &[f32],
    convert: impl Fn(f32) -> T,
) {
    let tokens = rows.len() / head_dim;
    for (token, row) in rows.chunks_exact(head_dim).enumerate() {
        let slot = slot + token;
        for (dim, &value) in row.iter().enumerate() {
            let at = slot_of(side, per_unit, head_dim, slot, dim);
            // SAFETY: slot and dim lie in the tile.
            unsafe { tile.add(at).write(convert(value)) };
        }
    }
    let end = slot + tokens;
    if side == Side::Values {
        for slot in end..end.next_multiple_of(per_unit) {
            for dim in 0..head_dim {
                let at = slot_of(side, per_unit, head_dim, slot, dim);
                // SAFETY: a tile is a whole number of units.
                unsafe { tile.add(at).write(T::default()) };
            }
        }
    }
}
