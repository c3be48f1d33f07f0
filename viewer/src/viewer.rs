//! The window's contents and what its menus and keys do.

mod input;
mod menus;
mod question;

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use egui::{Key, Modifiers, RichText, Ui, ViewportCommand};
use ir::asked::Objective;
use tempfile::TempDir;

use crate::compare::{self, Comparison};
use crate::document::{Document, is_trace};
use crate::files::{self, Chosen, Purpose};
use crate::recent::Recent;
use crate::scene::Scene;
use crate::view::{Panel, View};
use crate::what_if::{Answer, Question};
use crate::{
    compare_panel, details_panel, help, keys, memory_panel, placement_panel, search, step_panel,
    theme, timeline_panel,
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
    /// What the answers to what-if questions minimise.
    pub objective: Objective,
    /// The program that answers what-if questions.
    pub compiler: PathBuf,
    comparison: Option<(Second, usize, Comparison)>,
    /// Folders of the questions that were asked; they go with the window.
    answers: Vec<TempDir>,
    chosen: (Sender<Chosen>, Receiver<Chosen>),
    export: Option<(Purpose, PathBuf)>,
    watched: f64,
    /// The window's title as it was sent last: some window systems do not say what it is.
    title: String,
}

/// What the document is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Second {
    /// The answer to a question.
    Answer,
    /// Another document.
    Other,
}

impl Viewer {
    /// A viewer with a document or, without one, an empty window.
    pub fn new(document: Option<Document>, compiler: PathBuf) -> Self {
        let view =
            document.as_ref().map_or_else(|| View::new(&Scene::default()), |d| View::new(&d.scene));
        let objective = document.as_ref().map(|document| document.plan.asked.objective);
        Viewer {
            document,
            other: None,
            objective: objective.unwrap_or_default(),
            view,
            question: None,
            message: None,
            recent: Recent::default(),
            compiler,
            comparison: None,
            answers: Vec::new(),
            chosen: channel(),
            export: None,
            watched: 0.0,
            title: String::new(),
        }
    }

    /// Opens files in place of what is open. What cannot be read becomes a message.
    pub fn open(&mut self, plan: &Path, trace: Option<&Path>) {
        match Document::open(plan, trace) {
            Ok(document) => {
                self.recent.add(plan, trace);
                self.view = self.view.turn_to(&document.scene);
                self.objective = document.plan.asked.objective;
                self.document = Some(document);
                // It was asked about what was open.
                self.question = None;
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

    /// Puts a document beside what is open, in place of an answer.
    pub fn set_other(&mut self, other: Document) {
        self.other = Some(other);
        self.question.take_if(|question| matches!(question.answer, Answer::Plan(_)));
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
                .default_size((ui.available_width() * 0.3).min(310.0))
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
                ui.label("Drop plan.ron, and trace.ron if there is one, onto this window,");
                ui.label("or choose File → Open plan…");
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
            Panel::Compare => self.compare(ui),
        }
    }

    fn compare(&mut self, ui: &mut Ui) {
        self.refresh_comparison();
        let Some(document) = &self.document else { return };
        let first_title = document.title();
        let second = second(self.question.as_ref(), self.other.as_ref());
        let second_title = match (second, &self.question) {
            (Some((Second::Answer, _)), Some(question)) => question.title.clone(),
            (Some((_, other)), _) => other.title(),
            (None, _) => String::new(),
        };
        let pair = second.zip(self.comparison.as_ref());
        let pair = pair.map(|((_, other), (_, _, comparison))| compare_panel::Other {
            scene: &other.scene,
            first_title: &first_title,
            second_title: &second_title,
            comparison,
        });
        compare_panel::show(ui, &document.scene, pair, &mut self.view);
    }

    /// Compares anew where the comparison at hand is of another document or program.
    fn refresh_comparison(&mut self) {
        let second = second(self.question.as_ref(), self.other.as_ref());
        let (Some(document), Some((which, other))) = (&self.document, second) else { return };
        let program = self.view.program;
        let known = self.comparison.as_ref().map(|(which, program, _)| (*which, *program));
        if known != Some((which, program)) {
            let comparison = compare::compare(&document.scene, &other.scene, program);
            self.comparison = Some((which, program, comparison));
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
}

/// What the document is compared with: the answer to a question, else the other document.
fn second<'a>(
    question: Option<&'a Question>,
    other: Option<&'a Document>,
) -> Option<(Second, &'a Document)> {
    let answer = question.and_then(|question| match &question.answer {
        Answer::Plan(document) => Some((Second::Answer, document.as_ref())),
        Answer::Awaited(_) | Answer::Refused(_) => None,
    });
    answer.or(other.map(|other| (Second::Other, other)))
}

impl Viewer {
    /// Gives the window its title where that has changed: every command to a window draws another frame.
    fn send_title(&mut self, context: &egui::Context) {
        let title = self.document.as_ref().map(Document::title);
        let title = title
            .map_or_else(|| "hybrid-viewer".to_owned(), |title| format!("{title} – hybrid-viewer"));
        if self.title != title {
            self.title.clone_from(&title);
            context.send_viewport_cmd(ViewportCommand::Title(title));
        }
    }
}

impl eframe::App for Viewer {
    fn ui(&mut self, ui: &mut Ui, _: &mut eframe::Frame) {
        self.send_title(ui.ctx());
        Viewer::ui(self, ui);
    }
}

/// What `Ctrl` with a key means here, told from typing.
pub(crate) fn command(ui: &Ui, key: Key) -> bool {
    ui.input_mut(|input| input.consume_key(Modifiers::COMMAND, key))
}

#[cfg(test)]
mod tests {
    use egui::{Context, RawInput};

    use super::*;

    #[test]
    fn a_title_is_sent_once() {
        let mut viewer = Viewer::new(None, "hybridc".into());
        let context = Context::default();
        let mut titles = || {
            let output = context.run_ui(RawInput::default(), |ui| viewer.send_title(ui.ctx()));
            let commands = output.viewport_output.into_values().flat_map(|output| output.commands);
            commands.filter(|command| matches!(command, ViewportCommand::Title(_))).count()
        };
        assert_eq!([titles(), titles(), titles()], [1, 0, 0]);
    }
}
