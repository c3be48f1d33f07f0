//! What-if questions in the window: asked, awaited, answered.

use egui::{RichText, Ui};

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
        if self.question.as_ref().is_some_and(|question| matches!(question.answer, Answer::Plan(_)))
        {
            self.refresh_comparison();
        }
        let Some(question) = &self.question else { return };
        let mut open = true;
        let mut keep = false;
        let mut compare = false;
        let mut save = false;
        let differences = self.comparison.as_ref().map(|(_, _, comparison)| {
            (comparison.programs.as_slice(), comparison.blocks.as_slice())
        });
        let (programs, blocks) = differences.unwrap_or_default();
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
                    Answer::Plan(_) => {
                        for row in programs {
                            let change = row.change.map(quantity::change);
                            let change = change.map(|change| format!(" ({change})"));
                            let text = row.text() + &change.unwrap_or_default();
                            let color = theme::change(ui, row.change);
                            ui.label(RichText::new(text).color(color).strong());
                        }
                        for row in blocks.iter().take(6) {
                            ui.label(row.text());
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
            self.view.panel = Panel::Compare;
        }
        if keep && let Some(Question { answer: Answer::Plan(answer), .. }) = self.question.take() {
            self.view = self.view.turn_to(&answer.scene);
            self.document = Some(*answer);
            self.comparison = None;
        } else if !open {
            self.question = None;
        }
    }
}
