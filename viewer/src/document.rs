//! A plan and a trace read from files, with all that is wrong with them.

use std::fs::{self, File};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context as _, Result, ensure};
use command_line::FileKind;
use ir::plan::Plan;
use ir::trace::Trace;

use crate::scene::Scene;

/// More findings than this are counted, not listed: a broken plan can have one for each step.
const MOST_FINDINGS: usize = 200;

/// What is open.
#[derive(Debug)]
pub struct Document {
    /// The plan's file.
    pub plan_path: PathBuf,
    /// The trace's file.
    pub trace_path: Option<PathBuf>,
    /// The plan as it was read.
    pub plan: Plan,
    /// The trace as it was read.
    pub trace: Option<Trace>,
    /// Both joined.
    pub scene: Scene,
    modified: Vec<Option<SystemTime>>,
}

impl Document {
    /// Reads the files. Fails where one cannot be read or is no plan or trace of this version; an unsound plan,
    /// or a trace of another plan, opens with findings.
    pub fn open(plan_path: &Path, trace_path: Option<&Path>) -> Result<Self> {
        let modified = modified(plan_path, trace_path);
        ensure!(!is_trace(plan_path), "{} is a trace; the plan comes first", plan_path.display());
        let text = command_line::read_text(plan_path, FileKind::Plan)?;
        let plan =
            Plan::from_ron(&text).with_context(|| format!("reading {}", plan_path.display()))?;
        let read = |path: &Path| command_line::read(path, FileKind::Trace, Trace::from_ron);
        let trace = trace_path.map(read).transpose()?;
        let document = Document::of(plan, trace, ir::fingerprint(text.as_bytes()));
        let trace_path = trace_path.map(Path::to_owned);
        Ok(Document { plan_path: plan_path.to_owned(), trace_path, modified, ..document })
    }

    /// Joins what was read already; `fingerprint` is that of the plan's file.
    pub fn of(plan: Plan, trace: Option<Trace>, fingerprint: u64) -> Self {
        Document {
            plan_path: PathBuf::new(),
            trace_path: None,
            scene: scene(&plan, trace.as_ref(), fingerprint),
            plan,
            trace,
            modified: modified(Path::new(""), None),
        }
    }

    /// Whether a file is another than the one that was read, or tried, last.
    pub fn has_changed(&self) -> bool {
        modified(&self.plan_path, self.trace_path.as_deref()) != self.modified
    }

    /// Reads the files again. What cannot be read is not tried again before it has changed once more.
    pub fn read_again(&mut self) -> Result<Self> {
        self.modified = modified(&self.plan_path, self.trace_path.as_deref());
        Document::open(&self.plan_path, self.trace_path.as_deref())
    }

    /// For window titles: `plan.ron + trace.ron`.
    pub fn title(&self) -> String {
        let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
        let trace = self.trace_path.as_deref().and_then(name);
        let plan = name(&self.plan_path).unwrap_or_default();
        trace.map_or_else(|| plan.clone(), |trace| format!("{plan} + {trace}"))
    }
}

/// The scene of a plan whose file has the fingerprint, with all findings.
pub fn scene(plan: &Plan, trace: Option<&Trace>, fingerprint: u64) -> Scene {
    let violations = ir::check::check(plan);
    let mut findings: Vec<String> = violations
        .iter()
        .take(MOST_FINDINGS)
        .map(|violation| format!("the plan is unsound: {violation}"))
        .collect();
    if violations.len() > MOST_FINDINGS {
        findings.push(format!("and {} more", violations.len() - MOST_FINDINGS));
    }
    let scene = match trace.filter(|trace| trace.plan != fingerprint) {
        Some(trace) => {
            let finding = "the trace was recorded with another plan, or the plan has changed since";
            findings.insert(0, finding.to_owned());
            Scene::with_trace_of_another(plan, trace, findings)
        }
        None => Scene::new(plan, trace, findings),
    };
    Scene { is_unsound: !violations.is_empty(), ..scene }
}

/// Whether a file holds a trace rather than a plan, by its first lines.
pub fn is_trace(path: &Path) -> bool {
    let mut head = Vec::new();
    // What cannot be read is not a trace; opening it as a plan says why.
    let _ = File::open(path).and_then(|file| file.take(4096).read_to_end(&mut head));
    let head = String::from_utf8_lossy(&head);
    !head.contains("model:") && head.contains("runs:")
}

fn modified(plan: &Path, trace: Option<&Path>) -> Vec<Option<SystemTime>> {
    let time = |path: &Path| fs::metadata(path).and_then(|data| data.modified()).ok();
    std::iter::once(plan).chain(trace).map(time).collect()
}
