//! `hybridc`: compiles checkpoints to plans, and explains, compares and checks plans.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail, ensure};
use clap::builder::RangedI64ValueParser;
use clap::{Args, Parser, Subcommand};
use command_line::{FileKind, read};
use compiler::Objective;
use compiler::explain::{diff, explain, summary};
use compiler::options::{self, CountedExperts, FormatRule, Options, Pin, Request};
use ir::counts::ExpertCounts;
use ir::machine::{DeviceKind, Machine};
use ir::plan::Plan;
use ir::tensor::DType;
use mimalloc::MiMalloc;

/// Each of the plans that are priced is some 100 000 small pieces of memory; with the system's allocator they take half
/// of the time.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

/// Decides where every layer of a language model runs.
#[derive(Parser)]
#[command(name = "hybridc", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Place a checkpoint on a machine and write the plan.
    Compile(Box<Compile>),
    /// Print what a plan decided, and why.
    Explain {
        /// The plan.
        plan: PathBuf,
    },
    /// Print what differs between two plans.
    Diff {
        /// The plan to compare with.
        before: PathBuf,
        /// The plan to compare.
        after: PathBuf,
    },
    /// Prove a plan sound; exit code 1 and every violation where it is not.
    Check {
        /// The plan.
        plan: PathBuf,
    },
    /// Describe this machine as data.
    Probe {
        /// Write to this file instead of standard output.
        #[arg(short, long)]
        output: Option<PathBuf>,
        /// Divide each NUMA node's cores and memory into this many devices, to try plans of several; where there are
        /// fewer cores, devices share them.
        #[arg(long, value_name = "N", value_parser = parts())]
        split: Option<u32>,
    },
}

#[derive(Args)]
struct Compile {
    /// A model.safetensors, a model.safetensors.index.json, or the folder of either.
    checkpoint: PathBuf,
    /// Where to write the plan; - is standard output.
    #[arg(short, long, default_value = "plan.ron")]
    output: PathBuf,
    /// Plan for this machine; default: the one this runs on.
    #[arg(long, value_name = "FILE")]
    machine: Option<PathBuf>,
    /// The most tokens of a sequence, of its prompt and its answer: two or more; default: the model's, at most 8192.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    context: Option<u32>,
    /// Sequences at once.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one())]
    max_sequences: u32,
    /// The most tokens of one prefill run; default: 512; with GPUs more, such as 1024 or 2048, where that is
    /// predicted to be better.
    #[arg(long, value_name = "N", value_parser = at_least_one())]
    prefill_tokens: Option<u32>,
    /// The most bytes for all KV caches: 4GiB; default: what context and sequences need.
    #[arg(long, value_name = "SIZE", value_parser = options::parse_bytes)]
    kv_cache: Option<u64>,
    /// Element type of the KV caches: f32, f16, bf16, i8; default: as exact as the weights. GPUs keep the default
    /// instead of i8.
    #[arg(long, value_name = "TYPE", value_parser = options::parse_kv_type)]
    kv_type: Option<DType>,
    /// Compute format: f32, f16, bf16 (bf12 asks for the same), q8, q4; DEVICES=FORMAT for some devices, as 'numa*=q8';
    /// default: as stored. May be repeated.
    #[arg(long, value_name = "FORMAT")]
    format: Vec<FormatRule>,
    /// Hold bf16 in 16 bits everywhere; default: in 12 bits where that is faster.
    #[arg(long)]
    plain_bf16: bool,
    /// What to minimise: latency or throughput.
    #[arg(long, default_value = "latency")]
    objective: Objective,
    /// Stages on these devices, in this order: numa0,numa1; or on so many, GPUs first: 2.
    #[arg(
        long,
        visible_alias = "pipeline-parallel",
        value_name = "DEVICES",
        value_parser = options::parse_pipeline,
        conflicts_with = "tensor_parallel"
    )]
    pipeline: Option<Request>,
    /// All layers shared by these devices: numa0,numa1 or numa0:3,numa1:1; or by so many, GPUs first: 4.
    #[arg(long, value_name = "DEVICES", value_parser = options::parse_tensor_parallel)]
    tensor_parallel: Option<Request>,
    /// How often a mixture's experts are chosen, by `hybrid-exec --count-experts`: the most used stay on GPUs.
    #[arg(long, value_name = "FILE")]
    expert_counts: Option<PathBuf>,
    /// Run nodes whose names match a regular expression on a device: 'layers\.[0-9]\.=numa0'. May be repeated.
    #[arg(long, value_name = "PATTERN=DEVICE")]
    pin: Vec<Pin>,
    /// Plan as if this device were not there. May be repeated.
    #[arg(long, value_name = "DEVICE")]
    without: Vec<String>,
    /// Plan as if each GPU had no more memory than this.
    #[arg(long, value_name = "SIZE", value_parser = options::parse_gpu_memory)]
    gpu_memory: Option<u64>,
    /// Print what was decided, and why.
    #[arg(long)]
    explain: bool,
    #[arg(long, value_name = "PASS", value_parser = parse_pass, help = help_of_print_after())]
    print_after: Vec<String>,
}

fn help_of_print_after() -> String {
    let passes = compiler::stages().join(", ");
    format!("Print the graph after a pass, {passes} or all, to standard error. May be repeated")
}

/// Parses what is never 0.
fn at_least_one() -> RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..)
}

/// Parses the number of devices that a node is divided into.
fn parts() -> RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=i64::from(probe::MOST_PARTS))
}

/// Parses the name of a pass, or of all.
fn parse_pass(text: &str) -> Result<String> {
    let stages = compiler::stages();
    ensure!(
        text == "all" || stages.contains(&text),
        "unknown pass {text:?}: all and {} exist",
        stages.join(", ")
    );
    Ok(text.to_owned())
}

fn main() -> ExitCode {
    command_line::run(|cli: Cli| run(cli.command))
}

fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Compile(arguments) => compile(&arguments)?,
        Command::Explain { plan } => print(&explain(&sound_plan(&plan)?))?,
        Command::Diff { before, after } => {
            print(&diff(&sound_plan(&before)?, &sound_plan(&after)?))?;
        }
        Command::Check { plan } => return check(&plan),
        Command::Probe { output, split } => {
            let machine = probe::machine(split)?;
            shared_processors(&machine).iter().for_each(command_line::tell);
            let text = machine.to_ron()?;
            match output.as_deref().and_then(command_line::output_file) {
                Some(path) => {
                    command_line::check_outputs([path], [])?;
                    command_line::write(path, text.as_bytes())?;
                    let devices = machine.listed_devices();
                    command_line::tell(format_args!("wrote {}: {devices}", path.display()));
                }
                None => print(&text)?,
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Which devices compute on the same processors, a line for each set of them: forecasts take devices to work side by
/// side.
fn shared_processors(machine: &Machine) -> Vec<String> {
    let mut users = BTreeMap::<u32, Vec<&str>>::new();
    for device in machine.devices.rows() {
        if let DeviceKind::Numa { cpus, .. } = &device.kind {
            for &cpu in cpus {
                users.entry(cpu).or_default().push(&device.name);
            }
        }
    }
    let mut shared = BTreeMap::<Vec<&str>, Vec<String>>::new();
    for (cpu, names) in users.into_iter().filter(|(_, names)| names.len() > 1) {
        shared.entry(names).or_default().push(cpu.to_string());
    }
    let line = |(names, cpus): (Vec<&str>, Vec<String>)| {
        let (names, cpus) = (names.join(", "), cpus.join(", "));
        format!(
            "{names} share processors {cpus}: at the same time they take longer than is forecast"
        )
    };
    shared.into_iter().map(line).collect()
}

fn compile(arguments: &Compile) -> Result<()> {
    let options = arguments.options()?;
    let machine = match &arguments.machine {
        Some(path) => read(path, FileKind::Machine, Machine::from_ron)?,
        None => probe::machine(None)?,
    };
    let (model, unused) = models::lower_and_list_unused(&arguments.checkpoint)
        .map_err(|error| with_expected_file(error, &arguments.checkpoint))?;
    let files = model.files.rows().iter().map(|file| &file.path);
    let inputs = files.chain(&arguments.machine).chain(&arguments.expert_counts);
    let output = command_line::output_file(&arguments.output);
    command_line::check_outputs(output, inputs.map(PathBuf::as_path))?;
    let mut observe = |stage: &str, graph: &dyn std::fmt::Display| {
        if arguments.print_after.iter().any(|wanted| wanted == "all" || wanted == stage) {
            command_line::tell(format_args!("; after {stage}\n{graph}"));
        }
    };
    let plan = compiler::compile(&model, &machine, &options, &mut observe)?;
    let text = plan.to_ron()?;
    match output {
        Some(path) => command_line::write(path, text.as_bytes())?,
        None => print(&text)?,
    }
    if !has_tokenizer(&model.folder) {
        command_line::tell(format_args!(
            "warning: no tokenizer.json in {}: prompts of text will not work, --prompt-ids with --json will",
            model.folder.display()
        ));
    }
    if let Some(first) = unused.first() {
        command_line::tell(format_args!(
            "warning: {} of the checkpoint's tensors are not used, such as {first}: config.json may be of another model",
            unused.len()
        ));
    }
    let wrote =
        output.map_or("wrote the plan".to_owned(), |path| format!("wrote {}", path.display()));
    match (arguments.explain, output) {
        (false, _) => command_line::tell(format_args!(
            "{wrote}: {}",
            summary(&plan, arguments.machine.as_deref())
        )),
        // Standard output is the plan's.
        (true, None) => command_line::tell(explain(&plan).trim_end()),
        (true, Some(_)) => {
            command_line::tell(wrote);
            print(&explain(&plan))?;
        }
    }
    Ok(())
}

/// Whether a tokenizer, or what one is made of, lies in a checkpoint's folder.
fn has_tokenizer(folder: &Path) -> bool {
    let has = |name: &str| folder.join(name).is_file();
    has("tokenizer.json") || (has("vocab.json") && has("merges.txt"))
}

/// Says what is expected where another file of a checkpoint's folder is given, such as its `config.json`.
fn with_expected_file(error: anyhow::Error, checkpoint: &Path) -> anyhow::Error {
    let is_json = checkpoint.extension().is_some_and(|extension| extension == "json");
    if !is_json || !checkpoint.is_file() || checkpoint.to_string_lossy().ends_with(".index.json") {
        return error;
    }
    error.context(
        "expected a model.safetensors, a model.safetensors.index.json or the folder of either",
    )
}

impl Compile {
    fn options(&self) -> Result<Options> {
        let request = self.pipeline.as_ref().or(self.tensor_parallel.as_ref());
        // Where standard output leads is not known.
        let output = command_line::output_file(&self.output);
        Ok(Options {
            context: self.context,
            max_sequences: self.max_sequences,
            prefill_tokens: self.prefill_tokens,
            kv_cache_bytes: self.kv_cache,
            kv_type: self.kv_type,
            formats: self.format.clone(),
            plain_bf16: self.plain_bf16,
            objective: self.objective,
            request: request.cloned().unwrap_or(Request::Any),
            pins: self.pin.clone(),
            without: self.without.clone(),
            gpu_memory_bytes: self.gpu_memory,
            expert_counts: self.expert_counts.as_deref().map(read_counts).transpose()?,
            machine_file: self.machine.clone(),
            plan_folder: output.map(folder_of).transpose()?,
        })
    }
}

fn check(path: &Path) -> Result<ExitCode> {
    let found = ir::check::check(&read(path, FileKind::Plan, Plan::from_ron)?);
    for violation in &found {
        command_line::tell(violation);
    }
    if found.is_empty() {
        print(&format!("{} is sound\n", path.display()))?;
        return Ok(ExitCode::SUCCESS);
    }
    let plural = if found.len() == 1 { "" } else { "s" };
    bail!("{} has {} violation{plural}", path.display(), found.len());
}

/// A plan that may be looked at: its ids name rows.
fn sound_plan(path: &Path) -> Result<Plan> {
    let plan = read(path, FileKind::Plan, Plan::from_ron)?;
    if let Some(first) = ir::check::check(&plan).first() {
        bail!("{} is not sound: {first}; `hybridc check` lists all violations", path.display());
    }
    Ok(plan)
}

fn read_counts(path: &Path) -> Result<CountedExperts> {
    let counts = read(path, FileKind::ExpertCounts, ExpertCounts::from_ron)?;
    let file = path.canonicalize().with_context(|| format!("reading {}", path.display()))?;
    Ok(CountedExperts { file, counts })
}

/// The real folder of a file that need not exist yet.
fn folder_of(path: &Path) -> Result<PathBuf> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let folder = parent.unwrap_or(Path::new("."));
    folder.canonicalize().with_context(|| format!("writing {}", path.display()))
}

/// To standard output; a reader that has gone away is no error.
fn print(text: &str) -> Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(error).context("writing to standard output")
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_that_share_processors_are_told_in_one_line() {
        let mut machine = probe::machine(Some(2)).expect("the machine has a topology");
        assert!(machine.devices.len() >= 2);
        let mut set = |name: &str, numbers: &[u32]| {
            let id = machine.device(name).expect("a node is divided");
            if let DeviceKind::Numa { cpus, .. } = &mut machine.devices[id].kind {
                *cpus = numbers.to_vec();
            }
            shared_processors(&machine)
        };
        set("numa0", &[1000, 1001, 1002]);
        assert!(set("numa1", &[1003]).iter().all(|line| !line.contains("numa1")));
        let told = "numa0, numa1 share processors 1001, 1002: at the same time they take longer than is forecast";
        assert!(set("numa1", &[1002, 1003, 1001]).iter().any(|line| line == told));
    }
}
