//! Phi3: fused projections, LongRoPE, heads that may be rotated in part.

use anyhow::Result;

use super::llama;
use crate::decoder::{self, Decoder, Defaults};
use crate::lowering::Lowering;
use crate::rope::{RopeDefaults, Scalings};

const DEFAULTS: Defaults = Defaults {
    vocabulary: 32_064,
    hidden: 3072,
    intermediate: 8192,
    context: 4096,
    epsilon: 1e-5,
    rope: RopeDefaults {
        partial: Some(1.0),
        scalings: Scalings::LongRope { original_tokens: 4096 },
        ..RopeDefaults::COMMON
    },
    ..llama::DEFAULTS
};

pub(super) fn lower(lowering: &mut Lowering<'_>) -> Result<()> {
    let decoder = Decoder { fused: true, ..Decoder::read(lowering.config, &DEFAULTS)? };
    let window = lowering.config.nullable_size("sliding_window", None)?;
    let layers = decoder.alike(lowering, &DEFAULTS, window)?;
    decoder::lower(lowering, &decoder, &layers)
}
