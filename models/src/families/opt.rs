//! OPT: learned positions, layer norms in front or behind, plain MLPs, and an embedding that may be narrower.

use anyhow::{Result, ensure};
use ir::id::ValueId;
use ir::op::{Activation, Norm, NormKind, Op};

use crate::blocks::{self, AttentionStyle, Heads, Vocabulary};
use crate::decoder::inverse_root;
use crate::lowering::Lowering;

/// Rows of the position table before the row of position 0.
const POSITION_OFFSET: u32 = 2;

/// PyTorch's default, which OPT's configuration cannot change.
const EPSILON: f32 = 1e-5;

struct Opt {
    heads: Heads,
    intermediate: u32,
    activation: Activation,
    biased: bool,
    affine: bool,
    norm_first: bool,
}

pub(super) fn lower(lowering: &mut Lowering<'_>) -> Result<()> {
    let config = lowering.config;
    let hidden = config.size("hidden_size", 768)?;
    let heads = config.size("num_attention_heads", 12)?;
    ensure!(
        hidden.is_multiple_of(heads),
        config.error(format_args!(
            "hidden_size is {hidden}, not a multiple of num_attention_heads, {heads}"
        ))
    );
    let opt = Opt {
        heads: Heads { query: heads, key: heads, features: hidden / heads },
        intermediate: config.size("ffn_dim", 3072)?,
        activation: config.activation("activation_function", Activation::Relu)?,
        biased: config.flag("enable_bias", true)?,
        affine: config.flag("layer_norm_elementwise_affine", true)?,
        norm_first: config.flag("do_layer_norm_before", true)?,
    };
    let layers = config.layers("num_hidden_layers", 12)?;
    let context = config.size("max_position_embeddings", 2048)?;
    let width = config.size("word_embed_proj_dim", hidden)?;
    let tied = config.flag("tie_word_embeddings", true)?;
    let prefix = lowering
        .prefix(&["model.decoder.", "decoder.", "", "model."], "layers.0.self_attn.q_proj.weight");
    lowering.model.context = context;

    let table = format!("{prefix}embed_tokens");
    let vocabulary = [config.size("vocab_size", 50_272)?, width];
    let Vocabulary { table: embedding, head } = blocks::vocabulary(
        lowering,
        &format!("{table}.weight"),
        &["lm_head.weight"],
        tied,
        vocabulary,
    )?;
    let mut x = blocks::embed(lowering, &table, embedding, 1.0)?;
    if width != hidden {
        x = blocks::linear(lowering, &format!("{prefix}project_in"), hidden, false, x)?;
    }
    let name = format!("{prefix}embed_positions");
    let positions = context.saturating_add(POSITION_OFFSET);
    let table = lowering.weight(&format!("{name}.weight"), &[positions, hidden])?;
    x = lowering.push(name, Op::AddPosition { table, offset: POSITION_OFFSET }, &[x], hidden)?;
    for index in 0..layers {
        x = lower_layer(lowering, &opt, &format!("{prefix}layers.{index}"), x)?;
    }
    x = blocks::select_rows(lowering, format!("{prefix}select_rows"), x)?;
    if opt.norm_first && !config.flag("_remove_final_layer_norm", false)? {
        // Conversions of the first release have the second name.
        let names = ["final_layer_norm", "layer_norm"].map(|name| format!("{prefix}{name}"));
        let old = !lowering.has(&format!("{}.weight", names[0]))
            && lowering.has(&format!("{}.weight", names[1]));
        x = norm(lowering, &opt, &names[usize::from(old)], x)?;
    }
    if width != hidden {
        x = blocks::linear(lowering, &format!("{prefix}project_out"), width, false, x)?;
    }
    blocks::head(lowering, head, None, None, x)
}

fn lower_layer(
    lowering: &mut Lowering<'_>,
    opt: &Opt,
    name: &str,
    mut x: ValueId,
) -> Result<ValueId> {
    let attention_norm = format!("{name}.self_attn_layer_norm");
    let mlp_norm = format!("{name}.final_layer_norm");

    let mut inner = x;
    if opt.norm_first {
        inner = norm(lowering, opt, &attention_norm, x)?;
    }
    inner = attention(lowering, opt, &format!("{name}.self_attn"), inner)?;
    x = blocks::add(lowering, format!("{name}.residual1"), x, inner)?;
    if !opt.norm_first {
        x = norm(lowering, opt, &attention_norm, x)?;
    }

    let mut inner = x;
    if opt.norm_first {
        inner = norm(lowering, opt, &mlp_norm, x)?;
    }
    let names = [&format!("{name}.fc1")[..], &format!("{name}.fc2")];
    inner =
        blocks::plain_mlp(lowering, names, opt.intermediate, opt.activation, opt.biased, inner)?;
    x = blocks::add(lowering, format!("{name}.residual2"), x, inner)?;
    if !opt.norm_first {
        x = norm(lowering, opt, &mlp_norm, x)?;
    }
    Ok(x)
}

fn attention(lowering: &mut Lowering<'_>, opt: &Opt, name: &str, x: ValueId) -> Result<ValueId> {
    let hidden = lowering.features(x);
    let mut qkv = [x; 3];
    for (value, part) in qkv.iter_mut().zip(["q", "k", "v"]) {
        *value = blocks::linear(lowering, &format!("{name}.{part}_proj"), hidden, opt.biased, x)?;
    }
    let style = AttentionStyle::plain(opt.heads, inverse_root(f64::from(opt.heads.features)));
    let attended = blocks::attention(lowering, name, &style, qkv)?;
    blocks::linear(lowering, &format!("{name}.out_proj"), hidden, opt.biased, attended)
}

fn norm(lowering: &mut Lowering<'_>, opt: &Opt, name: &str, x: ValueId) -> Result<ValueId> {
    let norm = if opt.affine {
        let features = lowering.features(x);
        blocks::norm_weights(lowering, name, NormKind::Layer, features, EPSILON)?
    } else {
        Norm { kind: NormKind::Layer, scale: None, bias: None, epsilon: EPSILON, scale_offset: 0.0 }
    };
    blocks::norm(lowering, name, norm, x)
}
