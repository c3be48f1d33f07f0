//! Cosines and sines for rotary embeddings, in device memory.
//!
//! - Frequencies that are the same for every sequence have a table of all positions, made when the plan is loaded.
//! - Those that follow the length of a sequence have a table of a run's tokens, made for each run.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result};
use ir::id::{DeviceId, RopeId};
use ir::op::Rope;
use ir::plan::{Action, Plan};
use ir::workspace::rotation_rows;

use super::inputs::Inputs;
use super::memory::Memory;
use crate::kernels::cpu::rope::rope_row;
use crate::kernels::gpu::attention::append::Rotation;
use crate::kernels::gpu::device::{Gpu, Span};
use crate::ops::Scope;

/// The table of every rotary embedding that a device's steps use.
pub(super) struct Rotations {
    tables: BTreeMap<RopeId, Table>,
}

struct Table {
    rope: Rope,
    /// f32 `[rows, dims]`: of each row the cosines, then the sines.
    span: Span,
    rows: usize,
}

impl Rotations {
    /// Makes the tables of all positions and takes the memory of the others.
    pub(super) fn new(
        plan: &Plan,
        device: DeviceId,
        gpu: &Gpu,
        memory: &mut Memory,
    ) -> Result<Self> {
        let mut tables = BTreeMap::new();
        for id in used(plan, device) {
            let rope = plan.ropes[id].clone();
            let is_per_run = rope.frequencies.follow_length();
            let rows = rotation_rows(plan, id) as usize;
            let span = memory.take(rows * rope.dims as usize * size_of::<f32>())?;
            if !is_per_run {
                let mut values = Vec::with_capacity(rows * rope.dims as usize);
                fill(&rope, 0..rows as u32, 0, &mut values);
                gpu.write(&span, bytemuck::cast_slice(&values))?;
            }
            tables.insert(id, Table { rope, span, rows });
        }
        Ok(Self { tables })
    }

    /// Makes the tables that follow the lengths of a run's sequences.
    pub(super) fn fill(&self, gpu: &Gpu, scope: Scope<'_>) -> Result<()> {
        for table in self.tables.values().filter(|table| table.rope.frequencies.follow_length()) {
            let mut values = Vec::new();
            for part in scope.batch.parts() {
                let positions = part.past as u32..(part.past + part.tokens) as u32;
                fill(&table.rope, positions, part.rope_length as u32, &mut values);
            }
            gpu.write(&table.span, bytemuck::cast_slice(&values))?;
        }
        Ok(())
    }

    /// The rotation of a run's tokens, handed to `with`.
    pub(super) fn with<T>(
        &self,
        id: RopeId,
        inputs: &Inputs,
        with: impl FnOnce(Rotation<'_>) -> T,
    ) -> Result<T> {
        let table = self.tables.get(&id).with_context(|| format!("{id} has no table here"))?;
        let is_per_run = table.rope.frequencies.follow_length();
        let rows = if is_per_run { inputs.counting() } else { inputs.position() };
        Ok(with(Rotation {
            pairing: table.rope.pairing,
            dims: table.rope.dims,
            table: &table.span,
            table_rows: table.rows,
            rows: &rows,
        }))
    }
}

/// The rotary embeddings that a device's steps apply.
fn used(plan: &Plan, device: DeviceId) -> BTreeSet<RopeId> {
    let programs = plan.programs.iter();
    let steps = programs.flat_map(|program| {
        let lanes = program.lanes.iter().filter(|lane| lane.device == device);
        lanes.flat_map(|lane| &lane.steps).map(|&id| &program.steps[id].action)
    });
    steps.filter_map(|action| if let Action::Run(op) = action { op.rope() } else { None }).collect()
}

/// Appends the rows of positions for a sequence of `length` tokens.
fn fill(rope: &Rope, positions: std::ops::Range<u32>, length: u32, values: &mut Vec<f32>) {
    let frequencies = rope.frequencies.at(rope.dims, length);
    for position in positions {
        let start = values.len();
        values.resize(start + 2 * frequencies.len(), 0.0);
        rope_row(position, &frequencies, rope.magnitude, &mut values[start..]);
    }
}
