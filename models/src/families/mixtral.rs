//! Mixtral: Mistral with a mixture of experts in every layer.

use anyhow::Result;

use super::llama;
use crate::blocks::Mixture;
use crate::decoder::{self, Decoder, Defaults, Layer, Mlp};
use crate::lowering::Lowering;
use crate::rope::RopeDefaults;

const DEFAULTS: Defaults = Defaults {
    intermediate: 14_336,
    kv_heads: Some(8),
    context: 131_072,
    epsilon: 1e-5,
    rope: RopeDefaults { theta: 1_000_000.0, ..RopeDefaults::COMMON },
    ..llama::DEFAULTS
};

pub(super) fn lower(lowering: &mut Lowering<'_>) -> Result<()> {
    let config = lowering.config;
    let decoder = Decoder::read(config, &DEFAULTS)?;
    let mixture = Mixture {
        experts: config.size("num_local_experts", config.size("num_experts", 8)?)?,
        used: config.size("num_experts_per_tok", 2)?,
        renormalise: true,
        intermediate: decoder.intermediate,
        shared: None,
        matrices: ["w1", "w3", "w2"],
    };
    // Published checkpoints have the first name, those that keep transformers 5's own layout the second.
    let prefix = lowering.prefix(decoder.prefixes, "layers.0.input_layernorm.weight");
    let published = !lowering.has(&format!("{prefix}layers.0.mlp.gate.weight"));
    let name = if published { "block_sparse_moe" } else { "mlp" };
    let window = config.nullable_size("sliding_window", None)?;
    let layers: Vec<Layer> = decoder
        .alike(lowering, &DEFAULTS, window)?
        .into_iter()
        .map(|layer| Layer { mlp: Mlp::Mixture(name, mixture.clone()), ..layer })
        .collect();
    decoder::lower(lowering, &decoder, &layers)
}
