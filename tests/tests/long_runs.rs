//! Runs whose elements GPUs do not count: they take fewer tokens, or are refused.

use compiler::Options;
use ir::machine::Machine;
use ir::plan::Plan;
use tests::machines::{gpu, linked, numa};
use tests::toys::Toy;

/// More than any of these runs needs.
const AMPLE_BYTES: u64 = 1 << 42;
/// Features of a token inside an MLP: as many as of 2^32 elements for 2^16 tokens.
const INTERMEDIATE: u32 = 1 << 16;
const CONTEXT: u32 = 1 << 17;

fn compile(toy: Toy, machine: &Machine, max_sequences: u32) -> anyhow::Result<Plan> {
    let mut model = Toy { intermediate: INTERMEDIATE, ..toy }.model().expect("the toy is a model");
    model.context = CONTEXT;
    let options = Options {
        context: Some(CONTEXT),
        prefill_tokens: Some(CONTEXT),
        max_sequences,
        ..Options::default()
    };
    compiler::compile(&model, machine, &options, &mut |_, _| ())
}

/// The most tokens of a prefill run, where as many as a context has are asked for.
fn prefill_tokens(toy: Toy, machine: &Machine) -> u32 {
    compile(toy, machine, 1).expect("the toy compiles").programs[0].max.tokens
}

#[test]
fn prefill_runs_are_as_long_as_gpus_count() {
    let machine = linked(vec![gpu(0, AMPLE_BYTES)]);
    assert_eq!(prefill_tokens(Toy::llama(), &machine), (1 << 16) - 1);
    // At two experts each token has two rows.
    assert_eq!(prefill_tokens(Toy::mixture(), &machine), (1 << 15) - 1);
    let host = linked(vec![numa(0, AMPLE_BYTES)]);
    assert_eq!(prefill_tokens(Toy::llama(), &host), CONTEXT);
}

#[test]
fn more_sequences_than_gpus_count_are_refused() {
    let machine = linked(vec![gpu(0, AMPLE_BYTES)]);
    let error = compile(Toy::llama(), &machine, 1 << 16).expect_err("that is one too many");
    let error = format!("{error:#}");
    assert!(error.contains("lower --max-sequences to 65535"), "{error}");
}
