//! `hybridc` as its users call it: what it prints, and how it ends.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use ir::counts::{self, ExpertCounts};
use ir::id::{DeviceId, Id as _};
use ir::machine::{Device, DeviceKind, LinearRate, Link, Machine, RatePoint, RateSource, Rates};
use ir::plan::Plan;
use ir::tensor::Format;
use tempfile::TempDir;

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo")
}

/// Runs `hybridc` in a folder.
fn hybridc(folder: &TempDir, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hybridc"));
    command.current_dir(folder).args(arguments).output().expect("hybridc starts")
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("hybridc prints text")
}

/// Runs `hybridc` and gives what it printed.
fn success(folder: &TempDir, arguments: &[&str]) -> String {
    let output = hybridc(folder, arguments);
    assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    text(&output.stdout).into()
}

/// Runs `hybridc` and gives its one line of refusal.
fn refusal(folder: &TempDir, arguments: &[&str]) -> String {
    let output = hybridc(folder, arguments);
    assert!(matches!(output.status.code(), Some(1 | 2)), "{arguments:?}");
    assert_eq!(text(&output.stdout), "");
    let line = text(&output.stderr);
    assert!(line.starts_with("error: ") && line.lines().count() == 1, "{line}");
    line.trim_end().trim_start_matches("error: ").into()
}

/// Two NUMA nodes of eight cores each.
fn two_nodes() -> Machine {
    let linear = |format| {
        let point = RatePoint { tokens: 1, weights_per_sec: 1e10, nanos: 0.0 };
        LinearRate { format, points: vec![point] }
    };
    let node = |node: u32| Device {
        name: format!("numa{node}"),
        kind: DeviceKind::Numa { node, cpus: (8 * node..8 * (node + 1)).collect() },
        memory_bytes: 16 << 30,
        cpu_caches: Vec::new(),
        rates: Rates {
            source: RateSource::Nominal,
            read_bytes_per_sec: 1e11,
            step_nanos: 2e3,
            linear: Format::ALL.map(linear).to_vec(),
            experts: Vec::new(),
            shared_experts: Vec::new(),
            attention_nanos: 0.0,
            prompt_score_nanos: 0.0,
            score_nanos: 0.0,
            attention_flops_per_sec: 1e12,
            cache_bytes_per_sec: 1e11,
            other_caches: Vec::new(),
            beside_fetch: 0.9,
        },
    };
    let [first, second] = [0, 1].map(DeviceId::from_index);
    let link = |from, to| Link::new(from, to, 2e10, 1e3);
    Machine {
        devices: [0, 1].map(node).into_iter().collect(),
        links: vec![link(first, second), link(second, first)],
        ..Machine::default()
    }
}

/// A folder with a machine that is the same on all hosts.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder for plans");
    let machine = two_nodes().to_ron().expect("a machine can be written");
    fs::write(folder.path().join("machine.ron"), machine).expect("the folder is ours");
    folder
}

/// Compiles the demo for two devices.
fn compile(folder: &TempDir, output: &str, more: &[&str]) -> String {
    let demo = demo();
    let mut arguments = vec!["compile", demo.to_str().expect("a plain path"), "-o", output];
    arguments.extend(["--machine", "machine.ron"]);
    arguments.extend(more);
    success(folder, &arguments)
}

#[test]
fn the_same_inputs_give_the_same_plan() {
    let folder = folder();
    compile(&folder, "a.ron", &[]);
    compile(&folder, "b.ron", &[]);
    let read = |name| fs::read(folder.path().join(name)).expect("the plan was written");
    assert!(read("a.ron") == read("b.ron"));
    assert_eq!(success(&folder, &["diff", "a.ron", "b.ron"]), "the plans are the same\n");
    // Nothing is left of writing it.
    assert_eq!(fs::read_dir(&folder).expect("it is a folder").count(), 3);
}

#[test]
fn the_nodes_of_this_machine_are_probed_and_divided() {
    let folder = folder();
    let nodes = |text: &str| {
        let machine = Machine::from_ron(text).expect("a probe is a machine");
        machine.devices.rows().iter().filter(|device| !device.kind.is_gpu()).count()
    };
    let whole = nodes(&success(&folder, &["probe"]));
    let output = hybridc(&folder, &["probe", "--split", "2", "-o", "halves.ron"]);
    assert!(output.status.success());
    let said = text(&output.stderr);
    assert!(said.contains("wrote halves.ron: ") && said.contains("numa0, numa1"), "{said}");
    let halves = fs::read_to_string(folder.path().join("halves.ron")).expect("it was written");
    assert_eq!(nodes(&halves), 2 * whole);
    let demo = demo();
    let demo = demo.to_str().expect("a plain path");
    let stages = ["--machine", "halves.ron", "--pipeline", "numa0,numa1"];
    success(&folder, &[&["compile", demo][..], &stages[..]].concat());
    assert_eq!(success(&folder, &["check", "plan.ron"]), "plan.ron is sound\n");
}

#[test]
fn an_explanation_names_layers_devices_and_guesses() {
    let folder = folder();
    let text = compile(&folder, "plan.ron", &["--explain", "--pipeline", "numa0,numa1"]);
    for part in ["embedding", "head", "numa0", "numa1", "requested", "KV cache", "nominal"] {
        assert!(text.contains(part), "no {part:?} in\n{text}");
    }
    assert_eq!(success(&folder, &["explain", "plan.ron"]), text);
    assert_eq!(success(&folder, &["check", "plan.ron"]), "plan.ron is sound\n");
}

#[test]
fn what_was_decided_is_said_in_a_line_and_what_is_not_used_in_another() {
    let folder = folder();
    let demo = demo();
    for file in ["model.safetensors", "config.json", "tokenizer.json"] {
        fs::copy(demo.join(file), folder.path().join(file)).expect("the folder is ours");
    }
    let arguments = ["compile", ".", "--machine", "machine.ron", "--without", "numa1"];
    let output = hybridc(&folder, &arguments);
    let said = text(&output.stderr);
    let is_summary = |line: &str| line.starts_with("wrote plan.ron: all on numa0; ");
    assert!(is_summary(said) && said.contains("nominal"), "{said}");
    assert_eq!(said.lines().count(), 1);
    fs::remove_file(folder.path().join("tokenizer.json")).expect("it was copied");
    let output = hybridc(&folder, &arguments);
    let said = text(&output.stderr);
    let (warning, rest) = said.split_once('\n').expect("a warning and a summary");
    assert!(warning.starts_with("warning: no tokenizer.json in "), "{said}");
    let works = ": prompts of text will not work, --prompt-ids with --json will";
    assert!(warning.ends_with(works) && is_summary(rest), "{said}");
    let config = folder.path().join("config.json");
    let whole = fs::read_to_string(&config).expect("it was copied");
    let part = whole.replace("\"num_hidden_layers\": 6", "\"num_hidden_layers\": 4");
    assert_ne!(whole, part);
    fs::write(config, part).expect("the folder is ours");
    let output = hybridc(&folder, &arguments);
    let said = text(&output.stderr);
    assert!(said.contains("18 of the checkpoint's tensors are not used, such as model.layers.4."));
    let replaced = refusal(&folder, &["compile", ".", "-o", "config.json"]);
    assert!(replaced.contains("config.json: a file of this name belongs to a checkpoint"));
}

#[test]
fn a_dash_names_standard_output() {
    let folder = folder();
    Plan::from_ron(&compile(&folder, "-", &["--explain"])).expect("it is a plan");
    Machine::from_ron(&success(&folder, &["probe", "-o", "-"])).expect("it is a machine");
    assert_eq!(fs::read_dir(&folder).expect("it is a folder").count(), 1);
}

#[test]
fn what_is_wrong_with_a_machine_is_told_by_file_and_field() {
    let folder = folder();
    let demo = demo();
    let demo = demo.to_str().expect("a plain path");
    let check = |spoil: fn(&mut Machine), expected: &str| {
        let mut machine = two_nodes();
        spoil(&mut machine);
        let text = machine.to_ron().expect("a machine can be written");
        fs::write(folder.path().join("mx.ron"), text).expect("the folder is ours");
        let refused = refusal(&folder, &["compile", demo, "--machine", "mx.ron"]);
        assert_eq!(refused, format!("mx.ron: {expected}"));
    };
    check(
        |machine| machine.devices.rows_mut()[0].rates.read_bytes_per_sec = 0.0,
        "read_bytes_per_sec of numa0 is 0.0; at least 1000 is meant",
    );
    check(
        |machine| machine.devices.rows_mut()[1].rates.step_nanos = -5.0,
        "step_nanos of numa1 is -5.0; 0 to 1000000000000 is meant",
    );
    check(
        |machine| machine.devices.rows_mut()[1].rates.linear[0].points[0].weights_per_sec = 7.0,
        "weights_per_sec of f32 (tokens: 1) in linear of numa1 is 7.0; at least 1000 is meant",
    );
    check(
        |machine| machine.devices.rows_mut()[0].rates.linear[0].points.clear(),
        "points of f32 in linear of numa0: one at least is meant, of one token or more",
    );
    check(
        |machine| machine.links[0].from = DeviceId::from_index(9),
        "link 0 (from 9 to 1): there are devices 0 to 1",
    );
    check(
        |machine| machine.links[1].bytes_per_sec = 24.0,
        "bytes_per_sec of link 1 (from 1 to 0) is 24.0; at least 1000 is meant",
    );
}

#[test]
fn a_difference_names_the_layers_that_moved() {
    let folder = folder();
    compile(&folder, "a.ron", &["--pipeline", "numa0"]);
    compile(&folder, "b.ron", &["--pipeline", "numa0,numa1"]);
    let text = success(&folder, &["diff", "a.ron", "b.ron"]);
    assert!(text.contains("pipeline numa0 → numa1") && text.contains("head"), "{text}");
}

#[test]
fn a_difference_of_checkpoints_is_one_of_their_contents() {
    let folder = folder();
    compile(&folder, "a.ron", &[]);
    let copy = folder.path().join("copy");
    fs::create_dir(&copy).expect("the folder is ours");
    for name in ["config.json", "model.safetensors"] {
        fs::copy(demo().join(name), copy.join(name)).expect("the demo has it");
    }
    let of_copy = |output: &str| {
        success(&folder, &["compile", "copy", "-o", output, "--machine", "machine.ron"]);
        success(&folder, &["diff", "a.ron", output])
    };
    assert!(!of_copy("same.ron").contains("model"));
    let weights = copy.join("model.safetensors");
    let mut bytes = fs::read(&weights).expect("it was just written");
    *bytes.last_mut().expect("it has weights") ^= 1;
    fs::write(&weights, bytes).expect("the folder is ours");
    let text = of_copy("other.ron");
    assert!(text.contains("checkpoint") && text.contains("copy (LlamaForCausalLM)"), "{text}");
}

#[test]
fn a_pass_is_printed_on_request() {
    let folder = folder();
    let demo = demo();
    let demo = demo.to_str().expect("a plain path");
    let output = hybridc(&folder, &["compile", demo, "--print-after", "insert_moves"]);
    let printed = text(&output.stderr);
    assert!(printed.starts_with("; after insert_moves\n"), "{printed}");
    assert_eq!(printed.matches("; after").count(), 1);
    let unknown = refusal(&folder, &["compile", demo, "--print-after", "nonsense"]);
    assert!(unknown.contains("unknown pass \"nonsense\": all and merge_linears"), "{unknown}");
}

#[test]
fn an_unsound_plan_fails_its_check_with_every_violation() {
    let folder = folder();
    compile(&folder, "plan.ron", &[]);
    let path = folder.path().join("plan.ron");
    let sound = fs::read_to_string(&path).expect("the plan was written");
    let broken = sound.replacen("block_tokens: 32", "block_tokens: 0", 1);
    assert_ne!(sound, broken);
    fs::write(&path, broken).expect("the folder is ours");
    let output = hybridc(&folder, &["check", "plan.ron"]);
    assert_eq!(output.status.code(), Some(1));
    let found = text(&output.stderr);
    assert!(found.contains("cache block is empty"), "{found}");
    assert!(found.lines().last().expect("it says so").starts_with("error: plan.ron has "));
    assert!(refusal(&folder, &["explain", "plan.ron"]).contains("not sound"));
}

#[test]
fn counts_of_experts_are_those_of_the_model() {
    let folder = folder();
    let router = |block: u32| format!("model.layers.{block}.mlp.gate.route");
    let counted = ExpertCounts {
        version: counts::VERSION,
        model: "qwen3-moe".into(),
        routers: [0, 2, 3].into_iter().map(|block| (router(block), vec![1; 8])).collect(),
    };
    let path = folder.path().join("counts.ron");
    let text = counted.to_ron().expect("counts can be written");
    fs::write(&path, text).expect("the folder is ours");
    let arguments = |checkpoint| {
        ["compile", checkpoint, "--machine", "machine.ron", "--expert-counts", "counts.ron"]
    };
    let mixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/qwen3-moe");
    success(&folder, &arguments(mixture.to_str().expect("a plain path")));
    let plan = fs::read_to_string(folder.path().join("plan.ron")).expect("the plan was written");
    let plan = Plan::from_ron(&plan).expect("it is a plan");
    assert_eq!(plan.asked.expert_counts, path.canonicalize().ok());
    let refused = refusal(&folder, &arguments(demo().to_str().expect("a plain path")));
    assert!(refused.contains("counts.ron: the model has no experts"), "{refused}");
}

#[test]
fn bad_input_is_refused_with_one_line() {
    let folder = folder();
    fs::write(folder.path().join("bad.ron"), "nonsense").expect("the folder is ours");
    fs::create_dir(folder.path().join("sub")).expect("the folder is ours");
    compile(&folder, "good.ron", &[]);
    let demo = demo();
    let demo = demo.to_str().expect("a plain path");
    let compile = |more: &[&str]| {
        let arguments = ["compile", demo, "--machine", "machine.ron", "-o", "plan.ron"];
        refusal(&folder, &[&arguments[..], more].concat())
    };
    let cases = [
        (refusal(&folder, &["compile", "meta/missing"]), "meta/missing: there is no such file"),
        (refusal(&folder, &["compile", "meta/missing"]), "checkpoints are not downloaded"),
        (refusal(&folder, &["check", "missing.ron"]), "reading missing.ron"),
        (refusal(&folder, &["check", "bad.ron"]), "reading bad.ron: not a plan"),
        (refusal(&folder, &["diff", "bad.ron", "bad.ron"]), "bad.ron"),
        (refusal(&folder, &["explain", "sub"]), "sub is a folder, not a plan"),
        (refusal(&folder, &["compile", "good.ron"]), "this is a plan, a trace or"),
        (refusal(&folder, &["compile", "machine.ron"]), "this is a machine, which belongs behind"),
        (
            refusal(&folder, &["compile", demo, "--machine", "bad.ron"]),
            "bad.ron: not a machine of this version",
        ),
        (refusal(&folder, &["compile", demo, "--machine", "none.ron"]), "reading none.ron"),
        (refusal(&folder, &["compile", demo, "-o", "none/plan.ron"]), "writing none/plan.ron"),
        (refusal(&folder, &["compile", demo, "-o", "sub"]), "writing sub: it is a folder"),
        (refusal(&folder, &["probe", "-o", "none/machine.ron"]), "writing none/machine.ron"),
        (refusal(&folder, &["probe", "--split", "0"]), "0 is not in 1..=64"),
        (refusal(&folder, &["probe", "--split", "65"]), "65 is not in 1..=64"),
        (
            refusal(&folder, &["compile", &format!("{demo}/config.json")]),
            "expected a model.safetensors",
        ),
        (compile(&["--pin", "layers.0=gpu7"]), "unknown device \"gpu7\": the machine has numa0"),
        (compile(&["--pin", "layers.[0=numa0"]), "is no regular expression: unclosed"),
        (compile(&["--pin", "layers"]), "a pin is written PATTERN=DEVICE"),
        (compile(&["--pipeline", "numa0,numa0"]), "numa0 is named twice"),
        (compile(&["--tensor-parallel", "numa0:0,numa1:1"]), "is not positive"),
        (compile(&["--format", "q9"]), "unknown format \"q9\""),
        (compile(&["--kv-cache", "lots"]), "\"lots\" is not a size"),
        (compile(&["--kv-cache", "1"]), "bytes short of one context"),
        (
            compile(&["--context", "64", "--kv-cache", "2MiB", "--max-sequences", "9999"]),
            "lower --max-sequences to 21",
        ),
        (compile(&["--max-sequences", "1000000"]), "lower --max-sequences"),
        (compile(&["--context", "1"]), "1 is not in 2..=4294967295"),
        (compile(&["--context=-5"]), "-5 is not in 2..=4294967295"),
        (compile(&["--context", "4000000000"]), "longer than the model's"),
        (compile(&["--max-sequences", "0"]), "0 is not in 1.."),
        (compile(&["--gpu-memory", "abc"]), "\"abc\" is not a size: write 4GiB, 512MiB or bytes"),
        (compile(&["--gpu-memory", "24"]), "\"24\" is 24 bytes, too few"),
        (compile(&["--gpu-memory", "24GiB"]), "--gpu-memory limits GPUs, and the machine has none"),
        (compile(&["--kv-type", "i4"]), "unknown cache type \"i4\""),
        (compile(&["--format", "numa0=q8,numa1=q4"]), "repeat --format"),
        (compile(&["--format", "bf12", "--plain-bf16"]), "leave one out"),
        (compile(&["--tensor-parallel", "numa0:1000000000,numa1:1"]), "leave numa1 out"),
        (compile(&["--pipeline-parallel", "64"]), "`hybridc probe --split "),
        (compile(&["--objective", "fun"]), "unknown objective \"fun\""),
        (compile(&["--without", "numa0", "--without", "numa1"]), "no device is left"),
        (compile(&["--contxt", "9"]), "a similar argument exists: '--context'"),
        (compile(&["--context", "4k"]), "invalid value '4k' for '--context <N>': 4k is no whole"),
        (compile(&["--pipeline", "numa0", "--tensor-parallel", "numa1"]), "cannot be used with"),
        (refusal(&folder, &["compile"]), "not provided: <CHECKPOINT>"),
        (refusal(&folder, &["compil", demo]), "unrecognized subcommand 'compil'"),
        (refusal(&folder, &[]), "nothing is asked for; --help lists what can be"),
    ];
    for (line, part) in cases {
        assert!(line.contains(part), "no {part:?} in {line}");
    }
    assert!(!folder.path().join("plan.ron").exists());
}

#[test]
fn wrong_arguments_end_with_another_status_than_work_that_fails() {
    let folder = folder();
    let demo = demo();
    let demo = demo.to_str().expect("a plain path");
    let wrong = [
        ["--context", "4k"],
        ["--format", "int4"],
        ["--gpu-memory", "24"],
        ["--kv-cache", "lots"],
        ["--kv-type", "i4"],
        ["--objective", "fun"],
        ["--pin", "layers"],
        ["--pipeline", "0"],
        ["--print-after", "nonsense"],
        ["--tensor-parallel", "numa0:0"],
    ];
    for arguments in wrong {
        let output = hybridc(&folder, &[&["compile", demo][..], &arguments].concat());
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        let line = text(&output.stderr);
        assert!(line.ends_with("; --help lists what there is\n"), "{line}");
    }
    assert_eq!(hybridc(&folder, &["compile", "missing"]).status.code(), Some(1));
}
