//! A plan that is loaded and ready to answer, with its checkpoint's tokenizer.
//!
//! Weights take minutes to load. What is asked for is checked before that, with what an [`Opened`] plan knows.

use std::fs;
use std::io::{ErrorKind, IsTerminal as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use ir::plan::Plan;

use executor::counting::ExpertCounter;
use executor::engine::{Choice, Chooser, Engine, SequenceId, Timings, check_tokens};
use executor::generation::{FinishReason, Generation, GenerationOptions, GenerationOverrides};
use executor::load::{Options, PlanFile, load};
use executor::run::Row;
use executor::text::{NoTokenizer, Tokenizer};
use executor::trace::perfetto;

use super::RunArguments;

/// What takes no tokenizer where a prompt does.
pub(super) const PROMPT_IDS: &str = "--prompt-ids with --json";

/// A plan whose weights are still where they were.
pub(super) struct Opened {
    file: PlanFile,
    tokenizer: Result<Tokenizer>,
    /// How long that took.
    opening_time: Duration,
}

/// A loaded plan.
pub(super) struct Session {
    pub(super) engine: Engine,
    /// Opening the plan, and loading it to the last weight, without the prompt that is read in between.
    pub(super) load_time: Duration,
    tokenizer: Result<Tokenizer>,
    /// Where the choices of routers are counted, and the file for them.
    counted: Option<(Arc<ExpertCounter>, PathBuf)>,
}

/// How answers are made.
pub(super) struct Asked {
    pub(super) generation: GenerationOptions,
    /// Whether answers go on with the text of the prompt; in a chat they are texts of their own.
    pub(super) continues_text: bool,
}

/// A finished answer.
pub(super) struct Answer {
    pub(super) ids: Vec<u32>,
    pub(super) text: String,
    /// `None` when the user stopped it.
    pub(super) finish: Option<FinishReason>,
    /// Whether the context has room for no other token.
    pub(super) fills_context: bool,
    pub(super) timings: Timings,
}

/// An answer that grows token by token.
struct Growing<'a, F> {
    generation: Generation,
    tokenizer: Option<&'a Tokenizer>,
    on_text: F,
    finish: Option<FinishReason>,
}

impl<F: FnMut(&str) -> Result<()>> Chooser for Growing<'_, F> {
    fn inverse_temperature(&self, _: usize) -> Option<f32> {
        self.generation.inverse_temperature()
    }

    fn choose(&mut self, _: usize, row: Row<'_>) -> Result<Choice> {
        let step = match row {
            Row::Logits(logits) => self.generation.step(logits, self.tokenizer)?,
            Row::Shortlist(list) => match self.generation.step_from(&list, self.tokenizer)? {
                Some(step) => step,
                None => return Ok(Choice::NeedsLogits),
            },
        };
        (self.on_text)(&step.text)?;
        self.finish = step.finish;
        Ok(if step.finish.is_none() { Choice::Token(step.id) } else { Choice::End })
    }
}

impl Opened {
    /// Reads a plan and the tokenizer of its checkpoint.
    pub(super) fn new(plan: &Path, arguments: &RunArguments) -> Result<Self> {
        let start = Instant::now();
        arguments.check()?;
        if let Some(folder) = &arguments.model {
            let name = folder.display();
            ensure!(!folder.is_file(), "--model {name}: this is a file; name its folder");
            ensure!(folder.is_dir(), "--model {name}: there is no such folder");
        }
        let mut file = PlanFile::open(plan)?;
        if let Some(folder) = &arguments.model {
            file.move_checkpoint(folder);
        }
        if arguments.count_experts.is_some() {
            check_countable(&file.plan)?;
        }
        let folder = file.checkpoint_folder();
        ensure!(
            is_folder(&folder)?,
            "the checkpoint's folder {} is gone; --model FOLDER names where it lies now",
            folder.display()
        );
        let tokenizer = Tokenizer::load(&folder);
        Ok(Self { file, tokenizer, opening_time: start.elapsed() })
    }

    /// The plan.
    pub(super) fn plan(&self) -> &Plan {
        &self.file.plan
    }

    /// The tokenizer, where one lies beside the checkpoint; else the error names the option that takes none.
    pub(super) fn tokenizer(&self, other_option: &str) -> Result<&Tokenizer> {
        found(&self.tokenizer, other_option)
    }

    /// How the checkpoint would have answers generated, with what the user asks for instead.
    pub(super) fn generation(&self, overrides: &GenerationOverrides) -> Result<GenerationOptions> {
        let folder = self.file.checkpoint_folder();
        let tokenizer = match &self.tokenizer {
            Ok(tokenizer) => Some(tokenizer),
            Err(error) if error.is::<NoTokenizer>() => None,
            // What ends an answer may be known to this file alone.
            Err(error) => bail!("{error:#}"),
        };
        GenerationOptions::load(&folder, tokenizer)?.overridden(overrides)
    }

    /// Fails where a prompt has no tokens, some of another model, or leaves no room for an answer.
    pub(super) fn check_prompt(&self, prompt: &[u32]) -> Result<()> {
        ensure!(!prompt.is_empty(), "the prompt is empty: there is nothing to continue");
        check_tokens(prompt, self.plan().model.vocabulary)?;
        check_room(self.plan(), prompt.len())
    }

    /// Loads the weights, with a progress bar where somebody sees it.
    pub(super) fn load(self, arguments: &RunArguments, trace: bool) -> Result<Session> {
        let start = Instant::now();
        let options = Options { trace, ..arguments.options() };
        let engine = Engine::new(load_with_progress(self.file, &options)?);
        let counted = options.expert_counter.zip(arguments.count_experts.clone());
        // In between somebody may have typed a prompt.
        let load_time = self.opening_time + start.elapsed();
        Ok(Session { engine, load_time, tokenizer: self.tokenizer, counted })
    }
}

/// Whether a folder is there; an error where that cannot be told.
fn is_folder(path: &Path) -> Result<bool> {
    match fs::metadata(path) {
        Ok(found) => Ok(found.is_dir()),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            Ok(false)
        }
        Err(error) => Err(error).with_context(|| format!("looking for {}", path.display())),
    }
}

fn found<'a>(tokenizer: &'a Result<Tokenizer>, other_option: &str) -> Result<&'a Tokenizer> {
    tokenizer.as_ref().map_err(|error| {
        if error.is::<NoTokenizer>() {
            return anyhow!("{error:#}; text takes a tokenizer, {other_option} takes none");
        }
        // One that is malformed can be mended.
        anyhow!("{error:#}")
    })
}

/// Fails where so many tokens leave no room for an answer.
fn check_room(plan: &Plan, tokens: usize) -> Result<()> {
    let context = plan.model.context as usize;
    ensure!(
        tokens < context,
        "{tokens} tokens leave no room for an answer in the plan's context of {context}: compile it with \
         --context {} or more if the model has as much",
        tokens + 1
    );
    Ok(())
}

impl Session {
    /// The tokenizer, where one lies beside the checkpoint; else the error names the option that takes none.
    pub(super) fn tokenizer(&self, other_option: &str) -> Result<&Tokenizer> {
        found(&self.tokenizer, other_option)
    }

    /// Answers the ids appended to a sequence. `on_text` gets the text as it becomes certain;
    /// raising `abort` ends the answer.
    pub(super) fn answer(
        &mut self,
        sequence: SequenceId,
        asked: &Asked,
        abort: &AtomicBool,
        on_text: impl FnMut(&str) -> Result<()>,
    ) -> Result<Answer> {
        let prompt = self.engine.tokens(sequence).to_vec();
        check_room(self.engine.plan(), prompt.len())?;
        let context = self.engine.plan().model.context as usize;
        let tokenizer = self.tokenizer.as_ref().ok();
        let mut generation = Generation::new(&asked.generation, &prompt, context - prompt.len());
        if let Some(tokenizer) = tokenizer.filter(|_| asked.continues_text) {
            generation.continue_text(&prompt, tokenizer)?;
        }
        let finish = (generation.max_tokens() == 0).then_some(FinishReason::Length);
        let mut growing = Growing { generation, tokenizer, on_text, finish };
        let timings = if finish.is_none() {
            self.engine.generate_with(&[sequence], abort, &mut growing)?
        } else {
            // Nothing is fed for no tokens; the prompt is as long as it is.
            Timings { prompt_tokens: prompt.len(), ..Timings::default() }
        };
        let Growing { mut generation, mut on_text, finish, .. } = growing;
        if let (None, Some(tokenizer)) = (finish, tokenizer) {
            // What waited for a next token is of tokens that are in the answer.
            on_text(&generation.end(tokenizer)?)?;
        }
        let (ids, text) = (generation.ids().to_vec(), generation.text().to_owned());
        // The last token is not fed any more.
        let fills_context = prompt.len() + ids.len() >= context;
        Ok(Answer { ids, text, finish, fills_context, timings })
    }

    /// Writes what was counted and recorded: all that can be written, and tells the first failure.
    pub(super) fn write_records(
        &self,
        trace: Option<&Path>,
        perfetto_file: Option<&Path>,
    ) -> Result<()> {
        let plan = self.engine.plan();
        let counted = self.counted.as_ref().map_or(Ok(()), |(counter, path)| {
            write_record(Some(path), || counter.counts(plan).to_ron())
        });
        let Some(recorded) = self.engine.executor().trace() else { return counted };
        let traced = write_record(trace, || recorded.to_ron());
        let drawn = write_record(perfetto_file, || perfetto(plan, &recorded));
        counted.and(traced).and(drawn)
    }
}

/// Writes a record where a file is named for it.
fn write_record(path: Option<&Path>, text: impl FnOnce() -> Result<String>) -> Result<()> {
    match path {
        Some(path) => command_line::write(path, text()?.as_bytes()),
        None => Ok(()),
    }
}

/// A flag that Ctrl-C raises. When it is up already the program ends at once, with the status shells give
/// an interrupted program.
pub(super) fn interrupt_flag() -> Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    let raised = Arc::clone(&flag);
    ctrlc::set_handler(move || {
        if raised.swap(true, Ordering::Relaxed) {
            std::process::exit(INTERRUPTED);
        }
    })
    .context("listening for Ctrl-C")?;
    Ok(flag)
}

/// Ends the program with the status of an interrupted one where Ctrl-C has been pressed. The session is dropped before,
/// so that its lanes have ended.
pub(super) fn exit_if_interrupted(flag: &AtomicBool) {
    if flag.load(Ordering::Relaxed) {
        std::process::exit(INTERRUPTED);
    }
}

/// 128 and the number of SIGINT.
const INTERRUPTED: i32 = 130;

/// Whether a plan chooses experts, by the numbers that the checkpoint gives them.
fn check_countable(plan: &Plan) -> Result<()> {
    ensure!(plan.has_experts(), "--count-experts: {} is no mixture of experts", plan.model.name);
    ensure!(
        plan.asked.expert_counts.is_none(),
        "--count-experts: the plan was compiled with --expert-counts, which puts experts in another order; count with \
         a plan compiled without"
    );
    Ok(())
}

fn load_with_progress(file: PlanFile, options: &Options) -> Result<executor::executor::Executor> {
    let bar =
        if std::io::stderr().is_terminal() { ProgressBar::new(0) } else { ProgressBar::hidden() };
    let style =
        ProgressStyle::with_template("loading {bar:24} {bytes} of {total_bytes}, {bytes_per_sec}")
            .context("the template of the progress bar is malformed")?;
    bar.set_style(style);
    let executor = load(file, options, |loaded, total| {
        bar.set_length(total);
        bar.set_position(loaded);
    });
    bar.finish_and_clear();
    executor
}
