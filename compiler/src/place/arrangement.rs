//! Which groups of devices take which units, and what stays beside them.

use std::ops::Range;

use ir::id::{DeviceId, NodeId, Table};
use ir::plan::Phase;

use crate::place::group::Group;
use crate::place::hosted::Hosted;
use crate::place::is_numa;
use crate::place::prices::Pins;
use crate::place::units::Units;
use crate::task::Task;

/// A group of devices and its range of units.
pub(crate) type Stage = (Group, Range<usize>);

/// Groups of devices, each with a range of units.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Arrangement {
    /// In the order they run.
    pub(crate) stages: Vec<Stage>,
    /// Whether the user fixed the shares of groups.
    pub(crate) has_fixed_shares: bool,
    /// What stays beside the GPUs, each of which is a stage.
    pub(crate) hosted: Option<Hosted>,
}

impl Arrangement {
    /// All units on one group.
    pub(crate) fn whole(group: Group, units: &Units) -> Self {
        Self { stages: vec![(group, 0..units.len())], has_fixed_shares: false, hosted: None }
    }

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

    /// The devices of all stages.
    pub(crate) fn devices(&self) -> impl Iterator<Item = DeviceId> {
        self.stages.iter().flat_map(|(group, _)| group.devices.iter().copied())
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
        let elsewhere = |(id, pin): (NodeId, &Option<(DeviceId, Option<String>)>)| {
            let (device, pattern) = pin.as_ref()?;
            let leads_elsewhere = *self.group_of(units.of[id]).devices != [*device];
            leads_elsewhere.then_some((*device, pattern.is_some()))
        };
        let elsewhere: Vec<(DeviceId, bool)> = pins.iter().filter_map(elsewhere).collect();
        let (tables, stages) = self.split_tables(task, units);
        let mut name = self.shape(task, stages);
        if elsewhere.iter().any(|(_, is_asked)| *is_asked) {
            name += " but for pins";
        }
        let home = elsewhere.iter().find(|(_, is_asked)| !is_asked).map(|(home, _)| *home);
        if let Some(home) = home.or(tables) {
            name += &format!(", embedding on {}", task.target.name(home));
        }
        name
    }

    /// The NUMA node that is a first stage of nothing but lookups, where there is one; and the stages that compute.
    fn split_tables(&self, task: &Task<'_>, units: &Units) -> (Option<DeviceId>, &[Stage]) {
        let all = self.stages.as_slice();
        let [(first, range), others @ ..] = all else { return (None, all) };
        let mut nodes = task.model.layers.nodes().filter(|(id, _)| range.contains(&units.of[*id]));
        let are_lookups = nodes.all(|(_, node)| node.work.table().is_some());
        let home = first.devices[0];
        if are_lookups && is_numa(task, home) && !others.is_empty() {
            (Some(home), others)
        } else {
            (None, all)
        }
    }

    /// Those stages, for people.
    fn shape(&self, task: &Task<'_>, stages: &[Stage]) -> String {
        let group = |group: &Group| {
            let names: Vec<&str> =
                group.devices.iter().map(|&device| task.target.name(device)).collect();
            names.join("+")
        };
        if let Some(hosted) = &self.hosted {
            return hosted.name.clone();
        }
        match stages {
            [(only, _)] if only.devices.len() == 1 => format!("all on {}", group(only)),
            [(only, _)] => format!("tensor parallel {}", group(only)),
            stages => {
                let names: Vec<String> = stages.iter().map(|(stage, _)| group(stage)).collect();
                format!("pipeline {}", names.join(" → "))
            }
        }
    }

    /// Whether other shares could help where memory lacks.
    pub(super) fn can_shift(&self) -> bool {
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
}
