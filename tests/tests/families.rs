//! What families accept beside what the golden checkpoints show.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic as tests do")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use tempfile::TempDir;
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
    logits(written(config, tensors, "model.safetensors").path())
}

/// A folder with this configuration, and these tensors in a file of that name.
fn written(config: &Value, tensors: &Tensors, file: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let views = tensors.iter().map(|(name, (dtype, shape, data))| {
        (name, TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    safetensors::serialize_to_file(views, None, &folder.path().join(file)).unwrap();
    folder
}

/// The error for what is in a folder, with the folder's own name left out.
fn refusal(folder: &Path) -> String {
    let error = format!("{:#}", models::lower(folder).unwrap_err());
    error.replace(&format!("{}/", folder.display()), "")
}

/// Sets some fields of a configuration; null removes one.
fn with(mut config: Value, fields: Value) -> Value {
    let all = config.as_object_mut().unwrap();
    for (name, value) in fields.as_object().unwrap() {
        if value.is_null() {
            all.remove(name).unwrap();
        } else {
            all.insert(name.clone(), value.clone());
        }
    }
    config
}

/// Compares the first logits with those that transformers 5.24 computes from the same checkpoint in f32.
fn check(found: &Matrix, expected: [f32; 6]) {
    let close = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-3;
    assert!(found.data.iter().zip(&expected).all(close), "{:?}", &found.data[..6]);
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
fn a_vision_tower_is_no_sign_of_another_model() {
    let unused_of = |config: &Value, tensors: &Tensors| {
        let folder = written(config, tensors, "model.safetensors");
        models::lower_and_list_unused(folder.path()).unwrap().1
    };
    let vision = ["vision_tower.a.weight", "multi_modal_projector.b.weight"];
    let nested = json!({"model_type": "gemma3", "text_config": config("gemma3")});
    for prefix in ["", "model."] {
        let mut tensors =
            renamed(tensors("gemma3"), |name| name.replace("model.", "model.language_model."));
        for name in vision {
            let tensor = (safetensors::Dtype::F32, vec![1], vec![0; 4]);
            tensors.insert(format!("{prefix}{name}"), tensor);
        }
        assert_eq!(unused_of(&nested, &tensors), [""; 0]);
        // A model of text alone has none.
        let unused = unused_of(&config("gemma3"), &tensors);
        assert_eq!(unused.len(), vision.len(), "{unused:?}");
    }
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
    let sequential = with(config("gpt-neox"), json!({"use_parallel_residual": false}));
    check(
        &logits_of(&sequential, &tensors("gpt-neox")),
        [0.863_066, -3.471_892, -1.065_478, 1.874_666, 1.039_856, -0.557_614],
    );
}

#[test]
fn mistral_is_llama_with_a_window() {
    let mistral = |fields: Value, window: Value| {
        let kind = json!({"model_type": "mistral", "architectures": ["MistralForCausalLM"]});
        let mut mistral = with(with(config("llama3"), kind), fields);
        // Here null is a value: without it, the window is one of 4096 tokens.
        mistral["sliding_window"] = window;
        logits_of(&mistral, &tensors("llama3"))
    };
    assert_eq!(mistral(json!({}), json!(null)), logits(&golden("llama3")));
    let in_all = mistral(json!({}), json!(4));
    check(&in_all, [0.030_481, 2.704_898, 2.803_911, -0.301_186, 0.103_051, -1.774_085]);
    // Ministral says which layers have it, under either name.
    let (full, sliding) = ("full_attention", "sliding_attention");
    let some = json!([full, sliding, sliding]);
    let in_some = mistral(json!({"layer_types": some}), json!(4));
    check(&in_some, [1.174_785, -0.479_476, 0.927_160, -1.454_523, 1.672_544, -0.931_626]);
    let ministral = json!({
        "model_type": "ministral", "architectures": ["MinistralForCausalLM"], "layer_types": some,
    });
    assert_eq!(mistral(ministral, json!(4)), in_some);
}

#[test]
fn mixtral_of_equal_experts_is_llama() {
    const EXPERTS: usize = 3;
    let mut mixture = Tensors::new();
    for (name, tensor) in tensors("llama3") {
        let Some((layer, matrix)) = name.split_once(".mlp.") else {
            mixture.insert(name, tensor);
            continue;
        };
        let matrix = match matrix {
            "gate_proj.weight" => "w1",
            "up_proj.weight" => "w3",
            "down_proj.weight" => "w2",
            other => panic!("{other} is no matrix of a gated MLP"),
        };
        let moe = format!("{layer}.block_sparse_moe");
        for expert in 0..EXPERTS {
            mixture.insert(format!("{moe}.experts.{expert}.{matrix}.weight"), tensor.clone());
        }
        // A router that prefers some, which must not matter.
        let (dtype, hidden) = (tensor.0, 64);
        let rows = tensor.2[..EXPERTS * hidden * 2].to_vec();
        mixture.insert(format!("{moe}.gate.weight"), (dtype, vec![EXPERTS, hidden], rows));
    }
    let fields = json!({
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
    });
    let found = logits_of(&with(config("llama3"), fields), &mixture);
    let expected = logits(&golden("llama3"));
    assert_eq!(found.data.len(), expected.data.len());
    let close = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-4;
    assert!(found.data.iter().zip(&expected.data).all(close));
}

#[test]
fn gpt2_may_have_the_common_names() {
    let fields = json!({
        "n_embd": null,
        "hidden_size": 64,
        "n_layer": null,
        "num_hidden_layers": 3,
        "n_positions": null,
        "max_position_embeddings": 256,
        // Beside its own name, a common name wins.
        "n_head": 2,
        "num_attention_heads": 4,
    });
    let gpt2 = with(config("gpt2"), fields);
    assert_eq!(logits_of(&gpt2, &tensors("gpt2")), logits(&golden("gpt2")));
}

#[test]
fn a_class_without_head_is_lowered_where_the_head_is_tied() {
    let gpt2 = with(config("gpt2"), json!({"architectures": ["GPT2Model"]}));
    assert_eq!(logits_of(&gpt2, &tensors("gpt2")), logits(&golden("gpt2")));
    let fields = json!({"architectures": ["LlamaModel"], "tie_word_embeddings": null});
    let folder = written(&with(config("llama3"), fields), &tensors("llama3"), "model.safetensors");
    assert_eq!(refusal(folder.path()), "model.safetensors: tensor \"lm_head.weight\" is missing");
}

#[test]
fn each_family_has_its_own_names_of_the_rotary_base() {
    let fields = json!({"rope_theta": 5.0, "partial_rotary_factor": 1.0});
    let neox = with(config("gpt-neox"), fields);
    assert_eq!(logits_of(&neox, &tensors("gpt-neox")), logits(&golden("gpt-neox")));
    let fields = json!({"rope_theta": null, "rotary_emb_base": 5.0, "rotary_pct": 0.5});
    let llama = with(config("llama3"), fields);
    assert_eq!(logits_of(&llama, &tensors("llama3")), logits(&golden("llama3")));
}

#[test]
fn phi3_was_trained_for_4096_tokens_where_nothing_else_is_said() {
    let mut phi3 = config("phi3-longrope");
    for name in ["su", "yarn"] {
        phi3["rope_scaling"]["type"] = json!(name);
        assert_eq!(logits_of(&phi3, &tensors("phi3-longrope")), logits(&golden("phi3-longrope")));
    }
    let mut phi3 = with(phi3, json!({"original_max_position_embeddings": null}));
    phi3["rope_scaling"]["original_max_position_embeddings"] = json!(32);
    check(
        &logits_of(&phi3, &tensors("phi3-longrope")),
        [-0.100_418, -1.249_439, -3.002_972, -0.417_61, -1.364_047, 3.210_023],
    );
}

#[test]
fn scaling_of_transformers_4_comes_before_that_of_5_in_gemma3() {
    let fields = json!({
        "rope_theta": 5.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    });
    let gemma3 = with(config("gemma3"), fields);
    assert_eq!(logits_of(&gemma3, &tensors("gemma3")), logits(&golden("gemma3")));
}

#[test]
fn scaling_does_not_stretch_the_context_of_gemma3() {
    let model = models::lower(&golden("gemma3")).unwrap();
    // As max_position_embeddings says, though the linear factor is 4.
    assert_eq!(model.context, 512);
}

#[test]
fn quantised_weights_are_told_from_missing_ones() {
    let refusal = |columns: usize| {
        let mut tensors = tensors("llama3");
        let layer = "model.layers.0.self_attn.q_proj";
        tensors.remove(&format!("{layer}.weight")).unwrap();
        let packed = (safetensors::Dtype::I32, vec![8, columns], vec![0; 8 * columns * 4]);
        tensors.insert(format!("{layer}.qweight"), packed);
        let scales = (safetensors::Dtype::F16, vec![2, 64], vec![0; 2 * 64 * 2]);
        tensors.insert(format!("{layer}.scales"), scales);
        refusal(written(&config("llama3"), &tensors, "model.safetensors").path())
    };
    for (columns, method) in [(64, "GPTQ"), (8, "AWQ")] {
        assert_eq!(
            refusal(columns),
            format!(
                "model.safetensors: tensor \"model.layers.0.self_attn.q_proj.weight\" is missing, but \
                 \"model.layers.0.self_attn.q_proj.qweight\" is there: the weights are quantised by {method}, \
                 and only F32, F16 and BF16 are supported; take the unquantised checkpoint with --format q8 or q4"
            )
        );
    }
}

#[test]
fn an_index_may_list_what_is_not_there_and_not_needed() {
    let shard = "model-00001-of-00001.safetensors";
    let mut tensors = tensors("llama3");
    let folder = written(&config("llama3"), &tensors, shard);
    // The head is the embedding.
    tensors.insert("lm_head.weight".into(), tensors["model.embed_tokens.weight"].clone());
    let map: BTreeMap<&String, &str> = tensors.keys().map(|name| (name, shard)).collect();
    let index = folder.path().join("model.safetensors.index.json");
    fs::write(index, json!({"metadata": {}, "weight_map": map}).to_string()).unwrap();
    assert_eq!(logits(folder.path()), logits(&golden("llama3")));
    let untied = with(config("llama3"), json!({"tie_word_embeddings": false}));
    fs::write(folder.path().join("config.json"), untied.to_string()).unwrap();
    assert_eq!(
        refusal(folder.path()),
        "model.safetensors.index.json: tensor \"lm_head.weight\" is said to be in \
         model-00001-of-00001.safetensors, which lacks it"
    );
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
