//! Signs of life of an executor's lanes, which tell a device that never answers from work that takes long.
//!
//! - What processors do ends, however long it takes: nobody is given up while one of them works.
//! - All else that takes lanes long is to wait for devices. A lane that leaves a run gives a sign of life, since others
//!   may have waited for the same device before.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::locked;

/// What is known of the lanes of one executor.
#[derive(Default)]
pub(crate) struct Pulse {
    /// Lanes whose processors work.
    at_work: AtomicUsize,
    /// When a lane last gave a sign.
    latest: Mutex<Option<Instant>>,
}

/// Work of processors, which ends when this is dropped, even by a panic.
pub(crate) struct Work<'a> {
    pulse: &'a Pulse,
}

impl Pulse {
    /// Processors of the calling lane begin to work: on a run, on what is loaded, or on what is given back.
    pub(crate) fn work(&self) -> Work<'_> {
        self.at_work.fetch_add(1, Ordering::SeqCst);
        Work { pulse: self }
    }

    /// A lane gives a sign of life.
    pub(crate) fn beat(&self) {
        *locked(&self.latest) = Some(Instant::now());
    }

    /// Whether no processor works, and no lane has given a sign for longer than `patience`, which begins at `since` or
    /// later.
    pub(crate) fn is_silent(&self, since: Instant, patience: Duration) -> bool {
        if self.at_work.load(Ordering::SeqCst) > 0 {
            return false;
        }
        let latest = *locked(&self.latest);
        latest.map_or(since, |latest| latest.max(since)).elapsed() > patience
    }
}

impl Drop for Work<'_> {
    fn drop(&mut self) {
        // First of all, so that who sees nobody at work sees the sign.
        self.pulse.beat();
        self.pulse.at_work.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    fn long_ago() -> Instant {
        Instant::now().checked_sub(2 * PATIENCE).unwrap()
    }

    #[test]
    fn nobody_is_silent_while_a_processor_works() {
        let pulse = Pulse::default();
        assert!(pulse.is_silent(long_ago(), PATIENCE));
        let (first, second) = (pulse.work(), pulse.work());
        drop(first);
        *locked(&pulse.latest) = Some(long_ago());
        assert!(!pulse.is_silent(long_ago(), PATIENCE));
        // Its end is a sign of life.
        drop(second);
        assert!(!pulse.is_silent(long_ago(), PATIENCE));
    }

    #[test]
    fn patience_begins_with_the_last_sign_and_not_before_it_is_asked_for() {
        let pulse = Pulse::default();
        pulse.beat();
        assert!(!pulse.is_silent(long_ago(), PATIENCE));
        *locked(&pulse.latest) = Some(long_ago());
        assert!(pulse.is_silent(long_ago(), PATIENCE));
        assert!(!pulse.is_silent(Instant::now(), PATIENCE));
    }
}
