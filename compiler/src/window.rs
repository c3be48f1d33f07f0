//! The fetch window of one GPU: where fetched weights lie, and what must be over before one is fetched over another.
//!
//! - The weights of one node lie side by side, in the order they are fetched; nodes follow each other as in a ring.
//! - A weight lies over another only when the step that reads the other is known.

use ir::id::StepId;
use ir::plan::FETCH_ALIGNMENT;

/// The window while fetches are being scheduled.
#[derive(Clone, Debug)]
pub(crate) struct Window {
    bytes: u64,
    /// Where the next weight goes.
    next: u64,
    /// What lies in the window, the oldest first.
    taken: Vec<Taken>,
}

#[derive(Clone, Copy, Debug)]
struct Taken {
    start: u64,
    end: u64,
    /// The step that reads it and frees it, once it is known.
    reader: Option<StepId>,
}

/// Bytes that a weight takes in a window.
pub(crate) fn aligned(bytes: u64) -> u64 {
    bytes.next_multiple_of(FETCH_ALIGNMENT)
}

impl Window {
    /// An empty window.
    pub(crate) fn new(bytes: u64) -> Self {
        Self { bytes, next: 0, taken: Vec::new() }
    }

    /// Begins the weights of a node, which take `bytes` together.
    pub(crate) fn begin(&mut self, bytes: u64) {
        assert!(bytes <= self.bytes, "place made a window smaller than one node's weights");
        if self.next + bytes > self.bytes {
            self.next = 0;
        }
    }

    /// Where the next weight goes, and the step after which it may be fetched there.
    ///
    /// `None` while a weight lies there whose reader is not scheduled yet.
    pub(crate) fn place(&mut self, bytes: u64) -> Option<(u64, Option<StepId>)> {
        let (start, end) = (self.next, self.next + aligned(bytes));
        let overlaps = |taken: &Taken| taken.start < end && start < taken.end;
        let below: Vec<Taken> = self.taken.iter().copied().filter(overlaps).collect();
        if below.iter().any(|taken| taken.reader.is_none()) {
            return None;
        }
        self.taken.retain(|taken| !overlaps(taken));
        self.taken.push(Taken { start, end, reader: None });
        self.next = end;
        Some((start, below.iter().filter_map(|taken| taken.reader).max()))
    }

    /// Notes that `reader` reads, and so frees, everything that lies in the window without a reader and that was
    /// placed first: `count` weights.
    pub(crate) fn read(&mut self, count: usize, reader: StepId) {
        let waiting = self.taken.iter_mut().filter(|taken| taken.reader.is_none());
        waiting.take(count).for_each(|taken| taken.reader = Some(reader));
    }
}

#[cfg(test)]
mod tests {
    use ir::id::Id as _;

    use super::*;

    fn step(index: usize) -> StepId {
        StepId::from_index(index)
    }

    #[test]
    fn a_weight_waits_for_the_reader_of_what_it_lies_over() {
        let mut window = Window::new(1024);
        window.begin(1024);
        assert_eq!(window.place(512), Some((0, None)));
        assert_eq!(window.place(512), Some((512, None)));
        window.begin(512);
        assert_eq!(window.place(512), None);
        window.read(2, step(7));
        assert_eq!(window.place(512), Some((0, Some(step(7)))));
    }

    #[test]
    fn the_weights_of_a_node_are_not_torn_apart() {
        let mut window = Window::new(1024);
        window.begin(768);
        assert_eq!(window.place(768), Some((0, None)));
        window.read(1, step(0));
        window.begin(512);
        assert_eq!(window.place(200), Some((0, Some(step(0)))));
        assert_eq!(window.place(256), Some((256, None)));
    }
}
