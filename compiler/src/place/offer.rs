//! What an arrangement costs: the finished schedule, priced.

use anyhow::Result;
use ir::forecast::{Candidate, DeviceForecast, ProgramForecast};
use ir::graph::Placed;
use ir::id::{DeviceId, NodeId, Table};
use ir::plan::{Phase, Plan};

use crate::forecast::simulate;
use crate::graphs::{Graphs, Phases};
use crate::options::Objective;
use crate::place::arrangement::Arrangement;
use crate::place::fit::{LEAST, Laid, fitted};
use crate::place::lay_out::{lay_out, set_homes};
use crate::place::prices::{Prices, Times, judged_decode, judged_decode_program, missing};
use crate::place::{Layouts, is_numa};
use crate::task::Task;
use crate::unpacked;

/// An arrangement with its exact price.
#[derive(Clone, Debug)]
pub(super) struct Offer {
    pub(super) arrangement: Arrangement,
    /// Of a prompt and an answer; the lowest is best.
    pub(super) score: u64,
    /// The same with the decode of the most sequences.
    pub(super) score_of_most: u64,
    /// Time of the prompt that the score counts, in as many runs as it takes, with copies of packed matrices where
    /// all is on GPUs that have room for them.
    pub(super) prompt_nanos: u64,
    /// Time of the decode that the score counts.
    pub(super) decode_nanos: u64,
    pub(super) candidate: Candidate,
    /// What each device would hold, without such copies.
    pub(super) devices: Table<DeviceId, DeviceForecast>,
}

impl Offer {
    /// The lowest is best: those that fit by their scores, then the others by what they lack.
    pub(super) fn rank(&self) -> (u64, u64) {
        self.candidate.missing.map_or((0, self.score), |(_, bytes)| (bytes, 0))
    }

    /// Whether no device lacks memory.
    pub(super) fn fits(&self) -> bool {
        self.candidate.missing.is_none()
    }
}

impl Prices<'_> {
    /// The exact price of an arrangement with shares that [fit](fitted), worked out once.
    pub(super) fn offer(&self, arrangement: &Arrangement) -> Result<Offer> {
        let wanted =
            |(of, offer): &(Arrangement, Offer)| (of == arrangement).then(|| offer.clone());
        if let Some(offer) = self.known_offers.find(wanted) {
            return Ok(offer);
        }
        let offer = offer(self, arrangement)?;
        self.known_offers.add((arrangement.clone(), offer.clone()));
        Ok(offer)
    }

    /// Nanoseconds of the decode that placements are judged by: for less than the whole price of an arrangement that
    /// differs from others in its decode alone.
    pub(super) fn judged_decode_nanos(&self, arrangement: &Arrangement) -> Result<u64> {
        let decode = nodes(self, arrangement, Phase::Decode)?;
        let window_bytes = window_bytes(self, arrangement);
        let layouts = Layouts { nodes: Phases { prefill: decode, decode: None }, window_bytes };
        let graphs = Graphs::new(self.task, layouts, &mut |_, _| ())?;
        Ok(simulate(&judged_decode_program(self.task, &graphs)?).nanos)
    }

    /// The exact price of an arrangement that is asked for. Where a member lacks memory whatever shifts, what fits, or
    /// what lacks least, is looked for between the shares that were tried last and the least that it can have.
    pub(super) fn requested_offer(&self, arrangement: &Arrangement) -> Result<Offer> {
        /// Halvings of what lies between.
        const HALVINGS: usize = 6;
        let mut best = self.offer(arrangement)?;
        let Some((lacking, _)) = best.candidate.missing else { return Ok(best) };
        let mut most = best.arrangement.clone();
        let mut least = most.clone();
        if !least.shift_shares(&best.devices, LEAST, false) {
            return Ok(best);
        }
        let missing = |offer: &Offer| offer.candidate.missing.map_or(0, |(_, bytes)| bytes);
        for tries in 0..=HALVINGS {
            let half = if tries == 0 { least.clone() } else { least.halfway_to(&most) };
            let Ok(tried) = self.offer(&half) else { break };
            let lacks = tried.candidate.missing.is_some_and(|(device, _)| device == lacking);
            // Of what fits the last has most to do.
            if missing(&tried) < missing(&best) || tried.fits() {
                best = tried;
            }
            if lacks && tries == 0 {
                break;
            }
            // Another one lacks memory where this one has too little to do.
            if lacks { most = half } else { least = half }
        }
        Ok(best)
    }
}

fn offer(prices: &Prices<'_>, arrangement: &Arrangement) -> Result<Offer> {
    let &Prices { task, units, pins, .. } = prices;
    let (Laid { arrangement, graphs }, plan) = fitted(prices, arrangement)?;
    let missing = missing(&plan);
    let forecast = &plan.forecast.programs;
    // To save time: where nodes hold or compute a part, GPUs seldom have room for copies, and prefill is priced without.
    let is_on_gpus =
        arrangement.hosted.is_none() && arrangement.devices().all(|device| !is_numa(task, device));
    let with_copies = match missing {
        None if is_on_gpus => unpacked::prefill(task, graphs, &plan)?,
        None | Some(_) => None,
    };
    let prefill = with_copies.as_ref().unwrap_or(&forecast[0]);
    let Scores { score, score_of_most, prompt_nanos, decode_nanos } = scores(task, &plan, prefill);
    let fits = missing.is_none();
    let candidate = Candidate {
        name: arrangement.name(task, units, pins),
        prefill_nanos: fits.then_some(prefill.nanos),
        decode_nanos: fits.then_some(forecast[1].nanos),
        missing,
    };
    let devices = plan.forecast.devices;
    Ok(Offer { arrangement, score, score_of_most, prompt_nanos, decode_nanos, candidate, devices })
}

/// What plans are compared by.
pub(super) struct Scores {
    pub(super) score: u64,
    /// The score if it were judged by the decode of the most sequences.
    score_of_most: u64,
    /// The prompt that it is judged by.
    prompt_nanos: u64,
    /// The decode that it is judged by.
    decode_nanos: u64,
}

/// The scores of a plan for the batches that placements are priced with, where a run of a prompt takes `prefill`.
pub(super) fn scores(task: &Task<'_>, plan: &Plan, prefill: &ProgramForecast) -> Scores {
    let forecast = &plan.forecast.programs;
    // A run of a prompt starts when the one before leaves the busiest lane, unless runs work one after another.
    let apart = match plan.runs_one_by_one(&plan.programs[0]) {
        true => prefill.nanos,
        false => prefill.busiest_lane_nanos,
    };
    let first_nanos = match task.target.objective {
        Objective::Latency => prefill.nanos,
        Objective::Throughput => apart,
    };
    let prompt_nanos = first_nanos + (task.target.prompt_runs() - 1) * apart;
    // A step of decode needs the tokens of the one before, so nothing overlaps whatever the objective is.
    let score = |decode: &ProgramForecast| {
        Times { prefill: prompt_nanos, decode: decode.nanos }.score(task.target)
    };
    let judged = judged_decode(task.target, forecast);
    Scores {
        score: score(judged),
        score_of_most: score(&forecast[forecast.len() - 1]),
        prompt_nanos,
        decode_nanos: judged.nanos,
    }
}

/// Where an arrangement runs every node.
pub(super) fn layouts(prices: &Prices<'_>, arrangement: &Arrangement) -> Result<Layouts> {
    let prefill = nodes(prices, arrangement, Phase::Prefill)?;
    let has_decode = arrangement.hosted.is_some();
    let decode = has_decode.then(|| nodes(prices, arrangement, Phase::Decode)).transpose()?;
    let window_bytes = window_bytes(prices, arrangement);
    Ok(Layouts { nodes: Phases { prefill, decode }, window_bytes })
}

/// Where it runs them in a phase.
fn nodes(
    prices: &Prices<'_>,
    arrangement: &Arrangement,
    phase: Phase,
) -> Result<Table<NodeId, Placed>> {
    let (groups, group_of) = arrangement.groups(prices.units, prices.pins, phase);
    let mut nodes = lay_out(prices.task.model, &groups, &group_of)?;
    if let Some(hosted) = &arrangement.hosted {
        set_homes(&mut nodes, |node| {
            let hosting = hosted.nodes[node].filter(|hosting| hosting.is_fetched(phase));
            hosting.map(|hosting| hosting.home)
        });
    }
    Ok(nodes)
}

fn window_bytes(prices: &Prices<'_>, arrangement: &Arrangement) -> Table<DeviceId, u64> {
    let hosted = arrangement.hosted.as_ref();
    hosted.map_or_else(|| prices.task.per_device(0), |hosted| hosted.window_bytes.clone())
}
