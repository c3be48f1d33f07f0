//! What families accept beside what the golden checkpoints show.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic as tests do")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use tests::interpreter::{Interpreter, Matrix};

type Tensors = BTreeMap<String, (safetensors::Dtype, Vec<usize>, Vec<u8>)>;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden").join(name)
}

fn config(name: &str) -> Value {
    serde_json::from_slice(&fs::read(golden(name).join("config.json")).unwrap()).unwrap()
}

/// All tensors of a golden checkpoint.
fn tensors(name: &str) -> Tensors {
    let mut tensors = Tensors::new();
    for entry in fs::read_dir(golden(name)).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "safetensors") {
            continue;
        }
        let contents = fs::read(path).unwrap();
        for (name, view) in SafeTensors::deserialize(&contents).unwrap().iter() {
            let tensor = (view.dtype(), view.shape().to_vec(), view.data().to_vec());
            tensors.insert(name.to_owned(), tensor);
        }
    }
    tensors
}

/// Logits of the last of 20 tokens.
fn logits(folder: &Path) -> Matrix {
    let ids: Vec<u32> = (5..25).collect();
    let model = Interpreter::load(models::lower(folder).unwrap()).unwrap();
    model.logits(&ids, &[ids.len() - 1]).unwrap()
}

fn logits_of(config: &Value, tensors: &Tensors) -> Matrix {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let views = tensors.iter().map(|(name, (dtype, shape, data))| {
        (name, TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    safetensors::serialize_to_file(views, None, &folder.path().join("model.safetensors")).unwrap();
    logits(folder.path())
}

/// The same tensors under other names.
fn renamed(tensors: Tensors, rename: impl Fn(&str) -> String) -> Tensors {
    tensors.into_iter().map(|(name, tensor)| (rename(&name), tensor)).collect()
}

/// Puts the matrices of all experts of a layer into one tensor, those named first above the others.
fn stack_experts(tensors: &mut Tensors, layer: &str, parts: &[&str], stacked: &str) {
    let name = |expert: usize, part: &str| format!("{layer}.{expert}.{part}.weight");
    let experts = (0..).take_while(|&expert| tensors.contains_key(&name(expert, parts[0]))).count();
    let mut data = Vec::new();
    let mut found = None;
    for expert in 0..experts {
        for part in parts {
            let (dtype, shape, bytes) = tensors.remove(&name(expert, part)).unwrap();
            data.extend(bytes);
            found = Some((dtype, vec![experts, parts.len() * shape[0], shape[1]]));
        }
    }
    let (dtype, shape) = found.unwrap();
    tensors.insert(format!("{layer}.{stacked}"), (dtype, shape, data));
}

#[test]
fn stacked_experts_are_the_same_experts() {
    let mut stacked = tensors("qwen3-moe");
    for layer in [0, 2, 3] {
        let layer = format!("model.layers.{layer}.mlp.experts");
        stack_experts(&mut stacked, &layer, &["gate_proj", "up_proj"], "gate_up_proj");
        stack_experts(&mut stacked, &layer, &["down_proj"], "down_proj");
    }
    assert_eq!(logits_of(&config("qwen3-moe"), &stacked), logits(&golden("qwen3-moe")));
}

#[test]
fn key_prefixes_come_and_go() {
    let gpt2 = renamed(tensors("gpt2"), |name| format!("transformer.{name}"));
    assert_eq!(logits_of(&config("gpt2"), &gpt2), logits(&golden("gpt2")));
    let llama = renamed(tensors("llama3"), |name| name.replace("model.", ""));
    assert_eq!(logits_of(&config("llama3"), &llama), logits(&golden("llama3")));
    let opt = renamed(tensors("opt-postnorm"), |name| name.replace("model.decoder.", "decoder."));
    assert_eq!(logits_of(&config("opt-postnorm"), &opt), logits(&golden("opt-postnorm")));
}

#[test]
fn the_text_part_of_gemma3_is_gemma3() {
    let nested = json!({
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": config("gemma3"),
        "vision_config": {"hidden_size": 8},
    });
    let text = renamed(tensors("gemma3"), |name| format!("language_model.{name}"));
    assert_eq!(logits_of(&nested, &text), logits(&golden("gemma3")));
}

#[test]
fn rope_parameters_of_transformers_5_mean_the_same() {
    let mut gemma3 = config("gemma3");
    let fields = gemma3.as_object_mut().unwrap();
    for old in ["rope_theta", "rope_local_base_freq", "rope_scaling", "sliding_window_pattern"] {
        fields.remove(old).unwrap();
    }
    let kinds = ["sliding_attention", "sliding_attention", "full_attention"].repeat(2);
    fields.insert("layer_types".into(), json!(kinds));
    let parameters = json!({
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    });
    fields.insert("rope_parameters".into(), parameters);
    assert_eq!(logits_of(&gemma3, &tensors("gemma3")), logits(&golden("gemma3")));

    let mut neox = config("gpt-neox");
    let fields = neox.as_object_mut().unwrap();
    for old in ["rotary_emb_base", "rotary_pct", "rope_scaling"] {
        fields.remove(old).unwrap();
    }
    let parameters =
        json!({"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.25});
    fields.insert("rope_parameters".into(), parameters);
    assert_eq!(logits_of(&neox, &tensors("gpt-neox")), logits(&golden("gpt-neox")));
}

#[test]
fn a_head_that_differs_is_not_tied() {
    let mut tensors = tensors("llama3");
    let (dtype, shape, data) = tensors["model.embed_tokens.weight"].clone();
    tensors.insert("lm_head.weight".into(), (dtype, shape.clone(), data.clone()));
    assert_eq!(logits_of(&config("llama3"), &tensors), logits(&golden("llama3")));
    let zeros = vec![0; data.len()];
    tensors.insert("lm_head.weight".into(), (dtype, shape, zeros));
    assert!(logits_of(&config("llama3"), &tensors).data.iter().all(|&logit| logit == 0.0));
}

#[test]
fn attention_and_mlp_of_neox_may_follow_each_other() {
    let mut sequential = config("gpt-neox");
    sequential["use_parallel_residual"] = json!(false);
    assert_ne!(logits_of(&sequential, &tensors("gpt-neox")), logits(&golden("gpt-neox")));
}

/// Whatever a field of a configuration says, the answer is a model or an error of one line.
#[test]
fn awkward_fields_never_panic() {
    let awkward = [
        json!(null),
        json!(-1),
        json!(0),
        json!(1),
        json!(3),
        json!(0.5),
        json!(1e300),
        json!(u32::MAX),
        json!(u64::MAX),
        json!(true),
        json!("x"),
        json!([]),
        json!([3]),
        json!({}),
        json!({"rope_type": "yarn", "factor": 1e-300}),
    ];
    for entry in fs::read_dir(golden("")).unwrap() {
        let source = entry.unwrap().path();
        if !source.is_dir() {
            continue;
        }
        let folder = tempfile::tempdir().unwrap();
        for file in fs::read_dir(&source).unwrap() {
            let file = file.unwrap();
            let name = file.file_name();
            if name.to_string_lossy().contains(".safetensors") {
                std::os::unix::fs::symlink(file.path(), folder.path().join(name)).unwrap();
            }
        }
        let config: Value =
            serde_json::from_slice(&fs::read(source.join("config.json")).unwrap()).unwrap();
        for field in config.as_object().unwrap().keys() {
            for value in &awkward {
                let mut spoilt = config.clone();
                spoilt[field] = value.clone();
                fs::write(folder.path().join("config.json"), spoilt.to_string()).unwrap();
                if let Err(error) = models::lower(folder.path()) {
                    let line = format!("{error:#}");
                    assert!(line.contains(".json: ") || line.contains(".safetensors: "), "{line}");
                    assert!(!line.contains('\n'), "{line}");
                }
            }
        }
    }
}
