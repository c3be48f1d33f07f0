//! The keyboard help.

use egui::{Align2, RichText, Ui};

use crate::keys::KEYS;
use crate::view::View;

/// Draws the help while it is open.
pub fn show(ui: &Ui, view: &mut View) {
    let mut open = view.help;
    let window = egui::Window::new("Keys").collapsible(false).resizable(false).open(&mut open);
    window.anchor(Align2::CENTER_CENTER, [0.0, 0.0]).show(ui.ctx(), |ui| {
        egui::Grid::new("keys").num_columns(2).spacing([24.0, 6.0]).show(ui, |ui| {
            for (keys, meaning) in KEYS {
                ui.label(RichText::new(keys).strong());
                ui.label(meaning);
                ui.end_row();
            }
        });
    });
    view.help = open;
}
