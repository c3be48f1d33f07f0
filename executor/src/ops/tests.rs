//! Kernels of ours beside their plain Burn form: every operation of a plan gets the same inputs in both, at every level
//! of the instruction set, in runs of many tokens and of one.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use ::tests::machines::{gpu, linked};
use ::tests::toys::{FeedForward, Habits, Toy};
use compiler::options::Request;
use ir::machine::Machine;
use ir::model::{CheckpointFile, Model};
use ir::plan::{Action, Phase};
use ir::tensor::{DType, Format};

use super::*;
use crate::bind::{Device, Form, Shared};
use crate::checkpoint::Checkpoint;
use crate::kernels::cpu::isa::Isa;
use crate::kernels::cpu::testing::{Random, distance, on_its_own_thread};
use crate::load::{Kernels, Options};
use crate::slots::{Slots, Uses};

/// A plan for one device of a machine.
pub(crate) fn plan(
    model: &Model,
    (machine, device): (&Machine, &str),
    format: Format,
    kv_type: DType,
) -> Plan {
    let options = compiler::Options {
        formats: vec![format.to_string().parse().unwrap()],
        kv_type: Some(kv_type),
        max_sequences: 4,
        context: Some(96),
        request: Request::Pipeline(vec![device.to_owned()]),
        ..compiler::Options::default()
    };
    compiler::compile(model, machine, &options, &mut |_, _| ()).unwrap()
}

/// This machine's NUMA nodes beside a GPU that it need not have.
pub(crate) fn beside_a_gpu() -> Machine {
    let machine = probe::machine(None).unwrap();
    let nodes = machine.devices.rows().iter().filter(|device| !device.kind.is_gpu());
    linked([gpu(0, 4 << 30)].into_iter().chain(nodes.cloned()).collect())
}

/// The plan's device with the kernels that the options name.
fn bound(plan: &Plan, checkpoint: &Checkpoint, options: &Options) -> Cpu {
    let numa = plan.machine.device("numa0").unwrap();
    let shared = Shared::new(plan, options);
    let device = Device::bind(plan, numa, checkpoint, options, &shared, |_| true);
    match device.unwrap().form {
        Form::Cpu(cpu) => cpu,
        Form::Gpu(_) => unreachable!("the plan is for a NUMA node"),
    }
}

/// Two prompts at once, more of the first one, a token of it, tokens of three sequences, and another prompt, of more
/// tokens than GPUs multiply by kernels of their own; with the phase of each.
pub(super) fn batches(vocabulary: u32) -> Vec<(Phase, Batch)> {
    let mut random = Random(7);
    // Of nine blocks of 32 tokens some, in no order.
    let blocks: [&[u32]; 3] = [&[7, 0, 8], &[3], &[5]];
    let mut batch = |parts: &[(usize, usize, usize)], wants_all| {
        let mut batch = Batch::default();
        for &(sequence, tokens, past) in parts {
            let tokens: Vec<u32> =
                (0..tokens).map(|_| (random.next() % u64::from(vocabulary)) as u32).collect();
            let end = past + tokens.len();
            batch.push(&tokens, past, end, blocks[sequence], wants_all);
        }
        batch
    };
    vec![
        (Phase::Prefill, batch(&[(0, 37, 0), (1, 21, 0)], false)),
        (Phase::Prefill, batch(&[(0, 19, 37)], false)),
        (Phase::Decode, batch(&[(0, 1, 56)], true)),
        (Phase::Decode, batch(&[(0, 1, 57), (1, 1, 21), (2, 1, 0)], true)),
        (Phase::Prefill, batch(&[(0, 90, 0)], false)),
    ]
}

/// How far the kernels of an operation may be off, as a share of the largest element: sums are in another order, and
/// activations and caches have fewer bits than Burn's.
fn tolerance(plan: &Plan, op: &Op, isa: Isa) -> f64 {
    if let Op::Attention(attention) = op {
        return match plan.caches[attention.cache].dtype {
            DType::F16 => 2e-3,
            DType::Bf16 => 1e-2,
            DType::I8 => 3e-2,
            DType::F32 | DType::I32 | DType::U8 => 2e-5,
        };
    }
    let multiplies = matches!(op, Op::Linear(_) | Op::Experts(_));
    let formats = op.weights().into_iter().map(|weight| plan.weights[weight].format);
    let most = formats.filter(|_| multiplies).map(|format| match format {
        Format::F32 | Format::F16 => 2e-5,
        Format::Bf16 | Format::Bf12 => 5e-3,
        // Tiles round the weights once more: by 0.0215 of a gate on Emerald Rapids.
        Format::Q8 | Format::Q4 if isa == Isa::Amx => 3e-2,
        Format::Q8 | Format::Q4 => 2e-2,
    });
    // Experts multiply twice.
    let products = if matches!(op, Op::Experts(_)) { 2.0 } else { 1.0 };
    products * most.fold(2e-5, f64::max)
}

pub(super) fn compare(value: Value, expected: &Value, most: f64, at: &str) {
    if let Value::Int(_) = value {
        let [value, expected] = [value, expected.clone()].map(|value| {
            let data = value.into_data().convert::<i32>();
            data.as_slice::<i32>().unwrap().to_vec()
        });
        assert_eq!(value, expected, "{at}");
        return;
    }
    let expected = expected.clone().into_data();
    let data = value.into_data();
    assert_eq!(data.shape(), expected.shape(), "{at}");
    let wide = expected.as_slice::<f32>().unwrap().iter().copied().map(f64::from);
    let off = distance(data.as_slice().unwrap(), &wide.collect::<Vec<f64>>());
    assert!(off <= most, "{at}: {off} of {most}");
}

/// Runs every step of every batch both ways; what follows is fed what Burn makes.
fn walk(plan: &Plan, folder: &Path, isa: Isa) {
    let checkpoint = Checkpoint::open(&plan.files, folder).unwrap();
    let options = Options { isa: Some(isa), threads: Some(2), ..Options::default() };
    let mut ours = bound(plan, &checkpoint, &options);
    let mut burn = bound(plan, &checkpoint, &Options { kernels: Kernels::Plain, ..options });
    for (run, (phase, batch)) in batches(plan.model.vocabulary).into_iter().enumerate() {
        let parts = batch.parts().len() as u32;
        let program = plan
            .programs
            .iter()
            .find(|program| program.phase == phase && program.max_sequences >= parts)
            .unwrap();
        batch.check(program, &plan.model).unwrap();
        let scope = Scope { plan, batch: &batch, run: run as u32 };
        let slots = Slots::new(&Arc::new(Uses::of(program)));
        for step in program.steps.rows() {
            let Action::Run(op) = &step.action else { panic!("{} is not computed", step.name) };
            let at = format!("{} of {} in run {run} by {isa}", step.name, plan.model.name);
            let inputs = || -> Vec<Value> {
                step.reads.iter().map(|&buffer| slots.read(buffer).unwrap()).collect()
            };
            let expected = super::run(op, &mut burn, scope, inputs()).expect(&at);
            let made = super::run(op, &mut ours, scope, inputs()).expect(&at);
            assert_eq!(made.len(), expected.len(), "{at}");
            for (made, expected) in made.into_iter().zip(&expected) {
                compare(made, expected, tolerance(plan, op, isa), &at);
            }
            for (&buffer, value) in step.writes.iter().zip(expected) {
                slots.write(buffer, value);
            }
        }
    }
}

/// Walks a plan on a thread of its own at every level: teams bind the thread that makes them.
fn walk_at_every_level(plan: &Plan, folder: &Path) {
    for isa in Isa::available() {
        on_its_own_thread(|| walk(plan, folder, isa));
    }
}

/// The toy with weights of a file: vectors of about one, and matrices that keep an activation's size.
pub(crate) fn written(toy: &Toy, folder: &Path) -> Model {
    let mut model = toy.model().unwrap();
    let bytes: usize = model.files.rows()[0].bytes as usize;
    let mut values = vec![0.0_f32; bytes / size_of::<f32>()];
    let mut random = Random(11);
    for weight in model.weights.rows() {
        let (start, end) = weight.sources[0].span();
        let size = match weight.shape.as_slice() {
            [.., columns] if weight.shape.len() > 1 => 4.0 / (*columns as f32).sqrt(),
            _ => 1.0,
        };
        let range = start as usize / size_of::<f32>()..end as usize / size_of::<f32>();
        values[range].fill_with(|| random.float() * size);
    }
    let contents: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let path = folder.join("model.safetensors");
    fs::write(&path, &contents).unwrap();
    let fingerprint = ir::fingerprint(&contents);
    model.files.rows_mut()[0] = CheckpointFile { path, bytes: bytes as u64, fingerprint };
    model
}

fn agrees(toy: &Toy) {
    let types = [DType::F32, DType::F16, DType::Bf16, DType::I8];
    let folder = tempfile::tempdir().unwrap();
    let model = written(toy, folder.path());
    let machine = probe::machine(None).unwrap();
    for (format, kv_type) in Format::ALL.into_iter().zip(types.into_iter().cycle()) {
        let plan = plan(&model, (&machine, "numa0"), format, kv_type);
        walk_at_every_level(&plan, folder.path());
    }
}

/// Not whole in blocks, groups and panels, but that blocks are whole in rows.
fn toy() -> Toy {
    Toy {
        features: 320,
        heads: 10,
        head_dim: 32,
        intermediate: 608,
        vocabulary: 333,
        ..Toy::llama()
    }
}

/// Gated layers, without and with norms of heads and branches; inner values of the latter are whole operands of GPUs.
pub(crate) fn gated() -> [Toy; 2] {
    let habits = Habits { has_head_norms: true, has_branch_norms: true, ..Habits::default() };
    [toy(), Toy { habits, intermediate: 640, ..toy() }]
}

/// Plain layers with biases.
pub(super) fn plain_with_biases() -> Toy {
    let habits = Habits {
        has_biases: true,
        has_positions: true,
        is_parallel: true,
        has_soft_cap: true,
        is_tied: true,
        ..Habits::default()
    };
    Toy { feed_forward: FeedForward::Plain, habits, ..toy() }
}

/// Experts, some of them shared.
pub(super) fn mixture() -> Toy {
    let feed_forward = FeedForward::Mixture { experts: 5, used: 2, is_shared: true };
    Toy { feed_forward, intermediate: 96, ..toy() }
}

#[test]
fn kernels_agree_with_burn_on_gated_layers() {
    gated().iter().for_each(agrees);
}

#[test]
fn kernels_agree_with_burn_on_plain_layers_with_biases() {
    agrees(&plain_with_biases());
}

#[test]
fn kernels_agree_with_burn_on_mixtures() {
    agrees(&mixture());
}

#[test]
fn kernels_agree_with_burn_on_every_family() {
    let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden");
    let machine = probe::machine(None).unwrap();
    let mut families = 0;
    for entry in fs::read_dir(goldens).unwrap() {
        let folder = entry.unwrap().path();
        if folder.is_dir() {
            let model = models::lower(&folder).unwrap();
            let plan = plan(&model, (&machine, "numa0"), Format::F32, DType::F32);
            walk_at_every_level(&plan, &folder);
            families += 1;
        }
    }
    assert!(families > 0, "there are no golden checkpoints");
}
