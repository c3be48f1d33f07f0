//! Devices of what steps touch.

use ir::plan::{Lane, Program, Queue};

use crate::plans::{b, c, d, gpu, one_device, pipeline, s, tensor_parallel, w};
use crate::{findings, finds, finds_in_prefill, finds_in_step, named};

#[test]
fn a_step_reads_buffers_of_its_own_device() {
    finds_in_step(
        pipeline(),
        "router",
        |step| step.reads[0] = b(0),
        &[
            "s9 (router) of prefill touches b0, which is on another device",
            "s9 (router) of prefill touches b0 after its end",
        ],
    );
}

#[test]
fn a_transfer_arrives_where_it_goes() {
    finds(
        pipeline(),
        |plan| plan.programs[0].buffers[b(8)].device = d(0),
        &[
            "s8 (transfer) of prefill touches b8, which is on another device",
            "s9 (router) of prefill touches b8, which is on another device",
            "s11 (experts) of prefill touches b8, which is on another device",
        ],
    );
}

#[test]
fn the_receiver_drives_a_transfer() {
    finds_in_prefill(
        pipeline(),
        |program| {
            // It becomes the last step of the sender.
            program.lanes[1].steps.remove(0);
            program.lanes[0].steps.push(s(8));
            program.steps[s(9)].waits.push(s(8));
        },
        &["s8 (transfer) of prefill touches b8, which is on another device"],
    );
}

#[test]
fn nothing_is_broadcast_to_where_it_is() {
    let mut plan = tensor_parallel();
    plan.programs.truncate(1);
    let program = &mut plan.programs[0];
    let broadcast = named(program, "x");
    program.lanes[1].steps.retain(|&step| step != broadcast);
    program.lanes[0].steps.insert(1, broadcast);
    let expected = "s1 (x) of prefill: broadcast d0 goes nowhere";
    assert!(findings(&plan).contains(&expected.to_string()), "{:?}", findings(&plan));
}

#[test]
fn a_step_computes_with_weights_of_its_own_device() {
    finds(
        pipeline(),
        |plan| plan.weights[w(6)].device = d(0),
        &[
            "s9 (router) of prefill computes with w6, which is on another device",
            "s9 (router) of decode computes with w6, which is on another device",
        ],
    );
}

#[test]
fn a_step_computes_with_caches_of_its_own_device() {
    finds(
        pipeline(),
        |plan| plan.caches[c(0)].device = d(1),
        &[
            "s5 (attention) of prefill computes with c0, which is on another device",
            "s5 (attention) of decode computes with c0, which is on another device",
        ],
    );
}

#[test]
fn a_move_needs_a_link() {
    finds(
        pipeline(),
        |plan| plan.machine.links.retain(|link| link.from != d(0)),
        &[
            "s8 (transfer) of prefill moves from numa0 to numa1, between which there is no link",
            "s8 (transfer) of decode moves from numa0 to numa1, between which there is no link",
        ],
    );
}

#[test]
fn members_of_a_sum_need_links_to_each_other() {
    finds(
        tensor_parallel(),
        |plan| plan.machine.links.retain(|link| link.from != d(1)),
        &[
            "s12 (o) of prefill moves from numa1 to numa0, between which there is no link",
            "s14 (scatter) of prefill moves from numa1 to numa0, between which there is no link",
            "s16 (gather) of prefill moves from numa1 to numa0, between which there is no link",
            "s12 (o) of decode moves from numa1 to numa0, between which there is no link",
            "s14 (scatter) of decode moves from numa1 to numa0, between which there is no link",
            "s16 (gather) of decode moves from numa1 to numa0, between which there is no link",
        ],
    );
}

/// Gives the last step of the first lane a copy queue of its own.
fn copy_last(program: &mut Program) {
    let step = program.lanes[0].steps.pop().expect("the lane has steps");
    let before = *program.lanes[0].steps.last().expect("the lane has more steps");
    program.steps[step].waits.push(before);
    let device = program.lanes[0].device;
    program.lanes.push(Lane { device, queue: Queue::Copy, steps: vec![step] });
}

#[test]
fn nothing_computes_in_a_copy_queue() {
    finds(
        one_device(),
        |plan| {
            plan.machine.devices[d(0)].kind = gpu(0);
            copy_last(&mut plan.programs[0]);
        },
        &["s12 (head) of prefill is in a copy queue, where it cannot run"],
    );
}

/// Gives the transfer a copy queue of its own.
fn copy_transfer(program: &mut Program) {
    let device = program.lanes[1].device;
    let steps = vec![program.lanes[1].steps.remove(0)];
    program.steps[s(9)].waits.extend_from_slice(&steps);
    program.lanes.push(Lane { device, queue: Queue::Copy, steps });
}

#[test]
fn nothing_is_moved_in_a_copy_queue() {
    let expected = &["s8 (transfer) of prefill is in a copy queue, where it cannot run"];
    finds_in_prefill(pipeline(), copy_transfer, expected);
    let mut plan = pipeline();
    plan.machine.devices[d(1)].kind = gpu(0);
    finds_in_prefill(plan, copy_transfer, expected);
}

#[test]
fn a_copy_queue_fetches_something() {
    finds_in_prefill(
        one_device(),
        |program| {
            let device = program.lanes[0].device;
            program.lanes.push(Lane { device, queue: Queue::Copy, steps: Vec::new() });
        },
        &["lane 1 of prefill is a copy queue in which nothing is fetched"],
    );
}
