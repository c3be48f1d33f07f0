//! One lane for each queue and link: predicted above measured, over time.
//!
//! Work is in proportion to what is visible: bars are found by time, and those below a pixel are merged.

use egui::{
    Align2, Color32, FontId, Mesh, PointerButton, Pos2, Rect, Response, Sense, Stroke, StrokeKind,
    Ui, Vec2, pos2, vec2,
};

use crate::quantity;
use crate::scene::{Bar, Bars, IdleCause, LaneKind, Scene};
use crate::theme;
use crate::view::{Area, Selection, View};

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
    let (from, to) = visible(scene, view);
    let scrolled = egui::ScrollArea::vertical().max_height(room).show(ui, |ui| {
        let size = vec2(ui.available_width(), height);
        let (rect, response) = ui.allocate_exact_size(size, Sense::click_and_drag());
        let bars = Rect::from_min_max(pos2(rect.left() + NAMES_WIDTH, rect.top()), rect.max);
        let frame = Frame { bars, lane_height, from, to };
        draw_lanes(ui, scene, view, &frame);
        interact(ui, scene, view, &frame, &response);
        frame
    });
    let frame = scrolled.inner;
    draw_axis(ui, &frame, axis);
    draw_runs(ui, scene, view, &frame, runs);
    legend(ui, scene);
}

/// The visible time; fits the run where none is set.
fn visible(scene: &Scene, view: &mut View) -> (f64, f64) {
    if let Some(time) = view.time {
        return time;
    }
    let (start, end) = if view.fit_all {
        (0, scene.trace_end)
    } else {
        let timing = view.timing(scene);
        (timing.start, timing.end)
    };
    let predicted = view.program(scene).map_or(0, |program| program.predicted.end);
    let width = (end.saturating_sub(start).max(if view.fit_all { 0 } else { predicted })) as f64;
    let width = width.max(1.0);
    view.fit_all = false;
    let time = (start as f64 - width * 0.02, start as f64 + width * 1.02);
    view.time = Some(time);
    time
}

fn draw_axis(ui: &Ui, frame: &Frame, rect: Rect) {
    let painter = ui.painter();
    let width = frame.to - frame.from;
    // A tick about every 110 points, at 1, 2 or 5 times a power of ten.
    let rough = width / f64::from(frame.bars.width() / 110.0).max(1.0);
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|times| times * power);
    let step = step.into_iter().find(|&step| step >= rough).unwrap_or(rough).max(1.0);
    let line = Stroke::new(1.0, ui.visuals().widgets.noninteractive.bg_stroke.color);
    let mut time = (frame.from / step).ceil() * step;
    while time <= frame.to {
        let x = frame.x(time);
        painter.vline(x, rect.top() + 12.0..=rect.bottom(), line);
        let text = quantity::nanos(time);
        painter.text(
            pos2(x + 3.0, rect.top()),
            Align2::LEFT_TOP,
            text,
            FontId::proportional(11.0),
            theme::weak(ui),
        );
        time += step;
    }
    painter.text(
        rect.left_top(),
        Align2::LEFT_TOP,
        "Lanes · predicted over measured",
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
        let name = scene.programs.get(run.program).map_or("?", |program| &program.name);
        let tokens =
            if run.tokens == 1 { String::new() } else { format!(", {} tokens", run.tokens) };
        let text = format!(
            "run {number}: {name}{tokens}, {}",
            quantity::nanos((run.end - run.start) as f64)
        );
        let left = band.left().max(bars.left());
        text_within(
            ui,
            &painter,
            pos2(left + 4.0, band.center().y),
            band.right() - left - 6.0,
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
    let Some(program) = view.program(scene) else { return };
    let longest = program.steps.iter().map(|step| step.predicted_nanos).max().unwrap_or(1);
    for (number, lane) in scene.lanes.iter().enumerate() {
        let row = frame.lane(number);
        if !row.intersects(clip) {
            continue;
        }
        draw_lane_name(ui, scene, view, number, row, &timing);
        let painter = ui.painter().with_clip_rect(row.intersect(clip));
        let above = Rect::from_min_max(
            row.min + vec2(0.0, 2.0),
            pos2(row.right(), row.top() + row.height() * 0.40),
        );
        let below =
            Rect::from_min_max(pos2(row.left(), above.bottom() + 1.0), row.max - vec2(0.0, 2.0));
        let measured = !scene.runs.is_empty();
        draw_idle(ui, frame, number, if measured { below } else { above }, &timing, program);
        let look = |bar: &Bar| -> (Color32, bool, bool) {
            let Some(step) = scene
                .programs
                .get(bar.program as usize)
                .and_then(|p| p.steps.get(bar.step as usize))
            else {
                return (Color32::GRAY, false, false);
            };
            let here = bar.program as usize == view.program;
            let is_selected = here && selected.get(bar.step as usize) == Some(&true);
            let mut color = theme::step(scene, step, view.coloring, longest);
            if any_selected && !is_selected {
                color = theme::tint(ui, color, 0.35);
            }
            (color, is_selected, here)
        };
        for (offset, bars, run) in predicted_bars(scene, view, frame, number) {
            let dim = |bar: &Bar| {
                let (color, selected, _) = look(bar);
                (
                    theme::tint(ui, color, 0.75),
                    selected,
                    run.is_none() && timing.is_critical.get(bar.step as usize) == Some(&true),
                )
            };
            draw_bars(ui, &painter, scene, frame, above, bars, offset, dim);
        }
        let critical = |bar: &Bar| {
            let (color, selected, here) = look(bar);
            let shown = view.run == Some(bar.run as usize);
            (
                color,
                selected,
                here && shown && timing.is_critical.get(bar.step as usize) == Some(&true),
            )
        };
        draw_bars(ui, &painter, scene, frame, below, &lane.measured, 0, critical);
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

/// The program's bars at the start of every visible run of it; at 0 where nothing was measured.
fn predicted_bars<'a>(
    scene: &'a Scene,
    view: &View,
    frame: &Frame,
    lane: usize,
) -> Vec<(u64, &'a Bars, Option<usize>)> {
    if scene.runs.is_empty() {
        let program = scene.programs.get(view.program);
        return program
            .and_then(|program| program.bars.get(lane))
            .map(|bars| (0, bars, None))
            .into_iter()
            .collect();
    }
    let mut visible = Vec::new();
    for (number, run) in scene.runs.iter().enumerate() {
        let Some(program) = scene.programs.get(run.program) else { continue };
        let end = run.start.saturating_add(program.predicted.end);
        // Below a few points a prediction says nothing.
        if end as f64 >= frame.from
            && run.start as f64 <= frame.to
            && frame.x(end as f64) - frame.x(run.start as f64) >= 3.0
        {
            visible.extend(program.bars.get(lane).map(|bars| (run.start, bars, Some(number))));
        }
    }
    visible
}

fn draw_lane_name(
    ui: &Ui,
    scene: &Scene,
    view: &View,
    number: usize,
    row: Rect,
    timing: &crate::scene::Timing,
) {
    let lane = &scene.lanes[number];
    let left = ui.max_rect().left();
    let color = match &lane.kind {
        LaneKind::Queue(device, _) => theme::device(scene, *device),
        LaneKind::Link(..) => theme::kind(crate::scene::Kind::Transfer),
        LaneKind::Members(_) => theme::kind(crate::scene::Kind::Collective),
    };
    let chip = Rect::from_min_size(pos2(left, row.top() + 3.0), vec2(4.0, row.height() - 6.0));
    ui.painter().rect_filled(chip, 2.0, color);
    let painter = ui.painter().with_clip_rect(
        Rect::from_min_max(pos2(left, row.top()), pos2(row.left() - 4.0, row.bottom()))
            .intersect(ui.clip_rect()),
    );
    painter.text(
        pos2(left + 9.0, row.center().y - 6.0),
        Align2::LEFT_CENTER,
        &lane.name,
        FontId::proportional(12.5),
        theme::strong(ui),
    );
    let Some(program) = view.program(scene) else { return };
    if let Some(queue) = program.queues.iter().position(|(lane, _)| *lane == number) {
        let whole = timing.nanos().max(1) as f64;
        let busy = format!("busy {}", quantity::share(timing.busy[queue] as f64 / whole));
        painter.text(
            pos2(left + 9.0, row.center().y + 7.0),
            Align2::LEFT_CENTER,
            busy,
            FontId::proportional(10.5),
            theme::weak(ui),
        );
    }
}

/// Times in which the queue stood still, tinted and named by their cause.
fn draw_idle(
    ui: &Ui,
    frame: &Frame,
    lane: usize,
    rect: Rect,
    timing: &crate::scene::Timing,
    program: &crate::scene::Program,
) {
    let painter = ui.painter().with_clip_rect(rect.intersect(ui.clip_rect()));
    let mine = |queue: usize| program.queues.get(queue).is_some_and(|(row, _)| *row == lane);
    for idle in timing.idle.iter().filter(|idle| mine(idle.queue)) {
        let (left, right) = (frame.x(idle.start as f64), frame.x(idle.end as f64));
        if right < rect.left() || left > rect.right() || right - left < 2.0 {
            continue;
        }
        let strip = Rect::from_min_max(pos2(left, rect.bottom() - 3.0), pos2(right, rect.bottom()));
        painter.rect_filled(strip, 0.0, theme::tint(ui, theme::idle(idle.cause), 0.7));
        let left = left.max(rect.left());
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
pub fn idle_text(program: &crate::scene::Program, cause: IdleCause) -> String {
    let name = |step: usize| program.steps.get(step).map_or("?", |step| step.name.as_str());
    match cause {
        IdleCause::Transfer(step) => format!("waits for a transfer: {}", name(step)),
        IdleCause::Collective(step) => format!("waits for a collective: {}", name(step)),
        IdleCause::Dependency(step) => format!("waits for a result: {}", name(step)),
        IdleCause::NoWork => "no work".to_owned(),
    }
}

/// Bars as one mesh; neighbours below a pixel are merged into one of the color of the longest.
fn draw_bars(
    ui: &Ui,
    painter: &egui::Painter,
    scene: &Scene,
    frame: &Frame,
    rect: Rect,
    bars: &Bars,
    offset: u64,
    look: impl Fn(&Bar) -> (Color32, bool, bool),
) {
    let mut mesh = Mesh::default();
    let nanos_per_point = (frame.to - frame.from) / f64::from(frame.bars.width());
    let begin = (frame.from - offset as f64).max(0.0) as u64;
    let rows = bars.rows();
    let mut at = bars.first_after(0, begin);
    let mut labels = Vec::new();
    while let Some(bar) = rows.get(at) {
        let start = bar.start.saturating_add(offset) as f64;
        let end = bar.end.saturating_add(offset) as f64;
        if start > frame.to {
            break;
        }
        let (color, selected, critical) = look(bar);
        let (left, right) = (frame.x(start), frame.x(end));
        if right - left >= 1.5 {
            // Neighbours stay apart where there is room.
            let gap = if right - left > 4.0 { 1.0 } else { 0.0 };
            let place = Rect::from_x_y_ranges(left..=right - gap, rect.y_range());
            mesh.add_colored_rect(place, color);
            if critical {
                let line =
                    Rect::from_min_max(pos2(left, rect.bottom() - 2.5), pos2(right, rect.bottom()));
                mesh.add_colored_rect(line, theme::alarm(ui));
            }
            if right - left > 22.0 || selected {
                labels.push((place, *bar, selected, color));
            }
            at += 1;
            continue;
        }
        // Everything that ends within the next three points becomes one bar.
        let until = end + nanos_per_point * 3.0;
        let next = bars.first_after(at + 1, (until - offset as f64).max(0.0) as u64).max(at + 1);
        let chosen = rows[at..next]
            .iter()
            .step_by((next - at).div_ceil(16))
            .max_by_key(|bar| bar.end - bar.start);
        let (color, _, _) = chosen.map_or((color, false, false), &look);
        let last = rows[next - 1].end.saturating_add(offset) as f64;
        let right = frame.x(last).max(left + 1.0);
        // How full the merged stretch is.
        let fill = if next - at > 16 {
            0.8
        } else {
            let work: u64 = rows[at..next].iter().map(|bar| bar.end - bar.start).sum();
            (work as f64 / (last - start).max(1.0)) as f32
        };
        mesh.add_colored_rect(
            Rect::from_x_y_ranges(left..=right, rect.y_range()),
            theme::tint(ui, color, fill.clamp(0.35, 1.0)),
        );
        at = next;
    }
    painter.add(mesh);
    for (place, bar, selected, color) in labels {
        if selected {
            painter.rect_stroke(
                place,
                0.0,
                Stroke::new(2.0, theme::strong(ui)),
                StrokeKind::Inside,
            );
        }
        if rect.height() >= 11.0 && place.width() > 22.0 {
            let step = &scene.programs[bar.program as usize].steps[bar.step as usize];
            let text = Color32::from_gray(if luma(color) > 120.0 { 10 } else { 240 });
            let left = place.left().max(frame.bars.left());
            let room = place.right() - left - 5.0;
            if let Some(name) = fitting_name(ui, &step.name, room) {
                text_within(
                    ui,
                    painter,
                    pos2(left + 3.0, place.center().y),
                    room + 1.0,
                    name,
                    text,
                );
            }
        }
    }
}

/// The longest end of a dotted name that fits: a cut one would be read as another.
fn fitting_name<'a>(ui: &Ui, name: &'a str, room: f32) -> Option<&'a str> {
    let starts = std::iter::once(0).chain(name.match_indices('.').map(|(at, _)| at + 1));
    let mut ends = starts.map(|start| &name[start..]);
    ends.find(|end| {
        let galley = ui.painter().layout_no_wrap(
            (*end).to_owned(),
            FontId::proportional(11.0),
            Color32::WHITE,
        );
        galley.size().x <= room
    })
}

fn luma(color: Color32) -> f32 {
    0.3 * f32::from(color.r()) + 0.6 * f32::from(color.g()) + 0.1 * f32::from(color.b())
}

/// One line of small text, cut at `width`.
pub(crate) fn text_within(
    ui: &Ui,
    painter: &egui::Painter,
    left_center: Pos2,
    width: f32,
    text: &str,
    color: Color32,
) {
    if width < 14.0 {
        return;
    }
    let mut job = egui::text::LayoutJob::simple_singleline(
        text.to_owned(),
        FontId::proportional(11.0),
        color,
    );
    job.wrap = egui::text::TextWrapping::truncate_at_width(width);
    let galley = ui.fonts_mut(|fonts| fonts.layout_job(job));
    painter.galley(left_center - vec2(0.0, galley.size().y / 2.0), galley, color);
}

fn interact(ui: &Ui, scene: &Scene, view: &mut View, frame: &Frame, response: &Response) {
    let (mut from, mut to) = (frame.from, frame.to);
    let lane_at = |at: Pos2| {
        let lane = ((at.y - frame.bars.top()) / frame.lane_height).max(0.0) as usize;
        lane.min(scene.lanes.len() - 1)
    };
    if let Some(at) = response.hover_pos().filter(|at| frame.bars.contains(*at)) {
        let (scroll, pinch) = ui.input(|input| (input.smooth_scroll_delta(), input.zoom_delta()));
        let zoom = f64::from(pinch) * (f64::from(scroll.y) * 0.005).exp();
        zoom_around(&mut from, &mut to, frame.time(at.x), zoom);
        let pan = f64::from(scroll.x / frame.bars.width()) * (to - from);
        from -= pan;
        to -= pan;
        ui.input_mut(|input| input.smooth_scroll_delta = Vec2::ZERO);
        hover(ui, scene, view, frame, response, at, lane_at(at));
    }
    let shift = ui.input(|input| input.modifiers.shift);
    if response.dragged_by(PointerButton::Primary) || response.dragged_by(PointerButton::Middle) {
        if let (true, Some(at)) = (shift, response.interact_pointer_pos()) {
            let origin = ui.input(|input| input.pointer.press_origin()).unwrap_or(at);
            let (a, b) = (frame.time(origin.x), frame.time(at.x));
            let (first, last) = (lane_at(origin), lane_at(at));
            view.area = Some(Area {
                start: a.min(b),
                end: a.max(b),
                first_lane: first.min(last),
                last_lane: first.max(last),
            });
        } else {
            let pan = f64::from(response.drag_delta().x / frame.bars.width()) * (to - from);
            from -= pan;
            to -= pan;
        }
    }
    if let (true, Some(at)) = (response.clicked(), response.interact_pointer_pos()) {
        view.area = None;
        match bar_at(scene, view, frame, at, lane_at(at)) {
            Some(bar) => {
                if !scene.runs.is_empty()
                    && bar.run != u32::MAX
                    && view.run != Some(bar.run as usize)
                {
                    view.show_run(scene, bar.run as usize);
                }
                view.selection = Selection::Step(bar.step as usize, view.run);
                view.scroll_to_selection = true;
            }
            None => view.selection = Selection::Nothing,
        }
    }
    view.time = Some((from, to));
}

/// Scales a range by `1 / zoom`, leaving one time where it is. A nanosecond is the narrowest.
pub fn zoom_around(from: &mut f64, to: &mut f64, time: f64, zoom: f64) {
    let zoom = zoom.min((*to - *from).max(1.0));
    // Beyond a century there is nothing to see, and arithmetic begins to lose nanoseconds.
    if zoom <= 0.0 || !zoom.is_finite() || (*to - *from) / zoom > 3e18 {
        return;
    }
    *from = time - (time - *from) / zoom;
    *to = time + (*to - time) / zoom;
}

fn bar_at(scene: &Scene, view: &View, frame: &Frame, at: Pos2, lane: usize) -> Option<Bar> {
    let row = frame.lane(lane);
    let time = frame.time(at.x);
    let slack = (frame.to - frame.from) / f64::from(frame.bars.width());
    let found = |bars: &Bars, offset: u64| {
        let first = bars.first_after(0, (time - slack - offset as f64).max(0.0) as u64);
        let bar = *bars.rows().get(first)?;
        (bar.start as f64 + offset as f64 <= time + slack).then_some(bar)
    };
    if at.y < row.top() + row.height() * 0.42 {
        predicted_bars(scene, view, frame, lane).into_iter().find_map(|(offset, bars, run)| {
            let bar = found(bars, offset)?;
            Some(Bar { run: run.map_or(u32::MAX, |run| run as u32), ..bar })
        })
    } else {
        found(&scene.lanes[lane].measured, 0)
    }
}

fn hover(
    ui: &Ui,
    scene: &Scene,
    view: &View,
    frame: &Frame,
    response: &Response,
    at: Pos2,
    lane: usize,
) {
    ui.painter().vline(at.x, frame.bars.y_range(), Stroke::new(0.5, theme::weak(ui)));
    let Some(bar) = bar_at(scene, view, frame, at, lane) else { return };
    let Some(step) =
        scene.programs.get(bar.program as usize).and_then(|p| p.steps.get(bar.step as usize))
    else {
        return;
    };
    let mut text = format!(
        "{}\n{}\npredicted {}",
        step.name,
        step.action,
        quantity::nanos(step.predicted_nanos as f64)
    );
    if bar.run != u32::MAX && at.y >= frame.lane(lane).top() + frame.lane_height * 0.42 {
        text += &format!(
            "\nmeasured {} in run {}",
            quantity::nanos((bar.end - bar.start) as f64),
            bar.run
        );
    }
    response.clone().on_hover_ui_at_pointer(|ui| {
        ui.label(text);
    });
}

fn legend(ui: &mut Ui, scene: &Scene) {
    ui.horizontal(|ui| {
        ui.spacing_mut().item_spacing.x = 6.0;
        let mut chip = |color: Color32, text: &str| {
            let (rect, _) = ui.allocate_exact_size(vec2(14.0, 4.0), Sense::hover());
            ui.painter().rect_filled(rect, 1.0, color);
            ui.small(text);
            ui.add_space(6.0);
        };
        chip(theme::kind(crate::scene::Kind::Transfer), "transfer, or waiting for one");
        chip(theme::kind(crate::scene::Kind::Collective), "collective, or waiting for one");
        chip(theme::idle(IdleCause::Dependency(0)), "waiting for a result");
        chip(theme::idle(IdleCause::NoWork), "no work");
        let color = Color32::from_rgb(255, 80, 60);
        chip(
            color,
            if scene.runs.is_empty() { "critical path" } else { "critical path of the run" },
        );
        ui.small("· wheel or W S zoom, drag or A D pan, shift-drag adds up, F fits");
    });
}
