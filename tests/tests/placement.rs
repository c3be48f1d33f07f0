//! What placement decides, and what it says when it cannot.

use std::collections::BTreeSet;

use compiler::Options;
use compiler::options::{
    CountedExperts, Objective, Request, parse_pipeline, parse_tensor_parallel,
};
use ir::counts::ExpertCounts;
use ir::graph::Reason;
use ir::id::{DeviceId, Id as _};
use ir::machine::{DeviceKind, Machine};
use ir::op::Op;
use ir::plan::{Action, Plan};
use ir::tensor::{DType, Format};
use tests::machines::{self, gpu, linked, numa};
use tests::toys::{FeedForward, Toy};

const GIB: u64 = 1 << 30;

fn compile(toy: &Toy, machine: &Machine, options: &Options) -> anyhow::Result<Plan> {
    let model = toy.model().expect("the toy is a model");
    compiler::compile(&model, machine, options, &mut |_, _| ())
}

fn plan(toy: &Toy, machine: &Machine, options: &Options) -> Plan {
    compile(toy, machine, options).expect("the toy compiles")
}

fn refusal(toy: &Toy, machine: &Machine, options: &Options) -> String {
    match compile(toy, machine, options) {
        Ok(_) => panic!("it compiled"),
        Err(error) => format!("{error:#}"),
    }
}

/// Names of the devices that compute steps whose names hold `part`.
fn devices_of(plan: &Plan, part: &str) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    let program = &plan.programs[0];
    for lane in &program.lanes {
        for &step in &lane.steps {
            let step = &program.steps[step];
            let name = &plan.machine.devices[lane.device].name;
            if matches!(step.action, Action::Run(_))
                && step.name.contains(part)
                && !names.contains(name)
            {
                names.push(name.clone());
            }
        }
    }
    names
}

#[test]
fn a_model_that_fits_the_fastest_device_is_all_there() {
    let machine = linked(vec![numa(0, GIB), gpu(0, GIB)]);
    let toy = Toy { features: 1024, intermediate: 4096, ..Toy::llama() };
    let plan = plan(&toy, &machine, &Options::default());
    assert_eq!(devices_of(&plan, ""), ["gpu0"]);
    assert_eq!(plan.forecast.candidates[0].name, "all on gpu0");
}

#[test]
fn the_choice_is_never_slower_than_a_candidate_that_fits() {
    for machine in [machines::one_gpu_two_numa(), machines::two_gpu_two_numa()] {
        let plan = plan(&Toy::llama(), &machine, &Options::default());
        let scores: Vec<f64> = plan
            .forecast
            .candidates
            .iter()
            .filter_map(|candidate| {
                Some(tests::score(candidate.prefill_nanos?, candidate.decode_nanos?))
            })
            .collect();
        assert!(scores.len() > 1);
        assert!(scores.iter().all(|score| scores[0] <= score + 1.0), "{scores:?}");
        let chosen = &plan.forecast.candidates[0];
        assert_eq!(chosen.prefill_nanos, Some(plan.forecast.programs[0].nanos));
        assert_eq!(
            chosen.decode_nanos,
            Some(plan.forecast.programs[tests::first_decode(&plan)].nanos)
        );
    }
}

#[test]
fn the_missing_bytes_are_exactly_what_is_missing() {
    let toy = Toy::llama();
    let machine = |bytes| linked(vec![numa(0, bytes)]);
    let refusal = refusal(&toy, &machine(100_000), &Options::default());
    assert!(refusal.contains("missing on numa0, which has 100000 bytes"), "{refusal}");
    let missing: u64 = refusal
        .split_whitespace()
        .find_map(|word| word.parse().ok())
        .expect("the refusal gives a number");
    assert!(compile(&toy, &machine(100_000 + missing), &Options::default()).is_ok());
    assert!(compile(&toy, &machine(100_000 + missing - 1), &Options::default()).is_err());
}

#[test]
fn fewer_tokens_of_a_prefill_are_advised_where_they_fit() {
    let options = |tokens| Options { prefill_tokens: Some(tokens), ..Options::default() };
    let machine = |bytes| linked(vec![numa(0, bytes)]);
    let small = plan(&Toy::llama(), &machine(GIB), &options(64));
    let needed = small.forecast.devices[DeviceId::from_index(0)].needed_bytes();
    let refused = refusal(&Toy::llama(), &machine(needed), &options(256));
    assert!(refused.contains("lower --prefill-tokens to 64, "), "{refused}");
    let refused = refusal(&Toy::llama(), &machine(100_000), &options(256));
    assert!(!refused.contains("--prefill-tokens"), "{refused}");
}

#[test]
fn a_pin_moves_its_layers_and_is_their_cause() {
    let machine = machines::two_numa();
    let pin = "layers.1.*=numa1".parse().expect("it is a pin");
    let request = Request::Pipeline(vec!["numa0".into()]);
    let options = Options { pins: vec![pin], request, ..Options::default() };
    let plan = plan(&Toy::llama(), &machine, &options);
    assert_eq!(devices_of(&plan, "layers.1."), ["numa1"]);
    assert_eq!(devices_of(&plan, "layers.0."), ["numa0"]);
    let pattern = Reason::Pinned { pattern: "layers.1.*".into() };
    assert!(plan.causes.rows().iter().any(|cause| cause.reason == pattern));
}

#[test]
fn a_candidate_does_not_claim_what_is_pinned() {
    let options = |pin: &str| {
        let pin = pin.parse().expect("it is a pin");
        Options { pins: vec![pin], ..Options::default() }
    };
    let names = |plan: &Plan| -> Vec<String> {
        plan.forecast.candidates.iter().map(|candidate| candidate.name.clone()).collect()
    };
    let one = plan(&Toy::llama(), &machines::two_numa(), &options("layers.1.*=numa1"));
    let names_of_one = names(&one);
    for name in ["all on numa1", "all on numa0 but for pins"] {
        assert!(names_of_one.iter().any(|known| known == name), "{names_of_one:?}");
    }
    let all = plan(&Toy::llama(), &machines::two_numa(), &options(".*=numa1"));
    assert_eq!(names(&all), ["all as pinned"]);
}

#[test]
fn caches_of_too_many_sequences_are_refused_and_may_be_shared() {
    let toy = Toy::llama();
    let machine = linked(vec![numa(0, 8 << 20)]);
    let options =
        |kv_cache_bytes| Options { max_sequences: 100, kv_cache_bytes, ..Options::default() };
    let refused = refusal(&toy, &machine, &options(None));
    assert!(refused.contains("the KV cache of 100 sequences does not fit"), "{refused}");
    // A block of 16 KiB for each, where one context takes 8.
    assert!(refused.contains("with --kv-cache, of 1638400 bytes"), "{refused}");
    assert_eq!(plan(&toy, &machine, &options(Some(1_638_400))).model.blocks, 100);
    let few = refusal(&toy, &machine, &options(Some(1 << 20)));
    assert!(few.contains("lower --max-sequences to 64"), "{few}");
}

#[test]
fn prefill_takes_no_more_tokens_than_asked() {
    let options = Options { max_sequences: 100, prefill_tokens: Some(16), ..Options::default() };
    let plan = plan(&Toy::llama(), &machines::two_numa(), &options);
    let prefill = &plan.programs[0];
    assert_eq!((prefill.max.tokens, prefill.max.rows, prefill.max_sequences), (16, 16, 16));
    assert_eq!(plan.programs.last().expect("a decode program").max_sequences, 100);
}

#[test]
fn options_that_would_do_nothing_are_refused() {
    let no_gpu = Options { gpu_memory_bytes: Some(GIB), ..Options::default() };
    let refused = refusal(&Toy::llama(), &machines::two_numa(), &no_gpu);
    assert!(refused.contains("--gpu-memory limits GPUs, and the machine has none"), "{refused}");
    let counts = ExpertCounts { model: "another".into(), ..ExpertCounts::default() };
    let expert_counts = Some(CountedExperts { file: "counts.ron".into(), counts });
    let dense = Options { expert_counts, ..Options::default() };
    let refused = refusal(&Toy::llama(), &machines::two_numa(), &dense);
    assert!(refused.contains("counts.ron: the model has no experts"), "{refused}");
}

#[test]
fn a_stack_of_one_expert_is_held_as_others_are() {
    let one = FeedForward::Mixture { experts: 1, used: 1, is_shared: true };
    let formats = vec!["q8".parse().expect("it is a format")];
    let options = Options { formats, ..Options::default() };
    let plan = plan(&Toy { feed_forward: one, ..Toy::llama() }, &machines::two_numa(), &options);
    let mut stacks = plan.weights.rows().iter().filter(|weight| weight.shape.len() == 3).peekable();
    assert!(stacks.peek().is_some() && stacks.all(|stack| stack.format == Format::Q8));
}

#[test]
fn a_pin_that_cannot_be_is_refused() {
    let machine = machines::two_numa();
    let options = |pin: &str| {
        let pin = pin.parse().expect("it is a pin");
        Options { pins: vec![pin], ..Options::default() }
    };
    let unknown = refusal(&Toy::llama(), &machine, &options("layers.1=gpu7"));
    assert_eq!(unknown, "unknown device \"gpu7\": the machine has numa0, numa1");
    let idle = refusal(&Toy::llama(), &machine, &options("layers.99=numa0"));
    assert_eq!(
        idle,
        "the pin \"layers.99\" matches no node; they are called embed, layers.0.q+k+v, layers.0.attention, layers.0.o, \
         layers.0.gate+up, layers.0.down, select, head"
    );
}

/// The search for the fewest blocks that stay with a host once looked for them on a GPU that has no part in it.
#[test]
fn a_pin_that_does_not_fit_ends_the_search() {
    let toy = Toy { layers: 3, ..Toy::mixture() };
    for kibibytes in (100..700).step_by(50) {
        let machine = linked(vec![gpu(0, 1 << 10), gpu(1, kibibytes << 10), numa(0, GIB)]);
        let pin = "layers.0.(q|up|experts)=gpu0".parse().expect("it is a pin");
        let options = Options { pins: vec![pin], ..Options::default() };
        let refused = refusal(&toy, &machine, &options);
        assert!(refused.contains("gpu0"), "{refused}");
    }
}

#[test]
fn a_cache_that_nodes_cannot_store_is_refused() {
    let toy = Toy { head_dim: 6, ..Toy::llama() };
    let options = Options { kv_type: Some(DType::I8), ..Options::default() };
    assert_eq!(
        refusal(&toy, &machines::two_numa(), &options),
        "numa0 stores no keys of 6 features in i8: give another --kv-type, such as f32"
    );
    // Two keys of bfloat16 are stored together; where nothing is asked for, odd ones are stored in f32.
    let stored = |head_dim| {
        let toy = Toy { head_dim, stored: DType::Bf16, ..Toy::llama() };
        let plan = plan(&toy, &machines::two_numa(), &Options::default());
        plan.caches.rows().iter().map(|cache| cache.dtype).collect::<BTreeSet<DType>>()
    };
    assert_eq!([stored(6), stored(5)], [[DType::Bf16].into(), [DType::F32].into()]);
}

#[test]
fn a_format_for_no_device_is_refused() {
    let format = "gpu*=f16".parse().expect("it is a rule");
    let options = Options { formats: vec![format], ..Options::default() };
    let refused = refusal(&Toy::llama(), &machines::two_numa(), &options);
    assert_eq!(refused, "the format \"gpu*=f16\" matches no device: the machine has numa0, numa1");
}

#[test]
fn requested_stages_are_all_used_in_their_order() {
    let request = parse_pipeline("numa1,numa0").expect("it is a request");
    let options = Options { request, ..Options::default() };
    let plan = plan(&Toy { layers: 6, ..Toy::llama() }, &machines::two_numa(), &options);
    assert_eq!(devices_of(&plan, "layers.0."), ["numa1"]);
    assert_eq!(devices_of(&plan, "layers.5."), ["numa0"]);
    // Even stages: of six alike layers neither device has more than four.
    let on = |name: &str| {
        (0..6).filter(|i| devices_of(&plan, &format!("layers.{i}.")) == [name]).count()
    };
    assert!((2..=4).contains(&on("numa0")), "{}", on("numa0"));
}

#[test]
fn more_stages_than_layers_are_refused() {
    let devices: Vec<_> = (0..6).map(|node| numa(node, GIB)).collect();
    let request = Request::Pipeline((0..6).map(|node| format!("numa{node}")).collect());
    let options = Options { request, ..Options::default() };
    let toy = Toy { layers: 2, ..Toy::llama() };
    let refusal = refusal(&toy, &linked(devices), &options);
    assert!(refusal.contains("6 stages"), "{refusal}");
}

#[test]
fn shares_are_as_asked_in_whole_heads_and_blocks() {
    let request = parse_tensor_parallel("numa0:3,numa1:1").expect("it is a request");
    let options = Options { request, ..Options::default() };
    let toy = Toy { kv_heads: 4, ..Toy::llama() };
    let plan = plan(&toy, &machines::two_numa(), &options);
    let heads: Vec<u32> = plan.caches.rows().iter().map(|cache| cache.kv_heads).collect();
    assert_eq!(heads, [3, 1, 3, 1]);
    let rows = |device: usize| {
        let device = DeviceId::from_index(device);
        let mut gates = plan
            .weights
            .rows()
            .iter()
            .filter(|weight| weight.device == device && weight.name.contains("gate"));
        gates.next().expect("both hold a part").shape[0]
    };
    assert_eq!((rows(0), rows(1)), (96, 32));
}

#[test]
fn ranks_are_gpus_first_then_nodes() {
    let machine = linked(vec![numa(0, GIB), gpu(0, GIB), numa(1, GIB)]);
    let toy = Toy { layers: 4, ..Toy::llama() };
    let options = |request| Options { request, ..Options::default() };
    let pipeline = parse_pipeline("2").expect("it is a request");
    let in_stages = plan(&toy, &machine, &options(pipeline));
    assert_eq!(in_stages.forecast.candidates[0].name, "pipeline gpu0 → numa0");
    let shared = parse_tensor_parallel("3").expect("it is a request");
    let shared = plan(&toy, &machine, &options(shared));
    assert_eq!(shared.forecast.candidates[0].name, "tensor parallel gpu0+numa0+numa1");
    let many = parse_tensor_parallel("4").expect("it is a request");
    let refusal = refusal(&toy, &machine, &options(many));
    assert_eq!(
        refusal,
        "4 ranks need as many devices; 3 are there: `hybridc probe --split 2 -o machine.ron`, on the machine that is \
         planned for, divides its nodes, and --machine machine.ron plans with them"
    );
    let too_many = parse_tensor_parallel("200").expect("it is a request");
    let refusal = self::refusal(&toy, &machine, &options(too_many));
    assert_eq!(refusal, "200 ranks need as many devices; 3 are there");
}

/// Heads of 100 features in 16 bits are no whole loads of 16 bytes, two of them are.
#[test]
fn gpus_share_heads_in_parts_that_they_multiply() {
    let toy = Toy { heads: 32, kv_heads: 32, head_dim: 100, stored: DType::Bf16, ..Toy::llama() };
    let mut machine = linked((0..3).map(|ordinal| gpu(ordinal, GIB)).collect());
    for (ordinal, device) in (0..).zip(machine.devices.rows_mut()) {
        device.kind = DeviceKind::Gpu {
            ordinal,
            reserved_bytes: 0,
            library_bytes: 256,
            launch_bytes: 0,
            has_warpgroups: false,
        };
    }
    // By these parts alone 13, 13 and 6 of 32.
    let request = parse_tensor_parallel("gpu0:2,gpu1:2,gpu2:1").expect("it is a request");
    let plan = plan(&toy, &machine, &Options { request, ..Options::default() });
    let heads = plan.caches.rows().iter().map(|cache| cache.kv_heads);
    assert!(heads.clone().sum::<u32>() == 2 * 32 && heads.clone().all(|heads| heads % 2 == 0));
}

#[test]
fn more_devices_than_heads_cannot_share_attention() {
    let names: Vec<String> = (0..5).map(|node| format!("numa{node}")).collect();
    let request = Request::TensorParallel(names.iter().map(|name| (name.clone(), None)).collect());
    let options = Options { request, ..Options::default() };
    let machine = linked((0..5).map(|node| numa(node, GIB)).collect());
    let refusal = refusal(&Toy::llama(), &machine, &options);
    assert!(refusal.contains("4 attention heads are too few for 5 devices"), "{refusal}");
}

#[test]
fn throughput_spreads_prompts_that_latency_keeps_together() {
    let toy = Toy { layers: 8, ..Toy::llama() };
    let mut machine = machines::two_numa();
    // No layer is worth sharing.
    machine.links.iter_mut().for_each(|link| link.latency_nanos = 1e8);
    let busiest = |objective| {
        let options = Options { objective, max_sequences: 64, ..Options::default() };
        plan(&toy, &machine, &options).forecast.programs[0].busiest_lane_nanos
    };
    assert!(busiest(Objective::Throughput) < busiest(Objective::Latency));
}

#[test]
fn a_cache_budget_buys_whole_blocks_and_holds_one_context() {
    let options =
        |bytes| Options { kv_cache_bytes: Some(bytes), max_sequences: 8, ..Options::default() };
    let machine = machines::two_numa();
    // Two layers of keys and values, 2 heads of 16 features, 32 tokens of 4 bytes: 16 KiB a block, 8 a context.
    let small = refusal(&Toy::llama(), &machine, &options(8 * 16_384 - 1));
    assert!(small.contains("1 bytes short of one context of 256 tokens"), "{small}");
    let blocks = |bytes| plan(&Toy::llama(), &machine, &options(bytes)).model.blocks;
    assert_eq!(blocks(8 * 16_384), 8);
    assert_eq!(blocks(20 * 16_384 + 5), 20);
    // More than all sequences can fill is not taken.
    assert_eq!(blocks(GIB), 64);
}

#[test]
fn formats_follow_their_devices_and_spare_vectors_and_routers() {
    let rule = "numa*=q8".parse().expect("it is a rule");
    let options = Options { formats: vec![rule], ..Options::default() };
    let plan = plan(&Toy::mixture(), &machines::two_numa(), &options);
    for weight in plan.weights.rows() {
        let is_spared = weight.shape.len() == 1 || weight.name.contains("router");
        let expected = if is_spared { Format::F32 } else { Format::Q8 };
        assert_eq!(weight.format, expected, "{}", weight.name);
    }
    assert!(plan.weights.rows().iter().any(|weight| weight.name.contains("router")));
}

#[test]
fn matrices_of_a_gate_have_one_format_however_they_are_stored() {
    let machine = linked(vec![numa(0, GIB)]);
    for toy in [Toy::llama(), Toy::mixture()] {
        let mut model = toy.model().expect("the toy is a model");
        for weight in model.weights.rows_mut() {
            if weight.name.ends_with(".up") {
                weight.stored = DType::Bf16;
            }
        }
        let format_of = |formats: &[&str]| -> Vec<Format> {
            let formats = formats.iter().map(|rule| rule.parse().expect("it is a rule")).collect();
            let options = Options { formats, ..Options::default() };
            let plan = compiler::compile(&model, &machine, &options, &mut |_, _| ());
            let plan = plan.expect("the toy compiles");
            let weights = plan.weights.rows().iter();
            let of_gates = weights
                .filter(|weight| weight.name.ends_with(".gate") || weight.name.ends_with(".up"));
            of_gates.map(|weight| weight.format).collect()
        };
        assert_eq!(format_of(&[]), [Format::F32; 4]);
        assert_eq!(format_of(&["bf16"]), [Format::Bf16; 4]);
    }
}

#[test]
fn attention_that_is_pinned_is_not_shared_by_heads() {
    let model = Toy::llama().model().expect("the toy is a model");
    let attentions = model.layers.nodes().filter(|(_, node)| matches!(node.work, Op::Attention(_)));
    let pin = |name: &str| format!("^{}$=numa0", name.replace('.', r"\.")).parse();
    let pins = attentions.map(|(_, node)| pin(&node.name)).collect::<Result<_, _>>();
    // Four heads are too few for five devices.
    let machine = linked((0..5).map(|node| numa(node, GIB)).collect());
    let options = Options {
        request: parse_tensor_parallel("5").expect("it is a request"),
        pins: pins.expect("they are pins"),
        ..Options::default()
    };
    let plan = plan(&Toy::llama(), &machine, &options);
    let attending = plan.programs[0].steps.iter().filter_map(|(id, step)| {
        let is_attention = matches!(step.action, Action::Run(Op::Attention(_)));
        let lane = plan.programs[0].lanes.iter().find(|lane| lane.steps.contains(&id))?;
        is_attention.then_some(lane.device)
    });
    assert_eq!(attending.collect::<Vec<_>>(), [DeviceId::from_index(0); 2]);
}

#[test]
fn a_format_without_a_rate_is_refused() {
    let mut machine = linked(vec![numa(0, GIB)]);
    for device in machine.devices.rows_mut() {
        device.rates.linear.retain(|rate| rate.format != Format::Q4);
    }
    let rule = "q4".parse().expect("it is a rule");
    let options = Options { formats: vec![rule], ..Options::default() };
    let refusal = refusal(&Toy::llama(), &machine, &options);
    assert!(refusal.contains("numa0 does not compute q4"), "{refusal}");
}

#[test]
fn a_device_that_is_left_out_is_not_in_the_plan() {
    let options = Options { without: vec!["gpu0".into()], ..Options::default() };
    let plan = plan(&Toy::llama(), &machines::one_gpu_two_numa(), &options);
    assert!(plan.machine.device("gpu0").is_none());
    assert!(plan.machine.device("numa1").is_some());
}

#[test]
fn a_device_without_links_takes_part_in_nothing_with_others() {
    let mut machine = machines::two_numa();
    machine.links.clear();
    let request = parse_pipeline("numa0,numa1").expect("it is a request");
    let refusal = refusal(&Toy::llama(), &machine, &Options { request, ..Options::default() });
    assert!(refusal.contains("no link leads from numa0 to numa1"), "{refusal}");
    assert_eq!(plan(&Toy::llama(), &machine, &Options::default()).forecast.candidates.len(), 2);
}

#[test]
fn small_gpus_do_not_keep_large_ones_from_sharing_layers() {
    let toy = Toy { features: 2048, intermediate: 8192, ..Toy::llama() };
    let alone = plan(&toy, &linked(vec![gpu(0, GIB)]), &Options::default());
    let needed = alone.forecast.devices.rows()[0].needed_bytes();
    let sizes = [needed / 10, needed * 6 / 10, needed / 10, needed * 6 / 10];
    let gpus = (0..).zip(sizes).map(|(ordinal, bytes)| gpu(ordinal, bytes));
    let mut machine = linked(gpus.chain([numa(0, GIB)]).collect());
    let plan = plan(&toy, &machine, &Options::default());
    assert_eq!(plan.forecast.candidates[0].name, "tensor parallel gpu1+gpu3");
    // Rates that were measured one by one differ a little.
    machine.devices.rows_mut()[3].rates.read_bytes_per_sec *= 1.03;
    let plan = self::plan(&toy, &machine, &Options::default());
    assert_eq!(plan.forecast.candidates[0].name, "tensor parallel gpu1+gpu3");
}
