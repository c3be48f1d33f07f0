//! How fast attention is, of prompts and of one token.

use anyhow::{Context as _, Result};
use ir::id::{CacheId, Id as _};
use ir::op;
use ir::tensor::DType;
use ir::workspace;

use super::{Meter, rate};
use crate::calibrate::work::{BLOCK_TOKENS, Heads};
use crate::kernels::gpu::attention::decode::Decode;
use crate::kernels::gpu::attention::prefill::Prefill;
use crate::kernels::gpu::attention::{Cache, Reach, Tokens};
use crate::kernels::gpu::device::Span;

const HEADS: Heads = Heads::WIDE;

impl Meter<'_> {
    /// Operations a second of a prompt's attention.
    pub(super) fn attention_flops(&self) -> Result<f64> {
        let prompt = self.sizes.prompt;
        let layer = Layer::new(self, prompt, prompt)?;
        let nanos = self.time(self.sizes.launches, || {
            let Layer { attention, queries, out, .. } = &layer;
            let (cache, tokens) = (layer.cache(), layer.tokens());
            self.gpu.prefill(&Prefill { attention, cache, tokens, queries }, out);
            Ok(())
        })?;
        Ok(HEADS.prompt_flops(prompt) / nanos * 1e9)
    }

    /// Bytes of keys and values per second when one token looks back, and what that takes beside them.
    pub(super) fn cache(&self, step_nanos: f64) -> Result<(f64, f64)> {
        let pasts = [2 * self.sizes.prompt, self.sizes.prompt / 8];
        let bytes = pasts.map(|past| (past * 2 * HEADS.keys * HEADS.elements * 2) as f64);
        let nanos = [self.look_back(pasts[0])?, self.look_back(pasts[1])?];
        Ok(rate(bytes, nanos, step_nanos))
    }

    /// Nanoseconds of one token's attention.
    fn look_back(&self, past: usize) -> Result<f64> {
        /// Of caches of which none is still near when its turn comes again: 134 MB in all.
        const LAYERS: usize = 8;
        let layers = (0..LAYERS).map(|_| Layer::new(self, 1, past)).collect::<Result<Vec<_>>>()?;
        let [values, stats] = workspace::attention_terms(
            &layers[0].attention,
            1,
            workspace::attention_splits(HEADS.keys as u32, 1),
        );
        let workspace = self.gpu.allocate((values + stats) as usize)?;
        let mut turns = layers.iter().cycle();
        self.time(2 * LAYERS, || {
            let layer = turns.next().context("there are layers")?;
            let Layer { attention, queries, out, .. } = layer;
            let (cache, tokens) = (layer.cache(), layer.tokens());
            let call = Decode {
                attention,
                cache,
                tokens,
                queries,
                fresh: None,
                ahead: &[],
                workspace: &workspace,
                order: None,
            };
            self.gpu.decode(&call, out);
            Ok(())
        })
    }
}

/// One layer's cache for one sequence, and a run of its last tokens.
struct Layer {
    attention: op::Attention,
    keys: Span,
    values: Span,
    queries: Span,
    out: Span,
    sequence: Span,
    position: Span,
    parts: Span,
    blocks: Span,
    tokens: usize,
    cached: usize,
}

impl Layer {
    /// The last `tokens` tokens of a sequence of `length`.
    fn new(meter: &Meter<'_>, tokens: usize, length: usize) -> Result<Self> {
        let gpu = meter.gpu;
        let cached = length.div_ceil(BLOCK_TOKENS);
        let elements = cached * BLOCK_TOKENS * HEADS.keys * HEADS.elements;
        let width = HEADS.queries * HEADS.elements;
        let integers = |values: &[i32]| -> Result<Span> {
            let span = gpu.allocate(size_of_val(values))?;
            gpu.write(&span, bytemuck::cast_slice(values))?;
            Ok(span)
        };
        let past = (length - tokens) as i32;
        Ok(Self {
            attention: op::Attention {
                cache: CacheId::from_index(0),
                heads: HEADS.queries as u32,
                kv_heads: HEADS.keys as u32,
                head_dim: HEADS.elements as u32,
                group: HEADS.group() as u32,
                first_head: 0,
                scale: 1.0 / (HEADS.elements as f32).sqrt(),
                window: None,
                soft_cap: None,
                q_norm: None,
                k_norm: None,
                rope: None,
            },
            keys: meter.narrow(elements)?,
            values: meter.narrow(elements)?,
            queries: meter.floats(tokens * width)?,
            out: gpu.allocate(tokens * width * size_of::<f32>())?,
            sequence: integers(&vec![0; tokens])?,
            position: integers(&(past..past + tokens as i32).collect::<Vec<_>>())?,
            parts: integers(&[0, tokens as i32, past])?,
            blocks: integers(&(0..cached as i32).collect::<Vec<_>>())?,
            tokens,
            cached,
        })
    }

    fn cache(&self) -> Cache<'_> {
        Cache {
            keys: &self.keys,
            values: &self.values,
            element: DType::F16,
            blocks: self.cached,
            block_tokens: BLOCK_TOKENS,
        }
    }

    fn tokens(&self) -> Tokens<'_> {
        Tokens {
            tokens: self.tokens,
            sequences: 1,
            sequence: &self.sequence,
            position: &self.position,
            parts: &self.parts,
            blocks: &self.blocks,
            max_blocks: self.cached,
            reach: Reach::of(self.cached * BLOCK_TOKENS),
        }
    }
}
