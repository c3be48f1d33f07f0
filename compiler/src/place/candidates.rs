//! The arrangements worth pricing: one device, pipelines of devices and groups, shared layers.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context as _, Result, ensure};
use ir::forecast::DeviceForecast;
use ir::id::{DeviceId, NodeId, Table};
use ir::plan::Phase;
use rayon::prelude::*;

use crate::options::Objective;
use crate::part::WeightKey;
use crate::place::are_alike;
use crate::place::group::Group;
use crate::place::hosted::Hosted;
use crate::place::prices::{Pins, Priced, Times, handover, price_group};
use crate::place::stages::{Goal, cut};
use crate::place::units::Units;
use crate::task::Task;

/// Orders of devices that are tried for pipelines: all orders of five unlike devices.
const MOST_ORDERS: usize = 120;
/// Pipelines that are priced exactly: the best by the sums that they are cut by, from which exact prices hardly
/// depart. As many as there are orders of four unlike devices; each takes some milliseconds.
const MOST_PIPELINES: usize = 24;
/// Pipelines of one score that are priced.
const MOST_ALIKE: usize = 2;

/// Powers of devices' speeds that shares of a layer are tried in: what a share does not shorten, as launches and
/// crossings, is best made up for by a smaller share of the slow device.
const SHARE_EXPONENTS: [f64; 5] = [1.0, 1.2, 1.4, 1.7, 2.0];

/// Groups of devices, each with a range of units.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Arrangement {
    /// In the order they run.
    pub(crate) stages: Vec<(Group, Range<usize>)>,
    /// Whether the user fixed the shares of groups.
    pub(crate) has_fixed_shares: bool,
    /// What stays beside the GPUs, each of which is a stage.
    pub(crate) hosted: Option<Hosted>,
}

/// What groups of devices are priced with.
pub(crate) struct Prices<'a> {
    pub(super) task: &'a Task<'a>,
    pub(super) units: &'a Units,
    pub(super) pins: &'a Pins,
    /// Bytes that pinned nodes take are not there for stages.
    pub(super) free: Table<DeviceId, u64>,
    /// Groups that were priced before.
    known: Mutex<Vec<Priced>>,
}

impl<'a> Prices<'a> {
    /// Prices of the task.
    pub(crate) fn new(task: &'a Task<'a>, units: &'a Units, pins: &'a Pins) -> Self {
        let mut free: Table<DeviceId, u64> =
            task.target.machine.devices.rows().iter().map(|device| device.memory_bytes).collect();
        let mut seen = Vec::new();
        for (id, node) in task.model.layers.nodes() {
            let Some((device, _)) = pins[id] else { continue };
            for weight in node.work.weights() {
                let key = WeightKey::whole(task, weight, device);
                if !seen.contains(&key) {
                    free[device] = free[device].saturating_sub(key.bytes(task));
                    seen.push(key);
                }
            }
            if let Some(cache) = node.work.cache() {
                let cache = &task.model.caches[cache];
                let heads = (cache.kv_heads, cache.head_dim);
                let bytes = task.target.cache_bytes(device, heads);
                free[device] = free[device].saturating_sub(bytes);
            }
        }
        Self { task, units, pins, free, known: Mutex::default() }
    }

    /// Everything worth pricing when nothing is asked for.
    pub(crate) fn simple(&self) -> Result<Vec<Arrangement>> {
        let devices = self.task.target.machine.devices.ids();
        let alone: Vec<Group> = devices.map(Group::one).collect();
        // A device that cannot compute the format stays a candidate, so that the reason is told.
        let mut arrangements: Vec<Arrangement> =
            alone.iter().map(|group| self.whole(group.clone())).collect();
        let singles: Vec<Priced> =
            alone.par_iter().filter_map(|group| self.price(group).ok()).collect();
        let groups = self.groups(&singles);
        arrangements.extend(groups.iter().map(|priced| self.whole(priced.group.clone())));
        arrangements.extend(self.uneven(&groups)?);
        let sequences = self.sequences(&singles, &groups);
        for pipelines in self.pipelines_of(&sequences) {
            let fresh = pipelines.into_iter().filter(|pipeline| !arrangements.contains(pipeline));
            let fresh: Vec<Arrangement> = fresh.collect();
            arrangements.extend(fresh);
        }
        Ok(arrangements)
    }

    /// The best pipelines along sequences, by each goal. Runs of prompts overlap, which counts for throughput; steps of
    /// decode never do.
    fn pipelines_of(&self, sequences: &[Vec<&Priced>]) -> Vec<Vec<Arrangement>> {
        /// Limits of a stage's prefill, in percent of the most that the busiest stage takes of both at best.
        const LIMITS: [u64; 3] = [60, 80, 100];
        // Several goals find many of the same.
        let is_latency = self.task.target.objective == Objective::Latency;
        let most = if is_latency { MOST_PIPELINES } else { MOST_PIPELINES / 3 };
        let by = |goal| self.pipelines(sequences, goal, most);
        let with_sum = by(Goal::Sum).1;
        if is_latency {
            return vec![with_sum];
        }
        let (least, with_busiest) = by(Goal::Busiest);
        let limits = LIMITS.iter().filter_map(|percent| Some(least? / 100 * percent));
        let by_decode = limits.map(|most_prefill| by(Goal::Decode { most_prefill }).1);
        [with_sum, with_busiest].into_iter().chain(by_decode).collect()
    }

    /// The best pipelines along sequences, `most` of them, by a goal, and what the best is worth by it.
    fn pipelines(
        &self,
        sequences: &[Vec<&Priced>],
        goal: Goal,
        most: usize,
    ) -> (Option<u64>, Vec<Arrangement>) {
        let mut pipelines: Vec<(u64, Arrangement)> = Vec::new();
        for sequence in sequences {
            if let Some(pipeline) = self.pipeline(sequence, goal, false)
                && pipeline.1.stages.len() > 1
                && !pipelines.contains(&pipeline)
            {
                pipelines.push(pipeline);
            }
        }
        pipelines.sort_by_key(|(score, _)| *score);
        // Devices that are as fast in any order make many pipelines of one score.
        let mut alike = 0;
        let mut before = None;
        pipelines.retain(|(score, _)| {
            alike = if before.replace(*score) == Some(*score) { alike + 1 } else { 0 };
            alike < MOST_ALIKE
        });
        pipelines.truncate(most);
        let least = pipelines.first().map(|(score, _)| *score);
        (least, pipelines.into_iter().map(|(_, pipeline)| pipeline).collect())
    }

    /// Stages on these devices, all of them, as even in time as memory allows.
    pub(crate) fn requested_pipeline(&self, devices: &[DeviceId]) -> Result<Arrangement> {
        ensure!(
            devices.len() <= self.units.len(),
            "a pipeline of {} stages needs as many layers; the model can be cut into {}",
            devices.len(),
            self.units.len()
        );
        let priced: Vec<Priced> =
            devices.iter().map(|&device| self.price(&Group::one(device))).collect::<Result<_>>()?;
        let sequence: Vec<&Priced> = priced.iter().collect();
        for pair in devices.windows(2) {
            let names = (self.task.target.name(pair[0]), self.task.target.name(pair[1]));
            self.handover(pair[0], pair[1])
                .with_context(|| format!("no link leads from {} to {}", names.0, names.1))?;
        }
        // Nothing fits: stages by memory alone show how much is missing where.
        let pipeline = self.pipeline(&sequence, Goal::Busiest, true);
        Ok(pipeline.map_or_else(|| self.by_memory(&sequence), |(_, pipeline)| pipeline))
    }

    /// All layers shared by these devices, in these proportions or in some by their speed.
    pub(crate) fn requested_groups(
        &self,
        devices: &[DeviceId],
        shares: Option<Vec<f64>>,
    ) -> Result<Vec<Arrangement>> {
        let group = |shares: Vec<f64>| self.whole(Group { devices: devices.to_vec(), shares });
        if let Some(shares) = shares {
            return Ok(vec![Arrangement { has_fixed_shares: true, ..group(shares) }]);
        }
        let speed = |&device: &DeviceId| Ok(self.speed(&self.price(&Group::one(device))?));
        let speeds: Vec<f64> = devices.iter().map(speed).collect::<Result<_>>()?;
        let fastest = speeds.iter().copied().fold(0.0, f64::max);
        // Of devices that are alike all are the same.
        let exponents = if speeds.iter().all(|&speed| speed == fastest) {
            &SHARE_EXPONENTS[..1]
        } else {
            &SHARE_EXPONENTS
        };
        let shares =
            |exponent: &f64| speeds.iter().map(|speed| (speed / fastest).powf(*exponent)).collect();
        Ok(exponents.iter().map(|exponent| group(shares(exponent))).collect())
    }

    pub(super) fn whole(&self, group: Group) -> Arrangement {
        let stages = vec![(group, 0..self.units.len())];
        Arrangement { stages, has_fixed_shares: false, hosted: None }
    }

    /// All units on one group. A group is priced once.
    pub(super) fn price(&self, group: &Group) -> Result<Priced> {
        let known = || self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(priced) = known().iter().find(|priced| priced.group == *group) {
            return Ok(priced.clone());
        }
        let priced = price_group(self.task, self.units, self.pins, group)?;
        known().push(priced.clone());
        Ok(priced)
    }

    /// Work per time, in any scale.
    pub(super) fn speed(&self, priced: &Priced) -> f64 {
        let all = priced.times.iter().map(|times| times.request(self.task.target)).sum::<u64>();
        1.0 / (all.max(1) as f64)
    }

    /// Sequences of groups that pipelines are cut along.
    fn sequences<'p>(&self, singles: &'p [Priced], groups: &'p [Priced]) -> Vec<Vec<&'p Priced>> {
        let mut fastest: Vec<&Priced> = singles.iter().collect();
        fastest.sort_by(|a, b| self.speed(b).total_cmp(&self.speed(a)));
        let mut sequences = Vec::new();
        let machine = &self.task.target.machine;
        let device = |priced: &Priced| priced.group.devices[0];
        // Each by the first of its kind.
        let kind = |priced: &&Priced| {
            fastest.iter().position(|first| are_alike(machine, device(first), device(priced)))
        };
        let kinds: Vec<Option<usize>> = fastest.iter().map(kind).collect();
        let mut taken = vec![false; fastest.len()];
        self.orders(&fastest, &kinds, &mut taken, &mut Vec::new(), &mut sequences);
        for group in groups {
            let others = |priced: &&&Priced| {
                priced.group.devices.iter().all(|device| !group.group.devices.contains(device))
            };
            let rest: Vec<&Priced> = fastest.iter().filter(others).copied().collect();
            let other_groups = groups.iter().filter(|priced| others(&priced));
            for rest in other_groups.map(|other| vec![other]).chain([rest]) {
                if rest.is_empty() {
                    continue;
                }
                sequences.push([vec![group], rest.clone()].concat());
                sequences.push([rest, vec![group]].concat());
            }
        }
        sequences
    }

    /// Orders of single devices, the fastest first; devices of one kind are not exchanged.
    fn orders<'p>(
        &self,
        devices: &[&'p Priced],
        kinds: &[Option<usize>],
        taken: &mut [bool],
        begun: &mut Vec<usize>,
        found: &mut Vec<Vec<&'p Priced>>,
    ) {
        if devices.len() < 2 || found.len() == MOST_ORDERS {
            return;
        }
        if begun.len() == devices.len() {
            found.push(begun.iter().map(|&index| devices[index]).collect());
            return;
        }
        for next in 0..devices.len() {
            let alike = |earlier: usize| !taken[earlier] && kinds[earlier] == kinds[next];
            if taken[next] || (0..next).any(alike) {
                continue;
            }
            taken[next] = true;
            begun.push(next);
            self.orders(devices, kinds, taken, begun, found);
            begun.pop();
            taken[next] = false;
        }
    }

    /// The best pipeline of a sequence, and its score.
    fn pipeline(
        &self,
        sequence: &[&Priced],
        goal: Goal,
        uses_all: bool,
    ) -> Option<(u64, Arrangement)> {
        let handover = |from, to| self.handover(from, to);
        let (score, stages) =
            cut(self.task.target, sequence, handover, |device| self.free[device], goal, uses_all)?;
        let stages = stages
            .into_iter()
            .map(|(group, range)| (sequence[group].group.clone(), range))
            .collect();
        Some((score, Arrangement { stages, has_fixed_shares: false, hosted: None }))
    }

    /// As many units on each device as its memory takes, at least one; the rest on the last.
    fn by_memory(&self, sequence: &[&Priced]) -> Arrangement {
        let mut stages = Vec::new();
        let mut start = 0;
        for (index, priced) in sequence.iter().enumerate() {
            let after = sequence.len() - 1 - index;
            let mut left = self.free[priced.group.devices[0]].saturating_sub(priced.buffers[0]);
            let mut end = start;
            while end < self.units.len() - after {
                let unit = priced.bytes[end][0];
                if after > 0 && unit > left && end > start {
                    break;
                }
                left = left.saturating_sub(unit);
                end += 1;
            }
            stages.push((priced.group.clone(), start..end));
            start = end;
        }
        Arrangement { stages, has_fixed_shares: false, hosted: None }
    }

    fn handover(&self, from: DeviceId, to: DeviceId) -> Option<Times> {
        handover_of(self.task, from, to)
    }
}

/// Nanoseconds to hand an activation of the model's width from one device to another.
pub(crate) fn handover_of(task: &Task<'_>, from: DeviceId, to: DeviceId) -> Option<Times> {
    let (_, first) = task.model.layers.nodes().next()?;
    let ty = &task.model.layers.value(first.outputs[0]).ty;
    handover(&task.target.machine, task.target, ty, from, to)
}

impl Arrangement {
    /// The group of every node in a phase: its stage's, or that of its pin or of the home that computes it.
    pub(crate) fn groups(
        &self,
        units: &Units,
        pins: &Pins,
        phase: Phase,
    ) -> (Vec<Group>, Table<NodeId, usize>) {
        let mut groups: Vec<Group> = self.stages.iter().map(|(group, _)| group.clone()).collect();
        let mut group_of = Table::default();
        for (id, pin) in pins.iter() {
            let unit = units.of[id];
            let stage = self.stages.iter().position(|(_, range)| range.contains(&unit));
            let stage = stage.expect("stages cover all units");
            let hosting = self.hosted.as_ref().and_then(|hosted| hosted.nodes[id]);
            let home = hosting.filter(|hosting| !hosting.is_fetched(phase));
            let Some(device) = pin.as_ref().map(|pin| pin.0).or(home.map(|home| home.home)) else {
                group_of.push(stage);
                continue;
            };
            let alone = Group::one(device);
            let known = groups.iter().position(|group| *group == alone);
            group_of.push(known.unwrap_or_else(|| {
                groups.push(alone);
                groups.len() - 1
            }));
        }
        (groups, group_of)
    }

    /// The group of a unit's stage.
    pub(crate) fn group_of(&self, unit: usize) -> &Group {
        let stage = self.stages.iter().find(|(_, range)| range.contains(&unit));
        &stage.expect("stages cover all units").0
    }

    /// What it is, for people; pins that lead elsewhere are not passed over.
    pub(crate) fn name(&self, task: &Task<'_>, units: &Units, pins: &Pins) -> String {
        if pins.rows().iter().all(Option::is_some) {
            return "all as pinned".into();
        }
        let leads_elsewhere = pins.iter().any(|(id, pin)| {
            let group = self.group_of(units.of[id]);
            pin.as_ref().is_some_and(|(device, _)| group.devices != [*device])
        });
        let shape = self.shape(task);
        if leads_elsewhere { format!("{shape} but for pins") } else { shape }
    }

    /// Its stages, for people.
    fn shape(&self, task: &Task<'_>) -> String {
        let group = |group: &Group| {
            let names: Vec<&str> =
                group.devices.iter().map(|&device| task.target.name(device)).collect();
            names.join("+")
        };
        if let Some(hosted) = &self.hosted {
            return hosted.name.clone();
        }
        match self.stages.as_slice() {
            [(only, _)] if only.devices.len() == 1 => format!("all on {}", group(only)),
            [(only, _)] => format!("tensor parallel {}", group(only)),
            stages => {
                let names: Vec<String> = stages.iter().map(|(stage, _)| group(stage)).collect();
                format!("pipeline {}", names.join(" → "))
            }
        }
    }

    /// Whether other shares could help where memory lacks.
    fn can_shift(&self) -> bool {
        !self.has_fixed_shares && self.stages.iter().any(|(group, _)| group.devices.len() > 1)
    }

    /// The same with shares halfway to those of the other.
    pub(crate) fn halfway_to(&self, other: &Self) -> Self {
        let mut half = self.clone();
        for ((group, _), (to, _)) in half.stages.iter_mut().zip(&other.stages) {
            let [own, theirs] =
                [&group.shares, &to.shares].map(|shares| shares.iter().sum::<f64>());
            let shares = group.shares.iter().zip(&to.shares);
            let shares = shares.map(|(from, to)| (from / own + to / theirs) / 2.0);
            group.shares = shares.collect();
        }
        half
    }

    /// Gives the work that members of shared groups lack memory for to the members that have some left: as much as they
    /// are expected to lack, or all but what no member can do without.
    ///
    /// False where nothing can change.
    pub(crate) fn shift_shares(
        &mut self,
        held: &Table<DeviceId, DeviceForecast>,
        all: bool,
    ) -> bool {
        /// Parts are whole heads and blocks, so a share aims a little below the limit.
        const MARGIN: f64 = 0.97;
        /// A share of which every axis gives one part.
        const LEAST: f64 = 1e-6;
        if !self.can_shift() {
            return false;
        }
        let mut changed = false;
        for (group, _) in self.stages.iter_mut().filter(|(group, _)| group.devices.len() > 1) {
            let sum: f64 = group.shares.iter().sum();
            // How much of its own share each member has room for.
            let room = |device: &DeviceId| {
                let bytes = &held[*device];
                let own = (bytes.weight_bytes + bytes.cache_bytes).max(1) as f64;
                let other = bytes.needed_bytes() - bytes.weight_bytes - bytes.cache_bytes;
                bytes.capacity_bytes.saturating_sub(other) as f64 / own
            };
            let members = group.devices.iter().map(room).zip(&group.shares);
            // Of those that lack memory.
            let kept = |(room, share): (f64, &f64)| {
                let kept = if all { 0.0 } else { share / sum * room * MARGIN };
                (room < 1.0).then_some(kept.max(LEAST))
            };
            let kept: Vec<Option<f64>> = members.map(kept).collect();
            let others = group.shares.iter().zip(&kept).filter(|(_, kept)| kept.is_none());
            let others: f64 = others.map(|(share, _)| share / sum).sum();
            let all_kept: f64 = kept.iter().flatten().sum();
            if all_kept == 0.0 || others == 0.0 {
                continue;
            }
            let shifted = group.shares.iter().zip(kept);
            let shifted = shifted
                .map(|(share, kept)| kept.unwrap_or(share / sum * (1.0 - all_kept) / others));
            group.shares = shifted.collect();
            changed = true;
        }
        changed
    }
}
