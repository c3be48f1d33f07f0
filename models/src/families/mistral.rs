//! Mistral: every layer sees a window.

use anyhow::Result;

use super::llama;
use crate::decoder::{self, Decoder, Defaults};
use crate::lowering::Lowering;

const DEFAULTS: Defaults =
    Defaults { intermediate: 14_336, kv_heads: Some(8), context: 131_072, ..llama::DEFAULTS };

pub(super) fn lower(lowering: &mut Lowering<'_>) -> Result<()> {
    let decoder = Decoder::read(lowering.config, &DEFAULTS)?;
    let window = lowering.config.nullable_size("sliding_window", Some(4096))?;
    let layers = decoder.alike(lowering, &DEFAULTS, window)?;
    decoder::lower(lowering, &decoder, &layers)
}
