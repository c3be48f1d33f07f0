//! Runs that end early: steps that fail, prompts that are given up, executors that are closed.

#[expect(dead_code, reason = "each test file uses a part")]
mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{Shape, compile, distance, engine, gpu_options, is_same, logits, prompt, written};
use executor::batch::Batch;
use executor::load::{self, Fault, FaultKind, Options};
use ir::plan::{Lane, Phase, Plan, Program, Queue};
use tests::shortest;

const MODEL: &str = "llama3";
/// How long a run takes that waits for nobody; lanes that do not leave one are waited for a minute.
const LIMIT: Duration = Duration::from_secs(1);
/// Less than lanes that do not leave a run are waited for; kernels may be compiled meanwhile.
const PATIENCE: Duration = Duration::from_secs(30);

#[test]
fn every_failing_step_ends_its_run_and_is_named() {
    for shape in Shape::CPU {
        let plan = compile(MODEL, shape, |_| ());
        let steps = plan.programs[0].steps.rows();
        for (i, step) in steps.iter().enumerate().step_by(5) {
            let kind = if i % 2 == 0 { FaultKind::Error } else { FaultKind::Panic };
            let fault = Some(Fault { step: step.name.to_string(), kind, is_over: Arc::default() });
            let mut engine = engine(&plan, &Options { fault, ..Options::default() });
            let id = engine.open();
            engine.append(id, &prompt(9)).unwrap();
            let mut error = String::new();
            let time = shortest(LIMIT, || {
                error = format!("{:#}", engine.advance(&[id]).unwrap_err());
            });
            assert!(time < LIMIT, "{shape:?} {}", step.name);
            assert!(error.contains(&*step.name) && error.contains("numa"), "{error}");
            assert!(error.contains("was injected"), "{error}");
        }
    }
}

#[test]
fn an_engine_goes_on_after_failures() {
    for shape in Shape::CPU {
        let plan = compile(MODEL, shape, |_| ());
        let expected = logits(&mut engine(&plan, &Options::default()), &[prompt(9)]).remove(0);
        for kind in [FaultKind::Error, FaultKind::Panic] {
            let step = plan.programs[0].steps.rows()[3].name.to_string();
            let is_over = Arc::new(AtomicBool::new(false));
            let fault = Some(Fault { step, kind, is_over: Arc::clone(&is_over) });
            let mut engine = engine(&plan, &Options { fault, ..Options::default() });
            let id = engine.open();
            engine.append(id, &prompt(9)).unwrap();
            for _ in 0..3 {
                assert!(engine.advance(&[id]).is_err(), "{shape:?}");
            }
            is_over.store(true, Ordering::Relaxed);
            // The sequence that failed, and another.
            assert!(is_same(&expected, &engine.advance(&[id]).unwrap()[0]), "{shape:?}");
            engine.close(id);
            assert!(is_same(&expected, &logits(&mut engine, &[prompt(9)])[0]), "{shape:?}");
        }
    }
}

#[test]
fn an_aborted_feed_is_fed_again_whole() {
    for shape in Shape::CPU {
        let plan = compile(MODEL, shape, |options| options.prefill_tokens = Some(4));
        let mut engine = engine(&plan, &Options::default());
        let expected = logits(&mut engine, &[prompt(61)]);
        let id = engine.open();
        engine.append(id, &prompt(61)).unwrap();
        let mut cut = 0;
        for tokens in [0, 1, 2, 1, 3, 1, 6] {
            // Has the first run to itself, so that its token comes while the other sequence is fed.
            let first = engine.open();
            engine.append(first, &prompt(4)).unwrap();
            let abort = AtomicBool::new(tokens == 0);
            let (mut chosen, mut chosen_for_first) = (0, 0);
            let timings = engine.generate(&[first, id], &abort, |index, _| {
                chosen += 1;
                chosen_for_first += usize::from(index == 0);
                abort.store(chosen >= tokens, Ordering::Relaxed);
                Ok(Some(5))
            });
            assert!(timings.unwrap().is_aborted);
            cut += usize::from(chosen == 1);
            // What was chosen is not forgotten.
            assert_eq!(engine.tokens(first).len(), 4 + chosen_for_first);
            engine.close(first);
            engine.truncate(id, 20);
            engine.append(id, &prompt(61)[20..]).unwrap();
        }
        assert!(cut > 0, "{shape:?}: no prompt was fed in part");
        let again = engine.advance(&[id]).unwrap();
        assert!(distance(&expected[0], &again[0]) < 1e-4, "{shape:?}");
    }
}

#[test]
fn a_closed_executor_leaves_nobody_waiting() {
    let plan = compile(MODEL, Shape::Pipeline, |_| ());
    let mut tries = Vec::new();
    // Where other tests run beside it, all runs may have ended before the executor is closed, and closing it take long.
    for _ in 0..10 {
        let (_folder, file) = written(&plan);
        let executor = load::load(file, &Options::default(), |_, _| ()).unwrap();
        let runs: Vec<_> = (0..200)
            .map(|_| {
                let mut batch = Batch::default();
                batch.push(&prompt(200), 0, 200, &(0..20).collect::<Vec<_>>(), false);
                executor.start(0, batch).unwrap()
            })
            .collect();
        let start = Instant::now();
        drop(executor);
        let never = AtomicBool::new(false);
        let cancelled = runs.into_iter().filter_map(|run| run.wait_unless(&never).err()).count();
        tries.push((cancelled, start.elapsed()));
        if cancelled > 0 && start.elapsed() < LIMIT {
            return;
        }
    }
    panic!("no try cancelled some of its 200 runs in {LIMIT:?}: {tries:?}");
}

/// Steps of a plan's programs that stand for all, with their program: of each lane the one in the middle, fetches too.
fn middles(plan: &Plan) -> Vec<(Phase, Queue, String)> {
    let lanes = plan
        .programs
        .iter()
        .flat_map(|program| program.lanes.iter().map(move |lane| (program, lane)));
    let middle = |(program, lane): (&Program, &Lane)| {
        let step = *lane.steps.get(lane.steps.len() / 2)?;
        Some((program.phase, lane.queue, program.steps[step].name.to_string()))
    };
    lanes.filter_map(middle).collect()
}

#[test]
fn a_gpu_goes_on_after_failures_of_any_lane() {
    let mut failed_fetches = 0;
    for shape in Shape::GPU {
        let plan = compile(MODEL, shape, |options| options.max_sequences = 1);
        let mut sound = engine(&plan, &gpu_options());
        // Decode steps are captured in the second run and replayed in the third.
        let tokens: Vec<u32> = prompt(9).into_iter().chain([5, 11, 200, 3]).collect();
        let expected: Vec<Vec<f32>> = (9..=tokens.len())
            .map(|end| logits(&mut sound, &[tokens[..end].to_vec()]).remove(0))
            .collect();
        drop(sound);
        for (i, (phase, queue, step)) in middles(&plan).into_iter().enumerate() {
            let kind = if i % 2 == 0 { FaultKind::Error } else { FaultKind::Panic };
            let is_over = Arc::new(AtomicBool::new(true));
            let fault = Fault { step: step.clone(), kind, is_over: Arc::clone(&is_over) };
            let mut engine = engine(&plan, &Options { fault: Some(fault), ..gpu_options() });
            for round in 0..2 {
                let id = engine.open();
                engine.append(id, &tokens[..9]).unwrap();
                for (expected, end) in expected.iter().zip(9..) {
                    let is_due = match phase {
                        Phase::Prefill => end == 9,
                        Phase::Decode => end == 12,
                    };
                    if is_due {
                        is_over.store(false, Ordering::Relaxed);
                        let start = Instant::now();
                        let error = format!("{:#}", engine.advance(&[id]).unwrap_err());
                        assert!(start.elapsed() < PATIENCE, "{shape:?} {step}");
                        assert!(error.contains(&step), "{shape:?} {step}: {error}");
                        assert!(error.contains("was injected"), "{shape:?} {step}: {error}");
                        failed_fetches += usize::from(queue == Queue::Copy);
                        is_over.store(true, Ordering::Relaxed);
                    }
                    let given = engine.advance(&[id]).unwrap().remove(0);
                    let off = distance(expected, &given);
                    assert!(off < 1e-3, "{shape:?} {step}, round {round}, {end} tokens: {off}");
                    if let Some(&next) = tokens.get(end) {
                        engine.append(id, &[next]).unwrap();
                    }
                }
                engine.close(id);
            }
        }
    }
    assert!(failed_fetches > 0);
}
