//! `hybrid-exec` as its users call it rightly: answers and scores of the demo model, and what it writes beside them.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use compiler::options::Request;
use executor::kernels::cpu::isa::Isa;
use ir::tensor::DType;
use ir::trace::Trace;
use serde_json::{Value, json};
use tempfile::TempDir;
use tests::interpreter::{Interpreter, Matrix, softmax};

/// The logits of the tokens that follow are above all others by half a unit, which sums in another order do not change.
const PROMPT: &str = "A trait";
/// Their text.
const ANSWER: &str = " object.\n\nA trait object is";
/// What asks for them.
const GREEDY: [&str; 4] = ["--temperature", "0", "--max-tokens", "8"];

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo")
}

/// A folder with a plan of the demo in f32 for one device, `plan.ron`.
fn folder() -> TempDir {
    let model = models::lower(&demo()).expect("the demo is a model");
    let machine = probe::machine(None).expect("the machine has a topology");
    let options = compiler::Options {
        context: Some(256),
        formats: vec!["f32".parse().expect("it is a format")],
        kv_type: Some(DType::F32),
        request: Request::Pipeline(vec!["numa0".to_owned()]),
        ..compiler::Options::default()
    };
    let plan = compiler::compile(&model, &machine, &options, &mut |_, _| ()).expect("it fits");
    let folder = tempfile::tempdir().expect("a folder for the plan");
    write(&folder, "plan.ron", &plan.to_ron().expect("a plan can be written"));
    folder
}

fn write(folder: &TempDir, name: &str, text: &str) {
    fs::write(folder.path().join(name), text).expect("the folder is ours");
}

fn read(folder: &TempDir, name: &str) -> String {
    fs::read_to_string(folder.path().join(name)).expect("it was written")
}

/// What `hybrid-exec` prints where it works in a folder and reads an input.
fn printed(folder: &TempDir, arguments: &[&str], input: &str) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hybrid-exec"));
    command.current_dir(folder).args(arguments);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("hybrid-exec starts");
    let mut stdin = child.stdin.take().expect("it is a pipe");
    stdin.write_all(input.as_bytes()).expect("hybrid-exec reads its input");
    drop(stdin);
    let output = child.wait_with_output().expect("hybrid-exec ends");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {said}");
    String::from_utf8(output.stdout).expect("hybrid-exec prints text")
}

/// An answer as JSON.
fn answer(folder: &TempDir, arguments: &[&str]) -> Value {
    let arguments = [&["plan.ron", "--json"][..], arguments].concat();
    let text = printed(folder, &arguments, "");
    serde_json::from_str(&text).expect("one JSON object and nothing else")
}

/// The answer of the eight likeliest tokens as JSON.
fn greedy(folder: &TempDir, arguments: &[&str]) -> Value {
    answer(folder, &[&GREEDY[..], arguments].concat())
}

fn ids(value: &Value) -> Vec<u32> {
    let ids = value.as_array().expect("a list of ids");
    ids.iter().map(|id| id.as_u64().expect("an id") as u32).collect()
}

/// The logits of the reference after some of these tokens.
fn reference(tokens: &[u32], rows: &[usize]) -> Matrix {
    let model = models::lower(&demo()).expect("the demo is a model");
    let reference = Interpreter::load(model).expect("the weights are there");
    reference.logits(tokens, rows).expect("the model can be computed")
}

#[test]
fn the_likeliest_tokens_are_those_of_the_reference() {
    let answer = greedy(&folder(), &["--prompt", PROMPT]);
    assert_eq!(answer["text"], ANSWER);
    assert_eq!(answer["finish_reason"], "length");
    let (prompt, ids) = (ids(&answer["prompt_ids"]), ids(&answer["ids"]));
    assert_eq!(ids.len(), 8);
    let fed = [&prompt[..], &ids[..7]].concat();
    let rows: Vec<usize> = (prompt.len() - 1..fed.len()).collect();
    let logits = reference(&fed, &rows);
    let likeliest = |row: &[f32]| {
        let logits = (0..).zip(row);
        let best = logits.max_by(|a: &(u32, &f32), b| a.1.total_cmp(b.1));
        best.map(|(id, _)| id).unwrap()
    };
    assert_eq!(ids, logits.rows().map(likeliest).collect::<Vec<u32>>());
}

#[test]
fn a_prompt_is_an_argument_an_input_or_ids() {
    let folder = folder();
    let expected = greedy(&folder, &["--prompt", PROMPT]);
    let text = format!("{ANSWER}\n");
    let arguments = [&["plan.ron"][..], &GREEDY].concat();
    let with_prompt = [&arguments[..], &["--prompt", PROMPT]].concat();
    assert_eq!(printed(&folder, &with_prompt, ""), text);
    assert_eq!(printed(&folder, &arguments, &format!("{PROMPT}\n")), text);
    // Ids take no tokenizer, and a checkpoint may lie elsewhere.
    let bare = tempfile::tempdir().unwrap();
    for file in ["config.json", "generation_config.json", "model.safetensors"] {
        fs::copy(demo().join(file), bare.path().join(file)).unwrap();
    }
    let prompt: Vec<String> = ids(&expected["prompt_ids"]).iter().map(u32::to_string).collect();
    let model = bare.path().to_str().unwrap();
    let of_ids = greedy(&folder, &["--model", model, "--prompt-ids", &prompt.join(", ")]);
    assert_eq!(of_ids["prompt_ids"], expected["prompt_ids"]);
    assert_eq!(of_ids["ids"], expected["ids"]);
    assert_eq!(of_ids["text"], "");
}

#[test]
fn a_chat_is_asked_as_the_template_has_it() {
    let folder = folder();
    let plain = greedy(&folder, &["--prompt", PROMPT]);
    assert_eq!(plain["prompt_ids"], json!([0, 38, 546]));
    // <|bos|><|user|>A trait<|end|><|assistant|>
    let asked = json!([0, 2, 38, 546, 4, 3]);
    let chat = greedy(&folder, &["--chat", "--prompt", PROMPT]);
    assert_eq!(chat["prompt_ids"], asked);
    assert_ne!(chat["ids"], plain["ids"]);
    // The template leaves system messages out.
    let with_system = greedy(&folder, &["--system", "Be brief.", "--prompt", PROMPT]);
    assert_eq!(with_system["prompt_ids"], asked);
}

#[test]
fn an_answer_ends_where_it_is_told_to() {
    let folder = folder();
    let all = ids(&greedy(&folder, &["--prompt", PROMPT])["ids"]);
    for length in [0, 3] {
        let most = length.to_string();
        let arguments = ["--temperature", "0", "--max-tokens", &most, "--prompt", PROMPT];
        let short = answer(&folder, &arguments);
        assert_eq!(ids(&short["ids"]), all[..length]);
        assert_eq!(short["finish_reason"], "length");
    }
    // The second begins within a token and ends within a later one.
    for stop in ["trait", "ct.\n"] {
        let stopped = greedy(&folder, &["--stop", stop, "--prompt", PROMPT]);
        assert_eq!(stopped["text"], ANSWER[..ANSWER.find(stop).unwrap()]);
        assert_eq!(stopped["finish_reason"], "stop");
        let ids = ids(&stopped["ids"]);
        assert!(ids.len() < all.len() && all.starts_with(&ids), "{ids:?}");
    }
}

#[test]
fn a_seed_gives_the_same_answer_again_and_another_one_another() {
    let folder = folder();
    let sampled = |seed: &str| {
        let sampling = ["--temperature", "1.5", "--max-tokens", "16", "--seed", seed];
        answer(&folder, &[&sampling[..], &["--prompt", PROMPT]].concat())["ids"].clone()
    };
    let first = sampled("1");
    assert_eq!(sampled("1"), first);
    assert_ne!(sampled("2"), first);
}

#[test]
fn how_a_plan_is_run_changes_no_likeliest_token() {
    let folder = folder();
    let expected = greedy(&folder, &["--prompt", PROMPT])["ids"].clone();
    let levels: Vec<String> = Isa::available().iter().map(Isa::to_string).collect();
    let levels = levels.iter().map(|level| ["--isa", level]);
    let others = [["--kernels", "plain"], ["--cpu-backend", "ndarray"], ["--threads", "1"]];
    for [option, value] in levels.chain(others) {
        let given = greedy(&folder, &[option, value, "--prompt", PROMPT]);
        assert_eq!(given["ids"], expected, "{option} {value}");
    }
}

#[test]
fn records_of_an_answer_can_be_read() {
    let folder = folder();
    let records = ["--trace", "trace.ron", "--perfetto", "perfetto.json"];
    let traced = greedy(&folder, &[&records[..], &["--prompt", PROMPT]].concat());
    assert_eq!(traced["text"], ANSWER);
    let trace = Trace::from_ron(&read(&folder, "trace.ron")).unwrap();
    assert_eq!(trace.plan, ir::fingerprint(read(&folder, "plan.ron").as_bytes()));
    // The prompt, then each token but the last.
    let tokens: Vec<u32> = trace.runs.iter().map(|run| run.tokens).collect();
    assert_eq!(tokens, [3, 1, 1, 1, 1, 1, 1, 1]);
    for run in 0..8 {
        assert!(trace.spans.iter().any(|span| span.run == run), "run {run} has no steps");
    }
    let perfetto: Value = serde_json::from_str(&read(&folder, "perfetto.json")).unwrap();
    assert!(perfetto["traceEvents"].as_array().unwrap().len() > trace.spans.len());
}

#[test]
fn a_text_is_scored_as_its_ids_are() {
    const TEXT: &str = "A trait is a collection of methods.";
    let folder = folder();
    let given = answer(&folder, &["--max-tokens", "0", "--prompt", TEXT])["prompt_ids"].clone();
    write(&folder, "text", TEXT);
    write(&folder, "ids", &given.to_string());
    write(&folder, "object", &json!({ "ids": given }).to_string());
    let score =
        |kind: &str, file: &str| printed(&folder, &["perplexity", "plan.ron", kind, file], "");
    let scored = score("--text-file", "text");
    assert_eq!(score("--ids-file", "ids"), scored);
    assert_eq!(score("--ids-file", "object"), scored);
    let scored: Value = serde_json::from_str(&scored).unwrap();
    let ids = ids(&given);
    assert_eq!(scored["tokens"], ids.len() - 1);
    let rows: Vec<usize> = (0..ids.len() - 1).collect();
    let logits = reference(&ids, &rows);
    let of_token = |(row, &id): (&[f32], &u32)| {
        let row: Vec<f64> = row.iter().map(|&logit| f64::from(logit)).collect();
        -softmax(&row)[id as usize].ln()
    };
    let sum: f64 = logits.rows().zip(&ids[1..]).map(of_token).sum();
    let [nll, perplexity] = ["nll", "perplexity"].map(|name| scored[name].as_f64().unwrap());
    let expected = sum / rows.len() as f64;
    assert!((nll - expected).abs() < 1e-4, "{nll} instead of {expected}");
    assert!((perplexity / nll.exp() - 1.0).abs() < 1e-12, "{perplexity} of {nll}");
}

#[test]
fn a_bench_measures_prompts_and_answers() {
    let arguments = ["bench", "plan.ron", "-p", "8", "-n", "4", "-r", "1", "-o", "json"];
    let text = printed(&folder(), &arguments, "");
    let tests: Value = serde_json::from_str(&text).unwrap();
    let tests = tests.as_array().unwrap();
    let names: Vec<&Value> = tests.iter().map(|test| &test["test"]).collect();
    assert_eq!(names, ["pp8", "tg4"]);
    for (test, tokens) in tests.iter().zip([8, 4]) {
        assert_eq!(test["tokens"], tokens);
        let samples = test["samples"].as_array().unwrap();
        assert_eq!(samples.len(), 1);
        assert!(samples[0].as_f64().unwrap() > 0.0 && samples[0] == test["tokens_per_sec"]);
        assert_eq!((&test["format"], &test["devices"]), (&json!("f32"), &json!(["numa0"])));
    }
}

#[test]
fn features_name_the_level_that_is_used() {
    let folder = tempfile::tempdir().unwrap();
    for (arguments, level) in
        [(vec!["features"], Isa::detect()), (vec!["features", "--isa", "portable"], Isa::Portable)]
    {
        let text = printed(&folder, &arguments, "");
        let mut used = text.lines().filter(|line| line.ends_with("found, used"));
        let line = used.next().unwrap();
        assert_eq!(line.split_whitespace().next().unwrap(), level.to_string());
        assert_eq!(used.next(), None);
        assert!(text.contains("linear f32"), "{text}");
    }
}
