//! Qwen2-MoE: Qwen2 with experts in the layers that the configuration chooses, one of them shared by all tokens.

use anyhow::Result;

use super::qwen2;
use crate::blocks::Mixture;
use crate::config::Config;
use crate::decoder::{self, Decoder, Defaults, Layer, Mlp};
use crate::lowering::Lowering;

const DEFAULTS: Defaults = Defaults {
    hidden: 2048,
    intermediate: 5632,
    layers: 24,
    heads: 16,
    kv_heads: Some(16),
    ..qwen2::DEFAULTS
};

pub(super) fn lower(lowering: &mut Lowering<'_>) -> Result<()> {
    let config = lowering.config;
    let qkv_bias = config.flag("qkv_bias", true)?;
    let decoder = Decoder { qkv_bias, ..Decoder::read(config, &DEFAULTS)? };
    let max_window_layers = config.nullable_size("max_window_layers", Some(28))?.unwrap_or(0);
    let windows = qwen2::windows(config, decoder.layers, |layer| {
        layer < max_window_layers && layer.is_multiple_of(2)
    })?;
    let mixture = Mixture {
        experts: experts(config, 60)?,
        used: config.size("num_experts_per_tok", 4)?,
        renormalise: config.flag("norm_topk_prob", false)?,
        intermediate: config.size("moe_intermediate_size", 1408)?,
        shared: Some(config.size("shared_expert_intermediate_size", 5632)?),
        matrices: ["gate_proj", "up_proj", "down_proj"],
    };
    let layers = decoder.windowed(lowering, &DEFAULTS, &windows)?;
    let layers = with_experts(config, layers, &mixture)?;
    decoder::lower(lowering, &decoder, &layers)
}

/// The number of experts, which Qwen's configurations have under either name.
pub(super) fn experts(config: &Config, default: u32) -> Result<u32> {
    config.size("num_experts", config.size("num_local_experts", default)?)
}

/// Puts the mixture into each `decoder_sparse_step`th layer that is not in `mlp_only_layers`.
pub(super) fn with_experts(
    config: &Config,
    layers: Vec<Layer>,
    mixture: &Mixture,
) -> Result<Vec<Layer>> {
    let step = config.size("decoder_sparse_step", 1)?;
    let dense = config.indices("mlp_only_layers")?;
    let sparse = |index: u32| !dense.contains(&index) && (index + 1).is_multiple_of(step);
    Ok((0..)
        .zip(layers)
        .map(|(index, layer)| match sparse(index) {
            true => Layer { mlp: Mlp::Mixture("mlp", mixture.clone()), ..layer },
            false => layer,
        })
        .collect())
}
