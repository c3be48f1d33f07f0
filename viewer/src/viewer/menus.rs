//! The menu bar.

use egui::{Ui, ViewportCommand};
use ir::asked::Objective;

use crate::files::{self, Purpose};
use crate::keys;
use crate::theme::Coloring;
use crate::view::{Panel, Wish};
use crate::viewer::Viewer;

impl Viewer {
    pub(super) fn menus(&mut self, ui: &mut Ui) {
        /// What menus, panels and choosers take in one row.
        const ROW_WIDTH: f32 = 1000.0;
        let is_narrow = ui.available_width() < ROW_WIDTH;
        egui::MenuBar::new().ui(ui, |ui| {
            ui.menu_button("File", |ui| self.file_menu(ui));
            ui.menu_button("View", |ui| self.view_menu(ui));
            if self.document.is_some() {
                ui.menu_button("What if", |ui| self.what_if_menu(ui));
            }
            if ui.button("Help").clicked() {
                self.view.help = true;
            }
            ui.separator();
            for panel in Panel::ALL {
                if ui.selectable_label(self.view.panel == panel, panel.name()).clicked() {
                    self.view.show_panel(panel);
                }
            }
            if !is_narrow {
                ui.separator();
                self.choosers(ui);
            }
        });
        if is_narrow {
            ui.horizontal(|ui| self.choosers(ui));
        }
    }

    /// Program, run and coloring.
    fn choosers(&mut self, ui: &mut Ui) {
        let Some(document) = &self.document else { return };
        let scene = &document.scene;
        let name = self.view.program(scene).map(|program| program.name.clone()).unwrap_or_default();
        egui::ComboBox::from_id_salt("program")
            .selected_text(name)
            .show_ui(ui, |ui| {
                for (number, program) in scene.programs.iter().enumerate() {
                    if ui.selectable_label(self.view.program == number, &program.name).clicked() {
                        self.view.show_program(scene, number);
                    }
                }
            })
            .response
            .accessible_name("program");
        if let Some(run) = self.view.run {
            let runs: Vec<usize> = scene.runs_of(self.view.program).collect();
            let at = runs.iter().position(|&other| other == run);
            if ui.button("<").on_hover_text("run before ([)").clicked() {
                keys::run_along(scene, &mut self.view, false);
            }
            let of = at.map(|at| format!("run {run} ({} of {})", at + 1, runs.len()));
            ui.label(of.unwrap_or_default());
            if ui.button(">").on_hover_text("run after (])").clicked() {
                keys::run_along(scene, &mut self.view, true);
            }
        }
        egui::ComboBox::from_id_salt("coloring")
            .selected_text(format!("color: {}", self.view.coloring.name()))
            .width(170.0)
            .show_ui(ui, |ui| {
                for coloring in Coloring::ALL {
                    ui.selectable_value(&mut self.view.coloring, coloring, coloring.name());
                }
            })
            .response
            .accessible_name("color");
        if ui.button("Search").on_hover_text("Ctrl+P").clicked() {
            self.view.search = Some(String::new());
        }
    }

    fn file_menu(&mut self, ui: &mut Ui) {
        let choose = |ui: &mut Ui, title: &str, purpose: Purpose, enabled: bool| {
            if ui.add_enabled(enabled, egui::Button::new(title)).clicked() {
                files::choose(purpose, self.chosen.0.clone(), ui.ctx().clone());
            }
        };
        let open = self.document.is_some();
        choose(ui, "Open plan…", Purpose::Plan, true);
        choose(ui, "Open trace…", Purpose::Trace, open);
        choose(ui, "Compare with…", Purpose::Compare, open);
        // All other plans lie in files of their own already.
        choose(ui, "Save plan…", Purpose::Answer, self.is_on_answer());
        ui.separator();
        choose(ui, "Export view as PNG…", Purpose::Png, open);
        choose(ui, "Export view as SVG…", Purpose::Svg, open);
        choose(ui, "Export trace for Perfetto…", Purpose::Perfetto, open);
        ui.separator();
        ui.menu_button("Recent", |ui| {
            for (plan, trace) in self.recent.opened.clone() {
                if ui.button(files::name(&plan, trace.as_deref())).clicked() {
                    self.open(&plan, trace.as_deref());
                }
            }
        });
        if ui.button("Quit").clicked() {
            ui.ctx().send_viewport_cmd(ViewportCommand::Close);
        }
    }

    fn view_menu(&mut self, ui: &mut Ui) {
        let dark = ui.visuals().dark_mode;
        if ui.button(if dark { "Light" } else { "Dark" }).clicked() {
            ui.ctx().set_theme(if dark { egui::Theme::Light } else { egui::Theme::Dark });
        }
        for (title, factor) in [("Larger text", 1.1), ("Smaller text", 1.0 / 1.1)] {
            if ui.button(title).clicked() {
                let zoom = ui.ctx().zoom_factor() * factor;
                ui.ctx().set_zoom_factor(zoom.clamp(0.4, 4.0));
            }
        }
        if ui.button("Normal text").clicked() {
            ui.ctx().set_zoom_factor(1.0);
        }
    }

    fn what_if_menu(&mut self, ui: &mut Ui) {
        let Some(document) = &self.document else { return };
        let at = ui.max_rect().center_bottom();
        let mut wish = |ui: &mut Ui, title: String, wish: Wish| {
            if ui.button(title).clicked() {
                self.view.wish = Some((wish, at));
            }
        };
        if document.scene.devices.iter().any(|device| device.is_gpu) {
            wish(ui, "GPUs had twice the memory".to_owned(), Wish::GpuMemory { factor: 2 });
        }
        for (device, row) in document.scene.devices.iter().enumerate() {
            wish(
                ui,
                format!("{} had twice the memory", row.name),
                Wish::Memory { device, factor: 2 },
            );
        }
        for (device, row) in document.scene.devices.iter().enumerate() {
            wish(ui, format!("{} were not there", row.name), Wish::Without { device });
        }
        ui.weak("or drag a layer to another column");
        ui.separator();
        ui.label("Answers minimise");
        for objective in Objective::ALL {
            ui.radio_value(&mut self.objective, objective, objective.to_string());
        }
    }
}
