//! A plan means what its model means: both are interpreted in plain loops and compared.

mod wishes;

use std::collections::BTreeSet;
use std::io::Write as _;

use compiler::{Options, compile};
use ir::id::{BufferId, StepId, Table};
use ir::layout::Move;
use ir::model::{Model, ModelWeight};
use ir::plan::{Action, Plan, Program};
use ir::tensor::DType;
use proptest::prelude::*;
use proptest::sample::Index;
use tempfile::NamedTempFile;
use tests::interpreter::{Batch, Interpreter, Matrix};
use tests::toys::Toy;
use tests::{first_decode, machines};
use wishes::{compiled, machine, toy, wishes};

const IDS: [u32; 5] = [3, 1, 41, 59, 26];
const ROWS: [usize; 2] = [2, 4];

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 64,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn plans_mean_what_their_models_mean(
        toy in toy(),
        machine in machine(),
        wishes in wishes(),
        seed in any::<u32>(),
        program in any::<Index>(),
    ) {
        let mut wishes = wishes;
        // The batch must fit.
        (wishes.sizes.0, wishes.sizes.2) = (64, 64);
        let (model, _file) = stored(&Toy { stored: DType::F32, ..toy }, seed);
        // Another case takes the place of one whose wishes cannot be had.
        let plan = compiled(&model, &machine, &wishes);
        let plan = plan.ok_or_else(|| TestCaseError::reject("the wishes cannot be had"))?;
        let programs = [0, first_decode(&plan), program.index(plan.programs.len())];
        check(model, &plan, &BTreeSet::from(programs));
    }
}

#[test]
fn a_plan_that_fetches_means_what_its_model_means() {
    let (model, _file) = stored(&Toy { layers: 4, stored: DType::F32, ..Toy::llama() }, 7);
    let options = Options { context: Some(128), prefill_tokens: Some(64), ..Options::default() };
    let machine = machines::fast_link(600 << 10);
    let plan = compile(&model, &machine, &options, &mut |_, _| ()).expect("it fits");
    assert!(plan.forecast.devices.rows().iter().any(|device| device.fetch_bytes > 0));
    check(model, &plan, &(0..plan.programs.len()).collect());
}

/// Some programs of a plan give the logits of its model; of a decode program the tokens are one sequence, too.
fn check(model: Model, plan: &Plan, programs: &BTreeSet<usize>) {
    let reference = Interpreter::load(model).expect("the weights are there");
    let expected = reference.logits(&IDS, &ROWS).expect("the model can be computed");
    let scale = expected.data.iter().fold(1.0f32, |scale, x| scale.max(x.abs()));
    for &program in programs {
        let program = &plan.programs[program];
        let made = run(plan, program);
        let (size, name) = ((expected.features, expected.data.len()), &program.name);
        assert_eq!((made.features, made.data.len()), size, "{name}");
        for (made, expected) in made.data.iter().zip(&expected.data) {
            let is_like = (made - expected).abs() <= 1e-3 * scale;
            assert!(is_like, "{name}: {made} instead of {expected}");
        }
    }
}

/// The toy's model with random weights in a file.
fn stored(toy: &Toy, seed: u32) -> (Model, NamedTempFile) {
    let mut model = toy.model().expect("the toy is a model");
    let mut state = u64::from(seed) << 1 | 1;
    let mut file = NamedTempFile::new().expect("there is a folder for temporary files");
    let elements = model.files.rows()[0].bytes / 4;
    let weights = (0..elements).flat_map(|_| {
        // Knuth's linear congruence; its upper bits are random enough for weights in -0.25..0.25.
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (((state >> 40) as f32 / (1u64 << 24) as f32 - 0.5) / 2.0).to_le_bytes()
    });
    file.write_all(&weights.collect::<Vec<u8>>()).expect("the file can be written");
    model.files.rows_mut()[0].path = file.path().to_owned();
    (model, file)
}

/// The output of a program, its steps run in an order that lanes and waits allow.
fn run(plan: &Plan, program: &Program) -> Matrix {
    let interpreter = Interpreter::load(model_of(plan)).expect("the weights are there");
    let mut buffers: Table<BufferId, Option<Matrix>> =
        program.buffers.ids().map(|_| None).collect();
    let mut done: Table<StepId, bool> = program.steps.ids().map(|_| false).collect();
    let mut next = vec![0; program.lanes.len()];
    while next.iter().zip(&program.lanes).any(|(&next, lane)| next < lane.steps.len()) {
        for (next, lane) in next.iter_mut().zip(&program.lanes) {
            while let Some(&id) = lane.steps.get(*next)
                && program.steps[id].waits.iter().all(|&wait| done[wait])
            {
                run_step(&interpreter, program, id, &mut buffers);
                done[id] = true;
                *next += 1;
            }
        }
    }
    buffers[program.output].take().expect("the output is written")
}

/// A model whose weights are those of the plan, for interpreting its steps.
fn model_of(plan: &Plan) -> Model {
    let weights = plan.weights.rows().iter().map(|weight| ModelWeight {
        name: weight.name.clone(),
        shape: weight.shape.clone(),
        stored: DType::F32,
        sources: weight.sources.clone(),
    });
    Model {
        files: plan.files.clone(),
        weights: weights.collect(),
        ropes: plan.ropes.clone(),
        ..Model::default()
    }
}

fn run_step(
    interpreter: &Interpreter,
    program: &Program,
    id: StepId,
    buffers: &mut Table<BufferId, Option<Matrix>>,
) {
    let step = &program.steps[id];
    let read = |&buffer: &BufferId| buffers[buffer].as_ref().expect("it is written before");
    let reads: Vec<&Matrix> = step.reads.iter().map(read).collect();
    let made = match &step.action {
        Action::Run(op) => {
            let batch = Batch { ids: &IDS, rows: &ROWS };
            interpreter.run(op, &reads, &batch).expect("the step can be computed")
        }
        Action::Move { movement, slice, .. } => vec![moved(movement, *slice, &reads)],
        // The interpreter knows all weights, so that what is fetched need not hold anything.
        Action::Fetch { .. } => vec![Matrix { features: 0, data: Vec::new() }],
    };
    for (&buffer, value) in step.writes.iter().zip(made) {
        buffers[buffer] = Some(value);
    }
    for &buffer in &step.frees {
        buffers[buffer] = None;
    }
}

fn moved(movement: &Move, slice: Option<(u32, u32)>, reads: &[&Matrix]) -> Matrix {
    let cut = |whole: &Matrix| {
        let (start, size) = slice.expect("a cut has a slice");
        let columns = start as usize..(start + size) as usize;
        let data = whole.rows().flat_map(|row| row[columns.clone()].to_vec()).collect();
        Matrix { features: size as usize, data }
    };
    match movement {
        Move::Transfer { .. } | Move::Broadcast { .. } => reads[0].clone(),
        Move::AllReduce => sum(reads),
        Move::ReduceScatter { .. } => cut(&sum(reads)),
        Move::Slice { .. } => cut(reads[0]),
        Move::AllGather { .. } => {
            let rows = reads[0].rows().len();
            let data = (0..rows).flat_map(|row| reads.iter().flat_map(move |part| part.row(row)));
            let features = reads.iter().map(|part| part.features).sum();
            Matrix { features, data: data.copied().collect() }
        }
    }
}

fn sum(terms: &[&Matrix]) -> Matrix {
    let mut total = terms[0].clone();
    for term in &terms[1..] {
        total.data.iter_mut().zip(&term.data).for_each(|(total, x)| *total += x);
    }
    total
}
