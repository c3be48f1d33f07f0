//! `bench`: prompt and generation speed, forecast beside measured, with the habits of llama-bench:
//! tokenising and sampling stay outside, rounds that warm up come first.

mod forecast;

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use command_line::{misuse, tell};
use ir::id::DeviceId;
use ir::machine::{Device, RateSource};
use ir::plan::{Phase, Plan, Queue};
use ir::tensor::Format;
use serde_json::{Value, json};

use executor::calibrate::reads_now;
use executor::engine::{Engine, check_cache};

use self::forecast::{forecast_decode, forecast_prefill};
use super::BenchArguments;
use super::answer::{print, with_records};
use super::session::{Opened, exit_if_interrupted, interrupt_flag};

/// What is measured in each round.
struct Test {
    /// `pp512`, `tg128`, `tg128 @ d4096`.
    name: String,
    kind: &'static str,
    sequences: usize,
    /// Tokens of each sequence that are cached before.
    depth: usize,
    /// Tokens that count, over all sequences.
    tokens: usize,
    samples: Vec<f64>,
    /// Tokens per second by the plan's prediction, where it has one.
    forecast: Option<f64>,
}

pub(super) fn run(arguments: BenchArguments) -> Result<()> {
    if arguments.prompt_tokens == 0 && arguments.generated_tokens == 0 {
        return Err(misuse("-p 0 -n 0 measures nothing"));
    }
    let records = arguments.trace.iter().chain(&arguments.perfetto);
    arguments.run.check_outputs(records, [&arguments.plan])?;
    let traced = arguments.trace.is_some() || arguments.perfetto.is_some();
    let opened = Opened::new(&arguments.plan, &arguments.run)?;
    let (asked, most) = (arguments.sequences, most_sequences(opened.plan()));
    ensure!(
        asked <= most,
        "--sequences {asked}: {} is for {most} at a time; compile it with --max-sequences {asked}",
        arguments.plan.display()
    );
    check_length(&arguments, opened.plan())?;
    let mut session = opened.load(&arguments.run, traced)?;
    // Until here an interruption ends the program at once.
    let abort = interrupt_flag()?;
    let mut tests = Vec::new();
    let measured = measure_all(&mut session.engine, &arguments, &abort, &mut tests);
    // What has run until then is recorded, whatever ended it.
    let recorded = session.write_records(arguments.trace.as_deref(), arguments.perfetto.as_deref());
    let plan = session.engine.plan().clone();
    if !arguments.run.is_as_forecast(&plan) {
        tests.iter_mut().for_each(|test| test.forecast = None);
    }
    // Its memory and threads are out of the way.
    drop(session);
    // Tests that were finished are printed, whatever ended the others.
    let printed = if tests.is_empty() {
        Ok(())
    } else {
        let is_whole = measured.is_ok() && !abort.load(Ordering::Relaxed);
        let reads = if is_whole { memory_now(&plan) } else { Vec::new() };
        print(&if arguments.output == "json" {
            format!("{}\n", to_json(&arguments, &plan, &tests, &reads))
        } else {
            to_markdown(&plan, &tests, &reads)
        })
    };
    with_records(measured.and(printed), recorded)?;
    exit_if_interrupted(&abort);
    Ok(())
}

/// Measures what is asked for until raising `abort` stops it. Tests that are finished are in `tests`, whatever ends the
/// others.
fn measure_all(
    engine: &mut Engine,
    arguments: &BenchArguments,
    abort: &AtomicBool,
    tests: &mut Vec<Test>,
) -> Result<()> {
    if arguments.prompt_tokens > 0 {
        let tokens = arguments.prompt_tokens;
        let prefill = |engine: &mut Engine| engine.time_prefill(tokens, abort);
        let forecast =
            forecast_prefill(engine.plan(), tokens, (engine.share(tokens), engine.stages()));
        let test = Test {
            name: format!("pp{tokens}"),
            kind: "prefill",
            sequences: 1,
            depth: 0,
            tokens,
            samples: Vec::new(),
            forecast,
        };
        // The second round captures launches of short prompts.
        tests.extend(measure(engine, test, (2, arguments.repetitions), prefill)?);
    }
    if arguments.generated_tokens > 0 {
        let (tokens, sequences, depth) =
            (arguments.generated_tokens, arguments.sequences, arguments.depth);
        let decode = |engine: &mut Engine| engine.time_decode(sequences, depth, tokens, abort);
        let mut name = format!("tg{tokens}");
        if depth > 0 {
            name += &format!(" @ d{depth}");
        }
        if sequences > 1 {
            name += &format!(" x {sequences}");
        }
        // On the way, half of what is generated is cached.
        let forecast = forecast_decode(engine.plan(), sequences, depth + tokens / 2);
        let test = Test {
            name,
            kind: "decode",
            sequences,
            depth,
            tokens: tokens * sequences,
            samples: Vec::new(),
            forecast,
        };
        tests.extend(measure(engine, test, (1, arguments.repetitions), decode)?);
    }
    Ok(())
}

/// How fast a device reads its memory.
struct MemoryReads<'a> {
    device: &'a str,
    now_bytes_per_sec: f64,
    calibrated_bytes_per_sec: f64,
}

/// How fast memory is now, where forecasts rest on how fast it was: on machines that others use too it changes. Where
/// that cannot be told, a warning says so: what was measured before is not worth less.
fn memory_now(plan: &Plan) -> Vec<MemoryReads<'_>> {
    let mut reads = Vec::new();
    for (id, device) in plan.machine.devices.iter() {
        let is_used = plan.weights.rows().iter().any(|weight| weight.device == id);
        if !is_used || device.rates.source != RateSource::Calibrated {
            continue;
        }
        match reads_now(&plan.machine, id) {
            Ok(Some(now_bytes_per_sec)) => reads.push(MemoryReads {
                device: &device.name,
                now_bytes_per_sec,
                calibrated_bytes_per_sec: device.rates.read_bytes_per_sec,
            }),
            Ok(None) => (),
            Err(error) => tell(format_args!(
                "warning: how fast {} reads its memory now is not known: {error:#}",
                device.name
            )),
        }
    }
    reads
}

/// The formats that a plan computes in, most bytes first: `bf12`, `q8 + bf16`.
fn formats(plan: &Plan) -> String {
    let mut bytes: BTreeMap<Format, u64> = BTreeMap::new();
    // Vectors are a small part, and in f32 or as stored.
    for weight in plan.weights.rows().iter().filter(|weight| weight.shape.len() > 1) {
        *bytes.entry(weight.format).or_default() += plan.weight_bytes(weight);
    }
    let mut formats: Vec<(Format, u64)> = bytes.into_iter().collect();
    formats.sort_by_key(|&(_, bytes)| Reverse(bytes));
    let names: Vec<String> = formats.iter().map(|(format, _)| format.to_string()).collect();
    names.join(" + ")
}

/// Names of the devices that a plan computes on.
fn devices(plan: &Plan) -> Vec<&str> {
    let computes = |&(id, _): &(DeviceId, &Device)| {
        plan.programs.iter().any(|program| program.lane(id, Queue::Compute).is_some())
    };
    let used = plan.machine.devices.iter().filter(computes);
    used.map(|(_, device)| device.name.as_str()).collect()
}

/// Names of the devices that a plan computes on and whose rates nobody measured.
fn guessed(plan: &Plan) -> Vec<&str> {
    let mut names = devices(plan);
    names.retain(|name| {
        let device = plan.machine.device(name).map(|id| &plan.machine.devices[id]);
        device.is_some_and(|device| device.rates.source == RateSource::Nominal)
    });
    names
}

/// Fails before anything is measured where a test is longer than the plan's context, or its sequences than the cache.
fn check_length(arguments: &BenchArguments, plan: &Plan) -> Result<()> {
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
    for (sequences, tokens) in [(1, arguments.prompt_tokens), (arguments.sequences, decoded)] {
        check_cache(&plan.model, sequences, tokens)
            .with_context(|| format!("a test holds {sequences} x {tokens} tokens at once"))?;
    }
    Ok(())
}

/// Measures one test; `None` where it was stopped.
fn measure(
    engine: &mut Engine,
    mut test: Test,
    (warm_ups, repetitions): (usize, usize),
    mut round: impl FnMut(&mut Engine) -> Result<Option<Duration>>,
) -> Result<Option<Test>> {
    for _ in 0..warm_ups {
        if round(engine)?.is_none() {
            return Ok(None);
        }
    }
    for _ in 0..repetitions {
        let Some(time) = round(engine)? else { return Ok(None) };
        test.samples.push(test.tokens as f64 / time.as_secs_f64());
    }
    Ok(Some(test))
}

/// Sequences that a plan decodes at a time.
fn most_sequences(plan: &Plan) -> usize {
    let decodes = plan.programs.iter().filter(|program| program.phase == Phase::Decode);
    decodes.map(|program| program.max_sequences as usize).max().unwrap_or(0)
}

fn to_markdown(plan: &Plan, tests: &[Test], reads: &[MemoryReads<'_>]) -> String {
    let (model, formats, devices) = (&plan.model.name, formats(plan), devices(plan).join("+"));
    let mut text = String::from(
        "| model | format | devices | test | tok/s | forecast |\n| --- | --- | --- | --- | ---: | ---: |\n",
    );
    for test in tests {
        let forecast = test.forecast.map_or("–".into(), |rate| format!("{rate:.1}"));
        let (mean, deviation) = test.mean_and_deviation();
        text += &format!(
            "| {model} | {formats} | {devices} | {} | {mean:.2} ± {deviation:.2} | {forecast} |\n",
            test.name
        );
    }
    let guessed = guessed(plan);
    if !guessed.is_empty() && tests.iter().any(|test| test.forecast.is_some()) {
        text += &format!(
            "\nrates of {} are nominal, so forecasts are guesses: `hybrid-exec calibrate` measures them\n",
            guessed.join(", ")
        );
    }
    for MemoryReads { device, now_bytes_per_sec: now, calibrated_bytes_per_sec: then } in reads {
        text += &format!(
            "\n{device}: memory reads {:.1} GB/s now, {:.1} GB/s when it was calibrated\n",
            now / 1e9,
            then / 1e9
        );
    }
    text
}

/// A list of the tests as llama-bench has it: each says all that tells it from others.
fn to_json(
    arguments: &BenchArguments,
    plan: &Plan,
    tests: &[Test],
    reads: &[MemoryReads<'_>],
) -> Value {
    let memory = reads.iter().map(|reads| {
        json!({
            "device": reads.device,
            "now_bytes_per_sec": reads.now_bytes_per_sec,
            "calibrated_bytes_per_sec": reads.calibrated_bytes_per_sec,
        })
    });
    let memory: Value = memory.collect();
    let tests = tests.iter().map(|test| {
        let (mean, deviation) = test.mean_and_deviation();
        json!({
            "model": plan.model.name,
            "plan": arguments.plan,
            "format": formats(plan),
            "devices": devices(plan),
            "memory": memory,
            "test": test.name,
            "kind": test.kind,
            "sequences": test.sequences,
            "depth": test.depth,
            "tokens": test.tokens,
            "tokens_per_sec": mean,
            "stddev": deviation,
            "samples": test.samples,
            "forecast_tokens_per_sec": test.forecast,
            "forecast_is_guess": test.forecast.is_some() && !guessed(plan).is_empty(),
        })
    });
    tests.collect()
}

impl Test {
    /// Mean and sample standard deviation of the rounds.
    fn mean_and_deviation(&self) -> (f64, f64) {
        let count = self.samples.len() as f64;
        let mean = self.samples.iter().sum::<f64>() / count;
        let squares: f64 = self.samples.iter().map(|sample| (sample - mean).powi(2)).sum();
        (mean, (squares / (count - 1.0).max(1.0)).sqrt())
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Cli, Command};
    use super::*;
    use ::tests::machines::{linked, numa};
    use ::tests::toys::Toy;
    use clap::Parser as _;

    /// A plan of a toy for one device and so many sequences.
    pub(super) fn plan_on(device: Device, max_sequences: u32) -> Plan {
        let machine = linked(vec![device]);
        let options = compiler::Options { max_sequences, ..compiler::Options::default() };
        let model = Toy::llama().model().unwrap();
        compiler::compile(&model, &machine, &options, &mut |_, _| ()).unwrap()
    }

    fn plan() -> Plan {
        plan_on(numa(0, 1 << 30), 1)
    }

    #[test]
    fn forecasts_by_rates_that_nobody_measured_are_marked() {
        let mut plan = plan();
        let tests = [Test {
            name: "pp8".to_owned(),
            kind: "prefill",
            sequences: 1,
            depth: 0,
            tokens: 8,
            samples: vec![1.0],
            forecast: Some(1.0),
        }];
        let mut is_marked = |source| {
            plan.machine.devices.rows_mut()[0].rates.source = source;
            let line = "\nrates of numa0 are nominal, so forecasts are guesses: ";
            to_markdown(&plan, &tests, &[]).contains(line)
        };
        assert!(is_marked(RateSource::Nominal));
        assert!(!is_marked(RateSource::Calibrated));
    }

    #[test]
    fn what_the_cache_does_not_hold_is_refused_before_it_is_loaded() {
        let mut plan = plan();
        plan.model.context = 64;
        (plan.model.block_tokens, plan.model.blocks) = (16, 5);
        let refusal = |options: &str| {
            let words = ["hybrid-exec", "bench", "plan.ron"].into_iter().chain(options.split(' '));
            let Some(Command::Bench(arguments)) = Cli::try_parse_from(words).unwrap().command
            else {
                panic!("{options} are options of another command")
            };
            check_length(&arguments, &plan).err().map(|error| format!("{error:#}"))
        };
        assert_eq!(refusal("-p 64 -n 16 -d 16 --sequences 2"), None);
        let full = refusal("-p 64 -n 16 -d 16 --sequences 3").unwrap();
        assert!(full.starts_with("a test holds 3 x 32 tokens at once: the cache is"), "{full}");
        // Decoding begins behind one token.
        assert_eq!(refusal("-p 0 -n 15 --sequences 5"), None);
        assert!(refusal("-p 0 -n 16 --sequences 5").is_some());
        assert!(refusal("-p 65 -n 0").unwrap().contains("a context of 65 tokens"));
    }
}
