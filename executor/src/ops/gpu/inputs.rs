//! What a run is about, in device memory: tokens, positions, sequences, cache blocks, wanted rows and their
//! temperatures, and the run's number.
//!
//! - Every part keeps its place and its largest size, so that captured launches find it in every run. What is copied
//!   ends with the blocks of the last sequence: at a long context those of many would take megabytes.

use anyhow::{Result, ensure};
use ir::plan::Plan;
use ir::workspace::{RunPart, RunSizes};

use super::mail::Mail;
use super::memory::Memory;
use crate::batch::Batch;
use crate::kernels::gpu::attention::{Reach, Tokens};
use crate::kernels::gpu::device::{Gpu, Span};

/// Places of the parts, and what they hold of the run under way.
pub(super) struct Inputs {
    all: Span,
    sizes: RunSizes,
    /// Of the run under way.
    bytes: usize,
    tokens: usize,
    sequences: usize,
    reach: Reach,
}

impl Inputs {
    pub(super) fn new(plan: &Plan, memory: &mut Memory) -> Result<Self> {
        let sizes = RunSizes::of(plan);
        let all = memory.take(sizes.bytes() as usize)?;
        Ok(Self { all, sizes, bytes: 0, tokens: 0, sequences: 0, reach: Reach::Long })
    }

    /// Bytes of all parts.
    pub(super) fn bytes(&self) -> usize {
        self.all.bytes()
    }

    /// Prepares the batch of run `turn` for [`Inputs::queue()`], which without letters has nothing left to do.
    pub(super) fn fill(
        &mut self,
        gpu: &Gpu,
        mail: Option<&mut Mail>,
        batch: &Batch,
        turn: u32,
    ) -> Result<()> {
        let sizes = self.sizes;
        let blocks_start = RunPart::Blocks.start(sizes) as usize / size_of::<i32>();
        let mut words = vec![0_i32; blocks_start + batch.parts().len() * sizes.blocks as usize];
        let mut put = |part: RunPart, values: &mut dyn Iterator<Item = i32>| {
            let start = part.start(sizes) as usize / size_of::<i32>();
            let end = (start + part.count(sizes) as usize).min(words.len());
            words[start..end].iter_mut().zip(values).for_each(|(place, value)| *place = value);
        };
        let number = |value: &u32| value.cast_signed();
        put(RunPart::Token, &mut batch.tokens().iter().map(number));
        put(RunPart::Position, &mut batch.positions().iter().map(number));
        put(RunPart::Wanted, &mut batch.rows().iter().map(number));
        let inverse_temperatures = batch.inverse_temperatures().unwrap_or_default().iter();
        put(
            RunPart::InverseTemperature,
            &mut inverse_temperatures.map(|inverse| inverse.to_bits().cast_signed()),
        );
        put(RunPart::Counting, &mut (0..sizes.tokens.cast_signed()));
        put(RunPart::Turn, &mut std::iter::once(turn.cast_signed()));
        let parts = batch.parts();
        let sequences =
            (0_i32..).zip(parts).flat_map(|(i, part)| std::iter::repeat_n(i, part.tokens));
        // What follows them belongs to no sequence.
        put(RunPart::Sequence, &mut sequences.chain(std::iter::repeat(-1)));
        put(
            RunPart::Parts,
            &mut parts
                .iter()
                .flat_map(|part| [part.first_token, part.tokens, part.past])
                .map(|number| number as i32),
        );
        for part in parts {
            // A sequence may hold blocks beyond what this run reaches, never more than a context.
            ensure!(
                part.blocks.len() <= sizes.blocks as usize,
                "a sequence holds too many cache blocks"
            );
        }
        put(
            RunPart::Blocks,
            &mut parts.iter().flat_map(|part| {
                let blocks = part.blocks.iter().map(number);
                blocks.chain(std::iter::repeat(0)).take(sizes.blocks as usize)
            }),
        );
        (self.tokens, self.sequences) = (batch.tokens().len(), parts.len());
        self.bytes = size_of_val(words.as_slice());
        self.reach = reach(batch);
        match mail {
            Some(mail) => mail.write_inputs(&words),
            None => gpu.write(&self.all, bytemuck::cast_slice(&words)),
        }
    }

    /// Queues the copy of a run's batch.
    pub(super) fn queue(&self, gpu: &Gpu, mail: &Mail) {
        gpu.take_at_once(mail.inputs(), &self.all, self.bytes);
    }

    /// The number of the run.
    pub(super) fn turn(&self) -> Span {
        self.part(RunPart::Turn)
    }

    /// Token ids of the run.
    pub(super) fn token(&self) -> Span {
        self.part(RunPart::Token)
    }

    /// The position of each token in its sequence.
    pub(super) fn position(&self) -> Span {
        self.part(RunPart::Position)
    }

    /// Which rows are wanted.
    pub(super) fn wanted(&self) -> Span {
        self.part(RunPart::Wanted)
    }

    /// One over the temperature of each wanted row.
    pub(super) fn inverse_temperatures(&self) -> Span {
        self.part(RunPart::InverseTemperature)
    }

    /// The number of each token in the run.
    pub(super) fn counting(&self) -> Span {
        self.part(RunPart::Counting)
    }

    /// Hands what attention reads to `with`.
    pub(super) fn with_tokens<T>(&self, with: impl FnOnce(Tokens<'_>) -> T) -> T {
        with(Tokens {
            tokens: self.tokens,
            sequences: self.sequences,
            sequence: &self.part(RunPart::Sequence),
            position: &self.part(RunPart::Position),
            parts: &self.part(RunPart::Parts),
            blocks: &self.part(RunPart::Blocks),
            max_blocks: self.sizes.blocks as usize,
            reach: self.reach,
        })
    }

    fn part(&self, part: RunPart) -> Span {
        self.all.part(part.start(self.sizes) as usize, part.bytes(self.sizes) as usize)
    }
}

/// How far the tokens of a run look back.
pub(super) fn reach(batch: &Batch) -> Reach {
    let lengths = batch.parts().iter().map(|part| part.past + part.tokens);
    Reach::of(lengths.max().unwrap_or(0))
}
