//! Binding a plan's device to hardware: its threads, its weights, its caches.
//!
//! - It is done by the device's own lane thread, so that memory is touched first where it is used.
//! - What is bound belongs to that thread alone; other devices see only the buffers of a run.

use std::collections::BTreeSet;
use std::sync::Arc;

use anyhow::{Context as _, Result, bail, ensure};
use burn::tensor::Device as BurnDevice;
use hwlocality::Topology;
use hwlocality::cpu::binding::CpuBindingFlags;
use hwlocality::cpu::cpuset::CpuSet;
use ir::id::{DeviceId, WeightId};
use ir::machine::DeviceKind;
use ir::op::Op;
use ir::plan::{Action, Lane, Plan, Weight};
use ir::tensor::{DType, Format};

use crate::checkpoint::Checkpoint;
use crate::fetch::{Homes, Window, fetched};
use crate::home_caches::HomeCaches;
use crate::kernels::cpu::isa::Isa;
use crate::kernels::gpu::device::Gpu;
use crate::load::{CpuBackend, GpuDriver, Kernels, Options};
use crate::ops::{gpu, own, plain};
use crate::peers::Peers;
use crate::team::{Team, bind};

/// Processors that a NUMA node leaves to the threads that drive GPUs, a quarter of its own at most: one for letters,
/// one for CubeCL's thread, one for fetches. The others read memory as fast as all of them.
const SPARED_CPUS: usize = 3;

/// The processors that are left to the threads that drive GPUs: a member of a team that loses its own holds up all
/// others.
pub(crate) struct SparedCpus {
    topology: Topology,
    /// None where no NUMA node is of the plan's machine.
    cpus: Vec<u32>,
    /// Those that the thread that found them may use.
    all: Vec<u32>,
}

impl SparedCpus {
    /// Those of the NUMA nodes of a plan's machine.
    ///
    /// # Errors
    /// When the system does not tell its topology.
    pub(crate) fn find(plan: &Plan) -> Result<Self> {
        let computes = |id| lanes(plan).any(|lane| lane.device == id);
        let cpus = plan.machine.devices.iter().flat_map(|(id, device)| match &device.kind {
            DeviceKind::Numa { cpus, .. } if computes(id) => {
                let [_, spared] = shared_out(plan, cpus);
                spared.to_vec()
            }
            DeviceKind::Numa { cpus, .. } => cpus.clone(),
            DeviceKind::Gpu { .. } => Vec::new(),
        });
        let topology = Topology::new().context("reading the machine's topology")?;
        let all = topology.cpu_binding(CpuBindingFlags::THREAD);
        let all = numbers_of(&all.context("asking where this thread may run")?);
        Ok(Self { topology, cpus: cpus.collect(), all })
    }

    /// Keeps the calling thread, and those that it starts from now on, on them.
    ///
    /// # Errors
    /// When the system does not bind threads.
    pub(crate) fn bind(&self) -> Result<()> {
        if self.cpus.is_empty() { Ok(()) } else { bind(&self.topology, &self.cpus) }
    }

    /// Lets the calling thread, and those that it starts from now on, use all processors that it might before.
    fn unbind(&self) -> Result<()> {
        bind(&self.topology, &self.all)
    }
}

/// The processors of a NUMA node that compute, and those that are left to the threads that drive GPUs.
fn shared_out<'a>(plan: &Plan, cpus: &'a [u32]) -> [&'a [u32]; 2] {
    let drives_gpus = lanes(plan).any(|lane| plan.machine.devices[lane.device].kind.is_gpu());
    if drives_gpus { beside_gpus(cpus) } else { [cpus, &[]] }
}

/// The same where GPUs are driven.
pub(crate) fn beside_gpus(cpus: &[u32]) -> [&[u32]; 2] {
    let (computing, spared) = cpus.split_at(cpus.len() - SPARED_CPUS.min(cpus.len() / 4));
    [computing, spared]
}

fn lanes(plan: &Plan) -> impl Iterator<Item = &Lane> {
    plan.programs.iter().flat_map(|program| &program.lanes)
}

/// The processors of a NUMA node that compute, one for each thread.
pub(crate) fn team_cpus<'a>(plan: &Plan, cpus: &'a [u32], options: &Options) -> &'a [u32] {
    let [computing, _] = shared_out(plan, cpus);
    let threads = options.threads.unwrap_or(computing.len());
    &cpus[..threads.clamp(1, cpus.len())]
}

fn numbers_of(cpus: &CpuSet) -> Vec<u32> {
    cpus.iter_set().map(|cpu| usize::from(cpu) as u32).collect()
}

/// Whether this process may use all processors that a plan's teams are bound to.
///
/// # Errors
/// When it may not: a member that shares a processor with another holds up all of its team.
pub(crate) fn ensure_processors(plan: &Plan, options: &Options) -> Result<()> {
    let topology = Topology::new().context("reading the machine's topology")?;
    // Where the system does not tell, threads are bound as far as it binds them.
    let Ok(allowed) = topology.cpu_binding(CpuBindingFlags::PROCESS) else { return Ok(()) };
    let allowed: BTreeSet<u32> = numbers_of(&allowed).into_iter().collect();
    for lane in lanes(plan) {
        let device = &plan.machine.devices[lane.device];
        let DeviceKind::Numa { cpus, .. } = &device.kind else { continue };
        let cpus = team_cpus(plan, cpus, options);
        if let Some(cpu) = cpus.iter().find(|cpu| !allowed.contains(cpu)) {
            bail!(
                "{} computes on processor {cpu} in this plan, and this process may not use that: start it without \
                 the limit (taskset, a container's cpuset), or compile the plan under the same one",
                device.name
            );
        }
    }
    Ok(())
}

/// Whether every NUMA node that computes has as many threads as if nothing were said of them.
pub(crate) fn has_usual_threads(plan: &Plan, options: &Options) -> bool {
    let usual = Options { threads: None, ..options.clone() };
    let devices = lanes(plan).map(|lane| &plan.machine.devices[lane.device].kind);
    let mut nodes = devices.filter_map(|kind| match kind {
        DeviceKind::Numa { cpus, .. } => Some(cpus),
        DeviceKind::Gpu { .. } => None,
    });
    nodes.all(|cpus| team_cpus(plan, cpus, options) == team_cpus(plan, cpus, &usual))
}

/// What each rank of a plan is, in their order: the devices that compute, with the GPU or the NUMA node and processors
/// that they are bound to.
pub(crate) fn ranks(plan: &Plan, options: &Options) -> Vec<String> {
    let computing: BTreeSet<DeviceId> = lanes(plan).map(|lane| lane.device).collect();
    let describe = |(rank, &id): (usize, &DeviceId)| {
        let device = &plan.machine.devices[id];
        let place = match &device.kind {
            DeviceKind::Gpu { ordinal, .. } => {
                let model = plan.machine.host.gpus.get(*ordinal as usize);
                format!("GPU {ordinal}, {}", model.map_or("of unknown model", String::as_str))
            }
            DeviceKind::Numa { node, cpus } => {
                let cpus: Vec<String> =
                    team_cpus(plan, cpus, options).iter().map(u32::to_string).collect();
                format!("bound to NUMA node {node}, a thread on each of cpus {}", cpus.join(" "))
            }
        };
        format!("rank {rank} of {}: {}, {place}", computing.len(), device.name)
    };
    computing.iter().enumerate().map(describe).collect()
}

/// One device, ready to compute.
pub(crate) struct Device {
    pub(crate) name: String,
    pub(crate) form: Form,
}

/// How a device computes, with its weights and caches in that form.
pub(crate) enum Form {
    /// A NUMA node.
    Cpu(Cpu),
    /// A GPU, with kernels of ours.
    Gpu(Box<gpu::State>),
}

/// A NUMA node's threads and what they compute with.
pub(crate) struct Cpu {
    pub(crate) team: Team,
    pub(crate) form: CpuForm,
}

/// How a NUMA node computes.
pub(crate) enum CpuForm {
    /// With kernels of ours.
    Own(own::State),
    /// With Burn's operations.
    Plain(plain::State),
}

impl Device {
    /// Binds the calling thread, and the threads of a NUMA node, to the device, reads its weights and makes its
    /// caches. `progress` is told the bytes of every weight that is there, and says whether to go on.
    ///
    /// # Errors
    /// When the device is not one of this host, a weight cannot be read, or `progress` says no.
    pub(crate) fn bind(
        plan: &Plan,
        id: DeviceId,
        checkpoint: &Checkpoint,
        options: &Options,
        (peers, home_caches): (&Arc<Peers>, &Arc<HomeCaches>),
        progress: impl Fn(u64) -> bool,
    ) -> Result<Self> {
        let spec = &plan.machine.devices[id];
        let name = spec.name.clone();
        let (mut form, spared) = match &spec.kind {
            DeviceKind::Numa { cpus, .. } => {
                (Form::Cpu(Cpu::new(plan, id, cpus, options, home_caches)?), None)
            }
            DeviceKind::Gpu { ordinal, .. } => {
                let spared = SparedCpus::find(plan)?;
                spared.bind()?;
                let ordinal = *ordinal as usize;
                let gpu = match options.gpu_driver {
                    GpuDriver::Cuda => Gpu::cuda(ordinal),
                    GpuDriver::Vulkan => Gpu::vulkan(),
                };
                let gpu = gpu.with_context(|| format!("opening {name}"))?;
                for dtype in numbers(plan, id) {
                    ensure!(
                        gpu.knows(dtype),
                        "{name} does not compute with {dtype}: compile the plan with another \
                         --format and --kv-type, such as f16"
                    );
                }
                // Its weights are converted by all of them.
                spared.unbind()?;
                let counter = options.expert_counter.clone();
                let shared = (Arc::clone(peers), Arc::clone(home_caches));
                let state = gpu::State::new(plan, id, gpu, ordinal, shared, counter);
                let state = state.with_context(|| format!("taking the memory of {name}"))?;
                (Form::Gpu(Box::new(state)), Some(spared))
            }
        };
        let tables = tables(plan);
        for (weight_id, weight) in plan.weights.iter() {
            let is_here = weight.device == id;
            if is_here {
                let held = form.hold(weight, tables.contains(&weight_id), checkpoint);
                held.with_context(|| format!("reading {} for {name}", weight.name))?;
            } else {
                form.skip();
            }
            let goes_on = !is_here || progress(plan.weight_bytes(weight));
            ensure!(goes_on, "another device could not be loaded");
        }
        if let (Form::Gpu(state), Some(spared)) = (&mut form, spared) {
            state.finish_loading().with_context(|| format!("loading {name}"))?;
            spared.bind()?;
        }
        Ok(Self { name, form })
    }

    /// The weights at home on this device that GPUs fetch.
    pub(crate) fn homes(&self, plan: &Plan) -> Homes {
        let Form::Cpu(Cpu { form: CpuForm::Own(state), .. }) = &self.form else {
            return Homes::new();
        };
        let weights = plan.machine.devices.ids().flat_map(|gpu| fetched(plan, gpu));
        weights.filter_map(|weight| Some((weight, state.weights.home(weight)?))).collect()
    }

    /// Where fetched weights are wanted on this device; `None` where none are.
    pub(crate) fn window(&self) -> Option<Window> {
        if let Form::Gpu(state) = &self.form { state.window() } else { None }
    }
}

/// The types of floats that a GPU finds in the weights that it holds and in its caches; what it fetches it unpacks.
fn numbers(plan: &Plan, gpu: DeviceId) -> BTreeSet<DType> {
    let held = plan.weights.rows().iter().filter(|weight| weight.device == gpu);
    let floats = held.filter_map(|weight| match weight.format {
        Format::Bf12 => Some(DType::Bf16),
        Format::F32 | Format::F16 | Format::Bf16 | Format::Q8 | Format::Q4 => weight.format.float(),
    });
    let caches = plan.caches.rows().iter().filter(|cache| cache.device == gpu);
    let caches = caches.chain(plan.borrowed_by(gpu).map(|cache| &plan.caches[cache]));
    floats.chain(caches.map(|cache| cache.dtype)).collect()
}

/// The matrices of floats of which rows are looked up, and nothing else is done with them.
fn tables(plan: &Plan) -> BTreeSet<WeightId> {
    let (mut tables, mut others) = (BTreeSet::new(), BTreeSet::new());
    for step in plan.programs.iter().flat_map(|program| program.steps.rows()) {
        match &step.action {
            Action::Run(Op::Embed { table, .. } | Op::AddPosition { table, .. }) => {
                tables.insert(*table);
            }
            Action::Run(op) => others.extend(op.weights()),
            Action::Fetch { weight, .. } => drop(others.insert(*weight)),
            Action::Move { .. } => (),
        }
    }
    tables.retain(|id| !others.contains(id) && plan.weights[*id].format.float().is_some());
    tables
}

impl Form {
    fn hold(&mut self, weight: &Weight, is_table: bool, checkpoint: &Checkpoint) -> Result<()> {
        match self {
            Form::Gpu(state) => state.hold(weight, checkpoint),
            Form::Cpu(Cpu { team, form: CpuForm::Own(state) }) if is_table => {
                state.weights.hold_table(weight, checkpoint, team)
            }
            Form::Cpu(Cpu { team, form: CpuForm::Own(state) }) => {
                state.weights.hold(weight, checkpoint, team)
            }
            Form::Cpu(Cpu { team, form: CpuForm::Plain(state) }) => {
                state.hold(weight, checkpoint, team)
            }
        }
    }

    fn skip(&mut self) {
        match self {
            Form::Gpu(state) => state.skip(),
            Form::Cpu(Cpu { form: CpuForm::Own(state), .. }) => state.weights.skip(),
            Form::Cpu(Cpu { form: CpuForm::Plain(state), .. }) => state.skip(),
        }
    }
}

impl Cpu {
    fn new(
        plan: &Plan,
        id: DeviceId,
        cpus: &[u32],
        options: &Options,
        home_caches: &HomeCaches,
    ) -> Result<Self> {
        let name = &plan.machine.devices[id].name;
        let cpus = team_cpus(plan, cpus, options);
        let team = Team::new(cpus).with_context(|| format!("starting the threads of {name}"))?;
        let form = match (options.backend, options.kernels) {
            (CpuBackend::Flex, Kernels::Own) => {
                let isa = options.isa.unwrap_or_else(Isa::detect);
                CpuForm::Own(own::State::new(plan, id, isa, &team, home_caches)?)
            }
            (CpuBackend::Flex, Kernels::Plain) => {
                CpuForm::Plain(plain::State::new(plan, id, BurnDevice::flex(), cpus)?)
            }
            // Kernels of ours know the tensors of flex only.
            (CpuBackend::NdArray, _) => {
                CpuForm::Plain(plain::State::new(plan, id, ndarray(), cpus)?)
            }
        };
        Ok(Self { team, form })
    }
}

#[expect(deprecated, reason = "burn-ndarray stays selectable for comparison")]
fn ndarray() -> BurnDevice {
    BurnDevice::ndarray()
}
