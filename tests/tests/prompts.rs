//! How prompts are run: in how many tokens at once, and with which copies of weights.
//!
//! The machine is an H200 with as much memory as a test gives it, and its host.

use std::collections::BTreeSet;

use compiler::options::{Objective, Request};
use compiler::{Options, compile};
use ir::frame::Frame;
use ir::id::BufferId;
use ir::letters::most_programs;
use ir::machine::{DeviceKind, LinearRate, Machine, RatePoint};
use ir::model::Model;
use ir::op::{Linear, Op, Then};
use ir::plan::{Action, Phase, Plan, Program};
use ir::tensor::{DType, Format};
use ir::workspace::{MAX_FUSED_ROWS, MAX_PACKED_ROWS};
use tests::machines::{self, h200, two_numa};
use tests::made_up::{LlamaShape, MadeUp};
use tests::toys::Toy;

const GIB: u64 = 1 << 30;

fn llama() -> Model {
    MadeUp::llama(LlamaShape::LLAMA_8B).model()
}

fn plan(model: &Model, machine: &Machine, format: &str) -> Plan {
    let formats = vec![format.parse().expect("it is a rule")];
    let options = Options { formats, ..Options::default() };
    compile(model, machine, &options, &mut |_, _| ()).expect("it fits")
}

/// Nanoseconds of the decodes of one sequence, of some and of more than eight.
fn decodes(machine: &Machine) -> Vec<u64> {
    let options = Options { max_sequences: 16, ..Options::default() };
    let mixture = Toy::mixture().model().expect("the toy is a model");
    let plan = compile(&mixture, machine, &options, &mut |_, _| ()).expect("it fits");
    let forecasts = plan.programs.iter().zip(&plan.forecast.programs);
    let mut decodes: Vec<(u32, u64)> = forecasts
        .filter(|(program, _)| program.phase == Phase::Decode)
        .map(|(program, forecast)| (program.max_sequences, forecast.nanos))
        .collect();
    decodes.sort_unstable();
    let sequences: Vec<u32> = decodes.iter().map(|&(sequences, _)| sequences).collect();
    assert_eq!(sequences, [1, 4, 16]);
    decodes.into_iter().map(|(_, nanos)| nanos).collect()
}

#[test]
fn experts_of_few_and_of_many_tokens_have_curves_of_their_own() {
    let machine = |few: f64, many: f64| {
        let gpu = h200(10 * GIB).devices.rows()[0].clone();
        let mut machine = machines::linked(vec![gpu]);
        let rates = &mut machine.devices.rows_mut()[0].rates;
        let curves = |weights_per_sec: f64| {
            let points = vec![RatePoint { tokens: 1, weights_per_sec, nanos: 0.0 }];
            let curve = |format| LinearRate { format, points: points.clone() };
            Format::ALL.map(curve).to_vec()
        };
        (rates.experts, rates.shared_experts) = (curves(few), curves(many));
        machine
    };
    let same = decodes(&machine(1e9, 1e9));
    let few_slower = decodes(&machine(1e8, 1e9));
    assert!(few_slower[0] > same[0] && few_slower[1] > same[1] && few_slower[2] == same[2]);
    let many_slower = decodes(&machine(1e9, 1e8));
    assert!(many_slower[..2] == same[..2] && many_slower[2] > same[2]);
    // Without curves they are linears, which are faster here.
    let mut linears = machine(1e9, 1e9);
    let rates = &mut linears.devices.rows_mut()[0].rates;
    (rates.experts, rates.shared_experts) = (Vec::new(), Vec::new());
    assert!(decodes(&linears).iter().zip(&same).all(|(linear, experts)| linear < experts));
}

/// An H200 that takes as long to unpack a matrix for its library as it was measured to.
fn unpacking(gpu_bytes: u64) -> Machine {
    unpacking_at(gpu_bytes, 1.2e12)
}

/// An H200 that unpacks so many weights a second for its library.
fn unpacking_at(gpu_bytes: u64, weights_per_sec: f64) -> Machine {
    let mut machine = h200(gpu_bytes);
    for rate in &mut machine.devices.rows_mut()[0].rates.linear {
        let is_packed = matches!(rate.format, Format::Bf12 | Format::Q8 | Format::Q4);
        for point in
            rate.points.iter_mut().filter(|point| is_packed && point.tokens > MAX_PACKED_ROWS)
        {
            point.weights_per_sec = 1.0 / (1.0 / point.weights_per_sec + 1.0 / weights_per_sec);
        }
    }
    machine
}

#[test]
fn runs_are_as_long_as_is_best_for_prompts() {
    let llama = llama();
    let tokens = |machine: &Machine| plan(&llama, machine, "bf16").programs[0].max.tokens;
    // All that a small GPU fetches comes once for each run, and large products are the fastest.
    assert_eq!(tokens(&h200(10 * GIB)), 2048);
    assert_eq!(tokens(&h200(40 * GIB)), 2048);
    // Processors multiply few hundred tokens as fast as thousands.
    let mut host = h200(0);
    host.links.clear();
    assert_eq!(tokens(&host), 512);
    // No run is longer than the context.
    let toy = Toy::llama().model().expect("the toy is a model");
    let runs = plan(&toy, &two_numa(), "f32").programs[0].max.tokens;
    assert!(runs <= toy.context, "{runs} of {}", toy.context);
}

#[test]
fn memory_that_is_left_over_holds_packed_matrices_as_prompts_multiply_them() {
    let llama = llama();
    let unpacked = |plan: &Plan| -> Vec<String> {
        let weights = plan.weights.rows().iter().filter(|weight| weight.also_unpacked);
        weights.map(|weight| weight.name.clone()).collect()
    };
    let prefill = |plan: &Plan| plan.forecast.programs[0].nanos;
    for format in ["bf12", "q8", "q4"] {
        let all = plan(&llama, &unpacking(40 * GIB), format);
        // Seven of each block, but neither the table nor the head, which never multiplies many rows.
        assert_eq!(unpacked(&all).len(), 7 * 32, "{format}");
        assert!(unpacked(&all).iter().all(|name| name.contains(".layers.")));
        // As fast as if nothing had to be unpacked.
        let ideal = plan(&llama, &h200(40 * GIB), format);
        assert!(unpacked(&ideal).is_empty(), "it is worth nothing there");
        assert!(prefill(&all).abs_diff(prefill(&ideal)) < prefill(&ideal) / 100);
        // Less memory holds some, and is not exceeded.
        let held = |plan: &Plan| plan.forecast.devices.rows()[0].needed_bytes();
        let bytes = held(&all) - 6 * GIB;
        let some = plan(&llama, &unpacking(bytes), format);
        assert!((1..7 * 32).contains(&unpacked(&some).len()), "{format}");
        assert!(prefill(&all) < prefill(&some));
        // A tenth stays free.
        let most = bytes - bytes / 10;
        assert!(held(&some) <= most && held(&some) > most - GIB / 8);
    }
    // Where weights are fetched there is no room for anything twice.
    assert!(unpacked(&plan(&llama, &unpacking(10 * GIB), "bf16")).is_empty());
}

#[test]
fn prompts_take_as_long_as_all_that_their_operands_have_room_for() {
    let llama = llama();
    // What one more token adds behind a number that fills operands, and what those to the next number do.
    let added = |plan: &Plan, [full, next]: [u32; 2]| {
        let nanos = |tokens: u32| plan.forecast.programs[0].nanos_of(tokens);
        (nanos(full + 1) - nanos(full), nanos(next) - nanos(full + 1))
    };
    let fills = [[32, 64], [64, 96], [96, 128], [128, 192], [192, 256], [288, 384], [384, 512]];
    let own = plan(&llama, &h200(40 * GIB), "q4");
    for fill in fills {
        let (one, others) = added(&own, fill);
        assert!(one > 2.0 * others, "{fill:?}: {one} and {others}");
    }
    // The vendor's library, with copies for it, takes longer with each token.
    let copied = plan(&llama, &unpacking(40 * GIB), "q4");
    assert!(copied.weights.rows().iter().any(|weight| weight.also_unpacked));
    for fill in fills {
        let (one, others) = added(&copied, fill);
        let is_own = fill[1] <= MAX_FUSED_ROWS;
        let changes_hands = fill[0] == MAX_FUSED_ROWS;
        let is_step = one > 2.0 * others;
        assert!(changes_hands || is_step == is_own, "{fill:?}: {one} and {others}");
    }
    // Other GPUs' operands are small.
    let mut other = h200(40 * GIB);
    if let DeviceKind::Gpu { has_warpgroups, .. } = &mut other.devices.rows_mut()[0].kind {
        *has_warpgroups = false;
    }
    let other = plan(&llama, &other, "q4");
    let lengths = |plan: &Plan| plan.forecast.programs[0].others.len();
    assert!(lengths(&other) < lengths(&own));
    assert!(fills.iter().all(|&fill| added(&other, fill).0 < added(&other, fill).1));
}

#[test]
fn sums_of_gpus_cross_twice_with_flags_and_take_longer_in_pieces() {
    let (bytes_per_sec, latency_nanos) = (300e9, 1e3);
    let mut machine = h200(40 * GIB);
    machines::add_gpus(&mut machine, |_, _| (), 1);
    for link in &mut machine.links {
        (link.bytes_per_sec, link.latency_nanos) = (bytes_per_sec, latency_nanos);
    }
    let options = Options {
        request: Request::TensorParallelRanks(2),
        max_sequences: 128,
        context: Some(256),
        ..Options::default()
    };
    let plan = compile(&llama(), &machine, &options, &mut |_, _| ()).expect("it fits");
    let sum = |sequences: usize| {
        let program = plan.program_for(Phase::Decode, sequences, sequences, false);
        let program = &plan.programs[program.expect("it decodes so many")];
        assert_eq!(program.max_sequences as usize, sequences);
        let mut steps = program.steps.rows().iter();
        let sum = steps.find(|step| plan.is_peer_sum(program, step)).expect("they sum");
        sum.estimate_nanos as f64
    };
    // Sixteen rows are too many for the launch of the linear that makes them, 64 are the most that go with a flag beside
    // each number.
    let [few, flagged, in_pieces] = [16, 64, 128].map(sum);
    let row_bytes = 4.0 * 4096.0;
    let crossing = row_bytes / bytes_per_sec * 1e9;
    // The terms of both are read, and the sum is written.
    let local = 3.0 * row_bytes / machine.devices.rows()[0].rates.read_bytes_per_sec * 1e9;
    let start = few - 16.0 * (2.0 * crossing + local);
    let more = flagged - start - 64.0 * (2.0 * crossing + local);
    assert!(more.abs() < 10.0, "{more} ns");
    let more = in_pieces - start - 128.0 * (crossing + local);
    assert!((3_000.0..4_000.0).contains(&more), "{more} ns");
}

#[test]
fn gpus_send_each_other_terms_of_long_prompts_in_16_bits_and_add_residuals_behind_their_sums() {
    let mut machine = h200(40 * GIB);
    machines::add_gpus(&mut machine, |_, _| (), 1);
    let plan = |format: &str| {
        let options = Options {
            request: Request::TensorParallelRanks(2),
            formats: vec![format.parse().expect("it is a rule")],
            context: Some(2048),
            ..Options::default()
        };
        compile(&llama(), &machine, &options, &mut |_, _| ()).expect("it fits")
    };
    // What terms are made of, and whether linears add residuals, in long prompts and in the rest.
    let kinds = |plan: &Plan, is_long: bool| {
        let mut kinds = BTreeSet::new();
        let is_meant = |program: &&Program| {
            let has_many = program.max.tokens > MAX_FUSED_ROWS;
            (program.phase == Phase::Prefill && has_many) == is_long
        };
        for program in plan.programs.iter().filter(is_meant) {
            let adds = program.steps.rows().iter().any(|step| {
                matches!(&step.action, Action::Run(Op::Linear(Linear { residual: true, .. })))
            });
            for sum in program.steps.rows().iter().filter(|step| plan.is_peer_sum(program, step)) {
                kinds.extend(sum.reads.iter().map(|&term| (program.buffers[term].ty.dtype, adds)));
            }
        }
        kinds
    };
    let [f32, bf16] = [(DType::F32, true), (DType::Bf16, false)].map(|kind| BTreeSet::from([kind]));
    for (format, long) in [("bf16", &bf16), ("q4", &bf16), ("f16", &f32)] {
        let plan = plan(format);
        assert_eq!([kinds(&plan, true), kinds(&plan, false)], [long.clone(), f32.clone()]);
    }
    // What is added in the launch of a sum is written while terms are read.
    let plan = plan("bf16");
    let program = &plan.programs[0];
    let mut joined = 0;
    for lane in &program.lanes {
        let frame = Frame::new(&plan, program, lane.device);
        for position in 0..lane.steps.len() {
            if !plan.may_join_add(program, &lane.steps, position) {
                continue;
            }
            joined += 1;
            let [sum, add] = [position, position + 1].map(|at| &program.steps[lane.steps[at]]);
            let place = |buffer| frame.place(buffer).expect("it is on this device");
            let out = place(add.writes[0]);
            let is_own = |term: &&BufferId| program.buffers[**term].device == lane.device;
            for term in sum.reads.iter().filter(is_own).map(|&term| place(term)) {
                let is_apart =
                    out.start + out.bytes <= term.start || term.start + term.bytes <= out.start;
                assert!(is_apart, "{out:?} and {term:?}");
            }
        }
    }
    // Two of each block on each GPU.
    assert_eq!(joined, 2 * 2 * 32);
}

#[test]
fn copies_decide_how_long_runs_are() {
    let llama = llama();
    let tokens = |gpu_bytes| {
        let options = Options {
            formats: vec!["q4".parse().expect("it is a rule")],
            objective: Objective::Throughput,
            max_sequences: 24,
            context: Some(2048),
            ..Options::default()
        };
        // To unpack a matrix takes longer than a product of 2048 tokens gains over four of 512, which take it as it lies.
        let machine = unpacking_at(gpu_bytes, 0.4e12);
        let plan = compile(&llama, &machine, &options, &mut |_, _| ()).expect("it fits");
        assert_eq!(plan.queues().len(), 1, "all is on the GPU");
        plan.programs[0].max.tokens
    };
    assert_eq!([40, 14].map(|gib| tokens(gib * GIB)), [2048, 512]);
}

#[test]
fn copies_decide_between_widths() {
    let llama = llama();
    // To unpack all weights for each run takes longer than an answer gains by 12 bits, where they are not held twice.
    let formats = |gpu_bytes: u64| -> BTreeSet<Format> {
        let options =
            Options { prefill_tokens: Some(2048), context: Some(2304), ..Options::default() };
        let machine = unpacking_at(gpu_bytes, 0.02e12);
        let plan = compile(&llama, &machine, &options, &mut |_, _| ()).expect("it fits");
        assert_eq!(plan.queues().len(), 1, "all is on the GPU");
        let matrices = plan.weights.rows().iter().filter(|weight| weight.shape.len() == 2);
        let of_layers = matrices.filter(|weight| weight.name.contains(".layers."));
        of_layers.map(|weight| weight.format).collect()
    };
    assert_eq!(formats(40 * GIB), BTreeSet::from([Format::Bf12]));
    assert_eq!(formats(20 * GIB), BTreeSet::from([Format::Bf16]));
}

#[test]
fn a_gpu_holds_what_is_between_linears_in_16_bits_where_its_products_are() {
    let llama = llama();
    // The types of what gates write, on GPUs and on nodes, in prefill and in decode.
    let gated = |machine: &Machine, format: &str| {
        let plan = plan(&llama, machine, format);
        let types = |phase: Phase, is_gpu: bool| {
            let is_meant = |program: &&Program| {
                let is_short = phase == Phase::Prefill && program.max.tokens <= MAX_FUSED_ROWS;
                program.phase == phase && !is_short
            };
            let mut types = BTreeSet::new();
            for program in plan.programs.iter().filter(is_meant) {
                for step in program.steps.rows() {
                    let Action::Run(Op::Linear(Linear { then: Then::Gate(_), .. })) = &step.action
                    else {
                        continue;
                    };
                    let made = &program.buffers[step.writes[0]];
                    if plan.machine.devices[made.device].kind.is_gpu() == is_gpu {
                        types.insert(made.ty.dtype);
                    }
                }
            }
            types
        };
        [(Phase::Prefill, true), (Phase::Prefill, false), (Phase::Decode, true)]
            .map(|(phase, is_gpu)| types(phase, is_gpu))
    };
    let none = BTreeSet::new();
    let [f32, bf16] = [DType::F32, DType::Bf16].map(|dtype| BTreeSet::from([dtype]));
    let large = h200(60 * GIB);
    for (format, prefill) in [("bf16", &bf16), ("q4", &bf16), ("f16", &f32), ("f32", &f32)] {
        assert_eq!(gated(&large, format), [prefill, &none, &f32].map(BTreeSet::clone), "{format}");
    }
    let mut alone = large.clone();
    let DeviceKind::Gpu { library_bytes, .. } = &mut alone.devices.rows_mut()[0].kind else {
        panic!("the first is a GPU")
    };
    *library_bytes = 0;
    assert_eq!(gated(&alone, "bf16"), [&f32, &none, &f32].map(BTreeSet::clone));
    // What a GPU fetches it multiplies so, too; what a node computes in place is not held so.
    let [on_gpu, on_node, decoded] = gated(&h200(10 * GIB), "bf16");
    assert_eq!([on_gpu, decoded], [bf16, f32.clone()]);
    assert!(on_node == none || on_node == f32, "{on_node:?}");
}

/// The letters of a plan count as if it had as many programs, since placement looks at fewer.
#[test]
fn a_plan_has_no_more_programs_than_its_letters_are_counted_for() {
    let model = Toy::llama().model().expect("the toy is a model");
    let machine = machines::fast_link(256 << 10);
    for max_sequences in [1, 2, 3, 4, 5, 8, 16, 17, 63, 64, 65] {
        let options = Options { max_sequences, context: Some(64), ..Options::default() };
        let mut plan = compile(&model, &machine, &options, &mut |_, _| ()).expect("it fits");
        let programs = plan.programs.len() as u64;
        plan.programs.clear();
        assert!(most_programs(&plan) >= programs, "{programs} for {max_sequences} sequences");
    }
}
