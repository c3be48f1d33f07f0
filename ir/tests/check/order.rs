//! Lanes and the order they enforce.

use std::time::{Duration, Instant};

use ir::check::check;
use ir::id::{Id as _, StepId};
use ir::plan::{Lane, Queue, Step};
use ir::smallvec;

use crate::plans::{d, gpu, one_device, pipeline, s, tensor_parallel};
use crate::{finds, finds_in_prefill, finds_in_step, named};

#[test]
fn a_cycle_of_waits_is_a_deadlock() {
    finds_in_step(
        pipeline(),
        "embed",
        |step| step.waits.push(s(13)),
        &["s13 (head) of prefill waits for itself"],
    );
}

/// No wait forms a cycle here; but no member leaves a collective before all have come.
#[test]
fn a_member_that_waits_for_what_follows_its_collective_is_a_deadlock() {
    let plan = tensor_parallel();
    let follows = named(&plan.programs[0], "select");
    finds_in_prefill(
        plan,
        |program| {
            let last = *program.lanes[1].steps.last().expect("the lane has steps");
            program.steps[last].waits.push(follows);
        },
        &["s18 (select) of prefill waits for itself"],
    );
}

#[test]
fn a_step_in_no_lane_is_found() {
    finds_in_prefill(
        one_device(),
        |program| {
            program.lanes[0].steps.pop();
        },
        &["s12 (head) of prefill is in no lane"],
    );
}

#[test]
fn a_step_in_two_lanes_is_found() {
    finds_in_prefill(
        pipeline(),
        |program| program.lanes[0].steps.push(s(8)),
        &[
            "s8 (transfer) of prefill is in lanes 2 times",
            "s8 (transfer) of prefill touches b8, which is on another device",
        ],
    );
}

#[test]
fn a_queue_has_one_lane() {
    finds_in_prefill(
        one_device(),
        |program| {
            let steps = program.lanes[0].steps.split_off(6);
            program.steps[s(6)].waits.push(s(5));
            program.lanes.push(Lane { device: d(0), queue: Queue::Compute, steps });
        },
        &["lane 1 of prefill is a queue that has a lane already"],
    );
}

#[test]
fn more_lanes_than_are_checked_are_refused() {
    finds(
        one_device(),
        |plan| {
            for ordinal in 0..256 {
                let mut device = plan.machine.devices[d(0)].clone();
                (device.name, device.kind) = (format!("gpu{ordinal}"), gpu(ordinal));
                let device = plan.machine.devices.push(device);
                plan.programs[0].lanes.push(Lane { device, queue: Queue::Compute, steps: vec![] });
            }
        },
        &["program prefill has 257 lanes; at most 256 are checked: use fewer devices"],
    );
}

/// The loader checks each plan it reads: time must not grow with the square of the steps.
#[test]
fn a_hundred_thousand_steps_are_checked_in_seconds() {
    let mut plan = pipeline();
    let program = &mut plan.programs[0];
    let add = program.steps[named(program, "add")].clone();
    let mut last = program.output;
    for index in 0..100_000 {
        let lane = index % 2;
        let next = program.buffers.push(program.buffers[last].clone());
        let before = StepId::from_index(program.steps.len() - 1);
        let waits = smallvec![before];
        let step = Step {
            reads: smallvec![last; 2],
            writes: smallvec![next],
            frees: smallvec![last],
            waits,
            ..add.clone()
        };
        let step = program.steps.push(step);
        program.lanes[lane].steps.push(step);
        last = next;
    }
    program.output = last;
    let start = Instant::now();
    let found = check(&plan);
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    // Every other step computes on a device that its buffers are not on.
    assert_eq!(found.len(), 150_000);
}
