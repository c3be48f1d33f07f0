//! What is decided about a model that is larger than the GPU: which matrices stay, and who computes with them when.
//!
//! The machine is an H200 with as much memory as a test gives it, and its host.

use std::collections::BTreeSet;

use compiler::Options;
use compiler::options::{CountedExperts, Objective, parse_tensor_parallel};
use ir::counts::{ExpertCounts, VERSION};
use ir::id::{DeviceId, Id as _, StepId};
use ir::machine::{Device, DeviceKind, Link, Machine};
use ir::model::Model;
use ir::op::Op;
use ir::plan::{Action, Phase, Plan, Program, Queue, Step};
use ir::tensor::Format;
use tests::machines::{h200, keeping_caches, two_sockets};
use tests::made_up::{LlamaShape, MadeUp};
use tests::{first_decode, rates};

const GIB: u64 = 1 << 30;

fn options() -> Options {
    Options { prefill_tokens: Some(2048), context: Some(4096), ..Options::default() }
}

fn compile(model: &Model, machine: &Machine, options: &Options) -> Plan {
    compiler::compile(model, machine, options, &mut |_, _| ()).expect("it fits")
}

fn llama(gpu_bytes: u64) -> Plan {
    compile(&MadeUp::llama(LlamaShape::LLAMA_8B).model(), &h200(gpu_bytes), &options())
}

/// Steps of a program that fetch, and linears and mixtures that a device computes.
fn counts(program: &Program, device: usize) -> (usize, usize) {
    let count = |queue: Queue, counts: &dyn Fn(&Action) -> bool| {
        let lanes = program.lanes.iter().filter(|lane| lane.queue == queue);
        let steps = lanes
            .filter(|lane| queue == Queue::Copy || lane.device == DeviceId::from_index(device))
            .flat_map(|lane| &lane.steps);
        steps.filter(|&&step| counts(&program.steps[step].action)).count()
    };
    let computes = |action: &Action| matches!(action, Action::Run(Op::Linear(_) | Op::Experts(_)));
    (count(Queue::Copy, &|_| true), count(Queue::Compute, &computes))
}

/// What is minimised.
fn score(plan: &Plan) -> f64 {
    let nanos = |program: usize| plan.forecast.programs[program].nanos;
    tests::score(nanos(0), nanos(first_decode(plan)))
}

fn chosen(plan: &Plan) -> &str {
    &plan.forecast.candidates[0].name
}

#[test]
fn a_model_that_fits_leaves_the_host_alone() {
    let plan = llama(40 * GIB);
    assert_eq!(chosen(&plan), "all on gpu0");
    for program in &plan.programs {
        assert!(program.lanes.iter().all(|lane| lane.queue == Queue::Compute));
        assert_eq!(program.lanes.len(), 1);
    }
}

#[test]
fn half_a_llama_on_the_host_is_fetched_in_prefill_and_shared_in_decode() {
    // Sixteen of 32 blocks: what is left of 16 GB of weights, half of them beside the head.
    let plan = llama(10 * GIB);
    let (prefill, decode) = rates(&plan);
    assert!(prefill > 8000.0, "{prefill} tokens/s");
    assert!(decode > 1.2 * 15.8, "{decode} tokens/s");
    let (prefill_fetches, prefill_on_host) = counts(&plan.programs[0], 1);
    assert!(prefill_fetches > 0 && prefill_on_host == 0);
    let (decode_fetches, decode_on_host) = counts(&plan.programs[first_decode(&plan)], 1);
    assert!(decode_fetches > 0 && decode_on_host > 0 && decode_fetches < prefill_fetches);
}

#[test]
fn short_prompts_beside_a_host_have_a_program_of_their_own() {
    let machine = keeping_caches(h200(10 * GIB));
    let model = MadeUp::llama(LlamaShape::LLAMA_8B).model();
    let plan = compile(&model, &machine, &options());
    let [prefill, short] = [0, 1].map(|program| &plan.programs[program]);
    assert_eq!(short.phase, Phase::Prefill);
    assert!(short.max.tokens < prefill.max.tokens && short.max.tokens >= 16, "{:?}", short.max);
    // Most of what stays is computed in place, and little of it is read for few tokens.
    let (fetches, on_host) = counts(short, 1);
    assert!(on_host > 0 && fetches < counts(prefill, 1).0);
    let nanos = |program: usize| plan.forecast.programs[program].nanos;
    // The longest run of either; and a prompt that both take, in 16 bits, where half of the model is fetched.
    assert!(4 * nanos(1) < 3 * nanos(0), "{} and {}", nanos(1), nanos(0));
    let half = compile(&model, &machine, &Options { plain_bf16: true, ..options() });
    let [whole, little] = [0, 1].map(|program| half.forecast.programs[program].nanos_of(64));
    assert!(3.0 * little < 2.0 * whole, "{little} and {whole}");
    // Where no prompt is longer, it is the only one.
    let options = Options { prefill_tokens: Some(short.max.tokens), ..options() };
    let only = compile(&model, &machine, &options);
    assert_eq!(only.programs[1].phase, Phase::Decode);
    let only = only.forecast.programs[0].nanos;
    assert!(9 * only < 10 * nanos(1), "{only} and {}", nanos(1));
    // Where nothing is fetched, few tokens are no other work than many.
    let fits = llama(40 * GIB);
    let prefills = fits.programs.iter().filter(|program| program.phase == Phase::Prefill);
    assert_eq!(prefills.count(), 1);
}

#[test]
fn a_quarter_of_a_llama_on_the_host() {
    let plan = llama(14 * GIB);
    let (prefill, decode) = rates(&plan);
    assert!(prefill > 12_000.0, "{prefill} tokens/s");
    assert!(decode > 1.2 * 28.6, "{decode} tokens/s");
}

#[test]
fn a_gpu_computes_its_shards_while_the_host_computes_the_others() {
    let machine = keeping_caches(h200(23 * GIB / 2));
    let plan = compile(&MadeUp::llama(LlamaShape::LLAMA_8B).model(), &machine, &options());
    let layers = |mark: &str, device: usize| -> BTreeSet<&str> {
        let device = DeviceId::from_index(device);
        let weights = plan.weights.rows().iter().filter(|weight| weight.device == device);
        weights.filter_map(|weight| weight.name.strip_suffix(mark)).collect()
    };
    let (on_host, resident) = (layers(" (shard0)", 1), layers(" (resident)", 0));
    assert!(!on_host.is_empty() && on_host.is_subset(&resident), "{on_host:?} {resident:?}");
    let whole = plan.forecast.candidates.iter().find(|other| other.name.starts_with("matrices"));
    let whole = whole.and_then(|other| other.decode_nanos).expect("whole matrices fit as well");
    let decode = plan.forecast.candidates[0].decode_nanos.expect("it fits");
    assert!(decode < whole / 100 * 96, "{decode} ns instead of {whole}");
}

#[test]
fn a_pin_is_for_all_of_a_layer() {
    let model = MadeUp::llama(LlamaShape::LLAMA_8B).model();
    // One layer makes queries, keys and values.
    let cases = [
        ("down_proj=gpu0", &["down_proj"][..]),
        ("(q|down)_proj=gpu0", &["q_proj", "k_proj", "v_proj", "down_proj"][..]),
    ];
    for (pin, pinned) in cases {
        let pins = vec![pin.parse().expect("it is a pin")];
        let plan = compile(&model, &two_sockets(10 * GIB), &Options { pins, ..options() });
        let devices = |name: &str| -> Vec<usize> {
            let weights = plan.weights.rows().iter().filter(|weight| weight.name.contains(name));
            weights.map(|weight| weight.device.index()).collect()
        };
        // In each of 32 blocks.
        assert!(pinned.iter().all(|name| devices(name) == [0; 32]), "{pin}");
        assert!(devices("gate_proj").iter().any(|&device| device > 0), "{pin}: all is on gpu0");
    }
}

#[test]
fn tables_are_where_there_is_room() {
    let model = MadeUp::llama(LlamaShape::LLAMA_8B).model();
    let mut machine = two_sockets(6 * GIB);
    let first = machine.device("numa0").expect("it is there");
    machine.devices[first].memory_bytes = 600_000_000;
    let plan = compile(&model, &machine, &options());
    assert!(score(&plan) <= 1.02 * score(&compile(&model, &h200(6 * GIB), &options())));
}

#[test]
fn a_small_gpu_beside_a_large_one_is_no_loss() {
    let model = MadeUp::llama(LlamaShape::LLAMA_8B).model();
    let mut machine = h200(6 * GIB);
    let (first, host) = (DeviceId::from_index(0), DeviceId::from_index(1));
    let second = machine.devices.push(Device {
        name: "gpu1".into(),
        memory_bytes: 2_200_000_000,
        ..machine.devices[first].clone()
    });
    if let DeviceKind::Gpu { ordinal, .. } = &mut machine.devices[second].kind {
        *ordinal = 1;
    }
    let ends = [(first, second), (second, first), (second, host), (host, second)];
    let like = machine.links[0].clone();
    machine.links.extend(ends.map(|(from, to)| Link { from, to, ..like.clone() }));
    let both = compile(&model, &machine, &options());
    let without = Options { without: vec!["gpu1".into()], ..options() };
    assert!(score(&both) <= score(&compile(&model, &machine, &without)), "{}", chosen(&both));
}

#[test]
fn windows_shrink_with_the_memory() {
    let model = MadeUp::llama(LlamaShape::LLAMA_8B).model();
    let options = Options { context: Some(2048), ..options() };
    let tenths = [23, 24, 25, 26, 28, 30];
    let scores = tenths.map(|tenth| score(&compile(&model, &h200(tenth * GIB / 10), &options)));
    let is_near = |pair: &[f64]| pair[1] <= 1.03 * pair[0] && pair[0] <= 1.25 * pair[1];
    assert!(scores.windows(2).all(is_near), "{scores:?}");
}

#[test]
fn a_format_is_for_many_sequences_too() {
    let model = MadeUp::llama(LlamaShape::LLAMA_8B).model();
    let mut machine = h200(40 * GIB);
    let gpu = DeviceId::from_index(0);
    // Many rows need 12 bits unpacked.
    for rate in &mut machine.devices[gpu].rates.linear {
        if rate.format == Format::Bf12 {
            let mut slow = rate.points[0];
            (slow.tokens, slow.weights_per_sec) = (16, slow.weights_per_sec / 4.0);
            rate.points.insert(1, slow);
        }
    }
    let is_narrow = |max_sequences: u32| {
        let plan = compile(&model, &machine, &Options { max_sequences, ..options() });
        plan.weights.rows().iter().any(|weight| weight.format == Format::Bf12)
    };
    assert!(is_narrow(1) && !is_narrow(16));
}

#[test]
fn requested_shares_are_the_best_of_some() {
    let model = MadeUp::llama(LlamaShape::LLAMA_8B).model();
    let shared = |text: &str| {
        let request = parse_tensor_parallel(text).expect("it is a request");
        score(&compile(&model, &h200(15 * GIB), &Options { request, ..options() }))
    };
    let (free, fixed) = (shared("gpu0,numa0"), shared("gpu0:100,numa0:1"));
    assert!(free <= 1.01 * fixed, "{free} {fixed}");
}

#[test]
fn a_host_that_cannot_hold_all_that_may_stay_holds_some() {
    let mut machine = h200(20 * GIB);
    let roomy = compile(&MadeUp::mixture().model(), &machine, &options());
    machine.devices[DeviceId::from_index(1)].memory_bytes = 20 * GIB;
    let plan = compile(&MadeUp::mixture().model(), &machine, &options());
    assert!(rates(&plan).1 > 0.95 * rates(&roomy).1);
    assert!(plan.forecast.candidates[0].name.contains("beside gpu0"));
}

#[test]
fn many_sequences_fetch_what_the_host_would_be_late_with() {
    let model = MadeUp::llama(LlamaShape::LLAMA_8B).model();
    let options = Options { max_sequences: 64, kv_cache_bytes: Some(2 * GIB), ..options() };
    // Its host has no matrix instructions.
    let mut machine = h200(10 * GIB);
    for linear in &mut machine.devices[DeviceId::from_index(1)].rates.linear {
        let many = linear.points.iter_mut().filter(|point| point.tokens > 1);
        many.for_each(|point| point.weights_per_sec /= 8.0);
    }
    // Nanoseconds of 64 sequences.
    let of_most = |objective: Objective| {
        let options = Options { objective, ..options.clone() };
        let plan = compile(&model, &machine, &options);
        plan.forecast.programs.last().expect("a decode").nanos
    };
    let (for_most, for_one) = (of_most(Objective::Throughput), of_most(Objective::Latency));
    assert!(10 * for_most < 7 * for_one, "{for_most} and {for_one} ns");
}

#[test]
fn experts_stay_on_the_host_before_anything_else() {
    let options = Options { formats: vec!["q4".parse().expect("it is a format")], ..options() };
    let plan = compile(&MadeUp::mixture().model(), &h200(3 * GIB), &options);
    let (prefill, decode) = rates(&plan);
    assert!(prefill > 3.0 * 2668.0, "{prefill} tokens/s");
    assert!(decode > 1.2 * 118.0, "{decode} tokens/s");
    let host = DeviceId::from_index(1);
    let on_host = plan.weights.rows().iter().filter(|weight| weight.device == host);
    for weight in on_host.filter(|weight| weight.shape.len() > 1) {
        let stays = weight.name.contains("experts") || weight.name.contains("embed");
        assert!(stays, "{} is on the host", weight.name);
    }
}

/// What the host waits for in a step of decode: times of what comes first of some values from the GPU, and of what comes
/// right behind another, first of another step's and then of the same one's.
fn crossings(plan: &Plan) -> [Vec<u64>; 3] {
    let decode = &plan.programs[first_decode(plan)];
    let node = decode.lane(DeviceId::from_index(1), Queue::Compute).expect("the host computes");
    let is_move = |step: StepId| matches!(decode.steps[step].action, Action::Move { .. });
    let writer = |step: StepId| {
        let read = decode.steps[step].reads[0];
        decode.steps.iter().find(|(_, step)| step.writes.contains(&read)).map(|(id, _)| id)
    };
    let mut crossings = [const { Vec::new() }; 3];
    for pair in node.steps.windows(2).filter(|pair| is_move(pair[1])) {
        let place = match is_move(pair[0]) {
            false => 0,
            true if writer(pair[0]) != writer(pair[1]) => 1,
            true => 2,
        };
        crossings[place].push(decode.steps[pair[1]].estimate_nanos);
    }
    // What experts take, by whom, and how they are chosen.
    assert!(crossings.iter().all(|times| times.len() >= 20), "{crossings:?}");
    crossings
}

#[test]
fn values_that_cross_together_are_under_way_together() {
    let mut machine = h200(3 * GIB);
    machine.links.iter_mut().for_each(|link| link.letter_nanos = None);
    let plan = compile(&MadeUp::mixture().model(), &machine, &options());
    let [first, behind, of_same_step] = crossings(&plan);
    let latency = machine.links[0].latency_nanos as u64;
    assert!(first.iter().all(|&nanos| nanos > latency), "{first:?}");
    assert!(behind.iter().chain(&of_same_step).all(|&nanos| nanos < 1000), "{behind:?}");
}

#[test]
fn what_crosses_in_decodes_takes_what_letters_take() {
    let machine = h200(3 * GIB);
    let plan = compile(&MadeUp::mixture().model(), &machine, &options());
    let [first, behind, of_same_step] = crossings(&plan);
    // A row of 8 KB is copied twice besides.
    let letter = machine.links[0].letter_nanos.expect("it is measured") as u64;
    let are_letters =
        |times: &[u64]| times.iter().all(|nanos| (letter..letter + 2000).contains(nanos));
    assert!(are_letters(&first) && are_letters(&behind), "{first:?} {behind:?}");
    // The GPU sends each by a launch.
    let launch = machine.devices.rows()[0].rates.step_nanos as u64;
    assert!(
        of_same_step.iter().all(|nanos| (launch..launch + 100).contains(nanos)),
        "{of_same_step:?}"
    );
}

#[test]
fn what_crosses_beside_fetches_takes_longer() {
    let plan = llama(7 * GIB);
    let decode = &plan.programs[first_decode(&plan)];
    assert!(counts(decode, 0).0 > 0, "{} fetches nothing", decode.name);
    let latency = plan.machine.links[0].latency_nanos as u64;
    let crosses = |step: &&Step| matches!(&step.action, Action::Move { .. });
    // What comes first of some values: what is right behind is under way with it.
    let first = |step: &&Step| crosses(step) && step.estimate_nanos > latency / 4;
    let first: Vec<u64> =
        decode.steps.rows().iter().filter(first).map(|step| step.estimate_nanos).collect();
    assert!(!first.is_empty() && first.iter().all(|&nanos| nanos > latency), "{first:?}");
}

/// Counts of the made-up mixture: the choices of an expert fall with its rank, which differs from layer to layer.
fn falling_counts(model: &Model, steepness: f64) -> CountedExperts {
    let mut counts = ExpertCounts { version: VERSION, ..ExpertCounts::default() };
    let routers = model.layers.nodes().filter(|(_, node)| matches!(node.work, Op::Route { .. }));
    for (layer, (_, node)) in routers.enumerate() {
        let rank = |expert: usize| (expert * 77 + layer * 13) % 128;
        let count = |expert| (1e6 / (2.0 + rank(expert) as f64).powf(steepness)) as u64;
        counts.routers.insert(node.name.to_string(), (0..128).map(count).collect());
    }
    CountedExperts { file: "counts.ron".into(), counts }
}

#[test]
fn experts_that_are_used_more_are_on_the_gpu() {
    // Room for some experts of each layer, and not for all of any.
    let (model, machine) = (MadeUp::mixture().model(), h200(9 * GIB / 2));
    let counted = |steepness: Option<f64>| {
        let expert_counts = steepness.map(|steepness| falling_counts(&model, steepness));
        let formats = vec!["q4".parse().expect("it is a format")];
        compile(&model, &machine, &Options { formats, expert_counts, ..options() })
    };
    let (unknown, even, uneven) = (counted(None), counted(Some(0.0)), counted(Some(1.0)));
    let decode = |plan: &Plan| rates(plan).1;
    assert!(decode(&uneven) > 1.3 * decode(&unknown), "{} {}", decode(&uneven), decode(&unknown));
    assert!(decode(&even) >= decode(&unknown));
    // So steep that nothing is counted.
    assert!((decode(&counted(Some(f64::INFINITY))) / decode(&even) - 1.0).abs() < 0.01);
    for forecast in uneven.forecast.devices.rows() {
        assert!(forecast.needed_bytes() <= forecast.capacity_bytes);
    }
    // Every layer has all of its experts once, the most used ones on the GPU.
    let of_kind = |kind: &str, stack: &str| -> Vec<(usize, u32)> {
        let weights = uneven.weights.rows().iter();
        let stacks =
            weights.filter(|weight| weight.name.ends_with(&format!("{stack} ({kind} used)")));
        stacks.map(|weight| (weight.device.index(), weight.shape[0])).collect()
    };
    for stack in ["gate_proj", "up_proj", "down_proj"] {
        let (most, least) = (of_kind("most", stack), of_kind("least", stack));
        assert!(
            most.iter().all(|(device, _)| *device == 0)
                && least.iter().all(|(device, _)| *device == 1)
        );
        let all: u32 = most.iter().chain(&least).map(|(_, experts)| experts).sum();
        assert_eq!((most.len(), all), (24, 24 * 128), "{stack}");
    }
}

#[test]
fn mixtures_that_are_pinned_stay_whole() {
    let (model, machine) = (MadeUp::mixture().model(), h200(9 * GIB / 2));
    let mixtures = model.layers.nodes().filter(|(_, node)| matches!(node.work, Op::Experts(_)));
    let mixtures: Vec<&str> = mixtures.map(|(_, node)| &*node.name).collect();
    let pin = format!("^{}$=numa0", mixtures[0].replace('.', r"\."));
    let pins = vec![pin.parse().expect("it is a pin")];
    let expert_counts = Some(falling_counts(&model, 1.0));
    let formats = vec!["q4".parse().expect("it is a format")];
    let plan = compile(&model, &machine, &Options { formats, expert_counts, pins, ..options() });
    let of_mixture = |mixture: &str| -> BTreeSet<&str> {
        let steps = plan.programs[first_decode(&plan)].steps.rows().iter();
        let computed = steps.filter(|step| matches!(step.action, Action::Run(_)));
        computed.map(|step| &*step.name).filter(|name| name.starts_with(mixture)).collect()
    };
    assert_eq!(of_mixture(mixtures[0]), BTreeSet::from([mixtures[0]]));
    assert!(of_mixture(mixtures[1]).len() > 1, "{:?}", of_mixture(mixtures[1]));
}

#[test]
fn counts_as_large_as_can_be_add_up() {
    let (model, machine) = (MadeUp::mixture().model(), h200(9 * GIB / 2));
    let mut counted = falling_counts(&model, 1.0);
    for counts in counted.counts.routers.values_mut() {
        counts[5] = u64::MAX;
    }
    let formats = vec!["q4".parse().expect("it is a format")];
    let plan =
        compile(&model, &machine, &Options { formats, expert_counts: Some(counted), ..options() });
    let steps = plan.programs[first_decode(&plan)].steps.rows().iter();
    let parts = steps.filter_map(|step| match &step.action {
        Action::Run(Op::Experts(experts)) => experts.part,
        Action::Run(_) | Action::Move { .. } | Action::Fetch { .. } => None,
    });
    let least: Vec<f32> = parts.filter(|part| part.first > 0).map(|part| part.load).collect();
    assert!(!least.is_empty() && least.iter().all(|&load| load < 0.2), "{least:?}");
}

#[test]
fn counts_of_another_model_are_refused() {
    let (model, machine) = (MadeUp::mixture().model(), h200(5 * GIB));
    let mut counted = falling_counts(&model, 1.0);
    let router = counted.counts.routers.keys().next().expect("there are routers").clone();
    let message = |counted: &CountedExperts| {
        let expert_counts = Some(counted.clone());
        let formats = vec!["q4".parse().expect("it is a format")];
        let options = Options { formats, expert_counts, ..options() };
        let refused = compiler::compile(&model, &machine, &options, &mut |_, _| ());
        format!("{:#}", refused.expect_err("the counts do not fit"))
    };
    counted.counts.routers.insert(router.clone(), vec![1; 64]);
    let few = message(&counted);
    assert!(few.contains("counts.ron") && few.contains("counts 64 experts"), "{few}");
    counted.counts.routers.remove(&router);
    let none = message(&counted);
    assert!(none.contains(&format!("no {router}")), "{none}");
}

#[test]
fn the_choice_is_never_slower_than_a_simple_one() {
    let model = MadeUp::llama(LlamaShape::LLAMA_8B).model();
    // In 12 bits it fits 12 GiB.
    for (plain_bf16, sizes) in [(true, [6, 8, 10, 12, 14, 16]), (false, [4, 5, 6, 7, 8, 10])] {
        for gpu_bytes in sizes.map(|gib| gib * GIB) {
            let plan = compile(&model, &h200(gpu_bytes), &Options { plain_bf16, ..options() });
            let score = |candidate: &ir::forecast::Candidate| {
                Some(tests::score(candidate.prefill_nanos?, candidate.decode_nanos?))
            };
            let mut scores = plan.forecast.candidates.iter().filter_map(score);
            let chosen = score(&plan.forecast.candidates[0]).unwrap();
            assert!(scores.all(|score| chosen <= score + 1.0));
            let names = plan.forecast.candidates.iter().map(|c| c.name.as_str());
            let names: Vec<&str> = names.collect();
            // The best cut where nearly all fits is that behind the token table, which has a name of its own.
            let is_cut = |name: &&str| {
                name.starts_with("pipeline") || *name == "all on gpu0, embedding on numa0"
            };
            let has_pipeline = names.iter().any(is_cut);
            assert!(has_pipeline, "{gpu_bytes}: {names:?}");
        }
    }
}

#[test]
fn more_memory_is_never_slower() {
    let mut last = f64::INFINITY;
    for gpu_bytes in [6, 8, 10, 12, 14, 16, 18].map(|gib| gib * GIB) {
        let plan = llama(gpu_bytes);
        assert!(score(&plan) <= last, "{gpu_bytes} bytes: {}", chosen(&plan));
        last = score(&plan);
    }
}
