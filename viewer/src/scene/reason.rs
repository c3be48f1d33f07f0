//! Why a step is where it is, in words.

use std::collections::BTreeSet;

use ir::graph::{Reason, RunnerUp};
use ir::id::Id as _;
use ir::plan::Plan;

use super::{Scene, Step};
use crate::quantity;

impl Scene {
    /// What of their weights and caches the steps of a program have on other devices: `weights and cache at home on
    /// numa0`; empty where nothing.
    pub fn home_text(&self, program: usize, steps: &[usize]) -> String {
        let rows = self.programs.get(program).map(|program| program.steps.as_slice());
        let rows = || steps.iter().filter_map(|&step| rows.unwrap_or_default().get(step));
        let weights = self.names(rows().flat_map(Step::weight_homes));
        let cache = self.names(rows().filter_map(Step::cache_home));
        match (weights.as_str(), cache.as_str()) {
            ("", "") => String::new(),
            (weights, "") => format!("weights at home on {weights}"),
            ("", cache) => format!("cache at home on {cache}"),
            (weights, cache) if weights == cache => format!("weights and cache at home on {cache}"),
            (weights, cache) => format!("weights at home on {weights}, cache on {cache}"),
        }
    }

    /// Names of devices, each once.
    fn names(&self, devices: impl Iterator<Item = usize>) -> String {
        let devices: BTreeSet<usize> = devices.collect();
        let names: Vec<String> =
            devices.into_iter().map(|device| self.device_name(device)).collect();
        names.join(" + ")
    }
}

/// Where a step runs, and what of another device it works on.
#[derive(Clone, Copy)]
pub(super) struct Here {
    pub(super) device: usize,
    pub(super) fetches: bool,
    pub(super) borrows: bool,
}

impl Here {
    /// What is at home elsewhere.
    fn away(self) -> Option<&'static str> {
        match (self.fetches, self.borrows) {
            (true, _) => Some("its weights"),
            (false, true) => Some("its cache"),
            (false, false) => None,
        }
    }
}

/// Why something is where it is.
pub(super) fn reason_text(plan: &Plan, reason: &Reason, here: Here) -> String {
    match reason {
        Reason::Fastest => "predicted fastest for the whole plan".to_owned(),
        Reason::Pinned { pattern } => format!("pinned here by {pattern}"),
        Reason::Requested => "these stages or this split were asked for".to_owned(),
        Reason::Memory { device, missing_bytes } => {
            // A step that runs there itself lacks room for what it works on.
            let runs_there = device.index() == here.device;
            let what = if runs_there { here.away().unwrap_or("all of its layer") } else { "it" };
            format!(
                "{} has no room for {what}: {} are missing",
                device_name(plan, *device),
                quantity::bytes(*missing_bytes)
            )
        }
        Reason::FollowsInput => "it has no weights and follows what it reads".to_owned(),
        Reason::Mismatch => "its input is held elsewhere, or in another form".to_owned(),
    }
}

/// The next best place and its price.
pub(super) fn runner_up_text(plan: &Plan, other: &RunnerUp, here: Here) -> String {
    let names: Vec<String> =
        other.devices.iter().map(|&device| device_name(plan, device)).collect();
    let gap = quantity::nanos(other.gap_nanos.unsigned_abs() as f64);
    let than = if other.gap_nanos < 0 { "faster" } else { "slower" };
    let runs_there = other.devices.iter().all(|device| device.index() == here.device);
    let held = here.away().filter(|_| runs_there);
    let held = held.map(|what| format!(" with {what} held there")).unwrap_or_default();
    format!("{}{held}, {gap} a decode step {than}", names.join(" + "))
}

pub(super) fn device_name(plan: &Plan, device: ir::id::DeviceId) -> String {
    let known = plan.machine.devices.get(device).map(|device| device.name.clone());
    known.unwrap_or_else(|| format!("d{}?", device.index()))
}
