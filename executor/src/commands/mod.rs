//! The command line of `hybrid-exec`: what can be asked for, and which module answers.

mod answer;
mod bench;
mod calibrate;
mod chat;
mod features;
mod npy;
mod perplexity;
mod session;

use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Result;
use clap::{Args, Parser, Subcommand};
use command_line::misuse;

use ir::plan::Plan;

use executor::generation::GenerationOverrides;
use executor::kernels::cpu::isa::Isa;
use executor::load::{CpuBackend, GpuDriver, Kernels};

/// Runs a compiled plan: streams an answer, chats, measures.
#[derive(Parser)]
#[command(
    name = "hybrid-exec",
    version,
    about,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    arg_required_else_help = true
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    answer: AnswerArguments,
}

#[derive(Subcommand)]
enum Command {
    /// Prints the perplexity of a text or of a list of token ids as JSON
    Perplexity(PerplexityArguments),
    /// Measures prompt and generation speed beside the plan's forecast
    Bench(BenchArguments),
    /// Prints the processor features found and the kernel each operation uses
    Features(FeaturesArguments),
    /// Measures this machine's rates and writes them as a machine file for hybridc
    Calibrate(CalibrateArguments),
    /// Compiles a share of the kernels that calibrate measures a GPU with
    #[command(hide = true)]
    CompileKernels(CompileArguments),
}

#[derive(Args)]
struct AnswerArguments {
    /// The plan, as hybridc writes it
    #[arg(value_name = "PLAN", required = true)]
    plan: Option<PathBuf>,
    #[command(flatten)]
    run: RunArguments,
    /// Text to continue; without it an interactive chat, or from a pipe and with --json the prompt on standard input
    #[arg(long, allow_hyphen_values = true)]
    prompt: Option<String>,
    /// Token ids to continue, instead of text
    #[arg(
        long,
        value_delimiter = ',',
        value_parser = |id: &str| id.trim().parse::<u32>(),
        conflicts_with_all = ["prompt", "chat", "system"]
    )]
    prompt_ids: Option<Vec<u32>>,
    /// Apply the chat template to the prompt
    #[arg(long)]
    chat: bool,
    /// System message in front of a chat; implies --chat
    #[arg(long, allow_hyphen_values = true)]
    system: Option<String>,
    #[command(flatten)]
    sampling: SamplingArguments,
    /// Print one JSON object and nothing else on standard output
    #[arg(long)]
    json: bool,
    /// Write what each lane did to this file
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Write the same for ui.perfetto.dev
    #[arg(long, value_name = "FILE")]
    perfetto: Option<PathBuf>,
}

/// How a plan is run.
#[derive(Args)]
struct RunArguments {
    /// Folder of the checkpoint; default: where it was when the plan was compiled, as seen from the plan's folder
    #[arg(long, value_name = "FOLDER")]
    model: Option<PathBuf>,
    /// Burn backend of CPU devices; ndarray computes with plain Burn operations
    #[arg(long, value_name = "NAME", value_enum, default_value_t)]
    cpu_backend: CpuBackend,
    /// The project's own kernels, or plain Burn operations for comparison; default: own, with ndarray plain
    #[arg(long, value_name = "KIND", value_enum)]
    kernels: Option<Kernels>,
    /// What drives GPUs; vulkan is for tests without a GPU
    #[arg(long, value_name = "NAME", value_enum, default_value_t)]
    gpu_driver: GpuDriver,
    /// Use no newer processor features than these; `hybrid-exec features` lists them
    #[arg(long, value_name = "LEVEL", value_parser = features::available)]
    isa: Option<Isa>,
    /// The most threads of each CPU device
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    threads: Option<usize>,
    /// Write how often each expert of a mixture was chosen, for hybridc compile --expert-counts
    #[arg(long, value_name = "FILE")]
    count_experts: Option<PathBuf>,
}

#[derive(Args)]
struct SamplingArguments {
    /// The most tokens to generate; default: generation_config.json's, else what the context leaves
    #[arg(long, value_name = "N")]
    max_tokens: Option<usize>,
    /// Divide logits by this before a token is drawn; 0 is greedy; default: generation_config.json's where that asks
    /// for sampling, else 0
    #[arg(long, value_name = "T")]
    temperature: Option<f32>,
    /// Choose among the K likeliest tokens; 0 is all; default: generation_config.json's, else 50
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// Choose among the likeliest tokens that together have this probability; 1 is all; default:
    /// generation_config.json's, else 1
    #[arg(long, value_name = "P")]
    top_p: Option<f32>,
    /// Choose among tokens at least this likely, relative to the likeliest; 0 is all; default:
    /// generation_config.json's, else 0
    #[arg(long, value_name = "P")]
    min_p: Option<f32>,
    /// Divide positive logits of tokens seen before by this, multiply negative ones by it; 1 is none; default:
    /// generation_config.json's, else 1
    #[arg(long, value_name = "R")]
    repetition_penalty: Option<f32>,
    /// Seed of the sampling; default: 0, the same text every time
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// End the answer at this text, which may be a special token such as <|im_end|>; may be repeated
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    stop: Vec<String>,
    /// Go on past the tokens that end an answer
    #[arg(long)]
    ignore_eos: bool,
}

#[derive(Args)]
struct PerplexityArguments {
    /// The plan, as hybridc writes it
    #[arg(value_name = "PLAN")]
    plan: PathBuf,
    #[command(flatten)]
    run: RunArguments,
    #[command(flatten)]
    scored: ScoredArguments,
    /// Write the logits after the last token, as a NumPy array of 32-bit floats
    #[arg(long, value_name = "FILE")]
    logits: Option<PathBuf>,
}

#[derive(Args)]
#[group(required = true, multiple = false)]
struct ScoredArguments {
    /// A JSON list of token ids, or an object with such a list under "ids"
    #[arg(long, value_name = "FILE")]
    ids_file: Option<PathBuf>,
    /// A text, scored in pieces as long as the plan's context
    #[arg(long, value_name = "FILE")]
    text_file: Option<PathBuf>,
}

#[derive(Args)]
struct BenchArguments {
    /// The plan, as hybridc writes it
    #[arg(value_name = "PLAN")]
    plan: PathBuf,
    #[command(flatten)]
    run: RunArguments,
    /// Tokens of the prompt; 0 leaves this test out
    #[arg(short = 'p', long, value_name = "N", default_value_t = 512)]
    prompt_tokens: usize,
    /// Tokens to generate; 0 leaves this test out
    #[arg(short = 'n', long, value_name = "N", default_value_t = 128)]
    generated_tokens: usize,
    /// Tokens of context before the generated ones
    #[arg(short = 'd', long, value_name = "N", default_value_t = 0)]
    depth: usize,
    /// Sequences decoded together
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one)]
    sequences: usize,
    /// Rounds of each test, after some that warm up
    #[arg(short = 'r', long, value_name = "N", default_value_t = 5, value_parser = at_least_one)]
    repetitions: usize,
    /// Form of the output
    #[arg(short = 'o', long, value_name = "FORM", default_value = "md", value_parser = ["md", "json"])]
    output: String,
    /// Write what each lane did to this file
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Write the same for ui.perfetto.dev
    #[arg(long, value_name = "FILE")]
    perfetto: Option<PathBuf>,
}

#[derive(Args)]
struct FeaturesArguments {
    /// As if the processor had no newer features than these
    #[arg(long, value_name = "LEVEL", value_parser = features::available)]
    isa: Option<Isa>,
}

#[derive(Args)]
struct CalibrateArguments {
    /// Where to write the machine; - is standard output
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Devices to measure; default: this machine's as hybridc probe finds them
    #[arg(long, value_name = "FILE")]
    machine: Option<PathBuf>,
}

#[derive(Args)]
struct CompileArguments {
    /// The driver's number of the GPU
    ordinal: u32,
    /// Number of the share, from 0
    number: u32,
    /// How many shares there are
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    shares: u32,
    /// The processors to do it on; default: any
    cpus: Vec<u32>,
}

/// Parses a number that is never 0.
fn at_least_one(text: &str) -> Result<usize, Box<dyn Error + Send + Sync>> {
    let number: usize = text.parse()?;
    if number == 0 {
        return Err("at least 1 is meant".into());
    }
    Ok(number)
}

impl Cli {
    /// Does what was asked for.
    pub(crate) fn run(self) -> Result<()> {
        let outcome = match self.command {
            None => answer::run(self.answer),
            Some(Command::Perplexity(arguments)) => perplexity::run(arguments),
            Some(Command::Bench(arguments)) => bench::run(arguments),
            Some(Command::Features(arguments)) => features::run(arguments),
            Some(Command::Calibrate(arguments)) => calibrate::run(arguments),
            Some(Command::CompileKernels(arguments)) => calibrate::compile_share(&arguments),
        };
        match outcome {
            Err(error) if error.is::<answer::ReaderGone>() => Ok(()),
            outcome => outcome,
        }
    }
}

impl SamplingArguments {
    fn overrides(&self) -> GenerationOverrides {
        GenerationOverrides {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            seed: self.seed,
            stop_strings: self.stop.clone(),
            max_tokens: self.max_tokens,
            ignores_end: self.ignore_eos,
        }
    }
}

impl RunArguments {
    /// Fails where one option leaves another nothing to do.
    fn check(&self) -> Result<()> {
        let (backend, kernels) = (self.cpu_backend, self.kernels);
        if backend == CpuBackend::NdArray && kernels == Some(Kernels::Own) {
            return Err(misuse("--cpu-backend ndarray has plain kernels only, not --kernels own"));
        }
        let plain = match (backend, kernels) {
            (CpuBackend::NdArray, _) => "--cpu-backend ndarray",
            (CpuBackend::Flex, Some(Kernels::Plain)) => "--kernels plain",
            (CpuBackend::Flex, Some(Kernels::Own) | None) => return Ok(()),
        };
        if let Some(isa) = self.isa {
            return Err(misuse(format_args!("--isa {isa} has nothing to change with {plain}")));
        }
        Ok(())
    }

    /// Fails now rather than after a long run when an output, one of these or of the run's own, cannot be written or
    /// would replace one of the inputs.
    fn check_outputs<'a>(
        &'a self,
        outputs: impl IntoIterator<Item = &'a PathBuf>,
        inputs: impl IntoIterator<Item = &'a PathBuf>,
    ) -> Result<()> {
        let outputs = outputs.into_iter().chain(&self.count_experts).map(PathBuf::as_path);
        command_line::check_outputs(outputs, inputs.into_iter().map(PathBuf::as_path))
    }

    /// Whether the devices of a plan compute as it expects them to: with all of their threads and the fastest kernels.
    fn is_as_forecast(&self, plan: &Plan) -> bool {
        let options = self.options();
        let mut lanes = plan.programs.iter().flat_map(|program| &program.lanes);
        let has_processors = lanes.any(|lane| !plan.machine.devices[lane.device].kind.is_gpu());
        let are_as_forecast = self.kernels.unwrap_or_default() == Kernels::default()
            && self.cpu_backend == CpuBackend::default()
            && self.isa.is_none_or(|isa| isa == Isa::detect())
            && options.has_usual_threads(plan);
        self.gpu_driver == GpuDriver::default() && (are_as_forecast || !has_processors)
    }

    fn options(&self) -> executor::load::Options {
        executor::load::Options {
            kernels: self.kernels.unwrap_or_default(),
            gpu_driver: self.gpu_driver,
            backend: self.cpu_backend,
            isa: self.isa,
            threads: self.threads,
            expert_counter: self.count_experts.as_ref().map(|_| Arc::default()),
            ..Default::default()
        }
    }
}
