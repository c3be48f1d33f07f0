//! Gemma3: Gemma2 with normalised query and key heads in place of soft caps, and rotary bases of their own
//! for layers with and without a window. The text part of `Gemma3ForConditionalGeneration` is lowered alike.

use anyhow::Result;
use ir::id::RopeId;

use super::gemma2;
use crate::decoder::{self, Decoder, Defaults, Layer, Mlp};
use crate::lowering::Lowering;
use crate::rope::{self, Rotary, RotatedHead, Scalings};

const DEFAULTS: Defaults = Defaults { vocabulary: 262_208, context: 131_072, ..gemma2::DEFAULTS };

pub(super) fn lower(lowering: &mut Lowering<'_>) -> Result<()> {
    let config = lowering.config;
    let decoder = Decoder {
        prefixes: &["model.", "language_model.model.", "model.language_model.", ""],
        head_names: &["lm_head.weight", "language_model.lm_head.weight"],
        qk_norm: true,
        logit_cap: config.nullable_positive("final_logit_softcapping", None)?.map(|cap| cap as f32),
        ..gemma2::decoder(config, &DEFAULTS)?
    };
    let pattern = config.size("sliding_window_pattern", 6)?;
    let windows = gemma2::windows(config, decoder.layers, pattern)?;
    let global = rope(lowering, &decoder, true)?;
    let local = rope(lowering, &decoder, false)?;
    let layers: Vec<Layer> = windows
        .into_iter()
        .map(|window| Layer {
            window,
            rope: if window.is_some() { local } else { global },
            mlp: Mlp::Gated,
        })
        .collect();
    decoder::lower(lowering, &decoder, &layers)
}

/// The rotary embedding of layers without a window, or with one.
fn rope(lowering: &mut Lowering<'_>, decoder: &Decoder, global: bool) -> Result<RopeId> {
    let config = lowering.config;
    let (kind, field, default) = if global {
        ("full_attention", "rope_theta", 1_000_000.0)
    } else {
        ("sliding_attention", "rope_local_base_freq", 10_000.0)
    };
    let nested = match config.section("rope_parameters")? {
        Some(parameters) => parameters.section(kind)?,
        None => None,
    };
    let nested = nested.unwrap_or_else(|| config.empty_section(kind));
    // The scaling of transformers 4 is for the layers without a window, and comes before that of transformers 5.
    let scaling = if global { config.section("rope_scaling")? } else { None };
    let parameters = match scaling {
        Some(scaling) => scaling.over(nested),
        None => nested,
    };
    let theta = match parameters.optional_positive("rope_theta")? {
        Some(theta) => theta,
        None => config.positive(field, default)?,
    };
    let head = RotatedHead { features: decoder.heads.features, partial: 1.0 };
    let context = decoder.context;
    let rope = rope::with_base(config, &parameters, head, context, theta, Scalings::All)?;
    // Gemma3's configurations give the context after scaling.
    Ok(lowering.add_rope(Rotary { context, ..rope }))
}
