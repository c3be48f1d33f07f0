//! Which experts mixtures have.

use ir::op::{ExpertPart, Op};
use ir::plan::{Action, Lane, Plan, Program, Step};
use ir::smallvec;

use crate::plans::{one_device, w};
use crate::{finds, named};

/// The plan of one device with two mixtures of two experts each, whose outputs are added.
fn divided() -> Plan {
    let mut plan = one_device();
    for weight in [w(7), w(8), w(9)] {
        plan.weights[weight].shape[0] = 2;
        plan.weights[weight].sources[0].axes[0][0].size = 2;
    }
    for program in &mut plan.programs {
        let [first, add, select] = ["experts", "add", "select"].map(|name| named(program, name));
        let made = program.steps[first].writes[0];
        let [other, sum] = [0, 1].map(|_| program.buffers.push(program.buffers[made].clone()));
        let second = Step { writes: smallvec![other], ..program.steps[first].clone() };
        program.steps[first].frees.clear();
        let second = program.steps.push(second);
        let sum_of_both = Step {
            reads: smallvec![made, other],
            writes: smallvec![sum],
            frees: smallvec![made, other],
            ..program.steps[add].clone()
        };
        let sum_of_both = program.steps.push(sum_of_both);
        (program.steps[select].reads, program.steps[select].frees) =
            (smallvec![sum], smallvec![sum]);
        let Lane { steps, .. } = &mut program.lanes[0];
        let at = steps.iter().position(|&step| step == select);
        let at = at.expect("it is in the only lane");
        steps.splice(at..at, [second, sum_of_both]);
        let [one, other] = parts(program);
        (*one, *other) = (Some(part(0)), Some(part(2)));
    }
    plan
}

fn part(first: u32) -> ExpertPart {
    ExpertPart { first, load: 0.5 }
}

/// The parts that mixtures are, in the order of steps.
fn parts(program: &mut Program) -> [&mut Option<ExpertPart>; 2] {
    let mut parts = Vec::new();
    for step in program.steps.rows_mut() {
        if let Action::Run(Op::Experts(experts)) = &mut step.action {
            parts.push(&mut experts.part);
        }
    }
    parts.try_into().expect("there are two")
}

/// Makes the prefill's mixtures begin with those experts.
#[track_caller]
fn begin_with(firsts: [u32; 2], expected: &[&str]) {
    finds(
        divided(),
        |plan| {
            let parts = parts(&mut plan.programs[0]);
            parts.into_iter().zip(firsts).for_each(|(old, first)| *old = Some(part(first)));
        },
        expected,
    );
}

#[test]
fn parts_are_all_of_a_routers_experts() {
    begin_with([2, 0], &[]);
    begin_with([0, 0], &["s9 (route) of prefill: mixtures have experts 0..2 of its 4"]);
    begin_with([2, 2], &["s9 (route) of prefill: mixtures have experts 2..4 of its 4"]);
    begin_with([0, 1], &["s9 (route) of prefill: mixtures have experts 0..2 and 1..3 of its 4"]);
    begin_with([1, 2], &["s9 (route) of prefill: mixtures have experts 1..3 and 2..4 of its 4"]);
    begin_with(
        [0, 3],
        &[
            "s13 (experts) of prefill: a router over 4 experts feeds 2",
            "s9 (route) of prefill: mixtures have experts 0..2 of its 4",
        ],
    );
}

#[test]
fn shards_of_a_mixture_have_the_same_experts() {
    finds(
        divided(),
        |plan| {
            for weight in [w(7), w(8), w(9)] {
                plan.weights[weight].shape[0] = 4;
                plan.weights[weight].sources[0].axes[0][0].size = 4;
            }
            for program in &mut plan.programs {
                parts(program).into_iter().for_each(|part| *part = None);
            }
        },
        &[],
    );
}
