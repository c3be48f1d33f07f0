//! Gemma2: scaled embedding, norms of `1 + w` in front and behind, soft caps, a window in every other layer.

use anyhow::Result;
use ir::op::Activation;

use super::llama;
use crate::config::Config;
use crate::decoder::{self, Decoder, Defaults, inverse_root};
use crate::lowering::Lowering;

/// Gemma3's too, but for vocabulary and context.
pub(super) const DEFAULTS: Defaults = Defaults {
    vocabulary: 256_000,
    hidden: 2304,
    intermediate: 9216,
    layers: 26,
    heads: 8,
    kv_heads: Some(4),
    head_dim: Some(256),
    context: 8192,
    tied: true,
    activation: ("hidden_activation", Activation::GeluTanh),
    ..llama::DEFAULTS
};

pub(super) fn lower(lowering: &mut Lowering<'_>) -> Result<()> {
    let config = lowering.config;
    let decoder = Decoder {
        soft_cap: config
            .nullable_positive("attn_logit_softcapping", Some(50.0))?
            .map(|cap| cap as f32),
        logit_cap: config
            .nullable_positive("final_logit_softcapping", Some(30.0))?
            .map(|cap| cap as f32),
        ..decoder(config, &DEFAULTS)?
    };
    let windows = windows(config, decoder.layers, 2)?;
    let layers = decoder.windowed(lowering, &DEFAULTS, &windows)?;
    decoder::lower(lowering, &decoder, &layers)
}

/// What Gemma2 and Gemma3 share.
pub(super) fn decoder(config: &Config, defaults: &Defaults) -> Result<Decoder> {
    anyhow::ensure!(
        !config.flag("use_bidirectional_attention", false)?,
        config.error("use_bidirectional_attention is true, but generation needs causal attention")
    );
    let read = Decoder::read(config, defaults)?;
    let attention_bias = config.flag("attention_bias", false)?;
    Ok(Decoder {
        // transformers rounds this to the type it computes in; the plan computes activations in 32 bits.
        embed_scale: f64::from(read.hidden).sqrt() as f32,
        norm_offset: 1.0,
        post_norms: true,
        qkv_bias: attention_bias,
        output_bias: attention_bias,
        scale: inverse_root(config.positive("query_pre_attn_scalar", 256.0)?),
        ..read
    })
}

/// The window of each layer: by `layer_types`, else in all but each `pattern`th.
pub(super) fn windows(config: &Config, layers: u32, pattern: u32) -> Result<Vec<Option<u32>>> {
    let window = config.nullable_size("sliding_window", Some(4096))?;
    config.windows(layers, window, |layer| !(layer + 1).is_multiple_of(pattern))
}
