//! Checkpoints that have a configuration and headers but no data: their files are holes.
//!
//! They are for what looks at names and shapes only, at sizes no test could store.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;

use anyhow::{Context as _, Result};
use ir::model::Model;
use serde_json::{Map, Value, json};

/// A checkpoint to write.
#[derive(Clone, Debug)]
pub struct MadeUp {
    /// `config.json`.
    pub config: Value,
    /// Name, element type and shape of each tensor.
    pub tensors: Vec<(String, String, Vec<u64>)>,
}

/// The sizes of a Llama.
#[derive(Clone, Copy, Debug)]
pub struct LlamaShape {
    /// Rows of the embedding.
    pub vocabulary: u64,
    /// Features of the residual stream.
    pub hidden: u64,
    /// Features inside the MLP.
    pub intermediate: u64,
    /// Transformer blocks.
    pub layers: u64,
    /// Query heads.
    pub heads: u64,
    /// Key and value heads.
    pub kv_heads: u64,
}

impl LlamaShape {
    /// The shape of Llama 2 70B with the vocabulary of Llama 3.
    pub const LLAMA_70B: Self = Self {
        vocabulary: 128_256,
        hidden: 8192,
        intermediate: 28_672,
        layers: 80,
        heads: 64,
        kv_heads: 8,
    };

    /// The shape of Llama 3 8B.
    pub const LLAMA_8B: Self = Self {
        vocabulary: 128_256,
        hidden: 4096,
        intermediate: 14_336,
        layers: 32,
        heads: 32,
        kv_heads: 8,
    };

    /// The smallest shape with grouped heads.
    pub const TINY: Self =
        Self { vocabulary: 32, hidden: 16, intermediate: 24, layers: 2, heads: 4, kv_heads: 2 };
}

/// The sizes of a mixture of Qwen3's kind.
#[derive(Clone, Copy, Debug)]
pub struct MixtureShape {
    /// Rows of the embedding.
    pub vocabulary: u64,
    /// Features of the residual stream.
    pub hidden: u64,
    /// Features inside an expert.
    pub inner: u64,
    /// Experts of a block.
    pub experts: u64,
    /// Transformer blocks.
    pub layers: u64,
    /// Query heads.
    pub heads: u64,
    /// Key and value heads.
    pub kv_heads: u64,
}

impl MixtureShape {
    /// The blocks of Qwen3 30B-A3B, half as many.
    pub const QWEN3_15B: Self = Self {
        vocabulary: 151_936,
        hidden: 2048,
        inner: 768,
        experts: 128,
        layers: 24,
        heads: 32,
        kv_heads: 4,
    };
}

impl MadeUp {
    /// An untied Llama in bfloat16.
    pub fn llama(shape: LlamaShape) -> Self {
        let LlamaShape { vocabulary, hidden, intermediate, layers, heads, kv_heads } = shape;
        let narrow = hidden / heads * kv_heads;
        let mut tensors = vec![
            ("model.embed_tokens.weight".to_owned(), vec![vocabulary, hidden]),
            ("lm_head.weight".to_owned(), vec![vocabulary, hidden]),
            ("model.norm.weight".to_owned(), vec![hidden]),
        ];
        for layer in 0..layers {
            let parts = [
                ("input_layernorm", vec![hidden]),
                ("post_attention_layernorm", vec![hidden]),
                ("self_attn.q_proj", vec![hidden, hidden]),
                ("self_attn.k_proj", vec![narrow, hidden]),
                ("self_attn.v_proj", vec![narrow, hidden]),
                ("self_attn.o_proj", vec![hidden, hidden]),
                ("mlp.gate_proj", vec![intermediate, hidden]),
                ("mlp.up_proj", vec![intermediate, hidden]),
                ("mlp.down_proj", vec![hidden, intermediate]),
            ];
            let named =
                parts.map(|(part, shape)| (format!("model.layers.{layer}.{part}.weight"), shape));
            tensors.extend(named);
        }
        let config = json!({
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": vocabulary,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "max_position_embeddings": 4096,
        });
        let tensors =
            tensors.into_iter().map(|(name, shape)| (name, "BF16".into(), shape)).collect();
        Self { config, tensors }
    }

    /// A mixture of Qwen3's kind with 15 B parameters in bfloat16: 24 blocks of 128 experts, 8 of them used.
    pub fn mixture() -> Self {
        Self::mixture_of(MixtureShape::QWEN3_15B)
    }

    /// A mixture of Qwen3's kind in bfloat16, of whose experts each token uses eight.
    pub fn mixture_of(shape: MixtureShape) -> Self {
        const HEAD_DIM: u64 = 128;
        let MixtureShape { vocabulary, hidden, inner, experts, layers, heads, kv_heads } = shape;
        let mut tensors = vec![
            ("model.embed_tokens.weight".to_owned(), vec![vocabulary, hidden]),
            ("lm_head.weight".to_owned(), vec![vocabulary, hidden]),
            ("model.norm.weight".to_owned(), vec![hidden]),
        ];
        for layer in 0..layers {
            let mut push = |part: &str, shape: &[u64]| {
                tensors.push((format!("model.layers.{layer}.{part}.weight"), shape.to_vec()));
            };
            push("input_layernorm", &[hidden]);
            push("post_attention_layernorm", &[hidden]);
            push("self_attn.q_proj", &[heads * HEAD_DIM, hidden]);
            push("self_attn.k_proj", &[kv_heads * HEAD_DIM, hidden]);
            push("self_attn.v_proj", &[kv_heads * HEAD_DIM, hidden]);
            push("self_attn.o_proj", &[hidden, heads * HEAD_DIM]);
            push("self_attn.q_norm", &[HEAD_DIM]);
            push("self_attn.k_norm", &[HEAD_DIM]);
            push("mlp.gate", &[experts, hidden]);
            for expert in 0..experts {
                push(&format!("mlp.experts.{expert}.gate_proj"), &[inner, hidden]);
                push(&format!("mlp.experts.{expert}.up_proj"), &[inner, hidden]);
                push(&format!("mlp.experts.{expert}.down_proj"), &[hidden, inner]);
            }
        }
        let config = json!({
            "architectures": ["Qwen3MoeForCausalLM"],
            "vocab_size": vocabulary,
            "hidden_size": hidden,
            "moe_intermediate_size": inner,
            "num_experts": experts,
            "num_experts_per_tok": 8,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": HEAD_DIM,
            "max_position_embeddings": 8192,
        });
        let tensors =
            tensors.into_iter().map(|(name, shape)| (name, "BF16".into(), shape)).collect();
        Self { config, tensors }
    }

    /// The tensor of that name.
    pub fn tensor(&mut self, name: &str) -> &mut (String, String, Vec<u64>) {
        let found = self.tensors.iter_mut().find(|(known, ..)| known == name);
        found.expect("the test names a tensor that is there")
    }

    /// The model of the checkpoint.
    ///
    /// # Panics
    /// When it cannot be written, or is no model.
    pub fn model(&self) -> Model {
        let folder = tempfile::tempdir().expect("a folder for the headers");
        self.write(folder.path(), 4).expect("headers are written");
        models::lower(folder.path()).expect("the headers are a model")
    }

    /// Writes the checkpoint into a folder: one file, or as many shards and an index.
    pub fn write(&self, folder: &Path, shards: usize) -> Result<()> {
        fs::write(folder.join("config.json"), self.config.to_string())
            .context("writing config.json")?;
        if shards == 1 {
            return write_header(&folder.join("model.safetensors"), &self.tensors);
        }
        let mut map = Map::new();
        for (index, tensors) in self.tensors.chunks(self.tensors.len().div_ceil(shards)).enumerate()
        {
            let name = format!("model-{:05}-of-{shards:05}.safetensors", index + 1);
            write_header(&folder.join(&name), tensors)?;
            map.extend(tensors.iter().map(|(tensor, ..)| (tensor.clone(), json!(name))));
        }
        let index = json!({ "metadata": {}, "weight_map": map }).to_string();
        fs::write(folder.join("model.safetensors.index.json"), index).context("writing the index")
    }
}

fn write_header(path: &Path, tensors: &[(String, String, Vec<u64>)]) -> Result<()> {
    let mut header = Map::new();
    let mut end = 0;
    for (name, dtype, shape) in tensors {
        let element = if dtype == "F32" { 4 } else { 2 };
        let start = end;
        end += shape.iter().product::<u64>() * element;
        let entry = json!({ "dtype": dtype, "shape": shape, "data_offsets": [start, end] });
        header.insert(name.clone(), entry);
    }
    let header = Value::Object(header).to_string();
    let writing = || format!("writing {}", path.display());
    let mut file = File::create(path).with_context(writing)?;
    file.write_all(&(header.len() as u64).to_le_bytes()).with_context(writing)?;
    file.write_all(header.as_bytes()).with_context(writing)?;
    file.set_len(8 + header.len() as u64 + end).with_context(writing)
}
