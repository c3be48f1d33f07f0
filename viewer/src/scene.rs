//! A plan and a trace of it, joined by step into plain data: all that the panels draw.
//!
//! - Pure: the same plan and trace give the same scene, and nothing here knows a window.
//! - Total: every index of a plan or trace may be wrong; what cannot be joined is left out and named in `findings`.
//! - Times are nanoseconds: predicted ones since their program began, measured ones since the trace began.

mod bars;
mod blocks;
mod memory;
mod reason;
mod schedule;
mod steps;
mod summary;
mod text;
mod timing;
mod work;

use ir::forecast::ProgramForecast;
use ir::id::Id as _;
use ir::plan::{Phase, Plan, Queue};
use ir::trace::Trace;

use crate::quantity;

pub use bars::{Bar, Bars};
pub use blocks::{Block, Edge, Group};
pub use memory::{Curve, Level};
pub use steps::{Kind, Measured, Step};
pub(crate) use summary::size_text;
pub use summary::{Bottleneck, Limit, Size, Summary};
pub use timing::{Idle, IdleCause, Times, Timing};

/// Everything there is to draw.
#[derive(Clone, Debug, Default)]
pub struct Scene {
    /// The model's name.
    pub title: String,
    /// Its architecture, context and sequences, in words.
    pub subtitle: String,
    /// Fingerprints of the checkpoint's files, in order.
    pub checkpoint: Vec<u64>,
    /// In the plan's order.
    pub devices: Vec<Device>,
    /// Queues in order of devices, then links, then groups of devices that take part in collectives.
    pub lanes: Vec<Lane>,
    /// In the plan's order.
    pub programs: Vec<Program>,
    /// In the trace's order; empty without a trace.
    pub runs: Vec<Run>,
    /// Placements that were priced, best first.
    pub candidates: Vec<Candidate>,
    /// What is wrong with plan or trace.
    pub findings: Vec<String>,
    /// What is to be said of each program.
    pub summaries: Vec<Summary>,
    /// Whether the trace is of another plan: its spans are drawn, but measure nothing of this one.
    pub is_trace_of_another: bool,
    /// Whether the plan fails the check.
    pub is_unsound: bool,
    /// End of the last span or run of the trace.
    pub trace_end: u64,
}

/// A device and the bytes that the plan gives it.
#[derive(Clone, Debug, Default)]
pub struct Device {
    /// `gpu0`, `numa1`.
    pub name: String,
    /// Whether it is a GPU.
    pub is_gpu: bool,
    /// Whether its rates were measured.
    pub is_calibrated: bool,
    /// What plans may fill.
    pub capacity_bytes: u64,
    /// Weights in their compute formats, and unpacked copies of them.
    pub weight_bytes: u64,
    /// KV caches.
    pub cache_bytes: u64,
    /// The most bytes of buffers at one time.
    pub buffer_bytes: u64,
    /// The window that fetched weights pass through.
    pub fetch_bytes: u64,
    /// Scratch memory of kernels, and what the driver takes.
    pub scratch_bytes: u64,
}

/// One row of the timeline.
#[derive(Clone, Debug)]
pub struct Lane {
    /// `gpu0 compute`, `numa0 → gpu0`, `gpu0 + gpu1`.
    pub name: String,
    /// What it is a row of.
    pub kind: LaneKind,
    /// Measured spans of all runs.
    pub measured: Bars,
}

/// What a row of the timeline shows.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LaneKind {
    /// One queue of a device.
    Queue(usize, Queue),
    /// What crosses from one device to another.
    Link(usize, usize),
    /// Collectives of these devices.
    Members(Vec<usize>),
}

/// One program of the plan.
#[derive(Clone, Debug)]
pub struct Program {
    /// `prefill`, `decode1`.
    pub name: String,
    /// Whether one token a sequence is fed.
    pub is_decode: bool,
    /// The most tokens of one run.
    pub max_tokens: u32,
    /// The tokens of each sequence that predictions take to be cached.
    pub cached_tokens: u32,
    /// The compiler's forecast of its runs.
    pub forecast: Option<ProgramForecast>,
    /// Tokens of the largest measured runs, which `Step::measured` is of.
    pub measured_tokens: Option<u32>,
    /// By number.
    pub steps: Vec<Step>,
    /// For each lane of the plan's program: the row of `Scene::lanes`, and its steps in order.
    pub queues: Vec<(usize, Vec<usize>)>,
    /// Layers in the order they start.
    pub blocks: Vec<Block>,
    /// Neighbouring blocks that are alike, folded.
    pub groups: Vec<Group>,
    /// What passes between blocks on different devices.
    pub edges: Vec<Edge>,
    /// When each step is expected to run.
    pub predicted: Timing,
    /// The same for each row of `Scene::lanes`.
    pub bars: Vec<Bars>,
    /// How memory is expected to fill, for each device.
    pub memory: Vec<Curve>,
    buffers: Vec<memory::Lifetime>,
}

/// One measured run.
#[derive(Clone, Debug)]
pub struct Run {
    /// Index of its program.
    pub program: usize,
    /// Tokens fed.
    pub tokens: u32,
    /// Sequences fed.
    pub sequences: u32,
    /// Tokens cached before.
    pub past: u32,
    /// When its first step began.
    pub start: u64,
    /// When its logits were there.
    pub end: u64,
    /// When each step of the program ran.
    pub times: Vec<Option<Times>>,
    /// Whether all of them did, and as steps of this plan. What ended early measures nothing.
    pub is_whole: bool,
}

/// A placement that was priced.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// For people.
    pub name: String,
    /// One prefill of the most tokens; `None` where it does not fit.
    pub prefill_nanos: Option<u64>,
    /// One decode step of one sequence.
    pub decode_nanos: Option<u64>,
    /// What it lacks, in words.
    pub missing: Option<String>,
}

impl Scene {
    /// Joins a plan, whatever its `findings`, with a trace of it.
    pub fn new(plan: &Plan, trace: Option<&Trace>, findings: Vec<String>) -> Self {
        Scene::joined(plan, trace, Scene { findings, ..Scene::default() })
    }

    /// The same with a trace of another plan.
    pub fn with_trace_of_another(plan: &Plan, trace: &Trace, findings: Vec<String>) -> Self {
        let empty = Scene { findings, is_trace_of_another: true, ..Scene::default() };
        Scene::joined(plan, Some(trace), empty)
    }

    fn joined(plan: &Plan, trace: Option<&Trace>, empty: Scene) -> Self {
        let mut scene = Scene {
            title: plan.model.name.clone(),
            subtitle: format!(
                "{}, {} of context, {}",
                plan.model.architecture,
                quantity::counted(plan.model.context.into(), "token"),
                quantity::counted(plan.model.max_sequences.into(), "sequence")
            ),
            checkpoint: plan.fingerprints(),
            devices: devices(plan),
            ..empty
        };
        scene.candidates = plan.forecast.candidates.iter().map(|c| candidate(plan, c)).collect();
        scene.programs = plan.programs.iter().map(|program| program_scene(plan, program)).collect();
        scene.lay_lanes(plan);
        if let Some(trace) = trace {
            scene.join(trace);
        }
        scene.summaries = (0..scene.programs.len()).map(|number| scene.summarise(number)).collect();
        scene
    }

    /// Whether what is drawn says little of what would run.
    pub fn is_doubtful(&self) -> bool {
        self.is_trace_of_another || self.is_unsound
    }

    /// The program most people ask about: decode for the fewest sequences, else the first.
    pub fn main_program(&self) -> usize {
        self.programs.iter().position(|program| program.is_decode).unwrap_or(0)
    }

    /// Runs of a program, in order.
    pub fn runs_of(&self, program: usize) -> impl Iterator<Item = usize> + '_ {
        self.runs
            .iter()
            .enumerate()
            .filter(move |(_, run)| run.program == program)
            .map(|(index, _)| index)
    }

    fn whole_runs_of(&self, program: usize) -> impl Iterator<Item = usize> + '_ {
        self.runs_of(program).filter(|&run| self.runs[run].is_whole)
    }

    /// The run of a program that took the median time, among those at full size if there are any.
    pub fn typical_run(&self, program: usize) -> Option<usize> {
        let all: Vec<usize> = self.whole_runs_of(program).collect();
        let most = all.iter().map(|&run| self.runs[run].tokens).max()?;
        let mut largest: Vec<usize> =
            all.into_iter().filter(|&run| self.runs[run].tokens == most).collect();
        largest.sort_by_key(|&run| self.runs[run].end.saturating_sub(self.runs[run].start));
        largest.get(largest.len() / 2).copied()
    }

    /// The run of a program that is looked at first: the typical one, or where all ended early the first.
    pub fn first_shown_run(&self, program: usize) -> Option<usize> {
        self.typical_run(program).or_else(|| self.runs_of(program).next())
    }

    /// Critical path, idle times and shares of a measured run.
    pub fn run_timing(&self, run: usize) -> Option<Timing> {
        let run = self.runs.get(run)?;
        let program = self.programs.get(run.program)?;
        Some(Timing::of(program, run.times.clone(), run.start, run.end))
    }

    /// How memory filled in a measured run, for each device.
    pub fn run_memory(&self, run: usize) -> Option<Vec<Curve>> {
        let run = self.runs.get(run)?;
        let program = self.programs.get(run.program)?;
        Some(memory::curves(&program.buffers, &run.times, self.devices.len(), run.start, run.end))
    }

    /// Rows of the timeline, and in them the predicted and measured bars.
    fn lay_lanes(&mut self, plan: &Plan) {
        let mut kinds: Vec<LaneKind> = Vec::new();
        for (program, steps) in plan.programs.iter().zip(&self.programs) {
            kinds.extend(
                program.lanes.iter().map(|lane| LaneKind::Queue(lane.device.index(), lane.queue)),
            );
            kinds.extend(steps.steps.iter().filter_map(|step| step.path.clone()));
        }
        kinds.sort();
        kinds.dedup();
        self.lanes = kinds
            .iter()
            .map(|kind| Lane {
                name: self.lane_name(kind),
                kind: kind.clone(),
                measured: Bars::default(),
            })
            .collect();
        for (number, (program, planned)) in self.programs.iter_mut().zip(&plan.programs).enumerate()
        {
            for ((row, _), lane) in program.queues.iter_mut().zip(&planned.lanes) {
                let kind = LaneKind::Queue(lane.device.index(), lane.queue);
                *row = kinds.binary_search(&kind).expect("every queue was listed above");
            }
            for step in &mut program.steps {
                step.path_lane = step.path.as_ref().and_then(|kind| kinds.binary_search(kind).ok());
            }
            program.bars = bars::predicted(program, number, kinds.len());
        }
    }

    fn lane_name(&self, kind: &LaneKind) -> String {
        match kind {
            LaneKind::Queue(device, queue) => format!("{} {queue}", self.device_name(*device)),
            LaneKind::Link(from, to) => {
                format!("{} → {}", self.device_name(*from), self.device_name(*to))
            }
            LaneKind::Members(devices) => {
                let names: Vec<String> =
                    devices.iter().map(|&device| self.device_name(device)).collect();
                if names.len() > 3 {
                    format!("{} … {} ({})", names[0], names[names.len() - 1], names.len())
                } else {
                    names.join(" + ")
                }
            }
        }
    }

    /// The device's name; its id where the plan has no such device.
    pub fn device_name(&self, device: usize) -> String {
        self.devices.get(device).map_or_else(|| format!("d{device}?"), |device| device.name.clone())
    }

    /// Its devices, then those that only the other scene has.
    pub fn devices_with(&self, other: &Scene) -> Vec<Device> {
        let is_known = |name: &str| self.devices.iter().any(|device| device.name == name);
        let more = other.devices.iter().filter(|device| !is_known(&device.name));
        self.devices.iter().chain(more).cloned().collect()
    }

    fn join(&mut self, trace: &Trace) {
        let mut strays = 0_usize;
        for run in &trace.runs {
            let program = run.program as usize;
            let steps = self.programs.get(program).map_or(0, |program| program.steps.len());
            if self.programs.get(program).is_none() {
                strays += 1;
            }
            self.runs.push(Run {
                program,
                tokens: run.tokens,
                sequences: run.sequences,
                past: run.past,
                start: run.start,
                end: run.end.max(run.start),
                times: vec![None; steps],
                is_whole: false,
            });
            self.trace_end = self.trace_end.max(run.end);
        }
        for span in &trace.spans {
            let place = self
                .runs
                .get_mut(span.run as usize)
                .and_then(|run| run.times.get_mut(span.step.index()));
            let start = span.start.max(span.ready);
            let times = Times { ready: span.ready, start, end: span.end.max(start) };
            match place {
                Some(place @ None) => *place = Some(times),
                _ => strays += 1,
            }
            self.trace_end = self.trace_end.max(times.end);
        }
        if strays > 0 {
            self.findings.push(format!(
                "the trace names {strays} steps or programs that the plan lacks or that ran twice in a run"
            ));
        }
        let is_complete = |run: &Run| run.times.iter().all(Option::is_some);
        for run in &mut self.runs {
            run.is_whole = !self.is_trace_of_another && is_complete(run);
        }
        let ended_early = self.runs.iter().filter(|run| !is_complete(run)).count();
        // Runs of another plan count for nothing in any case.
        if ended_early > 0 && !self.is_trace_of_another {
            let runs = if ended_early == 1 {
                "run ended early and counts"
            } else {
                "runs ended early and count"
            };
            self.findings.push(format!("{ended_early} {runs} for no time"));
        }
        bars::measured(self);
        steps::measure(self);
    }
}

fn devices(plan: &Plan) -> Vec<Device> {
    let held = ir::check::memory(plan);
    let devices = plan.machine.devices.iter().zip(held.rows());
    devices
        .map(|((_, device), held)| Device {
            name: device.name.clone(),
            is_gpu: device.kind.is_gpu(),
            is_calibrated: device.rates.source == ir::machine::RateSource::Calibrated,
            capacity_bytes: device.memory_bytes,
            weight_bytes: held.weight_bytes,
            cache_bytes: held.cache_bytes,
            buffer_bytes: held.buffer_bytes,
            fetch_bytes: held.fetch_bytes,
            scratch_bytes: held.workspace_bytes.saturating_add(held.reserved_bytes),
        })
        .collect()
}

fn candidate(plan: &Plan, candidate: &ir::forecast::Candidate) -> Candidate {
    Candidate {
        name: candidate.name.clone(),
        prefill_nanos: candidate.prefill_nanos,
        decode_nanos: candidate.decode_nanos,
        missing: candidate.missing.map(|(device, bytes)| {
            let device = plan.machine.devices.get(device);
            let device = device.map_or("a device", |device| &device.name);
            format!("{device} lacks {}", quantity::bytes(bytes))
        }),
    }
}

fn program_scene(plan: &Plan, program: &ir::plan::Program) -> Program {
    let queues: Vec<(usize, Vec<usize>)> = program
        .lanes
        .iter()
        .map(|lane| {
            let known = lane.steps.iter().map(|step| step.index());
            (0, known.filter(|&step| step < program.steps.len()).collect())
        })
        .collect();
    let is_decode = program.phase == Phase::Decode;
    // What the estimates of steps are for.
    let cached = if is_decode { plan.model.context / 2 } else { 0 };
    let forecasts = &plan.forecast.programs;
    let forecast = forecasts.iter().find(|forecast| forecast.program == program.name);
    let cached = forecast.filter(|_| is_decode).map_or(cached, |forecast| forecast.tokens);
    let mut scene = Program {
        name: program.name.clone(),
        is_decode,
        max_tokens: program.max.tokens,
        cached_tokens: cached,
        forecast: forecast.cloned(),
        measured_tokens: None,
        steps: steps::rows(plan, program, cached),
        queues,
        blocks: Vec::new(),
        groups: Vec::new(),
        edges: Vec::new(),
        predicted: Timing::default(),
        bars: Vec::new(),
        memory: Vec::new(),
        buffers: memory::lifetimes(program),
    };
    let times = schedule::times(&scene.steps, &scene.queues);
    let end = times.iter().flatten().map(|times| times.end).max().unwrap_or(0);
    scene.memory = memory::curves(&scene.buffers, &times, plan.machine.devices.len(), 0, end);
    scene.predicted = Timing::of(&scene, times, 0, end);
    blocks::fill(&mut scene, program, plan.machine.devices.len());
    scene
}
