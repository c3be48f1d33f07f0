//! Files that come in, change on disk, or are written.

use std::path::{Path, PathBuf};

use anyhow::Result;
use egui::Ui;

use super::WATCH;
use crate::document::{Document, is_trace};
use crate::files::{Chosen, Purpose};
use crate::perfetto;
use crate::picture::{self, Shot};
use crate::viewer::Viewer;
use crate::what_if;

impl Viewer {
    /// Files dropped, chosen in a dialog, or changed on disk.
    pub(super) fn take_files(&mut self, ui: &Ui) {
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
                Purpose::Answer => self.report(|viewer| viewer.keep_answer(&path)),
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
            self.reload_document();
        }
        if self.other.as_ref().is_some_and(Document::has_changed) {
            self.reload_other();
        }
    }

    /// Reads all files again and keeps the view. A file that cannot be read now leaves what is open.
    pub fn reload(&mut self) {
        self.message = None;
        self.reload_document();
        self.reload_other();
    }

    fn reload_document(&mut self) {
        let Some(document) = &mut self.document else { return };
        match document.read_again() {
            Ok(read) => {
                self.view.revisit(&document.scene, &read.scene);
                if read.plan != document.plan {
                    // It was asked about the plan as it was.
                    self.question = None;
                }
                *document = read;
                self.comparison = None;
                self.message = None;
            }
            // It may be half written: when it changes again it is read again.
            Err(error) => self.message = Some(format!("{error:#}")),
        }
    }

    fn reload_other(&mut self) {
        let Some(other) = &mut self.other else { return };
        match other.read_again() {
            Ok(read) => {
                *other = read;
                self.comparison = None;
            }
            Err(error) => self.message = Some(format!("{error:#}")),
        }
    }

    /// Whether what is open is the answer to a question, in a folder that goes with the window.
    pub(super) fn is_on_answer(&self) -> bool {
        let is_in = |document: &Document| {
            self.answers.iter().any(|folder| document.plan_path.starts_with(folder.path()))
        };
        self.document.as_ref().is_some_and(is_in)
    }

    /// Writes the answer that is open to where it stays, and opens it there, with the same program in the same panel.
    fn keep_answer(&mut self, path: &Path) -> Result<()> {
        // Another plan may have been opened while the dialog was.
        if !self.is_on_answer() {
            return Ok(());
        }
        let Some(document) = &mut self.document else { return Ok(()) };
        what_if::save(document, path)?;
        let kept = Document::open(path, None)?;
        self.view.revisit(&document.scene, &kept.scene);
        *document = kept;
        self.comparison = None;
        self.recent.add(path, None);
        Ok(())
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
        command_line::write(path, text.as_bytes())
    }

    pub(super) fn export(&mut self, ui: &Ui) {
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
            command_line::write(path, text.as_bytes())
        } else {
            let pixels = picture::pixels(shot, memory, |ui| self.ui(ui));
            picture::save_png(path, &pixels)
        }
    }
}
