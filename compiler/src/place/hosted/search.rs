//! The search for what stays beside some GPUs: how many blocks, how large a fetch window, how much decode fetches.

mod fewest;

use std::collections::BTreeSet;
use std::ops::Range;

use ir::dag::Node;
use ir::graph::LayerGraph;
use ir::id::{DeviceId, NodeId, Table, ValueId, WeightId};
use ir::op::Op;

use super::share::share;
use super::{Hosted, Hosting, Price, hosts};
use crate::cost::fetch_nanos;
use crate::explain::bytes;
use crate::part::WeightKey;
use crate::place::candidates::Arrangement;
use crate::place::group::Group;
use crate::place::prices::{Pins, Times, decode_nanos};
use crate::place::units::Units;
use crate::place::{Offer, Room};
use crate::shards::shard;
use crate::task::Task;
use crate::window::aligned;

/// What of a block stays on a NUMA node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kept {
    /// A mixture's experts.
    Experts,
    /// The MLPs that are in shards.
    Mlps,
    /// All linears and experts, with what lies between them.
    Matrices,
}

/// A block that may stay.
struct Block {
    /// The stage that it belongs to.
    stage: usize,
    /// Its nodes in the order they run; those without a matrix go with the others.
    nodes: Vec<Member>,
    /// Bytes of its matrices at home, at most.
    bytes: u64,
}

struct Member {
    node: NodeId,
    /// Of a shard, the host that it is for.
    host: Option<usize>,
    /// Bytes of its matrices at home, at most.
    bytes: u64,
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

/// The home computes all that stays.
const IN_PLACE: Fetching = Fetching { share: 0.0, in_blocks: true };

/// The search for the best arrangement beside some GPUs.
pub(super) struct Search<'a> {
    task: &'a Task<'a>,
    /// GPUs, each with a range of units.
    stages: Vec<(DeviceId, Range<usize>)>,
    hosts: Vec<DeviceId>,
    kept: Kept,
    blocks: Vec<Block>,
    /// Nodes that only look rows up, and their tables, which are as well on a NUMA node as on the GPU.
    lookups: Vec<(NodeId, WeightId)>,
    /// For each stage bytes of windows that are tried, the largest first; none at last.
    rungs: Vec<Vec<u64>>,
}

impl<'a> Search<'a> {
    /// `None` where nothing can stay, or no NUMA node computes its format.
    pub(super) fn new(
        task: &'a Task<'a>,
        units: &'a Units,
        pins: &Pins,
        gpus: &[DeviceId],
        kept: Kept,
    ) -> Option<Self> {
        let hosts = hosts(task, gpus);
        let stages = share(task, units, gpus)?;
        let stage_of = |unit: usize| stages.iter().position(|(_, units)| units.contains(&unit));
        let graph = &task.model.layers;
        // Where some layers are in shards, those are the ones to stay.
        let is_cut = |(_, node): (NodeId, &Node<Op>)| shard(&node.name).is_some();
        let has_shards = graph.nodes().any(is_cut);
        let shards = graph.nodes().filter_map(|(_, node)| Some(shard(&node.name)?.1));
        let shards: BTreeSet<usize> = shards.collect();
        // What is in no shard goes to any of them; the first stands for all.
        let mut home_nanos = vec![None; hosts.len()];
        for &host in shards.iter().chain([&0]) {
            let home = *hosts.get(host)?;
            home_nanos[host] = Some(decode_nanos(task, home)?);
        }
        let mut blocks: Vec<Option<Block>> = (0..units.len()).map(|_| None).collect();
        let mut lookups = Vec::new();
        for (id, node) in graph.nodes().filter(|(id, _)| pins[*id].is_none()) {
            if let Op::Embed { table, .. } | Op::AddPosition { table, .. } = &node.work {
                let mut users =
                    graph.nodes().filter(|(_, node)| node.work.weights().contains(table));
                if users.all(|(user, _)| user == id) {
                    lookups.push((id, *table));
                }
                continue;
            }
            let stays = match kept {
                // Where experts are split, the first are those to have on the GPU.
                Kept::Experts => {
                    let Op::Experts(experts) = &node.work else { continue };
                    let is_beside = experts.part.is_none_or(|part| part.first > 0);
                    is_beside && (!has_shards || shard(&node.name).is_some())
                }
                Kept::Mlps => matches!(node.work, Op::Linear(_)) && shard(&node.name).is_some(),
                // Shards are added up where both sums arrive soonest.
                Kept::Matrices => {
                    !matches!(node.work, Op::Attention(_)) && !sums_shards(graph, node)
                }
            };
            if !stays || Task::block(&node.name).is_none() {
                continue;
            }
            let shard = shard(&node.name).map(|(_, shard)| shard);
            let host = shard.unwrap_or(0);
            let (home, home_nanos) = (hosts[host], home_nanos[host].as_ref()?[id]);
            let mut member = Member {
                node: id,
                host: shard,
                bytes: 0,
                window_bytes: 0,
                fetch_nanos: 0.0,
                // Shards are computed at the same time.
                home_nanos: home_nanos as f64
                    / if shard.is_some() { shards.len() as f64 } else { 1.0 },
            };
            let stage = stage_of(units.of[id])?;
            let gpu = stages[stage].0;
            let block = blocks[units.of[id]].get_or_insert_with(|| Block {
                stage,
                nodes: Vec::new(),
                bytes: 0,
            });
            if node.work.takes_fetched() {
                for weight in node.work.weights() {
                    // Homes may hold it in different formats; the largest is what there must be room for.
                    let packed = |&home: &DeviceId| {
                        let format = task.format(weight, home);
                        let key = WeightKey { weight, device: home, format, slice: None };
                        key.packed_bytes(task)
                    };
                    if task.model.weights[weight].shape.len() > 1 {
                        let bytes = hosts.iter().map(packed).max().unwrap_or(0);
                        block.bytes += bytes;
                        member.bytes += bytes;
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
        let of_stage = |stage: usize| blocks.iter().filter(move |block| block.stage == stage);
        let rungs = (0..stages.len()).map(|stage| rungs(of_stage(stage))).collect();
        some.then_some(Self { task, stages, hosts, kept, blocks, lookups, rungs })
    }

    /// The offers that are worth comparing with one of score `best`, or a rough one of them.
    pub(super) fn offers(&self, is_rough: bool, best: u64, price: &Price<'_>) -> Vec<Offer> {
        let mut offers: Vec<Offer> = Vec::new();
        let mut tried: Vec<Vec<u64>> = Vec::new();
        let none = self.rungs.iter().map(Vec::len).max().unwrap_or(1) - 1;
        let rungs = if is_rough { vec![0] } else { vec![none, 1, 0] };
        for rung in rungs {
            let Some((windows, everything)) = self.windows(rung, price) else { continue };
            if tried.contains(&windows) {
                continue;
            }
            if let Some((counts, base)) = self.fewest(&windows, everything, price) {
                let fits = base.candidate.missing.is_none();
                let decode = base.decode_nanos as f64;
                offers.push(base);
                if fits && !is_rough && windows.iter().any(|&bytes| bytes > 0) {
                    offers.extend(self.fetching(&counts, &windows, decode, best, price));
                }
            }
            tried.push(windows);
        }
        offers
    }

    /// The window of each stage, and the price with all that may stay: the window of a rung, or of the first below it
    /// beside which there is room for the rest.
    fn windows(&self, rung: usize, price: &Price<'_>) -> Option<(Vec<u64>, Offer)> {
        let all = self.all();
        let window = |rungs: &Vec<u64>| rungs[rung.min(rungs.len() - 1)];
        let mut windows: Vec<u64> = self.rungs.iter().map(window).collect();
        loop {
            let offer = price(&self.arrange(&all, &windows, IN_PLACE)).ok()?;
            let lacking = offer.candidate.missing;
            let stage = |(lacking, bytes): (DeviceId, u64)| {
                let stage = self.stages.iter().position(|(gpu, _)| *gpu == lacking)?;
                (windows[stage] > 0).then_some((stage, bytes))
            };
            let Some((stage, bytes)) = lacking.and_then(stage) else {
                return Some((windows, offer));
            };
            let most = windows[stage].saturating_sub(bytes);
            let lower = self.rungs[stage].iter().find(|&&window| window <= most);
            windows[stage] = lower.copied().unwrap_or(0);
        }
    }

    /// What GPUs have left, beside their windows, when all that may stay does.
    pub(super) fn rooms(
        &self,
        window_bytes: &Table<DeviceId, u64>,
        price: &Price<'_>,
    ) -> Vec<Room> {
        let windows: Vec<u64> = self.stages.iter().map(|(gpu, _)| window_bytes[*gpu]).collect();
        let Ok(offer) = price(&self.arrange(&self.all(), &windows, IN_PLACE)) else {
            return Vec::new();
        };
        let room = |(device, units): &(DeviceId, Range<usize>)| {
            let held = &offer.devices[*device];
            let bytes = held.capacity_bytes.saturating_sub(held.needed_bytes());
            Room { device: *device, units: units.clone(), bytes }
        };
        self.stages.iter().map(room).collect()
    }

    /// The best offer in which decode fetches a share of what stays.
    ///
    /// The best share is near the one for which the link and the home take equally long; whether whole blocks or single
    /// nodes are fetched is decided there. `None` where even that share's decode takes longer than all of what scores `best`.
    fn fetching(
        &self,
        counts: &[usize],
        windows: &[u64],
        decode_nanos: f64,
        best: u64,
        price: &Price<'_>,
    ) -> Option<Offer> {
        let members = || self.staying(counts).flat_map(|block| &block.nodes);
        let fetch: f64 = members().map(|member| member.fetch_nanos).sum();
        let home: f64 = members().map(|member| member.home_nanos).sum();
        // Without fetches decode takes what the home takes, and what no fetch shortens.
        let even = (decode_nanos / (fetch + home).max(1.0)).min(1.0);
        let decode = Times { prefill: 0, decode: (even * fetch) as u64 };
        if decode.score(self.task.target) > best {
            return None;
        }
        let offer = |share: f64, in_blocks: bool| {
            let fetching = Fetching { share: share.min(1.0), in_blocks };
            let offer = price(&self.arrange(counts, windows, fetching)).ok()?;
            offer.candidate.missing.is_none().then_some(offer)
        };
        let score = |offer: &Option<Offer>| offer.as_ref().map_or(u64::MAX, |offer| offer.score);
        let (blocks, nodes) = (offer(even, true), offer(even, false));
        let in_blocks = score(&blocks) <= score(&nodes);
        let others = [0.85, 0.9, 0.95, 1.05, 1.1].map(|factor| offer(even * factor, in_blocks));
        [blocks, nodes].into_iter().chain(others).flatten().min_by_key(|offer| offer.score)
    }

    /// All blocks of each stage.
    fn all(&self) -> Vec<usize> {
        (0..self.stages.len()).map(|stage| self.blocks_of(stage).count()).collect()
    }

    fn blocks_of(&self, stage: usize) -> impl Iterator<Item = &Block> {
        self.blocks.iter().filter(move |block| block.stage == stage)
    }

    /// The blocks that stay, so many of each stage, evenly spread; the first ones come late, so that the link has a lead.
    fn staying(&self, counts: &[usize]) -> impl Iterator<Item = &Block> {
        counts.iter().enumerate().flat_map(|(stage, &count)| {
            let all = self.blocks_of(stage).count();
            let stays = move |index: usize| (index + 1) * count / all > index * count / all;
            let blocks = self.blocks_of(stage).enumerate();
            blocks.filter(move |(index, _)| stays(*index)).map(|(_, block)| block)
        })
    }

    fn arrange(&self, counts: &[usize], windows: &[u64], fetching: Fetching) -> Arrangement {
        let mut nodes: Table<NodeId, Option<Hosting>> =
            self.task.model.layers.nodes().map(|_| None).collect();
        let devices = &self.task.target.machine.devices;
        let mut free: Vec<u64> =
            self.hosts.iter().map(|&host| devices[host].memory_bytes).collect();
        // The first of those with the most room.
        let roomiest = |free: &[u64]| {
            let most = free.iter().max();
            free.iter().position(|free| Some(free) == most).unwrap_or(0)
        };
        for &(lookup, table) in &self.lookups {
            let host = roomiest(&free);
            let home = self.hosts[host];
            let format = self.task.format(table, home);
            let key = WeightKey { weight: table, device: home, format, slice: None };
            free[host] = free[host].saturating_sub(key.bytes(self.task));
            nodes[lookup] =
                Some(Hosting { home, is_fetched_in_prefill: false, is_fetched_in_decode: false });
        }
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
        for block in self.staying(counts) {
            let host_of_block = roomiest(&free);
            let window = windows[block.stage];
            let fits = |member: &Member| member.window_bytes <= window;
            let mut matrices = block.nodes.iter().filter(|member| member.window_bytes > 0);
            // What lies before the first matrix goes with it.
            let mut is_fetched_in_prefill = matrices.next().is_some_and(fits);
            let fitting = block.nodes.iter().filter(|member| fits(member));
            let fitting_bytes = fitting.map(|member| member.bytes).sum();
            bytes += block.bytes;
            let whole = fetching.in_blocks && decide(fitting_bytes);
            let mut is_fetched_in_decode = whole && is_fetched_in_prefill;
            for member in &block.nodes {
                if member.window_bytes > 0 {
                    is_fetched_in_prefill = fits(member);
                    is_fetched_in_decode = is_fetched_in_prefill
                        && (whole || !fetching.in_blocks && decide(member.window_bytes));
                }
                let host = member.host.unwrap_or(host_of_block);
                free[host] = free[host].saturating_sub(member.bytes);
                let home = self.hosts[host];
                nodes[member.node] =
                    Some(Hosting { home, is_fetched_in_prefill, is_fetched_in_decode });
            }
        }
        let percent = 100.0 * fetched_bytes as f64 / bytes.max(1) as f64;
        let name = self.name(counts.iter().sum(), windows, percent);
        let mut window_bytes = self.task.per_device(0);
        for ((gpu, _), &bytes) in self.stages.iter().zip(windows) {
            window_bytes[*gpu] = bytes;
        }
        let hosted = Hosted { nodes, window_bytes, name };
        let stages = self.stages.iter().map(|(gpu, units)| (Group::one(*gpu), units.clone()));
        Arrangement { stages: stages.collect(), has_fixed_shares: false, hosted: Some(hosted) }
    }

    /// Whether the most used experts are nodes of their own.
    fn is_split(&self) -> bool {
        let mut members = self.blocks.iter().flat_map(|block| &block.nodes);
        members.any(|member| {
            let op = &self.task.model.layers.node(member.node).work;
            matches!(op, Op::Experts(experts) if experts.part.is_some())
        })
    }

    /// Blocks with what is kept, in shards or not.
    fn blocks_of_kind(&self) -> usize {
        let has_kind = |node: &Node<Op>| match self.kept {
            Kept::Experts => matches!(node.work, Op::Experts(_)),
            Kept::Mlps | Kept::Matrices => node.work.takes_fetched(),
        };
        let nodes = self.task.model.layers.nodes().filter(|(_, node)| has_kind(node));
        nodes.filter_map(|(_, node)| Task::block(&node.name)).collect::<BTreeSet<u32>>().len()
    }

    fn name(&self, count: usize, windows: &[u64], decode_percent: f64) -> String {
        let what = match self.kept {
            Kept::Experts if self.is_split() => "least used experts",
            Kept::Experts => "experts",
            Kept::Mlps => "MLPs",
            Kept::Matrices => "matrices",
        };
        let name = |device: &DeviceId| self.task.target.name(*device);
        let hosts: Vec<&str> = self.hosts.iter().map(name).collect();
        let gpus: Vec<&str> = self.stages.iter().map(|(gpu, _)| name(gpu)).collect();
        let mut name = format!(
            "{what} of {count} of {} blocks on {} beside {}",
            self.blocks_of_kind(),
            hosts.join("+"),
            gpus.join(" → ")
        );
        let mut windows: Vec<u64> = windows.iter().copied().filter(|&bytes| bytes > 0).collect();
        windows.dedup();
        if !windows.is_empty() {
            let windows: Vec<String> = windows.into_iter().map(bytes).collect();
            name += &format!(", fetching {} ahead", windows.join(" and "));
        }
        if decode_percent > 0.0 {
            name += &format!(", {decode_percent:.0} % in decode");
        }
        name
    }
}

/// Windows of a stage with those blocks: two of the largest node, that node, each smaller one, and none.
///
/// One matrix is read while the next one comes; larger windows take room from blocks. What does not fit a window is
/// computed where it lies.
fn rungs<'b>(blocks: impl Iterator<Item = &'b Block>) -> Vec<u64> {
    let mut nodes = BTreeSet::from([0]);
    nodes.extend(blocks.flat_map(|block| &block.nodes).map(|member| member.window_bytes));
    let two = nodes.last().map(|largest| 2 * largest);
    two.into_iter().chain(nodes.into_iter().rev()).collect()
}

/// Whether a node adds up shards.
fn sums_shards(graph: &LayerGraph, node: &Node<Op>) -> bool {
    let is_shard =
        |&input: &ValueId| shard(&graph.node(graph.value(input).producer).name).is_some();
    matches!(node.work, Op::Add) && node.inputs.iter().any(is_shard)
}
