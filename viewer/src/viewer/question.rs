//! What-if questions in the window: asked, awaited, answered.

use egui::{RichText, Ui};

use crate::compare;
use crate::files::{self, Purpose};
use crate::quantity;
use crate::theme;
use crate::view::Panel;
use crate::viewer::Viewer;
use crate::what_if::{Answer, How, Question};

impl Viewer {
    /// Starts the compiler when something was wished for, and takes its answer.
    pub(super) fn ask(&mut self, ui: &Ui) {
        if let (Some((wish, at)), Some(document)) = (self.view.wish.take(), &self.document) {
            let context = ui.ctx().clone();
            let wake = move || context.request_repaint();
            let how = How { objective: self.objective, program: self.view.program, at };
            match tempfile::Builder::new().prefix("hybrid-viewer").tempdir() {
                Ok(folder) => {
                    let question =
                        Question::ask(&self.compiler, document, &wish, how, folder.path(), wake);
                    self.question = Some(question);
                    self.answers.push(folder);
                }
                Err(error) => {
                    self.message = Some(format!("making a folder for the answer: {error}"))
                }
            }
        }
        if self.question.as_mut().is_some_and(Question::poll) {
            self.comparison = None;
        }
    }

    pub(super) fn show_question(&mut self, ui: &Ui) {
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
                    ui.label(RichText::new(&question.command).monospace().size(11.0));
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
}
