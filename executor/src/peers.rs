//! Which sums the GPUs of a plan make among themselves, so which steps are waited for on the host, and where each GPU
//! finds the exchanges of the others.

#![expect(unsafe_code, reason = "the driver is asked for access to the memory of other GPUs")]

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context as _, Result};
use cudarc::driver::{CudaContext, sys};
use ir::id::{BufferId, DeviceId, StepId, Table};
use ir::machine::DeviceKind;
use ir::plan::{Plan, Program};

use crate::lane::fetching::last_read;
use crate::load::{GpuDriver, Options};

/// What the lanes of a plan's GPUs share.
pub(crate) struct Peers {
    /// For each program, which steps are parts of sums that GPUs make without the host.
    sums: Vec<Table<StepId, bool>>,
    /// For each program, which steps other lanes wait for on the host, in the run or before the next.
    awaited: Vec<Table<StepId, bool>>,
    exchanges: Mutex<BTreeMap<DeviceId, Exchange>>,
}

/// Where a GPU's exchange lies.
#[derive(Clone, Copy)]
struct Exchange {
    ordinal: usize,
    address: u64,
}

impl Peers {
    /// Finds the sums of a plan whose members reach each other's memory.
    pub(crate) fn new(plan: &Plan, options: &Options) -> Self {
        let mut reaches = BTreeMap::new();
        let sums = plan.programs.iter().map(|program| {
            let is_sum = |id: StepId| {
                let step = &program.steps[id];
                options.gpu_driver == GpuDriver::Cuda
                    && plan.is_peer_sum(program, step)
                    && *reaches
                        .entry(members(program, &step.reads))
                        .or_insert_with_key(|members| reach_each_other(plan, members))
            };
            program.steps.ids().map(is_sum).collect()
        });
        let sums: Vec<_> = sums.collect();
        let awaited = plan.programs.iter().zip(&sums).map(|(program, sums)| awaited(program, sums));
        Self { awaited: awaited.collect(), sums, exchanges: Mutex::default() }
    }

    /// Whether a step is a GPU's part of a sum that needs no host.
    pub(crate) fn is_sum(&self, program: usize, step: StepId) -> bool {
        self.sums[program][step]
    }

    /// The same for all steps of a program.
    pub(crate) fn sums(&self, program: usize) -> &Table<StepId, bool> {
        &self.sums[program]
    }

    /// Whether GPUs meet in a program without the host.
    pub(crate) fn meet(&self, program: usize) -> bool {
        self.sums[program].rows().contains(&true)
    }

    /// For each step of a program whether other lanes wait for it on the host.
    pub(crate) fn awaited(&self, program: usize) -> &Table<StepId, bool> {
        &self.awaited[program]
    }

    /// Tells the others where a GPU's exchange lies.
    pub(crate) fn register(&self, device: DeviceId, ordinal: usize, address: u64) {
        let mut exchanges = self.exchanges.lock().unwrap_or_else(PoisonError::into_inner);
        exchanges.insert(device, Exchange { ordinal, address });
    }

    /// The exchanges of a sum's members, once `device` may write to them.
    ///
    /// # Errors
    /// When a member has no exchange, or the driver grants no access.
    pub(crate) fn addresses(&self, device: DeviceId, members: &[DeviceId]) -> Result<Vec<u64>> {
        let exchanges = self.exchanges.lock().unwrap_or_else(PoisonError::into_inner);
        let own = exchanges.get(&device).context("this GPU has no exchange")?.ordinal;
        let address = |member: &DeviceId| {
            let exchange = exchanges.get(member).context("a GPU has no exchange")?;
            if exchange.ordinal != own {
                grant(own, exchange.ordinal)?;
            }
            Ok(exchange.address)
        };
        members.iter().map(address).collect()
    }
}

/// For each step of a program whether another lane waits for it on the host, in this run or before the next; `sums` are
/// the steps that do not wait there.
fn awaited(program: &Program, sums: &Table<StepId, bool>) -> Table<StepId, bool> {
    let mut awaited: Table<StepId, bool> = program.steps.ids().map(|_| false).collect();
    for (_, step) in program.steps.iter().filter(|(id, _)| !sums[*id]) {
        for &wait in &step.waits {
            awaited[wait] = true;
        }
    }
    let devices = program.lanes.iter().map(|lane| lane.device);
    for step in devices.filter_map(|device| last_read(program, device)) {
        awaited[step] = true;
    }
    awaited
}

/// The devices whose buffers are read, in that order.
pub(crate) fn members(program: &Program, reads: &[BufferId]) -> Vec<DeviceId> {
    reads.iter().map(|&buffer| program.buffers[buffer].device).collect()
}

fn reach_each_other(plan: &Plan, members: &[DeviceId]) -> bool {
    let ordinal = |&device: &DeviceId| match plan.machine.devices[device].kind {
        DeviceKind::Gpu { ordinal, .. } => Some(ordinal as usize),
        DeviceKind::Numa { .. } => None,
    };
    let Some(ordinals) = members.iter().map(ordinal).collect::<Option<Vec<usize>>>() else {
        return false;
    };
    let pairs = ordinals.iter().flat_map(|&from| ordinals.iter().map(move |&to| (from, to)));
    pairs.filter(|(from, to)| from != to).all(|(from, to)| reaches(from, to).unwrap_or(false))
}

/// Whether launches on one GPU can reach the memory of another.
pub(crate) fn reaches(from: usize, to: usize) -> Result<bool> {
    let (from, to) = (CudaContext::new(from)?, CudaContext::new(to)?);
    let mut answer = 0;
    // SAFETY: the answer is written to a number of this function.
    unsafe { sys::cuDeviceCanAccessPeer(&raw mut answer, from.cu_device(), to.cu_device()) }
        .result()?;
    Ok(answer != 0)
}

/// Lets launches on one GPU read and write the memory of another.
pub(crate) fn grant(own: usize, other: usize) -> Result<()> {
    let (own, other) = (CudaContext::new(own)?, CudaContext::new(other)?);
    own.bind_to_thread().context("binding the GPU's context")?;
    // SAFETY: both contexts are alive, and the first is this thread's.
    let granted = unsafe { sys::cuCtxEnablePeerAccess(other.cu_ctx(), 0) };
    if granted == sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED {
        return Ok(());
    }
    granted.result().context("reaching the memory of another GPU")
}
