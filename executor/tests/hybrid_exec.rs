//! `hybrid-exec` as its users call it wrongly: one line that says what is wrong, and exit code 1, or 2 where it does
//! not take its arguments.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Output};

fn hybrid_exec(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hybrid-exec"));
    command.args(arguments).output().expect("hybrid-exec starts")
}

/// The one line of a refusal.
fn refusal(arguments: &[&str]) -> String {
    let output = hybrid_exec(arguments);
    assert!(matches!(output.status.code(), Some(1 | 2)), "{arguments:?}");
    assert!(output.stdout.is_empty(), "{arguments:?}");
    let line = String::from_utf8(output.stderr).expect("hybrid-exec prints text");
    assert!(line.starts_with("error: ") && line.lines().count() == 1, "{line}");
    line.trim_end().trim_start_matches("error: ").to_owned()
}

fn check(arguments: &[&str], part: &str) {
    let line = refusal(arguments);
    assert!(line.contains(part), "no {part:?} in {line}");
}

#[test]
fn arguments_that_make_no_sense_are_refused_with_one_line() {
    check(&[], "nothing is asked for; --help lists what can be");
    check(&["--json"], "<PLAN>");
    check(&["plan.ron", "--max-token", "3"], "a similar argument exists: '--max-tokens'");
    check(&["plan.ron", "--kernels", "fast"], "[possible values: own, plain]");
    check(&["plan.ron", "--prompt-ids", "1,-2"], "invalid value '-2' for '--prompt-ids");
    check(&["plan.ron", "--prompt", "a", "--prompt-ids", "1"], "cannot be used with");
    check(&["bench"], "<PLAN>");
    check(&["bench", "plan.ron", "-r", "0"], "'--repetitions <N>': at least 1 is meant");
    check(&["bench", "plan.ron", "--sequences", "0"], "'--sequences <N>': at least 1 is meant");
    check(&["bench", "plan.ron", "-r", "-1"], "'--repetitions <N>': -1 is out of range");
    check(
        &["plan.ron", "--threads", "99999999999999999999"],
        "99999999999999999999 is out of range",
    );
    check(&["plan.ron", "--threads", "all"], "'--threads <N>': all is no whole number");
    check(&["plan.ron", "--min-p", "many"], "'--min-p <P>': many is no number");
    check(&["plan.ron", "--top-p", "0"], "top-p is 0, but must be above 0 and at most 1; --help");
    check(&["plan.ron", "-p", "hi"], "tip: options with this letter: --prompt, --prompt-ids");
    check(&["run", "plan.ron"], "\"run\" is no command but taken for PLAN");
    assert!(
        refusal(&["plan.ron", "run"]).ends_with("one of perplexity, bench, features, calibrate")
    );
}

#[test]
fn files_that_are_missing_or_cannot_be_written_are_named() {
    check(&["none.ron", "--prompt", "a"], "none.ron");
    check(&["none.ron", "--prompt", "a", "--trace", "none/trace.ron"], "writing none/trace.ron");
    check(&["perplexity", "none.ron", "--ids-file", "none.json"], "none.json");
    check(&["calibrate", "-o", "none/machine.ron"], "writing none/machine.ron");
    let model = ["none.ron", "--prompt", "a", "--model", "none"];
    check(&model, "--model none: there is no such folder");
}

#[test]
fn what_a_checkpoint_lacks_is_told_with_what_helps() {
    let folder = tempfile::tempdir().expect("a folder for a checkpoint");
    let (checkpoint, plan) = (folder.path().join("demo"), folder.path().join("plan.ron"));
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo");
    fs::create_dir(&checkpoint).expect("the folder is ours");
    for file in ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"] {
        fs::copy(demo.join(file), checkpoint.join(file)).expect("the folder is ours");
    }
    let model = models::lower(&checkpoint).expect("the demo is a model");
    let machine = probe::machine(None).expect("the machine has a topology");
    let options = compiler::Options::default();
    let compiled = compiler::compile(&model, &machine, &options, &mut |_, _| ()).expect("it fits");
    let text = compiled.to_ron().expect("a plan can be written");
    fs::write(&plan, text).expect("the folder is ours");
    let asked = [plan.to_str().expect("a plain path"), "--prompt", "a"];
    let config = checkpoint.join("tokenizer_config.json");
    fs::write(&config, "{").expect("the folder is ours");
    let malformed = "EOF while parsing an object at line 1 column 1";
    let expected = format!("malformed JSON in {}: {malformed}", config.display());
    assert_eq!(refusal(&asked), expected);
    // Where no text is asked for, too: what ends an answer may be told there alone.
    let ids = [asked[0], "--prompt-ids", "5", "--json"];
    assert_eq!(refusal(&ids), expected);
    fs::remove_file(&config).expect("the folder is ours");
    check(&[asked[0], "--prompt", ""], "the prompt is empty");
    check(&[asked[0], "--prompt", "", "--chat"], "the prompt is empty");
    check(&[asked[0], "--prompt", "a", "--stop", ""], "a --stop is empty");
    // It is not worth being looked at.
    let long = folder.path().join("long.txt");
    let most = compiled.model.context as usize * 1024;
    fs::write(&long, "a".repeat(most + 1)).expect("the folder is ours");
    let input = File::open(&long).expect("it was just written");
    let output = Command::new(env!("CARGO_BIN_EXE_hybrid-exec")).arg(&plan).stdin(input).output();
    let said = String::from_utf8(output.expect("hybrid-exec starts").stderr).expect("it is text");
    assert!(said.contains(&format!("the prompt is longer than {most} bytes")), "{said}");
    let other = folder.path().join("other");
    fs::create_dir(&other).expect("the folder is ours");
    fs::write(other.join("model.safetensors"), "{}").expect("the folder is ours");
    let expected = "is to hold the checkpoint that the plan was compiled for: checkpoint changed";
    check(&[&ids[..], &["--model", other.to_str().expect("a plain path")]].concat(), expected);
    let tokenizer = checkpoint.join("tokenizer.json");
    fs::write(&tokenizer, "{").expect("the folder is ours");
    check(&ids, &format!("cannot read tokenizer {}", tokenizer.display()));
    fs::remove_file(tokenizer).expect("it was copied");
    let other = "text takes a tokenizer, --prompt-ids with --json takes none";
    let expected = format!("no tokenizer.json in {}; {other}", checkpoint.display());
    assert_eq!(refusal(&asked), expected);
    fs::rename(&checkpoint, folder.path().join("moved")).expect("the folder is ours");
    let expected = format!("the checkpoint's folder {} is gone", checkpoint.display());
    let remedy = "--model FOLDER names where it lies now";
    let gone = format!("{expected}; {remedy}");
    assert_eq!(refusal(&asked), gone);
    fs::write(&checkpoint, "no folder").expect("the folder is ours");
    assert_eq!(refusal(&asked), gone);
}

#[test]
fn the_status_tells_wrong_arguments_from_work_that_failed() {
    assert_eq!(hybrid_exec(&["--json"]).status.code(), Some(2));
    for wrong in [
        ["--max-tokens", "-1"],
        ["--temperature", "-1"],
        ["--top-p", "0"],
        ["--min-p", "many"],
        ["--repetition-penalty", "0"],
        ["--threads", "0"],
        ["--isa", "fast"],
    ] {
        let output = hybrid_exec(&[&["none.ron", "--prompt", "a"][..], &wrong].concat());
        assert_eq!(output.status.code(), Some(2), "{wrong:?}");
    }
    let greedy = ["none.ron", "--prompt", "a", "--temperature", "0", "--top-p", "0"];
    assert_eq!(hybrid_exec(&greedy).status.code(), Some(1));
    let nothing = ["bench", "none.ron", "-p", "0", "-n", "0"];
    assert_eq!(hybrid_exec(&nothing).status.code(), Some(2));
    check(&nothing, "-p 0 -n 0 measures nothing; --help lists what there is");
    assert_eq!(hybrid_exec(&["none.ron", "--prompt", "a"]).status.code(), Some(1));
    let output = hybrid_exec(&["bnech", "plan.ron"]);
    assert_eq!(output.status.code(), Some(2));
    let line = String::from_utf8(output.stderr).expect("hybrid-exec prints text");
    assert!(line.contains("or with a command, one of perplexity, bench,"), "{line}");
}

#[test]
fn options_that_leave_each_other_nothing_to_do_are_refused() {
    let kernels = "--cpu-backend ndarray has plain kernels only, not --kernels own";
    let of_ndarray = "--isa portable has nothing to change with --cpu-backend ndarray";
    let of_plain = "--isa portable has nothing to change with --kernels plain";
    for (wrong, expected) in [
        (["--cpu-backend", "ndarray", "--kernels", "own"], kernels),
        (["--cpu-backend", "ndarray", "--isa", "portable"], of_ndarray),
        (["--kernels", "plain", "--isa", "portable"], of_plain),
    ] {
        for command in [&["none.ron", "--prompt", "a"][..], &["bench", "none.ron"]] {
            let asked = [command, &wrong].concat();
            assert_eq!(hybrid_exec(&asked).status.code(), Some(2), "{asked:?}");
            check(&asked, expected);
        }
    }
    check(&["none.ron", "--prompt", "a", "--cpu-backend", "ndarray"], "none.ron");
}

#[test]
fn texts_may_begin_with_a_dash() {
    check(&["none.ron", "--prompt", "- one", "--stop", "---", "--system", "- be nice"], "none.ron");
}

#[test]
fn help_and_version_are_no_errors() {
    for argument in ["--help", "--version"] {
        let output = hybrid_exec(&[argument]);
        assert!(output.status.success() && output.stderr.is_empty(), "{argument}");
        assert!(!output.stdout.is_empty(), "{argument}");
    }
}
