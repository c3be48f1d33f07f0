//! Memory of letters, and of what the host takes out of them.

use std::time::{Duration, Instant};

use ir::check::{check, memory};
use ir::letters::{FLAG_BYTES, OWN_PLACES_BYTES, SENDING_FLAGS_BYTES, home, letter_bytes};
use ir::machine::{Device, Link};
use ir::plan::Phase;
use ir::workspace::RunSizes;

use crate::plans::{d, gpu, gpus, on_gpu, one_device, pipeline, tensor_parallel};

#[test]
fn letters_count_with_the_node_that_a_gpu_exchanges_values_with() {
    let (nodes, plan) = (pipeline(), on_gpu(pipeline(), 0));
    // Three programs for one sequence at most.
    let steps = plan.programs[0].lanes[0].steps.len() as u64;
    let flags = 3 * (3 * FLAG_BYTES * steps + SENDING_FLAGS_BYTES);
    // Eight tokens of eight features.
    let sent = 8 * 8 * 4;
    assert_eq!(letter_bytes(&plan, d(0)), RunSizes::of(&plan).bytes() + flags + sent);
    assert_eq!(letter_bytes(&plan, d(1)), 0);
    let [before, now] = [&nodes, &plan].map(|plan| memory(plan)[d(1)]);
    assert_eq!(now.workspace_bytes - before.workspace_bytes, letter_bytes(&plan, d(0)));
    // The value that was taken out until it is copied, which may be that of each of three runs.
    let more = now.buffer_bytes - before.buffer_bytes;
    assert!((2 * sent..=3 * sent).contains(&more), "{more}");
}

#[test]
fn a_gpu_that_works_alone_leaves_its_logits_with_the_node_that_computes_nothing() {
    let mut plan = on_gpu(pipeline(), 0);
    for program in &mut plan.programs {
        program.lanes.remove(1);
        program.lanes[0].steps = program.steps.ids().collect();
        program.steps.rows_mut().iter_mut().for_each(|step| step.waits.clear());
        program.buffers.rows_mut().iter_mut().for_each(|buffer| buffer.device = d(0));
    }
    let rows = |program: &ir::plan::Program| {
        program.buffers[program.output].ty.bytes(program.max).next_multiple_of(256)
    };
    let logits = plan.programs.iter().map(rows).max().unwrap();
    let held = memory(&plan)[d(1)];
    assert_eq!(held.workspace_bytes, letter_bytes(&plan, d(0)));
    assert!(held.workspace_bytes > logits && held.buffer_bytes > 0);
    plan.programs.iter_mut().for_each(|program| program.lanes.clear());
    assert_eq!(letter_bytes(&plan, d(0)), 0);
}

#[test]
fn the_fastest_way_leads_home() {
    let mut plan = on_gpu(tensor_parallel(), 0);
    assert_eq!(home(&plan, d(0)), Some(d(1)));
    let near = plan.machine.devices[d(1)].clone();
    let far = plan.machine.devices.push(near);
    for (from, to) in [(d(0), far), (far, d(0))] {
        let mut link = plan.machine.links[0].clone();
        (link.from, link.to, link.bytes_per_sec) = (from, to, 2e10);
        plan.machine.links.push(link);
    }
    assert_eq!(home(&plan, d(0)), Some(far));
    plan.machine.links.last_mut().unwrap().bytes_per_sec = 1e9;
    assert_eq!(home(&plan, d(0)), Some(d(1)));
    assert_eq!(home(&on_gpu(one_device(), 0), d(0)), None);
    assert_eq!(home(&gpus(), d(0)), None);
}

/// The loader checks each plan it reads: time must not grow with the devices times the links.
#[test]
fn thousands_of_devices_are_checked_in_seconds() {
    let mut plan = on_gpu(pipeline(), 0);
    plan.machine.devices[d(0)].memory_bytes = 1 << 30;
    let (first, link) = (plan.machine.devices[d(1)].clone(), plan.machine.links[0].clone());
    for number in 1..=2000 {
        let node = Device { name: format!("node{number}"), ..first.clone() };
        let node = plan.machine.devices.push(node);
        let idle = Device { name: format!("gpu{number}"), kind: gpu(number), ..first.clone() };
        let idle = plan.machine.devices.push(idle);
        for (from, to) in [(idle, node), (node, idle)] {
            plan.machine.links.push(Link { from, to, ..link.clone() });
        }
    }
    let start = Instant::now();
    assert_eq!(check(&plan), []);
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
}

#[test]
fn what_gpus_may_exchange_without_the_host_is_counted_up_to_what_has_its_own_place() {
    let mut plan = gpus();
    let few = letter_bytes(&plan, d(0));
    for program in &mut plan.programs {
        program.max.tokens = 1 << 21;
    }
    let inputs = RunSizes::of(&plan).bytes();
    let many = letter_bytes(&plan, d(0)) - inputs;
    assert!(few < 1 << 20 && (OWN_PLACES_BYTES..OWN_PLACES_BYTES + (1 << 20)).contains(&many));
    // One GPU that shares work with a node knows; but decodes of fewer sequences may have places of their own.
    let mut plan = on_gpu(tensor_parallel(), 0);
    for program in &mut plan.programs {
        program.max.tokens = 1 << 22;
    }
    let inputs = RunSizes::of(&plan).bytes();
    plan.programs.retain(|program| program.phase == Phase::Decode);
    assert!(letter_bytes(&plan, d(0)) - inputs > OWN_PLACES_BYTES);
    plan.programs.iter_mut().for_each(|program| program.phase = Phase::Prefill);
    // Two terms of half the features.
    let pair = 2 * (4 << 22) * 4;
    let values = letter_bytes(&plan, d(0)) - inputs;
    assert!((pair..pair + (1 << 20)).contains(&values), "{values}");
}
