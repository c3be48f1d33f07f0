//! The answers that people come for, in words: how far off, what is the bottleneck, which limit binds.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::{Program, Run, Scene, Timing};
use crate::quantity;

/// The part of the bottleneck's time that a device beside it works at least to count as much.
const AS_BUSY: f64 = 0.8;

/// What is to be said of one program.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// Time of one run of the largest size, as the compiler forecast it or as its steps add up.
    pub predicted_nanos: u64,
    /// Median of the measured runs with most tokens.
    pub measured_nanos: Option<u64>,
    /// How many runs that is.
    pub runs: usize,
    /// What the median run was fed and found.
    pub size: Option<Size>,
    /// The compiler's forecast of a run of that size; `None` where it has none.
    pub expected_nanos: Option<u64>,
    /// For each device, then for movement: time on the critical path, measured if there is a trace.
    pub critical_nanos: Vec<u64>,
    /// For each device, then for movement: time of all steps, on that path or beside it.
    pub busy_nanos: Vec<u64>,
    /// Devices that work beside each other, the bottleneck among them, and nearly as long as it does.
    pub as_busy: Vec<usize>,
    /// The whole of that path, waiting included.
    pub critical_end: u64,
    /// What most of it goes to.
    pub bottleneck: Option<Bottleneck>,
    /// Devices whose memory kept blocks away.
    pub limits: Vec<Limit>,
}

/// What a run was fed and found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Tokens fed, over all sequences.
    pub tokens: u32,
    /// Tokens cached of each sequence.
    pub cached: u32,
}

/// What most of a run's time goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bottleneck {
    /// Work of a device.
    Device(usize),
    /// Movement, most of it in this row of `Scene::lanes`.
    Movement(Option<usize>),
}

/// What a device's memory kept away.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    /// The full device.
    pub device: usize,
    /// Blocks that would be faster there.
    pub blocks: Vec<usize>,
    /// Bytes they would take there beside what is there already.
    pub needed_bytes: u64,
    /// Bytes still free there.
    pub free_bytes: u64,
    /// What one run loses, as the compiler priced each block by itself.
    pub lost_nanos: u64,
}

impl Summary {
    /// How much longer runs took than a run of their size was predicted to, relative to that.
    pub fn error(&self) -> Option<f64> {
        quantity::relative_change(self.expected_nanos?, self.measured_nanos?)
    }

    /// Whether a device is the bottleneck, alone or with those that are as busy.
    pub fn is_bottleneck(&self, device: usize) -> bool {
        self.bottleneck == Some(Bottleneck::Device(device)) || self.as_busy.contains(&device)
    }

    /// Whether a device also works beside the critical path, for more than a tenth of the run.
    pub fn is_beside(&self, device: usize) -> bool {
        let nanos = |of: &[u64]| of.get(device).copied().unwrap_or(0);
        let beside = nanos(&self.busy_nanos).saturating_sub(nanos(&self.critical_nanos));
        beside > self.critical_end / 10
    }

    /// The bottleneck and the devices that work beside it for nearly as long, if there are any: which of them the
    /// critical path is in is chance.
    fn as_busy(&self) -> Vec<usize> {
        let Some(Bottleneck::Device(most)) = self.bottleneck else { return Vec::new() };
        let Some((_, devices)) = self.busy_nanos.split_last() else { return Vec::new() };
        let least = devices.get(most).map_or(0.0, |&nanos| nanos as f64 * AS_BUSY);
        let is_as_busy = |&device: &usize| {
            device == most || devices[device] as f64 >= least && self.is_beside(device)
        };
        let found: Vec<usize> = (0..devices.len()).filter(is_as_busy).collect();
        if found.len() > 1 { found } else { Vec::new() }
    }
}

impl Size {
    fn of(run: &Run) -> Self {
        Size { tokens: run.tokens, cached: run.past / run.sequences.max(1) }
    }

    /// Whether attention has about as much to do in both: within a factor of two it does not change a forecast much.
    pub fn is_like(self, other: Size) -> bool {
        let seen = |size: Size| u64::from(size.cached) + u64::from(size.tokens) / 2;
        let (a, b) = (seen(self), seen(other));
        self.tokens == other.tokens && a <= 2 * b && b <= 2 * a
    }
}

impl Program {
    /// What predictions of steps are for.
    pub fn predicted_size(&self) -> Size {
        Size { tokens: self.max_tokens, cached: self.cached_tokens }
    }

    /// Whether the largest measured runs had as many tokens as predictions of steps are for.
    pub fn is_measured_in_full(&self) -> bool {
        self.measured_tokens == Some(self.max_tokens)
    }

    /// ` for 512 tokens`; empty where the largest measured runs are as large as what predictions of steps are for.
    pub fn tokens_text(&self, tokens: u32) -> String {
        if self.measured_tokens.is_none() || self.is_measured_in_full() {
            return String::new();
        }
        format!(" for {}", quantity::counted(tokens.into(), "token"))
    }

    /// The compiler's forecast of a run of some size; `None` where it has none.
    fn expected_nanos(&self, size: Size) -> Option<u64> {
        // Of decode it has none for fewer sequences.
        if self.is_decode && size.tokens != self.max_tokens {
            return None;
        }
        let varied = |size: Size| if self.is_decode { size.cached } else { size.tokens };
        let is_largest = varied(size) == varied(self.predicted_size());
        match &self.forecast {
            Some(forecast) if is_largest || !forecast.others.is_empty() => {
                Some(forecast.nanos_of(varied(size)).round() as u64)
            }
            None if is_largest => Some(self.predicted.end),
            Some(_) | None => None,
        }
    }
}

impl Scene {
    /// Whether the typical run of a program is as large as what the estimates of its attention are for.
    pub(super) fn is_attention_as_planned(&self, program: usize) -> bool {
        let run = self.typical_run(program).and_then(|run| self.runs.get(run));
        let planned = self.programs.get(program).map(Program::predicted_size);
        run.zip(planned).is_some_and(|(run, planned)| Size::of(run).is_like(planned))
    }

    /// What is to be said of a program. Worked out once: see `Scene::summaries`.
    pub(super) fn summarise(&self, program: usize) -> Summary {
        let Some(row) = self.programs.get(program) else { return Summary::default() };
        let typical = self.typical_run(program);
        let timing = typical.and_then(|run| self.run_timing(run));
        let timing = timing.as_ref().unwrap_or(&row.predicted);
        let typical = typical.map(|run| &self.runs[run]);
        let size = typical.map(Size::of);
        let alike = self.whole_runs_of(program).map(|run| self.runs[run].tokens);
        let mut summary = Summary {
            predicted_nanos: row.forecast.as_ref().map_or(row.predicted.end, |row| row.nanos),
            measured_nanos: typical.map(|run| run.end - run.start),
            runs: alike.filter(|&tokens| size.is_some_and(|size| size.tokens == tokens)).count(),
            size,
            expected_nanos: size.and_then(|size| row.expected_nanos(size)),
            critical_end: timing.nanos(),
            busy_nanos: timing.all_shares(row, self.devices.len()),
            critical_nanos: timing.critical_shares(row, self.devices.len()),
            as_busy: Vec::new(),
            bottleneck: self.bottleneck(row, timing),
            limits: self.limits(program),
        };
        summary.as_busy = summary.as_busy();
        summary
    }

    fn bottleneck(&self, program: &Program, timing: &Timing) -> Option<Bottleneck> {
        let shares = timing.critical_shares(program, self.devices.len());
        let (&movement, devices) = shares.split_last()?;
        let most = (0..devices.len())
            .max_by_key(|&device| (devices[device], Reverse(device)))
            .filter(|&device| devices[device] > 0);
        if movement > most.map_or(0, |device| devices[device]) {
            return Some(Bottleneck::Movement(busiest_path(program, timing)));
        }
        most.map(Bottleneck::Device)
    }

    fn limits(&self, program: usize) -> Vec<Limit> {
        let mut limits: Vec<Limit> = Vec::new();
        for (number, block) in self.programs[program].blocks.iter().enumerate() {
            let Some((device, lost)) = block.limit else { continue };
            let bytes = block.bytes_away_from(device);
            // All of it may be there in this program.
            if bytes == 0 {
                continue;
            }
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
        let mut lines = vec![if self.is_trace_of_another {
            foreign_line(row, summary)
        } else {
            prediction_line(row, summary)
        }];
        lines
            .extend(summary.bottleneck.map(|bottleneck| self.bottleneck_line(summary, bottleneck)));
        for limit in &summary.limits {
            lines.push(self.limit_line(program, limit));
        }
        lines
    }

    fn bottleneck_line(&self, summary: &Summary, bottleneck: Bottleneck) -> String {
        if !summary.as_busy.is_empty() {
            return self.as_busy_line(summary);
        }
        let lane = |lane: usize| format!(", most of it {}", self.lanes[lane].name);
        let (name, nanos, path) = match bottleneck {
            Bottleneck::Device(device) => {
                (self.device_name(device), summary.critical_nanos.get(device), None)
            }
            Bottleneck::Movement(path) => {
                ("movement".to_owned(), summary.critical_nanos.last(), path.map(lane))
            }
        };
        let nanos = nanos.copied().unwrap_or(0);
        format!(
            "Bottleneck: {name} takes {} of the {} that a run lasts ({}){}",
            quantity::nanos(nanos as f64),
            quantity::nanos(summary.critical_end as f64),
            quantity::share(nanos as f64 / summary.critical_end.max(1) as f64),
            path.unwrap_or_default()
        )
    }

    /// Of devices that are as busy none is to blame more than the others.
    fn as_busy_line(&self, summary: &Summary) -> String {
        let busy = summary.as_busy.iter().filter_map(|&device| summary.busy_nanos.get(device));
        let most = busy.copied().max().unwrap_or(0) as f64;
        format!(
            "Bottleneck: {} share the work, busy up to {} of the {} that a run lasts ({})",
            self.devices_text(&summary.as_busy),
            quantity::nanos(most),
            quantity::nanos(summary.critical_end as f64),
            quantity::share(most / summary.critical_end.max(1) as f64)
        )
    }

    /// `gpu0 and gpu1`, `gpu0 to gpu5`, `gpu0, gpu2 and gpu3`; a row is of one kind: `gpu0, numa0 and numa1`.
    fn devices_text(&self, devices: &[usize]) -> String {
        let names: Vec<String> = devices.iter().map(|&device| self.device_name(device)).collect();
        let is_gpu = |device: usize| self.devices.get(device).map(|device| device.is_gpu);
        let is_row = devices
            .windows(2)
            .all(|pair| pair[1] == pair[0] + 1 && is_gpu(pair[0]) == is_gpu(pair[1]));
        match names.as_slice() {
            [first, _, .., last] if is_row => format!("{first} to {last}"),
            [others @ .., last] if !others.is_empty() => {
                format!("{} and {last}", others.join(", "))
            }
            _ => names.concat(),
        }
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
            "{name} is full: {blocks} would be faster held there but lack {}. Twice its memory would hold {held}, \
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
            (block.bytes_away_from(limit.device), lost)
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

/// The row of the timeline that most of the movement on the critical path is in.
fn busiest_path(program: &Program, timing: &Timing) -> Option<usize> {
    let mut nanos = BTreeMap::<usize, u64>::new();
    for &step in &timing.critical {
        let lane = program.steps[step].path_lane.filter(|_| program.steps[step].kind.is_move());
        if let (Some(lane), Some(times)) = (lane, timing.times[step]) {
            let sum = nanos.entry(lane).or_default();
            *sum = sum.saturating_add(times.end.saturating_sub(times.start));
        }
    }
    nanos.into_iter().max_by_key(|&(lane, nanos)| (nanos, Reverse(lane))).map(|(lane, _)| lane)
}

/// What is predicted where the trace says nothing of it.
fn foreign_line(program: &Program, summary: &Summary) -> String {
    format!(
        "{}: predicted {} {}; the trace is of another plan: measured times are not compared",
        program.name,
        quantity::nanos(summary.predicted_nanos as f64),
        size_text(program, program.predicted_size())
    )
}

fn prediction_line(program: &Program, summary: &Summary) -> String {
    let name = &program.name;
    let nanos = |nanos: u64| quantity::nanos(nanos as f64);
    let largest = program.predicted_size();
    let Some((measured, size)) = summary.measured_nanos.zip(summary.size) else {
        let (predicted, size) = (nanos(summary.predicted_nanos), size_text(program, largest));
        return format!("{name}: predicted {predicted} {size}, not measured");
    };
    let runs = quantity::counted(summary.runs as u64, "run");
    let measured = nanos(measured);
    let own = size_text(program, size);
    // Prompts are predicted with nothing cached.
    let cached = if program.is_decode || size.cached == 0 {
        String::new()
    } else {
        format!("; {} tokens were cached, predicted is with none", size.cached)
    };
    let is_other =
        if program.is_decode { !size.is_like(largest) } else { size.tokens != largest.tokens };
    let assumed = if is_other {
        format!("; cards, bars and steps are predicted {}", size_text(program, largest))
    } else {
        String::new()
    };
    match (summary.expected_nanos, summary.error()) {
        (Some(expected), Some(error)) => format!(
            "{name}: predicted {} {own}, measured {measured} (median of {runs}): {}{cached}{assumed}",
            nanos(expected),
            quantity::change(error)
        ),
        _ if summary.predicted_nanos == 0 => {
            format!("{name}: measured {measured} {own} (median of {runs}), not predicted")
        }
        _ => format!(
            "{name}: predicted {} {}, measured {measured} {own} (median of {runs})",
            nanos(summary.predicted_nanos),
            size_text(program, largest)
        ),
    }
}

/// `for 512 tokens`, `with 1024 tokens cached`, `for 3 sequences with 1024 tokens cached`.
pub(crate) fn size_text(program: &Program, size: Size) -> String {
    let fed = |noun: &str| quantity::counted(size.tokens.into(), noun);
    let cached = quantity::counted(size.cached.into(), "token");
    match (program.is_decode, program.max_tokens) {
        (false, _) => format!("for {}", fed("token")),
        (true, 1) => format!("with {cached} cached"),
        (true, _) => format!("for {} with {cached} cached", fed("sequence")),
    }
}
