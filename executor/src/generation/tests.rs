//! Defaults, overrides and ends of answers.

use std::fs;

use serde_json::json;

use super::*;

fn from_config(config: Value) -> Result<GenerationOptions> {
    GenerationOptions::from_config(config.as_object().unwrap())
}

fn tokenizer() -> Tokenizer {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/tokenizers");
    Tokenizer::load(&root.join("qwen2")).unwrap()
}

/// Logits that are highest at one id.
fn logits(id: u32) -> Vec<f32> {
    let mut logits = vec![0.0; 768];
    logits[id as usize] = 1.0;
    logits
}

#[test]
fn a_checkpoint_that_does_not_sample_is_greedy() {
    let options =
        from_config(json!({ "temperature": 0.6, "top_p": 0.9, "eos_token_id": 3 })).unwrap();
    assert_eq!(options.sampling.temperature, 0.0);
    assert_eq!(options.end_ids, [3]);
    // A temperature turns sampling on, with the checkpoint's other values.
    let warm = GenerationOverrides { temperature: Some(0.8), ..GenerationOverrides::default() };
    let warm = options.overridden(&warm).unwrap();
    assert_eq!((warm.sampling.temperature, warm.sampling.top_p), (0.8, 0.9));
}

#[test]
fn a_checkpoint_that_samples_does_so_as_it_says() {
    let config = json!({
        "do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1,
        "repetition_penalty": 1.1, "eos_token_id": [1, 2], "max_new_tokens": 9, "stop_strings": "x",
    });
    let options = from_config(config).unwrap();
    let sampling = SamplingOptions {
        temperature: 0.6,
        top_k: 20,
        top_p: 0.95,
        min_p: 0.1,
        repetition_penalty: 1.1,
        seed: 0,
    };
    assert_eq!(options.sampling, sampling);
    assert_eq!((options.end_ids.as_slice(), options.max_tokens), ([1, 2].as_slice(), Some(9)));
    assert_eq!(options.stop_strings, ["x"]);
    assert_eq!(from_config(json!({ "do_sample": true })).unwrap().sampling.temperature, 1.0);

    let overrides = GenerationOverrides {
        temperature: Some(0.5),
        stop_strings: vec!["y".to_owned()],
        seed: Some(5),
        ignores_end: true,
        ..GenerationOverrides::default()
    };
    let changed = options.overridden(&overrides).unwrap();
    assert_eq!((changed.sampling.temperature, changed.sampling.seed), (0.5, 5));
    assert_eq!(changed.stop_strings, ["x", "y"]);
    assert!(changed.end_ids.is_empty());
    assert_eq!(changed.max_tokens, Some(9));
}

#[test]
fn values_of_the_wrong_kind_are_named() {
    let check = |config: Value, expected: &str| {
        assert_eq!(from_config(config).unwrap_err().to_string(), expected);
    };
    check(json!({ "top_k": -2 }), "top_k is not a count");
    check(json!({ "top_k": 1.5 }), "top_k is not a count");
    check(json!({ "max_new_tokens": -1 }), "max_new_tokens is not a count");
    check(json!({ "top_p": "0.9" }), "top_p is not a number");
    check(json!({ "eos_token_id": [1, "2"] }), "eos_token_id holds \"2\", which is no token id");
    check(json!({ "eos_token_id": -2 }), "eos_token_id holds -2, which is no token id");
    check(json!({ "do_sample": 1 }), "do_sample is neither true nor false");
}

#[test]
fn values_are_taken_as_they_are_meant() {
    let config = json!({ "eos_token_id": -1, "top_k": 40.0, "max_new_tokens": 9.0 });
    let options = from_config(config).unwrap();
    assert_eq!((options.sampling.top_k, options.max_tokens), (40, Some(9)));
    assert!(options.end_ids.is_empty());
    assert_eq!(from_config(json!({ "eos_token_id": [-1, 2.0] })).unwrap().end_ids, [2]);
}

#[test]
fn fifty_tokens_are_sampled_where_the_checkpoint_says_nothing() {
    let top_k = |config: Value, overrides: &GenerationOverrides| {
        from_config(config).unwrap().overridden(overrides).unwrap().sampling.top_k
    };
    let none = GenerationOverrides::default();
    assert_eq!(top_k(json!({ "do_sample": true }), &none), 50);
    assert_eq!(top_k(json!({ "do_sample": true, "top_k": null }), &none), 50);
    assert_eq!(top_k(json!({ "do_sample": true, "top_k": 0 }), &none), 0);
    assert_eq!(top_k(json!({ "do_sample": true, "top_k": -1 }), &none), 0);
    let warm = GenerationOverrides { temperature: Some(0.8), ..none.clone() };
    assert_eq!(top_k(json!({}), &warm), 50);
    assert_eq!(top_k(json!({}), &GenerationOverrides { top_k: Some(0), ..warm }), 0);
}

#[test]
fn values_count_only_where_they_are_used() {
    let overridden = |config: Value, overrides: GenerationOverrides| {
        from_config(config).unwrap().overridden(&overrides).map_err(|error| format!("{error:#}"))
    };
    let none = GenerationOverrides::default();
    overridden(json!({ "do_sample": false, "top_p": 0 }), none.clone()).unwrap();
    let sampled = json!({ "do_sample": true, "top_p": 0 });
    let error = overridden(sampled.clone(), none.clone()).unwrap_err();
    let blame = "an option must replace a value of the checkpoint's generation_config.json: ";
    assert_eq!(error, format!("{blame}top-p is 0, but must be above 0 and at most 1"));
    let options = overridden(sampled, GenerationOverrides { top_p: Some(0.9), ..none.clone() });
    assert_eq!(options.unwrap().sampling.top_p, 0.9);
    // The checkpoint is not blamed for what the user says.
    let given = GenerationOverrides { repetition_penalty: Some(1e-39), ..none };
    let error = overridden(json!({}), given).unwrap_err();
    assert!(error.starts_with("repetition penalty is 1e-39, "), "{error}");
}

#[test]
fn what_the_user_says_is_judged_where_it_may_have_an_effect() {
    let check = |temperature, top_p, min_p| {
        let none = GenerationOverrides::default();
        let given = GenerationOverrides { temperature, top_p, min_p, ..none };
        given.check().map_err(|error| error.to_string())
    };
    assert_eq!(check(None, None, None), Ok(()));
    assert_eq!(check(Some(0.0), Some(0.0), None), Ok(()));
    assert_eq!(check(Some(0.0), None, Some(2.0)), Ok(()));
    let top_p = Err("top-p is 0, but must be above 0 and at most 1".to_owned());
    assert_eq!(check(None, Some(0.0), None), top_p);
    assert_eq!(check(Some(0.5), Some(0.0), None), top_p);
    let min_p = Err("min-p is 2, but must be between 0 and 1".to_owned());
    assert_eq!(check(None, None, Some(2.0)), min_p);
    let temperature = Err("temperature is -1, but must be 0 or more".to_owned());
    assert_eq!(check(Some(-1.0), None, None), temperature);
}

#[test]
fn options_of_no_effect_are_told() {
    let none = GenerationOverrides::default();
    let cases = [
        (GenerationOverrides { top_k: Some(40), ..none.clone() }, "--top-k"),
        (GenerationOverrides { top_p: Some(0.9), ..none.clone() }, "--top-p"),
        (GenerationOverrides { min_p: Some(0.1), ..none.clone() }, "--min-p"),
        (GenerationOverrides { seed: Some(3), ..none.clone() }, "--seed"),
    ];
    let greedy = from_config(json!({})).unwrap().sampling;
    let sampled = from_config(json!({ "do_sample": true })).unwrap().sampling;
    for (overrides, option) in cases {
        assert_eq!(overrides.without_effect(&greedy), [option]);
        assert!(overrides.without_effect(&sampled).is_empty());
        let asked = GenerationOverrides { temperature: Some(0.0), ..overrides };
        assert!(asked.without_effect(&greedy).is_empty());
    }
    let several = GenerationOverrides { top_p: Some(0.9), min_p: Some(0.1), ..none };
    assert_eq!(several.without_effect(&greedy), ["--top-p", "--min-p"]);
}

#[test]
fn the_ends_come_from_the_first_file_that_has_some() {
    let folder = tempfile::tempdir().unwrap();
    let write =
        |name: &str, value: Value| fs::write(folder.path().join(name), value.to_string()).unwrap();
    let tokenizer = tokenizer();
    let ends = || GenerationOptions::load(folder.path(), Some(&tokenizer)).unwrap().end_ids;
    assert_eq!(ends(), [767], "the tokenizer's <|im_end|>");
    write("config.json", json!({ "eos_token_id": 7 }));
    assert_eq!(ends(), [7]);
    write("generation_config.json", json!({ "eos_token_id": [5, 6] }));
    assert_eq!(ends(), [5, 6]);
    write("generation_config.json", json!({ "eos_token_id": null }));
    assert_eq!(ends(), [7]);
    write("generation_config.json", json!({ "top_p": [] }));
    let error = format!("{:#}", GenerationOptions::load(folder.path(), None).unwrap_err());
    assert!(error.ends_with("generation_config.json: top_p is not a number"), "{error}");
}

#[test]
fn an_answer_ends_at_an_end_token() {
    let tokenizer = tokenizer();
    let hello = tokenizer.encode("Hello", false).unwrap();
    // A special token, and one that is part of texts elsewhere.
    for end in [767, tokenizer.encode("!", false).unwrap()[0]] {
        let options = GenerationOptions { end_ids: vec![end], ..GenerationOptions::default() };
        let mut generation = Generation::new(&options, &[1], 10);
        for &id in &hello {
            assert_eq!(generation.step(&logits(id), Some(&tokenizer)).unwrap().finish, None);
        }
        let last = generation.step(&logits(end), Some(&tokenizer)).unwrap();
        assert_eq!(last.finish, Some(FinishReason::Stop));
        assert_eq!(generation.text(), "Hello");
        assert_eq!(generation.ids(), [hello.as_slice(), &[end]].concat());
    }
}

#[test]
fn an_answer_ends_at_a_stop_string() {
    let tokenizer = tokenizer();
    let options =
        GenerationOptions { stop_strings: vec!["wor".to_owned()], ..GenerationOptions::default() };
    let mut generation = Generation::new(&options, &[], 100);
    let mut shown = String::new();
    for id in tokenizer.encode("Hello, world!", false).unwrap() {
        let step = generation.step(&logits(id), Some(&tokenizer)).unwrap();
        shown.push_str(&step.text);
        if step.finish.is_some() {
            assert_eq!(step.finish, Some(FinishReason::Stop));
            break;
        }
    }
    assert_eq!((shown.as_str(), generation.text()), ("Hello, ", "Hello, "));
}

#[test]
fn an_answer_ends_at_a_special_token_that_is_a_stop_string() {
    let tokenizer = tokenizer();
    let asked = GenerationOverrides {
        stop_strings: vec!["<|im_end|>".to_owned()],
        ignores_end: true,
        ..GenerationOverrides::default()
    };
    let options = from_config(json!({ "eos_token_id": 765 })).unwrap().overridden(&asked).unwrap();
    let mut generation = Generation::new(&options, &[], 100);
    let mut finishes = Vec::new();
    for id in tokenizer.encode("Hi<|endoftext|><|im_end|>", false).unwrap() {
        finishes.push(generation.step(&logits(id), Some(&tokenizer)).unwrap().finish);
    }
    let (last, before) = finishes.split_last().unwrap();
    assert_eq!(*last, Some(FinishReason::Stop));
    assert!(before.iter().all(Option::is_none), "{before:?}");
    assert_eq!((generation.text(), generation.ids().last()), ("Hi", Some(&767)));
}

#[test]
fn an_answer_ends_where_it_or_the_context_is_full() {
    let limits = |max_tokens: Option<usize>, room: usize| {
        let options = GenerationOptions { max_tokens, ..GenerationOptions::default() };
        let mut generation = Generation::new(&options, &[], room);
        (1..).find(|_| generation.step(&logits(3), None).unwrap().finish.is_some()).unwrap()
    };
    assert_eq!(limits(Some(3), 10), 3);
    assert_eq!(limits(Some(30), 10), 10);
    assert_eq!(limits(None, 5), 5);
    assert_eq!(FinishReason::Length.name(), "length");
}

#[test]
fn what_waited_for_a_character_is_shown_at_the_end() {
    let tokenizer = tokenizer();
    let options = GenerationOptions { max_tokens: Some(1), ..GenerationOptions::default() };
    let mut generation = Generation::new(&options, &[], 10);
    let half = tokenizer.encode("日", false).unwrap()[0];
    let step = generation.step(&logits(half), Some(&tokenizer)).unwrap();
    assert_eq!((step.text.as_str(), step.finish), ("\u{FFFD}", Some(FinishReason::Length)));
}

#[test]
fn fields_that_are_ignored_are_told_where_they_ask_for_something() {
    let told = |config: Value| ignored(config.as_object().unwrap());
    let neutral = json!({
        "no_repeat_ngram_size": 0, "min_new_tokens": null, "min_length": 0, "typical_p": 1.0,
        "num_beams": 1, "guidance_scale": 1, "suppress_tokens": [], "top_k": 20,
        "encoder_no_repeat_ngram_size": 3,
    });
    assert_eq!(told(neutral), [""; 0]);
    let asked = json!({
        "bad_words_ids": [[5]], "num_beams": 4, "penalty_alpha": 0.6, "suppress_tokens": [1],
    });
    let names = ["num_beams", "penalty_alpha", "suppress_tokens", "bad_words_ids"];
    assert_eq!(told(asked), names);
}

#[test]
fn an_answer_that_is_stopped_keeps_the_text_that_waited() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/tokenizers");
    let tokenizer = Tokenizer::load(&root.join("llama2")).unwrap();
    let mut generation = Generation::new(&GenerationOptions::default(), &[], 10);
    let newline = tokenizer.token_id("<0x0A>").unwrap();
    assert_eq!(generation.accept(newline, Some(&tokenizer)).unwrap().text, "");
    assert_eq!(generation.end(&tokenizer).unwrap(), "\n");
    assert_eq!((generation.text(), generation.ids()), ("\n", [newline].as_slice()));
}
