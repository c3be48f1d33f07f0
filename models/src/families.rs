//! What each family adds to the blocks: one file a family, chosen by the `model_type` of `config.json`, or by its
//! `architectures` where that is absent.

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

/// A `model_type`, and the class that transformers takes for a language model of that type.
type Name = (&'static str, &'static str);

/// Models that are lowered alike.
struct Family {
    names: &'static [Name],
    lower: Lower,
}

/// The class of Gemma3 that has a vision tower, too.
const GEMMA3_WITH_VISION: &str = "Gemma3ForConditionalGeneration";

/// Every family, in alphabetical order of classes.
const FAMILIES: [Family; 13] = [
    Family { names: &[("gpt2", "GPT2LMHeadModel")], lower: gpt2::lower },
    Family { names: &[("gpt_neox", "GPTNeoXForCausalLM")], lower: gpt_neox::lower },
    Family { names: &[("gemma2", "Gemma2ForCausalLM")], lower: gemma2::lower },
    Family {
        names: &[("gemma3_text", "Gemma3ForCausalLM"), ("gemma3", GEMMA3_WITH_VISION)],
        lower: gemma3::lower,
    },
    Family { names: &[("llama", "LlamaForCausalLM")], lower: llama::lower },
    Family {
        names: &[("mistral", "MistralForCausalLM"), ("ministral", "MinistralForCausalLM")],
        lower: mistral::lower,
    },
    Family { names: &[("mixtral", "MixtralForCausalLM")], lower: mixtral::lower },
    Family { names: &[("opt", "OPTForCausalLM")], lower: opt::lower },
    Family { names: &[("phi3", "Phi3ForCausalLM")], lower: phi3::lower },
    Family { names: &[("qwen2", "Qwen2ForCausalLM")], lower: qwen2::lower },
    Family { names: &[("qwen2_moe", "Qwen2MoeForCausalLM")], lower: qwen2_moe::lower },
    Family { names: &[("qwen3", "Qwen3ForCausalLM")], lower: qwen3::lower },
    Family { names: &[("qwen3_moe", "Qwen3MoeForCausalLM")], lower: qwen3_moe::lower },
];

/// Lowers the checkpoint with the family that its configuration names.
pub(crate) fn lower(checkpoint: &Checkpoint, config: &Config) -> Result<Model> {
    let (class, add_layers) = choose(config)?;
    refuse_quantised(config)?;
    let text = config.section("text_config")?;
    let mut lowering = Lowering::new(checkpoint, text.as_ref().unwrap_or(config), class);
    add_layers(&mut lowering)?;
    Ok(lowering.model)
}

/// Whether a tensor belongs to what models of this class have beside the language model.
pub(crate) fn is_beside(class: &str, tensor: &str) -> bool {
    let name = tensor.strip_prefix("model.").unwrap_or(tensor);
    let parts = ["vision_tower.", "multi_modal_projector."];
    class == GEMMA3_WITH_VISION && parts.iter().any(|part| name.starts_with(part))
}

/// The class of the language model that a configuration describes, and what lowers it.
fn choose(config: &Config) -> Result<(&'static str, Lower)> {
    let classes = config.texts("architectures")?;
    if let Some(class) = classes.iter().find(|class| !may_give_logits(class)) {
        return Err(config.error(format_args!(
            "architectures names {class}, whose head is not that of a language model"
        )));
    }
    let find = |is_meant: &dyn Fn(&Name) -> bool| {
        FAMILIES.iter().find_map(|family| {
            let name = family.names.iter().find(|name| is_meant(name));
            name.map(|name| (family, name.1))
        })
    };
    let one_of = |name_of: fn(&Name) -> &'static str| {
        let names: Vec<&str> =
            FAMILIES.iter().flat_map(|family| family.names).map(name_of).collect();
        format!("one of those supported: {}", names.join(", "))
    };
    let Some(model_type) = config.text("model_type")? else {
        ensure!(!classes.is_empty(), config.missing("model_type"));
        let by_class = find(&|name| classes.contains(&name.1));
        let (family, class) =
            by_class.ok_or_else(|| config.unexpected("architectures", &one_of(|name| name.1)))?;
        return Ok((class, family.lower));
    };
    let by_type = find(&|name| name.0 == model_type);
    let (family, class) =
        by_type.ok_or_else(|| config.unexpected("model_type", &one_of(|name| name.0)))?;
    // Unknown classes are spellings of old, or models without their heads, which may be tied.
    let other = find(&|name| classes.contains(&name.1) && !family.names.contains(name));
    if let Some((_, other)) = other {
        return Err(config.error(format_args!(
            "model_type is {model_type}, but architectures names {other}: remove the one that is wrong"
        )));
    }
    Ok((class, family.lower))
}

/// Whether a class may be a language model: the names of others say what else they are for.
fn may_give_logits(class: &str) -> bool {
    let has = |part: &&str| class.contains(*part);
    let is_for_text = ["CausalLM", "ConditionalGeneration"].iter().any(has);
    let is_judge = ["Reward", "Classif"].iter().any(has);
    !is_judge && (is_for_text || !class.contains("For"))
}

/// Fails where the configuration says that weights are quantised.
fn refuse_quantised(config: &Config) -> Result<()> {
    if !config.has("quantization_config") {
        return Ok(());
    }
    let section = config.section("quantization_config")?;
    let method = match &section {
        Some(section) => section.text("quant_method")?,
        None => None,
    };
    let method = method.map(|method| format!(" by {method}")).unwrap_or_default();
    Err(config.error(format_args!(
        "quantization_config says that the weights are quantised{method}, but only F32, F16 and BF16 are supported: \
         take the unquantised checkpoint with --format q8 or q4, or remove quantization_config if these are not quantised"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The class that a configuration is lowered as, or the error.
    fn chosen(text: &str) -> String {
        let config = Config::parse("config.json".into(), text.as_bytes()).unwrap();
        match choose(&config) {
            Ok((class, _)) => class.to_owned(),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn each_model_type_and_each_class_is_enough() {
        for (model_type, class) in FAMILIES.iter().flat_map(|family| family.names) {
            assert_eq!(chosen(&format!(r#"{{"model_type": "{model_type}"}}"#)), *class);
            assert_eq!(chosen(&format!(r#"{{"architectures": ["{class}"]}}"#)), *class);
        }
    }

    #[test]
    fn the_model_type_decides() {
        let with = |model_type: &str, architectures: &str| {
            let text =
                format!(r#"{{"model_type": "{model_type}", "architectures": {architectures}}}"#);
            chosen(&text)
        };
        assert_eq!(with("llama", r#"["LLaMAForCausalLM"]"#), "LlamaForCausalLM");
        assert_eq!(with("llama", "null"), "LlamaForCausalLM");
        assert_eq!(with("llama", "[]"), "LlamaForCausalLM");
        assert_eq!(with("gpt2", r#"["GPT2Model"]"#), "GPT2LMHeadModel");
        assert_eq!(with("opt", r#"["OPTModel"]"#), "OPTForCausalLM");
        // Both are names of one family.
        assert_eq!(with("gemma3", r#"["Gemma3ForCausalLM"]"#), "Gemma3ForConditionalGeneration");
        assert_eq!(
            with("mistral", r#"["LlamaForCausalLM"]"#),
            "config.json: model_type is mistral, but architectures names LlamaForCausalLM: \
             remove the one that is wrong"
        );
        assert_eq!(
            with("bloom", r#"["LlamaForCausalLM"]"#),
            "config.json: model_type is \"bloom\", not one of those supported: gpt2, gpt_neox, gemma2, gemma3_text, \
             gemma3, llama, mistral, ministral, mixtral, opt, phi3, qwen2, qwen2_moe, qwen3, qwen3_moe"
        );
        assert_eq!(chosen("{}"), "config.json: model_type is missing");
    }

    #[test]
    fn a_head_for_something_else_is_refused() {
        for class in [
            "LlamaForSequenceClassification",
            "Qwen2ForTokenClassification",
            "OPTForQuestionAnswering",
            "Qwen2ForProcessRewardModel",
            "LlamaRewardModel",
            "LlamaModelForScore",
        ] {
            for text in [
                format!(r#"{{"model_type": "llama", "architectures": ["{class}"]}}"#),
                format!(r#"{{"architectures": ["{class}"]}}"#),
            ] {
                assert_eq!(
                    chosen(&text),
                    format!(
                        "config.json: architectures names {class}, whose head is not that of a language model"
                    )
                );
            }
        }
    }

    #[test]
    fn a_quantised_checkpoint_is_refused_with_its_method() {
        let refusal = |text: &str| {
            let config = Config::parse("config.json".into(), text.as_bytes()).unwrap();
            refuse_quantised(&config).unwrap_err().to_string()
        };
        let advice = "but only F32, F16 and BF16 are supported: take the unquantised checkpoint with --format q8 \
                      or q4, or remove quantization_config if these are not quantised";
        assert_eq!(
            refusal(r#"{"quantization_config": {"bits": 4, "quant_method": "gptq"}}"#),
            format!(
                "config.json: quantization_config says that the weights are quantised by gptq, {advice}"
            )
        );
        assert_eq!(
            refusal(r#"{"quantization_config": {"load_in_8bit": true}}"#),
            format!(
                "config.json: quantization_config says that the weights are quantised, {advice}"
            )
        );
    }
}
