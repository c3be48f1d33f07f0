//! What a set of times means: the critical path, why lanes stood still, and who the time went to.

use super::{Kind, Program};
use crate::quantity;

/// When one step ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Times {
    /// When its lane came to it.
    pub ready: u64,
    /// When work began.
    pub start: u64,
    /// When it ended.
    pub end: u64,
}

/// One run of a program, expected or measured.
#[derive(Clone, Debug, Default)]
pub struct Timing {
    /// For each step; `None` where it did not run.
    pub times: Vec<Option<Times>>,
    /// When the run began.
    pub start: u64,
    /// When it ended; not before its last step.
    pub end: u64,
    /// Steps that the end depends on without slack, in order.
    pub critical: Vec<usize>,
    /// Whether a step is on that path.
    pub is_critical: Vec<bool>,
    /// Times in which a queue of the program stood still, in order of queues, then time.
    pub idle: Vec<Idle>,
    /// Time each queue of the program computed.
    pub busy: Vec<u64>,
    /// Time each queue of the program moved bytes, or was in a collective with others.
    pub moving: Vec<u64>,
}

/// A time in which a queue stood still.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Idle {
    /// Index into the program's queues.
    pub queue: usize,
    /// From.
    pub start: u64,
    /// To.
    pub end: u64,
    /// Why.
    pub cause: IdleCause,
}

/// Why a queue stood still. The step is the one it waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdleCause {
    /// Bytes were on their way.
    Transfer(usize),
    /// Other members of a collective were late, or it was under way.
    Collective(usize),
    /// Another queue was still computing.
    Dependency(usize),
    /// There was nothing to do, or the queue was between two steps.
    NoWork,
}

impl Timing {
    /// Works out a run from the times of its steps.
    pub(super) fn of(program: &Program, times: Vec<Option<Times>>, start: u64, end: u64) -> Timing {
        let last = times.iter().flatten().map(|times| times.end).max();
        let end = last.map_or(end, |last| last.max(end));
        let critical = critical(program, &times);
        let mut is_critical = vec![false; times.len()];
        critical.iter().for_each(|&step| is_critical[step] = true);
        let worked = |is_move: bool| {
            let sum = |(_, queue): &(usize, Vec<usize>)| {
                let steps = queue.iter().copied();
                let steps = steps.filter(|&step| program.steps[step].kind.is_move() == is_move);
                let nanos = |times: Times| times.end.saturating_sub(times.start);
                steps.filter_map(|step| times[step].map(nanos)).fold(0, u64::saturating_add)
            };
            program.queues.iter().map(sum).collect::<Vec<u64>>()
        };
        let (busy, moving) = (worked(false), worked(true));
        let idle = idle(program, &times, start, end);
        Timing { times, start, end, critical, is_critical, idle, busy, moving }
    }

    /// `busy 93 %, moving 6.9 %`: what of the run a queue computed and moved. Collectives are no work, as in
    /// `all_shares`: a queue is in one while it waits for others.
    pub fn work_text(&self, queue: usize) -> String {
        let nanos = |of: &[u64]| of.get(queue).copied().unwrap_or(0);
        let share = |nanos: u64| quantity::share(nanos as f64 / self.nanos().max(1) as f64);
        match (nanos(&self.busy), nanos(&self.moving)) {
            (busy, 0) => format!("busy {}", share(busy)),
            // A queue of copies has nothing else to do.
            (0, moving) => format!("moving {}", share(moving)),
            (busy, moving) => format!("busy {}, moving {}", share(busy), share(moving)),
        }
    }

    /// From the start of the run to its end.
    pub fn nanos(&self) -> u64 {
        self.end.saturating_sub(self.start)
    }

    /// Time of each device on the critical path, and of movement on it as the last entry.
    pub fn critical_shares(&self, program: &Program, devices: usize) -> Vec<u64> {
        self.shares(program, devices, self.critical.iter().copied())
    }

    /// The same for all steps.
    pub fn all_shares(&self, program: &Program, devices: usize) -> Vec<u64> {
        self.shares(program, devices, 0..self.times.len())
    }

    fn shares(
        &self,
        program: &Program,
        devices: usize,
        steps: impl Iterator<Item = usize>,
    ) -> Vec<u64> {
        let mut shares = vec![0_u64; devices + 1];
        for step in steps {
            let (Some(times), Some(row)) = (self.times[step], program.steps.get(step)) else {
                continue;
            };
            let place = if row.kind.is_move() { devices } else { row.device.min(devices) };
            shares[place] = shares[place].saturating_add(times.end.saturating_sub(times.start));
        }
        shares
    }
}

/// Backwards from the step that ends last, always to what it started after.
fn critical(program: &Program, times: &[Option<Times>]) -> Vec<usize> {
    let mut before: Vec<Option<usize>> = vec![None; times.len()];
    for (_, queue) in &program.queues {
        for pair in queue.windows(2) {
            before[pair[1]] = Some(pair[0]);
        }
    }
    let end = |step: usize| times[step].map(|times| times.end);
    let mut path = Vec::new();
    let mut seen = vec![false; times.len()];
    let mut at =
        (0..times.len()).filter(|&step| times[step].is_some()).max_by_key(|&step| end(step));
    while let Some(step) = at.filter(|&step| !seen[step]) {
        seen[step] = true;
        path.push(step);
        let earlier = program.steps[step].waits.iter().copied().chain(before[step]);
        at = earlier.filter(|&step| times[step].is_some()).max_by_key(|&step| end(step));
    }
    path.reverse();
    path
}

fn idle(program: &Program, times: &[Option<Times>], start: u64, end: u64) -> Vec<Idle> {
    let mut idle = Vec::new();
    for (number, (_, queue)) in program.queues.iter().enumerate() {
        let mut push = |start: u64, end: u64, cause| {
            if start < end {
                idle.push(Idle { queue: number, start, end, cause });
            }
        };
        let mut free = start;
        for &step in queue {
            let Some(at) = times[step] else { continue };
            let ready = at.ready.clamp(free, at.start.max(free));
            push(free, ready, IdleCause::NoWork);
            push(ready, at.start, cause(program, times, step));
            free = free.max(at.end);
        }
        push(free, end, IdleCause::NoWork);
    }
    idle
}

/// What a step that was not ready to start waited for.
fn cause(program: &Program, times: &[Option<Times>], step: usize) -> IdleCause {
    let waits = program.steps[step].waits.iter().copied();
    let Some(last) = waits.max_by_key(|&wait| times[wait].map(|times| times.end)) else {
        return IdleCause::NoWork;
    };
    if program.steps[step].kind == Kind::Collective {
        return IdleCause::Collective(last);
    }
    match program.steps[last].kind {
        Kind::Transfer => IdleCause::Transfer(last),
        Kind::Collective => IdleCause::Collective(last),
        Kind::Embed
        | Kind::Norm
        | Kind::Linear
        | Kind::Attention
        | Kind::Experts
        | Kind::Elementwise => IdleCause::Dependency(last),
    }
}
