//! How long other runs of a plan's programs take than those of the most tokens with nothing cached.

use std::collections::BTreeSet;

use anyhow::Result;
use ir::forecast::RunForecast;
use ir::plan::{Phase, Plan};
use ir::tensor::Extent;
use ir::workspace::{FLOAT_ROWS, MAX_FUSED_ROWS, MAX_PACKED_ROWS, MAX_PLANE_ROWS, OperandRows};
use rayon::prelude::*;

use crate::bind::Bound;
use crate::emit::program;
use crate::forecast::{simulate, unreplayed_nanos};
use crate::graphs::Graphs;
use crate::schedule::Causes;
use crate::target::Batch;
use crate::task::Task;

/// Tokens of prompts: what is said in a chat, and where GPUs multiply in another way.
const TOKENS: [u32; 7] = [
    8,
    MAX_PLANE_ROWS,
    MAX_PLANE_ROWS + 1,
    MAX_FUSED_ROWS,
    MAX_FUSED_ROWS + 1,
    MAX_PACKED_ROWS,
    MAX_PACKED_ROWS + 1,
];

/// Adds to a plan's forecast what its programs, one for each batch, take for fewer tokens, with nothing cached or behind
/// what prompts have cached.
pub(crate) fn forecast(
    task: &Task<'_>,
    graphs: &Graphs,
    bound: &Bound,
    batches: &[Batch],
    plan: &mut Plan,
) -> Result<()> {
    let (known, prompts) = (&*plan, prompts(plan));
    let run = |tokens: u32, batch: &Batch| {
        let program = program(task, graphs, bound, batch, &mut Causes::default())?;
        let nanos = simulate(&program).nanos + unreplayed_nanos(known, batch.phase);
        Ok(RunForecast { tokens, nanos })
    };
    let runs = |batch: &Batch| {
        let others = others(&prompts, batch).into_par_iter();
        let others = others.map(|batch| run(batch.varying_tokens(), &batch));
        // Of several errors the first is told, whichever came first.
        let others: Vec<Result<RunForecast>> = others.collect();
        let tokens = task.target.context.saturating_sub(batch.extent.tokens);
        let looks_back = batch.phase == Phase::Prefill && tokens > 0;
        let behind = looks_back.then(|| run(tokens, &Batch { past: tokens, ..batch.clone() }));
        Ok((others.into_iter().collect::<Result<_>>()?, behind.transpose()?))
    };
    let runs: Vec<(Vec<RunForecast>, Option<RunForecast>)> =
        batches.iter().map(runs).collect::<Result<_>>()?;
    for (forecast, runs) in plan.forecast.programs.iter_mut().zip(runs) {
        (forecast.others, forecast.behind) = runs;
    }
    Ok(())
}

/// The sizes that are forecast of a program beside its own.
fn others(prompts: &BTreeSet<u32>, batch: &Batch) -> Vec<Batch> {
    match batch.phase {
        Phase::Decode => vec![Batch { past: 0, ..batch.clone() }],
        Phase::Prefill => {
            let fewer = prompts.iter().copied();
            let of_size =
                |tokens: u32| Batch { extent: Extent { tokens, ..batch.extent }, ..batch.clone() };
            fewer.filter(|&tokens| tokens < batch.extent.tokens).map(of_size).collect()
        }
    }
}

/// Tokens of the prompts that are forecast of a plan: with the instructions of warpgroups also on both sides of each
/// number that fills their operands, since one token more takes as long as all that the next have room for.
fn prompts(plan: &Plan) -> BTreeSet<u32> {
    let mut prompts = BTreeSet::from(TOKENS);
    let has_warpgroups = |(device, _)| plan.machine.devices[device].kind.has_warpgroups();
    if plan.queues().into_iter().any(has_warpgroups) {
        prompts.extend(filling().flat_map(|rows| [rows, rows + 1]));
    }
    prompts
}

/// Numbers of rows that fill the operands of warpgroups.
fn filling() -> impl Iterator<Item = u32> {
    let fills = |rows: &u32| OperandRows::of(*rows).map(OperandRows::count) == Some(*rows);
    (FLOAT_ROWS..=MAX_PACKED_ROWS).filter(fills)
}

/// Whether people are told of such a prompt: not of those that only say how long the next operands take.
pub(crate) fn is_listed(tokens: u32) -> bool {
    TOKENS.contains(&tokens) || !filling().any(|rows| rows + 1 == tokens)
}
