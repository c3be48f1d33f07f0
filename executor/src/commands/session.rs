//! A plan that is loaded and ready to answer, with its checkpoint's tokenizer and defaults.

use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use ir::op::Op;
use ir::plan::{Action, Plan};

use executor::counting::ExpertCounter;
use executor::engine::{Choice, Chooser, Engine, SequenceId, Timings};
use executor::generation::{FinishReason, Generation, GenerationOptions, GenerationOverrides};
use executor::load::{Options, PlanFile, load};
use executor::run::Row;
use executor::text::Tokenizer;
use executor::trace::perfetto;

use super::RunArguments;

/// A loaded plan.
pub(super) struct Session {
    pub(super) engine: Engine,
    /// From the start of the program's work to the last weight in place.
    pub(super) load_time: Duration,
    tokenizer: Result<Tokenizer>,
    defaults: GenerationOptions,
    /// Where the choices of routers are counted, and the file for them.
    counted: Option<(Arc<ExpertCounter>, PathBuf)>,
}

/// A finished answer.
pub(super) struct Answer {
    pub(super) ids: Vec<u32>,
    pub(super) text: String,
    /// `None` when the user stopped it.
    pub(super) finish: Option<FinishReason>,
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

impl Session {
    /// Loads a plan, with a progress bar where somebody sees it.
    pub(super) fn open(
        plan: &Path,
        arguments: &RunArguments,
        overrides: &GenerationOverrides,
        trace: bool,
    ) -> Result<Self> {
        let start = Instant::now();
        let file = PlanFile::open(plan)?;
        if arguments.count_experts.is_some() {
            check_countable(&file.plan)?;
        }
        let folder = file.checkpoint_folder();
        let tokenizer = Tokenizer::load(&folder);
        let defaults =
            GenerationOptions::load(&folder, tokenizer.as_ref().ok())?.overridden(overrides)?;
        let options = Options { trace, ..arguments.options()? };
        let engine = Engine::new(load_with_progress(file, &options)?);
        let counted = options.expert_counter.zip(arguments.count_experts.clone());
        Ok(Self { engine, load_time: start.elapsed(), tokenizer, defaults, counted })
    }

    /// The tokenizer, where one lies beside the checkpoint.
    pub(super) fn tokenizer(&self) -> Result<&Tokenizer> {
        self.tokenizer.as_ref().map_err(|error| anyhow::anyhow!("{error:#}")).context(
            "text takes the checkpoint's tokenizer, which cannot be used; --prompt-ids with --json needs none",
        )
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
        let context = self.engine.plan().model.context as usize;
        let room = context.saturating_sub(prompt.len());
        ensure!(
            room > 0,
            "{} tokens fill the plan's context of {context} and leave no room for an answer: compile it with \
             --context {} or more if the model has as much",
            prompt.len(),
            prompt.len() + 1
        );
        let generation = Generation::new(&self.defaults, &prompt, room);
        let finish = (generation.max_tokens() == 0).then_some(FinishReason::Length);
        let tokenizer = self.tokenizer.as_ref().ok();
        let mut growing = Growing { generation, tokenizer, on_text, finish };
        let mut timings = Timings::default();
        if finish.is_none() {
            timings = self.engine.generate_with(&[sequence], abort, &mut growing)?;
        }
        let Growing { generation, finish, .. } = growing;
        let (ids, text) = (generation.ids().to_vec(), generation.text().to_owned());
        Ok(Answer { ids, text, finish, timings })
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
