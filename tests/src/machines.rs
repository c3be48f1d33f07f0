//! Machines by name, small and slow, so that toy models overflow and occupy them as large ones do real machines.

use ir::id::{DeviceId, Id as _};
use ir::machine::{Device, DeviceKind, LinearRate, Link, Machine, RatePoint, RateSource, Rates};
use ir::tensor::Format;

/// Rates are those of real hardware over this: a toy has about a ten-thousandth of a small model's weights.
const SLOWER: f64 = 1e4;
/// What an unlimited device has.
const AMPLE_BYTES: u64 = 1 << 30;
/// Two thirds of [`crate::toys::Toy::llama`] with its caches, buffers and scratch.
const TIGHT_BYTES: u64 = 896 << 10;

/// The machine of that name, as test files spell it.
pub fn named(name: &str) -> Option<Machine> {
    Some(match name {
        "one_gpu" => one_gpu(),
        "one_gpu_two_numa" => one_gpu_two_numa(),
        "two_gpu_two_numa" => two_gpu_two_numa(),
        "two_numa" => two_numa(),
        _ => return None,
    })
}

/// A GPU that holds every toy.
pub fn one_gpu() -> Machine {
    linked(vec![gpu(0, AMPLE_BYTES)])
}

/// A small GPU beside two NUMA nodes.
pub fn one_gpu_two_numa() -> Machine {
    linked(vec![gpu(0, TIGHT_BYTES), numa(0, AMPLE_BYTES), numa(1, AMPLE_BYTES)])
}

/// A GPU of some bytes, and a NUMA node behind a link that is so fast that even the short prompts of toys are worth
/// fetching weights for.
pub fn fast_link(gpu_bytes: u64) -> Machine {
    let mut machine = linked(vec![gpu(0, gpu_bytes), numa(0, AMPLE_BYTES)]);
    machine.links.iter_mut().for_each(|link| link.bytes_per_sec *= 4.0);
    machine
}

/// Two small GPUs beside two NUMA nodes.
pub fn two_gpu_two_numa() -> Machine {
    linked(vec![
        gpu(0, TIGHT_BYTES),
        gpu(1, TIGHT_BYTES),
        numa(0, AMPLE_BYTES),
        numa(1, AMPLE_BYTES),
    ])
}

/// Two NUMA nodes alone.
pub fn two_numa() -> Machine {
    linked(vec![numa(0, AMPLE_BYTES), numa(1, AMPLE_BYTES)])
}

/// The machine with NUMA nodes that attend so slowly that all caches are better on GPUs.
pub fn keeping_caches(mut machine: Machine) -> Machine {
    let devices = machine.devices.rows_mut().iter_mut();
    for device in devices.filter(|device| !device.kind.is_gpu()) {
        device.rates.cache_bytes_per_sec = 1e3;
    }
    machine
}

/// An H200 of which `gpu_bytes` may be used, and its host's 16 cores, as fast as they were measured.
pub fn h200(gpu_bytes: u64) -> Machine {
    let curve = |format: Format, bytes_per_sec: f64, flops: &[(u32, f64)]| {
        let weights_per_sec = bytes_per_sec / (format.bytes(1, 64) as f64 / 64.0);
        let few = RatePoint { tokens: 1, weights_per_sec, nanos: 0.0 };
        let many = flops.iter().map(|&(tokens, flops)| RatePoint {
            tokens,
            weights_per_sec: weights_per_sec.min(flops / 2.0 / f64::from(tokens)),
            nanos: 0.0,
        });
        LinearRate { format, points: [few].into_iter().chain(many).collect() }
    };
    let rates =
        |bytes_per_sec: f64, flops: &[(u32, f64)], step_nanos, attention, beside_fetch| Rates {
            source: RateSource::Nominal,
            read_bytes_per_sec: bytes_per_sec,
            step_nanos,
            linear: Format::ALL.map(|format| curve(format, bytes_per_sec, flops)).to_vec(),
            attention_flops_per_sec: attention,
            attention_nanos: 0.0,
            prompt_score_nanos: 0.0,
            score_nanos: 0.0,
            experts: Vec::new(),
            shared_experts: Vec::new(),
            cache_bytes_per_sec: bytes_per_sec * 0.8,
            other_caches: Vec::new(),
            beside_fetch,
        };
    let gpu = Device {
        name: "gpu0".into(),
        kind: DeviceKind::Gpu {
            ordinal: 0,
            reserved_bytes: 640 << 20,
            library_bytes: 32 << 20,
            launch_bytes: 2560,
            has_warpgroups: true,
        },
        memory_bytes: gpu_bytes,
        cpu_caches: Vec::new(),
        // Steps of a captured graph.
        rates: rates(3.7e12, &[(512, 664e12), (2048, 791e12)], 2e3, 411e12, 1.0),
    };
    let host = Device {
        name: "numa0".into(),
        kind: DeviceKind::Numa { node: 0, cpus: (0..16).collect() },
        memory_bytes: 120 << 30,
        cpu_caches: Vec::new(),
        rates: rates(110e9, &[(64, 8e12), (512, 10e12)], 2e3, 1e12, 97.0 / 110.0),
    };
    let mut machine = linked(vec![gpu, host]);
    for link in &mut machine.links {
        (link.bytes_per_sec, link.latency_nanos) = (55e9, 10e3);
        link.letter_nanos = Some(3.1e3);
    }
    machine
}

/// Adds devices that are linked as one of the machine's is, and with it as two nodes of one host are.
pub fn add_like(
    machine: &mut Machine,
    name: &str,
    changes: impl Fn(usize, &mut Device),
    count: usize,
) {
    let first = machine.device(name).expect("the machine has it");
    let links = machine.links.clone();
    for number in 1..=count {
        let mut another = machine.devices[first].clone();
        changes(number, &mut another);
        let another = machine.devices.push(another);
        let mut between: Vec<(DeviceId, DeviceId)> = vec![(first, another)];
        between.extend(
            (1..number).map(|before| (DeviceId::from_index(another.index() - before), another)),
        );
        for (from, to) in between {
            machine.links.extend([between_nodes(from, to), between_nodes(to, from)]);
        }
        machine.links.extend(
            links.iter().filter(|link| link.from == first || link.to == first).map(|link| {
                let moved = |end| if end == first { another } else { end };
                Link { from: moved(link.from), to: moved(link.to), ..link.clone() }
            }),
        );
    }
}

/// Adds GPUs like the machine's first, which has number 0.
pub fn add_gpus(machine: &mut Machine, changes: impl Fn(usize, &mut Device), count: usize) {
    let numbered = |number: usize, gpu: &mut Device| {
        gpu.name = format!("gpu{number}");
        if let DeviceKind::Gpu { ordinal, .. } = &mut gpu.kind {
            *ordinal = u32::try_from(number).expect("GPUs are few");
        }
        changes(number, gpu);
    };
    add_like(machine, "gpu0", numbered, count);
}

/// Multiplies the rates of a machine's devices by a factor for GPUs and one for nodes.
pub fn slow_down(machine: &mut Machine, of_gpus: f64, of_nodes: f64) {
    for device in machine.devices.rows_mut() {
        let factor = if device.kind.is_gpu() { of_gpus } else { of_nodes };
        slow_down_rates(&mut device.rates, factor);
    }
}

/// Multiplies the rates of a device by a factor.
pub fn slow_down_rates(rates: &mut Rates, factor: f64) {
    rates.read_bytes_per_sec *= factor;
    rates.cache_bytes_per_sec *= factor;
    rates.attention_flops_per_sec *= factor;
    for point in rates.linear.iter_mut().flat_map(|linear| &mut linear.points) {
        point.weights_per_sec *= factor;
    }
}

/// A link between two nodes of one host.
pub fn between_nodes(from: DeviceId, to: DeviceId) -> Link {
    Link::new(from, to, 60e9, 500.0)
}

/// The same host with a second socket like the first.
pub fn two_sockets(gpu_bytes: u64) -> Machine {
    sockets(gpu_bytes, 2)
}

/// The same with `count` sockets, all linked.
pub fn sockets(gpu_bytes: u64, count: u32) -> Machine {
    let mut machine = h200(gpu_bytes);
    let first = machine.devices.ids().last().expect("a host");
    let of_first = machine.links.clone();
    let mut sockets = vec![first];
    for node in 1..count {
        let socket = machine.devices.push(Device {
            name: format!("numa{node}"),
            kind: DeviceKind::Numa { node, cpus: (16 * node..16 * (node + 1)).collect() },
            ..machine.devices[first].clone()
        });
        let end = |end| if end == first { socket } else { end };
        let of_socket = of_first.iter().map(|link| Link {
            from: end(link.from),
            to: end(link.to),
            ..link.clone()
        });
        machine.links.extend(of_socket);
        let to_others = sockets.iter().flat_map(|&other| [(other, socket), (socket, other)]);
        machine.links.extend(to_others.map(|(from, to)| between_nodes(from, to)));
        sockets.push(socket);
    }
    machine
}

/// A GPU: 3 TB/s and 300 TFLOP/s over `SLOWER`, 5 µs a launch.
pub fn gpu(ordinal: u32, memory_bytes: u64) -> Device {
    Device {
        name: format!("gpu{ordinal}"),
        kind: DeviceKind::Gpu {
            ordinal,
            reserved_bytes: 0,
            library_bytes: 0,
            launch_bytes: 0,
            has_warpgroups: false,
        },
        memory_bytes,
        cpu_caches: Vec::new(),
        rates: rates(3e12 / SLOWER, 5e3, 3e14 / SLOWER),
    }
}

/// Eight cores of a NUMA node: 100 GB/s and 2 TFLOP/s over `SLOWER`, 1 µs a step.
pub fn numa(node: u32, memory_bytes: u64) -> Device {
    Device {
        name: format!("numa{node}"),
        kind: DeviceKind::Numa { node, cpus: (8 * node..8 * (node + 1)).collect() },
        memory_bytes,
        cpu_caches: Vec::new(),
        rates: rates(1e11 / SLOWER, 1e3, 2e12 / SLOWER),
    }
}

/// Rates of a core as probes write them: 28 GB/s, 94 GFLOP/s, 2 µs a step.
pub fn core_rates() -> Rates {
    rates(2.8e10, 2e3, 9.4e10)
}

/// Four GPUs and four nodes that 70 B in 16 bits do not fit by themselves: unlike in memory, so that every order of them
/// is another pipeline, and too small for most of these.
pub fn eight_unlike() -> Machine {
    let size = |index: u32| (15 + 2 * u64::from(index)) << 30;
    let gpus = (0..4).map(|ordinal| gpu(ordinal, size(ordinal)));
    linked(gpus.chain((0..4).map(|node| numa(node, size(node) + (1 << 30)))).collect())
}

/// A machine of these devices, each linked to every other.
pub fn linked(devices: Vec<Device>) -> Machine {
    let ids: Vec<DeviceId> = (0..devices.len()).map(DeviceId::from_index).collect();
    let is_gpu = |id: DeviceId| devices[id.index()].kind.is_gpu();
    let mut links = Vec::new();
    for &from in &ids {
        for &to in ids.iter().filter(|&&to| to != from) {
            // Peer to peer, shared memory, and the bus between a host and a GPU.
            let (bytes_per_sec, latency_nanos) = match (is_gpu(from), is_gpu(to)) {
                (true, true) => (3e11, 5e3),
                (false, false) => (6e10, 1e3),
                (true, false) | (false, true) => (5e10, 1e4),
            };
            links.push(Link::new(from, to, bytes_per_sec, latency_nanos));
        }
    }
    links.iter_mut().for_each(|link| link.bytes_per_sec /= SLOWER);
    Machine { devices: devices.into_iter().collect(), links, ..Machine::default() }
}

/// Linears that are bound by the weights up to some rows, then by arithmetic.
fn rates(read_bytes_per_sec: f64, step_nanos: f64, flops_per_sec: f64) -> Rates {
    let linear = |format: Format| {
        let weight_bytes = format.bytes(1, 32) as f64 / 32.0;
        let memory_bound = read_bytes_per_sec / weight_bytes;
        let at = |tokens: u32| {
            let arithmetic_bound = flops_per_sec / 2.0 / f64::from(tokens);
            let weights_per_sec = memory_bound.min(arithmetic_bound);
            RatePoint { tokens, weights_per_sec, nanos: 0.0 }
        };
        LinearRate { format, points: [1, 32, 512].map(at).to_vec() }
    };
    Rates {
        source: RateSource::Nominal,
        read_bytes_per_sec,
        step_nanos,
        linear: Format::ALL.map(linear).to_vec(),
        attention_flops_per_sec: flops_per_sec / 2.0,
        attention_nanos: 0.0,
        prompt_score_nanos: 0.0,
        score_nanos: 0.0,
        experts: Vec::new(),
        shared_experts: Vec::new(),
        cache_bytes_per_sec: read_bytes_per_sec,
        other_caches: Vec::new(),
        beside_fetch: 0.9,
    }
}
