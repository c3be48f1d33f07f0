//! The heads of the columns: what each device has, and what it has to do.

use egui::{Align2, Color32, FontId, Rect, Sense, Stroke, StrokeKind, Ui, vec2};

use super::Columns;
use crate::quantity;
use crate::scene::{Device, Scene, Summary};
use crate::text::{fitting, text_width, text_within};
use crate::theme;
use crate::view::{Selection, View, Wish};

pub(super) fn draw_header(ui: &mut Ui, scene: &Scene, view: &mut View, columns: Columns<'_>) {
    let Some(summary) = scene.summaries.get(view.program) else { return };
    for (number, device) in scene.devices.iter().enumerate() {
        let column = columns.left(number)..=columns.right(number);
        let cell = Rect::from_x_y_ranges(column, columns.body.y_range());
        let cell = cell.shrink2(vec2(5.0, 2.0));
        let response = ui.interact(cell, ui.scope_id().with(("device", number)), Sense::click());
        response.widget_info(|| {
            egui::WidgetInfo::labeled(egui::Role::Button, true, format!("device {}", device.name))
        });
        if response.clicked() {
            view.selection = Selection::Device(number);
        }
        device_menu(&response, scene, view, number);
        let bottleneck = summary.is_bottleneck(number) && scene.devices.len() > 1;
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
        let room = cell.width() - 16.0;
        let kind = if device.is_gpu { "GPU" } else { "CPU" };
        // A cut word is worse than none: the frame and the color of the text tell the bottleneck, too.
        let alarm_width = text_width(ui, ALARM, 12.0) + 8.0;
        let alarms = bottleneck && text_width(ui, &device.name, 15.0) + alarm_width <= room;
        let name_room = if alarms { room - alarm_width } else { room };
        let names = [format!("{} · {kind}", device.name), device.name.clone()];
        painter.text(
            cell.min + vec2(8.0, 5.0),
            Align2::LEFT_TOP,
            fitting(ui, names, 15.0, name_room),
            FontId::proportional(15.0),
            theme::strong(ui),
        );
        if alarms {
            painter.text(
                cell.right_top() + vec2(-8.0, 7.0),
                Align2::RIGHT_TOP,
                ALARM,
                FontId::proportional(12.0),
                theme::alarm(ui),
            );
        }
        let text = fitting(ui, work_texts(summary, number), 11.0, room);
        text_within(
            ui,
            &painter,
            cell.min + vec2(8.0, 33.0),
            room,
            &text,
            if bottleneck { theme::alarm(ui) } else { ui.visuals().text_color() },
        );
        let bar = Rect::from_min_size(cell.min + vec2(8.0, 44.0), vec2(room, 12.0));
        draw_memory_bar(ui, &painter, bar, device, color);
        let text = fitting(ui, memory_texts(device), 11.0, room);
        let at = cell.min + vec2(8.0, 67.0);
        text_within(ui, &painter, at, room, &text, theme::weak(ui));
    }
}

/// What marks the device that most of a run's time goes to.
const ALARM: &str = "BOTTLENECK";

/// A device's part of the critical path; or all of its work where that is much more: it works beside others then, and
/// which of them that path is in is chance. The shorter ones are for narrow columns.
fn work_texts(summary: &Summary, device: usize) -> [String; 2] {
    let nanos = |of: &[u64]| of.get(device).copied().unwrap_or(0) as f64;
    let (critical, busy) = (nanos(&summary.critical_nanos), nanos(&summary.busy_nanos));
    let run = summary.critical_end.max(1) as f64;
    let share = |nanos: f64| quantity::share(nanos / run);
    let is_shared = summary.as_busy.contains(&device);
    if is_shared || summary.is_beside(device) {
        let text = format!("{} busy", share(busy));
        [format!("{text}, {} critical", share(critical)), text]
    } else {
        let text = quantity::nanos(critical);
        [format!("{text} of a run ({})", share(critical)), format!("{text} ({})", share(critical))]
    }
}

/// What a device holds, in fewer and fewer words.
fn memory_texts(device: &Device) -> [String; 4] {
    let used = quantity::bytes(device.used_bytes());
    let capacity = quantity::bytes(device.capacity_bytes);
    let free = quantity::bytes(device.free_bytes());
    [
        format!("{used} of {capacity} used, {free} free"),
        format!("{used} of {capacity}, {free} free"),
        format!("{used} of {capacity}"),
        format!("{free} free"),
    ]
}

/// Weights, caches and buffers against capacity.
pub(crate) fn draw_memory_bar(
    ui: &Ui,
    painter: &egui::Painter,
    bar: Rect,
    device: &Device,
    color: Color32,
) {
    painter.rect_filled(bar, 2.0, ui.visuals().extreme_bg_color);
    let mut left = bar.left();
    let passing_bytes = [device.buffer_bytes, device.fetch_bytes, device.scratch_bytes]
        .into_iter()
        .fold(0, u64::saturating_add);
    let parts = [(device.weight_bytes, 1.0), (device.cache_bytes, 0.65), (passing_bytes, 0.4)];
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_beside_the_critical_path_is_named() {
        let summary = Summary {
            critical_nanos: vec![600_000, 0, 0],
            busy_nanos: vec![650_000, 400_000, 0],
            critical_end: 1_000_000,
            ..Summary::default()
        };
        assert_eq!(work_texts(&summary, 0), ["600 µs of a run (60 %)", "600 µs (60 %)"]);
        assert_eq!(work_texts(&summary, 1), ["40 % busy, 0.0 % critical", "40 % busy"]);
    }

    #[test]
    fn what_is_as_busy_is_told_by_its_work() {
        let summary = Summary {
            critical_nanos: vec![900_000, 10_000, 0],
            busy_nanos: vec![920_000, 910_000, 0],
            critical_end: 1_000_000,
            as_busy: vec![0, 1],
            ..Summary::default()
        };
        assert_eq!(work_texts(&summary, 0)[0], "92 % busy, 90 % critical");
        assert_eq!(work_texts(&summary, 1)[0], "91 % busy, 1.0 % critical");
    }
}
