//! Files that come into the window and go out of it: dropped, chosen in dialogs, exported.

#![expect(clippy::unwrap_used, reason = "a test that cannot write its files has failed")]

mod harness;
mod made_up;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use egui::{DroppedFile, Pos2};
use egui_kittest::kittest::Queryable as _;
use harness::{Window, write};
use ir::machine::Machine;
use ir::plan::Plan;
use ir::trace::Trace;
use made_up::{Style, Wish};
use viewer::Viewer;
use viewer::files::{Chosen, Purpose};
use viewer::view::Panel;

/// A file as the window system hands it over.
#[derive(Debug)]
struct Dropped(PathBuf);

impl DroppedFile for Dropped {
    fn path(&self) -> &Path {
        &self.0
    }

    fn bytes(&self) -> Result<Vec<u8>, String> {
        fs::read(&self.0).map_err(|error| error.to_string())
    }
}

fn drop_on(window: &mut Window, paths: &[&Path]) {
    for path in paths {
        window.harness.input_mut().dropped_files.push(Arc::new(Dropped(path.to_path_buf())));
    }
    window.harness.run_steps(3);
}

/// As if a dialog had been answered.
fn choose(window: &mut Window, purpose: Purpose, path: &Path) {
    let chosen = Chosen { purpose, path: path.to_owned() };
    window.viewer().chosen().send(chosen).unwrap();
    window.harness.run_steps(4);
}

fn empty() -> Window {
    Window::on(tempfile::tempdir().unwrap(), Viewer::new(None, "no-such-compiler".into()))
}

/// Names of the plan and the trace that are open.
fn title(window: &Window) -> Option<String> {
    window.viewer().document.as_ref().map(viewer::document::Document::title)
}

#[test]
fn a_plan_and_a_trace_dropped_together_are_opened_in_any_order() {
    let mut window = empty();
    let (plan, trace) = write(window.folder.path(), "dropped", Wish::new(4, 1, 1, Style::Pipeline));
    drop_on(&mut window, &[&trace, &plan]);
    assert_eq!(title(&window).as_deref(), Some("dropped.ron + dropped-trace.ron"));
    assert!(window.shows("decode1: predicted"));
}

#[test]
fn a_trace_that_is_dropped_joins_the_plan_that_is_open() {
    let mut window = empty();
    let (plan, trace) = write(window.folder.path(), "dropped", Wish::new(4, 1, 1, Style::Pipeline));
    drop_on(&mut window, &[&trace]);
    assert!(window.shows("a trace is opened after its plan"));
    drop_on(&mut window, &[&plan]);
    assert_eq!(title(&window).as_deref(), Some("dropped.ron"));
    drop_on(&mut window, &[&trace]);
    assert_eq!(title(&window).as_deref(), Some("dropped.ron + dropped-trace.ron"));
    assert!(window.viewer().message.is_none());
}

#[test]
fn a_file_that_is_no_plan_is_named_and_what_is_open_stays() {
    let mut window = Window::open();
    let other = window.folder.path().join("notes.txt");
    fs::write(&other, "nothing of the kind").unwrap();
    drop_on(&mut window, &[&other]);
    assert!(window.shows("notes.txt"));
    assert_eq!(title(&window).as_deref(), Some("plan.ron + plan-trace.ron"));
    let missing = window.folder.path().join("missing.ron");
    choose(&mut window, Purpose::Plan, &missing);
    assert!(window.shows("missing.ron"));
    assert_eq!(title(&window).as_deref(), Some("plan.ron + plan-trace.ron"));
}

#[test]
fn what_a_dialog_chose_is_opened() {
    let mut window = empty();
    let wish = Wish::new(12, 1, 2, Style::Pipeline);
    let (plan, trace) = write(window.folder.path(), "chosen", wish);
    choose(&mut window, Purpose::Plan, &plan);
    assert_eq!(title(&window).as_deref(), Some("chosen.ron"));
    choose(&mut window, Purpose::Trace, &trace);
    assert_eq!(title(&window).as_deref(), Some("chosen.ron + chosen-trace.ron"));
    choose(&mut window, Purpose::Compare, &plan);
    assert_eq!(window.viewer().view.panel, Panel::Compare);
    assert!(window.shows("No layer runs elsewhere"));
}

#[test]
fn exports_go_where_a_dialog_says() {
    let mut window = Window::open();
    window.compiler("exit 1");
    let wish = viewer::view::Wish::Move { first: 5, last: 5, device: 0 };
    window.harness.state_mut().view.wish = Some((wish, Pos2::new(400.0, 300.0)));
    window.await_answer();
    let starts: [(Purpose, &[u8]); 4] = [
        (Purpose::Png, b"\x89PNG"),
        (Purpose::Svg, b"<svg"),
        (Purpose::Perfetto, b"{"),
        (Purpose::Pins, b"--pin '"),
    ];
    for (purpose, start) in starts {
        let path = window.folder.path().join(format!("{purpose:?}"));
        choose(&mut window, purpose, &path);
        assert_eq!(window.viewer().message, None);
        let written = fs::read(&path).unwrap();
        assert!(written.starts_with(start), "{purpose:?} begins with {:?}", &written[..8]);
    }
}

#[test]
fn an_answer_that_is_looked_at_can_be_kept_with_its_machine() {
    let mut window = Window::open();
    let larger = Wish { gpu_layers: 8, ..Wish::new(12, 1, 2, Style::Pipeline) };
    let (answer, _) = write(window.folder.path(), "answer", larger);
    window.answer_with(&answer);
    let wish = viewer::view::Wish::Move { first: 5, last: 5, device: 0 };
    window.harness.state_mut().view.wish = Some((wish, Pos2::new(400.0, 300.0)));
    window.await_answer();
    window.click("Look at this plan");
    let [kept, again] = ["kept.ron", "again.ron"].map(|name| window.folder.path().join(name));
    choose(&mut window, Purpose::Answer, &kept);
    assert_eq!(window.viewer().message, None);
    assert_eq!(title(&window).as_deref(), Some("kept.ron"));
    let plan = Plan::from_ron(&fs::read_to_string(&kept).unwrap()).unwrap();
    assert_eq!(plan.machine, made_up::plan(larger).machine);
    assert!(plan.model.folder.is_absolute() && plan.files.rows()[0].path.is_absolute());
    let machine = fs::read_to_string(kept.with_extension("machine.ron")).unwrap();
    assert!(Machine::from_ron(&machine).is_ok());
    choose(&mut window, Purpose::Answer, &again);
    assert!(!again.exists(), "the plan that is open has a file of its own");
}

#[test]
fn an_export_that_cannot_be_written_is_told() {
    let mut window = Window::open();
    for purpose in [Purpose::Png, Purpose::Svg, Purpose::Perfetto] {
        let path = window.folder.path().join(format!("none/{purpose:?}"));
        choose(&mut window, purpose, &path);
        let message = window.viewer().message.as_deref().unwrap_or_default();
        assert!(message.starts_with("writing ") && message.contains("none/"), "{message}");
    }
}

/// Long enough for the next look at the files, and for what is written next to have another time.
fn wait_for_a_look(window: &mut Window) {
    std::thread::sleep(Duration::from_millis(20));
    // The harness's clock goes forward with each step.
    window.harness.run_steps(12);
}

#[test]
fn a_trace_that_is_recorded_again_is_in_sight() {
    let mut window = Window::open();
    let before = window.viewer().view.time.unwrap();
    let (plan, trace) = write(window.folder.path(), "plan", Wish::new(12, 1, 2, Style::Pipeline));
    window.harness.state_mut().open(&plan, Some(&trace));
    let text = fs::read_to_string(&trace).unwrap();
    let mut later = Trace::from_ron(&text).unwrap();
    for run in &mut later.runs {
        (run.start, run.end) = (run.start + 1_000_000_000, run.end + 1_000_000_000);
    }
    for span in &mut later.spans {
        for time in [&mut span.ready, &mut span.start, &mut span.end] {
            *time += 1_000_000_000;
        }
    }
    wait_for_a_look(&mut window);
    fs::write(&trace, later.to_ron().unwrap()).unwrap();
    wait_for_a_look(&mut window);
    let after = window.viewer().view.time.unwrap();
    assert!((after.0 - before.0 - 1e9).abs() < 2.0 && (after.1 - before.1 - 1e9).abs() < 2.0);
}

#[test]
fn a_file_that_stays_unreadable_is_told_once() {
    let mut window = Window::open();
    let plan = window.folder.path().join("plan.ron");
    wait_for_a_look(&mut window);
    fs::write(&plan, "nothing of the kind").unwrap();
    wait_for_a_look(&mut window);
    assert!(window.shows("not a plan"));
    window.click("dismiss");
    wait_for_a_look(&mut window);
    assert!(!window.shows("not a plan"));
    // When it is whole again it is read.
    let larger = Wish { gpu_layers: 8, ..Wish::new(12, 1, 2, Style::Pipeline) };
    write(window.folder.path(), "plan", larger);
    wait_for_a_look(&mut window);
    assert!(window.harness.query_by_label("layers 0–7, alike").is_some());
}

#[test]
fn a_plan_that_is_compared_with_is_read_again_when_it_changes() {
    let mut window = Window::open();
    let wish = |gpu_layers| Wish { gpu_layers, ..Wish::new(12, 1, 2, Style::Pipeline) };
    let (other, _) = write(window.folder.path(), "other", wish(8));
    choose(&mut window, Purpose::Compare, &other);
    assert!(window.shows("layers 4–7"));
    wait_for_a_look(&mut window);
    write(window.folder.path(), "other", wish(6));
    wait_for_a_look(&mut window);
    assert!(window.shows("layers 4–5") && !window.shows("layers 4–7"));
}
