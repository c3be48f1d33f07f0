//! The layers of the model, one column for each device.
//!
//! Alike layers are folded into one card; what passes between devices is drawn between cards.

mod card;
mod edges;
mod header;

use egui::{Rect, Sense, Stroke, Ui, vec2};

use crate::scene::{Block, Group, Program, Scene};
use crate::view::View;

const HEADER_HEIGHT: f32 = 84.0;
const CARD_HEIGHT: f32 = 70.0;
/// What a card is higher by that says where its weights or cache are at home.
const HOME_HEIGHT: f32 = 13.0;
const GAP: f32 = 24.0;
const STEP_HEIGHT: f32 = 17.0;

/// Where the columns of devices are in this frame.
#[derive(Clone, Copy)]
struct Columns {
    body: Rect,
    width: f32,
}

impl Columns {
    fn left(&self, device: usize) -> f32 {
        self.body.left() + self.width * device as f32
    }

    /// The device under a point of the window.
    fn device(&self, x: f32, devices: usize) -> Option<usize> {
        let column = ((x - self.body.left()) / self.width).floor();
        (column >= 0.0 && (column as usize) < devices).then_some(column as usize)
    }
}

/// One row of cards: blocks `first..=last`, drawn as one.
struct Row {
    first: usize,
    last: usize,
    is_group: bool,
    top: f32,
    /// Height of all but the steps.
    head: f32,
    height: f32,
}

/// Draws the panel and takes its mouse input.
pub fn show(ui: &mut Ui, scene: &Scene, view: &mut View) {
    let Some(program) = view.program(scene) else {
        ui.label("The plan has no programs.");
        return;
    };
    let columns = scene.devices.len().max(1);
    let width = (ui.available_width() / columns as f32).max(190.0);
    let rows = rows(program, view);
    let height = rows.last().map_or(0.0, |row| row.top + row.height) + GAP;
    egui::ScrollArea::horizontal().show(ui, |ui| {
        let size = vec2(width * columns as f32, HEADER_HEIGHT);
        let (header, _) = ui.allocate_exact_size(size, Sense::hover());
        header::draw_header(ui, scene, view, header, width);
        egui::ScrollArea::vertical().auto_shrink(false).show(ui, |ui| {
            let size = vec2(width * columns as f32, height.max(ui.available_height()));
            let (body, _) = ui.allocate_exact_size(size, Sense::hover());
            let shown = Columns { body, width };
            draw_columns(ui, columns, shown);
            edges::draw_edges(ui, program, &rows, shown);
            let largest = rows.iter().map(|row| row_nanos(program, row)).max().unwrap_or(1);
            for row in &rows {
                card::draw_row(ui, scene, view, program, row, shown, largest);
            }
        });
    });
}

/// Cards from top to bottom.
fn rows(program: &Program, view: &View) -> Vec<Row> {
    let mut rows = Vec::new();
    let mut top = 8.0;
    let mut push = |first: usize, last: usize, is_group: bool| {
        let steps = |block: &Block| {
            let count = |device: &usize| {
                block.steps.iter().filter(|&&step| program.steps[step].device == *device).count()
            };
            block.devices.iter().map(count).max().unwrap_or(0)
        };
        let opened = !is_group && view.opened.contains(&first);
        let more =
            if opened { steps(&program.blocks[first]) as f32 * STEP_HEIGHT + 6.0 } else { 0.0 };
        let mut blocks = program.blocks[first..=last].iter();
        let is_away = blocks.any(|block| {
            let mut steps = block.steps.iter().map(|&step| &program.steps[step]);
            steps.any(|step| step.cache_home().is_some() || step.weight_homes().next().is_some())
        });
        let head = CARD_HEIGHT + if is_away { HOME_HEIGHT } else { 0.0 };
        rows.push(Row { first, last, is_group, top, head, height: head + more });
        top += head + more + GAP;
    };
    for &Group { first, last } in &program.groups {
        if first < last && !view.unfolded.contains(&first) {
            push(first, last, true);
        } else {
            (first..=last).for_each(|block| push(block, block, false));
        }
    }
    rows
}

fn row_nanos(program: &Program, row: &Row) -> u64 {
    program.blocks_predicted(row.first, row.last)
}

fn draw_columns(ui: &Ui, count: usize, columns: Columns) {
    let color = ui.visuals().widgets.noninteractive.bg_stroke.color;
    let line = Stroke::new(1.0, color.gamma_multiply(0.6));
    for column in 1..count {
        ui.painter().vline(columns.left(column), columns.body.y_range(), line);
    }
}
