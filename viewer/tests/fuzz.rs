//! Damaged plans and traces: whatever can be read can be shown, and nothing panics.

mod made_up;

use egui::{Context, RawInput, Rect, vec2};
use ir::plan::Plan;
use ir::trace::Trace;
use made_up::{Random, Style, Wish};
use viewer::Viewer;
use viewer::document::Document;
use viewer::view::{Panel, Selection};

/// Numbers that are likely to be wrong somewhere.
const NUMBERS: [u64; 8] = [0, 1, 2, 7, 999, 65_536, 2_147_483_648, u32::MAX as u64];
/// The same where 64 bits are read; elsewhere they make a text unreadable.
const LARGE: [u64; 2] = [u64::MAX, i64::MAX as u64];

/// Replaces some of the numbers of a text, keeping its form.
fn damage(text: &str, random: &mut Random, times: u64) -> String {
    let mut text = text.to_owned();
    for _ in 0..times {
        let from = random.below(text.len() as u64) as usize;
        let Some(start) = text[from..].find(|c: char| c.is_ascii_digit()) else { continue };
        let start = from + start;
        // A digit inside a name or a fraction is no number of its own.
        if text[..start].ends_with(|c: char| c.is_alphanumeric() || c == '.' || c == '_') {
            continue;
        }
        let end = text[start..].find(|c: char| !c.is_ascii_digit());
        let end = end.map_or(text.len(), |end| start + end);
        let numbers = if random.below(40) == 0 { &LARGE[..] } else { &NUMBERS[..] };
        let number = numbers[random.below(numbers.len() as u64) as usize];
        text.replace_range(start..end, &number.to_string());
    }
    text
}

/// Draws every panel, each with a selection that the number of the case decides.
fn show(plan: Plan, trace: Option<Trace>, case: usize) {
    let document = Document::of(plan, trace, 7);
    let selections = [
        Selection::Nothing,
        Selection::Step(3, Some(0)),
        Selection::Blocks(0, 2),
        Selection::Device(1),
    ];
    let mut viewer = Viewer::new(Some(document), "hybridc".into());
    let context = Context::default();
    viewer::theme::install(&context);
    for (number, panel) in Panel::ALL.into_iter().enumerate() {
        viewer.view.panel = panel;
        viewer.view.selection = selections[(number + case) % selections.len()];
        let input = RawInput {
            screen_rect: Some(Rect::from_min_size(Default::default(), vec2(1200.0, 800.0))),
            time: Some(number as f64),
            ..RawInput::default()
        };
        let output = context.run_ui(input, |ui| viewer.ui(ui));
        assert!(!output.shapes.is_empty());
    }
}

#[test]
fn damaged_plans_that_can_be_read_can_be_shown() {
    let mut random = Random(1);
    let mut shown = 0;
    for style in [Style::Pipeline, Style::Tensor, Style::Streaming] {
        let plan = made_up::plan(Wish::new(3, 2, 1, style));
        let text = plan.to_ron().unwrap();
        let trace = made_up::trace(&plan, 7, 80);
        for case in 0..200 {
            let times = 1 + random.below(30);
            if let Ok(damaged) = Plan::from_ron(&damage(&text, &mut random, times)) {
                show(damaged, (case % 2 == 0).then(|| trace.clone()), case / 2);
                shown += 1;
            }
        }
    }
    assert!(shown > 200, "only {shown} damaged plans could be read");
}

#[test]
fn damaged_traces_that_can_be_read_can_be_shown() {
    let mut random = Random(2);
    let plan = made_up::plan(Wish::new(3, 1, 1, Style::Pipeline));
    let text = made_up::trace(&plan, 7, 80).to_ron().unwrap();
    let mut shown = 0;
    for _ in 0..200 {
        let times = 1 + random.below(60);
        if let Ok(damaged) = Trace::from_ron(&damage(&text, &mut random, times)) {
            show(plan.clone(), Some(damaged), shown);
            shown += 1;
        }
    }
    assert!(shown > 100, "only {shown} damaged traces could be read");
}

#[test]
fn damaged_bytes_are_read_or_refused() {
    let mut random = Random(3);
    let plan = made_up::plan(Wish::new(2, 1, 1, Style::Pipeline));
    let trace = made_up::trace(&plan, 7, 40);
    let mut shown = 0;
    for text in [plan.to_ron().unwrap(), trace.to_ron().unwrap()] {
        for _ in 0..300 {
            let mut bytes = text.clone().into_bytes();
            let mut at = || random.below(text.len() as u64) as usize;
            let (from, to, end) = (at(), at(), at());
            bytes[to] = text.as_bytes()[from];
            match random.below(4) {
                0 => bytes[to] = random.next() as u8,
                1 => bytes.truncate(end),
                _ => (),
            }
            let text = String::from_utf8_lossy(&bytes);
            if let Ok(damaged) = Plan::from_ron(&text) {
                show(damaged, None, shown);
                shown += 1;
            }
            if let Ok(damaged) = Trace::from_ron(&text) {
                show(plan.clone(), Some(damaged), shown);
                shown += 1;
            }
        }
    }
    assert!(shown > 20, "only {shown} damaged files could be read");
}

#[test]
fn a_plan_without_anything_can_be_shown() {
    let mut plan = made_up::plan(Wish::new(1, 0, 1, Style::Pipeline));
    plan.programs.clear();
    show(plan.clone(), None, 0);
    plan.machine.devices = ir::id::Table::default();
    show(plan, Some(Trace { version: ir::trace::VERSION, ..Trace::default() }), 0);
}
