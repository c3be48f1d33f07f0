//! What plans predict of prompts and decodes of any size, from what they say of some.

use executor::engine::{nanos_in_stages, nanos_in_turn};
use ir::forecast::on_line;
use ir::plan::{Phase, Plan};

/// Predicted prompt tokens per second, with nothing cached, of a prompt in runs of at most `share` tokens, on which
/// `stages` work side by side.
pub(super) fn forecast_prefill(
    plan: &Plan,
    prompt_tokens: usize,
    (share, stages): (u32, usize),
) -> Option<f64> {
    let run_tokens = prompt_tokens.min(share as usize);
    let index = plan.program_for(Phase::Prefill, run_tokens, 1, false)?;
    let most = plan.programs[index].max.tokens;
    let run_tokens = u32::try_from(run_tokens).map_or(most, |tokens| tokens.min(most));
    let forecast = plan.forecast.programs.get(index)?;
    let nanos = if stages > 1 { nanos_in_stages } else { nanos_in_turn };
    let nanos = nanos(forecast, prompt_tokens, run_tokens);
    (nanos > 0.0).then(|| prompt_tokens as f64 * 1e9 / nanos)
}

/// Predicted generated tokens per second, over all sequences, with so many tokens cached of each. Programs are priced
/// full; of fewer sequences a run takes what lies on the line to the next smaller program.
pub(super) fn forecast_decode(plan: &Plan, sequences: usize, cached: usize) -> Option<f64> {
    let cached = u32::try_from(cached).ok()?;
    let index = plan.program_for(Phase::Decode, sequences, sequences, false)?;
    let most = |index: usize| plan.programs[index].max_sequences as usize;
    if most(index) < sequences {
        return None;
    }
    let smaller = (0..plan.programs.len())
        .filter(|&other| plan.programs[other].phase == Phase::Decode && most(other) < sequences)
        .max_by_key(|&other| most(other));
    let nanos_of = |index: usize| Some(plan.forecast.programs.get(index)?.nanos_of(cached));
    let point = |index: usize| Some((most(index) as f64, nanos_of(index)?));
    let nanos = match smaller {
        Some(smaller) => on_line(sequences as f64, [point(smaller)?, point(index)?]),
        None => nanos_of(index)?,
    };
    (nanos > 0.0).then(|| sequences as f64 * 1e9 / nanos)
}

#[cfg(test)]
mod tests {
    use ::tests::machines::numa;
    use ir::forecast::{ProgramForecast, RunForecast};

    use super::super::tests::plan_on;
    use super::*;

    /// Prefill of so many tokens in 1200 ns, of which the busiest lane works 400, and of others in as many as are given.
    fn prefill<const OTHERS: usize>(tokens: u32, others: [(u32, u64); OTHERS]) -> ProgramForecast {
        ProgramForecast {
            program: "prefill".into(),
            tokens,
            nanos: 1200,
            busiest_lane_nanos: 400,
            others: others.map(|(tokens, nanos)| RunForecast { tokens, nanos }).into(),
            behind: None,
        }
    }

    #[test]
    fn a_prompt_that_passes_stages_in_parts_is_forecast_so() {
        let mut plan = plan_on(numa(0, 1 << 30), 1);
        let tokens = plan.programs[0].max.tokens;
        plan.forecast.programs[0] = prefill(tokens, [(tokens / 4, 300)]);
        let nanos = |prompt_tokens: u32, share, stages| {
            let forecast = forecast_prefill(&plan, prompt_tokens as usize, (share, stages));
            f64::from(prompt_tokens) * 1e9 / forecast.unwrap()
        };
        let is = |nanos: f64, expected: f64| (nanos - expected).abs() < 1e-6;
        assert!(is(nanos(tokens, u32::MAX, 3), 1200.0));
        assert!(is(nanos(tokens, tokens / 4, 3), 300.0 + 3.0 * 100.0));
        // What no run takes as a whole passes in full runs, without stages one after another.
        assert!(is(nanos(3 * tokens, u32::MAX, 3), 1200.0 + 2.0 * 400.0));
        assert!(is(nanos(3 * tokens + tokens / 4, u32::MAX, 1), 3.0 * 1200.0 + 300.0));
    }

    #[test]
    fn as_many_sequences_as_no_program_is_for_are_forecast_between_two() {
        let mut plan = plan_on(numa(0, 1 << 30), 16);
        for (program, forecast) in plan.programs.iter().zip(&mut plan.forecast.programs) {
            forecast.others.clear();
            forecast.nanos = match (program.phase, program.max_sequences) {
                (Phase::Decode, 1) => 100,
                (Phase::Decode, 4) => 160,
                (Phase::Decode, 16) => 400,
                (Phase::Prefill, _) => 7,
                (phase, sequences) => panic!("{phase:?} of {sequences} sequences"),
            };
        }
        let nanos = |sequences: usize| {
            forecast_decode(&plan, sequences, 0).map(|rate| sequences as f64 * 1e9 / rate)
        };
        for (sequences, expected) in [(1, 100.0), (2, 120.0), (4, 160.0), (7, 220.0), (16, 400.0)] {
            let nanos = nanos(sequences).unwrap();
            assert!((nanos - expected).abs() < 1e-6, "{sequences}: {nanos}");
        }
        assert_eq!(nanos(17), None);
    }
}
