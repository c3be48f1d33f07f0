//! GPUs, as NVIDIA's management library sees them.

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

/// All GPUs; none where there is no driver.
pub(crate) fn read() -> Vec<Gpu> {
    let Ok(nvml) = Nvml::init() else { return Vec::new() };
    let count = nvml.device_count().unwrap_or(0);
    (0..count).filter_map(|ordinal| gpu(&nvml, ordinal)).collect()
}

fn gpu(nvml: &Nvml, ordinal: u32) -> Option<Gpu> {
    let device = nvml.device_by_index(ordinal).ok()?;
    let hertz = |clock| device.max_clock_info(clock).ok().map(|mega| f64::from(mega) * 1e6);
    let width_bytes = device.memory_bus_width().ok().map(|bits| f64::from(bits) / 8.0);
    // Two transfers a clock, as the driver states memory clocks.
    let memory = hertz(Clock::Memory).zip(width_bytes).map(|(hertz, bytes)| 2.0 * hertz * bytes);
    let cores = device.num_cores().ok().map(f64::from);
    let generation = device.max_pcie_link_gen().unwrap_or(3);
    let lanes = device.max_pcie_link_width().unwrap_or(16);
    /// The most links that any GPU has had so far.
    const MOST_NVLINKS: u32 = 18;
    Some(Gpu {
        ordinal,
        name: device.name().ok()?,
        memory_bytes: device.memory_info().ok()?.total,
        memory_bytes_per_sec: memory,
        core_hertz: cores.zip(hertz(Clock::SM)).map(|(cores, hertz)| cores * hertz),
        pcie_bytes_per_sec: pcie_bytes_per_sec(generation, lanes),
        has_nvlink: (0..MOST_NVLINKS)
            .any(|link| device.link_wrapper_for(link).is_active().unwrap_or(false)),
    })
}

/// A fifth generation slot of 16 lanes carried 55 GB/s from pinned memory on an H200; each generation doubles.
fn pcie_bytes_per_sec(generation: u32, lanes: u32) -> f64 {
    let generations_back = 5 - generation.min(6) as i32;
    55e9 / 2f64.powi(generations_back) * f64::from(lanes.min(16)) / 16.0
}
