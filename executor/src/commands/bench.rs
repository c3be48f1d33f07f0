//! `bench`: prompt and generation speed, forecast beside measured, with the habits of llama-bench:
//! tokenising and sampling stay outside, rounds that warm up come first.

use std::time::Duration;

use anyhow::{Result, ensure};
use ir::machine::RateSource;
use ir::plan::{Phase, Plan};
use serde_json::json;

use executor::calibrate::reads_now;
use executor::engine::Engine;
use executor::generation::GenerationOverrides;

use super::BenchArguments;
use super::answer::print;
use super::session::Session;

/// What is measured in each round.
struct Test {
    /// `pp512`, `tg128`, `tg128 @ d4096`.
    name: String,
    kind: &'static str,
    /// Tokens that count, over all sequences.
    tokens: usize,
    samples: Vec<f64>,
    /// The plan's prediction, where it has one.
    forecast: Option<Forecast>,
}

/// What a plan predicts.
struct Forecast {
    tokens_per_sec: f64,
    /// `pp512`: the prompt that it is of, where that is not the one that is measured.
    of: Option<String>,
}

pub(super) fn run(arguments: BenchArguments) -> Result<()> {
    ensure!(arguments.repetitions > 0, "-r 0 measures nothing");
    ensure!(arguments.sequences > 0, "--sequences 0 measures nothing");
    let records = arguments.trace.iter().chain(&arguments.perfetto);
    arguments.run.check_outputs(records, [&arguments.plan])?;
    let traced = arguments.trace.is_some() || arguments.perfetto.is_some();
    let mut session =
        Session::open(&arguments.plan, &arguments.run, &GenerationOverrides::default(), traced)?;
    let engine = &mut session.engine;
    let (asked, most) = (arguments.sequences, most_sequences(engine.plan()));
    ensure!(
        asked <= most,
        "--sequences {asked}: {} is for {most} at a time; compile it with --max-sequences {asked}",
        arguments.plan.display()
    );
    check_context(&arguments, engine.plan())?;
    let mut tests = Vec::new();
    if arguments.prompt_tokens > 0 {
        let tokens = arguments.prompt_tokens;
        let prefill = |engine: &mut Engine| engine.time_prefill(tokens);
        let forecast = forecast_prefill(engine.plan(), tokens);
        let test = Test::new(format!("pp{tokens}"), "prefill", tokens, forecast);
        // The second round captures launches of short prompts.
        tests.push(measure(engine, test, (2, arguments.repetitions), prefill)?);
    }
    if arguments.generated_tokens > 0 {
        let (tokens, sequences, depth) =
            (arguments.generated_tokens, arguments.sequences, arguments.depth);
        let decode = |engine: &mut Engine| engine.time_decode(sequences, depth, tokens);
        let mut name = format!("tg{tokens}");
        if depth > 0 {
            name += &format!(" @ d{depth}");
        }
        if sequences > 1 {
            name += &format!(" x {sequences}");
        }
        // On the way, half of what is generated is cached.
        let forecast = forecast_decode(engine.plan(), sequences, depth + tokens / 2);
        let test = Test::new(name, "decode", tokens * sequences, forecast);
        tests.push(measure(engine, test, (1, arguments.repetitions), decode)?);
    }
    ensure!(!tests.is_empty(), "-p 0 -n 0 measures nothing");
    let text = if arguments.output == "json" {
        format!("{}\n", serde_json::Value::from_iter(tests.iter().map(Test::to_json)))
    } else {
        to_markdown(&session.engine.plan().model.name, &tests)
    };
    print(&text)?;
    session.write_records(arguments.trace.as_deref(), arguments.perfetto.as_deref())?;
    let plan = session.engine.plan().clone();
    // Its memory and threads are out of the way.
    drop(session);
    if arguments.output != "json" {
        print(&memory_now(&plan)?)?;
    }
    Ok(())
}

/// How fast memory is now, where forecasts rest on how fast it was: on machines that others use too it changes.
fn memory_now(plan: &Plan) -> Result<String> {
    let mut text = String::new();
    for (id, device) in plan.machine.devices.iter() {
        let is_used = plan.weights.rows().iter().any(|weight| weight.device == id);
        if !is_used || device.rates.source != RateSource::Calibrated {
            continue;
        }
        if let Some(now) = reads_now(&plan.machine, id)? {
            let then = device.rates.read_bytes_per_sec;
            text += &format!(
                "\n{}: memory reads {:.1} GB/s now, {:.1} GB/s when it was calibrated\n",
                device.name,
                now / 1e9,
                then / 1e9
            );
        }
    }
    Ok(text)
}

/// Fails before anything is measured where a test is longer than the plan's context.
fn check_context(arguments: &BenchArguments, plan: &Plan) -> Result<()> {
    // Decoding begins behind one token at least.
    let decoded = match arguments.generated_tokens {
        0 => 0,
        tokens => tokens.saturating_add(arguments.depth.max(1)),
    };
    let needed = decoded.max(arguments.prompt_tokens);
    ensure!(
        needed <= plan.model.context as usize,
        "these tests need a context of {needed} tokens, and that of {} is {}: lower -p, -d or -n, or compile it with \
         --context {needed} if the model has as much",
        arguments.plan.display(),
        plan.model.context
    );
    Ok(())
}

fn measure(
    engine: &mut Engine,
    mut test: Test,
    (warm_ups, repetitions): (usize, usize),
    mut round: impl FnMut(&mut Engine) -> Result<Duration>,
) -> Result<Test> {
    for _ in 0..warm_ups {
        round(engine)?;
    }
    for _ in 0..repetitions {
        test.samples.push(test.tokens as f64 / round(engine)?.as_secs_f64());
    }
    Ok(test)
}

/// Predicted prompt tokens per second, with nothing cached: of the prompt, or of a full run where it takes several.
fn forecast_prefill(plan: &Plan, prompt_tokens: usize) -> Option<Forecast> {
    let index = plan.program_for(Phase::Prefill, prompt_tokens, 1, false)?;
    let most = plan.programs[index].max.tokens;
    let tokens = u32::try_from(prompt_tokens).map_or(most, |tokens| tokens.min(most));
    let nanos = plan.forecast.programs.get(index)?.nanos_of(tokens);
    (nanos > 0.0).then(|| Forecast {
        tokens_per_sec: f64::from(tokens) * 1e9 / nanos,
        of: (tokens as usize != prompt_tokens).then(|| format!("pp{tokens}")),
    })
}

/// Sequences that a plan decodes at a time.
fn most_sequences(plan: &Plan) -> usize {
    let decodes = plan.programs.iter().filter(|program| program.phase == Phase::Decode);
    decodes.map(|program| program.max_sequences as usize).max().unwrap_or(0)
}

/// Predicted generated tokens per second, over all sequences, with so many tokens cached of each.
fn forecast_decode(plan: &Plan, sequences: usize, cached: usize) -> Option<Forecast> {
    let index = plan.program_for(Phase::Decode, sequences, sequences, false)?;
    if (plan.programs[index].max_sequences as usize) < sequences {
        return None;
    }
    let cached = u32::try_from(cached).ok()?;
    let nanos = plan.forecast.programs.get(index)?.nanos_of(cached);
    let tokens_per_sec = sequences as f64 * 1e9 / nanos;
    (nanos > 0.0).then_some(Forecast { tokens_per_sec, of: None })
}

fn to_markdown(model: &str, tests: &[Test]) -> String {
    let mut text =
        String::from("| model | test | tok/s | forecast |\n| --- | --- | ---: | ---: |\n");
    for test in tests {
        let forecast = test.forecast.as_ref().map_or("–".into(), |forecast| {
            let rate = format!("{:.1}", forecast.tokens_per_sec);
            forecast.of.as_ref().map_or(rate.clone(), |of| format!("{rate} @ {of}"))
        });
        let (mean, deviation) = test.mean_and_deviation();
        text += &format!("| {model} | {} | {mean:.2} ± {deviation:.2} | {forecast} |\n", test.name);
    }
    text
}

impl Test {
    fn new(name: String, kind: &'static str, tokens: usize, forecast: Option<Forecast>) -> Self {
        Self { name, kind, tokens, samples: Vec::new(), forecast }
    }

    /// Mean and sample standard deviation of the rounds.
    fn mean_and_deviation(&self) -> (f64, f64) {
        let count = self.samples.len() as f64;
        let mean = self.samples.iter().sum::<f64>() / count;
        let squares: f64 = self.samples.iter().map(|sample| (sample - mean).powi(2)).sum();
        (mean, (squares / (count - 1.0).max(1.0)).sqrt())
    }

    fn to_json(&self) -> serde_json::Value {
        let (mean, deviation) = self.mean_and_deviation();
        json!({
            "test": self.name,
            "kind": self.kind,
            "tokens": self.tokens,
            "tokens_per_sec": mean,
            "stddev": deviation,
            "samples": self.samples,
            "forecast_tokens_per_sec": self.forecast.as_ref().map(|forecast| forecast.tokens_per_sec),
            "forecast_of": self.forecast.as_ref().and_then(|forecast| forecast.of.as_ref()),
        })
    }
}
