//! Nominal links between all pairs of devices.

use ir::id::{DeviceId, Table};
use ir::machine::{Device, DeviceKind, Link};

use crate::gpu::Gpu;

/// Seeing another core's flag: two misses in a shared cache, and the wake-up of a team that spins.
const CORE_LATENCY_NANOS: f64 = 1_000.0;
/// The same across sockets.
const SOCKET_LATENCY_NANOS: f64 = 2_000.0;
/// One core group's copy of another's memory on the same node: half of what a few cores read (30 GB/s each).
const NODE_BYTES_PER_SEC: f64 = 20e9;
/// One direction of two socket links (UPI at 20.8 GB/s each, data sheet of fourth generation Xeon).
const SOCKET_BYTES_PER_SEC: f64 = 40e9;
/// A 32 KiB copy to the host with its wait took 20 µs on an H200.
const PCIE_LATENCY_NANOS: f64 = 20_000.0;
/// Half of what a few bytes take there and back between captured launches: 2.8 to 3.4 µs were measured on H200s.
const PCIE_LETTER_NANOS: f64 = 3_100.0;
/// Launch and wait of a peer copy: two launches at 5 µs.
const PEER_LATENCY_NANOS: f64 = 10_000.0;
/// One way of NVLink 4 (450 GB/s, data sheet), three quarters of it usable.
const NVLINK_BYTES_PER_SEC: f64 = 340e9;

/// Links in the order of senders, then receivers.
pub(crate) fn all(devices: &Table<DeviceId, Device>, gpus: &[Gpu]) -> Vec<Link> {
    let gpu = |ordinal: u32| gpus.iter().find(|gpu| gpu.ordinal == ordinal);
    let pcie = |ordinal: u32| gpu(ordinal).map_or(NODE_BYTES_PER_SEC, |gpu| gpu.pcie_bytes_per_sec);
    let mut links = Vec::new();
    for (from, sender) in devices.iter() {
        for (to, receiver) in devices.iter().filter(|(to, _)| *to != from) {
            let (bytes_per_sec, latency_nanos) = match (&sender.kind, &receiver.kind) {
                (DeviceKind::Numa { node: a, .. }, DeviceKind::Numa { node: b, .. }) => {
                    if a == b {
                        (NODE_BYTES_PER_SEC, CORE_LATENCY_NANOS)
                    } else {
                        (SOCKET_BYTES_PER_SEC, SOCKET_LATENCY_NANOS)
                    }
                }
                (DeviceKind::Gpu { ordinal, .. }, DeviceKind::Numa { .. })
                | (DeviceKind::Numa { .. }, DeviceKind::Gpu { ordinal, .. }) => {
                    (pcie(*ordinal), PCIE_LATENCY_NANOS)
                }
                (DeviceKind::Gpu { ordinal: a, .. }, DeviceKind::Gpu { ordinal: b, .. }) => {
                    let has_nvlink = |ordinal| gpu(ordinal).is_some_and(|gpu| gpu.has_nvlink);
                    if has_nvlink(*a) && has_nvlink(*b) {
                        (NVLINK_BYTES_PER_SEC, PEER_LATENCY_NANOS)
                    } else {
                        (pcie(*a).min(pcie(*b)), PEER_LATENCY_NANOS)
                    }
                }
            };
            let crosses = sender.kind.is_gpu() != receiver.kind.is_gpu();
            let letter_nanos = crosses.then_some(PCIE_LETTER_NANOS);
            links.push(Link { letter_nanos, ..Link::new(from, to, bytes_per_sec, latency_nanos) });
        }
    }
    links
}
