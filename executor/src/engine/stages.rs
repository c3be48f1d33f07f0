//! How stages share a prompt: it is cut into runs, and each stage works on another.

use ir::forecast::ProgramForecast;
use ir::plan::{Phase, Plan, Program};

/// The fewest tokens of the runs that a prompt is cut into for stages to work side by side. Fewer wait for their
/// weights: in bf16 two Zen 5 cores take 8 rows in the time of one and 16 in 1.3 of it, and only from 64 on in
/// proportion.
const LEAST_SHARE: usize = 64;

/// The most tokens of one run of a prompt for some stages.
pub(super) fn most_tokens_of_a_run(plan: &Plan, stages: usize, tokens: usize) -> u32 {
    /// With n times as many runs as stages, s of them idle for (s − 1) of ((n + 1) s − 1) turns.
    const RUNS_OF_A_STAGE: [usize; 3] = [1, 2, 4];
    /// More runs than needed have to be sooner by this factor: each takes launches that its forecast may lack.
    const GAIN: f64 = 1.1;
    if stages < 2 {
        return u32::MAX;
    }
    let Some((_, forecast)) = first_prefill(plan) else { return u32::MAX };
    let nanos = |share: u32| nanos_in_stages(forecast, tokens, share.min(forecast.tokens).max(1));
    let (mut best, mut least) = (u32::MAX, nanos(u32::try_from(tokens).unwrap_or(u32::MAX)));
    for runs in RUNS_OF_A_STAGE.map(|runs| runs * stages) {
        let even = tokens.div_ceil(runs).next_multiple_of(16).max(LEAST_SHARE);
        let share = u32::try_from(even).unwrap_or(u32::MAX);
        let nanos = nanos(share);
        if even < tokens && nanos * GAIN < least {
            (best, least) = (share, nanos);
        }
    }
    best
}

/// Nanoseconds of a prompt in runs of `run_tokens` tokens, by the forecast of its program: the first passes all stages,
/// and each other ends as much later as the busiest of them works on it, and looks back on those before.
pub fn nanos_in_stages(forecast: &ProgramForecast, prompt_tokens: usize, run_tokens: u32) -> f64 {
    let first = forecast.nanos_of(run_tokens);
    let part_of_busiest = forecast.busiest_lane_nanos as f64 / forecast.nanos.max(1) as f64;
    let (prompt, run) = (prompt_tokens as f64, f64::from(run_tokens));
    let others = (prompt / run - 1.0).max(0.0);
    // Behind one run, behind two, and so on.
    let runs_behind = others * (others + 1.0) / 2.0;
    first + part_of_busiest * (others * first + forecast.look_back_nanos(run, runs_behind * run))
}

/// The same of a prompt whose runs work one after another.
pub fn nanos_in_turn(forecast: &ProgramForecast, prompt_tokens: usize, run_tokens: u32) -> f64 {
    let step = run_tokens.max(1) as usize;
    let run = |past: usize| {
        let tokens = step.min(prompt_tokens - past);
        let fed = u32::try_from(tokens).unwrap_or(run_tokens);
        forecast.nanos_of(fed) + forecast.look_back_nanos(tokens as f64, past as f64)
    };
    (0..prompt_tokens).step_by(step).map(run).sum()
}

/// Stages that can work on different runs of a prompt at a time: a run takes this many times as long alone as the
/// busiest lane works on it, whatever is forecast no more than there are lanes. 1 where runs work one after another.
pub(super) fn stages(plan: &Plan) -> usize {
    let prefill = first_prefill(plan).filter(|(program, _)| !plan.runs_one_by_one(program));
    prefill.map_or(1, |(program, forecast)| {
        let stages = forecast.nanos as f64 / forecast.busiest_lane_nanos.max(1) as f64;
        (stages.round() as usize).clamp(1, program.lanes.len().max(1))
    })
}

/// The program for prompts and its forecast: others are for short prompts, which are one run.
fn first_prefill(plan: &Plan) -> Option<(&Program, &ProgramForecast)> {
    let mut programs = plan.programs.iter().zip(&plan.forecast.programs);
    programs.find(|(program, _)| program.phase == Phase::Prefill)
}

#[cfg(test)]
mod tests {
    use ir::forecast::RunForecast;

    use super::*;

    /// Two stages, each half of a run, which takes as long as given for 128, 256, 512 and 2048 tokens.
    fn forecast(nanos: [u64; 4]) -> ProgramForecast {
        let [a, b, c, all] = nanos;
        let others = [(128, a), (256, b), (512, c)];
        ProgramForecast {
            program: "prefill".into(),
            tokens: 2048,
            nanos: all,
            busiest_lane_nanos: all / 2,
            others: others.map(|(tokens, nanos)| RunForecast { tokens, nanos }).to_vec(),
            behind: None,
        }
    }

    #[test]
    fn parts_of_a_prompt_pass_stages_one_behind_the_other() {
        let forecast = forecast([20, 36, 70, 280]);
        assert!((nanos_in_stages(&forecast, 512, 128) - (20.0 + 3.0 * 10.0)).abs() < 1e-9);
        assert!((nanos_in_stages(&forecast, 2048, 2048) - 280.0).abs() < 1e-9);
        // A run that is longer than the prompt is all of it.
        assert!((nanos_in_stages(&forecast, 100, 256) - 36.0).abs() < 1e-9);
    }

    #[test]
    fn runs_look_back_on_those_before() {
        let mut forecast = forecast([20, 36, 70, 280]);
        assert!((nanos_in_turn(&forecast, 4096 + 128, 2048) - (2.0 * 280.0 + 20.0)).abs() < 1e-9);
        // 20 behind 2048 tokens, so 1.25 of 512 behind 512.
        forecast.behind = Some(RunForecast { tokens: 4096, nanos: 280 + 40 });
        let expected = 70.0 + 35.0 * 3.0 + (1.25 + 2.5 + 3.75) / 2.0;
        assert!((nanos_in_stages(&forecast, 2048, 512) - expected).abs() < 1e-9);
        let expected = 2.0 * 280.0 + 20.0 + 20.0 + 2.5;
        assert!((nanos_in_turn(&forecast, 4096 + 128, 2048) - expected).abs() < 1e-9);
    }

    #[test]
    fn prompts_are_cut_where_that_is_sooner() {
        let machine = ::tests::machines::linked(vec![::tests::machines::numa(0, 1 << 30)]);
        let model = ::tests::toys::Toy::llama().model().unwrap();
        let options = compiler::Options::default();
        let mut plan = compiler::compile(&model, &machine, &options, &mut |_, _| ()).unwrap();
        let mut cut = |nanos: [u64; 4], stages: usize, tokens: usize| {
            plan.forecast.programs[0] = forecast(nanos);
            most_tokens_of_a_run(&plan, stages, tokens)
        };
        // In proportion to tokens, as processors take: the more runs, the less a stage idles.
        assert_eq!(cut([128, 256, 512, 2048], 2, 2048), 256);
        assert_eq!(cut([128, 256, 512, 2048], 2, 512), 128);
        // A few tokens take as long as many, as on GPUs.
        assert_eq!(cut([60, 85, 139, 560], 2, 2048), 512);
        assert_eq!(cut([60, 85, 139, 560], 2, 512), u32::MAX);
        assert_eq!(cut([128, 256, 512, 2048], 1, 2048), u32::MAX);
        assert_eq!(cut([128, 256, 512, 2048], 2, 64), u32::MAX);
    }
}
