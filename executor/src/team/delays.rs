//! How long a thread had to wait for its CPU, because others used it.

use std::fs::File;
use std::io::{Read as _, Seek as _};
use std::time::{Duration, Instant};

/// A run that took less has lost little: shorter than a scheduler's slice, and long beside the few microseconds that
/// looking at the delays takes.
pub(super) const LONG: Duration = Duration::from_micros(500);
/// Delays matter that are this part of the time: kernel threads and interrupts take less.
const PART: u32 = 8;

/// The delays of the thread that made this, as Linux counts them.
pub(super) struct Delays {
    /// `schedstat`: nanoseconds on a CPU, nanoseconds ready to run without one, and slices.
    counts: File,
    total: Duration,
    looked: Instant,
}

impl Delays {
    /// None where the system does not count.
    pub(super) fn of_this_thread() -> Option<Self> {
        let mut counts = File::open("/proc/thread-self/schedstat").ok()?;
        let total = read(&mut counts)?;
        Some(Self { counts, total, looked: Instant::now() })
    }

    /// Whether they were long since the last look.
    pub(super) fn are_long(&mut self) -> bool {
        let since = self.looked.elapsed();
        let delay = self.take();
        delay >= LONG && delay >= since / PART
    }

    /// How long they were since the last look.
    pub(super) fn take(&mut self) -> Duration {
        let total = read(&mut self.counts).unwrap_or(self.total);
        let delay = total.saturating_sub(self.total);
        (self.total, self.looked) = (total, Instant::now());
        delay
    }
}

fn read(counts: &mut File) -> Option<Duration> {
    let mut bytes = [0; 64];
    counts.rewind().ok()?;
    let count = counts.read(&mut bytes).ok()?;
    let text = str::from_utf8(&bytes[..count]).ok()?;
    text.split_ascii_whitespace().nth(1)?.parse().ok().map(Duration::from_nanos)
}
