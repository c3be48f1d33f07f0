//! What the layers of a made-up plan have on their devices: weights, caches and causes.

use ir::graph::{Cause, Reason, RunnerUp};
use ir::id::{CacheId, CauseId, DeviceId, FileId, Id as _, WeightId};
use ir::plan::{Cache, Phase, Plan, Weight};
use ir::tensor::{DType, Format};
use ir::weight::Source;

use super::{CONTEXT, Style, Wish};

/// Weights and cache of one layer.
pub(super) fn layer_bytes(hidden: u32) -> u64 {
    let square = u64::from(hidden) * u64::from(hidden);
    // q, k, v, o and three matrices of four times the width, in two bytes; then cached keys and values.
    2 * (4 * square + 12 * square) + 8 * u64::from(hidden) + u64::from(CONTEXT * hidden) * 4
}

/// What one layer has on its devices.
#[derive(Clone)]
pub(super) struct Layer {
    pub(super) devices: Vec<DeviceId>,
    pub(super) mlp: Vec<DeviceId>,
    pub(super) weights: Vec<[WeightId; 9]>,
    pub(super) caches: Vec<CacheId>,
    pub(super) cause: CauseId,
}

impl Layer {
    /// As a phase computes it: when streaming, the first device computes all of a prompt.
    pub(super) fn of_phase(&self, plan: &mut Plan, wish: Wish, phase: Phase) -> Self {
        let mut layer = self.clone();
        if (wish.style, phase) == (Style::Streaming, Phase::Prefill) {
            layer.devices.clone_from(&layer.mlp);
            let norm = plan.weights[layer.weights[0][7]].clone();
            layer.weights[0][7] = plan.weights.push(Weight { device: layer.mlp[0], ..norm });
        }
        layer
    }
}

/// Gives every layer its devices, and these what it needs.
pub(super) fn hold(plan: &mut Plan, wish: Wish) -> Vec<Layer> {
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
                let format = if wish.packed { Format::Q4 } else { Format::Bf16 };
                let row = weight(name, device, format, shape);
                let also_unpacked = plan.unpacked_bytes(&row).is_some();
                plan.weights.push(Weight { also_unpacked, ..row })
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
            let is_gpu = plan.machine.devices[device].kind.is_gpu();
            layer.caches.push(plan.caches.push(Cache {
                name: format!("layers.{number}.self_attn"),
                device,
                dtype: if wish.packed && !is_gpu { DType::I8 } else { DType::Bf16 },
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
        Style::Streaming => {
            let device = DeviceId::from_index(0);
            let other = RunnerUp { devices: vec![device], gap_nanos: -20_000 };
            let missing_bytes = (8 + 8 * u64::from(layer)) << 10;
            Cause { reason: Reason::Memory { device, missing_bytes }, runner_up: Some(other) }
        }
        Style::Pipeline => {
            let device = DeviceId::from_index((wish.gpus + wish.nodes) as usize - 1);
            let other = RunnerUp { devices: vec![device], gap_nanos: 31_000 };
            Cause { reason: Reason::Fastest, runner_up: (device != devices[0]).then_some(other) }
        }
    }
}

pub(super) fn weight(name: String, device: DeviceId, format: Format, shape: Vec<u32>) -> Weight {
    let source = Source::contiguous(FileId::from_index(0), DType::Bf16, 1024, &shape);
    Weight { name, device, format, shape, also_unpacked: false, sources: vec![source] }
}
