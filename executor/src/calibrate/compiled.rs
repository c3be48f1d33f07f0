//! Which kernels are compiled before they are measured, and by how many processes: a compiler, and the driver's beside
//! it, compiles one kernel of a process after the other, and what one process compiled the next finds in the user's
//! cache folder.

use std::cell::Cell;
use std::thread;

use anyhow::{Context as _, Result};
use hwlocality::Topology;
use hwlocality::cpu::binding::CpuBindingFlags;
use ir::machine::{DeviceKind, Machine};

use super::cpus;
use super::gpu::{self, Sizes};
use crate::cpus::beside_all_gpus;
use crate::kernels::gpu::device::Gpu;
use crate::team::bind;

/// Memory of a GPU for each process that compiles for it: its context and libraries take 0.6 GiB of an H200 (driver
/// 580), the largest mixture that is measured 1.1.
const PROCESS_BYTES: u64 = 3 << 30;
/// On an H200 whose host has 16 cores 8 processes take 11.4 s for what one takes 30 to 35 for, 16 take 10.8; where all
/// is compiled already 16 take 6.7 s to start and to end, one after the other in the driver.
const MOST_PROCESSES: u32 = 8;

/// Every `shares`-th of the launches that are measured, from number `number` on.
#[derive(Clone, Copy, Debug)]
pub struct Share {
    /// Its number, from 0.
    pub number: u32,
    /// How many there are: at least 1.
    pub shares: u32,
}

/// Whose turn it is to make the launches that are measured.
pub(super) struct Turns {
    /// Which launches are made once, to be compiled, and nothing else is done; all are measured where there is none.
    compiled: Option<Share>,
    /// Measurements so far.
    begun: Cell<u32>,
}

impl Turns {
    pub(super) fn new(compiled: Option<Share>) -> Self {
        Self { compiled, begun: Cell::new(0) }
    }

    /// Leaves the next measurement out if another process compiles for it, so that nothing is prepared for it here.
    pub(super) fn leave(&self) -> bool {
        let is_others =
            self.compiled.is_some_and(|share| self.begun() % share.shares != share.number);
        if is_others {
            self.begun.set(self.begun() + 1);
        }
        is_others
    }

    /// Makes the first launch of the next measurement, which compiles a kernel or chooses an algorithm, if it is to be
    /// made here. Returns whether others are to be timed.
    pub(super) fn begin(&self, first: impl FnOnce() -> Result<()>) -> Result<bool> {
        if self.leave() {
            return Ok(false);
        }
        self.begun.set(self.begun() + 1);
        first()?;
        Ok(self.compiled.is_none())
    }

    pub(super) fn begun(&self) -> u32 {
        self.begun.get()
    }
}

/// The processors that measure nothing while others are measured: those that are left to threads that drive GPUs. None
/// where nodes are too small to spare any.
pub fn spared(machine: &Machine) -> Vec<u32> {
    let nodes = machine.devices.rows().iter().filter_map(cpus);
    nodes.flat_map(|cpus| beside_all_gpus(machine, cpus)[1]).copied().collect()
}

/// The driver's ordinal of each kind of GPU of a machine, with the number of processes, several, among which its
/// kernels are best shared out; none of GPUs that have not the memory for two.
pub fn compiling(machine: &Machine) -> Vec<(u32, u32)> {
    let threads = thread::available_parallelism().map_or(1, |threads| threads.get() as u32);
    let mut seen = Vec::new();
    let mut found = Vec::new();
    for device in machine.devices.rows() {
        let DeviceKind::Gpu { ordinal, .. } = device.kind else { continue };
        // Models of one size of memory are taken for one model.
        if !seen.contains(&device.memory_bytes) {
            seen.push(device.memory_bytes);
            let fit = device.memory_bytes / PROCESS_BYTES;
            let processes = threads.min(MOST_PROCESSES).min(fit as u32);
            found.extend((processes > 1).then_some((ordinal, processes)));
        }
    }
    found
}

/// Compiles a share of the kernels that a GPU is measured with, on some processors; on any where none are named.
///
/// # Errors
/// When it cannot be opened, has no memory to measure with, or fails, and when the system does not bind threads.
pub fn compile(ordinal: u32, share: Share, cpus: &[u32]) -> Result<()> {
    if !cpus.is_empty() {
        // Threads that it starts from now on are bound as it is.
        bind(&Topology::new().context("reading the machine's topology")?, cpus)?;
    }
    let gpu = Gpu::cuda(ordinal as usize).with_context(|| format!("opening gpu{ordinal}"))?;
    gpu::compile(&gpu, Sizes::FULL, share)
}

/// Lets a process that compiles have all processors that this one may use.
///
/// # Errors
/// When there is no such process, or the system binds none.
pub fn unbind(process: u32) -> Result<()> {
    let topology = Topology::new().context("reading the machine's topology")?;
    let all = topology.cpu_binding(CpuBindingFlags::PROCESS);
    let all = all.context("asking where this process may run")?;
    let bound = topology.bind_process_cpu(process, &all, CpuBindingFlags::empty());
    bound.with_context(|| format!("unbinding process {process}"))
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_process_gets_all_processors_back() {
        let topology = Topology::new().unwrap();
        let all = topology.cpu_binding(CpuBindingFlags::PROCESS).unwrap();
        let mut process = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let (none, id) = (CpuBindingFlags::empty(), process.id());
        let mut one = all.clone();
        one.singlify();
        topology.bind_process_cpu(id, &one, none).unwrap();
        assert_eq!(topology.process_cpu_binding(id, none).unwrap(), one);
        unbind(id).unwrap();
        assert_eq!(topology.process_cpu_binding(id, none).unwrap(), all);
        // Its input ends with the pipe.
        drop(process.stdin.take());
        assert!(process.wait().unwrap().success());
    }
}
