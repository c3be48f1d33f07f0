//! Cutting what sequences are to be fed into batches, and starting a run for each.

use std::collections::VecDeque;

use anyhow::{Context as _, Result, bail, ensure};
use ir::plan::{Phase, Program};

use super::{Engine, Pending, SequenceId};
use crate::batch::Batch;

impl Engine {
    /// Feeds everything appended to `ids`; calls `on_row` with the index of the sequence, the position of a
    /// token and its logits: for the last token of each, or for all that are fed.
    ///
    /// # Errors
    /// As [`Engine::advance`].
    pub(super) fn feed(
        &mut self,
        ids: &[SequenceId],
        wants_all: bool,
        mut on_row: impl FnMut(usize, usize, &[f32]),
    ) -> Result<()> {
        self.reserve(ids)?;
        let mut next = 0;
        let mut under_way: VecDeque<Pending> = VecDeque::new();
        let most_under_way = self.executor.lanes() + 1;
        while next < ids.len() {
            // Always room for one more: the oldest run is waited for before another is started.
            if under_way.len() == most_under_way
                && let Some(oldest) = under_way.pop_front()
            {
                oldest.finish(&mut on_row)?;
            }
            let pending = self.start_next(ids, &mut next, wants_all)?;
            under_way.push_back(pending);
        }
        under_way.into_iter().try_for_each(|pending| pending.finish(&mut on_row))
    }

    /// Starts a run of as much as one run takes, beginning with sequence `next`.
    fn start_next(
        &mut self,
        ids: &[SequenceId],
        next: &mut usize,
        wants_all: bool,
    ) -> Result<Pending> {
        let waiting = &ids[*next..];
        let program = self.choose(waiting, wants_all)?;
        let schedule = &self.executor.plan().programs[program];
        let (most, most_sequences) = (schedule.max, schedule.max_sequences as usize);
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
                wanted.extend((past..end).enumerate().map(|(i, at)| (*next, at, first_row + i)));
            } else if end == length {
                wanted.push((*next, end - 1, first_row));
            }
            if end < length {
                break;
            }
            *next += 1;
        }
        let handle = self.executor.start(program, batch)?;
        Ok(Pending { handle, wanted })
    }

    /// The smallest program that takes all that waits, or else the largest.
    fn choose(&self, waiting: &[SequenceId], wants_all: bool) -> Result<usize> {
        let is_decode = waiting.iter().all(|id| {
            self.sequences.get(id).is_some_and(|sequence| {
                sequence.cached > 0 && sequence.tokens.len() == sequence.cached + 1
            })
        });
        let phase = if is_decode && !wants_all { Phase::Decode } else { Phase::Prefill };
        let takes = |program: &Program| program.max_sequences as usize;
        let programs = self.executor.plan().programs.iter().enumerate();
        let classes: Vec<_> = programs.filter(|(_, program)| program.phase == phase).collect();
        classes
            .iter()
            .filter(|(_, program)| takes(program) >= waiting.len())
            .min_by_key(|(_, program)| takes(program))
            .or_else(|| classes.iter().max_by_key(|(_, program)| takes(program)))
            .map(|&(index, _)| index)
            .with_context(|| format!("the plan has no {phase:?} program"))
    }

    /// Makes sure that everything can be cached before anything is started.
    fn reserve(&mut self, ids: &[SequenceId]) -> Result<()> {
        for (index, id) in ids.iter().enumerate() {
            ensure!(!ids[..index].contains(id), "a sequence is fed twice at once");
            let Some(sequence) = self.sequences.get_mut(id) else {
                bail!("the sequence is closed")
            };
            ensure!(sequence.cached < sequence.tokens.len(), "a sequence is fed no tokens");
            self.blocks.reserve(&mut sequence.blocks, sequence.tokens.len())?;
        }
        Ok(())
    }
}
