//! Binding a plan's device to hardware: its threads, its weights, its caches.
//!
//! - It is done by the device's own lane thread, so that memory is touched first where it is used.
//! - What is bound belongs to that thread alone; other devices see only the buffers of a run.

use anyhow::{Context as _, Result, bail, ensure};
use burn::tensor::Device as BurnDevice;
use ir::id::DeviceId;
use ir::machine::DeviceKind;
use ir::plan::Plan;

use crate::checkpoint::Checkpoint;
use crate::kernels::cpu::isa::Isa;
use crate::load::{CpuBackend, Kernels, Options};
use crate::ops::{own, plain};
use crate::team::Team;

/// One device, ready to compute.
pub(crate) struct Device {
    pub(crate) name: String,
    pub(crate) team: Team,
    pub(crate) form: Form,
}

/// How a device computes, with its weights and caches in that form.
pub(crate) enum Form {
    /// With kernels of ours.
    Own(own::State),
    /// With Burn's operations.
    Plain(plain::State),
}

impl Device {
    /// Binds the calling thread and its team to the device, reads its weights and makes its caches.
    /// `progress` is told the bytes of every weight that is there, and says whether to go on.
    ///
    /// # Errors
    /// When the device is not one of this host, a weight cannot be read, or `progress` says no.
    pub(crate) fn bind(
        plan: &Plan,
        id: DeviceId,
        checkpoint: &Checkpoint,
        options: &Options,
        progress: impl Fn(u64) -> bool,
    ) -> Result<Self> {
        let spec = &plan.machine.devices[id];
        let name = spec.name.clone();
        let cpus = match &spec.kind {
            DeviceKind::Numa { cpus, .. } => cpus,
            DeviceKind::Gpu { .. } => bail!("{name} is a GPU, and this build computes on none"),
        };
        let threads = options.threads.map_or(cpus.len(), |most| most.clamp(1, cpus.len()));
        let cpus = &cpus[..threads];
        let team = Team::new(cpus).with_context(|| format!("starting the threads of {name}"))?;
        let mut form = match (options.backend, options.kernels) {
            (CpuBackend::Flex, Kernels::Own) => {
                let isa = options.isa.unwrap_or_else(Isa::detect);
                Form::Own(own::State::new(plan, id, isa, &team)?)
            }
            (CpuBackend::Flex, Kernels::Plain) => {
                Form::Plain(plain::State::new(plan, id, BurnDevice::flex(), cpus)?)
            }
            // Kernels of ours know the tensors of flex only.
            (CpuBackend::NdArray, _) => Form::Plain(plain::State::new(plan, id, ndarray(), cpus)?),
        };
        for weight in plan.weights.rows() {
            let is_here = weight.device == id;
            let held = match &mut form {
                Form::Own(state) if is_here => state.weights.hold(weight, checkpoint, &team),
                Form::Plain(state) if is_here => state.hold(weight, checkpoint),
                Form::Own(state) => {
                    state.weights.skip();
                    Ok(())
                }
                Form::Plain(state) => {
                    state.skip();
                    Ok(())
                }
            };
            held.with_context(|| format!("reading {} for {name}", weight.name))?;
            let goes_on = !is_here || progress(plan.weight_bytes(weight));
            ensure!(goes_on, "another device could not be loaded");
        }
        Ok(Self { name, team, form })
    }
}

#[expect(deprecated, reason = "burn-ndarray stays selectable for comparison")]
fn ndarray() -> BurnDevice {
    BurnDevice::ndarray()
}
