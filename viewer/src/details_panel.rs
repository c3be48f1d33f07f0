//! Everything that is known of what is selected.

use egui::{Rect, RichText, Sense, Ui, vec2};

use crate::quantity;
use crate::scene::{Bars, Block, Kind, LaneKind, Program, Scene, Step, Summary, size_text};
use crate::text::{fitting, text_within};
use crate::theme;
use crate::timeline_panel::idle_text;
use crate::view::{Area, Selection, View};

/// More candidates than this are counted, not listed.
const MOST_CANDIDATES: usize = 12;

/// Draws the panel.
pub fn show(ui: &mut Ui, scene: &Scene, view: &mut View) {
    egui::ScrollArea::vertical().auto_shrink(false).show(ui, |ui| {
        if let (Some(area), Some(program)) = (view.area, view.program(scene)) {
            show_area(ui, scene, view, program, area);
            ui.separator();
        }
        let Some(program) = view.program(scene) else { return };
        match view.selection {
            Selection::Nothing => show_plan(ui, scene, view),
            Selection::Step(step, run) => {
                if let Some(row) = program.steps.get(step) {
                    show_step(ui, scene, view, program, row, run);
                }
            }
            Selection::Blocks(first, last) => {
                show_blocks(ui, scene, view, program, (first, last));
            }
            Selection::Device(device) => show_device(ui, scene, view, program, device),
        }
    });
}

fn row(ui: &mut Ui, name: &str, value: impl Into<String>) {
    let value = value.into();
    if value.is_empty() {
        return;
    }
    ui.horizontal_wrapped(|ui| {
        ui.spacing_mut().item_spacing.x = 4.0;
        ui.label(RichText::new(name).color(theme::weak(ui)).small());
        ui.label(value);
    });
}

/// A name, a bar of a part of the whole and the part in figures. The bar is pale as far as the device is busy.
/// The figures get `room`, or less of it where the bar would vanish.
fn share_row(ui: &mut Ui, name: &str, nanos: u64, whole: f64, busy: Option<f64>, room: f32) {
    /// What the name takes.
    const NAME: f32 = 84.0;
    /// The least width of a bar, and what is between it and the figures.
    const LEAST: f32 = 24.0;
    const GAP: f32 = 6.0;
    let (rect, _) = ui.allocate_exact_size(vec2(ui.available_width(), 18.0), Sense::hover());
    let share = nanos as f64 / whole;
    let room = room.min((rect.width() - NAME - LEAST - GAP).max(0.0));
    let time = quantity::nanos(nanos as f64);
    let also = busy.map(|busy| format!(", {} busy", quantity::share(busy))).unwrap_or_default();
    let values = [format!("{time} ({}){also}", quantity::share(share)), format!("{time}{also}")];
    let value = fitting(ui, values, 11.0, room);
    let bar = Rect::from_min_max(rect.min + vec2(NAME, 3.0), rect.max - vec2(room + GAP, 3.0));
    if bar.is_positive() {
        ui.painter().rect_filled(bar, 2.0, ui.visuals().extreme_bg_color);
        let fill = ui.visuals().selection.bg_fill;
        let pale = busy.map(|busy| (busy, theme::mix(ui.visuals().extreme_bg_color, fill, 0.4)));
        for (part, color) in pale.into_iter().chain([(share, fill)]) {
            let width = bar.width() * part.clamp(0.0, 1.0) as f32;
            let filled = Rect::from_min_size(bar.min, vec2(width, bar.height()));
            ui.painter().rect_filled(filled, 2.0, color);
        }
    }
    let text = ui.visuals().text_color();
    text_within(ui, ui.painter(), rect.left_center(), NAME - 4.0, name, text);
    text_within(ui, ui.painter(), rect.right_center() - vec2(room, 0.0), room, &value, text);
}

fn show_plan(ui: &mut Ui, scene: &Scene, view: &View) {
    ui.heading(&scene.title);
    ui.label(&scene.subtitle);
    ui.add_space(6.0);
    for finding in &scene.findings {
        ui.colored_label(theme::alarm(ui), format!("! {finding}"));
    }
    let Some(summary) = scene.summaries.get(view.program) else { return };
    if let Some(program) = view.program(scene) {
        show_shares(ui, scene, summary, program);
        ui.add_space(6.0);
    }
    if !scene.candidates.is_empty() {
        ui.strong("Placements that were priced");
        for (number, candidate) in scene.candidates.iter().take(MOST_CANDIDATES).enumerate() {
            let nanos = |nanos: Option<u64>| {
                nanos.map_or_else(|| "–".to_owned(), |nanos| quantity::nanos(nanos as f64))
            };
            let text = match &candidate.missing {
                Some(missing) => format!("does not fit: {missing}"),
                None => format!(
                    "decode {}, prefill {}",
                    nanos(candidate.decode_nanos),
                    nanos(candidate.prefill_nanos)
                ),
            };
            let chosen = if number == 0 { ", chosen" } else { "" };
            row(ui, &candidate.name, format!("{text}{chosen}"));
        }
        if let Some(more) = more_candidates(scene.candidates.len()) {
            ui.weak(more);
        }
        ui.add_space(6.0);
    }
    if scene.devices.iter().any(|device| !device.is_calibrated) {
        let names: Vec<&str> = scene
            .devices
            .iter()
            .filter(|device| !device.is_calibrated)
            .map(|device| device.name.as_str())
            .collect();
        ui.label(format!(
            "Rates of {} are nominal, not measured: predictions are guesses.",
            names.join(", ")
        ));
    }
    ui.weak("Click a card, a span or a row to see what it is and why it is there.");
}

/// Time on the critical path, and where devices work beside it how busy each is.
fn show_shares(ui: &mut Ui, scene: &Scene, summary: &Summary, program: &Program) {
    ui.strong(format!("Where the time of {} goes, on the critical path", program.name));
    let whole = summary.critical_end.max(1) as f64;
    let nanos = |of: &[u64], place: usize| of.get(place).copied().unwrap_or(0);
    let is_any_beside = (0..scene.devices.len()).any(|device| summary.is_beside(device));
    // As much for all rows, so that their bars have one scale.
    let room = if is_any_beside { 150.0 } else { 98.0 };
    for (number, device) in scene.devices.iter().enumerate() {
        let busy = nanos(&summary.busy_nanos, number) as f64 / whole;
        let busy = is_any_beside.then_some(busy);
        share_row(ui, &device.name, nanos(&summary.critical_nanos, number), whole, busy, room);
    }
    let moved = summary.critical_nanos.last().copied().unwrap_or(0);
    share_row(ui, "movement", moved, whole, None, room);
    let worked = summary.critical_nanos.iter().copied().fold(0, u64::saturating_add);
    // Between steps, and before the first and after the last of a run.
    let outside = summary.critical_end.saturating_sub(worked);
    share_row(ui, "outside steps", outside, whole, None, room);
}

/// `and 6 more; hybridc explain lists them`.
fn more_candidates(count: usize) -> Option<String> {
    let more = count.checked_sub(MOST_CANDIDATES).filter(|&more| more > 0)?;
    Some(format!("and {more} more; hybridc explain lists them"))
}

fn show_step(
    ui: &mut Ui,
    scene: &Scene,
    view: &mut View,
    program: &Program,
    step: &Step,
    run: Option<usize>,
) {
    ui.heading(&step.name);
    ui.label(RichText::new(&step.action).monospace().small());
    ui.add_space(4.0);
    row(ui, "on", scene.device_name(step.device));
    if let Some(LaneKind::Link(from, to)) = &step.path {
        row(ui, "path", format!("{} → {}", scene.device_name(*from), scene.device_name(*to)));
    }
    row(ui, "its", scene.home_text(view.program, &[step.number]));
    row(ui, "because", step.cause.clone());
    row(ui, "next best", step.runner_up.clone().unwrap_or_default());
    ui.add_space(4.0);
    let has_attention = step.kind == Kind::Attention;
    row(ui, "predicted", planned_text(program, step.predicted_nanos, has_attention));
    if let Some(measured) = step.measured {
        row(
            ui,
            "measured",
            format!(
                "{} (median of {}; {} to {})",
                measured_text(program, measured.median_nanos),
                measured.count,
                quantity::nanos(measured.least_nanos as f64),
                quantity::nanos(measured.most_nanos as f64)
            ),
        );
        row(ui, "error", step.error().map(quantity::change).unwrap_or_default());
    }
    if let Some(run) = run
        && view.has_shares(scene)
        && let Some(times) =
            scene.runs.get(run).and_then(|run| run.times.get(step.number).copied().flatten())
    {
        row(ui, &format!("in run {run}"), quantity::nanos((times.end - times.start) as f64));
        row(ui, "waited", quantity::nanos(times.start.saturating_sub(times.ready) as f64));
    }
    ui.add_space(4.0);
    row(ui, "reads", step.reads.join("\n"));
    row(ui, "writes", step.writes.join("\n"));
    row(ui, "weights", step.weights.join("\n"));
    for (name, bytes) in [
        ("weight bytes", step.weight_bytes),
        ("cache bytes", step.cache_bytes),
        ("buffer bytes", step.buffer_bytes),
        ("moved bytes", step.moved_bytes),
    ] {
        if bytes > 0 {
            row(ui, name, quantity::bytes(bytes));
        }
    }
    if step.flops > 0.0 {
        row(ui, "arithmetic", quantity::flops(step.flops));
    }
    let per_second = |amount: f64, nanos: u64| amount / nanos as f64 * 1e9;
    if let Some(nanos) = step.rated_nanos() {
        if step.flops > 0.0 {
            let speed = quantity::flops(per_second(step.flops, nanos));
            row(ui, "speed", format!("{speed}/s"));
        }
        if let Some(bytes) = step.read_bytes {
            let rate = quantity::bytes(per_second(bytes as f64, nanos) as u64);
            row(ui, "weights read", format!("{rate}/s"));
        }
    }
    if !step.waits.is_empty() {
        ui.add_space(4.0);
        ui.label(RichText::new("waits for").color(theme::weak(ui)).small());
        for &wait in &step.waits {
            let other = &program.steps[wait];
            if ui
                .link(format!("s{wait} {} on {}", other.name, scene.device_name(other.device)))
                .clicked()
            {
                view.selection = Selection::Step(wait, view.run);
                view.keep_in_sight(scene, wait);
            }
        }
    }
}

/// A predicted time, with what it is for: of decode the tokens cached, on which only attention depends, else the tokens
/// where measured ones are of others.
pub(crate) fn planned_text(program: &Program, nanos: u64, has_attention: bool) -> String {
    let size = if program.is_decode && has_attention {
        format!(" {}", size_text(program, program.predicted_size()))
    } else {
        program.tokens_text(program.max_tokens)
    };
    format!("{}{size}", quantity::nanos(nanos as f64))
}

/// A measured time, with its tokens likewise.
pub(crate) fn measured_text(program: &Program, nanos: u64) -> String {
    let tokens = program.measured_tokens.map(|tokens| program.tokens_text(tokens));
    format!("{}{}", quantity::nanos(nanos as f64), tokens.unwrap_or_default())
}

fn show_blocks(
    ui: &mut Ui,
    scene: &Scene,
    view: &View,
    program: &Program,
    (first, last): (usize, usize),
) {
    let Some(blocks) = program.blocks.get(first..=last) else { return };
    let numbers: Vec<usize> = (first..=last).collect();
    ui.heading(scene.blocks_text(view.program, &numbers));
    let Some(block) = blocks.first() else { return };
    let names: Vec<String> =
        block.devices.iter().map(|&device| scene.device_name(device)).collect();
    row(ui, "on", names.join(" + "));
    row(ui, "its", scene.home_text(view.program, &block.steps));
    row(ui, "because", block.cause.clone());
    row(ui, "next best", block.runner_up.clone().unwrap_or_default());
    ui.add_space(4.0);
    let mut steps = blocks.iter().flat_map(|block| &block.steps);
    let has_attention = steps.any(|&step| program.steps[step].kind == Kind::Attention);
    let predicted = program.blocks_predicted(first, last);
    row(ui, "predicted", planned_text(program, predicted, has_attention));
    if let Some(measured) = program.blocks_measured(first, last) {
        row(ui, "measured", measured_text(program, measured));
        row(ui, "error", program.blocks_error_text(first, last).unwrap_or_default());
    }
    let sum = |bytes: fn(&Block) -> u64| blocks.iter().map(bytes).fold(0, u64::saturating_add);
    row(ui, "weights", quantity::bytes(sum(|block| block.weight_bytes)));
    row(ui, "KV cache", quantity::bytes(sum(|block| block.cache_bytes)));
    for (verb, bytes, count) in &block.collectives {
        row(ui, "each layer", format!("{count} × {verb} of {}", quantity::bytes(*bytes)));
    }
    ui.add_space(6.0);
    ui.weak(
        "Drag the card to another column, or use its context menu, to ask what that would cost.",
    );
}

fn show_device(ui: &mut Ui, scene: &Scene, view: &mut View, program: &Program, number: usize) {
    let Some(device) = scene.devices.get(number) else { return };
    ui.heading(&device.name);
    row(ui, "is a", if device.is_gpu { "GPU" } else { "NUMA node" });
    row(
        ui,
        "rates",
        if device.is_calibrated { "measured" } else { "nominal: predictions are guesses" },
    );
    row(ui, "capacity", quantity::bytes(device.capacity_bytes));
    row(ui, "weights", quantity::bytes(device.weight_bytes));
    row(ui, "KV cache", quantity::bytes(device.cache_bytes));
    row(ui, "buffers", quantity::bytes(device.buffer_bytes));
    if device.fetch_bytes > 0 {
        row(ui, "fetched weights", quantity::bytes(device.fetch_bytes));
    }
    if device.scratch_bytes > 0 {
        row(ui, "scratch", quantity::bytes(device.scratch_bytes));
    }
    row(ui, "free", quantity::bytes(device.free_bytes()));
    ui.add_space(4.0);
    if !view.has_shares(scene) {
        return;
    }
    let timing = view.timing(scene);
    for (queue, (lane, _)) in program.queues.iter().enumerate() {
        if !matches!(scene.lanes[*lane].kind, LaneKind::Queue(device, _) if device == number) {
            continue;
        }
        row(ui, &scene.lanes[*lane].name, timing.work_text(queue));
        let mut waits: Vec<_> = timing.idle.iter().filter(|idle| idle.queue == queue).collect();
        waits.sort_by_key(|idle| std::cmp::Reverse(idle.end - idle.start));
        for idle in waits.into_iter().take(5) {
            let nanos = quantity::nanos((idle.end - idle.start) as f64);
            row(ui, &nanos, idle_text(program, idle.cause));
        }
    }
}

/// Sums over the part of the measured spans, or of the predicted ones, inside the area.
fn show_area(ui: &mut Ui, scene: &Scene, view: &View, program: &Program, area: Area) {
    ui.heading("Selected time");
    row(ui, "from", range_text(scene, view, area));
    row(ui, "length", quantity::nanos(area.end - area.start));
    let measured = !scene.runs.is_empty();
    row(ui, "sums of", if measured { "measured spans" } else { "predicted spans" });
    for lane in area.first_lane..=area.last_lane {
        let Some(row_of) = scene.lanes.get(lane) else { continue };
        let bars = if measured { Some(&row_of.measured) } else { program.bars.get(lane) };
        let Some(bars) = bars else { continue };
        let (count, nanos) = sum_within(bars, area);
        if count > 0 {
            let share = nanos / (area.end - area.start).max(1.0);
            row(
                ui,
                &row_of.name,
                format!("{count} spans, {} ({})", quantity::nanos(nanos), quantity::share(share)),
            );
        }
    }
}

/// From when to when, since the run shown began, as on the axis; in as many figures as tell the ends apart.
pub fn range_text(scene: &Scene, view: &View, area: Area) -> String {
    let origin = view.origin(scene);
    let step = ((area.end - area.start) / 100.0).max(1.0);
    let text = |time: f64| quantity::nanos_in_steps(time - origin, step);
    format!("{} to {}", text(area.start), text(area.end))
}

/// Number of spans that touch the area, and the time inside it in which at least one of them runs.
pub fn sum_within(bars: &Bars, area: Area) -> (usize, f64) {
    let first = bars.first_after(0, area.start.max(0.0) as u64);
    let (mut count, mut nanos, mut until) = (0, 0.0, area.start);
    for bar in bars.rows()[first..].iter().take_while(|bar| (bar.start as f64) < area.end) {
        let end = (bar.end as f64).min(area.end);
        if end > (bar.start as f64).max(area.start) {
            count += 1;
            nanos += (end - (bar.start as f64).max(until)).max(0.0);
            until = until.max(end);
        }
    }
    (count, nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn candidates_that_are_not_listed_are_counted() {
        assert_eq!(more_candidates(MOST_CANDIDATES), None);
        let more = more_candidates(MOST_CANDIDATES + 6);
        assert_eq!(more.as_deref(), Some("and 6 more; hybridc explain lists them"));
    }
}
