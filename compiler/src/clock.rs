//! Which step is certainly over when another begins: vector clocks over lanes.

use ir::id::{Few, Id as _, StepId, Table};

/// The order that lanes and waits give to steps.
///
/// Steps are numbered so that each comes after everything it depends on.
#[derive(Clone, Debug)]
pub(crate) struct Clocks {
    lanes: usize,
    /// For each step and lane, how many steps of that lane are over when the step is: one row of `lanes` a step.
    over: Vec<u32>,
    lane: Table<StepId, usize>,
    /// Position of each step in its lane.
    position: Table<StepId, u32>,
    /// For each step the waits that lane order and its other waits do not imply.
    pub(crate) waits: Table<StepId, Few<StepId>>,
}

impl Clocks {
    /// Works out clocks and the fewest waits from the lane of each step and the earlier steps it depends on.
    pub(crate) fn new(
        lanes: usize,
        lane: &Table<StepId, usize>,
        after: &Table<StepId, Few<StepId>>,
    ) -> Self {
        let mut clocks = Self {
            lanes,
            over: Vec::with_capacity(lane.len() * lanes),
            lane: lane.clone(),
            position: Table::with_capacity(lane.len()),
            waits: Table::with_capacity(lane.len()),
        };
        // The latest step of each lane.
        let mut latest: Vec<Option<StepId>> = vec![None; lanes];
        let (mut clock, mut depends) = (vec![0u32; lanes], Few::new());
        for step in lane.ids() {
            let own = lane[step];
            match latest[own] {
                Some(step) => clock.copy_from_slice(clocks.over(step)),
                None => clock.fill(0),
            }
            // The latest first: what it implies needs no wait of its own.
            depends.clone_from(&after[step]);
            depends.sort_by(|a, b| b.cmp(a));
            let mut waits = Few::new();
            for &on in &depends {
                assert!(on < step, "the scheduler numbered {step} before {on}, which it needs");
                if clock[lane[on]] <= clocks.position[on] {
                    waits.push(on);
                    for (mine, theirs) in clock.iter_mut().zip(clocks.over(on)) {
                        *mine = (*mine).max(*theirs);
                    }
                }
            }
            waits.reverse();
            clocks.position.push(clock[own]);
            clock[own] += 1;
            latest[own] = Some(step);
            clocks.over.extend_from_slice(&clock);
            clocks.waits.push(waits);
        }
        clocks
    }

    /// How many steps of each lane are over when the step is.
    fn over(&self, step: StepId) -> &[u32] {
        &self.over[step.index() * self.lanes..][..self.lanes]
    }

    /// Whether `first` is over before `then` begins, or is the same step.
    pub(crate) fn is_before(&self, first: StepId, then: StepId) -> bool {
        self.over(then)[self.lane[first]] > self.position[first]
    }

    /// The earliest of a lane's steps that begins after all of `steps`. `lane` is in lane order.
    pub(crate) fn first_after(&self, steps: &[StepId], lane: &[StepId]) -> Option<StepId> {
        let is_after = |&step: &StepId| steps.iter().all(|&first| self.is_before(first, step));
        let at = lane.partition_point(|step| !is_after(step));
        lane.get(at).copied()
    }

    /// The lane's index of a step.
    pub(crate) fn lane(&self, step: StepId) -> usize {
        self.lane[step]
    }
}

#[cfg(test)]
mod tests {
    use ir::smallvec;

    use super::*;

    fn step(index: usize) -> StepId {
        StepId::from_index(index)
    }

    #[test]
    fn a_wait_that_another_implies_is_left_out() {
        // Lane 0: s0, s1. Lane 1: s2 after both.
        let lane = [0, 0, 1].into_iter().collect();
        let after = [smallvec![], smallvec![], smallvec![step(0), step(1)]].into_iter().collect();
        let clocks = Clocks::new(2, &lane, &after);
        assert_eq!(*clocks.waits[step(2)], [step(1)]);
        assert!(clocks.is_before(step(0), step(2)));
    }

    #[test]
    fn lanes_are_unordered_without_waits() {
        let lane = [0, 1].into_iter().collect();
        let after = [smallvec![], smallvec![]].into_iter().collect();
        let clocks = Clocks::new(2, &lane, &after);
        assert!(!clocks.is_before(step(0), step(1)));
        assert_eq!(clocks.first_after(&[step(0)], &[step(1)]), None);
    }
}
