//! Causal attention over a paged cache, one sequence and one head at a time.

use anyhow::{Result, ensure};
use burn::tensor::{Bool, Device as BurnDevice, IndexingUpdateOp, Tensor, TensorData, activation};
use ir::op::{Attention, Pairing, Rope};

use super::State;
use super::norm::norm;
use super::rows::ids;
use super::soft_cap;
use crate::batch::Part;
use crate::ops::Scope;

/// Keys and values of one layer, each `[blocks · kv_heads · block_tokens, head_dim]`.
pub(super) struct Cache {
    keys: Tensor<2>,
    values: Tensor<2>,
    kv_heads: usize,
    block_tokens: usize,
}

impl Cache {
    pub(super) fn new(
        blocks: usize,
        kv_heads: usize,
        block_tokens: usize,
        head_dim: usize,
        device: &BurnDevice,
    ) -> Self {
        let zeros = || Tensor::zeros([blocks * kv_heads * block_tokens, head_dim], device);
        Self { keys: zeros(), values: zeros(), kv_heads, block_tokens }
    }

    /// Rows of positions `positions` of a sequence for one head.
    fn rows(&self, part: &Part, head: usize, positions: std::ops::Range<usize>) -> Vec<u32> {
        positions
            .map(|position| {
                let block = part.blocks[position / self.block_tokens] as usize;
                let row = (block * self.kv_heads + head) * self.block_tokens
                    + position % self.block_tokens;
                row as u32
            })
            .collect()
    }
}

/// `[tokens, heads · head_dim]` from `q` of that shape and `k`, `v: [tokens, kv_heads · head_dim]`.
pub(super) fn attention(
    attention: &Attention,
    [q, k, v]: [Tensor<2>; 3],
    state: &mut State,
    scope: Scope<'_>,
) -> Result<Tensor<2>> {
    let head_dim = attention.head_dim as usize;
    let rope = attention.rope.map(|rope| &scope.plan.ropes[rope]);
    let mut cache = state.take_cache(attention.cache)?;
    let mut sequences = Vec::new();
    for part in scope.batch.parts() {
        let tokens = part.first_token..part.first_token + part.tokens;
        let head = |x: &Tensor<2>, head: usize| {
            x.clone().slice([tokens.clone(), head * head_dim..(head + 1) * head_dim])
        };
        let turn = rope.map(|rope| Turn::of(rope, part, &state.burn));
        let prepared = |x: Tensor<2>, weights: &Option<ir::op::Norm>| -> Result<Tensor<2>> {
            let x = match weights {
                Some(weights) => norm(weights, x, state)?,
                None => x,
            };
            Ok(turn.as_ref().map_or(x.clone(), |turn| turn.apply(x)))
        };
        for kv_head in 0..attention.kv_heads as usize {
            let new = part.past..part.past + part.tokens;
            let rows = ids(&cache.rows(part, kv_head, new), &state.burn);
            let key = prepared(head(&k, kv_head), &attention.k_norm)?;
            // The cache must be the only owner of its tensors here, or they would be copied.
            cache.keys = cache.keys.select_assign(0, rows.clone(), key, IndexingUpdateOp::Assign);
            cache.values =
                cache.values.select_assign(0, rows, head(&v, kv_head), IndexingUpdateOp::Assign);
        }
        let mut heads = Vec::new();
        let hidden = hidden(part, attention.window, &state.burn);
        for query_head in 0..attention.heads as usize {
            let kv_head = (attention.first_head as usize + query_head) / attention.group as usize;
            ensure!(
                kv_head < attention.kv_heads as usize,
                "query head {query_head} has no key head"
            );
            let all = ids(&cache.rows(part, kv_head, 0..part.past + part.tokens), &state.burn);
            let query = prepared(head(&q, query_head), &attention.q_norm)?;
            let keys = cache.keys.clone().select(0, all.clone());
            let mut scores = query.matmul(keys.transpose()) * attention.scale;
            if let Some(cap) = attention.soft_cap {
                scores = soft_cap(scores, cap);
            }
            let scores = scores.mask_fill(hidden.clone(), f32::NEG_INFINITY);
            let values = cache.values.clone().select(0, all);
            heads.push(activation::softmax(scores, 1).matmul(values));
        }
        sequences.push(Tensor::cat(heads, 1));
    }
    state.put_cache(attention.cache, cache);
    ensure!(!sequences.is_empty(), "a batch holds no sequence");
    let unfed = scope.batch.tokens().len() - scope.batch.fed();
    if unfed > 0 {
        sequences.push(Tensor::zeros([unfed, attention.heads as usize * head_dim], &state.burn));
    }
    Ok(Tensor::cat(sequences, 0))
}

/// Which cached tokens `[tokens, past + tokens]` each token does not see.
fn hidden(part: &Part, window: Option<u32>, device: &BurnDevice) -> Tensor<2, Bool> {
    let length = part.past + part.tokens;
    let mask: Vec<bool> = (part.past..length)
        .flat_map(|i| {
            (0..length).map(move |j| j > i || window.is_some_and(|window| i - j >= window as usize))
        })
        .collect();
    Tensor::from_data(TensorData::new(mask, [part.tokens, length]), device)
}

/// The rotation of the tokens of one sequence.
struct Turn {
    pairing: Pairing,
    dims: usize,
    /// `[tokens, dims / 2]`.
    cosine: Tensor<2>,
    sine: Tensor<2>,
}

impl Turn {
    fn of(rope: &Rope, part: &Part, device: &BurnDevice) -> Self {
        let frequencies = rope.frequencies.at(rope.dims, part.rope_length as u32);
        let angles: Vec<f32> = (part.past..part.past + part.tokens)
            .flat_map(|position| frequencies.iter().map(move |f| position as f32 * f))
            .collect();
        let table = |function: fn(f32) -> f32| {
            let values: Vec<f32> =
                angles.iter().map(|&angle| function(angle) * rope.magnitude).collect();
            Tensor::from_data(TensorData::new(values, [part.tokens, frequencies.len()]), device)
        };
        Self {
            pairing: rope.pairing,
            dims: rope.dims as usize,
            cosine: table(f32::cos),
            sine: table(f32::sin),
        }
    }

    /// Turns the pairs of `x: [tokens, head_dim]`.
    fn apply(&self, x: Tensor<2>) -> Tensor<2> {
        let [tokens, head_dim] = x.dims();
        let pairs = self.dims / 2;
        let turned = x.clone().slice([0..tokens, 0..self.dims]);
        let (a, b) = match self.pairing {
            Pairing::Halves => (
                turned.clone().slice([0..tokens, 0..pairs]),
                turned.slice([0..tokens, pairs..self.dims]),
            ),
            Pairing::Neighbours => {
                let pairs = turned.reshape([tokens * pairs, 2]);
                let part = |index: usize| {
                    pairs
                        .clone()
                        .slice([0..tokens * self.dims / 2, index..index + 1])
                        .reshape([tokens, self.dims / 2])
                };
                (part(0), part(1))
            }
        };
        let (cosine, sine) = (&self.cosine, &self.sine);
        let first = a.clone() * cosine.clone() - b.clone() * sine.clone();
        let second = b * cosine.clone() + a * sine.clone();
        let turned = match self.pairing {
            Pairing::Halves => Tensor::cat(vec![first, second], 1),
            Pairing::Neighbours => {
                let column = |x: Tensor<2>| x.reshape([tokens * pairs, 1]);
                Tensor::cat(vec![column(first), column(second)], 1).reshape([tokens, self.dims])
            }
        };
        if self.dims == head_dim {
            return turned;
        }
        Tensor::cat(vec![turned, x.slice([0..tokens, self.dims..head_dim])], 1)
    }
}
