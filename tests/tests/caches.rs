//! Which caches stay with hosts where a GPU has no room for them, and what plans that borrow them must keep to.
//!
//! The machine is an H200 with as much memory as a test gives it, and its host; the model has contexts of 128 Ki
//! tokens.

use std::collections::BTreeMap;

use compiler::Options;
use ir::check::{Violation, check};
use ir::id::{CacheId, DeviceId};
use ir::machine::Machine;
use ir::model::Model;
use ir::plan::{Action, Phase, Plan};
use ir::tensor::DType;
use ir::workspace::workspaces;
use tests::machines::{h200, two_sockets};
use tests::made_up::{LlamaShape, MadeUp};
use tests::{first_decode, rates};

const GIB: u64 = 1 << 30;

fn model() -> Model {
    Model { context: 128 << 10, ..MadeUp::llama(LlamaShape::LLAMA_8B).model() }
}

fn plan(machine: &Machine, context: u32, options: Options) -> Plan {
    let options = Options { context: Some(context), prefill_tokens: Some(2048), ..options };
    compiler::compile(&model(), machine, &options, &mut |_, _| ()).expect("it fits")
}

/// The device that attends to each cache in a program.
fn attending(plan: &Plan, program: usize) -> BTreeMap<CacheId, DeviceId> {
    let program = &plan.programs[program];
    let of_lane = |lane: &ir::plan::Lane| {
        let device = lane.device;
        let caches = lane.steps.iter().filter_map(|&step| match &program.steps[step].action {
            Action::Run(op) => op.cache(),
            Action::Move { .. } | Action::Fetch { .. } => None,
        });
        caches.map(|cache| (cache, device)).collect::<Vec<_>>()
    };
    program.lanes.iter().flat_map(of_lane).collect()
}

#[test]
fn prompts_are_fast_where_the_caches_of_a_context_do_not_fit_the_gpu() {
    // Keys and values take 128 KiB a token: 4, 8 and 16 GiB.
    for (memory, context) in [(5 * GIB, 32 << 10), (7 * GIB, 64 << 10), (13 * GIB, 128 << 10)] {
        let plan = plan(&h200(memory), context, Options::default());
        let (prefill, decode) = rates(&plan);
        assert!(prefill > 5000.0, "{context} tokens beside {memory} bytes: {prefill} tok/s");
        // Whole layers on the host would read all their weights, and the other half of the caches as well.
        assert!(decode > 5.0, "{context} tokens beside {memory} bytes: {decode} tok/s");
        let [in_prefill, in_decode] = [0, first_decode(&plan)].map(|at| attending(&plan, at));
        let gpu = plan.machine.device("gpu0").unwrap();
        for (id, cache) in plan.caches.iter() {
            assert_eq!((in_prefill[&id], in_decode[&id]), (gpu, cache.device), "{}", cache.name);
        }
        let borrowed = plan.caches.rows().iter().filter(|cache| cache.device != gpu).count();
        assert!(borrowed >= 8, "{borrowed} caches of {context} tokens are borrowed");
        let window = workspaces(&plan)[gpu].borrowed_bytes;
        assert_eq!(window, u64::from(context) * 8 * 128 * 2, "the keys of one layer");
    }
}

#[test]
fn caches_are_spread_over_the_nodes_that_have_room() {
    let plan = plan(&two_sockets(7 * GIB), 64 << 10, Options::default());
    for node in ["numa0", "numa1"] {
        let node = plan.machine.device(node).unwrap();
        let caches = plan.caches.rows().iter().filter(|cache| cache.device == node).count();
        assert!(caches >= 8, "{caches} caches on {node:?}");
    }
}

#[test]
fn bytes_are_attended_to_where_they_are() {
    let options = Options { kv_type: Some(DType::I8), ..Options::default() };
    let plan = plan(&h200(7 * GIB), 64 << 10, options);
    assert!(!plan.borrows());
    for program in 0..plan.programs.len() {
        for (cache, device) in attending(&plan, program) {
            assert_eq!(device, plan.caches[cache].device);
        }
    }
}

#[test]
fn only_gpus_borrow_only_floats_over_links_in_prefill() {
    let plan = plan(&h200(7 * GIB), 64 << 10, Options::default());
    assert_eq!(check(&plan), []);
    let found = |change: &dyn Fn(&mut Plan)| {
        let mut plan = plan.clone();
        change(&mut plan);
        check(&plan)
    };
    let is_foreign = |found: &Violation| matches!(found, Violation::ForeignCache { .. });
    let decoded = found(&|plan| plan.programs[0].phase = Phase::Decode);
    assert!(decoded.iter().any(is_foreign), "{decoded:?}");
    let bytes = found(&|plan| plan.caches.rows_mut().iter_mut().for_each(|c| c.dtype = DType::I8));
    assert!(bytes.iter().any(is_foreign), "{bytes:?}");
    let elsewhere = found(&|plan| {
        let gpu = plan.machine.device("gpu0").unwrap();
        plan.caches.rows_mut().iter_mut().for_each(|cache| cache.device = gpu);
    });
    assert!(elsewhere.iter().any(is_foreign), "{elsewhere:?}");
    let apart = found(&|plan| {
        let gpu = plan.machine.device("gpu0").unwrap();
        plan.machine.links.retain(|link| link.to != gpu);
    });
    assert!(apart.iter().any(|found| matches!(found, Violation::NoLink { .. })), "{apart:?}");
}
