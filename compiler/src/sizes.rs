//! How long other runs of a plan's programs take than those of the largest extent with nothing cached.

use anyhow::Result;
use ir::forecast::RunForecast;
use ir::plan::{Phase, Plan};
use ir::tensor::Extent;
use ir::workspace::{MAX_FUSED_ROWS, MAX_PACKED_ROWS, MAX_PLANE_ROWS};
use rayon::prelude::*;

use crate::bind::Bound;
use crate::emit::program;
use crate::forecast::simulate;
use crate::graphs::Graphs;
use crate::schedule::Causes;
use crate::target::Batch;
use crate::task::Task;

/// Tokens of prompts: what is said in a chat, where GPUs multiply in another way, and what people measure.
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
    let run = |tokens: u32, batch: &Batch| {
        let program = program(task, graphs, bound, batch, &mut Causes::default())?;
        Ok(RunForecast { tokens, nanos: simulate(&program).nanos })
    };
    for (batch, forecast) in batches.iter().zip(&mut plan.forecast.programs) {
        let others = others(batch).into_par_iter();
        let others = others.map(|batch| run(batch.varying_tokens(), &batch));
        // Of several errors the first is told, whichever came first.
        let others: Vec<Result<RunForecast>> = others.collect();
        forecast.others = others.into_iter().collect::<Result<_>>()?;
        let tokens = task.target.context.saturating_sub(batch.extent.tokens);
        if batch.phase == Phase::Prefill && tokens > 0 {
            forecast.behind = Some(run(tokens, &Batch { past: tokens, ..batch.clone() })?);
        }
    }
    Ok(())
}

/// The sizes that are forecast of a program beside its own.
fn others(batch: &Batch) -> Vec<Batch> {
    match batch.phase {
        Phase::Decode => vec![Batch { past: 0, ..batch.clone() }],
        Phase::Prefill => {
            let fewer = TOKENS.into_iter().filter(|&tokens| tokens < batch.extent.tokens);
            let of_size = |tokens: u32| {
                let extent = Extent { tokens, rows: batch.extent.rows.min(tokens) };
                Batch { extent, ..batch.clone() }
            };
            fewer.map(of_size).collect()
        }
    }
}
