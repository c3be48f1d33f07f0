//! GPT-NeoX: heads rotated in part, query, key and value interleaved head by head in one tensor, attention
//! and MLP side by side.

use anyhow::{Result, ensure};
use ir::id::{RopeId, ValueId};
use ir::op::{Activation, NormKind};
use ir::weight::{Source, Stride};

use crate::blocks::{self, AttentionStyle, Heads, Vocabulary};
use crate::decoder::inverse_root;
use crate::lowering::Lowering;
use crate::rope::{self, RopeDefaults};

const ROPE: RopeDefaults = RopeDefaults {
    partial: Some(0.25),
    theta_field: "rotary_emb_base",
    partial_field: "rotary_pct",
    ..RopeDefaults::COMMON
};

struct GptNeox {
    heads: Heads,
    intermediate: u32,
    activation: Activation,
    epsilon: f32,
    biased: bool,
    parallel: bool,
    rope: RopeId,
}

pub(super) fn lower(lowering: &mut Lowering<'_>) -> Result<()> {
    let config = lowering.config;
    let hidden = config.size("hidden_size", 6144)?;
    let heads = config.size("num_attention_heads", 64)?;
    ensure!(
        hidden.is_multiple_of(heads),
        config.error(format_args!(
            "hidden_size is {hidden}, not a multiple of num_attention_heads, {heads}"
        ))
    );
    let heads = Heads { query: heads, key: heads, features: hidden / heads };
    let context = config.size("max_position_embeddings", 2048)?;
    let rope = rope::rope(config, "full_attention", heads.features, context, ROPE)?;
    let neox = GptNeox {
        heads,
        intermediate: config.size("intermediate_size", 24_576)?,
        activation: config.activation("hidden_act", Activation::Gelu)?,
        epsilon: config.positive("layer_norm_eps", 1e-5)? as f32,
        biased: config.flag("attention_bias", true)?,
        parallel: config.flag("use_parallel_residual", true)?,
        rope: lowering.add_rope(rope),
    };
    let layers = config.layers("num_hidden_layers", 44)?;
    let tied = config.flag("tie_word_embeddings", false)?;
    let prefix = lowering.prefix(&["gpt_neox.", ""], "layers.0.input_layernorm.weight");

    let table = format!("{prefix}embed_in");
    let vocabulary = [config.size("vocab_size", 50_432)?, hidden];
    let Vocabulary { table: embedding, head } = blocks::vocabulary(
        lowering,
        &format!("{table}.weight"),
        &["embed_out.weight", "lm_head.weight"],
        tied,
        vocabulary,
    )?;
    let mut x = blocks::embed(lowering, &table, embedding, 1.0)?;
    for index in 0..layers {
        x = lower_layer(lowering, &neox, &format!("{prefix}layers.{index}"), x)?;
    }
    let rows = blocks::select_rows(lowering, format!("{prefix}select_rows"), x)?;
    let normed = norm(lowering, &neox, &format!("{prefix}final_layer_norm"), rows)?;
    blocks::head(lowering, head, None, None, normed)
}

fn lower_layer(
    lowering: &mut Lowering<'_>,
    neox: &GptNeox,
    name: &str,
    x: ValueId,
) -> Result<ValueId> {
    let normed = norm(lowering, neox, &format!("{name}.input_layernorm"), x)?;
    let attended = attention(lowering, neox, &format!("{name}.attention"), normed)?;
    let after = blocks::add(lowering, format!("{name}.residual1"), x, attended)?;
    // In parallel, the MLP reads what attention read.
    let read = if neox.parallel { x } else { after };
    let normed = norm(lowering, neox, &format!("{name}.post_attention_layernorm"), read)?;
    let names = [&format!("{name}.mlp.dense_h_to_4h")[..], &format!("{name}.mlp.dense_4h_to_h")];
    let mixed =
        blocks::plain_mlp(lowering, names, neox.intermediate, neox.activation, true, normed)?;
    blocks::add(lowering, format!("{name}.residual2"), after, mixed)
}

fn attention(
    lowering: &mut Lowering<'_>,
    neox: &GptNeox,
    name: &str,
    x: ValueId,
) -> Result<ValueId> {
    let hidden = lowering.features(x);
    let layer = format!("{name}.query_key_value");
    let (tensor, bias_tensor) = (format!("{layer}.weight"), format!("{layer}.bias"));
    let fused = lowering.product(3, hidden)?;
    let matrix = lowering.source(&tensor, &[fused, hidden])?;
    let biases = if neox.biased { Some(lowering.source(&bias_tensor, &[fused])?) } else { None };
    let mut qkv = [x; 3];
    for (value, (index, part)) in qkv.iter_mut().zip((0..).zip(["q", "k", "v"])) {
        let rows = interleaved(&matrix, neox.heads, index);
        let weight = lowering.view(&format!("{tensor}.{part}"), rows);
        let bias = biases.as_ref().map(|biases| {
            lowering.view(&format!("{bias_tensor}.{part}"), interleaved(biases, neox.heads, index))
        });
        *value = blocks::linear_of(lowering, &format!("{layer}.{part}"), weight, bias, x)?;
    }
    let style = AttentionStyle {
        rope: Some(neox.rope),
        ..AttentionStyle::plain(neox.heads, inverse_root(f64::from(neox.heads.features)))
    };
    let attended = blocks::attention(lowering, name, &style, qkv)?;
    blocks::linear(lowering, &format!("{name}.dense"), hidden, neox.biased, attended)
}

/// Part `index` of three, of rows that are stored `[heads, 3, features of a head]`.
fn interleaved(fused: &Source, heads: Heads, index: u32) -> Source {
    let mut view = fused.clone();
    let row = fused.axes[0][0].stride;
    let run = u64::from(heads.features) * row;
    view.offset += u64::from(index) * run * fused.dtype.bytes();
    view.axes[0] = vec![
        Stride { size: heads.query, stride: 3 * run },
        Stride { size: heads.features, stride: row },
    ];
    view
}

fn norm(lowering: &mut Lowering<'_>, neox: &GptNeox, name: &str, x: ValueId) -> Result<ValueId> {
    let features = lowering.features(x);
    let norm = blocks::norm_weights(lowering, name, NormKind::Layer, features, neox.epsilon)?;
    blocks::norm(lowering, name, norm, x)
}
