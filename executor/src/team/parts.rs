//! Parts of a run's work that other work follows, part by part.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::{Shared, wait_until};

/// Parts of the work of a run, each of some tasks, that other work follows: no member waits for parts that it does not
/// need.
pub struct Parts<'a> {
    team: &'a Shared,
    /// Tasks of each part that are not done, and one more until what follows is done, too.
    left: Vec<AtomicUsize>,
}

impl<'a> Parts<'a> {
    pub(super) fn new(team: &'a Shared, count: usize, tasks: usize) -> Self {
        Self { team, left: (0..count).map(|_| AtomicUsize::new(tasks + 1)).collect() }
    }

    /// Notes that a task of a part is done. Whether it was the last one: then what all of them wrote is visible, and
    /// the caller does what follows.
    pub fn finish_task(&self, part: usize) -> bool {
        self.left[part].fetch_sub(1, Ordering::AcqRel) == 2
    }

    /// Lets members that wait for a part go on; called by the one that has done what follows the part's last task.
    pub fn open(&self, part: usize) {
        self.left[part].store(0, Ordering::Release);
    }

    /// Returns when a part is open; what was written before is then visible.
    ///
    /// # Panics
    /// When another member has panicked, so that the part may never be open.
    pub fn wait(&self, part: usize) {
        let is_open = || self.left[part].load(Ordering::Acquire) == 0;
        wait_until(|| is_open() || self.team.panicked.load(Ordering::Relaxed));
        assert!(is_open(), "another member of the team panicked");
    }
}
