//! Bars of one row: what is visible of them, as one mesh.

use egui::{Color32, FontId, Mesh, Rect, Stroke, StrokeKind, Ui, pos2};

use super::Frame;
use crate::scene::{Bar, Bars, Scene};
use crate::text::text_within;
use crate::theme;
use crate::view::View;

/// What was predicted for one run.
pub(super) struct Predicted<'a> {
    /// Its bars in one lane.
    pub(super) bars: &'a Bars,
    /// Where the run, and so the prediction, starts.
    pub(super) start: u64,
    /// Where another prediction is drawn instead.
    pub(super) until: u64,
    /// The run; `None` where nothing was measured.
    pub(super) run: Option<usize>,
}

/// Predictions in one lane, each at the start of its run; at 0 where the program never ran.
///
/// That of the run shown is whole; others end where the next run begins.
pub(super) fn predicted_bars<'a>(
    scene: &'a Scene,
    view: &View,
    frame: &Frame,
    lane: usize,
) -> Vec<Predicted<'a>> {
    let bars = |program: usize| scene.programs.get(program).and_then(|p| p.bars.get(lane));
    if view.run.is_none() {
        let only = |bars| Predicted { bars, start: 0, until: u64::MAX, run: None };
        return bars(view.program).map(only).into_iter().collect();
    }
    let length = |program: usize| scene.programs.get(program).map_or(0, |p| p.predicted.end);
    let shown = view.run.and_then(|run| scene.runs.get(run));
    let shown = shown.map(|run| run.start..run.start.saturating_add(length(run.program)));
    let mut visible = Vec::new();
    for (number, run) in scene.runs.iter().enumerate() {
        let Some(bars) = bars(run.program) else { continue };
        let mut until = run.start.saturating_add(length(run.program));
        if view.run != Some(number) {
            if shown.as_ref().is_some_and(|shown| shown.contains(&run.start)) {
                continue;
            }
            let next = scene.runs.get(number + 1).map_or(u64::MAX, |next| next.start);
            let shown = shown.as_ref().map(|shown| shown.start);
            let shown = shown.filter(|&start| start > run.start).unwrap_or(u64::MAX);
            until = until.min(next).min(shown);
        }
        let (left, right) = (frame.x(run.start as f64), frame.x(until as f64));
        // Below a few points a prediction says nothing.
        if right >= frame.bars.left() && left <= frame.bars.right() && right - left >= 3.0 {
            visible.push(Predicted { bars, start: run.start, until, run: Some(number) });
        }
    }
    visible
}

/// Bars of one row of one run or of all.
#[derive(Clone, Copy)]
pub(super) struct Strip<'a> {
    /// Where they are drawn, over the whole visible time.
    pub(super) rect: Rect,
    /// What is drawn.
    pub(super) bars: &'a Bars,
    /// Added to their times.
    pub(super) offset: u64,
}

/// How one bar is drawn.
#[derive(Clone, Copy)]
pub(super) struct Look {
    /// Its color.
    pub(super) color: Color32,
    /// Whether it has a frame.
    pub(super) is_selected: bool,
    /// Whether it is underlined.
    pub(super) is_critical: bool,
}

/// Bars narrower than this many points are merged with their neighbours.
const NARROW: f32 = 1.5;
/// No bar narrower than this has a name in it.
const NAMED: f32 = 22.0;
/// Of more bars than this, only so many are looked at when they are merged.
const LOOKED_AT: usize = 16;

/// Bars as one mesh; neighbours below a pixel are merged into one of the color of the longest.
pub(super) fn draw_bars(
    ui: &Ui,
    scene: &Scene,
    frame: &Frame,
    clip: Rect,
    strip: Strip<'_>,
    look: impl Fn(&Bar) -> Look,
) {
    let Strip { rect, bars, offset } = strip;
    let painter = ui.painter().with_clip_rect(clip);
    let nanos_per_point = (frame.to - frame.from) / f64::from(frame.bars.width());
    let begin = (frame.from - offset as f64).max(0.0) as u64;
    let rows = bars.rows();
    let mut mesh = Mesh::default();
    let mut labels = Vec::new();
    let mut at = bars.first_after(0, begin);
    while let Some(bar) = rows.get(at) {
        let start = bar.start.saturating_add(offset) as f64;
        let end = bar.end.saturating_add(offset) as f64;
        if start > frame.to {
            break;
        }
        let (left, right) = (frame.x(start), frame.x(end));
        if right - left >= NARROW {
            let look = look(bar);
            // Neighbours stay apart where there is room.
            let gap = if right - left > 4.0 { 1.0 } else { 0.0 };
            let place = Rect::from_x_y_ranges(left..=right - gap, rect.y_range());
            mesh.add_colored_rect(place, look.color);
            if look.is_critical {
                let line = rect.bottom() - 2.5..=rect.bottom();
                mesh.add_colored_rect(Rect::from_x_y_ranges(left..=right, line), theme::alarm(ui));
            }
            if right - left > NAMED || look.is_selected {
                labels.push((place, *bar, look));
            }
            at += 1;
            continue;
        }
        // Everything that ends within the next three points becomes one bar.
        let until = end + nanos_per_point * 3.0 - offset as f64;
        let next = bars.first_after(at + 1, until.max(0.0) as u64).max(at + 1);
        let merged = &rows[at..next];
        let some = merged.iter().step_by(merged.len().div_ceil(LOOKED_AT));
        let longest = some.max_by_key(|bar| bar.end - bar.start).unwrap_or(bar);
        let last = merged[merged.len() - 1].end.saturating_add(offset) as f64;
        let right = frame.x(last).max(left + 1.0);
        // How full the stretch is; many small bars have few gaps.
        let fill = if merged.len() > LOOKED_AT {
            0.8
        } else {
            let work: f64 = merged.iter().map(|bar| (bar.end - bar.start) as f64).sum();
            (work / (last - start).max(1.0)) as f32
        };
        let color = theme::tint(ui, look(longest).color, fill.clamp(0.35, 1.0));
        mesh.add_colored_rect(Rect::from_x_y_ranges(left..=right, rect.y_range()), color);
        at = next;
    }
    painter.add(mesh);
    for (place, bar, look) in labels {
        if look.is_selected {
            let stroke = Stroke::new(2.0, theme::strong(ui));
            painter.rect_stroke(place, 0.0, stroke, StrokeKind::Inside);
        }
        let step = scene.programs.get(bar.program as usize);
        let step = step.and_then(|program| program.steps.get(bar.step as usize));
        if let (true, true, Some(step)) = (rect.height() >= 11.0, place.width() > NAMED, step) {
            let left = place.left().max(frame.bars.left());
            let room = place.right().min(frame.bars.right()) - left - 5.0;
            if let Some(name) = fitting_name(ui, &step.name, room) {
                let color = Color32::from_gray(if luma(look.color) > 120.0 { 10 } else { 240 });
                let at = pos2(left + 3.0, place.center().y);
                text_within(ui, &painter, at, room + 1.0, name, color);
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
