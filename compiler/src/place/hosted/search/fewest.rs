//! How many blocks must stay with hosts so that the rest fits the GPUs.

use ir::id::DeviceId;

use super::{Block, Frame, Full, IN_PLACE, Search};
use crate::place::Offer;

/// Hosts, and pairs of a GPU and a host, from which on it takes long to find out how much each can hold if the hosts are
/// too small for all that may stay: where there are as many of both it is tried only when nothing fits otherwise.
const MANY_HOSTS: usize = 3;
const MANY_PAIRS: usize = 9;
/// A GPU may lack one part in so many of what a block takes there and still hold it: it needs less for its letters and
/// what it hands over.
const SPARED: u64 = 8;

impl Search<'_> {
    /// Whether hosts lack memory for everything that may stay, and less may not or is not tried: so many bytes on GPUs
    /// are too few for the rest.
    pub(super) fn overfills_hosts(&self, everything: &Offer, room: u64) -> bool {
        let is_host = |(lacking, _): (DeviceId, u64)| self.hosts.contains(&lacking);
        let (hosts, pairs) = (self.hosts.len(), self.hosts.len() * self.stages.len());
        let are_many = hosts >= MANY_HOSTS && pairs >= MANY_PAIRS;
        let is_tried = !are_many || self.task.target.is_exhaustive;
        everything.candidate.missing.is_some_and(is_host)
            && (!is_tried || room < self.beyond_hosts(everything))
    }

    /// What all hosts together lack.
    fn beyond_hosts(&self, offer: &Offer) -> u64 {
        self.hosts.iter().map(|&host| offer.devices[host].missing_bytes()).sum()
    }

    /// The fewest blocks of each stage that must stay so that the rest fits the GPUs, with the price; all of them where
    /// it never does.
    pub(super) fn fewest(&self, frame: &Frame, full: Full) -> Option<(Vec<usize>, Offer)> {
        // What has no price, because a device does not compute it, fits no more than what lacks memory.
        let offer =
            |counts: &[usize]| self.prices.offer(&self.arrange(counts, frame, IN_PLACE)).ok();
        let all = self.all();
        let stage_of = |lacking| self.stages.iter().position(|(gpu, _)| *gpu == lacking);
        let Full { free, offer: everything } = full;
        let is_hopeless = everything.as_ref().is_some_and(|everything| {
            let missing = everything.candidate.missing;
            let gpu_lacks = missing.is_some_and(|(lacking, _)| !self.hosts.contains(&lacking));
            gpu_lacks || self.overfills_hosts(everything, free.iter().sum())
        });
        let whole = |all: Vec<usize>| {
            let everything = everything.or_else(|| offer(&all))?;
            Some((all, everything))
        };
        if is_hopeless {
            return whole(all);
        }
        // Blocks are much alike, so the first guess is off by little. A GPU may hold them in another format than hosts.
        let largest = |bytes: fn(&Block) -> u64| self.blocks.iter().map(bytes).max().unwrap_or(1);
        let (at_home, on_gpu) = (largest(|block| block.bytes), largest(|block| block.gpu_bytes));
        let guess = |(&all, &free): (&usize, &u64)| {
            all - usize::try_from(free / on_gpu).unwrap_or(all).min(all)
        };
        let mut counts: Vec<usize> = all.iter().zip(&free).map(guess).collect();
        // Where nothing else stays there is a block at least that does, and it may be any stage's.
        let stays = frame.head_stays || frame.caches.iter().any(|&count| count > 0);
        let least = usize::from(!stays);
        if least > 0 && counts.iter().all(|&count| count == 0) {
            counts[all.iter().position(|&all| all > 0)?] = 1;
        }
        let mut is_tight = vec![false; counts.len()];
        let mut best = loop {
            let Some(offer) = offer(&counts) else { return whole(all) };
            let Some((lacking, bytes)) = offer.candidate.missing else { break (counts, offer) };
            // At least so many blocks have these bytes.
            let blocks = |bytes: u64, of_block: u64| {
                usize::try_from(bytes.div_ceil(of_block)).unwrap_or(usize::MAX)
            };
            match stage_of(lacking) {
                Some(stage) if counts[stage] < all[stage] => {
                    counts[stage] =
                        counts[stage].saturating_add(blocks(bytes, on_gpu)).min(all[stage]);
                    is_tight[stage] = true;
                }
                // The guess leaves too much to the hosts.
                None if self.hosts.contains(&lacking) && !is_tight.contains(&true) => {
                    let fewer = blocks(self.beyond_hosts(&offer), at_home);
                    if fewer >= counts.iter().sum::<usize>() {
                        return whole(all);
                    }
                    for _ in 0..fewer {
                        let most = counts.iter_mut().max().expect("there are stages");
                        *most -= 1;
                    }
                }
                Some(_) | None => return whole(all),
            }
        };
        let staying_bytes =
            |counts: &[usize]| -> u64 { self.staying(counts).map(|block| block.gpu_bytes).sum() };
        for stage in (0..is_tight.len()).filter(|&stage| !is_tight[stage]) {
            while best.0[stage] > 0 && best.0.iter().sum::<usize>() > least {
                let mut fewer = best.0.clone();
                fewer[stage] -= 1;
                // To save time: what a GPU needs beside matrices is much the same with one block more or less, but for its
                // window, which goes with the last one.
                let more = staying_bytes(&best.0).saturating_sub(staying_bytes(&fewer));
                let free = best.1.devices[self.stages[stage].0].free_bytes();
                if fewer[stage] > 0 && free < more - more / SPARED {
                    break;
                }
                match offer(&fewer) {
                    Some(offer) if offer.fits() => best = (fewer, offer),
                    Some(_) | None => break,
                }
            }
        }
        Some(best)
    }
}
