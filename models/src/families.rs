//! What each family adds to the blocks: one file a family, chosen by the `architectures` of `config.json`.

mod gemma2;
mod gemma3;
mod gpt2;
mod gpt_neox;
mod llama;
mod mistral;
mod mixtral;
mod opt;
mod phi3;
mod qwen2;
mod qwen2_moe;
mod qwen3;
mod qwen3_moe;

use anyhow::{Result, ensure};
use ir::model::Model;

use crate::checkpoint::Checkpoint;
use crate::config::Config;
use crate::lowering::Lowering;

/// Adds all layers of a model to the lowering.
type Lower = fn(&mut Lowering<'_>) -> Result<()>;

/// Every `architectures` value that can be lowered, in alphabetical order.
const FAMILIES: [(&str, Lower); 14] = [
    ("GPT2LMHeadModel", gpt2::lower),
    ("GPTNeoXForCausalLM", gpt_neox::lower),
    ("Gemma2ForCausalLM", gemma2::lower),
    ("Gemma3ForCausalLM", gemma3::lower),
    ("Gemma3ForConditionalGeneration", gemma3::lower),
    ("LlamaForCausalLM", llama::lower),
    ("MistralForCausalLM", mistral::lower),
    ("MixtralForCausalLM", mixtral::lower),
    ("OPTForCausalLM", opt::lower),
    ("Phi3ForCausalLM", phi3::lower),
    ("Qwen2ForCausalLM", qwen2::lower),
    ("Qwen2MoeForCausalLM", qwen2_moe::lower),
    ("Qwen3ForCausalLM", qwen3::lower),
    ("Qwen3MoeForCausalLM", qwen3_moe::lower),
];

/// Lowers the checkpoint with the family that its configuration names.
pub(crate) fn lower(checkpoint: &Checkpoint, config: &Config) -> Result<Model> {
    let named = config.texts("architectures")?;
    ensure!(!named.is_empty(), config.missing("architectures"));
    let supported = || FAMILIES.map(|(name, _)| name).join(", ");
    let family = FAMILIES.iter().find(|(name, _)| named.contains(name)).ok_or_else(|| {
        config.unexpected("architectures", &format!("one of those supported: {}", supported()))
    })?;
    ensure!(
        !config.has("quantization_config"),
        config.error(
            "quantization_config is there, but only checkpoints in F32, F16 and BF16 are supported"
        )
    );
    let text = config.section("text_config")?;
    let mut lowering = Lowering::new(checkpoint, text.as_ref().unwrap_or(config), family.0);
    (family.1)(&mut lowering)?;
    Ok(lowering.model)
}
