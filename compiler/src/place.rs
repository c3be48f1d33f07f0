//! Decides where every node runs: forms candidates, prices each exactly, keeps the one predicted best.
//!
//! - Candidates hold the plans that people make by hand: all on one device, layers split in order, all layers
//!   shared. So the result never scores worse than the best of those that are priced: of many unlike devices, stages
//!   are priced in the orders that seem best.
//! - Matrices and caches stay on NUMA nodes beside a GPU only where the model fits no GPUs that are about as fast.
//! - A price is that of the finished schedule, so byte limits are exact.

mod arrangement;
mod candidates;
mod causes;
mod fit;
pub(crate) mod group;
mod hosted;
mod lay_out;
mod offer;
mod prices;
mod sharing;
mod stages;
mod too_large;
pub(crate) mod units;

use std::collections::BTreeSet;
use std::ops::Range;

use anyhow::{Result, bail, ensure};
use ir::forecast::{Candidate, DeviceForecast};
use ir::graph::Placed;
use ir::id::{DeviceId, NodeId, Table};
use ir::layout::Layout;
use ir::machine::{Device, DeviceKind, Link, Machine, RatePoint};
use ir::model::ModelCache;
use ir::plan::Phase;
use ir::tensor::Format;
use rayon::prelude::*;

use crate::graphs::Phases;
use crate::options::{Options, Request};
use crate::place::arrangement::Arrangement;
use crate::place::offer::{Offer, layouts};
use crate::place::prices::{Pins, Prices};
pub(crate) use crate::place::prices::{Times, missing};
use crate::place::too_large::too_large;
use crate::place::units::Units;
use crate::target::BLOCK_TOKENS;
use crate::task::Task;
use crate::token_table;

use self::hosted::Wanted;
pub(crate) use self::hosted::{fillable_bytes, hosts, hosts_alike};

/// Tokens of the prompt that placements are judged by, in runs of whatever size.
pub(crate) const PROMPT_TOKENS: u32 = 2048;

/// A decided placement.
#[derive(Clone, Debug)]
pub(crate) struct Placement {
    /// Layouts of every node of the layer graph; causes are theirs once it is [explained](explain).
    pub(crate) layouts: Layouts,
    /// Who does what.
    arrangement: Arrangement,
    /// Of those that lack memory and would be better, the best.
    better: Option<Offer>,
    /// The chosen placement, then others that were compared with it, best first; not all that were priced.
    pub(crate) candidates: Vec<Candidate>,
    /// Of a prompt of [`PROMPT_TOKENS`], or of the context if that is shorter, and an answer; the lowest is best.
    pub(crate) score: u64,
    /// What the score would be if it were judged by the decode of the most sequences.
    pub(crate) score_of_most: u64,
    /// What each device holds.
    pub(crate) devices: Table<DeviceId, DeviceForecast>,
    /// What GPUs would have left with all experts of a mixture beside them; empty where none need to be.
    pub(crate) rooms: Vec<Room>,
}

/// Memory of a GPU that is left beside everything but experts.
#[derive(Clone, Debug)]
pub(crate) struct Room {
    /// The GPU.
    pub(crate) device: DeviceId,
    /// What runs on it.
    pub(crate) units: Range<usize>,
    /// What is left.
    pub(crate) bytes: u64,
}

/// Where every node of the layer graph runs in each phase, over the same weights and caches.
#[derive(Clone, Debug)]
pub(crate) struct Layouts {
    /// The nodes.
    pub(crate) nodes: Phases<Table<NodeId, Placed>>,
    /// Bytes of the window that each GPU fetches weights to.
    pub(crate) window_bytes: Table<DeviceId, u64>,
}

impl Placement {
    /// The same, with what it was chosen over behind it.
    pub(crate) fn chosen_over(mut self, other: Self) -> Self {
        self.candidates.truncate(1);
        self.candidates.extend(other.candidates);
        self
    }

    /// The GPUs that compute.
    pub(crate) fn gpus(&self, task: &Task<'_>) -> Vec<DeviceId> {
        let nodes = self.layouts.nodes.of(Phase::Decode).rows();
        let used: BTreeSet<DeviceId> = nodes
            .iter()
            .flat_map(|placed| &placed.layouts)
            .flat_map(|to| to.devices.iter().copied())
            .collect();
        used.into_iter().filter(|&device| !is_numa(task, device)).collect()
    }

    /// Names of the nodes whose weights are on NUMA nodes, or that run there in some phase.
    pub(crate) fn beside_gpus(&self, task: &Task<'_>) -> BTreeSet<String> {
        let runs_there = |to: &Layout| to.devices.iter().any(|&device| is_numa(task, device));
        let is_beside =
            |placed: &Placed| placed.home.is_some() || placed.layouts.iter().any(runs_there);
        let phases = [Phase::Prefill, Phase::Decode].map(|phase| self.layouts.nodes.of(phase));
        let nodes = task.model.layers.nodes();
        nodes
            .filter(|(id, _)| phases.iter().any(|nodes| is_beside(&nodes[*id])))
            .map(|(_, node)| node.name.to_string())
            .collect()
    }
}

/// Whether two devices are of one kind and linked alike, so that it does not matter which of them does what.
fn are_alike(machine: &Machine, a: DeviceId, b: DeviceId) -> bool {
    /// Rates of two GPUs of one model, each measured by itself, differ by less.
    const SAME: f64 = 1.1;
    let is_same = |a: f64, b: f64| a.max(b) <= SAME * a.min(b);
    let is_same_link = |a: Option<&Link>, b: Option<&Link>| match (a, b) {
        (Some(a), Some(b)) => is_same(a.bytes_per_sec, b.bytes_per_sec),
        (a, b) => a.is_none() && b.is_none(),
    };
    let mut others = machine.devices.ids().filter(|&other| other != a && other != b);
    let (first, second) = (&machine.devices[a], &machine.devices[b]);
    let rates = |device: &Device| -> Vec<(Format, u32, f64)> {
        let linear = device.rates.linear.iter();
        let point = |format| move |point: &RatePoint| (format, point.tokens, point.weights_per_sec);
        linear.flat_map(|linear| linear.points.iter().map(point(linear.format))).collect()
    };
    let (ours, theirs) = (rates(first), rates(second));
    let is_same_rate = |(a, b): (&(Format, u32, f64), &(Format, u32, f64))| {
        (a.0, a.1) == (b.0, b.1) && is_same(a.2, b.2)
    };
    first.kind.is_gpu() == second.kind.is_gpu()
        && first.memory_bytes == second.memory_bytes
        && is_same(first.rates.read_bytes_per_sec, second.rates.read_bytes_per_sec)
        && ours.len() == theirs.len()
        && ours.iter().zip(&theirs).all(is_same_rate)
        && others.all(|other| {
            is_same_link(machine.link(a, other), machine.link(b, other))
                && is_same_link(machine.link(other, a), machine.link(other, b))
        })
}

fn is_numa(task: &Task<'_>, device: DeviceId) -> bool {
    matches!(task.target.machine.devices[device].kind, DeviceKind::Numa { .. })
}

/// Which arrangements are compared.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Among<'a> {
    /// All that the request allows.
    All,
    /// Those with matrices beside these GPUs.
    Beside(&'a [DeviceId]),
    /// A few of those: enough to learn how many blocks stay.
    RoughlyBeside(&'a [DeviceId]),
}

/// What an error says that only decides what is tried next.
pub(crate) const NOTHING_FITS: &str = "nothing fits";

/// Places the task's model.
///
/// Fails when a request names what does not exist or cannot be, and when nothing fits: then the error names the
/// device that lacks least and what it lacks, if [`crate::target::Target::is_told`].
pub(crate) fn place(task: &Task<'_>, options: &Options, among: Among<'_>) -> Result<Placement> {
    let units = Units::new(task.model);
    let pins = pins(task, options)?;
    check_cache_sizes(task)?;
    let prices = Prices::new(task, &units, &pins);
    let offers = offers(task, options, &prices, among)?;
    let Some(best) = offers.iter().find(|offer| offer.fits()) else {
        // Nobody is told why there is none beside some GPUs.
        let is_told = task.target.is_told && matches!(among, Among::All);
        ensure!(is_told, NOTHING_FITS);
        let offers_of =
            |task: &Task<'_>| self::offers(task, options, &Prices::new(task, &units, &pins), among);
        bail!("{}", too_large(task, options, &offers, offers_of)?);
    };
    let layouts = layouts(&prices, &best.arrangement)?;
    let better = offers.iter().filter(|offer| offer.score < best.score && !offer.fits());
    let better = better.min_by_key(|offer| offer.score).cloned();
    // Where experts are split, what stays beside GPUs may become best.
    let counted = offers.iter().filter(|_| options.expert_counts.is_some());
    let hosted = counted.filter(|offer| offer.fits());
    let hosted = hosted.map(|offer| &offer.arrangement).find(|offer| offer.hosted.is_some());
    let rooms = hosted.map(|hosted| hosted::rooms(&prices, hosted));
    let rooms = rooms.unwrap_or_default();
    let &Offer { score, score_of_most, .. } = best;
    let (arrangement, devices) = (best.arrangement.clone(), best.devices.clone());
    let candidates = offers.into_iter().map(|offer| offer.candidate).collect();
    Ok(Placement { layouts, arrangement, better, candidates, score, score_of_most, devices, rooms })
}

/// Writes the cause of every node of a placement that is kept.
pub(crate) fn explain(task: &Task<'_>, options: &Options, placement: &mut Placement) -> Result<()> {
    let units = Units::new(task.model);
    let pins = pins(task, options)?;
    causes::explain(options, &Prices::new(task, &units, &pins), placement)
}

/// All candidates that the request allows, priced: those that fit first, by score.
fn offers(
    task: &Task<'_>,
    options: &Options,
    prices: &Prices<'_>,
    among: Among<'_>,
) -> Result<Vec<Offer>> {
    let arrangements = match &options.request {
        _ if !matches!(among, Among::All) => Vec::new(),
        Request::Any => prices.simple()?,
        Request::Pipeline(names) => {
            let devices = named(task, names.iter().map(String::as_str))?;
            vec![prices.requested_pipeline(&devices)?]
        }
        Request::TensorParallel(members) => {
            let devices = named(task, members.iter().map(|(name, _)| name.as_str()))?;
            let shares: Option<Vec<f64>> = members.iter().map(|(_, share)| *share).collect();
            prices.requested_groups(&devices, shares)?
        }
        Request::PipelineRanks(ranks) => vec![prices.requested_pipeline(&first(task, *ranks)?)?],
        Request::TensorParallelRanks(ranks) => {
            prices.requested_groups(&first(task, *ranks)?, None)?
        }
    };
    // Where everything is pinned, all arrangements are the same.
    let is_pinned = prices.pins.rows().iter().all(Option::is_some);
    ensure!(
        !is_pinned || options.request == Request::Any,
        "every layer is pinned, so there is nothing for the devices that are asked for to share: leave out the pins or \
         the devices"
    );
    let arrangements = match is_pinned {
        true => arrangements.get(..1).unwrap_or_default(),
        false => &arrangements,
    };
    let is_shared =
        matches!(options.request, Request::TensorParallel(_) | Request::TensorParallelRanks(_));
    let price = if is_shared { Prices::requested_offer } else { Prices::offer };
    let priced: Vec<Result<Offer>> =
        arrangements.par_iter().map(|arrangement| price(prices, arrangement)).collect();
    // Some may be impossible: no link, no rate for a format, too few heads, shares that no device computes.
    let mut offers: Vec<Offer> = priced.into_iter().filter_map(Result::ok).collect();
    if options.request == Request::Any && !offers.iter().any(|offer| fits_fast_gpus(task, offer)) {
        let fitting = offers.iter().filter(|offer| offer.fits());
        let best = fitting.map(|offer| offer.score).min().unwrap_or(u64::MAX);
        let (sets, wanted) = match among {
            Among::All => (hosted::gpu_sets(task), Wanted::Worth(best)),
            // Of placements of shards only the best is compared with others.
            Among::Beside(gpus) | Among::RoughlyBeside(gpus) => {
                (vec![gpus.to_vec()], Wanted::Better(best))
            }
        };
        let is_rough = matches!(among, Among::RoughlyBeside(_));
        offers.extend(hosted::offers(prices, &sets, is_rough, wanted));
    }
    if offers.is_empty()
        && let Some(first) = arrangements.first()
    {
        // All of them are impossible; the first says why.
        prices.offer(first)?;
    }
    offers.sort_by_key(Offer::rank);
    if is_shared {
        // They differ in their shares alone.
        offers.truncate(1);
    }
    Ok(offers)
}

/// Whether the whole model is on GPUs, they have the memory, and none is much slower than the fastest: a small one
/// beside a large one may take longer than a host whose matrices the large one fetches.
fn fits_fast_gpus(task: &Task<'_>, offer: &Offer) -> bool {
    /// The part of the fastest GPU's rate below which one is slow.
    const SLOW: f64 = 0.5;
    let devices = &task.target.machine.devices;
    let rate = |device: DeviceId| devices[device].rates.read_bytes_per_sec;
    let gpus = devices.ids().filter(|&device| !is_numa(task, device));
    let fastest = gpus.map(rate).fold(0.0, f64::max);
    let mut members = offer.arrangement.devices();
    offer.fits() && members.all(|device| !is_numa(task, device) && rate(device) >= SLOW * fastest)
}

/// The device that each node is pinned to, with the pattern that did it; the last pin that matches holds. What the
/// target keeps on a NUMA node is there without a pattern.
fn pins(task: &Task<'_>, options: &Options) -> Result<Pins> {
    let mut pins: Pins = task.model.layers.nodes().map(|_| None).collect();
    if let Some(home) = task.target.table_home {
        for (id, _) in token_table::lookups(task.model) {
            pins[id] = Some((home, None));
        }
    }
    for pin in &options.pins {
        let device = task.target.device(&pin.device)?;
        let mut matched = false;
        for (id, node) in task.model.layers.nodes() {
            if pin.pattern.is_match(&node.name) {
                pins[id] = Some((device, Some(pin.pattern.as_str().to_owned())));
                matched = true;
            }
        }
        ensure!(
            matched,
            "the pin {:?} matches no node; they are called {}",
            pin.pattern.as_str(),
            names_of_one_block(task).join(", ")
        );
    }
    Ok(pins)
}

/// Names of the nodes of the first block, and of those before and behind all blocks.
fn names_of_one_block<'a>(task: &Task<'a>) -> Vec<&'a str> {
    let nodes = task.model.layers.nodes().map(|(_, node)| &*node.name);
    nodes.filter(|name| Task::block(name).is_none_or(|block| block == 0)).collect()
}

/// Fails where GPUs cannot count the elements of a cache.
fn check_cache_sizes(task: &Task<'_>) -> Result<()> {
    // Kernels of GPUs count elements in 32 bits.
    let elements = |cache: &ModelCache| {
        let heads = u64::from(BLOCK_TOKENS * cache.kv_heads);
        u64::from(task.target.blocks) * heads * u64::from(cache.head_dim)
    };
    let largest = task.model.caches.rows().iter().map(elements).max().unwrap_or(0);
    let has_gpu = task.target.machine.has_gpus();
    ensure!(
        !has_gpu || largest <= u64::from(u32::MAX),
        "the keys of a layer are {largest} numbers, and GPUs take {} at most: lower --max-sequences or --context, give \
         a --kv-cache, or leave GPUs out with --without",
        u32::MAX
    );
    Ok(())
}

/// The devices of a request, each named once.
fn named<'n>(task: &Task<'_>, names: impl Iterator<Item = &'n str>) -> Result<Vec<DeviceId>> {
    let mut devices = Vec::new();
    for name in names {
        let device = task.target.device(name)?;
        ensure!(!devices.contains(&device), "{name} is named twice");
        devices.push(device);
    }
    Ok(devices)
}

/// The devices that get ranks: GPUs first, then NUMA nodes.
fn first(task: &Task<'_>, ranks: usize) -> Result<Vec<DeviceId>> {
    let machine = &task.target.machine;
    let mut devices: Vec<DeviceId> = machine.devices.ids().collect();
    // The sort is stable: the machine's order stays.
    devices.sort_by_key(|&id| match machine.devices[id].kind {
        DeviceKind::Gpu { .. } => 0,
        DeviceKind::Numa { .. } => 1,
    });
    ensure!(
        ranks <= devices.len(),
        "{ranks} ranks need as many devices; {} are there{}",
        devices.len(),
        advice_to_split(machine, ranks)
    );
    devices.truncate(ranks);
    Ok(devices)
}

/// How NUMA nodes become so many devices, with GPUs beside them; nothing where there are none, or
/// they cannot.
fn advice_to_split(machine: &Machine, ranks: usize) -> String {
    let mut nodes = BTreeSet::new();
    let mut gpus = 0;
    for device in machine.devices.rows() {
        match device.kind {
            DeviceKind::Numa { node, .. } => {
                nodes.insert(node);
            }
            DeviceKind::Gpu { .. } => gpus += 1,
        }
    }
    if nodes.is_empty() {
        return String::new();
    }
    let parts = (ranks - gpus).div_ceil(nodes.len());
    if parts > probe::MOST_PARTS as usize {
        return String::new();
    }
    format!(
        ": `hybridc probe --split {parts} -o machine.ron`, on the machine that is planned for, divides its nodes, and \
         --machine machine.ron plans with them"
    )
}
