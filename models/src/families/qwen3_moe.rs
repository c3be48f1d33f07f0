//! Qwen3-MoE: Qwen3 with experts in the layers that the configuration chooses.

use anyhow::Result;

use super::{qwen2, qwen2_moe};
use crate::blocks::Mixture;
use crate::decoder::{self, Decoder, Defaults};
use crate::lowering::Lowering;

const DEFAULTS: Defaults = Defaults {
    hidden: 2048,
    intermediate: 6144,
    layers: 24,
    heads: 32,
    kv_heads: Some(4),
    ..qwen2::DEFAULTS
};

pub(super) fn lower(lowering: &mut Lowering<'_>) -> Result<()> {
    let config = lowering.config;
    let attention_bias = config.flag("attention_bias", false)?;
    let decoder = Decoder {
        qkv_bias: attention_bias,
        output_bias: attention_bias,
        qk_norm: true,
        ..Decoder::read(config, &DEFAULTS)?
    };
    let mixture = Mixture {
        experts: qwen2_moe::experts(config, 128)?,
        used: config.size("num_experts_per_tok", 8)?,
        renormalise: config.flag("norm_topk_prob", false)?,
        intermediate: config.size("moe_intermediate_size", 768)?,
        shared: None,
        matrices: ["gate_proj", "up_proj", "down_proj"],
    };
    // Of the Qwen families only this one has no `layer_types`.
    let layers = decoder.alike(lowering, &DEFAULTS, qwen2::window(config)?)?;
    let layers = qwen2_moe::with_experts(config, layers, &mixture)?;
    decoder::lower(lowering, &decoder, &layers)
}
