//! Where the system has put the memory of a loaded plan: on huge pages, and each device's on its own NUMA node.

#![cfg(target_os = "linux")]

use std::fs;

use compiler::Options;
use compiler::options::Request;
use executor::engine::Engine;
use executor::load::{self, PlanFile};
use executor::memory::Region;
use ir::id::DeviceId;
use ir::machine::DeviceKind;
use tests::made_up::{LlamaShape, MadeUp};

/// Matrices of 2 MiB and more beside smaller ones, a small one in three.
const LLAMA: LlamaShape = LlamaShape {
    vocabulary: 16_384,
    hidden: 1024,
    intermediate: 2816,
    layers: 4,
    heads: 16,
    kv_heads: 4,
};

/// Pages of the last huge page of each region and stretch.
const SLACK_BYTES: u64 = 32 << 20;

/// Memory that asks for huge pages, as `/proc/self/smaps` and `/proc/self/numa_maps` count it.
#[derive(Debug, Default)]
struct Advised {
    bytes: u64,
    huge_bytes: u64,
    /// By the number of the NUMA node.
    node_bytes: Vec<u64>,
}

impl Advised {
    fn read() -> Self {
        Self::parse(
            &fs::read_to_string("/proc/self/smaps").unwrap(),
            &fs::read_to_string("/proc/self/numa_maps").unwrap_or_default(),
        )
    }

    fn parse(smaps: &str, numa_maps: &str) -> Self {
        let mut sum = Self::default();
        let (mut start, mut bytes, mut huge_bytes) = ("", 0, 0);
        let kilobytes = |field: &str| field.trim().trim_end_matches(" kB").parse::<u64>().unwrap();
        for line in smaps.lines() {
            match line.split_once(':') {
                Some(("Rss", field)) => bytes = kilobytes(field) << 10,
                Some(("AnonHugePages", field)) => huge_bytes = kilobytes(field) << 10,
                Some(("VmFlags", flags)) => {
                    if flags.split_whitespace().any(|flag| flag == "hg") {
                        sum.bytes += bytes;
                        sum.huge_bytes += huge_bytes;
                        sum.add_nodes(start, numa_maps);
                    }
                }
                Some((key, _)) if !key.contains(' ') => {}
                // A header: the addresses of the mapping that the next lines are about.
                Some(_) | None => start = line.split('-').next().unwrap(),
            }
        }
        sum
    }

    /// Adds the pages of the mapping at an address.
    fn add_nodes(&mut self, start: &str, numa_maps: &str) {
        let line = numa_maps.lines().find(|line| line.split(' ').next() == Some(start));
        let fields = line.unwrap_or_default().split(' ').filter_map(|field| field.split_once('='));
        let (mut page_bytes, mut pages) = (0, Vec::<(usize, u64)>::new());
        for (key, value) in fields {
            if key == "kernelpagesize_kB" {
                page_bytes = value.parse::<u64>().unwrap() << 10;
            } else if let Some(node) = key.strip_prefix('N').and_then(|node| node.parse().ok()) {
                pages.push((node, value.parse().unwrap()));
            }
        }
        for (node, pages) in pages {
            let nodes = self.node_bytes.len().max(node + 1);
            self.node_bytes.resize(nodes, 0);
            self.node_bytes[node] += pages * page_bytes;
        }
    }
}

#[test]
fn mappings_are_read_as_the_system_writes_them() {
    let smaps = "\
7f0000000000-7f0000800000 rw-p 00000000 00:00 0
Size:               8192 kB
Rss:                6144 kB
AnonHugePages:      4096 kB
THPeligible:           1
VmFlags: rd wr mr mw me ac sd hg
7f0001000000-7f0001400000 rw-p 00000000 08:01 77         /a file: of some kind
Rss:                4096 kB
AnonHugePages:         0 kB
VmFlags: rd wr mr mw me ac sd
7f0002000000-7f0002400000 rw-p 00000000 00:00 0          [anon: ours]
Rss:                1024 kB
AnonHugePages:         0 kB
VmFlags: rd wr mr mw me ac sd hg
";
    let numa_maps = "\
7f0000000000 default anon=1536 dirty=1536 active=0 N0=1024 N1=512 kernelpagesize_kB=4
7f0001000000 default file=/a\\040file: mapped=1024 N0=1024 kernelpagesize_kB=4
7f0002000000 bind:1 anon=256 dirty=256 N1=256 kernelpagesize_kB=4
";
    let sum = Advised::parse(smaps, numa_maps);
    assert_eq!([sum.bytes, sum.huge_bytes], [7 << 20, 4 << 20]);
    assert_eq!(sum.node_bytes, [4 << 20, 3 << 20]);
}

/// One test of two plans, since what a process has mapped is counted.
#[test]
fn a_loaded_plan_is_on_huge_pages_and_on_its_nodes() {
    // What the system gives of huge pages now.
    let mut region = Region::new(64 << 20).unwrap();
    region.as_mut_slice::<u8>().fill(1);
    let given = Advised::read();
    drop(region);
    let share = |advised: &Advised| advised.huge_bytes as f64 / advised.bytes as f64;
    let folder = tempfile::tempdir().unwrap();
    MadeUp::llama(LLAMA).write(folder.path(), 1).unwrap();
    let model = models::lower(folder.path()).unwrap();
    let machine = probe::machine(None).unwrap();
    let nodes = machine.devices.iter().filter_map(|(id, device)| match &device.kind {
        DeviceKind::Numa { node, .. } => Some((id, *node, device.name.as_str())),
        DeviceKind::Gpu { .. } => None,
    });
    let nodes: Vec<(DeviceId, u32, &str)> = nodes.collect();
    let members = nodes.iter().map(|&(_, _, name)| (name.to_owned(), None)).collect();
    let options = Options {
        context: Some(1024),
        formats: vec!["q8".parse().unwrap()],
        request: Request::TensorParallel(members),
        ..Options::default()
    };
    let plan = compiler::compile(&model, &machine, &options, &mut |_, _| ()).unwrap();
    let path = folder.path().join("plan.ron");
    fs::write(&path, plan.to_ron().unwrap()).unwrap();
    let file = PlanFile::open(&path).unwrap();
    let mut engine = Engine::new(load::load(file, &load::Options::default(), |_, _| ()).unwrap());
    let id = engine.open();
    engine.append(id, &[7; 1000]).unwrap();
    engine.advance(&[id]).unwrap();
    let held = Advised::read();
    let forecasts = &plan.forecast.devices;
    let weights: u64 = forecasts.rows().iter().map(|device| device.weight_bytes).sum();
    assert!(held.bytes >= weights, "{held:?} for {weights} bytes of weights");
    if share(&given) < 0.5 {
        eprintln!("skipped: the system gives few huge pages: {given:?}");
    } else {
        assert!(share(&held) > share(&given) - 0.1, "{held:?}, a region has {given:?}");
    }
    let [_, _, ..] = &nodes[..] else {
        return eprintln!("skipped: this machine has one NUMA node");
    };
    for &(id, node, device) in &nodes {
        let forecast = &forecasts[id];
        let bytes = held.node_bytes.get(node as usize).copied().unwrap_or(0);
        let allowed = forecast.needed_bytes() * 103 / 100 + SLACK_BYTES;
        assert!(
            (forecast.weight_bytes..=allowed).contains(&bytes),
            "{device} has {} bytes of weights and is to have {allowed} at most: {held:?}",
            forecast.weight_bytes
        );
    }
}
