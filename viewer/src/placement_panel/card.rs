//! One card: a block, or several that are alike.

use egui::{
    Align2, Color32, CursorIcon, FontId, Pos2, Rect, Sense, Stroke, StrokeKind, Ui, pos2, vec2,
};

use super::{Columns, HOME_HEIGHT, Row, STEP_HEIGHT, row_nanos};
use crate::quantity;
use crate::scene::{Block, Program, Scene};
use crate::text::{fitting, text_within};
use crate::theme::{self, Coloring};
use crate::view::{Selection, View, Wish};

/// The stretch of a row that a card takes: from its first device's column to its last's.
fn card_rect(block: &Block, row: &Row, columns: Columns<'_>) -> Rect {
    let first = block.devices.first().copied().unwrap_or(0);
    let last = block.devices.last().copied().unwrap_or(0);
    let top = columns.body.top() + row.top;
    Rect::from_x_y_ranges(
        columns.left(first) + 6.0..=columns.right(last) - 6.0,
        top..=top + row.height,
    )
}

pub(super) fn draw_row(
    ui: &mut Ui,
    scene: &Scene,
    view: &mut View,
    program: &Program,
    row: &Row,
    columns: Columns<'_>,
    largest: u64,
) {
    let block = &program.blocks[row.first];
    let rect = card_rect(block, row, columns);
    if view.scroll_to_selection && is_selected(view, program, row) {
        // With its neighbours, so that it stands in its place.
        ui.scroll_to_rect(rect.expand2(vec2(0.0, rect.height())), None);
        view.scroll_to_selection = false;
    }
    // A plan may name devices that there are not.
    if !rect.is_positive() || !ui.is_rect_visible(rect) {
        return;
    }
    let response = ui.interact(
        rect,
        ui.scope_id().with(("block", row.first, row.is_group)),
        Sense::click_and_drag(),
    );
    let title = title(program, row);
    response.widget_info(|| egui::WidgetInfo::labeled(egui::Role::Button, true, &title));
    let fold = Rect::from_min_size(rect.min + vec2(3.0, 4.0), vec2(18.0, 18.0));
    if response.clicked() {
        let on_fold = response.interact_pointer_pos().is_some_and(|at| fold.contains(at));
        if on_fold || response.double_clicked() {
            toggle(program, view, row);
        }
        select_at(view, program, row, rect, &response, columns);
    }
    block_menu(&response, scene, view, row);
    drag(ui, scene, view, row, &response, columns, &title);

    let color = match view.coloring {
        Coloring::Device => {
            block.devices.first().map_or(Color32::GRAY, |&device| theme::device(scene, device))
        }
        Coloring::Kind => {
            let most = block.steps.iter().max_by_key(|&&step| program.steps[step].predicted_nanos);
            most.map_or(Color32::GRAY, |&step| theme::kind(program.steps[step].kind))
        }
        Coloring::Time => theme::heat(row_nanos(program, row) as f32 / largest.max(1) as f32),
        Coloring::Error => theme::error(program.blocks_error(row.first, row.last)),
    };
    let selected = is_selected(view, program, row);
    let stroke =
        if selected { Stroke::new(2.5, theme::strong(ui)) } else { Stroke::new(1.0, color) };
    if row.is_group {
        // A second sheet behind says that there are several.
        ui.painter().rect(
            rect.translate(vec2(3.0, 3.0)),
            5.0,
            theme::tint(ui, color, 0.2),
            Stroke::new(1.0, color),
            StrokeKind::Inside,
        );
    }
    ui.painter().rect_filled(rect, 5.0, theme::tint(ui, color, 0.36));
    if view.coloring == Coloring::Device && block.devices.len() > 1 {
        for &device in &block.devices {
            let column = columns.left(device)..=columns.right(device);
            let part = Rect::from_x_y_ranges(column, rect.y_range()).intersect(rect);
            ui.painter().rect_filled(
                part,
                0.0,
                theme::tint(ui, theme::device(scene, device), 0.36),
            );
        }
    }
    ui.painter().rect_stroke(rect, 5.0, stroke, StrokeKind::Inside);
    let painter = ui.painter().with_clip_rect(rect.intersect(ui.clip_rect()));
    let folded = row.is_group || !view.opened.contains(&row.first);
    triangle(&painter, fold.center(), folded, theme::strong(ui));
    let left = rect.left() + 22.0;
    let room = rect.right() - left - 8.0;
    let mut job = egui::text::LayoutJob::simple_singleline(
        title,
        FontId::proportional(13.5),
        theme::strong(ui),
    );
    job.wrap = egui::text::TextWrapping::truncate_at_width(room);
    let galley = ui.fonts_mut(|fonts| fonts.layout_job(job));
    painter.galley(pos2(left, rect.top() + 4.0), galley, theme::strong(ui));
    let numbers = fitting(ui, numbers(program, row), 11.0, room);
    let at = pos2(left, rect.top() + 29.0);
    text_within(ui, &painter, at, room, &numbers, ui.visuals().text_color());
    let home = scene.home_text(view.program, &block.steps);
    let at = pos2(left, rect.top() + 29.0 + HOME_HEIGHT);
    text_within(ui, &painter, at, room, &home, ui.visuals().text_color());
    let mut job = egui::text::LayoutJob::simple(
        because(block),
        FontId::proportional(11.0),
        theme::weak(ui),
        room,
    );
    job.wrap.max_rows = 2;
    let galley = ui.fonts_mut(|fonts| fonts.layout_job(job));
    if galley.elided {
        response.on_hover_text_at_pointer(because(block));
    }
    let at = pos2(left, rect.top() + row.head - 32.0);
    painter.galley(at, galley, theme::weak(ui));
    if !row.is_group && view.opened.contains(&row.first) {
        draw_steps(ui, view, program, block, rect.top() + row.head, columns);
    }
}

fn title(program: &Program, row: &Row) -> String {
    let (first, last) = (&program.blocks[row.first], &program.blocks[row.last]);
    match (first.number, last.number) {
        (Some(from), Some(to)) if row.is_group => format!("layers {from}–{to}, alike"),
        _ => first.title(),
    }
}

/// Time and bytes of a row; the shorter text leaves it to the details what an error leaves out.
fn numbers(program: &Program, row: &Row) -> [String; 2] {
    let (first, last) = (row.first, row.last);
    let short = program.blocks_error(first, last).map(quantity::change);
    [program.blocks_error_text(first, last), short].map(|error| numbers_with(program, row, error))
}

/// Time and bytes of one block, or of all blocks of a group.
fn numbers_with(program: &Program, row: &Row, error: Option<String>) -> String {
    let blocks = &program.blocks[row.first..=row.last];
    let bytes = blocks.iter().map(|block| block.weight_bytes).fold(0, u64::saturating_add);
    let mut text = quantity::nanos(row_nanos(program, row) as f64);
    if blocks.len() > 1 {
        let mean = row_nanos(program, row) as f64 / blocks.len() as f64;
        text = format!("{} × {} = {text}", blocks.len(), quantity::nanos(mean));
    }
    if let Some(error) = error {
        text += &format!(", measured {error}");
    }
    if bytes > 0 {
        text += &format!(" · {}", quantity::bytes(bytes));
    }
    for (verb, bytes, count) in &blocks[0].collectives {
        text += &format!(" · {count} × {verb} of {}", quantity::bytes(*bytes));
    }
    text
}

fn because(block: &Block) -> String {
    match &block.runner_up {
        Some(other) if block.limit.is_some() => {
            format!("Why here: {}; better: {other}", block.cause)
        }
        Some(other) => format!("Why here: {}; next best: {other}", block.cause),
        None => format!("Why here: {}", block.cause),
    }
}

fn triangle(painter: &egui::Painter, at: Pos2, folded: bool, color: Color32) {
    let points = if folded {
        vec![at + vec2(-3.0, -5.0), at + vec2(4.0, 0.0), at + vec2(-3.0, 5.0)]
    } else {
        vec![at + vec2(-5.0, -3.0), at + vec2(5.0, -3.0), at + vec2(0.0, 4.0)]
    };
    painter.add(egui::Shape::convex_polygon(points, color, Stroke::NONE));
}

fn toggle(program: &Program, view: &mut View, row: &Row) {
    if row.is_group {
        view.unfolded.insert(row.first);
    } else if !view.opened.remove(&row.first) {
        view.opened.insert(row.first);
    } else if let Some(group) =
        program.groups.iter().find(|g| (g.first..=g.last).contains(&row.first))
        && (group.first..=group.last).all(|block| !view.opened.contains(&block))
    {
        // Closing the last open block of a group folds it again.
        view.unfolded.remove(&group.first);
    }
}

/// Selects the step under the pointer, else the blocks of the row.
fn select_at(
    view: &mut View,
    program: &Program,
    row: &Row,
    rect: Rect,
    response: &egui::Response,
    columns: Columns<'_>,
) {
    view.selection = Selection::Blocks(row.first, row.last);
    view.scroll_to_selection = true;
    let opened = !row.is_group && view.opened.contains(&row.first);
    if let (true, Some(at)) = (opened, response.interact_pointer_pos()) {
        let line = ((at.y - rect.top() - row.head) / STEP_HEIGHT).floor();
        let block = &program.blocks[row.first];
        if let (true, Some(device)) = (line >= 0.0, columns.device(at.x)) {
            let mut steps =
                block.steps.iter().filter(|&&step| program.steps[step].device == device);
            if let Some(&step) = steps.nth(line as usize) {
                view.selection = Selection::Step(step, view.run);
            }
        }
    }
}

fn is_selected(view: &View, program: &Program, row: &Row) -> bool {
    match view.selection {
        Selection::Nothing => false,
        Selection::Step(step, _) => {
            program.steps.get(step).is_some_and(|step| (row.first..=row.last).contains(&step.block))
        }
        Selection::Blocks(first, last) => row.first <= last && first <= row.last,
        Selection::Device(device) => program.blocks[row.first].devices.contains(&device),
    }
}

fn draw_steps(
    ui: &Ui,
    view: &View,
    program: &Program,
    block: &Block,
    steps_top: f32,
    columns: Columns<'_>,
) {
    let selected = view.selection;
    for &device in &block.devices {
        let left = columns.left(device) + 14.0;
        let mine = block.steps.iter().filter(|&&step| program.steps[step].device == device);
        for (line, &step) in mine.enumerate() {
            let row = &program.steps[step];
            let top = steps_top + line as f32 * STEP_HEIGHT;
            let size = vec2(columns.width(device) - 28.0, STEP_HEIGHT - 1.0);
            let place = Rect::from_min_size(pos2(left, top), size);
            let painter = ui.painter().with_clip_rect(place.intersect(ui.clip_rect()));
            painter.rect_filled(place, 2.0, theme::tint(ui, theme::kind(row.kind), 0.35));
            if selected == Selection::Step(step, view.run)
                || matches!(selected, Selection::Step(s, _) if s == step)
            {
                painter.rect_stroke(
                    place,
                    2.0,
                    Stroke::new(1.5, theme::strong(ui)),
                    StrokeKind::Inside,
                );
            }
            let short =
                row.name.strip_prefix(&block.name).unwrap_or(&row.name).trim_start_matches('.');
            let text = format!("{} {short}", row.verb);
            text_within(
                ui,
                &painter,
                place.left_center() + vec2(5.0, 0.0),
                place.width() - 66.0,
                &text,
                theme::strong(ui),
            );
            painter.text(
                place.right_center() - vec2(5.0, 0.0),
                Align2::RIGHT_CENTER,
                quantity::nanos(row.predicted_nanos as f64),
                FontId::proportional(11.0),
                theme::strong(ui),
            );
        }
    }
}

fn block_menu(response: &egui::Response, scene: &Scene, view: &mut View, row: &Row) {
    let at = response.rect.center();
    response.context_menu(|ui| {
        ui.label("What if it ran on …");
        for device in 0..scene.devices.len() {
            if ui.button(scene.device_name(device)).clicked() {
                view.wish = Some((Wish::Move { first: row.first, last: row.last, device }, at));
            }
        }
    });
}

/// Shows the card under the pointer while it is dragged, and asks for the move where it is dropped.
fn drag(
    ui: &Ui,
    scene: &Scene,
    view: &mut View,
    row: &Row,
    response: &egui::Response,
    columns: Columns<'_>,
    title: &str,
) {
    let Some(at) = response.interact_pointer_pos() else { return };
    let target = columns.device(at.x);
    if response.dragged() {
        let painter = ui
            .ctx()
            .layer_painter(egui::LayerId::new(egui::Order::Tooltip, ui.scope_id().with("dragged")));
        let text = match target {
            Some(device) => format!("{title} → {}?", scene.device_name(device)),
            None => title.to_owned(),
        };
        if let Some(device) = target {
            let column = Rect::from_x_y_ranges(
                columns.left(device)..=columns.right(device),
                columns.body.y_range(),
            );
            painter.rect(
                column.intersect(ui.clip_rect()),
                0.0,
                theme::device(scene, device).gamma_multiply(0.15),
                Stroke::new(2.0, theme::device(scene, device)),
                StrokeKind::Inside,
            );
        }
        let galley = painter.layout_no_wrap(text, FontId::proportional(13.0), theme::strong(ui));
        let place = Rect::from_min_size(at + vec2(12.0, 8.0), galley.size() + vec2(12.0, 8.0));
        painter.rect(
            place,
            4.0,
            ui.visuals().window_fill,
            Stroke::new(1.0, theme::weak(ui)),
            StrokeKind::Inside,
        );
        painter.galley(place.min + vec2(6.0, 4.0), galley, theme::strong(ui));
        ui.ctx().set_cursor_icon(CursorIcon::Grabbing);
    }
    if let (true, Some(device)) = (response.drag_stopped(), target) {
        view.selection = Selection::Blocks(row.first, row.last);
        view.wish = Some((Wish::Move { first: row.first, last: row.last, device }, at));
    }
}
