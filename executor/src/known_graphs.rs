//! For which kinds of runs launches are captured, and which of these make room for others.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard};

use crate::locked;
use crate::ops::gpu::GraphKey;

/// Kinds of runs that are captured, as few as their memory is counted for.
pub(crate) struct KnownGraphs {
    /// The most that are captured at one time.
    most: usize,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    /// Kinds of which a run has ended well.
    met: BTreeSet<GraphKey>,
    /// Kinds whose launches lanes hold, or will before they come to the next run; the least recently used first.
    held: Vec<Held>,
}

#[derive(Clone, Copy)]
struct Held {
    key: GraphKey,
    /// Whether the run that captures it has ended well.
    is_captured: bool,
}

/// What a run does about captured launches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Admission {
    /// Whether its launches are captured.
    pub(crate) captures: bool,
    /// The kind whose launches are dropped for that.
    pub(crate) replaces: Option<GraphKey>,
}

impl KnownGraphs {
    /// None yet, and never more than `most` captured at one time.
    pub(crate) fn new(most: usize) -> Self {
        Self { most, known: Mutex::default() }
    }

    /// Lets in a run whose launches can be captured, in the order in which lanes work through runs. A decode is
    /// captured at once, a prompt when it comes the second time, since many lengths are met only once.
    pub(crate) fn admit(&self, key: GraphKey, is_decode: bool) -> Admission {
        let mut known = self.lock();
        if let Some(position) = known.held.iter().position(|held| held.key == key) {
            let held = known.held.remove(position);
            known.held.push(held);
            return Admission { captures: !held.is_captured, replaces: None };
        }
        if self.most == 0 || !is_decode && !known.met.contains(&key) {
            return Admission::default();
        }
        let is_full = known.held.len() >= self.most;
        let replaces = is_full.then(|| known.held.remove(0).key);
        known.held.push(Held { key, is_captured: false });
        Admission { captures: true, replaces }
    }

    /// A run that was let in has ended well.
    pub(crate) fn note_end(&self, key: GraphKey, has_captured: bool) {
        let mut known = self.lock();
        known.met.insert(key);
        if let Some(held) = known.held.iter_mut().find(|held| held.key == key) {
            held.is_captured |= has_captured;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        locked(&self.known)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::Batch;

    fn key(program: usize, tokens: usize) -> GraphKey {
        let mut batch = Batch::default();
        batch.push(&vec![0; tokens], 0, tokens, &[0, 1, 2, 3, 4, 5, 6, 7], false);
        GraphKey::of(program, &batch)
    }

    const REPLAYS: Admission = Admission { captures: false, replaces: None };
    const CAPTURES: Admission = Admission { captures: true, replaces: None };

    #[test]
    fn decodes_are_captured_at_once_and_prompts_when_they_come_again() {
        let known = KnownGraphs::new(8);
        assert_eq!(known.admit(key(1, 1), true), CAPTURES);
        assert_eq!(known.admit(key(0, 20), false), REPLAYS);
        // A run that did not end well says nothing of its kind, and its capture is made by the next.
        assert_eq!(known.admit(key(0, 20), false), REPLAYS);
        assert_eq!(known.admit(key(1, 1), true), CAPTURES);
        known.note_end(key(1, 1), true);
        known.note_end(key(0, 20), false);
        assert_eq!(known.admit(key(1, 1), true), REPLAYS);
        assert_eq!(known.admit(key(0, 20), false), CAPTURES);
        known.note_end(key(0, 20), true);
        assert_eq!(known.admit(key(0, 20), false), REPLAYS);
    }

    #[test]
    fn the_least_recently_used_makes_room() {
        let known = KnownGraphs::new(2);
        let [first, second, third] = [1, 2, 3].map(|program| key(program, 1));
        for key in [first, second] {
            assert_eq!(known.admit(key, true), CAPTURES);
            known.note_end(key, true);
        }
        assert_eq!(known.admit(first, true), REPLAYS);
        let replaces = |key| Admission { captures: true, replaces: Some(key) };
        assert_eq!(known.admit(third, true), replaces(second));
        // The end of a run that was let in before its kind was dropped brings nothing back.
        known.note_end(second, true);
        assert_eq!(known.admit(second, true), replaces(first));
        assert_eq!(known.lock().held.len(), 2);
    }

    #[test]
    fn where_there_is_memory_for_none_none_is_captured() {
        let known = KnownGraphs::new(0);
        assert_eq!(known.admit(key(1, 1), true), REPLAYS);
        known.note_end(key(1, 1), false);
        assert_eq!(known.admit(key(1, 1), true), REPLAYS);
    }
}
