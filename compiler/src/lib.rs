//! Decides where every layer of a model runs: a model, a machine and options in, a plan out.
//!
//! - It allocates no tensor and needs no accelerator: the machine is data.
//! - The same inputs give the same plan, byte for byte.

pub mod options;
mod target;
mod task;

pub mod elide_moves;
pub mod fuse;
pub mod insert_moves;
mod place;

mod bind;
mod clock;
mod cost;
mod emit;
mod experts;
mod forecast;
mod free;
mod graphs;
mod groups;
mod part;
mod prompts;
mod rewrite;
mod schedule;
mod shards;
mod window;

pub mod explain;

use anyhow::{Context as _, Result};
use ir::machine::Machine;
use ir::model::Model;
use ir::plan::Plan;

pub use elide_moves::PLACED_PASSES;
pub use fuse::LAYER_PASSES;
pub use insert_moves::insert_moves;
pub use options::{Objective, Options};

use crate::graphs::Graphs;
use crate::place::{Among, Placement, Room, place};
use crate::target::Target;
use crate::task::Task;

/// A rewrite that keeps its stage: same type in, same type out.
#[derive(Clone, Copy, Debug)]
pub struct Pass<G> {
    /// As files, `--print-after` and test folders spell it.
    pub name: &'static str,
    /// The rewrite.
    pub run: fn(G) -> Result<G>,
}

/// Called after each stage with its name and the text of what it made.
pub type Observer<'a> = &'a mut dyn FnMut(&str, &dyn std::fmt::Display);

/// Names of all stages that an observer hears of, in order.
pub fn stages() -> Vec<&'static str> {
    let layer = LAYER_PASSES.iter().map(|pass| pass.name);
    let placed = PLACED_PASSES.iter().map(|pass| pass.name);
    layer.chain(["insert_moves"]).chain(placed).chain(["schedule"]).collect()
}

/// Compiles a model for a machine.
///
/// Fails on requests that name what does not exist, and on a model that the machine cannot hold: the error says
/// how many bytes are missing on which device.
pub fn compile(
    model: &Model,
    machine: &Machine,
    options: &Options,
    observe: Observer<'_>,
) -> Result<Plan> {
    let target = Target::new(model, machine, options)?;
    let layers = run_all(LAYER_PASSES, model.layers.clone(), observe)?;
    let model = Model { layers, ..model.clone() };
    if let Some(counted) = &options.expert_counts {
        let file = || format!("using {}", counted.file.display());
        experts::check_counts(&model, &counted.counts).with_context(file)?;
    }
    let (target, placed) = place_by_width(&model, target, options)?;
    let counted = with_counts(&model, &placed, &target, options)?;
    let with_shards = |model, placed| shards::with_shards(model, placed, &target, options);
    let (model, placement) = with_shards(model, placed)?;
    let counted = counted.map(|(model, placed)| with_shards(model, placed)).transpose()?;
    let (model, placement) = match counted {
        Some((split, placed)) if placed.score < placement.score => {
            (split, placed.chosen_over(placement))
        }
        Some(_) | None => (model, placement),
    };
    let task = Task::new(&model, &target);
    let graphs = Graphs::new(&model, &placement.layouts, observe)?;
    let plan = prompts::plan(&task, &graphs, placement.blocks)?;
    let plan = emit::complete(&task, &graphs, plan, options, placement.candidates)?;
    observe("schedule", &plan);
    let found = ir::check::check(&plan);
    assert!(
        found.is_empty(),
        "the compiler made an unsound plan: {}",
        found.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
    );
    Ok(plan)
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
        let Some(split) = experts::split(&task, &counted.counts, &rooms).with_context(file)? else {
            break;
        };
        // With less in the room it may fit.
        let Ok(placed) = place(&Task::new(&split, target), options, Among::All) else { continue };
        if placed.score < placement.score {
            return Ok(Some((split, placed)));
        }
    }
    Ok(None)
}

/// Runs the passes of one stage in order.
pub fn run_all<G: std::fmt::Display>(
    passes: &[Pass<G>],
    graph: G,
    observe: Observer<'_>,
) -> Result<G> {
    let mut graph = graph;
    for pass in passes {
        graph = (pass.run)(graph).with_context(|| format!("in {}", pass.name))?;
        observe(pass.name, &graph);
    }
    Ok(graph)
}
