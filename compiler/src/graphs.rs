//! The placed graphs of a model: one for all programs, or one for each phase over the same weights and caches.

use std::collections::HashSet;

use anyhow::Result;
use ir::graph::PlacedGraph;
use ir::id::{DeviceId, Table};
use ir::plan::Phase;

use crate::part::WeightKey;
use crate::place::Layouts;
use crate::reach::reach_tables;
use crate::task::Task;
use crate::{Observer, PLACED_PASSES, insert_moves, run_all};

/// One of something for each phase.
#[derive(Clone, Debug, Default)]
pub(crate) struct Phases<T> {
    /// For prefill, and for decode where that has none of its own.
    pub(crate) prefill: T,
    /// For decode where it differs.
    pub(crate) decode: Option<T>,
}

/// What programs are scheduled from.
#[derive(Clone, Debug)]
pub(crate) struct Graphs {
    /// Placed work with its movement.
    pub(crate) placed: Phases<PlacedGraph>,
    /// Bytes of the window that each GPU fetches weights to.
    pub(crate) window_bytes: Table<DeviceId, u64>,
    /// What GPUs hold unpacked as well.
    pub(crate) unpacked: HashSet<WeightKey>,
}

impl<T> Phases<T> {
    /// That of a phase.
    pub(crate) fn of(&self, phase: Phase) -> &T {
        match phase {
            Phase::Prefill => &self.prefill,
            Phase::Decode => self.decode.as_ref().unwrap_or(&self.prefill),
        }
    }

    /// Another thing for each.
    pub(crate) fn try_map<U>(self, mut make: impl FnMut(T) -> Result<U>) -> Result<Phases<U>> {
        Ok(Phases { prefill: make(self.prefill)?, decode: self.decode.map(make).transpose()? })
    }

    /// Each where it is.
    pub(crate) fn as_ref(&self) -> Phases<&T> {
        Phases { prefill: &self.prefill, decode: self.decode.as_ref() }
    }

    /// Each once.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        [&mut self.prefill].into_iter().chain(&mut self.decode)
    }
}

impl Graphs {
    /// Makes movement explicit in each phase.
    pub(crate) fn new(task: &Task<'_>, layouts: Layouts, observe: Observer<'_>) -> Result<Self> {
        let Layouts { mut nodes, window_bytes } = layouts;
        reach_tables(task, &mut nodes);
        let placed = nodes.try_map(|nodes| {
            let graph = insert_moves(&task.model.layers, nodes)?;
            observe("insert_moves", &graph);
            run_all(PLACED_PASSES, graph, observe)
        })?;
        Ok(Self { placed, window_bytes, unpacked: HashSet::new() })
    }
}
