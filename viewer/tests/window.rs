//! The window under test: clicks, keys and drags, and what they lead to.

mod harness;
mod made_up;

use std::cmp::Ordering::{Equal, Greater, Less};
use std::fs::{self, File};
use std::time::Duration;

use egui::{Event, Key, Modifiers, MouseWheelUnit, Pos2, Vec2, vec2};
use egui_kittest::kittest::Queryable as _;
use harness::{Window, write, write_at, write_plan};
use ir::asked::{Asked, Objective, Request};
use ir::tensor::DType;
use made_up::{Pace, Style, Wish};
use viewer::Viewer;
use viewer::details_panel::sum_within;
use viewer::document::Document;
use viewer::view::{Area, Panel, Selection};
use viewer::what_if::Answer;

fn width(viewer: &Viewer) -> f64 {
    let (from, to) = viewer.view.time.expect("the timeline has been drawn");
    to - from
}

#[test]
fn the_first_look_names_prediction_bottleneck_and_limit() {
    let window = Window::open();
    assert!(window.shows("decode1: predicted"));
    assert!(window.shows("Bottleneck: numa"));
    assert!(window.shows("gpu0 is full: layers 4–11"));
}

#[test]
fn a_card_a_row_and_a_step_key_select_the_same_step_everywhere() {
    let mut window = Window::open();
    window.click("layers 4–7, alike");
    assert_eq!(window.viewer().view.selection, Selection::Blocks(5, 8));
    assert!(window.shows("gpu0 has no room for it"), "details say why");
    window.press(Modifiers::NONE, Key::Num4);
    assert_eq!(window.viewer().view.panel, Panel::Steps);
    let row = window.harness.get_by_label_contains("layers.4.self_attn.o_proj");
    row.click();
    window.harness.run_steps(2);
    let Selection::Step(step, run) = window.viewer().view.selection else { panic!("no step") };
    assert_eq!(run, window.viewer().view.run);
    window.press(Modifiers::NONE, Key::Period);
    assert_eq!(window.viewer().view.selection, Selection::Step(step + 1, run));
    window.press(Modifiers::NONE, Key::Comma);
    assert_eq!(window.viewer().view.selection, Selection::Step(step, run));
    window.press(Modifiers::NONE, Key::Escape);
    assert_eq!(window.viewer().view.selection, Selection::Nothing);
}

#[test]
fn search_finds_a_layer_and_unfolds_it() {
    let mut window = Window::open();
    assert!(window.harness.query_by_label("layer 9").is_none(), "it is folded at first");
    window.press(Modifiers::COMMAND, Key::P);
    window.harness.event(Event::Text("layer 9".into()));
    window.harness.run_steps(2);
    window.press(Modifiers::NONE, Key::Enter);
    window.harness.run_steps(2);
    let viewer = window.viewer();
    let Selection::Blocks(block, _) = viewer.view.selection else { panic!("no block") };
    let scene = &viewer.document.as_ref().unwrap().scene;
    assert_eq!(scene.programs[viewer.view.program].blocks[block].name, "layers.9");
    assert!(window.shows("layer 9"));
}

#[test]
fn keys_wheel_and_drag_zoom_and_pan_and_f_fits() {
    let mut window = Window::open();
    let whole = window.viewer().view.time.unwrap();
    window.press(Modifiers::NONE, Key::W);
    assert!(width(window.viewer()) < whole.1 - whole.0);
    let zoomed = width(window.viewer());
    let at = Pos2::new(700.0, 800.0);
    window.harness.hover_at(at);
    window.harness.step();
    window.harness.event(Event::MouseWheel {
        unit: MouseWheelUnit::Point,
        delta: Vec2::new(0.0, 200.0),
        phase: egui::TouchPhase::Move,
        modifiers: Modifiers::NONE,
        source: egui::MouseWheelSource::Unknown,
    });
    window.harness.run_steps(6);
    assert!(width(window.viewer()) < zoomed);
    let before = window.viewer().view.time.unwrap();
    window.drag(at, at + vec2(-200.0, 0.0), Modifiers::NONE);
    let after = window.viewer().view.time.unwrap();
    assert!(after.0 > before.0 && ((after.1 - after.0) - (before.1 - before.0)).abs() < 1.0);
    window.press(Modifiers::NONE, Key::F);
    let fitted = window.viewer().view.time.unwrap();
    assert!((fitted.0 - whole.0).abs() < 2.0 && (fitted.1 - whole.1).abs() < 2.0);
    window.press(Modifiers::NONE, Key::F);
    assert!(width(window.viewer()) > 2.0 * (whole.1 - whole.0), "again: the whole trace");
}

#[test]
fn letters_zoom_and_pan_both_ways() {
    let mut window = Window::open();
    for (key, left, right) in [
        (Key::S, Less, Greater),
        (Key::A, Less, Less),
        (Key::D, Greater, Greater),
        (Key::W, Greater, Less),
    ] {
        let before = window.viewer().view.time.unwrap();
        window.press(Modifiers::NONE, key);
        let after = window.viewer().view.time.unwrap();
        let moved = (after.0.total_cmp(&before.0), after.1.total_cmp(&before.1));
        assert_eq!(moved, (left, right), "{key:?}");
        let stretch = (after.1 - after.0) - (before.1 - before.0);
        assert!(left != right || stretch.abs() < 1.0, "{key:?}");
    }
}

#[test]
fn digits_turn_to_panels() {
    let mut window = Window::open();
    for (key, panel) in [
        (Key::Num2, Panel::Timeline),
        (Key::Num3, Panel::Memory),
        (Key::Num4, Panel::Steps),
        (Key::Num5, Panel::Compare),
        (Key::Num1, Panel::Placement),
    ] {
        window.press(Modifiers::NONE, key);
        assert_eq!(window.viewer().view.panel, panel);
    }
}

#[test]
fn brackets_turn_to_the_runs_beside() {
    let mut window = Window::open();
    let viewer = window.viewer();
    let scene = &viewer.document.as_ref().unwrap().scene;
    let runs: Vec<usize> = scene.runs_of(viewer.view.program).collect();
    window.harness.state_mut().view.run = Some(runs[0]);
    for (key, run) in [
        (Key::CloseBracket, runs[1]),
        (Key::OpenBracket, runs[0]),
        // There is none before.
        (Key::OpenBracket, runs[0]),
    ] {
        window.press(Modifiers::NONE, key);
        assert_eq!(window.viewer().view.run, Some(run));
    }
}

#[test]
fn text_becomes_larger_smaller_and_normal() {
    let mut window = Window::open();
    for (key, size) in
        [(Key::Plus, Greater), (Key::Num0, Equal), (Key::Minus, Less), (Key::Num0, Equal)]
    {
        window.press(Modifiers::COMMAND, key);
        assert_eq!(window.harness.ctx.zoom_factor().total_cmp(&1.0), size, "{key:?}");
    }
}

#[test]
fn f_shows_the_whole_trace_of_a_run_that_was_faster_than_predicted() {
    let folder = tempfile::tempdir().unwrap();
    let plan = made_up::plan(Wish::new(12, 1, 2, Style::Pipeline));
    let pace = Pace { percent: 60, prompt: None };
    let (path, trace) = write_at(folder.path(), "plan", &plan, pace);
    let document = Document::open(&path, Some(&trace)).unwrap();
    let end = document.scene.trace_end as f64;
    let mut window = Window::on(folder, Viewer::new(Some(document), "hybridc".into()));
    assert!(width(window.viewer()) < 0.5 * end);
    window.press(Modifiers::NONE, Key::F);
    let (from, to) = window.viewer().view.time.unwrap();
    assert!(from <= 0.0 && to >= end, "{from} to {to} of {end}");
    window.press(Modifiers::NONE, Key::F);
    assert!(width(window.viewer()) < 0.5 * end, "again: the run");
}

#[test]
fn a_shift_drag_is_told_in_times_since_the_run_began() {
    let mut window = Window::open();
    let scene = &window.viewer().document.as_ref().unwrap().scene;
    let start = scene.runs[window.viewer().view.run.unwrap()].start as f64;
    assert!(start > 1_000_000.0);
    let area = |start: f64, end: f64| Area { start, end, first_lane: 0, last_lane: 1 };
    let view = &mut window.harness.state_mut().view;
    view.area = Some(area(start + 135_000.0, start + 330_000.0));
    window.harness.run_steps(2);
    assert!(window.shows("135 µs to 330 µs"));
    // A second later both ends are still told apart.
    let late = 1_500_000_000.0 + start;
    window.harness.state_mut().view.area = Some(area(late, late + 100_000.0));
    window.harness.run_steps(2);
    assert!(window.shows("1500000 µs to 1500100 µs"));
}

#[test]
fn members_of_a_collective_count_once_in_an_area() {
    let plan = made_up::plan(Wish::new(4, 4, 0, Style::Tensor));
    let scene = viewer::scene::Scene::new(&plan, None, Vec::new());
    let program = &scene.programs[0];
    let is_collective = |lane: &viewer::scene::Lane| lane.name == "gpu0 … gpu3 (4)";
    let lane = scene.lanes.iter().position(is_collective).unwrap();
    let end = program.predicted.end as f64;
    let area = Area { start: 0.0, end, first_lane: lane, last_lane: lane };
    let (count, nanos) = sum_within(&program.bars[lane], area);
    let bars = program.bars[lane].rows();
    let all: u64 = bars.iter().map(|bar| bar.end - bar.start).sum();
    assert_eq!(count, bars.len());
    // Four members work beside each other.
    assert!(nanos > 0.0 && nanos < all as f64 / 2.0, "{nanos} of {all}");
}

#[test]
fn a_shift_drag_adds_up_an_area() {
    let mut window = Window::open();
    window.drag(Pos2::new(400.0, 760.0), Pos2::new(900.0, 900.0), Modifiers::SHIFT);
    assert!(window.viewer().view.area.is_some());
    assert!(window.shows("Selected time"));
    window.press(Modifiers::NONE, Key::Escape);
    assert!(window.viewer().view.area.is_none());
}

#[test]
fn two_plans_are_compared_layer_by_layer() {
    let mut window = Window::open();
    let larger = Wish { gpu_layers: 8, ..Wish::new(12, 1, 2, Style::Pipeline) };
    let (other, _) = write(window.folder.path(), "larger", larger);
    window.harness.state_mut().compare_with(&other);
    window.harness.run_steps(3);
    assert!(window.shows("Layers that differ"));
    assert!(window.shows("gpu0 in bf16"));
}

#[test]
fn two_traces_of_one_plan_are_compared() {
    let mut window = Window::open();
    let trace = window.folder.path().join("plan-trace.ron");
    window.harness.state_mut().compare_with(&trace);
    window.harness.run_steps(3);
    assert!(window.shows("decode1 measured"));
    assert!(window.shows("No layer runs elsewhere"));
}

#[test]
fn a_drag_to_another_device_is_priced_by_the_compiler() {
    let mut window = Window::open();
    let larger = Wish { gpu_layers: 8, ..Wish::new(12, 1, 2, Style::Pipeline) };
    let (other, _) = write(window.folder.path(), "answer", larger);
    // Keeps the arguments, and gives the prepared plan for an answer.
    let script = format!(
        "echo \"$@\" > {folder}/arguments\nwhile [ \"$1\" != -o ]; do shift; done\ncp {answer} \"$2\"",
        folder = window.folder.path().display(),
        answer = other.display()
    );
    window.compiler(&script);
    let (from, to) = (window.center("layers 4–7, alike"), window.center("device gpu0"));
    window.drag(from, Pos2::new(to.x, from.y), Modifiers::NONE);
    window.await_answer();
    assert!(window.shows("What if: layers 4–7 on gpu0"));
    let arguments = fs::read_to_string(window.folder.path().join("arguments")).unwrap();
    assert!(arguments.contains(r"--pin ^layers\.(4|5|6|7)(\.|$)=gpu0"), "{arguments}");
    assert!(window.shows("hybridc compile"), "the command is shown");
    let pins = window.folder.path().join("pins");
    window.viewer().question.as_ref().unwrap().save_pins(&pins).unwrap();
    assert_eq!(fs::read_to_string(pins).unwrap(), "--pin '^layers\\.(4|5|6|7)(\\.|$)=gpu0'\n");
    window.click("Look at this plan");
    assert!(window.harness.query_by_label("layers 0–7, alike").is_some());
}

#[test]
fn a_question_repeats_what_the_plan_was_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let mut plan = made_up::plan(Wish::new(4, 0, 2, Style::Tensor));
    let members = vec![("numa0".to_owned(), Some(3.0)), ("numa1".to_owned(), Some(1.5))];
    plan.asked = Asked {
        plain_bf16: true,
        prefill_tokens: Some(96),
        objective: Objective::Throughput,
        request: Request::TensorParallel(members),
        pins: vec!["embed.*=numa1".to_owned()],
        formats: vec!["numa*=q8".to_owned()],
        kv_type: Some(DType::F16),
        kv_cache_bytes: Some(1 << 30),
        expert_counts: Some("counts.ron".into()),
    };
    let (path, _) = write_plan(folder.path(), "plan", &plan);
    let document = Document::open(&path, None).unwrap();
    let mut window = Window::on(folder, Viewer::new(Some(document), "no-such-compiler".into()));
    let arguments = window.folder.path().join("arguments");
    window.compiler(&format!("echo \"$@\" > {}\nexit 1", arguments.display()));
    let wish = viewer::view::Wish::Memory { device: 0, factor: 2 };
    window.harness.state_mut().view.wish = Some((wish, Pos2::new(400.0, 300.0)));
    window.await_answer();
    let arguments = fs::read_to_string(arguments).unwrap();
    for part in [
        "--objective throughput",
        "--tensor-parallel numa0:3,numa1:1.5",
        "--pin embed.*=numa1",
        "--format numa*=q8",
        "--kv-type f16",
        "--kv-cache 1073741824",
        "--prefill-tokens 96",
        "--expert-counts counts.ron",
        "--plain-bf16",
    ] {
        assert!(arguments.contains(part), "no {part:?} in {arguments}");
    }
}

#[test]
fn an_answer_that_is_looked_at_stays_when_another_is_asked_for() {
    let mut window = Window::open();
    let wish = || (viewer::view::Wish::GpuMemory { factor: 2 }, Pos2::new(400.0, 300.0));
    for gpu_layers in [8, 6] {
        let larger = Wish { gpu_layers, ..Wish::new(12, 1, 2, Style::Pipeline) };
        let (answer, _) = write(window.folder.path(), &format!("answer{gpu_layers}"), larger);
        window.answer_with(&answer);
        window.harness.state_mut().view.wish = Some(wish());
        window.await_answer();
        if gpu_layers == 8 {
            window.click("Look at this plan");
        }
        // Long enough for changed files to be read again.
        window.harness.run_steps(12);
        let is_shown = window.harness.query_by_label("layers 0–7, alike").is_some();
        assert!(is_shown, "after the answer with {gpu_layers} layers");
    }
}

#[test]
fn a_drag_that_the_compiler_refuses_says_why_where_it_ended() {
    let mut window = Window::open();
    window.compiler("echo 'error: gpu0 lacks 3.1 GiB for layers.4' >&2\nexit 1");
    let (from, to) = (window.center("layers 4–7, alike"), window.center("device gpu0"));
    let end = Pos2::new(to.x, from.y);
    window.drag(from, end, Modifiers::NONE);
    window.await_answer();
    assert!(window.shows("gpu0 lacks 3.1 GiB for layers.4"));
    assert_eq!(window.viewer().question.as_ref().unwrap().at, end);
    let before = window.viewer().document.as_ref().unwrap().plan_path.clone();
    window.press(Modifiers::NONE, Key::Escape);
    assert!(window.viewer().question.is_none());
    assert_eq!(window.viewer().document.as_ref().unwrap().plan_path, before);
}

#[test]
fn a_missing_compiler_is_named() {
    let mut window = Window::open();
    let (from, to) = (window.center("layers 4–7, alike"), window.center("device numa1"));
    window.drag(from, Pos2::new(to.x, from.y), Modifiers::NONE);
    window.await_answer();
    let answer = &window.viewer().question.as_ref().unwrap().answer;
    assert!(
        matches!(answer, Answer::Refused(error) if error.contains("no-such-compiler")),
        "{answer:?}"
    );
}

#[test]
fn an_unsound_plan_and_a_trace_of_another_open_with_findings() {
    let folder = tempfile::tempdir().unwrap();
    let mut plan = made_up::plan(Wish::new(3, 1, 1, Style::Pipeline));
    let trace = made_up::trace(&plan, 1, 50);
    plan.programs[1].steps.rows_mut()[3].waits.clear();
    plan.programs[1].lanes[0].steps.pop();
    let paths = (folder.path().join("p.ron"), folder.path().join("t.ron"));
    fs::write(&paths.0, plan.to_ron().unwrap()).unwrap();
    fs::write(&paths.1, trace.to_ron().unwrap()).unwrap();
    let document = Document::open(&paths.0, Some(&paths.1)).unwrap();
    let window = Window::on(folder, Viewer::new(Some(document), "hybridc".into()));
    assert!(window.shows("the trace was recorded with another plan"));
    assert!(window.shows("the plan is unsound"));
}

#[test]
fn a_file_that_changes_is_read_again() {
    let mut window = Window::open();
    assert!(!window.shows("layers 0–7, alike"));
    std::thread::sleep(Duration::from_millis(20));
    write(
        window.folder.path(),
        "plan",
        Wish { gpu_layers: 8, ..Wish::new(12, 1, 2, Style::Pipeline) },
    );
    // The harness's clock goes forward with each step.
    window.harness.run_steps(12);
    assert!(window.harness.query_by_label("layers 0–7, alike").is_some());
}

#[test]
fn files_are_read_again_on_request() {
    let mut window = Window::open();
    let paths = ["plan.ron", "plan-trace.ron"].map(|name| window.folder.path().join(name));
    let times = paths.each_ref().map(|path| fs::metadata(path).unwrap().modified().unwrap());
    let larger = Wish { gpu_layers: 8, ..Wish::new(12, 1, 2, Style::Pipeline) };
    write(window.folder.path(), "plan", larger);
    // By their times they have not changed.
    for (path, time) in paths.iter().zip(times) {
        File::options().write(true).open(path).unwrap().set_modified(time).unwrap();
    }
    window.harness.run_steps(12);
    assert!(window.harness.query_by_label("layers 0–7, alike").is_none());
    window.press(Modifiers::COMMAND, Key::R);
    assert!(window.harness.query_by_label("layers 0–7, alike").is_some());
}

#[test]
fn an_empty_window_tells_how_to_open_a_plan() {
    let window = Window::on(tempfile::tempdir().unwrap(), Viewer::new(None, "hybridc".into()));
    assert!(window.shows("Open a plan"));
}

#[test]
fn the_question_mark_lists_the_keys() {
    let mut window = Window::open();
    window.press(Modifiers::NONE, Key::Questionmark);
    assert!(window.shows("zoom in and out"));
    window.press(Modifiers::NONE, Key::Escape);
    assert!(!window.shows("zoom in and out"));
}
