//! Whole plans of toys on small machines, as people read them. A change that moves a plan shows here.

use compiler::Options;
use compiler::options::{Request, parse_pipeline, parse_tensor_parallel};
use ir::frame::Frame;
use ir::machine::{Collectives, Machine};
use ir::plan::{Phase, Plan, Queue};
use tests::machines;
use tests::toys::Toy;

fn plan(toy: &Toy, machine: &Machine, request: Request) -> String {
    let model = toy.model().expect("the toy is a model");
    let options = Options { request, ..Options::default() };
    let plan = compiler::compile(&model, machine, &options, &mut |_, _| ());
    plan.expect("the toy fits").to_string()
}

#[test]
fn llama() {
    let plan = |machine| plan(&Toy::llama(), &machine, Request::Any);
    insta::assert_snapshot!("llama on one gpu", plan(machines::one_gpu()));
    insta::assert_snapshot!("llama on one gpu and two numa", plan(machines::one_gpu_two_numa()));
    insta::assert_snapshot!("llama on two gpu and two numa", plan(machines::two_gpu_two_numa()));
    insta::assert_snapshot!("llama on two numa", plan(machines::two_numa()));
}

#[test]
fn mixture() {
    let plan = |machine| plan(&Toy::mixture(), &machine, Request::Any);
    insta::assert_snapshot!("mixture on one gpu", plan(machines::one_gpu()));
    insta::assert_snapshot!("mixture on one gpu and two numa", plan(machines::one_gpu_two_numa()));
    insta::assert_snapshot!("mixture on two gpu and two numa", plan(machines::two_gpu_two_numa()));
    insta::assert_snapshot!("mixture on two numa", plan(machines::two_numa()));
}

#[test]
fn weights_and_caches_beside_a_gpu() {
    let model = Toy { layers: 4, ..Toy::llama() }.model().expect("the toy is a model");
    let options = Options { context: Some(128), prefill_tokens: Some(64), ..Options::default() };
    let plan = |machine| {
        let plan = compiler::compile(&model, &machine, &options, &mut |_, _| ());
        plan.expect("the toy fits").to_string()
    };
    let machine = machines::fast_link(600 << 10);
    insta::assert_snapshot!("llama with caches beside a gpu", plan(machine.clone()));
    let machine = machines::keeping_caches(machine);
    insta::assert_snapshot!("llama fetched to a gpu", plan(machine));
}

#[test]
fn requested_shapes() {
    let stages = parse_pipeline("numa1,gpu0").expect("it is a request");
    let machine = machines::one_gpu_two_numa();
    insta::assert_snapshot!("llama in two stages", plan(&Toy::llama(), &machine, stages));
    let shares = parse_tensor_parallel("numa0:3,numa1:1").expect("it is a request");
    let machine = machines::two_numa();
    insta::assert_snapshot!(
        "llama in uneven shares",
        plan(&Toy::llama(), &machine, shares.clone())
    );
    insta::assert_snapshot!("mixture in uneven shares", plan(&Toy::mixture(), &machine, shares));
}

#[test]
fn what_another_gpu_reads_where_it_lies_is_not_overwritten() {
    let model = Toy { layers: 6, ..Toy::llama() }.model().expect("the toy is a model");
    // There and back again: the first GPU goes on while the other has its value.
    let pins = ["(layers.[024]|embed|norm|lm_head|select)=gpu0", "layers.[135]=gpu1"];
    let pins = pins.map(|pin| pin.parse().expect("it is a pin")).to_vec();
    let options = Options { pins, ..Options::default() };
    let machine = machines::linked(vec![machines::gpu(0, 64 << 20), machines::gpu(1, 64 << 20)]);
    let plan = compiler::compile(&model, &machine, &options, &mut |_, _| ());
    let plan = plan.expect("the toy fits");
    let mut moved = 0;
    for program in &plan.programs {
        for step in program.steps.rows() {
            for (value, from) in plan.peer_moved(program, step) {
                moved += 1;
                let frame = Frame::new(&plan, program, from);
                let place = frame.place(value).expect("the value has a place");
                let lane = program.lane(from, Queue::Compute).expect("the device computes");
                let written = lane.steps.iter().flat_map(|&step| &program.steps[step].writes);
                for &later in written.skip_while(|&&buffer| buffer != value).skip(1) {
                    let other = frame.place(later).expect("a buffer of the device has a place");
                    let is_apart = other.start >= place.start + place.bytes
                        || other.start + other.bytes <= place.start;
                    assert!(is_apart, "{later} overwrites {value} in {}", program.name);
                }
            }
        }
    }
    assert!(moved >= 5 * plan.programs.len(), "{moved} moves between GPUs");
}

#[test]
fn sums_over_many_gpus_are_the_librarys_in_prefill() {
    let model = Toy::llama().model().expect("the toy is a model");
    let of = |gpus: u32| {
        let mut machine =
            machines::linked((0..gpus).map(|gpu| machines::gpu(gpu, 64 << 20)).collect());
        let link = machine.links[0].clone();
        let (bytes_per_sec, latency_nanos) = (0.45 * link.bytes_per_sec, 1.5 * link.latency_nanos);
        machine.collectives =
            Some(Collectives { bytes_per_sec, latency_nanos, reserved_bytes: 1 << 20 });
        let names: Vec<String> = (0..gpus).map(|gpu| format!("gpu{gpu}")).collect();
        let request = parse_tensor_parallel(&names.join(",")).expect("it is a request");
        let options = Options { request, ..Options::default() };
        compiler::compile(&model, &machine, &options, &mut |_, _| ()).expect("the toy fits")
    };
    let by_library = |plan: &Plan, phase: Phase| {
        let programs = plan.programs.iter().filter(|program| program.phase == phase);
        let steps = programs.flat_map(|program| {
            program.steps.rows().iter().filter(|step| plan.is_library_sum(program, step))
        });
        steps.count()
    };
    // Of two GPUs, each sends a whole term either way, a small one with as many bytes of flags; of four, the library has
    // half as much as three terms to send.
    let (two, four) = (of(2), of(4));
    assert_eq!(by_library(&two, Phase::Prefill), 0);
    assert!(by_library(&four, Phase::Prefill) > 0);
    assert_eq!(by_library(&four, Phase::Decode), 0);
    let reserved = |plan: &Plan| plan.forecast.devices.rows()[0].reserved_bytes;
    assert_eq!(reserved(&four), reserved(&two) + (1 << 20));
    let text = four.to_ron().expect("the plan is written");
    assert_eq!(Plan::from_ron(&text).expect("it is a plan"), four);
    assert!(four.to_string().contains("by the library"));
}
