//! GPT-2: learned positions, matrices stored `[inputs, outputs]`, query, key and value in one of them.

use anyhow::{Result, ensure};
use ir::id::ValueId;
use ir::op::{Activation, NormKind, Op};

use crate::blocks::{self, AttentionStyle, Heads, Vocabulary};
use crate::decoder::inverse_root;
use crate::lowering::Lowering;

struct Gpt2 {
    heads: Heads,
    intermediate: u32,
    activation: Activation,
    epsilon: f32,
    scaled: bool,
    scaled_by_layer: bool,
}

pub(super) fn lower(lowering: &mut Lowering<'_>) -> Result<()> {
    let config = lowering.config;
    // As in transformers, the common name wins where GPT-2's own is there, too.
    let named = |own, common| if config.has(common) { common } else { own };
    let hidden_name = named("n_embd", "hidden_size");
    let heads_name = named("n_head", "num_attention_heads");
    let hidden = config.size(hidden_name, 768)?;
    let heads = config.size(heads_name, 12)?;
    ensure!(
        hidden.is_multiple_of(heads),
        config.error(format_args!(
            "{hidden_name} is {hidden}, not a multiple of {heads_name}, {heads}"
        ))
    );
    ensure!(
        !config.flag("add_cross_attention", false)?,
        config.error("add_cross_attention is true, but there is no encoder to attend to")
    );
    let gpt2 = Gpt2 {
        heads: Heads { query: heads, key: heads, features: hidden / heads },
        intermediate: match config.optional_size("n_inner")? {
            Some(intermediate) => intermediate,
            None => lowering.product(4, hidden)?,
        },
        activation: config.activation("activation_function", Activation::GeluTanh)?,
        epsilon: config.positive("layer_norm_epsilon", 1e-5)? as f32,
        scaled: config.flag("scale_attn_weights", true)?,
        scaled_by_layer: config.flag("scale_attn_by_inverse_layer_idx", false)?,
    };
    let layers = config.layers(named("n_layer", "num_hidden_layers"), 12)?;
    let context = config.size(named("n_positions", "max_position_embeddings"), 1024)?;
    let tied = config.flag("tie_word_embeddings", true)?;
    let prefix = lowering.prefix(&["transformer.", ""], "h.0.ln_1.weight");
    lowering.model.context = context;

    let table = format!("{prefix}wte");
    let vocabulary = [config.size("vocab_size", 50_257)?, hidden];
    let Vocabulary { table: embedding, head } = blocks::vocabulary(
        lowering,
        &format!("{table}.weight"),
        &["lm_head.weight"],
        tied,
        vocabulary,
    )?;
    let x = blocks::embed(lowering, &table, embedding, 1.0)?;
    let name = format!("{prefix}wpe");
    let table = lowering.weight(&format!("{name}.weight"), &[context, hidden])?;
    let mut x = lowering.push(name, Op::AddPosition { table, offset: 0 }, &[x], hidden)?;
    for index in 0..layers {
        x = lower_layer(lowering, &gpt2, index, &format!("{prefix}h.{index}"), x)?;
    }
    let rows = blocks::select_rows(lowering, format!("{prefix}select_rows"), x)?;
    let normed = norm(lowering, &gpt2, &format!("{prefix}ln_f"), rows)?;
    blocks::head(lowering, head, None, None, normed)
}

fn lower_layer(
    lowering: &mut Lowering<'_>,
    gpt2: &Gpt2,
    index: u32,
    name: &str,
    x: ValueId,
) -> Result<ValueId> {
    let normed = norm(lowering, gpt2, &format!("{name}.ln_1"), x)?;
    let attended = attention(lowering, gpt2, index, &format!("{name}.attn"), normed)?;
    let x = blocks::add(lowering, format!("{name}.residual1"), x, attended)?;
    let normed = norm(lowering, gpt2, &format!("{name}.ln_2"), x)?;
    let up = conv1d(lowering, &format!("{name}.mlp.c_fc"), gpt2.intermediate, normed)?;
    let act = Op::Activate(gpt2.activation);
    let activated = lowering.push(format!("{name}.mlp.act"), act, &[up], gpt2.intermediate)?;
    let hidden = lowering.features(x);
    let mixed = conv1d(lowering, &format!("{name}.mlp.c_proj"), hidden, activated)?;
    blocks::add(lowering, format!("{name}.residual2"), x, mixed)
}

fn attention(
    lowering: &mut Lowering<'_>,
    gpt2: &Gpt2,
    index: u32,
    name: &str,
    x: ValueId,
) -> Result<ValueId> {
    let hidden = lowering.features(x);
    let layer = format!("{name}.c_attn");
    let fused = lowering.product(3, hidden)?;
    let matrix = lowering.source(&format!("{layer}.weight"), &[hidden, fused])?.transposed();
    let bias = lowering.source(&format!("{layer}.bias"), &[fused])?;
    let mut qkv = [x; 3];
    for (value, (start, part)) in
        qkv.iter_mut().zip((0..).step_by(hidden as usize).zip(["q", "k", "v"]))
    {
        let weight =
            blocks::rows_of(lowering, &format!("{layer}.weight"), part, &matrix, start, hidden)?;
        let bias = blocks::rows_of(lowering, &format!("{layer}.bias"), part, &bias, start, hidden)?;
        *value = blocks::linear_of(lowering, &format!("{layer}.{part}"), weight, Some(bias), x)?;
    }
    let mut scale = if gpt2.scaled { inverse_root(f64::from(gpt2.heads.features)) } else { 1.0 };
    if gpt2.scaled_by_layer {
        scale /= (index + 1) as f32;
    }
    let style = AttentionStyle::plain(gpt2.heads, scale);
    let attended = blocks::attention(lowering, name, &style, qkv)?;
    conv1d(lowering, &format!("{name}.c_proj"), hidden, attended)
}

/// A linear whose matrix is stored `[inputs, outputs]`.
fn conv1d(lowering: &mut Lowering<'_>, name: &str, outputs: u32, x: ValueId) -> Result<ValueId> {
    let tensor = format!("{name}.weight");
    let stored = lowering.source(&tensor, &[lowering.features(x), outputs])?;
    let weight = lowering.view(&tensor, stored.transposed());
    let bias = lowering.weight(&format!("{name}.bias"), &[outputs])?;
    blocks::linear_of(lowering, name, weight, Some(bias), x)
}

fn norm(lowering: &mut Lowering<'_>, gpt2: &Gpt2, name: &str, x: ValueId) -> Result<ValueId> {
    let features = lowering.features(x);
    let norm = blocks::norm_weights(lowering, name, NormKind::Layer, features, gpt2.epsilon)?;
    blocks::norm(lowering, name, norm, x)
}
