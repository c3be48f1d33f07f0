//! `hybrid-viewer` as it is called wrongly: one line that says what is wrong, and a status that is not 0.

mod made_up;

use std::fs;
use std::process::Command;

use made_up::{Style, Wish};

/// Arguments that the program does not take.
const MISUSED: i32 = 2;
/// Arguments that it takes and cannot follow.
const FAILED: i32 = 1;

fn check(arguments: &[&str], status: i32, part: &str) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hybrid-viewer"));
    for display in ["DISPLAY", "WAYLAND_DISPLAY", "WAYLAND_SOCKET"] {
        command.env_remove(display);
    }
    let output = command.args(arguments).output().expect("hybrid-viewer starts");
    assert_eq!(output.status.code(), Some(status), "{arguments:?}");
    let line = String::from_utf8(output.stderr).expect("hybrid-viewer prints text");
    assert!(line.starts_with("error: ") && line.lines().count() == 1, "{line}");
    assert!(line.contains(part), "no {part:?} in {line}");
    line
}

#[test]
fn arguments_that_make_no_sense_are_refused_with_one_line() {
    check(&["plan.ron", "--panel", "graph"], MISUSED, "[possible values: placement, timeline,");
    check(&["plan.ron", "--size", "large"], MISUSED, "a size is written 1600x1000");
    check(&["--screenshot", "view.png"], MISUSED, "<PLAN>");
    check(&["none.ron", "--screenshot", "view.png"], FAILED, "none.ron");
}

#[test]
fn a_picture_that_is_neither_png_nor_svg_is_refused() {
    let ends = "a picture ends in .png or .svg";
    check(&["none.ron", "--screenshot", "view.jpg"], FAILED, &format!("{ends}, view.jpg does not"));
    check(&["none.ron", "--screenshot", "view"], FAILED, ends);
}

#[test]
fn a_trace_in_place_of_the_plan_is_named() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let plan = made_up::plan(Wish::new(2, 1, 0, Style::Pipeline));
    let path = folder.path().join("trace.ron");
    let trace = made_up::trace(&plan, 7, 20).to_ron().expect("a trace can be written");
    fs::write(&path, trace).expect("a trace can be written");
    let path = path.to_str().expect("its name is text");
    check(&[path, "plan.ron"], FAILED, "trace.ron is a trace; the plan comes first");
}

#[test]
fn a_window_without_a_display_is_refused_with_its_cause_alone() {
    let line = check(&[], FAILED, "nor DISPLAY is set");
    assert!(!line.contains(".rs"), "a place in a source file: {line}");
}

#[test]
fn a_layer_that_the_model_lacks_is_not_found() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let plan = made_up::plan(Wish::new(6, 1, 0, Style::Pipeline));
    let path = folder.path().join("plan.ron");
    fs::write(&path, plan.to_ron().expect("a plan can be written")).expect("a plan can be written");
    let (path, picture) = (path.display().to_string(), folder.path().join("view.png"));
    let picture = picture.display().to_string();
    let arguments = [&path, "--select", "layer 12", "--screenshot", &picture];
    check(&arguments, FAILED, "nothing in the plan is called \"layer 12\"");
}
