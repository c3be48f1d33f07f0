//! Cosines and sines of the tokens of one run: worked out by the first layer that needs them, kept for the others.

use std::collections::BTreeMap;

use ir::id::RopeId;

use crate::kernels::cpu::rope::{RopeView, rope_table};
use crate::ops::Scope;
use crate::team::Team;

/// Tables of the latest run.
#[derive(Default)]
pub(crate) struct Rotations {
    run: Option<u32>,
    /// `[tokens, dims]`; empty where it has not been needed in this run.
    tables: BTreeMap<RopeId, Vec<f32>>,
}

impl Rotations {
    /// The rotations of a run's tokens.
    pub(super) fn view(&mut self, id: RopeId, team: &Team, scope: Scope<'_>) -> RopeView<'_> {
        if self.run != Some(scope.run) {
            self.tables.values_mut().for_each(Vec::clear);
            self.run = Some(scope.run);
        }
        let rope = &scope.plan.ropes[id];
        let dims = rope.dims as usize;
        let table = self.tables.entry(id).or_default();
        if table.is_empty() {
            let positions = scope.batch.positions();
            table.resize(positions.len() * dims, 0.0);
            let mut fill = |tokens: std::ops::Range<usize>, length: usize| {
                let frequencies = rope.frequencies.at(rope.dims, length as u32);
                let rows = &mut table[tokens.start * dims..tokens.end * dims];
                rope_table(team, &positions[tokens], &frequencies, rope.magnitude, rows);
            };
            if rope.frequencies.follow_length() {
                for part in scope.batch.parts() {
                    fill(part.first_token..part.first_token + part.tokens, part.rope_length);
                }
            } else {
                fill(0..positions.len(), 0);
            }
        }
        RopeView { pairing: rope.pairing, dims, table }
    }
}
