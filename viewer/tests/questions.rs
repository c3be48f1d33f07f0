//! What a document is compared with: another one, or the answer to a question, each under its own title.

mod harness;
mod made_up;

use std::fs;

use egui::{Key, Modifiers, Pos2};
use egui_kittest::kittest::Queryable as _;
use harness::{Window, write};
use made_up::{Style, Wish};
use viewer::view::Panel;

fn larger(gpu_layers: u32) -> Wish {
    Wish { gpu_layers, ..Wish::new(12, 1, 2, Style::Pipeline) }
}

/// Asks a question; the answer is a plan with so many layers on the GPU.
fn ask(window: &mut Window, gpu_layers: u32) {
    let (answer, _) = write(window.folder.path(), "answer", larger(gpu_layers));
    let script = format!("while [ \"$1\" != -o ]; do shift; done\ncp {} \"$2\"", answer.display());
    window.compiler(&script);
    let wish = viewer::view::Wish::Memory { device: 1, factor: 2 };
    window.harness.state_mut().view.wish = Some((wish, Pos2::new(400.0, 300.0)));
    window.await_answer();
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
    let other = window.folder.path().join("other.ron");
    fs::write(&other, plan.to_ron().unwrap()).unwrap();
    window.harness.state_mut().compare_with(&other);
    window.harness.run_steps(3);
    assert!(window.shows("other.ron: no program decode1"));
    assert!(!window.shows("No layer runs elsewhere"));
}
