//! Tokens and text against what transformers makes of the golden checkpoints.

use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn golden_folders() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden");
    let mut folders: Vec<PathBuf> = fs::read_dir(root)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("golden.json").is_file())
        .collect();
    folders.sort();
    assert!(folders.len() >= 12, "golden checkpoints are missing: {folders:?}");
    folders
}

fn golden(folder: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(folder.join("golden.json")).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn tokenizer(name: &str) -> Tokenizer {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/tokenizers");
    Tokenizer::load(&root.join(name)).unwrap()
}

/// The pieces that a stream hands out, with what it hands out at the end.
fn streamed(tokenizer: &Tokenizer, stops: &[&str], ids: &[u32]) -> Vec<String> {
    let stops: Vec<String> = stops.iter().map(|&stop| stop.to_owned()).collect();
    let mut stream = TextStream::new(&stops, true);
    let mut pieces: Vec<String> =
        ids.iter().map(|&id| stream.push(tokenizer, id).unwrap()).collect();
    pieces.push(stream.finish(tokenizer).unwrap());
    pieces
}

#[test]
fn tokenizers_agree_with_transformers() {
    for folder in golden_folders() {
        let tokenizer = Tokenizer::load(&folder).unwrap();
        for vector in golden(&folder)["tokenizer"].as_array().unwrap() {
            let text = vector["text"].as_str().unwrap();
            let context = format!("{}: {text:?}", folder.display());
            let with_special = ids(&vector["ids"]);
            assert_eq!(tokenizer.encode(text, true).unwrap(), with_special, "{context}");
            let without = tokenizer.encode(text, false).unwrap();
            assert_eq!(without, ids(&vector["ids_no_special"]), "{context}");
            let decoded = tokenizer.decode(&with_special, true).unwrap();
            assert_eq!(decoded, vector["decoded"].as_str().unwrap(), "{context}");
            let kept = tokenizer.decode(&with_special, false).unwrap();
            assert_eq!(kept, vector["decoded_keep_special"].as_str().unwrap(), "{context}");
            assert_eq!(streamed(&tokenizer, &[], &with_special).concat(), decoded, "{context}");
        }
    }
}

#[test]
fn conversations_agree_with_transformers() {
    let mut count = 0;
    for folder in golden_folders() {
        let tokenizer = Tokenizer::load(&folder).unwrap();
        let golden = golden(&folder);
        assert_eq!(tokenizer.has_chat_template(), !golden["chat"].is_null());
        for vector in golden["chat"].as_array().into_iter().flatten() {
            let request = ChatRequest {
                messages: vector["messages"].as_array().unwrap().clone(),
                add_generation_prompt: vector["add_generation_prompt"].as_bool().unwrap(),
                ..ChatRequest::default()
            };
            let rendered = tokenizer.render_chat(&request).unwrap();
            assert_eq!(rendered, vector["rendered"].as_str().unwrap(), "{}", folder.display());
            assert_eq!(tokenizer.encode_chat(&request).unwrap(), ids(&vector["ids"]));
            count += 1;
        }
    }
    assert!(count >= 20, "only {count} conversations");
}

#[test]
fn a_missing_tokenizer_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let error = Tokenizer::load(folder.path()).unwrap_err();
    assert!(error.is::<NoTokenizer>());
    let error = format!("{error:#}");
    assert_eq!(error, format!("no tokenizer.json in {}", folder.path().display()));

    fs::write(folder.path().join("tokenizer.json"), "{").unwrap();
    let error = Tokenizer::load(folder.path()).unwrap_err();
    assert!(!error.is::<NoTokenizer>());
    let error = format!("{error:#}");
    assert!(error.contains("tokenizer.json: EOF while parsing"), "{error}");

    fs::write(folder.path().join("tokenizer_config.json"), "[]").unwrap();
    let error = format!("{:#}", Tokenizer::load(folder.path()).unwrap_err());
    assert!(error.ends_with("tokenizer_config.json does not hold a JSON object"), "{error}");
}

#[test]
fn a_conversation_without_a_template_is_an_error() {
    let error = tokenizer("gpt2").render_chat(&ChatRequest::default()).unwrap_err();
    let said = "the tokenizer has no chat template: leave out --chat and --system";
    assert_eq!(format!("{error:#}"), said);
}

#[test]
fn a_malformed_chat_template_leaves_the_tokenizer() {
    let folder = tempfile::tempdir().unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/tokenizers/gpt2");
    fs::copy(source.join("tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
    fs::write(folder.path().join("chat_template.jinja"), "{% if %}").unwrap();
    let tokenizer = Tokenizer::load(folder.path()).unwrap();
    assert_eq!(tokenizer.decode(&tokenizer.encode("Hello", true).unwrap(), true).unwrap(), "Hello");
    assert!(tokenizer.has_chat_template());
    let error = format!("{:#}", tokenizer.encode_chat(&ChatRequest::default()).unwrap_err());
    assert!(error.starts_with("malformed chat template "), "{error}");
    assert!(error.contains("chat_template.jinja: "), "{error}");
}

/// A folder with the parts of which a whole tokenizer of the tests is made.
fn in_parts(name: &str) -> tempfile::TempDir {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/tokenizers").join(name);
    let whole: Value =
        serde_json::from_str(&fs::read_to_string(source.join("tokenizer.json")).unwrap()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: String| fs::write(folder.path().join(name), text).unwrap();
    write("vocab.json", whole["model"]["vocab"].to_string());
    let merges: Vec<String> = whole["model"]["merges"]
        .as_array()
        .unwrap()
        .iter()
        .map(|merge| match merge.as_array() {
            Some(pair) => format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()),
            None => merge.as_str().unwrap().to_owned(),
        })
        .collect();
    write("merges.txt", format!("#version: 0.2\n{}\n", merges.join("\n")));
    fs::copy(source.join("tokenizer_config.json"), folder.path().join("tokenizer_config.json"))
        .unwrap();
    folder
}

#[test]
fn vocab_and_merges_make_the_same_tokenizer() {
    // Line ends after punctuation and accents apart from their letters tell Qwen2's from GPT-2's.
    let special = ["before </s> after", "<|im_start|>user\n<|im_end|>"];
    let texts = ["", "Hello, world!", " two  spaces", "日本語 é", "e\u{301}", "IT'S 123!\n\n x"];
    for name in ["opt", "gpt2", "qwen2"] {
        let (whole, folder) = (tokenizer(name), in_parts(name));
        let parts = Tokenizer::load(folder.path()).unwrap();
        for text in texts.into_iter().chain(special) {
            let ids = whole.encode(text, true).unwrap();
            assert_eq!(parts.encode(text, true).unwrap(), ids, "{name}: {text:?}");
            assert_eq!(parts.decode(&ids, true).unwrap(), whole.decode(&ids, true).unwrap());
        }
    }
}

#[test]
fn parts_without_a_class_are_cut_as_the_architecture_has_it() {
    let folder = in_parts("qwen2");
    let config = folder.path().join("tokenizer_config.json");
    let mut without: Value = serde_json::from_str(&fs::read_to_string(&config).unwrap()).unwrap();
    without.as_object_mut().unwrap().remove("tokenizer_class");
    fs::write(&config, without.to_string()).unwrap();
    let ids = || Tokenizer::load(folder.path()).unwrap().encode("e\u{301}", true).unwrap();
    let as_gpt2 = ids();
    let whole = tokenizer("qwen2").encode("e\u{301}", true).unwrap();
    assert_ne!(as_gpt2, whole);
    for model in [
        json!({ "model_type": "qwen3_moe" }),
        json!({ "model_type": "other", "tokenizer_class": "Qwen2TokenizerFast" }),
    ] {
        fs::write(folder.path().join("config.json"), model.to_string()).unwrap();
        assert_eq!(ids(), whole, "{model}");
    }
}

#[test]
fn parts_of_another_class_are_no_tokenizer() {
    let folder = in_parts("opt");
    let config = json!({ "tokenizer_class": "LlamaTokenizer" });
    fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    let error = format!("{:#}", Tokenizer::load(folder.path()).unwrap_err());
    assert!(error.starts_with(&format!("no tokenizer.json in {}, and", folder.path().display())));
    assert!(error.contains("of a LlamaTokenizer: "), "{error}");
}

#[test]
fn tokens_of_the_configuration_are_added() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/tokenizers/gpt2");
    let folder = tempfile::tempdir().unwrap();
    fs::copy(source.join("tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
    let config = json!({
        "eos_token": { "content": "<|endoftext|>" },
        "pad_token": "<|pad|>",
        "added_tokens_decoder": {
            "10": { "content": "<|b|>", "special": false },
            "9": { "content": "<|a|>", "special": true },
            "11": { "content": "<|c|>", "special": false },
        },
        "additional_special_tokens": ["<|c|>"],
    });
    fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    let tokenizer = Tokenizer::load(folder.path()).unwrap();
    assert_eq!(tokenizer.special_token("eos_token"), Some("<|endoftext|>"));
    let ids = tokenizer.encode("<|a|><|b|><|c|><|pad|>", true).unwrap();
    assert_eq!(ids, [768, 769, 770, 771]);
    assert_eq!(tokenizer.decode(&ids, true).unwrap(), "<|b|>");
}

#[test]
fn half_a_character_is_never_shown() {
    for name in ["gpt2", "llama2", "gemma"] {
        let tokenizer = tokenizer(name);
        let ids = tokenizer.encode("x 日本 🙂 y", false).unwrap();
        let pieces = streamed(&tokenizer, &[], &ids);
        assert!(ids.len() > 12, "{name} has these characters as tokens");
        assert!(pieces.iter().all(|piece| !piece.contains('\u{FFFD}')), "{name}: {pieces:?}");
        assert_eq!(pieces.concat(), "x 日本 🙂 y");
        // The answer is shown as it grows, not at its end.
        assert!(pieces.iter().filter(|piece| !piece.is_empty()).count() >= 4, "{pieces:?}");
    }
}

#[test]
fn malformed_bytes_show_as_in_a_whole_decode() {
    let tokenizer = tokenizer("llama2");
    let byte = |byte: u8| tokenizer.token_id(&format!("<0x{byte:02X}>")).unwrap();
    // A whole character before the malformed byte falls with it: the run is one.
    let ids = [byte(0xE6), byte(0x97), byte(0xA5), byte(0xFF), byte(b'a')];
    assert_eq!(tokenizer.decode(&ids, true).unwrap(), "\u{FFFD}".repeat(5));
    assert_eq!(streamed(&tokenizer, &[], &ids).concat(), "\u{FFFD}".repeat(5));
}

#[test]
fn a_space_after_a_silent_token_stays() {
    let tokenizer = tokenizer("llama2");
    let ids =
        [tokenizer.encode("a", false).unwrap(), vec![2], tokenizer.encode("b", false).unwrap()]
            .concat();
    let whole = tokenizer.decode(&ids, true).unwrap();
    assert_eq!(whole, "a b");
    assert_eq!(streamed(&tokenizer, &[], &ids).concat(), whole);
}

#[test]
fn a_stop_string_ends_the_text_and_is_not_shown() {
    let tokenizer = tokenizer("qwen2");
    let check = |stops: &[&str], text: &str, expected: &str| {
        let ids = tokenizer.encode(text, false).unwrap();
        assert_eq!(streamed(&tokenizer, stops, &ids).concat(), expected, "{stops:?} in {text:?}");
    };
    check(&["\nUser:"], "One.\nTwo.\nUser: three", "One.\nTwo.");
    check(&["\nUser:"], "One.\nUse it.\nUs", "One.\nUse it.\nUs");
    check(&["zz", ""], "pizza", "pi");
    check(&["pizza"], "pizza", "");
    // The one that is complete first wins, then the longest.
    check(&["bcde", "cd"], "abcdef", "ab");
    check(&["cd", "bcd"], "abcdef", "a");
    check(&["日本"], "a日木日本b", "a日木");
}

/// The text before a stop string and how many tokens it took to find it.
fn stopped_after(tokenizer: &Tokenizer, stop: &str, ids: &[u32]) -> (String, Option<usize>) {
    let mut stream = TextStream::new(&[stop.to_owned()], true);
    let mut text = String::new();
    for (i, &id) in ids.iter().enumerate() {
        text.push_str(&stream.push(tokenizer, id).unwrap());
        if stream.stopped().is_some() {
            assert_eq!(stream.stopped(), Some(stop));
            assert_eq!(stream.finish(tokenizer).unwrap(), "");
            return (text, Some(i + 1));
        }
    }
    text.push_str(&stream.finish(tokenizer).unwrap());
    (text, None)
}

#[test]
fn a_stop_string_is_found_in_a_run_of_bytes() {
    let tokenizer = tokenizer("llama2");
    let bytes = |text: &[u8]| -> Vec<u32> {
        let id = |byte: &u8| tokenizer.token_id(&format!("<0x{byte:02X}>")).unwrap();
        text.iter().map(id).collect()
    };
    let check = |stop: &str, text: &[u8], expected: &str, tokens: Option<usize>| {
        let found = stopped_after(&tokenizer, stop, &bytes(text));
        assert_eq!(found, (expected.to_owned(), tokens), "{stop:?} in {text:?}");
    };
    check("\n\n", b"\n\n\n\n", "", Some(2));
    check("\n\n", b"a\n\n\xFF", "a", Some(3));
    check("\n\n", b"a\nb\n", "a\nb\n", None);
    check("日", "x日本".as_bytes(), "x", Some(4));
    // A run that is malformed already has no text in which to look.
    check("\n", b"\xFF\n", "\u{FFFD}\u{FFFD}", None);
    // A stop string may begin before the run.
    let ids = [tokenizer.encode("a", false).unwrap(), bytes(b"\n\n")].concat();
    assert_eq!(stopped_after(&tokenizer, "a\n", &ids), (String::new(), Some(ids.len() - 1)));
}

#[test]
fn a_special_token_may_be_a_stop_string() {
    let tokenizer = tokenizer("qwen2");
    let ids = |text: &str| tokenizer.encode(text, false).unwrap();
    let hello = ids("Hello");
    let found = stopped_after(&tokenizer, "<|im_end|>", &ids("Hello<|im_end|> there"));
    assert_eq!(found, ("Hello".to_owned(), Some(hello.len() + 1)));
    // Others stay silent, and what waited is shown.
    let found = stopped_after(&tokenizer, "<|im_end|>", &ids("<|im_start|>Hello<<|im_end|>"));
    assert_eq!(found.0, "Hello<");
    assert_eq!(
        stopped_after(&tokenizer, "end", &ids("Hello<|im_end|>")),
        ("Hello".to_owned(), None)
    );
}

#[test]
fn spaces_are_cleaned_up_where_the_configuration_asks() {
    let folder = tempfile::tempdir().unwrap();
    let words = ["[UNK]", "it", "'", "s", "do", "n't", "go", ",", "he", "said", "."];
    let vocabulary: serde_json::Map<String, Value> =
        words.iter().enumerate().map(|(id, word)| ((*word).to_owned(), id.into())).collect();
    let whole = json!({
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": { "type": "WhitespaceSplit" },
        "model": { "type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]" },
    });
    fs::write(folder.path().join("tokenizer.json"), whole.to_string()).unwrap();
    let load = |cleans_up: bool| {
        let config = json!({ "clean_up_tokenization_spaces": cleans_up });
        fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        Tokenizer::load(folder.path()).unwrap()
    };
    let text = "it 's do n't go , he said .";
    let ids: Vec<u32> = vec![1, 2, 3, 4, 5, 6, 7, 8, 9, 10];
    let plain = load(false);
    assert_eq!(plain.encode(text, true).unwrap(), [1, 0, 4, 5, 6, 7, 8, 9, 10]);
    assert_eq!(plain.decode(&ids, true).unwrap(), "it ' s do n't go , he said .");
    let cleaned = load(true);
    assert_eq!(cleaned.decode(&ids, true).unwrap(), "it's don't go, he said.");
    // A stop string is found although what it ends in may be cleaned up.
    let found = |stop: &str| stopped_after(&cleaned, stop, &ids);
    assert_eq!(found(","), ("it's don't go".to_owned(), Some(7)));
    assert_eq!(found("."), ("it's don't go, he said".to_owned(), Some(10)));
    assert_eq!(found("said"), ("it's don't go, he ".to_owned(), Some(9)));
    assert_eq!(found(" ."), ("it's don't go, he said.".to_owned(), None));
}

proptest! {
    #[test]
    fn a_stream_gives_the_text_of_a_whole_decode(
        name in prop::sample::select(vec!["gemma", "gpt2", "llama2", "llama3", "opt", "qwen2"]),
        ids in prop::collection::vec(0_u32..780, 0..60),
    ) {
        let tokenizer = tokenizer(name);
        let whole = tokenizer.decode(&ids, true).unwrap();
        prop_assert_eq!(streamed(&tokenizer, &[], &ids).concat(), whole);
    }

    #[test]
    fn stop_strings_do_not_depend_on_where_text_is_cut(
        text in "[ab日]{0,24}",
        stops in prop::collection::vec("[ab日]{0,4}", 0..4),
        cuts in prop::collection::vec(0_usize..25, 0..6),
    ) {
        let characters: Vec<char> = text.chars().collect();
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(characters.len())).collect();
        cuts.extend([0, characters.len()]);
        cuts.sort_unstable();
        let mut stream = stream::StopStrings::new(&stops);
        let mut shown = String::new();
        for part in cuts.windows(2) {
            if stream.matched().is_none() {
                shown.push_str(&stream.push(&characters[part[0]..part[1]].iter().collect::<String>()));
            }
        }
        shown.push_str(&stream.finish());

        // By definition: character by character, until the text ends with a stop string.
        let mut expected = String::new();
        for character in characters {
            expected.push(character);
            let stop = stops.iter().filter(|stop| !stop.is_empty() && expected.ends_with(*stop));
            if let Some(longest) = stop.max_by_key(|stop| stop.len()) {
                expected.truncate(expected.len() - longest.len());
                break;
            }
        }
        prop_assert_eq!(shown, expected);
    }
}
