//! Pictures and exports of made-up plans, compared with ones that someone has looked at.
//!
//! `BLESS=1 cargo test --release --workspace --test pictures` writes them anew.

mod made_up;

use std::fs::{self, File};
use std::io::BufReader;
use std::path::{Path, PathBuf};

use made_up::{Pace, Style, Wish};
use tempfile::TempDir;
use viewer::Viewer;
use viewer::document::Document;
use viewer::picture::Shot;
use viewer::theme::Coloring;
use viewer::view::{Area, Panel, Selection};
use viewer::what_if::{Answer, Question};

const SHOT: Shot = Shot { size: [1200.0, 760.0], scale: 1.0, dark: true };

fn viewer(wish: Wish, spans: usize) -> Viewer {
    let plan = made_up::plan(wish);
    let trace = (spans > 0).then(|| made_up::trace(&plan, 7, spans));
    Viewer::new(Some(Document::of(plan, trace, 7)), "hybridc".into())
}

/// Compares pixels, and the words of the same picture: a wrong number is too small to count among the pixels.
fn check(name: &str, mut viewer: Viewer, shot: Shot) {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let words = words(&mut viewer, shot, &folder);
    let known = |ending: &str| {
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("tests/pictures/{name}.{ending}"))
    };
    let (known, known_words) = (known("png"), known("txt"));
    if std::env::var_os("BLESS").is_some() {
        viewer.save_picture(false, &known, shot, None).expect("a picture can be written");
        fs::write(known_words, words).expect("words can be written");
        return;
    }
    let read_words = fs::read_to_string(&known_words).unwrap_or_default();
    let change = words.lines().zip(read_words.lines()).find(|(drawn, known)| drawn != known);
    let known_words = known_words.display();
    assert!(words == read_words, "other words than in {known_words}, drawn and known: {change:?}");
    let drawn = folder.path().join("drawn.png");
    viewer.save_picture(false, &drawn, shot, None).expect("a picture can be written");
    let (size, known_pixels) = read(&known);
    let (drawn_size, pixels) = read(&drawn);
    assert_eq!(size, drawn_size);
    // Rounding differs between processors, by a shade here and there.
    let differ = |(a, b): (&u8, &u8)| a.abs_diff(*b) > 24;
    let count = known_pixels.iter().zip(&pixels).filter(|pair| differ(*pair)).count();
    if count * 500 > pixels.len() {
        let kept = folder.keep().join("drawn.png");
        panic!(
            "{count} of {} values differ from {}; see {}",
            pixels.len(),
            known.display(),
            kept.display()
        );
    }
}

/// All texts of a picture, one a line, in the order they are drawn.
fn words(viewer: &mut Viewer, shot: Shot, folder: &TempDir) -> String {
    let path = folder.path().join("words.svg");
    viewer.save_picture(true, &path, shot, None).expect("a drawing can be written");
    let drawing = fs::read_to_string(path).expect("it was written");
    let texts = drawing.lines().filter(|line| line.starts_with("<text "));
    let inner = |line: &str| {
        let text = line.split_once('>').map_or("", |(_, text)| text);
        format!("{}\n", text.trim_end_matches("</text>"))
    };
    texts.map(inner).collect()
}

fn read(path: &Path) -> ((u32, u32), Vec<u8>) {
    let file = File::open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut reader = png::Decoder::new(BufReader::new(file)).read_info().expect("it is a PNG file");
    let mut pixels = vec![0; reader.output_buffer_size().expect("it has a size")];
    let info = reader.next_frame(&mut pixels).expect("it has a picture");
    ((info.width, info.height), pixels)
}

#[test]
fn a_pipeline_and_a_run_of_it_look_as_they_did() {
    check("placement", viewer(Wish::new(12, 1, 2, Style::Pipeline), 200), SHOT);
}

#[test]
fn a_selected_layer_is_shown_in_light_colors_with_its_reason() {
    let mut viewer = viewer(Wish::new(12, 1, 2, Style::Pipeline), 200);
    viewer.view.selection = Selection::Blocks(6, 6);
    let scene = &viewer.document.as_ref().expect("it is open").scene;
    viewer.view.unfold(scene, 6);
    viewer.view.opened.insert(6);
    viewer.view.scroll_to_selection = true;
    check("selected", viewer, Shot { dark: false, ..SHOT });
}

#[test]
fn a_timeline_of_tensor_parallel_devices_looks_as_it_did() {
    let mut viewer = viewer(Wish::new(4, 2, 0, Style::Tensor), 200);
    viewer.view.panel = Panel::Timeline;
    viewer.view.coloring = Coloring::Kind;
    check("timeline", viewer, SHOT);
}

#[test]
fn memory_and_steps_look_as_they_did() {
    let mut memory = viewer(Wish::new(6, 1, 1, Style::Streaming), 100);
    memory.view.panel = Panel::Memory;
    memory.view.selection = Selection::Device(0);
    check("memory", memory, SHOT);
    let mut steps = viewer(Wish::new(6, 1, 1, Style::Streaming), 100);
    steps.view.panel = Panel::Steps;
    steps.view.coloring = Coloring::Error;
    check("steps", steps, SHOT);
}

#[test]
fn a_step_on_weights_of_another_device_is_shown_with_its_rates_and_an_area() {
    let mut viewer = viewer(Wish::new(6, 1, 1, Style::Streaming), 100);
    let document = viewer.document.as_ref().expect("it is open");
    viewer.view.show_program(&document.scene, 0);
    viewer.view.unfold(&document.scene, 1);
    viewer.view.opened.insert(1);
    let start = document.scene.runs[0].start as f64;
    let (from, to) = (start + 100_000.0, start + 200_000.0);
    viewer.view.area = Some(Area { start: from, end: to, first_lane: 0, last_lane: 1 });
    let steps = &document.scene.programs[0].steps;
    let step = steps.iter().find(|step| step.name.ends_with("q_proj") && step.flops > 0.0);
    viewer.view.selection = Selection::Step(step.expect("it is there").number, Some(0));
    check("homes", viewer, Shot { size: [1200.0, 900.0], ..SHOT });
}

#[test]
fn a_short_prompt_is_shown_with_its_length() {
    let plan = made_up::plan(Wish::new(6, 1, 1, Style::Streaming));
    let pace = Pace { percent: 112, prompt: Some(8) };
    let trace = made_up::trace_at(&plan, 7, 60, pace);
    let mut viewer = Viewer::new(Some(Document::of(plan, Some(trace), 7)), "hybridc".into());
    let document = viewer.document.as_ref().expect("it is open");
    viewer.view.show_program(&document.scene, 0);
    viewer.view.coloring = Coloring::Error;
    viewer.view.selection = Selection::Blocks(1, 6);
    check("short", viewer, SHOT);
}

#[test]
fn a_comparison_looks_as_it_did() {
    let mut viewer = viewer(Wish::new(12, 1, 2, Style::Pipeline), 0);
    let larger = Wish { gpu_layers: 8, ..Wish::new(12, 1, 2, Style::Pipeline) };
    viewer.set_other(Document::of(made_up::plan(larger), None, 7));
    check("compare", viewer, SHOT);
}

#[test]
fn an_answered_question_looks_as_it_did() {
    let mut viewer = viewer(Wish::new(12, 1, 2, Style::Pipeline), 0);
    let larger = Wish { gpu_layers: 8, ..Wish::new(12, 1, 2, Style::Pipeline) };
    let command =
        r"hybridc compile model --machine machine.ron --pin '^layers\.(4|5|6|7)(\.|$)=gpu0'";
    viewer.question = Some(Question {
        title: "layers 4–7 on gpu0".into(),
        command: command.into(),
        pins: vec![r"^layers\.(4|5|6|7)(\.|$)=gpu0".into()],
        at: egui::pos2(180.0, 300.0),
        answer: Answer::Plan(Box::new(Document::of(made_up::plan(larger), None, 7))),
    });
    check("question", viewer, SHOT);
}

#[test]
fn a_small_window_with_findings_and_help_looks_as_it_did() {
    let mut plan = made_up::plan(Wish::new(6, 2, 0, Style::Tensor));
    plan.programs[1].steps.rows_mut()[3].waits.clear();
    plan.programs[1].lanes[0].steps.pop();
    let mut viewer = Viewer::new(Some(Document::of(plan, None, 7)), "hybridc".into());
    viewer.view.panel = Panel::Steps;
    let small = Shot { size: [800.0, 500.0], ..SHOT };
    check("small", viewer, small);
    let mut viewer = Viewer::new(None, "hybridc".into());
    viewer.view.help = true;
    check("help", viewer, Shot { dark: false, ..small });
}

#[test]
fn a_drawing_holds_the_words_of_the_window() {
    let folder: TempDir = tempfile::tempdir().expect("a temporary folder can be made");
    let path = folder.path().join("view.svg");
    let mut viewer = viewer(Wish::new(12, 1, 2, Style::Pipeline), 200);
    viewer.save_picture(true, &path, SHOT, None).expect("a drawing can be written");
    let text = fs::read_to_string(path).expect("it was written");
    assert!(text.starts_with("<svg ") && text.ends_with("</svg>\n"));
    assert!(text.contains("Bottleneck: numa1"));
    let count = |what: &str| text.matches(what).count();
    assert_eq!(count("<g "), count("</g>"));
    assert!(count("<rect ") > 100, "the bars are there");
    assert!(!text.contains("NaN") && !text.contains("inf"));
}

#[test]
fn a_trace_for_perfetto_has_every_span_twice() {
    let folder: TempDir = tempfile::tempdir().expect("a temporary folder can be made");
    let path = folder.path().join("trace.json");
    let viewer = viewer(Wish::new(12, 1, 2, Style::Pipeline), 200);
    viewer.save_perfetto(&path).expect("a trace can be written");
    let text = fs::read_to_string(path).expect("it was written");
    let json: serde_json::Value = serde_json::from_str(&text).expect("it is JSON");
    let events = json["traceEvents"].as_array().expect("it has events");
    let scene = &viewer.document.as_ref().expect("it is open").scene;
    let spans: usize = scene.lanes.iter().map(|lane| lane.measured.rows().len()).sum();
    // Once as measured, once as predicted.
    let drawn = events.iter().filter(|event| event["ph"] == "X").count();
    assert_eq!(drawn, 2 * spans);
    let named = |name: &str| events.iter().any(|event| event["args"]["name"] == name);
    assert!(named("gpu0 compute") && named("predicted"));
}
