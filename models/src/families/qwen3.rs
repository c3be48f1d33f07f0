//! Qwen3: Qwen2 with normalised query and key heads in place of biases.

use anyhow::Result;

use super::qwen2;
use crate::decoder::{self, Decoder, Defaults};
use crate::lowering::Lowering;

const DEFAULTS: Defaults = Defaults { head_dim: Some(128), ..qwen2::DEFAULTS };

pub(super) fn lower(lowering: &mut Lowering<'_>) -> Result<()> {
    let config = lowering.config;
    let attention_bias = config.flag("attention_bias", false)?;
    let decoder = Decoder {
        qkv_bias: attention_bias,
        output_bias: attention_bias,
        qk_norm: true,
        ..Decoder::read(config, &DEFAULTS)?
    };
    let max_window_layers = config.nullable_size("max_window_layers", Some(28))?.unwrap_or(0);
    let windows = qwen2::windows(config, decoder.layers, |layer| layer >= max_window_layers)?;
    let layers = decoder.windowed(lowering, &DEFAULTS, &windows)?;
    decoder::lower(lowering, &decoder, &layers)
}
