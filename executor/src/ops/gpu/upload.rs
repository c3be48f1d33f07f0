//! Weights on their way to a GPU: converted by all cores into pinned memory, copied while the next are converted.

#![expect(unsafe_code, reason = "pinned memory is filled while other parts of it are copied")]

use std::ops::Range;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, PinnedHostSlice, result};
use rayon::prelude::*;

use super::weights::Read;
use crate::kernels::cpu::pack::PANEL;
use crate::kernels::gpu::device::{ALIGNMENT, Gpu, Span};

/// Bytes that are converted at a time: large against the cost of a copy's start, small against memory.
const STAGE_BYTES: usize = 32 << 20;
/// Bytes that one core converts at a time.
const PIECE_BYTES: usize = 1 << 20;

/// Two stages in turn.
pub(super) struct Upload {
    stages: Option<Stages>,
}

struct Stages {
    stream: Arc<CudaStream>,
    stages: [PinnedHostSlice<u8>; 2],
    /// The end of the copy from each stage.
    copied: [CudaEvent; 2],
    next: usize,
}

impl Upload {
    /// Takes the stages where copies can be made beside the host's work.
    pub(super) fn new(gpu: &Gpu) -> Result<Self> {
        let Some(ordinal) = gpu.ordinal() else { return Ok(Self { stages: None }) };
        let context = CudaContext::new(ordinal).context("opening the GPU's context")?;
        let stream = context.new_stream().context("making a stream for weights")?;
        let stage = || {
            // SAFETY: every byte is written before it is copied.
            unsafe { context.alloc_pinned::<u8>(STAGE_BYTES) }.context("pinning memory for weights")
        };
        let copied = || stream.record_event(None).context("recording an event");
        let (stages, copied) = ([stage()?, stage()?], [copied()?, copied()?]);
        Ok(Self { stages: Some(Stages { stages, copied, stream, next: 0 }) })
    }

    /// Rows of `row_bytes` bytes, in the matrix's format.
    pub(super) fn rows(
        &mut self,
        gpu: &Gpu,
        place: &Span,
        rows: usize,
        row_bytes: usize,
        matrix: &Read<'_>,
    ) -> Result<()> {
        // Pieces begin at aligned places: rows are whole 16 bytes.
        let unit = 16 * (PIECE_BYTES / row_bytes / 16).max(1);
        self.units(gpu, place, rows, unit, row_bytes, &|rows, bytes| matrix.rows(rows, bytes))
    }

    /// The panels of matrices of `rows` rows, one matrix after the other; a panel has 32 rows, the last of a matrix may
    /// lack some.
    pub(super) fn panels(
        &mut self,
        gpu: &Gpu,
        place: &Span,
        rows: usize,
        matrices: &[Read<'_>],
    ) -> Result<()> {
        let panel_bytes = matrices.first().map_or(ALIGNMENT, Read::panel_bytes);
        let of_each = rows.div_ceil(PANEL);
        // After each of this many panels another copy may begin.
        let aligned = (1..=ALIGNMENT).find(|count| (count * panel_bytes).is_multiple_of(ALIGNMENT));
        let aligned = aligned.unwrap_or(ALIGNMENT);
        let unit = aligned * (PIECE_BYTES / 4 / panel_bytes / aligned).max(1);
        let fill = |panels: Range<usize>, bytes: &mut [u8]| {
            for (panel, bytes) in panels.zip(bytes.chunks_mut(panel_bytes)) {
                let first = panel % of_each * PANEL;
                matrices[panel / of_each].panels(first..rows.min(first + PANEL), bytes);
            }
        };
        self.units(gpu, place, matrices.len() * of_each, unit, panel_bytes, &fill)
    }

    /// `count` units of `size` bytes (the last may be shorter), `piece` of them at a time to each core.
    fn units(
        &mut self,
        gpu: &Gpu,
        place: &Span,
        count: usize,
        piece: usize,
        size: usize,
        fill: &(dyn Fn(Range<usize>, &mut [u8]) + Sync),
    ) -> Result<()> {
        let staged = piece * (STAGE_BYTES / (piece * size)).max(1);
        for first in (0..count).step_by(staged) {
            let end = count.min(first + staged);
            let bytes = place.bytes().min(end * size) - first * size;
            let convert = |stage: &mut [u8]| {
                stage.par_chunks_mut(piece * size).enumerate().for_each(|(index, bytes)| {
                    let start = first + index * piece;
                    fill(start..end.min(start + piece), bytes);
                });
            };
            let target = place.part(first * size, bytes);
            match &mut self.stages {
                Some(stages) if bytes <= STAGE_BYTES => stages.copy(&target, convert)?,
                _ => {
                    let mut stage = vec![0; bytes];
                    convert(&mut stage);
                    gpu.write(&target, &stage)?;
                }
            }
        }
        Ok(())
    }

    /// Waits for all copies and gives the stages back.
    pub(super) fn finish(&mut self) -> Result<()> {
        if let Some(stages) = self.stages.take() {
            stages.stream.synchronize().context("copying weights to the GPU")?;
        }
        Ok(())
    }
}

impl Stages {
    fn copy(&mut self, target: &Span, convert: impl Fn(&mut [u8])) -> Result<()> {
        let at = self.next;
        self.next = 1 - at;
        self.copied[at].synchronize().context("copying weights to the GPU")?;
        self.stream.context().bind_to_thread().context("binding the GPU's context")?;
        let stage = self.stages[at].as_mut_slice().context("using pinned memory")?;
        let stage = &mut stage[..target.bytes()];
        convert(stage);
        // SAFETY: the target is as long as the stage's part; the stage is not written again before the event.
        unsafe { result::memcpy_htod_async(target.address()?, stage, self.stream.cu_stream()) }
            .context("copying weights to the GPU")?;
        self.copied[at] = self.stream.record_event(None).context("recording an event")?;
        Ok(())
    }
}
