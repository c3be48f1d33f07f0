//! NUMA nodes, cores, caches and memory, as hwloc sees them.

use anyhow::{Context as _, Result, ensure};
use hwlocality::Topology;
use hwlocality::bitmap::BitmapIndex;
use hwlocality::cpu::binding::CpuBindingFlags;
use hwlocality::cpu::cpuset::CpuSet;
use hwlocality::object::TopologyObject;
use hwlocality::object::attributes::ObjectAttributes;
use hwlocality::object::depth::Depth;
use hwlocality::object::types::ObjectType;

use crate::{field, kernel_file, memory};

/// The processors of this machine.
#[derive(Clone, Debug)]
pub(crate) struct Processors {
    /// Model name.
    pub(crate) model: String,
    /// Logical processors.
    pub(crate) logical: u32,
    /// Instruction sets, as the kernel spells them.
    pub(crate) flags: Vec<String>,
    /// Nodes that have processors.
    pub(crate) nodes: Vec<Node>,
    /// Caches of all nodes.
    pub(crate) caches: Vec<DataCache>,
}

/// One NUMA node.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    /// The operating system's number.
    pub(crate) number: u32,
    /// Its memory, as far as this process may use it.
    pub(crate) memory_bytes: u64,
    /// One logical processor of each core, of those that this process may run on.
    pub(crate) cores: Vec<u32>,
    /// All logical processors.
    pub(crate) all_cpus: Vec<u32>,
}

/// One cache that holds data.
#[derive(Clone, Debug)]
pub(crate) struct DataCache {
    /// 1 is the nearest to a core.
    pub(crate) level: u32,
    /// Its size.
    pub(crate) bytes: u64,
    /// Logical processors that use it.
    pub(crate) cpus: Vec<u32>,
}

impl Processors {
    /// Fails when hwloc cannot read the topology or finds no node with cores.
    pub(crate) fn read() -> Result<Self> {
        let topology = Topology::new().context("reading the machine's topology")?;
        let cpuinfo = kernel_file("/proc/cpuinfo").unwrap_or_default();
        // Where the system does not tell, all of them.
        let allowed = topology.cpu_binding(CpuBindingFlags::PROCESS).ok();
        let nodes = topology.objects_at_depth(Depth::NUMANode);
        let mut nodes: Vec<Node> =
            nodes.filter_map(|object| node(&topology, object, allowed.as_ref())).collect();
        let has_cores = nodes.iter().any(|node| !node.cores.is_empty());
        ensure!(has_cores, "the topology has no NUMA node with cores");
        let has_memory = nodes.iter().any(|node| node.memory_bytes > 0);
        ensure!(
            has_memory,
            "the system tells of no memory: mount /sys, which the topology is read from"
        );
        limit_memory(&mut nodes);
        let logical = topology.objects_with_type(ObjectType::PU).count() as u32;
        let caches = topology.objects().filter_map(data_cache).collect();
        Ok(Self {
            model: model(&topology, &cpuinfo),
            logical,
            flags: flags(&cpuinfo),
            nodes,
            caches,
        })
    }
}

/// `None` for a node that is memory alone.
fn node(topology: &Topology, object: &TopologyObject, allowed: Option<&CpuSet>) -> Option<Node> {
    let set = object.cpuset()?;
    // The first of each object's processors for which that is so.
    let inside = |kind: ObjectType, is_one: &dyn Fn(BitmapIndex) -> bool| -> Vec<u32> {
        let objects = topology.objects_with_type(kind);
        let first = |object: &TopologyObject| object.cpuset()?.iter_set().find(|cpu| is_one(*cpu));
        let inside = objects.filter(|object| object.is_inside_cpuset(set));
        inside.filter_map(first).map(|cpu| usize::from(cpu) as u32).collect()
    };
    let is_allowed = |cpu: BitmapIndex| allowed.is_none_or(|allowed| allowed.is_set(cpu));
    let all_cpus = inside(ObjectType::PU, &|_| true);
    let mut cores = inside(ObjectType::Core, &is_allowed);
    if topology.objects_with_type(ObjectType::Core).next().is_none() {
        // Some virtual machines tell of no cores.
        cores = inside(ObjectType::PU, &is_allowed);
    }
    cores.sort_unstable();
    (!all_cpus.is_empty()).then(|| Node {
        number: object.os_index().unwrap_or(0) as u32,
        memory_bytes: object.total_memory(),
        cores,
        all_cpus,
    })
}

/// `None` for what is no cache, and for a cache whose size the system does not tell.
fn data_cache(object: &TopologyObject) -> Option<DataCache> {
    if !object.object_type().is_cpu_data_cache() {
        return None;
    }
    let Some(ObjectAttributes::Cache(cache)) = object.attributes() else { return None };
    Some(DataCache {
        level: cache.depth() as u32,
        bytes: cache.size()?.get(),
        cpus: object.cpuset()?.iter_set().map(|cpu| usize::from(cpu) as u32).collect(),
    })
}

/// Brings the nodes' memory to what the system and the container have for all of them; each keeps its share.
///
/// Sandboxes tell of a node only the memory that has been used so far, and of the system all there is.
fn limit_memory(nodes: &mut [Node]) {
    let told: u64 = nodes.iter().map(|node| node.memory_bytes).sum();
    let total = told.max(memory::of_system().unwrap_or(0)).min(memory::limit().unwrap_or(u64::MAX));
    if total != told {
        for node in nodes {
            let share = node.memory_bytes as f64 / told.max(1) as f64;
            node.memory_bytes = (total as f64 * share) as u64;
        }
    }
}

fn model(topology: &Topology, cpuinfo: &str) -> String {
    let package = topology.objects_with_type(ObjectType::Package).next();
    let named = package.and_then(|package| package.info("CPUModel"));
    match named {
        Some(name) => name.to_string_lossy().trim().to_owned(),
        None => field(cpuinfo, "model name").unwrap_or("unknown").to_owned(),
    }
}

fn flags(cpuinfo: &str) -> Vec<String> {
    let flags = field(cpuinfo, "flags").or(field(cpuinfo, "Features")).unwrap_or("");
    flags.split_whitespace().map(str::to_owned).collect()
}
