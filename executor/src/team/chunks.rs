//! Chunks of a range that whoever is free claims in turn.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::Padded;

/// Contiguous chunks of `0..count`, claimed by whoever is free.
pub struct Chunks {
    next: Padded<AtomicUsize>,
    count: usize,
    grain: usize,
}

impl Chunks {
    /// Chunks of `grain`, the last one shorter where `grain` does not divide `count`.
    pub fn new(count: usize, grain: usize) -> Self {
        assert!(grain > 0, "a chunk holds something");
        Self { next: Padded(AtomicUsize::new(0)), count, grain }
    }

    /// The next chunk that nobody has yet.
    pub fn claim(&self) -> Option<Range<usize>> {
        let start = self.next.0.fetch_add(self.grain, Ordering::Relaxed);
        (start < self.count).then(|| start..self.count.min(start + self.grain))
    }
}
