//! What the tests of attention share: runs of several sequences over shuffled blocks, and plain loops in f64.

use half::f16;
use ir::id::{CacheId, Id as _};
use ir::op::Attention;
use ir::tensor::DType;

use super::{Cache, Reach, Tokens};
use crate::kernels::gpu::device::{Gpu, Span};

pub(super) const BLOCK_TOKENS: usize = 16;

/// Attention without norms, rotation, window or cap.
pub(in crate::kernels::gpu) fn plain(heads: u32, kv_heads: u32, head_dim: u32) -> Attention {
    Attention {
        cache: CacheId::from_index(0),
        heads,
        kv_heads,
        head_dim,
        group: heads / kv_heads,
        first_head: 0,
        scale: 1.0 / (head_dim as f32).sqrt(),
        window: None,
        soft_cap: None,
        q_norm: None,
        k_norm: None,
        rope: None,
    }
}

/// Numbers between −1 and 1 that look like noise.
pub(in crate::kernels::gpu) fn noise(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12345);
    (0..count)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

/// A run on the host.
pub(super) struct Run {
    /// Tokens cached before, and new ones, of each sequence.
    pub parts: Vec<(usize, usize)>,
    /// Rows that pad the run.
    pub padding: usize,
    pub max_blocks: usize,
}

/// A run on the device.
pub(super) struct OnDevice {
    tokens: usize,
    sequences: usize,
    max_blocks: usize,
    reach: Reach,
    sequence: Span,
    position: Span,
    parts: Span,
    blocks: Span,
}

impl Run {
    pub(super) fn new(parts: &[(usize, usize)]) -> Self {
        let parts = parts.to_vec();
        let mut run = Self { parts, padding: 0, max_blocks: 0 };
        run.max_blocks = run.longest().div_ceil(BLOCK_TOKENS) + 1;
        run
    }

    /// Tokens of the longest context.
    fn longest(&self) -> usize {
        self.parts.iter().map(|(past, new)| past + new).max().unwrap()
    }

    pub(super) fn padded(mut self, rows: usize) -> Self {
        self.padding = rows;
        self
    }

    pub(super) fn rows(&self) -> usize {
        self.parts.iter().map(|(_, new)| new).sum::<usize>() + self.padding
    }

    /// Blocks of the cache, more than are used.
    pub(super) fn cache_blocks(&self) -> usize {
        self.parts.len() * self.max_blocks + 3
    }

    /// The block that holds a position of a sequence: neighbours lie far apart.
    fn block(&self, sequence: usize, index: usize) -> usize {
        let count = self.cache_blocks();
        let step = (2..).find(|step| common_divisor(count, *step) == 1).unwrap();
        ((sequence * self.max_blocks + index) * step + 1) % count
    }

    /// Sequence and position of each row that is no padding.
    pub(super) fn tokens(&self) -> Vec<(usize, usize)> {
        let parts = self.parts.iter().enumerate();
        parts.flat_map(|(s, &(past, new))| (past..past + new).map(move |p| (s, p))).collect()
    }

    /// The row of a head and position in the cache.
    pub(super) fn cache_row(
        &self,
        kv_heads: usize,
        sequence: usize,
        head: usize,
        position: usize,
    ) -> usize {
        let block = self.block(sequence, position / BLOCK_TOKENS);
        (block * kv_heads + head) * BLOCK_TOKENS + position % BLOCK_TOKENS
    }

    pub(super) fn upload(&self, gpu: &Gpu) -> OnDevice {
        let tokens = self.tokens();
        let padding = std::iter::repeat_n(-1, self.padding);
        let sequence: Vec<i32> = tokens.iter().map(|t| t.0 as i32).chain(padding).collect();
        let position: Vec<i32> =
            tokens.iter().map(|t| t.1 as i32).chain(std::iter::repeat_n(0, self.padding)).collect();
        let mut parts = Vec::new();
        let mut blocks = Vec::new();
        let mut first = 0;
        for (sequence, &(past, new)) in self.parts.iter().enumerate() {
            parts.extend([first as i32, new as i32, past as i32]);
            blocks.extend((0..self.max_blocks).map(|i| self.block(sequence, i) as i32));
            first += new;
        }
        OnDevice {
            tokens: self.rows(),
            sequences: self.parts.len(),
            max_blocks: self.max_blocks,
            reach: Reach::of(self.longest()),
            sequence: gpu.upload(&sequence),
            position: gpu.upload(&position),
            parts: gpu.upload(&parts),
            blocks: gpu.upload(&blocks),
        }
    }
}

fn common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

impl OnDevice {
    pub(super) fn tokens(&self) -> Tokens<'_> {
        Tokens {
            tokens: self.tokens,
            sequences: self.sequences,
            sequence: &self.sequence,
            position: &self.position,
            parts: &self.parts,
            blocks: &self.blocks,
            max_blocks: self.max_blocks,
            reach: self.reach,
        }
    }
}

/// The cache of one layer, on the host as numbers that its element type holds exactly.
pub(super) struct Cached {
    pub element: DType,
    pub blocks: usize,
    pub keys: Vec<f32>,
    pub values: Vec<f32>,
    on_device: [Span; 2],
}

impl Cached {
    /// Noise where the run's tokens are, and not-a-numbers elsewhere.
    pub(super) fn filled(gpu: &Gpu, run: &Run, attention: &Attention, element: DType) -> Self {
        let (kv_heads, head_dim) = (attention.kv_heads as usize, attention.head_dim as usize);
        let blocks = run.cache_blocks();
        let count = blocks * kv_heads * BLOCK_TOKENS * head_dim;
        let fill = |seed| {
            let mut elements = vec![f32::NAN; count];
            for (sequence, &(past, new)) in run.parts.iter().enumerate() {
                for position in 0..past + new {
                    for head in 0..kv_heads {
                        let row = run.cache_row(kv_heads, sequence, head, position);
                        let seed = seed + (row * 7) as u32;
                        for (to, from) in elements[row * head_dim..][..head_dim]
                            .iter_mut()
                            .zip(noise(head_dim, seed))
                        {
                            *to = rounded(from, element);
                        }
                    }
                }
            }
            elements
        };
        let (keys, values) = (fill(1), fill(2));
        let on_device = [&keys, &values].map(|elements| stored(gpu, elements, element));
        Self { element, blocks, keys, values, on_device }
    }

    /// Not-a-numbers everywhere.
    pub(super) fn empty(gpu: &Gpu, run: &Run, attention: &Attention, element: DType) -> Self {
        let blocks = run.cache_blocks();
        let count = blocks * BLOCK_TOKENS * (attention.kv_heads * attention.head_dim) as usize;
        let bytes = count * element.bytes() as usize;
        let on_device = [gpu.poisoned(bytes), gpu.poisoned(bytes)];
        let nothing = vec![f32::NAN; count];
        Self { element, blocks, keys: nothing.clone(), values: nothing, on_device }
    }

    pub(super) fn cache(&self) -> Cache<'_> {
        Cache {
            keys: &self.on_device[0],
            values: &self.on_device[1],
            element: self.element,
            blocks: self.blocks,
            block_tokens: BLOCK_TOKENS,
        }
    }
}

/// The nearest number that `element` holds.
pub(super) fn rounded(value: f32, element: DType) -> f32 {
    match element {
        DType::F16 => f16::from_f32(value).to_f32(),
        DType::Bf16 => half::bf16::from_f32(value).to_f32(),
        DType::F32 | DType::I32 | DType::U8 | DType::I8 => value,
    }
}

fn stored(gpu: &Gpu, elements: &[f32], element: DType) -> Span {
    match element {
        DType::F16 => gpu.upload(&elements.iter().map(|&v| f16::from_f32(v)).collect::<Vec<_>>()),
        DType::Bf16 => {
            gpu.upload(&elements.iter().map(|&v| half::bf16::from_f32(v)).collect::<Vec<_>>())
        }
        DType::F32 | DType::I32 | DType::U8 | DType::I8 => gpu.upload(elements),
    }
}

/// Elements of a stored span.
pub(super) fn loaded(gpu: &Gpu, span: &Span, count: usize, element: DType) -> Vec<f32> {
    match element {
        DType::F16 => gpu.download::<f16>(span, count).iter().map(|v| v.to_f32()).collect(),
        DType::Bf16 => gpu.download::<half::bf16>(span, count).iter().map(|v| v.to_f32()).collect(),
        DType::F32 | DType::I32 | DType::U8 | DType::I8 => gpu.download(span, count),
    }
}

/// Attention of every row that is no padding, in f64.
pub(super) fn reference(
    attention: &Attention,
    run: &Run,
    cached: &Cached,
    queries: &[f32],
) -> Vec<f64> {
    let head_dim = attention.head_dim as usize;
    let kv_heads = attention.kv_heads as usize;
    let heads = attention.heads as usize;
    let mut out = Vec::new();
    for (row, (sequence, position)) in run.tokens().into_iter().enumerate() {
        for head in 0..heads {
            let kv_head = (attention.first_head as usize + head) / attention.group as usize;
            let query = &queries[(row * heads + head) * head_dim..][..head_dim];
            let window = attention.window.map_or(usize::MAX, |window| window as usize);
            let seen = (position + 1).saturating_sub(window)..position + 1;
            let at = |position| run.cache_row(kv_heads, sequence, kv_head, position) * head_dim;
            let scores: Vec<f64> = seen
                .clone()
                .map(|position| {
                    let key = &cached.keys[at(position)..][..head_dim];
                    let product: f64 =
                        query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                    let score = product * f64::from(attention.scale);
                    attention.soft_cap.map_or(score, |cap| {
                        let cap = f64::from(cap);
                        cap * (score / cap).tanh()
                    })
                })
                .collect();
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
            let total: f64 = weights.iter().sum();
            let mut sums = vec![0.0; head_dim];
            for (position, weight) in seen.zip(&weights) {
                let value = &cached.values[at(position)..][..head_dim];
                for (sum, value) in sums.iter_mut().zip(value) {
                    *sum += weight / total * f64::from(*value);
                }
            }
            out.extend(sums);
        }
    }
    out
}

/// Panics where a result is further from what it should be than `tolerance`.
pub(super) fn assert_close(actual: &[f32], expected: &[f64], tolerance: f64, what: &str) {
    assert!(actual.len() >= expected.len());
    for (i, (actual, expected)) in actual.iter().zip(expected).enumerate() {
        let off = (f64::from(*actual) - expected).abs();
        assert!(off <= tolerance, "{what}: element {i} is {actual} instead of {expected}");
    }
}
