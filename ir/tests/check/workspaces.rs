//! Scratch memory of GPUs.

use ir::machine::{Device, DeviceKind, Link};
use ir::op::{Norm, NormKind, Op};
use ir::plan::{Action, Plan};
use ir::tensor::Format;
use ir::workspace::{
    ATTENTION_SPLITS, EXCHANGE_HEADER_BYTES, Exchange, WORKSPACE_ALIGNMENT, Workspace,
    attention_splits, most_flagged_term_bytes, shortlist, workspace, workspaces,
};

use crate::plans::{d, gpu, gpus, one_device, streamed, tensor_parallel, w};

/// A plan of so many tokens a prefill.
fn with_tokens(mut plan: Plan, tokens: u32) -> Plan {
    plan.programs[0].max.tokens = tokens;
    plan
}

const LIBRARY_BYTES: u64 = 1000;

const LAYER_NORM: Norm =
    Norm { kind: NormKind::Layer, scale: None, bias: None, scale_offset: 0.0, epsilon: 1e-5 };

fn on_gpu(mut plan: Plan) -> Plan {
    plan.machine.devices[d(0)].kind = DeviceKind::Gpu {
        ordinal: 0,
        reserved_bytes: 0,
        library_bytes: LIBRARY_BYTES,
        launch_bytes: 0,
        has_warpgroups: false,
    };
    plan
}

#[test]
fn a_numa_node_has_no_workspace() {
    let plan = with_tokens(one_device(), 100);
    assert_eq!(workspaces(&plan)[d(0)], Workspace::default());
}

#[test]
fn a_gpu_without_a_lane_has_no_workspace() {
    let mut plan = streamed();
    plan.programs.iter_mut().for_each(|program| program.lanes.clear());
    assert_eq!(workspaces(&plan)[d(0)], Workspace::default());
}

#[test]
fn few_rows_are_multiplied_with_matrices_as_they_lie() {
    // Eight tokens of eight features; two rows reach the head, two experts of 16 features are used.
    let space = workspaces(&with_tokens(on_gpu(streamed()), 8))[d(0)];
    assert_eq!((space.input_bytes, space.matrix_bytes, space.library_bytes), (0, 0, 0));
    assert_eq!(space.inner_bytes, 8 * 2 * 16 * 4);
}

#[test]
fn few_rows_come_as_operands_to_large_matrices() {
    let input_bytes = |rows, outputs| {
        let mut plan = with_tokens(on_gpu(streamed()), rows);
        plan.programs[0].max.rows = rows;
        for weight in plan.weights.rows_mut().iter_mut().filter(|weight| weight.shape.len() == 2) {
            (weight.shape[0], weight.format) = (outputs, Format::Bf12);
        }
        workspaces(&plan)[d(0)].input_bytes
    };
    // Of eight columns each; operands have eight rows.
    assert_eq!([1, 2, 8].map(|rows| input_bytes(rows, 2 << 20)), [0, 8 * 8 * 2, 8 * 8 * 2]);
    assert_eq!([1, 2, 8].map(|rows| input_bytes(rows, 1 << 10)), [0, 0, 0]);
}

#[test]
fn many_rows_need_the_largest_packed_matrix_unpacked() {
    // The linears' matrices are 8 by 8, in bfloat16 and fetched; those of the router and the head are the GPU's own
    // floats.
    let plan = with_tokens(on_gpu(streamed()), 9);
    let space = workspaces(&plan)[d(0)];
    assert_eq!((space.matrix_bytes, space.library_bytes), (8 * 8 * 2, LIBRARY_BYTES));
    // As right operands of matrix instructions rows come in eights, and more than sixteen in thirty-twos.
    assert_eq!(space.input_bytes, 16 * 8 * 2);
    for (rows, operands) in [(17, 32), (40, 64), (70, 96), (130, 130)] {
        let bytes = operands * 8 * 2;
        let plan = with_tokens(on_gpu(streamed()), rows);
        assert_eq!(workspaces(&plan)[d(0)].input_bytes, bytes, "{rows} rows");
    }
    let mut quantised = plan;
    quantised.programs[0].max.rows = 9;
    let head = quantised.weights.ids().last().expect("there are weights");
    quantised.weights[head].format = Format::Q8;
    assert_eq!(workspaces(&quantised)[d(0)].matrix_bytes, 32 * 8 * 2);
    // So do those of blocks, of up to 512 rows.
    for (rows, operands) in [(9, 16), (17, 32), (40, 64), (70, 96), (130, 2 * 96), (513, 513)] {
        let bytes = operands * 8 * 2;
        let mut plan = with_tokens(quantised.clone(), rows);
        plan.programs[0].max.rows = rows;
        assert_eq!(workspaces(&plan)[d(0)].input_bytes, bytes, "{rows} rows");
    }
}

#[test]
fn up_to_128_rows_behind_a_layer_norm_are_f32() {
    let input_bytes = |tokens| {
        let mut plan = with_tokens(on_gpu(streamed()), tokens);
        for id in plan.programs[0].steps.ids().collect::<Vec<_>>() {
            if let Action::Run(Op::Linear(linear)) = &mut plan.programs[0].steps[id].action {
                linear.norm = Some(LAYER_NORM);
            }
        }
        workspaces(&plan)[d(0)].input_bytes
    };
    // The library takes more in 16 bits.
    for (rows, bytes) in
        [(9, 9 * 8 * 4), (128, 128 * 8 * 4), (200, 128 * 8 * 4), (300, 300 * 8 * 2)]
    {
        assert_eq!(input_bytes(rows), bytes, "{rows} rows");
    }
}

#[test]
fn without_the_library_f32_is_counted_and_parts_of_the_rows_in_16_bits() {
    let without = |rows| {
        let mut plan = with_tokens(on_gpu(streamed()), rows);
        for step in plan.programs[0].steps.rows_mut() {
            if let Action::Run(Op::Linear(linear)) = &mut step.action {
                linear.norm = None;
            }
        }
        workspace(&plan, d(0), 0)
    };
    let space = without(9);
    assert_eq!((space.matrix_bytes, space.library_bytes), (8 * 8 * 4, 0));
    // As operands, of which there are 128 at most.
    for (rows, parts) in [(9, 16), (16, 16), (17, 32), (40, 64), (70, 96), (130, 128)] {
        assert_eq!(without(rows).input_bytes, parts * 8 * 2, "{rows} rows");
    }
}

#[test]
fn floats_of_the_gpu_are_not_unpacked() {
    let space = workspaces(&with_tokens(on_gpu(one_device()), 9))[d(0)];
    assert_eq!((space.matrix_bytes, space.library_bytes), (0, LIBRARY_BYTES));
}

#[test]
fn terms_of_a_sum_over_gpus_have_a_place_where_they_come_through_the_host() {
    let mut plan = tensor_parallel();
    for (ordinal, device) in (0..).zip(plan.machine.devices.ids().collect::<Vec<_>>()) {
        plan.machine.devices[device].kind = DeviceKind::Gpu {
            ordinal,
            reserved_bytes: 0,
            library_bytes: LIBRARY_BYTES,
            launch_bytes: 0,
            has_warpgroups: false,
        };
    }
    // Nothing but sums is left to do.
    let mut sums = Vec::new();
    for (index, program) in plan.programs.iter().enumerate() {
        let steps = program.steps.iter().filter(|(_, step)| plan.is_peer_sum(program, step));
        sums.extend(steps.map(|(id, step)| (index, id, step.writes[0])));
    }
    assert!(!sums.is_empty());
    for (index, program) in plan.programs.iter_mut().enumerate() {
        for lane in &mut program.lanes {
            lane.steps.retain(|step| sums.iter().any(|sum| (index, *step) == (sum.0, sum.1)));
        }
    }
    let spaces = workspaces(&plan);
    for (index, _, written) in sums {
        let program = &plan.programs[index];
        let sum = &program.buffers[written];
        assert!(spaces[sum.device].exchange_bytes > 0);
        assert!(spaces[sum.device].inner_bytes >= sum.ty.bytes(program.max));
    }
}

#[test]
fn flags_take_no_longer_than_the_crossings_that_they_save() {
    let most = |bytes_per_sec| [2, 3, 8].map(|gpus| most_flagged_term_bytes(gpus, bytes_per_sec));
    // As much as inboxes have room for, which peers share.
    assert_eq!(most(1e12), [1 << 20, 512 << 10, 149_760]);
    // 175,000 bytes in 3.5 µs, of all peers; never less than linears send by themselves.
    assert_eq!(most(50e9), [174_848, 87_296, 64 << 10]);
    let exchange = Exchange::new(100 << 10, 2, 1e12);
    assert_eq!(exchange, Exchange { piece_bytes: 100 << 10, flagged_bytes: 200 << 10 });
    assert_eq!(exchange.bytes(3) - EXCHANGE_HEADER_BYTES, 8 * 2 * (300 << 10));
}

#[test]
fn links_of_gpus_that_sum_decide_what_passes_with_flags() {
    let flagged = |change: &dyn Fn(&mut Plan)| {
        let mut plan = gpus();
        plan.programs[0].max.tokens = 100_000;
        plan.machine.links.iter_mut().for_each(|link| link.bytes_per_sec = 1e12);
        change(&mut plan);
        Exchange::of(&plan).flagged_bytes
    };
    assert_eq!(flagged(&|_| ()), 2 << 20);
    // Another GPU has no part in it.
    let add_another = |plan: &mut Plan| {
        let other = Device { kind: gpu(2), ..plan.machine.devices[d(0)].clone() };
        let other = plan.machine.devices.push(other);
        plan.machine.links.push(Link::new(d(0), other, 1e9, 0.0));
    };
    assert_eq!(flagged(&add_another), 2 << 20);
    let slow_down = |plan: &mut Plan| plan.machine.links[0].bytes_per_sec = 1e9;
    assert_eq!(flagged(&slow_down), 128 << 10);
}

#[test]
fn decode_attention_leaves_a_term_for_each_part_of_the_context() {
    // Two heads of four features share one key head; one sequence.
    let space = workspaces(&on_gpu(one_device()))[d(0)];
    let splits = u64::from(attention_splits(1, 1));
    assert_eq!(splits, u64::from(ATTENTION_SPLITS));
    assert_eq!(space.partial_bytes, 2 * splits * 4 * 4 + 2 * splits * 2 * 4);
    // Queries of eight tokens.
    assert!(space.inner_bytes >= 8 * 2 * 4 * 4);
}

#[test]
fn a_run_is_told_tokens_rows_and_blocks() {
    let space = workspaces(&on_gpu(one_device()))[d(0)];
    // Eight tokens, four times; two rows; one sequence, its temperature and its 64 tokens in blocks of 16; the
    // number of the run: all short.
    assert_eq!(space.run_bytes, 9 * WORKSPACE_ALIGNMENT);
    // Four rotated features at 64 positions.
    assert_eq!(space.rotation_bytes, 64 * 4 * 4);
}

#[test]
fn lists_of_likely_tokens_are_for_as_many_sequences_as_a_run_has() {
    let mut plan = on_gpu(one_device());
    plan.model.vocabulary = shortlist::LISTED_LOGITS + 1;
    plan.programs[0].max_sequences = 100;
    let bytes = shortlist::bytes(100, plan.model.vocabulary);
    assert!(bytes > shortlist::bytes(plan.model.max_sequences, plan.model.vocabulary));
    assert_eq!(workspaces(&plan)[d(0)].inner_bytes, bytes);
}

#[test]
fn absurd_sizes_are_counted_to_the_end_of_the_scale() {
    let mut plan = with_tokens(streamed(), u32::MAX);
    plan.weights[w(2)].shape = vec![u32::MAX; 3];
    plan.model.context = u32::MAX;
    plan.model.block_tokens = 0;
    assert!(workspaces(&plan)[d(0)].bytes() > u64::from(u32::MAX));
}
