//! A plan that is loaded and ready to answer, with its checkpoint's tokenizer and defaults.
//!
//! Weights take minutes to load. What is asked for is checked before that, with what an [`Opened`] plan knows.

use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use ir::op::Op;
use ir::plan::{Action, Plan};

use executor::counting::ExpertCounter;
use executor::engine::{Choice, Chooser, Engine, SequenceId, Timings, check_tokens};
use executor::generation::{FinishReason, Generation, GenerationOptions, GenerationOverrides};
use executor::load::{Options, PlanFile, load};
use executor::run::Row;
use executor::text::Tokenizer;
use executor::trace::perfetto;

use super::RunArguments;

/// A plan whose weights are still where they were.
pub(super) struct Opened {
    file: PlanFile,
    texts: Texts,
    start: Instant,
}

/// What turns text to tokens and tokens to an answer.
struct Texts {
    tokenizer: Result<Tokenizer>,
    defaults: GenerationOptions,
}

/// A loaded plan.
pub(super) struct Session {
    pub(super) engine: Engine,
    /// From the start of the program's work to the last weight in place.
    pub(super) load_time: Duration,
    texts: Texts,
    /// Where the choices of routers are counted, and the file for them.
    counted: Option<(Arc<ExpertCounter>, PathBuf)>,
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
    /// Reads a plan and what its checkpoint says of texts.
    pub(super) fn new(
        plan: &Path,
        arguments: &RunArguments,
        overrides: &GenerationOverrides,
    ) -> Result<Self> {
        let start = Instant::now();
        let mut file = PlanFile::open(plan)?;
        if let Some(folder) = &arguments.model {
            file.move_checkpoint(folder);
        }
        if arguments.count_experts.is_some() {
            check_countable(&file.plan)?;
        }
        let folder = file.checkpoint_folder();
        let tokenizer = Tokenizer::load(&folder);
        let defaults =
            GenerationOptions::load(&folder, tokenizer.as_ref().ok())?.overridden(overrides)?;
        Ok(Self { file, texts: Texts { tokenizer, defaults }, start })
    }

    /// The plan.
    pub(super) fn plan(&self) -> &Plan {
        &self.file.plan
    }

    /// The tokenizer, where one lies beside the checkpoint.
    pub(super) fn tokenizer(&self) -> Result<&Tokenizer> {
        self.texts.tokenizer()
    }

    /// Fails where a prompt has no tokens, some of another model, or leaves no room for an answer.
    pub(super) fn check_prompt(&self, prompt: &[u32]) -> Result<()> {
        ensure!(!prompt.is_empty(), "the prompt is empty: there is nothing to continue");
        check_tokens(prompt, self.plan().model.vocabulary)?;
        check_room(self.plan(), prompt.len())
    }

    /// Loads the weights, with a progress bar where somebody sees it.
    pub(super) fn load(self, arguments: &RunArguments, trace: bool) -> Result<Session> {
        let options = Options { trace, ..arguments.options()? };
        let engine = Engine::new(load_with_progress(self.file, &options)?);
        let counted = options.expert_counter.zip(arguments.count_experts.clone());
        let load_time = self.start.elapsed();
        Ok(Session { engine, load_time, texts: self.texts, counted })
    }
}

impl Texts {
    fn tokenizer(&self) -> Result<&Tokenizer> {
        self.tokenizer.as_ref().map_err(|error| {
            anyhow!("{error:#}; text takes a tokenizer, --prompt-ids with --json takes none")
        })
    }
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
    /// The tokenizer, where one lies beside the checkpoint.
    pub(super) fn tokenizer(&self) -> Result<&Tokenizer> {
        self.texts.tokenizer()
    }

    /// Answers the ids appended to a sequence. `on_text` gets the text as it becomes certain;
    /// raising `abort` ends the answer.
    pub(super) fn answer(
        &mut self,
        sequence: SequenceId,
        abort: &AtomicBool,
        on_text: impl FnMut(&str) -> Result<()>,
    ) -> Result<Answer> {
        let prompt = self.engine.tokens(sequence).to_vec();
        check_room(self.engine.plan(), prompt.len())?;
        let context = self.engine.plan().model.context as usize;
        let generation = Generation::new(&self.texts.defaults, &prompt, context - prompt.len());
        let finish = (generation.max_tokens() == 0).then_some(FinishReason::Length);
        let tokenizer = self.texts.tokenizer.as_ref().ok();
        let mut growing = Growing { generation, tokenizer, on_text, finish };
        let mut timings = Timings::default();
        if finish.is_none() {
            timings = self.engine.generate_with(&[sequence], abort, &mut growing)?;
        }
        let Growing { generation, finish, .. } = growing;
        let (ids, text) = (generation.ids().to_vec(), generation.text().to_owned());
        // The last token is not fed any more.
        let fills_context = prompt.len() + ids.len() >= context;
        Ok(Answer { ids, text, finish, fills_context, timings })
    }

    /// Writes what was counted and recorded.
    pub(super) fn write_records(
        &self,
        trace: Option<&Path>,
        perfetto_file: Option<&Path>,
    ) -> Result<()> {
        if let Some((counter, path)) = &self.counted {
            let counts = counter.counts(self.engine.plan());
            command_line::write(path, counts.to_ron()?.as_bytes())?;
        }
        let Some(recorded) = self.engine.executor().trace() else { return Ok(()) };
        if let Some(path) = trace {
            command_line::write(path, recorded.to_ron()?.as_bytes())?;
        }
        if let Some(path) = perfetto_file {
            command_line::write(path, perfetto(self.engine.plan(), &recorded)?.as_bytes())?;
        }
        Ok(())
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

/// 128 and the number of SIGINT.
pub(super) const INTERRUPTED: i32 = 130;

/// Whether a plan chooses experts, by the numbers that the checkpoint gives them.
fn check_countable(plan: &Plan) -> Result<()> {
    let mut steps = plan.programs.iter().flat_map(|program| program.steps.rows());
    ensure!(
        steps.any(|step| matches!(step.action, Action::Run(Op::Route { .. }))),
        "--count-experts: {} is no mixture of experts",
        plan.model.name
    );
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
