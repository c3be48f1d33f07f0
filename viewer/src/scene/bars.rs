//! Spans of one row of the timeline, found by time without looking at the others.

use super::{Program, Scene, Times};

/// One drawn span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bar {
    /// The run, for measured ones.
    pub run: u32,
    /// Its program.
    pub program: u32,
    /// Step of the program.
    pub step: u32,
    /// When work began.
    pub start: u64,
    /// When it ended.
    pub end: u64,
}

/// Bars in order of their starts.
#[derive(Clone, Debug, Default)]
pub struct Bars {
    rows: Vec<Bar>,
    /// The latest end among a bar and all before it: rising, so that it can be searched.
    latest_end: Vec<u64>,
}

impl Bars {
    fn new(mut rows: Vec<Bar>) -> Self {
        rows.sort_by_key(|bar| (bar.start, bar.end, bar.step));
        let mut latest = 0;
        let latest_end = rows.iter().map(|bar| {
            latest = bar.end.max(latest);
            latest
        });
        let latest_end = latest_end.collect();
        Bars { rows, latest_end }
    }

    /// All of them.
    pub fn rows(&self) -> &[Bar] {
        &self.rows
    }

    /// Number of the first bar, at or after `from`, that ends after `time`.
    pub fn first_after(&self, from: usize, time: u64) -> usize {
        let rest = self.latest_end.get(from..).unwrap_or_default();
        from + rest.partition_point(|&end| end <= time)
    }
}

/// The expected bars of a program, for each of the scene's lanes.
pub(super) fn predicted(program: &Program, number: usize, lanes: usize) -> Vec<Bars> {
    let mut rows = vec![Vec::new(); lanes];
    place(&mut rows, program, number, 0, &program.predicted.times);
    rows.into_iter().map(Bars::new).collect()
}

/// Fills the measured bars of every lane.
pub(super) fn measured(scene: &mut Scene) {
    let mut rows = vec![Vec::new(); scene.lanes.len()];
    for (number, run) in scene.runs.iter().enumerate() {
        if let Some(program) = scene.programs.get(run.program) {
            place(&mut rows, program, run.program, number, &run.times);
        }
    }
    for (lane, rows) in scene.lanes.iter_mut().zip(rows) {
        lane.measured = Bars::new(rows);
    }
}

fn place(
    rows: &mut [Vec<Bar>],
    program: &Program,
    number: usize,
    run: usize,
    times: &[Option<Times>],
) {
    for (lane, queue) in &program.queues {
        for &step in queue {
            let Some(times) = times.get(step).copied().flatten() else { continue };
            let bar = Bar {
                run: run as u32,
                program: number as u32,
                step: step as u32,
                start: times.start,
                end: times.end,
            };
            rows[*lane].push(bar);
            if let Some(lane) = program.steps[step].path_lane {
                rows[lane].push(bar);
            }
        }
    }
}
