//! Bytes on each device over a run, against what the device has.

use egui::{Align2, Color32, FontId, Mesh, Rect, Sense, Stroke, StrokeKind, Ui, pos2, vec2};

use crate::quantity;
use crate::scene::{Curve, Device, Level, Scene};
use crate::text::{fitting, legend_entry};
use crate::theme;
use crate::view::{Selection, View};

const WEIGHTS: Color32 = Color32::from_rgb(86, 160, 220);
const CACHE: Color32 = Color32::from_rgb(0, 158, 115);
const ACTIVATIONS: Color32 = Color32::from_rgb(225, 195, 90);
/// Grey: it holds nothing of the model.
const SCRATCH: Color32 = Color32::from_rgb(130, 130, 130);
const STAGING: Color32 = Color32::from_rgb(225, 105, 170);

/// `run 3`, or `run 3, each as large as for 512 tokens`: a run of fewer takes less.
fn run_text(scene: &Scene, number: usize) -> String {
    let run = scene.runs.get(number);
    let program = run.and_then(|run| scene.programs.get(run.program));
    match run.zip(program) {
        Some((run, program)) if run.tokens < program.max_tokens => {
            format!("run {number}, each as large as for {} tokens", program.max_tokens)
        }
        _ => format!("run {number}"),
    }
}

/// Draws the panel.
pub fn show(ui: &mut Ui, scene: &Scene, view: &mut View) {
    let run = view.run.filter(|_| view.has_shares(scene));
    let measured = run.and_then(|run| scene.run_memory(run));
    let planned = view.program(scene).map(|program| program.memory.clone());
    let what = match run {
        Some(run) if measured.is_some() => run_text(scene, run),
        _ => "the predicted run".to_owned(),
    };
    let curves = measured.or(planned).unwrap_or_default();
    ui.horizontal_wrapped(|ui| {
        ui.label(format!(
            "Left: all bytes of each device. Right: its buffers over {what}, enlarged."
        ));
        for (color, name) in [
            (WEIGHTS, "weights"),
            (CACHE, "KV cache"),
            (ACTIVATIONS, "activations"),
            (STAGING, "staging"),
            (SCRATCH, "scratch"),
        ] {
            legend_entry(ui, color, name);
        }
    });
    let height = (ui.available_height() / scene.devices.len().max(1) as f32).clamp(74.0, 170.0);
    egui::ScrollArea::vertical().auto_shrink(false).show(ui, |ui| {
        for (number, device) in scene.devices.iter().enumerate() {
            let size = vec2(ui.available_width(), height - 4.0);
            let (rect, response) = ui.allocate_exact_size(size, Sense::click());
            if response.clicked() {
                view.selection = Selection::Device(number);
            }
            if !ui.is_rect_visible(rect) {
                continue;
            }
            // The frame of a selected device is around its words.
            let inner = rect.shrink2(vec2(0.0, 4.0));
            let half = inner.left() + inner.width() * 0.42;
            let left = Rect::from_min_max(inner.min, pos2(half - 8.0, inner.bottom()));
            let right = Rect::from_min_max(pos2(half, inner.top()), inner.max - vec2(4.0, 0.0));
            draw_whole(ui, scene, number, device, left);
            if let Some(curve) = curves.get(number) {
                draw_curve(ui, curve, right);
                if let Some(at) = response.hover_pos().filter(|at| right.contains(*at)) {
                    explain(ui, curve, right, at, &response);
                }
            }
            if view.selection == Selection::Device(number) {
                ui.painter().rect_stroke(
                    rect,
                    3.0,
                    Stroke::new(2.0, theme::strong(ui)),
                    StrokeKind::Inside,
                );
            }
        }
    });
}

/// One bar of all bytes, with what each part takes in words.
fn draw_whole(ui: &Ui, scene: &Scene, number: usize, device: &Device, rect: Rect) {
    let painter = ui.painter().with_clip_rect(rect.intersect(ui.clip_rect()));
    let full = device.used_bytes() as f64 / device.capacity_bytes.max(1) as f64;
    let over = full > 1.0;
    let (name, full) = (&device.name, quantity::share(full));
    let used = quantity::bytes(device.used_bytes());
    let capacity = quantity::bytes(device.capacity_bytes);
    let titles = [
        format!("{name} · {used} of {capacity} ({full})"),
        format!("{name} · {used} of {capacity}"),
        format!("{name} · {full}"),
    ];
    let title = fitting(ui, titles, 14.0, rect.width() - 8.0);
    let color = if over { theme::alarm(ui) } else { theme::strong(ui) };
    painter.text(
        rect.min + vec2(4.0, 4.0),
        Align2::LEFT_TOP,
        title,
        FontId::proportional(14.0),
        color,
    );
    let bar = Rect::from_min_size(rect.min + vec2(4.0, 26.0), vec2(rect.width() - 12.0, 20.0));
    painter.rect_filled(bar, 2.0, ui.visuals().extreme_bg_color);
    let scale =
        f64::from(bar.width()) / device.capacity_bytes.max(device.used_bytes()).max(1) as f64;
    let mut left = bar.left();
    for (bytes, color) in [
        (device.weight_bytes, WEIGHTS),
        (device.cache_bytes, CACHE),
        (device.buffer_bytes, ACTIVATIONS),
        (device.fetch_bytes, STAGING),
        (device.scratch_bytes, SCRATCH),
    ] {
        let right = left + (bytes as f64 * scale) as f32;
        painter.rect_filled(Rect::from_x_y_ranges(left..=right, bar.y_range()), 0.0, color);
        left = right;
    }
    let end = bar.left() + (device.capacity_bytes as f64 * scale) as f32;
    painter.vline(
        end.min(bar.right()),
        bar.expand2(vec2(0.0, 4.0)).y_range(),
        Stroke::new(2.0, if over { theme::alarm(ui) } else { theme::strong(ui) }),
    );
    painter.rect_stroke(
        bar,
        2.0,
        Stroke::new(1.0, theme::device(scene, number)),
        StrokeKind::Inside,
    );
    let parts = [
        ("weights", Some(device.weight_bytes)),
        ("KV cache", Some(device.cache_bytes)),
        ("buffers up to", Some(device.buffer_bytes)),
        ("fetched weights up to", Some(device.fetch_bytes).filter(|&bytes| bytes > 0)),
        ("scratch", Some(device.scratch_bytes).filter(|&bytes| bytes > 0)),
        ("free", Some(device.free_bytes())),
    ];
    // Lines break between parts only.
    let parts: Vec<String> = parts
        .into_iter()
        .filter_map(|(part, bytes)| Some(format!("{part} {}", quantity::bytes(bytes?))))
        .map(|part| part.replace(' ', "\u{a0}"))
        .collect();
    let parts = parts.join(" · ");
    let top = pos2(bar.left(), bar.bottom() + 4.0);
    let font = FontId::proportional(11.0);
    let mut job = egui::text::LayoutJob::simple(parts, font, theme::weak(ui), bar.width());
    // As many lines as the row has room for.
    job.wrap.max_rows = ((rect.bottom() - top.y) / 13.0).max(1.0) as usize;
    let galley = ui.fonts_mut(|fonts| fonts.layout_job(job));
    painter.galley(top, galley, theme::weak(ui));
}

/// Buffers over time: staging below, activations above it.
fn draw_curve(ui: &Ui, curve: &Curve, rect: Rect) {
    let painter = ui.painter().with_clip_rect(rect.intersect(ui.clip_rect()));
    let plot = Rect::from_min_max(rect.min + vec2(0.0, 16.0), rect.max - vec2(4.0, 14.0));
    painter.rect_filled(plot, 0.0, ui.visuals().extreme_bg_color);
    let peak = curve.peak().max(1) as f64;
    let nanos = curve.end.saturating_sub(curve.start).max(1) as f64;
    let x = |time: u64| {
        plot.left()
            + ((time.saturating_sub(curve.start)) as f64 / nanos * f64::from(plot.width())) as f32
    };
    let y = |bytes: u64| plot.bottom() - (bytes as f64 / peak * f64::from(plot.height())) as f32;
    let mut mesh = Mesh::default();
    for Stretch { left, right, level } in stretches(curve, x) {
        let right = right.min(plot.right());
        let staging = y(level.staging_bytes);
        let top = y(level.staging_bytes.saturating_add(level.activation_bytes));
        mesh.add_colored_rect(
            Rect::from_min_max(pos2(left, staging), pos2(right, plot.bottom())),
            STAGING,
        );
        mesh.add_colored_rect(
            Rect::from_min_max(pos2(left, top), pos2(right, staging)),
            ACTIVATIONS,
        );
    }
    painter.add(mesh);
    painter.rect_stroke(plot, 0.0, Stroke::new(1.0, theme::weak(ui)), StrokeKind::Inside);
    let text = format!("buffers: peak {}", quantity::bytes(curve.peak()));
    painter.text(rect.min, Align2::LEFT_TOP, text, FontId::proportional(11.5), theme::weak(ui));
    for (part, align) in
        [(0.0, Align2::LEFT_BOTTOM), (0.5, Align2::CENTER_BOTTOM), (1.0, Align2::RIGHT_BOTTOM)]
    {
        let at = pos2(plot.left() + plot.width() * part, rect.bottom());
        painter.text(
            at,
            align,
            quantity::nanos(nanos * f64::from(part)),
            FontId::proportional(10.5),
            theme::weak(ui),
        );
    }
}

/// A part of a curve that is drawn as one.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Stretch {
    left: f32,
    right: f32,
    level: Level,
}

/// Narrower stretches may lie between two pixels.
const NARROW: f32 = 1.0;

/// The whole curve without gaps. Of levels that together are narrow the highest is drawn: a peak must be seen.
fn stretches(curve: &Curve, x: impl Fn(u64) -> f32) -> Vec<Stretch> {
    let mut stretches: Vec<Stretch> = Vec::new();
    for (number, &level) in curve.levels.iter().enumerate() {
        let end = curve.levels.get(number + 1).map_or(curve.end, |next| next.time);
        let right = x(end);
        let left = stretches.last().map_or(x(level.time), |last| last.right);
        if let Some(last) = stretches.last_mut().filter(|last| last.right - last.left < NARROW) {
            if right - left < NARROW {
                last.right = right;
                last.level = if level.bytes() > last.level.bytes() { level } else { last.level };
                continue;
            }
            last.right = last.left + NARROW;
        }
        let left = stretches.last().map_or(left, |last| last.right);
        stretches.push(Stretch { left, right, level });
    }
    widen_last(&mut stretches, x(curve.end));
    stretches
}

/// Gives the last stretch room to the left should it be narrow: to the right of it is the frame. Where it is lower than
/// what is before it, that is drawn to the end instead.
fn widen_last(stretches: &mut Vec<Stretch>, end: f32) {
    let Some(mut last) = stretches.pop() else { return };
    last.right = end;
    while last.right - last.left < NARROW
        && let Some(mut before) = stretches.pop()
    {
        if before.level.bytes() >= last.level.bytes() {
            last = Stretch { right: end, ..before };
        } else if end - before.left < 2.0 * NARROW {
            last.left = before.left;
        } else {
            last.left = end - NARROW;
            before.right = last.left;
            stretches.push(before);
            break;
        }
    }
    stretches.push(last);
}

fn explain(ui: &Ui, curve: &Curve, rect: Rect, at: egui::Pos2, response: &egui::Response) {
    let part = f64::from((at.x - rect.left()) / (rect.width() - 4.0));
    let time = curve.start + (part.clamp(0.0, 1.0) * (curve.end - curve.start) as f64) as u64;
    let number = curve.levels.partition_point(|level| level.time <= time).saturating_sub(1);
    let Some(level) = curve.levels.get(number) else { return };
    ui.painter().vline(at.x, rect.y_range(), Stroke::new(0.5, theme::weak(ui)));
    let text = format!(
        "at {}: activations {}, staging {}",
        quantity::nanos((time - curve.start) as f64),
        quantity::bytes(level.activation_bytes),
        quantity::bytes(level.staging_bytes)
    );
    response.clone().on_hover_ui_at_pointer(|ui| {
        ui.label(text);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_peaks_are_seen_and_leave_no_gaps() {
        let level = |time, activation_bytes| Level { time, activation_bytes, staging_bytes: 7 };
        let levels =
            vec![level(0, 10), level(100, 90), level(101, 20), level(103, 30), level(160, 40)];
        let curve = Curve { levels, start: 0, end: 200 };
        // Ten nanoseconds a point.
        let drawn = stretches(&curve, |time| time as f32 / 10.0);
        let parts: Vec<(f32, f32, u64)> = drawn
            .iter()
            .map(|&Stretch { left, right, level }| (left, right, level.activation_bytes))
            .collect();
        assert_eq!(parts, [(0.0, 10.0, 10), (10.0, 11.0, 90), (11.0, 16.0, 30), (16.0, 20.0, 40)]);
    }

    #[test]
    fn a_peak_at_the_end_is_seen_inside_the_frame() {
        let level = |time, activation_bytes| Level { time, activation_bytes, staging_bytes: 0 };
        let drawn = |levels: Vec<Level>| {
            let curve = Curve { levels, start: 0, end: 200 };
            let drawn = stretches(&curve, |time| time as f32 / 10.0);
            let part = |part: &Stretch| (part.left, part.right, part.level.activation_bytes);
            drawn.iter().map(part).collect::<Vec<(f32, f32, u64)>>()
        };
        let peak = [(0.0, 19.0, 10), (19.0, 20.0, 90)];
        assert_eq!(drawn(vec![level(0, 10), level(199, 90)]), peak);
        // What is given back as the run ends hides nothing.
        assert_eq!(drawn(vec![level(0, 10), level(199, 90), level(200, 0)]), peak);
        assert_eq!(drawn(vec![level(0, 10), level(200, 90)]), peak);
        let low = vec![level(0, 10), level(150, 90), level(200, 0)];
        assert_eq!(drawn(low), [(0.0, 15.0, 10), (15.0, 20.0, 90)]);
        // Of two peaks in the last points the higher one is drawn.
        let peaks = vec![level(0, 10), level(185, 90), level(195, 80)];
        assert_eq!(drawn(peaks), [(0.0, 18.5, 10), (18.5, 20.0, 90)]);
    }
}
