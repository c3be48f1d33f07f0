//! One lane for each queue and link: predicted above measured, over time.
//!
//! Work is in proportion to what is visible: bars are found by time, and those below a pixel are merged.

mod bars;
mod pointer;

use egui::{Align2, Color32, FontId, Rect, Sense, Stroke, StrokeKind, Ui, pos2, vec2};

use self::bars::{Look, Predicted, Strip, draw_bars, predicted_bars};
pub use self::pointer::zoom_around;
use crate::quantity;
use crate::scene::{Bar, IdleCause, Kind, LaneKind, Program, Run, Scene, Timing};
use crate::text::text_within;
use crate::theme;
use crate::view::View;

const NAMES_WIDTH: f32 = 190.0;
const AXIS_HEIGHT: f32 = 20.0;
const RUNS_HEIGHT: f32 = 18.0;

/// Where things are in this frame.
struct Frame {
    bars: Rect,
    lane_height: f32,
    from: f64,
    to: f64,
}

impl Frame {
    fn x(&self, time: f64) -> f32 {
        let part = (time - self.from) / (self.to - self.from);
        self.bars.left() + (part * f64::from(self.bars.width())) as f32
    }

    fn time(&self, x: f32) -> f64 {
        let part = f64::from((x - self.bars.left()) / self.bars.width());
        self.from + part * (self.to - self.from)
    }

    fn lane(&self, lane: usize) -> Rect {
        let top = self.bars.top() + lane as f32 * self.lane_height;
        Rect::from_min_size(pos2(self.bars.left(), top), vec2(self.bars.width(), self.lane_height))
    }
}

/// Draws the panel and takes its mouse input.
pub fn show(ui: &mut Ui, scene: &Scene, view: &mut View) {
    if scene.lanes.is_empty() {
        ui.label("The plan has no lanes.");
        return;
    }
    let whole = ui.available_rect_before_wrap();
    let (_, axis) = ui.allocate_space(vec2(whole.width(), AXIS_HEIGHT));
    let (_, runs) = ui.allocate_space(vec2(whole.width(), RUNS_HEIGHT));
    let room = (whole.bottom() - runs.bottom() - 22.0).max(60.0);
    let lane_height = (room / scene.lanes.len() as f32).clamp(24.0, 64.0);
    let height = lane_height * scene.lanes.len() as f32;
    let (from, to) = view.visible(scene);
    let scrolled = egui::ScrollArea::vertical().max_height(room).show(ui, |ui| {
        let size = vec2(ui.available_width(), height);
        let (rect, response) = ui.allocate_exact_size(size, Sense::click_and_drag());
        let bars = Rect::from_min_max(pos2(rect.left() + NAMES_WIDTH, rect.top()), rect.max);
        let frame = Frame { bars, lane_height, from, to };
        draw_lanes(ui, scene, view, &frame);
        pointer::interact(ui, scene, view, &frame, &response);
        frame
    });
    let frame = scrolled.inner;
    draw_axis(ui, scene, view, &frame, axis);
    draw_runs(ui, scene, view, &frame, runs);
    legend(ui, scene);
}

fn draw_axis(ui: &Ui, scene: &Scene, view: &View, frame: &Frame, rect: Rect) {
    let painter = ui.painter();
    let width = frame.to - frame.from;
    // A tick about every 110 points, at 1, 2 or 5 times a power of ten.
    let rough = width / f64::from(frame.bars.width() / 110.0).max(1.0);
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|times| times * power);
    let step = step.into_iter().find(|&step| step >= rough).unwrap_or(rough).max(1.0);
    let line = Stroke::new(1.0, ui.visuals().widgets.noninteractive.bg_stroke.color);
    // Within a trace, what matters is the time since the run began.
    let origin = view.origin(scene);
    let first = ((frame.from - origin) / step).ceil();
    // Counted, because adding to large times may leave them as they are.
    for tick in 0..100 {
        let since = (first + f64::from(tick)) * step;
        let time = origin + since;
        if time > frame.to {
            break;
        }
        let x = frame.x(time);
        painter.vline(x, rect.top() + 12.0..=rect.bottom(), line);
        let text = quantity::nanos_in_steps(since, step);
        let galley = painter.layout_no_wrap(text, FontId::proportional(11.0), theme::weak(ui));
        // A number whose end is cut off is another number.
        if x + 3.0 + galley.size().x <= frame.bars.right() {
            painter.galley(pos2(x + 3.0, rect.top()), galley, theme::weak(ui));
        }
    }
    painter.text(
        rect.left_top(),
        Align2::LEFT_TOP,
        if scene.runs.is_empty() {
            "Lanes · predicted"
        } else {
            "Lanes · predicted over measured"
        },
        FontId::proportional(12.0),
        theme::weak(ui),
    );
}

fn draw_runs(ui: &mut Ui, scene: &Scene, view: &mut View, frame: &Frame, rect: Rect) {
    let bars = Rect::from_x_y_ranges(frame.bars.x_range(), rect.y_range());
    let painter = ui.painter().with_clip_rect(rect);
    painter.text(
        rect.left_center(),
        Align2::LEFT_CENTER,
        if scene.runs.is_empty() { "not measured: no trace" } else { "runs" },
        FontId::proportional(12.0),
        theme::weak(ui),
    );
    let painter = ui.painter().with_clip_rect(bars.intersect(ui.clip_rect()));
    let response = ui.interact(bars, ui.scope_id().with("runs"), Sense::click());
    let mut last_x = f32::MIN;
    for (number, run) in scene.runs.iter().enumerate() {
        let (left, right) = (frame.x(run.start as f64), frame.x(run.end as f64));
        if right < bars.left() || left > bars.right() || right < last_x + 1.0 {
            continue;
        }
        last_x = right;
        let band = Rect::from_x_y_ranges(
            left..=right.max(left + 1.0),
            bars.shrink2(vec2(0.0, 1.0)).y_range(),
        );
        let shown = view.run == Some(number);
        painter.rect_filled(
            band,
            2.0,
            theme::tint(ui, run_color(number), if shown { 0.8 } else { 0.4 }),
        );
        if shown {
            painter.rect_stroke(band, 2.0, Stroke::new(1.5, theme::strong(ui)), StrokeKind::Inside);
        }
        let text = run_text(scene, number, run);
        let left = band.left().max(bars.left());
        text_within(
            ui,
            &painter,
            pos2(left + 4.0, band.center().y),
            band.right().min(bars.right()) - left - 6.0,
            &text,
            theme::strong(ui),
        );
        if response.clicked() && response.interact_pointer_pos().is_some_and(|at| band.contains(at))
        {
            let time = view.time;
            view.show_run(scene, number);
            view.time = time;
            return;
        }
    }
}

/// `run 3: prefill, 4 of 512 tokens, 13.2 ms`.
fn run_text(scene: &Scene, number: usize, run: &Run) -> String {
    let program = scene.programs.get(run.program);
    let name = program.map_or("?", |program| &program.name);
    let most = program.map_or(run.tokens, |program| program.max_tokens);
    let tokens = match run.tokens {
        tokens if tokens != most => format!(", {tokens} of {most} tokens"),
        1 => String::new(),
        tokens => format!(", {tokens} tokens"),
    };
    let nanos = quantity::nanos((run.end - run.start) as f64);
    format!("run {number}: {name}{tokens}, {nanos}")
}

/// Runs take turns in three hues, so that neighbours differ.
fn run_color(number: usize) -> Color32 {
    [
        Color32::from_rgb(90, 130, 200),
        Color32::from_rgb(150, 110, 190),
        Color32::from_rgb(90, 160, 130),
    ][number % 3]
}

fn draw_lanes(ui: &Ui, scene: &Scene, view: &mut View, frame: &Frame) {
    let clip = ui.clip_rect();
    let timing = view.timing(scene);
    let selected = view.selected(scene);
    let any_selected = selected.contains(&true);
    let has_shares = view.has_shares(scene);
    let Some(program) = view.program(scene) else { return };
    let longest = program.steps.iter().map(|step| step.predicted_nanos).max().unwrap_or(1);
    for (number, lane) in scene.lanes.iter().enumerate() {
        let row = frame.lane(number);
        if !row.intersects(clip) {
            continue;
        }
        draw_lane_name(ui, scene, view, number, row, &timing);
        let measured = view.run.is_some();
        let share = if measured { 0.40 } else { 0.90 };
        let above = Rect::from_min_max(
            row.min + vec2(0.0, 2.0),
            pos2(row.right(), row.top() + row.height() * share),
        );
        let below =
            Rect::from_min_max(pos2(row.left(), above.bottom() + 1.0), row.max - vec2(0.0, 2.0));
        if has_shares {
            draw_idle(ui, frame, number, if measured { below } else { above }, &timing, program);
        }
        let look = |bar: &Bar, is_shown: bool| {
            let steps = scene.programs.get(bar.program as usize).map(|program| &program.steps);
            let here = bar.program as usize == view.program;
            let is_selected = here && selected.get(bar.step as usize) == Some(&true);
            let color = steps
                .and_then(|steps| steps.get(bar.step as usize))
                .map_or(Color32::GRAY, |step| theme::step(scene, step, view.coloring, longest));
            let faded = any_selected && !is_selected;
            let is_critical = timing.is_critical.get(bar.step as usize) == Some(&true);
            Look {
                color: if faded { theme::tint(ui, color, 0.35) } else { color },
                is_selected,
                is_critical: here && is_shown && is_critical && has_shares,
            }
        };
        let clip = row.intersect(clip);
        for predicted in predicted_bars(scene, view, frame, number) {
            let pale = |bar: &Bar| {
                let look = look(bar, predicted.run.is_none());
                Look { color: theme::tint(ui, look.color, 0.75), ..look }
            };
            let Predicted { bars, start, until, .. } = predicted;
            let mut clip = clip;
            clip.max.x = clip.max.x.min(frame.x(until as f64));
            draw_bars(ui, scene, frame, clip, Strip { rect: above, bars, offset: start }, pale);
        }
        let full = |bar: &Bar| look(bar, view.run == Some(bar.run as usize));
        let strip = Strip { rect: below, bars: &lane.measured, offset: 0 };
        if measured {
            draw_bars(ui, scene, frame, clip, strip, full);
        }
        ui.painter().hline(
            ui.max_rect().left()..=row.right(),
            row.bottom(),
            Stroke::new(0.5, ui.visuals().widgets.noninteractive.bg_stroke.color),
        );
    }
    if let Some(area) = view.area {
        let top = frame.lane(area.first_lane).top();
        let bottom = frame.lane(area.last_lane).bottom();
        let rect =
            Rect::from_min_max(pos2(frame.x(area.start), top), pos2(frame.x(area.end), bottom));
        ui.painter().rect(
            rect,
            0.0,
            ui.visuals().selection.bg_fill.gamma_multiply(0.25),
            ui.visuals().selection.stroke,
            StrokeKind::Inside,
        );
    }
}

fn draw_lane_name(ui: &Ui, scene: &Scene, view: &View, number: usize, row: Rect, timing: &Timing) {
    let lane = &scene.lanes[number];
    let left = ui.max_rect().left();
    let color = match &lane.kind {
        LaneKind::Queue(device, _) => theme::device(scene, *device),
        LaneKind::Link(..) => theme::kind(Kind::Transfer),
        LaneKind::Members(_) => theme::kind(Kind::Collective),
    };
    let chip = Rect::from_min_size(pos2(left, row.top() + 3.0), vec2(4.0, row.height() - 6.0));
    ui.painter().rect_filled(chip, 2.0, color);
    let painter = ui.painter().with_clip_rect(
        Rect::from_min_max(pos2(left, row.top()), pos2(row.left() - 4.0, row.bottom()))
            .intersect(ui.clip_rect()),
    );
    let is_high = row.height() >= 30.0;
    painter.text(
        pos2(left + 9.0, row.center().y - if is_high { 6.0 } else { 0.0 }),
        Align2::LEFT_CENTER,
        &lane.name,
        FontId::proportional(12.5),
        theme::strong(ui),
    );
    let is_told = is_high && view.has_shares(scene);
    let Some(program) = view.program(scene).filter(|_| is_told) else { return };
    if let Some(queue) = program.queues.iter().position(|(lane, _)| *lane == number) {
        painter.text(
            pos2(left + 9.0, row.center().y + 7.0),
            Align2::LEFT_CENTER,
            timing.work_text(queue),
            FontId::proportional(10.5),
            theme::weak(ui),
        );
    }
}

/// Times in which the queue stood still, tinted and named by their cause.
fn draw_idle(ui: &Ui, frame: &Frame, lane: usize, rect: Rect, timing: &Timing, program: &Program) {
    let painter = ui.painter().with_clip_rect(rect.intersect(ui.clip_rect()));
    let mine = |queue: usize| program.queues.get(queue).is_some_and(|(row, _)| *row == lane);
    for idle in timing.idle.iter().filter(|idle| mine(idle.queue)) {
        let (left, right) = (frame.x(idle.start as f64), frame.x(idle.end as f64));
        if right < rect.left() || left > rect.right() || right - left < 2.0 {
            continue;
        }
        let strip = Rect::from_min_max(pos2(left, rect.bottom() - 3.0), pos2(right, rect.bottom()));
        painter.rect_filled(strip, 0.0, theme::tint(ui, theme::idle(idle.cause), 0.7));
        let (left, right) = (left.max(rect.left()), right.min(rect.right()));
        if right - left > 50.0 && rect.height() > 10.0 {
            let text = idle_text(program, idle.cause);
            let text = format!("{text}, {}", quantity::nanos((idle.end - idle.start) as f64));
            text_within(
                ui,
                &painter,
                pos2(left + 4.0, rect.center().y - 1.0),
                right - left - 8.0,
                &text,
                theme::weak(ui),
            );
        }
    }
}

/// `waits for a transfer: layers.12.self_attn.q_proj`.
pub fn idle_text(program: &Program, cause: IdleCause) -> String {
    let name = |step: usize| program.steps.get(step).map_or("?", |step| step.name.as_str());
    match cause {
        IdleCause::Transfer(step) => format!("waits for a transfer: {}", name(step)),
        IdleCause::Collective(step) => format!("waits for a collective: {}", name(step)),
        IdleCause::Dependency(step) => format!("waits for a result: {}", name(step)),
        IdleCause::NoWork => "no work".to_owned(),
    }
}

fn legend(ui: &mut Ui, scene: &Scene) {
    ui.horizontal(|ui| {
        ui.spacing_mut().item_spacing.x = 6.0;
        // Only what does not push the panel wider.
        let mut chip = |color: Color32, text: &str| {
            let font = egui::TextStyle::Small.resolve(ui.style());
            let text_width = ui.painter().layout_no_wrap(text.to_owned(), font, color).size().x;
            if ui.available_width() < text_width + 34.0 {
                return;
            }
            let (rect, _) = ui.allocate_exact_size(vec2(14.0, 4.0), Sense::hover());
            ui.painter().rect_filled(rect, 1.0, color);
            ui.small(text);
            ui.add_space(6.0);
        };
        chip(theme::kind(Kind::Transfer), "transfer, or waiting for one");
        chip(theme::kind(Kind::Collective), "collective, or waiting for one");
        chip(theme::idle(IdleCause::Dependency(0)), "waiting for a result");
        chip(theme::idle(IdleCause::NoWork), "no work");
        let color = Color32::from_rgb(255, 80, 60);
        chip(
            color,
            if scene.runs.is_empty() { "critical path" } else { "critical path of the run" },
        );
        if ui.available_width() > 420.0 {
            ui.small("· wheel or W S zoom, drag or A D pan, shift-drag adds up, F fits");
        }
    });
}
