//! What tests of whole runs share: golden checkpoints, machines of this host, plans on disk, distances of logits.

pub(crate) mod expected;

use std::path::{Path, PathBuf};

use compiler::Options;
use compiler::options::Request;
use executor::engine::Engine;
use executor::load::{self, GpuDriver, PlanFile};
use ir::id::DeviceId;
use ir::machine::{Device, DeviceKind, Link, Machine, Rates};
use ir::model::Model;
use ir::plan::{Plan, Program, Queue};
use ir::tensor::DType;

/// Ways to place a model on the devices of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// One device does everything.
    One,
    /// Two stages, one after the other.
    Pipeline,
    /// Two devices share every layer, one doing three times as much as the other.
    Shared,
    /// A GPU does everything.
    Gpu,
    /// A GPU has the first layers, a NUMA node the others.
    GpuPipeline,
    /// A GPU and a NUMA node share every layer.
    GpuShared,
    /// A GPU computes everything, with weights of which two fifths are at home on slow NUMA nodes.
    GpuFetching,
    /// A GPU lacks memory for two fifths of the weights, which NUMA nodes behind slow links compute with.
    GpuHosted,
    /// The same behind links that are fast enough to compute together: each NUMA node has a shard of what stays.
    GpuShards,
    /// The same with a GPU that is hardly faster, and has a shard of its own.
    GpuResident,
    /// A GPU lacks memory for half of the caches, too, which NUMA nodes attend to.
    GpuCaches,
    /// Two GPUs share every layer.
    GpusShared,
    /// Two GPUs are stages.
    GpusPipeline,
}

impl Shape {
    /// Those of a host without a GPU.
    pub(crate) const CPU: [Shape; 3] = [Shape::One, Shape::Pipeline, Shape::Shared];
    /// Those with a GPU.
    pub(crate) const GPU: [Shape; 8] = [
        Shape::Gpu,
        Shape::GpuPipeline,
        Shape::GpuShared,
        Shape::GpuFetching,
        Shape::GpuHosted,
        Shape::GpuShards,
        Shape::GpuResident,
        Shape::GpuCaches,
    ];

    /// Those with two GPUs.
    pub(crate) const GPUS: [Shape; 2] = [Shape::GpusShared, Shape::GpusPipeline];

    /// GPUs that take part.
    pub(crate) fn gpus(self) -> usize {
        if Self::GPUS.contains(&self) { 2 } else { usize::from(Self::GPU.contains(&self)) }
    }

    fn request(self) -> Request {
        let names = match self.gpus() {
            0 => ["numa0", "numa1"],
            1 => ["gpu0", "numa1"],
            _ => ["gpu0", "gpu1"],
        };
        let [first, second] = names.map(str::to_owned);
        match self {
            Shape::One | Shape::Gpu => Request::Pipeline(vec![first]),
            Shape::GpuFetching
            | Shape::GpuHosted
            | Shape::GpuShards
            | Shape::GpuResident
            | Shape::GpuCaches => Request::Any,
            Shape::Pipeline | Shape::GpuPipeline | Shape::GpusPipeline => {
                Request::Pipeline(vec![first, second])
            }
            Shape::Shared | Shape::GpuShared => {
                Request::TensorParallel(vec![(first, Some(3.0)), (second, Some(1.0))])
            }
            Shape::GpusShared => Request::TensorParallel(vec![(first, None), (second, None)]),
        }
    }
}

/// How plans with a GPU are run here: by CUDA where there is a GPU, else by a Vulkan device in software.
pub(crate) fn gpu_options() -> load::Options {
    let gpu_driver = if probe::machine(None).unwrap().host.gpus.is_empty() {
        GpuDriver::Vulkan
    } else {
        GpuDriver::Cuda
    };
    load::Options { gpu_driver, ..load::Options::default() }
}

/// Whether that is CUDA, which captures launches; a device in software does not.
pub(crate) fn has_cuda() -> bool {
    gpu_options().gpu_driver == GpuDriver::Cuda
}

/// The folder of a golden checkpoint.
pub(crate) fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden").join(name)
}

/// This host in two devices of each NUMA node; on a single processor they share it.
pub(crate) fn machine() -> Machine {
    probe::machine(Some(2)).unwrap()
}

/// The same with so many GPUs; where this host has none, one as fast as its first device. Of more all others are too
/// small for anything. Captured launches, which would outweigh what golden checkpoints hold, take nothing.
pub(crate) fn gpu_machine(gpus: usize) -> Machine {
    let mut machine = machine();
    let mut ordinal = gpus;
    while let Some(other) = machine.device(&format!("gpu{ordinal}")) {
        machine.devices[other].memory_bytes = 0;
        ordinal += 1;
    }
    if machine.device("gpu0").is_none() {
        let numa: Vec<DeviceId> = machine.devices.ids().collect();
        machine.host.gpus.push("a device in software".to_owned());
        let gpu = machine.devices.push(Device {
            name: "gpu0".to_owned(),
            kind: DeviceKind::Gpu {
                ordinal: 0,
                reserved_bytes: 0,
                library_bytes: 0,
                launch_bytes: 0,
                has_warpgroups: false,
            },
            ..machine.devices[numa[0]].clone()
        });
        for numa in numa {
            let link = |from, to| Link::new(from, to, 1e10, 1e4);
            machine.links.extend([link(gpu, numa), link(numa, gpu)]);
        }
    }
    for device in machine.devices.rows_mut() {
        if let DeviceKind::Gpu { launch_bytes, .. } = &mut device.kind {
            *launch_bytes = 0;
        }
    }
    machine
}

/// A plan of a golden checkpoint that computes in f32.
pub(crate) fn compile(name: &str, shape: Shape, change: impl FnOnce(&mut Options)) -> Plan {
    compile_model(&models::lower(&golden(name)).unwrap(), shape, change)
}

/// The same of such a model.
pub(crate) fn compile_model(
    model: &Model,
    shape: Shape,
    change: impl FnOnce(&mut Options),
) -> Plan {
    let mut options = Options {
        formats: vec!["f32".parse().unwrap()],
        kv_type: Some(DType::F32),
        max_sequences: 4,
        request: shape.request(),
        ..Options::default()
    };
    change(&mut options);
    let mut machine = match shape.gpus() {
        0 => machine(),
        gpus => gpu_machine(gpus),
    };
    let compile = |machine: &Machine, options: &Options| {
        compiler::compile(model, machine, options, &mut |_, _| ()).unwrap()
    };
    let slower = match shape {
        Shape::GpuFetching | Shape::GpuCaches => Some(([1e4, 1e4, 1.0], 1e12)),
        Shape::GpuHosted => Some(([1.0, 1e3, 1.0], 1e6)),
        Shape::GpuShards => Some(([0.1, 3e3, 1.0], 3e7)),
        Shape::GpuResident => Some(([0.1, 3e3, 30.0], 3e7)),
        Shape::One
        | Shape::Pipeline
        | Shape::Shared
        | Shape::Gpu
        | Shape::GpuPipeline
        | Shape::GpuShared
        | Shape::GpusShared
        | Shape::GpusPipeline => None,
    };
    if let Some((times, link_bytes_per_sec)) = slower {
        let alone = Options { request: Shape::Gpu.request(), ..options.clone() };
        let alone = compile(&machine, &alone);
        leave_out(&mut machine, &alone, if shape == Shape::GpuCaches { 0.5 } else { 0.0 });
        set_speeds(&mut machine, times, link_bytes_per_sec);
        if shape != Shape::GpuCaches {
            machine = tests::machines::keeping_caches(machine);
        }
    }
    compile(&machine, &options)
}

/// Takes so much memory from the GPU that two fifths of the weights of `alone`, which is all on it, do not fit, or all
/// of them and a part of the caches.
fn leave_out(machine: &mut Machine, alone: &Plan, caches: f64) {
    let gpu = machine.device("gpu0").unwrap();
    let held = &alone.forecast.devices[alone.machine.device("gpu0").unwrap()];
    let weights = if caches > 0.0 { held.weight_bytes } else { held.weight_bytes * 2 / 5 };
    let caches = (held.cache_bytes as f64 * caches) as u64;
    machine.devices[gpu].memory_bytes = held.needed_bytes() - weights - caches;
    machine.devices[gpu].rates = tests::machines::gpu(0, 0).rates;
}

/// Makes steps and products of NUMA nodes so many times slower than a core's, whatever this host's are, products of the
/// GPU so many times slower than a GPU's, and links so fast, that weights are fetched or not.
fn set_speeds(machine: &mut Machine, [steps, weights, of_gpu]: [f64; 3], link_bytes_per_sec: f64) {
    let divide = |rates: &mut Rates, by: f64| {
        let points = rates.linear.iter_mut().flat_map(|linear| &mut linear.points);
        points.for_each(|point| point.weights_per_sec /= by);
    };
    let gpu = machine.device("gpu0").unwrap();
    divide(&mut machine.devices[gpu].rates, of_gpu);
    machine
        .links
        .iter_mut()
        .for_each(|link| (link.bytes_per_sec, link.latency_nanos) = (link_bytes_per_sec, 1.0));
    for device in machine.devices.ids().filter(|&device| device != gpu).collect::<Vec<_>>() {
        machine.devices[device].cpu_caches.clear();
        let rates = &mut machine.devices[device].rates;
        *rates = tests::machines::core_rates();
        rates.step_nanos *= steps;
        divide(rates, weights);
    }
}

/// Whether a program brings weights to a GPU.
pub(crate) fn fetches(program: &Program) -> bool {
    program.lanes.iter().any(|lane| lane.queue == Queue::Copy && !lane.steps.is_empty())
}

/// Writes a plan where it can be opened from.
pub(crate) fn written(plan: &Plan) -> (tempfile::TempDir, PlanFile) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plan.ron");
    std::fs::write(&path, plan.to_ron().unwrap()).unwrap();
    let file = PlanFile::open(&path).unwrap();
    (folder, file)
}

/// An engine that runs a plan.
pub(crate) fn engine(plan: &Plan, options: &load::Options) -> Engine {
    let (_folder, file) = written(plan);
    Engine::new(load::load(file, options, |_, _| ()).unwrap())
}

/// A prompt of so many tokens.
pub(crate) fn prompt(length: usize) -> Vec<u32> {
    (0..length).map(|i| (i * 37 % 700) as u32 + 3).collect()
}

/// Logits after each of some prompts, fed together.
pub(crate) fn logits(engine: &mut Engine, prompts: &[Vec<u32>]) -> Vec<Vec<f32>> {
    let ids: Vec<_> = prompts
        .iter()
        .map(|prompt| {
            let id = engine.open();
            engine.append(id, prompt).unwrap();
            id
        })
        .collect();
    let logits = engine.advance(&ids).unwrap();
    ids.into_iter().for_each(|id| engine.close(id));
    logits
}

/// Whether two lists of numbers are the same bit for bit.
pub(crate) fn is_same(a: &[f32], b: &[f32]) -> bool {
    a.iter().map(|x| x.to_bits()).eq(b.iter().map(|x| x.to_bits()))
}

/// The largest distance of two lists of numbers; not a number where one of them is none.
pub(crate) fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    largest(a.iter().zip(b).map(|(a, b)| (a - b).abs()))
}

/// The largest of some distances; not a number where one of them is none, which `max` would drop.
pub(crate) fn largest(distances: impl IntoIterator<Item = f32>) -> f32 {
    let worse = |worst: f32, d: f32| if worst.is_nan() || d <= worst { worst } else { d };
    distances.into_iter().fold(0.0, worse)
}
