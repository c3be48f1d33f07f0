//! What a worker and the caller agree on: which run the worker is inside, and whether it has to be woken.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// One worker's seat.
///
/// `turn` is `2 · run` while the worker is inside a run, and `2 · run + 1` when that run is over for it, because it has
/// left or because the caller has closed the run before it came. It only grows, and both sides change it by comparison,
/// so one of `enter` and `close` wins.
pub(super) struct Seat {
    turn: AtomicU64,
    rest: AtomicU8,
}

/// What a worker does that is inside no run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rest {
    /// It looks for runs by itself.
    Awake,
    /// It sleeps until it is woken.
    Parked,
    /// It leaves its CPU to others, and is woken only for a run that needs all.
    Away,
}

impl Default for Seat {
    fn default() -> Self {
        Self { turn: AtomicU64::new(over(0)), rest: AtomicU8::new(Rest::Awake as u8) }
    }
}

impl Seat {
    /// Lets the worker into a run whose epoch it has seen; false when the caller has closed that.
    pub(super) fn enter(&self, run: u64) -> bool {
        // Relaxed: the epoch has brought the run's work, and the caller reads what `leave` releases.
        let before = self.turn.load(Ordering::Relaxed);
        before < inside(run)
            && self
                .turn
                .compare_exchange(before, inside(run), Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
    }

    /// Ends the worker's part in a run; what it has done is visible to a caller that sees it.
    pub(super) fn leave(&self, run: u64) {
        self.turn.store(over(run), Ordering::Release);
    }

    /// Keeps the worker out of a run unless it is inside, by the caller; whether the run is over for it.
    pub(super) fn close(&self, run: u64) -> bool {
        // Acquires what the worker released when it left this run, or the one that it was inside before.
        let before = self.turn.load(Ordering::Acquire);
        before == over(run)
            || (before < inside(run)
                && self
                    .turn
                    .compare_exchange(before, over(run), Ordering::Relaxed, Ordering::Relaxed)
                    .is_ok())
    }

    /// Whether the worker has left a run.
    pub(super) fn is_over(&self, run: u64) -> bool {
        self.turn.load(Ordering::Acquire) == over(run)
    }

    /// What the worker does: sequentially consistent, as is the epoch that the caller stores before it looks here.
    pub(super) fn rest(&self) -> Rest {
        match self.rest.load(Ordering::SeqCst) {
            rest if rest == Rest::Parked as u8 => Rest::Parked,
            rest if rest == Rest::Away as u8 => Rest::Away,
            _ => Rest::Awake,
        }
    }

    /// Says what the worker does, by itself before it looks at the epoch for the last time.
    pub(super) fn set_rest(&self, rest: Rest) {
        self.rest.store(rest as u8, Ordering::SeqCst);
    }
}

fn inside(run: u64) -> u64 {
    2 * run
}

fn over(run: u64) -> u64 {
    2 * run + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_entered_or_closed() {
        let seat = Seat::default();
        assert!(seat.enter(1) && !seat.close(1) && !seat.is_over(1));
        seat.leave(1);
        assert!(seat.is_over(1) && seat.close(1));
        assert!(seat.close(2) && !seat.enter(2), "closed before the worker came");
        assert!(seat.close(3) && !seat.enter(2), "a worker that is late by two runs");
        assert!(seat.enter(4), "one that has missed two");
    }
}
