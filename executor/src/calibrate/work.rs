//! What processors are timed with, here and in benches: one linear, the experts and the attention of one layer.

use std::collections::BTreeSet;

use anyhow::Result;
use ir::op::{Activation, Then};
use ir::tensor::Format;

use super::{made_up, touch};
use crate::kernels::cpu::attention::{Attention, Sequence, attention};
use crate::kernels::cpu::cache::{Cache, CacheShape, Element};
use crate::kernels::cpu::experts::{Expert, Experts, experts};
use crate::kernels::cpu::isa::Isa;
use crate::kernels::cpu::linear::{Linear, linear};
use crate::kernels::cpu::pack::{PANEL, PackedMatrix, pack};
use crate::memory::Region;
use crate::team::Team;

/// Tokens of a block of the measured caches.
pub(super) const BLOCK_TOKENS: usize = 32;

/// Heads of a measured attention.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// Query heads.
    pub queries: usize,
    /// Heads of keys and values.
    pub keys: usize,
    /// Elements of each.
    pub elements: usize,
}

impl Heads {
    /// Those of an 8 B model.
    pub const WIDE: Self = Self { queries: 32, keys: 8, elements: 128 };
    /// Those of a 1 B model.
    pub const NARROW: Self = Self { queries: 32, keys: 4, elements: 64 };

    /// Query heads that share one of keys and values.
    pub fn group(self) -> usize {
        self.queries / self.keys
    }

    /// Bytes of a token's keys and values, without what elements share.
    pub fn token_bytes(self, element: Element) -> usize {
        2 * self.keys * self.elements * element.bytes()
    }

    /// Scores of a prompt: the triangle that is seen, for each query head.
    pub fn prompt_scores(self, tokens: usize) -> f64 {
        (self.queries * (tokens * (tokens + 1) / 2)) as f64
    }

    /// Operations of a prompt's attention: a multiplication and an addition for each element of each score and each
    /// value.
    pub fn prompt_flops(self, tokens: usize) -> f64 {
        4.0 * self.elements as f64 * self.prompt_scores(tokens)
    }
}

/// A packed matrix of made-up weights.
///
/// # Errors
/// When there is no memory.
pub fn made_up_matrix(
    team: &Team,
    format: Format,
    rows: usize,
    columns: usize,
) -> Result<PackedMatrix> {
    pack(team, format, rows, columns, &|range, values| {
        for (i, value) in values.iter_mut().enumerate() {
            *value = made_up(range.start * columns + i);
        }
    })
}

/// A linear of one matrix, with nothing before or behind it.
///
/// # Errors
/// When sizes do not fit together.
pub fn multiply(
    team: &Team,
    isa: Isa,
    matrix: &PackedMatrix,
    x: &[f32],
    tokens: usize,
    out: &mut [f32],
) -> Result<()> {
    let work = Linear {
        x,
        tokens,
        norm: None,
        weights: &[matrix],
        biases: &[None],
        then: Then::Nothing,
        residual: None,
    };
    linear(team, isa, &work, &mut [out])
}

/// Features of the measured mixture, and of each expert's middle: those of a 15 B mixture.
const MIXTURE: [usize; 2] = [2048, 768];
/// Experts that one of its tokens chooses.
pub const USED: usize = 8;

/// Some experts of a mixture.
pub struct Mixture(Vec<[PackedMatrix; 3]>);

/// Tokens that have chosen experts.
pub struct MixtureTokens {
    x: Vec<f32>,
    ids: Vec<i32>,
    weights: Vec<f32>,
    out: Vec<f32>,
}

impl Mixture {
    /// A mixture of so many experts.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn new(team: &Team, format: Format, experts: usize) -> Result<Self> {
        let [features, inner] = MIXTURE;
        // Stacks, as plans hold them: a matrix by itself is smaller than a huge page.
        let stack = |rows: usize, columns| -> Result<Vec<PackedMatrix>> {
            let stack = made_up_matrix(team, format, experts * rows, columns)?;
            let panels = rows / PANEL;
            Ok((0..experts).map(|expert| stack.part(expert * panels, panels)).collect())
        };
        let wide = || stack(inner, features);
        let stacks = wide()?.into_iter().zip(wide()?).zip(stack(features, inner)?);
        Ok(Self(stacks.map(|((gate, up), down)| [gate, up, down]).collect()))
    }

    /// Weights of an expert.
    pub fn weights(&self) -> u64 {
        let [features, inner] = MIXTURE;
        3 * (features * inner) as u64
    }

    /// Sums up what the tokens' experts make of them.
    ///
    /// # Errors
    /// When there is no memory for what lies between.
    pub fn compute(&self, team: &Team, isa: Isa, tokens: &mut MixtureTokens) -> Result<()> {
        let all = self.0.iter().map(|[gate, up, down]| Expert { gate, up, down });
        let all: Vec<Expert<'_>> = all.collect();
        let inputs: Experts<'_> = Experts {
            x: &tokens.x,
            tokens: tokens.ids.len() / USED,
            ids: &tokens.ids,
            weights: &tokens.weights,
            first_expert: 0,
            experts: &all,
            activation: Activation::Silu,
        };
        experts(team, isa, &inputs, &mut tokens.out)
    }
}

impl MixtureTokens {
    /// So many tokens; `choose` names a token's expert of each rank.
    pub fn new(count: usize, choose: impl Fn(usize, usize) -> usize) -> Self {
        let [features, _] = MIXTURE;
        Self {
            x: (0..count * features).map(made_up).collect(),
            ids: (0..count * USED).map(|i| choose(i / USED, i % USED) as i32).collect(),
            weights: vec![1.0 / USED as f32; count * USED],
            out: vec![0.0; count * features],
        }
    }

    /// How many experts any of them chose.
    pub fn chosen(&self) -> usize {
        self.ids.iter().collect::<BTreeSet<_>>().len()
    }
}

/// One layer's cache for one sequence, and activations to feed it.
pub struct Layer {
    heads: Heads,
    shape: CacheShape,
    keys: Region,
    values: Region,
    blocks: Vec<u32>,
    activations: Vec<f32>,
    out: Vec<f32>,
}

impl Layer {
    /// A layer for a context of `tokens` tokens, of which up to `fed` are fed at once; the team touches its pages.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn new(
        team: &Team,
        heads: Heads,
        element: Element,
        tokens: usize,
        fed: usize,
    ) -> Result<Self> {
        let blocks = tokens.div_ceil(BLOCK_TOKENS);
        let shape = CacheShape {
            element,
            blocks,
            kv_heads: heads.keys,
            block_tokens: BLOCK_TOKENS,
            head_dim: heads.elements,
        };
        let region = || -> Result<Region> {
            let mut region = Region::new(shape.region_bytes().next_multiple_of(8))?;
            touch(team, region.as_mut_slice());
            Ok(region)
        };
        let width = heads.queries * heads.elements;
        Ok(Self {
            heads,
            shape,
            keys: region()?,
            values: region()?,
            blocks: (0..blocks as u32).collect(),
            activations: (0..fed * width).map(made_up).collect(),
            out: vec![0.0; fed * width],
        })
    }

    /// Bytes of its keys and values.
    pub fn bytes(&self) -> usize {
        2 * self.shape.blocks * self.shape.block_bytes()
    }

    /// Attends from the last `tokens` tokens after `past` others.
    ///
    /// # Errors
    /// When they are more than the context.
    pub fn attend(&mut self, team: &Team, isa: Isa, tokens: usize, past: usize) -> Result<()> {
        let Heads { queries, keys, elements } = self.heads;
        let (q, kv) = (tokens * queries * elements, tokens * keys * elements);
        let sequences = [Sequence { first_token: 0, tokens, past, blocks: &self.blocks }];
        let work = Attention {
            q: &self.activations[..q],
            k: &self.activations[..kv],
            v: &self.activations[..kv],
            sequences: &sequences,
            heads: queries,
            group: self.heads.group(),
            first_head: 0,
            scale: 1.0 / (elements as f32).sqrt(),
            window: None,
            soft_cap: None,
            q_norm: None,
            k_norm: None,
            rope: None,
        };
        let (keys, values) = (self.keys.as_mut_slice(), self.values.as_mut_slice());
        let mut cache = Cache::new(self.shape, keys, values)?;
        attention(team, isa, &work, &mut cache, &mut self.out[..q]);
        Ok(())
    }
}
