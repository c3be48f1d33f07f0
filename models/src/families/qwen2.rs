//! Qwen2: biases on query, key and value; a window in the layers that the configuration chooses.

use anyhow::Result;

use super::llama;
use crate::config::Config;
use crate::decoder::{self, Decoder, Defaults};
use crate::lowering::Lowering;

/// Qwen3's too, but for the head.
pub(super) const DEFAULTS: Defaults = Defaults {
    vocabulary: 151_936,
    intermediate: 22_016,
    kv_heads: Some(32),
    context: 32_768,
    ..llama::DEFAULTS
};

pub(super) fn lower(lowering: &mut Lowering<'_>) -> Result<()> {
    let decoder = Decoder { qkv_bias: true, ..Decoder::read(lowering.config, &DEFAULTS)? };
    let max_window_layers =
        lowering.config.nullable_size("max_window_layers", Some(28))?.unwrap_or(0);
    let windows = windows(lowering.config, decoder.layers, |layer| layer >= max_window_layers)?;
    let layers = decoder.windowed(lowering, &DEFAULTS, &windows)?;
    decoder::lower(lowering, &decoder, &layers)
}

/// The window of each layer: by `layer_types`, else where `slides` says so.
pub(super) fn windows(
    config: &Config,
    layers: u32,
    slides: impl Fn(u32) -> bool,
) -> Result<Vec<Option<u32>>> {
    config.windows(layers, window(config)?, slides)
}

/// The window of layers that have one; none unless `use_sliding_window`.
pub(super) fn window(config: &Config) -> Result<Option<u32>> {
    let has_window = config.flag("use_sliding_window", false)?;
    if has_window { config.nullable_size("sliding_window", Some(4096)) } else { Ok(None) }
}
