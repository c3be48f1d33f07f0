//! `hybrid-viewer` as it is called: pictures without a window; where it is called wrongly, one line that says what is
//! wrong, and a status that is not 0.

mod made_up;

use std::fs::{self, File};
use std::io::BufReader;
use std::path::PathBuf;
use std::process::{Command, Output};

use made_up::{Style, Wish};
use tempfile::TempDir;

/// Arguments that the program does not take.
const MISUSED: i32 = 2;
/// Arguments that it takes and cannot follow.
const FAILED: i32 = 1;

/// Runs the program without a display.
fn hybrid_viewer(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hybrid-viewer"));
    for display in ["DISPLAY", "WAYLAND_DISPLAY", "WAYLAND_SOCKET"] {
        command.env_remove(display);
    }
    command.args(arguments).output().expect("hybrid-viewer starts")
}

fn check(arguments: &[&str], status: i32, part: &str) -> String {
    let output = hybrid_viewer(arguments);
    assert_eq!(output.status.code(), Some(status), "{arguments:?}");
    let line = String::from_utf8(output.stderr).expect("hybrid-viewer prints text");
    assert!(line.starts_with("error: ") && line.lines().count() == 1, "{line}");
    assert!(line.contains(part), "no {part:?} in {line}");
    line
}

/// Writes a made-up plan and gives its path.
fn write(folder: &TempDir, name: &str, wish: Wish) -> String {
    let path = folder.path().join(name);
    let plan = made_up::plan(wish).to_ron().expect("a plan can be written");
    fs::write(&path, plan).expect("a plan can be written");
    path.display().to_string()
}

/// Takes a picture and gives its path.
fn picture(folder: &TempDir, name: &str, arguments: &[&str]) -> PathBuf {
    let path = folder.path().join(name);
    let mut arguments = arguments.to_vec();
    arguments.extend(["--screenshot", path.to_str().expect("its name is text")]);
    let output = hybrid_viewer(&arguments);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.is_empty(), "{arguments:?}: {said}");
    path
}

#[test]
fn a_picture_is_as_large_and_as_light_as_asked() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let plan = write(&folder, "plan.ron", Wish::new(12, 1, 2, Style::Pipeline));
    let shade = |name: &str, more: &[&str]| {
        let mut arguments = vec![plan.as_str(), "--size", "800x600"];
        arguments.extend(more);
        let file = File::open(picture(&folder, name, &arguments)).expect("it was written");
        let decoder = png::Decoder::new(BufReader::new(file));
        let mut reader = decoder.read_info().expect("it is a PNG file");
        let mut values = vec![0; reader.output_buffer_size().expect("it has a size")];
        let info = reader.next_frame(&mut values).expect("it has a picture");
        assert_eq!((info.width, info.height), (800, 600));
        values.iter().map(|&value| u64::from(value)).sum::<u64>() / values.len() as u64
    };
    let (dark, light) = (shade("dark.png", &[]), shade("light.png", &["--light"]));
    assert!(dark < 85 && light > 170, "the mean of all values is {dark} and {light} of 255");
}

#[test]
fn a_picture_may_end_in_capitals() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let plan = write(&folder, "plan.ron", Wish::new(2, 1, 0, Style::Pipeline));
    let starts: [(&str, &[u8]); 2] = [("view.PNG", b"\x89PNG"), ("view.Svg", b"<svg ")];
    for (name, start) in starts {
        let written = fs::read(picture(&folder, name, &[&plan])).expect("it was written");
        assert!(written.starts_with(start), "{name}");
    }
}

#[test]
fn a_drawing_shows_what_was_asked_for() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let plan = write(&folder, "plan.ron", Wish::new(12, 1, 2, Style::Pipeline));
    let larger = Wish { gpu_layers: 8, ..Wish::new(12, 1, 2, Style::Pipeline) };
    let other = write(&folder, "larger.ron", larger);
    let drawing = |more: &[&str]| {
        let mut arguments = vec![plan.as_str()];
        arguments.extend(more);
        fs::read_to_string(picture(&folder, "view.svg", &arguments)).expect("it was written")
    };
    let plain = drawing(&[]);
    assert!(plain.starts_with("<svg ") && plain.contains("width=\"1600\" height=\"1000\""));
    for (asked, text) in [
        (["--select", "layer 9"], ">layer 9</text>"),
        (["--panel", "memory"], ">Left: all bytes of each device."),
        (["--program", "prefill"], ">prefill: predicted "),
        (["--color", "kind"], ">color: kind of work</text>"),
        (["--compare", other.as_str()], ">Layers that differ</text>"),
    ] {
        assert!(drawing(&asked).contains(text) && !plain.contains(text), "{asked:?}");
    }
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
    let plan = write(&folder, "plan.ron", Wish::new(6, 1, 0, Style::Pipeline));
    let picture = folder.path().join("view.png").display().to_string();
    let arguments = [plan.as_str(), "--select", "layer 12", "--screenshot", &picture];
    check(&arguments, FAILED, "nothing in the plan is called \"layer 12\"");
}
