//! A prompt counts beside an answer that takes many times as long: it does not wait for weights to come one by one
//! where little less memory for others would do.

use compiler::Options;
use ir::plan::{Phase, Plan};
use tests::machines::{h200, slow_down};
use tests::made_up::{LlamaShape, MadeUp};

const GIB: u64 = 1 << 30;

/// The prefill of a plan: its tokens, and nanoseconds of all and of the busiest lane alone.
fn prefill(plan: &Plan) -> (u32, f64, f64) {
    let mut programs = plan.programs.iter().zip(&plan.forecast.programs);
    let (program, forecast) =
        programs.find(|(program, _)| program.phase == Phase::Prefill).expect("a prefill");
    (program.max.tokens, forecast.nanos as f64, forecast.busiest_lane_nanos as f64)
}

#[test]
fn what_a_prompt_fetches_comes_while_it_computes() {
    let model = MadeUp::llama(LlamaShape::LLAMA_8B).model();
    // What the host's memory is slower by than where the rates were measured.
    for (gib, factor) in [(5, 1.0), (6, 0.7), (7, 0.7), (7, 0.5), (8, 1.0), (10, 1.0)] {
        let mut machine = h200(gib * GIB);
        slow_down(&mut machine, 1.0, factor);
        let options = Options { context: Some(4096), ..Options::default() };
        let plan = compiler::compile(&model, &machine, &options, &mut |_, _| ()).expect("a plan");
        let (tokens, nanos, busiest) = prefill(&plan);
        let case = format!("{gib} GiB, host at {factor}: runs of {tokens} take {nanos:.0} ns");
        assert_eq!(tokens, 2048, "{case}");
        assert!(nanos < 1.25 * busiest, "{case}, their busiest lane {busiest:.0}");
    }
}
