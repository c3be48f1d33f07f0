//! Where the buffers of a GPU's compute lane lie: places in one stretch of memory, decided before the first run.
//!
//! - A buffer keeps its place in every run, so that captured launches find it.
//! - Lanes of processors never see a place: what they read is copied to the host by the step that writes it. So a place
//!   is free again after its last use by this device, whenever other devices are done.
//! - A sum over GPUs that a linear may make by itself has a place apart from what the linear reads, and what is made of
//!   such a sum at once has one apart from the terms.
//! - What is moved to another GPU keeps its place to the end of the run: that GPU reads it where it lies.
//! - Fetched weights lie in a window of their own, where the plan says.

use std::collections::BTreeSet;

use crate::id::{BufferId, DeviceId, Id as _, StepId, Table};
use crate::plan::{Action, Lane, Plan, Program, Queue, Step};
use crate::workspace::aligned;

/// Places of one program's buffers on one device.
#[derive(Debug, Default)]
pub struct Frame {
    places: Table<BufferId, Option<Place>>,
    fetched: Table<BufferId, Option<Place>>,
    bytes: u64,
}

/// Where a buffer lies, at its largest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Of its first byte.
    pub start: u64,
    /// Its length.
    pub bytes: u64,
}

impl Frame {
    /// Decides all places.
    pub fn new(plan: &Plan, program: &Program, device: DeviceId) -> Self {
        let nowhere = || program.buffers.ids().map(|_| None).collect();
        let mut frame = Self { places: nowhere(), fetched: nowhere(), bytes: 0 };
        for step in program.steps.rows() {
            if let (Action::Fetch { offset, .. }, &[buffer]) = (&step.action, &*step.writes)
                && program.buffers.get(buffer).is_some_and(|buffer| buffer.device == device)
            {
                let place = Place { start: *offset, bytes: bytes(program, buffer) };
                frame.fetched.rows_mut()[buffer.index()] = Some(place);
            }
        }
        let is_ours = |lane: &&Lane| lane.device == device && lane.queue == Queue::Compute;
        let lanes = program.lanes.iter().filter(is_ours);
        let ids: Vec<StepId> = lanes.flat_map(|lane| &lane.steps).copied().collect();
        let join = |position: usize| {
            plan.may_join_sum(program, &ids, position) || plan.may_join_add(program, &ids, position)
        };
        let step = |(position, &id)| Some((program.steps.get(id)?, join(position)));
        let steps: Vec<(&Step, bool)> = ids.iter().enumerate().filter_map(step).collect();
        let moved = program.steps.rows().iter().flat_map(|step| plan.peer_moved(program, step));
        let ours = moved.filter(|(_, from)| *from == device);
        let kept: BTreeSet<BufferId> = ours.map(|(buffer, _)| buffer).collect();
        frame.place_all(program, &steps, &kept);
        frame
    }

    /// Bytes of the stretch.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Where a buffer lies in the stretch; `None` where it does not.
    pub fn place(&self, buffer: BufferId) -> Option<Place> {
        self.places.get(buffer).copied().flatten()
    }

    /// Where a fetched weight lies in the window; `None` where it is not one.
    pub fn fetched(&self, buffer: BufferId) -> Option<Place> {
        self.fetched.get(buffer).copied().flatten()
    }

    /// Places what steps write, each given with whether it may write what the next one does.
    fn place_all(&mut self, program: &Program, steps: &[(&Step, bool)], kept: &BTreeSet<BufferId>) {
        let mut last_uses: Table<BufferId, usize> = program.buffers.ids().map(|_| 0).collect();
        for (position, (step, is_joined)) in steps.iter().enumerate() {
            for buffer in step.reads.iter().chain(&step.writes) {
                if let Some(last) = last_uses.rows_mut().get_mut(buffer.index()) {
                    *last = (*last).max(position + usize::from(*is_joined));
                }
            }
        }
        let mut free = Free::default();
        let mut joined: &[BufferId] = &[];
        for (position, (step, is_joined)) in steps.iter().enumerate() {
            for &buffer in &step.writes {
                if let Some(place) = self.places.rows_mut().get_mut(buffer.index()) {
                    *place = Some(free.take(bytes(program, buffer)));
                }
            }
            let used = step.reads.iter().chain(&step.writes).chain(joined);
            let mut used: Vec<BufferId> = used.copied().collect();
            joined = if *is_joined { &step.reads } else { &[] };
            used.sort_unstable();
            used.dedup();
            for buffer in used {
                if last_uses.get(buffer) == Some(&position) && !kept.contains(&buffer) {
                    // What other lanes wrote has no place here.
                    self.place(buffer).into_iter().for_each(|place| free.give_back(place));
                }
            }
        }
        self.bytes = free.end;
    }
}

fn bytes(program: &Program, buffer: BufferId) -> u64 {
    program.buffers.get(buffer).map_or(0, |buffer| buffer.ty.bytes(program.max))
}

/// Gaps of a stretch that grows at its end.
#[derive(Default)]
struct Free {
    /// Start and size of each, in order, none next to another.
    gaps: Vec<(u64, u64)>,
    end: u64,
}

impl Free {
    /// The smallest gap that is large enough, or new memory at the end.
    fn take(&mut self, bytes: u64) -> Place {
        let size = aligned(bytes.max(1));
        let fits = self.gaps.iter().enumerate().filter(|(_, gap)| gap.1 >= size);
        if let Some((at, &(start, gap))) = fits.min_by_key(|(_, gap)| gap.1) {
            if gap == size {
                self.gaps.remove(at);
            } else {
                self.gaps[at] = (start.saturating_add(size), gap - size);
            }
            return Place { start, bytes: size };
        }
        // A gap at the end grows to what is needed.
        let start = match self.gaps.last() {
            Some(&(start, gap)) if start.saturating_add(gap) == self.end => {
                self.gaps.pop();
                start
            }
            _ => self.end,
        };
        self.end = start.saturating_add(size);
        Place { start, bytes: size }
    }

    fn give_back(&mut self, place: Place) {
        let at = self.gaps.partition_point(|gap| gap.0 < place.start);
        self.gaps.insert(at, (place.start, place.bytes));
        let ends_at = |gap: (u64, u64)| gap.0.saturating_add(gap.1);
        if at + 1 < self.gaps.len() && ends_at(self.gaps[at]) == self.gaps[at + 1].0 {
            self.gaps[at].1 += self.gaps.remove(at + 1).1;
        }
        if at > 0 && ends_at(self.gaps[at - 1]) == self.gaps[at].0 {
            self.gaps[at - 1].1 += self.gaps.remove(at).1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::WORKSPACE_ALIGNMENT;

    #[test]
    fn gaps_are_joined_and_used_again() {
        let unit = WORKSPACE_ALIGNMENT;
        let mut free = Free::default();
        let places: Vec<Place> = (0..4).map(|_| free.take(unit)).collect();
        assert_eq!(free.end, 4 * unit);
        free.give_back(places[2]);
        free.give_back(places[1]);
        assert_eq!(free.gaps, [(unit, 2 * unit)]);
        assert_eq!(free.take(2 * unit - 1).start, unit);
        free.give_back(places[3]);
        // The gap at the end grows.
        assert_eq!(free.take(3 * unit).start, 3 * unit);
        assert_eq!(free.end, 6 * unit);
    }
}
