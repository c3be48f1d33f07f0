//! Tables on NUMA nodes that GPUs look rows up in, and those that they do not; prompts that are captured where there is
//! room for that.

use compiler::Options;
use compiler::options::Request;
use ir::captured::{can_include_prompts, captured_bytes};
use ir::id::DeviceId;
use ir::machine::Machine;
use ir::model::Model;
use ir::plan::Plan;
use tests::machines::h200;
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
    assert!(can_include_prompts(&plan));
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
    for (bytes, is_captured) in [(least, true), (least - graphs / 2, false)] {
        let plan = compile(&model, &h200(bytes), &options);
        assert_eq!(plan.captures_prompts, is_captured);
        assert!(plan.forecast.devices[gpu].needed_bytes() <= bytes);
    }
}
