//! The paged caches of one GPU, and those that it borrows from NUMA nodes.
//!
//! - A borrowed cache is used in a window, which holds one at a time, with its blocks where they are at home: what is
//!   cached is brought before a step attends, and what the step adds is given back.
//! - Pinned memory is read and written by address. Elsewhere the host copies element by element: on devices in software,
//!   and where the system pins no more.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use ir::id::{CacheId, DeviceId};
use ir::plan::Plan;
use ir::tensor::DType;

use super::memory::Memory;
use crate::batch::{Batch, Part};
use crate::home_caches::{HomeCache, HomeCaches};
use crate::kernels::cpu::cache::{CacheShape, Side, TILE_TOKENS};
use crate::kernels::gpu::attention::borrow::Crossing;
use crate::kernels::gpu::attention::{Cache, Tokens};
use crate::kernels::gpu::device::{Gpu, Span};

/// Keys and values of the layers of one device.
pub(super) struct Caches {
    caches: BTreeMap<CacheId, Held>,
    blocks: usize,
    block_tokens: usize,
    /// Where what is borrowed is at home.
    homes: Arc<HomeCaches>,
}

struct Held {
    keys: Span,
    values: Span,
    element: DType,
}

impl Caches {
    /// Takes the memory of every cache that the plan puts on a device, and of a window of `borrowed_bytes` bytes for keys
    /// and as many for values.
    pub(super) fn new(
        plan: &Plan,
        device: DeviceId,
        homes: Arc<HomeCaches>,
        borrowed_bytes: u64,
        memory: &mut Memory,
    ) -> Result<Self> {
        let (blocks, block_tokens) = (plan.model.blocks, plan.model.block_tokens);
        let mut caches = BTreeMap::new();
        for (id, cache) in plan.caches.iter().filter(|(_, cache)| cache.device == device) {
            let bytes = cache.bytes(blocks, block_tokens) as usize / 2;
            let mut take =
                || memory.take(bytes).with_context(|| format!("the cache of {}", cache.name));
            let (keys, values) = (take()?, take()?);
            caches.insert(id, Held { keys, values, element: cache.dtype });
        }
        if borrowed_bytes > 0 {
            let mut take = || memory.take(borrowed_bytes as usize).context("borrowed caches");
            let (keys, values) = (take()?, take()?);
            for id in plan.borrowed_by(device) {
                let (keys, values) = (keys.clone(), values.clone());
                caches.insert(id, Held { keys, values, element: plan.caches[id].dtype });
            }
        }
        Ok(Self { caches, blocks: blocks as usize, block_tokens: block_tokens as usize, homes })
    }

    /// Where a cache is at home that is borrowed; `None` for one that is on this device.
    pub(super) fn home(
        &self,
        plan: &Plan,
        device: DeviceId,
        id: CacheId,
    ) -> Result<Option<Arc<HomeCache>>> {
        let is_borrowed = plan.caches.get(id).is_some_and(|cache| cache.device != device);
        is_borrowed.then(|| self.homes.get(plan, id)).transpose()
    }

    /// One layer's keys and values.
    pub(super) fn cache(&self, id: CacheId) -> Result<Cache<'_>> {
        let held = self.caches.get(&id).with_context(|| format!("{id} is not on this device"))?;
        Ok(Cache {
            keys: &held.keys,
            values: &held.values,
            element: held.element,
            blocks: self.blocks,
            block_tokens: self.block_tokens,
        })
    }
}

/// Lets what the sequences of a run have cached, as far back as any token sees, come from a cache at home to its window on
/// a GPU.
///
/// # Errors
/// When the device failed.
pub(super) fn bring(
    gpu: &Gpu,
    home: &HomeCache,
    window: &Cache<'_>,
    batch: &Batch,
    tokens: &Tokens<'_>,
    seen: Option<u32>,
) -> Result<()> {
    let cached = |part: &Part| first_brought(part.past, seen)..part.past;
    if batch.parts().iter().all(|part| part.past == 0) {
        return Ok(());
    }
    cross(home, window, batch, tokens, cached, |side, span, crossing| match crossing {
        Some(crossing) => {
            gpu.bring(&crossing);
            Ok(())
        }
        None => {
            let mut elements = vec![0; home.shape().blocks * home.shape().block_bytes()];
            home.with_bytes(side, |home_bytes| {
                for part in batch.parts() {
                    let pairs = elements_of(home.shape(), side, &part.blocks, cached(part));
                    for (at_home, here) in pairs {
                        elements[here].copy_from_slice(&home_bytes[at_home]);
                    }
                }
            });
            gpu.write(span, &elements)
        }
    })
}

/// Lets what a run adds go from the window on a GPU to the cache at home.
///
/// # Errors
/// When the device failed.
pub(super) fn give_back(
    gpu: &Gpu,
    home: &HomeCache,
    window: &Cache<'_>,
    batch: &Batch,
    tokens: &Tokens<'_>,
) -> Result<()> {
    let added = |part: &Part| part.past..part.past + part.tokens;
    cross(home, window, batch, tokens, added, |side, span, crossing| match crossing {
        Some(crossing) => {
            gpu.give_back(&crossing);
            Ok(())
        }
        None => {
            let elements = gpu.read(span)?;
            home.with_bytes(side, |home_bytes| {
                for part in batch.parts() {
                    let added = added(part);
                    // Behind the last token lie zeros.
                    let behind = added.end..added.end.next_multiple_of(TILE_TOKENS);
                    for (at_home, _) in elements_of(home.shape(), side, &part.blocks, behind) {
                        home_bytes[at_home].fill(0);
                    }
                    let pairs = elements_of(home.shape(), side, &part.blocks, added);
                    for (at_home, here) in pairs {
                        home_bytes[at_home].copy_from_slice(&elements[here]);
                    }
                }
            });
            Ok(())
        }
    })
}

/// The first token that is brought of `past` cached ones where each token sees so many, itself included: what a tile of
/// keys of the kernels may begin with.
fn first_brought(past: usize, seen: Option<u32>) -> usize {
    /// A multiple of the keys of a tile.
    const MOST_KEYS: usize = 256;
    let first = seen.map_or(0, |seen| (past + 1).saturating_sub(seen as usize));
    first.min(past) / MOST_KEYS * MOST_KEYS
}

/// Calls `cross` for keys and for values: with what each sequence's tokens take to cross by address, or once where the
/// host copies.
fn cross(
    home: &HomeCache,
    window: &Cache<'_>,
    batch: &Batch,
    tokens: &Tokens<'_>,
    range: impl Fn(&Part) -> Range<usize>,
    cross: impl Fn(Side, &Span, Option<Crossing<'_>>) -> Result<()>,
) -> Result<()> {
    let shape = home.shape();
    for (side, span) in [(Side::Keys, window.keys), (Side::Values, window.values)] {
        let Some(address) = home.address(side) else {
            cross(side, span, None)?;
            continue;
        };
        for (sequence, part) in batch.parts().iter().enumerate() {
            let range = range(part);
            if range.is_empty() {
                continue;
            }
            let crossing = Crossing {
                address,
                window: span,
                shape,
                side,
                blocks: tokens.blocks,
                all_blocks: tokens.sequences * tokens.max_blocks,
                first_block: sequence * tokens.max_blocks,
                tokens: range,
            };
            cross(side, span, Some(crossing))?;
        }
    }
    Ok(())
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
    #[expect(unsafe_code, reason = "members of a team append to different tiles at the same time")]
    fn appended(shape: CacheShape, blocks: &[u32], rows: &[Vec<f32>]) -> HomeCache {
        let region = || Region::new(shape.region_bytes()).unwrap();
        let home = HomeCache::new(shape, region(), region()).unwrap();
        let cache = home.view().unwrap();
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
                let found: Vec<f32> = home.with_bytes(side, |all| {
                    pairs.iter().map(|(at, _)| float(element, &all[at.clone()])).collect()
                });
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
