//! The heads of the columns: what each device has, and what it has to do.

use egui::{Align2, Color32, FontId, Rect, Sense, Stroke, StrokeKind, Ui, vec2};

use crate::quantity;
use crate::scene::{Bottleneck, Scene, Summary};
use crate::text::text_within;
use crate::theme;
use crate::view::{Selection, View, Wish};

pub(super) fn draw_header(ui: &mut Ui, scene: &Scene, view: &mut View, rect: Rect, width: f32) {
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
        let bottleneck = summary.bottleneck == Some(Bottleneck::Device(number));
        let bottleneck = bottleneck && scene.devices.len() > 1;
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
        let text = work_text(summary, number);
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

/// A device's part of the critical path, and all of its work where that is much more: it works beside others then.
fn work_text(summary: &Summary, device: usize) -> String {
    let nanos = |of: &[u64]| of.get(device).copied().unwrap_or(0) as f64;
    let (critical, busy) = (nanos(&summary.critical_nanos), nanos(&summary.busy_nanos));
    let run = summary.critical_end.max(1) as f64;
    let share = |nanos: f64| quantity::share(nanos / run);
    let text = format!("{} of a run ({})", quantity::nanos(critical), share(critical));
    if busy - critical > run / 10.0 { format!("{text}, {} busy", share(busy)) } else { text }
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
        assert_eq!(work_text(&summary, 0), "600 µs of a run (60 %)");
        assert_eq!(work_text(&summary, 1), "0 ns of a run (0.0 %), 40 % busy");
    }
}
