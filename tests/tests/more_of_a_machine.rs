//! More of what a machine has is never predicted to be much slower, wherever the limits of memory fall.

use compiler::Options;
use ir::machine::Machine;
use ir::plan::{Phase, Plan};
use tests::machines::{h200, slow_down, two_sockets};
use tests::made_up::{LlamaShape, MadeUp};

const GIB: f64 = (1_u64 << 30) as f64;

/// A small GPU of a tenth of an H200's rates, with a quarter of its link and a host of half the rates.
fn small(gpu_gib: f64) -> Machine {
    let mut machine = h200((gpu_gib * GIB) as u64);
    slow_down(&mut machine, 0.1, 0.5);
    machine.links.iter_mut().for_each(|link| link.bytes_per_sec *= 0.25);
    machine
}

/// Seconds of a prompt of 2048 tokens and an answer of 128.
fn seconds(plan: &Plan) -> f64 {
    let nanos = |phase| {
        let mut programs = plan.programs.iter().zip(&plan.forecast.programs);
        let (program, forecast) = programs.find(|(program, _)| program.phase == phase).unwrap();
        (forecast.nanos as f64, program.max.tokens)
    };
    let ((prefill, tokens), (decode, _)) = (nanos(Phase::Prefill), nanos(Phase::Decode));
    (f64::from(2048_u32.div_ceil(tokens)) * prefill + 128.0 * decode) / 1e9
}

fn compile(machine: &Machine) -> Plan {
    compile_in(machine, &["q8"])
}

fn compile_in(machine: &Machine, formats: &[&str]) -> Plan {
    let model = MadeUp::llama(LlamaShape::LLAMA_8B).model();
    let formats = formats.iter().map(|format| format.parse().unwrap()).collect();
    let options = Options { context: Some(4096), formats, ..Options::default() };
    compiler::compile(&model, machine, &options, &mut |_, _| ()).unwrap()
}

/// Seconds of a prompt of 2048 tokens.
fn prompt_seconds(plan: &Plan) -> f64 {
    let (program, forecast) = (&plan.programs[0], &plan.forecast.programs[0]);
    assert_eq!(program.phase, Phase::Prefill);
    f64::from(2048_u32.div_ceil(program.max.tokens)) * forecast.nanos as f64 / 1e9
}

#[test]
fn a_gpu_with_more_memory_is_no_slower() {
    let mut best = f64::INFINITY;
    for step in 0..6 {
        let gib = 5.5 + 0.12 * f64::from(step);
        let time = seconds(&compile(&small(gib)));
        assert!(time <= 1.03 * best, "{gib:.2} GiB: {time:.3} s, less takes {best:.3} s");
        best = best.min(time);
    }
}

/// Caches and the head make room for windows, not only for matrices that decode then reads on the GPU.
#[test]
fn prompts_are_fetched_for_however_small_a_gpu_is() {
    let mut best = f64::INFINITY;
    for gib in [1.1, 1.3, 1.5, 1.7, 1.9, 2.0, 2.1, 2.2, 2.3, 2.4, 2.6] {
        let plan = compile_in(&h200((gib * GIB) as u64), &[]);
        let time = prompt_seconds(&plan);
        assert!(time <= 1.25 * best, "{gib} GiB: {time:.3} s, less takes {best:.3} s");
        best = best.min(time);
    }
}

#[test]
fn a_head_that_leaves_no_room_for_a_window_stays_with_the_host() {
    let machine = h200((1.2 * GIB) as u64);
    let plan = compile_in(&machine, &[]);
    let host = machine.device("numa0").unwrap();
    let heads = plan.weights.rows().iter().filter(|weight| weight.name.starts_with("lm_head"));
    let devices: Vec<_> = heads.map(|weight| weight.device).collect();
    assert_eq!(devices, [host]);
    let without = compile_in(&h200((0.7 * GIB) as u64), &[]);
    let [with, without] = [&plan, &without].map(prompt_seconds);
    assert!(with < without / 5.0, "{with:.3} s, without a GPU {without:.3} s");
}

#[test]
fn it_does_not_matter_which_socket_has_more_memory() {
    let sockets = |roomy: &str| {
        let mut machine = two_sockets((6.0 * GIB) as u64);
        slow_down(&mut machine, 0.2, 1.0);
        // The second is far from the GPU, and its memory is slower.
        let [far, gpu] = ["numa1", "gpu0"].map(|name| machine.device(name).unwrap());
        machine.devices[far].rates.read_bytes_per_sec *= 0.4;
        for point in
            machine.devices[far].rates.linear.iter_mut().flat_map(|linear| &mut linear.points)
        {
            point.weights_per_sec *= 0.4;
        }
        for link in &mut machine.links {
            let ends = [link.from, link.to];
            if ends.contains(&gpu) {
                link.bytes_per_sec *= if ends.contains(&far) { 0.15 } else { 0.5 };
            }
        }
        let roomy = machine.device(roomy).unwrap();
        machine.devices[roomy].memory_bytes += 8 << 30;
        machine
    };
    let [near, far] = ["numa0", "numa1"].map(|roomy| seconds(&compile(&sockets(roomy))));
    assert!((far / near - 1.0).abs() < 0.03, "{near:.3} and {far:.3} s");
}
