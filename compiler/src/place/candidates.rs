//! The arrangements worth pricing: one device, pipelines of devices and groups, shared layers.

use anyhow::{Result, ensure};
use ir::id::DeviceId;
use rayon::prelude::*;

use crate::options::Objective;
use crate::place::are_alike;
use crate::place::arrangement::Arrangement;
use crate::place::group::Group;
use crate::place::prices::{Priced, Prices};
use crate::place::stages::{Goal, cut};

/// Orders of devices that are tried for pipelines: all orders of five unlike devices.
const MOST_ORDERS: usize = 120;
/// Pipelines that are priced exactly: the best by the sums that they are cut by, from which exact prices hardly
/// depart, so that those half as slow again are not among them. As many as there are orders of four unlike devices;
/// each takes some milliseconds.
const MOST_PIPELINES: usize = 24;
/// Of pipelines in which runs of a prompt overlap so many are cut as even as can be, too: copies of packed matrices,
/// which are not in the sums, change what is best.
const MOST_EVEN: usize = 3;
/// Pipelines of one score that are priced.
const MOST_ALIKE: usize = 2;

/// Powers of devices' speeds that shares of a layer are tried in: what a share does not shorten, as launches and
/// crossings, is best made up for by a smaller share of the slow device.
const SHARE_EXPONENTS: [f64; 5] = [1.0, 1.2, 1.4, 1.7, 2.0];

impl Prices<'_> {
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
        let sequences = self.sequences(&singles, &groups);
        let pipelines = self.pipelines_of(&sequences);
        // Where no pipeline fits, perhaps nothing does, and the one that lacks least is told.
        let any_fits = pipelines.iter().any(|found| !found.is_empty());
        let may_fit = |priced: &&Priced| !any_fits || self.may_hold_all(priced, &singles);
        let sharing: Vec<&Priced> = groups.iter().filter(may_fit).collect();
        arrangements.extend(sharing.iter().map(|priced| self.whole(priced.group.clone())));
        arrangements.extend(self.uneven(sharing)?);
        for pipelines in pipelines {
            let fresh = pipelines.into_iter().filter(|pipeline| !arrangements.contains(pipeline));
            let fresh: Vec<Arrangement> = fresh.collect();
            arrangements.extend(fresh);
        }
        Ok(arrangements)
    }

    /// The best pipelines along sequences, by each goal. Runs of prompts overlap, which counts for throughput, and for
    /// latency where a prompt takes several; steps of decode never do.
    fn pipelines_of(&self, sequences: &[Vec<&Priced>]) -> Vec<Vec<Arrangement>> {
        /// Limits of a stage's prefill, in percent of the most that the busiest stage takes of both at best, for each run
        /// of the prompt.
        const LIMITS: [u64; 4] = [60, 80, 100, 180];
        // Several goals find many of the same.
        let few = MOST_PIPELINES / 3;
        let prompt_runs = self.task.target.prompt_runs();
        let by = |goal, most| self.pipelines(sequences, goal, most);
        if self.task.target.objective == Objective::Latency {
            let with_sum = by(Goal::Sum, MOST_PIPELINES).1;
            let overlapping = if prompt_runs > 1 { MOST_EVEN } else { 0 };
            let overlapping = with_sum.iter().take(overlapping);
            let even = overlapping.filter_map(|pipeline| self.even(pipeline)).collect();
            return vec![with_sum, even];
        }
        let with_sum = by(Goal::Sum, few).1;
        let (least, with_busiest) = by(Goal::Busiest, few);
        let of_run = least.map(|least| least / prompt_runs);
        let limits = LIMITS.iter().filter_map(|percent| Some(of_run? / 100 * percent));
        let by_decode = limits.map(|most_prefill| by(Goal::Decode { most_prefill }, few).1);
        [with_sum, with_busiest].into_iter().chain(by_decode).collect()
    }

    /// The best pipelines along sequences, `most` of them, by a goal, and what the best is worth by it.
    fn pipelines(
        &self,
        sequences: &[Vec<&Priced>],
        goal: Goal,
        most: usize,
    ) -> (Option<u64>, Vec<Arrangement>) {
        let found =
            sequences.par_iter().filter_map(|sequence| self.pipeline(sequence, goal, false));
        let found: Vec<(u64, Arrangement)> = found.collect();
        let mut pipelines: Vec<(u64, Arrangement)> = Vec::new();
        for pipeline in found {
            if pipeline.1.stages.len() > 1 && !pipelines.contains(&pipeline) {
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
        let worth = pipelines.first().map_or(0, |(score, _)| score.saturating_add(score / 2));
        pipelines.retain(|(score, _)| *score <= worth);
        let least = pipelines.first().map(|(score, _)| *score);
        (least, pipelines.into_iter().map(|(_, pipeline)| pipeline).collect())
    }

    /// Stages on the same groups, as even in time as memory allows.
    fn even(&self, pipeline: &Arrangement) -> Option<Arrangement> {
        let priced = pipeline.stages.iter().map(|(group, _)| self.price(group).ok());
        let priced: Vec<Priced> = priced.collect::<Option<_>>()?;
        let sequence: Vec<&Priced> = priced.iter().collect();
        Some(self.pipeline(&sequence, Goal::Busiest, true)?.1)
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
            self.task.target.machine.need_link(pair[0], pair[1])?;
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
        let group = |shares: Vec<f64>| self.whole(Group { devices: devices.into(), shares });
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
        Arrangement::whole(group, self.units)
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
        let handover = |from, to| self.handovers.between(from, to);
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
}
