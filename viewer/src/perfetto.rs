//! A scene's spans in the trace event format that ui.perfetto.dev opens.

use serde_json::{Value, json};

use crate::scene::{Bar, Scene};

/// Measured spans as one process and, beside it, what was predicted for each run as another.
pub fn trace_events(scene: &Scene) -> Value {
    let mut events = Vec::new();
    for (process, name) in [(1, "measured"), (2, "predicted")] {
        events.push(
            json!({"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}),
        );
        for (number, lane) in scene.lanes.iter().enumerate() {
            let name = json!({"name": lane.name});
            events.push(json!({"ph": "M", "pid": process, "tid": number, "name": "thread_name", "args": name}));
        }
    }
    for (number, lane) in scene.lanes.iter().enumerate() {
        events
            .extend(lane.measured.rows().iter().filter_map(|bar| event(scene, 1, number, bar, 0)));
    }
    // A prediction ends where the next run begins: it may be of more tokens than were run.
    let nexts = scene.runs.iter().skip(1).map(|run| run.start).chain([u64::MAX]);
    let predicted: Vec<(usize, u64, u64, Option<usize>)> = if scene.runs.is_empty() {
        vec![(scene.main_program(), 0, u64::MAX, None)]
    } else {
        let runs = scene.runs.iter().zip(nexts).enumerate();
        runs.map(|(number, (run, next))| (run.program, run.start, next, Some(number))).collect()
    };
    for (program, start, next, run) in predicted {
        let Some(program) = scene.programs.get(program) else { continue };
        let most = next.saturating_sub(start);
        for (number, bars) in program.bars.iter().enumerate() {
            for bar in bars.rows().iter().filter(|bar| bar.start < most) {
                let bar = Bar { run: run.unwrap_or(0) as u32, end: bar.end.min(most), ..*bar };
                events.extend(event(scene, 2, number, &bar, start));
            }
        }
    }
    json!({"displayTimeUnit": "ns", "traceEvents": events})
}

fn event(scene: &Scene, process: u32, lane: usize, bar: &Bar, start: u64) -> Option<Value> {
    let step = scene.programs.get(bar.program as usize)?.steps.get(bar.step as usize)?;
    let micros = |nanos: u64| nanos as f64 / 1000.0;
    Some(json!({
        "ph": "X",
        "pid": process,
        "tid": lane,
        "ts": micros(bar.start.saturating_add(start)),
        "dur": micros(bar.end - bar.start),
        "name": step.name,
        "cat": step.kind.name(),
        "args": {
            "run": bar.run,
            "step": format!("s{}", step.number),
            "action": step.action,
            "predicted_micros": micros(step.predicted_nanos),
        },
    }))
}
