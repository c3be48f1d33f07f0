//! What the user looks at: everything about the window that is not in the scene.

use std::collections::BTreeSet;
use std::sync::Arc;

use egui::Pos2;

use crate::scene::{Scene, Timing};
use crate::theme::Coloring;

/// The large panels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Panel {
    /// Which layer is where.
    Placement,
    /// What runs when.
    Timeline,
    /// How full each device is.
    Memory,
    /// All steps as a table.
    Steps,
    /// Two plans or traces side by side.
    Compare,
}

impl Panel {
    /// All of them, in the order of their keys.
    pub const ALL: [Panel; 5] =
        [Panel::Placement, Panel::Timeline, Panel::Memory, Panel::Steps, Panel::Compare];

    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Panel::Placement => "Placement",
            Panel::Timeline => "Timeline",
            Panel::Memory => "Memory",
            Panel::Steps => "Steps",
            Panel::Compare => "Compare",
        }
    }
}

/// What is selected, in graph, timeline and table alike.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Selection {
    /// Nothing.
    #[default]
    Nothing,
    /// One step of the program, and the run in which it was clicked.
    Step(usize, Option<usize>),
    /// Blocks `first..=last` of the program.
    Blocks(usize, usize),
    /// A device.
    Device(usize),
}

/// A rectangle of the timeline whose work is added up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Area {
    /// From, in nanoseconds.
    pub start: f64,
    /// To, in nanoseconds.
    pub end: f64,
    /// First row.
    pub first_lane: usize,
    /// Last row.
    pub last_lane: usize,
}

/// A wish to have blocks elsewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wish {
    /// Blocks `first..=last` of the program shown on a device.
    Move {
        /// First block.
        first: usize,
        /// Last block.
        last: usize,
        /// Where to.
        device: usize,
    },
    /// A device's memory multiplied.
    Memory {
        /// Which.
        device: usize,
        /// By how much.
        factor: u64,
    },
    /// All GPUs' memory multiplied.
    GpuMemory {
        /// By how much.
        factor: u64,
    },
    /// The machine without a device.
    Without {
        /// Which.
        device: usize,
    },
}

/// Columns of the table of steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Column {
    /// Order of the program.
    Number,
    /// The layer's name.
    Name,
    /// The operation.
    Verb,
    /// The device.
    Device,
    /// The weights' format.
    Format,
    /// Bytes of weights, or moved.
    Bytes,
    /// Arithmetic.
    Flops,
    /// The estimate.
    Predicted,
    /// The median.
    Measured,
    /// How far off.
    Error,
}

/// The state of the window.
#[derive(Clone, Debug)]
pub struct View {
    /// Which panel is large.
    pub panel: Panel,
    /// The program shown.
    pub program: usize,
    /// The run shown, if there is a trace.
    pub run: Option<usize>,
    /// What is selected.
    pub selection: Selection,
    /// What colors say.
    pub coloring: Coloring,
    /// Visible time in nanoseconds; `None` fits the run at the next frame.
    pub time: Option<(f64, f64)>,
    /// Selected area of the timeline.
    pub area: Option<Area>,
    /// First blocks of groups that are unfolded.
    pub unfolded: BTreeSet<usize>,
    /// Blocks whose steps are shown.
    pub opened: BTreeSet<usize>,
    /// Column that the table is sorted by, and whether it falls.
    pub sort: (Column, bool),
    /// Only steps that contain it are in the table.
    pub filter: String,
    /// The search box, when it is open.
    pub search: Option<String>,
    /// Whether the help is open.
    pub help: bool,
    /// Whether the panel should bring the selection into sight.
    pub scroll_to_selection: bool,
    /// What was asked for in this frame, and where.
    pub wish: Option<(Wish, Pos2)>,
    timing: Option<(usize, Option<usize>, Arc<Timing>)>,
}

impl View {
    /// The first look at a scene: the main program and a typical run of it.
    pub fn new(scene: &Scene) -> Self {
        let program = scene.main_program();
        View {
            panel: Panel::Placement,
            program,
            run: scene.first_shown_run(program),
            selection: Selection::Nothing,
            coloring: Coloring::Device,
            time: None,
            area: None,
            unfolded: BTreeSet::new(),
            opened: BTreeSet::new(),
            sort: (Column::Number, false),
            filter: String::new(),
            search: None,
            help: false,
            scroll_to_selection: false,
            wish: None,
            timing: None,
        }
    }

    /// The first look at another scene, in the same panel and colors.
    pub fn turn_to(&self, scene: &Scene) -> Self {
        View { panel: self.panel, coloring: self.coloring, ..View::new(scene) }
    }

    /// Keeps what still makes sense of a view of the scene `before` on one that was read again.
    pub fn revisit(&mut self, before: &Scene, scene: &Scene) {
        let shown = |scene: &Scene, view: &Self| {
            let run = view.run.and_then(|run| scene.runs.get(run));
            run.map(|run| (run.start, run.end))
        };
        let known = shown(before, self);
        let fresh = View::new(scene);
        if self.program >= scene.programs.len() {
            self.show_program(scene, fresh.program);
        }
        if self
            .run
            .is_none_or(|run| scene.runs.get(run).is_none_or(|run| run.program != self.program))
        {
            self.run = scene.first_shown_run(self.program);
        }
        // A trace that was recorded again has its runs at other times.
        if shown(scene, self) != known {
            self.time = None;
        }
        self.selection = Selection::Nothing;
        self.timing = None;
        self.area = None;
    }

    /// Turns to another panel, with the selection in sight.
    pub fn show_panel(&mut self, panel: Panel) {
        self.panel = panel;
        self.scroll_to_selection = true;
    }

    /// Turns to another program and a typical run of it.
    pub fn show_program(&mut self, scene: &Scene, program: usize) {
        self.program = program;
        self.run = scene.first_shown_run(program);
        self.selection = Selection::Nothing;
        self.unfolded.clear();
        self.opened.clear();
        self.area = None;
        self.time = None;
    }

    /// Turns to another run and its program.
    pub fn show_run(&mut self, scene: &Scene, run: usize) {
        let program = scene.runs.get(run).map_or(self.program, |run| run.program);
        if program != self.program && program < scene.programs.len() {
            self.show_program(scene, program);
        }
        self.run = Some(run);
        self.time = None;
    }

    /// The run shown as it was measured, or the program as it is predicted.
    pub fn timing(&mut self, scene: &Scene) -> Arc<Timing> {
        let key = (self.program, self.run);
        let known = matches!(&self.timing, Some((program, run, _)) if (*program, *run) == key);
        if !known {
            let measured = self.run.and_then(|run| scene.run_timing(run));
            let predicted = || scene.programs.get(self.program).map(|p| p.predicted.clone());
            let timing = measured.or_else(predicted).unwrap_or_default();
            self.timing = Some((self.program, self.run, Arc::new(timing)));
        }
        let (_, _, timing) = self.timing.as_ref().expect("it was filled above");
        Arc::clone(timing)
    }

    /// Whether shares, waits and the critical path of `timing` mean anything: those of a run of another plan do not.
    pub fn has_shares(&self, scene: &Scene) -> bool {
        self.run.is_none() || !scene.is_trace_of_another
    }

    /// For each step of the program whether it belongs to the selection.
    pub fn selected(&self, scene: &Scene) -> Vec<bool> {
        let Some(program) = scene.programs.get(self.program) else { return Vec::new() };
        let belongs = |step: &crate::scene::Step| match self.selection {
            Selection::Nothing => false,
            Selection::Step(selected, _) => step.number == selected,
            Selection::Blocks(first, last) => (first..=last).contains(&step.block),
            Selection::Device(device) => step.device == device,
        };
        program.steps.iter().map(belongs).collect()
    }

    /// The program shown.
    pub fn program<'a>(&self, scene: &'a Scene) -> Option<&'a crate::scene::Program> {
        scene.programs.get(self.program)
    }

    /// Selects the step before or after the selected one in its lane; the first one where none is selected.
    pub fn step_along(&mut self, scene: &Scene, forward: bool) {
        let Some(program) = scene.programs.get(self.program) else { return };
        let run = self.run;
        let Selection::Step(step, _) = self.selection else {
            let first = if let Selection::Blocks(first, _) = self.selection {
                program.blocks.get(first).map(|block| block.steps[0])
            } else {
                program.queues.iter().find_map(|(_, queue)| queue.first().copied())
            };
            if let Some(first) = first {
                self.selection = Selection::Step(first, run);
            }
            return;
        };
        for (_, queue) in &program.queues {
            let Some(at) = queue.iter().position(|&other| other == step) else { continue };
            let next = if forward { at + 1 } else { at.wrapping_sub(1) };
            if let Some(&next) = queue.get(next) {
                self.selection = Selection::Step(next, run);
                self.scroll_to_selection = true;
                self.keep_in_sight(scene, next);
            }
            return;
        }
    }

    /// Shows a block by itself, should it be folded with others.
    pub fn unfold(&mut self, scene: &Scene, block: usize) {
        let groups =
            self.program(scene).map(|program| program.groups.as_slice()).unwrap_or_default();
        if let Some(group) = groups.iter().find(|g| (g.first..=g.last).contains(&block)) {
            self.unfolded.insert(group.first);
        }
    }

    /// Moves the visible time so that a step of the run shown is in it.
    pub fn keep_in_sight(&mut self, scene: &Scene, step: usize) {
        let Some(times) = self.timing(scene).times.get(step).copied().flatten() else { return };
        let Some((from, to)) = self.time else { return };
        let (start, end) = (times.start as f64, times.end as f64);
        if start < from || end > to {
            let width = (to - from).max((end - start) * 1.2);
            let middle = (start + end) / 2.0;
            self.time = Some((middle - width / 2.0, middle + width / 2.0));
        }
    }

    /// Shows the selected steps of the run, or the whole run, or, when that is shown already, the whole trace.
    pub fn fit(&mut self, scene: &Scene) {
        let selected = self.selected(scene);
        let timing = self.timing(scene);
        let times = timing.times.iter().zip(&selected).filter(|(_, selected)| **selected);
        let range = times.filter_map(|(times, _)| *times).fold(None, |range, times| {
            let (from, to) = range.unwrap_or((times.start, times.end));
            Some((from.min(times.start), to.max(times.end)))
        });
        if let Some((from, to)) = range {
            let margin = ((to - from) as f64 * 0.1).max(1.0);
            self.time = Some((from as f64 - margin, to as f64 + margin));
        } else {
            let fitted = self.fitted(scene);
            let shown = self.time.is_some_and(|(from, to)| {
                let slack = (fitted.1 - fitted.0) * 0.05;
                (from - fitted.0).abs() <= slack && (to - fitted.1).abs() <= slack
            });
            self.time = Some(if shown && !scene.runs.is_empty() {
                with_margin(0, scene.trace_end)
            } else {
                fitted
            });
        }
    }

    /// The visible time; the run shown where none was chosen yet.
    pub fn visible(&mut self, scene: &Scene) -> (f64, f64) {
        let time = self.time.unwrap_or_else(|| self.fitted(scene));
        self.time = Some(time);
        time
    }

    /// When the run shown began, in nanoseconds: what times are counted from.
    pub fn origin(&self, scene: &Scene) -> f64 {
        let run = self.run.and_then(|run| scene.runs.get(run));
        run.map_or(0.0, |run| run.start as f64)
    }

    /// The time that shows the whole run, and all that was predicted for it.
    fn fitted(&mut self, scene: &Scene) -> (f64, f64) {
        let timing = self.timing(scene);
        let predicted = self.program(scene).map_or(0, |program| program.predicted.end);
        with_margin(timing.start, timing.nanos().max(predicted))
    }
}

/// A stretch of time with a little room on both sides.
fn with_margin(start: u64, nanos: u64) -> (f64, f64) {
    let nanos = nanos.max(1) as f64;
    (start as f64 - nanos * 0.02, start as f64 + nanos * 1.02)
}
