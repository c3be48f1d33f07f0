//! Draws a comparison: layer strips side by side, then what differs as tables.

use egui::{Color32, FontId, Rect, RichText, Sense, Stroke, StrokeKind, Ui, pos2, vec2};

use crate::compare::{Comparison, Difference};
use crate::quantity;
use crate::scene::{Block, Device, Scene, size_text};
use crate::text::legend_entry;
use crate::theme;
use crate::view::{Selection, View};

/// More findings than this are counted, not listed: the tables come after them.
const MOST_FINDINGS: usize = 6;

/// The other scene, with what people call the two.
pub struct Other<'a> {
    /// The second scene.
    pub scene: &'a Scene,
    /// What the first is called.
    pub first_title: &'a str,
    /// What the second is called.
    pub second_title: &'a str,
    /// What differs.
    pub comparison: &'a Comparison,
}

/// Draws the panel. Without another scene it says how to get one. What is wrong with the first is said elsewhere.
pub fn show(ui: &mut Ui, scene: &Scene, other: Option<Other<'_>>, view: &mut View) {
    let Some(other) = other else {
        ui.add_space(20.0);
        ui.vertical_centered(|ui| {
            ui.heading("Nothing to compare with yet");
            ui.label("File → Compare with… opens a second plan or trace.");
            ui.label("The answer to a what-if question can be compared, too.");
        });
        return;
    };
    egui::ScrollArea::vertical().auto_shrink(false).show(ui, |ui| {
        let program = view.program(scene).map(|program| program.name.clone()).unwrap_or_default();
        if let Some(models) = &other.comparison.models {
            ui.colored_label(theme::alarm(ui), models);
        }
        let devices = scene.devices_with(other.scene);
        ui.horizontal_wrapped(|ui| {
            ui.strong(format!("Where the layers of {program} run"));
            for (number, device) in devices.iter().enumerate() {
                legend_entry(ui, theme::device_among(&devices, number), &device.name);
            }
        });
        let home = scene.programs.iter().find(|other| other.name == program);
        let home = home.map(|program| program.blocks.as_slice()).unwrap_or_default();
        let first = Strip { scene, title: other.first_title, findings: &[], program: &program };
        strip(ui, first, &devices, home, view);
        let second = Strip {
            scene: other.scene,
            title: other.second_title,
            findings: &other.scene.findings,
            ..first
        };
        strip(ui, second, &devices, home, view);
        ui.add_space(8.0);
        let titles = (other.first_title, other.second_title);
        table(ui, "Time of a run", titles, &other.comparison.programs, view);
        table(ui, "Memory", titles, &other.comparison.devices, view);
        table(ui, "Layers that differ", titles, &other.comparison.blocks, view);
        let is_shared = [scene, other.scene]
            .iter()
            .all(|scene| scene.programs.iter().any(|other| other.name == program));
        // Of a trace of another plan, or an unsound plan, this would say too much.
        let is_doubtful = scene.is_doubtful() || other.scene.is_doubtful();
        if is_shared && !is_doubtful && other.comparison.blocks.is_empty() {
            ui.label("No layer runs elsewhere or takes noticeably longer or shorter.");
        }
    });
}

/// The program of a scene whose blocks are drawn beside those of another.
#[derive(Clone, Copy)]
struct Strip<'a> {
    scene: &'a Scene,
    title: &'a str,
    /// What is wrong with it.
    findings: &'a [String],
    program: &'a str,
}

/// All blocks of a program as cells in the colors that their devices have among those of both scenes. What is selected
/// are blocks of the first scene, `home`.
fn strip(ui: &mut Ui, shown: Strip<'_>, devices: &[Device], home: &[Block], view: &mut View) {
    let Strip { scene, title, findings, program } = shown;
    let show_findings = |ui: &mut Ui| {
        for line in findings_lines(findings) {
            ui.colored_label(theme::alarm(ui), line);
        }
    };
    let Some(number) = scene.programs.iter().position(|other| other.name == program) else {
        ui.label(format!("{title}: no program {program}"));
        show_findings(ui);
        return;
    };
    let program = &scene.programs[number];
    let summary = &scene.summaries[number];
    let measured = summary.measured_nanos.zip(summary.size).map(|(nanos, size)| {
        format!(", measured {} {}", quantity::nanos(nanos as f64), size_text(program, size))
    });
    ui.horizontal_wrapped(|ui| {
        ui.strong(title);
        ui.label(format!(
            "predicted {} {}{}",
            quantity::nanos(summary.predicted_nanos as f64),
            size_text(program, program.predicted_size()),
            measured.unwrap_or_default()
        ));
    });
    show_findings(ui);
    let (rect, response) =
        ui.allocate_exact_size(vec2(ui.available_width() - 8.0, 34.0), Sense::click());
    let count = program.blocks.len().max(1) as f32;
    // Numbers take up to 20 points; where cells are narrower every second, fifth or tenth has one.
    let labelled = [1, 2, 5, 10, 20, 50].into_iter();
    let labelled = labelled.clone().find(|&every| rect.width() / count * every as f32 >= 20.0);
    let clicked = response.interact_pointer_pos().filter(|_| response.clicked());
    for (number, block) in program.blocks.iter().enumerate() {
        let left = rect.left() + rect.width() * number as f32 / count;
        let right = rect.left() + rect.width() * (number + 1) as f32 / count;
        let cell = Rect::from_min_max(pos2(left, rect.top()), pos2(right - 1.0, rect.bottom()));
        let parts = block.devices.len().max(1) as f32;
        for (part, &device) in block.devices.iter().enumerate() {
            let name = scene.device_name(device);
            let known = devices.iter().position(|device| device.name == name);
            let color = known.map_or(Color32::GRAY, |at| theme::device_among(devices, at));
            let top = cell.top() + cell.height() * part as f32 / parts;
            let height = cell.height() / parts;
            ui.painter().rect_filled(
                Rect::from_min_size(pos2(cell.left(), top), vec2(cell.width(), height)),
                1.0,
                color,
            );
        }
        name_cell(ui, cell, block, labelled);
        if response.hover_pos().is_some_and(|at| cell.contains(at)) {
            let devices: Vec<String> =
                block.devices.iter().map(|&device| scene.device_name(device)).collect();
            let text = format!("{} on {}", block.title(), devices.join(" + "));
            response.clone().on_hover_text_at_pointer(text);
        }
        let Some(same) = home.iter().position(|other| other.name == block.name) else { continue };
        if matches!(view.selection, Selection::Blocks(from, to) if (from..=to).contains(&same)) {
            ui.painter().rect_stroke(
                cell,
                1.0,
                Stroke::new(2.0, theme::strong(ui)),
                StrokeKind::Inside,
            );
        }
        if clicked.is_some_and(|at| cell.contains(at)) {
            view.selection = Selection::Blocks(same, same);
        }
    }
    ui.add_space(4.0);
}

/// `! the plan is unsound: …`, one a line, then `! and 3 more`.
fn findings_lines(findings: &[String]) -> Vec<String> {
    let listed = findings.iter().take(MOST_FINDINGS).map(|finding| format!("! {finding}"));
    let more = findings.len().checked_sub(MOST_FINDINGS).filter(|&more| more > 0);
    listed.chain(more.map(|more| format!("! and {more} more"))).collect()
}

/// Writes the block's number, should it be one of each `labelled`, or what fits of its name in whole words.
fn name_cell(ui: &Ui, cell: Rect, block: &Block, labelled: Option<u32>) {
    let galley = |text: &str| {
        let font = FontId::proportional(11.0);
        ui.painter().layout_no_wrap(text.to_owned(), font, Color32::BLACK)
    };
    let name = match block.number {
        Some(number) => {
            let is_labelled = labelled.is_some_and(|every| number.is_multiple_of(every));
            is_labelled.then(|| galley(&number.to_string()))
        }
        None => {
            let title = block.title();
            let words = [title.rsplit('_').next(), title.split('_').next()];
            let names = std::iter::once(title.as_str()).chain(words.into_iter().flatten());
            names.map(galley).find(|name| name.size().x <= cell.width() - 2.0)
        }
    };
    let Some(name) = name else { return };
    let place = Rect::from_center_size(cell.center(), name.size());
    if block.devices.len() > 1 {
        // Text across stripes of several colors is hard to read.
        let plate = Color32::from_white_alpha(170);
        ui.painter().rect_filled(place.expand2(vec2(1.0, 0.0)), 2.0, plate);
    }
    ui.painter().galley(place.min, name, Color32::BLACK);
}

fn table(
    ui: &mut Ui,
    title: &str,
    (first, second): (&str, &str),
    rows: &[Difference],
    view: &mut View,
) {
    if rows.is_empty() {
        return;
    }
    ui.add_space(6.0);
    ui.strong(title);
    egui::Grid::new(title).num_columns(4).striped(true).spacing([24.0, 4.0]).show(ui, |ui| {
        let has_changes = rows.iter().any(|row| row.change.is_some());
        for text in ["", first, second, if has_changes { "change" } else { "" }] {
            ui.label(RichText::new(text).small().color(theme::weak(ui)));
        }
        ui.end_row();
        for row in rows {
            if let Some(block) = row.block {
                if ui.link(&row.subject).clicked() {
                    view.selection = Selection::Blocks(block, block);
                }
            } else {
                ui.label(&row.subject);
            }
            ui.label(&row.before);
            ui.label(&row.after);
            let change = row.change.map(quantity::change).unwrap_or_default();
            ui.colored_label(theme::change(ui, row.change), change);
            ui.end_row();
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_that_are_not_listed_are_counted() {
        let mut findings = vec!["a step is in no lane".to_owned(); MOST_FINDINGS];
        let lines = findings_lines(&findings);
        assert_eq!(lines, vec!["! a step is in no lane"; MOST_FINDINGS]);
        findings.extend(findings.clone());
        let lines = findings_lines(&findings);
        assert_eq!(lines.len(), MOST_FINDINGS + 1);
        assert_eq!(lines[MOST_FINDINGS], format!("! and {MOST_FINDINGS} more"));
    }
}
