//! What keys do.

use egui::{Key, Ui, ViewportCommand};

use crate::files::{self, Purpose};
use crate::scene::Scene;
use crate::timeline_panel::zoom_around;
use crate::view::{Panel, Selection, View};
use crate::viewer::{Viewer, command};

/// Every key with its meaning, for the help.
pub const KEYS: [(&str, &str); 15] = [
    ("W  S", "zoom in and out"),
    ("A  D", "pan left and right"),
    ("wheel, drag", "zoom and pan with the mouse; shift-drag adds up an area"),
    ("F", "fit the selection or the run; again: the whole trace"),
    ("Esc", "clear the selection, close what is open"),
    (".  ,", "next and previous step of the lane"),
    ("[  ]", "previous and next run of the program"),
    ("1 … 5", "placement, timeline, memory, steps, compare"),
    ("Ctrl+P", "search layers, operations and devices"),
    ("Ctrl+O", "open a plan"),
    ("Ctrl+R", "read the files again"),
    ("Ctrl+Q", "quit"),
    ("Ctrl++  Ctrl+−  Ctrl+0", "larger, smaller, normal text"),
    ("?", "this help"),
    ("drag a card", "ask what it would cost on another device"),
];

/// Takes the keys that are not typed into a text field.
pub fn take(ui: &Ui, viewer: &mut Viewer) {
    if command(ui, Key::P) {
        viewer.view.search = Some(String::new());
    }
    if command(ui, Key::O) {
        files::choose(Purpose::Plan, viewer.chosen(), ui.ctx().clone());
    }
    if command(ui, Key::R) {
        viewer.reload();
    }
    if command(ui, Key::Q) {
        ui.ctx().send_viewport_cmd(ViewportCommand::Close);
    }
    let pressed = |key: Key| ui.input(|input| input.key_pressed(key));
    if pressed(Key::Escape) {
        escape(viewer);
    }
    let typing = ui.ctx().text_edit_focused() || viewer.view.search.is_some();
    let modified = ui.input(|input| input.modifiers.command || input.modifiers.alt);
    if typing || modified {
        return;
    }
    if pressed(Key::Questionmark) {
        viewer.view.help = !viewer.view.help;
    }
    let Some(document) = &viewer.document else { return };
    let (scene, view) = (&document.scene, &mut viewer.view);
    for (panel, key) in
        Panel::ALL.into_iter().zip([Key::Num1, Key::Num2, Key::Num3, Key::Num4, Key::Num5])
    {
        if pressed(key) {
            view.show_panel(panel);
        }
    }
    if pressed(Key::F) {
        view.fit(scene);
    }
    for (key, forward) in [(Key::Period, true), (Key::Comma, false)] {
        if pressed(key) {
            view.step_along(scene, forward);
        }
    }
    for (key, forward) in [(Key::CloseBracket, true), (Key::OpenBracket, false)] {
        if pressed(key) {
            run_along(scene, view, forward);
        }
    }
    travel(ui, view);
}

/// Zooms and pans while a key is down.
fn travel(ui: &Ui, view: &mut View) {
    let Some((mut from, mut to)) = view.time else { return };
    let (dt, down) = ui.input(|input| {
        let down = [Key::W, Key::S, Key::A, Key::D]
            .map(|key| input.key_down(key) || input.key_pressed(key));
        (f64::from(input.stable_dt.min(0.1)), down)
    });
    if !down.contains(&true) {
        return;
    }
    let middle = (from + to) / 2.0;
    // Threefold in a second, and a whole width in a second.
    let speed = 3f64.powf(dt * 2.0);
    if down[0] {
        zoom_around(&mut from, &mut to, middle, speed);
    }
    if down[1] {
        zoom_around(&mut from, &mut to, middle, 1.0 / speed);
    }
    let pan = (to - from) * dt * (f64::from(u8::from(down[3])) - f64::from(u8::from(down[2])));
    view.time = Some((from + pan, to + pan));
    ui.ctx().request_repaint();
}

/// Closes what is on top; else clears area, then selection.
fn escape(viewer: &mut Viewer) {
    let view = &mut viewer.view;
    if view.help {
        view.help = false;
    } else if view.search.is_some() {
        view.search = None;
    } else if viewer.question.is_some() {
        viewer.question = None;
    } else if view.area.is_some() {
        view.area = None;
    } else {
        view.selection = Selection::Nothing;
    }
}

/// Turns to the run of the same program before or after the one shown.
pub fn run_along(scene: &Scene, view: &mut View, forward: bool) {
    let runs: Vec<usize> = scene.runs_of(view.program).collect();
    let Some(at) = runs.iter().position(|&run| Some(run) == view.run) else { return };
    let next = if forward { at + 1 } else { at.wrapping_sub(1) };
    if let Some(&run) = runs.get(next) {
        view.show_run(scene, run);
    }
}
