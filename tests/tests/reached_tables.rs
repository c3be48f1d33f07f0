//! Tables on NUMA nodes that GPUs look rows up in, and those that they do not; prompts that are captured where there is
//! room for that.

use compiler::Options;
use compiler::options::Request;
use ir::captured::{captured_bytes, includes_prompts};
use ir::id::DeviceId;
use ir::machine::{Device, Machine};
use ir::model::Model;
use ir::plan::{Action, Phase, Plan, Program, Step};
use tests::machines::{add_gpus, h200};
use tests::made_up::{LlamaShape, MadeUp};

const GIB: u64 = 1 << 30;

fn compile(model: &Model, machine: &Machine, options: &Options) -> Plan {
    compiler::compile(model, machine, options, &mut |_, _| ()).expect("it fits")
}

fn llama_8b() -> Model {
    MadeUp::llama(LlamaShape::LLAMA_8B).model()
}

fn options() -> Options {
    Options { context: Some(2048), prefill_tokens: Some(512), ..Options::default() }
}

/// The GPU and the node of an H200.
fn devices(plan: &Plan) -> [DeviceId; 2] {
    ["gpu0", "numa0"].map(|name| plan.machine.device(name).expect("it has both"))
}

/// All but the table fits a GPU: nothing is left to do for the node.
#[test]
fn a_gpu_reaches_the_table_that_it_lacks_room_for() {
    let plan = compile(&llama_8b(), &h200(12 * GIB), &options());
    let [gpu, node] = devices(&plan);
    assert_eq!(plan.reached_by(gpu), plan.reached_tables());
    assert_eq!(plan.reached_tables().len(), 1);
    assert!(plan.programs.iter().all(|program| program.ops_of(node).next().is_none()));
    assert!(includes_prompts(&plan));
    let chosen = plan.forecast.candidates.first().map(|chosen| chosen.name.as_str());
    assert_eq!(chosen, Some("all on gpu0, embedding on numa0"));
}

#[test]
fn a_node_that_is_asked_for_looks_rows_up_itself() {
    let named = Request::Pipeline(vec!["numa0".to_owned(), "gpu0".to_owned()]);
    let pins = vec!["embed_tokens=numa0".parse().expect("a pin")];
    for options in [Options { request: named, ..options() }, Options { pins, ..options() }] {
        let plan = compile(&llama_8b(), &h200(12 * GIB), &options);
        let [_, node] = devices(&plan);
        assert!(plan.reached_tables().is_empty());
        assert!(plan.programs.iter().all(|program| program.ops_of(node).next().is_some()));
    }
}

#[test]
fn a_node_that_reads_rows_itself_looks_them_up() {
    // Block 0 reads them on the node, or its attention there and its residual on the GPU.
    for pattern in [r"layers\.0\.=numa0", r"layers\.0\.self_attn\.=numa0"] {
        let pins = vec![pattern.parse().expect("a pin")];
        let plan = compile(&llama_8b(), &h200(11 * GIB), &Options { pins, ..options() });
        let [_, node] = devices(&plan);
        assert!(plan.reached_tables().is_empty(), "{pattern}");
        let looks_up = |program: &Program| program.ops_of(node).any(|op| op.table().is_some());
        assert!(plan.programs.iter().all(looks_up), "{pattern}");
    }
}

/// A row of floats crosses as a whole; one of a table in panels, word by word with what lies beside each.
#[test]
fn rows_that_are_reached_take_what_the_link_does() {
    const PANEL_WORD_BYTES: f64 = 76.0;
    let machine = h200(8 * GIB);
    let q4 = Options { formats: vec!["q4".parse().expect("a format")], ..options() };
    let of_q4 = PANEL_WORD_BYTES * 4096.0 / 32.0 * 18.0 / 4.0;
    for (options, gib, row_bytes) in [(options(), 8, 2.0 * 4096.0), (q4, 3, of_q4)] {
        let plan = compile(&llama_8b(), &h200(gib * GIB), &options);
        let [gpu, node] = devices(&plan);
        let link = machine.link(node, gpu).expect("there is one").bytes_per_sec;
        let program = plan.program_for(Phase::Prefill, 512, 1, false).expect("it takes prompts");
        let program = &plan.programs[program];
        assert_eq!(program.max.tokens, 512);
        let is_lookup =
            |step: &&Step| matches!(&step.action, Action::Run(op) if op.table().is_some());
        let step = program.steps.rows().iter().find(is_lookup).expect("tokens are looked up");
        let crossing = 512.0 * row_bytes / link * 1e9;
        let beside = step.estimate_nanos as f64 - crossing;
        assert!((0.0..20e3).contains(&beside), "{crossing} and {beside} ns");
    }
}

#[test]
fn prompts_are_captured_where_there_is_room_for_that() {
    let model = llama_8b();
    let options = Options { request: Request::Pipeline(vec!["gpu0".to_owned()]), ..options() };
    let plan = compile(&model, &h200(100 * GIB), &options);
    let [gpu, _] = devices(&plan);
    let without = Plan { captures_prompts: false, ..plan.clone() };
    let graphs = captured_bytes(&plan, gpu) - captured_bytes(&without, gpu);
    assert!(plan.captures_prompts && graphs > 0);
    // Copies of matrices for prompts are left out first.
    let needed = |gib: u64| compile(&model, &h200(gib * GIB), &options).forecast.devices[gpu];
    let least = needed(14).needed_bytes();
    let prompts = [(least, true), (least - graphs / 2, false)].map(|(bytes, is_captured)| {
        let plan = compile(&model, &h200(bytes), &options);
        assert_eq!(plan.captures_prompts, is_captured);
        assert!(plan.forecast.devices[gpu].needed_bytes() <= bytes);
        plan.forecast.programs[0].nanos
    });
    assert!(prompts[1] > prompts[0] + 900_000, "launches are queued one by one: {prompts:?}");
}

/// A GPU that lacks room for nothing but graphs gives some of its share of the layers to the other.
#[test]
fn shares_leave_room_for_graphs() {
    let formats = vec!["q4".parse().expect("a format")];
    let request = Request::TensorParallelRanks(2);
    let options = Options { request, formats, ..options() };
    let compiled = |second_bytes: u64| {
        let mut machine = h200(40 * GIB);
        let second = |_, gpu: &mut Device| gpu.memory_bytes = second_bytes;
        add_gpus(&mut machine, second, 1);
        compile(&llama_8b(), &machine, &options)
    };
    let ample = compiled(40 * GIB);
    let gpu = ample.machine.device("gpu1").expect("a GPU");
    let bytes = |plan: &Plan| captured_bytes(plan, gpu);
    let graphs = bytes(&ample) - bytes(&Plan { captures_prompts: false, ..ample.clone() });
    let shifted = compiled(ample.forecast.devices[gpu].needed_bytes() - graphs / 2);
    assert!(graphs > 0 && includes_prompts(&shifted));
    let held = |plan: &Plan| plan.forecast.devices[gpu].weight_bytes;
    assert!(held(&shifted) < held(&ample));
}
