//! File dialogs, on threads of their own so that the window goes on drawing.

use std::path::{Path, PathBuf};
use std::sync::mpsc::Sender;
use std::thread;

/// What a file is chosen for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To be opened as a plan.
    Plan,
    /// To be opened as a trace of the open plan.
    Trace,
    /// To be compared with what is open.
    Compare,
    /// To hold the view as pixels.
    Png,
    /// To hold the view as a drawing.
    Svg,
    /// To hold the trace for Perfetto.
    Perfetto,
    /// To hold pins.
    Pins,
    /// To hold the answer that is open as a plan.
    Answer,
}

/// What the user chose.
#[derive(Debug)]
pub struct Chosen {
    /// What for.
    pub purpose: Purpose,
    /// Which file.
    pub path: PathBuf,
}

/// Opens the dialog; the choice, if there is one, is sent and a frame asked for.
pub fn choose(purpose: Purpose, sender: Sender<Chosen>, context: egui::Context) {
    thread::spawn(move || {
        let dialog = rfd::FileDialog::new();
        let path = match purpose {
            Purpose::Plan | Purpose::Trace | Purpose::Compare => {
                dialog.add_filter("plan or trace", &["ron"]).pick_file()
            }
            Purpose::Png => dialog.set_file_name("view.png").save_file(),
            Purpose::Svg => dialog.set_file_name("view.svg").save_file(),
            Purpose::Perfetto => dialog.set_file_name("trace.json").save_file(),
            Purpose::Pins => dialog.set_file_name("pins.txt").save_file(),
            Purpose::Answer => dialog.set_file_name("plan.ron").save_file(),
        };
        if let Some(path) = path {
            // The window may have been closed meanwhile: then nobody waits.
            let _ = sender.send(Chosen { purpose, path });
            context.request_repaint();
        }
    });
}

/// A plan and a trace as a line of a menu.
pub fn name(plan: &Path, trace: Option<&Path>) -> String {
    let trace = trace.map(|trace| format!(" + {}", trace.display())).unwrap_or_default();
    format!("{}{trace}", plan.display())
}
