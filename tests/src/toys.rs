//! Models of a few kilobytes, shaped like those that people run. Their files do not exist.

use anyhow::Result;
use ir::graph::LayerGraph;
use ir::id::{CacheId, FileId, RopeId, ValueId, WeightId};
use ir::model::{CheckpointFile, Model, ModelCache, ModelWeight};
use ir::op::{
    Activation, Attention, Experts, Frequencies, Linear, Norm, NormKind, Op, Pairing, Rope, Then,
    unscaled_frequencies,
};
use ir::smallvec;
use ir::tensor::{DType, Dim, TensorType};
use ir::weight::Source;

/// What a toy is made of.
#[derive(Clone, Debug)]
pub struct Toy {
    /// Transformer blocks.
    pub layers: u32,
    /// Features of the residual.
    pub features: u32,
    /// Query heads.
    pub heads: u32,
    /// Key and value heads; divides `heads`.
    pub kv_heads: u32,
    /// Features of one head.
    pub head_dim: u32,
    /// Features inside an MLP or expert.
    pub intermediate: u32,
    /// What follows attention.
    pub feed_forward: FeedForward,
    /// Rows of the embedding and of the logits.
    pub vocabulary: u32,
    /// Stored type of all weights.
    pub stored: DType,
    /// What families do differently.
    pub habits: Habits,
}

/// Kinds of feed-forward blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FeedForward {
    /// Two linears with an activation between them.
    Plain,
    /// A gated MLP.
    Gated,
    /// A mixture, perhaps beside a shared expert with a gate of its own.
    Mixture {
        /// Experts of each layer.
        experts: u32,
        /// Experts chosen for a token.
        used: u32,
        /// Whether there is a shared expert.
        is_shared: bool,
    },
}

/// What families do differently.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Habits {
    /// Linears have biases (GPT-2, OPT).
    pub has_biases: bool,
    /// Positions are learned (GPT-2, OPT).
    pub has_positions: bool,
    /// Queries and keys are normalised (Qwen3).
    pub has_head_norms: bool,
    /// Branches are normalised behind as well (Gemma2).
    pub has_branch_norms: bool,
    /// Attention and MLP read the same residual (GPT-NeoX).
    pub is_parallel: bool,
    /// Logits are capped (Gemma2).
    pub has_soft_cap: bool,
    /// The embedding is the head's weight.
    pub is_tied: bool,
}

impl Toy {
    /// Two blocks of Llama's kind, half a megabyte.
    pub fn llama() -> Self {
        Self {
            layers: 2,
            features: 64,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            intermediate: 128,
            feed_forward: FeedForward::Gated,
            vocabulary: 256,
            stored: DType::F32,
            habits: Habits::default(),
        }
    }

    /// Two blocks of Mixtral's kind.
    pub fn mixture() -> Self {
        let feed_forward = FeedForward::Mixture { experts: 4, used: 2, is_shared: false };
        Self { feed_forward, intermediate: 64, ..Self::llama() }
    }

    /// The lowered model.
    pub fn model(&self) -> Result<Model> {
        let file = CheckpointFile { path: "model.safetensors".into(), bytes: 0, fingerprint: 0 };
        let mut model = Model {
            name: "toy".into(),
            architecture: "Toy".into(),
            folder: "toy".into(),
            vocabulary: self.vocabulary,
            context: 256,
            ..Model::default()
        };
        model.files.push(file);
        // Of an odd head all but the last feature.
        let (pairing, dims) = (Pairing::Halves, self.head_dim / 2 * 2);
        let frequencies = Frequencies::Fixed(unscaled_frequencies(1e4, dims));
        let rope = model.ropes.push(Rope { pairing, dims, magnitude: 1.0, frequencies });
        let mut made = Made { toy: self, model, graph: LayerGraph::default(), file_bytes: 0 };
        made.all_layers(rope)?;
        let Made { mut model, graph, file_bytes, .. } = made;
        model.layers = graph;
        model.files.rows_mut()[0].bytes = file_bytes;
        Ok(model)
    }
}

/// A model as far as it is made.
struct Made<'a> {
    toy: &'a Toy,
    model: Model,
    graph: LayerGraph,
    file_bytes: u64,
}

impl Made<'_> {
    fn all_layers(&mut self, rope: RopeId) -> Result<()> {
        let Toy { features, vocabulary, habits, .. } = *self.toy;
        let table = self.weight("embed", &[vocabulary, features]);
        let mut x = self.push("embed", Op::Embed { table, scale: 1.0 }, &[], features)?;
        if habits.has_positions {
            let table = self.weight("positions", &[self.model.context + 2, features]);
            x = self.push("positions", Op::AddPosition { table, offset: 2 }, &[x], features)?;
        }
        for layer in 0..self.toy.layers {
            x = self.block(&format!("layers.{layer}"), rope, x)?;
        }
        let rows = |features| TensorType {
            dtype: DType::F32,
            shape: smallvec![Dim::Rows, Dim::Fixed(features)],
        };
        let x = self.graph.push_one("select", Op::SelectRows, &[x], rows(features))?;
        let norm = Op::Norm(self.norm_of("norm", features));
        let x = self.graph.push_one("norm", norm, &[x], rows(features))?;
        let head =
            if habits.is_tied { table } else { self.weight("head", &[vocabulary, features]) };
        let linear = Op::Linear(plain(head, None));
        let mut logits = self.graph.push_one("head", linear, &[x], rows(vocabulary))?;
        if habits.has_soft_cap {
            let cap = Op::SoftCap { cap: 30.0 };
            logits = self.graph.push_one("soft_cap", cap, &[logits], rows(vocabulary))?;
        }
        self.graph.return_value(logits);
        Ok(())
    }

    fn block(&mut self, name: &str, rope: RopeId, x: ValueId) -> Result<ValueId> {
        let features = self.toy.features;
        let normed = self.norm(&format!("{name}.norm"), x)?;
        let branch = self.attention(name, rope, normed)?;
        if self.toy.habits.is_parallel {
            let normed = self.norm(&format!("{name}.mlp_norm"), x)?;
            let mlp = self.feed_forward(name, normed)?;
            let both = self.push(&format!("{name}.both"), Op::Add, &[branch, mlp], features)?;
            return self.push(&format!("{name}.add"), Op::Add, &[both, x], features);
        }
        let branch = self.branch_norm(&format!("{name}.behind"), branch)?;
        let x = self.push(&format!("{name}.add"), Op::Add, &[x, branch], features)?;
        let normed = self.norm(&format!("{name}.mlp_norm"), x)?;
        let branch = self.feed_forward(name, normed)?;
        let branch = self.branch_norm(&format!("{name}.mlp_behind"), branch)?;
        self.push(&format!("{name}.mlp_add"), Op::Add, &[x, branch], features)
    }

    fn attention(&mut self, name: &str, rope: RopeId, x: ValueId) -> Result<ValueId> {
        let Toy { features, heads, kv_heads, head_dim, habits, .. } = *self.toy;
        let cache: CacheId = self.model.caches.push(ModelCache { kv_heads, head_dim });
        let q = self.linear(&format!("{name}.q"), x, features, heads * head_dim)?;
        let k = self.linear(&format!("{name}.k"), x, features, kv_heads * head_dim)?;
        let v = self.linear(&format!("{name}.v"), x, features, kv_heads * head_dim)?;
        let [q_norm, k_norm] = ["q_norm", "k_norm"].map(|norm| {
            habits.has_head_norms.then(|| self.norm_of(&format!("{name}.{norm}"), head_dim))
        });
        let op = Op::Attention(Attention {
            cache,
            heads,
            kv_heads,
            head_dim,
            group: heads / kv_heads,
            first_head: 0,
            scale: 0.25,
            window: None,
            soft_cap: None,
            q_norm,
            k_norm,
            rope: (!habits.has_positions).then_some(rope),
        });
        let y = self.push(&format!("{name}.attention"), op, &[q, k, v], heads * head_dim)?;
        self.linear(&format!("{name}.o"), y, heads * head_dim, features)
    }

    fn feed_forward(&mut self, name: &str, x: ValueId) -> Result<ValueId> {
        let Toy { features, intermediate, feed_forward, .. } = *self.toy;
        match feed_forward {
            FeedForward::Plain => {
                let y = self.linear(&format!("{name}.up"), x, features, intermediate)?;
                let op = Op::Activate(Activation::GeluTanh);
                let y = self.push(&format!("{name}.activation"), op, &[y], intermediate)?;
                self.linear(&format!("{name}.down"), y, intermediate, features)
            }
            FeedForward::Gated => self.gated(name, x),
            FeedForward::Mixture { experts, used, is_shared } => {
                let chosen = self.mixture(name, x, experts, used)?;
                if !is_shared {
                    return Ok(chosen);
                }
                let shared = self.gated(&format!("{name}.shared"), x)?;
                let gate = self.linear(&format!("{name}.shared_gate"), x, features, 1)?;
                let inputs = [gate, shared];
                let shared =
                    self.push(&format!("{name}.shared_out"), Op::SigmoidGate, &inputs, features)?;
                self.push(&format!("{name}.experts_add"), Op::Add, &[chosen, shared], features)
            }
        }
    }

    fn gated(&mut self, name: &str, x: ValueId) -> Result<ValueId> {
        let Toy { features, intermediate, .. } = *self.toy;
        let gate = self.linear(&format!("{name}.gate"), x, features, intermediate)?;
        let up = self.linear(&format!("{name}.up"), x, features, intermediate)?;
        let op = Op::Gate(Activation::Silu);
        let y = self.push(&format!("{name}.activation"), op, &[gate, up], intermediate)?;
        self.linear(&format!("{name}.down"), y, intermediate, features)
    }

    fn mixture(&mut self, name: &str, x: ValueId, experts: u32, used: u32) -> Result<ValueId> {
        let Toy { features, intermediate, .. } = *self.toy;
        let router = self.weight(&format!("{name}.router"), &[experts, features]);
        let op = Op::Linear(plain(router, None));
        let logits = self.push(&format!("{name}.router"), op, &[x], experts)?;
        let weights = TensorType::activation(used);
        let ids = TensorType { dtype: DType::I32, ..weights.clone() };
        let route = Op::Route { used, renormalise: true };
        let chosen = self.graph.push(format!("{name}.route"), route, &[logits], &[ids, weights])?;
        let op = Op::Experts(Experts {
            gate: self.weight(&format!("{name}.gate"), &[experts, intermediate, features]),
            up: self.weight(&format!("{name}.up"), &[experts, intermediate, features]),
            down: self.weight(&format!("{name}.down"), &[experts, features, intermediate]),
            activation: Activation::Silu,
            part: None,
        });
        self.push(&format!("{name}.experts"), op, &[x, chosen[0], chosen[1]], features)
    }

    fn branch_norm(&mut self, name: &str, x: ValueId) -> Result<ValueId> {
        if self.toy.habits.has_branch_norms { self.norm(name, x) } else { Ok(x) }
    }

    fn norm(&mut self, name: &str, x: ValueId) -> Result<ValueId> {
        let op = Op::Norm(self.norm_of(name, self.toy.features));
        self.push(name, op, &[x], self.toy.features)
    }

    fn norm_of(&mut self, name: &str, features: u32) -> Norm {
        let scale = Some(self.weight(name, &[features]));
        Norm { kind: NormKind::Rms, scale, bias: None, epsilon: 1e-5, scale_offset: 0.0 }
    }

    fn linear(&mut self, name: &str, x: ValueId, inputs: u32, outputs: u32) -> Result<ValueId> {
        let weight = self.weight(name, &[outputs, inputs]);
        let has_bias = self.toy.habits.has_biases && outputs > 1;
        let bias = has_bias.then(|| self.weight(&format!("{name}.bias"), &[outputs]));
        self.push(name, Op::Linear(plain(weight, bias)), &[x], outputs)
    }

    fn weight(&mut self, name: &str, shape: &[u32]) -> WeightId {
        let stored = self.toy.stored;
        let file: FileId = self.model.files.ids().next().expect("the model has one file");
        let source = Source::contiguous(file, stored, self.file_bytes, shape);
        self.file_bytes = source.span().1;
        let (name, shape) = (name.to_owned(), shape.to_vec());
        self.model.weights.push(ModelWeight { name, shape, stored, sources: vec![source] })
    }

    fn push(&mut self, name: &str, op: Op, inputs: &[ValueId], features: u32) -> Result<ValueId> {
        self.graph.push_one(name, op, inputs, TensorType::activation(features))
    }
}

fn plain(weight: WeightId, bias: Option<WeightId>) -> Linear {
    Linear {
        norm: None,
        weights: smallvec![weight],
        biases: smallvec![bias],
        then: Then::Nothing,
        residual: false,
    }
}
