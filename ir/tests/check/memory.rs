//! Peak bytes.

use std::collections::{BTreeMap, BTreeSet};

use ir::check::memory;
use ir::id::{BufferId, DeviceId};
use ir::letters;
use ir::plan::{Buffer, Plan};
use ir::smallvec;
use ir::tensor::TensorType;
use proptest::collection::vec;
use proptest::{prop_assert, proptest};

use crate::finds;
use crate::plans::{
    PANEL_BYTES, d, node_before_gpus, on_gpu, one_device, pipeline, s, streamed, tensor_parallel,
};

/// Bytes of buffers at a time, of eight tokens of `features` each.
fn rows(features: u64) -> u64 {
    8 * features * 4
}

#[test]
fn a_device_holds_no_more_than_it_has() {
    finds(
        one_device(),
        |plan| plan.machine.devices[d(0)].memory_bytes = 5000,
        &["numa0 would hold 101152 bytes and has 5000"],
    );
}

#[test]
fn the_peak_of_one_lane_is_exact() {
    // The residual, the normed input, q, k and v; and the logits of the run before until the caller takes them.
    let plan = one_device();
    let (program, held) = (&plan.programs[0], memory(&plan)[d(0)].buffer_bytes);
    let logits = program.buffers[program.output].ty.bytes(program.max);
    assert_eq!(held, rows(8 + 8 + 8 + 4 + 4) + logits);
}

#[test]
fn a_node_holds_what_its_kernels_need_for_one_step() {
    let mut plan = one_device();
    let few = memory(&plan)[d(0)].workspace_bytes;
    for program in &mut plan.programs {
        program.max.tokens *= 2;
    }
    let more = memory(&plan)[d(0)].workspace_bytes;
    assert!(0 < few && few < more && more <= 2 * few, "{few} {more}");
    plan.programs.iter_mut().for_each(|program| program.lanes.clear());
    assert_eq!(memory(&plan)[d(0)].workspace_bytes, 0);
}

#[test]
fn a_buffer_counts_until_the_reader_of_another_device_is_done() {
    let mut plan = pipeline();
    // What the first device has sent may be there while it works on: here one step more, and on the two runs that may
    // follow.
    let before = memory(&plan)[d(0)].buffer_bytes;
    assert_eq!(before, rows(8 + 8 + 8 + 4 + 4) + 2 * rows(8));
    for program in &mut plan.programs {
        let buffer = program.buffers.push(Buffer { device: d(0), ty: TensorType::activation(100) });
        let mut step = program.steps[s(0)].clone();
        step.writes = smallvec![buffer];
        step.frees = smallvec![buffer];
        let step = program.steps.push(step);
        program.lanes[0].steps.push(step);
    }
    assert_eq!(memory(&plan)[d(0)].buffer_bytes, rows(8 + 100) + 2 * rows(8));
}

#[test]
fn fetched_weights_take_their_window_and_no_buffers() {
    let held = memory(&streamed());
    // One panel of the linears, four of each stack of the mixture.
    assert_eq!(held[d(0)].fetch_bytes, (1 + 3 * 4) * PANEL_BYTES);
    assert_eq!(held[d(1)].fetch_bytes, 0);
    // The mixture's input, ids, weights and result, each at a multiple of 256 bytes.
    assert_eq!(held[d(0)].buffer_bytes, 4 * 256);
}

#[test]
fn the_window_counts_against_the_capacity() {
    finds(
        streamed(),
        |plan| plan.machine.devices[d(0)].memory_bytes = 28_000,
        &["gpu0 would hold 33280 bytes and has 28000"],
    );
}

proptest! {
    #[test]
    fn no_interleaving_of_lanes_holds_more_than_the_bound(choices in vec(0usize..64, 64)) {
        for plan in interleaved().into_iter().chain([streamed()]) {
            let bound = memory(&plan);
            for (device, bytes) in held_by_runs(&plan, 1, &choices) {
                let bound = bound[device].buffer_bytes + bound[device].fetch_bytes;
                prop_assert!(bytes <= bound, "{device} holds {bytes}");
            }
        }
    }

    #[test]
    fn no_runs_under_way_hold_more_than_the_bound(choices in vec(0usize..64, 200)) {
        for plan in interleaved() {
            let bound = memory(&plan);
            // Buffers of a GPU have one place for all runs.
            let is_node = |device: DeviceId| !plan.machine.devices[device].kind.is_gpu();
            let held = held_by_runs(&plan, 5, &choices).into_iter();
            for (device, bytes) in held.filter(|(device, _)| is_node(*device)) {
                prop_assert!(bytes <= bound[device].buffer_bytes, "{device} holds {bytes}");
            }
        }
    }
}

/// Plans whose lanes may go on in any order, of nodes alone and beside GPUs.
fn interleaved() -> Vec<Plan> {
    vec![
        one_device(),
        pipeline(),
        tensor_parallel(),
        node_before_gpus(),
        on_gpu(pipeline(), 0),
        on_gpu(pipeline(), 1),
        on_gpu(tensor_parallel(), 0),
    ]
}

#[test]
fn what_gpus_send_each_other_counts_while_they_run() {
    let plan = node_before_gpus();
    let sent = |gpu| letters::sent(&plan, &plan.programs[0], d(gpu)).len();
    assert_eq!(sent(1) + sent(2), 9);
    // What the node embeds may be there of this run and three others, and so may the output; of the values that pass
    // between the GPUs, two at a time.
    assert_eq!(memory(&plan)[d(0)].buffer_bytes, (4 + 3 + 2) * rows(8));
}

/// The most bytes each device holds in so many runs of the first program, of which no more are under way than may be,
/// when `choices` say which of the lanes that can go on does. What a GPU sends its letters' home holds as well.
fn held_by_runs(plan: &Plan, runs: usize, choices: &[usize]) -> BTreeMap<DeviceId, u64> {
    let program = &plan.programs[0];
    let most_under_way = plan.queues().len() + 1;
    let mut done = vec![BTreeSet::new(); runs];
    let mut next = vec![(0, 0); program.lanes.len()];
    let (mut now, mut most, mut taken) = (BTreeMap::new(), BTreeMap::new(), 0);
    let homes = letters::homes(plan);
    let sent = homes.iter().flat_map(|(&gpu, &home)| {
        letters::sent(plan, program, gpu).into_iter().map(move |buffer| (buffer, home))
    });
    let sent: BTreeMap<BufferId, DeviceId> = sent.collect();
    let sizes = |id: BufferId| {
        let buffer = &program.buffers[id];
        let bytes = buffer.ty.bytes(program.max);
        [Some(buffer.device), sent.get(&id).copied()]
            .into_iter()
            .flatten()
            .map(move |device| (device, bytes))
    };
    for choice in choices.iter().cycle().take(runs * program.steps.len()) {
        let ready: Vec<usize> = (0..next.len())
            .filter(|&lane| {
                let (run, position) = next[lane];
                let step = program.lanes[lane].steps.get(position);
                let is_started = run < runs.min(taken + most_under_way);
                is_started
                    && step.is_some_and(|&step| {
                        program.steps[step].waits.iter().all(|wait| done[run].contains(wait))
                    })
            })
            .collect();
        let lane = ready[choice % ready.len()];
        let (run, position) = next[lane];
        let id = program.lanes[lane].steps[position];
        let is_last = position + 1 == program.lanes[lane].steps.len();
        next[lane] = if is_last { (run + 1, 0) } else { (run, position + 1) };
        done[run].insert(id);
        for (device, bytes) in program.steps[id].writes.iter().flat_map(|&buffer| sizes(buffer)) {
            let now = now.entry(device).or_insert(0u64);
            *now += bytes;
            let most = most.entry(device).or_insert(0);
            *most = (*most).max(*now);
        }
        for (device, bytes) in program.steps[id].frees.iter().flat_map(|&buffer| sizes(buffer)) {
            *now.entry(device).or_default() -= bytes;
        }
        // The caller takes what the oldest run has made when that is over.
        while taken < runs && done[taken].len() == program.steps.len() {
            for (device, bytes) in sizes(program.output) {
                *now.entry(device).or_default() -= bytes;
            }
            taken += 1;
        }
    }
    assert_eq!(taken, runs, "every run comes to its end");
    most
}

#[test]
fn sizes_beyond_counting_are_refused() {
    finds(
        one_device(),
        |plan| {
            plan.programs[0].max.tokens = u32::MAX;
            plan.model.blocks = u32::MAX;
            plan.caches.rows_mut()[0].kv_heads = u32::MAX;
            plan.caches.rows_mut()[0].head_dim = u32::MAX;
        },
        &[
            "s5 (attention) of prefill: c0 holds 4294967295 heads of 4294967295 features, not 1 of 4",
            "s5 (attention) of decode: c0 holds 4294967295 heads of 4294967295 features, not 1 of 4",
            "numa0 would hold 18446744073709551615 bytes and has 1048576",
        ],
    );
}
