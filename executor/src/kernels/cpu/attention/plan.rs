//! How an attention is cut into pieces for a team.

use std::ops::Range;

use super::super::cache::TILE_TOKENS;
use super::Attention;
use super::span::SPAN_TOKENS;

/// Rows that pass over a span together: enough to hide reading it from the second-level cache.
const JOB_ROWS: usize = 128;
/// The shortest context that is worth a piece of its own: about 10 µs for one row.
const PIECE_TOKENS: usize = 2 * SPAN_TOKENS;
/// Pieces for each member if all were alike: enough that the last ones end together.
const PIECES_PER_MEMBER: usize = 4;
/// What a key costs beside the rows that meet it, in rows: it is read from memory.
const KEY_COST: usize = 4;

/// All work of one attention.
pub(super) struct Plan {
    pub(super) jobs: Vec<Job>,
    /// Parts of jobs, in the order in which they are claimed.
    pub(super) pieces: Vec<Piece>,
    /// Rows that pieces leave for joining.
    pub(super) part_rows: usize,
}

/// Neighbouring queries of a sequence in all heads that read one key head.
pub(super) struct Job {
    pub(super) sequence: usize,
    pub(super) kv_head: usize,
    heads: Range<usize>,
    /// Tokens, counted from the sequence's first in this run.
    queries: Range<usize>,
    /// Tokens of the whole sequence that some query sees, from the start of a tile.
    keys: Range<usize>,
    pub(super) pieces: usize,
    /// Where the rows of its pieces begin among all that wait to be joined, if it has several.
    pub(super) part: Option<usize>,
}

/// One job, or a part of its keys.
pub(super) struct Piece {
    pub(super) job: usize,
    pub(super) keys: Range<usize>,
    /// Where its rows are left, if the job has other pieces.
    pub(super) part: Option<usize>,
}

impl Job {
    /// Queries times heads.
    pub(super) fn rows(&self) -> usize {
        self.queries.len() * self.heads.len()
    }

    /// Query and local head of a row. Rows of one query are neighbours.
    #[inline(always)]
    pub(super) fn row(&self, row: usize) -> (usize, usize) {
        let heads = self.heads.len();
        (self.queries.start + row / heads, self.heads.start + row % heads)
    }

    fn cost(&self) -> usize {
        self.keys.len() * (self.rows() + KEY_COST)
    }
}

/// Cuts `attention` for `members`.
pub(super) fn plan(attention: &Attention, kv_heads: usize, members: usize) -> Plan {
    let mut jobs = Vec::new();
    for (index, sequence) in attention.sequences.iter().enumerate() {
        for kv_head in 0..kv_heads {
            let heads = attention.heads_of(kv_head);
            if heads.is_empty() {
                continue;
            }
            let queries = (JOB_ROWS / heads.len()).max(1);
            // Late queries see most: they come first, so that short pieces are left for the end.
            for first in (0..sequence.tokens).step_by(queries).rev() {
                let queries = first..sequence.tokens.min(first + queries);
                let window = attention.window.unwrap_or(usize::MAX);
                let start = (sequence.past + queries.start + 1).saturating_sub(window);
                let start = start / TILE_TOKENS * TILE_TOKENS;
                let keys = start..sequence.past + queries.end;
                let heads = heads.clone();
                jobs.push(Job {
                    sequence: index,
                    kv_head,
                    heads,
                    queries,
                    keys,
                    pieces: 1,
                    part: None,
                });
            }
        }
    }
    let total: usize = jobs.iter().map(Job::cost).sum();
    let most = (total / (members * PIECES_PER_MEMBER)).max(1);
    let (mut pieces, mut part_rows) = (Vec::with_capacity(jobs.len()), 0);
    for (index, job) in jobs.iter_mut().enumerate() {
        let wanted = if members == 1 { 1 } else { job.cost().div_ceil(most) };
        let wanted = wanted.min(job.keys.len() / PIECE_TOKENS).max(1);
        let tokens = job.keys.len().div_ceil(wanted).next_multiple_of(SPAN_TOKENS);
        job.pieces = job.keys.len().div_ceil(tokens);
        let is_split = job.pieces > 1;
        job.part = is_split.then_some(part_rows);
        for first in job.keys.clone().step_by(tokens) {
            let keys = first..job.keys.end.min(first + tokens);
            pieces.push(Piece { job: index, keys, part: is_split.then_some(part_rows) });
            part_rows += if is_split { job.rows() } else { 0 };
        }
    }
    Plan { jobs, pieces, part_rows }
}
