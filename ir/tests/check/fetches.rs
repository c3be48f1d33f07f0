//! Weights that are fetched.

use ir::id::WeightId;
use ir::machine::DeviceKind;
use ir::plan::{Action, Program, Queue};

use crate::plans::{PANEL_BYTES, b, d, pipeline, streamed, w};
use crate::{findings, finds, finds_in_prefill, finds_in_step, named};

fn fetch<'a>(program: &'a mut Program, name: &str) -> (&'a mut WeightId, &'a mut u64) {
    let step = named(program, name);
    match &mut program.steps[step].action {
        Action::Fetch { weight, offset } => (weight, offset),
        Action::Run(_) | Action::Move { .. } => panic!("{name} fetches nothing"),
    }
}

#[test]
fn a_weight_that_is_not_fetched_is_foreign() {
    finds_in_step(
        streamed(),
        "first",
        |step| {
            let buffer = step.reads.pop().expect("it reads a fetched weight");
            step.frees.retain(|freed| *freed != buffer);
        },
        &[
            "s2 (first) of prefill computes with w1, which is on another device",
            "no step of prefill frees b1",
            "s9 (fetch of second) of prefill fetches over b1, which may still be read",
        ],
    );
}

#[test]
fn a_step_reads_the_weights_it_computes_with() {
    finds_in_step(
        streamed(),
        "experts",
        |step| step.reads.swap(3, 4),
        &[
            "s8 (experts) of prefill reads b7, which holds no weight that it computes with",
            "s8 (experts) of prefill reads b6, which holds no weight that it computes with",
        ],
    );
}

#[test]
fn a_step_reads_no_weight_that_it_has() {
    finds_in_step(
        streamed(),
        "router",
        |step| step.reads.push(b(1)),
        &[
            "s3 (router) of prefill reads b1, which holds no weight that it computes with",
            "s3 (router) of prefill touches b1 after its end",
        ],
    );
}

#[test]
fn another_weight_of_the_same_shape_is_another_weight() {
    finds_in_prefill(
        streamed(),
        |program| *fetch(program, "fetch of first").0 = w(6),
        &["s2 (first) of prefill reads b1, which holds no weight that it computes with"],
    );
}

#[test]
fn a_fetched_buffer_has_the_size_of_the_packed_weight() {
    finds_in_prefill(
        streamed(),
        |program| program.buffers[b(1)].ty.shape.truncate(1),
        &["s1 (fetch of first) of prefill: u8[1, 2048] and u8[1] where types must be the same"],
    );
}

#[test]
fn a_vector_is_not_fetched() {
    finds(
        streamed(),
        |plan| plan.weights[w(1)].shape.truncate(1),
        &[
            "w1 (weight1): a vector is held as bf16 instead of f32",
            "w1 (weight1): 1 sources for 8 rows",
            "w1 (weight1): a source of shape [8, 8] where [] is held",
            "s2 (first) of prefill reads b1, which holds no weight that it computes with",
            "s2 (first) of prefill computes with w1, which is on another device",
            "s1 (fetch of first) of prefill: a vector is fetched",
            "s2 (first) of prefill: w1 has shape [8] where a matrix is used",
            "s2 (first) of decode reads b1, which holds no weight that it computes with",
            "s2 (first) of decode computes with w1, which is on another device",
            "s1 (fetch of first) of decode: a vector is fetched",
            "s2 (first) of decode: w1 has shape [8] where a matrix is used",
        ],
    );
}

#[test]
fn only_what_a_numa_node_holds_is_fetched() {
    finds(
        streamed(),
        |plan| plan.weights[w(1)].device = d(0),
        &[
            "s1 (fetch of first) of prefill fetches w1, which no NUMA node holds",
            "s2 (first) of prefill reads b1, which holds no weight that it computes with",
            "s1 (fetch of first) of decode fetches w1, which no NUMA node holds",
            "s2 (first) of decode reads b1, which holds no weight that it computes with",
        ],
    );
}

#[test]
fn a_fetch_needs_a_link() {
    let mut plan = streamed();
    plan.machine.links.retain(|link| link.to != d(0));
    let found = findings(&plan);
    // Five weights are fetched in each of two programs.
    assert_eq!(found.len(), 10);
    assert_eq!(
        found[0],
        "s1 (fetch of first) of prefill moves from numa1 to gpu0, between which there is no link"
    );
}

#[test]
fn a_weight_is_not_fetched_over_one_that_is_still_read() {
    finds_in_step(
        streamed(),
        "fetch of second",
        |step| step.waits.clear(),
        &["s9 (fetch of second) of prefill fetches over b1, which may still be read"],
    );
}

#[test]
fn fetched_weights_may_not_overlap() {
    finds_in_prefill(
        streamed(),
        |program| *fetch(program, "fetch of down").1 -= PANEL_BYTES,
        &["s7 (fetch of down) of prefill fetches over b7, which may still be read"],
    );
}

#[test]
fn a_weight_begins_where_a_library_can_read_it() {
    finds_in_prefill(
        streamed(),
        |program| *fetch(program, "fetch of down").1 += 16,
        &["s7 (fetch of down) of prefill: it begins at byte 18448 of the window, which is no \
             multiple of 256"],
    );
}

#[test]
fn a_lost_wait_for_a_fetched_weight_is_a_race() {
    finds_in_step(
        streamed(),
        "first",
        |step| step.waits.clear(),
        &["s1 (fetch of first) of prefill and s2 (first) of prefill touch b1 in no fixed order"],
    );
}

#[test]
fn nothing_is_fetched_in_a_compute_queue() {
    let mut plan = streamed();
    plan.programs[0].lanes.swap(0, 1);
    plan.programs[0].lanes[0].queue = Queue::Compute;
    plan.programs[0].lanes[1].queue = Queue::Copy;
    let expected = "s1 (fetch of first) of prefill is in a compute queue, where it cannot run";
    assert!(findings(&plan).iter().any(|found| found == expected));
}

#[test]
fn a_numa_device_fetches_nothing() {
    let mut plan = streamed();
    plan.machine.devices[d(0)].kind = DeviceKind::Numa { node: 0, cpus: vec![0] };
    plan.programs.truncate(1);
    let found = findings(&plan);
    let is_queue = |found: &&String| found.ends_with("is in a copy queue, where it cannot run");
    assert_eq!(found.iter().filter(is_queue).count(), 5);
}

#[test]
fn packed_bytes_are_not_moved() {
    let mut plan = pipeline();
    let ty = plan.weights[w(0)].packed_type().expect("the table is a matrix");
    for buffer in [b(7), b(8)] {
        plan.programs[0].buffers[buffer].ty = ty.clone();
    }
    let expected = "s8 (transfer) of prefill: transfer d0 -> d1 of u8[1, 2048]";
    assert!(findings(&plan).iter().any(|found| found == expected));
}
