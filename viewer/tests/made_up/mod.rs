//! Plans and traces made up from a few numbers: sound, always the same, of any size.

#![allow(
    dead_code,
    unreachable_pub,
    unused_imports,
    clippy::allow_attributes,
    clippy::unwrap_used,
    reason = "each test crate uses a part of it"
)]

mod layers;
mod program;
mod times;

use ir::asked::Asked;
use ir::forecast::{Candidate, Forecast, ProgramForecast, RunForecast};
use ir::id::{DeviceId, Id as _, Table};
use ir::machine::{
    Device, DeviceKind, Host, LinearRate, Link, Machine, RatePoint, RateSource, Rates,
};
use ir::model::CheckpointFile;
use ir::plan::{ModelInfo, Phase, Plan, VERSION, Weight};
use ir::tensor::{Extent, Format};

use layers::{hold, layer_bytes};
use program::program;
use times::simulate;

pub use times::{Pace, Random, trace, trace_at};

/// How the layers lie on the devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// Consecutive layers on each device, as many as fit.
    Pipeline,
    /// Every layer on all devices, in equal parts.
    Tensor,
    /// Attention on the last device and MLPs on the first, a GPU. Of prompts the GPU computes all: it fetches the
    /// matrices of attention and borrows the caches.
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
    /// Matrices in four bits, which GPUs hold unpacked as well; and NUMA nodes cache bytes.
    pub packed: bool,
}

impl Wish {
    pub fn new(layers: u32, gpus: u32, nodes: u32, style: Style) -> Self {
        let gpu_layers = if style == Style::Pipeline { 4 } else { layers };
        Wish { layers, gpus, nodes, style, gpu_layers, hidden: 64, packed: false }
    }
}

const CONTEXT: u32 = 64;
const PROMPT: u32 = 32;
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
        asked: Asked::default(),
        machine,
        files: [CheckpointFile {
            path: "model.safetensors".into(),
            bytes: 1 << 50,
            fingerprint: wish.layers.into(),
        }]
        .into_iter()
        .collect(),
        weights: Table::default(),
        caches: Table::default(),
        ropes: Table::default(),
        programs: Vec::new(),
        captures_prompts: false,
        causes: Table::default(),
        forecast: Forecast::default(),
    };
    let layers = hold(&mut plan, wish);
    for (name, phase, tokens) in
        [("prefill", Phase::Prefill, PROMPT), ("decode1", Phase::Decode, 1)]
    {
        let max = Extent { tokens, rows: 1 };
        let program = program(&mut plan, wish, &layers, name, phase, max);
        plan.programs.push(program);
    }
    if wish.style == Style::Streaming || wish.packed {
        // Nearly full.
        let needed = ir::check::memory(&plan)[DeviceId::from_index(0)].needed_bytes();
        plan.machine.devices.rows_mut()[0].memory_bytes = needed + (16 << 10);
    }
    forecast(&mut plan);
    plan
}

fn machine(wish: Wish) -> Machine {
    let layer = layer_bytes(wish.hidden);
    let device = |name: String, kind, memory_bytes, speed: f64| Device {
        name,
        kind,
        memory_bytes,
        cpu_caches: Vec::new(),
        rates: Rates {
            source: RateSource::Calibrated,
            read_bytes_per_sec: speed,
            step_nanos: 2e3,
            linear: vec![LinearRate {
                format: Format::Bf16,
                points: vec![RatePoint { tokens: 1, weights_per_sec: speed / 2.0, nanos: 0.0 }],
            }],
            attention_flops_per_sec: speed * 10.0,
            attention_nanos: 0.0,
            prompt_score_nanos: 0.0,
            score_nanos: 0.0,
            experts: Vec::new(),
            shared_experts: Vec::new(),
            cache_bytes_per_sec: speed,
            other_caches: Vec::new(),
            beside_fetch: 1.0,
        },
    };
    // Token table, head, buffers, and what GPUs sum with.
    let exchange = if wish.gpus > 1 { 32 << 10 } else { 0 };
    let rest = u64::from(VOCABULARY * wish.hidden) * 4 + u64::from(wish.hidden) * 2048 + exchange;
    let gpus = (0..wish.gpus).map(|i| {
        let kind = DeviceKind::Gpu {
            ordinal: i,
            reserved_bytes: 0,
            library_bytes: 0,
            launch_bytes: 0,
            has_warpgroups: false,
        };
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
            links.push(Link::new(from, to, 1e9, 4e3));
        }
    }
    let host =
        Host { cpu: "made up".into(), cpus: 2 * wish.nodes, nodes: wish.nodes, gpus: vec![] };
    Machine { host, devices, links, collectives: None }
}

/// A prompt of a quarter as long; decode with nothing cached.
fn other_runs(phase: Phase, nanos: u64) -> Vec<RunForecast> {
    match phase {
        Phase::Prefill => vec![RunForecast { tokens: PROMPT / 4, nanos: nanos / 3 }],
        Phase::Decode => vec![RunForecast { tokens: 0, nanos: nanos * 15 / 16 }],
    }
}

fn forecast(plan: &mut Plan) {
    plan.forecast.devices = ir::check::memory(plan);
    let programs = plan.programs.iter().map(|program| {
        let times =
            simulate(program, |step| step.estimate_nanos, 0, &mut vec![0; program.lanes.len()]);
        let nanos = times.iter().map(|&(_, _, end)| end).max().unwrap_or(0);
        ProgramForecast {
            program: program.name.clone(),
            tokens: if program.phase == Phase::Decode { CONTEXT / 2 } else { program.max.tokens },
            nanos,
            busiest_lane_nanos: nanos / 2,
            behind: None,
            others: other_runs(program.phase, nanos),
        }
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
