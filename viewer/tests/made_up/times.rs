//! When the steps of made-up plans run, as predicted and as if measured.

use ir::id::Id as _;
use ir::plan::{Plan, Program, Step};
use ir::trace::{Span, Trace, TracedRun};

/// Ready, start and end of every step when each takes `nanos`.
pub(super) fn simulate(
    program: &Program,
    mut nanos: impl FnMut(&Step) -> u64,
    from: u64,
    free: &mut [u64],
) -> Vec<(u64, u64, u64)> {
    let mut lane_of = vec![0; program.steps.len()];
    for (number, lane) in program.lanes.iter().enumerate() {
        lane.steps.iter().for_each(|step| lane_of[step.index()] = number);
    }
    // Steps are numbered in an order in which they can run.
    let mut times: Vec<(u64, u64, u64)> = Vec::with_capacity(program.steps.len());
    for (id, step) in program.steps.iter() {
        let lane = lane_of[id.index()];
        let ready = free[lane].max(from);
        let waited = step.waits.iter().map(|wait| times[wait.index()].2).max().unwrap_or(0);
        let start = ready.max(waited);
        let end = start + nanos(step);
        free[lane] = end;
        times.push((ready, start, end));
    }
    times
}

/// How a trace differs from what was predicted.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Part of the predicted time that steps take.
    pub percent: u64,
    /// Tokens of the prompt; the most where `None`.
    pub prompt: Option<u32>,
}

/// A trace of one prefill and then decodes until there are at least `spans` spans, most of them 12 % slower than
/// predicted.
pub fn trace(plan: &Plan, fingerprint: u64, spans: usize) -> Trace {
    trace_at(plan, fingerprint, spans, Pace { percent: 112, prompt: None })
}

/// The same at another pace.
pub fn trace_at(plan: &Plan, fingerprint: u64, spans: usize, pace: Pace) -> Trace {
    let mut trace = Trace { version: ir::trace::VERSION, plan: fingerprint, ..Trace::default() };
    let mut random = Random(42);
    let mut free: Vec<u64> = vec![0; plan.programs[0].lanes.len()];
    let mut start = 1_000;
    while trace.spans.len() < spans {
        let number = usize::from(!trace.runs.is_empty());
        let program = &plan.programs[number];
        free.resize(program.lanes.len(), 0);
        let most = program.max.tokens;
        let tokens = pace.prompt.filter(|_| number == 0).unwrap_or(most);
        let mut noisy = |step: &Step| {
            // Measured times scatter; one in fifty is half as long again.
            let slow = if random.below(50) == 0 { pace.percent + 38 } else { pace.percent };
            let nanos = step.estimate_nanos * (slow + random.below(16)) / 108;
            nanos * u64::from(tokens) / u64::from(most)
        };
        let times = simulate(program, &mut noisy, start, &mut free);
        let end = times.iter().map(|times| times.2).max().unwrap_or(start);
        let run = trace.runs.len() as u32;
        trace.runs.push(TracedRun {
            program: number as u32,
            tokens,
            sequences: 1,
            past: run,
            start,
            end,
        });
        for (number, lane) in program.lanes.iter().enumerate() {
            for &step in &lane.steps {
                let (ready, start, end) = times[step.index()];
                trace.spans.push(Span { run, step, lane: number as u32, ready, start, end });
            }
        }
        start = end + 5_000;
    }
    trace
}

/// Splitmix64 (Steele, Lea and Flood 2014).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}
