//! The pre-norm decoder with rotary attention and gated MLPs that most families are: written once.

use anyhow::{Result, ensure};
use ir::id::{RopeId, ValueId};
use ir::op::{Activation, Norm, NormKind};

use crate::blocks::{self, AttentionStyle, Heads, Mixture, Vocabulary};
use crate::config::Config;
use crate::lowering::Lowering;
use crate::rope::{self, RopeDefaults};

/// What a family's configuration class assumes where `config.json` is silent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Defaults {
    pub(crate) vocabulary: u32,
    pub(crate) hidden: u32,
    pub(crate) intermediate: u32,
    pub(crate) layers: u32,
    pub(crate) heads: u32,
    /// `None`: as many as query heads.
    pub(crate) kv_heads: Option<u32>,
    /// `None`: hidden features divided by heads.
    pub(crate) head_dim: Option<u32>,
    pub(crate) context: u32,
    pub(crate) epsilon: f64,
    pub(crate) tied: bool,
    /// The field that names the activation, and the activation.
    pub(crate) activation: (&'static str, Activation),
    pub(crate) rope: RopeDefaults,
}

/// A decoder: what the configuration says, and what the family adds.
#[derive(Clone, Debug)]
pub(crate) struct Decoder {
    pub(crate) vocabulary: u32,
    pub(crate) hidden: u32,
    pub(crate) intermediate: u32,
    pub(crate) layers: u32,
    pub(crate) heads: Heads,
    pub(crate) context: u32,
    pub(crate) epsilon: f32,
    pub(crate) tied: bool,
    pub(crate) activation: Activation,
    /// Key prefixes that checkpoints of the family have, the usual one first.
    pub(crate) prefixes: &'static [&'static str],
    /// Names that checkpoints of the family have for the head's matrix.
    pub(crate) head_names: &'static [&'static str],
    /// Factor on the embedding.
    pub(crate) embed_scale: f32,
    /// Added to every norm's scale.
    pub(crate) norm_offset: f32,
    /// Whether attention and MLP are normalised behind too, under Gemma's names.
    pub(crate) post_norms: bool,
    pub(crate) qkv_bias: bool,
    pub(crate) output_bias: bool,
    pub(crate) mlp_bias: bool,
    /// Whether query and key heads are normalised.
    pub(crate) qk_norm: bool,
    /// Whether query, key and value, and gate and up, are one tensor each.
    pub(crate) fused: bool,
    /// Factor on attention scores.
    pub(crate) scale: f32,
    /// Cap of attention scores.
    pub(crate) soft_cap: Option<f32>,
    /// Cap of logits.
    pub(crate) logit_cap: Option<f32>,
}

/// What may differ from layer to layer.
#[derive(Clone, Debug)]
pub(crate) struct Layer {
    pub(crate) window: Option<u32>,
    pub(crate) rope: RopeId,
    pub(crate) mlp: Mlp,
}

/// The second half of a layer, and its name.
#[derive(Clone, Debug)]
pub(crate) enum Mlp {
    /// `mlp`, as wide as the decoder says.
    Gated,
    /// A mixture of experts under this name.
    Mixture(&'static str, Mixture),
}

impl Decoder {
    /// Reads what all families of this shape have. The rest is as in Llama, for the family to change.
    pub(crate) fn read(config: &Config, defaults: &Defaults) -> Result<Self> {
        let hidden = config.size("hidden_size", defaults.hidden)?;
        let heads = heads(config, hidden, defaults)?;
        let (activation, assumed) = defaults.activation;
        Ok(Self {
            vocabulary: config.size("vocab_size", defaults.vocabulary)?,
            hidden,
            intermediate: config.size("intermediate_size", defaults.intermediate)?,
            layers: config.layers("num_hidden_layers", defaults.layers)?,
            heads,
            context: config.size("max_position_embeddings", defaults.context)?,
            epsilon: config.positive("rms_norm_eps", defaults.epsilon)? as f32,
            tied: config.flag("tie_word_embeddings", defaults.tied)?,
            activation: config.activation(activation, assumed)?,
            prefixes: &["model.", ""],
            head_names: &["lm_head.weight"],
            embed_scale: 1.0,
            norm_offset: 0.0,
            post_norms: false,
            qkv_bias: false,
            output_bias: false,
            mlp_bias: false,
            qk_norm: false,
            fused: false,
            scale: inverse_root(f64::from(heads.features)),
            soft_cap: None,
            logit_cap: None,
        })
    }

    /// Layers that are all alike.
    pub(crate) fn alike(
        &self,
        lowering: &mut Lowering<'_>,
        defaults: &Defaults,
        window: Option<u32>,
    ) -> Result<Vec<Layer>> {
        self.windowed(lowering, defaults, &vec![window; self.layers as usize])
    }

    /// Layers that differ by window at most.
    pub(crate) fn windowed(
        &self,
        lowering: &mut Lowering<'_>,
        defaults: &Defaults,
        windows: &[Option<u32>],
    ) -> Result<Vec<Layer>> {
        let mut of_kind = |window: Option<u32>| -> Result<RopeId> {
            let kind = if window.is_some() { "sliding_attention" } else { "full_attention" };
            let rope = rope::rope(
                lowering.config,
                kind,
                self.heads.features,
                self.context,
                defaults.rope,
            )?;
            Ok(lowering.add_rope(rope))
        };
        windows
            .iter()
            .map(|&window| Ok(Layer { window, rope: of_kind(window)?, mlp: Mlp::Gated }))
            .collect()
    }
}

/// `features^-0.5`, computed as Python does before it meets 32 bits.
pub(crate) fn inverse_root(features: f64) -> f32 {
    features.powf(-0.5) as f32
}

/// Heads that divide what they must divide.
fn heads(config: &Config, hidden: u32, defaults: &Defaults) -> Result<Heads> {
    let query = config.size("num_attention_heads", defaults.heads)?;
    // An explicit null is an old way to say that all heads have their own keys.
    let key = config
        .nullable_size("num_key_value_heads", Some(defaults.kv_heads.unwrap_or(query)))?
        .unwrap_or(query);
    ensure!(
        query.is_multiple_of(key),
        config.error(format_args!(
            "num_attention_heads is {query}, not a multiple of num_key_value_heads, {key}"
        ))
    );
    let features = match config.nullable_size("head_dim", defaults.head_dim)? {
        Some(features) => features,
        None => {
            ensure!(
                hidden.is_multiple_of(query),
                config.error(format_args!(
                    "hidden_size is {hidden}, not a multiple of num_attention_heads, {query}"
                ))
            );
            hidden / query
        }
    };
    Ok(Heads { query, key, features })
}

/// Lowers a decoder of these layers.
pub(crate) fn lower(
    lowering: &mut Lowering<'_>,
    decoder: &Decoder,
    layers: &[Layer],
) -> Result<()> {
    let prefix = lowering.prefix(decoder.prefixes, "layers.0.input_layernorm.weight");
    let table = format!("{prefix}embed_tokens");
    let Vocabulary { table: embedding, head } = blocks::vocabulary(
        lowering,
        &format!("{table}.weight"),
        decoder.head_names,
        decoder.tied,
        [decoder.vocabulary, decoder.hidden],
    )?;
    let mut x = blocks::embed(lowering, &table, embedding, decoder.embed_scale)?;
    for (index, layer) in layers.iter().enumerate() {
        x = lower_layer(lowering, decoder, layer, &format!("{prefix}layers.{index}"), x)?;
    }
    let rows = blocks::select_rows(lowering, format!("{prefix}select_rows"), x)?;
    let normed = norm(lowering, decoder, &format!("{prefix}norm"), rows)?;
    blocks::head(lowering, head, None, decoder.logit_cap, normed)
}

fn lower_layer(
    lowering: &mut Lowering<'_>,
    decoder: &Decoder,
    layer: &Layer,
    name: &str,
    x: ValueId,
) -> Result<ValueId> {
    let (before_mlp, behind_attention) = if decoder.post_norms {
        ("pre_feedforward_layernorm", Some("post_attention_layernorm"))
    } else {
        ("post_attention_layernorm", None)
    };
    let normed = norm(lowering, decoder, &format!("{name}.input_layernorm"), x)?;
    let mut attended = attention(lowering, decoder, layer, &format!("{name}.self_attn"), normed)?;
    if let Some(behind) = behind_attention {
        attended = norm(lowering, decoder, &format!("{name}.{behind}"), attended)?;
    }
    let x = blocks::add(lowering, format!("{name}.residual1"), x, attended)?;

    let normed = norm(lowering, decoder, &format!("{name}.{before_mlp}"), x)?;
    let mut mixed = match &layer.mlp {
        Mlp::Gated => {
            let (name, width) = (format!("{name}.mlp"), decoder.intermediate);
            if decoder.fused {
                blocks::fused_gated_mlp(lowering, &name, width, decoder.activation, normed)?
            } else {
                let biased = decoder.mlp_bias;
                blocks::gated_mlp(lowering, &name, width, decoder.activation, biased, normed)?
            }
        }
        Mlp::Mixture(block, mixture) => {
            let name = format!("{name}.{block}");
            blocks::mixture(lowering, &name, mixture, decoder.activation, normed)?
        }
    };
    if decoder.post_norms {
        mixed = norm(lowering, decoder, &format!("{name}.post_feedforward_layernorm"), mixed)?;
    }
    blocks::add(lowering, format!("{name}.residual2"), x, mixed)
}

fn attention(
    lowering: &mut Lowering<'_>,
    decoder: &Decoder,
    layer: &Layer,
    name: &str,
    x: ValueId,
) -> Result<ValueId> {
    let Heads { query, key, features } = decoder.heads;
    let (wide, narrow) = (lowering.product(query, features)?, lowering.product(key, features)?);
    let parts = [("q", wide), ("k", narrow), ("v", narrow)];
    let mut qkv = [x; 3];
    if decoder.fused {
        let layer = format!("{name}.qkv_proj");
        let tensor = format!("{layer}.weight");
        let all = query.saturating_add(key.saturating_mul(2));
        let rows = lowering.product(all, features)?;
        let fused = lowering.source(&tensor, &[rows, decoder.hidden])?;
        let mut start = 0;
        for (value, (part, size)) in qkv.iter_mut().zip(parts) {
            let weight = blocks::rows_of(lowering, &tensor, part, &fused, start, size)?;
            *value = blocks::linear_of(lowering, &format!("{layer}.{part}"), weight, None, x)?;
            start += size;
        }
    } else {
        for (value, (part, size)) in qkv.iter_mut().zip(parts) {
            let name = format!("{name}.{part}_proj");
            *value = blocks::linear(lowering, &name, size, decoder.qkv_bias, x)?;
        }
    }
    let mut head_norm = |part: &str| -> Result<Option<Norm>> {
        let name = format!("{name}.{part}_norm");
        let norm = decoder.qk_norm.then(|| norm_of(lowering, decoder, &name, features));
        norm.transpose()
    };
    let style = AttentionStyle {
        heads: decoder.heads,
        scale: decoder.scale,
        window: layer.window,
        soft_cap: decoder.soft_cap,
        q_norm: head_norm("q")?,
        k_norm: head_norm("k")?,
        rope: Some(layer.rope),
    };
    let attended = blocks::attention(lowering, name, &style, qkv)?;
    blocks::linear(
        lowering,
        &format!("{name}.o_proj"),
        decoder.hidden,
        decoder.output_bias,
        attended,
    )
}

fn norm_of(
    lowering: &mut Lowering<'_>,
    decoder: &Decoder,
    name: &str,
    features: u32,
) -> Result<Norm> {
    let norm = blocks::norm_weights(lowering, name, NormKind::Rms, features, decoder.epsilon)?;
    Ok(Norm { scale_offset: decoder.norm_offset, ..norm })
}

fn norm(lowering: &mut Lowering<'_>, decoder: &Decoder, name: &str, x: ValueId) -> Result<ValueId> {
    let norm = norm_of(lowering, decoder, name, lowering.features(x))?;
    blocks::norm(lowering, name, norm, x)
}
