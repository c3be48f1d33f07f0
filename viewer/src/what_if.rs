//! Questions of the kind "and if it ran there?", answered by the compiler as a subprocess.
//!
//! Nothing is decided or priced here: a question becomes a command, its answer is a plan or an error.

use std::path::{Component, Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::{env, fs, thread};

use anyhow::{Context as _, Result, ensure};
use egui::Pos2;
use ir::asked::{Asked, Objective, Request};
use ir::plan::Plan;

use crate::document::Document;
use crate::scene::Scene;
use crate::view::Wish;

/// Name of an answer's file.
const PLAN: &str = "plan.ron";
/// Name of the file beside it with the machine that it is for.
const MACHINE: &str = "machine.ron";

/// How a question is asked.
#[derive(Clone, Copy, Debug)]
pub struct How {
    /// What the answer is to minimise.
    pub objective: Objective,
    /// The program that was looked at.
    pub program: usize,
    /// Where it was asked.
    pub at: Pos2,
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
    ///
    /// `folder` is for the files of this question alone: its answer may be looked at when others are asked.
    pub fn ask(
        compiler: &Path,
        document: &Document,
        wish: &Wish,
        how: How,
        folder: &Path,
        wake: impl FnOnce() + Send + 'static,
    ) -> Self {
        let How { objective, program, at } = how;
        let title = title(&document.scene, program, wish);
        let pins = pins(document, program, wish);
        match prepare(document, objective, wish, &pins, folder) {
            Ok(arguments) => {
                let command = shell_line(compiler, &arguments);
                let (sender, receiver) = channel();
                let (compiler, plan) = (compiler.to_owned(), folder.join(PLAN));
                thread::spawn(move || {
                    let answer = run(&compiler, &arguments, &plan);
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

/// Writes an answer to `path`, and the machine it was asked for beside it: `plan.ron` and `plan.machine.ron`.
///
/// The folder of the question goes with the window, so the saved plan names its checkpoint by absolute paths.
pub fn save(answer: &Document, path: &Path) -> Result<()> {
    let machine_path = path.with_extension(MACHINE);
    command_line::check_outputs([path, &machine_path], [])?;
    let machine = answer.plan_path.with_file_name(MACHINE);
    let machine = fs::read(&machine).with_context(|| format!("reading {}", machine.display()))?;
    let folder = answer.plan_path.parent().unwrap_or(Path::new("."));
    let folder =
        fs::canonicalize(folder).with_context(|| format!("reading {}", folder.display()))?;
    let mut plan = answer.plan.clone();
    plan.model.folder = from_root(&folder, &plan.model.folder);
    for file in plan.files.rows_mut() {
        file.path = from_root(&folder, &file.path);
    }
    // The dialog asked about the plan's file alone.
    ensure!(
        fs::read(&machine_path).ok().is_none_or(|there| there == machine),
        "{} is there already and holds another machine: choose another name",
        machine_path.display()
    );
    command_line::write(&machine_path, &machine)?;
    command_line::write(path, plan.to_ron()?.as_bytes())
}

/// `path` as it is seen from `folder`, spelt without `..`: that would lead nowhere once the folder is gone.
fn from_root(folder: &Path, path: &Path) -> PathBuf {
    let mut whole = folder.to_owned();
    for part in path.components() {
        if part == Component::ParentDir {
            whole.pop();
        } else {
            whole.push(part);
        }
    }
    whole
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

/// The pins that the plan was made with, and the one that the wish means.
fn pins(document: &Document, program: usize, wish: &Wish) -> Vec<String> {
    let scene = &document.scene;
    let mut pins = document.plan.asked.pins.clone();
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

/// The compiler's arguments, with the machine they name written down.
fn prepare(
    document: &Document,
    objective: Objective,
    wish: &Wish,
    pins: &[String],
    folder: &Path,
) -> Result<Vec<String>> {
    let machine_path = folder.join(MACHINE);
    write_machine(&document.plan, wish, &machine_path)?;
    let checkpoint = checkpoint(document);
    let mut arguments = vec![
        "compile".to_owned(),
        path_text(&checkpoint)?,
        "-o".to_owned(),
        path_text(&folder.join(PLAN))?,
        "--machine".to_owned(),
        path_text(&machine_path)?,
        "--objective".to_owned(),
        objective.to_string(),
    ];
    arguments.extend(asked(&document.plan)?);
    for pin in pins {
        arguments.extend(["--pin".to_owned(), pin.clone()]);
    }
    if let Wish::Without { device } = wish {
        arguments.extend(["--without".to_owned(), document.scene.device_name(*device)]);
    }
    Ok(arguments)
}

/// Writes the plan's machine, with the memory that the wish gives it.
fn write_machine(plan: &Plan, wish: &Wish, path: &Path) -> Result<()> {
    let mut machine = plan.machine.clone();
    for (id, device) in machine.devices.rows_mut().iter_mut().enumerate() {
        let factor = match wish {
            Wish::Memory { device, factor } if *device == id => *factor,
            Wish::GpuMemory { factor } if device.kind.is_gpu() => *factor,
            Wish::Move { .. }
            | Wish::Memory { .. }
            | Wish::GpuMemory { .. }
            | Wish::Without { .. } => 1,
        };
        device.memory_bytes = device.memory_bytes.saturating_mul(factor);
    }
    command_line::write(path, machine.to_ron()?.as_bytes())
}

/// The checkpoint that the plan was made of.
fn checkpoint(document: &Document) -> PathBuf {
    let plan = &document.plan;
    let folder = document.plan_path.parent().unwrap_or(Path::new("."));
    // One file may lie beside others, and only it is the plan's; of several an index tells.
    match plan.files.rows() {
        [file] => folder.join(&file.path),
        _ => folder.join(&plan.model.folder),
    }
}

/// What the plan was asked for, as options, but for what a question may change: its objective and its pins.
fn asked(plan: &Plan) -> Result<Vec<String>> {
    let Asked {
        objective: _,
        pins: _,
        request,
        prefill_tokens,
        plain_bf16,
        formats,
        kv_type,
        kv_cache_bytes,
        expert_counts,
    } = &plan.asked;
    let mut options = Vec::new();
    let mut option = |name: &str, value: String| options.extend([name.to_owned(), value]);
    option("--context", plan.model.context.to_string());
    option("--max-sequences", plan.model.max_sequences.to_string());
    if let Some(tokens) = prefill_tokens {
        option("--prefill-tokens", tokens.to_string());
    }
    let names = |named: &[(String, Option<f64>)]| {
        let share = |share: &f64| format!(":{share}");
        let name = |(name, part): &(String, Option<f64>)| {
            format!("{name}{}", part.as_ref().map(share).unwrap_or_default())
        };
        named.iter().map(name).collect::<Vec<_>>().join(",")
    };
    match request {
        Request::Any => (),
        Request::Pipeline(stages) => option("--pipeline", stages.join(",")),
        Request::TensorParallel(members) => option("--tensor-parallel", names(members)),
        Request::PipelineRanks(ranks) => option("--pipeline", ranks.to_string()),
        Request::TensorParallelRanks(ranks) => option("--tensor-parallel", ranks.to_string()),
    }
    if let Some(dtype) = kv_type {
        option("--kv-type", dtype.to_string());
    }
    if let Some(bytes) = kv_cache_bytes {
        option("--kv-cache", bytes.to_string());
    }
    if let Some(file) = expert_counts {
        option("--expert-counts", path_text(file)?);
    }
    for format in formats {
        option("--format", format.clone());
    }
    if *plain_bf16 {
        options.push("--plain-bf16".to_owned());
    }
    Ok(options)
}

fn path_text(path: &Path) -> Result<String> {
    let text = path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))?;
    Ok(text.to_owned())
}

fn run(compiler: &Path, arguments: &[String], plan: &Path) -> Result<Document> {
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
    Document::open(plan, None)
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
    fn a_path_from_a_folder_that_goes_is_spelt_from_the_root() {
        let check = |path: &str, whole: &str| {
            let found = from_root(Path::new("/tmp/answer"), Path::new(path));
            assert_eq!(found, Path::new(whole));
        };
        check("../model/model.safetensors", "/tmp/model/model.safetensors");
        check("/data/model", "/data/model");
        check("model", "/tmp/answer/model");
    }

    #[test]
    fn a_pattern_reaches_the_shell_in_quotes() {
        let arguments = ["compile".to_owned(), r"^layers\.1(\.|$)=gpu0".to_owned()];
        let line = shell_line(Path::new("/opt/bin/hybridc"), &arguments);
        assert_eq!(line, r"hybridc compile '^layers\.1(\.|$)=gpu0'");
    }
}
