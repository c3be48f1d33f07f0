//! The program for short prompts.
//!
//! Where prefill fetches weights it takes as long as all that is fetched is under way, however few the tokens. Decode
//! computes most of it in place, which is sooner done for few tokens too: so there is a second program for prompts,
//! placed as decode is.

use anyhow::Result;
use ir::plan::{Phase, Plan};

use crate::emit::emit;
use crate::graphs::Graphs;
use crate::place::missing;
use crate::target::Batch;
use crate::task::Task;

/// Tokens that such a program may take.
const TOKENS: [u32; 9] = [16, 32, 64, 96, 128, 192, 256, 384, 512];

/// The plan with all programs, and the batch of each: where prompts of some tokens are predicted to be done sooner as
/// decode is placed, one more for prompts of as many tokens as that holds for, after prefill.
pub(crate) fn plan(task: &Task<'_>, graphs: &Graphs) -> Result<(Plan, Vec<Batch>)> {
    let batches = task.target.batches();
    if let Some(tokens) = most_tokens(task, graphs)? {
        let mut with_short = batches.clone();
        if tokens < task.target.prefill_tokens {
            with_short.insert(1, task.target.prompt(tokens, Phase::Decode));
        } else {
            // All prompts come in such short parts.
            with_short[0].placed_as = Phase::Decode;
        }
        let plan = emit(task, graphs, &with_short)?;
        // Each program fits, but one may need most buffers and another most scratch memory.
        if missing(&plan).is_none() {
            return Ok((plan, with_short));
        }
    }
    Ok((emit(task, graphs, &batches)?, batches))
}

/// The most tokens that a program for short prompts serves.
fn most_tokens(task: &Task<'_>, graphs: &Graphs) -> Result<Option<u32>> {
    if graphs.placed.decode.is_none() {
        return Ok(None);
    }
    let all = task.target.prefill_tokens;
    let fewer = TOKENS.into_iter().filter(|&tokens| tokens < all);
    let offered: Vec<u32> = fewer.chain((all <= TOKENS[TOKENS.len() - 1]).then_some(all)).collect();
    let (mut offered, mut most) = (offered.as_slice(), None);
    // What is fetched takes the same time for more tokens, and computing and memory grow: what does not serve some
    // tokens does not serve more.
    while let Some(&tokens) = offered.get(offered.len() / 2) {
        let (fewer, more) = (&offered[..offered.len() / 2], &offered[offered.len() / 2 + 1..]);
        if serves(task, graphs, tokens)? {
            (most, offered) = (Some(tokens), more);
        } else {
            offered = fewer;
        }
    }
    Ok(most)
}

/// Whether prompts of `tokens` tokens are done sooner by a program placed as decode is, and it fits.
fn serves(task: &Task<'_>, graphs: &Graphs, tokens: u32) -> Result<bool> {
    let [as_prefill, as_decode] =
        [Phase::Prefill, Phase::Decode].map(|phase| task.target.prompt(tokens, phase));
    // NUMA nodes that prefill fetches from need room for the activations of such a prompt.
    let plan = emit(task, graphs, &[as_prefill, as_decode])?;
    let times = &plan.forecast.programs;
    Ok(times[1].nanos < times[0].nanos && missing(&plan).is_none())
}
