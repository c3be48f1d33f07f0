//! Golden checkpoints run as transformers runs them: on one device, in two stages, and shared by two devices
//! with uneven parts.

#[expect(dead_code, reason = "each test file uses a part")]
mod common;

use std::collections::BTreeSet;
use std::sync::Arc;

use common::expected::{self, Tolerance, expected, goldens, ids, logits_of};
use common::{
    Shape, compile, distance, engine, fetches, golden, gpu_machine, gpu_options, has_cuda, is_same,
};
use compiler::options::{CountedExperts, Request};
use executor::counting::ExpertCounter;
use executor::engine::Engine;
use executor::kernels::cpu::isa::Isa;
use executor::load::{CpuBackend, Kernels, Options};
use ir::check::memory;
use ir::counts::ExpertCounts;
use ir::id::{BufferId, DeviceId};
use ir::layout::Move;
use ir::machine::DeviceKind;
use ir::op::{Op, Then};
use ir::plan::{Action, Phase, Queue, Weight};
use ir::tensor::DType;
use ir::workspace::workspaces;

/// What sums in another order cost; these models' logits are below 10.
const CLOSE: f32 = 2e-4;
const NLL: f64 = 1e-4;
/// What keys and values in eight bits cost: 0.014 where a router then chooses other experts, elsewhere below 0.009.
const CACHE_NLL: f64 = 0.02;
/// Two runs in f32 may choose differently where the best two logits are this close: several times what sums in another
/// order cost both.
const MARGIN: f64 = 2e-3;

/// The largest distance of any logit from its golden value; fails on other tokens and another likelihood.
fn check(name: &str, engine: &mut Engine) -> f32 {
    expected::check(name, engine, Tolerance { margin: MARGIN, nll: NLL })
}

fn check_all(shape: Shape, options: &Options) {
    let mut failures = Vec::new();
    let mut fetching = 0;
    for name in goldens() {
        let plan = compile(&name, shape, |_| ());
        fetching += usize::from(plan.programs.iter().all(fetches));
        let worst = check(&name, &mut engine(&plan, options));
        if worst.is_nan() || worst > CLOSE {
            failures.push(format!("{name}: {worst}"));
        }
    }
    // Some are little more than their tables, which are not fetched.
    assert!(shape != Shape::GpuFetching || fetching >= 6, "{fetching} plans fetch weights");
    assert!(failures.is_empty(), "logits are off by more than {CLOSE}: {failures:?}");
}

#[test]
fn one_device_gives_the_golden_tokens() {
    check_all(Shape::One, &Options::default());
}

#[test]
fn two_stages_give_the_golden_tokens() {
    check_all(Shape::Pipeline, &Options::default());
}

#[test]
fn uneven_shares_give_the_golden_tokens() {
    check_all(Shape::Shared, &Options::default());
}

#[test]
fn a_gpu_gives_the_golden_tokens_alone_and_beside_a_numa_node() {
    for shape in Shape::GPU {
        check_all(shape, &gpu_options());
    }
}

#[test]
fn plain_operations_give_the_golden_tokens() {
    for shape in Shape::CPU {
        check_all(shape, &Options { kernels: Kernels::Plain, ..Options::default() });
    }
}

#[test]
fn the_ndarray_backend_gives_the_golden_tokens() {
    check_all(Shape::One, &Options { backend: CpuBackend::NdArray, ..Options::default() });
}

#[test]
fn a_cache_of_bytes_costs_little_likelihood() {
    for shape in [Shape::One, Shape::Shared] {
        for name in goldens() {
            let plan = compile(&name, shape, |options| options.kv_type = Some(DType::I8));
            let wide = compile(&name, shape, |_| ());
            for (_, cache) in plan.caches.iter() {
                // Four bytes an element become one, and one scale for each head of a token.
                let heads = u64::from(cache.kv_heads * plan.model.blocks * plan.model.block_tokens);
                let bytes = cache.bytes(plan.model.blocks, plan.model.block_tokens);
                assert_eq!(bytes, 2 * heads * (u64::from(cache.head_dim) + 4), "{name}");
            }
            let mut engine = engine(&plan, &Options::default());
            let expected = expected(&name);
            let nll = engine.perplexity(&ids(&expected["nll"]["ids"])).unwrap().nll;
            let golden = expected["nll"]["mean"].as_f64().unwrap();
            assert!((nll - golden).abs() < CACHE_NLL, "{name}: nll {nll}, golden {golden}");
            assert!(plan.forecast.devices.rows().iter().zip(wide.forecast.devices.rows()).all(
                |(narrow, wide)| narrow.cache_bytes < wide.cache_bytes || wide.cache_bytes == 0
            ));
        }
    }
}

/// The logits after each prompt, one prompt after the other.
fn logits(name: &str, format: &str, shape: Shape, options: &Options) -> Vec<f32> {
    let plan = compile(name, shape, |options| options.formats = vec![format.parse().unwrap()]);
    logits_of(name, &plan, options)
}

#[test]
fn a_gpu_computes_blocks_as_processors_do() {
    /// Processors round activations to 8 bits, which moves these logits by up to 0.4; rounding weights to 4 bits
    /// moves them by 3 to 8.
    const TOLERANCE: f32 = 0.6;
    /// With tiles they do so in groups of 256 columns, and round the weights to 8 bits as well: up to 0.63.
    const TOLERANCE_OF_TILES: f32 = 0.8;
    for format in ["q8", "q4"] {
        for name in ["gpt2", "gemma3", "llama3", "qwen3-moe"] {
            let on_gpu = logits(name, format, Shape::Gpu, &gpu_options());
            let without_tiles = Isa::detect().min(Isa::Avx512Bf16Vnni);
            for isa in Isa::available().into_iter().filter(|&isa| isa >= without_tiles) {
                let options = Options { isa: Some(isa), ..Options::default() };
                let on_cpu = logits(name, format, Shape::One, &options);
                let most = if isa == Isa::Amx { TOLERANCE_OF_TILES } else { TOLERANCE };
                let off = distance(&on_cpu, &on_gpu);
                assert!(off < most, "{name} in {format}, {isa}: a logit is off by {off}");
            }
        }
    }
}

#[test]
fn what_a_gpu_holds_unpacked_as_well_is_what_it_would_unpack() {
    for format in ["q8", "q4"] {
        let formats = vec![format.parse().unwrap()];
        let mut plan = compile("llama3", Shape::Gpu, |options| options.formats = formats);
        let packed = logits_of("llama3", &plan, &gpu_options());
        let is_packed = |weight: &Weight| plan.unpacked_bytes(weight).is_some();
        let packed_ones: Vec<bool> = plan.weights.rows().iter().map(is_packed).collect();
        assert!(packed_ones.contains(&true));
        for (weight, is_packed) in plan.weights.rows_mut().iter_mut().zip(packed_ones) {
            weight.also_unpacked = is_packed;
        }
        plan.forecast.devices = memory(&plan);
        // Nothing could be unpacked in a run.
        let gpu = plan.machine.device("gpu0").unwrap();
        assert_eq!(workspaces(&plan)[gpu].matrix_bytes, 0);
        assert_eq!(logits_of("llama3", &plan, &gpu_options()), packed, "{format}");
        // A library that is counted, and missing where the plan is run, leaves all to be unpacked in a run.
        if !has_cuda() {
            if let DeviceKind::Gpu { library_bytes, .. } = &mut plan.machine.devices[gpu].kind {
                *library_bytes = 32 << 20;
            }
            plan.forecast.devices = memory(&plan);
            assert_eq!(logits_of("llama3", &plan, &gpu_options()), packed, "{format}");
        }
    }
}

#[test]
fn a_gpu_without_the_library_computes_as_with_it() {
    let mut machine = gpu_machine(1);
    let gpu = machine.device("gpu0").unwrap();
    let has_library = machine.devices[gpu].kind.has_library();
    if !has_library {
        eprintln!("skipped: there is no cuBLASLt here");
        return;
    }
    if let DeviceKind::Gpu { library_bytes, .. } = &mut machine.devices[gpu].kind {
        *library_bytes = 0;
    }
    for format in ["bf16", "q8", "q4"] {
        for name in ["llama3", "gpt2", "gemma3"] {
            let formats = vec![format.parse().unwrap()];
            let mut plan = compile(name, Shape::Gpu, |options| options.formats = formats);
            let with = logits_of(name, &plan, &gpu_options());
            plan.machine = machine.clone();
            plan.forecast.devices = memory(&plan);
            let off = distance(&with, &logits_of(name, &plan, &gpu_options()));
            // The library is given blocks that are rounded to bf16: up to 0.13.
            assert!(off < 0.2, "{name} in {format}: a logit is off by {off}");
        }
    }
}

#[test]
fn a_gpu_gives_the_golden_tokens_beside_a_node_with_the_head_and_its_table() {
    for name in ["llama3", "gemma2", "qwen3"] {
        let plan = compile(name, Shape::Gpu, |options| {
            options.pins = ["head=numa0", "embed=numa0"].map(|pin| pin.parse().unwrap()).to_vec();
        });
        let node = plan.machine.device("numa0").unwrap();
        let is_table = |weight: &&Weight| weight.shape.first() == Some(&plan.model.vocabulary);
        let tables = plan.weights.rows().iter().filter(is_table);
        let devices: BTreeSet<DeviceId> = tables.map(|weight| weight.device).collect();
        assert_eq!(devices, BTreeSet::from([node]), "{name}");
        let worst = check(name, &mut engine(&plan, &gpu_options()));
        assert!(worst < CLOSE, "{name}: a logit is off by {worst}");
    }
}

/// Tables of tokens and of positions, at home on a node.
#[test]
fn tables_that_a_gpu_reaches_give_what_its_own_do() {
    // Devices in software know no bf16.
    let formats = ["f32", "f16", "q8", "q4", "bf16"].into_iter();
    for format in formats.filter(|format| *format != "bf16" || has_cuda()) {
        for name in ["gpt2", "gpt-neox"] {
            let own = compile(name, Shape::Gpu, |options| {
                options.formats = vec![format.parse().unwrap()];
            });
            let [gpu, node] = ["gpu0", "numa0"].map(|name| own.machine.device(name).unwrap());
            let mut reaching = own.clone();
            let ops = || own.programs.iter().flat_map(|program| program.ops_of(gpu));
            let others = || ops().filter(|op| op.table().is_none()).flat_map(Op::weights);
            for table in ops().filter_map(Op::table) {
                if !others().any(|other| other == table) {
                    reaching.weights[table].device = node;
                }
            }
            reaching.forecast.devices = memory(&reaching);
            assert_eq!(reaching.reached_by(gpu).len(), 1, "{name}");
            let [own, reached] = [own, reaching].map(|plan| logits_of(name, &plan, &gpu_options()));
            assert!(is_same(&own, &reached), "{name} in {format}");
        }
    }
}

#[test]
fn values_of_16_bits_between_linears_cost_no_more_than_rounding_them() {
    let has_cuda = has_cuda();
    // Logits are below 10.
    let narrow = [("f16", DType::F16, 0.01), ("bf16", DType::Bf16, 0.1), ("q8", DType::Bf16, 0.1)];
    for (format, dtype, most) in narrow.into_iter().take(if has_cuda { 3 } else { 1 }) {
        for name in ["llama3", "gpt2"] {
            let formats = vec![format.parse().unwrap()];
            let mut plan = compile(name, Shape::Gpu, |options| options.formats = formats);
            let mut with = |dtype: DType| {
                let prefill = &mut plan.programs[0];
                for step in prefill.steps.rows() {
                    let Action::Run(Op::Linear(linear)) = &step.action else { continue };
                    if linear.then != Then::Nothing {
                        prefill.buffers[step.writes[0]].ty.dtype = dtype;
                    }
                }
                plan.forecast.devices = memory(&plan);
                logits_of(name, &plan, &gpu_options())
            };
            let (wide, narrow) = (with(DType::F32), with(dtype));
            assert_ne!(wide, narrow);
            let off = distance(&wide, &narrow);
            assert!(off < most, "{name} in {format}: a logit is off by {off}");
        }
    }
}

#[test]
fn sums_by_groups_give_the_golden_tokens() {
    let mut machine = gpu_machine(1);
    // So slow that a second crossing pays even for these small terms.
    let gpu = machine.device("gpu0").unwrap();
    for link in machine.links.iter_mut().filter(|link| link.from == gpu || link.to == gpu) {
        link.bytes_per_sec = 1e7;
    }
    let members = [("gpu0", 2.0), ("numa0", 1.0), ("numa1", 1.0)];
    let members = members.map(|(name, share)| (name.to_owned(), Some(share)));
    let options = compiler::Options {
        formats: vec!["f32".parse().unwrap()],
        kv_type: Some(DType::F32),
        request: Request::TensorParallel(members.to_vec()),
        ..compiler::Options::default()
    };
    for name in ["llama3", "gemma2"] {
        let model = models::lower(&golden(name)).unwrap();
        let plan = compiler::compile(&model, &machine, &options, &mut |_, _| ()).unwrap();
        let prefill = &plan.programs[0];
        // Devices that the sums of a member are over.
        let sums = |device: &str| -> Vec<Vec<&str>> {
            let lane = prefill.lane(plan.machine.device(device).unwrap(), Queue::Compute).unwrap();
            let steps = lane.steps.iter().map(|&step| &prefill.steps[step]);
            let sums = steps.filter(|step| {
                matches!(step.action, Action::Move { movement: Move::AllReduce, .. })
            });
            let holder = |&buffer: &BufferId| {
                plan.machine.devices[prefill.buffers[buffer].device].name.as_str()
            };
            sums.map(|step| step.reads.iter().map(holder).collect()).collect()
        };
        let (of_gpu, of_node) = (sums("gpu0"), sums("numa1"));
        assert!(!of_gpu.is_empty() && of_node.len() > 1, "{name}");
        assert!(of_gpu.iter().all(|sum| *sum == ["gpu0", "numa0"]), "{name}");
        for (index, sum) in of_node.iter().enumerate() {
            let expected = if index % 2 == 0 { ["numa0", "numa1"] } else { ["gpu0", "numa1"] };
            assert_eq!(*sum, expected, "{name}");
        }
        let worst = check(name, &mut engine(&plan, &gpu_options()));
        assert!(worst < CLOSE, "{name}: a logit is off by {worst}");
    }
}

#[test]
fn short_prompts_beside_a_gpu_give_the_golden_tokens_by_either_program() {
    let mut tried = Vec::new();
    for name in goldens() {
        let mut plan = compile(&name, Shape::GpuHosted, |_| ());
        if plan.programs[1].phase == Phase::Decode {
            continue;
        }
        let [all, short] = [0, 1].map(|program| &plan.programs[program]);
        assert!(fetches(all) && all.max.tokens > short.max.tokens, "{name}");
        let worst = check(&name, &mut engine(&plan, &gpu_options()));
        assert!(worst < CLOSE, "{name}: a logit is off by {worst}");
        // Without the other, the program that fetches takes short prompts, too.
        plan.programs.remove(1);
        plan.forecast.programs.remove(1);
        let worst = check(&name, &mut engine(&plan, &gpu_options()));
        assert!(worst < CLOSE, "{name}, fetching: a logit is off by {worst}");
        tried.push(name);
    }
    assert!(tried.len() >= 2, "{tried:?}");
}

/// How often a mixture's experts are chosen in its golden text.
fn counts(name: &str, shape: Shape, options: &Options) -> ExpertCounts {
    let counter = Arc::new(ExpertCounter::default());
    let options = Options { expert_counter: Some(Arc::clone(&counter)), ..options.clone() };
    let plan = compile(name, shape, |_| ());
    engine(&plan, &options).perplexity(&ids(&expected(name)["nll"]["ids"])).unwrap();
    counter.counts(&plan)
}

#[test]
fn every_device_counts_the_same_choices() {
    let expected = counts("qwen2-moe", Shape::One, &Options::default());
    for choices in expected.routers.values() {
        // Each of 128 tokens chooses three of eight.
        assert_eq!((choices.len(), choices.iter().sum()), (8, 3 * 128));
    }
    assert_eq!(expected, ExpertCounts::from_ron(&expected.to_ron().unwrap()).unwrap());
    for shape in [Shape::Shared, Shape::Pipeline] {
        assert_eq!(counts("qwen2-moe", shape, &Options::default()), expected, "{shape:?}");
    }
    assert_eq!(counts("qwen2-moe", Shape::Gpu, &gpu_options()), expected);
}

#[test]
fn the_most_used_experts_on_a_gpu_and_the_others_beside_it_give_the_golden_tokens() {
    let name = "qwen3-moe";
    let counts = counts(name, Shape::One, &Options::default());
    let plan = compile(name, Shape::GpuHosted, |options| {
        // Of two nodes that share the layers, and of long prompts, other placements make more.
        options.without = vec!["numa1".to_owned()];
        options.prefill_tokens = Some(24);
        options.expert_counts = Some(CountedExperts { file: "counts.ron".into(), counts });
    });
    let gpu = plan.machine.device("gpu0").unwrap();
    let on_gpu = |kind: &str| -> Vec<bool> {
        let of_kind = plan.weights.rows().iter().filter(|weight| weight.name.ends_with(kind));
        of_kind.map(|weight| weight.device == gpu).collect()
    };
    let (most, least) = (on_gpu("(most used)"), on_gpu("(least used)"));
    assert!(!most.is_empty() && most.iter().all(|&on_gpu| on_gpu));
    assert!(least.iter().any(|&on_gpu| !on_gpu));
    let worst = check(name, &mut engine(&plan, &gpu_options()));
    assert!(worst < CLOSE, "a logit is off by {worst}");
}

#[test]
fn shards_beside_a_gpu_are_among_what_gives_the_golden_tokens() {
    let with = |shape: Shape, mark: &str| -> Vec<String> {
        let has_mark = |name: &String| {
            let plan = compile(name, shape, |_| ());
            plan.weights.rows().iter().any(|weight| weight.name.contains(mark))
        };
        goldens().into_iter().filter(has_mark).collect()
    };
    let shards = [" (shard0", " (shard1"].map(|mark| (Shape::GpuShards, mark));
    for (shape, mark) in shards.into_iter().chain([(Shape::GpuResident, " (resident)")]) {
        let cut = with(shape, mark);
        // Pieces that are not resident are mostly better.
        let least = if shape == Shape::GpuResident { 1 } else { 3 };
        assert!(cut.len() >= least, "{mark}: {cut:?}");
    }
}

#[test]
fn caches_that_a_gpu_borrows_give_the_golden_tokens_in_parts_of_prompts() {
    // What crosses is the same in all models, and takes the host long where it copies element by element.
    const ENOUGH: usize = 4;
    let mut tried = Vec::new();
    for name in goldens() {
        let plan = compile(&name, Shape::GpuCaches, |options| options.prefill_tokens = Some(20));
        if plan.borrows() && tried.len() < ENOUGH {
            let worst = check(&name, &mut engine(&plan, &gpu_options()));
            assert!(worst < CLOSE, "{name}: a logit is off by {worst}");
            tried.push(name);
        }
    }
    assert_eq!(tried.len(), ENOUGH, "{tried:?}");
}
