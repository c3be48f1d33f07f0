//! `hybrid-viewer` as it is called wrongly: one line that says what is wrong, and exit code 1.

use std::process::Command;

fn check(arguments: &[&str], part: &str) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hybrid-viewer"));
    let output = command.args(arguments).output().expect("hybrid-viewer starts");
    assert_eq!(output.status.code(), Some(1), "{arguments:?}");
    let line = String::from_utf8(output.stderr).expect("hybrid-viewer prints text");
    assert!(line.starts_with("error: ") && line.lines().count() == 1, "{line}");
    assert!(line.contains(part), "no {part:?} in {line}");
}

#[test]
fn arguments_that_make_no_sense_are_refused_with_one_line() {
    check(&["plan.ron", "--panel", "graph"], "[possible values: placement, timeline,");
    check(&["plan.ron", "--size", "large"], "a size is written 1600x1000");
    check(&["--screenshot", "view.png"], "<PLAN>");
    check(&["none.ron", "--screenshot", "view.png"], "none.ron");
}
