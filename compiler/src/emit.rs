//! Writes placed graphs down as a plan: tables of what is held, programs over them, and the forecast.

use std::path::{Component, Path, PathBuf};

use anyhow::{Result, ensure};
use ir::asked::Asked;
use ir::captured::can_include_prompts;
use ir::forecast::{Candidate, Forecast, ProgramForecast};
use ir::model::CheckpointFile;
use ir::plan::{ModelInfo, Plan, Program, VERSION, Weight};
use ir::weight::Source;

use crate::bind::{Bound, bind};
use crate::contend::contend;
use crate::forecast::{simulate, unreplayed_nanos};
use crate::graphs::Graphs;
use crate::options::Options;
use crate::part::WeightKey;
use crate::place::missing;
use crate::schedule::{Causes, schedule};
use crate::sizes;
use crate::target::{BLOCK_TOKENS, Batch};
use crate::task::Task;

/// The plan of placed graphs with programs for `batches`.
///
/// Weights carry no sources yet, nor the plan what was asked: a plan that is only priced needs neither.
pub(crate) fn emit(task: &Task<'_>, graphs: &Graphs, batches: &[Batch]) -> Result<Plan> {
    let (model, target) = (task.model, task.target);
    let bound = bind(task, graphs)?;
    let mut causes = Causes::default();
    let programs = batches
        .iter()
        .map(|batch| program(task, graphs, &bound, batch, &mut causes))
        .collect::<Result<Vec<_>>>()?;
    let weights = bound
        .weights
        .rows()
        .iter()
        .map(|key| Weight {
            name: model.weights[key.weight].name.clone(),
            device: key.device,
            format: key.format,
            shape: key.shape(task).into_vec(),
            also_unpacked: graphs.unpacked.contains(key),
            sources: Vec::new(),
        })
        .collect();
    let mut plan = Plan {
        version: VERSION,
        model: ModelInfo {
            name: model.name.clone(),
            architecture: model.architecture.clone(),
            folder: model.folder.clone(),
            vocabulary: model.vocabulary,
            context: target.context,
            max_sequences: target.max_sequences,
            block_tokens: BLOCK_TOKENS,
            blocks: target.blocks,
        },
        asked: Asked::default(),
        machine: target.machine.clone(),
        files: model.files.clone(),
        weights,
        caches: bound.caches,
        ropes: model.ropes.clone(),
        programs,
        captures_prompts: false,
        causes: causes.table,
        forecast: Forecast::default(),
    };
    plan.captures_prompts = can_include_prompts(&plan);
    plan.forecast.devices = ir::check::memory(&plan);
    if plan.captures_prompts && missing(&plan).is_some() {
        plan.captures_prompts = false;
        plan.forecast.devices = ir::check::memory(&plan);
    }
    let forecast = |(program, batch): (&Program, &Batch)| {
        let (times, unreplayed) = (simulate(program), unreplayed_nanos(&plan, batch.phase));
        ProgramForecast {
            program: program.name.clone(),
            tokens: batch.varying_tokens(),
            nanos: times.nanos + unreplayed,
            busiest_lane_nanos: times.busiest_lane_nanos + unreplayed,
            others: Vec::new(),
            behind: None,
        }
    };
    plan.forecast.programs = plan.programs.iter().zip(batches).map(forecast).collect();
    Ok(plan)
}

/// The program for one kind of batch, with the times of its steps.
pub(crate) fn program(
    task: &Task<'_>,
    graphs: &Graphs,
    bound: &Bound,
    batch: &Batch,
    causes: &mut Causes,
) -> Result<Program> {
    let mut program = schedule(task, graphs, bound, batch, causes)?;
    contend(task, bound, &mut program);
    Ok(program)
}

/// Adds what only a plan that is kept needs: where its weights are read from, what runs of other sizes take, what was
/// asked and what else was priced. Its programs are for `batches`.
pub(crate) fn complete(
    task: &Task<'_>,
    graphs: &Graphs,
    mut plan: Plan,
    batches: &[Batch],
    options: &Options,
    candidates: Vec<Candidate>,
) -> Result<Plan> {
    let bound = bind(task, graphs)?;
    for (id, key) in bound.weights.iter() {
        plan.weights[id].sources = sources(task, key)?;
    }
    sizes::forecast(task, graphs, &bound, batches, &mut plan)?;
    if let Some(folder) = &options.plan_folder {
        for file in plan.files.rows_mut() {
            *file = CheckpointFile { path: relative(&file.path, folder), ..file.clone() };
        }
        plan.model.folder = relative(&plan.model.folder, folder);
    }
    let files = plan.files.rows().iter().map(|file| &file.path);
    for path in files.chain([&plan.model.folder]) {
        ensure!(
            path.to_str().is_some(),
            "a plan is text and cannot name {}, which is not in UTF-8: rename it, or write the plan into that folder",
            path.display()
        );
    }
    plan.asked = options.asked();
    // Searches with nothing but caches beside GPUs end alike, whatever else they might have kept there.
    for candidate in candidates {
        if !plan.forecast.candidates.contains(&candidate) {
            plan.forecast.candidates.push(candidate);
        }
    }
    Ok(plan)
}

/// Where the held part of a weight lies.
fn sources(task: &Task<'_>, key: &WeightKey) -> Result<Vec<Source>> {
    let weight = &task.model.weights[key.weight];
    let sliced = key.slice.map(|slice| weight.sliced(slice)).transpose()?;
    Ok(sliced.as_ref().unwrap_or(weight).sources.clone())
}

/// `path` as seen from `folder`, where both lie in one project; paths that share only the root stay absolute,
/// because they do not move together.
fn relative(path: &Path, folder: &Path) -> PathBuf {
    let from: Vec<Component<'_>> = folder.components().collect();
    let to: Vec<Component<'_>> = path.components().collect();
    let shared = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
    if shared < 2 {
        return path.to_owned();
    }
    let up = from[shared..].iter().map(|_| Component::ParentDir);
    let relative: PathBuf = up.chain(to[shared..].iter().copied()).collect();
    if relative.as_os_str().is_empty() { PathBuf::from(".") } else { relative }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(path: &str, folder: &str, expected: &str) {
        assert_eq!(relative(Path::new(path), Path::new(folder)), Path::new(expected));
    }

    #[test]
    fn paths_of_one_project_are_relative() {
        check("/home/me/models/a.safetensors", "/home/me/plans", "../models/a.safetensors");
        check("/home/me/models/a.safetensors", "/home/me/models", "a.safetensors");
        check("/home/me/models", "/home/me/models", ".");
    }

    #[test]
    fn paths_that_share_the_root_alone_stay_absolute() {
        check("/data/a.safetensors", "/home/me", "/data/a.safetensors");
    }
}
