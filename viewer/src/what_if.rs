//! Questions of the kind "and if it ran there?", answered by the compiler as a subprocess.
//!
//! Nothing is decided or priced here: a question becomes a command, its answer is a plan or an error.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::{env, fs, process, thread};

use anyhow::{Context as _, Result, ensure};
use egui::Pos2;
use ir::plan::Plan;
use ir::tensor::Format;

use crate::document::Document;
use crate::scene::Scene;
use crate::view::Wish;

/// What the compiler is asked to minimise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Objective {
    /// Time of one answer.
    Latency,
    /// Work of the busiest device.
    Throughput,
}

impl Objective {
    /// Both.
    pub const ALL: [Objective; 2] = [Objective::Latency, Objective::Throughput];

    /// As the compiler spells it.
    pub fn name(self) -> &'static str {
        match self {
            Objective::Latency => "latency",
            Objective::Throughput => "throughput",
        }
    }

    /// What a plan seems to be made for: nobody who wants latency takes a placement when another one that was
    /// priced is faster in prefill and decode.
    pub fn of(scene: &Scene) -> Self {
        let Some(chosen) = scene.candidates.first() else { return Objective::Latency };
        let faster = |nanos: Option<u64>, than: Option<u64>| {
            nanos.zip(than).is_some_and(|(nanos, than)| nanos < than)
        };
        let beaten = scene.candidates.iter().any(|other| {
            faster(other.prefill_nanos, chosen.prefill_nanos)
                && faster(other.decode_nanos, chosen.decode_nanos)
        });
        if beaten { Objective::Throughput } else { Objective::Latency }
    }
}

/// A question under way or answered.
#[derive(Debug)]
pub struct Question {
    /// In words.
    pub title: String,
    /// As it would be typed.
    pub command: String,
    /// Pins it adds, as they would be typed.
    pub pins: Vec<String>,
    /// Where it was asked.
    pub at: Pos2,
    /// What came back.
    pub answer: Answer,
}

/// What became of a question.
#[derive(Debug)]
pub enum Answer {
    /// The compiler is at work.
    Awaited(Receiver<Result<Document>>),
    /// The plan it made.
    Plan(Box<Document>),
    /// Why there is none.
    Refused(String),
}

/// The compiler beside this program's own file, else the one that the shell would find.
pub fn compiler() -> PathBuf {
    let beside = env::current_exe().ok().and_then(|exe| Some(exe.parent()?.join("hybridc")));
    beside.filter(|path| path.is_file()).unwrap_or_else(|| "hybridc".into())
}

impl Question {
    /// Starts the compiler on a wish for a plan; `wake` is called when the answer is there.
    pub fn ask(
        compiler: &Path,
        document: &Document,
        objective: Objective,
        program: usize,
        wish: &Wish,
        at: Pos2,
        wake: impl FnOnce() + Send + 'static,
    ) -> Self {
        let title = title(&document.scene, program, wish);
        let pins = pins(&document.scene, program, wish);
        let folder = folder();
        match prepare(document, objective, wish, &pins, &folder) {
            Ok(arguments) => {
                let command = shell_line(compiler, &arguments);
                let (sender, receiver) = channel();
                let compiler = compiler.to_owned();
                thread::spawn(move || {
                    let answer = run(&compiler, &arguments, &folder);
                    // The window may have been closed meanwhile: then nobody waits.
                    let _ = sender.send(answer);
                    wake();
                });
                Question { title, command, pins, at, answer: Answer::Awaited(receiver) }
            }
            Err(error) => {
                let answer = Answer::Refused(format!("{error:#}"));
                Question { title, command: String::new(), pins, at, answer }
            }
        }
    }

    /// Takes the answer if it has come. Returns whether it came now.
    pub fn poll(&mut self) -> bool {
        let Answer::Awaited(receiver) = &self.answer else { return false };
        self.answer = match receiver.try_recv() {
            Ok(Ok(document)) => Answer::Plan(Box::new(document)),
            Ok(Err(error)) => Answer::Refused(format!("{error:#}")),
            Err(TryRecvError::Empty) => return false,
            Err(TryRecvError::Disconnected) => Answer::Refused("the compiler was lost".to_owned()),
        };
        true
    }

    /// Writes its pins to a file, one a line, as the compiler takes them.
    pub fn save_pins(&self, path: &Path) -> Result<()> {
        let lines: String = self.pins.iter().map(|pin| format!("--pin '{pin}'\n")).collect();
        command_line::write(path, lines.as_bytes())
    }
}

fn title(scene: &Scene, program: usize, wish: &Wish) -> String {
    match wish {
        Wish::Move { first, last, device } => {
            let blocks: Vec<usize> = (*first..=*last).collect();
            format!("{} on {}", scene.blocks_text(program, &blocks), scene.device_name(*device))
        }
        Wish::Memory { device, factor } => {
            format!("{} with {factor} times the memory", scene.device_name(*device))
        }
        Wish::GpuMemory { factor } => format!("GPUs with {factor} times the memory"),
        Wish::Without { device } => format!("without {}", scene.device_name(*device)),
    }
}

/// The pin that the wish means, besides those that the plan was made with.
fn pins(scene: &Scene, program: usize, wish: &Wish) -> Vec<String> {
    let mut pins = Vec::new();
    let steps = scene.programs.iter().flat_map(|program| &program.steps);
    for step in steps {
        if let Some(pattern) = &step.pin {
            let pin = format!("{pattern}={}", scene.device_name(step.device));
            if !pins.contains(&pin) {
                pins.push(pin);
            }
        }
    }
    if let Wish::Move { first, last, device } = wish
        && let Some(blocks) = scene.programs.get(program).and_then(|p| p.blocks.get(*first..=*last))
    {
        let pattern = match blocks {
            [block] => block.pattern(),
            [first, ..] => {
                let stem = first.name.trim_end_matches(|c: char| c.is_ascii_digit());
                let numbers: Vec<String> =
                    blocks.iter().filter_map(|block| block.number).map(|n| n.to_string()).collect();
                format!(r"^{}({})(\.|$)", stem.replace('.', r"\."), numbers.join("|"))
            }
            [] => return pins,
        };
        // Of the pins that match a node the last one holds.
        pins.push(format!("{pattern}={}", scene.device_name(*device)));
    }
    pins
}

/// A folder of this process for machine files and answers.
fn folder() -> PathBuf {
    env::temp_dir().join(format!("hybrid-viewer-{}", process::id()))
}

/// The compiler's arguments, with the machine they name written down.
fn prepare(
    document: &Document,
    objective: Objective,
    wish: &Wish,
    pins: &[String],
    folder: &Path,
) -> Result<Vec<String>> {
    let plan = &document.plan;
    let machine_path = folder.join("machine.ron");
    let mut machine = plan.machine.clone();
    for (id, device) in machine.devices.rows_mut().iter_mut().enumerate() {
        let factor = match wish {
            Wish::Memory { device, factor } if *device == id => *factor,
            Wish::GpuMemory { factor }
                if matches!(device.kind, ir::machine::DeviceKind::Gpu { .. }) =>
            {
                *factor
            }
            Wish::Move { .. }
            | Wish::Memory { .. }
            | Wish::GpuMemory { .. }
            | Wish::Without { .. } => 1,
        };
        device.memory_bytes = device.memory_bytes.saturating_mul(factor);
    }
    fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
    fs::write(&machine_path, machine.to_ron()?)
        .with_context(|| format!("writing {}", machine_path.display()))?;

    let plan_folder = document.plan_path.parent().unwrap_or(Path::new("."));
    let checkpoint = plan_folder.join(&plan.model.folder);
    let mut arguments = vec![
        "compile".to_owned(),
        path_text(&checkpoint)?,
        "-o".to_owned(),
        path_text(&folder.join("plan.ron"))?,
        "--machine".to_owned(),
        path_text(&machine_path)?,
        "--context".to_owned(),
        plan.model.context.to_string(),
        "--max-sequences".to_owned(),
        plan.model.max_sequences.to_string(),
        "--objective".to_owned(),
        objective.name().to_owned(),
    ];
    if let Some(prefill) = plan.programs.first() {
        arguments.extend(["--prefill-tokens".to_owned(), prefill.max.tokens.to_string()]);
    }
    if let Some(cache) = plan.caches.rows().first() {
        arguments.extend(["--kv-type".to_owned(), cache.dtype.to_string()]);
    }
    arguments.extend(request(document).into_iter().flatten());
    for (device, format) in formats(plan) {
        arguments.extend(["--format".to_owned(), format!("{device}={format}")]);
    }
    for pin in pins {
        arguments.extend(["--pin".to_owned(), pin.clone()]);
    }
    if let Wish::Without { device } = wish {
        arguments.extend(["--without".to_owned(), document.scene.device_name(*device)]);
    }
    Ok(arguments)
}

/// The stages or the split that the plan was asked to have.
fn request(document: &Document) -> Option<[String; 2]> {
    let asked = |cause: &ir::graph::Cause| cause.reason == ir::graph::Reason::Requested;
    document.plan.causes.rows().iter().find(|cause| asked(cause))?;
    let scene = &document.scene;
    let blocks = || scene.programs.iter().flat_map(|program| &program.blocks);
    let names = |devices: &[usize]| {
        devices.iter().map(|&device| scene.device_name(device)).collect::<Vec<_>>().join(",")
    };
    if let Some(shared) = blocks().map(|block| &block.devices).find(|devices| devices.len() > 1) {
        return Some(["--tensor-parallel".to_owned(), names(shared)]);
    }
    let mut stages = Vec::new();
    for &device in blocks().flat_map(|block| &block.devices) {
        if !stages.contains(&device) {
            stages.push(device);
        }
    }
    Some(["--pipeline".to_owned(), names(&stages)])
}

fn path_text(path: &Path) -> Result<String> {
    let text = path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))?;
    Ok(text.to_owned())
}

/// Formats in which devices hold their matrices, where that is not how they are stored.
fn formats(plan: &Plan) -> Vec<(String, Format)> {
    let mut found: BTreeMap<usize, BTreeMap<Format, u64>> = BTreeMap::new();
    for weight in plan.weights.rows().iter().filter(|weight| weight.shape.len() > 1) {
        let stored = weight.sources.first().map(|source| Format::from(source.dtype));
        let elements: u64 =
            weight.shape.iter().map(|&size| u64::from(size)).fold(1, u64::saturating_mul);
        if stored != Some(weight.format) {
            let device = found.entry(ir::id::Id::index(weight.device)).or_default();
            let sum = device.entry(weight.format).or_default();
            *sum = sum.saturating_add(elements);
        }
    }
    let devices = plan.machine.devices.rows();
    found
        .into_iter()
        .filter_map(|(device, formats)| {
            let (format, _) = formats.into_iter().max_by_key(|&(_, elements)| elements)?;
            Some((devices.get(device)?.name.clone(), format))
        })
        .collect()
}

fn run(compiler: &Path, arguments: &[String], folder: &Path) -> Result<Document> {
    let output = Command::new(compiler)
        .args(arguments)
        .output()
        .with_context(|| format!("starting {}", compiler.display()))?;
    let said = String::from_utf8_lossy(&output.stderr);
    let said = said.trim();
    ensure!(
        output.status.success(),
        "{}",
        if said.is_empty() { "the compiler failed" } else { said }
    );
    Document::open(&folder.join("plan.ron"), None)
}

/// The command as a shell takes it.
fn shell_line(compiler: &Path, arguments: &[String]) -> String {
    let plain = |text: &str| {
        !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_./=,:".contains(c))
    };
    let quoted = arguments.iter().map(|argument| {
        if plain(argument) {
            argument.clone()
        } else {
            format!("'{}'", argument.replace('\'', r"'\''"))
        }
    });
    let name = compiler.file_name().unwrap_or(compiler.as_os_str()).to_string_lossy().into_owned();
    std::iter::once(name).chain(quoted).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_reaches_the_shell_in_quotes() {
        let arguments = ["compile".to_owned(), r"^layers\.1(\.|$)=gpu0".to_owned()];
        let line = shell_line(Path::new("/opt/bin/hybridc"), &arguments);
        assert_eq!(line, r"hybridc compile '^layers\.1(\.|$)=gpu0'");
    }
}
