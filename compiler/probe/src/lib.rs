//! Describes the machine it runs on as data, and says how another description differs from it.
//!
//! Rates are nominal: from data sheets and from measurements of other machines. A calibration replaces them.

mod cpu;
mod gpu;
mod links;
mod memory;
mod nominal;

use std::cmp::Reverse;

use anyhow::{Context as _, Result, ensure};
use ir::id::Table;
use ir::machine::{CpuCache, Device, DeviceKind, Host, Machine};

use crate::cpu::{DataCache, Node, Processors};
use crate::gpu::Gpu;

pub use crate::memory::available_memory;

/// Share of a node's memory that plans may fill: the rest is for the system and for what the plan does not count.
const USABLE_NODE_MEMORY: f64 = 0.9;
/// Share of a GPU's memory that plans may fill: the driver keeps 0.43 % of an H200 for itself, and pages are 2 MiB.
const USABLE_GPU_MEMORY: f64 = 0.985;

/// Parts of a node that are plenty for trying plans; every pair of devices has links, so their number grows with its
/// square.
pub const MOST_PARTS: u32 = 64;

/// This machine: GPUs first, then NUMA nodes with one logical processor a core, of those that
/// this process may run on.
///
/// `split` divides each node's cores and memory into that many devices, for trying plans of several devices on
/// one node. Fails when the topology cannot be read, or `split` is 0 or more than 64.
pub fn machine(split: Option<u32>) -> Result<Machine> {
    let processors = Processors::read()?;
    let gpus = gpu::read();
    let parts = split.unwrap_or(1);
    ensure!(parts > 0, "a machine cannot be split into 0 devices");
    ensure!(
        parts <= MOST_PARTS,
        "a node can be split into {MOST_PARTS} devices at most, not {parts}: lower --split"
    );
    let mut devices = Table::default();
    for gpu in &gpus {
        devices.push(gpu_device(gpu));
    }
    let mut number = 0;
    for node in processors.nodes.iter().filter(|node| !node.cores.is_empty()) {
        for part in 0..parts {
            devices.push(node_device(&processors, node, number, part, parts));
            number += 1;
        }
    }
    let links = links::all(&devices, &gpus);
    Ok(Machine { host: host(&processors, &gpus), devices, links, collectives: None })
}

/// What keeps a plan made for `machine` from running here, one sentence each; empty when nothing does.
///
/// Fails when this machine's topology cannot be read.
pub fn mismatch(machine: &Machine) -> Result<Vec<String>> {
    let processors = Processors::read()?;
    // To ask for them takes a while.
    let has_gpus = machine.has_gpus();
    let gpus = if has_gpus { gpu::read() } else { Vec::new() };
    Ok(differences(machine, &processors, &gpus))
}

fn differences(machine: &Machine, processors: &Processors, gpus: &[Gpu]) -> Vec<String> {
    let mut found = Vec::new();
    let here = host(processors, gpus);
    let there = &machine.host;
    if there.cpu != here.cpu {
        found.push(format!("its processor is {:?}, this one is {:?}", there.cpu, here.cpu));
    }
    if there.cpus != here.cpus {
        found.push(format!("it has {} logical processors, this one has {}", there.cpus, here.cpus));
    }
    if there.nodes != here.nodes {
        found.push(format!("it has {} NUMA nodes, this one has {}", there.nodes, here.nodes));
    }
    for (_, device) in machine.devices.iter() {
        match &device.kind {
            DeviceKind::Gpu { ordinal, .. } => {
                let name = &device.name;
                let planned = there.gpus.get(*ordinal as usize);
                match gpus.iter().find(|gpu| gpu.ordinal == *ordinal) {
                    None => found.push(format!("{name} is GPU {ordinal}, which is not here")),
                    Some(gpu) if planned != Some(&gpu.name) => found.push(format!(
                        "{name} is a {:?}, here it is a {:?}",
                        planned.map_or("GPU without a name", String::as_str),
                        gpu.name
                    )),
                    Some(gpu) if gpu.memory_bytes < device.memory_bytes => found.push(format!(
                        "{name} has {} bytes, here it has {}",
                        device.memory_bytes, gpu.memory_bytes
                    )),
                    Some(_) => (),
                }
            }
            DeviceKind::Numa { node, cpus } => {
                let Some(here) = processors.nodes.iter().find(|here| here.number == *node) else {
                    found.push(format!("{} is NUMA node {node}, which is not here", device.name));
                    continue;
                };
                let foreign: Vec<String> = cpus
                    .iter()
                    .filter(|cpu| !here.all_cpus.contains(cpu))
                    .map(u32::to_string)
                    .collect();
                if !foreign.is_empty() {
                    found.push(format!(
                        "{} runs on processors {}, which NUMA node {node} does not have here",
                        device.name,
                        foreign.join(", ")
                    ));
                }
            }
        }
    }
    for node in &processors.nodes {
        let planned = machine.devices.rows().iter().filter(
            |device| matches!(device.kind, DeviceKind::Numa { node: on, .. } if on == node.number),
        );
        let planned: u64 = planned.map(|device| device.memory_bytes).fold(0, u64::saturating_add);
        if planned > node.memory_bytes {
            found.push(format!(
                "its devices on NUMA node {} have {planned} bytes, the node here has {}",
                node.number, node.memory_bytes
            ));
        }
    }
    found
}

fn host(processors: &Processors, gpus: &[Gpu]) -> Host {
    Host {
        cpu: processors.model.clone(),
        cpus: processors.logical,
        nodes: processors.nodes.len() as u32,
        gpus: gpus.iter().map(|gpu| gpu.name.clone()).collect(),
    }
}

fn gpu_device(gpu: &Gpu) -> Device {
    let has_library = gpu::has_library();
    Device {
        name: format!("gpu{}", gpu.ordinal),
        kind: DeviceKind::Gpu {
            ordinal: gpu.ordinal,
            reserved_bytes: nominal::GPU_RESERVED_BYTES,
            library_bytes: if has_library { nominal::GPU_LIBRARY_BYTES } else { 0 },
            launch_bytes: nominal::GPU_LAUNCH_BYTES,
            has_warpgroups: nominal::is_hopper(&gpu.name),
        },
        memory_bytes: usable(gpu.memory_bytes, USABLE_GPU_MEMORY),
        cpu_caches: Vec::new(),
        rates: nominal::gpu_rates(gpu, has_library),
    }
}

/// Part `part` of `parts` of a node. Cores need not divide evenly; with fewer cores than parts they are shared.
fn node_device(processors: &Processors, node: &Node, number: u32, part: u32, parts: u32) -> Device {
    let cores = node.cores.len() as u32;
    let cpus = if cores < parts {
        vec![node.cores[(part % cores) as usize]]
    } else {
        // The first parts get the cores that are left over.
        let (each, left) = (cores / parts, cores % parts);
        let start = (part * each + part.min(left)) as usize;
        let size = (each + u32::from(part < left)) as usize;
        node.cores[start..start + size].to_vec()
    };
    Device {
        name: format!("numa{number}"),
        memory_bytes: usable(node.memory_bytes / u64::from(parts), USABLE_NODE_MEMORY),
        cpu_caches: cpu_caches(&processors.caches, &cpus),
        rates: nominal::node_rates(cpus.len() as u32, cores, &processors.flags),
        kind: DeviceKind::Numa { node: node.number, cpus },
    }
}

/// The caches that these processors use, alike ones counted.
fn cpu_caches(caches: &[DataCache], cpus: &[u32]) -> Vec<CpuCache> {
    let mut found: Vec<CpuCache> = Vec::new();
    for cache in caches.iter().filter(|cache| cache.cpus.iter().any(|cpu| cpus.contains(cpu))) {
        let (level, bytes) = (cache.level, cache.bytes);
        match found.iter_mut().find(|known| (known.level, known.bytes) == (level, bytes)) {
            Some(known) => known.count += 1,
            None => found.push(CpuCache { level, bytes, count: 1 }),
        }
    }
    found.sort_by_key(|cache| (cache.level, Reverse(cache.bytes)));
    found
}

/// Whole pages, so that two descriptions of one machine are alike.
fn usable(bytes: u64, share: f64) -> u64 {
    const PAGE_BYTES: u64 = 4096;
    (bytes as f64 * share) as u64 / PAGE_BYTES * PAGE_BYTES
}

/// Reads a file of the kernel's, trimmed.
fn kernel_file(path: &str) -> Result<String> {
    let text = std::fs::read_to_string(path).with_context(|| format!("reading {path}"))?;
    Ok(text.trim().to_owned())
}

/// A value of a text of lines such as `name: value`.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(key, _)| key.trim() == name)
        .map(|(_, value)| value.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn processors(cores: &[u32]) -> Processors {
        Processors {
            model: "test".into(),
            logical: cores.len() as u32,
            flags: Vec::new(),
            nodes: vec![Node {
                number: 0,
                memory_bytes: 1 << 30,
                cores: cores.to_vec(),
                all_cpus: cores.to_vec(),
            }],
            caches: Vec::new(),
        }
    }

    fn cpus(cores: &[u32], parts: u32) -> Vec<Vec<u32>> {
        let processors = processors(cores);
        let device = |part| node_device(&processors, &processors.nodes[0], part, part, parts);
        (0..parts)
            .map(|part| match device(part).kind {
                DeviceKind::Numa { cpus, .. } => cpus,
                DeviceKind::Gpu { .. } => unreachable!("a part of a node is a node"),
            })
            .collect()
    }

    #[test]
    fn parts_of_a_node_share_its_cores_out() {
        assert_eq!(cpus(&[0, 1, 2], 2), [vec![0, 1], vec![2]]);
        assert_eq!(cpus(&[0], 2), [vec![0], vec![0]]);
    }

    #[test]
    fn caches_count_for_every_device_that_uses_them() {
        let cache = |level, bytes, cpus: &[u32]| DataCache { level, bytes, cpus: cpus.to_vec() };
        // Two large cores and a small one under a third level of all.
        let caches = [
            cache(3, 8 << 20, &[0, 1, 2]),
            cache(1, 32 << 10, &[2]),
            cache(1, 48 << 10, &[0]),
            cache(1, 48 << 10, &[1]),
        ];
        let row = |level, bytes, count| CpuCache { level, bytes, count };
        let third = row(3, 8 << 20, 1);
        let all = [row(1, 48 << 10, 2), row(1, 32 << 10, 1), third];
        assert_eq!(cpu_caches(&caches, &[0, 1, 2]), all);
        assert_eq!(cpu_caches(&caches, &[2]), [row(1, 32 << 10, 1), third]);
    }

    #[test]
    fn a_split_machine_matches_its_own_host() {
        for split in [None, Some(1), Some(2), Some(5)] {
            let machine = machine(split).unwrap();
            assert_eq!(mismatch(&machine).unwrap(), Vec::<String>::new());
        }
    }

    #[test]
    fn every_difference_is_named() {
        let mut machine = machine(Some(2)).unwrap();
        machine.host.cpu = "another".into();
        machine.devices.rows_mut()[0].memory_bytes = u64::MAX;
        let last = machine.devices.len() - 1;
        machine.devices.rows_mut()[last].kind = DeviceKind::Numa { node: 4711, cpus: vec![0] };
        let found = mismatch(&machine).unwrap().join("\n");
        for part in ["another", "4711", "bytes"] {
            assert!(found.contains(part), "{found}");
        }
    }

    #[test]
    fn a_machine_cannot_be_split_into_nothing_or_into_dust() {
        assert!(machine(Some(0)).is_err());
        assert!(machine(Some(MOST_PARTS)).is_ok());
        assert!(machine(Some(MOST_PARTS + 1)).is_err());
    }
}
