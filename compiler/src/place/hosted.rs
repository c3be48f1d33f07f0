//! Arrangements of a model that is larger than a GPU's memory: matrices that stay on NUMA nodes.
//!
//! - The GPU keeps all attention and all caches, so that only activations of linears cross the link.
//! - In each phase either the node computes with a matrix in place or the GPU fetches it. Prefill has enough
//!   arithmetic to hide fetches behind; decode fetches as much as the link carries while the node computes.
//! - Blocks that stay are spread evenly over the model, and so are fetches among them: the link then works without
//!   a pause, through a window that holds a few matrices.

use ir::id::{DeviceId, NodeId, Table};
use ir::machine::DeviceKind;
use ir::op::Op;
use ir::plan::{DeviceForecast, Phase};

use crate::cost::fetch_nanos;
use crate::explain::bytes;
use crate::part::WeightKey;
use crate::place::Offer;
use crate::place::candidates::Arrangement;
use crate::place::group::Group;
use crate::place::prices::{Pins, decode_nanos};
use crate::place::units::Units;
use crate::task::Task;
use crate::window::aligned;

/// What stays beside the GPU of an arrangement.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Hosted {
    /// The nodes whose weights are not on the GPU.
    pub(crate) nodes: Table<NodeId, Option<Hosting>>,
    /// Bytes of the GPU's fetch window.
    pub(crate) window_bytes: u64,
    /// What it is, for people.
    pub(crate) name: String,
}

/// Where a node's weights are and who computes with them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Hosting {
    /// The NUMA node.
    pub(crate) home: DeviceId,
    /// Whether the GPU fetches them in prefill; else the home computes.
    is_fetched_in_prefill: bool,
    /// The same for decode.
    is_fetched_in_decode: bool,
}

impl Hosting {
    /// Whether the GPU fetches the weights in that phase; else the home computes.
    pub(crate) fn is_fetched(&self, phase: Phase) -> bool {
        match phase {
            Phase::Prefill => self.is_fetched_in_prefill,
            Phase::Decode => self.is_fetched_in_decode,
        }
    }
}

/// Every arrangement of this kind that is worth pricing, priced. Those that are impossible are left out.
pub(crate) fn offers(
    task: &Task<'_>,
    units: &Units,
    pins: &Pins,
    price: &dyn Fn(&Arrangement) -> anyhow::Result<Offer>,
) -> Vec<Offer> {
    let mut offers: Vec<Offer> = Vec::new();
    for gpu in unlike_gpus(task) {
        for kept in [Kept::Experts, Kept::Matrices] {
            if let Some(search) = Search::new(task, units, pins, gpu, kept) {
                offers.extend(search.offers(price));
            }
            if offers.iter().any(|offer| offer.candidate.missing.is_none()) {
                break;
            }
        }
    }
    offers
}

/// GPUs that a NUMA node is linked with; of those that differ in their names alone the first.
fn unlike_gpus(task: &Task<'_>) -> Vec<DeviceId> {
    let devices = &task.target.machine.devices;
    let mut gpus: Vec<DeviceId> = Vec::new();
    for (id, device) in devices.iter() {
        let alike = |&gpu: &DeviceId| {
            devices[gpu].rates == device.rates && devices[gpu].memory_bytes == device.memory_bytes
        };
        let is_gpu = matches!(device.kind, DeviceKind::Gpu { .. });
        if is_gpu && !hosts(task, id).is_empty() && !gpus.iter().any(alike) {
            gpus.push(id);
        }
    }
    gpus
}

/// NUMA nodes that are linked with a GPU both ways.
fn hosts(task: &Task<'_>, gpu: DeviceId) -> Vec<DeviceId> {
    let machine = &task.target.machine;
    let devices = machine.devices.iter();
    devices
        .filter(|(id, device)| {
            matches!(device.kind, DeviceKind::Numa { .. })
                && machine.link(*id, gpu).is_some()
                && machine.link(gpu, *id).is_some()
        })
        .map(|(id, _)| id)
        .collect()
}

/// What of a block stays on a NUMA node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kept {
    /// A mixture's experts.
    Experts,
    /// All linears and experts, with what lies between them.
    Matrices,
}

/// A block that may stay.
struct Block {
    /// Its nodes in the order they run; those without a matrix go with the others.
    nodes: Vec<Member>,
    /// Bytes of its matrices at home, at most.
    bytes: u64,
}

struct Member {
    node: NodeId,
    /// Bytes of its matrices in a fetch window, at most.
    window_bytes: u64,
    /// What fetching them takes while the home computes.
    fetch_nanos: f64,
    /// What the home takes for them in decode.
    home_nanos: f64,
}

/// How much decode fetches.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Fetching {
    /// Share of the bytes that stay.
    share: f64,
    /// Whether blocks are fetched as a whole; else each node by itself.
    in_blocks: bool,
}

/// The search for the best arrangement beside one GPU.
struct Search<'a> {
    task: &'a Task<'a>,
    units: &'a Units,
    gpu: DeviceId,
    hosts: Vec<DeviceId>,
    kept: Kept,
    blocks: Vec<Block>,
    /// Nodes that only look rows up: their tables are as well on a NUMA node as on the GPU.
    lookups: Vec<NodeId>,
}

impl<'a> Search<'a> {
    /// `None` where nothing can stay, or no NUMA node computes its format.
    fn new(
        task: &'a Task<'a>,
        units: &'a Units,
        pins: &Pins,
        gpu: DeviceId,
        kept: Kept,
    ) -> Option<Self> {
        let hosts = hosts(task, gpu);
        let home = hosts[0];
        let home_nanos = decode_nanos(task, home)?;
        let graph = &task.model.layers;
        let mut blocks: Vec<Option<Block>> = (0..units.len()).map(|_| None).collect();
        let mut lookups = Vec::new();
        for (id, node) in graph.nodes().filter(|(id, _)| pins[*id].is_none()) {
            if let Op::Embed { table, .. } | Op::AddPosition { table, .. } = &node.work {
                let mut users =
                    graph.nodes().filter(|(_, node)| node.work.weights().contains(table));
                if users.all(|(user, _)| user == id) {
                    lookups.push(id);
                }
                continue;
            }
            let stays = match kept {
                Kept::Experts => matches!(node.work, Op::Experts(_)),
                Kept::Matrices => !matches!(node.work, Op::Attention(_)),
            };
            if !stays || Task::block(&node.name).is_none() {
                continue;
            }
            let mut member = Member {
                node: id,
                window_bytes: 0,
                fetch_nanos: 0.0,
                home_nanos: home_nanos[id] as f64,
            };
            let block =
                blocks[units.of[id]].get_or_insert_with(|| Block { nodes: Vec::new(), bytes: 0 });
            if node.work.takes_fetched() {
                for weight in node.work.weights() {
                    // Homes may hold it in different formats; the largest is what there must be room for.
                    let packed = |&home: &DeviceId| {
                        let sensitive = task.sensitive[weight];
                        let format = task.target.format(task.model, weight, home, sensitive);
                        let key = WeightKey { weight, device: home, format, slice: None };
                        key.packed_bytes(task)
                    };
                    if task.model.weights[weight].shape.len() > 1 {
                        let bytes = hosts.iter().map(packed).max().unwrap_or(0);
                        block.bytes += bytes;
                        member.window_bytes += aligned(bytes);
                        member.fetch_nanos +=
                            fetch_nanos(task.target, home, gpu, bytes, true).ok()?;
                    }
                }
            }
            block.nodes.push(member);
        }
        let blocks: Vec<Block> =
            blocks.into_iter().flatten().filter(|block| block.bytes > 0).collect();
        let some = !blocks.is_empty();
        some.then_some(Self { task, units, gpu, hosts, kept, blocks, lookups })
    }

    fn offers(&self, price: &dyn Fn(&Arrangement) -> anyhow::Result<Offer>) -> Vec<Offer> {
        let mut offers: Vec<Offer> = Vec::new();
        let members = || self.blocks.iter().flat_map(|block| &block.nodes);
        let largest_node = members().map(|member| member.window_bytes).max().unwrap_or(0);
        let block_bytes =
            |block: &Block| block.nodes.iter().map(|member| member.window_bytes).sum();
        let largest_block: u64 = self.blocks.iter().map(block_bytes).max().unwrap_or(0);
        // One matrix is read while the next one comes; larger windows smooth unevenness and take room from blocks.
        let mut windows = vec![0, 2 * largest_node, 2 * largest_block];
        windows.dedup();
        for window_bytes in windows {
            let in_place = Fetching { share: 0.0, in_blocks: true };
            let Some((count, base)) = self.fewest(window_bytes, in_place, price) else { continue };
            let decode = base.candidate.decode_nanos;
            offers.push(base);
            if let Some(decode) = decode.filter(|_| window_bytes > 0) {
                offers.extend(self.fetching(count, window_bytes, decode as f64, price));
            }
        }
        offers
    }

    /// The best offer in which decode fetches a share of what stays.
    ///
    /// The best share is near the one for which the link and the home take equally long; whether whole blocks or single
    /// nodes are fetched is decided there.
    fn fetching(
        &self,
        count: usize,
        window_bytes: u64,
        decode_nanos: f64,
        price: &dyn Fn(&Arrangement) -> anyhow::Result<Offer>,
    ) -> Option<Offer> {
        let members = || self.staying(count).flat_map(|block| &block.nodes);
        let fetch: f64 = members().map(|member| member.fetch_nanos).sum();
        let home: f64 = members().map(|member| member.home_nanos).sum();
        // Without fetches decode takes what the home takes, and what no fetch shortens.
        let even = (decode_nanos / (fetch + home).max(1.0)).min(1.0);
        let offer = |share: f64, in_blocks: bool| {
            let fetching = Fetching { share: share.min(1.0), in_blocks };
            let offer = price(&self.arrange(count, window_bytes, fetching)).ok()?;
            offer.candidate.missing.is_none().then_some(offer)
        };
        let score = |offer: &Option<Offer>| offer.as_ref().map_or(u64::MAX, |offer| offer.score);
        let (blocks, nodes) = (offer(even, true), offer(even, false));
        let in_blocks = score(&blocks) <= score(&nodes);
        let others = [0.85, 0.9, 0.95, 1.05, 1.1].map(|factor| offer(even * factor, in_blocks));
        [blocks, nodes].into_iter().chain(others).flatten().min_by_key(|offer| offer.score)
    }

    /// The fewest blocks that must stay so that the rest fits the GPU, with the price; all of them where it never does.
    fn fewest(
        &self,
        window_bytes: u64,
        fetching: Fetching,
        price: &dyn Fn(&Arrangement) -> anyhow::Result<Offer>,
    ) -> Option<(usize, Offer)> {
        let offer = |count| price(&self.arrange(count, window_bytes, fetching)).ok();
        let all = self.blocks.len();
        let mut best = (all, offer(all)?);
        let slack = {
            let bytes: &DeviceForecast = &best.1.devices[self.gpu];
            bytes.capacity_bytes.saturating_sub(bytes.needed_bytes())
        };
        if best.1.candidate.missing.is_some() {
            return Some(best);
        }
        // Blocks are much alike, so the first guess is off by little.
        let largest = self.blocks.iter().map(|block| block.bytes).max().unwrap_or(1);
        let mut count = all - usize::try_from(slack / largest).unwrap_or(all).min(all - 1);
        let mut is_shrinking = true;
        while count < best.0 && count > 0 {
            let offer = offer(count)?;
            if offer.candidate.missing.is_none() {
                best = (count, offer);
                if !is_shrinking {
                    break;
                }
                count -= 1;
            } else {
                is_shrinking = false;
                count += 1;
            }
        }
        Some(best)
    }

    /// The `count` blocks that stay, evenly spread; the first ones come late, so that the link has a lead.
    fn staying(&self, count: usize) -> impl Iterator<Item = &Block> {
        let all = self.blocks.len();
        let stays = move |index: usize| (index + 1) * count / all > index * count / all;
        self.blocks
            .iter()
            .enumerate()
            .filter(move |(index, _)| stays(*index))
            .map(|(_, block)| block)
    }

    fn arrange(&self, count: usize, window_bytes: u64, fetching: Fetching) -> Arrangement {
        let mut nodes: Table<NodeId, Option<Hosting>> =
            self.task.model.layers.nodes().map(|_| None).collect();
        for &lookup in &self.lookups {
            nodes[lookup] = Some(Hosting {
                home: self.hosts[0],
                is_fetched_in_prefill: false,
                is_fetched_in_decode: false,
            });
        }
        let mut free: Vec<u64> = self
            .hosts
            .iter()
            .map(|&host| self.task.target.machine.devices[host].memory_bytes)
            .collect();
        let (mut bytes, mut fetched_bytes) = (0, 0);
        // What is to be fetched so far and was not: it decides about the next block or node.
        let mut owed = 0.0;
        let mut decide = |bytes: u64| {
            owed += bytes as f64 * fetching.share;
            let is_fetched = bytes > 0 && owed >= bytes as f64 / 2.0;
            if is_fetched {
                owed -= bytes as f64;
                fetched_bytes += bytes;
            }
            is_fetched
        };
        for block in self.staying(count) {
            let most = free.iter().max().copied().unwrap_or(0);
            let host = free.iter().position(|&free| free == most).unwrap_or(0);
            free[host] = free[host].saturating_sub(block.bytes);
            bytes += block.bytes;
            let whole = fetching.in_blocks && decide(block.bytes);
            let mut is_fetched = whole;
            for member in &block.nodes {
                if !fetching.in_blocks && member.window_bytes > 0 {
                    is_fetched = decide(member.window_bytes);
                }
                nodes[member.node] = Some(Hosting {
                    home: self.hosts[host],
                    is_fetched_in_prefill: window_bytes > 0,
                    is_fetched_in_decode: is_fetched,
                });
            }
        }
        let percent = 100.0 * fetched_bytes as f64 / bytes.max(1) as f64;
        let hosted = Hosted { nodes, window_bytes, name: self.name(count, window_bytes, percent) };
        Arrangement {
            stages: vec![(Group::one(self.gpu), 0..self.units.len())],
            has_fixed_shares: false,
            hosted: Some(hosted),
        }
    }

    fn name(&self, count: usize, window_bytes: u64, decode_percent: f64) -> String {
        let what = match self.kept {
            Kept::Experts => "experts",
            Kept::Matrices => "matrices",
        };
        let hosts: Vec<&str> = self.hosts.iter().map(|&host| self.task.target.name(host)).collect();
        let mut name = format!(
            "{what} of {count} of {} blocks on {} beside {}",
            self.blocks.len(),
            hosts.join("+"),
            self.task.target.name(self.gpu)
        );
        if window_bytes > 0 {
            name += &format!(", fetching {} ahead", bytes(window_bytes));
        }
        if decode_percent > 0.0 {
            name += &format!(", {decode_percent:.0} % in decode");
        }
        name
    }
}
