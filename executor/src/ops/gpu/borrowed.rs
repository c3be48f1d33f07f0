//! What a step of a GPU borrows: keys and values between a cache at home on a NUMA node and the GPU's window.
//!
//! - The window holds one cache at a time, with its blocks where they are at home: what is cached is brought before a
//!   step attends, and what the step adds is given back.
//! - Pinned memory is read and written by address. Elsewhere the host copies element by element: on devices in
//!   software, and where the system pins no more.

#![expect(unsafe_code, reason = "lanes of different devices use a cache in turn")]

use std::ops::Range;

use anyhow::Result;

use crate::batch::{Batch, Part};
use crate::home_caches::HomeCache;
use crate::kernels::cpu::cache::{CacheShape, Side, TILE_TOKENS};
use crate::kernels::gpu::attention::borrow::Crossing;
use crate::kernels::gpu::attention::{Cache, Tokens};
use crate::kernels::gpu::device::{Gpu, Span};

/// A cache that a step borrows, in a run of these sequences.
pub(super) struct Borrowed<'a> {
    pub(super) gpu: &'a Gpu,
    pub(super) home: &'a HomeCache,
    pub(super) window: Cache<'a>,
    pub(super) batch: &'a Batch,
    pub(super) tokens: Tokens<'a>,
}

impl Borrowed<'_> {
    /// Lets what the sequences have cached come to the window, as far back as tokens see that see `seen` of them.
    ///
    /// # Errors
    /// When the device failed.
    pub(super) fn bring(&self, seen: Option<u32>) -> Result<()> {
        if self.batch.parts().iter().all(|part| part.past == 0) {
            return Ok(());
        }
        let cached = |part: &Part| first_brought(part.past, seen)..part.past;
        // SAFETY: what lies at home is pinned and of this shape, and plans let one step use a cache at a time.
        let bring = |gpu: &Gpu, crossing: &Crossing<'_>| unsafe { gpu.bring(crossing) };
        self.cross(cached, bring, |side, span| {
            let shape = self.home.shape();
            let mut elements = vec![0; shape.blocks * shape.block_bytes()];
            let copy = |home: &mut [u8]| {
                for part in self.batch.parts() {
                    for (at_home, here) in elements_of(shape, side, &part.blocks, cached(part)) {
                        elements[here].copy_from_slice(&home[at_home]);
                    }
                }
            };
            // SAFETY: plans let one step use a cache at a time, which is this one.
            unsafe { self.home.with_bytes(side, copy) };
            self.gpu.write(span, &elements)
        })
    }

    /// Lets what the run adds go home.
    ///
    /// # Errors
    /// When the device failed.
    pub(super) fn give_back(&self) -> Result<()> {
        let added = |part: &Part| part.past..part.past + part.tokens;
        // SAFETY: as in `bring`.
        let give_back = |gpu: &Gpu, crossing: &Crossing<'_>| unsafe { gpu.give_back(crossing) };
        self.cross(added, give_back, |side, span| {
            let shape = self.home.shape();
            let elements = self.gpu.read(span)?;
            let copy = |home: &mut [u8]| {
                for part in self.batch.parts() {
                    let added = added(part);
                    // Behind the last token lie zeros.
                    let behind = added.end..added.end.next_multiple_of(TILE_TOKENS);
                    for (at_home, _) in elements_of(shape, side, &part.blocks, behind) {
                        home[at_home].fill(0);
                    }
                    for (at_home, here) in elements_of(shape, side, &part.blocks, added) {
                        home[at_home].copy_from_slice(&elements[here]);
                    }
                }
            };
            // SAFETY: plans let one step use a cache at a time, which is this one.
            unsafe { self.home.with_bytes(side, copy) };
            Ok(())
        })
    }

    /// Lets keys and values cross: by address those `tokens` of each sequence, else all at once by the host.
    fn cross(
        &self,
        tokens: impl Fn(&Part) -> Range<usize>,
        by_address: impl Fn(&Gpu, &Crossing<'_>),
        by_host: impl Fn(Side, &Span) -> Result<()>,
    ) -> Result<()> {
        for (side, span) in [(Side::Keys, self.window.keys), (Side::Values, self.window.values)] {
            let Some(address) = self.home.address(side) else {
                by_host(side, span)?;
                continue;
            };
            let max_blocks = self.tokens.max_blocks;
            let ranges = self.batch.parts().iter().map(&tokens).enumerate();
            for (sequence, tokens) in ranges.filter(|(_, range)| !range.is_empty()) {
                let crossing = Crossing {
                    address,
                    window: span,
                    shape: self.home.shape(),
                    side,
                    blocks: self.tokens.blocks,
                    all_blocks: self.tokens.sequences * max_blocks,
                    first_block: sequence * max_blocks,
                    tokens,
                };
                by_address(self.gpu, &crossing);
            }
        }
        Ok(())
    }
}

/// The first token that is brought of `past` cached ones where each token sees `seen`, itself included: one that a tile
/// of keys of the kernels may begin with.
fn first_brought(past: usize, seen: Option<u32>) -> usize {
    /// A multiple of the keys of a tile.
    const MOST_KEYS: usize = 256;
    let first = seen.map_or(0, |seen| (past + 1).saturating_sub(seen as usize));
    first.min(past) / MOST_KEYS * MOST_KEYS
}

/// Where each element of some tokens of a sequence lies at home and in the window, in bytes.
fn elements_of(
    shape: &CacheShape,
    side: Side,
    blocks: &[u32],
    tokens: Range<usize>,
) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
    let CacheShape { kv_heads, block_tokens, head_dim, element, .. } = *shape;
    let bytes = element.bytes();
    tokens.flat_map(move |token| {
        let block = blocks[token / block_tokens] as usize;
        (0..kv_heads).flat_map(move |head| {
            let row = (block * kv_heads + head) * block_tokens + token % block_tokens;
            (0..head_dim).map(move |dim| {
                let at_home = shape.element_offset(side, blocks, head, token, dim);
                let here = (row * head_dim + dim) * bytes;
                (at_home..at_home + bytes, here..here + bytes)
            })
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::cpu::cache::Element;
    use crate::memory::Region;

    /// A cache at home whose tokens of a sequence have been appended.
    fn appended(shape: CacheShape, blocks: &[u32], rows: &[Vec<f32>]) -> HomeCache {
        let region = || Region::new(shape.region_bytes()).unwrap();
        let home = HomeCache::new(shape, region(), region()).unwrap();
        // SAFETY: nobody else uses the cache.
        let cache = unsafe { home.view() }.unwrap();
        for (token, row) in rows.iter().enumerate() {
            for (head, row) in row.chunks(shape.head_dim).enumerate() {
                for side in [Side::Keys, Side::Values] {
                    // SAFETY: nobody else uses the cache.
                    unsafe { cache.append(side, blocks, head, token, row) };
                }
            }
        }
        home
    }

    #[test]
    fn no_more_is_brought_than_is_seen() {
        assert_eq!(first_brought(5000, None), 0);
        assert_eq!(first_brought(5000, Some(1024)), 3840);
        assert_eq!(first_brought(5000, Some(1)), 4864);
        assert_eq!(first_brought(500, Some(1024)), 0);
    }

    #[test]
    fn the_host_finds_what_a_node_has_appended() {
        let (blocks, tokens) = ([2, 0], 40);
        for (element, bytes) in [(Element::F32, 4), (Element::F16, 2), (Element::Bf16, 2)] {
            let shape =
                CacheShape { element, blocks: 3, kv_heads: 2, block_tokens: 32, head_dim: 6 };
            // Whole numbers below 256 are the same in all types.
            let rows: Vec<Vec<f32>> = (0..tokens)
                .map(|token| (0..12).map(|i| ((token * 12 + i) % 256) as f32).collect())
                .collect();
            let home = appended(shape, &blocks, &rows);
            for side in [Side::Keys, Side::Values] {
                let pairs: Vec<_> = elements_of(&shape, side, &blocks, 0..tokens).collect();
                let read = |all: &mut [u8]| -> Vec<f32> {
                    pairs.iter().map(|(at, _)| float(element, &all[at.clone()])).collect()
                };
                // SAFETY: nobody else uses the cache.
                let found = unsafe { home.with_bytes(side, read) };
                assert_eq!(found, rows.concat(), "{element:?}, {side:?}");
                // Row after row: the first block of the sequence is the third of the window.
                let start = |block: usize, head: usize, token: usize| {
                    ((block * 2 + head) * 32 + token) * 6 * bytes
                };
                assert_eq!(pairs[0].1.start, start(2, 0, 0));
                assert_eq!(pairs[33 * 12 + 6].1.start, start(0, 1, 1));
            }
        }
    }

    fn float(element: Element, bytes: &[u8]) -> f32 {
        match element {
            Element::F32 => bytemuck::pod_read_unaligned(bytes),
            Element::F16 => half::f16::from_bits(bytemuck::pod_read_unaligned(bytes)).to_f32(),
            Element::Bf16 => half::bf16::from_bits(bytemuck::pod_read_unaligned(bytes)).to_f32(),
            Element::Int8 => unreachable!("no GPU borrows bytes"),
        }
    }
}
