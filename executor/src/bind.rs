//! Binding a plan's device to hardware: its threads, its weights, its caches.
//!
//! - It is done by the device's own lane thread, so that memory is touched first where it is used.
//! - What is bound belongs to that thread alone; other devices see only the buffers of a run.

use std::collections::BTreeSet;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use burn::tensor::Device as BurnDevice;
use ir::id::{DeviceId, WeightId};
use ir::machine::DeviceKind;
use ir::plan::{Action, Plan, Weight};
use ir::tensor::{DType, Format};

use crate::checkpoint::Checkpoint;
use crate::cpus::{SparedCpus, team_cpus};
use crate::fetch::{Homes, Window, fetched};
use crate::home_caches::HomeCaches;
use crate::kernels::cpu::isa::Isa;
use crate::kernels::gpu::device::Gpu;
use crate::load::{CpuBackend, GpuDriver, Kernels, Options};
use crate::ops::gpu::HomeTables;
use crate::ops::{gpu, own, plain};
use crate::peers::Peers;
use crate::team::Team;

/// What the devices of a plan share.
#[derive(Clone)]
pub(crate) struct Shared {
    pub(crate) peers: Arc<Peers>,
    pub(crate) home_caches: Arc<HomeCaches>,
    pub(crate) home_tables: Arc<HomeTables>,
}

impl Shared {
    /// What nobody has added to yet.
    pub(crate) fn new(plan: &Plan, options: &Options) -> Self {
        let peers = Arc::new(Peers::new(plan, options));
        Self { peers, home_caches: Arc::default(), home_tables: Arc::default() }
    }
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
        shared: &Shared,
        progress: impl Fn(u64) -> bool,
    ) -> Result<Self> {
        let spec = &plan.machine.devices[id];
        let name = spec.name.clone();
        let (mut form, spared) = match &spec.kind {
            DeviceKind::Numa { cpus, .. } => {
                (Form::Cpu(Cpu::new(plan, id, cpus, options, &shared.home_caches)?), None)
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
                let state = gpu::State::new(plan, id, gpu, ordinal, shared.clone(), counter);
                let state = state.with_context(|| format!("taking the memory of {name}"))?;
                (Form::Gpu(Box::new(state)), Some(spared))
            }
        };
        let tables = tables(plan);
        let reached = plan.reached_by(id);
        let reached_at_home = plan.reached_tables();
        for (weight_id, weight) in plan.weights.iter() {
            let is_read =
                if let (Form::Gpu(state), true) = (&mut form, reached.contains(&weight_id)) {
                    state.reach(plan, weight_id, checkpoint)
                } else if weight.device == id && !reached_at_home.contains(&weight_id) {
                    form.hold(weight, tables.contains(&weight_id), checkpoint).map(|()| true)
                } else {
                    form.skip();
                    Ok(false)
                };
            let is_read = is_read.with_context(|| format!("reading {} for {name}", weight.name))?;
            let goes_on = !is_read || progress(plan.weight_bytes(weight));
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

/// The types of floats that a GPU finds in the weights that it holds or reaches and in its caches; what it fetches it
/// unpacks.
fn numbers(plan: &Plan, gpu: DeviceId) -> BTreeSet<DType> {
    let reached = plan.reached_by(gpu);
    let held = plan.weights.iter().filter(|(id, it)| it.device == gpu || reached.contains(id));
    let floats = held.filter_map(|(_, weight)| match weight.format {
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
            Action::Run(op) => match op.table() {
                Some(table) => drop(tables.insert(table)),
                None => others.extend(op.weights()),
            },
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
