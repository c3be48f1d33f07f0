//! Shares of layers that fit the memory of the devices that share them.

use anyhow::Result;
use ir::captured::lacks_room_for_prompts;
use ir::forecast::DeviceForecast;
use ir::id::{DeviceId, Table};
use ir::plan::Plan;

use crate::emit::emit;
use crate::graphs::Graphs;
use crate::place::arrangement::Arrangement;
use crate::place::group::filled;
use crate::place::offer::{layouts, scores};
use crate::place::prices::{Prices, missing, priced_batches};

/// Parts of their room that devices which lacked memory are to fill, one after the other until they lack none: parts of
/// a layer are whole heads and blocks.
const FILLED: [f64; 4] = [0.99, 0.97, 0.97, 0.97];
/// The part that leaves a device what none can do without.
pub(super) const LEAST: f64 = 0.0;
/// Shifts of shares between two schedules: each takes what the last one found missing.
const SHIFTS: usize = 6;

/// An arrangement with its graphs, and its plan for the batches that placements are priced with. Where a member of a
/// shared group lacks memory, shares shift to the others as far as that helps.
///
/// # Errors
/// When a device does not compute what it is to.
pub(super) fn fitted(prices: &Prices<'_>, arrangement: &Arrangement) -> Result<(Laid, Plan)> {
    let first = Laid::new(prices, arrangement.clone())?;
    if !arrangement.can_shift() {
        let plan = first.scheduled(prices)?;
        return Ok((first, plan));
    }
    // What is held is most of what lacks memory, and known before anything is scheduled; the rest is much as it was
    // when the group was priced, if it was.
    let mut expected = first.held(prices)?;
    for (group, _) in &arrangement.stages {
        let buffers = prices.known_buffers(&group.devices).unwrap_or_default();
        for (&device, bytes) in group.devices.iter().zip(buffers) {
            expected[device].buffer_bytes = bytes;
        }
    }
    let [most, ..] = FILLED;
    let by_held = first.shifted(prices, expected, most);
    // Some shares cut what a device then does not compute.
    let scheduled = by_held.and_then(|laid| Some((laid.scheduled(prices).ok()?, laid)));
    let (plan, laid) = match scheduled {
        Some(scheduled) => scheduled,
        None => (first.scheduled(prices)?, first),
    };
    let mut tried = vec![(laid, plan)];
    for part in FILLED {
        let (last, plan) = tried.last_mut().expect("the first is there");
        let Some(next) = last.shifted(prices, with_graphs(plan), part) else { break };
        let Ok(plan) = next.scheduled(prices) else { break };
        tried.push((next, plan));
    }
    // Where nothing fits, what lacks least is told. To have room for graphs is not always worth unlike shares.
    let cost = |(_, plan): &(Laid, Plan)| {
        let lacking = missing(plan).map_or(0, |(_, bytes)| bytes);
        (lacking, scores(prices.task, plan, &plan.forecast.programs[0]).score)
    };
    Ok(tried.into_iter().min_by_key(cost).expect("the first is there"))
}

/// What devices would take with the graphs of prompts, where a plan can have them.
fn with_graphs(plan: &mut Plan) -> Table<DeviceId, DeviceForecast> {
    if !lacks_room_for_prompts(plan) {
        return plan.forecast.devices.clone();
    }
    plan.captures_prompts = true;
    let devices = ir::check::memory(plan);
    plan.captures_prompts = false;
    devices
}

/// An arrangement with its graphs.
pub(super) struct Laid {
    pub(super) arrangement: Arrangement,
    pub(super) graphs: Graphs,
}

impl Laid {
    fn new(prices: &Prices<'_>, arrangement: Arrangement) -> Result<Self> {
        let layouts = layouts(prices, &arrangement)?;
        let graphs = Graphs::new(prices.task, layouts, &mut |_, _| ())?;
        Ok(Self { arrangement, graphs })
    }

    fn scheduled(&self, prices: &Prices<'_>) -> Result<Plan> {
        emit(prices.task, &self.graphs, &priced_batches(prices.task.target))
    }

    /// What devices hold before anything runs.
    fn held(&self, prices: &Prices<'_>) -> Result<Table<DeviceId, DeviceForecast>> {
        Ok(emit(prices.task, &self.graphs, &[])?.forecast.devices)
    }

    /// The same with shares shifted until no device lacks memory of those that take `taken` now, if what they take
    /// beside weights and caches shrinks with these: so that those that lacked some fill `part` of their room. `None`
    /// where nothing lacks, or nothing can change.
    fn shifted(
        &self,
        prices: &Prices<'_>,
        mut taken: Table<DeviceId, DeviceForecast>,
        part: f64,
    ) -> Option<Self> {
        let mut last: Option<Self> = None;
        for _ in 0..SHIFTS {
            let mut arrangement = last.as_ref().unwrap_or(self).arrangement.clone();
            let lacks = taken.rows().iter().any(|device| device.missing_bytes() > 0);
            if !lacks || !arrangement.shift_shares(&taken, part, prices.task.target.is_exhaustive) {
                break;
            }
            let Ok(laid) = Self::new(prices, arrangement) else { break };
            let Ok(held) = laid.held(prices) else { break };
            for (taken, held) in taken.rows_mut().iter_mut().zip(held.rows()) {
                let shrunk = held_bytes(held) as f64 / held_bytes(taken).max(1) as f64;
                for beside in [&mut taken.buffer_bytes, &mut taken.workspace_bytes] {
                    *beside = (*beside as f64 * shrunk.min(1.0)) as u64;
                }
                (taken.weight_bytes, taken.cache_bytes) = (held.weight_bytes, held.cache_bytes);
            }
            last = Some(laid);
        }
        last
    }
}

fn held_bytes(bytes: &DeviceForecast) -> u64 {
    bytes.weight_bytes + bytes.cache_bytes
}

impl Arrangement {
    /// Gives work of the members of shared groups that lack memory to those that have some left, so that what a member
    /// keeps is expected to fill `part` of its room.
    ///
    /// False where nothing can change. Where all members of a group together lack memory nothing does, or, in vain,
    /// each comes to lack as large a part of its room.
    pub(super) fn shift_shares(
        &mut self,
        taken: &Table<DeviceId, DeviceForecast>,
        part: f64,
        in_vain: bool,
    ) -> bool {
        /// A share of which every axis gives one part.
        const ONE_PART: f64 = 1e-6;
        if !self.can_shift() {
            return false;
        }
        let mut changed = false;
        for (group, _) in self.stages.iter_mut().filter(|(group, _)| group.devices.len() > 1) {
            let sum: f64 = group.shares.iter().sum();
            // How much of its own share each member has room for.
            let room = |device: &DeviceId| {
                let bytes = &taken[*device];
                let beside = bytes.needed_bytes() - held_bytes(bytes);
                let room = bytes.capacity_bytes.saturating_sub(beside);
                room as f64 / held_bytes(bytes).max(1) as f64
            };
            let rooms: Vec<f64> = group.devices.iter().map(room).collect();
            if rooms.iter().all(|room| *room >= 1.0) {
                continue;
            }
            let bytes = |bytes: fn(&DeviceForecast) -> u64| -> u64 {
                group.devices.iter().map(|&device| bytes(&taken[device])).sum()
            };
            // Bytes are not the same where formats differ, nor is what is held in proportion to a small share.
            let fitting: Vec<f64> =
                group.shares.iter().zip(&rooms).map(|(share, room)| share / sum * room).collect();
            let all_have_too_little = fitting.iter().sum::<f64>() < 1.0
                && bytes(DeviceForecast::missing_bytes) > bytes(DeviceForecast::free_bytes);
            if all_have_too_little && part > LEAST {
                // Then all lack a like part of their room.
                if in_vain {
                    group.shares = fitting.into_iter().map(|share| share.max(ONE_PART)).collect();
                    changed = true;
                }
                continue;
            }
            // What is taken goes to those with room for it; to all others where that seems too little.
            let most = |others_are_limited: bool| -> Vec<f64> {
                let members = rooms.iter().zip(&group.shares);
                let most = members.map(|(&room, share)| match room < 1.0 {
                    true => (share / sum * room * part).max(ONE_PART),
                    false if others_are_limited => share / sum * (room * part).max(1.0),
                    false => 1.0,
                });
                most.collect()
            };
            let mut tried = [true, false].into_iter();
            let shares = tried.find_map(|limited| filled(&group.shares, &most(limited)));
            let Some(shares) = shares else { continue };
            group.shares = shares;
            changed = true;
        }
        changed
    }
}

#[cfg(test)]
mod tests {
    use ir::id::{Few, Id as _};

    use super::*;
    use crate::place::group::Group;

    /// What becomes of equal shares where each member holds 100 bytes, takes 20 beside them and has so many in all.
    fn shifted(capacities: &[u64], part: f64, in_vain: bool) -> Option<Vec<f64>> {
        let devices: Few<DeviceId> = (0..capacities.len()).map(DeviceId::from_index).collect();
        let group = Group { devices, shares: vec![1.0; capacities.len()] };
        let mut arrangement =
            Arrangement { stages: vec![(group, 0..1)], has_fixed_shares: false, hosted: None };
        let taken = capacities.iter().map(|&capacity_bytes| DeviceForecast {
            weight_bytes: 90,
            cache_bytes: 10,
            buffer_bytes: 20,
            capacity_bytes,
            ..DeviceForecast::default()
        });
        let is_shifted = arrangement.shift_shares(&taken.collect(), part, in_vain);
        is_shifted.then(|| arrangement.stages.remove(0).0.shares)
    }

    fn check(capacities: &[u64], part: f64, expected: Option<&[f64]>) {
        let near = |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-5);
        match (shifted(capacities, part, false), expected) {
            (Some(found), Some(expected)) => assert!(near(&found, expected), "{found:?}"),
            (found, expected) => assert_eq!(found.as_deref(), expected),
        }
    }

    #[test]
    fn shares_go_to_those_with_room_for_them() {
        check(&[120, 120], 1.0, None);
        check(&[70, 520], 1.0, Some(&[0.25, 0.75]));
        check(&[70, 520], 0.8, Some(&[0.2, 0.8]));
        // The second has room for as much again as it has, the third for any.
        check(&[50, 220, 920], 1.0, Some(&[0.1, 0.45, 0.45]));
        check(&[50, 140, 920], 1.0, Some(&[0.1, 0.4, 0.5]));
    }

    #[test]
    fn where_all_lack_memory_no_share_helps_but_the_least_is_asked_for() {
        check(&[70, 70], 1.0, None);
        check(&[70, 130], 1.0, None);
        check(&[70, 130], LEAST, Some(&[0.0, 1.0]));
        check(&[70, 70], LEAST, None);
        // In vain all come to lack a like part of their room.
        assert_eq!(shifted(&[70, 130], 1.0, true), Some(vec![0.25, 0.55]));
    }
}
