//! A checker no one has seen fail is not a checker: every violation is provoked by one change to a sound plan.

mod attention;
mod buffers;
mod caches;
mod captured;
mod collectives;
mod experts;
mod fetches;
mod indices;
mod letters;
mod memory;
mod moved;
mod order;
mod places;
mod plans;
mod reached;
mod shapes;
mod tables;
mod workspaces;
mod written;

use ir::check::check;
use ir::id::StepId;
use ir::op::Op;
use ir::plan::{Action, Plan, Program, Step};

#[test]
fn plans_made_with_care_are_sound() {
    for plan in
        [plans::one_device(), plans::pipeline(), plans::tensor_parallel(), plans::streamed()]
    {
        finds(plan, |_| (), &[]);
    }
}

/// Changes a sound plan and expects exactly these findings.
#[track_caller]
fn finds(mut plan: Plan, change: impl FnOnce(&mut Plan), expected: &[&str]) {
    assert_eq!(findings(&plan), [""; 0], "before the change");
    change(&mut plan);
    assert_eq!(findings(&plan), expected);
}

/// The same for a change of the prefill program.
#[track_caller]
fn finds_in_prefill(plan: Plan, change: impl FnOnce(&mut Program), expected: &[&str]) {
    finds(plan, |plan| change(&mut plan.programs[0]), expected);
}

/// The same for a change of one prefill step.
#[track_caller]
fn finds_in_step(plan: Plan, step: &str, change: impl FnOnce(&mut Step), expected: &[&str]) {
    let id = named(&plan.programs[0], step);
    finds(plan, |plan| change(&mut plan.programs[0].steps[id]), expected);
}

/// The same for a change of the operation of one prefill step.
#[track_caller]
fn finds_in_op(plan: Plan, step: &str, change: impl FnOnce(&mut Op), expected: &[&str]) {
    finds_in_step(
        plan,
        step,
        |step| match &mut step.action {
            Action::Run(op) => change(op),
            Action::Move { movement, .. } => panic!("{movement} is no operation"),
            Action::Fetch { weight, .. } => panic!("a fetch of {weight} is no operation"),
        },
        expected,
    );
}

fn findings(plan: &Plan) -> Vec<String> {
    check(plan).iter().map(ToString::to_string).collect()
}

/// The first step of that name.
fn named(program: &Program, name: &str) -> StepId {
    let mut steps = program.steps.iter();
    steps.find(|(_, step)| &*step.name == name).expect("the program has such a step").0
}
