//! One row for each step: what it does, on what, and how long that takes.

use ir::graph::Reason;
use ir::id::{Id as _, WeightId};
use ir::layout::Move;
use ir::op::{Attention, Op, Products};
use ir::plan::{Action, Cache, ModelInfo, Phase, Plan, Program, Weight};
use ir::tensor::{Extent, Format, TensorType};

use super::{LaneKind, Run, Scene};

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
    /// Bytes of the cache it keeps.
    pub cache_bytes: u64,
    /// Bytes of the buffers it reads and writes, at the largest extent.
    pub buffer_bytes: u64,
    /// For a move, bytes that come from other devices.
    pub moved_bytes: u64,
    /// Arithmetic at the largest extent, decode with half of the context cached.
    pub flops: f64,
    /// The compiler's estimate.
    pub predicted_nanos: u64,
    /// What the trace says; `None` where it does not name the step.
    pub measured: Option<Measured>,
    /// Why it is here.
    pub cause: String,
    /// The row of the plan's table of causes.
    pub cause_number: usize,
    /// The best other place and what it would cost.
    pub runner_up: Option<String>,
    /// What it would take longer there.
    pub gap_nanos: Option<i64>,
    /// The device whose memory kept it away, with the bytes that lacked.
    pub limit: Option<(usize, u64)>,
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
}

impl Step {
    /// How much longer it took than predicted, relative to the prediction.
    pub fn error(&self) -> Option<f64> {
        let measured = self.measured?.median_nanos as f64;
        (self.predicted_nanos > 0).then(|| measured / self.predicted_nanos as f64 - 1.0)
    }
}

/// Rows of a program, without lanes and blocks.
pub(super) fn rows(plan: &Plan, program: &Program) -> Vec<Step> {
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
        .map(|(id, _)| row(plan, program, id.index(), device[id.index()]))
        .collect();
    gather_members(program, &mut rows);
    rows
}

fn row(plan: &Plan, program: &Program, number: usize, device: usize) -> Step {
    let step = &program.steps.rows()[number];
    let buffer = |id: &ir::id::BufferId| program.buffers.get(*id);
    let tensor = |id: &ir::id::BufferId| match buffer(id) {
        Some(buffer) => format!("{id}: {}", buffer.ty),
        None => format!("{id}: no such buffer"),
    };
    let bytes_of = |id: &ir::id::BufferId| {
        buffer(id).map_or(0, |buffer| tensor_bytes(&buffer.ty, program.max))
    };
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
    let cache = op.and_then(Op::cache).and_then(|id| plan.caches.get(id));
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
        name: step.name.clone(),
        kind: kind(&step.action),
        verb: action.split(['(', ' ']).next().unwrap_or_default().to_owned(),
        action,
        device,
        reads: step.reads.iter().map(tensor).collect(),
        writes: step.writes.iter().map(tensor).collect(),
        weights: weights.iter().map(|weight| describe(weight)).collect(),
        format: weights.iter().max_by_key(|weight| plan.weight_bytes(weight)).map(|w| w.format),
        weight_bytes: weights
            .iter()
            .map(|weight| plan.weight_bytes(weight))
            .fold(0, u64::saturating_add),
        cache_bytes: cache
            .map_or(0, |cache| cache.bytes(plan.model.blocks, plan.model.block_tokens)),
        buffer_bytes: step
            .reads
            .iter()
            .chain(&step.writes)
            .map(bytes_of)
            .fold(0, u64::saturating_add),
        moved_bytes,
        flops: op.map_or(0.0, |op| flops(plan, program, op, number)),
        predicted_nanos: step.estimate_nanos,
        measured: None,
        cause: cause.map_or_else(
            || format!("{} is no cause of this plan", step.cause),
            |cause| super::summary::reason_text(plan, &cause.reason),
        ),
        cause_number: step.cause.index(),
        runner_up: cause
            .and_then(|cause| cause.runner_up.as_ref())
            .map(|other| super::summary::runner_up_text(plan, other)),
        gap_nanos: cause.and_then(|cause| cause.runner_up.as_ref()).map(|other| other.gap_nanos),
        limit: cause.and_then(|cause| {
            let Reason::Memory { device, missing_bytes } = &cause.reason else { return None };
            Some((device.index(), *missing_bytes))
        }),
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
    let mut collectives = std::collections::BTreeMap::<_, Vec<usize>>::new();
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

/// Multiplications and additions of one step at the program's largest extent.
fn flops(plan: &Plan, program: &Program, op: &Op, number: usize) -> f64 {
    let step = &program.steps.rows()[number];
    let rows = |buffer: Option<&ir::id::BufferId>| {
        let ty = buffer.and_then(|&id| program.buffers.get(id)).map(|buffer| &buffer.ty);
        let rows = ty.and_then(|ty| ty.shape.first()).map_or(0, |dim| dim.size(program.max));
        f64::from(rows)
    };
    let elements = |id: &WeightId| {
        let shape = plan.weights.get(*id).map(|weight| weight.shape.as_slice()).unwrap_or_default();
        shape.iter().map(|&size| f64::from(size)).product::<f64>()
    };
    match op.products() {
        Some(Products::Linear(linear)) => {
            let weights: f64 = linear.weights.iter().map(elements).sum();
            2.0 * weights * rows(step.reads.first())
        }
        Some(Products::Attention(Attention { heads, head_dim, .. })) => {
            // A prompt's token sees half of the prompt on average; decode is priced at half of the context.
            let seen = match program.phase {
                Phase::Prefill => f64::from(program.max.tokens) / 2.0,
                Phase::Decode => f64::from(plan.model.context) / 2.0,
            };
            4.0 * f64::from(*heads) * f64::from(*head_dim) * rows(step.reads.first()) * seen
        }
        Some(Products::Experts(experts)) => {
            let one: f64 = [experts.gate, experts.up, experts.down]
                .iter()
                .filter_map(|&id| plan.weights.get(id))
                .map(|weight| {
                    weight.shape.iter().skip(1).map(|&size| f64::from(size)).product::<f64>()
                })
                .sum();
            let ids = step.reads.get(1).and_then(|&id| program.buffers.get(id));
            let used = ids.map_or(1, |buffer| buffer.ty.features(program.max));
            2.0 * one * f64::from(used) * rows(step.reads.first())
        }
        None => 0.0,
    }
}

fn describe(weight: &Weight) -> String {
    let shape: Vec<String> = weight.shape.iter().map(u32::to_string).collect();
    format!("{} {}[{}]", weight.name, weight.format, shape.join(", "))
}

/// As `TensorType::bytes`, for sizes that may be absurd.
pub(super) fn tensor_bytes(ty: &TensorType, extent: Extent) -> u64 {
    let elements = ty.shape.iter().map(|dim| u64::from(dim.size(extent)));
    elements.fold(ty.dtype.bytes(), u64::saturating_mul)
}

/// As `Cache::bytes`, for sizes that may be absurd.
pub(super) fn cache_bytes(cache: &Cache, model: &ModelInfo) -> u64 {
    [cache.kv_heads, cache.head_dim, model.blocks, model.block_tokens]
        .into_iter()
        .fold(2 * cache.dtype.bytes(), |bytes, size| bytes.saturating_mul(u64::from(size)))
}

/// Fills in what the trace says of each step.
pub(super) fn measure(scene: &mut Scene) {
    for (number, program) in scene.programs.iter_mut().enumerate() {
        let runs: Vec<_> = scene.runs.iter().filter(|run| run.program == number).collect();
        // Runs of fewer tokens say nothing of a prediction for more.
        let most = runs.iter().map(|run| run.tokens).max().unwrap_or(0);
        let runs: Vec<&Run> = runs.into_iter().filter(|run| run.tokens == most).collect();
        for step in &mut program.steps {
            let spans = runs.iter().filter_map(|run| run.times.get(step.number).copied().flatten());
            let mut nanos: Vec<u64> = spans.map(|times| times.end - times.start).collect();
            nanos.sort_unstable();
            if let (Some(&least_nanos), Some(&most_nanos)) = (nanos.first(), nanos.last()) {
                let median_nanos = nanos[nanos.len() / 2];
                let count = nanos.len();
                step.measured = Some(Measured { count, median_nanos, least_nanos, most_nanos });
            }
        }
        super::blocks::measure(program, &runs);
    }
}
