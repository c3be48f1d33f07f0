//! The answers that people come for, in words: how far off, what is the bottleneck, which limit binds.

use ir::graph::{Reason, RunnerUp};
use ir::id::Id as _;
use ir::plan::Plan;

use super::Scene;
use crate::quantity;

/// What is to be said of one program.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// Time of one run as the compiler forecast it, or as its steps add up.
    pub predicted_nanos: u64,
    /// Median of the measured runs at full size.
    pub measured_nanos: Option<u64>,
    /// How many runs that is.
    pub runs: usize,
    /// Tokens of those runs, where that is less than the prediction is for.
    pub fewer_tokens: Option<u32>,
    /// Tokens cached in a decode's median run, where that is far from what the prediction is for: both.
    pub other_cached: Option<(u32, u32)>,
    /// For each device, then for movement: time on the critical path, measured if there is a trace.
    pub critical_nanos: Vec<u64>,
    /// For each device, then for movement: time of all steps, on that path or beside it.
    pub busy_nanos: Vec<u64>,
    /// The whole of that path, waiting included.
    pub critical_end: u64,
    /// The device with most of it.
    pub bottleneck: Option<usize>,
    /// Devices whose memory kept blocks away.
    pub limits: Vec<Limit>,
}

/// What a device's memory kept away.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    /// The full device.
    pub device: usize,
    /// Blocks that would be faster there.
    pub blocks: Vec<usize>,
    /// Bytes they would take there.
    pub needed_bytes: u64,
    /// Bytes still free there.
    pub free_bytes: u64,
    /// What one run loses, as the compiler priced each block by itself.
    pub lost_nanos: u64,
}

impl Summary {
    /// How much longer runs took than predicted, relative to the prediction.
    pub fn error(&self) -> Option<f64> {
        let measured = self.measured_nanos? as f64;
        (self.predicted_nanos > 0).then(|| measured / self.predicted_nanos as f64 - 1.0)
    }
}

impl Scene {
    /// What is to be said of a program. Worked out once: see `Scene::summaries`.
    pub(super) fn summarise(&self, program: usize) -> Summary {
        let Some(row) = self.programs.get(program) else { return Summary::default() };
        let typical = self.typical_run(program);
        let timing = typical.and_then(|run| self.run_timing(run));
        let timing = timing.as_ref().unwrap_or(&row.predicted);
        let critical_nanos = timing.critical_shares(row, self.devices.len());
        let devices = &critical_nanos[..self.devices.len()];
        let bottleneck = (0..devices.len())
            .max_by_key(|&device| (devices[device], std::cmp::Reverse(device)))
            .filter(|&device| devices[device] > 0);
        let tokens = typical.map(|run| self.runs[run].tokens);
        Summary {
            predicted_nanos: row.forecast_nanos.unwrap_or(row.predicted.end),
            measured_nanos: typical.map(|run| self.runs[run].end - self.runs[run].start),
            runs: self
                .runs_of(program)
                .filter(|&run| Some(self.runs[run].tokens) == tokens)
                .count(),
            fewer_tokens: tokens.filter(|&tokens| tokens < row.max_tokens),
            other_cached: typical.and_then(|run| {
                let run = &self.runs[run];
                let predicted = row.cached_tokens?.saturating_mul(run.sequences);
                // Within a factor of two, attention does not change a forecast much.
                let alike = (predicted / 2..=predicted.saturating_mul(2)).contains(&run.past);
                (!alike).then_some((predicted, run.past))
            }),
            critical_end: timing.nanos(),
            busy_nanos: timing.all_shares(row, self.devices.len()),
            critical_nanos,
            bottleneck,
            limits: self.limits(program),
        }
    }

    fn limits(&self, program: usize) -> Vec<Limit> {
        let mut limits: Vec<Limit> = Vec::new();
        for (number, block) in self.programs[program].blocks.iter().enumerate() {
            let Some((device, lost)) = block.limit else { continue };
            let bytes = block.weight_bytes.saturating_add(block.cache_bytes);
            let place = limits.iter().position(|limit| limit.device == device);
            let place = place.unwrap_or_else(|| {
                let free_bytes = self.devices.get(device).map_or(0, super::Device::free_bytes);
                let (needed_bytes, lost_nanos) = (0, 0);
                let blocks = Vec::new();
                limits.push(Limit { device, blocks, needed_bytes, free_bytes, lost_nanos });
                limits.len() - 1
            });
            let limit = &mut limits[place];
            limit.blocks.push(number);
            limit.needed_bytes = limit.needed_bytes.saturating_add(bytes);
            limit.lost_nanos = limit.lost_nanos.saturating_add(lost);
        }
        limits
    }

    /// The facts of a program as sentences: prediction, bottleneck, then limits.
    pub fn headline(&self, program: usize) -> Vec<String> {
        let Some(row) = self.programs.get(program) else { return Vec::new() };
        let Some(summary) = self.summaries.get(program) else { return Vec::new() };
        let mut lines = vec![prediction_line(&row.name, summary, row.max_tokens)];
        if let Some(device) = summary.bottleneck {
            let nanos = summary.critical_nanos[device];
            lines.push(format!(
                "Bottleneck: {} takes {} of the {} that a run lasts ({})",
                self.device_name(device),
                quantity::nanos(nanos as f64),
                quantity::nanos(summary.critical_end as f64),
                quantity::share(nanos as f64 / summary.critical_end.max(1) as f64),
            ));
        }
        for limit in &summary.limits {
            lines.push(self.limit_line(program, limit));
        }
        lines
    }

    fn limit_line(&self, program: usize, limit: &Limit) -> String {
        let name = self.device_name(limit.device);
        let missing = limit.needed_bytes.saturating_sub(limit.free_bytes);
        let blocks = self.blocks_text(program, &limit.blocks);
        let (held, saved) = self.held_by_twice(program, limit);
        let held = match held {
            held if held == limit.blocks.len() => "all of them".to_owned(),
            held => format!("{held} of these {}", limit.blocks.len()),
        };
        format!(
            "{name} is full: {blocks} would be faster there but lack {}. Twice its memory would hold {held}, \
             saving about {} a decode step",
            quantity::bytes(missing),
            quantity::nanos(saved as f64)
        )
    }

    /// How many of the blocks a device of twice the memory would hold, and what that would save. Those that would
    /// save most for their bytes come first.
    fn held_by_twice(&self, program: usize, limit: &Limit) -> (usize, u64) {
        let capacity = self.devices.get(limit.device).map_or(0, |device| device.capacity_bytes);
        let mut room = capacity.saturating_add(limit.free_bytes);
        let rows = &self.programs[program].blocks;
        let price = |&block: &usize| -> (u64, u64) {
            let block = &rows[block];
            let lost = block.limit.map_or(0, |(_, lost)| lost);
            (block.weight_bytes.saturating_add(block.cache_bytes), lost)
        };
        let mut prices: Vec<(u64, u64)> = limit.blocks.iter().map(price).collect();
        prices.sort_by(|(a_bytes, a_lost), (b_bytes, b_lost)| {
            let rate = |bytes: u64, lost: u64| lost as f64 / bytes.max(1) as f64;
            rate(*b_bytes, *b_lost).total_cmp(&rate(*a_bytes, *a_lost))
        });
        let mut held = (0, 0_u64);
        for (bytes, lost) in prices {
            if bytes <= room {
                room -= bytes;
                held = (held.0 + 1, held.1.saturating_add(lost));
            }
        }
        held
    }

    /// `layers 3–17, layer 20, lm_head`.
    pub fn blocks_text(&self, program: usize, blocks: &[usize]) -> String {
        let rows = self.programs.get(program).map(|p| p.blocks.as_slice()).unwrap_or_default();
        let blocks: Vec<usize> = blocks.iter().copied().filter(|&b| b < rows.len()).collect();
        let mut parts: Vec<String> = Vec::new();
        let mut at = 0;
        while at < blocks.len() {
            let first = &rows[blocks[at]];
            let mut last = at;
            while last + 1 < blocks.len()
                && first.number.is_some()
                && rows[blocks[last]].number.and_then(|number| number.checked_add(1))
                    == rows[blocks[last + 1]].number
            {
                last += 1;
            }
            parts.push(match (first.number, rows[blocks[last]].number) {
                (Some(from), Some(to)) if last > at => format!("layers {from}–{to}"),
                _ => first.title(),
            });
            at = last + 1;
        }
        if parts.len() > 4 {
            let more = parts.len() - 3;
            parts.truncate(3);
            parts.push(format!("{more} more"));
        }
        parts.join(", ")
    }
}

impl super::Device {
    /// Bytes that nothing takes.
    pub fn free_bytes(&self) -> u64 {
        self.capacity_bytes.saturating_sub(self.used_bytes())
    }

    /// Bytes that anything takes.
    pub fn used_bytes(&self) -> u64 {
        [
            self.weight_bytes,
            self.cache_bytes,
            self.buffer_bytes,
            self.fetch_bytes,
            self.scratch_bytes,
        ]
        .into_iter()
        .fold(0, u64::saturating_add)
    }
}

fn prediction_line(name: &str, summary: &Summary, max_tokens: u32) -> String {
    let predicted = quantity::nanos(summary.predicted_nanos as f64);
    let Some(measured) = summary.measured_nanos else {
        return format!("{name}: predicted {predicted}, not measured");
    };
    let measured = quantity::nanos(measured as f64);
    let runs = format!("{} run{}", summary.runs, if summary.runs == 1 { "" } else { "s" });
    let cached = summary.other_cached.map_or_else(String::new, |(predicted, measured)| {
        format!("; predicted for {predicted} tokens cached, measured with {measured}")
    });
    match (summary.fewer_tokens, summary.error()) {
        (Some(tokens), _) => format!(
            "{name}: predicted {predicted} for {max_tokens} tokens, measured {measured} for {tokens} (median of {runs})"
        ),
        (None, Some(error)) => format!(
            "{name}: predicted {predicted}, measured {measured} (median of {runs}): {}{cached}",
            quantity::change(error)
        ),
        (None, None) => format!("{name}: measured {measured} (median of {runs}), not predicted"),
    }
}

/// Why something is where it is.
pub(super) fn reason_text(plan: &Plan, reason: &Reason) -> String {
    match reason {
        Reason::Fastest => "predicted fastest for the whole plan".to_owned(),
        Reason::Pinned { pattern } => format!("pinned here by {pattern}"),
        Reason::Requested => "these stages or this split were asked for".to_owned(),
        Reason::Memory { device, missing_bytes } => format!(
            "{} has no room for it: {} are missing",
            name(plan, *device),
            quantity::bytes(*missing_bytes)
        ),
        Reason::FollowsInput => "it has no weights and follows what it reads".to_owned(),
        Reason::Mismatch => "its input is held elsewhere, or in another form".to_owned(),
    }
}

/// The next best place and its price.
pub(super) fn runner_up_text(plan: &Plan, other: &RunnerUp) -> String {
    let names: Vec<String> = other.devices.iter().map(|&device| name(plan, device)).collect();
    let gap = quantity::nanos(other.gap_nanos.unsigned_abs() as f64);
    let than = if other.gap_nanos < 0 { "faster" } else { "slower" };
    format!("{}, {gap} a decode step {than}", names.join(" + "))
}

fn name(plan: &Plan, device: ir::id::DeviceId) -> String {
    let known = plan.machine.devices.get(device).map(|device| device.name.clone());
    known.unwrap_or_else(|| format!("d{}?", device.index()))
}
