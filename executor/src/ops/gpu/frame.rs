//! Where the buffers of a GPU's compute lane lie: places in one stretch of memory, decided before the first run.
//!
//! - A buffer keeps its place in every run, so that captured launches find it.
//! - Lanes of other devices never see a place: what they read is copied to the host by the step that writes it.
//!   So a place is free again after its last use by this device, whenever other devices are done.

use ir::id::{BufferId, DeviceId, StepId, Table};
use ir::plan::{Lane, Program, Queue};

use crate::kernels::gpu::device::ALIGNMENT;

/// Places of one program's buffers on one device.
#[derive(Debug, Default)]
pub(super) struct Frame {
    places: Table<BufferId, Option<Place>>,
    /// Bytes of the stretch.
    pub(super) bytes: usize,
}

/// Where a buffer lies, at its largest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) start: usize,
    pub(super) bytes: usize,
}

impl Frame {
    /// Decides all places.
    pub(super) fn new(program: &Program, device: DeviceId) -> Self {
        let mut frame =
            Self { places: program.buffers.ids().map(|_| None).collect(), ..Self::default() };
        let lanes = program.lanes.iter();
        let is_ours = |lane: &&Lane| lane.device == device && lane.queue == Queue::Compute;
        let steps = lanes.filter(is_ours).flat_map(|lane| &lane.steps).copied();
        frame.place_all(program, &steps.collect::<Vec<StepId>>());
        frame
    }

    /// Where a buffer lies; `None` where it is not on this device.
    pub(super) fn place(&self, buffer: BufferId) -> Option<Place> {
        self.places.get(buffer).copied().flatten()
    }

    fn place_all(&mut self, program: &Program, steps: &[StepId]) {
        let mut last_uses: Table<BufferId, usize> = program.buffers.ids().map(|_| 0).collect();
        for (position, &id) in steps.iter().enumerate() {
            let step = &program.steps[id];
            step.reads.iter().chain(&step.writes).for_each(|&buffer| last_uses[buffer] = position);
        }
        let mut free = Free::default();
        for (position, &id) in steps.iter().enumerate() {
            let step = &program.steps[id];
            for &buffer in &step.writes {
                self.places[buffer] = Some(free.take(bytes(program, buffer)));
            }
            let mut ended: Vec<BufferId> = step.reads.iter().chain(&step.writes).copied().collect();
            ended.sort_unstable();
            ended.dedup();
            for buffer in ended.into_iter().filter(|&buffer| last_uses[buffer] == position) {
                // What other lanes wrote has no place here.
                self.places[buffer].into_iter().for_each(|place| free.give_back(place));
            }
        }
        self.bytes = free.end;
    }
}

fn bytes(program: &Program, buffer: BufferId) -> usize {
    program.buffers[buffer].ty.bytes(program.max) as usize
}

/// Gaps of a stretch that grows at its end.
#[derive(Default)]
struct Free {
    /// Start and size of each, in order, none next to another.
    gaps: Vec<(usize, usize)>,
    end: usize,
}

impl Free {
    /// The smallest gap that is large enough, or new memory at the end.
    fn take(&mut self, bytes: usize) -> Place {
        let size = bytes.max(1).next_multiple_of(ALIGNMENT);
        let fits = self.gaps.iter().enumerate().filter(|(_, gap)| gap.1 >= size);
        if let Some((at, &(start, gap))) = fits.min_by_key(|(_, gap)| gap.1) {
            if gap == size {
                self.gaps.remove(at);
            } else {
                self.gaps[at] = (start + size, gap - size);
            }
            return Place { start, bytes: size };
        }
        // A gap at the end grows to what is needed.
        let start = match self.gaps.last() {
            Some(&(start, gap)) if start + gap == self.end => {
                self.gaps.pop();
                start
            }
            _ => self.end,
        };
        self.end = start + size;
        Place { start, bytes: size }
    }

    fn give_back(&mut self, place: Place) {
        let at = self.gaps.partition_point(|gap| gap.0 < place.start);
        self.gaps.insert(at, (place.start, place.bytes));
        if at + 1 < self.gaps.len() && self.gaps[at].0 + self.gaps[at].1 == self.gaps[at + 1].0 {
            self.gaps[at].1 += self.gaps.remove(at + 1).1;
        }
        if at > 0 && self.gaps[at - 1].0 + self.gaps[at - 1].1 == self.gaps[at].0 {
            self.gaps[at - 1].1 += self.gaps.remove(at).1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_joined_and_used_again() {
        let mut free = Free::default();
        let places: Vec<Place> = (0..4).map(|_| free.take(ALIGNMENT)).collect();
        assert_eq!(free.end, 4 * ALIGNMENT);
        free.give_back(places[2]);
        free.give_back(places[1]);
        assert_eq!(free.gaps, [(ALIGNMENT, 2 * ALIGNMENT)]);
        assert_eq!(free.take(2 * ALIGNMENT - 1).start, ALIGNMENT);
        free.give_back(places[3]);
        // The gap at the end grows.
        assert_eq!(free.take(3 * ALIGNMENT).start, 3 * ALIGNMENT);
        assert_eq!(free.end, 6 * ALIGNMENT);
    }
}
