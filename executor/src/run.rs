//! One run of a program: its batch, its tensors, which of its steps are done, and how it ended.

use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};
use burn::tensor::TensorData;
use ir::id::{Id as _, StepId};
use ir::plan::{Plan, Program};
use ir::workspace::shortlist::{LIST_WORDS, LISTED_TOKENS};

use crate::batch::Batch;
use crate::bell::Bell;
use crate::known_graphs::{Admission, KnownGraphs};
use crate::lane::pulse::Pulse;
use crate::locked;
use crate::ops::gpu::GraphKey;
use crate::sample::Shortlist;
use crate::slots::{Slots, Uses, Value};
use crate::trace::Recorder;

/// How long lanes that wait for devices have to leave a run that was ended early, from any lane's last sign of life on:
/// many times what the longest stretch of a GPU's steps takes as a rule. A processor's step may take longer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// What all lanes share of a run.
pub(crate) struct Run {
    /// Index into the plan's programs.
    pub(crate) program: usize,
    /// Runs started before it.
    pub(crate) number: u32,
    pub(crate) batch: Batch,
    pub(crate) slots: Slots,
    /// Under what its captured graph is found.
    pub(crate) graph_key: GraphKey,
    /// What it does about captured launches; `None` where runs of its kind are never captured.
    pub(crate) admission: Option<Admission>,
    done: Vec<AtomicBool>,
    /// Lanes that have come to each of the places where they meet.
    met: [AtomicUsize; 2],
    /// Lanes that have not left the run.
    lanes_left: AtomicUsize,
    /// GPUs that have replayed their parts.
    replays: AtomicUsize,
    is_aborted: AtomicBool,
    /// When it was ended early.
    aborted: OnceLock<Instant>,
    failure: Mutex<Option<Failure>>,
    /// That of the lanes of all runs.
    pub(crate) pulse: Arc<Pulse>,
    /// Where lanes wait for steps of others.
    steps_bell: Bell,
    /// Where the caller waits for the end, and lanes that begin the next run alone: kept apart, for a waker pays for
    /// every sleeper.
    end_bell: Bell,
}

/// A lane's part in a run, which ends when this is dropped, even by a panic.
pub(crate) struct Presence<'a> {
    run: &'a Run,
}

/// Why a run ended early.
#[derive(Clone, Debug)]
pub(crate) enum Failure {
    /// A step failed.
    Step {
        /// Its name and where it stands.
        step: String,
        /// Where it ran.
        device: String,
        /// What went wrong.
        cause: String,
    },
    /// Nobody wants the result any more.
    Cancelled,
}

impl Failure {
    /// A step failed, of a device of that name.
    pub(crate) fn at_step(program: &Program, id: StepId, device: &str, cause: String) -> Self {
        let step = format!("{id} ({}) of {}", program.steps[id].name, program.name);
        Self::Step { step, device: device.to_owned(), cause }
    }

    /// A lane of that device failed, and no step is to blame.
    pub(crate) fn beside_steps(program: &Program, device: &str, cause: String) -> Self {
        let step = format!("a lane of {}", program.name);
        Self::Step { step, device: device.to_owned(), cause }
    }
}

/// A run under way. Dropping it does not end the run.
pub struct RunHandle {
    pub(crate) run: Arc<Run>,
    pub(crate) plan: Arc<Plan>,
    pub(crate) recorder: Option<Arc<Recorder>>,
    pub(crate) known: Arc<KnownGraphs>,
    /// Whether the lanes' teams have all processors.
    pub(crate) is_crowded: bool,
}

/// What a run found for the wanted rows of a batch, in the batch's order.
#[derive(Clone, Debug)]
pub struct Logits {
    data: TensorData,
    /// Numbers of a row.
    columns: usize,
    is_listed: bool,
}

/// What a run found for one row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Row<'a> {
    /// The logits of all tokens.
    Logits(&'a [f32]),
    /// The most likely tokens, where the batch allowed that.
    Shortlist(Shortlist<'a>),
}

impl Run {
    pub(crate) fn new(
        plan: &Plan,
        program: usize,
        number: u32,
        batch: Batch,
        known: &KnownGraphs,
        uses: &Arc<Uses>,
        pulse: &Arc<Pulse>,
    ) -> Self {
        let schedule = &plan.programs[program];
        let graph_key = GraphKey::of(program, &batch);
        Self {
            program,
            number,
            admission: known.admit(graph_key, schedule.phase),
            batch,
            graph_key,
            met: [const { AtomicUsize::new(0) }; 2],
            slots: Slots::new(uses),
            done: schedule.steps.ids().map(|_| AtomicBool::new(false)).collect(),
            lanes_left: AtomicUsize::new(schedule.lanes.len()),
            replays: AtomicUsize::new(0),
            is_aborted: AtomicBool::new(false),
            aborted: OnceLock::new(),
            failure: Mutex::new(None),
            pulse: Arc::clone(pulse),
            steps_bell: Bell::default(),
            end_bell: Bell::default(),
        }
    }

    /// A GPU has replayed its part.
    pub(crate) fn note_replay(&self) {
        self.replays.fetch_add(1, Ordering::SeqCst);
    }

    /// Waits for steps of other lanes; false when the run has been aborted.
    pub(crate) fn wait_for(&self, steps: &[StepId]) -> bool {
        for step in steps {
            self.steps_bell
                .wait_until(|| self.done[step.index()].load(Ordering::SeqCst) || self.is_aborted());
        }
        !self.is_aborted()
    }

    /// Whether steps of other lanes have ended.
    pub(crate) fn has_done(&self, steps: &[StepId]) -> bool {
        steps.iter().all(|step| self.done[step.index()].load(Ordering::SeqCst))
    }

    /// Tells other lanes that a step which some of them wait for has ended.
    pub(crate) fn finish(&self, step: StepId) {
        self.done[step.index()].store(true, Ordering::SeqCst);
        self.steps_bell.ring();
    }

    /// Waits until all of `lanes` lanes have come to meeting `number` of the run; false when the run has been aborted.
    pub(crate) fn meet(&self, number: usize, lanes: usize) -> bool {
        self.met[number].fetch_add(1, Ordering::SeqCst);
        self.steps_bell.ring();
        let all_are_here = || self.met[number].load(Ordering::SeqCst) >= lanes;
        self.steps_bell.wait_until(|| all_are_here() || self.is_aborted());
        all_are_here()
    }

    /// Ends the run early; the first failure is the one told.
    pub(crate) fn abort(&self, failure: Failure) {
        locked(&self.failure).get_or_insert(failure);
        self.aborted.get_or_init(Instant::now);
        self.is_aborted.store(true, Ordering::SeqCst);
        self.steps_bell.ring();
    }

    pub(crate) fn is_aborted(&self) -> bool {
        self.is_aborted.load(Ordering::SeqCst)
    }

    /// Whether lanes are still at the run so long after it was ended early that they will hardly leave it: a GPU that
    /// others wait for on their devices may have failed. Not so while processors work, on this run or on another, since
    /// their steps end and lanes leave then.
    pub(crate) fn is_stuck(&self, patience: Duration) -> bool {
        self.is_aborted()
            && !self.has_ended()
            && self.aborted.get().is_some_and(|&since| self.pulse.is_silent(since, patience))
    }

    /// Waits until all lanes have done with the run.
    pub(crate) fn wait_for_end(&self) {
        self.end_bell.wait_until(|| self.has_ended());
    }

    /// Whether all lanes have done with the run.
    fn has_ended(&self) -> bool {
        self.lanes_left.load(Ordering::SeqCst) == 0
    }

    /// A lane begins its part, as each does once.
    pub(crate) fn enter(&self) -> Presence<'_> {
        Presence { run: self }
    }
}

impl Drop for Presence<'_> {
    fn drop(&mut self) {
        self.run.pulse.beat();
        self.run.lanes_left.fetch_sub(1, Ordering::SeqCst);
        self.run.end_bell.ring();
    }
}

impl RunHandle {
    /// Waits for the end of the run; `None`, with lanes in the run still, when `abort` is raised or a lane has failed:
    /// [`RunHandle::cancel`] tells the failure.
    ///
    /// # Errors
    /// The first failure of any lane: the step, the device and the cause.
    pub fn wait_unless(&self, abort: &AtomicBool) -> Result<Option<Logits>> {
        self.wait_for_lanes(|| abort.load(Ordering::Relaxed) || self.run.is_aborted());
        if self.run.has_ended() { self.finish().map(Some) } else { Ok(None) }
    }

    /// Lets lanes leave the run after the steps they are at.
    pub fn abort(&self) {
        self.run.abort(Failure::Cancelled);
    }

    /// Ends the run and waits until its lanes have left it: as long as steps of processors take, and for devices a
    /// minute at most.
    ///
    /// # Errors
    /// The first failure of any lane before that, or when a lane has not left.
    pub fn cancel(self) -> Result<()> {
        self.abort();
        self.wait_for_lanes(|| false);
        if let Some(recorder) = &self.recorder {
            recorder.end_run(self.run.number);
        }
        self.run.slots.clear();
        self.note_failure();
        match self.failure() {
            Some(Failure::Cancelled) if self.run.has_ended() => Ok(()),
            Some(failure) => Err(self.error(&failure)),
            None => Ok(()),
        }
    }

    fn wait_for_lanes(&self, gives_up: impl Fn() -> bool) {
        let is_over = || self.run.has_ended() || gives_up() || self.run.is_stuck(PATIENCE);
        if self.is_crowded {
            self.run.end_bell.sleep_until(is_over);
        } else {
            self.run.end_bell.wait_until(is_over);
        }
    }

    fn failure(&self) -> Option<Failure> {
        locked(&self.run.failure).take()
    }

    fn note_failure(&self) {
        if let Some(admission) = self.run.admission {
            self.known.note_failure(self.run.graph_key, admission);
        }
    }

    fn error(&self, failure: &Failure) -> anyhow::Error {
        if self.run.has_ended() {
            anyhow!("{failure}")
        } else {
            anyhow!("{failure}; some devices never ended that run: start again")
        }
    }

    fn finish(&self) -> Result<Logits> {
        let run = &self.run;
        if let Some(recorder) = &self.recorder {
            recorder.end_run(run.number);
        }
        let program = &self.plan.programs[run.program];
        let output = run.slots.take(program.output);
        run.slots.clear();
        if let Some(failure) = self.failure() {
            self.note_failure();
            return Err(self.error(&failure));
        }
        if let Some(admission) = run.admission {
            let replays = run.replays.load(Ordering::SeqCst);
            self.known.note_end(run.graph_key, admission, replays);
        }
        match output.context("no step wrote the logits")? {
            Value::Float(logits) => {
                Logits::new(logits.into_data(), self.plan.model.vocabulary as usize)
            }
            Value::Int(_) => Err(anyhow!("the program's output is not logits")),
        }
    }
}

impl Logits {
    fn new(data: TensorData, vocabulary: usize) -> Result<Self> {
        let shape = data.shape();
        let columns = *shape.last().context("logits have no axes")?;
        data.as_slice::<f32>().map_err(|error| anyhow!("logits are not f32: {error:?}"))?;
        // Lists are shorter than any vocabulary that they are made of.
        let is_listed = columns != vocabulary && columns == LIST_WORDS as usize;
        Ok(Self { data, columns, is_listed })
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.as_slice().len() / self.columns
    }

    /// What was found for one row.
    pub fn row(&self, row: usize) -> Row<'_> {
        let numbers = &self.as_slice()[row * self.columns..(row + 1) * self.columns];
        if self.is_listed {
            let (logits, rest) = numbers.split_at(LISTED_TOKENS as usize);
            let (ids, rest) = rest.split_at(LISTED_TOKENS as usize);
            Row::Shortlist(Shortlist { logits, ids, weight: rest[0] })
        } else {
            Row::Logits(numbers)
        }
    }

    fn as_slice(&self) -> &[f32] {
        self.data.as_slice().expect("checked when they were made")
    }
}

impl<'a> Row<'a> {
    /// The logits of a row of a batch that asked for them.
    ///
    /// # Errors
    /// When the run gave a list instead.
    pub fn logits(self) -> Result<&'a [f32]> {
        match self {
            Row::Logits(logits) => Ok(logits),
            Row::Shortlist(_) => Err(anyhow!("the run gave the most likely tokens alone")),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Step { step, device, cause } => {
                write!(f, "{step} on {device} failed: {cause}")
            }
            Failure::Cancelled => f.write_str("the run was cancelled"),
        }
    }
}

/// What a panic says.
pub(crate) fn panic_message(payload: &(dyn Any + Send)) -> String {
    payload
        .downcast_ref::<String>()
        .cloned()
        .or_else(|| payload.downcast_ref::<&str>().map(ToString::to_string))
        .unwrap_or_else(|| "a panic without a message".into())
}

#[cfg(test)]
mod tests {
    use std::thread;

    use ::tests::machines::{linked, numa};
    use ::tests::toys::Toy;

    use super::*;

    /// A run of a toy's first program, of which no lane has begun, failed or cancelled so long ago.
    fn ended(failure: Option<Failure>, since: Duration) -> RunHandle {
        let machine = linked(vec![numa(0, 1 << 30)]);
        let (model, options) = (Toy::llama().model().unwrap(), compiler::Options::default());
        let plan = compiler::compile(&model, &machine, &options, &mut |_, _| ()).unwrap();
        let known = Arc::new(KnownGraphs::new(1, 0));
        let uses = Arc::new(Uses::of(&plan.programs[0]));
        let run = Run::new(&plan, 0, 0, Batch::default(), &known, &uses, &Arc::default());
        if let Some(failure) = failure {
            run.aborted.set(Instant::now().checked_sub(since).unwrap()).unwrap();
            run.abort(failure);
        }
        RunHandle {
            run: Arc::new(run),
            plan: Arc::new(plan),
            recorder: None,
            known,
            is_crowded: false,
        }
    }

    fn broken() -> Failure {
        Failure::Step { step: "s1".into(), device: "gpu0".into(), cause: "broken".into() }
    }

    #[test]
    fn a_failure_is_told_where_another_lane_never_leaves() {
        let handle = ended(Some(broken()), PATIENCE + Duration::from_secs(1));
        assert!(handle.wait_unless(&AtomicBool::new(false)).unwrap().is_none());
        let error = handle.cancel().unwrap_err().to_string();
        let end = "some devices never ended that run: start again";
        assert_eq!(error, format!("s1 on gpu0 failed: broken; {end}"));
        let handle = ended(Some(Failure::Cancelled), PATIENCE + Duration::from_secs(1));
        assert_eq!(
            handle.cancel().unwrap_err().to_string(),
            format!("the run was cancelled; {end}")
        );
    }

    #[test]
    fn a_step_of_a_processor_is_waited_for_however_long_it_takes() {
        let handle = ended(Some(Failure::Cancelled), PATIENCE + Duration::from_secs(1));
        assert!(handle.run.is_stuck(PATIENCE));
        let run = Arc::clone(&handle.run);
        let work = run.pulse.work();
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(20));
                drop(work);
                drop(run.enter());
            });
            handle.cancel().unwrap();
        });
        assert!(run.has_ended());
    }

    #[test]
    fn a_failure_is_seen_before_all_lanes_have_left() {
        let handle = ended(Some(broken()), Duration::ZERO);
        assert!(handle.wait_unless(&AtomicBool::new(false)).unwrap().is_none());
        drop(handle.run.enter());
        let error = handle.wait_unless(&AtomicBool::new(false)).unwrap_err();
        assert_eq!(error.to_string(), "s1 on gpu0 failed: broken");
    }

    #[test]
    fn a_run_that_nobody_wants_any_more_goes_on_until_it_is_cancelled() {
        let handle = ended(None, Duration::ZERO);
        assert!(handle.wait_unless(&AtomicBool::new(true)).unwrap().is_none());
        assert!(!handle.run.is_aborted());
        handle.abort();
        assert!(handle.run.is_aborted());
        drop(handle.run.enter());
        handle.cancel().unwrap();
    }
}
