//! All steps of a program as a table that can be sorted and filtered.

use std::cmp::Ordering;

use egui::{Align2, FontId, Rect, Sense, Ui, pos2, vec2};

use crate::details_panel::{measured_text, planned_text};
use crate::quantity;
use crate::scene::{Kind, Program, Scene, Step};
use crate::text::text_within;
use crate::theme;
use crate::view::{Column, Selection, View};

const ROW_HEIGHT: f32 = 18.0;

/// Columns with their titles and shares of the width.
const COLUMNS: [(Column, &str, f32); 10] = [
    (Column::Number, "step", 0.06),
    (Column::Name, "layer", 0.23),
    (Column::Verb, "operation", 0.11),
    (Column::Device, "device", 0.08),
    (Column::Format, "format", 0.06),
    (Column::Bytes, "bytes", 0.09),
    (Column::Flops, "arithmetic", 0.10),
    (Column::Predicted, "predicted", 0.09),
    (Column::Measured, "measured", 0.09),
    (Column::Error, "error", 0.09),
];

/// Draws the panel and takes its mouse input.
pub fn show(ui: &mut Ui, scene: &Scene, view: &mut View) {
    let Some(program) = view.program(scene) else {
        ui.label("The plan has no programs.");
        return;
    };
    let rows = sorted(scene, program, view);
    ui.horizontal_wrapped(|ui| {
        let label = ui.label("Filter");
        let edit = egui::TextEdit::singleline(&mut view.filter);
        let edit = edit.desired_width(220.0).hint_text("layer, operation or device");
        ui.add(edit).labelled_by(label.id);
        ui.weak(format!(
            "{} of {} steps · {}",
            rows.len(),
            program.steps.len(),
            sum_text(program, &rows)
        ));
    });
    header(ui, view);
    let selected = view.selected(scene);
    let target =
        view.scroll_to_selection.then(|| rows.iter().position(|&step| selected[step])).flatten();
    view.scroll_to_selection = false;
    let mut area = egui::ScrollArea::vertical().auto_shrink(false);
    if let Some(row) = target {
        let middle =
            row as f32 * (ROW_HEIGHT + ui.spacing().item_spacing.y) - ui.available_height() / 2.0;
        area = area.vertical_scroll_offset(middle.max(0.0));
    }
    area.show_rows(ui, ROW_HEIGHT, rows.len(), |ui, range| {
        for &step in &rows[range] {
            let (rect, response) =
                ui.allocate_exact_size(vec2(ui.available_width(), ROW_HEIGHT), Sense::click());
            let row = &program.steps[step];
            response.widget_info(|| {
                egui::WidgetInfo::selected(
                    egui::Role::Button,
                    true,
                    selected[step],
                    format!("s{step} {}", row.name),
                )
            });
            if response.clicked() {
                view.selection = Selection::Step(step, view.run);
                view.keep_in_sight(scene, step);
            }
            draw_row(ui, scene, row, rect, selected[step], response.hovered());
        }
    });
}

fn sum_text(program: &Program, rows: &[usize]) -> String {
    let predicted: u64 =
        rows.iter().map(|&step| program.steps[step].predicted_nanos).fold(0, u64::saturating_add);
    let measured: Option<u64> = rows
        .iter()
        .filter_map(|&step| program.steps[step].measured)
        .map(|measured| measured.median_nanos)
        .reduce(u64::saturating_add);
    let measured = measured.map(|nanos| format!(", measured {}", measured_text(program, nanos)));
    let has_attention = rows.iter().any(|&step| program.steps[step].kind == Kind::Attention);
    let predicted = planned_text(program, predicted, has_attention);
    format!("predicted {predicted}{}", measured.unwrap_or_default())
}

/// The columns that a row has room for, with their cells.
fn columns(rect: Rect) -> impl Iterator<Item = (Column, &'static str, Rect)> {
    /// Below this, numbers of ten columns are cut.
    const ALL_WIDTH: f32 = 640.0;
    let is_shown = move |column: Column| {
        rect.width() >= ALL_WIDTH || !matches!(column, Column::Format | Column::Flops)
    };
    let shown = COLUMNS.into_iter().filter(move |(column, ..)| is_shown(*column));
    let whole: f32 = shown.clone().map(|(_, _, share)| share).sum();
    let mut left = rect.left();
    shown.map(move |(column, title, share)| {
        let width = rect.width() * share / whole;
        let cell = Rect::from_min_size(pos2(left, rect.top()), vec2(width, rect.height()));
        left += width;
        (column, title, cell)
    })
}

fn header(ui: &mut Ui, view: &mut View) {
    let (rect, _) = ui.allocate_exact_size(vec2(ui.available_width(), 20.0), Sense::hover());
    for (column, title, cell) in columns(rect) {
        let response = ui.interact(cell, ui.scope_id().with(("sort", title)), Sense::click());
        response.widget_info(|| {
            egui::WidgetInfo::labeled(egui::Role::Button, true, format!("sort by {title}"))
        });
        if response.clicked() {
            // Numbers are looked at from the largest.
            let falls = !matches!(
                column,
                Column::Number | Column::Name | Column::Verb | Column::Device | Column::Format
            );
            view.sort =
                if view.sort.0 == column { (column, !view.sort.1) } else { (column, falls) };
        }
        let arrow = match view.sort {
            (sorted, falls) if sorted == column => {
                if falls {
                    " ▼"
                } else {
                    " ▲"
                }
            }
            _ => "",
        };
        let color = if response.hovered() { theme::strong(ui) } else { theme::weak(ui) };
        ui.painter().with_clip_rect(cell.intersect(ui.clip_rect())).text(
            cell.left_center() + vec2(4.0, 0.0),
            Align2::LEFT_CENTER,
            format!("{title}{arrow}"),
            FontId::proportional(12.0),
            color,
        );
    }
}

/// Steps that pass the filter, in the order of the table.
pub fn sorted(scene: &Scene, program: &Program, view: &View) -> Vec<usize> {
    let needle = view.filter.to_lowercase();
    let passes = |step: &&Step| {
        needle.is_empty()
            || step.name.to_lowercase().contains(&needle)
            || step.action.to_lowercase().contains(&needle)
            || scene.device_name(step.device).to_lowercase().contains(&needle)
    };
    let mut rows: Vec<usize> =
        program.steps.iter().filter(passes).map(|step| step.number).collect();
    let (column, falls) = view.sort;
    rows.sort_by(|&a, &b| {
        let order = compare(&program.steps[a], &program.steps[b], column);
        if falls { order.reverse() } else { order }.then(a.cmp(&b))
    });
    rows
}

fn compare(a: &Step, b: &Step, column: Column) -> Ordering {
    match column {
        Column::Number => a.number.cmp(&b.number),
        Column::Name => a.name.cmp(&b.name),
        Column::Verb => a.verb.cmp(&b.verb),
        Column::Device => a.device.cmp(&b.device),
        Column::Format => a.format.cmp(&b.format),
        Column::Bytes => bytes(a).cmp(&bytes(b)),
        Column::Flops => a.flops.total_cmp(&b.flops),
        Column::Predicted => a.predicted_nanos.cmp(&b.predicted_nanos),
        Column::Measured => {
            let nanos = |step: &Step| step.measured.map(|measured| measured.median_nanos);
            nanos(a).cmp(&nanos(b))
        }
        Column::Error => {
            let error = |step: &Step| step.error().unwrap_or(f64::NEG_INFINITY);
            error(a).total_cmp(&error(b))
        }
    }
}

fn bytes(step: &Step) -> u64 {
    if step.kind.is_move() { step.moved_bytes } else { step.weight_bytes }
}

fn draw_row(ui: &Ui, scene: &Scene, step: &Step, rect: Rect, selected: bool, hovered: bool) {
    if selected {
        ui.painter().rect_filled(rect, 2.0, ui.visuals().selection.bg_fill);
    } else if hovered {
        ui.painter().rect_filled(rect, 2.0, ui.visuals().widgets.hovered.weak_bg_fill);
    }
    let text = ui.visuals().text_color();
    for (column, _, cell) in columns(rect) {
        let painter = ui.painter().with_clip_rect(cell.intersect(ui.clip_rect()));
        let mut color = text;
        let value = match column {
            Column::Number => format!("s{}", step.number),
            Column::Name => step.name.clone(),
            Column::Verb => step.verb.clone(),
            Column::Device => {
                color = theme::mix(text, theme::device(scene, step.device), 0.6);
                scene.device_name(step.device)
            }
            Column::Format => step.format.map(|format| format.to_string()).unwrap_or_default(),
            Column::Bytes => {
                if bytes(step) > 0 {
                    quantity::bytes(bytes(step))
                } else {
                    String::new()
                }
            }
            Column::Flops => {
                if step.flops > 0.0 {
                    quantity::flops(step.flops)
                } else {
                    String::new()
                }
            }
            Column::Predicted => quantity::nanos(step.predicted_nanos as f64),
            Column::Measured => step
                .measured
                .map_or_else(String::new, |measured| quantity::nanos(measured.median_nanos as f64)),
            Column::Error => {
                color = theme::mix(text, theme::error(step.error()), 0.8);
                step.error().map_or_else(String::new, quantity::change)
            }
        };
        text_within(
            ui,
            &painter,
            cell.left_center() + vec2(4.0, 0.0),
            cell.width() - 6.0,
            &value,
            color,
        );
    }
}
