//! Options that leave the shape of a placement open: limits, formats, pins and caches, each by what a plan makes of it.

use compiler::Options;
use compiler::options::{Request, parse_pipeline, parse_tensor_parallel};
use ir::id::{DeviceId, Id as _};
use ir::machine::{CacheRate, Machine};
use ir::plan::Plan;
use ir::tensor::{DType, Format};
use tests::machines::{self, gpu, linked, numa};
use tests::made_up::{LlamaShape, MadeUp};
use tests::rates;
use tests::toys::Toy;

const GIB: u64 = 1 << 30;

fn plan(toy: &Toy, machine: &Machine, options: &Options) -> Plan {
    let model = toy.model().expect("the toy is a model");
    let plan = compiler::compile(&model, machine, options, &mut |_, _| ());
    plan.expect("the toy compiles")
}

/// Names of the devices that hold the caches, in the order of the layers.
fn holders(plan: &Plan) -> Vec<&str> {
    let caches = plan.caches.rows().iter();
    caches.map(|cache| plan.machine.devices[cache.device].name.as_str()).collect()
}

#[test]
fn a_gpu_of_which_less_may_be_used_is_like_a_smaller_one() {
    let small = machines::one_gpu_two_numa();
    let small_bytes = small.devices.rows()[0].memory_bytes;
    let mut large = small.clone();
    large.devices.rows_mut()[0].memory_bytes = GIB;
    let with = |machine: &Machine, gpu_memory_bytes| {
        let options = Options { gpu_memory_bytes, ..Options::default() };
        plan(&Toy::llama(), machine, &options)
    };
    let limited = with(&large, Some(small_bytes));
    assert!(limited == with(&small, None));
    assert!(limited.weights != with(&large, None).weights, "the limit changes nothing");
    // More than a GPU has is no more than that.
    assert!(limited == with(&small, Some(GIB)));
}

#[test]
fn a_later_rule_for_a_format_comes_before_an_earlier_one() {
    let formats_of = |rules: [&str; 2]| {
        let formats = rules.iter().map(|rule| rule.parse().expect("it is a rule")).collect();
        let request = parse_pipeline("numa0,numa1").expect("it is a request");
        let options = Options { formats, request, ..Options::default() };
        let plan = plan(&Toy::llama(), &machines::two_numa(), &options);
        [0, 1].map(|device| {
            let device = DeviceId::from_index(device);
            let held = plan.weights.rows().iter().filter(|weight| weight.device == device);
            let matrices = held.filter(|weight| weight.shape.len() > 1);
            let mut formats: Vec<Format> = matrices.map(|matrix| matrix.format).collect();
            formats.dedup();
            formats
        })
    };
    assert_eq!(formats_of(["numa*=q8", "numa1=f16"]), [[Format::Q8], [Format::F16]]);
    assert_eq!(formats_of(["numa1=f16", "numa*=q8"]), [[Format::Q8], [Format::Q8]]);
}

#[test]
fn the_last_pin_that_matches_holds() {
    let plan_of = |pins: [&str; 2]| {
        let pins = pins.iter().map(|pin| pin.parse().expect("it is a pin")).collect();
        let options = Options { pins, ..Options::default() };
        plan(&Toy::llama(), &machines::two_numa(), &options)
    };
    assert_eq!(holders(&plan_of(["layers=numa0", "layers.1=numa1"])), ["numa0", "numa1"]);
    assert_eq!(holders(&plan_of(["layers.1=numa1", "layers=numa0"])), ["numa0", "numa0"]);
}

#[test]
fn caches_are_as_exact_as_weights() {
    let machine = linked(vec![numa(0, GIB)]);
    for (stored, format, expected) in [
        (DType::F32, None, DType::F32),
        (DType::F16, None, DType::F16),
        (DType::Bf16, None, DType::Bf16),
        (DType::Bf16, Some("f32"), DType::F32),
        (DType::Bf16, Some("f16"), DType::F16),
        (DType::F32, Some("bf16"), DType::Bf16),
        (DType::F32, Some("bf12"), DType::Bf16),
        (DType::F32, Some("q8"), DType::F16),
        (DType::F16, Some("q4"), DType::F16),
        (DType::Bf16, Some("q8"), DType::Bf16),
        (DType::Bf16, Some("q4"), DType::Bf16),
    ] {
        let formats = format.iter().map(|rule| rule.parse().expect("it is a rule")).collect();
        let options = Options { formats, ..Options::default() };
        let plan = plan(&Toy { stored, ..Toy::llama() }, &machine, &options);
        let types: Vec<DType> = plan.caches.rows().iter().map(|cache| cache.dtype).collect();
        assert_eq!(types, [expected; 2], "{format:?} of {stored}");
    }
}

#[test]
fn forecasts_know_how_fast_caches_of_a_type_are() {
    let mut machine = linked(vec![numa(0, GIB)]);
    let node = machine.devices.ids().next().expect("there is a node");
    let usual = machine.devices[node].rates.attention(DType::Bf16);
    machine.devices[node].rates.other_caches.push(CacheRate {
        kv_type: DType::F32,
        attention_flops_per_sec: usual.attention_flops_per_sec / 1e3,
        cache_bytes_per_sec: usual.cache_bytes_per_sec / 1e3,
        ..usual
    });
    let rates = |kv_type| {
        let options = Options { kv_type: Some(kv_type), ..Options::default() };
        rates(&plan(&Toy::llama(), &machine, &options))
    };
    let (bf16, f16, f32) = (rates(DType::Bf16), rates(DType::F16), rates(DType::F32));
    assert_eq!(bf16, f16);
    assert!(f32.0 < bf16.0 / 2.0 && f32.1 < bf16.1 / 2.0, "{f32:?} of {bf16:?}");
}

#[test]
fn gpus_keep_their_caches_as_exact_as_weights_where_bytes_are_asked_for() {
    let machine = linked(vec![gpu(0, GIB), numa(0, GIB)]);
    let options = Options {
        request: parse_pipeline("gpu0").expect("it is a request"),
        pins: vec!["layers.1=numa0".parse().expect("it is a pin")],
        kv_type: Some(DType::I8),
        ..Options::default()
    };
    let plan = plan(&Toy::llama(), &machine, &options);
    let types: Vec<DType> = plan.caches.rows().iter().map(|cache| cache.dtype).collect();
    assert_eq!(holders(&plan), ["gpu0", "numa0"]);
    assert_eq!(types, [DType::F32, DType::I8]);
}

#[test]
fn a_context_is_the_models_up_to_8192_tokens_where_none_is_asked_for() {
    let context_of = |most: u32, context| {
        let mut model = Toy::llama().model().expect("the toy is a model");
        model.context = most;
        let options = Options { context, ..Options::default() };
        let plan = compiler::compile(&model, &machines::two_numa(), &options, &mut |_, _| ());
        plan.expect("the toy compiles").model.context
    };
    assert_eq!(context_of(256, None), 256);
    assert_eq!(context_of(20_000, None), 8192);
    assert_eq!(context_of(20_000, Some(10_000)), 10_000);
}

#[test]
fn wishes_that_contradict_each_other_are_refused() {
    let machine = linked(vec![gpu(0, GIB), numa(0, GIB)]);
    let refusal = |request: &str, pins: &[&str], without: &[&str]| {
        let options = Options {
            request: parse_pipeline(request).expect("it is a request"),
            pins: pins.iter().map(|pin| pin.parse().expect("it is a pin")).collect(),
            without: without.iter().map(ToString::to_string).collect(),
            ..Options::default()
        };
        let model = Toy::llama().model().expect("the toy is a model");
        let refused = compiler::compile(&model, &machine, &options, &mut |_, _| ());
        refused.expect_err("it contradicts itself").to_string()
    };
    let left_out = "gpu0 is asked for, and --without leaves it out: leave one of the two away";
    assert_eq!(refusal("gpu0", &[], &["gpu0"]), left_out);
    assert_eq!(refusal("numa0", &["layers.1=gpu0"], &["gpu0"]), left_out);
    let pinned = refusal("gpu0,numa0", &[".*=numa0"], &[]);
    assert!(pinned.starts_with("every layer is pinned"), "{pinned}");
}

#[test]
fn gpus_that_cannot_add_up_a_layer_are_refused_to_share_it() {
    // Few tokens, so that nothing but the sum asks for whole loads.
    let shape = LlamaShape { hidden: 66, heads: 3, kv_heads: 3, ..LlamaShape::TINY };
    let model = MadeUp::llama(shape).model();
    let machine = linked(vec![gpu(0, GIB), gpu(1, GIB)]);
    let compile = |request: Request| {
        let options = Options { request, prefill_tokens: Some(8), ..Options::default() };
        compiler::compile(&model, &machine, &options, &mut |_, _| ())
    };
    let error = compile(parse_tensor_parallel("gpu0,gpu1").unwrap()).unwrap_err();
    assert!(format!("{error:#}").contains("not of 66"), "{error:#}");
    compile(Request::Any).expect("one computes it alone");
}
