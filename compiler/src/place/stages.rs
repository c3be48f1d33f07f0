//! Cuts the units into pipeline stages: contiguous ranges on a sequence of groups, by dynamic programming.

use std::ops::Range;

use ir::id::DeviceId;

use crate::options::Objective;
use crate::place::prices::{Priced, Times};
use crate::target::Target;

/// What a pipeline minimises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Goal {
    /// The sum over stages and handovers, which a run passes one after the other, and for latency once more for each
    /// later run of a prompt the prefill of the stage that takes longest for it.
    Sum,
    /// The slowest stage: runs overlap, and for throughput all runs of a prompt count.
    Busiest,
    /// The sum of decode, which never overlaps, over stages whose prefill, which does, takes no longer than so much.
    Decode {
        /// Nanoseconds.
        most_prefill: u64,
    },
}

/// Ranges of units, each with the index of its group in the sequence.
pub(crate) type Stages = Vec<(usize, Range<usize>)>;

/// The best stages of `sequence`, in its order, within the `free` bytes of devices, and their score; nearly the best
/// where later runs count: of the ways to a cut one is kept, whatever stage comes to take longest behind it.
///
/// Groups may be left out unless `uses_all`. `None` when nothing fits.
pub(crate) fn cut(
    target: &Target,
    sequence: &[&Priced],
    handover: impl Fn(DeviceId, DeviceId) -> Option<Times>,
    free: impl Fn(DeviceId) -> u64,
    goal: Goal,
    uses_all: bool,
) -> Option<(u64, Stages)> {
    let units = sequence.first()?.times.len();
    let join = |before: u64, stage: u64| match goal {
        Goal::Sum | Goal::Decode { .. } => before + stage,
        Goal::Busiest => before.max(stage),
    };
    // For throughput all runs of a prompt count alike, for latency those after the first by themselves.
    let (runs, later_runs) = match target.objective {
        Objective::Latency => (1, target.prompt_runs() - 1),
        Objective::Throughput => (target.prompt_runs(), 0),
    };
    let score = |times: Times| match goal {
        Goal::Sum | Goal::Busiest => {
            Times { prefill: runs * times.prefill, ..times }.request(target)
        }
        Goal::Decode { .. } => Times { prefill: 0, ..times }.request(target),
    };
    // What handing over from the leader of one group to that of a later one costs; `None` without a link.
    let between: Vec<Vec<Option<u64>>> = sequence
        .iter()
        .map(|from| {
            let from = from.group.devices[0];
            let to = sequence.iter().map(|to| to.group.devices[0]);
            to.map(|to| Some(score(handover(from, to)?))).collect()
        })
        .collect();
    // Prefix sums over units, per group.
    let costs: Vec<Vec<u64>> = sequence
        .iter()
        .map(|priced| prefix(priced.times.iter().map(|&times| score(times))))
        .collect();
    let prefills: Vec<Vec<u64>> = sequence
        .iter()
        .map(|priced| prefix(priced.times.iter().map(|times| times.prefill)))
        .collect();
    let bytes: Vec<Vec<Vec<u64>>> = sequence
        .iter()
        .map(|priced| {
            (0..priced.group.devices.len())
                .map(|member| prefix(priced.bytes.iter().map(|unit| unit[member])))
                .collect()
        })
        .collect();
    let prefill = |group: usize, range: &Range<usize>| {
        prefills[group][range.end] - prefills[group][range.start]
    };
    let is_too_slow = |group: usize, range: &Range<usize>| match goal {
        Goal::Decode { most_prefill } => prefill(group, range) > most_prefill,
        Goal::Sum | Goal::Busiest => false,
    };
    // What later runs of a prompt add where no other stage takes longer.
    let later = |group: usize, range: &Range<usize>| match goal {
        Goal::Sum => later_runs * prefill(group, range),
        Goal::Busiest | Goal::Decode { .. } => 0,
    };
    let fits = |group: usize, range: &Range<usize>| {
        let members = sequence[group].group.devices.iter().zip(&sequence[group].buffers);
        members.zip(&bytes[group]).all(|((&device, &buffers), prefix)| {
            prefix[range.end] - prefix[range.start] + buffers <= free(device)
        })
    };
    // best[group][end]: the best way to have units before `end` done and the last of them on `group`.
    let mut best: Vec<Vec<Way>> = vec![vec![Way::NONE; units + 1]; sequence.len()];
    // For each start what a group's stage may begin with: most ways are in no respect better than another.
    let mut entries_at: Vec<Vec<Entry>> = vec![Vec::new(); units];
    for group in 0..sequence.len() {
        let earliest_before = if uses_all { group.saturating_sub(1) } else { 0 };
        for (start, entries) in entries_at.iter_mut().enumerate().skip(1) {
            entries.clear();
            for before in earliest_before..group {
                let way = best[before][start];
                if let Some(handover) = between[before][group].filter(|_| way.exists()) {
                    let entry = Entry { before, way, handover };
                    if !entries.iter().any(|other| other.is_as_good_as(&entry)) {
                        entries.push(entry);
                    }
                }
            }
        }
        // Fewer units take less memory and time, so the first start that can be never comes earlier for a later end.
        let mut first = 0;
        for end in 1..=units {
            let can_be = |start| fits(group, &(start..end)) && !is_too_slow(group, &(start..end));
            while first < end && !can_be(first) {
                first += 1;
            }
            let mut found = Way::NONE;
            for start in (first..end).rev() {
                let work = costs[group][end] - costs[group][start];
                let own_later = later(group, &(start..end));
                if start == 0 {
                    if group == 0 || !uses_all {
                        let (cost, squares) = (work + own_later, square(work));
                        found.offer(Way { cost, later: own_later, squares, start, from: None });
                    }
                    continue;
                }
                // Earlier starts take longer.
                if work + own_later > found.cost {
                    break;
                }
                for &Entry { before, way, handover } in &entries_at[start] {
                    let stage = work + handover;
                    let later = way.later.max(own_later);
                    let cost = join(way.cost - way.later, stage) + later;
                    // Most are worse at first sight.
                    if cost <= found.cost {
                        let squares = way.squares + square(stage);
                        found.offer(Way { cost, later, squares, start, from: Some(before) });
                    }
                }
            }
            best[group][end] = found;
        }
    }
    let last = (0..sequence.len())
        .filter(|&group| !uses_all || group == sequence.len() - 1)
        .filter(|&group| best[group][units].exists())
        .min_by_key(|&group| best[group][units].order())?;
    let score = best[last][units].cost;
    let mut stages = Vec::new();
    let (mut group, mut end) = (last, units);
    loop {
        let Way { start, from, .. } = best[group][end];
        stages.push((group, start..end));
        let Some(before) = from else { break };
        (group, end) = (before, start);
    }
    stages.reverse();
    Some((score, stages))
}

/// A way to have some units done.
#[derive(Clone, Copy, Debug)]
struct Way {
    /// What is minimised; `u64::MAX` where there is no way.
    cost: u64,
    /// What of it later runs of a prompt add.
    later: u64,
    /// The sum of squares of stages, which breaks ties in favour of even ones.
    squares: u128,
    /// Where the last stage begins.
    start: usize,
    /// The group of the stage before.
    from: Option<usize>,
}

/// What a stage begins with.
#[derive(Clone, Copy, Debug)]
struct Entry {
    /// The group of the stage before.
    before: usize,
    /// The best way to have the units before done by it.
    way: Way,
    /// What handing over from there costs.
    handover: u64,
}

impl Entry {
    /// Whether no stage that begins with the other one is better than with this one.
    fn is_as_good_as(&self, other: &Self) -> bool {
        self.way.cost - self.way.later <= other.way.cost - other.way.later
            && self.way.later <= other.way.later
            && self.way.squares <= other.way.squares
            && self.handover <= other.handover
    }
}

impl Way {
    const NONE: Self = Self { cost: u64::MAX, later: 0, squares: u128::MAX, start: 0, from: None };

    fn exists(&self) -> bool {
        self.cost < u64::MAX
    }

    fn order(&self) -> (u64, u128) {
        (self.cost, self.squares)
    }

    /// Takes the other where it is better.
    fn offer(&mut self, other: Self) {
        if other.order() < self.order() {
            *self = other;
        }
    }
}

fn square(stage: u64) -> u128 {
    u128::from(stage) * u128::from(stage)
}

/// `0, a, a + b, …`
fn prefix(terms: impl Iterator<Item = u64>) -> Vec<u64> {
    let mut sums = vec![0];
    let mut sum = 0;
    for term in terms {
        sum += term;
        sums.push(sum);
    }
    sums
}
