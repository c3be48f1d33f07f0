//! The search for what stays beside some GPUs: how many blocks and caches, how large a fetch window, how much decode
//! fetches.

mod arrange;
mod blocks;
mod caches;
mod fewest;
mod head;

use std::collections::BTreeSet;
use std::ops::Range;

use ir::id::{DeviceId, NodeId, WeightId};
use rayon::prelude::*;

pub(super) use self::blocks::Kept;
use self::blocks::{Beside, Block, Member};
use self::caches::is_chosen;
use self::head::Head;
use super::share::share;
use super::{Hosted, fillable_bytes, host_cost, hosts};
use crate::place::arrangement::Arrangement;
use crate::place::prices::{Prices, Times};
use crate::place::{Offer, Room};
use crate::task::Task;

/// Which offers a search makes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Wanted {
    /// Those worth comparing with one of that score.
    Worth(u64),
    /// Those that may be better than one of that score: nobody hears of the others.
    Better(u64),
}

impl Wanted {
    /// The same where those offers are made.
    fn beside<'o>(self, offers: impl Iterator<Item = &'o Offer>) -> Self {
        match self {
            Self::Worth(_) => self,
            Self::Better(best) => {
                let fitting = offers.filter(|offer| offer.fits());
                Self::Better(fitting.map(|offer| offer.score).fold(best, u64::min))
            }
        }
    }
}

/// How much decode fetches.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Fetching {
    /// Share of the bytes that stay.
    share: f64,
    /// Whether blocks are fetched as a whole; else each node by itself.
    in_blocks: bool,
}

/// What is decided before the blocks that stay are counted.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Frame {
    /// Bytes of each stage's fetch window.
    windows: Vec<u64>,
    /// Blocks of each stage whose caches stay.
    caches: Vec<usize>,
    /// Bytes of the caches of one block of each stage.
    cache_bytes: Vec<u64>,
    /// Whether the head does too.
    head_stays: bool,
}

/// What is known of a frame in which all blocks that may stay do.
struct Full {
    /// Bytes that each stage's GPU has left.
    free: Vec<u64>,
    /// Its price; `None` where it fits and was not worked out.
    offer: Option<Offer>,
}

/// The home computes all that stays.
const IN_PLACE: Fetching = Fetching { share: 0.0, in_blocks: true };

/// The search for the best arrangement beside some GPUs.
pub(super) struct Search<'a> {
    prices: &'a Prices<'a>,
    task: &'a Task<'a>,
    /// GPUs, each with a range of units.
    stages: Vec<(DeviceId, Range<usize>)>,
    hosts: Vec<DeviceId>,
    /// Bytes of each host that are not pinned.
    free: Vec<u64>,
    /// For each stage what matrices cost beside its GPU on each host.
    costs: Vec<Vec<u64>>,
    kept: Kept,
    blocks: Vec<Block>,
    /// Nodes that only look rows up, and their tables, which are as well on a NUMA node as on the GPU.
    lookups: Vec<(NodeId, WeightId)>,
    head: Option<Head>,
    /// For each stage bytes of windows that are tried, the largest first; none at last.
    rungs: Vec<Vec<u64>>,
    /// Layers with attention of each stage.
    layers: Vec<usize>,
}

impl<'a> Search<'a> {
    /// `None` where nothing can stay, or no NUMA node computes its format.
    pub(super) fn new(prices: &'a Prices<'a>, gpus: &[DeviceId], kept: Kept) -> Option<Self> {
        let &Prices { task, units, .. } = prices;
        let hosts = hosts(task, gpus);
        let stages = share(task, units, gpus)?;
        let beside = Beside { prices, stages: &stages, hosts: &hosts };
        let blocks = beside.blocks(kept)?;
        if blocks.is_empty() {
            return None;
        }
        let lookups = beside.lookups();
        let head = Head::new(&beside, &lookups);
        let of_stage = |stage: usize| blocks.iter().filter(move |block| block.stage == stage);
        let rungs = (0..stages.len()).map(|stage| rungs(of_stage(stage))).collect();
        let layers = (0..stages.len()).map(|stage| beside.attentions(stage)).collect();
        let cost = |gpu: DeviceId| hosts.iter().map(move |&host| host_cost(task, host, gpu));
        let costs = stages.iter().map(|(gpu, _)| cost(*gpu).collect()).collect();
        let free = hosts.iter().map(|&host| prices.free[host]).collect();
        Some(Self {
            prices,
            task,
            stages,
            hosts,
            free,
            costs,
            kept,
            blocks,
            lookups,
            head,
            rungs,
            layers,
        })
    }

    /// The offers that are wanted, or a rough one of them.
    pub(super) fn offers(&self, is_rough: bool, wanted: Wanted) -> Vec<Offer> {
        // Whatever else stays takes more of hosts: none fits if these lack more than all that GPUs have, or are so many
        // that less is not tried yet.
        let devices = &self.task.target.machine.devices;
        let room = self.stages.iter().map(|(gpu, _)| devices[*gpu].memory_bytes).sum();
        let largest = self.fitting(self.without_caches(self.windows(0)));
        if let Some((_, everything)) = &largest
            && self.overfills_hosts(everything, room)
        {
            return vec![everything.clone()];
        }
        let none = self.rungs.iter().map(Vec::len).max().unwrap_or(1) - 1;
        let rungs = if is_rough { vec![0] } else { vec![none, 1, 0] };
        let frames = rungs.iter().map(|&rung| self.without_caches(self.windows(rung))).collect();
        let mut tried: Vec<Frame> = Vec::new();
        let mut within = |frames, fetching: usize, wanted| {
            let fetching = if is_rough { 0 } else { fetching };
            self.offers_within(frames, largest.as_ref(), &mut tried, fetching, wanted)
        };
        let mut found = within(frames, rungs.len(), wanted);
        let windows = self.windows_beside(&found, &rungs, is_rough);
        let sizes = windows.len();
        let bases = windows.into_iter().map(|windows| self.without_caches(windows));
        let frames = bases.flat_map(|base| self.with_caches(&base, is_rough));
        let beside = |found: &[(Frame, Offer)]| wanted.beside(found.iter().map(|(_, offer)| offer));
        found.extend(within(frames.collect(), sizes, beside(&found)));
        let frames = self.with_head(&found, &rungs, is_rough);
        found.extend(within(frames, sizes, beside(&found)));
        found.into_iter().map(|(_, offer)| offer).collect()
    }

    /// The windows that are tried where more than matrices stays: those that are best so far, and larger ones if all
    /// together they are less than each GPU's largest matrix. Any where nothing fits.
    fn windows_beside(
        &self,
        found: &[(Frame, Offer)],
        rungs: &[usize],
        is_rough: bool,
    ) -> Vec<Vec<u64>> {
        let any = rungs.iter().map(|&rung| self.windows(rung));
        let Some((Frame { windows: own, .. }, _)) = best(found) else { return any.collect() };
        let sum = |windows: &[u64]| windows.iter().sum::<u64>();
        let is_enough = is_rough || sum(own) >= sum(&self.windows(1));
        let larger = any.filter(|windows| !is_enough && sum(windows) > sum(own));
        [own.clone()].into_iter().chain(larger).collect()
    }

    /// The offers within frames that do not come out as one of `tried`, to which they are added. Decode fetches in
    /// `fetching` of them at most: in the best where the home computes all. `largest` is the frame of the largest
    /// windows, with its price where all blocks stay.
    fn offers_within(
        &self,
        frames: Vec<Frame>,
        largest: Option<&(Frame, Offer)>,
        tried: &mut Vec<Frame>,
        fetching: usize,
        wanted: Wanted,
    ) -> Vec<(Frame, Offer)> {
        let full = |frame: Frame| {
            if let Some(full) = largest.and_then(|largest| self.below(largest, &frame)) {
                return Some((frame, full));
            }
            let (frame, offer) = self.fitting(frame)?;
            let free = self.stages.iter().map(|(gpu, _)| offer.devices[*gpu].free_bytes());
            Some((frame, Full { free: free.collect(), offer: Some(offer) }))
        };
        let mut fresh: Vec<(Frame, Full)> = frames.into_par_iter().filter_map(full).collect();
        fresh.retain(|(frame, _)| {
            let is_fresh = !tried.contains(frame);
            if is_fresh {
                tried.push(frame.clone());
            }
            is_fresh
        });
        let fewest = |(frame, full): (Frame, Full)| {
            let (counts, base) = self.fewest(&frame, full)?;
            if counts.iter().any(|&count| count > 0) {
                return Some((frame, counts, base));
            }
            // Nothing is left to fetch.
            let frame = Frame { windows: vec![0; frame.windows.len()], ..frame };
            let base = self.prices.offer(&self.arrange(&counts, &frame, IN_PLACE)).ok()?;
            Some((frame, counts, base))
        };
        let mut bases: Vec<(Frame, Vec<usize>, Offer)> =
            fresh.into_par_iter().filter_map(fewest).collect();
        bases.sort_by_key(|(_, _, base)| (base.candidate.missing.is_some(), base.score));
        let may_fetch = |(frame, _, base): &&(Frame, Vec<usize>, Offer)| {
            base.fits() && frame.windows.iter().any(|&bytes| bytes > 0)
        };
        let fetching: Vec<_> = bases.iter().filter(may_fetch).take(fetching).collect();
        let wanted = wanted.beside(bases.iter().map(|(_, _, base)| base));
        let fetching = fetching.into_par_iter().filter_map(|(frame, counts, base)| {
            Some((frame.clone(), self.fetching(counts, frame, base, wanted)?))
        });
        let fetching: Vec<(Frame, Offer)> = fetching.collect();
        bases.into_iter().map(|(frame, _, base)| (frame, base)).chain(fetching).collect()
    }

    /// The windows of a rung.
    fn windows(&self, rung: usize) -> Vec<u64> {
        let window = |rungs: &Vec<u64>| rungs[rung.min(rungs.len() - 1)];
        self.rungs.iter().map(window).collect()
    }

    /// Whether each GPU of an offer has a window for its largest matrix, or nothing to fetch.
    pub(super) fn has_windows(&self, offer: &Offer) -> bool {
        let Some(hosted) = &offer.arrangement.hosted else { return true };
        let largest = self.windows(1);
        let has_window = |(stage, (gpu, _)): (usize, &(DeviceId, Range<usize>))| {
            let mut members = self.blocks_of(stage).flat_map(|block| &block.nodes);
            hosted.window_bytes[*gpu] >= largest[stage]
                || members.all(|member| hosted.nodes[member.node].is_none())
        };
        self.stages.iter().enumerate().all(has_window)
    }

    /// The frame, or the first below it in its windows beside which there is room for the rest, and the price with all
    /// blocks that may stay.
    fn fitting(&self, mut frame: Frame) -> Option<(Frame, Offer)> {
        let all = self.all();
        loop {
            let offer = self.prices.offer(&self.arrange(&all, &frame, IN_PLACE)).ok()?;
            let lacking = offer.candidate.missing;
            let stage = |(lacking, bytes): (DeviceId, u64)| {
                let stage = self.stages.iter().position(|(gpu, _)| *gpu == lacking)?;
                (frame.windows[stage] > 0).then_some((stage, bytes))
            };
            let Some((stage, bytes)) = lacking.and_then(stage) else {
                return Some((frame, offer));
            };
            let most = frame.windows[stage].saturating_sub(bytes);
            let lower = self.rungs[stage].iter().find(|&&window| window <= most);
            frame.windows[stage] = lower.copied().unwrap_or(0);
        }
    }

    /// A frame with all blocks that may stay, where it differs from `larger`, which fits, in smaller windows alone. `None`
    /// where hosts, which compute more without windows, have little to spare.
    fn below(&self, (larger, offer): &(Frame, Offer), frame: &Frame) -> Option<Full> {
        let devices = &self.task.target.machine.devices;
        let has_room =
            |&host: &DeviceId| offer.devices[host].needed_bytes() <= fillable_bytes(&devices[host]);
        let with_larger = Frame { windows: larger.windows.clone(), ..frame.clone() };
        let smaller = larger.windows.iter().zip(&frame.windows);
        let less: Option<Vec<u64>> = smaller.map(|(all, part)| all.checked_sub(*part)).collect();
        let less = less.filter(|_| with_larger == *larger && frame != larger)?;
        let free = |((gpu, _), less): (&(DeviceId, Range<usize>), u64)| {
            offer.devices[*gpu].free_bytes() + less
        };
        let is_known = offer.fits() && self.hosts.iter().all(has_room);
        is_known
            .then(|| Full { free: self.stages.iter().zip(less).map(free).collect(), offer: None })
    }

    /// What GPUs have left, beside their windows, when all that may stay does.
    pub(super) fn rooms(&self, hosted: &Hosted) -> Vec<Room> {
        let windows = self.stages.iter().map(|(gpu, _)| hosted.window_bytes[*gpu]).collect();
        let stays = |node: &NodeId| hosted.nodes[*node].is_some();
        let keeps_cache = |block: &&Block| block.attentions.iter().any(stays);
        let caches = |stage: usize| self.blocks_of(stage).filter(keeps_cache).count();
        let caches = (0..self.stages.len()).map(caches).collect();
        let head_stays = self.head.as_ref().is_some_and(|head| head.stays(hosted));
        let frame = Frame { caches, head_stays, ..self.without_caches(windows) };
        let Ok(offer) = self.prices.offer(&self.arrange(&self.all(), &frame, IN_PLACE)) else {
            return Vec::new();
        };
        let room = |(device, units): &(DeviceId, Range<usize>)| {
            let bytes = offer.devices[*device].free_bytes();
            Room { device: *device, units: units.clone(), bytes }
        };
        self.stages.iter().map(room).collect()
    }

    /// The best offer in which decode fetches a share of what stays.
    ///
    /// The best share is near the one for which the link and the home take equally long; whether whole blocks or single
    /// nodes are fetched is decided there. `None` where even that share does not make of `base`, in which the home
    /// computes all, what is wanted.
    fn fetching(
        &self,
        counts: &[usize],
        frame: &Frame,
        base: &Offer,
        wanted: Wanted,
    ) -> Option<Offer> {
        let (Wanted::Worth(best) | Wanted::Better(best)) = wanted;
        let members = || self.staying(counts).flat_map(|block| &block.nodes);
        let fetch: f64 = members().map(|member| member.fetch_nanos).sum();
        let home: f64 = members().map(|member| member.home_nanos).sum();
        // Without fetches decode takes what the home takes, and what no fetch shortens.
        let even = (base.decode_nanos as f64 / (fetch + home).max(1.0)).min(1.0);
        let times = Times { prefill: base.prompt_nanos, decode: (even * fetch) as u64 };
        if times.score(self.task.target) > best {
            return None;
        }
        let mut tried: Vec<(u64, Arrangement)> = Vec::new();
        // Prompts are fetched for as in `base`.
        let mut try_share = |share: f64, in_blocks: bool| {
            let fetching = Fetching { share: share.min(1.0), in_blocks };
            let arrangement = self.arrange(counts, frame, fetching);
            // Shares that differ by little may come to the same.
            if let Some((score, _)) = tried.iter().find(|(_, known)| *known == arrangement) {
                return *score;
            }
            let decode = self.prices.judged_decode_nanos(&arrangement).ok();
            let score = |decode| Times { decode, ..times }.score(self.task.target);
            let score = decode.map_or(u64::MAX, score);
            tried.push((score, arrangement));
            score
        };
        let (blocks, nodes) = (try_share(even, true), try_share(even, false));
        for factor in [0.85, 0.9, 0.95, 1.05, 1.1] {
            try_share(even * factor, blocks <= nodes);
        }
        if matches!(wanted, Wanted::Better(_)) {
            tried.retain(|(score, _)| *score < best);
        }
        tried.sort_by_key(|(score, _)| *score);
        let offer = |(_, arrangement): &(u64, Arrangement)| self.prices.offer(arrangement).ok();
        tried.iter().filter_map(offer).find(Offer::fits)
    }

    /// All blocks of each stage.
    fn all(&self) -> Vec<usize> {
        (0..self.stages.len()).map(|stage| self.blocks_of(stage).count()).collect()
    }

    fn blocks_of(&self, stage: usize) -> impl Iterator<Item = &Block> {
        self.blocks.iter().filter(move |block| block.stage == stage)
    }

    /// The blocks that stay, so many of each stage, evenly spread; the first ones come late, so that the link has a
    /// lead.
    fn staying(&self, counts: &[usize]) -> impl Iterator<Item = &Block> {
        counts.iter().enumerate().flat_map(|(stage, &count)| {
            let all = self.blocks_of(stage).count();
            let blocks = self.blocks_of(stage).enumerate();
            blocks.filter(move |(index, _)| is_chosen(*index, count, all)).map(|(_, block)| block)
        })
    }
}

/// The best of what fits.
fn best(found: &[(Frame, Offer)]) -> Option<&(Frame, Offer)> {
    found.iter().filter(|(_, offer)| offer.fits()).min_by_key(|(_, offer)| offer.score)
}

/// Windows of a stage with those blocks: two of the largest node, that node, each smaller one, and none.
///
/// One matrix is read while the next one comes; larger windows take room from blocks. What does not fit a window is
/// computed where it lies.
fn rungs<'b>(blocks: impl Iterator<Item = &'b Block>) -> Vec<u64> {
    let mut nodes = BTreeSet::from([0]);
    nodes.extend(blocks.flat_map(|block| &block.nodes).map(|member| member.window_bytes));
    let two = nodes.last().map(|largest| 2 * largest);
    two.into_iter().chain(nodes.into_iter().rev()).collect()
}
