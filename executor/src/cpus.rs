//! Which of a node's processors compute, and which drive GPUs.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, bail};
use hwlocality::Topology;
use hwlocality::cpu::binding::CpuBindingFlags;
use hwlocality::cpu::cpuset::CpuSet;
use ir::id::DeviceId;
use ir::machine::{Device, DeviceKind, Machine};
use ir::plan::{Lane, Plan};

use crate::load::Options;
use crate::team::bind;

/// Processors that NUMA nodes leave to the threads that drive a GPU, a quarter of their own at most: one for letters,
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
    pub(crate) fn unbind(&self) -> Result<()> {
        bind(&self.topology, &self.all)
    }
}

/// The processors of a NUMA node that compute, and those that are left to the threads that drive GPUs.
fn shared_out<'a>(plan: &Plan, cpus: &'a [u32]) -> [&'a [u32]; 2] {
    let working: BTreeSet<DeviceId> = lanes(plan).map(|lane| lane.device).collect();
    let devices = || plan.machine.devices.iter();
    let is_working = |(id, _): &(DeviceId, &Device)| working.contains(id);
    let (gpus, nodes): (Vec<_>, Vec<_>) =
        devices().filter(is_working).partition(|(_, device)| device.kind.is_gpu());
    let idle = devices().filter(|device| !is_working(device));
    let idle = idle.map(|(_, device)| match &device.kind {
        DeviceKind::Numa { cpus, .. } => cpus.len(),
        DeviceKind::Gpu { .. } => 0,
    });
    beside_gpus(cpus, gpus.len(), nodes.len(), idle.sum())
}

/// The same where as many GPUs are driven beside as many nodes that compute, and others have `idle` processors: those of a
/// node that computes are the nearest to it, so it leaves one GPU's whatever is idle.
fn beside_gpus(cpus: &[u32], gpus: usize, nodes: usize, idle: usize) -> [&[u32]; 2] {
    let of_node = (SPARED_CPUS * gpus).saturating_sub(idle).div_ceil(nodes.max(1));
    let spared = of_node.next_multiple_of(SPARED_CPUS).max(SPARED_CPUS * gpus.min(1));
    let (computing, spared) = cpus.split_at(cpus.len() - spared.min(cpus.len() / 4));
    [computing, spared]
}

/// The same where all GPUs of a machine are driven beside all of its nodes.
pub(crate) fn beside_all_gpus<'a>(machine: &Machine, cpus: &'a [u32]) -> [&'a [u32]; 2] {
    let devices = machine.devices.rows();
    let gpus = devices.iter().filter(|device| device.kind.is_gpu()).count();
    beside_gpus(cpus, gpus, devices.len() - gpus, 0)
}

/// The lanes of all programs.
pub(crate) fn lanes(plan: &Plan) -> impl Iterator<Item = &Lane> {
    plan.programs.iter().flat_map(|program| &program.lanes)
}

/// The processors of a NUMA node that compute, one for each thread.
pub(crate) fn team_cpus<'a>(plan: &Plan, cpus: &'a [u32], options: &Options) -> &'a [u32] {
    let [computing, _] = shared_out(plan, cpus);
    let threads = options.threads.unwrap_or(computing.len());
    &computing[..threads.clamp(1, computing.len())]
}

/// The numbers of a set's processors.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_that_drive_gpus_have_processors_of_their_own() {
        let cpus: Vec<u32> = (0..32).collect();
        let spared =
            |count: usize, gpus, nodes| beside_gpus(&cpus[..count], gpus, nodes, 0)[1].len();
        // None, one, two GPUs beside a node, and beside two.
        assert_eq!([0, 1, 2].map(|gpus| spared(32, gpus, 1)), [0, 3, 6]);
        assert_eq!([1, 2, 4].map(|gpus| spared(32, gpus, 2)), [3, 3, 6]);
        // A quarter of the node's at most.
        assert_eq!([spared(16, 2, 1), spared(32, 8, 1), spared(3, 1, 1)], [4, 8, 0]);
        // Threads go to nodes that do nothing, too.
        assert_eq!([2, 4, 32].map(|idle| beside_gpus(&cpus, 4, 2, idle)[1].len()), [6, 6, 3]);
        let [computing, spared] = beside_gpus(&cpus, 2, 1, 0);
        assert_eq!((computing, spared), (&cpus[..26], &cpus[26..]));
    }
}
