//! Where everything runs: the best of placements for prompts in smaller and larger parts, with bfloat16 in 12 and in 16
//! bits, with the most used experts on GPUs and with matrices divided.

use anyhow::{Context as _, Result};
use ir::machine::{DeviceKind, Machine};
use ir::model::Model;

use crate::options::Options;
use crate::place::{Among, PROMPT_TOKENS, Placement, Room, place};
use crate::target::Target;
use crate::task::Task;
use crate::{experts, shards};

/// What is decided before movement is made explicit.
pub(crate) struct Decided {
    /// The model, with what is divided of it.
    pub(crate) model: Model,
    /// What it is compiled for.
    pub(crate) target: Target,
    /// Where it runs.
    pub(crate) placement: Placement,
}

/// Tokens of prefill runs that are tried where none are asked for: products of fewer keep no device busy, and more take
/// more memory for activations.
const PREFILL_TOKENS: [u32; 2] = [512, PROMPT_TOKENS];

/// More tokens are better where a prompt of [`PROMPT_TOKENS`] is done sooner by one part in so many.
const WORTH: u64 = 20;
/// The first token soon is worth one part in so many of the score: what the activations take of a small GPU's memory,
/// every token of the answer pays for.
const COST: u64 = 10;

/// Decides for runs of as many tokens as is asked; else for the fewest, or with GPUs for more where that is better.
pub(crate) fn decide(model: &Model, machine: &Machine, options: &Options) -> Result<Decided> {
    let in_runs_of = |tokens: u32| {
        let target = Target::new(model, machine, options, tokens)?;
        decide_for(model, target, options)
    };
    let [few, many] = PREFILL_TOKENS;
    if let Some(tokens) = options.prefill_tokens {
        return in_runs_of(tokens);
    }
    let target = Target::new(model, machine, options, few)?;
    let has_gpu = target.machine.devices.rows().iter().any(|device| device.kind.is_gpu());
    if !has_gpu || target.context <= few {
        return decide_for(model, target, options);
    }
    let many = in_runs_of(many);
    if let Ok(decided) = &many
        && activations_are_small(decided)
    {
        return many;
    }
    let few = decide_for(model, target, options)?;
    let is_better = |many: &Decided| {
        let (few, many) = (&few.placement, &many.placement);
        many.prompt_nanos <= few.prompt_nanos - few.prompt_nanos / WORTH
            && many.score_of_prompt <= few.score_of_prompt + few.score_of_prompt / COST
    };
    // More may need memory that is not there.
    Ok(many.ok().filter(is_better).unwrap_or(few))
}

/// Whether what activations take on GPUs is little beside what stays with hosts and is fetched for each run: then more
/// tokens in a run are better without a look at fewer.
fn activations_are_small(decided: &Decided) -> bool {
    let devices = &decided.target.machine.devices;
    let (mut activations, mut staying) = (0, 0);
    for (id, held) in decided.placement.devices.iter() {
        match devices[id].kind {
            DeviceKind::Gpu { .. } => activations += held.buffer_bytes + held.workspace_bytes,
            DeviceKind::Numa { .. } => staying += held.weight_bytes,
        }
    }
    let fetches = decided.placement.devices.rows().iter().any(|held| held.fetch_bytes > 0);
    fetches && activations < staying / (2 * COST)
}

fn decide_for(model: &Model, target: Target, options: &Options) -> Result<Decided> {
    if let Some(counted) = &options.expert_counts {
        let file = || format!("using {}", counted.file.display());
        experts::check_counts(model, &counted.counts).with_context(file)?;
    }
    let (target, placed) = place_by_width(model, target, options)?;
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

/// The better placement of two, with its target: with bfloat16 in 12 bits on GPUs, which leaves room for more, and in
/// 16, which prompts and many sequences need not unpack. The decode of one sequence and of the most weigh alike.
fn place_by_width(model: &Model, target: Target, options: &Options) -> Result<(Target, Placement)> {
    let place_for = |target: &Target| place(&Task::new(model, target), options, Among::All);
    let Some(plain) = target.with_plain_gpus() else {
        return place_for(&target).map(|placed| (target, placed));
    };
    let (narrow, wide) = rayon::join(|| place_for(&target), || place_for(&plain));
    let both = |placed: &Placement| placed.score + placed.score_of_most;
    // Either may fit alone: 12 bits take less, but room to unpack a matrix as well.
    match (narrow, wide) {
        (Ok(narrow), Ok(wide)) if both(&wide) <= both(&narrow) => Ok((plain, wide)),
        (Err(_), Ok(wide)) => Ok((plain, wide)),
        (narrow, _) => narrow.map(|narrow| (target, narrow)),
    }
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
        let is_free = |layer: &str| !options.is_pinned(layer);
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
