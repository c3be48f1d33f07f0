//! Where everything runs: the best of placements for prompts in smaller and larger parts, with bfloat16 in 12 and in 16
//! bits, with the most used experts on GPUs and with matrices divided.

use anyhow::{Context as _, Result};
use ir::id::DeviceId;
use ir::machine::Machine;
use ir::model::Model;
use ir::op::{Experts, Op};
use rayon::prelude::*;

use crate::options::Options;
use crate::place::{Among, NOTHING_FITS, PROMPT_TOKENS, Placement, Room, explain, place};
use crate::target::Target;
use crate::task::Task;
use crate::{experts, shards, token_table};

/// What is decided before movement is made explicit.
pub(crate) struct Decided {
    /// The model, with what is divided of it.
    pub(crate) model: Model,
    /// What it is compiled for.
    pub(crate) target: Target,
    /// Where it runs.
    pub(crate) placement: Placement,
}

/// Tokens of prefill runs that are tried where none are asked for: the fewest that keep processors busy, and a whole
/// prompt, whose activations take more memory.
const PREFILL_TOKENS: [u32; 2] = [512, PROMPT_TOKENS];
/// Between these, where hosts compute or hold a part: activations then take the room of weights or caches.
const TOKENS_BESIDE_HOSTS: u32 = 1024;

/// Decides for runs of as many tokens as is asked; else, with GPUs, for as many as is best.
///
/// Fails when nothing fits, and says what is missing.
pub(crate) fn decide(model: &Model, machine: &Machine, options: &Options) -> Result<Decided> {
    let decided = decide_table(model, machine, options, false)
        .or_else(|_| decide_table(model, machine, options, true));
    let mut decided = decided.or_else(|_| refuse(model, machine, options))?;
    let Decided { model, target, placement } = &mut decided;
    explain(&Task::new(model, target), options, placement)?;
    Ok(decided)
}

/// Says why runs of as many tokens as is asked, or of a few, do not fit.
fn refuse(model: &Model, machine: &Machine, options: &Options) -> Result<Decided> {
    let target = Target { is_exhaustive: true, is_told: true, ..first(model, machine, options)? };
    decide_for(model, in_widths(target), options)
}

/// What is tried first: runs of as many tokens as is asked, or of a few.
fn first(model: &Model, machine: &Machine, options: &Options) -> Result<Target> {
    let tokens = options.prefill_tokens.unwrap_or(PREFILL_TOKENS[0]);
    Target::new(model, machine, options, tokens)
}

/// Decides with tables of tokens anywhere, and with them on a NUMA node where that may be better: where GPUs have no
/// room for both them and more of the layers, or nothing fits.
fn decide_table(
    model: &Model,
    machine: &Machine,
    options: &Options,
    is_exhaustive: bool,
) -> Result<Decided> {
    let decide = |home| decide_unexplained(model, machine, options, is_exhaustive, home);
    let free = decide(None);
    let target = first(model, machine, options)?;
    let Some(home) = token_table::home(&Task::new(model, &target)) else { return free };
    if let Ok(Decided { model, target, placement }) = &free
        && !token_table::is_room_short(&Task::new(model, target), placement)
    {
        return free;
    }
    let fitting = [free, decide(Some(home))].into_iter().flatten().collect();
    best_of(fitting).context(NOTHING_FITS)
}

fn decide_unexplained(
    model: &Model,
    machine: &Machine,
    options: &Options,
    is_exhaustive: bool,
    table_home: Option<DeviceId>,
) -> Result<Decided> {
    let target = |tokens: u32| {
        let target = Target::new(model, machine, options, tokens)?;
        anyhow::Ok(Target { is_exhaustive, table_home, ..target })
    };
    let in_runs_of = |tokens: u32| decide_for(model, in_widths(target(tokens)?), options);
    let [few, many] = PREFILL_TOKENS;
    if let Some(tokens) = options.prefill_tokens {
        return in_runs_of(tokens);
    }
    let first = target(few)?;
    let has_gpu = first.machine.has_gpus();
    let context = first.context;
    if !has_gpu || context <= few {
        return decide_for(model, in_widths(first), options);
    }
    let few = || decide_for(model, in_widths(first), options);
    let (few, many) = rayon::join(few, || in_runs_of(many));
    // Where the fewest do not fit, fewer may.
    let are_tried = few.is_err() || [&few, &many].into_iter().flatten().any(uses_hosts);
    let mut others = if are_tried { other_tokens(model) } else { Vec::new() };
    // Longer runs than the context are runs of the context, which is tried.
    others.retain(|&tokens| tokens < context);
    // To save time, in the widths alone that are best for the fewest or for the most tokens: with GPUs, which widths
    // there are does not depend on the tokens, so one of them is left.
    let chosen = [&few, &many].into_iter().flatten().map(|decided| &decided.target.has_bf12);
    let chosen: Vec<_> = chosen.cloned().collect();
    let in_chosen_widths = |tokens: u32| {
        let mut targets = in_widths(target(tokens)?);
        targets.retain(|target| chosen.is_empty() || chosen.contains(&target.has_bf12));
        decide_for(model, targets, options)
    };
    let others: Vec<Result<Decided>> = others.into_par_iter().map(in_chosen_widths).collect();
    let mut fitting: Vec<Decided> =
        [few].into_iter().chain(others).chain([many]).flatten().collect();
    fitting.sort_by_key(|decided| decided.target.prefill_tokens);
    best_of(fitting).context(NOTHING_FITS)
}

/// The best of what is decided; of equals the first.
fn best_of(all: Vec<Decided>) -> Option<Decided> {
    all.into_iter().min_by_key(|decided| decided.placement.score)
}

/// Whether a host has weights or caches.
fn uses_hosts(decided: &Decided) -> bool {
    let devices = &decided.target.machine.devices;
    let mut held = decided.placement.devices.iter();
    held.any(|(id, held)| !devices[id].kind.is_gpu() && held.weight_bytes + held.cache_bytes > 0)
}

/// Tokens of runs beside hosts; of a mixture fewer, too, as many as let each expert's matrices be multiplied as they
/// lie.
fn other_tokens(model: &Model) -> Vec<u32> {
    let nodes = || model.layers.nodes().map(|(_, node)| &node.work);
    let used =
        nodes().filter_map(|op| if let Op::Route { used, .. } = op { Some(*used) } else { None });
    let count = |experts: &Experts| model.weights[experts.gate].shape[0];
    let experts =
        nodes().filter_map(|op| if let Op::Experts(op) = op { Some(count(op)) } else { None });
    let fused = used.max().zip(experts.min()).and_then(|(used, all)| fused_tokens(used, all));
    [TOKENS_BESIDE_HOSTS].into_iter().chain(fused).collect()
}

/// The most tokens that leave each of `all` experts, of which each token has `used`, few rows, if their choices are even;
/// `None` where others are tried that are as few.
fn fused_tokens(used: u32, all: u32) -> Option<u32> {
    /// Rows that take little longer than one, as matrices lie.
    const FEW_ROWS: u64 = 64;
    let tokens = FEW_ROWS * u64::from(all) / u64::from(used.max(1));
    u32::try_from(tokens).ok().filter(|tokens| (1..PREFILL_TOKENS[0]).contains(tokens))
}

/// A target, and the same with bfloat16 in 16 bits on GPUs that may hold it in 12.
fn in_widths(target: Target) -> Vec<Target> {
    let plain = target.with_plain_gpus();
    [target].into_iter().chain(plain).collect()
}

/// Decides for the best of targets that differ in widths.
fn decide_for(model: &Model, targets: Vec<Target>, options: &Options) -> Result<Decided> {
    if let Some(counted) = &options.expert_counts {
        let file = || format!("using {}", counted.file.display());
        experts::check_counts(model, &counted.counts).with_context(file)?;
    }
    let (target, placed) = place_by_width(model, targets, options)?;
    let counted = with_counts(model, &placed, &target, options)?;
    let with_shards = |model, placed| shards::with_shards(model, placed, &target, options);
    let (model, placement) = with_shards(model.clone(), placed)?;
    let counted = counted.map(|(model, placed)| with_shards(model, placed)).transpose()?;
    let (model, placement) = match counted {
        Some((split, placed)) if placed.score < placement.score => {
            (split, placed.chosen_over(placement))
        }
        Some(_) | None => (model, placement),
    };
    Ok(Decided { model, target, placement })
}

/// The best placement, with its target: with bfloat16 in 12 bits on GPUs, which leaves room for more, or in 16, which
/// prompts and many sequences need not unpack. For latency the decode of one sequence and of the most weigh alike.
fn place_by_width(
    model: &Model,
    targets: Vec<Target>,
    options: &Options,
) -> Result<(Target, Placement)> {
    let place_for = |target: Target| {
        let placed = place(&Task::new(model, &target), options, Among::All)?;
        anyhow::Ok((target, placed))
    };
    let placed: Vec<Result<(Target, Placement)>> = targets.into_par_iter().map(place_for).collect();
    let both = |(_, placed): &(Target, Placement)| placed.score + placed.score_of_most;
    // Any may fit alone: 12 bits take less, but room to unpack a matrix as well. Of refusals the first is told.
    let better = |a: Result<(Target, Placement)>, b: Result<(Target, Placement)>| match (a, b) {
        (Ok(narrow), Ok(wide)) if both(&wide) <= both(&narrow) => Ok(wide),
        (Err(_), Ok(wide)) => Ok(wide),
        (narrow, _) => narrow,
    };
    placed.into_iter().reduce(better).context(NOTHING_FITS)?
}

/// The model and placement with the most used experts of mixtures on GPUs, where experts are counted, some are beside
/// the GPUs and that is predicted to be better than `placement`.
fn with_counts(
    model: &Model,
    placement: &Placement,
    target: &Target,
    options: &Options,
) -> Result<Option<(Model, Placement)>> {
    /// Parts of the room that are tried: what the experts of a GPU take beside their weights is known only afterwards.
    const SHARES: [u64; 3] = [100, 95, 85];
    let Some(counted) = &options.expert_counts else { return Ok(None) };
    let file = || format!("using {}", counted.file.display());
    for share in SHARES {
        let room = |room: &Room| Room { bytes: room.bytes / 100 * share, ..room.clone() };
        let rooms: Vec<Room> = placement.rooms.iter().map(room).collect();
        let task = Task::new(model, target);
        let is_free = |layer: &str| !target.is_pinned(layer);
        let split = experts::split(&task, &counted.counts, &rooms, is_free).with_context(file)?;
        let Some(split) = split else { break };
        // With less in the room it may fit.
        let Ok(placed) = place(&Task::new(&split, target), options, Among::All) else { continue };
        if placed.score < placement.score {
            return Ok(Some((split, placed)));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mixtures_are_tried_with_as_many_tokens_as_leave_experts_few_rows() {
        assert_eq!(fused_tokens(2, 8), Some(256));
        assert_eq!(fused_tokens(6, 16), Some(170));
        assert_eq!(fused_tokens(8, 128), None);
        assert_eq!(fused_tokens(1, 8), None);
    }
}
