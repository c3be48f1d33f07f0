//! What a document is compared with: another one, or the answer to a question, each under its own title.

mod harness;
mod made_up;

use std::fs;
use std::path::PathBuf;

use egui::{Key, Modifiers, Pos2};
use egui_kittest::kittest::Queryable as _;
use harness::{Window, write};
use ir::plan::Plan;
use made_up::{Style, Wish};
use viewer::view::Panel;

fn larger(gpu_layers: u32) -> Wish {
    Wish { gpu_layers, ..Wish::new(12, 1, 2, Style::Pipeline) }
}

/// Asks a question; the answer is a plan with so many layers on the GPU.
fn ask(window: &mut Window, gpu_layers: u32) {
    ask_for(window, &made_up::plan(larger(gpu_layers)));
}

/// Asks a question that this plan answers.
fn ask_for(window: &mut Window, plan: &Plan) {
    let answer = write_alone(window, "answer.ron", plan);
    window.answer_with(&answer);
    let wish = viewer::view::Wish::Memory { device: 1, factor: 2 };
    window.harness.state_mut().view.wish = Some((wish, Pos2::new(400.0, 300.0)));
    window.await_answer();
}

/// Writes a plan without a trace.
fn write_alone(window: &Window, name: &str, plan: &Plan) -> PathBuf {
    let path = window.folder.path().join(name);
    fs::write(&path, plan.to_ron().expect("a plan can be written")).expect("a plan can be written");
    path
}

fn compare_with(window: &mut Window, name: &str, gpu_layers: u32) {
    let (other, _) = write(window.folder.path(), name, larger(gpu_layers));
    window.harness.state_mut().compare_with(&other);
    window.harness.run_steps(3);
}

const ANSWER: &str = "numa0 with 2 times the memory";

#[test]
fn an_answer_and_another_plan_have_each_their_own_numbers() {
    let mut window = Window::open();
    compare_with(&mut window, "other", 8);
    assert!(window.shows("layers 4–7") && !window.shows("layers 4–5"));
    ask(&mut window, 6);
    window.harness.run_steps(3);
    assert!(window.harness.query_all_by_label(ANSWER).count() > 0, "the strip has its title");
    assert!(window.shows("layers 4–5"), "the table is of the answer");
    window.press(Modifiers::NONE, Key::Escape);
    window.harness.run_steps(2);
    assert!(window.harness.query_all_by_label("other.ron").count() > 0);
    assert!(window.shows("layers 4–7") && !window.shows("layers 4–5"));
}

#[test]
fn a_plan_that_is_opened_for_comparison_takes_the_place_of_an_answer() {
    let mut window = Window::open();
    ask(&mut window, 6);
    compare_with(&mut window, "other", 8);
    assert_eq!(window.viewer().view.panel, Panel::Compare);
    assert!(window.harness.query_all_by_label("other.ron").count() > 0);
    assert!(!window.shows(ANSWER));
}

#[test]
fn an_answer_ends_with_the_plan_it_is_about() {
    let mut window = Window::open();
    ask(&mut window, 6);
    assert!(window.shows(ANSWER));
    let (other, _) = write(window.folder.path(), "other", larger(8));
    window.harness.state_mut().open(&other, None);
    assert!(window.viewer().question.is_none());
    window.harness.run_steps(2);
    ask(&mut window, 6);
    // The same plan, recorded again: the answer is still about it.
    window.harness.state_mut().reload();
    assert!(window.viewer().question.is_some());
    write(window.folder.path(), "other", larger(7));
    window.harness.state_mut().reload();
    assert!(window.viewer().question.is_none());
}

#[test]
fn a_program_that_the_other_plan_lacks_is_not_said_to_be_alike() {
    let mut window = Window::open();
    let mut plan = made_up::plan(larger(4));
    plan.programs.truncate(1);
    let other = write_alone(&window, "other.ron", &plan);
    window.harness.state_mut().compare_with(&other);
    window.harness.run_steps(3);
    assert!(window.shows("other.ron: no program decode1"));
    assert!(!window.shows("No layer runs elsewhere"));
}

#[test]
fn an_answer_for_shorter_prompts_is_no_faster_and_programs_that_it_lacks_are_named() {
    let mut window = Window::open();
    let mut plan = made_up::plan(larger(8));
    plan.programs[0].max.tokens /= 2;
    plan.programs.truncate(1);
    ask_for(&mut window, &plan);
    // With nothing behind it: of runs of other sizes there is no change.
    let said = "prefill predicted: 2.12 ms for 32 tokens → 1.44 ms for 16 tokens";
    assert_eq!(window.harness.query_all_by_label(said).count(), 1);
    assert_eq!(window.harness.query_all_by_label("decode1: only in the first").count(), 1);
}

#[test]
fn what_is_wrong_with_the_other_plan_or_trace_is_said_under_its_title() {
    let mut window = Window::open();
    let (_, foreign) = write(window.folder.path(), "other", larger(8));
    window.harness.state_mut().compare_with(&foreign);
    window.harness.run_steps(3);
    assert!(window.shows("! the trace was recorded with another plan"));
    assert!(!window.shows("No layer runs elsewhere"));
    let mut plan = made_up::plan(larger(4));
    plan.programs[1].lanes[0].steps.pop();
    let unsound = write_alone(&window, "unsound.ron", &plan);
    window.harness.state_mut().compare_with(&unsound);
    window.harness.run_steps(3);
    assert!(window.shows("! the plan is unsound"));
    assert!(!window.shows("No layer runs elsewhere"));
}

#[test]
fn strips_say_what_size_their_times_are_for() {
    let mut window = Window::open();
    let viewer = window.harness.state_mut();
    viewer.view.show_program(&viewer.document.as_ref().unwrap().scene, 0);
    let mut plan = made_up::plan(larger(4));
    plan.programs[0].max.tokens /= 2;
    let other = write_alone(&window, "other.ron", &plan);
    window.harness.state_mut().compare_with(&other);
    window.harness.run_steps(3);
    assert!(window.shows("predicted 2.12 ms for 32 tokens, measured "));
    let strip = "predicted 2.12 ms for 16 tokens";
    assert_eq!(window.harness.query_all_by_label(strip).count(), 1);
}
