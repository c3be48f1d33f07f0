//! `hybrid-exec` as its users call it wrongly: one line that says what is wrong, and exit code 1, or 2 where it does not
//! take its arguments.

use std::process::{Command, Output};

fn hybrid_exec(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hybrid-exec"));
    command.args(arguments).output().expect("hybrid-exec starts")
}

fn check(arguments: &[&str], part: &str) {
    let output = hybrid_exec(arguments);
    assert!(matches!(output.status.code(), Some(1 | 2)), "{arguments:?}");
    assert!(output.stdout.is_empty(), "{arguments:?}");
    let line = String::from_utf8(output.stderr).expect("hybrid-exec prints text");
    assert!(line.starts_with("error: ") && line.lines().count() == 1, "{line}");
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
    check(&["bench", "plan.ron", "-r", "0"], "-r 0 measures nothing");
    check(&["bench", "plan.ron", "--sequences", "0"], "--sequences 0 measures nothing");
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
fn the_status_tells_wrong_arguments_from_work_that_failed() {
    assert_eq!(hybrid_exec(&["--json"]).status.code(), Some(2));
    assert_eq!(hybrid_exec(&["none.ron", "--prompt", "a"]).status.code(), Some(1));
    let output = hybrid_exec(&["bnech", "plan.ron"]);
    assert_eq!(output.status.code(), Some(2));
    let line = String::from_utf8(output.stderr).expect("hybrid-exec prints text");
    assert!(line.contains("a command comes first, one of perplexity, bench,"), "{line}");
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
