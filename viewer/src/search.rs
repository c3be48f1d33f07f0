//! Finding a layer, step or device by part of its name.

use egui::{Key, Ui};

use crate::scene::Scene;
use crate::view::{Selection, View};

/// Found things, best first: devices, then blocks, then steps whose text contains all words of `text`.
pub fn find(scene: &Scene, view: &View, text: &str, most: usize) -> Vec<(String, Selection)> {
    let words: Vec<String> = text.to_lowercase().split_whitespace().map(str::to_owned).collect();
    let Some(program) = view.program(scene).filter(|_| !words.is_empty()) else {
        return Vec::new();
    };
    let matches = |text: &str| {
        let text = text.to_lowercase();
        words.iter().all(|word| text.contains(word))
    };
    let devices = scene
        .devices
        .iter()
        .enumerate()
        .map(|(number, device)| (format!("device {}", device.name), Selection::Device(number)));
    let blocks = program.blocks.iter().enumerate().map(|(number, block)| {
        let text = format!("{} ({})", block.title(), block.name);
        (text, Selection::Blocks(number, number))
    });
    let steps = program.steps.iter().map(|step| {
        let device = scene.device_name(step.device);
        let text = format!("s{} {} {} on {device}", step.number, step.name, step.verb);
        (text, Selection::Step(step.number, view.run))
    });
    devices.chain(blocks).chain(steps).filter(|(text, _)| matches(text)).take(most).collect()
}

/// Draws the box while it is open.
pub fn show(ui: &mut Ui, scene: &Scene, view: &mut View) {
    let Some(mut text) = view.search.take() else { return };
    let mut chosen = None;
    let mut open = true;
    egui::Window::new("Search")
        .anchor(egui::Align2::CENTER_TOP, [0.0, 60.0])
        .collapsible(false)
        .resizable(false)
        .open(&mut open)
        .show(ui.ctx(), |ui| {
            let hint = "layer, operation or device; Enter takes the first";
            let edit = egui::TextEdit::singleline(&mut text).desired_width(420.0).hint_text(hint);
            let edit = ui.add(edit).accessible_name("what to find");
            let entered = edit.lost_focus() && ui.input(|input| input.key_pressed(Key::Enter));
            edit.request_focus();
            for (number, (title, selection)) in find(scene, view, &text, 12).into_iter().enumerate()
            {
                if ui.selectable_label(number == 0, title).clicked() || (entered && number == 0) {
                    chosen = Some(selection);
                }
            }
        });
    if let Some(selection) = chosen {
        view.selection = selection;
        view.scroll_to_selection = true;
        if let Selection::Step(step, _) = selection {
            view.keep_in_sight(scene, step);
        }
        if let Selection::Blocks(block, _) = selection {
            view.unfold(scene, block);
        }
    } else if open {
        view.search = Some(text);
    }
}
