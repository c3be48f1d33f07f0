//! The layers of the model, one column for each device.
//!
//! Alike layers are folded into one card; what passes between devices is drawn between cards.

mod card;
mod edges;
mod header;

use egui::style::ScrollStyle;
use egui::{Rect, Sense, Stroke, Ui, vec2};

use crate::scene::{Block, Group, Program, Scene};
use crate::view::View;

const HEADER_HEIGHT: f32 = 84.0;
const CARD_HEIGHT: f32 = 70.0;
/// What a card is higher by that says where its weights or cache are at home.
const HOME_HEIGHT: f32 = 13.0;
const GAP: f32 = 24.0;
const STEP_HEIGHT: f32 = 17.0;
/// Columns of devices that have something to do are at least as wide.
const COLUMN_WIDTH: f32 = 170.0;
/// Others have room for their name and numbers, and for cards to be dropped on.
const IDLE_WIDTH: f32 = 100.0;

/// Where the columns of devices are in this frame.
#[derive(Clone, Copy)]
struct Columns<'a> {
    body: Rect,
    /// Left edge of each, from that of the body, and the right edge of the last.
    bounds: &'a [f32],
}

impl Columns<'_> {
    /// The left edge of a device's column; behind the last its right edge, as for devices that there are not.
    fn left(&self, device: usize) -> f32 {
        let bound = self.bounds.get(device).or(self.bounds.last());
        self.body.left() + bound.copied().unwrap_or(0.0)
    }

    fn right(&self, device: usize) -> f32 {
        self.left(device.saturating_add(1))
    }

    fn width(&self, device: usize) -> f32 {
        self.right(device) - self.left(device)
    }

    /// The device under a point of the window.
    fn device(&self, x: f32) -> Option<usize> {
        let right = self.bounds.partition_point(|bound| *bound <= x - self.body.left());
        right.checked_sub(1).filter(|device| device + 1 < self.bounds.len())
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
    let bounds = column_bounds(&has_work(scene, program), ui.available_width());
    let width = bounds.last().copied().unwrap_or(0.0);
    let rows = rows(program, view);
    let height = rows.last().map_or(0.0, |row| row.top + row.height) + GAP;
    // What is beside the window would not be known of without a bar.
    ui.spacing_mut().scroll = ScrollStyle::thin();
    egui::ScrollArea::horizontal().show(ui, |ui| {
        let (header, _) = ui.allocate_exact_size(vec2(width, HEADER_HEIGHT), Sense::hover());
        header::draw_header(ui, scene, view, Columns { body: header, bounds: &bounds });
        ui.spacing_mut().scroll = ScrollStyle::floating();
        egui::ScrollArea::vertical().auto_shrink(false).show(ui, |ui| {
            let size = vec2(width, height.max(ui.available_height()));
            let (body, _) = ui.allocate_exact_size(size, Sense::hover());
            let shown = Columns { body, bounds: &bounds };
            draw_columns(ui, scene.devices.len(), shown);
            edges::draw_edges(ui, program, &rows, shown);
            let largest = rows.iter().map(|row| row_nanos(program, row)).max().unwrap_or(1);
            for row in &rows {
                card::draw_row(ui, scene, view, program, row, shown, largest);
            }
        });
    });
}

/// For each device whether it computes a block of the program, or sends or receives something.
fn has_work(scene: &Scene, program: &Program) -> Vec<bool> {
    let mut has_work = vec![false; scene.devices.len()];
    let computing = program.blocks.iter().flat_map(|block| block.devices.iter().copied());
    let moving = program.edges.iter().flat_map(|edge| [edge.from, edge.to]);
    for device in computing.chain(moving) {
        if let Some(place) = has_work.get_mut(device) {
            *place = true;
        }
    }
    has_work
}

/// Left edges of columns that fill the width together, and the right edge of the last. Devices without work take little
/// of it beside others.
fn column_bounds(has_work: &[bool], width: f32) -> Vec<f32> {
    let working = has_work.iter().filter(|works| **works).count();
    let idle = has_work.len() - working;
    let (wide, narrow) = if working == 0 {
        (0.0, (width / idle.max(1) as f32).floor().max(IDLE_WIDTH))
    } else {
        let rest = width - IDLE_WIDTH * idle as f32;
        ((rest / working as f32).floor().max(COLUMN_WIDTH), IDLE_WIDTH)
    };
    let mut bounds = vec![0.0];
    let mut right = 0.0;
    for &works in has_work {
        right += if works { wide } else { narrow };
        bounds.push(right);
    }
    bounds
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

fn draw_columns(ui: &Ui, count: usize, columns: Columns<'_>) {
    let color = ui.visuals().widgets.noninteractive.bg_stroke.color;
    let line = Stroke::new(1.0, color.gamma_multiply(0.6));
    for column in 1..count {
        ui.painter().vline(columns.left(column), columns.body.y_range(), line);
    }
}

#[cfg(test)]
mod tests {
    use egui::pos2;

    use super::*;

    #[test]
    fn devices_without_work_have_narrow_columns() {
        let six_of_eight = [true, true, true, true, true, true, false, false];
        let bounds = column_bounds(&six_of_eight, 1280.0);
        assert_eq!(bounds[..3], [0.0, 180.0, 360.0]);
        assert_eq!(bounds[6..], [1080.0, 1180.0, 1280.0]);
        // Where there is no room for all, the rest is scrolled to.
        assert_eq!(column_bounds(&[true; 6], 800.0)[6], 6.0 * COLUMN_WIDTH);
        assert_eq!(column_bounds(&[false, false], 800.0), [0.0, 400.0, 800.0]);
        assert_eq!(column_bounds(&[true, true], 800.0), [0.0, 400.0, 800.0]);
        assert_eq!(column_bounds(&[], 800.0), [0.0]);
    }

    #[test]
    fn a_point_is_in_the_column_that_is_drawn_there() {
        let body = Rect::from_min_size(pos2(10.0, 0.0), vec2(300.0, 50.0));
        let columns = Columns { body, bounds: &[0.0, 200.0, 300.0] };
        let devices = [5.0, 10.0, 209.0, 210.0, 309.0, 310.0].map(|x| columns.device(x));
        assert_eq!(devices, [None, Some(0), Some(0), Some(1), Some(1), None]);
        assert_eq!((columns.left(2), columns.width(1)), (310.0, 100.0));
    }
}
