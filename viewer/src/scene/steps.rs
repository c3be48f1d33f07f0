//! One row for each step: what it does, on what, and how long that takes.

use std::collections::BTreeMap;

use ir::graph::Reason;
use ir::id::{Id as _, WeightId};
use ir::layout::Move;
use ir::op::Op;
use ir::plan::{Action, Plan, Program, Weight};
use ir::tensor::Format;

use super::reason::{Here, device_name, reason_text, runner_up_text};
use super::work::Work;
use super::{LaneKind, Run, Scene};
use crate::quantity;

/// One step of a program.
#[derive(Clone, Debug)]
pub struct Step {
    /// Its number in the program.
    pub number: usize,
    /// The layer it belongs to.
    pub name: String,
    /// What sort of work it is.
    pub kind: Kind,
    /// `linear`, `all_reduce`: the first word of the operation.
    pub verb: String,
    /// The whole operation as the plan's text form has it.
    pub action: String,
    /// Where it runs; the number of a device that may not exist in an unsound plan.
    pub device: usize,
    /// What it reads, as `b3: f32[tokens, 64]`.
    pub reads: Vec<String>,
    /// What it writes.
    pub writes: Vec<String>,
    /// Weights it reads, as `layers.3.mlp.up bf16[256, 64]`.
    pub weights: Vec<String>,
    /// Format of its largest weight.
    pub format: Option<Format>,
    /// Bytes of those weights.
    pub weight_bytes: u64,
    /// The same by the device that is their home.
    pub weight_bytes_at: Vec<(usize, u64)>,
    /// Bytes of weights that a run as estimated reads: of experts those of the chosen ones, as if each token
    /// chose at random. `None` for tables, of which only rows are read.
    pub read_bytes: Option<u64>,
    /// Bytes of the cache it keeps.
    pub cache_bytes: u64,
    /// The device that is the home of that cache.
    pub cache_at: Option<usize>,
    /// Bytes of the buffers it reads and writes, in a run as estimated.
    pub buffer_bytes: u64,
    /// For a move, bytes that come from other devices.
    pub moved_bytes: u64,
    /// Arithmetic of a run as estimated, decode with as much cached as predictions take to be.
    pub flops: f64,
    /// The compiler's estimate.
    pub predicted_nanos: u64,
    /// What the trace says; `None` where it does not name the step.
    pub measured: Option<Measured>,
    /// Why it is here, in words.
    pub cause: String,
    /// Why it is here.
    pub reason: Option<Reason>,
    /// The best other place and what it would cost.
    pub runner_up: Option<String>,
    /// What it would take longer there.
    pub gap_nanos: Option<i64>,
    /// Steps of other lanes that must end first.
    pub waits: Vec<usize>,
    /// The devices between which it moves.
    pub path: Option<LaneKind>,
    /// Row of the timeline for `path`.
    pub path_lane: Option<usize>,
    /// Block it belongs to.
    pub block: usize,
}

/// What sort of work a step is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Token and position tables.
    Embed,
    /// Normalisation.
    Norm,
    /// Matrices.
    Linear,
    /// Attention.
    Attention,
    /// Mixtures and their routers.
    Experts,
    /// Everything without weights.
    Elementwise,
    /// From one device to another.
    Transfer,
    /// Between several.
    Collective,
}

impl Kind {
    /// All kinds, in the order of legends.
    pub const ALL: [Kind; 8] = [
        Kind::Embed,
        Kind::Norm,
        Kind::Linear,
        Kind::Attention,
        Kind::Experts,
        Kind::Elementwise,
        Kind::Transfer,
        Kind::Collective,
    ];

    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Embed => "embedding",
            Kind::Norm => "norm",
            Kind::Linear => "linear",
            Kind::Attention => "attention",
            Kind::Experts => "experts",
            Kind::Elementwise => "elementwise",
            Kind::Transfer => "transfer",
            Kind::Collective => "collective",
        }
    }

    /// Whether bytes move and nothing is computed.
    pub fn is_move(self) -> bool {
        matches!(self, Kind::Transfer | Kind::Collective)
    }
}

/// Measured durations of one step over the runs of its program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measured {
    /// Runs in which it was seen.
    pub count: usize,
    /// The middle one.
    pub median_nanos: u64,
    /// The shortest.
    pub least_nanos: u64,
    /// The longest.
    pub most_nanos: u64,
    /// Whether those runs were as large as the one that prediction and arithmetic are for; of attention also whether
    /// about as much was cached.
    pub is_as_planned: bool,
}

impl Step {
    /// How much longer it took than predicted, relative to the prediction; `None` for runs of another size.
    pub fn error(&self) -> Option<f64> {
        let measured = self.measured.filter(|_| self.is_as_planned())?;
        quantity::relative_change(self.predicted_nanos, measured.median_nanos)
    }

    /// Whether it was measured in runs as large as the one it is predicted for.
    pub fn is_as_planned(&self) -> bool {
        self.measured.is_some_and(|measured| measured.is_as_planned)
    }

    /// The time that its arithmetic and bytes are to be divided by: as measured, as predicted where nothing was, and
    /// `None` for runs of another size.
    pub fn rated_nanos(&self) -> Option<u64> {
        let measured = self.measured.map_or(Some(self.predicted_nanos), |measured| {
            measured.is_as_planned.then_some(measured.median_nanos)
        });
        measured.filter(|&nanos| nanos > 0)
    }

    /// The device whose memory kept it away, or what it works on.
    pub fn limit(&self) -> Option<usize> {
        match &self.reason {
            Some(Reason::Memory { device, .. }) => Some(device.index()),
            Some(
                Reason::Fastest
                | Reason::Pinned { .. }
                | Reason::Requested
                | Reason::FollowsInput
                | Reason::Mismatch,
            )
            | None => None,
        }
    }

    /// Other devices that are the home of its weights.
    pub fn weight_homes(&self) -> impl Iterator<Item = usize> {
        let homes = self.weight_bytes_at.iter().map(|&(home, _)| home);
        homes.filter(|&home| home != self.device)
    }

    /// Another device that is the home of the cache it keeps.
    pub fn cache_home(&self) -> Option<usize> {
        self.cache_at.filter(|&home| home != self.device)
    }
}

/// Rows of a program, without lanes and blocks; with `cached` tokens of each sequence, which the estimates are for.
pub(super) fn rows(plan: &Plan, program: &Program, cached: u32) -> Vec<Step> {
    let mut device = vec![usize::MAX; program.steps.len()];
    for lane in &program.lanes {
        for step in &lane.steps {
            if let Some(place) = device.get_mut(step.index()) {
                *place = lane.device.index();
            }
        }
    }
    let mut rows: Vec<Step> = program
        .steps
        .iter()
        .map(|(id, _)| row(plan, program, id.index(), device[id.index()], cached))
        .collect();
    gather_members(program, &mut rows);
    rows
}

fn row(plan: &Plan, program: &Program, number: usize, device: usize, cached: u32) -> Step {
    let step = &program.steps.rows()[number];
    let buffer = |id: &ir::id::BufferId| program.buffers.get(*id);
    let tensor = |id: &ir::id::BufferId| match buffer(id) {
        Some(buffer) => format!("{id}: {}", buffer.ty),
        None => format!("{id}: no such buffer"),
    };
    let bytes_of =
        |id: &ir::id::BufferId| buffer(id).map_or(0, |buffer| buffer.ty.bytes(program.estimated()));
    let cause = plan.causes.get(step.cause);
    let (op, action) = match &step.action {
        Action::Run(op) => (Some(op), op.to_string()),
        Action::Move { movement, .. } => (None, movement.to_string()),
        Action::Fetch { weight, .. } => (None, format!("fetch {weight}")),
    };
    let weights: Vec<&Weight> = op
        .map(Op::weights)
        .unwrap_or_default()
        .into_iter()
        .filter_map(|id: WeightId| plan.weights.get(id))
        .collect();
    let held =
        by_home(weights.iter().map(|weight| (weight.device.index(), plan.weight_bytes(weight))));
    let cache = op.and_then(Op::cache).and_then(|id| plan.caches.get(id));
    let here = Here {
        device,
        fetches: held.iter().any(|&(home, _)| home != device),
        borrows: cache.is_some_and(|cache| cache.device.index() != device),
    };
    let other = cause.and_then(|cause| cause.runner_up.as_ref());
    let work = op.map(|op| Work { plan, program, step, op, cached });
    let path = path(plan, program, number, device);
    let from_afar = step
        .reads
        .iter()
        .filter(|id| buffer(id).is_some_and(|buffer| buffer.device.index() != device));
    let moved_bytes = match step.action {
        Action::Fetch { .. } => step.writes.iter().map(bytes_of).fold(0, u64::saturating_add),
        // Its sender may be the one that drives it.
        Action::Move { movement: Move::Transfer { .. }, .. } => {
            step.reads.iter().map(bytes_of).fold(0, u64::saturating_add)
        }
        Action::Run(_) | Action::Move { .. } => {
            from_afar.map(bytes_of).fold(0, u64::saturating_add)
        }
    };
    Step {
        number,
        name: step.name.to_string(),
        kind: kind(&step.action),
        verb: action.split(['(', ' ']).next().unwrap_or_default().to_owned(),
        action,
        device,
        reads: step.reads.iter().map(tensor).collect(),
        writes: step.writes.iter().map(tensor).collect(),
        weights: weights.iter().map(|weight| describe(plan, weight, device)).collect(),
        format: weights.iter().max_by_key(|weight| plan.weight_bytes(weight)).map(|w| w.format),
        weight_bytes: held.iter().map(|&(_, bytes)| bytes).fold(0, u64::saturating_add),
        weight_bytes_at: held,
        read_bytes: work.and_then(Work::read_bytes),
        cache_bytes: cache
            .map_or(0, |cache| cache.bytes(plan.model.blocks, plan.model.block_tokens)),
        cache_at: cache.map(|cache| cache.device.index()),
        buffer_bytes: step
            .reads
            .iter()
            .chain(&step.writes)
            .map(bytes_of)
            .fold(0, u64::saturating_add),
        moved_bytes,
        flops: work.map_or(0.0, Work::flops),
        predicted_nanos: step.estimate_nanos,
        measured: None,
        cause: cause.map_or_else(
            || format!("{} is no cause of this plan", step.cause),
            |cause| reason_text(plan, &cause.reason, here),
        ),
        reason: cause.map(|cause| cause.reason.clone()),
        runner_up: other.map(|other| runner_up_text(plan, other, here)),
        gap_nanos: other.map(|other| other.gap_nanos),
        waits: step
            .waits
            .iter()
            .map(|wait| wait.index())
            .filter(|&wait| wait < program.steps.len())
            .collect(),
        path,
        path_lane: None,
        block: 0,
    }
}

fn kind(action: &Action) -> Kind {
    match action {
        Action::Run(op) => match op {
            Op::Embed { .. } | Op::AddPosition { .. } => Kind::Embed,
            Op::Norm(_) => Kind::Norm,
            Op::Linear(_) => Kind::Linear,
            Op::Attention(_) => Kind::Attention,
            Op::Route { .. } | Op::Experts(_) => Kind::Experts,
            Op::Activate(_)
            | Op::Gate(_)
            | Op::Add
            | Op::SigmoidGate
            | Op::SelectRows
            | Op::SoftCap { .. } => Kind::Elementwise,
        },
        Action::Move { movement, .. } => match movement {
            Move::Transfer { .. } | Move::Broadcast { .. } => Kind::Transfer,
            Move::AllReduce | Move::AllGather { .. } | Move::ReduceScatter { .. } => {
                Kind::Collective
            }
            Move::Slice { .. } => Kind::Elementwise,
        },
        Action::Fetch { .. } => Kind::Transfer,
    }
}

/// The link that a transfer, broadcast or fetch uses. Members of collectives are gathered later.
fn path(plan: &Plan, program: &Program, number: usize, device: usize) -> Option<LaneKind> {
    let step = &program.steps.rows()[number];
    let link = |from: usize, to: usize| (from != to).then_some(LaneKind::Link(from, to));
    match &step.action {
        Action::Run(_) => None,
        Action::Fetch { weight, .. } => link(plan.weights.get(*weight)?.device.index(), device),
        Action::Move { movement, .. } => match movement {
            Move::Transfer { from, to } => link(from.index(), to.index()),
            Move::Broadcast { from } => link(from.index(), device),
            Move::AllReduce
            | Move::AllGather { .. }
            | Move::ReduceScatter { .. }
            | Move::Slice { .. } => None,
        },
    }
}

/// Gives the steps of each collective the row of their devices.
fn gather_members(program: &Program, rows: &mut [Step]) {
    let mut collectives = BTreeMap::<_, Vec<usize>>::new();
    for (id, step) in program.steps.iter() {
        if let Action::Move { collective: Some(collective), .. } = &step.action
            && rows[id.index()].kind == Kind::Collective
        {
            collectives.entry(*collective).or_default().push(id.index());
        }
    }
    for steps in collectives.into_values() {
        let mut devices: Vec<usize> = steps.iter().map(|&step| rows[step].device).collect();
        devices.sort_unstable();
        devices.dedup();
        for step in steps {
            rows[step].path = Some(LaneKind::Members(devices.clone()));
        }
    }
}

/// `layers.3.mlp.up bf16[256, 64]`, with its home where that is not the step's device.
fn describe(plan: &Plan, weight: &Weight, device: usize) -> String {
    let shape: Vec<String> = weight.shape.iter().map(u32::to_string).collect();
    let text = format!("{} {}[{}]", weight.name, weight.format, shape.join(", "));
    if weight.device.index() == device {
        return text;
    }
    format!("{text} at home on {}", device_name(plan, weight.device))
}

/// Bytes by the device that is their home, in order of devices.
pub(super) fn by_home(bytes: impl Iterator<Item = (usize, u64)>) -> Vec<(usize, u64)> {
    let mut homes = BTreeMap::<usize, u64>::new();
    for (device, bytes) in bytes {
        let sum = homes.entry(device).or_default();
        *sum = sum.saturating_add(bytes);
    }
    homes.into_iter().collect()
}

/// Fills in what the trace says of each step.
pub(super) fn measure(scene: &mut Scene) {
    for number in 0..scene.programs.len() {
        let is_attention_as_planned = scene.is_attention_as_planned(number);
        let program = &mut scene.programs[number];
        let runs: Vec<&Run> =
            scene.runs.iter().filter(|run| run.program == number && run.is_whole).collect();
        // Runs of fewer tokens say nothing of those of more.
        let most = runs.iter().map(|run| run.tokens).max();
        let runs: Vec<&Run> = runs.into_iter().filter(|run| Some(run.tokens) == most).collect();
        program.measured_tokens = most;
        let is_full = program.is_measured_in_full();
        for step in &mut program.steps {
            let spans = runs.iter().filter_map(|run| run.times.get(step.number).copied().flatten());
            let mut nanos: Vec<u64> = spans.map(|times| times.end - times.start).collect();
            nanos.sort_unstable();
            if let (Some(&least_nanos), Some(&most_nanos)) = (nanos.first(), nanos.last()) {
                step.measured = Some(Measured {
                    count: nanos.len(),
                    median_nanos: nanos[nanos.len() / 2],
                    least_nanos,
                    most_nanos,
                    is_as_planned: is_full
                        && (step.kind != Kind::Attention || is_attention_as_planned),
                });
            }
        }
        super::blocks::measure(program, &runs);
    }
}
