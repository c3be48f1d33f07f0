//! Decides where every layer of a model runs: a model, a machine and options in, a plan out.
//!
//! - It allocates no tensor and needs no accelerator: the machine is data.
//! - The same inputs give the same plan, byte for byte.

mod decide;
mod indices;
pub mod options;
mod target;
mod task;

pub mod elide_moves;
pub mod fuse;
pub mod insert_moves;
mod place;

mod bind;
mod clock;
mod contend;
mod cost;
mod emit;
mod experts;
mod forecast;
mod free;
mod graphs;
mod groups;
mod part;
mod prompts;
mod queueing;
mod reach;
mod rewrite;
mod schedule;
mod shards;
mod sizes;
mod token_table;
mod unpacked;
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

use crate::decide::{Decided, decide};
use crate::graphs::Graphs;
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
    options.check()?;
    let layers = run_all(LAYER_PASSES, model.layers.clone(), observe)?;
    let model = Model { layers, ..model.clone() };
    let Decided { model, target, placement } = decide(&model, machine, options)?;
    let task = Task::new(&model, &target);
    let mut graphs = Graphs::new(&task, placement.layouts, observe)?;
    let (plan, batches) = unpacked::plan(&task, &mut graphs)?;
    let plan = emit::complete(&task, &graphs, plan, &batches, options, placement.candidates)?;
    observe("schedule", &plan);
    let found = ir::check::check(&plan);
    assert!(
        found.is_empty(),
        "the compiler made an unsound plan: {}",
        found.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
    );
    Ok(plan)
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
