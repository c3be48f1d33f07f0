//! A window without a screen, clicked and typed into.

#![allow(
    dead_code,
    unreachable_pub,
    clippy::allow_attributes,
    clippy::unwrap_used,
    reason = "each test crate uses a part of it"
)]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use egui::{Event, Key, Modifiers, PointerButton, Pos2, vec2};
use egui_kittest::Harness;
use egui_kittest::kittest::Queryable as _;
use ir::plan::Plan;
use tempfile::TempDir;
use viewer::Viewer;
use viewer::document::Document;
use viewer::what_if::Answer;

use crate::made_up::{self, Pace, Style, Wish};

/// A window on a plan of 12 layers on a GPU and two NUMA nodes, with a trace of it.
pub struct Window {
    pub folder: TempDir,
    pub harness: Harness<'static, Viewer>,
}

impl Window {
    pub fn open() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (plan, trace) = write(folder.path(), "plan", Wish::new(12, 1, 2, Style::Pipeline));
        let document = Document::open(&plan, Some(&trace)).unwrap();
        Self::on(folder, Viewer::new(Some(document), "no-such-compiler".into()))
    }

    pub fn on(folder: TempDir, viewer: Viewer) -> Self {
        let mut harness = Harness::builder()
            .with_size(vec2(1600.0, 1000.0))
            .with_context_setup(viewer::theme::install)
            .build_ui_state(|ui, viewer: &mut Viewer| viewer.ui(ui), viewer);
        harness.run_steps(3);
        Window { folder, harness }
    }

    pub fn viewer(&self) -> &Viewer {
        self.harness.state()
    }

    pub fn click(&mut self, label: &str) {
        self.harness.get_by_label(label).click();
        self.harness.run_steps(2);
    }

    pub fn press(&mut self, modifiers: Modifiers, key: Key) {
        self.harness.key_press_modifiers(modifiers, key);
        self.harness.run_steps(2);
    }

    pub fn shows(&self, text: &str) -> bool {
        self.harness.query_all_by_label_contains(text).next().is_some()
    }

    pub fn center(&self, label: &str) -> Pos2 {
        self.harness.get_by_label(label).rect().center()
    }

    pub fn drag(&mut self, from: Pos2, to: Pos2, modifiers: Modifiers) {
        self.harness.event(Event::ModifiersChanged(modifiers));
        let button = |pos, pressed| Event::PointerButton {
            pos,
            button: PointerButton::Primary,
            pressed,
            modifiers,
        };
        for events in [
            vec![Event::PointerMoved(from)],
            vec![button(from, true)],
            vec![Event::PointerMoved(from.lerp(to, 0.5))],
            vec![Event::PointerMoved(to)],
            vec![button(to, false)],
        ] {
            events.into_iter().for_each(|event| self.harness.event(event));
            self.harness.step();
        }
        self.harness.event(Event::ModifiersChanged(Modifiers::NONE));
        self.harness.run_steps(2);
    }

    /// A compiler that does what the shell script says.
    pub fn compiler(&mut self, script: &str) {
        let path = self.folder.path().join("hybridc");
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        self.harness.state_mut().compiler = path;
    }

    /// A compiler that answers with this plan.
    pub fn answer_with(&mut self, plan: &Path) {
        let plan = plan.display();
        self.compiler(&format!("while [ \"$1\" != -o ]; do shift; done\ncp {plan} \"$2\""));
    }

    pub fn await_answer(&mut self) {
        /// A machine that is busy takes seconds to start a shell.
        const PATIENCE: Duration = Duration::from_secs(30);
        let asked = Instant::now();
        while asked.elapsed() < PATIENCE {
            self.harness.run_steps(1);
            let awaited = matches!(&self.viewer().question, Some(q) if matches!(q.answer, Answer::Awaited(_)));
            if self.viewer().question.is_some() && !awaited {
                self.harness.run_steps(2);
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("the compiler did not answer in {PATIENCE:?}");
    }
}

/// Writes a made-up plan and a trace of it.
pub fn write(folder: &Path, name: &str, wish: Wish) -> (PathBuf, PathBuf) {
    write_plan(folder, name, &made_up::plan(wish))
}

/// Writes a plan and a trace of it.
pub fn write_plan(folder: &Path, name: &str, plan: &Plan) -> (PathBuf, PathBuf) {
    write_at(folder, name, plan, Pace { percent: 112, prompt: None })
}

/// Writes a plan and a trace of it at some pace.
pub fn write_at(folder: &Path, name: &str, plan: &Plan, pace: Pace) -> (PathBuf, PathBuf) {
    let text = plan.to_ron().unwrap();
    let trace = made_up::trace_at(plan, ir::fingerprint(text.as_bytes()), 300, pace);
    let paths = (folder.join(format!("{name}.ron")), folder.join(format!("{name}-trace.ron")));
    fs::write(&paths.0, text).unwrap();
    fs::write(&paths.1, trace.to_ron().unwrap()).unwrap();
    paths
}
