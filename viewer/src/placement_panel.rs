//! The layers of the model, one column for each device.
//!
//! Alike layers are folded into one card; what passes between devices is drawn between cards.

use egui::{
    Align2, Color32, CursorIcon, FontId, Pos2, Rect, Sense, Stroke, StrokeKind, Ui, pos2, vec2,
};

use crate::quantity;
use crate::scene::{Block, Group, Program, Scene};
use crate::theme::{self, Coloring};
use crate::timeline_panel::text_within;
use crate::view::{Selection, View, Wish};

const HEADER_HEIGHT: f32 = 84.0;
const CARD_HEIGHT: f32 = 70.0;
const GAP: f32 = 24.0;
const STEP_HEIGHT: f32 = 17.0;

/// One row of cards: blocks `first..=last`, drawn as one.
struct Row {
    first: usize,
    last: usize,
    is_group: bool,
    top: f32,
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
        draw_header(ui, scene, view, header, width);
        egui::ScrollArea::vertical().auto_shrink(false).show(ui, |ui| {
            let size = vec2(width * columns as f32, height.max(ui.available_height()));
            let (body, _) = ui.allocate_exact_size(size, Sense::hover());
            draw_columns(ui, columns, body, width);
            draw_edges(ui, program, &rows, body, width);
            let largest = rows.iter().map(|row| row_nanos(program, row)).max().unwrap_or(1);
            for row in &rows {
                draw_row(ui, scene, view, program, row, body, width, largest);
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
        rows.push(Row { first, last, is_group, top, height: CARD_HEIGHT + more });
        top += CARD_HEIGHT + more + GAP;
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
    program.blocks[row.first..=row.last].iter().map(|block| block.predicted_nanos).sum()
}

fn draw_header(ui: &mut Ui, scene: &Scene, view: &mut View, rect: Rect, width: f32) {
    let Some(summary) = scene.summaries.get(view.program) else { return };
    for (number, device) in scene.devices.iter().enumerate() {
        let cell = Rect::from_min_size(
            rect.min + vec2(width * number as f32, 0.0),
            vec2(width, rect.height()),
        );
        let cell = cell.shrink2(vec2(5.0, 2.0));
        let response = ui.interact(cell, ui.scope_id().with(("device", number)), Sense::click());
        response.widget_info(|| {
            egui::WidgetInfo::labeled(egui::Role::Button, true, format!("device {}", device.name))
        });
        if response.clicked() {
            view.selection = Selection::Device(number);
        }
        device_menu(&response, scene, view, number);
        let bottleneck = summary.bottleneck == Some(number) && scene.devices.len() > 1;
        let color = theme::device(scene, number);
        let selected = view.selection == Selection::Device(number);
        let edge = if bottleneck {
            theme::alarm(ui)
        } else if selected {
            theme::strong(ui)
        } else {
            color
        };
        ui.painter().rect(
            cell,
            4.0,
            theme::tint(ui, color, 0.18),
            Stroke::new(if bottleneck || selected { 2.0 } else { 1.0 }, edge),
            StrokeKind::Inside,
        );
        let painter = ui.painter().with_clip_rect(cell.intersect(ui.clip_rect()));
        let kind = if device.is_gpu { "GPU" } else { "CPU" };
        painter.text(
            cell.min + vec2(8.0, 5.0),
            Align2::LEFT_TOP,
            format!("{} · {kind}", device.name),
            FontId::proportional(15.0),
            theme::strong(ui),
        );
        if bottleneck {
            painter.text(
                cell.right_top() + vec2(-8.0, 7.0),
                Align2::RIGHT_TOP,
                "BOTTLENECK",
                FontId::proportional(12.0),
                theme::alarm(ui),
            );
        }
        let nanos = summary.critical_nanos.get(number).copied().unwrap_or(0);
        let share = nanos as f64 / summary.critical_end.max(1) as f64;
        let text =
            format!("{} of a run ({})", quantity::nanos(nanos as f64), quantity::share(share));
        text_within(
            ui,
            &painter,
            cell.min + vec2(8.0, 33.0),
            cell.width() - 16.0,
            &text,
            if bottleneck { theme::alarm(ui) } else { ui.visuals().text_color() },
        );
        let bar = Rect::from_min_size(cell.min + vec2(8.0, 44.0), vec2(cell.width() - 16.0, 12.0));
        draw_memory_bar(ui, &painter, bar, device, color);
        let text = format!(
            "{} of {} used, {} free",
            quantity::bytes(device.used_bytes()),
            quantity::bytes(device.capacity_bytes),
            quantity::bytes(device.free_bytes())
        );
        text_within(
            ui,
            &painter,
            cell.min + vec2(8.0, 67.0),
            cell.width() - 16.0,
            &text,
            theme::weak(ui),
        );
    }
}

/// Weights, caches and buffers against capacity.
pub(crate) fn draw_memory_bar(
    ui: &Ui,
    painter: &egui::Painter,
    bar: Rect,
    device: &crate::scene::Device,
    color: Color32,
) {
    painter.rect_filled(bar, 2.0, ui.visuals().extreme_bg_color);
    let mut left = bar.left();
    let parts =
        [(device.weight_bytes, 1.0), (device.cache_bytes, 0.65), (device.buffer_bytes, 0.4)];
    for (bytes, strength) in parts {
        let width = bar.width() * (bytes as f64 / device.capacity_bytes.max(1) as f64) as f32;
        let right = (left + width).min(bar.right());
        painter.rect_filled(
            Rect::from_x_y_ranges(left..=right, bar.y_range()),
            0.0,
            theme::tint(ui, color, strength),
        );
        left = right;
    }
    painter.rect_stroke(bar, 2.0, Stroke::new(1.0, theme::weak(ui)), StrokeKind::Inside);
}

fn device_menu(response: &egui::Response, scene: &Scene, view: &mut View, device: usize) {
    let at = response.rect.center_bottom();
    response.context_menu(|ui| {
        let name = scene.device_name(device);
        ui.label(format!("What if {name} …"));
        if ui.button("had twice the memory").clicked() {
            view.wish = Some((Wish::Memory { device, factor: 2 }, at));
        }
        if ui.button("were not there").clicked() {
            view.wish = Some((Wish::Without { device }, at));
        }
    });
}

fn draw_columns(ui: &Ui, columns: usize, body: Rect, width: f32) {
    let line =
        Stroke::new(1.0, ui.visuals().widgets.noninteractive.bg_stroke.color.gamma_multiply(0.6));
    for column in 1..columns {
        ui.painter().vline(body.left() + width * column as f32, body.y_range(), line);
    }
}

/// The stretch of a row that a card takes: from its first device's column to its last's.
fn card_rect(block: &Block, row: &Row, body: Rect, width: f32) -> Rect {
    let first = block.devices.first().copied().unwrap_or(0);
    let last = block.devices.last().copied().unwrap_or(0);
    let left = body.left() + width * first as f32 + 6.0;
    let right = body.left() + width * (last + 1) as f32 - 6.0;
    Rect::from_min_max(
        pos2(left, body.top() + row.top),
        pos2(right, body.top() + row.top + row.height),
    )
}

#[expect(
    clippy::too_many_arguments,
    reason = "one row of one frame, told apart from its neighbours"
)]
fn draw_row(
    ui: &mut Ui,
    scene: &Scene,
    view: &mut View,
    program: &Program,
    row: &Row,
    body: Rect,
    width: f32,
    largest: u64,
) {
    let block = &program.blocks[row.first];
    let rect = card_rect(block, row, body, width);
    if !ui.is_rect_visible(rect) {
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
        select_at(view, program, row, rect, &response);
    }
    block_menu(&response, scene, view, row);
    drag(ui, scene, view, row, &response, body, width, &title);

    let average = mean_error(program, row);
    let color = match view.coloring {
        Coloring::Device => {
            block.devices.first().map_or(Color32::GRAY, |&device| theme::device(scene, device))
        }
        Coloring::Kind => {
            let most = block.steps.iter().max_by_key(|&&step| program.steps[step].predicted_nanos);
            most.map_or(Color32::GRAY, |&step| theme::kind(program.steps[step].kind))
        }
        Coloring::Time => theme::heat(row_nanos(program, row) as f32 / largest.max(1) as f32),
        Coloring::Error => theme::error(average),
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
    ui.painter().rect(rect, 5.0, theme::tint(ui, color, 0.36), stroke, StrokeKind::Inside);
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
    text_within(
        ui,
        &painter,
        pos2(left, rect.top() + 29.0),
        room,
        &numbers(program, row, average),
        ui.visuals().text_color(),
    );
    let mut job = egui::text::LayoutJob::simple(
        because(block),
        FontId::proportional(11.0),
        theme::weak(ui),
        room,
    );
    job.wrap.max_rows = 2;
    let galley = ui.fonts_mut(|fonts| fonts.layout_job(job));
    painter.galley(pos2(left, rect.top() + 38.0), galley, theme::weak(ui));
    if !row.is_group && view.opened.contains(&row.first) {
        draw_steps(ui, view, program, block, rect, body, width);
    }
}

fn title(program: &Program, row: &Row) -> String {
    let (first, last) = (&program.blocks[row.first], &program.blocks[row.last]);
    match (first.number, last.number) {
        (Some(from), Some(to)) if row.is_group => format!("layers {from}–{to}, alike"),
        _ => first.title(),
    }
}

/// Time and bytes of one block, or of all blocks of a group.
fn numbers(program: &Program, row: &Row, error: Option<f64>) -> String {
    let blocks = &program.blocks[row.first..=row.last];
    let bytes = blocks.iter().map(|block| block.weight_bytes).fold(0, u64::saturating_add);
    let mut text = quantity::nanos(row_nanos(program, row) as f64);
    if blocks.len() > 1 {
        text = format!(
            "{} × {} = {text}",
            blocks.len(),
            quantity::nanos(blocks[0].predicted_nanos as f64)
        );
    }
    if let Some(error) = error {
        text += &format!(", measured {}", quantity::change(error));
    }
    if bytes > 0 {
        text += &format!(" · {}", quantity::bytes(bytes));
    }
    for (verb, bytes, count) in &blocks[0].collectives {
        text += &format!(" · {count} × {verb} of {}", quantity::bytes(*bytes));
    }
    text
}

fn mean_error(program: &Program, row: &Row) -> Option<f64> {
    let blocks = &program.blocks[row.first..=row.last];
    let measured: Option<u64> = blocks.iter().map(|block| block.measured_nanos).sum();
    let predicted = row_nanos(program, row);
    (predicted > 0).then_some(measured? as f64 / predicted as f64 - 1.0)
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
fn select_at(view: &mut View, program: &Program, row: &Row, rect: Rect, response: &egui::Response) {
    view.selection = Selection::Blocks(row.first, row.last);
    view.scroll_to_selection = true;
    let opened = !row.is_group && view.opened.contains(&row.first);
    if let (true, Some(at)) = (opened, response.interact_pointer_pos()) {
        let line = ((at.y - rect.top() - CARD_HEIGHT) / STEP_HEIGHT).floor();
        let block = &program.blocks[row.first];
        let part = (at.x - rect.left()) / rect.width();
        let (first, last) = (block.devices.first(), block.devices.last());
        if let (true, Some(first), Some(last)) = (line >= 0.0, first, last) {
            let device = first + (part * (last - first + 1) as f32) as usize;
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
    rect: Rect,
    body: Rect,
    width: f32,
) {
    let selected = view.selection;
    for &device in &block.devices {
        let left = body.left() + width * device as f32 + 14.0;
        let mine = block.steps.iter().filter(|&&step| program.steps[step].device == device);
        for (line, &step) in mine.enumerate() {
            let row = &program.steps[step];
            let top = rect.top() + CARD_HEIGHT + line as f32 * STEP_HEIGHT;
            let place = Rect::from_min_size(pos2(left, top), vec2(width - 28.0, STEP_HEIGHT - 1.0));
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
#[expect(
    clippy::too_many_arguments,
    reason = "one row of one frame, told apart from its neighbours"
)]
fn drag(
    ui: &Ui,
    scene: &Scene,
    view: &mut View,
    row: &Row,
    response: &egui::Response,
    body: Rect,
    width: f32,
    title: &str,
) {
    let Some(at) = response.interact_pointer_pos() else { return };
    let column = ((at.x - body.left()) / width).floor();
    let target =
        (column >= 0.0 && (column as usize) < scene.devices.len()).then_some(column as usize);
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
                body.left() + width * device as f32..=body.left() + width * (device + 1) as f32,
                body.y_range(),
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

/// What passes between rows: one line for each pair of rows and devices, with bytes and number.
fn draw_edges(ui: &Ui, program: &Program, rows: &[Row], body: Rect, width: f32) {
    let row_of = |block: usize| rows.iter().position(|row| (row.first..=row.last).contains(&block));
    let mut sums = std::collections::BTreeMap::<(usize, usize, usize, usize), (u64, usize)>::new();
    for edge in &program.edges {
        let (Some(from), Some(to)) = (row_of(edge.from_block), row_of(edge.to_block)) else {
            continue;
        };
        let sum = sums.entry((from, to, edge.from, edge.to)).or_default();
        sum.0 = sum.0.saturating_add(edge.bytes);
        sum.1 += 1;
    }
    let color = theme::kind(crate::scene::Kind::Transfer);
    let column = |device: usize| body.left() + width * (device as f32 + 0.5);
    for ((from, to, sender, receiver), (bytes, count)) in sums {
        let (start, end) = if from == to {
            let y = body.top() + rows[from].top + rows[from].height + 5.0;
            (pos2(column(sender), y), pos2(column(receiver), y))
        } else {
            let (upper, lower) = (&rows[from], &rows[to]);
            let start = body.top() + upper.top + if from < to { upper.height } else { 0.0 };
            let end = body.top() + lower.top + if from < to { 0.0 } else { lower.height };
            (pos2(column(sender), start), pos2(column(receiver), end))
        };
        if !ui.is_rect_visible(Rect::from_two_pos(start, end).expand(4.0)) {
            continue;
        }
        let middle = (start.y + end.y) / 2.0;
        let bends = [start, pos2(start.x, middle), pos2(end.x, middle), end];
        ui.painter().line(bends.to_vec(), Stroke::new(2.0, color));
        ui.painter().arrow(
            end - vec2(0.0, if from == to { 0.0 } else { 5.0 }),
            if from == to { vec2((end.x - start.x).signum() * 5.0, 0.0) } else { vec2(0.0, 5.0) },
            Stroke::new(2.0, color),
        );
        let text = if count == 1 {
            quantity::bytes(bytes)
        } else {
            format!("{count} × {}", quantity::bytes(bytes / count as u64))
        };
        let galley =
            ui.painter().layout_no_wrap(text, FontId::proportional(11.5), theme::strong(ui));
        let place = Rect::from_center_size(
            pos2((start.x + end.x) / 2.0, middle),
            galley.size() + vec2(8.0, 2.0),
        );
        ui.painter().rect(
            place,
            3.0,
            ui.visuals().panel_fill,
            Stroke::new(1.0, color),
            StrokeKind::Inside,
        );
        ui.painter().galley(place.min + vec2(4.0, 1.0), galley, theme::strong(ui));
    }
}
