//! How many caches are tried with hosts: a layer's weights may be worth more in their place on a GPU.
//!
//! - Decode attends where the cache is: beside matrices that stay as well, that spares activations a crossing. In
//!   prefill the GPU borrows the cache.
//! - Those that are small beside a GPU's memory stay only where it lacks that.

use ir::id::DeviceId;

use super::{Block, Frame, IN_PLACE, Search};
use crate::place::Offer;

/// Caches that take less than one part in so many of a GPU's memory are all on it, if they fit.
const SMALL: u64 = 64;
/// Caches that take more than one part in so many are tried in halves as well; of others the fewest, and all.
const LARGE: u64 = 8;

impl Search<'_> {
    /// Nothing but windows decided.
    pub(super) fn without_caches(&self, windows: Vec<u64>) -> Frame {
        let stages = self.stages.len();
        Frame { windows, caches: vec![0; stages], cache_bytes: vec![0; stages], head_stays: false }
    }

    /// What is tried beside a frame that keeps all caches on GPUs: as many with hosts as GPUs lack the memory for, and
    /// more; and without windows as many as leave the room for all matrices.
    pub(super) fn with_caches(&self, without: &Frame, is_rough: bool) -> Vec<Frame> {
        let all = self.all();
        let Ok(everything) = self.prices.offer(&self.arrange(&all, without, IN_PLACE)) else {
            return Vec::new();
        };
        let held = |stage: usize| &everything.devices[self.stages[stage].0];
        let is_small = |stage: usize| held(stage).cache_bytes < held(stage).capacity_bytes / SMALL;
        let is_lacking = |stage: usize| held(stage).missing_bytes() > 0;
        let stages = 0..all.len();
        if stages.clone().all(|stage| is_small(stage) && !is_lacking(stage)) {
            return Vec::new();
        }
        // Layers are much alike.
        let of_layer = |stage: usize| held(stage).cache_bytes / self.layers[stage].max(1) as u64;
        let cache_bytes: Vec<u64> = stages.map(of_layer).collect();
        let fewest = self.enough(&everything, &cache_bytes);
        let is_large = |stage: usize| held(stage).cache_bytes > held(stage).capacity_bytes / LARGE;
        let halves = match is_rough {
            true => &[0][..],
            false if (0..all.len()).any(is_large) => &[0, 1, 2],
            false => &[0, 2],
        };
        let counts = halves.iter().map(|half| {
            let each = fewest.iter().zip(&all);
            each.map(|(&few, &all)| few.max(all * half / 2)).collect()
        });
        let mut counts: Vec<Vec<usize>> = counts.collect();
        counts.dedup();
        counts.retain(|counts| counts.iter().any(|&count| count > 0));
        let frame = |without: &Frame, caches| {
            let cache_bytes = cache_bytes.clone();
            Frame { caches, cache_bytes, ..without.clone() }
        };
        let mut frames: Vec<Frame> =
            counts.into_iter().map(|counts| frame(without, counts)).collect();
        let no_windows = Frame { windows: vec![0; all.len()], ..without.clone() };
        if !is_rough
            && let Ok(nothing) =
                self.prices.offer(&self.arrange(&vec![0; all.len()], &no_windows, IN_PLACE))
        {
            let enough = self.enough(&nothing, &cache_bytes);
            let can_be_enough = |stage: usize| {
                let borrowed = cache_bytes[stage];
                nothing.devices[self.stages[stage].0].missing_bytes() + borrowed
                    <= borrowed * all[stage] as u64
            };
            if (0..all.len()).all(can_be_enough) {
                frames.push(frame(&no_windows, enough));
            }
        }
        frames
    }

    /// The fewest caches of each stage that leave the memory that an offer lacks; all of them where they do not.
    fn enough(&self, offer: &Offer, cache_bytes: &[u64]) -> Vec<usize> {
        let of_stage = |(((gpu, _), &bytes), all): (((&DeviceId, _), &u64), usize)| {
            let lacking = offer.devices[*gpu].missing_bytes();
            // What borrows takes the room of one more.
            let window = if lacking > 0 { bytes } else { 0 };
            let count = (lacking + window).div_ceil(bytes.max(1));
            usize::try_from(count).unwrap_or(all).min(all)
        };
        let stages = self.stages.iter().map(|(gpu, units)| (gpu, units));
        stages.zip(cache_bytes).zip(self.all()).map(of_stage).collect()
    }

    /// The blocks whose caches stay, so many of each stage: evenly spread among those whose matrices do, then among the
    /// others.
    pub(super) fn caching(&self, counts: &[usize], caches: &[usize]) -> Vec<&Block> {
        let mut caching = Vec::new();
        for (stage, (&count, &caches)) in counts.iter().zip(caches).enumerate() {
            let all = self.blocks_of(stage).count();
            let blocks = self.blocks_of(stage).enumerate();
            let blocks = blocks.filter(|(_, block)| !block.attentions.is_empty());
            let (staying, others): (Vec<_>, Vec<_>) =
                blocks.partition(|(index, _)| is_chosen(*index, count, all));
            let beside = caches.min(staying.len());
            let apart = (caches - beside).min(others.len());
            for (blocks, count) in [(&staying, beside), (&others, apart)] {
                let chosen = |index: &usize| is_chosen(*index, count, blocks.len());
                caching.extend((0..blocks.len()).filter(chosen).map(|index| blocks[index].1));
            }
        }
        caching
    }
}

/// Whether one of `all` is among `count` of them that are evenly spread, the first ones late.
pub(super) fn is_chosen(index: usize, count: usize, all: usize) -> bool {
    (index + 1) * count / all > index * count / all
}
