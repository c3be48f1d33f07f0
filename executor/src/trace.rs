//! Recording what happened when: spans of steps, for `trace.ron` and for ui.perfetto.dev.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use anyhow::Result;
use ir::id::Id as _;
use ir::plan::{Plan, Queue};
use ir::trace::{Span, Trace, TracedRun, VERSION};
use serde_json::{Value, json};

use crate::batch::Batch;
use crate::locked;

/// Collects spans while an executor runs.
pub(crate) struct Recorder {
    start: Instant,
    recorded: Mutex<Recorded>,
}

struct Recorded {
    trace: Trace,
    /// Runs that wait for those before them, as far as is known: none of their steps has been added.
    waiting: BTreeSet<u32>,
}

impl Recorder {
    /// A recorder for the plan whose file has this fingerprint.
    pub(crate) fn new(plan: u64) -> Self {
        let trace = Trace { version: VERSION, plan, ..Trace::default() };
        let recorded = Recorded { trace, waiting: BTreeSet::new() };
        Self { start: Instant::now(), recorded: Mutex::new(recorded) }
    }

    /// Nanoseconds since the trace began.
    pub(crate) fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Notes a run; runs are numbered in the order of these calls.
    pub(crate) fn start_run(&self, program: usize, batch: &Batch) {
        let start = self.now();
        let mut recorded = self.recorded();
        let number = recorded.trace.runs.len() as u32;
        recorded.waiting.insert(number);
        recorded.trace.runs.push(TracedRun {
            program: program as u32,
            tokens: batch.fed() as u32,
            sequences: batch.parts().len() as u32,
            past: batch.parts().iter().map(|part| part.past as u32).sum(),
            start,
            end: start,
        });
    }

    /// Notes that a run's logits are there.
    pub(crate) fn end_run(&self, number: u32) {
        let end = self.now();
        if let Some(run) = self.recorded().trace.runs.get_mut(number as usize) {
            run.end = end;
        }
    }

    /// Adds what one lane did in one run, and empties it.
    pub(crate) fn add(&self, spans: &mut Vec<Span>) {
        let mut recorded = self.recorded();
        let Recorded { trace, waiting } = &mut *recorded;
        for span in &*spans {
            let Some(run) = trace.runs.get_mut(span.run as usize) else { continue };
            let is_first = waiting.remove(&span.run);
            run.start = if is_first { span.start } else { run.start.min(span.start) };
        }
        trace.spans.append(spans);
    }

    /// What was recorded until now.
    pub(crate) fn trace(&self) -> Trace {
        self.recorded().trace.clone()
    }

    fn recorded(&self) -> MutexGuard<'_, Recorded> {
        locked(&self.recorded)
    }
}

/// The trace as Chrome's trace events: one track for each lane, one for the runs.
pub fn perfetto(plan: &Plan, trace: &Trace) -> Result<String> {
    let micros = |nanos: u64| nanos as f64 / 1000.0;
    let mut tracks: BTreeMap<(u32, Queue), usize> = BTreeMap::new();
    for program in &plan.programs {
        for lane in &program.lanes {
            tracks.entry((lane.device.index() as u32, lane.queue)).or_default();
        }
    }
    let mut events: Vec<Value> = vec![name_event(0, "runs")];
    for (track, ((device, queue), number)) in tracks.iter_mut().enumerate() {
        *number = track + 1;
        let device = &plan.machine.devices.rows()[*device as usize].name;
        events.push(name_event(*number, &format!("{device} {queue}")));
    }
    for run in &trace.runs {
        let program = plan.programs.get(run.program as usize);
        events.push(json!({
            "ph": "X", "pid": 0, "tid": 0,
            "name": program.map_or("unknown program", |program| &program.name),
            "ts": micros(run.start), "dur": micros(run.end.saturating_sub(run.start)),
            "args": {"tokens": run.tokens, "sequences": run.sequences, "past": run.past},
        }));
    }
    for span in &trace.spans {
        let Some(run) = trace.runs.get(span.run as usize) else { continue };
        let Some(program) = plan.programs.get(run.program as usize) else { continue };
        let Some(lane) = program.lanes.get(span.lane as usize) else { continue };
        let Some(step) = program.steps.get(span.step) else { continue };
        events.push(json!({
            "ph": "X", "pid": 0, "tid": tracks[&(lane.device.index() as u32, lane.queue)],
            "name": step.name,
            "ts": micros(span.start), "dur": micros(span.end.saturating_sub(span.start)),
            "args": {
                "step": span.step.to_string(), "run": span.run,
                "waited_micros": micros(span.start.saturating_sub(span.ready)),
                "predicted_micros": micros(step.estimate_nanos),
            },
        }));
    }
    Ok(serde_json::to_string(&json!({"traceEvents": events, "displayTimeUnit": "ns"}))?)
}

fn name_event(track: usize, name: &str) -> Value {
    json!({"ph": "M", "pid": 0, "tid": track, "name": "thread_name", "args": {"name": name}})
}

#[cfg(test)]
mod tests {
    use ir::id::StepId;

    use super::*;

    #[test]
    fn a_run_starts_with_its_first_step() {
        let recorder = Recorder::new(7);
        for _ in 0..3 {
            recorder.start_run(0, &Batch::default());
        }
        let span = |run, start| Span {
            run,
            step: StepId::from_index(0),
            lane: 0,
            ready: start,
            start,
            end: start + 1,
        };
        let far = recorder.now() + (1 << 40);
        recorder.add(&mut vec![span(1, far + 9), span(1, far + 12)]);
        recorder.add(&mut vec![span(1, far + 5), span(0, far)]);
        let starts = recorder.trace().runs.iter().map(|run| run.start).collect::<Vec<_>>();
        assert_eq!(starts[..2], [far, far + 5]);
        // Of the last nothing is known but when it was asked for.
        assert!(starts[2] < far);
    }
}
