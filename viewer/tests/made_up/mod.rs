//! Plans and traces made up from a few numbers: sound, always the same, of any size.

#![allow(
    dead_code,
    unreachable_pub,
    clippy::allow_attributes,
    clippy::unwrap_used,
    reason = "each test crate uses a part of it"
)]

use ir::graph::{Cause, Reason, RunnerUp};
use ir::id::{
    BufferId, CacheId, CauseId, CollectiveId, DeviceId, FileId, Id as _, StepId, Table, WeightId,
};
use ir::layout::Move;
use ir::machine::{
    Device, DeviceKind, Host, LinearRate, Link, Machine, RatePoint, RateSource, Rates,
};
use ir::model::CheckpointFile;
use ir::op::{Activation, Attention, Linear, Norm, NormKind, Op, Then};
use ir::plan::{
    Action, Buffer, Cache, Candidate, DeviceForecast, Forecast, Lane, ModelInfo, Phase, Plan,
    Program, ProgramForecast, Queue, Step, VERSION, Weight,
};
use ir::tensor::{DType, Dim, Extent, Format, TensorType};
use ir::trace::{Span, Trace, TracedRun};
use ir::weight::Source;

/// How the layers lie on the devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// Consecutive layers on each device, as many as fit.
    Pipeline,
    /// Every layer on all devices, in equal parts.
    Tensor,
    /// Attention on the last device and MLPs on the first, whose copy queue works beside it.
    Streaming,
}

/// What to make up.
#[derive(Clone, Copy, Debug)]
pub struct Wish {
    pub layers: u32,
    pub gpus: u32,
    pub nodes: u32,
    pub style: Style,
    /// Memory of each GPU, in layers it can hold.
    pub gpu_layers: u32,
    pub hidden: u32,
}

impl Wish {
    pub fn new(layers: u32, gpus: u32, nodes: u32, style: Style) -> Self {
        let gpu_layers = if style == Style::Pipeline { 4 } else { layers };
        Wish { layers, gpus, nodes, style, gpu_layers, hidden: 64 }
    }
}

const CONTEXT: u32 = 64;
const BLOCK_TOKENS: u32 = 16;
const VOCABULARY: u32 = 512;

/// A sound plan.
pub fn plan(wish: Wish) -> Plan {
    let machine = machine(wish);
    let mut plan = Plan {
        version: VERSION,
        model: ModelInfo {
            name: format!("made-up-{}", wish.layers),
            architecture: "LlamaForCausalLM".into(),
            folder: ".".into(),
            vocabulary: VOCABULARY,
            context: CONTEXT,
            max_sequences: 1,
            block_tokens: BLOCK_TOKENS,
            blocks: CONTEXT / BLOCK_TOKENS,
        },
        machine,
        files: [CheckpointFile {
            path: "model.safetensors".into(),
            bytes: 1 << 50,
            fingerprint: 7,
        }]
        .into_iter()
        .collect(),
        weights: Table::default(),
        caches: Table::default(),
        ropes: Table::default(),
        programs: Vec::new(),
        causes: Table::default(),
        forecast: Forecast::default(),
    };
    let layers = hold(&mut plan, wish);
    for (name, phase, tokens) in [("prefill", Phase::Prefill, 32), ("decode1", Phase::Decode, 1)] {
        let max = Extent { tokens, rows: 1 };
        let mut made =
            Made { plan: &mut plan, program: empty(name, phase, max), owner: Vec::new() };
        made.fill(wish, &layers);
        let program = made.finish();
        plan.programs.push(program);
    }
    forecast(&mut plan);
    plan
}

fn empty(name: &str, phase: Phase, max: Extent) -> Program {
    Program {
        name: name.into(),
        phase,
        max,
        max_sequences: 1,
        buffers: Table::default(),
        steps: Table::default(),
        lanes: Vec::new(),
        output: BufferId::from_index(0),
    }
}

fn machine(wish: Wish) -> Machine {
    let layer = layer_bytes(wish.hidden);
    let device = |name: String, kind, memory_bytes, speed: f64| Device {
        name,
        kind,
        memory_bytes,
        rates: Rates {
            source: RateSource::Calibrated,
            read_bytes_per_sec: speed,
            step_nanos: 2e3,
            linear: vec![LinearRate {
                format: Format::Bf16,
                points: vec![RatePoint { tokens: 1, weights_per_sec: speed / 2.0 }],
            }],
            attention_flops_per_sec: speed * 10.0,
            cache_bytes_per_sec: speed,
            beside_fetch: 1.0,
        },
    };
    // Token table, head and buffers.
    let rest = u64::from(VOCABULARY * wish.hidden) * 4 + u64::from(wish.hidden) * 2048;
    let gpus = (0..wish.gpus).map(|i| {
        let kind = DeviceKind::Gpu { ordinal: i, reserved_bytes: 0, library_bytes: 0 };
        device(format!("gpu{i}"), kind, layer * u64::from(wish.gpu_layers) + rest, 20e9)
    });
    let nodes = (0..wish.nodes).map(|i| {
        let kind = DeviceKind::Numa { node: i, cpus: vec![2 * i, 2 * i + 1] };
        device(format!("numa{i}"), kind, 1 << 36, 4e9)
    });
    let devices: Table<DeviceId, Device> = gpus.chain(nodes).collect();
    let mut links = Vec::new();
    for from in devices.ids() {
        for to in devices.ids().filter(|&to| to != from) {
            links.push(Link { from, to, bytes_per_sec: 1e9, latency_nanos: 4e3 });
        }
    }
    let host =
        Host { cpu: "made up".into(), cpus: 2 * wish.nodes, nodes: wish.nodes, gpus: vec![] };
    Machine { host, devices, links }
}

/// Weights and cache of one layer.
fn layer_bytes(hidden: u32) -> u64 {
    let square = u64::from(hidden) * u64::from(hidden);
    // q, k, v, o and three matrices of four times the width, in two bytes; then cached keys and values.
    2 * (4 * square + 12 * square) + 8 * u64::from(hidden) + u64::from(CONTEXT * hidden) * 4
}

/// What one layer has on its devices.
struct Layer {
    devices: Vec<DeviceId>,
    mlp: Vec<DeviceId>,
    weights: Vec<[WeightId; 9]>,
    caches: Vec<CacheId>,
    cause: CauseId,
}

fn hold(plan: &mut Plan, wish: Wish) -> Vec<Layer> {
    let all: Vec<DeviceId> = plan.machine.devices.ids().collect();
    let mut layers = Vec::new();
    for number in 0..wish.layers {
        let (devices, mlp) = match wish.style {
            Style::Pipeline => {
                let device = vec![all[stage(wish, number)]];
                (device.clone(), device)
            }
            Style::Tensor => (all.clone(), all.clone()),
            Style::Streaming => (vec![all[all.len() - 1]], vec![all[0]]),
        };
        let cause = plan.causes.push(cause(wish, &devices, number));
        let parts = devices.len() as u32;
        let mut layer = Layer {
            devices: devices.clone(),
            mlp: mlp.clone(),
            weights: vec![],
            caches: vec![],
            cause,
        };
        for (&device, &mlp) in devices.iter().zip(&mlp) {
            let hidden = wish.hidden;
            let mut matrix = |device, part: &str, rows: u32, columns: u32| {
                let shape = vec![rows, columns];
                let name = format!("layers.{number}.{part}.weight");
                plan.weights.push(weight(name, device, Format::Bf16, shape))
            };
            let matrices = [
                matrix(device, "self_attn.q_proj", hidden / parts, hidden),
                matrix(device, "self_attn.k_proj", hidden / parts, hidden),
                matrix(device, "self_attn.v_proj", hidden / parts, hidden),
                matrix(device, "self_attn.o_proj", hidden, hidden / parts),
                matrix(mlp, "mlp.gate_proj", 4 * hidden / parts, hidden),
                matrix(mlp, "mlp.up_proj", 4 * hidden / parts, hidden),
                matrix(mlp, "mlp.down_proj", hidden, 4 * hidden / parts),
            ];
            let mut vector = |device, part: &str| {
                let name = format!("layers.{number}.{part}.weight");
                plan.weights.push(weight(name, device, Format::F32, vec![hidden]))
            };
            let norms =
                [vector(device, "input_layernorm"), vector(mlp, "post_attention_layernorm")];
            let mut weights = [norms[0]; 9];
            weights[..7].copy_from_slice(&matrices);
            weights[7..].copy_from_slice(&norms);
            layer.weights.push(weights);
            layer.caches.push(plan.caches.push(Cache {
                name: format!("layers.{number}"),
                device,
                dtype: DType::Bf16,
                kv_heads: hidden / 16 / parts,
                head_dim: 16,
            }));
        }
        layers.push(layer);
    }
    layers
}

/// GPUs take as many layers as they hold, NUMA nodes share the rest.
fn stage(wish: Wish, layer: u32) -> usize {
    let on_gpus = wish.gpus * wish.gpu_layers;
    if layer < on_gpus || wish.nodes == 0 {
        return (layer / wish.gpu_layers).min(wish.gpus - 1) as usize;
    }
    let rest = (wish.layers - on_gpus).max(1);
    (wish.gpus + (layer - on_gpus) * wish.nodes / rest) as usize
}

fn cause(wish: Wish, devices: &[DeviceId], layer: u32) -> Cause {
    let on_node = devices[0].index() >= wish.gpus as usize;
    match wish.style {
        Style::Tensor => Cause { reason: Reason::Requested, runner_up: None },
        Style::Pipeline if on_node && wish.gpus > 0 => {
            let device = DeviceId::from_index(wish.gpus as usize - 1);
            let behind = u64::from(layer + 1 - wish.gpus * wish.gpu_layers);
            let missing_bytes = layer_bytes(wish.hidden) * behind;
            let other = RunnerUp { devices: vec![device], gap_nanos: -30_000 };
            Cause { reason: Reason::Memory { device, missing_bytes }, runner_up: Some(other) }
        }
        Style::Pipeline | Style::Streaming => {
            let device = DeviceId::from_index((wish.gpus + wish.nodes) as usize - 1);
            let other = RunnerUp { devices: vec![device], gap_nanos: 31_000 };
            Cause { reason: Reason::Fastest, runner_up: (device != devices[0]).then_some(other) }
        }
    }
}

fn weight(name: String, device: DeviceId, format: Format, shape: Vec<u32>) -> Weight {
    let source = Source::contiguous(FileId::from_index(0), DType::Bf16, 1024, &shape);
    Weight { name, device, format, shape, sources: vec![source] }
}

/// A program under construction. Steps are pushed in an order in which they could run.
struct Made<'a> {
    plan: &'a mut Plan,
    program: Program,
    owner: Vec<(DeviceId, Queue)>,
}

impl Made<'_> {
    fn buffer(&mut self, device: DeviceId, rows: Dim, features: u32) -> BufferId {
        let ty = TensorType { dtype: DType::F32, shape: vec![rows, Dim::Fixed(features)] };
        self.program.buffers.push(Buffer { device, ty })
    }

    fn step(
        &mut self,
        name: &str,
        (device, queue): (DeviceId, Queue),
        action: Action,
        reads: &[BufferId],
        writes: &[BufferId],
        cause: CauseId,
    ) -> StepId {
        let estimate_nanos = self.estimate(device, &action, reads);
        self.owner.push((device, queue));
        self.program.steps.push(Step {
            name: name.into(),
            action,
            reads: reads.to_vec(),
            writes: writes.to_vec(),
            frees: Vec::new(),
            waits: Vec::new(),
            estimate_nanos,
            cause,
        })
    }

    fn run(
        &mut self,
        name: &str,
        device: DeviceId,
        op: Op,
        reads: &[BufferId],
        writes: &[BufferId],
        cause: CauseId,
    ) {
        self.step(name, (device, Queue::Compute), Action::Run(op), reads, writes, cause);
    }

    fn estimate(&self, device: DeviceId, action: &Action, reads: &[BufferId]) -> u64 {
        let bytes_of = |id: &BufferId| self.program.buffers[*id].ty.bytes(self.program.max);
        let moved: u64 = reads.iter().map(bytes_of).sum();
        let rates = &self.plan.machine.devices[device].rates;
        let nanos = match action {
            Action::Run(op) => {
                let bytes: u64 = op
                    .weights()
                    .iter()
                    .map(|&w| self.plan.weight_bytes(&self.plan.weights[w]))
                    .sum();
                let rows = f64::from(self.program.max.tokens).sqrt();
                rates.step_nanos
                    + (bytes as f64 * rows + moved as f64) / rates.read_bytes_per_sec * 1e9
            }
            Action::Move { .. } | Action::Fetch { .. } => 4e3 + moved as f64,
        };
        nanos as u64
    }

    /// Brings a value to a device, by the copy queue of a GPU.
    fn bring(&mut self, name: &str, value: BufferId, to: DeviceId) -> BufferId {
        let Buffer { device: from, ty } = self.program.buffers[value].clone();
        if from == to {
            return value;
        }
        let copy = self.program.buffers.push(Buffer { device: to, ty });
        let gpu = matches!(self.plan.machine.devices[to].kind, DeviceKind::Gpu { .. });
        let queue = if gpu { Queue::Copy } else { Queue::Compute };
        let action =
            Action::Move { movement: Move::Transfer { from, to }, collective: None, slice: None };
        let cause = self.mismatch();
        self.step(name, (to, queue), action, &[value], &[copy], cause);
        copy
    }

    fn mismatch(&mut self) -> CauseId {
        self.plan.causes.push(Cause { reason: Reason::Mismatch, runner_up: None })
    }

    fn reduce(&mut self, name: &str, terms: &[BufferId], collective: usize) -> Vec<BufferId> {
        let cause = self.mismatch();
        terms
            .iter()
            .map(|&term| {
                let Buffer { device, ty } = self.program.buffers[term].clone();
                let sum = self.program.buffers.push(Buffer { device, ty });
                let action = Action::Move {
                    movement: Move::AllReduce,
                    collective: Some(CollectiveId::from_index(collective)),
                    slice: None,
                };
                self.step(name, (device, Queue::Compute), action, terms, &[sum], cause);
                sum
            })
            .collect()
    }

    fn fill(&mut self, wish: Wish, layers: &[Layer]) {
        let hidden = wish.hidden;
        let first = layers[0].devices.clone();
        let cause = layers[0].cause;
        let mut x = Vec::new();
        for &device in &first {
            let table =
                self.weight("embed_tokens.weight", device, Format::Bf16, vec![VOCABULARY, hidden]);
            let out = self.buffer(device, Dim::Tokens, hidden);
            self.run("embed_tokens", device, Op::Embed { table, scale: 1.0 }, &[], &[out], cause);
            x.push(out);
        }
        for (number, layer) in layers.iter().enumerate() {
            x = self.layer(number, layer, hidden, x, number + 1 == layers.len());
        }
        let last = self.program.buffers[x[0]].device;
        let follows = Cause { reason: Reason::FollowsInput, runner_up: None };
        let follows = self.plan.causes.push(follows);
        let mut selected = Vec::new();
        for x in x {
            let device = self.program.buffers[x].device;
            let rows = self.buffer(device, Dim::Rows, hidden);
            self.run("select", device, Op::SelectRows, &[x], &[rows], follows);
            selected.push(rows);
        }
        let rows = selected[0];
        let cause = layers[layers.len() - 1].cause;
        let scale = self.weight("norm.weight", last, Format::F32, vec![hidden]);
        let head = self.weight("lm_head.weight", last, Format::Bf16, vec![VOCABULARY, hidden]);
        let logits = self.buffer(last, Dim::Rows, VOCABULARY);
        let op = linear(Some(scale), vec![head], Then::Nothing, false);
        self.run("lm_head", last, op, &[rows], &[logits], cause);
        self.program.output = logits;
    }

    fn weight(
        &mut self,
        name: &str,
        device: DeviceId,
        format: Format,
        shape: Vec<u32>,
    ) -> WeightId {
        let held = self.plan.weights.iter();
        let mut held = held.filter(|(_, weight)| weight.name == name && weight.device == device);
        if let Some((id, _)) = held.next() {
            return id;
        }
        drop(held);
        self.plan.weights.push(weight(name.into(), device, format, shape))
    }

    fn layer(
        &mut self,
        number: usize,
        layer: &Layer,
        hidden: u32,
        x: Vec<BufferId>,
        last: bool,
    ) -> Vec<BufferId> {
        let parts = layer.devices.len() as u32;
        let split = parts > 1;
        let name = |part: &str| format!("layers.{number}.{part}");
        let mut attended = Vec::new();
        let mut inputs = Vec::new();
        for (member, &device) in layer.devices.iter().enumerate() {
            let weights = layer.weights[member];
            let x = self.bring(&name("self_attn.q_proj"), x[member.min(x.len() - 1)], device);
            let qkv: Vec<BufferId> =
                (0..3).map(|_| self.buffer(device, Dim::Tokens, hidden / parts)).collect();
            let op = linear(Some(weights[7]), weights[..3].to_vec(), Then::Nothing, false);
            self.run(&name("self_attn.q_proj"), device, op, &[x], &qkv, layer.cause);
            let y = self.buffer(device, Dim::Tokens, hidden / parts);
            let op = Op::Attention(Attention {
                cache: layer.caches[member],
                heads: hidden / 16 / parts,
                kv_heads: hidden / 16 / parts,
                head_dim: 16,
                group: 1,
                first_head: 0,
                scale: 0.25,
                window: None,
                soft_cap: None,
                q_norm: None,
                k_norm: None,
                rope: None,
            });
            self.run(&name("self_attn"), device, op, &qkv, &[y], layer.cause);
            let out = self.buffer(device, Dim::Tokens, hidden);
            let residual = member == 0;
            let op = linear(None, vec![weights[3]], Then::Nothing, residual);
            let reads = if residual { vec![y, x] } else { vec![y] };
            self.run(&name("self_attn.o_proj"), device, op, &reads, &[out], layer.cause);
            attended.push(out);
            inputs.push(x);
        }
        if split {
            attended = self.reduce(&name("mlp.gate_proj"), &attended, 2 * number);
        }
        let mut outputs = Vec::new();
        for (member, &device) in layer.mlp.iter().enumerate() {
            let weights = layer.weights[member];
            let x = self.bring(&name("mlp.gate_proj"), attended[member], device);
            let gated = self.buffer(device, Dim::Tokens, 4 * hidden / parts);
            let then = Then::Gate(Activation::Silu);
            let op = linear(Some(weights[8]), weights[4..6].to_vec(), then, false);
            self.run(&name("mlp.gate_proj"), device, op, &[x], &[gated], layer.cause);
            let out = self.buffer(device, Dim::Tokens, hidden);
            let residual = member == 0;
            let op = linear(None, vec![weights[6]], Then::Nothing, residual);
            let reads = if residual { vec![gated, x] } else { vec![gated] };
            self.run(&name("mlp.down_proj"), device, op, &reads, &[out], layer.cause);
            outputs.push(out);
        }
        if split {
            // A movement has the name of what needs it.
            let needs = if last {
                "select".into()
            } else {
                format!("layers.{}.self_attn.q_proj", number + 1)
            };
            outputs = self.reduce(&needs, &outputs, 2 * number + 1);
        }
        outputs
    }

    /// Lanes, waits and frees.
    fn finish(mut self) -> Program {
        let steps = self.program.steps.len();
        let mut lanes: Vec<(DeviceId, Queue)> = self.owner.clone();
        lanes.sort();
        lanes.dedup();
        let mut writer = vec![0; self.program.buffers.len()];
        let mut users: Vec<Vec<usize>> = vec![Vec::new(); self.program.buffers.len()];
        for (id, step) in self.program.steps.iter() {
            for buffer in &step.writes {
                writer[buffer.index()] = id.index();
            }
            for buffer in step.writes.iter().chain(&step.reads) {
                users[buffer.index()].push(id.index());
            }
        }
        let mut waits: Vec<Vec<usize>> = vec![Vec::new(); steps];
        for (id, step) in self.program.steps.iter() {
            waits[id.index()].extend(step.reads.iter().map(|buffer| writer[buffer.index()]));
        }
        for (buffer, users) in users.iter().enumerate() {
            let id = BufferId::from_index(buffer);
            if id == self.program.output {
                continue;
            }
            let last = users[users.len() - 1];
            let lane = (self.program.buffers[id].device, Queue::Compute);
            let shared = users.iter().any(|&user| self.owner[user] != self.owner[last]);
            let after = (last + 1..steps).find(|&step| shared && self.owner[step] == lane);
            let freeing = after.unwrap_or(last);
            self.program.steps.rows_mut()[freeing].frees.push(id);
            waits[freeing].extend(users.iter().copied().filter(|&user| user != freeing));
        }
        for (number, mut waited) in waits.into_iter().enumerate() {
            waited.sort_unstable();
            waited.dedup();
            waited.retain(|&wait| self.owner[wait] != self.owner[number]);
            self.program.steps.rows_mut()[number].waits =
                waited.into_iter().map(StepId::from_index).collect();
        }
        self.program.lanes = lanes
            .into_iter()
            .map(|(device, queue)| {
                let mine = (0..steps).filter(|&step| self.owner[step] == (device, queue));
                Lane { device, queue, steps: mine.map(StepId::from_index).collect() }
            })
            .collect();
        self.program
    }
}

fn linear(norm: Option<WeightId>, weights: Vec<WeightId>, then: Then, residual: bool) -> Op {
    let norm = norm.map(|scale| Norm {
        kind: NormKind::Rms,
        scale: Some(scale),
        bias: None,
        epsilon: 1e-5,
        scale_offset: 0.0,
    });
    let biases = vec![None; weights.len()];
    Op::Linear(Linear { norm, weights, biases, then, residual })
}

fn forecast(plan: &mut Plan) {
    let model = plan.model.clone();
    plan.forecast.devices = plan
        .machine
        .devices
        .iter()
        .map(|(id, device)| DeviceForecast {
            weight_bytes: plan
                .weights
                .rows()
                .iter()
                .filter(|w| w.device == id)
                .map(|weight| weight.bytes(&device.kind))
                .sum(),
            cache_bytes: plan
                .caches
                .rows()
                .iter()
                .filter(|cache| cache.device == id)
                .map(|cache| cache.bytes(model.blocks, model.block_tokens))
                .sum(),
            buffer_bytes: 32 << 10,
            fetch_bytes: 0,
            workspace_bytes: 0,
            reserved_bytes: 0,
            capacity_bytes: device.memory_bytes,
        })
        .collect();
    let programs = plan.programs.iter().map(|program| {
        let times =
            simulate(program, |step| step.estimate_nanos, 0, &mut vec![0; program.lanes.len()]);
        let nanos = times.iter().map(|&(_, _, end)| end).max().unwrap_or(0);
        ProgramForecast { program: program.name.clone(), nanos, busiest_lane_nanos: nanos / 2 }
    });
    plan.forecast.programs = programs.collect();
    plan.forecast.candidates = vec![
        Candidate {
            name: "as planned".into(),
            prefill_nanos: Some(plan.forecast.programs[0].nanos),
            decode_nanos: Some(plan.forecast.programs[1].nanos),
            missing: None,
        },
        Candidate {
            name: "all on the first device".into(),
            prefill_nanos: None,
            decode_nanos: None,
            missing: Some((DeviceId::from_index(0), 1 << 20)),
        },
    ];
}

/// Ready, start and end of every step when each takes `nanos`.
fn simulate(
    program: &Program,
    mut nanos: impl FnMut(&Step) -> u64,
    from: u64,
    free: &mut [u64],
) -> Vec<(u64, u64, u64)> {
    let mut lane_of = vec![0; program.steps.len()];
    for (number, lane) in program.lanes.iter().enumerate() {
        lane.steps.iter().for_each(|step| lane_of[step.index()] = number);
    }
    // Steps are numbered in an order in which they can run.
    let mut times: Vec<(u64, u64, u64)> = Vec::with_capacity(program.steps.len());
    for (id, step) in program.steps.iter() {
        let lane = lane_of[id.index()];
        let ready = free[lane].max(from);
        let waited = step.waits.iter().map(|wait| times[wait.index()].2).max().unwrap_or(0);
        let start = ready.max(waited);
        let end = start + nanos(step);
        free[lane] = end;
        times.push((ready, start, end));
    }
    times
}

/// A trace of one prefill and then decodes until there are at least `spans` spans.
pub fn trace(plan: &Plan, fingerprint: u64, spans: usize) -> Trace {
    let mut trace = Trace { version: ir::trace::VERSION, plan: fingerprint, ..Trace::default() };
    let mut random = Random(42);
    let mut free: Vec<u64> = vec![0; plan.programs[0].lanes.len()];
    let mut start = 1_000;
    while trace.spans.len() < spans {
        let number = usize::from(!trace.runs.is_empty());
        let program = &plan.programs[number];
        free.resize(program.lanes.len(), 0);
        let mut noisy = |step: &Step| {
            // Measured times scatter around 12 % more than predicted; one in fifty is half as long again.
            let slow = if random.below(50) == 0 { 150 } else { 112 };
            step.estimate_nanos * (slow + random.below(16)) / 108
        };
        let times = simulate(program, &mut noisy, start, &mut free);
        let end = times.iter().map(|times| times.2).max().unwrap_or(start);
        let run = trace.runs.len() as u32;
        let tokens = program.max.tokens;
        trace.runs.push(TracedRun {
            program: number as u32,
            tokens,
            sequences: 1,
            past: run,
            start,
            end,
        });
        for (number, lane) in program.lanes.iter().enumerate() {
            for &step in &lane.steps {
                let (ready, start, end) = times[step.index()];
                trace.spans.push(Span { run, step, lane: number as u32, ready, start, end });
            }
        }
        start = end + 5_000;
    }
    trace
}

/// Splitmix64 (Steele, Lea and Flood 2014).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}
