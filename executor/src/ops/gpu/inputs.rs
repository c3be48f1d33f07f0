//! What a run is about, in device memory: tokens, positions, sequences, cache blocks, wanted rows.
//!
//! - Every part keeps its place and its largest size, so that captured launches find it in every run.

use anyhow::{Result, ensure};
use ir::plan::Plan;

use crate::batch::Batch;
use crate::kernels::gpu::attention::Tokens;
use crate::kernels::gpu::device::{ALIGNMENT, Gpu, Span};

/// Places of the parts, and what they hold of the run under way.
pub(super) struct Inputs {
    all: Span,
    sizes: Sizes,
    /// Of the run under way.
    tokens: usize,
    sequences: usize,
}

/// The most of each that a run has.
#[derive(Clone, Copy)]
struct Sizes {
    tokens: usize,
    rows: usize,
    sequences: usize,
    blocks: usize,
}

/// Parts in the order in which they lie.
#[derive(Clone, Copy)]
enum Part {
    Token,
    Position,
    Sequence,
    Wanted,
    Parts,
    Blocks,
    /// Numbers from 0 on: the rows of a rotation table that is made for one run.
    Counting,
}

const PARTS: [Part; 7] = [
    Part::Token,
    Part::Position,
    Part::Sequence,
    Part::Wanted,
    Part::Parts,
    Part::Blocks,
    Part::Counting,
];

impl Sizes {
    fn of(plan: &Plan) -> Self {
        let most = |size: fn(&ir::plan::Program) -> u32| {
            plan.programs.iter().map(size).max().unwrap_or(0) as usize
        };
        Self {
            tokens: most(|program| program.max.tokens),
            rows: most(|program| program.max.rows),
            sequences: most(|program| program.max_sequences),
            blocks: plan.model.context.div_ceil(plan.model.block_tokens) as usize,
        }
    }

    /// Numbers of 32 bits in a part.
    fn count(self, part: Part) -> usize {
        match part {
            Part::Token | Part::Position | Part::Sequence | Part::Counting => self.tokens,
            Part::Wanted => self.rows,
            Part::Parts => self.sequences * 3,
            Part::Blocks => self.sequences * self.blocks,
        }
    }

    fn start(self, part: Part) -> usize {
        let before = PARTS.iter().take(part as usize);
        before.map(|&part| self.bytes(part)).sum()
    }

    fn bytes(self, part: Part) -> usize {
        (self.count(part) * size_of::<i32>()).next_multiple_of(ALIGNMENT)
    }

    fn all_bytes(self) -> usize {
        PARTS.iter().map(|&part| self.bytes(part)).sum()
    }
}

impl Inputs {
    pub(super) fn new(plan: &Plan, gpu: &Gpu) -> Result<Self> {
        let sizes = Sizes::of(plan);
        let all = gpu.allocate(sizes.all_bytes())?;
        Ok(Self { all, sizes, tokens: 0, sequences: 0 })
    }

    /// Queues the copy of a run's batch.
    pub(super) fn fill(&mut self, gpu: &Gpu, batch: &Batch) -> Result<()> {
        let sizes = self.sizes;
        let mut words = vec![0_i32; sizes.all_bytes() / size_of::<i32>()];
        let mut put = |part: Part, values: &mut dyn Iterator<Item = i32>| {
            let start = sizes.start(part) / size_of::<i32>();
            let place = &mut words[start..start + sizes.count(part)];
            place.iter_mut().zip(values).for_each(|(place, value)| *place = value);
        };
        let number = |value: &u32| value.cast_signed();
        put(Part::Token, &mut batch.tokens().iter().map(number));
        put(Part::Position, &mut batch.positions().iter().map(number));
        put(Part::Wanted, &mut batch.rows().iter().map(number));
        put(Part::Counting, &mut (0..sizes.tokens as i32));
        let parts = batch.parts();
        put(
            Part::Sequence,
            &mut (0_i32..).zip(parts).flat_map(|(i, part)| std::iter::repeat_n(i, part.tokens)),
        );
        put(
            Part::Parts,
            &mut parts
                .iter()
                .flat_map(|part| [part.first_token, part.tokens, part.past])
                .map(|number| number as i32),
        );
        for part in parts {
            // A sequence may hold blocks beyond what this run reaches, never more than a context.
            ensure!(part.blocks.len() <= sizes.blocks, "a sequence holds too many cache blocks");
        }
        put(
            Part::Blocks,
            &mut parts.iter().flat_map(|part| {
                let blocks = part.blocks.iter().map(number);
                blocks.chain(std::iter::repeat(0)).take(sizes.blocks)
            }),
        );
        (self.tokens, self.sequences) = (batch.tokens().len(), parts.len());
        gpu.write(&self.all, bytemuck::cast_slice(&words))
    }

    /// Token ids of the run.
    pub(super) fn token(&self) -> Span {
        self.part(Part::Token)
    }

    /// The position of each token in its sequence.
    pub(super) fn position(&self) -> Span {
        self.part(Part::Position)
    }

    /// Which rows are wanted.
    pub(super) fn wanted(&self) -> Span {
        self.part(Part::Wanted)
    }

    /// The number of each token in the run.
    pub(super) fn counting(&self) -> Span {
        self.part(Part::Counting)
    }

    /// Hands what attention reads to `with`.
    pub(super) fn with_tokens<T>(&self, with: impl FnOnce(Tokens<'_>) -> T) -> T {
        with(Tokens {
            tokens: self.tokens,
            sequences: self.sequences,
            sequence: &self.part(Part::Sequence),
            position: &self.part(Part::Position),
            parts: &self.part(Part::Parts),
            blocks: &self.part(Part::Blocks),
            max_blocks: self.sizes.blocks,
        })
    }

    fn part(&self, part: Part) -> Span {
        self.all.part(self.sizes.start(part), self.sizes.bytes(part))
    }
}
