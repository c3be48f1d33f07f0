//! Which kernels are compiled before they are measured, and by how many processes: a compiler, and the driver's beside
//! it, compiles one kernel of a process after the other, and what one process compiled the next finds in the user's
//! cache folder.

use std::thread;

use anyhow::{Context as _, Result};
use ir::machine::{DeviceKind, Machine};

use super::gpu::{self, Share, Sizes};
use crate::kernels::gpu::device::Gpu;

/// Memory of a GPU for each process that compiles for it: its context and libraries take 0.6 GiB of an H200 (driver
/// 580), the largest mixture that is measured 1.1.
const PROCESS_BYTES: u64 = 3 << 30;
/// On an H200 whose host has 16 cores 8 processes take 11.4 s for what one takes 30 to 35 for, 16 take 10.8; where all
/// is compiled already 16 take 6.7 s to start and to end, one after the other in the driver.
const MOST_PROCESSES: u32 = 8;

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

/// Compiles a share of the kernels that a GPU is measured with.
///
/// # Errors
/// When it cannot be opened, has no memory to measure with, or fails.
pub fn compile(ordinal: u32, share: Share) -> Result<()> {
    let gpu = Gpu::cuda(ordinal as usize).with_context(|| format!("opening gpu{ordinal}"))?;
    gpu::compile(&gpu, Sizes::FULL, share)
}
