//! Groups of devices that share layers.

use anyhow::Result;
use ir::id::DeviceId;
use rayon::prelude::*;

use super::are_alike;
use super::arrangement::Arrangement;
use super::group::{Group, filled};
use super::prices::{Priced, Prices};

/// Pairs are shared only among so few GPUs, nodes, or devices; beyond, groups of one kind come first.
const MOST_DEVICES_FOR_PAIRS: usize = 4;
/// GPUs of one kind, and those of all kinds but one, share layers by themselves where there are so few kinds.
const MOST_KINDS: usize = 3;
/// Groups of unlike members whose shares are tried otherwise than by speed, too.
const MOST_UNEVEN: usize = 3;

impl Prices<'_> {
    /// Groups that share layers: all GPUs, all NUMA nodes, everything, the fastest half of each, quarter and so on,
    /// GPUs of one kind, those of all kinds but one, and pairs where GPUs, nodes or all devices are few.
    pub(super) fn groups(&self, singles: &[Priced]) -> Vec<Priced> {
        let machine = &self.task.target.machine;
        let device = |priced: &Priced| priced.group.devices[0];
        let is_gpu = |priced: &&Priced| machine.devices[device(priced)].kind.is_gpu();
        let gpus: Vec<&Priced> = singles.iter().filter(is_gpu).collect();
        let nodes: Vec<&Priced> = singles.iter().filter(|priced| !is_gpu(priced)).collect();
        let mut sets = vec![gpus.clone(), nodes.clone(), singles.iter().collect()];
        // Fewer may be better: where heads are few, sums cost more with each member, or one has no memory for its
        // share.
        for all in [&gpus, &nodes] {
            let has_room = |priced: &&&Priced| self.free[device(priced)] > priced.buffers[0];
            let mut fastest: Vec<&Priced> = all.iter().filter(has_room).copied().collect();
            fastest.sort_by(|a, b| self.speed(b).total_cmp(&self.speed(a)));
            while fastest.len() > 1 {
                let is_in = |priced: &&&Priced| {
                    fastest.iter().any(|member| device(member) == device(priced))
                };
                sets.push(all.iter().filter(is_in).copied().collect());
                fastest.truncate(fastest.len() / 2);
            }
        }
        // Each kind by its first GPU. One of little memory or speed holds back all that it shares layers with.
        let mut kinds: Vec<DeviceId> = Vec::new();
        for gpu in &gpus {
            if !kinds.iter().any(|&kind| are_alike(machine, kind, device(gpu))) {
                kinds.push(device(gpu));
            }
        }
        for &kind in kinds.iter().filter(|_| kinds.len() <= MOST_KINDS) {
            let of_kind = |gpu: &&&Priced| are_alike(machine, kind, device(gpu));
            let (these, others): (Vec<&Priced>, Vec<&Priced>) = gpus.iter().partition(of_kind);
            sets.extend([these, others]);
        }
        // A host or two beside some GPUs do not make these too many, nor GPUs the nodes.
        for few in [&gpus, &nodes, &singles.iter().collect()] {
            if few.len() > MOST_DEVICES_FOR_PAIRS {
                continue;
            }
            for (index, first) in few.iter().enumerate() {
                sets.extend(few[index + 1..].iter().map(|second| vec![*first, *second]));
            }
        }
        let mut groups: Vec<Group> = Vec::new();
        for set in sets.into_iter().filter(|set| set.len() > 1) {
            let group = Group {
                devices: set.iter().map(|priced| priced.group.devices[0]).collect(),
                shares: set.iter().map(|priced| self.speed(priced)).collect(),
            };
            if !groups.iter().any(|known| known.devices == group.devices) {
                groups.push(group);
            }
        }
        // A group that cannot share this model is no candidate.
        groups.par_iter().filter_map(|group| self.price(group).ok()).collect()
    }

    /// The fastest of groups with other shares than by their members' speed alone.
    pub(super) fn uneven(&self, mut groups: Vec<&Priced>) -> Result<Vec<Arrangement>> {
        groups.sort_by(|a, b| self.speed(b).total_cmp(&self.speed(a)));
        let machine = &self.task.target.machine;
        let is_unlike = |priced: &&Priced| {
            let (first, others) = priced.group.devices.split_first().expect("a group has members");
            others.iter().any(|&other| !are_alike(machine, *first, other))
        };
        let unlike = groups.into_iter().filter(is_unlike).take(MOST_UNEVEN);
        let shared = unlike.map(|priced| {
            let arrangements = self.requested_groups(&priced.group.devices, None)?;
            // The first is by speed. Where memory decides, others come to the same.
            let mut known = Vec::new();
            let is_fresh = arrangements.into_iter().filter(|arrangement| {
                let shares = &arrangement.stages[0].0.shares;
                let settled = filled(shares, &self.most_shares(priced));
                let is_fresh = !known.iter().any(|known| are_close(known, &settled));
                known.push(settled);
                is_fresh
            });
            Ok(is_fresh.skip(1).collect::<Vec<_>>())
        });
        Ok(shared.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
    }

    /// The share of the model that each member of a group has the memory for, if what it holds is in proportion to its
    /// share.
    fn most_shares(&self, priced: &Priced) -> Vec<f64> {
        let Group { devices, shares } = &priced.group;
        let all: f64 = shares.iter().sum();
        let most = |(member, share): (usize, &f64)| {
            let held: u64 = priced.bytes.iter().map(|unit| unit[member]).sum();
            let room = self.free[devices[member]].saturating_sub(priced.buffers[member]);
            share / all * room as f64 / held.max(1) as f64
        };
        shares.iter().enumerate().map(most).collect()
    }

    /// Whether the members of a group have the memory for the whole model in some shares: as much as it takes on the one
    /// of them, of `singles`, where it takes least.
    pub(super) fn may_hold_all(&self, group: &Priced, singles: &[Priced]) -> bool {
        let members = &group.group.devices;
        let free = members.iter().map(|&member| self.free[member]).fold(0, u64::saturating_add);
        let alone = singles.iter().filter(|single| members.contains(&single.group.devices[0]));
        let taken = alone.map(|single| single.bytes.iter().map(|unit| unit[0]).sum::<u64>());
        taken.min().is_none_or(|least| least <= free)
    }
}

/// Whether shares, or that there are none, are so much the same that parts of a layer hardly differ.
fn are_close(a: &Option<Vec<f64>>, b: &Option<Vec<f64>>) -> bool {
    /// Of the larger one.
    const CLOSE: f64 = 0.01;
    match (a, b) {
        (Some(a), Some(b)) => a.iter().zip(b).all(|(a, b)| (a - b).abs() <= CLOSE * a.max(*b)),
        (a, b) => a.is_none() && b.is_none(),
    }
}
