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
    let model = MadeUp::llama(LlamaShape::LLAMA_8B).model();
    let options =
        Options { context: Some(4096), formats: vec!["q8".parse().unwrap()], ..Options::default() };
    compiler::compile(&model, machine, &options, &mut |_, _| ()).unwrap()
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
