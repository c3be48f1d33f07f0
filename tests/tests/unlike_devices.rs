//! What is decided where devices are unlike: in formats, memory, kernels, speed or number.

use compiler::Options;
use compiler::options::{Objective, Request};
use ir::captured::can_include_prompts;
use ir::graph::{Cause, Reason};
use ir::id::{DeviceId, Id as _};
use ir::machine::{Device, DeviceKind, Machine};
use ir::model::Model;
use ir::plan::{Action, Phase, Plan};
use ir::tensor::{DType, Format};
use tests::machines::{
    add_gpus, add_like, eight_unlike, h200, slow_down, slow_down_rates, two_sockets,
};
use tests::made_up::{LlamaShape, MadeUp};
use tests::{first_decode, rates};

const GIB: u64 = 1 << 30;

fn llama_8b() -> Model {
    MadeUp::llama(LlamaShape::LLAMA_8B).model()
}

fn compile(model: &Model, machine: &Machine, options: &Options) -> Plan {
    compiler::compile(model, machine, options, &mut |_, _| ()).expect("it fits")
}

fn options() -> Options {
    Options { context: Some(4096), ..Options::default() }
}

fn chosen(plan: &Plan) -> &str {
    &plan.forecast.candidates[0].name
}

fn device(machine: &Machine, name: &str) -> DeviceId {
    machine.device(name).expect("the machine has it")
}

/// So many NUMA nodes like an H200's host, and no GPU.
fn nodes(count: u32) -> Machine {
    let mut machine = h200(GIB);
    add_like(
        &mut machine,
        "numa0",
        |number, node| {
            let number = u32::try_from(number).expect("nodes are few");
            node.name = format!("numa{number}");
            let cpus = (16 * number..16 * (number + 1)).collect();
            node.kind = DeviceKind::Numa { node: number, cpus };
        },
        count as usize - 1,
    );
    let gpu = device(&machine, "gpu0");
    machine.devices[gpu].memory_bytes = 0;
    machine
}

#[test]
fn a_gpu_is_full_where_hosts_hold_blocks_in_fewer_bytes() {
    let gpu = DeviceId::from_index(0);
    for rule in ["numa*=q4", "numa*=q8", "numa*=f32"] {
        let formats = vec![rule.parse().expect("it is a rule")];
        let options = Options { formats, plain_bf16: true, ..options() };
        let plan = compile(&llama_8b(), &h200(10 * GIB), &options);
        let block = 436 << 20;
        let free = plan.forecast.devices[gpu].free_bytes();
        assert!(free < 2 * block, "{rule}: {free} bytes are free, {}", chosen(&plan));
    }
}

#[test]
fn a_node_without_memory_keeps_no_gpu_from_computing() {
    let mut machine = two_sockets(40 * GIB);
    let tiny = device(&machine, "numa0");
    for bytes in [0, 64 << 20] {
        machine.devices[tiny].memory_bytes = bytes;
        assert_eq!(chosen(&compile(&llama_8b(), &machine, &options())), "all on gpu0");
    }
}

#[test]
fn throughput_counts_that_stages_wait_for_each_other_in_decode() {
    let options = Options { objective: Objective::Throughput, max_sequences: 4, ..options() };
    let plan = compile(&llama_8b(), &nodes(2), &options);
    assert_eq!(chosen(&plan), "tensor parallel numa0+numa1");
}

#[test]
fn a_decode_of_many_sequences_has_as_much_cached_as_there_is_room_for() {
    let cached = |kv_cache_bytes| {
        let options = Options { max_sequences: 64, kv_cache_bytes, ..options() };
        let plan = compile(&llama_8b(), &h200(130 * GIB), &options);
        let decodes = plan.forecast.programs.into_iter().skip(1);
        decodes.map(|decode| decode.tokens).collect::<Vec<u32>>()
    };
    // 128 KiB a token; of one to 64 sequences, and half of the context at most.
    assert_eq!(cached(Some(2 * GIB)), [2048, 2048, 1023, 255]);
    assert_eq!(cached(None), [2048; 4]);
}

#[test]
fn one_small_node_of_eight_leaves_the_others_to_share() {
    let mut machine = nodes(8);
    let tiny = device(&machine, "numa3");
    machine.devices[tiny].memory_bytes = 100 << 20;
    let plan = compile(&llama_8b(), &machine, &options());
    assert!(chosen(&plan).starts_with("tensor parallel"), "{}", chosen(&plan));
    assert!(!chosen(&plan).contains("numa3"), "{}", chosen(&plan));
}

#[test]
fn as_many_nodes_share_as_there_are_heads_for() {
    let shape = LlamaShape { heads: 4, kv_heads: 4, ..LlamaShape::LLAMA_8B };
    let plan = compile(&MadeUp::llama(shape).model(), &nodes(8), &options());
    assert_eq!(chosen(&plan), "tensor parallel numa0+numa1+numa2+numa3");
}

#[test]
fn a_slow_gpu_does_not_keep_the_host_out() {
    let mut machine = h200(10 * GIB);
    let slow = |_: usize, gpu: &mut Device| {
        gpu.memory_bytes = 12 * GIB;
        gpu.rates.read_bytes_per_sec /= 100.0;
        let points = gpu.rates.linear.iter_mut().flat_map(|rate| &mut rate.points);
        points.for_each(|point| point.weights_per_sec /= 400.0);
    };
    add_gpus(&mut machine, slow, 1);
    let plan = compile(&llama_8b(), &machine, &options());
    assert!(chosen(&plan).contains("beside gpu0"), "{}", chosen(&plan));
}

#[test]
fn a_small_slow_gpu_that_fits_first_is_not_taken_instead_of_a_large_one() {
    let mut machine = two_sockets(10 * GIB);
    let large = device(&machine, "gpu0");
    let options = Options {
        context: Some(1024),
        max_sequences: 64,
        objective: Objective::Throughput,
        ..options()
    };
    let alone = compile(&llama_8b(), &machine, &options);
    let small = |_: usize, gpu: &mut Device| {
        gpu.memory_bytes = 4 * GIB;
        slow_down_rates(&mut gpu.rates, 0.4);
    };
    add_gpus(&mut machine, small, 1);
    let is_host = |end: DeviceId| !machine.devices[end].kind.is_gpu();
    machine.links.retain(|link| is_host(link.from) || is_host(link.to));
    let plan = compile(&llama_8b(), &machine, &options);
    assert_eq!(chosen(&plan), chosen(&alone));
    assert!(plan.forecast.devices[large].weight_bytes > 5 * GIB);
}

#[test]
fn a_tiny_gpu_is_left_out_beside_a_host() {
    let mut machine = h200(24 * GIB);
    let smaller = |number: usize, gpu: &mut Device| {
        gpu.memory_bytes = [GIB * 49 / 2, 400 << 20][number - 1];
    };
    add_gpus(&mut machine, smaller, 2);
    let formats = vec!["q8".parse().expect("it is a rule")];
    let model = MadeUp::llama(LlamaShape::LLAMA_70B).model();
    let plan = compile(&model, &machine, &Options { formats, ..options() });
    assert!(chosen(&plan).contains("gpu0 → gpu1"), "{}", chosen(&plan));
    assert!(!chosen(&plan).contains("gpu2"), "{}", chosen(&plan));
}

#[test]
fn a_small_socket_holds_what_it_has_room_for() {
    let mut machine = two_sockets(10 * GIB);
    let small = device(&machine, "numa0");
    machine.devices[small].memory_bytes = 20 * GIB;
    let formats = vec!["q8".parse().expect("it is a rule")];
    let model = MadeUp::llama(LlamaShape::LLAMA_70B).model();
    let plan = compile(&model, &machine, &Options { formats, ..options() });
    let held = plan.forecast.devices[small].weight_bytes;
    // An even share would be 30 GiB.
    assert!(held > 12 * GIB, "numa0 holds {held} bytes, {}", chosen(&plan));
}

#[test]
fn a_node_that_lacks_a_format_leaves_hosting_to_the_other() {
    let formats = vec!["q4".parse().expect("it is a rule")];
    let options = Options { formats, ..options() };
    for (lacks, has) in [("numa0", "numa1"), ("numa1", "numa0")] {
        let mut machine = two_sockets(4 * GIB);
        let lacking = device(&machine, lacks);
        machine.devices[lacking].rates.linear.retain(|rate| rate.format != Format::Q4);
        let plan = compile(&llama_8b(), &machine, &options);
        let expected = format!("on {has} beside gpu0");
        assert!(chosen(&plan).contains(&expected), "{}", chosen(&plan));
    }
}

#[test]
fn a_time_of_hours_is_refused() {
    let mut machine = h200(10 * GIB);
    machine.links[0].latency_nanos = 1e20;
    let refusal = compiler::compile(&llama_8b(), &machine, &options(), &mut |_, _| ());
    let refusal = format!("{:#}", refusal.expect_err("no link is so slow"));
    assert!(refusal.contains("latency_nanos"), "{refusal}");
    assert!(refusal.contains("1000000000000"), "{refusal}");
}

#[test]
fn a_link_that_cores_slow_down_carries_less_in_decode() {
    let fetched = |kept: f64| {
        let mut machine = h200(8 * GIB);
        machine.links.iter_mut().for_each(|link| link.beside_reads = Some(kept));
        let plan = compile(&llama_8b(), &machine, &options());
        let decode = plan.programs.iter().find(|program| program.phase == Phase::Decode);
        let steps = decode.expect("a decode").steps.rows().iter();
        let bytes = steps.map(|step| match step.action {
            Action::Fetch { weight, .. } => plan.weight_bytes(&plan.weights[weight]),
            Action::Run(_) | Action::Move { .. } => 0,
        });
        bytes.sum::<u64>()
    };
    let (much, little) = (fetched(1.0), fetched(0.5));
    assert!(little > 0 && 4 * little < 3 * much, "{little} and {much} bytes");
}

#[test]
fn a_link_that_keeps_nothing_is_refused() {
    let mut machine = h200(10 * GIB);
    machine.links[0].beside_reads = Some(0.0);
    let refusal = compiler::compile(&llama_8b(), &machine, &options(), &mut |_, _| ());
    let refusal = format!("{:#}", refusal.expect_err("it carries something"));
    assert!(refusal.contains("beside_reads"), "{refusal}");
}

#[test]
fn a_short_context_is_fed_at_once_where_that_is_sooner() {
    let plan = compile(&llama_8b(), &h200(10 * GIB), &Options { context: Some(1000), ..options() });
    assert_eq!(plan.programs[0].max.tokens, 1000);
}

#[test]
fn many_sequences_leave_12_bits_to_the_decode_of_one() {
    let mut machine = nodes(1);
    let node = device(&machine, "numa0");
    for rate in &mut machine.devices[node].rates.linear {
        // Both multiply as fast.
        let at = rate.points.iter_mut().find(|point| point.tokens == 64).expect("it is a point");
        at.weights_per_sec = 2e10;
    }
    let plan = compile(&llama_8b(), &machine, &Options { max_sequences: 64, ..options() });
    let is_narrow = plan.weights.rows().iter().any(|weight| weight.format == Format::Bf12);
    assert!(is_narrow);
}

#[test]
fn prompts_leave_12_bits_to_latency_on_nodes() {
    let mut machine = nodes(1);
    let node = device(&machine, "numa0");
    for rate in &mut machine.devices[node].rates.linear {
        if rate.format == Format::Bf12 {
            let points = rate.points.iter_mut().filter(|point| point.tokens > 64);
            points.for_each(|point| point.weights_per_sec /= 1.5);
        }
    }
    let is_narrow = |objective| {
        let without = vec!["gpu0".into()];
        let options = Options { objective, max_sequences: 32, without, ..options() };
        let plan = compile(&llama_8b(), &machine, &options);
        plan.weights.rows().iter().any(|weight| weight.format == Format::Bf12)
    };
    assert!(is_narrow(Objective::Latency));
    assert!(!is_narrow(Objective::Throughput));
}

#[test]
fn what_a_shared_layer_lacks_is_exact() {
    let model = llama_8b();
    let members = ["gpu0", "numa0"].map(|name| (name.to_owned(), None));
    let shared = Options { request: Request::TensorParallel(members.to_vec()), ..options() };
    let refusal = |bytes: u64| -> Option<u64> {
        let refused = compiler::compile(&model, &h200(bytes), &shared, &mut |_, _| ()).err()?;
        let refused = format!("{refused:#}");
        let missing = refused.strip_prefix("the model does not fit: ")?.split(' ').next()?;
        Some(missing.parse().unwrap())
    };
    // With next to nothing, with less than the shares that are tried first, and with nearly enough.
    let least = GIB / 2 + refusal(GIB / 2).unwrap();
    for bytes in [GIB, 2 * least / 3, least - 1] {
        assert_eq!(refusal(bytes), Some(least - bytes));
    }
    assert_eq!(refusal(least), None);
    // Another one has room for little more than what the GPU cannot hold.
    let tight = |bytes: u64, node: u64| {
        let mut machine = h200(bytes);
        let numa = device(&machine, "numa0");
        machine.devices[numa].memory_bytes = node;
        compiler::compile(&model, &machine, &shared, &mut |_, _| ()).is_ok()
    };
    assert!(tight(6 * GIB, 8 * GIB) && !tight(6 * GIB, 5 * GIB));
}

#[test]
fn caches_of_bytes_with_a_small_host_leave_a_gpu_room_for_its_matrices() {
    let mut machine = h200(13 * GIB);
    let node = device(&machine, "numa0");
    machine.devices[node].memory_bytes = 17 * GIB / 2;
    let kv_type = Some(DType::I8);
    let context = 65_536;
    let model = Model { context, ..llama_8b() };
    let asked = Options { context: Some(context), kv_type, plain_bf16: true, ..options() };
    let plan = compile(&model, &machine, &asked);
    assert!(chosen(&plan).contains("32 caches there"), "{}", chosen(&plan));
}

#[test]
fn members_in_unlike_formats_share_what_each_has_room_for() {
    let mut machine = nodes(2);
    for (name, tenths) in [("numa0", 30), ("numa1", 74)] {
        let node = device(&machine, name);
        machine.devices[node].memory_bytes = tenths * GIB / 10;
    }
    let formats = vec!["numa1=q8".parse().expect("a rule")];
    let asked = Options { context: Some(2048), plain_bf16: true, formats, ..options() };
    let plan = compile(&llama_8b(), &machine, &asked);
    assert_eq!(chosen(&plan), "tensor parallel numa0+numa1");
}

#[test]
fn gpus_that_share_layers_may_follow_nodes_that_do() {
    // What GPUs sent each other was once counted for as long as the nodes before them do nothing.
    let options =
        Options { objective: Objective::Throughput, max_sequences: 4, ..Options::default() };
    let plan = compile(&MadeUp::llama(LlamaShape::LLAMA_70B).model(), &eight_unlike(), &options);
    let candidates = &plan.forecast.candidates;
    let pipeline = "pipeline numa0+numa1+numa2+numa3 → gpu0+gpu1+gpu2+gpu3";
    let pipeline = candidates.iter().find(|candidate| candidate.name == pipeline);
    let pipeline = pipeline.expect("it is among the best by what layers take");
    assert_eq!(pipeline.missing, None);
}

/// GPUs unlike in speed that share layers have room for the shares that suit them only without the table of tokens.
#[test]
fn a_node_holds_the_table_where_gpus_that_share_layers_lack_room_for_it() {
    let model = llama_8b();
    let mut machine = h200(9 * GIB);
    add_gpus(&mut machine, |_, gpu| slow_down_rates(&mut gpu.rates, 0.3), 1);
    let plan = compile(&model, &machine, &options());
    let pins = vec!["embed_tokens=numa0".parse().expect("a pin")];
    let pinned = compile(&model, &machine, &Options { pins, ..options() });
    // GPUs reach the table; what is pinned computes where it is.
    let reaching = |plan: &Plan| {
        let gpus = ["gpu0", "gpu1"].map(|name| plan.machine.device(name).expect("a GPU"));
        gpus.map(|gpu| plan.reached_by(gpu).len())
    };
    assert_eq!([reaching(&plan), reaching(&pinned)], [[1, 1], [0, 0]]);
    let has_node = |plan: &Plan| {
        let node = plan.machine.device("numa0").expect("a node");
        plan.programs.iter().any(|program| program.ops_of(node).next().is_some())
    };
    assert!(!has_node(&plan) && has_node(&pinned));
    assert!(can_include_prompts(&plan) && !can_include_prompts(&pinned));
    // Runs of prompts may be of unlike sizes.
    let score = |plan: &Plan| {
        let (prefill, decode) = rates(plan);
        tests::score((2048e9 / prefill) as u64, (1e9 / decode) as u64)
    };
    assert!(score(&plan) < score(&pinned));
    assert!(chosen(&plan).ends_with(", embedding on numa0"), "{}", chosen(&plan));
    let is_pin = |cause: &Cause| matches!(cause.reason, Reason::Pinned { .. });
    assert!(plan.asked.pins.is_empty() && !plan.causes.rows().iter().any(is_pin));
}

#[test]
fn a_node_holds_the_table_where_stages_asked_for_by_number_lack_room_for_it() {
    let mut machine = h200(4 * GIB);
    add_gpus(&mut machine, |_, _| (), 3);
    let asked = Options { request: Request::PipelineRanks(4), ..options() };
    let plan = compile(&llama_8b(), &machine, &asked);
    assert_eq!(chosen(&plan), "pipeline gpu0 → gpu1 → gpu2 → gpu3, embedding on numa0");
}

/// With room for all of the model, and by a request that names devices, the table is on GPUs.
#[test]
fn gpus_hold_the_table_where_they_have_room_or_are_asked_for() {
    let model = llama_8b();
    let holds_table = |plan: &Plan| {
        let numa0 = device(&plan.machine, "numa0");
        plan.weights.rows().iter().any(|weight| weight.device == numa0)
    };
    let gpus = ["gpu0", "gpu1", "gpu2", "gpu3"].map(str::to_owned);
    let request = Request::Pipeline(gpus.to_vec());
    let with = |request, gpu_gib: u64| {
        let mut machine = h200(gpu_gib * GIB);
        add_gpus(&mut machine, |_, _| (), 3);
        compile(&model, &machine, &Options { request, ..options() })
    };
    assert!(holds_table(&with(Request::Any, 4)));
    assert!(!holds_table(&with(Request::Any, 8)));
    assert!(!holds_table(&with(request, 6)));
}

/// Two GPUs of half an H200's rates behind a slow link, on which longer runs of a prompt gain nothing.
fn two_behind_a_slow_link() -> Machine {
    let mut machine = h200(40 * GIB);
    slow_down(&mut machine, 0.5, 1.0);
    let gpu = device(&machine, "gpu0");
    for rate in &mut machine.devices[gpu].rates.linear {
        rate.points.retain(|point| point.tokens <= 512);
    }
    add_gpus(&mut machine, |_, _| (), 1);
    let ends = [gpu, device(&machine, "gpu1")];
    let links = machine.links.iter_mut();
    for link in links.filter(|link| ends.contains(&link.from) && ends.contains(&link.to)) {
        (link.bytes_per_sec, link.latency_nanos) = (12.5e9, 5e3);
    }
    machine
}

/// Nanoseconds of the later runs of a prompt of 2048 tokens: each leaves the busiest stage behind the one before.
fn later_runs_nanos(plan: &Plan) -> u64 {
    let runs = 2048_u32.div_ceil(plan.programs[0].max.tokens);
    u64::from(runs - 1) * plan.forecast.programs[0].busiest_lane_nanos
}

/// Pipelines were once tried by the sum of their stages alone, as if runs of a prompt did not overlap.
#[test]
fn stages_in_which_runs_of_a_prompt_overlap_are_chosen_for_latency() {
    let machine = two_behind_a_slow_link();
    let formats = vec!["q4".parse().expect("a rule")];
    let with = |request| {
        compile(&llama_8b(), &machine, &Options { request, formats: formats.clone(), ..options() })
    };
    let score = |plan: &Plan| {
        let programs = &plan.forecast.programs;
        let prompt = programs[0].nanos + later_runs_nanos(plan);
        tests::score(prompt, programs[first_decode(plan)].nanos)
    };
    let [plan, asked] = [Request::Any, Request::PipelineRanks(2)].map(with);
    assert_eq!(chosen(&plan), "pipeline gpu0 → gpu1");
    assert!(score(&plan) <= score(&asked));
}

/// Among placements for runs of 512 tokens that of the best run was once kept, and not that of the best prompt.
#[test]
fn placements_for_runs_of_one_size_are_compared_by_a_whole_prompt() {
    let machine = two_behind_a_slow_link();
    let (objective, max_sequences) = (Objective::Throughput, 16);
    let formats = vec!["q4".parse().expect("a rule")];
    let with = |(request, prefill_tokens)| {
        let formats = formats.clone();
        let asked =
            Options { objective, request, max_sequences, prefill_tokens, formats, ..options() };
        compile(&llama_8b(), &machine, &asked)
    };
    let score = |plan: &Plan| {
        let programs = &plan.forecast.programs;
        let prompt = programs[0].busiest_lane_nanos + later_runs_nanos(plan);
        let decode = programs.last().expect("a plan decodes").nanos;
        prompt + 128 * decode / u64::from(max_sequences)
    };
    let in_stages = (Request::PipelineRanks(2), Some(512));
    let [plan, asked] = [(Request::Any, None), in_stages].map(with);
    assert!(score(&plan) <= score(&asked), "{}", chosen(&plan));
}
