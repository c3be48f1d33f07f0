//! Cutting what sequences are to be fed into batches, and starting a run for each.

use std::collections::VecDeque;
use std::sync::atomic::AtomicBool;

use anyhow::{Context as _, Result, bail, ensure};
use ir::plan::Phase;
use ir::tensor::Extent;

use super::stages::most_tokens_of_a_run;
use super::{Engine, SequenceId};
use crate::batch::Batch;
use crate::run::{Row, RunHandle};

/// A started run and the rows of its logits that the caller gets.
struct Pending {
    handle: RunHandle,
    wanted: Vec<Wanted>,
}

/// What the caller of [`Engine::feed`] gets.
#[derive(Clone, Copy)]
pub(super) enum Wants<'a> {
    /// The logits after every token that is fed.
    All,
    /// Those after the last token of each sequence.
    Last,
    /// The same, or the most likely tokens where a device can tell them; for each sequence one over its temperature.
    Listed(&'a [f32]),
}

/// A row of a run's logits.
struct Wanted {
    /// Index of the sequence among those that are fed.
    sequence: usize,
    /// Position of the token in its sequence.
    position: usize,
    row: usize,
}

impl Engine {
    /// Feeds everything appended to `ids`; calls `on_row` with the index of the sequence, the position of a
    /// token and what follows it. Says whether it came to the end: raising `abort` stops it.
    ///
    /// Where it does not come to the end, the sequences are as they were before, but that they may have nothing cached.
    ///
    /// # Errors
    /// As [`Engine::advance`].
    pub(super) fn feed(
        &mut self,
        ids: &[SequenceId],
        wants: Wants<'_>,
        abort: &AtomicBool,
        mut on_row: impl FnMut(usize, usize, Row<'_>) -> Result<()>,
    ) -> Result<bool> {
        self.reserve(ids)?;
        for id in ids {
            if let Some(sequence) = self.sequences.get_mut(id) {
                sequence.forget_other_keys(self.executor.plan().ropes.rows());
            }
        }
        let cached: Vec<usize> =
            ids.iter().filter_map(|id| self.sequences.get(id)).map(|s| s.cached).collect();
        let mut under_way = VecDeque::new();
        let outcome = self.feed_in_runs(ids, wants, abort, &mut under_way, &mut on_row);
        if matches!(outcome, Ok(true)) {
            return outcome;
        }
        // All at once: a lane that leaves one run must not begin the next, and one that never does is waited for once.
        under_way.iter().for_each(|pending| pending.handle.abort());
        let ends: Vec<Result<()>> =
            under_way.into_iter().map(|pending| pending.handle.cancel()).collect();
        // What was cached meanwhile is cached again, with the same values.
        for (id, cached) in ids.iter().zip(cached) {
            if let Some(sequence) = self.sequences.get_mut(id) {
                sequence.cached = cached;
            }
        }
        ends.into_iter()
            .fold(outcome, |outcome, end| outcome.and_then(|is_fed| end.map(|()| is_fed)))
    }

    fn feed_in_runs(
        &mut self,
        ids: &[SequenceId],
        wants: Wants<'_>,
        abort: &AtomicBool,
        under_way: &mut VecDeque<Pending>,
        on_row: &mut impl FnMut(usize, usize, Row<'_>) -> Result<()>,
    ) -> Result<bool> {
        // Every lane can be at another run, and one more waits so that none idles.
        let most_under_way = self.executor.plan().queues().len() + 1;
        let share = self.share(ids.iter().map(|&id| self.unfed(id)).sum());
        let mut next = 0;
        while next < ids.len() || !under_way.is_empty() {
            if next < ids.len() && under_way.len() < most_under_way {
                under_way.push_back(self.start_next(ids, &mut next, share, wants)?);
                continue;
            }
            let Some(Pending { handle, wanted }) = under_way.pop_front() else { break };
            let Some(logits) = handle.wait_unless(abort)? else {
                under_way.push_front(Pending { handle, wanted });
                return Ok(false);
            };
            for Wanted { sequence, position, row } in wanted {
                on_row(sequence, position, logits.row(row))?;
            }
        }
        Ok(true)
    }

    /// Starts a run of as much as one run takes, at most `share` tokens, beginning with sequence `next`.
    fn start_next(
        &mut self,
        ids: &[SequenceId],
        next: &mut usize,
        share: u32,
        wants: Wants<'_>,
    ) -> Result<Pending> {
        let wants_all = matches!(wants, Wants::All);
        let waiting = &ids[*next..];
        let program = self.choose(waiting, share, wants_all)?;
        let schedule = &self.executor.plan().programs[program];
        let (most, most_sequences) = (schedule.max, schedule.max_sequences as usize);
        let most_tokens = most.tokens as usize;
        let most = Extent { tokens: most.tokens.min(share), ..most };
        let (mut batch, mut wanted) = (Batch::default(), Vec::new());
        while *next < ids.len() {
            let extent = batch.extent();
            let (tokens_left, rows_left) = (most.tokens - extent.tokens, most.rows - extent.rows);
            if tokens_left == 0 || rows_left == 0 || batch.parts().len() == most_sequences {
                break;
            }
            let sequence = self.sequences.get_mut(&ids[*next]).context("the sequence is closed")?;
            let (past, length) = (sequence.cached, sequence.tokens.len());
            let room = if wants_all { tokens_left.min(rows_left) } else { tokens_left };
            let end = length.min(past + room as usize);
            let first_row = extent.rows as usize;
            batch.push(&sequence.tokens[past..end], past, length, &sequence.blocks, wants_all);
            sequence.cached = end;
            if wants_all {
                let rows = (past..end).zip(first_row..);
                wanted.extend(rows.map(|(position, row)| Wanted {
                    sequence: *next,
                    position,
                    row,
                }));
            } else if end == length {
                wanted.push(Wanted { sequence: *next, position: end - 1, row: first_row });
            }
            if end < length {
                break;
            }
            *next += 1;
        }
        if let Wants::Listed(inverse_temperatures) = wants
            && wanted.len() == batch.rows().len()
        {
            batch.allow_shortlists(
                wanted.iter().map(|wanted| inverse_temperatures[wanted.sequence]).collect(),
            );
        }
        if !wants_all && !batch.is_decode() {
            batch.pad(self.executor.padded(batch.tokens().len()).min(most_tokens));
        }
        let handle = self.executor.start(program, batch)?;
        Ok(Pending { handle, wanted })
    }

    /// The most tokens of one run when `tokens` are to be fed: fewer than these where stages are then forecast to be
    /// sooner, each at work on another run.
    pub fn share(&self, tokens: usize) -> u32 {
        most_tokens_of_a_run(self.plan(), self.stages, tokens)
    }

    /// The smallest of the programs that take most of what waits, of which a run may have `share` tokens.
    fn choose(&self, waiting: &[SequenceId], share: u32, wants_all: bool) -> Result<usize> {
        let is_decode = waiting.iter().all(|id| {
            self.sequences.get(id).is_some_and(|sequence| {
                sequence.cached > 0 && sequence.tokens.len() == sequence.cached + 1
            })
        });
        let phase = if is_decode && !wants_all { Phase::Decode } else { Phase::Prefill };
        let tokens: usize = waiting.iter().map(|&id| self.unfed(id)).sum();
        let tokens = tokens.min(share as usize);
        let sequences = waiting.len().min(tokens);
        let program = self.executor.plan().program_for(phase, tokens, sequences, wants_all);
        program.with_context(|| format!("the plan has no {phase:?} program"))
    }

    /// Makes sure that everything can be cached before anything is started. Where it cannot, sequences hold no blocks
    /// for what they would be fed.
    fn reserve(&mut self, ids: &[SequenceId]) -> Result<()> {
        let reserved = ids.iter().enumerate().try_for_each(|(index, id)| -> Result<()> {
            ensure!(!ids[..index].contains(id), "a sequence is fed twice at once");
            let Some(sequence) = self.sequences.get_mut(id) else {
                bail!("the sequence is closed")
            };
            ensure!(sequence.cached < sequence.tokens.len(), "a sequence is fed no tokens");
            self.blocks.reserve(&mut sequence.blocks, sequence.tokens.len())
        });
        if reserved.is_err() {
            ids.iter().for_each(|&id| self.release_uncached(id));
        }
        reserved
    }
}
