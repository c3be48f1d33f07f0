//! Llama: the decoder as it is, with optional biases.

use anyhow::Result;
use ir::op::Activation;

use crate::decoder::{self, Decoder, Defaults};
use crate::lowering::Lowering;
use crate::rope::RopeDefaults;

/// What the families after Llama differ from.
pub(super) const DEFAULTS: Defaults = Defaults {
    vocabulary: 32_000,
    hidden: 4096,
    intermediate: 11_008,
    layers: 32,
    heads: 32,
    kv_heads: None,
    head_dim: None,
    context: 2048,
    epsilon: 1e-6,
    tied: false,
    activation: ("hidden_act", Activation::Silu),
    rope: RopeDefaults::COMMON,
};

pub(super) fn lower(lowering: &mut Lowering<'_>) -> Result<()> {
    let config = lowering.config;
    let attention_bias = config.flag("attention_bias", false)?;
    let decoder = Decoder {
        qkv_bias: attention_bias,
        output_bias: attention_bias,
        mlp_bias: config.flag("mlp_bias", false)?,
        ..Decoder::read(config, &DEFAULTS)?
    };
    let layers = decoder.alike(lowering, &DEFAULTS, None)?;
    decoder::lower(lowering, &decoder, &layers)
}
