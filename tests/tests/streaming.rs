//! What is decided about a model that is larger than the GPU: which matrices stay, and who computes with them when.
//!
//! The machine is an H200 with as much memory as a test gives it, and its host.

use compiler::Options;
use ir::graph::Reason;
use ir::id::{DeviceId, Id as _};
use ir::machine::Machine;
use ir::model::Model;
use ir::op::Op;
use ir::plan::{Action, Plan, Program, Queue};
use tests::machines::h200;
use tests::made_up::{LlamaShape, MadeUp};

const GIB: u64 = 1 << 30;

fn model(checkpoint: &MadeUp) -> Model {
    let folder = tempfile::tempdir().expect("a folder for the headers");
    checkpoint.write(folder.path(), 4).expect("headers are written");
    models::lower(folder.path()).expect("the headers are a model")
}

fn options() -> Options {
    Options { prefill_tokens: 2048, context: Some(4096), ..Options::default() }
}

fn compile(model: &Model, machine: &Machine, options: &Options) -> Plan {
    compiler::compile(model, machine, options, &mut |_, _| ()).expect("it fits")
}

fn llama(gpu_bytes: u64) -> Plan {
    compile(&model(&MadeUp::llama(LlamaShape::LLAMA_8B)), &h200(gpu_bytes), &options())
}

/// Tokens per second of prefill, and of decode.
fn rates(plan: &Plan) -> (f64, f64) {
    let rate = |program: usize| {
        let tokens = f64::from(plan.programs[program].max.tokens);
        tokens / (plan.forecast.programs[program].nanos as f64 / 1e9)
    };
    (rate(0), rate(1))
}

/// Steps of a program that fetch, and linears and mixtures that a device computes.
fn counts(program: &Program, device: usize) -> (usize, usize) {
    let count = |queue: Queue, counts: &dyn Fn(&Action) -> bool| {
        let lanes = program.lanes.iter().filter(|lane| lane.queue == queue);
        let steps = lanes
            .filter(|lane| queue == Queue::Copy || lane.device == DeviceId::from_index(device))
            .flat_map(|lane| &lane.steps);
        steps.filter(|&&step| counts(&program.steps[step].action)).count()
    };
    let computes = |action: &Action| matches!(action, Action::Run(Op::Linear(_) | Op::Experts(_)));
    (count(Queue::Copy, &|_| true), count(Queue::Compute, &computes))
}

fn chosen(plan: &Plan) -> &str {
    &plan.forecast.candidates[0].name
}

#[test]
fn a_model_that_fits_leaves_the_host_alone() {
    let plan = llama(40 * GIB);
    assert_eq!(chosen(&plan), "all on gpu0");
    for program in &plan.programs {
        assert!(program.lanes.iter().all(|lane| lane.queue == Queue::Compute));
        assert_eq!(program.lanes.len(), 1);
    }
}

#[test]
fn half_a_llama_on_the_host_is_fetched_in_prefill_and_shared_in_decode() {
    // Sixteen of 32 blocks: what is left of 16 GB of weights, half of them beside the head.
    let plan = llama(10 * GIB);
    let (prefill, decode) = rates(&plan);
    assert!(prefill > 8000.0, "{prefill} tokens/s");
    assert!(decode > 1.2 * 15.8, "{decode} tokens/s");
    let (prefill_fetches, prefill_on_host) = counts(&plan.programs[0], 1);
    assert!(prefill_fetches > 0 && prefill_on_host == 0);
    let (decode_fetches, decode_on_host) = counts(&plan.programs[1], 1);
    assert!(decode_fetches > 0 && decode_on_host > 0 && decode_fetches < prefill_fetches);
}

#[test]
fn a_quarter_of_a_llama_on_the_host() {
    let plan = llama(14 * GIB);
    let (prefill, decode) = rates(&plan);
    assert!(prefill > 12_000.0, "{prefill} tokens/s");
    assert!(decode > 1.2 * 28.6, "{decode} tokens/s");
}

#[test]
fn experts_stay_on_the_host_before_anything_else() {
    let options = Options { formats: vec!["q4".parse().expect("it is a format")], ..options() };
    let plan = compile(&model(&MadeUp::mixture()), &h200(3 * GIB), &options);
    let (prefill, decode) = rates(&plan);
    assert!(prefill > 3.0 * 2668.0, "{prefill} tokens/s");
    assert!(decode > 1.2 * 118.0, "{decode} tokens/s");
    let host = DeviceId::from_index(1);
    let on_host = plan.weights.rows().iter().filter(|weight| weight.device == host);
    for weight in on_host.filter(|weight| weight.shape.len() > 1) {
        let stays = weight.name.contains("experts") || weight.name.contains("embed");
        assert!(stays, "{} is on the host", weight.name);
    }
}

#[test]
fn all_caches_are_on_the_gpu() {
    let plan = llama(10 * GIB);
    assert!(plan.caches.rows().iter().all(|cache| cache.device.index() == 0));
}

#[test]
fn what_stays_says_what_the_gpu_lacks() {
    let plan = llama(10 * GIB);
    let lacks = plan.causes.rows().iter().any(|cause| {
        matches!(cause.reason, Reason::Memory { device, missing_bytes } if device.index() == 0 && missing_bytes > 0)
    });
    assert!(lacks);
}

#[test]
fn the_choice_is_never_slower_than_a_simple_one() {
    for gpu_bytes in [6, 8, 10, 12, 14, 16].map(|gib| gib * GIB) {
        let plan = llama(gpu_bytes);
        let score = |candidate: &ir::plan::Candidate| {
            Some(candidate.prefill_nanos? + 128 * candidate.decode_nanos?)
        };
        let best = plan.forecast.candidates.iter().filter_map(score).min();
        assert_eq!(score(&plan.forecast.candidates[0]), best);
        assert!(plan.forecast.candidates.iter().any(|c| c.name.starts_with("pipeline")));
    }
}

#[test]
fn more_memory_is_never_slower() {
    let mut last = u64::MAX;
    for gpu_bytes in [6, 8, 10, 12, 14, 16, 18].map(|gib| gib * GIB) {
        let best = &llama(gpu_bytes).forecast.candidates[0];
        let score =
            best.prefill_nanos.expect("it fits") + 128 * best.decode_nanos.expect("it fits");
        assert!(score <= last, "{gpu_bytes} bytes: {}", best.name);
        last = score;
    }
}
