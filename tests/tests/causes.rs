//! Why layers are where they are: what a better device lacks for them.

use std::collections::{BTreeMap, BTreeSet};

use compiler::Options;
use ir::graph::{Cause, Reason};
use ir::id::{CacheId, DeviceId, Id as _, WeightId};
use ir::machine::{Device, Link, Machine};
use ir::plan::{Action, Plan};
use tests::first_decode;
use tests::machines::{gpu, h200, linked, numa};
use tests::made_up::{LlamaShape, MadeUp};
use tests::toys::Toy;

const GIB: u64 = 1 << 30;

#[test]
fn what_a_faster_device_lacks_is_the_cause_of_a_slower_place() {
    let toy = Toy { features: 1024, intermediate: 4096, ..Toy::llama() };
    let plan = |gpu_bytes| -> Plan {
        let machine = linked(vec![gpu(0, gpu_bytes), numa(0, GIB)]);
        let model = toy.model().expect("the toy is a model");
        compiler::compile(&model, &machine, &Options::default(), &mut |_, _| ()).expect("it fits")
    };
    let full = plan(GIB);
    let budget = &full.forecast.devices[DeviceId::from_index(0)];
    let needed = budget.needed_bytes();
    let plan = plan(needed * 3 / 4);
    let is_limited = |reason: &Reason| match reason {
        Reason::Memory { device, missing_bytes } => device.index() == 0 && *missing_bytes > 0,
        Reason::Fastest
        | Reason::Pinned { .. }
        | Reason::Requested
        | Reason::FollowsInput
        | Reason::Mismatch => false,
    };
    assert!(plan.causes.rows().iter().any(|cause| is_limited(&cause.reason)));
}

#[test]
fn what_stays_says_what_the_gpu_lacks_for_it() {
    let options = Options { prefill_tokens: Some(2048), plain_bf16: true, ..Options::default() };
    let model = MadeUp::llama(LlamaShape::LLAMA_8B).model();
    let plan = compiler::compile(&model, &h200(10 * GIB), &options, &mut |_, _| ());
    let plan = plan.expect("it fits");
    let budget = &plan.forecast.devices.rows()[0];
    let free = budget.capacity_bytes - budget.needed_bytes();
    let mut staying: BTreeMap<_, (BTreeSet<WeightId>, BTreeSet<CacheId>)> = BTreeMap::new();
    for step in plan.programs[0].steps.rows() {
        let Action::Run(op) = &step.action else { continue };
        let away = op.weights().into_iter().filter(|&id| plan.weights[id].device.index() == 1);
        let cached = op.cache().into_iter().filter(|&id| plan.caches[id].device.index() == 1);
        // Layers that lack as much have one cause.
        let layer = step.name.split('.').find(|part| part.parse::<u32>().is_ok());
        let (weights, caches) = staying.entry((step.cause, layer)).or_default();
        weights.extend(away);
        caches.extend(cached);
    }
    let mut lacking = 0;
    for ((cause, _), (weights, caches)) in staying {
        let Cause { reason: Reason::Memory { device, missing_bytes }, runner_up } =
            &plan.causes[cause]
        else {
            continue;
        };
        let of_weights: u64 = weights.iter().map(|&id| plan.weight_bytes(&plan.weights[id])).sum();
        let of_cache =
            |&id: &CacheId| plan.caches[id].bytes(plan.model.blocks, plan.model.block_tokens);
        let bytes = of_weights + caches.iter().map(of_cache).sum::<u64>();
        assert_eq!((device.index(), *missing_bytes), (0, bytes - free));
        assert!(runner_up.as_ref().is_some_and(|other| other.gap_nanos < 0), "{runner_up:?}");
        lacking += 1;
    }
    assert!(lacking > 0);
}

/// Causes speak of blocks one by one, and those of a plan are added up for people.
#[test]
fn what_more_memory_would_save_is_what_it_saves() {
    let options = Options { prefill_tokens: Some(2048), ..Options::default() };
    let model = MadeUp::llama(LlamaShape::LLAMA_8B).model();
    let compile = |machine: &Machine| {
        compiler::compile(&model, machine, &options, &mut |_, _| ()).expect("it fits")
    };
    let decode = |plan: &Plan| plan.forecast.programs[first_decode(plan)].nanos as f64;
    let least = decode(&compile(&h200(120 * GIB)));
    for (gib, nodes) in [(5, 1), (10, 1), (5, 2), (10, 2)] {
        let mut machine = h200(gib * GIB);
        if nodes == 2 {
            add_node(&mut machine);
        }
        let plan = compile(&machine);
        let mut savings: BTreeMap<&str, i64> = BTreeMap::new();
        for step in plan.programs[0].steps.rows() {
            let layer = step.name.split('.').find(|part| part.parse::<u32>().is_ok());
            if let (Some(layer), Some(other)) = (layer, &plan.causes[step.cause].runner_up)
                && other.devices[0].index() == 0
            {
                savings.insert(layer, -other.gap_nanos);
            }
        }
        let saving = savings.values().sum::<i64>() as f64;
        let real = decode(&plan) - least;
        assert!((0.7..1.2).contains(&(saving / real)), "{gib} GiB, {nodes}: {saving} of {real}");
    }
}

/// A second node like the first, linked as that is.
fn add_node(machine: &mut Machine) {
    let node = Device { name: "numa1".into(), ..machine.devices.rows()[1].clone() };
    let node = machine.devices.push(node);
    let [gpu, first] = [0, 1].map(DeviceId::from_index);
    let links = machine.links.clone();
    let of = |id: DeviceId| if id == first { node } else { id };
    machine.links.extend(links.iter().map(|link| Link {
        from: of(link.from),
        to: of(link.to),
        ..link.clone()
    }));
    let between = links.iter().find(|link| link.from == gpu).cloned().expect("the GPU has a link");
    machine.links.extend([(first, node), (node, first)].map(|(from, to)| Link {
        from,
        to,
        ..between
    }));
}
