//! How the plans are put together, lane by lane.

use ir::asked::Asked;
use ir::forecast::Forecast;
use ir::graph::{Cause, Reason};
use ir::id::{BufferId, Id as _, StepId, Table, WeightId};
use ir::layout::Move;
use ir::machine::{Device, DeviceKind, Link, Machine, RateSource, Rates};
use ir::model::CheckpointFile;
use ir::op::{
    Activation, Attention, Experts, Frequencies, Linear, Norm, NormKind, Op, Pairing, Rope, Then,
};
use ir::plan::{
    Action, Algorithm, Buffer, Cache, Lane, ModelInfo, Phase, Plan, Program, Queue, Step, VERSION,
    Weight,
};
use ir::smallvec;
use ir::tensor::{DType, Dim, Extent, Format, TensorType};
use ir::weight::Source;

use super::{FEATURES, PANEL_BYTES, b, d};

const HEAD_DIM: u32 = 4;
const VOCABULARY: u32 = 32;

/// A plan of one program that grows step by step.
pub(super) struct Builder {
    pub(super) plan: Plan,
    pub(super) program: Program,
    collectives: usize,
}

impl Builder {
    pub(super) fn new(devices: usize) -> Self {
        let rates = Rates {
            source: RateSource::Nominal,
            read_bytes_per_sec: 1e10,
            step_nanos: 1e3,
            linear: vec![],
            attention_flops_per_sec: 1e10,
            attention_nanos: 0.0,
            prompt_score_nanos: 0.0,
            score_nanos: 0.0,
            experts: Vec::new(),
            shared_experts: Vec::new(),
            cache_bytes_per_sec: 1e10,
            other_caches: Vec::new(),
            beside_fetch: 1.0,
        };
        let device = |index: usize| Device {
            name: format!("numa{index}"),
            kind: DeviceKind::Numa { node: 0, cpus: vec![index as u32] },
            memory_bytes: 1 << 20,
            cpu_caches: Vec::new(),
            rates: rates.clone(),
        };
        let pairs = (0..devices).flat_map(|from| (0..devices).map(move |to| (from, to)));
        let links = pairs
            .filter(|(from, to)| from != to)
            .map(|(from, to)| Link::new(d(from), d(to), 1e10, 1e3))
            .collect();
        let machine =
            Machine { devices: (0..devices).map(device).collect(), links, ..Machine::default() };
        let cause = Cause { reason: Reason::Fastest, runner_up: None };
        let file = CheckpointFile { path: "model".into(), bytes: 1 << 20, fingerprint: 0 };
        let rope = Rope {
            pairing: Pairing::Halves,
            dims: HEAD_DIM,
            magnitude: 1.0,
            frequencies: Frequencies::Fixed(vec![1.0, 0.5]),
        };
        let model = ModelInfo {
            name: "toy".into(),
            architecture: "Toy".into(),
            folder: "toy".into(),
            vocabulary: VOCABULARY,
            context: 64,
            max_sequences: 1,
            block_tokens: 16,
            blocks: 4,
        };
        let lane = |index| Lane { device: d(index), queue: Queue::Compute, steps: Vec::new() };
        Self {
            plan: Plan {
                version: VERSION,
                model,
                asked: Asked::default(),
                machine,
                files: Table::from_iter([file]),
                weights: Table::default(),
                caches: Table::default(),
                ropes: Table::from_iter([rope]),
                programs: vec![],
                captures_prompts: true,
                causes: Table::from_iter([cause]),
                forecast: Forecast::default(),
            },
            program: Program {
                name: "prefill".into(),
                phase: Phase::Prefill,
                max: Extent { tokens: 8, rows: 2 },
                max_sequences: 1,
                buffers: Table::default(),
                steps: Table::default(),
                lanes: (0..devices).map(lane).collect(),
                output: b(0),
            },
            collectives: 0,
        }
    }

    fn weight(&mut self, device: usize, shape: &[u32]) -> WeightId {
        let format = if shape.len() == 1 { Format::F32 } else { Format::Bf16 };
        let file = ir::id::FileId::from_index(0);
        self.plan.weights.push(Weight {
            name: format!("weight{}", self.plan.weights.len()),
            device: d(device),
            format,
            shape: shape.to_vec(),
            also_unpacked: false,
            sources: vec![Source::contiguous(file, DType::Bf16, 16, shape)],
        })
    }

    /// Adds a step to a lane; it waits for those that write what it reads in other lanes.
    fn step(
        &mut self,
        lane: usize,
        name: &str,
        action: Action,
        reads: &[BufferId],
        writes: &[TensorType],
    ) -> Vec<BufferId> {
        let program = &mut self.program;
        let waits = program
            .steps
            .iter()
            .filter(|(_, step)| step.writes.iter().any(|buffer| reads.contains(buffer)))
            .map(|(id, _)| id)
            .filter(|id| !program.lanes[lane].steps.contains(id))
            .collect();
        let writes: Vec<BufferId> = writes
            .iter()
            .map(|ty| program.buffers.push(Buffer { device: d(lane), ty: ty.clone() }))
            .collect();
        let id = program.steps.push(Step {
            name: name.into(),
            action,
            reads: reads.into(),
            writes: writes.clone().into(),
            frees: smallvec![],
            waits,
            estimate_nanos: 1000,
            cause: ir::id::CauseId::from_index(0),
        });
        program.lanes[lane].steps.push(id);
        writes
    }

    fn run(
        &mut self,
        lane: usize,
        name: &str,
        op: Op,
        reads: &[BufferId],
        features: u32,
    ) -> BufferId {
        let writes = [TensorType::activation(features)];
        self.step(lane, name, Action::Run(op), reads, &writes)[0]
    }

    fn linear(
        &mut self,
        lane: usize,
        name: &str,
        x: BufferId,
        inputs: u32,
        outputs: u32,
    ) -> BufferId {
        let weight = self.weight(lane, &[outputs, inputs]);
        self.run(lane, name, plain(weight), &[x], outputs)
    }

    pub(super) fn embed(&mut self, lane: usize) -> BufferId {
        let table = self.weight(lane, &[VOCABULARY, FEATURES]);
        self.run(lane, "embed", Op::Embed { table, scale: 1.0 }, &[], FEATURES)
    }

    fn attention(&mut self, lane: usize, x: BufferId, heads: u32, kv_heads: u32) -> BufferId {
        let cache = self.plan.caches.push(Cache {
            name: "attention".into(),
            device: d(lane),
            dtype: DType::F32,
            kv_heads,
            head_dim: HEAD_DIM,
        });
        let [q, k, v] = [("q", heads), ("k", kv_heads), ("v", kv_heads)]
            .map(|(name, heads)| self.linear(lane, name, x, FEATURES, heads * HEAD_DIM));
        let op = Op::Attention(Attention {
            cache,
            heads,
            kv_heads,
            head_dim: HEAD_DIM,
            group: 2,
            first_head: 0,
            scale: 0.5,
            window: None,
            soft_cap: None,
            q_norm: None,
            k_norm: None,
            rope: Some(ir::id::RopeId::from_index(0)),
        });
        self.run(lane, "attention", op, &[q, k, v], heads * HEAD_DIM)
    }

    /// Brings a weight of the second device to the first.
    fn fetch(
        &mut self,
        name: &str,
        shape: &[u32],
        offset: u64,
        waits: &[StepId],
    ) -> (WeightId, BufferId) {
        let weight = self.weight(1, shape);
        let ty = self.plan.weights[weight].packed_type().expect("it is a matrix");
        let action = Action::Fetch { weight, offset };
        let buffer = self.step(1, name, action, &[], &[ty])[0];
        self.program.buffers[buffer].device = d(0);
        let step = self.program.steps.ids().last().expect("a step was added");
        self.program.steps[step].waits.extend_from_slice(waits);
        (weight, buffer)
    }

    pub(super) fn fetched_linear(
        &mut self,
        name: &str,
        x: BufferId,
        offset: u64,
        waits: &[StepId],
    ) -> BufferId {
        let (weight, buffer) =
            self.fetch(&format!("fetch of {name}"), &[FEATURES, FEATURES], offset, waits);
        let op = plain(weight);
        self.run(0, name, op, &[x, buffer], FEATURES)
    }

    pub(super) fn fetched_mixture(&mut self, x: BufferId, offset: u64) -> BufferId {
        let chosen = self.route(0, x);
        // Four experts of one panel each.
        let [gate, up, down] = [
            ("gate", 0, [4, 16, FEATURES]),
            ("up", 4, [4, 16, FEATURES]),
            ("down", 8, [4, FEATURES, 16]),
        ]
        .map(|(name, panels, shape)| {
            self.fetch(&format!("fetch of {name}"), &shape, offset + panels * PANEL_BYTES, &[])
        });
        let op = Op::Experts(Experts {
            gate: gate.0,
            up: up.0,
            down: down.0,
            activation: Activation::Silu,
            part: None,
        });
        let reads = [x, chosen[0], chosen[1], gate.1, up.1, down.1];
        self.run(0, "experts", op, &reads, FEATURES)
    }

    pub(super) fn attention_block(&mut self, lane: usize, x: BufferId) -> BufferId {
        let norm = Norm {
            kind: NormKind::Rms,
            scale: Some(self.weight(lane, &[FEATURES])),
            bias: None,
            epsilon: 1e-5,
            scale_offset: 0.0,
        };
        let normed = self.run(lane, "norm", Op::Norm(norm), &[x], FEATURES);
        let values = self.attention(lane, normed, 2, 1);
        let made = self.linear(lane, "o", values, 2 * HEAD_DIM, FEATURES);
        self.run(lane, "add", Op::Add, &[x, made], FEATURES)
    }

    /// Attention that two devices share, and the sum of what they make on each.
    pub(super) fn shared_attention(&mut self) -> Vec<BufferId> {
        let x = self.embed(0);
        let copy = self.collective("x", Move::Broadcast { from: d(0) }, &[1], &[x], FEATURES)[0];
        let terms = [(0, x), (1, copy)].map(|(device, x)| self.half(device, x));
        self.collective("o", Move::AllReduce, &[0, 1], &terms, FEATURES)
    }

    /// One of two devices' share of attention: a term of the sum.
    fn half(&mut self, lane: usize, x: BufferId) -> BufferId {
        let values = self.attention(lane, x, 2, 1);
        self.linear(lane, "o", values, 2 * HEAD_DIM, FEATURES)
    }

    pub(super) fn mixture_block(&mut self, lane: usize, x: BufferId) -> BufferId {
        let chosen = self.route(lane, x);
        let op = Op::Experts(Experts {
            gate: self.weight(lane, &[4, 16, FEATURES]),
            up: self.weight(lane, &[4, 16, FEATURES]),
            down: self.weight(lane, &[4, FEATURES, 16]),
            activation: Activation::Silu,
            part: None,
        });
        self.run(lane, "experts", op, &[x, chosen[0], chosen[1]], FEATURES)
    }

    fn route(&mut self, lane: usize, x: BufferId) -> Vec<BufferId> {
        let logits = self.linear(lane, "router", x, FEATURES, 4);
        let ids = TensorType { dtype: DType::I32, ..TensorType::activation(2) };
        let route = Action::Run(Op::Route { used: 2, renormalise: true });
        self.step(lane, "route", route, &[logits], &[ids, TensorType::activation(2)])
    }

    pub(super) fn transfer(&mut self, from: usize, to: usize, x: BufferId) -> BufferId {
        let movement = Move::Transfer { from: d(from), to: d(to) };
        let action =
            Action::Move { movement, collective: None, slice: None, algorithm: Algorithm::Direct };
        let ty = self.program.buffers[x].ty.clone();
        self.step(to, "transfer", action, &[x], &[ty])[0]
    }

    pub(super) fn collective(
        &mut self,
        name: &str,
        movement: Move,
        members: &[usize],
        reads: &[BufferId],
        features: u32,
    ) -> Vec<BufferId> {
        let collective = Some(ir::id::CollectiveId::from_index(self.collectives));
        self.collectives += 1;
        let scatters = matches!(movement, Move::ReduceScatter { .. });
        members
            .iter()
            .map(|&member| {
                let slice = scatters.then_some((member as u32 * features, features));
                let action = Action::Move {
                    movement: movement.clone(),
                    collective,
                    slice,
                    algorithm: Algorithm::Direct,
                };
                self.step(member, name, action, reads, &[TensorType::activation(features)])[0]
            })
            .collect()
    }

    pub(super) fn head(mut self, lane: usize, x: BufferId) -> Plan {
        let rows = |features| TensorType {
            dtype: DType::F32,
            shape: smallvec![Dim::Rows, Dim::Fixed(features)],
        };
        let select = Action::Run(Op::SelectRows);
        let x = self.step(lane, "select", select, &[x], &[rows(FEATURES)])[0];
        let weight = self.weight(lane, &[VOCABULARY, FEATURES]);
        let action = Action::Run(plain(weight));
        self.program.output = self.step(lane, "head", action, &[x], &[rows(VOCABULARY)])[0];
        self.free();
        let decode = Program {
            name: "decode".into(),
            phase: Phase::Decode,
            max: Extent { tokens: 1, rows: 1 },
            ..self.program.clone()
        };
        self.plan.programs = vec![self.program, decode];
        self.plan
    }

    /// Ends each buffer at its only reader, or at a later step that waits for all its readers.
    fn free(&mut self) {
        let program = &mut self.program;
        for buffer in program.buffers.ids().filter(|&buffer| buffer != program.output) {
            let users: Vec<StepId> = program
                .steps
                .iter()
                .filter(|(_, step)| step.reads.contains(&buffer) || step.writes.contains(&buffer))
                .map(|(id, _)| id)
                .collect();
            let last = users[users.len() - 1];
            let lane = |step: StepId| {
                program
                    .lanes
                    .iter()
                    .position(|lane| lane.steps.contains(&step))
                    .expect("every step is in a lane")
            };
            let elsewhere: Vec<StepId> =
                users[1..].iter().copied().filter(|&user| lane(user) != lane(last)).collect();
            if elsewhere.is_empty() {
                program.steps[last].frees.push(buffer);
                continue;
            }
            let home = program.buffers[buffer].device;
            let later = |step: &StepId| *step > last;
            let owner = program
                .lanes
                .iter()
                .find(|lane| lane.device == home)
                .expect("every device has a lane");
            let at = owner.steps.iter().copied().find(later);
            let at = at
                .or_else(|| program.steps.ids().find(later))
                .expect("the head reads one buffer of its own device");
            program.steps[at].frees.push(buffer);
            program.steps[at].waits.extend(users);
            program.steps[at].waits.sort_unstable();
            program.steps[at].waits.dedup();
        }
    }
}

/// A linear that only multiplies.
fn plain(weight: WeightId) -> Op {
    Op::Linear(Linear {
        norm: None,
        weights: smallvec![weight],
        biases: smallvec![None],
        then: Then::Nothing,
        residual: false,
    })
}
