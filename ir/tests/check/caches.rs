//! Caches by themselves, and which steps append to them.

use ir::machine::Device;
use ir::op::Op;
use ir::plan::{Action, Cache, Plan, Step};
use ir::smallvec;
use ir::tensor::DType;

use crate::plans::{b, c, d, gpu, one_device, pipeline, tensor_parallel};
use crate::{findings, finds, named};

#[test]
fn a_cache_holds_floats() {
    finds(
        one_device(),
        |plan| plan.caches[c(0)].dtype = DType::I32,
        &["c0 (attention): 1 heads of 4 features in i32"],
    );
}

#[test]
fn a_gpu_caches_no_bytes() {
    finds(
        one_device(),
        |plan| {
            plan.caches[c(0)].dtype = DType::I8;
            plan.machine.devices[d(0)].kind = gpu(0);
        },
        &["c0 (attention): 1 heads of 4 features in i8"],
    );
}

#[test]
fn a_cache_is_one_that_kernels_store() {
    finds(
        one_device(),
        |plan| (plan.model.block_tokens, plan.model.blocks) = (8, 8),
        &["cache blocks have 8 tokens, which is no multiple of 16"],
    );
    let heads_of = |features: u32, dtype: DType| {
        move |plan: &mut Plan| {
            let cache = Cache { head_dim: features, dtype, ..plan.caches[c(0)].clone() };
            plan.caches[c(0)] = cache;
            // Nothing attends to it.
            plan.programs.clear();
        }
    };
    let problem = |features, dtype| {
        let mut plan = one_device();
        heads_of(features, dtype)(&mut plan);
        let found = findings(&plan);
        found.into_iter().find(|finding| finding.contains("(attention)"))
    };
    assert_eq!(
        problem(3, DType::Bf16).unwrap(),
        "c0 (attention): heads of 3 features in bf16, which NUMA nodes store 2 at a time"
    );
    assert_eq!(
        problem(6, DType::I8).unwrap(),
        "c0 (attention): heads of 6 features in i8, which NUMA nodes store 4 at a time"
    );
    for (features, dtype) in [(3, DType::F32), (3, DType::F16), (6, DType::Bf16), (8, DType::I8)] {
        assert_eq!(problem(features, dtype), None);
    }
}

#[test]
fn gpus_tell_the_keys_of_a_cache_apart() {
    // One head of four features.
    let with_blocks = |blocks: u32| {
        move |plan: &mut Plan| {
            plan.machine.devices[d(0)].memory_bytes = 1 << 50;
            (plan.model.blocks, plan.model.block_tokens) = (blocks, 1 << 10);
        }
    };
    let mut plan = one_device();
    finds(plan.clone(), with_blocks(1 << 20), &[]);
    plan.machine.devices[d(0)].kind = gpu(0);
    finds(plan.clone(), with_blocks((1 << 20) - 1), &[]);
    finds(
        plan,
        with_blocks(1 << 20),
        &["c0 (attention): 4294967296 keys, more than GPUs tell apart"],
    );
    let mut plan = one_device();
    plan.machine.devices.push(Device {
        name: "gpu0".into(),
        kind: gpu(0),
        ..plan.machine.devices[d(0)].clone()
    });
    plan.programs[0].lanes[0].device = d(1);
    with_blocks(1 << 20)(&mut plan);
    let borrowed = "c0 (attention): 4294967296 keys, more than GPUs tell apart";
    assert!(findings(&plan).contains(&borrowed.to_string()));
}

/// Lets the attention steps of the prefill append to those caches.
fn append_to(plan: &mut Plan, caches: [usize; 2]) {
    let mut caches = caches.map(c).into_iter();
    for step in plan.programs[0].steps.rows_mut() {
        if let Action::Run(Op::Attention(attention)) = &mut step.action {
            attention.cache = caches.next().expect("two steps attend");
        }
    }
}

#[test]
fn a_cache_has_one_writer() {
    finds(
        tensor_parallel(),
        |plan| append_to(plan, [0, 0]),
        &[
            "s10 (attention) of prefill appends to c0, to which another step appends",
            "no step of prefill appends to c1",
            "s10 (attention) of prefill computes with c0, which is on another device",
        ],
    );
}

/// Two layers of one device that attend.
fn two_layers() -> Plan {
    let mut plan = pipeline();
    for program in &mut plan.programs {
        let attention = named(program, "attention");
        let first = program.steps[attention].clone();
        let values = program.buffers.push(program.buffers[first.writes[0]].clone());
        let mut second = Step { name: "second".into(), writes: smallvec![values], ..first };
        second.frees.push(values);
        if let Action::Run(Op::Attention(attention)) = &mut second.action {
            attention.cache = c(1);
        }
        program.steps[attention].frees.clear();
        let second = program.steps.push(second);
        let place = program.lanes[0].steps.iter().position(|&step| step == attention);
        let place = place.expect("it is in the first lane");
        program.lanes[0].steps.insert(place + 1, second);
    }
    let second = Cache { name: "second".into(), ..plan.caches[c(0)].clone() };
    plan.caches.push(second);
    plan
}

#[test]
fn programs_share_the_caches_of_layers() {
    finds(
        two_layers(),
        |plan| append_to(plan, [1, 0]),
        &[
            "s5 (attention) of prefill appends to c1, which is another layer's",
            "s14 (second) of prefill appends to c0, which is another layer's",
        ],
    );
    finds(
        two_layers(),
        |plan| plan.caches[c(1)].name = "attention".into(),
        &[
            "c1 (attention): its device has another cache of the layer",
            "s14 (second) of prefill appends to c1, which is another layer's",
            "s14 (second) of decode appends to c1, which is another layer's",
        ],
    );
    finds(
        two_layers(),
        |plan| {
            let prefill = &mut plan.programs[0];
            let second = named(prefill, "second");
            prefill.steps[second].action = Action::Run(Op::Add);
            prefill.steps[second].reads = smallvec![b(2), b(2)];
        },
        &["no step of prefill appends to c1"],
    );
}
