//! The placed graphs of a model: one for all programs, or one for each phase over the same weights and caches.

use anyhow::Result;
use ir::graph::PlacedGraph;
use ir::model::Model;
use ir::plan::Phase;

use crate::place::Layouts;
use crate::{Observer, PLACED_PASSES, insert_moves, run_all};

/// What programs are scheduled from.
#[derive(Clone, Debug)]
pub(crate) struct Graphs {
    /// For prefill, and for decode where that has none of its own.
    prefill: PlacedGraph,
    /// For decode where its placement differs.
    decode: Option<PlacedGraph>,
    /// Bytes of the window that each GPU fetches weights to.
    pub(crate) window_bytes: u64,
}

impl Graphs {
    /// Makes movement explicit in each phase.
    pub(crate) fn new(model: &Model, layouts: &Layouts, observe: Observer<'_>) -> Result<Self> {
        let mut graph = |nodes| {
            let graph = insert_moves(&model.layers, nodes)?;
            observe("insert_moves", &graph);
            run_all(PLACED_PASSES, graph, observe)
        };
        Ok(Self {
            prefill: graph(&layouts.prefill)?,
            decode: layouts.decode.as_ref().map(graph).transpose()?,
            window_bytes: layouts.window_bytes,
        })
    }

    /// The graph of a phase.
    pub(crate) fn of(&self, phase: Phase) -> &PlacedGraph {
        match phase {
            Phase::Prefill => &self.prefill,
            Phase::Decode => self.decode.as_ref().unwrap_or(&self.prefill),
        }
    }

    /// Each graph once.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &PlacedGraph> {
        [&self.prefill].into_iter().chain(&self.decode)
    }
}
