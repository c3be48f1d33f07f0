//! Checkpoints are read quickly, or refused with one line that names file and cause.

#![expect(clippy::unwrap_used, reason = "helpers of tests may panic as tests do")]

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::Duration;

use compiler::Options;
use executor::load::{self, PlanFile, load};
use serde_json::json;
use tests::made_up::{LlamaShape, MadeUp};
use tests::shortest;

/// The error for what is in `folder`, with the folder's own name left out.
fn error(folder: &Path) -> String {
    let error = format!("{:#}", models::lower(folder).unwrap_err());
    assert!(!error.contains('\n'), "{error}");
    error.replace(&format!("{}/", folder.display()), "")
}

/// The error for a tiny Llama with something wrong.
fn refusal(shards: usize, spoil: impl FnOnce(&mut MadeUp)) -> String {
    let folder = tempfile::tempdir().unwrap();
    let mut checkpoint = MadeUp::llama(LlamaShape::TINY);
    spoil(&mut checkpoint);
    checkpoint.write(folder.path(), shards).unwrap();
    error(folder.path())
}

/// The error for a tiny Llama whose files are changed behind its back.
fn damage(shards: usize, damage: impl FnOnce(&Path)) -> String {
    let folder = tempfile::tempdir().unwrap();
    MadeUp::llama(LlamaShape::TINY).write(folder.path(), shards).unwrap();
    damage(folder.path());
    error(folder.path())
}

#[test]
fn a_file_an_index_and_a_folder_are_the_same_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = MadeUp::llama(LlamaShape::TINY);
    checkpoint.write(folder.path(), 1).unwrap();
    let whole = models::lower(folder.path()).unwrap();
    assert_eq!(whole, models::lower(&folder.path().join("model.safetensors")).unwrap());
    checkpoint.write(folder.path(), 3).unwrap();
    let sharded = models::lower(&folder.path().join("model.safetensors.index.json")).unwrap();
    assert_eq!(sharded.files.len(), 3);
    assert_eq!(whole.layers, sharded.layers);
}

#[test]
fn headers_of_seventy_billion_parameters_are_read_within_a_second() {
    let folder = tempfile::tempdir().unwrap();
    MadeUp::llama(LlamaShape::LLAMA_70B).write(folder.path(), 30).unwrap();
    let second = Duration::from_secs(1);
    let taken = shortest(second, || drop(models::lower(folder.path()).unwrap()));
    let model = models::lower(folder.path()).unwrap();
    let bytes: u64 = model.files.rows().iter().map(|file| file.bytes).sum();
    assert!(bytes > 140_000_000_000, "{bytes}");
    assert_eq!(model.caches.len(), 80);
    assert!(taken < second, "it took {taken:?}");
}

#[test]
fn a_folder_without_checkpoint_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let check = |found: &str| {
        assert_eq!(
            format!("{:#}", models::lower(folder.path()).unwrap_err()),
            format!(
                "{}: holds neither model.safetensors nor model.safetensors.index.json{found}",
                folder.path().display()
            )
        );
    };
    let gguf = "a GGUF file, which is made from a checkpoint; take the checkpoint itself";
    check("");
    fs::write(folder.path().join("a.gguf"), "GGUF").unwrap();
    check(&format!(", but a.gguf, {gguf}"));
    fs::write(folder.path().join("b.gguf"), "GGUF").unwrap();
    check(&format!(", but a.gguf and 1 more, each {gguf}"));
    fs::write(folder.path().join("c.bin"), "").unwrap();
    check(", but a.gguf and 2 more");
}

#[test]
#[cfg(unix)]
fn links_to_nothing_and_what_is_no_file_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    std::os::unix::fs::symlink("../blobs/abc", &path).unwrap();
    for named in [folder.path(), &path] {
        let error = format!("{:#}", models::lower(named).unwrap_err());
        let expected = format!("{}: a link to ../blobs/abc, which cannot be read", path.display());
        assert!(error.starts_with(&expected), "{error}");
    }
    fs::remove_file(&path).unwrap();
    // It would be waited for whoever writes to it.
    assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
    let error = format!("{:#}", models::lower(folder.path()).unwrap_err());
    assert_eq!(error, format!("{}: not a file", path.display()));
}

#[test]
fn a_missing_file_is_named() {
    assert_eq!(
        format!("{:#}", models::lower(Path::new("/nowhere/model.safetensors")).unwrap_err()),
        "/nowhere/model.safetensors: there is no such file or folder; checkpoints are not downloaded: \
         name one on this machine"
    );
    assert_eq!(
        damage(1, |folder| fs::remove_file(folder.join("config.json")).unwrap()),
        "config.json is missing: it is published beside the weights, says what they are, and goes into their folder"
    );
    assert_eq!(
        damage(3, |folder| {
            fs::remove_file(folder.join("model-00002-of-00003.safetensors")).unwrap();
        }),
        "a shard of model.safetensors.index.json: reading model-00002-of-00003.safetensors: \
         No such file or directory (os error 2)"
    );
}

#[test]
fn a_truncated_file_is_refused() {
    let shorten = |bytes: u64| {
        move |folder: &Path| {
            let file =
                fs::File::options().write(true).open(folder.join("model.safetensors")).unwrap();
            file.set_len(bytes).unwrap();
        }
    };
    assert_eq!(
        damage(1, shorten(0)),
        "model.safetensors: 0 bytes are too short for a safetensors header"
    );
    assert_eq!(
        damage(1, shorten(100)),
        "model.safetensors: the header claims 2034 bytes, but only 92 follow: \
         the file is truncated or no safetensors file"
    );
    assert_eq!(
        damage(1, shorten(5000)),
        "model.safetensors: tensor \"model.layers.0.mlp.down_proj.weight\" has the byte range 5216..5984, \
         but only 2958 bytes of data follow the header"
    );
}

#[test]
fn an_absurd_header_is_refused() {
    let write = |start: u64, rest: &'static [u8]| {
        move |folder: &Path| {
            let contents = [&start.to_le_bytes()[..], rest].concat();
            fs::write(folder.join("model.safetensors"), contents).unwrap();
        }
    };
    assert_eq!(
        damage(1, write(u64::MAX, b"{}")),
        "model.safetensors: this is no safetensors file: its first eight bytes would make a header of \
         18446744073709551615 bytes, and 100000000 are allowed"
    );
    assert_eq!(
        damage(1, write(4, b"{}!!")),
        "model.safetensors: malformed header: trailing characters at line 1 column 3"
    );
    assert_eq!(
        damage(1, write(2, b"{}")),
        "model.safetensors: tensor \"lm_head.weight\" is missing"
    );
}

#[test]
fn an_index_must_agree_with_its_shards() {
    let rewrite = |from: &'static str, to: &'static str| {
        move |folder: &Path| {
            let path = folder.join("model.safetensors.index.json");
            let text = fs::read_to_string(&path).unwrap();
            assert!(text.contains(from));
            fs::write(path, text.replacen(from, to, 1)).unwrap();
        }
    };
    assert_eq!(
        damage(2, rewrite("\"lm_head.weight\":\"model-00001", "\"lm_head.weight\":\"model-00002")),
        "model.safetensors.index.json: tensor \"lm_head.weight\" is said to be in \
         model-00002-of-00002.safetensors, which lacks it"
    );
    assert_eq!(
        damage(2, rewrite("model-00001-of-00002.safetensors", "../secret")),
        "model.safetensors.index.json: \"../secret\" is not a file of this folder"
    );
    assert_eq!(
        damage(2, rewrite("\"weight_map\"", "\"map\"")),
        "model.safetensors.index.json: malformed index: missing field `weight_map` at line 1 column 1553"
    );
}

#[test]
fn a_needed_tensor_must_be_there_and_as_configured() {
    assert_eq!(
        refusal(1, |checkpoint| checkpoint.tensor("model.norm.weight").0 = "norm".into()),
        "model.safetensors: tensor \"model.norm.weight\" is missing"
    );
    assert_eq!(
        refusal(2, |checkpoint| checkpoint.tensor("model.norm.weight").0 = "norm".into()),
        "model.safetensors.index.json: tensor \"model.norm.weight\" is missing from its 2 files"
    );
    assert_eq!(
        refusal(1, |checkpoint| checkpoint.tensor("lm_head.weight").2 = vec![32, 8]),
        "model.safetensors: tensor \"lm_head.weight\" has shape [32, 8], but config.json asks for [32, 16]"
    );
    assert_eq!(
        refusal(1, |checkpoint| checkpoint.tensor("lm_head.weight").1 = "I16".into()),
        "model.safetensors: tensor \"lm_head.weight\" is stored as I16; F32, F16 and BF16 are supported"
    );
}

#[test]
fn a_malformed_configuration_is_refused() {
    let with = |field: &str, value: serde_json::Value| {
        refusal(1, |checkpoint| checkpoint.config[field] = value)
    };
    assert_eq!(
        with("hidden_size", json!("16")),
        "config.json: hidden_size is \"16\", not a whole number from 1 up"
    );
    assert_eq!(
        with("num_attention_heads", json!(0)),
        "config.json: num_attention_heads is 0, not a whole number from 1 up"
    );
    assert_eq!(
        with("num_attention_heads", json!(-4)),
        "config.json: num_attention_heads is -4, not a whole number from 1 up"
    );
    assert_eq!(
        with("hidden_size", json!(1_u64 << 40)),
        "config.json: hidden_size is 1099511627776, not a whole number of at most 32 bits"
    );
    assert_eq!(
        with("rms_norm_eps", json!(1e300)),
        "config.json: rms_norm_eps is 1e+300, not a number that 32 bits hold"
    );
    assert_eq!(
        with("rope_theta", json!(1e-300)),
        "config.json: rope_theta is 1e-300, not a number above 0 that 32 bits hold"
    );
    assert_eq!(
        with("num_key_value_heads", json!(3)),
        "config.json: num_attention_heads is 4, not a multiple of num_key_value_heads, 3"
    );
    assert_eq!(
        with("hidden_size", json!(18)),
        "config.json: hidden_size is 18, not a multiple of num_attention_heads, 4"
    );
    assert_eq!(
        with("num_hidden_layers", json!(4_000_000_000u32)),
        "config.json: num_hidden_layers is 4000000000, not a number of layers"
    );
    assert_eq!(
        with("head_dim", json!(4_000_000_000u32)),
        "config.json: heads of 4000000000 features are more than 65536"
    );
    assert_eq!(
        with("hidden_act", json!("mish")),
        "config.json: hidden_act is \"mish\", not one of relu, silu, gelu and gelu_pytorch_tanh"
    );
    assert_eq!(
        with("rope_scaling", json!({"type": "spiral"})),
        "config.json: rope_scaling.type is \"spiral\", not one of default, linear, dynamic, llama3, yarn and longrope"
    );
    assert_eq!(
        with("rope_scaling", json!({"type": "linear"})),
        "config.json: rope_scaling.factor is missing"
    );
    assert_eq!(
        with("tie_word_embeddings", json!("no")),
        "config.json: tie_word_embeddings is \"no\", not true or false"
    );
    assert_eq!(with("architectures", json!(null)), "config.json: model_type is missing");
    assert_eq!(
        with("architectures", json!(["BloomForCausalLM"])),
        "config.json: architectures is [\"BloomForCausalLM\"], not one of those supported: GPT2LMHeadModel, \
         GPTNeoXForCausalLM, Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3ForConditionalGeneration, \
         LlamaForCausalLM, MistralForCausalLM, MinistralForCausalLM, MixtralForCausalLM, OPTForCausalLM, \
         Phi3ForCausalLM, Qwen2ForCausalLM, Qwen2MoeForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM"
    );
    assert_eq!(
        damage(1, |folder| fs::write(folder.join("config.json"), "{").unwrap()),
        "config.json: not JSON: EOF while parsing an object at line 1 column 1"
    );
}

#[test]
fn a_head_stored_once_serves_both_ends() {
    let lowered = |spoil: fn(&mut MadeUp)| {
        let folder = tempfile::tempdir().unwrap();
        let mut checkpoint = MadeUp::llama(LlamaShape::TINY);
        checkpoint.config["tie_word_embeddings"] = json!(true);
        spoil(&mut checkpoint);
        checkpoint.write(folder.path(), 1).unwrap();
        models::lower(folder.path()).unwrap().weights.len()
    };
    // 9 weights in each of 2 layers, the last norm, and the one table.
    assert_eq!(
        lowered(|checkpoint| checkpoint.tensors.retain(|(name, ..)| name != "lm_head.weight")),
        20
    );
    assert_eq!(
        lowered(|checkpoint| checkpoint.tensors.retain(|(name, ..)| !name.contains("embed"))),
        20
    );
    assert_eq!(lowered(|_| ()), 20);
}

/// However large they are: of files of this size a fingerprint sees samples.
#[test]
fn a_head_that_differs_in_one_byte_is_no_copy() {
    let folder = tempfile::tempdir().unwrap();
    let mut checkpoint = MadeUp::llama(LlamaShape { vocabulary: 9 << 20, ..LlamaShape::TINY });
    checkpoint.config["tie_word_embeddings"] = json!(true);
    checkpoint.tensors.sort_by_key(|(name, ..)| name == "lm_head.weight");
    checkpoint.write(folder.path(), 1).unwrap();
    let file = folder.path().join("model.safetensors");
    let bytes = fs::metadata(&file).unwrap().len();
    assert!(ir::is_sampled(bytes / 2), "{bytes}");
    assert_eq!(models::lower(folder.path()).unwrap().weights.len(), 20);
    let opened = fs::File::options().write(true).open(&file).unwrap();
    opened.write_all_at(&[1], bytes - 100_000).unwrap();
    assert_eq!(models::lower(folder.path()).unwrap().weights.len(), 21);
}

#[test]
fn tensors_that_nothing_uses_are_listed() {
    let folder = tempfile::tempdir().unwrap();
    let mut checkpoint = MadeUp::llama(LlamaShape::TINY);
    checkpoint.write(folder.path(), 1).unwrap();
    assert_eq!(models::lower_and_list_unused(folder.path()).unwrap().1, [""; 0]);
    checkpoint.config["num_hidden_layers"] = json!(1);
    checkpoint.write(folder.path(), 2).unwrap();
    let unused = models::lower_and_list_unused(folder.path()).unwrap().1;
    assert_eq!(unused.len(), 9);
    assert!(unused.iter().all(|name| name.starts_with("model.layers.1.")), "{unused:?}");
    // What families fuse, transpose or tie counts as used.
    for name in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("golden")).unwrap() {
        let path = name.unwrap().path();
        if !path.is_dir() {
            continue;
        }
        let unused = models::lower_and_list_unused(&path).unwrap().1;
        assert_eq!(unused, [""; 0], "{}", path.display());
    }
}

#[test]
fn a_checkpoint_that_moved_is_found_where_it_is_said_to_be() {
    let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    MadeUp::llama(LlamaShape::TINY).write(folder.path(), 2).unwrap();
    let model = models::lower(folder.path()).unwrap();
    let options = Options { plan_folder: Some(other.path().to_owned()), ..Options::default() };
    let machine = probe::machine(None).unwrap();
    let plan = compiler::compile(&model, &machine, &options, &mut |_, _| ()).unwrap();
    let path = other.path().join("plan.ron");
    fs::write(&path, plan.to_ron().unwrap()).unwrap();
    let moved = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(folder.path()).unwrap() {
        let entry = entry.unwrap();
        fs::rename(entry.path(), moved.path().join(entry.file_name())).unwrap();
    }
    let open = || PlanFile::open(&path).unwrap();
    let refusal = load(open(), &load::Options::default(), |_, _| ()).err().unwrap();
    assert!(format!("{refusal:#}").contains("--model FOLDER"), "{refusal:#}");
    let mut file = open();
    file.move_checkpoint(moved.path());
    load(file, &load::Options::default(), |_, _| ()).unwrap();
}
