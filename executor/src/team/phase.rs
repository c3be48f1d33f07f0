//! Chunks that are all done before anybody does what comes after them.
//!
//! What counts are chunks, not members: one member can do a phase alone, and others that come late pass it.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::{Chunks, Padded, Shared, wait_until};

/// The chunks of one phase of a run.
pub struct Phase<'a> {
    team: &'a Shared,
    chunks: Chunks,
    /// Chunks that nobody has said to be done.
    left: Padded<AtomicUsize>,
    /// Whether none is left, where waiters do not stand in the way of those who count.
    is_over: Padded<AtomicBool>,
}

/// One member's part in a phase.
pub struct Turn<'a> {
    phase: &'a Phase<'a>,
    claimed: usize,
}

impl<'a> Phase<'a> {
    pub(super) fn new(team: &'a Shared, count: usize, grain: usize) -> Self {
        Self {
            team,
            chunks: Chunks::new(count, grain),
            left: Padded(AtomicUsize::new(count.div_ceil(grain))),
            is_over: Padded(AtomicBool::new(count == 0)),
        }
    }

    /// Begins the part of a member, which ends it with [`Turn::finish`].
    pub fn begin(&self) -> Turn<'_> {
        Turn { phase: self, claimed: 0 }
    }
}

impl Turn<'_> {
    /// The next chunk that nobody has yet; the one before is done.
    pub fn claim(&mut self) -> Option<Range<usize>> {
        let chunk = self.phase.chunks.claim()?;
        self.claimed += 1;
        Some(chunk)
    }

    /// Says that this member's chunks are done and returns when all are, by whomever; what was written is then visible.
    ///
    /// # Panics
    /// When another member has panicked, so that its chunk may never be done.
    pub fn finish(self) {
        let Self { phase, claimed } = self;
        // The member that counts to zero has acquired what all others released by counting, and releases it to the
        // waiters.
        if claimed > 0 && phase.left.0.fetch_sub(claimed, Ordering::AcqRel) == claimed {
            phase.is_over.0.store(true, Ordering::Release);
            return;
        }
        let is_over = || phase.is_over.0.load(Ordering::Acquire);
        wait_until(|| is_over() || phase.team.panicked.load(Ordering::Relaxed));
        assert!(is_over(), "another member of the team panicked");
    }
}
