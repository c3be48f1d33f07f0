//! Why layers are where they are: what a better device lacks for them.

use std::collections::{BTreeMap, BTreeSet};

use compiler::Options;
use ir::graph::{Cause, Reason};
use ir::id::{DeviceId, Id as _, WeightId};
use ir::plan::{Action, Plan};
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
    let mut staying: BTreeMap<_, BTreeSet<WeightId>> = BTreeMap::new();
    for step in plan.programs[0].steps.rows() {
        let Action::Run(op) = &step.action else { continue };
        let away = op.weights().into_iter().filter(|&id| plan.weights[id].device.index() == 1);
        // Layers that lack as much have one cause.
        let layer = step.name.split('.').find(|part| part.parse::<u32>().is_ok());
        staying.entry((step.cause, layer)).or_default().extend(away);
    }
    let mut lacking = 0;
    for ((cause, _), weights) in staying {
        let Cause { reason: Reason::Memory { device, missing_bytes }, runner_up } =
            &plan.causes[cause]
        else {
            continue;
        };
        let bytes: u64 = weights.iter().map(|&id| plan.weight_bytes(&plan.weights[id])).sum();
        assert_eq!((device.index(), *missing_bytes), (0, bytes - free));
        assert!(runner_up.as_ref().is_some_and(|other| other.gap_nanos < 0), "{runner_up:?}");
        lacking += 1;
    }
    assert!(lacking > 0);
}
