//! What the integration tests share: machines, models and checkpoints without data made for them, and the
//! reference that defines what a graph means.

pub mod made_up;

pub mod interpreter;
pub mod machines;
pub mod toys;

use std::time::{Duration, Instant};

use ir::plan::{Phase, Plan};

/// Number of the program that decodes one sequence.
///
/// # Panics
/// When the plan has none.
pub fn first_decode(plan: &Plan) -> usize {
    let mut programs = plan.programs.iter();
    programs.position(|program| program.phase == Phase::Decode).expect("a plan decodes")
}

/// Tokens per second of prefill, and of the decode of one sequence, as they are predicted.
///
/// # Panics
/// When the plan decodes nothing.
pub fn rates(plan: &Plan) -> (f64, f64) {
    let rate = |program: usize| {
        let tokens = f64::from(plan.programs[program].max.tokens);
        tokens / (plan.forecast.programs[program].nanos as f64 / 1e9)
    };
    (rate(0), rate(first_decode(plan)))
}

/// What is minimised for latency, of a plan whose prompt takes `prefill` and whose tokens take `decode` nanoseconds.
pub fn score(prefill: u64, decode: u64) -> f64 {
    let [prompt, answer] = [prefill as f64, 128.0 * decode as f64];
    (prompt + answer).powf(2.0 / 3.0) * (prompt * answer).powf(1.0 / 6.0)
}

/// How long `work` takes when it is left alone: the shortest of ten tries, or the first that stays below `limit`. Other
/// tests run beside it.
pub fn shortest(limit: Duration, mut work: impl FnMut()) -> Duration {
    let mut shortest = Duration::MAX;
    for _ in 0..10 {
        let start = Instant::now();
        work();
        shortest = shortest.min(start.elapsed());
        if shortest < limit {
            break;
        }
    }
    shortest
}
