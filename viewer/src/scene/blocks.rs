//! Steps gathered into the blocks of the model, alike neighbours folded, and what passes between them.

use std::collections::BTreeMap;

use ir::graph::Reason;
use ir::id::Id as _;

use super::steps::by_home;
use super::{Kind, Program, Run, Step, Times};
use crate::quantity;

/// One transformer block, or what stands before or behind them.
#[derive(Clone, Debug, Default)]
pub struct Block {
    /// `layers.12`, `embed_tokens`.
    pub name: String,
    /// The number in the name.
    pub number: Option<u32>,
    /// Its steps, by number.
    pub steps: Vec<usize>,
    /// Devices that compute it, in order.
    pub devices: Vec<usize>,
    /// Time in which at least one of its steps is expected to run.
    pub predicted_nanos: u64,
    /// The median of the same over measured runs.
    pub measured_nanos: Option<u64>,
    /// Bytes of its weights.
    pub weight_bytes: u64,
    /// Bytes of its caches.
    pub cache_bytes: u64,
    /// Bytes of both by the device that is their home.
    pub bytes_at: Vec<(usize, u64)>,
    /// Why it is where it is: the cause that decided, in words.
    pub cause: String,
    /// The best other place.
    pub runner_up: Option<String>,
    /// The device whose memory kept it away, and what it would have saved there.
    pub limit: Option<(usize, u64)>,
    /// Collectives inside, each counted once: operation, bytes and number of them.
    pub collectives: Vec<(String, u64, usize)>,
    /// Equal for blocks that are alike.
    signature: String,
}

/// Blocks `first..=last`, alike in everything but their number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// Index of the first.
    pub first: usize,
    /// Index of the last.
    pub last: usize,
}

/// Bytes that pass from one block to another, or within one, between two devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edge {
    /// The step that moves them.
    pub step: usize,
    /// Block that made them.
    pub from_block: usize,
    /// Block that needs them.
    pub to_block: usize,
    /// Sender.
    pub from: usize,
    /// Receiver.
    pub to: usize,
    /// In a run as estimated.
    pub bytes: u64,
}

impl Block {
    /// `layer 12`, `embed_tokens`.
    pub fn title(&self) -> String {
        let last = self.name.rsplit('.').next().unwrap_or(&self.name);
        self.number.map_or_else(|| last.to_owned(), |number| format!("layer {number}"))
    }

    /// Bytes of its weights and caches that are not at home on the device.
    pub fn bytes_away_from(&self, device: usize) -> u64 {
        let away = self.bytes_at.iter().filter(|&&(home, _)| home != device);
        away.map(|&(_, bytes)| bytes).fold(0, u64::saturating_add)
    }

    /// A pattern that matches the names of its steps and of no others.
    pub fn pattern(&self) -> String {
        let escaped = self.name.replace('.', r"\.");
        format!(r"^{escaped}(\.|$)")
    }
}

impl Program {
    /// How much longer blocks `first..=last` took than predicted, relative to the prediction: of all their work, or of
    /// the steps that were measured in runs as large as predicted ones. `None` where there are none.
    pub fn blocks_error(&self, first: usize, last: usize) -> Option<f64> {
        let steps = || self.steps_of(first, last).filter(|step| step.measured.is_some());
        if steps().all(Step::is_as_planned) {
            let measured = self.blocks_measured(first, last)?;
            return quantity::relative_change(self.blocks_predicted(first, last), measured);
        }
        let alike = steps().filter(|step| step.is_as_planned());
        let (predicted, measured) =
            alike.fold((0, 0), |(predicted, measured): (u64, u64), step| {
                let nanos = step.measured.map_or(0, |measured| measured.median_nanos);
                (predicted.saturating_add(step.predicted_nanos), measured.saturating_add(nanos))
            });
        quantity::relative_change(predicted, measured)
    }

    /// The same as text, which says what is left out.
    pub fn blocks_error_text(&self, first: usize, last: usize) -> Option<String> {
        let error = quantity::change(self.blocks_error(first, last)?);
        let mut steps = self.steps_of(first, last).filter(|step| step.measured.is_some());
        let is_whole = steps.all(Step::is_as_planned);
        Some(if is_whole { error } else { format!("{error} without attention") })
    }

    fn steps_of(&self, first: usize, last: usize) -> impl Iterator<Item = &Step> {
        let blocks = self.blocks.get(first..=last).unwrap_or_default();
        blocks.iter().flat_map(|block| &block.steps).map(|&step| &self.steps[step])
    }

    /// What blocks `first..=last` are predicted to take together.
    pub fn blocks_predicted(&self, first: usize, last: usize) -> u64 {
        let blocks = self.blocks.get(first..=last).unwrap_or_default();
        blocks.iter().map(|block| block.predicted_nanos).fold(0, u64::saturating_add)
    }

    /// What blocks `first..=last` took together; `None` where one was not measured.
    pub fn blocks_measured(&self, first: usize, last: usize) -> Option<u64> {
        let blocks = self.blocks.get(first..=last).unwrap_or_default();
        blocks.iter().try_fold(0, |sum: u64, block| Some(sum.saturating_add(block.measured_nanos?)))
    }
}

/// The part of a step's name up to its first number, or all of it.
pub(super) fn block_name(name: &str) -> (&str, Option<u32>) {
    let mut end = 0;
    for component in name.split('.') {
        end += component.len();
        if let Ok(number) = component.parse() {
            return (&name[..end], Some(number));
        }
        end += 1;
    }
    (name, None)
}

/// Fills blocks, groups and edges of a program whose steps and predicted times are known.
pub(super) fn fill(program: &mut Program, planned: &ir::plan::Program, devices: usize) {
    let mut found: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for step in &program.steps {
        found.entry(block_name(&step.name).0).or_default().push(step.number);
    }
    let times = &program.predicted.times;
    let starts = |steps: &[usize]| {
        // A block is where its computation is: a move into it may run long before.
        let computed = steps.iter().filter(|&&step| !program.steps[step].kind.is_move());
        let start = computed.filter_map(|&step| times[step]).map(|times| times.start).min();
        (start.is_none(), start, steps[0])
    };
    let mut order: Vec<(&str, Vec<usize>)> = found.into_iter().collect();
    order.sort_by_key(|(_, steps)| starts(steps));
    let blocks: Vec<Block> =
        order.into_iter().map(|(name, steps)| block(program, name, steps)).collect();
    for (number, block) in blocks.iter().enumerate() {
        for &step in &block.steps {
            program.steps[step].block = number;
        }
    }
    program.blocks = blocks;
    program.groups = groups(&program.blocks);
    program.edges = edges(program, planned, devices);
}

fn block(program: &Program, name: &str, steps: Vec<usize>) -> Block {
    let rows = || steps.iter().map(|&step| &program.steps[step]);
    let computed = || rows().filter(|step| !step.kind.is_move());
    let mut devices: Vec<usize> = computed().map(|step| step.device).collect();
    if devices.is_empty() {
        devices = rows().map(|step| step.device).collect();
    }
    devices.sort_unstable();
    devices.dedup();
    // What says most of the place: a limit, a pin, what is at home elsewhere, then the largest weights.
    let decisive = computed()
        .max_by_key(|step| {
            let is_pinned = matches!(step.reason, Some(Reason::Pinned { .. }));
            let is_away = step.weight_homes().next().is_some()
                || step.limit().is_some_and(|device| device != step.device);
            let (is_limited, bytes) = (step.limit().is_some(), step.weight_bytes);
            (is_limited, is_pinned, is_away, bytes, step.predicted_nanos)
        })
        .or_else(|| rows().next());
    let mut collectives: BTreeMap<(String, u64), usize> = BTreeMap::new();
    for step in rows().filter(|step| step.kind == Kind::Collective) {
        *collectives.entry((step.verb.clone(), step.moved_bytes)).or_default() += 1;
    }
    let members = devices.len().max(1);
    let collectives = collectives
        .into_iter()
        .map(|((verb, bytes), steps)| (verb, bytes, steps.div_ceil(members)))
        .collect();
    Block {
        name: name.to_owned(),
        number: block_name(name).1,
        predicted_nanos: worked_nanos(&steps, &program.predicted.times).unwrap_or(0),
        measured_nanos: None,
        weight_bytes: rows().map(|step| step.weight_bytes).fold(0, u64::saturating_add),
        cache_bytes: rows().map(|step| step.cache_bytes).fold(0, u64::saturating_add),
        bytes_at: by_home(rows().flat_map(|step| {
            let cache = step.cache_at.map(|home| (home, step.cache_bytes));
            step.weight_bytes_at.iter().copied().chain(cache)
        })),
        cause: decisive.map(|step| step.cause.clone()).unwrap_or_default(),
        runner_up: decisive.and_then(|step| step.runner_up.clone()),
        limit: limit(program, &steps),
        collectives,
        signature: signature(program, &steps),
        devices,
        steps,
    }
}

/// The device that had no room for the block, and the time that was lost by it.
///
/// The compiler prices a block as a whole and writes the price on each of its steps.
fn limit(program: &Program, steps: &[usize]) -> Option<(usize, u64)> {
    let rows = steps.iter().map(|&step| &program.steps[step]);
    let limited = rows.filter_map(|step| {
        let lost = step.gap_nanos.unwrap_or(0).min(0).unsigned_abs();
        step.limit().map(|device| (device, lost))
    });
    limited.max_by_key(|&(_, lost)| lost)
}

/// Whether a step brings a weight, which only some blocks need.
fn is_fetch(step: &Step) -> bool {
    step.verb == "fetch"
}

/// Everything that makes two blocks alike: work, shapes, formats, places and reasons, but no names or moves.
fn signature(program: &Program, steps: &[usize]) -> String {
    let rows = steps.iter().map(|&step| &program.steps[step]);
    let describe = |step: &Step| {
        let format = step.format.map(|format| format.to_string()).unwrap_or_default();
        let (verb, device, reason) = (&step.verb, step.device, reason(step));
        let (weights, cache) = (&step.weight_bytes_at, (step.cache_at, step.cache_bytes));
        format!("{verb} {device} {format} {weights:?} {cache:?} {reason}")
    };
    let mut described: Vec<String> =
        rows.filter(|step| step.kind != Kind::Transfer || is_fetch(step)).map(describe).collect();
    // Devices that work beside each other have no order among them.
    described.sort_unstable();
    described.join("; ")
}

/// What is alike in the reasons of alike blocks: what lacks differs from one to the next.
fn reason(step: &Step) -> String {
    step.limit().map_or_else(|| step.cause.clone(), |device| format!("no room on {device}"))
}

fn groups(blocks: &[Block]) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for (number, block) in blocks.iter().enumerate() {
        match groups.last_mut() {
            Some(group)
                if block.number.is_some()
                    && blocks[group.last].number.and_then(|last| last.checked_add(1))
                        == block.number
                    && blocks[group.last].signature == block.signature =>
            {
                group.last = number;
            }
            _ => groups.push(Group { first: number, last: number }),
        }
    }
    groups
}

/// Between devices that there are: an unsound plan may name others.
fn edges(program: &Program, planned: &ir::plan::Program, devices: usize) -> Vec<Edge> {
    let mut writer = vec![None; planned.buffers.len()];
    let mut reader = vec![None; planned.buffers.len()];
    for (id, step) in planned.steps.iter() {
        for buffer in &step.writes {
            if let Some(place) = writer.get_mut(buffer.index()) {
                *place = Some(id.index());
            }
        }
        for buffer in &step.reads {
            if let Some(place @ None) = reader.get_mut(buffer.index()) {
                *place = Some(id.index());
            }
        }
    }
    let mut edges = Vec::new();
    for (id, step) in planned.steps.iter() {
        let row = &program.steps[id.index()];
        let Some(super::LaneKind::Link(from, to)) = row.path else { continue };
        if from.max(to) >= devices {
            continue;
        }
        let block = |buffers: &[ir::id::BufferId], by: &[Option<usize>]| {
            let step = buffers.first().and_then(|buffer| *by.get(buffer.index())?);
            step.map_or(row.block, |step| program.steps[step].block)
        };
        edges.push(Edge {
            step: id.index(),
            from_block: block(&step.reads, &writer),
            to_block: block(&step.writes, &reader),
            from,
            to,
            bytes: row.moved_bytes,
        });
    }
    edges
}

/// Fills in the median time that each block took in some runs.
pub(super) fn measure(program: &mut Program, runs: &[&Run]) {
    for block in &mut program.blocks {
        let times = runs.iter().filter_map(|run| worked_nanos(&block.steps, &run.times));
        let mut times: Vec<u64> = times.collect();
        times.sort_unstable();
        block.measured_nanos = times.get(times.len() / 2).copied();
    }
}

/// Time in which at least one of the steps runs: devices that work beside each other count once.
fn worked_nanos(steps: &[usize], times: &[Option<Times>]) -> Option<u64> {
    let spans = steps.iter().filter_map(|&step| times.get(step).copied().flatten());
    let mut spans: Vec<(u64, u64)> = spans.map(|times| (times.start, times.end)).collect();
    spans.sort_unstable();
    let mut until = spans.first()?.0;
    let mut worked = 0_u64;
    for (start, end) in spans {
        worked = worked.saturating_add(end.saturating_sub(start.max(until)));
        until = until.max(end);
    }
    Some(worked)
}
