//! Kernels of GPUs beside their plain Burn form: every operation of a plan gets the same inputs in both, in runs of many
//! tokens and of one, with the vendor's library and without.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use ::tests::toys::Toy;
use burn::tensor::Device as BurnDevice;
use half::{bf16, f16};
use ir::machine::{DeviceKind, Machine};
use ir::op::Op;
use ir::plan::{Action, Plan};
use ir::tensor::{DType, Format};
use ir::workspace::{WARPGROUP_COLUMNS, product_format};

use super::copies::collect;
use super::state::{Operand, State};
use crate::bind::{Device, Form, Shared};
use crate::checkpoint::Checkpoint;
use crate::kernels::gpu::testing;
use crate::kernels::gpu::warpgroup::RightOperands;
use crate::known_graphs::KnownGraphs;
use crate::load::{GpuDriver, Options};
use crate::ops::tests::{
    batches, beside_a_gpu, compare, gated, mixture, plain_with_biases, plan, written,
};
use crate::ops::{Scope, plain};
use crate::run::Run;
use crate::slots::{Uses, Value};
use crate::team::Team;

/// This machine, with one of its GPUs; where there is none, with one in software.
fn machine(has_library: bool) -> Machine {
    let mut machine = probe::machine(None).unwrap();
    if machine.device("gpu0").is_none() {
        machine = beside_a_gpu();
    }
    for device in machine.devices.rows_mut() {
        if let (DeviceKind::Gpu { library_bytes, .. }, false) = (&mut device.kind, has_library) {
            *library_bytes = 0;
        }
    }
    machine
}

/// What a buffer holds.
fn value(state: &State, operand: &Operand) -> Value {
    let &Operand { rows, columns, dtype, .. } = operand;
    if let Some(order) = operand.order {
        return Value::of_floats(rows_of_operands(state, operand, order), rows, columns);
    }
    let bytes = state.gpu.read(&operand.span.part(0, rows * operand.row_bytes())).unwrap();
    let floats = match dtype {
        DType::F32 => collect(&bytes),
        DType::F16 => collect::<f16>(&bytes).into_iter().map(f16::to_f32).collect(),
        DType::Bf16 => collect::<bf16>(&bytes).into_iter().map(bf16::to_f32).collect(),
        DType::I32 => return Value::of_ints(collect(&bytes), rows, columns),
        DType::U8 | DType::I8 => unreachable!("no step writes bytes"),
    };
    Value::of_floats(floats, rows, columns)
}

/// Right operands, row after row.
fn rows_of_operands(state: &State, operand: &Operand, order: RightOperands) -> Vec<f32> {
    let &Operand { rows, columns, .. } = operand;
    let bytes = state.gpu.read(&operand.span.part(0, order.count() * columns * 2)).unwrap();
    let elements = collect::<bf16>(&bytes);
    let element = |at: usize| {
        let (token, feature) = (at / columns, at % columns);
        // Each eight of a block of 32 has every fourth pair, or its neighbours.
        let (eight, of_eight) = if order.is_spread {
            let pair = feature % 32 / 2;
            (feature / 32 * 4 + pair % 4, pair / 4 * 2 + feature % 2)
        } else {
            (feature / 8, feature % 8)
        };
        let eight = token / order.tokens * (columns / 8) + eight;
        let at = (eight * order.tokens + token % order.tokens) * 8 + of_eight;
        elements[at].to_f32() / order.factor
    };
    (0..rows * columns).map(element).collect()
}

/// How far the kernels of an operation may be off, as a share of the largest element: sums are in another order, and
/// caches have fewer bits than Burn's. With matrix instructions so have activations, and what steps hand on.
fn tolerance(plan: &Plan, op: &Op, driver: GpuDriver, is_narrow: bool) -> f64 {
    let of = |dtype: DType| -> f64 {
        match dtype {
            DType::F16 => 2e-3,
            DType::Bf16 => 1e-2,
            DType::F32 | DType::I32 | DType::U8 | DType::I8 => 2e-5,
        }
    };
    let multiplies = driver == GpuDriver::Cuda && matches!(op, Op::Linear(_) | Op::Experts(_));
    let formats = op.weights().into_iter().map(|weight| plan.weights[weight].format);
    let of_formats = formats.filter(|_| multiplies).map(|format| match format {
        Format::F32 => 2e-5,
        Format::F16 => 2e-3,
        Format::Bf16 | Format::Bf12 => 1e-2,
        Format::Q8 | Format::Q4 => 2e-2,
    });
    let of_cache = op.cache().map_or(0.0, |cache| of(plan.caches[cache].dtype));
    let handed_on = if is_narrow { of(DType::Bf16) } else { 2e-5 };
    // Experts multiply twice.
    let products = if matches!(op, Op::Experts(_)) { 2.0 } else { 1.0 };
    products * of_formats.fold(of_cache.max(handed_on), f64::max)
}

/// Runs every step of every batch both ways; what follows is fed what the GPU makes. Says of how many
/// rows something lay as operands.
fn walk(plan: &Plan, folder: &Path, options: &Options) -> BTreeSet<usize> {
    let checkpoint = Checkpoint::open(&plan.files, folder).unwrap();
    let id = plan.machine.device("gpu0").unwrap();
    let shared = Shared::new(plan, options);
    let bound = Device::bind(plan, id, &checkpoint, options, &shared, |_| true);
    let Form::Gpu(mut state) = bound.unwrap().form else { unreachable!("gpu0 is a GPU") };
    let team = Team::new(&[0]).unwrap();
    let mut burn = plain::State::new(plan, id, BurnDevice::flex(), &[0]).unwrap();
    for weight in plan.weights.rows() {
        burn.hold(weight, &checkpoint, &team).unwrap();
    }
    let known = KnownGraphs::new(0, 0);
    let mut ordered = BTreeSet::new();
    for (number, (phase, batch)) in batches(plan.model.vocabulary).into_iter().enumerate() {
        let parts = batch.parts().len() as u32;
        let fits = |&program: &usize| {
            let program = &plan.programs[program];
            program.phase == phase && program.max_sequences >= parts
        };
        let program = (0..plan.programs.len()).find(fits).unwrap();
        let schedule = &plan.programs[program];
        batch.check(schedule, &plan.model).unwrap();
        let uses = Arc::new(Uses::of(schedule));
        let number = number as u32;
        let run = Run::new(plan, program, number, batch, &known, &uses, &Arc::default());
        let scope = Scope { plan, batch: &run.batch, run: number };
        let [lane] = schedule.lanes.as_slice() else { panic!("a GPU alone has one lane") };
        for &step in &lane.steps {
            let spec = &schedule.steps[step];
            let Action::Run(op) = &spec.action else { panic!("{} is not computed", spec.name) };
            let at = format!("{} of {} in run {number}", spec.name, plan.model.name);
            let operand = |buffer| state.operand(schedule, program, buffer, scope).unwrap();
            let inputs: Vec<Operand> = spec.reads.iter().copied().map(operand).collect();
            let outputs: Vec<Operand> = spec.writes.iter().copied().map(operand).collect();
            // What it writes may lie where it reads.
            let values: Vec<Value> = inputs.iter().map(|input| value(&state, input)).collect();
            let expected = plain::run(op, &mut burn, scope, &values).expect(&at);
            state.run(scope, &run, &[step], true, &mut { step }).expect(&at);
            assert_eq!(outputs.len(), expected.len(), "{at}");
            for (output, expected) in outputs.iter().zip(&expected) {
                let is_narrow =
                    inputs.iter().chain([output]).any(|x| x.dtype.bytes() < 4 || x.order.is_some());
                let most = tolerance(plan, op, options.gpu_driver, is_narrow);
                compare(value(&state, output), expected, most, &at);
                ordered.extend(output.order.map(|_| output.rows));
            }
        }
    }
    ordered
}

/// Formats of matrices, each with that of a cache and the type of floats that a GPU has to know beside that of the
/// cache.
const FORMATS: [(Format, DType, DType); 6] = [
    (Format::F32, DType::F32, DType::F32),
    (Format::F16, DType::F16, DType::F16),
    (Format::Bf16, DType::Bf16, DType::Bf16),
    (Format::Bf12, DType::F32, DType::Bf16),
    (Format::Q8, DType::F16, DType::F16),
    (Format::Q4, DType::F32, DType::F16),
];

/// Walks plans of a toy in the formats that the GPU computes with; does nothing where there is none.
fn agrees(toy: &Toy) {
    let Some(gpu) = testing::gpu() else { return };
    let gpu_driver = if gpu.is_cuda() { GpuDriver::Cuda } else { GpuDriver::Vulkan };
    let options = Options { gpu_driver, ..Options::default() };
    let folder = tempfile::tempdir().unwrap();
    let model = written(toy, folder.path());
    for (format, kv_type, float) in FORMATS {
        if !gpu.knows(kv_type) || !gpu.knows(float) {
            eprintln!("skipped: {format} on a device that does not compute with it");
            continue;
        }
        let libraries: &[bool] = if gpu.is_cuda() { &[true, false] } else { &[false] };
        for &has_library in libraries {
            let machine = machine(has_library);
            let plan = plan(&model, (&machine, "gpu0"), format, kv_type);
            let ordered = walk(&plan, folder.path(), &options);
            let has_whole = toy.intermediate.is_multiple_of(WARPGROUP_COLUMNS);
            let is_bf16 = product_format(format, true) == Format::Bf16;
            let are_operands = gpu.has_warpgroups() && has_whole && is_bf16;
            assert_eq!(!ordered.is_empty(), are_operands, "{format}");
            let is_large = toy.features * toy.intermediate >= 12 << 20;
            assert_eq!(ordered.contains(&3), are_operands && is_large, "{format}");
        }
    }
}

#[test]
fn kernels_agree_with_burn_on_gated_layers() {
    gated().iter().for_each(agrees);
}

/// Of which three rows come as operands, too.
#[test]
fn kernels_agree_with_burn_on_large_linears() {
    let Some(gpu) = testing::gpu() else { return };
    if !gpu.has_warpgroups() {
        eprintln!("skipped: only Hopper GPUs multiply few rows with large matrices in another way");
        return;
    }
    let [plain, _] = gated();
    let intermediate = 19_712;
    agrees(&Toy { layers: 1, features: 640, heads: 20, intermediate, ..plain });
}

#[test]
fn kernels_agree_with_burn_on_plain_layers_with_biases() {
    agrees(&plain_with_biases());
}

#[test]
fn kernels_agree_with_burn_on_mixtures() {
    agrees(&mixture());
}
