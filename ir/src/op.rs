//! The operations a model is made of: what is computed, never where.
//!
//! The set is closed and matched in full everywhere. The same type serves three levels: in a layer graph
//! ids name rows of the model's tables; in a plan they name rows of the plan's, and counts are those of one device.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::id::{CacheId, Few, RopeId, WeightId};

/// One operation. Every activation is `[tokens, features]` unless said otherwise.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum Op {
    /// No input. Rows of `table` for the batch's token ids, times `scale`.
    Embed {
        /// `[vocabulary, features]`.
        table: WeightId,
        /// Factor on every element; 1 for most families.
        scale: f32,
    },
    /// `x` plus the rows of a learned position table for the batch's positions.
    AddPosition {
        /// `[positions + offset, features]`.
        table: WeightId,
        /// Added to each position; OPT has 2.
        offset: u32,
    },
    /// `norm(x)`, or `norm(x) + residual` for two inputs.
    Norm(Norm),
    /// `x` (and a residual as second input) through one or more matrices.
    Linear(Linear),
    /// `q, k, v` to the weighted values, after appending `k` and `v` to the cache.
    Attention(Attention),
    /// `activation(x)`.
    Activate(Activation),
    /// `gate, up` to `activation(gate) * up`.
    Gate(Activation),
    /// `a + b`.
    Add,
    /// `gate: [tokens, 1]`, `x` to `sigmoid(gate) * x`.
    SigmoidGate,
    /// Router logits `[tokens, experts]` to expert ids `i32[tokens, used]` and their weights `[tokens, used]`.
    Route {
        /// Experts chosen for a token.
        used: u32,
        /// Whether the chosen weights are divided by their sum.
        renormalise: bool,
    },
    /// `x`, ids, weights to the weighted sum of the chosen experts' gated MLPs.
    Experts(Experts),
    /// The batch's wanted rows of `x`: `[rows, features]`.
    SelectRows,
    /// `cap * tanh(x / cap)`.
    SoftCap {
        /// Bound of the result.
        cap: f32,
    },
}

/// A normalisation over the last axis (in attention: over each head).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Norm {
    /// What is divided out.
    pub kind: NormKind,
    /// Elementwise factor, `[features]`.
    #[serde(deserialize_with = "crate::ron_text::written")]
    pub scale: Option<WeightId>,
    /// Elementwise term, `[features]`.
    #[serde(deserialize_with = "crate::ron_text::written")]
    pub bias: Option<WeightId>,
    /// Added to the variance.
    pub epsilon: f32,
    /// Added to every scale; 1 in the Gemma families.
    pub scale_offset: f32,
}

/// Kinds of normalisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum NormKind {
    /// Divides by the root mean square.
    Rms,
    /// Subtracts the mean, divides by the standard deviation.
    Layer,
}

/// Matrices that share an input, with what is done in front and behind in the same pass.
///
/// Output `i` is `then(norm(x) · weights[i]ᵀ + biases[i]) + residual`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Linear {
    /// Applied to `x` first.
    #[serde(deserialize_with = "crate::ron_text::written")]
    pub norm: Option<Norm>,
    /// Each `[outputs, inputs]`.
    pub weights: Few<WeightId>,
    /// One for each weight, `[outputs]`.
    pub biases: Few<Option<WeightId>>,
    /// Applied to the products.
    pub then: Then,
    /// Whether a second input is added to the only output.
    pub residual: bool,
}

/// What follows the products of a linear.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Then {
    /// One output for each weight.
    Nothing,
    /// One output for each weight, activated.
    Activate(Activation),
    /// Two weights, gate and up, and the one output `activation(gate) * up`.
    Gate(Activation),
}

/// Elementwise nonlinearities, with the names of `transformers`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Activation {
    /// `max(x, 0)`.
    Relu,
    /// `x · sigmoid(x)`.
    Silu,
    /// `x · Φ(x)` with the error function.
    Gelu,
    /// The tanh approximation of GELU (`gelu_new`, `gelu_pytorch_tanh`).
    GeluTanh,
}

/// Causal attention of grouped heads over a paged cache.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attention {
    /// Where this layer's keys and values are kept.
    pub cache: CacheId,
    /// Query heads.
    pub heads: u32,
    /// Key and value heads.
    pub kv_heads: u32,
    /// Features of one head.
    pub head_dim: u32,
    /// Query heads that share one key and value head in the whole model.
    pub group: u32,
    /// Query head `h` reads key head `(first_head + h) / group`. Not 0 only where a split cuts a group.
    pub first_head: u32,
    /// Factor on the scores.
    pub scale: f32,
    /// Token `i` sees tokens `j` with `i - j < window`; all earlier ones where `None`.
    #[serde(deserialize_with = "crate::ron_text::written")]
    pub window: Option<u32>,
    /// Scores become `cap * tanh(score / cap)`.
    #[serde(deserialize_with = "crate::ron_text::written")]
    pub soft_cap: Option<f32>,
    /// Normalises each query head, before the rotation.
    #[serde(deserialize_with = "crate::ron_text::written")]
    pub q_norm: Option<Norm>,
    /// Normalises each key head, before the rotation.
    #[serde(deserialize_with = "crate::ron_text::written")]
    pub k_norm: Option<Norm>,
    /// Rotates queries and keys.
    #[serde(deserialize_with = "crate::ron_text::written")]
    pub rope: Option<RopeId>,
}

/// A mixture's gated MLPs, one matrix stack for each of the three linears.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Experts {
    /// `[experts, intermediate, features]`.
    pub gate: WeightId,
    /// `[experts, intermediate, features]`.
    pub up: WeightId,
    /// `[experts, features, intermediate]`.
    pub down: WeightId,
    /// Applied to the gate.
    pub activation: Activation,
    /// Which of the mixture's experts they are; `None` is all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part: Option<ExpertPart>,
}

impl Attention {
    /// Tokens seen, summed over `fed` tokens of a sequence that has `past` tokens cached: a triangle behind what is
    /// cached, cut off at the window.
    pub fn seen(&self, fed: f64, past: f64) -> f64 {
        let window = f64::from(self.window.unwrap_or(u32::MAX));
        let growing = (window - past).clamp(0.0, fed);
        growing * (past + (growing + 1.0) / 2.0) + (fed - growing) * window
    }
}

impl Experts {
    /// Id of the first expert.
    pub fn first(&self) -> u32 {
        self.part.map_or(0, |part| part.first)
    }

    /// Of `held` experts, `used` of which each of `tokens` tokens chooses as if at random, those that any token
    /// chooses.
    pub fn chosen(held: f64, used: f64, tokens: f64) -> f64 {
        held * (1.0 - (1.0 - (used / held).min(1.0)).powf(tokens))
    }
}

/// Some of a mixture's experts, neighbours by id. Others that a token chose count for nothing here.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertPart {
    /// Id of the first of them.
    pub first: u32,
    /// The part of all choices that fall on them, as counted.
    pub load: f32,
}

/// Rotary position embedding (Su et al. 2021), with the frequencies worked out when the model is lowered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rope {
    /// Which elements of a head turn together.
    pub pairing: Pairing,
    /// Leading elements of each head that are rotated.
    pub dims: u32,
    /// Factor on cosine and sine (YaRN's and LongRoPE's attention factor).
    pub magnitude: f32,
    /// Radians per position for each pair.
    pub frequencies: Frequencies,
}

/// Which elements of a head form a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Pairing {
    /// `i` with `i + dims / 2`.
    Halves,
    /// `2 i` with `2 i + 1`.
    Neighbours,
}

/// Rotation frequencies, `dims / 2` of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum Frequencies {
    /// The same for every sequence.
    Fixed(Vec<f32>),
    /// NTK scaling that follows the length `l` of the sequence beyond `original_tokens`:
    /// base becomes `base · (factor · l / original_tokens − (factor − 1))^(dims / (dims − 2))`.
    Dynamic {
        /// Rotary base before scaling.
        base: f64,
        /// Scaling factor.
        factor: f64,
        /// Length up to which nothing is scaled.
        original_tokens: u32,
    },
    /// LongRoPE: one set up to `original_tokens`, another beyond.
    Switched {
        /// For sequences of at most `original_tokens`.
        short: Vec<f32>,
        /// For longer ones.
        long: Vec<f32>,
        /// Where the switch is.
        original_tokens: u32,
    },
}

impl Frequencies {
    /// The frequencies for a sequence that is `length` tokens long at the end of this run.
    pub fn at(&self, dims: u32, length: u32) -> Vec<f32> {
        match self {
            Frequencies::Fixed(frequencies) => frequencies.clone(),
            Frequencies::Dynamic { base, factor, original_tokens } => {
                let (length, original) =
                    (f64::from(length.max(*original_tokens)), f64::from(*original_tokens));
                let growth = factor * length / original - (factor - 1.0);
                let dims_f64 = f64::from(dims);
                unscaled_frequencies(base * growth.powf(dims_f64 / (dims_f64 - 2.0)), dims)
            }
            Frequencies::Switched { short, long, original_tokens } => {
                if length > *original_tokens {
                    long.clone()
                } else {
                    short.clone()
                }
            }
        }
    }

    /// Whether keys, of which the first and the latest were rotated when the sequence had as many tokens as `before`
    /// says, serve when it has `now`.
    ///
    /// - Beside keys of the other set LongRoPE means nothing, and models that use it compute all of them anew.
    /// - With NTK scaling a token that was chosen (`is_decode`) goes on behind the keys of shorter lengths, as in
    ///   transformers. A new prompt gives what all of the text gives at once.
    pub fn keep_keys(&self, before: [u32; 2], now: u32, is_decode: bool) -> bool {
        let [first, latest] = before;
        match self {
            Frequencies::Fixed(_) => true,
            Frequencies::Dynamic { original_tokens, .. } => {
                let scaled = |length: u32| length.max(*original_tokens);
                is_decode || (scaled(first) == scaled(now) && scaled(latest) == scaled(now))
            }
            Frequencies::Switched { original_tokens, .. } => {
                (latest > *original_tokens) == (now > *original_tokens)
            }
        }
    }

    /// Whether they depend on the length of the sequence.
    pub fn follow_length(&self) -> bool {
        match self {
            Frequencies::Fixed(_) => false,
            Frequencies::Dynamic { .. } | Frequencies::Switched { .. } => true,
        }
    }
}

/// `base^(−2 i / dims)` for each pair `i`, rounded as `transformers` rounds: powers in 32 bits.
pub fn unscaled_frequencies(base: f64, dims: u32) -> Vec<f32> {
    let base = base as f32;
    (0..dims / 2).map(|i| 1.0 / base.powf((2 * i) as f32 / dims as f32)).collect()
}

/// What an operation multiplies, where that is what its time goes to.
#[derive(Clone, Copy, Debug)]
pub enum Products<'a> {
    /// Activations with matrices.
    Linear(&'a Linear),
    /// Queries with keys, and weights with values.
    Attention(&'a Attention),
    /// Activations with the matrices of the experts that were chosen for them.
    Experts(&'a Experts),
}

impl Op {
    /// Its products; `None` where it streams activations, with a few operations for each element.
    pub fn products(&self) -> Option<Products<'_>> {
        match self {
            Op::Linear(linear) => Some(Products::Linear(linear)),
            Op::Attention(attention) => Some(Products::Attention(attention)),
            Op::Experts(experts) => Some(Products::Experts(experts)),
            Op::Embed { .. }
            | Op::AddPosition { .. }
            | Op::Norm(_)
            | Op::Activate(_)
            | Op::Gate(_)
            | Op::Add
            | Op::SigmoidGate
            | Op::Route { .. }
            | Op::SelectRows
            | Op::SoftCap { .. } => None,
        }
    }

    /// Every weight the operation reads, in a fixed order.
    pub fn weights(&self) -> Few<WeightId> {
        let of_norms = |norms: [&Option<Norm>; 2]| -> Few<WeightId> {
            norms.into_iter().flatten().flat_map(Norm::weights).collect()
        };
        match self {
            Op::Embed { table, .. } | Op::AddPosition { table, .. } => smallvec![*table],
            Op::Norm(norm) => norm.weights().collect(),
            Op::Linear(linear) => {
                let mut weights = of_norms([&linear.norm, &None]);
                weights.extend_from_slice(&linear.weights);
                weights.extend(linear.biases.iter().flatten().copied());
                weights
            }
            Op::Attention(attention) => of_norms([&attention.q_norm, &attention.k_norm]),
            Op::Experts(Experts { gate, up, down, .. }) => smallvec![*gate, *up, *down],
            Op::Activate(_)
            | Op::Gate(_)
            | Op::Add
            | Op::SigmoidGate
            | Op::Route { .. }
            | Op::SelectRows
            | Op::SoftCap { .. } => Few::new(),
        }
    }

    /// The same operation on other weights: each id is replaced by `rename` of it, in the order of `weights`.
    #[must_use]
    pub fn map_weights(mut self, rename: impl FnMut(WeightId) -> WeightId) -> Self {
        self.rename_weights(rename);
        self
    }

    /// Replaces each weight's id by `rename` of it, in the order of `weights`.
    pub fn rename_weights(&mut self, mut rename: impl FnMut(WeightId) -> WeightId) {
        match self {
            Op::Embed { table, .. } | Op::AddPosition { table, .. } => *table = rename(*table),
            Op::Norm(norm) => norm.rename(&mut rename),
            Op::Linear(linear) => {
                linear.norm.iter_mut().for_each(|norm| norm.rename(&mut rename));
                linear.weights.iter_mut().for_each(|weight| *weight = rename(*weight));
                linear.biases.iter_mut().flatten().for_each(|bias| *bias = rename(*bias));
            }
            Op::Attention(attention) => {
                attention.q_norm.iter_mut().for_each(|norm| norm.rename(&mut rename));
                attention.k_norm.iter_mut().for_each(|norm| norm.rename(&mut rename));
            }
            Op::Experts(Experts { gate, up, down, .. }) => {
                for weight in [gate, up, down] {
                    *weight = rename(*weight);
                }
            }
            Op::Activate(_)
            | Op::Gate(_)
            | Op::Add
            | Op::SigmoidGate
            | Op::Route { .. }
            | Op::SelectRows
            | Op::SoftCap { .. } => (),
        }
    }

    /// Whether its matrices may come from another device: the rest needs few rows, or none.
    pub fn takes_fetched(&self) -> bool {
        matches!(self.products(), Some(Products::Linear(_) | Products::Experts(_)))
    }

    /// The table that the operation looks rows up in.
    pub fn table(&self) -> Option<WeightId> {
        if let Op::Embed { table, .. } | Op::AddPosition { table, .. } = self {
            Some(*table)
        } else {
            None
        }
    }

    /// The cache the operation reads and appends to.
    pub fn cache(&self) -> Option<CacheId> {
        if let Op::Attention(attention) = self { Some(attention.cache) } else { None }
    }

    /// The rotary embedding the operation applies.
    pub fn rope(&self) -> Option<RopeId> {
        if let Op::Attention(attention) = self { attention.rope } else { None }
    }
}

impl Norm {
    fn weights(&self) -> impl Iterator<Item = WeightId> {
        self.scale.iter().chain(&self.bias).copied()
    }

    fn rename(&mut self, rename: &mut impl FnMut(WeightId) -> WeightId) {
        for weight in self.scale.iter_mut().chain(self.bias.iter_mut()) {
            *weight = rename(*weight);
        }
    }
}
