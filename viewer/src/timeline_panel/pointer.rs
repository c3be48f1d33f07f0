//! What the pointer does on the timeline: zoom, pan, select, sum and explain.

use egui::{PointerButton, Pos2, Response, Stroke, Ui, Vec2};

use super::Frame;
use super::bars::predicted_bars;
use crate::quantity;
use crate::scene::{Bar, Bars, Scene};
use crate::theme;
use crate::view::{Area, Selection, View};

pub(super) fn interact(
    ui: &Ui,
    scene: &Scene,
    view: &mut View,
    frame: &Frame,
    response: &Response,
) {
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
    if view.run.is_none() || at.y < row.top() + row.height() * 0.42 {
        predicted_bars(scene, view, frame, lane).into_iter().find_map(|predicted| {
            let bar = found(predicted.bars, predicted.start)?;
            let run = predicted.run.map_or(u32::MAX, |run| run as u32);
            (time <= predicted.until as f64).then_some(Bar { run, ..bar })
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
    let Some(program) = scene.programs.get(bar.program as usize) else { return };
    let Some(step) = program.steps.get(bar.step as usize) else { return };
    let run = scene.runs.get(bar.run as usize);
    // Predicted is the largest run.
    let tokens = run.map(|run| run.tokens).filter(|&tokens| tokens != program.max_tokens);
    let most = tokens.map(|_| format!(" for {} tokens", program.max_tokens)).unwrap_or_default();
    let tokens = tokens.map(|tokens| format!(" of {tokens} tokens")).unwrap_or_default();
    let mut text = format!(
        "{}\n{}\npredicted {}{most}",
        step.name,
        step.action,
        quantity::nanos(step.predicted_nanos as f64)
    );
    if bar.run != u32::MAX && at.y >= frame.lane(lane).top() + frame.lane_height * 0.42 {
        text += &format!(
            "\nmeasured {} in run {}{tokens}",
            quantity::nanos((bar.end - bar.start) as f64),
            bar.run
        );
    }
    response.clone().on_hover_ui_at_pointer(|ui| {
        ui.label(text);
    });
}
