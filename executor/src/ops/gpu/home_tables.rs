//! Tables at home on NUMA nodes whose rows GPUs look up where they lie.
//!
//! - A table lies as GPUs hold one, in pinned memory of its home: nothing else uses it, as the checker proves.
//! - The first GPU that comes to a table reads it, for all.
//! - Devices in software know no addresses: each has a copy.

#![expect(unsafe_code, reason = "GPUs reach tables by address")]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};

use anyhow::{Context as _, Result};
use cudarc::driver::CudaContext;
use ir::id::WeightId;
use ir::plan::Plan;
use rayon::prelude::*;

use super::weights::{Read, layout_of};
use crate::checkpoint::{Checkpoint, matrices};
use crate::kernels::cpu::pack::PANEL;
use crate::kernels::gpu::matrix::Layout;
use crate::kernels::gpu::rows::Reached;
use crate::locked;
use crate::memory::Region;
use crate::ops::own::weight_dims;
use crate::pinned::Pinned;

/// The tables of a plan that GPUs reach, as their lanes read them.
#[derive(Default)]
pub(crate) struct HomeTables(Mutex<BTreeMap<WeightId, Arc<HomeTable>>>);

/// A table.
pub(super) struct HomeTable {
    reached: Reached,
    /// Keeps it where it is.
    _pinned: Pinned,
}

impl HomeTables {
    /// A table, as the GPUs of CUDA reach it; and whether it has been read now, through the GPU of that ordinal.
    ///
    /// # Errors
    /// When it cannot be read, or there is no memory, or none that can be pinned.
    pub(super) fn get(
        &self,
        plan: &Plan,
        id: WeightId,
        ordinal: usize,
        checkpoint: &Checkpoint,
    ) -> Result<(Arc<HomeTable>, bool)> {
        // Others wait until it is there.
        let mut tables = locked(&self.0);
        if let Some(table) = tables.get(&id) {
            return Ok((Arc::clone(table), false));
        }
        let table = Arc::new(HomeTable::read(plan, id, ordinal, checkpoint)?);
        tables.insert(id, Arc::clone(&table));
        Ok((table, true))
    }
}

impl HomeTable {
    fn read(plan: &Plan, id: WeightId, ordinal: usize, checkpoint: &Checkpoint) -> Result<Self> {
        let weight = &plan.weights[id];
        let (rows, columns) = weight_dims(weight);
        let (format, layout) = (weight.format, layout_of(weight));
        let home = &plan.machine.devices[weight.device].kind;
        let mut region = Region::near(layout.bytes(format, rows, columns)?, Some(home))?;
        let sources = matrices(weight)?;
        let source = sources.first().context("it has no source")?;
        let failed = OnceLock::new();
        let read = Read::new(checkpoint.matrix(source, rows, columns)?, format, columns, &failed);
        let panel_bytes = match layout {
            Layout::RowMajor => PANEL * region.bytes() / rows,
            Layout::Panels => read.panel_bytes(),
        };
        let panels = region.as_mut_slice::<u8>().par_chunks_mut(panel_bytes).enumerate();
        panels.for_each(|(panel, bytes)| {
            let its_rows = panel * PANEL..rows.min((panel + 1) * PANEL);
            match layout {
                Layout::RowMajor => read.rows(its_rows, bytes),
                Layout::Panels => read.panels(its_rows, bytes),
            }
        });
        drop(read);
        failed.into_inner().map_or(Ok(()), Err)?;
        let context = CudaContext::new(ordinal).context("opening the GPU's context")?;
        let pinned = Pinned::alone(&context, &Arc::new(region)).with_context(|| {
            format!(
                "pinning {}, in which GPUs look rows up: compile with --pin for its layer and a NUMA node",
                weight.name
            )
        })?;
        // SAFETY: the table lies there, pinned for as long as this has it, and nobody writes it any more.
        let reached = unsafe { Reached::new(pinned.address(), (format, layout), rows, columns) };
        Ok(Self { reached, _pinned: pinned })
    }

    /// How GPUs reach it.
    pub(super) fn reached(&self) -> &Reached {
        &self.reached
    }
}
