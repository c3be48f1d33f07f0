//! GPUs, numbered as the driver numbers them for programs, and what its management library knows of each.
//!
//! - The management library lists all GPUs by their slots. Programs see those that `CUDA_VISIBLE_DEVICES` names, or
//!   all, the fastest first; so GPUs are asked for by slot.
//! - Containers may lack the library: what it does not tell is `None`, or what is usual.

#![expect(unsafe_code, reason = "the driver is asked through its C interface")]

use cudarc::driver::{result, sys};
use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::Clock;

/// One GPU.
#[derive(Clone, Debug)]
pub(crate) struct Gpu {
    /// The driver's number.
    pub(crate) ordinal: u32,
    /// Model name.
    pub(crate) name: String,
    /// All of its memory.
    pub(crate) memory_bytes: u64,
    /// What its memory's clock and width give, where the driver tells.
    pub(crate) memory_bytes_per_sec: Option<f64>,
    /// Shader cores times clock, where the driver tells.
    pub(crate) core_hertz: Option<f64>,
    /// What its PCIe slot carries one way.
    pub(crate) pcie_bytes_per_sec: f64,
    /// Whether an NVLink of it is up.
    pub(crate) has_nvlink: bool,
}

/// Whether cuBLASLt is installed, which runs the products of prompts.
pub(crate) fn has_library() -> bool {
    // SAFETY: looks for a library.
    unsafe { cudarc::cublaslt::sys::is_culib_present() }
}

/// All GPUs that programs see; none where there is no driver.
pub(crate) fn read() -> Vec<Gpu> {
    // SAFETY: looks for a library.
    let is_there = unsafe { sys::is_culib_present() };
    if !is_there || result::init().is_err() {
        return Vec::new();
    }
    let nvml = Nvml::init().ok();
    let count = result::device::get_count().unwrap_or(0);
    (0..count.cast_unsigned()).filter_map(|ordinal| gpu(nvml.as_ref(), ordinal)).collect()
}

fn gpu(nvml: Option<&Nvml>, ordinal: u32) -> Option<Gpu> {
    let Seen { name, slot, memory_bytes } = Seen::of(ordinal)?;
    let device = nvml.and_then(|nvml| nvml.device_by_pci_bus_id(slot).ok());
    let device = device.as_ref();
    let hertz = |clock| Some(f64::from(device?.max_clock_info(clock).ok()?) * 1e6);
    let width_bytes = || Some(f64::from(device?.memory_bus_width().ok()?) / 8.0);
    let cores = || Some(f64::from(device?.num_cores().ok()?));
    let total_bytes = || Some(device?.memory_info().ok()?.total);
    let generation = || device?.max_pcie_link_gen().ok();
    let lanes = || device?.max_pcie_link_width().ok();
    /// The most links that any GPU has had so far.
    const MOST_NVLINKS: u32 = 18;
    let is_active = |link| {
        device.is_some_and(|device| device.link_wrapper_for(link).is_active().unwrap_or(false))
    };
    Some(Gpu {
        ordinal,
        name,
        memory_bytes: total_bytes()
            .map_or(memory_bytes, |whole_bytes| whole_or_part(whole_bytes, memory_bytes)),
        // Two transfers a clock, as the driver states memory clocks.
        memory_bytes_per_sec: hertz(Clock::Memory)
            .zip(width_bytes())
            .map(|(hertz, bytes)| 2.0 * hertz * bytes),
        core_hertz: cores().zip(hertz(Clock::SM)).map(|(cores, hertz)| cores * hertz),
        pcie_bytes_per_sec: pcie_bytes_per_sec(generation().unwrap_or(3), lanes().unwrap_or(16)),
        has_nvlink: (0..MOST_NVLINKS).any(is_active),
    })
}

/// A GPU as programs see it.
struct Seen {
    name: String,
    /// Domain, bus and device: `0000:3b:00.0`.
    slot: String,
    memory_bytes: u64,
}

impl Seen {
    fn of(ordinal: u32) -> Option<Self> {
        use sys::CUdevice_attribute_enum::{
            CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID,
            CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID,
        };
        let device = result::device::get(ordinal.cast_signed()).ok()?;
        // SAFETY: the driver has just named this device.
        let number = |which| unsafe { result::device::get_attribute(device, which) }.ok();
        let domain = number(CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?;
        let bus = number(CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?;
        let place = number(CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?;
        // SAFETY: as above.
        let memory_bytes = unsafe { result::device::total_mem(device) }.ok()?;
        Some(Self {
            name: result::device::get_name(device).ok()?,
            slot: format!("{domain:04x}:{bus:02x}:{place:02x}.0"),
            memory_bytes: memory_bytes as u64,
        })
    }
}

/// The memory of a GPU of which programs see so much: it keeps a little of the whole for itself, and where it is
/// divided (MIG) a part is much less.
fn whole_or_part(whole_bytes: u64, seen_bytes: u64) -> u64 {
    let is_part = seen_bytes < whole_bytes - whole_bytes / 10;
    if is_part { seen_bytes } else { whole_bytes }
}

/// A fifth generation slot of 16 lanes carried 55 GB/s from pinned memory on an H200; each generation doubles.
fn pcie_bytes_per_sec(generation: u32, lanes: u32) -> f64 {
    let generations_back = 5 - generation.min(6) as i32;
    55e9 / 2f64.powi(generations_back) * f64::from(lanes.min(16)) / 16.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_a_gpu_has_its_own_memory() {
        // The driver keeps 0.43 % of an H200.
        let whole = 150_754_820_096;
        assert_eq!(whole_or_part(whole, whole / 10_000 * 9_957), whole);
        assert_eq!(whole_or_part(whole, whole / 8), whole / 8);
    }
}
