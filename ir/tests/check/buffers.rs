//! Lives of buffers.

use ir::plan::{Buffer, Step};
use ir::tensor::TensorType;

use crate::plans::{b, d, one_device, pipeline, s, tensor_parallel};
use crate::{finds_in_prefill, finds_in_step, named};

#[test]
fn a_lost_wait_is_a_race() {
    finds_in_step(
        pipeline(),
        "transfer",
        |step| step.waits.clear(),
        &["s7 (add) of prefill and s8 (transfer) of prefill touch b7 in no fixed order"],
    );
}

#[test]
fn steps_in_the_wrong_order_are_found() {
    finds_in_prefill(
        one_device(),
        |program| program.lanes[0].steps.swap(11, 12),
        &[
            "s12 (head) of prefill reads b12 before it is written",
            "s11 (select) of prefill touches b12 after its end",
        ],
    );
}

#[test]
fn a_step_that_reads_what_it_writes_reads_too_early() {
    finds_in_step(
        one_device(),
        "o",
        |step| step.reads[0] = b(6),
        &["s6 (o) of prefill reads b6 before it is written"],
    );
}

#[test]
fn a_buffer_freed_early_is_gone() {
    finds_in_prefill(
        one_device(),
        |program| {
            program.steps[s(4)].frees.clear();
            program.steps[s(3)].frees.push(b(1));
        },
        &["s4 (v) of prefill touches b1 after its end"],
    );
}

#[test]
fn a_free_that_does_not_wait_for_a_reader_is_a_race() {
    let plan = tensor_parallel();
    let broadcast = named(&plan.programs[0], "x");
    let frees = |step: &Step| step.frees.contains(&b(0)) && step.waits.contains(&broadcast);
    let steps = &plan.programs[0].steps;
    let id = steps.iter().find(|(_, step)| frees(step)).expect("one frees the input").0;
    finds_in_prefill(
        plan,
        |program| program.steps[id].waits.retain(|wait| *wait != broadcast),
        &["s1 (x) of prefill and s5 (attention) of prefill touch b0 in no fixed order"],
    );
}

#[test]
fn two_writers_of_one_buffer_are_found() {
    finds_in_step(
        one_device(),
        "add",
        |step| step.writes[0] = b(1),
        &[
            "s7 (add) of prefill writes b1, which is written already",
            "no step of prefill writes b7",
        ],
    );
}

#[test]
fn a_buffer_ends_once() {
    finds_in_step(
        one_device(),
        "head",
        |step| step.frees.push(b(11)),
        &["s12 (head) of prefill frees b11, which is freed already"],
    );
}

#[test]
fn a_buffer_that_no_step_frees_leaks() {
    finds_in_step(
        one_device(),
        "head",
        |step| step.frees.clear(),
        &["no step of prefill frees b12"],
    );
}

#[test]
fn a_buffer_that_no_step_writes_is_found() {
    let ty = TensorType::activation(8);
    finds_in_prefill(
        one_device(),
        |program| {
            program.buffers.push(Buffer { device: d(0), ty });
        },
        &["no step of prefill writes b14"],
    );
}

#[test]
fn the_output_stays() {
    let head = named(&one_device().programs[0], "head");
    finds_in_prefill(
        one_device(),
        |program| program.steps[head].frees.push(program.output),
        &["s12 (head) of prefill frees the output"],
    );
}
