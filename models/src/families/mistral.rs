//! Mistral: every layer sees a window, or those that `layer_types` names, as in Ministral.

use anyhow::Result;

use super::llama;
use crate::decoder::{self, Decoder, Defaults};
use crate::lowering::Lowering;

const DEFAULTS: Defaults =
    Defaults { intermediate: 14_336, kv_heads: Some(8), context: 131_072, ..llama::DEFAULTS };

pub(super) fn lower(lowering: &mut Lowering<'_>) -> Result<()> {
    let decoder = Decoder::read(lowering.config, &DEFAULTS)?;
    let window = lowering.config.nullable_size("sliding_window", Some(4096))?;
    // What transformers' AutoConfig takes for a Ministral under this name, too.
    let windows = lowering.config.windows(decoder.layers, window, |_| true)?;
    let layers = decoder.windowed(lowering, &DEFAULTS, &windows)?;
    decoder::lower(lowering, &decoder, &layers)
}
