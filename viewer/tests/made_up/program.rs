//! The steps of a made-up program, with lanes, waits and frees.

use ir::graph::{Cause, Reason};
use ir::id::{BufferId, CauseId, CollectiveId, DeviceId, Few, Id as _, StepId, Table, WeightId};
use ir::layout::Move;
use ir::op::{Activation, Attention, Linear, Norm, NormKind, Op, Then};
use ir::plan::{
    Action, Algorithm, Buffer, FETCH_ALIGNMENT, Lane, Phase, Plan, Program, Queue, Step,
};
use ir::smallvec;
use ir::tensor::{DType, Dim, Extent, Format, TensorType};

use super::layers::{Layer, weight};
use super::{Style, VOCABULARY, Wish};

/// The program of layers that lie on their devices already.
pub(super) fn program(
    plan: &mut Plan,
    wish: Wish,
    layers: &[Layer],
    name: &str,
    phase: Phase,
    max: Extent,
) -> Program {
    let layers: Vec<Layer> = layers.iter().map(|layer| layer.of_phase(plan, wish, phase)).collect();
    let program = empty(name, phase, max);
    let mut made = Made { plan, program, owner: Vec::new(), window_bytes: 0 };
    made.fill(wish, &layers);
    made.finish()
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

/// A program under construction. Steps are pushed in an order in which they could run.
struct Made<'a> {
    plan: &'a mut Plan,
    program: Program,
    owner: Vec<(DeviceId, Queue)>,
    /// Where the next fetched weight begins.
    window_bytes: u64,
}

impl Made<'_> {
    fn buffer(&mut self, device: DeviceId, rows: Dim, features: u32) -> BufferId {
        let ty = TensorType { dtype: DType::F32, shape: smallvec![rows, Dim::Fixed(features)] };
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
        let moved = if reads.is_empty() { writes } else { reads };
        let estimate_nanos = self.estimate(device, &action, moved);
        self.owner.push((device, queue));
        self.program.steps.push(Step {
            name: name.into(),
            action,
            reads: reads.into(),
            writes: writes.into(),
            frees: Few::new(),
            waits: Few::new(),
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
        let mut reads = reads.to_vec();
        for weight in self.plan.fetched(&op, device) {
            reads.push(self.fetch(name, weight, device, cause));
        }
        self.step(name, (device, Queue::Compute), Action::Run(op), &reads, writes, cause);
    }

    fn estimate(&self, device: DeviceId, action: &Action, moved: &[BufferId]) -> u64 {
        let bytes_of = |id: &BufferId| self.program.buffers[*id].ty.bytes(self.program.max);
        let moved: u64 = moved.iter().map(bytes_of).sum();
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

    /// Brings a value to a device.
    fn bring(&mut self, name: &str, value: BufferId, to: DeviceId) -> BufferId {
        let Buffer { device: from, ty } = self.program.buffers[value].clone();
        if from == to {
            return value;
        }
        let copy = self.program.buffers.push(Buffer { device: to, ty });
        let action = Action::Move {
            movement: Move::Transfer { from, to },
            collective: None,
            slice: None,
            algorithm: Algorithm::Direct,
        };
        let cause = self.mismatch();
        self.step(name, (to, Queue::Compute), action, &[value], &[copy], cause);
        copy
    }

    /// Brings a weight to a GPU, behind all that was fetched before.
    fn fetch(&mut self, name: &str, weight: WeightId, to: DeviceId, cause: CauseId) -> BufferId {
        let ty = self.plan.weights[weight].packed_type().unwrap();
        let offset = self.window_bytes;
        let end = offset + ty.bytes(self.program.max);
        self.window_bytes = end.next_multiple_of(FETCH_ALIGNMENT);
        let copy = self.program.buffers.push(Buffer { device: to, ty });
        let action = Action::Fetch { weight, offset };
        self.step(name, (to, Queue::Copy), action, &[], &[copy], cause);
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
                    algorithm: Algorithm::Direct,
                };
                self.step(name, (device, Queue::Compute), action, terms, &[sum], cause);
                sum
            })
            .collect()
    }

    fn fill(&mut self, wish: Wish, layers: &[Layer]) {
        let hidden = wish.hidden;
        let first = layers[0].devices.clone();
        let (cause, last_cause) = self.outer_causes(wish, layers);
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
        let scale = self.weight("norm.weight", last, Format::F32, vec![hidden]);
        let head = self.weight("lm_head.weight", last, Format::Bf16, vec![VOCABULARY, hidden]);
        let logits = self.buffer(last, Dim::Rows, VOCABULARY);
        let op = linear(Some(scale), vec![head], Then::Nothing, false);
        self.run("lm_head", last, op, &[rows], &[logits], last_cause);
        self.program.output = logits;
    }

    /// Why the token table and the head are where they are.
    fn outer_causes(&mut self, wish: Wish, layers: &[Layer]) -> (CauseId, CauseId) {
        match wish.style {
            Style::Pipeline | Style::Tensor => (layers[0].cause, layers[layers.len() - 1].cause),
            Style::Streaming => {
                let fastest = Cause { reason: Reason::Fastest, runner_up: None };
                let fastest = self.plan.causes.push(fastest);
                (fastest, fastest)
            }
        }
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
    let biases = smallvec![None; weights.len()];
    Op::Linear(Linear { norm, weights: weights.into(), biases, then, residual })
}
