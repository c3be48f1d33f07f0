//! What is decided where the host of a GPU that is too small has several NUMA nodes.

use compiler::Options;
use ir::id::Id as _;
use ir::machine::Machine;
use ir::model::Model;
use ir::plan::Plan;
use tests::machines::{h200, sockets, two_sockets};
use tests::made_up::{LlamaShape, MadeUp};
use tests::rates;

const GIB: u64 = 1 << 30;

fn options() -> Options {
    Options { prefill_tokens: Some(2048), context: Some(4096), ..Options::default() }
}

fn compile(model: &Model, machine: &Machine, options: &Options) -> Plan {
    compiler::compile(model, machine, options, &mut |_, _| ()).expect("it fits")
}

/// Bytes of matrices that the programs multiply with, on each NUMA node.
fn matrix_bytes_on_nodes(plan: &Plan) -> Vec<u64> {
    let nodes = plan.machine.devices.ids().skip(1);
    let of_node = |node| {
        let weights = plan.weights.rows().iter().filter(|weight| weight.device == node);
        let matrices = weights.filter(|weight| !weight.name.contains("embed"));
        matrices.map(|weight| plan.weight_bytes(weight)).sum()
    };
    nodes.map(of_node).collect()
}

#[test]
fn two_sockets_compute_what_stays_at_the_same_time() {
    let model = MadeUp::llama(LlamaShape::LLAMA_8B).model();
    let decode = |machine| {
        let plan = compile(&model, &machine, &options());
        (rates(&plan).1, plan)
    };
    let (one, _) = decode(h200(8 * GIB));
    let (two, plan) = decode(two_sockets(8 * GIB));
    // One socket is helped by the GPU, which computes its own shards meanwhile.
    assert!(two > 1.4 * one, "{two} tokens/s on two sockets, {one} on one");
    let held = matrix_bytes_on_nodes(&plan);
    assert!(held[0] > 0 && held[0].abs_diff(held[1]) < held[0] / 10, "{held:?}");
    // Each has a shard of every layer that stays.
    let shards = |node: &str| {
        let on_node = plan.weights.rows().iter().filter(|weight| {
            weight.device == plan.machine.device(node).expect("it is there")
                && weight.name.contains(" (shard")
        });
        on_node.count()
    };
    assert!(shards("numa0") > 0);
    assert_eq!(shards("numa0"), shards("numa1"));
}

#[test]
fn two_sockets_compute_half_of_every_expert() {
    let options = Options { formats: vec!["q4".parse().expect("it is a format")], ..options() };
    let model = MadeUp::mixture().model();
    let plan = |machine| compile(&model, &machine, &options);
    let (one, two) = (plan(h200(3 * GIB)), plan(two_sockets(3 * GIB)));
    assert!(rates(&two).1 > 1.25 * rates(&one).1, "{} {}", rates(&two).1, rates(&one).1);
    let held = matrix_bytes_on_nodes(&two);
    assert!(held[0] > 0 && held[0].abs_diff(held[1]) < held[0] / 10, "{held:?}");
    // No node has a whole mixture.
    let on_nodes = two.weights.rows().iter().filter(|weight| weight.device.index() > 0);
    let stacks: Vec<_> = on_nodes.filter(|weight| weight.shape.len() == 3).collect();
    assert!(!stacks.is_empty() && stacks.iter().all(|stack| stack.name.contains(" (shard")));
}

#[test]
fn a_socket_without_memory_for_its_shards_leaves_them_to_the_other() {
    let model = MadeUp::llama(LlamaShape::LLAMA_8B).model();
    let mut machine = two_sockets(8 * GIB);
    let last = machine.devices.ids().last().expect("a socket");
    machine.devices[last].memory_bytes = GIB / 2;
    let plan = compile(&model, &machine, &options());
    let held = matrix_bytes_on_nodes(&plan);
    assert!(held[0] > GIB && held[1] < GIB / 2, "{held:?}");
    let alone = compile(&model, &h200(8 * GIB), &options());
    assert!(rates(&plan).1 >= 0.99 * rates(&alone).1);
}

#[test]
fn nodes_that_cannot_hold_all_that_may_stay_hold_some() {
    let model = MadeUp::llama(LlamaShape::LLAMA_8B).model();
    for count in 2..=4 {
        let with_nodes_of = |bytes: u64| {
            let mut machine = sockets(8 * GIB, count);
            for device in
                machine.devices.rows_mut().iter_mut().filter(|device| !device.kind.is_gpu())
            {
                device.memory_bytes = bytes / u64::from(count);
            }
            compile(&model, &machine, &options())
        };
        let (roomy, tight) = (with_nodes_of(64 * GIB), with_nodes_of(9 * GIB));
        let name = &tight.forecast.candidates[0].name;
        assert!(name.contains("beside gpu0"), "{name}");
        assert!(rates(&tight).0 > 0.7 * rates(&roomy).0, "{name}");
    }
}
