//! How plans are run: batches, runs in flight, and what is refused.

#[expect(dead_code, reason = "each test file uses a part")]
mod common;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::AtomicBool;

use common::{
    Shape, compile, compile_model, distance, engine, fetches, golden, gpu_options, has_cuda,
    is_same, logits, prompt, written,
};
use compiler::options::FormatRule;
use executor::batch::Batch;
use executor::load::{self, Options, PlanFile};
use ir::machine::DeviceKind;
use ir::plan::Plan;
use ir::trace::Trace;

const MODEL: &str = "llama3";

#[test]
fn runs_of_one_plan_are_the_same_bit_for_bit() {
    for shape in Shape::CPU {
        let plan = compile(MODEL, shape, |_| ());
        let mut engines = [0, 1].map(|_| engine(&plan, &Options::default()));
        let [first, second] =
            engines.each_mut().map(|engine| logits(engine, &[prompt(40), prompt(7)]));
        let bits = |logits: &[Vec<f32>]| -> Vec<Vec<u32>> {
            logits.iter().map(|row| row.iter().map(|x| x.to_bits()).collect()).collect()
        };
        assert_eq!(bits(&first), bits(&second), "{shape:?}");
        let again = logits(&mut engines[0], &[prompt(40), prompt(7)]);
        assert_eq!(bits(&first), bits(&again), "{shape:?}");
    }
}

#[test]
fn an_absurd_forecast_cuts_prompts_into_no_more_runs_than_lanes_are_there_for() {
    let mut plan = compile(MODEL, Shape::Pipeline, |_| ());
    let expected = logits(&mut engine(&plan, &Options::default()), &[prompt(40)]);
    for forecast in &mut plan.forecast.programs {
        (forecast.nanos, forecast.busiest_lane_nanos) = (1 << 63, 0);
    }
    let given = logits(&mut engine(&plan, &Options::default()), &[prompt(40)]);
    assert!(distance(&expected[0], &given[0]) < 1e-3);
}

#[test]
fn captured_runs_of_a_gpu_are_the_same_bit_for_bit() {
    for shape in Shape::GPU {
        let plan = compile(MODEL, shape, |_| ());
        let is_fetching = plan.programs.iter().all(fetches);
        // Of shards some may be fetched, and of what makes room for caches.
        let may_fetch = matches!(shape, Shape::GpuShards | Shape::GpuResident | Shape::GpuCaches);
        assert!(is_fetching == (shape == Shape::GpuFetching) || may_fetch, "{shape:?}");
        let mut engine = engine(&plan, &gpu_options());
        let id = engine.open();
        engine.append(id, &prompt(9)).unwrap();
        let mut decode = |token: u32| {
            let logits = engine.advance(&[id]).unwrap().remove(0);
            engine.append(id, &[token]).unwrap();
            logits
        };
        let first: Vec<Vec<f32>> = (0..5).map(&mut decode).collect();
        engine.close(id);
        let id = engine.open();
        engine.append(id, &prompt(9)).unwrap();
        for (token, first) in (0..5).zip(&first) {
            // The second sequence replays what the first one captured.
            let again = engine.advance(&[id]).unwrap().remove(0);
            engine.append(id, &[token]).unwrap();
            assert!(is_same(first, &again), "{shape:?}");
        }
        // Of eight decodes the first is captured; in software nothing is.
        let replays = if has_cuda() { 7 } else { 0 };
        assert_eq!(engine.executor().replays(), replays, "{shape:?}");
    }
}

#[test]
fn captured_runs_of_prompts_serve_unlike_lengths() {
    // Of blocks a processor's inputs have 8 bits, which moves logits by up to a third; another token moves them by
    // more.
    for (format, most) in [("f32", 1e-3), ("q8", 0.5)] {
        let with_format = |options: &mut compiler::Options| {
            options.formats = vec![format.parse().unwrap()];
        };
        let mut alone = engine(&compile(MODEL, Shape::One, with_format), &Options::default());
        for shape in Shape::GPU {
            let mut engine = engine(&compile(MODEL, shape, with_format), &gpu_options());
            // A GPU alone runs all blocks with eight tokens: as they are, captured, then replayed, first and behind
            // what is cached.
            for length in [5, 5, 3, 8, 5, 2] {
                let id = engine.open();
                let tokens = prompt(length + 4);
                for end in [length, length + 4] {
                    engine.append(id, &tokens[engine.tokens(id).len()..end]).unwrap();
                    let given = engine.advance(&[id]).unwrap().remove(0);
                    let expected = logits(&mut alone, &[tokens[..end].to_vec()]).remove(0);
                    let off = distance(&expected, &given);
                    assert!(off < most, "{shape:?} in {format}, {end} tokens: off by {off}");
                    let other = logits(&mut alone, &[tokens[..end - 1].to_vec()]).remove(0);
                    assert!(distance(&other, &given) > most, "{format}, {end} tokens");
                }
                engine.close(id);
            }
        }
    }
}

#[test]
fn captured_runs_of_prompts_are_the_same_bit_for_bit() {
    // A device in software may lack the last.
    let formats = &["f32", "f16", "q8", "bf16"][..if has_cuda() { 4 } else { 3 }];
    let shapes = [Shape::Gpu, Shape::GpuHosted, Shape::GpuFetching];
    let dense = shapes.map(|shape| (MODEL, shape));
    let mixtures = ["qwen3-moe", "qwen2-moe"].map(|name| (name, Shape::Gpu));
    // Prompts of one run; in software, where nothing is captured, few tokens.
    let runs: [Vec<usize>; 3] = [vec![5], vec![20], vec![150; if has_cuda() { 4 } else { 1 }]];
    for ((name, shape), format) in dense
        .iter()
        .chain(&mixtures)
        .flat_map(|of| formats.iter().map(move |format| (*of, *format)))
    {
        let mut model = models::lower(&golden(name)).unwrap();
        model.context = 1024;
        let plan = compile_model(&model, shape, |options| {
            options.formats = vec![format.parse().unwrap()];
            options.prefill_tokens = Some(1024);
            // Held in 16 bits, matrices are the vendor library's, and what lies between them is narrow.
            options.plain_bf16 = true;
        });
        let mut engine = engine(&plan, &gpu_options());
        for lengths in &runs {
            let prompts: Vec<Vec<u32>> = lengths.iter().map(|&length| prompt(length)).collect();
            let mut given = (0..3).map(|_| logits(&mut engine, &prompts));
            let first = given.next().unwrap();
            for again in given {
                let is_same = first.iter().zip(&again).all(|(first, again)| is_same(first, again));
                assert!(is_same, "{name} as {shape:?} in {format}, {lengths:?} tokens");
            }
        }
        assert_eq!(plan.programs[0].max.tokens, 1024);
        // The third run of each, but for those beside a host that are long.
        let replays = if shape == Shape::Gpu { runs.len() } else { runs.len() - 1 };
        let replays = if has_cuda() { replays } else { 0 };
        assert_eq!(engine.executor().replays(), replays, "{name} as {shape:?} in {format}");
    }
}

#[test]
fn captured_runs_over_gpus_are_the_same_bit_for_bit() {
    if probe::machine(None).unwrap().host.gpus.len() < 2 {
        return eprintln!("skipped: there are no two GPUs here");
    }
    let prompts = [5, 20, 150].map(prompt);
    // Of blocks a processor's inputs have 8 bits, and prompts of GPUs are padded.
    let cases = [(MODEL, "f32", 1e-3), (MODEL, "q8", 0.5), ("qwen3-moe", "f32", 1e-3)];
    for (name, format, most) in cases {
        let formats: Vec<FormatRule> = vec![format.parse().unwrap()];
        let set_format = |options: &mut compiler::Options| options.formats = formats.clone();
        let mut alone = engine(&compile(name, Shape::One, set_format), &Options::default());
        let expected = prompts.clone().map(|prompt| logits(&mut alone, &[prompt]).remove(0));
        // In one run, and in many that are under way together.
        for (shape, tokens) in Shape::GPUS.into_iter().flat_map(|shape| [(shape, 512), (shape, 8)])
        {
            let plan = compile(name, shape, |options| {
                set_format(options);
                options.prefill_tokens = Some(tokens);
            });
            let mut engine = engine(&plan, &gpu_options());
            for (prompt, expected) in prompts.iter().zip(&expected) {
                let length = prompt.len();
                let of = format!("{name} as {shape:?} in {format}, {length} by {tokens} tokens");
                let mut answer = || {
                    let given = logits(&mut engine, std::slice::from_ref(prompt)).remove(0);
                    (given, engine.executor().replays())
                };
                let [(first, _), (captured, before), (replayed, after)] =
                    [answer(), answer(), answer()];
                assert!(distance(expected, &first) < most, "{of}");
                assert!(is_same(&first, &captured) && is_same(&first, &replayed), "{of}");
                let of_run = engine.share(length).min(tokens) as usize;
                assert_eq!(after - before, 2 * length.div_ceil(of_run), "{of}");
            }
        }
    }
}

#[test]
fn captured_runs_of_more_kinds_than_are_held_stay_the_same() {
    // Where a processor multiplies, too, every length is a kind of its own.
    let plan = compile(MODEL, Shape::GpuHosted, |options| {
        options.formats = vec!["q8".parse().unwrap()];
        options.max_sequences = 1;
    });
    let held = if has_cuda() { ir::captured::most_kinds(&plan) as usize } else { 1 };
    let lengths = 2..held + 6;
    let mut engine = engine(&plan, &gpu_options());
    let mut answer = |length: usize| {
        let id = engine.open();
        let given = [&*prompt(length), &[5]].map(|tokens| {
            engine.append(id, tokens).unwrap();
            engine.advance(&[id]).unwrap().remove(0)
        });
        engine.close(id);
        given
    };
    // The second time a length is captured, in the place of an older one, and the third time replayed; then all again.
    let mut first: Vec<[Vec<f32>; 2]> = Vec::new();
    for round in 0..2 {
        for (at, length) in lengths.clone().enumerate() {
            for _ in 0..3 {
                let given = answer(length);
                if first.len() == at {
                    first.push(given.clone());
                }
                let is_same =
                    first[at].iter().zip(&given).all(|(first, given)| is_same(first, given));
                assert!(is_same, "round {round}, {length} tokens");
            }
        }
    }
    // Of all decodes the first is captured; in software nothing is.
    let prompts = 2 * lengths.len();
    let replays = if has_cuda() { prompts + 3 * prompts - 1 } else { 0 };
    assert_eq!(engine.executor().replays(), replays);
}

#[test]
fn sequences_of_a_batch_do_not_mix() {
    for shape in Shape::CPU {
        let plan = compile(MODEL, shape, |_| ());
        let mut engine = engine(&plan, &Options::default());
        let prompts = [prompt(5), prompt(33), prompt(1), prompt(18)];
        let together = logits(&mut engine, &prompts);
        for (prompt, together) in prompts.iter().zip(&together) {
            let alone = logits(&mut engine, std::slice::from_ref(prompt));
            assert!(distance(&alone[0], together) < 1e-4, "{shape:?} {}", prompt.len());
        }
    }
}

#[test]
fn chunks_in_flight_give_what_one_run_gives() {
    for shape in Shape::CPU {
        let whole = logits(
            &mut engine(&compile(MODEL, shape, |_| ()), &Options::default()),
            &[prompt(61), prompt(20)],
        );
        let plan = compile(MODEL, shape, |options| options.prefill_tokens = Some(4));
        let chunked = logits(&mut engine(&plan, &Options::default()), &[prompt(61), prompt(20)]);
        for (whole, chunked) in whole.iter().zip(&chunked) {
            assert!(distance(whole, chunked) < 1e-4, "{shape:?}");
        }
    }
}

#[test]
fn decoding_gives_what_feeding_again_gives() {
    for shape in Shape::CPU {
        let plan = compile(MODEL, shape, |_| ());
        let mut engine = engine(&plan, &Options::default());
        let ids = [engine.open(), engine.open(), engine.open()];
        for (i, &id) in ids.iter().enumerate() {
            engine.append(id, &prompt(10 + i)).unwrap();
        }
        engine.advance(&ids).unwrap();
        for token in [11, 200, 3] {
            ids.iter().for_each(|&id| engine.append(id, &[token]).unwrap());
            let decoded = engine.advance(&ids).unwrap();
            for (&id, decoded) in ids.iter().zip(&decoded) {
                let tokens = engine.tokens(id).to_vec();
                let again = logits(&mut engine, &[tokens]);
                assert!(distance(&again[0], decoded) < 1e-4, "{shape:?}");
            }
        }
    }
}

/// Fails unless every step of every run has a span, behind those that it waits for.
fn check_trace(plan: &Plan, trace: &Trace, of: &str) {
    for (number, run) in (0..).zip(&trace.runs) {
        let program = &plan.programs[run.program as usize];
        let spans: Vec<_> = trace.spans.iter().filter(|span| span.run == number).collect();
        assert_eq!(spans.len(), program.steps.len(), "{of}");
        for span in &spans {
            let times = [span.ready, span.start, span.end, run.end];
            assert!(times.is_sorted(), "{of}: {span:?} of {run:?}");
            for wait in &program.steps[span.step].waits {
                let other = spans.iter().find(|other| other.step == *wait).unwrap();
                assert!(other.end <= span.start, "{of}: {} starts before {wait}", span.step);
            }
        }
    }
}

#[test]
fn a_trace_has_every_step_of_every_run_in_order() {
    let plan = compile(MODEL, Shape::Shared, |_| ());
    let mut engine = engine(&plan, &Options { trace: true, ..Options::default() });
    logits(&mut engine, &[prompt(9)]);
    logits(&mut engine, &[prompt(3), prompt(4)]);
    let trace = engine.executor().trace().unwrap();
    assert_eq!(trace.runs.len(), 2);
    assert_eq!((trace.runs[1].tokens, trace.runs[1].sequences), (7, 2));
    check_trace(&plan, &trace, "shared");
    let text = trace.to_ron().unwrap();
    assert_eq!(Trace::from_ron(&text).unwrap(), trace);
    let perfetto = executor::trace::perfetto(&plan, &trace).unwrap();
    let events: serde_json::Value = serde_json::from_str(&perfetto).unwrap();
    assert!(events["traceEvents"].as_array().unwrap().len() > trace.spans.len());
}

#[test]
fn captured_runs_of_a_gpu_are_traced_step_by_step() {
    for shape in Shape::GPU {
        let plan = compile(MODEL, shape, |_| ());
        let mut engine = engine(&plan, &Options { trace: true, ..gpu_options() });
        let id = engine.open();
        engine.append(id, &prompt(9)).unwrap();
        for token in 0..5 {
            engine.advance(&[id]).unwrap();
            engine.append(id, &[token]).unwrap();
        }
        let trace = engine.executor().trace().unwrap();
        check_trace(&plan, &trace, &format!("{shape:?}"));
    }
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let plan = compile(MODEL, Shape::One, |options| options.context = Some(48));
    let mut engine = engine(&plan, &Options::default());
    let id = engine.open();
    let refused = |result: anyhow::Result<()>| format!("{:#}", result.unwrap_err());
    let long = refused(engine.append(id, &prompt(49)));
    assert!(long.contains("49 tokens are more than the plan's context of 48"), "{long}");
    let unknown = refused(engine.append(id, &[1, 768]));
    assert!(unknown.contains("token id 768") && unknown.contains("768 tokens"), "{unknown}");
    let empty = refused(engine.advance(&[id]).map(drop));
    assert!(empty.contains("no tokens"), "{empty}");
    // Room for four sequences; the fifth finds none.
    let ids: Vec<_> = (0..5).map(|_| engine.open()).collect();
    ids.iter().for_each(|&id| engine.append(id, &prompt(48)).unwrap());
    let full = refused(engine.advance(&ids).map(drop));
    assert!(full.contains("the cache is full"), "{full}");
}

#[test]
fn batches_beyond_the_caches_are_refused() {
    let plan = compile(MODEL, Shape::One, |options| options.context = Some(48));
    let (_folder, file) = written(&plan);
    let executor = load::load(file, &Options::default(), |_, _| ()).unwrap();
    let blocks: Vec<u32> = (0..plan.model.blocks).collect();
    let refused = |parts: &[(usize, usize, &[u32])]| {
        let mut batch = Batch::default();
        for &(tokens, past, blocks) in parts {
            batch.push(&prompt(tokens), past, past + tokens, blocks, false);
        }
        format!("{:#}", executor.start(0, batch).err().unwrap())
    };
    let message = refused(&[(9, 40, &blocks[..4])]);
    assert!(message.contains("49 tokens") && message.contains("context of 48"), "{message}");
    let message = refused(&[(9, 30, &blocks[..1])]);
    assert!(message.contains("beyond its 1 cache blocks"), "{message}");
    let message = refused(&[(9, 0, &[plan.model.blocks])]);
    assert!(message.contains(&format!("none with id {}", plan.model.blocks)), "{message}");
    let message = refused(&[(3, 0, &[1]), (3, 0, &[1])]);
    assert!(message.contains("block 1 would be written twice"), "{message}");
    // What is only read may be another's, too.
    let mut batch = Batch::default();
    batch.push(&prompt(3), 32, 35, &[1, 2], false);
    batch.push(&prompt(3), 32, 35, &[1, 3], false);
    executor.start(0, batch).unwrap().wait_unless(&AtomicBool::new(false)).unwrap();
}

#[test]
fn plans_that_do_not_fit_their_surroundings_are_refused() {
    let plan = compile(MODEL, Shape::One, |_| ());
    let refused = |plan: &Plan| {
        let (_folder, file) = written(plan);
        let error = load::load(file, &Options::default(), |_, _| ()).err().unwrap();
        format!("{error:#}")
    };
    let mut elsewhere = plan.clone();
    elsewhere.machine.host.cpus += 1;
    let message = refused(&elsewhere);
    assert!(message.contains("another machine") && message.contains("processors"), "{message}");
    let mut changed = plan.clone();
    changed.files.rows_mut()[0].fingerprint ^= 1;
    let message = refused(&changed);
    assert!(message.contains("model.safetensors") && message.contains("changed"), "{message}");

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plan.ron");
    let opened = |text: String| {
        std::fs::write(&path, text).unwrap();
        format!("{:#}", PlanFile::open(&path).err().unwrap())
    };
    let mut unsound = plan.clone();
    for lane in &mut unsound.programs[0].lanes {
        lane.steps.pop();
    }
    let message = opened(unsound.to_ron().unwrap());
    assert!(message.contains("plan.ron is unsound"), "{message}");
    let text = plan.to_ron().unwrap();
    let message =
        opened(text.replacen(&format!("version: {}", ir::plan::VERSION), "version: 999", 1));
    assert!(message.contains("plan.ron") && message.contains("version 999"), "{message}");
    let message = opened(text[..text.len() / 2].to_owned());
    assert!(message.contains("plan.ron"), "{message}");
}

/// Where a plan lies that this process, bound to its first processor, is to refuse.
const BOUND: &str = "HYBRID_TEST_BOUND_PLAN";

#[test]
fn processors_that_the_process_may_not_use_are_named() {
    if let Ok(path) = std::env::var(BOUND) {
        let file = PlanFile::open(Path::new(&path)).unwrap();
        let error = load::load(file, &Options::default(), |_, _| ()).err().unwrap().to_string();
        assert!(error.contains("numa1 computes on processor"), "{error}");
        assert!(error.contains("this process may not use that"), "{error}");
        return;
    }
    let plan = compile(MODEL, Shape::Shared, |_| ());
    // A machine may list GPUs before its nodes.
    let nodes: Vec<&[u32]> = plan
        .machine
        .devices
        .rows()
        .iter()
        .filter_map(|device| match &device.kind {
            DeviceKind::Numa { cpus, .. } => Some(cpus.as_slice()),
            DeviceKind::Gpu { .. } => None,
        })
        .collect();
    let (first, cpus) = (nodes[0], nodes.iter().copied().flatten().collect::<BTreeSet<&u32>>());
    if cpus.len() < 2 {
        return eprintln!("skipped: this process may use one processor");
    }
    let (folder, _file) = written(&plan);
    let first: Vec<String> = first.iter().map(u32::to_string).collect();
    let again = Command::new("taskset")
        .args(["-c", &first.join(",")])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "processors_that_the_process_may_not_use_are_named"])
        .env(BOUND, folder.path().join("plan.ron"))
        .output();
    match again {
        Ok(output) => assert!(output.status.success(), "{output:?}"),
        Err(error) => eprintln!("skipped: taskset: {error}"),
    }
}
