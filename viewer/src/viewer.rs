//! The window's contents and what its menus and keys do.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use anyhow::{Context as _, Result};
use egui::{Key, Modifiers, RichText, Ui, ViewportCommand};

use crate::compare::{self, Comparison};
use crate::document::{Document, is_trace};
use crate::files::{self, Chosen, Purpose};
use crate::picture::{self, Shot};
use crate::quantity;
use crate::recent::Recent;
use crate::scene::Scene;
use crate::theme::{self, Coloring};
use crate::view::{Panel, View, Wish};
use crate::what_if::{Answer, Question};
use crate::{
    compare_panel, details_panel, help, keys, memory_panel, perfetto, placement_panel, search,
    step_panel, timeline_panel,
};

/// How often files are looked at for changes.
const WATCH: Duration = Duration::from_secs(1);

/// The program.
pub struct Viewer {
    /// What is open.
    pub document: Option<Document>,
    /// What it is compared with.
    pub other: Option<Document>,
    /// What the user looks at.
    pub view: View,
    /// The question asked last.
    pub question: Option<Question>,
    /// What went wrong last.
    pub message: Option<String>,
    /// The list of recent files.
    pub recent: Recent,
    /// The program that answers what-if questions.
    pub compiler: PathBuf,
    comparison: Option<(usize, Comparison)>,
    chosen: (Sender<Chosen>, Receiver<Chosen>),
    export: Option<(Purpose, PathBuf)>,
    watched: f64,
}

impl Viewer {
    /// A viewer with a document or, without one, an empty window.
    pub fn new(document: Option<Document>, compiler: PathBuf) -> Self {
        let view =
            document.as_ref().map_or_else(|| View::new(&Scene::default()), |d| View::new(&d.scene));
        Viewer {
            document,
            other: None,
            view,
            question: None,
            message: None,
            recent: Recent::default(),
            compiler,
            comparison: None,
            chosen: channel(),
            export: None,
            watched: 0.0,
        }
    }

    /// Opens files in place of what is open. What cannot be read becomes a message.
    pub fn open(&mut self, plan: &Path, trace: Option<&Path>) {
        match Document::open(plan, trace) {
            Ok(document) => {
                self.recent.add(plan, trace);
                self.view = self.view.turn_to(&document.scene);
                self.document = Some(document);
                self.comparison = None;
                self.message = None;
            }
            Err(error) => self.message = Some(format!("{error:#}")),
        }
    }

    /// Opens a second plan, or another trace of the same plan, beside what is open.
    pub fn compare_with(&mut self, path: &Path) {
        let opened = match &self.document {
            Some(document) if is_trace(path) => Document::open(&document.plan_path, Some(path)),
            _ => Document::open(path, None),
        };
        match opened {
            Ok(other) => self.set_other(other),
            Err(error) => self.message = Some(format!("{error:#}")),
        }
    }

    /// Puts a document beside what is open.
    pub fn set_other(&mut self, other: Document) {
        self.other = Some(other);
        self.comparison = None;
        self.view.panel = Panel::Compare;
    }

    /// Where file dialogs send what was chosen.
    pub fn chosen(&self) -> Sender<Chosen> {
        self.chosen.0.clone()
    }

    /// Draws everything and takes all input.
    pub fn ui(&mut self, ui: &mut Ui) {
        self.take_files(ui);
        self.export(ui);
        keys::take(ui, self);
        egui::Panel::top("menu").show(ui, |ui| self.menus(ui));
        if self.document.is_some() {
            egui::Panel::top("facts").show(ui, |ui| self.facts(ui));
        }
        if let Some(message) = self.message.clone() {
            egui::Panel::bottom("message").show(ui, |ui| {
                ui.horizontal_wrapped(|ui| {
                    ui.colored_label(theme::alarm(ui), message);
                    if ui.button("dismiss").clicked() {
                        self.message = None;
                    }
                });
            });
        }
        if let Some(document) = &self.document {
            let scene = &document.scene;
            let view = &mut self.view;
            egui::Panel::right("details")
                .default_size(310.0)
                .show(ui, |ui| details_panel::show(ui, scene, view));
            if matches!(view.panel, Panel::Placement | Panel::Steps) {
                let height = (ui.available_height() * 0.36).max(160.0);
                egui::Panel::bottom("timeline")
                    .default_size(height)
                    .resizable(true)
                    .show(ui, |ui| timeline_panel::show(ui, scene, view));
            }
        }
        egui::CentralPanel::default().show(ui, |ui| self.central(ui));
        self.ask(ui);
        self.show_question(ui);
        if let Some(document) = &self.document {
            search::show(ui, &document.scene, &mut self.view);
        }
        help::show(ui, &mut self.view);
    }

    fn central(&mut self, ui: &mut Ui) {
        let Some(document) = &self.document else {
            ui.add_space(40.0);
            ui.vertical_centered(|ui| {
                ui.heading("Open a plan");
                ui.label("Drop plan.ron, and trace.ron if there is one, onto this window, or choose File → Open.");
                for (plan, trace) in self.recent.opened.clone() {
                    if ui.link(files::name(&plan, trace.as_deref())).clicked() {
                        self.open(&plan, trace.as_deref());
                    }
                }
            });
            return;
        };
        let scene = &document.scene;
        match self.view.panel {
            Panel::Placement => placement_panel::show(ui, scene, &mut self.view),
            Panel::Timeline => timeline_panel::show(ui, scene, &mut self.view),
            Panel::Memory => memory_panel::show(ui, scene, &mut self.view),
            Panel::Steps => step_panel::show(ui, scene, &mut self.view),
            Panel::Compare => {
                let program = self.view.program;
                if let Some(other) = &self.other
                    && self.comparison.as_ref().is_none_or(|(compared, _)| *compared != program)
                {
                    self.comparison =
                        Some((program, compare::compare(scene, &other.scene, program)));
                }
                let (first, second) = (
                    document.title(),
                    self.other.as_ref().map(Document::title).unwrap_or_default(),
                );
                let asked = self.question.as_ref().filter(|q| matches!(q.answer, Answer::Plan(_)));
                let second = asked.map_or(second, |question| question.title.clone());
                let answer = asked.and_then(|question| match &question.answer {
                    Answer::Plan(document) => Some(document.as_ref()),
                    Answer::Awaited(_) | Answer::Refused(_) => None,
                });
                let other = answer.or(self.other.as_ref());
                if let Some(answer) = answer
                    && self.comparison.as_ref().is_none_or(|(compared, _)| *compared != program)
                {
                    self.comparison =
                        Some((program, compare::compare(scene, &answer.scene, program)));
                }
                let pair = other.zip(self.comparison.as_ref()).map(|(other, (_, comparison))| {
                    compare_panel::Other {
                        scene: &other.scene,
                        first_title: &first,
                        second_title: &second,
                        comparison,
                    }
                });
                compare_panel::show(ui, scene, pair, &mut self.view);
            }
        }
    }

    /// The facts of the program shown, and what is wrong with the files.
    fn facts(&mut self, ui: &mut Ui) {
        let Some(document) = &self.document else { return };
        for (number, line) in document.scene.headline(self.view.program).into_iter().enumerate() {
            let text = RichText::new(line).size(14.0);
            ui.label(if number == 0 { text.strong() } else { text });
        }
        let findings = &document.scene.findings;
        if let Some(first) = findings.first() {
            let more = findings.len() - 1;
            let more = if more > 0 {
                format!(" (and {more} more, listed on the right)")
            } else {
                String::new()
            };
            ui.colored_label(theme::alarm(ui), format!("! {first}{more}"));
        }
    }

    fn menus(&mut self, ui: &mut Ui) {
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
                    self.view.panel = panel;
                }
            }
            ui.separator();
            self.choosers(ui);
        });
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
    }

    /// Starts the compiler when something was wished for, and takes its answer.
    fn ask(&mut self, ui: &Ui) {
        if let (Some((wish, at)), Some(document)) = (self.view.wish.take(), &self.document) {
            let context = ui.ctx().clone();
            let wake = move || context.request_repaint();
            self.question =
                Some(Question::ask(&self.compiler, document, self.view.program, &wish, at, wake));
        }
        if self.question.as_mut().is_some_and(Question::poll) {
            self.comparison = None;
        }
    }

    fn show_question(&mut self, ui: &Ui) {
        let (Some(question), Some(document)) = (&self.question, &self.document) else { return };
        let mut open = true;
        let mut keep = false;
        let mut compare = false;
        let mut save = false;
        let program = self.view.program;
        let window = egui::Window::new(format!("What if: {}", question.title))
            .id(egui::Id::unique("what if"));
        // Answers appear where the question was asked: where the drag ended.
        window
            .default_pos(question.at)
            .default_width(420.0)
            .collapsible(false)
            .open(&mut open)
            .show(ui.ctx(), |ui| {
                match &question.answer {
                    Answer::Awaited(_) => {
                        ui.horizontal(|ui| {
                            ui.spinner();
                            ui.label("the compiler is at work");
                        });
                    }
                    Answer::Refused(error) => drop(ui.colored_label(theme::alarm(ui), error)),
                    Answer::Plan(answer) => {
                        for (number, row) in document.scene.programs.iter().enumerate() {
                            let Some(other) = answer
                                .scene
                                .programs
                                .iter()
                                .position(|other| other.name == row.name)
                            else {
                                continue;
                            };
                            let before = document.scene.summaries[number].predicted_nanos as f64;
                            let after = answer.scene.summaries[other].predicted_nanos as f64;
                            let text = format!(
                                "{}: {} → {} ({})",
                                row.name,
                                quantity::nanos(before),
                                quantity::nanos(after),
                                quantity::change(after / before.max(1.0) - 1.0)
                            );
                            let color =
                                if after > before { theme::alarm(ui) } else { theme::good(ui) };
                            ui.label(RichText::new(text).color(color).strong());
                        }
                        let moved =
                            compare::compare(&document.scene, &answer.scene, program).blocks;
                        for row in moved.iter().take(6) {
                            ui.label(format!("{}: {} → {}", row.subject, row.before, row.after));
                        }
                        ui.horizontal(|ui| {
                            compare = ui.button("Compare").clicked();
                            keep = ui.button("Look at this plan").clicked();
                        });
                    }
                }
                if !question.command.is_empty() {
                    ui.add_space(4.0);
                    ui.label(RichText::new(&question.command).monospace().small());
                    ui.horizontal(|ui| {
                        if ui.button("Copy command").clicked() {
                            ui.ctx().copy_text(question.command.clone());
                        }
                        save = !question.pins.is_empty() && ui.button("Save pins…").clicked();
                    });
                }
            });
        if save {
            files::choose(Purpose::Pins, self.chosen.0.clone(), ui.ctx().clone());
        }
        if compare {
            self.comparison = None;
            self.view.panel = Panel::Compare;
        }
        if keep && let Some(Question { answer: Answer::Plan(answer), .. }) = self.question.take() {
            self.view = self.view.turn_to(&answer.scene);
            self.document = Some(*answer);
            self.comparison = None;
        } else if !open {
            self.question = None;
            self.comparison = None;
        }
    }

    /// Files dropped, chosen in a dialog, or changed on disk.
    fn take_files(&mut self, ui: &Ui) {
        let dropped: Vec<PathBuf> = ui.input(|input| {
            input.raw.dropped_files.iter().map(|file| file.path().to_owned()).collect()
        });
        let (traces, plans): (Vec<_>, Vec<_>) =
            dropped.into_iter().partition(|path| is_trace(path));
        if let Some(plan) = plans.first() {
            self.open(plan, traces.first().map(PathBuf::as_path));
        } else if let Some(trace) = traces.first() {
            self.open_trace(trace);
        }
        while let Ok(Chosen { purpose, path }) = self.chosen.1.try_recv() {
            match purpose {
                Purpose::Plan => self.open(&path, None),
                Purpose::Trace => self.open_trace(&path),
                Purpose::Compare => self.compare_with(&path),
                Purpose::Png | Purpose::Svg => {
                    self.export = Some((purpose, path));
                    // The menu that asked for it is gone in the next frame.
                    ui.ctx().request_repaint();
                    return;
                }
                Purpose::Perfetto => self.report(|viewer| viewer.save_perfetto(&path)),
                Purpose::Pins => self.report(|viewer| match &viewer.question {
                    Some(question) => question.save_pins(&path),
                    None => Ok(()),
                }),
            }
        }
        self.watch(ui);
    }

    fn open_trace(&mut self, trace: &Path) {
        match self.document.as_ref().map(|document| document.plan_path.clone()) {
            Some(plan) => self.open(&plan, Some(trace)),
            None => self.message = Some("a trace is opened after its plan".to_owned()),
        }
    }

    /// Reads the files again when they have changed.
    fn watch(&mut self, ui: &Ui) {
        ui.ctx().request_repaint_after(WATCH);
        let now = ui.input(|input| input.time);
        if now < self.watched + WATCH.as_secs_f64() {
            return;
        }
        self.watched = now;
        if self.document.as_ref().is_some_and(Document::has_changed) {
            self.reload();
        }
    }

    /// Reads the files again and keeps the view. A file that cannot be read now leaves what is open.
    pub fn reload(&mut self) {
        let Some(document) = &self.document else { return };
        match Document::open(&document.plan_path, document.trace_path.as_deref()) {
            Ok(document) => {
                self.view.revisit(&document.scene);
                self.document = Some(document);
                self.comparison = None;
                self.message = None;
            }
            // It may be half written: the next look tells.
            Err(error) => self.message = Some(format!("{error:#}")),
        }
    }

    fn report(&mut self, action: impl FnOnce(&mut Self) -> Result<()>) {
        if let Err(error) = action(self) {
            self.message = Some(format!("{error:#}"));
        }
    }

    /// Writes the trace for ui.perfetto.dev.
    pub fn save_perfetto(&self, path: &Path) -> Result<()> {
        let Some(document) = &self.document else { return Ok(()) };
        let text = perfetto::trace_events(&document.scene).to_string();
        std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))
    }

    fn export(&mut self, ui: &Ui) {
        let Some((purpose, path)) = self.export.take() else { return };
        let context = ui.ctx();
        let size = context.content_rect().size();
        let shot = Shot {
            size: size.into(),
            scale: context.pixels_per_point(),
            dark: ui.visuals().dark_mode,
        };
        let memory = context.memory(Clone::clone);
        self.report(|viewer| {
            viewer.save_picture(purpose == Purpose::Svg, &path, shot, Some(memory))
        });
    }

    /// Draws the view to a file.
    pub fn save_picture(
        &mut self,
        as_svg: bool,
        path: &Path,
        shot: Shot,
        memory: Option<egui::Memory>,
    ) -> Result<()> {
        if as_svg {
            let text = picture::vectors(shot, memory, |ui| self.ui(ui));
            std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))
        } else {
            let pixels = picture::pixels(shot, memory, |ui| self.ui(ui));
            picture::save_png(path, &pixels)
        }
    }
}

impl eframe::App for Viewer {
    fn ui(&mut self, ui: &mut Ui, _: &mut eframe::Frame) {
        let title = self.document.as_ref().map(Document::title);
        let title = title
            .map_or_else(|| "hybrid-viewer".to_owned(), |title| format!("{title} – hybrid-viewer"));
        if ui.input(|input| input.viewport().title.as_deref() != Some(&title)) {
            ui.ctx().send_viewport_cmd(ViewportCommand::Title(title));
        }
        Viewer::ui(self, ui);
    }
}

/// What `Ctrl` with a key means here, told from typing.
pub(crate) fn command(ui: &Ui, key: Key) -> bool {
    ui.input_mut(|input| input.consume_key(Modifiers::COMMAND, key))
}
