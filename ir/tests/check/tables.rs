//! Devices, limits, weights and ropes by themselves; ids that name nothing.

use ir::forecast::Candidate;
use ir::graph::{Cause, Reason, RunnerUp};
use ir::id::{CauseId, FileId, Id as _, RopeId};
use ir::machine::DeviceKind;
use ir::op::{Frequencies, Op};
use ir::plan::{Lane, Plan, Queue};
use ir::tensor::{DType, Format};
use ir::weight::Source;

use crate::plans::{b, c, d, gpu, gpus, one_device, pipeline, s, w};
use crate::{findings, finds, finds_in_op, finds_in_prefill, finds_in_step};

#[test]
fn devices_have_names_of_their_own() {
    finds(
        pipeline(),
        |plan| plan.machine.devices[d(1)].name = "numa0".into(),
        &["two devices are called \"numa0\""],
    );
}

#[test]
fn programs_have_names_of_their_own() {
    finds(
        pipeline(),
        |plan| plan.programs[1].name = "prefill".into(),
        &["two programs are called \"prefill\""],
    );
}

#[test]
fn a_numa_device_has_processors() {
    finds(
        pipeline(),
        |plan| {
            plan.machine.devices[d(1)].kind = DeviceKind::Numa { node: 0, cpus: vec![] };
        },
        &["numa1 has no processors to run on"],
    );
}

#[test]
fn a_numa_device_has_each_processor_once() {
    let on = |cpus: Vec<u32>| {
        move |plan: &mut Plan| plan.machine.devices[d(1)].kind = DeviceKind::Numa { node: 0, cpus }
    };
    finds(pipeline(), on(vec![3, 4, 3]), &["cpus of numa1 has processor 3 twice"]);
    // Parts of a node that has fewer cores than there are parts share them.
    finds(pipeline(), on(vec![0]), &[]);
}

#[test]
fn gpus_have_ordinals_of_their_own() {
    finds(
        gpus(),
        |plan| plan.machine.devices[d(1)].kind = gpu(0),
        &["numa0 and numa1 have the same ordinal 0"],
    );
}

#[test]
fn limits_are_not_zero() {
    finds(one_device(), |plan| plan.model.max_sequences = 0, &["the number of sequences is empty"]);
    finds(
        one_device(),
        |plan| plan.model.block_tokens = 0,
        &["the cache block is empty", "caches of 0 tokens do not hold one sequence of 64"],
    );
    finds(one_device(), |plan| plan.model.context = 0, &["the context is empty"]);
}

#[test]
fn caches_hold_one_sequence() {
    finds(
        one_device(),
        |plan| plan.model.blocks = 3,
        &["caches of 48 tokens do not hold one sequence of 64"],
    );
}

#[test]
fn prefill_comes_first() {
    finds(
        one_device(),
        |plan| plan.programs.reverse(),
        &[
            "program decode: a decode that is first",
            "program prefill: a prefill that comes after a decode",
        ],
    );
}

#[test]
fn there_is_a_decode_program() {
    finds(
        one_device(),
        |plan| plan.programs.truncate(1),
        &["a plan has a prefill and at least one decode program"],
    );
    finds(
        one_device(),
        |plan| plan.programs.clear(),
        &["a plan has a prefill and at least one decode program"],
    );
}

#[test]
fn prefills_fall_in_tokens() {
    let with_another = |fewer: u32| {
        move |plan: &mut Plan| {
            let mut short = plan.programs[0].clone();
            short.name = "short".into();
            short.max.tokens -= fewer;
            short.max.rows = short.max.rows.min(short.max.tokens);
            plan.programs.insert(1, short);
        }
    };
    finds(one_device(), with_another(0), &["program short: prefills do not fall in tokens"]);
    let mut plan = one_device();
    with_another(1)(&mut plan);
    assert_eq!(findings(&plan), [""; 0]);
}

#[test]
fn decodes_rise_in_sequences() {
    finds(
        one_device(),
        |plan| {
            let mut again = plan.programs[1].clone();
            again.name = "again".into();
            plan.programs.push(again);
        },
        &["program again: decodes do not rise in sequences"],
    );
}

#[test]
fn the_last_decode_takes_all_sequences() {
    finds(
        one_device(),
        |plan| plan.model.max_sequences = 2,
        &["program decode: it takes 1 sequences and comes last, but there may be 2"],
    );
}

#[test]
fn extents_suit_the_phase() {
    finds_in_prefill(
        one_device(),
        |program| program.max.rows = 9,
        &["program prefill: it returns more rows than it is fed tokens"],
    );
    finds_in_prefill(
        one_device(),
        |program| program.max.rows = 0,
        &["program prefill: its extent is empty"],
    );
    finds(
        one_device(),
        |plan| {
            plan.programs[1].max_sequences = 2;
        },
        &["program decode: it has fewer tokens or rows than sequences"],
    );
}

#[test]
fn a_rope_turns_pairs_each_at_its_frequency() {
    let r = RopeId::from_index(0);
    finds(one_device(), |plan| plan.ropes[r].dims = 3, &["r0: it turns 3 elements in pairs"]);
    finds(one_device(), |plan| plan.ropes[r].dims = 2, &["r0: 2 frequencies for 1 pairs"]);
    finds(
        one_device(),
        |plan| {
            plan.ropes[r].frequencies = Frequencies::Switched {
                short: vec![1.0; 2],
                long: vec![1.0; 3],
                original_tokens: 8,
            };
        },
        &["r0: 3 frequencies for 2 pairs"],
    );
    finds(
        one_device(),
        |plan| {
            plan.ropes[r].frequencies =
                Frequencies::Dynamic { base: 1e4, factor: 2.0, original_tokens: 0 };
        },
        &["r0: base 10000 cannot grow by 2 beyond 0 tokens"],
    );
    // Beyond twice the original tokens that would be a power of a negative number.
    finds(
        one_device(),
        |plan| {
            plan.ropes[r].dims = 4;
            plan.ropes[r].frequencies =
                Frequencies::Dynamic { base: 1e4, factor: -5.0, original_tokens: 8 };
        },
        &["r0: base 10000 cannot grow by -5 beyond 8 tokens"],
    );
    finds(one_device(), |plan| plan.ropes[r].magnitude = f32::NAN, &["r0: its magnitude is NaN"]);
    finds(
        one_device(),
        |plan| plan.ropes[r].frequencies = Frequencies::Fixed(vec![1.0, f32::INFINITY]),
        &["r0: a pair turns by inf at each position"],
    );
}

#[test]
fn a_rope_fits_into_a_head() {
    finds(
        one_device(),
        |plan| {
            let rope = &mut plan.ropes[RopeId::from_index(0)];
            rope.dims = 6;
            rope.frequencies = Frequencies::Fixed(vec![1.0; 3]);
        },
        &[
            "s5 (attention) of prefill: r0 turns 6 of 4 features",
            "s5 (attention) of decode: r0 turns 6 of 4 features",
        ],
    );
}

#[test]
fn vectors_are_held_in_full() {
    finds(
        one_device(),
        |plan| plan.weights[w(1)].format = Format::Bf16,
        &["w1 (weight1): a vector is held as bf16 instead of f32"],
    );
}

#[test]
fn only_packed_matrices_of_gpus_are_held_twice() {
    let gpu = gpu(0);
    finds(
        one_device(),
        |plan| {
            plan.machine.devices[d(0)].kind = gpu.clone();
            plan.weights[w(1)].also_unpacked = true;
        },
        &["w1 (weight1): only packed matrices of GPUs are held unpacked as well"],
    );
}

#[test]
fn a_weight_lies_inside_its_file() {
    finds(
        one_device(),
        |plan| plan.weights[w(9)].sources[0].offset = (1 << 20) - 1023,
        &["w9 (weight9): bytes 1047553..1048577 of model, which has 1048576"],
    );
    finds(
        one_device(),
        |plan| plan.weights[w(9)].sources[0].axes[0][0].stride = u64::MAX,
        &["w9 (weight9): bytes 16..18446744073709551615 of model, which has 1048576"],
    );
}

#[test]
fn sources_have_the_shape_of_the_weight() {
    finds(
        one_device(),
        |plan| plan.weights[w(2)].sources[0].axes[0][0].size = 4,
        &["w2 (weight2): a source of shape [4, 8] where [8, 8] is held"],
    );
    finds(
        one_device(),
        |plan| plan.weights[w(2)].sources[0].axes[0].clear(),
        &[
            "w2 (weight2): an axis of a source has one or two strides",
            "w2 (weight2): a source of shape [1, 8] where [8, 8] is held",
        ],
    );
    finds(
        one_device(),
        |plan| plan.weights[w(2)].sources.clear(),
        &["w2 (weight2): it has no source"],
    );
    finds(
        one_device(),
        |plan| {
            let source = Source::contiguous(FileId::from_index(0), DType::F32, 0, &[16, 8]);
            plan.weights[w(7)].sources = vec![source; 3];
        },
        &["w7 (weight7): 3 sources for 4 rows"],
    );
}

#[test]
fn a_stack_may_come_from_one_source_a_row() {
    finds(
        one_device(),
        |plan| {
            let source = Source::contiguous(FileId::from_index(0), DType::F32, 0, &[16, 8]);
            plan.weights[w(7)].sources = vec![source; 4];
        },
        &[],
    );
}

#[test]
fn a_weight_has_one_to_three_axes() {
    finds(
        one_device(),
        |plan| {
            plan.weights[w(1)].shape.clear();
            plan.weights[w(1)].sources[0].axes.clear();
        },
        &[
            "w1 (weight1): a weight of shape []",
            "s1 (norm) of prefill: w1 has shape [] instead of [8]",
            "s1 (norm) of decode: w1 has shape [] instead of [8]",
        ],
    );
}

mod dangling {
    use super::*;

    #[test]
    fn every_id_names_a_row() {
        let far = 1_000_000;
        finds(
            one_device(),
            |plan| plan.weights[w(3)].device = d(far),
            &[
                "w3 (weight3) names d1000000, which does not exist",
                "s3 (k) of prefill computes with w3, which is on another device",
                "s3 (k) of decode computes with w3, which is on another device",
            ],
        );
        finds(
            one_device(),
            |plan| plan.weights[w(3)].sources[0].file = FileId::from_index(far),
            &["w3 (weight3) names f1000000, which does not exist"],
        );
        finds(
            one_device(),
            |plan| plan.caches[c(0)].device = d(far),
            &[
                "c0 (attention) names d1000000, which does not exist",
                "s5 (attention) of prefill computes with c0, which is on another device",
                "s5 (attention) of decode computes with c0, which is on another device",
            ],
        );
        finds(
            pipeline(),
            |plan| plan.machine.links[0].to = d(far),
            &[
                "link 0 names d1000000, which does not exist",
                "s8 (transfer) of prefill moves from numa0 to numa1, between which there is no link",
                "s8 (transfer) of decode moves from numa0 to numa1, between which there is no link",
            ],
        );
        finds(
            one_device(),
            |plan| {
                plan.causes.push(Cause {
                    reason: Reason::Memory { device: d(far), missing_bytes: 1 },
                    runner_up: Some(RunnerUp { devices: vec![d(far)], gap_nanos: 0 }),
                });
            },
            &[
                "cause y1 names d1000000, which does not exist",
                "cause y1 names d1000000, which does not exist",
            ],
        );
        finds(
            one_device(),
            |plan| {
                plan.forecast.candidates.push(Candidate {
                    name: "all on numa7".into(),
                    prefill_nanos: None,
                    decode_nanos: None,
                    missing: Some((d(far), 1)),
                });
            },
            &["candidate \"all on numa7\" names d1000000, which does not exist"],
        );
        finds_in_prefill(
            one_device(),
            |program| program.buffers[b(2)].device = d(far),
            &[
                "b2 of prefill names d1000000, which does not exist",
                "s2 (q) of prefill touches b2, which is on another device",
                "s5 (attention) of prefill touches b2, which is on another device",
            ],
        );
        finds_in_prefill(
            one_device(),
            |program| {
                program.lanes.push(Lane { device: d(far), queue: Queue::Compute, steps: vec![] });
            },
            &["lane 1 of prefill names d1000000, which does not exist"],
        );
        finds_in_prefill(
            one_device(),
            |program| program.lanes[0].steps.push(s(far)),
            &["lane 0 of prefill names s1000000, which does not exist"],
        );
        finds_in_prefill(
            one_device(),
            |program| program.output = b(far),
            &[
                "output of prefill names b1000000, which does not exist",
                "no step of prefill frees b13",
            ],
        );
        finds_in_step(
            one_device(),
            "k",
            |step| step.reads[0] = b(far),
            &["s3 (k) of prefill names b1000000, which does not exist"],
        );
        finds_in_step(
            one_device(),
            "k",
            |step| step.writes[0] = b(far),
            &[
                "s3 (k) of prefill names b1000000, which does not exist",
                "no step of prefill writes b3",
            ],
        );
        finds_in_step(
            one_device(),
            "k",
            |step| step.frees.push(b(far)),
            &["s3 (k) of prefill names b1000000, which does not exist"],
        );
        finds_in_step(
            one_device(),
            "k",
            |step| step.waits.push(s(far)),
            &["s3 (k) of prefill names s1000000, which does not exist"],
        );
        finds_in_step(
            one_device(),
            "k",
            |step| step.cause = CauseId::from_index(far),
            &["s3 (k) of prefill names y1000000, which does not exist"],
        );
        finds_in_op(
            one_device(),
            "k",
            |op| *op = op.clone().map_weights(|_| w(far)),
            &["s3 (k) of prefill names w1000000, which does not exist"],
        );
        finds_in_op(
            one_device(),
            "attention",
            |op| {
                if let Op::Attention(attention) = op {
                    attention.cache = c(far);
                    attention.rope = Some(RopeId::from_index(far));
                }
            },
            &[
                "s5 (attention) of prefill names c1000000, which does not exist",
                "s5 (attention) of prefill names r1000000, which does not exist",
                "no step of prefill appends to c0",
            ],
        );
    }
}
