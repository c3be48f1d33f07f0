//! What a scene says of runs, memory and places, number by number.

mod made_up;

use ir::graph::{Cause, Reason};
use ir::id::{DeviceId, Id as _};
use ir::layout::Move;
use ir::op::{Activation, ExpertPart, Experts, Op};
use ir::plan::{Action, Plan, Weight};
use ir::smallvec;
use ir::tensor::{Dim, Format};
use made_up::{Pace, Style, Wish, trace_at};
use viewer::compare::compare;
use viewer::document::Document;
use viewer::scene::{Bottleneck, Kind, LaneKind, Scene};
use viewer::step_panel::sorted;
use viewer::theme;
use viewer::view::View;

const PREFILL: usize = 0;
const DECODE: usize = 1;
/// What prompts of made-up plans have at most.
const LONG: Pace = Pace { percent: 112, prompt: None };
const SHORT: Pace = Pace { percent: 112, prompt: Some(8) };

fn pipeline() -> Plan {
    made_up::plan(Wish::new(12, 1, 2, Style::Pipeline))
}

fn streaming() -> Plan {
    made_up::plan(Wish::new(4, 1, 1, Style::Streaming))
}

fn measured(plan: &Plan, pace: Pace) -> Scene {
    Scene::new(plan, Some(&trace_at(plan, 7, 300, pace)), Vec::new())
}

fn predicted(plan: &Plan) -> Scene {
    Scene::new(plan, None, Vec::new())
}

#[test]
fn a_short_prompt_is_compared_with_the_forecast_of_one() {
    let plan = pipeline();
    let scene = measured(&plan, SHORT);
    let summary = &scene.summaries[PREFILL];
    assert_eq!(summary.expected_nanos, Some(plan.forecast.programs[PREFILL].nanos_of(8) as u64));
    let line = &scene.headline(PREFILL)[0];
    assert!(line.starts_with("prefill: predicted") && line.contains(" for 8 tokens, "), "{line}");
}

#[test]
fn steps_and_blocks_of_a_short_prompt_have_no_error_and_no_rate() {
    for (pace, is_long) in [(LONG, true), (SHORT, false)] {
        let scene = measured(&pipeline(), pace);
        let program = &scene.programs[PREFILL];
        assert!(program.steps.iter().all(|step| step.measured.is_some()));
        assert!(program.steps.iter().all(|step| step.error().is_some() == is_long));
        assert!(program.steps.iter().all(|step| step.rated_nanos().is_some() == is_long));
        assert!(program.blocks_measured(3, 6).is_some());
        assert_eq!(program.blocks_error(3, 6).is_some(), is_long);
    }
}

#[test]
fn decode_is_compared_with_the_forecast_for_what_was_cached() {
    let plan = pipeline();
    let scene = measured(&plan, LONG);
    let summary = &scene.summaries[DECODE];
    let cached = summary.size.expect("it was measured").cached;
    let forecast = &plan.forecast.programs[DECODE];
    assert_eq!(summary.expected_nanos, Some(forecast.nanos_of(cached).round() as u64));
    assert_ne!(summary.expected_nanos, Some(forecast.nanos));
    // The estimates are for 32 tokens cached: only attention depends on them.
    let attention = |kind: Kind| kind == Kind::Attention;
    for step in &scene.programs[DECODE].steps {
        assert_eq!(step.error().is_none(), attention(step.kind), "{}", step.name);
    }
}

#[test]
fn layers_of_decode_are_compared_without_the_attention_that_had_less_to_do() {
    let plan = pipeline();
    let mut trace = trace_at(&plan, 7, 300, LONG);
    for span in trace.spans.iter_mut().filter(|span| span.run > 0) {
        // Twice as long as predicted, but attention, which takes no time.
        let step = &plan.programs[DECODE].steps[span.step];
        let is_attention = matches!(step.action, Action::Run(Op::Attention(_)));
        span.end = span.start + if is_attention { 0 } else { 2 * step.estimate_nanos };
    }
    let scene = Scene::new(&plan, Some(&trace), Vec::new());
    let program = &scene.programs[DECODE];
    assert_eq!(program.blocks_error(3, 6), Some(1.0));
    assert_eq!(program.blocks_error_text(3, 6).as_deref(), Some("+100 % without attention"));
    assert_eq!(program.blocks_error_text(0, 0).as_deref(), Some("+100 %"));
}

#[test]
fn a_forecast_of_one_size_says_nothing_of_others() {
    let mut plan = pipeline();
    plan.forecast.programs[PREFILL].others.clear();
    let scene = measured(&plan, SHORT);
    assert_eq!(scene.summaries[PREFILL].error(), None);
    let line = &scene.headline(PREFILL)[0];
    assert!(line.contains(" for 32 tokens, measured ") && line.contains(" for 8 tokens (median"));
}

#[test]
fn prompts_of_other_lengths_are_compared_with_their_lengths_and_without_a_change() {
    let plan = pipeline();
    let (short, long) = (measured(&plan, SHORT), measured(&plan, LONG));
    let comparison = compare(&short, &long, PREFILL);
    let row = comparison.programs.iter().find(|row| row.subject == "prefill measured");
    let row = row.expect("both were measured");
    assert!(row.before.ends_with(" for 8 tokens") && row.after.ends_with(" for 32 tokens"));
    assert_eq!(row.change, None);
    assert!(comparison.blocks.is_empty(), "{:?}", comparison.blocks);
    let alike = compare(&long, &long, PREFILL);
    assert!(alike.programs.iter().all(|row| row.change == Some(0.0)));
}

#[test]
fn programs_that_one_plan_lacks_are_named() {
    let whole = pipeline();
    let mut part = whole.clone();
    part.programs.truncate(1);
    let (whole, part) = (predicted(&whole), predicted(&part));
    let said = |before: &Scene, after: &Scene| {
        let comparison = compare(before, after, PREFILL);
        let row = comparison.programs.into_iter().find(|row| row.subject == "decode1");
        row.map(|row| (row.before, row.after)).expect("it is named")
    };
    assert_eq!(said(&whole, &part).0, "only in the first");
    assert_eq!(said(&part, &whole).1, "only in the second");
}

#[test]
fn devices_hold_what_the_checker_counts() {
    let packed = Wish { packed: true, ..Wish::new(12, 1, 2, Style::Pipeline) };
    for plan in [made_up::plan(packed), streaming()] {
        assert_eq!(ir::check::check(&plan), []);
        let scene = predicted(&plan);
        for (device, held) in scene.devices.iter().zip(ir::check::memory(&plan).rows()) {
            assert_eq!(device.used_bytes(), held.needed_bytes());
            assert_eq!(
                (device.weight_bytes, device.cache_bytes),
                (held.weight_bytes, held.cache_bytes)
            );
        }
        let caches: u64 = scene.devices.iter().map(|device| device.cache_bytes).sum();
        let of_steps: u64 = scene.programs[DECODE].steps.iter().map(|step| step.cache_bytes).sum();
        assert_eq!(caches, of_steps);
    }
    let plan = made_up::plan(packed);
    let scene = predicted(&plan);
    let once: u64 = plan.weights.rows().iter().map(|weight| plan.weight_bytes(weight)).sum();
    let held: u64 = scene.devices.iter().map(|device| device.weight_bytes).sum();
    assert!(held > once, "copies that are not packed count, too");
}

#[test]
fn a_full_device_lacks_room_for_what_it_does_not_hold_yet() {
    let plan = streaming();
    let scene = predicted(&plan);
    let away: u64 = plan
        .weights
        .rows()
        .iter()
        .filter(|weight| weight.name.contains("self_attn") && weight.device.index() == 1)
        .map(|weight| plan.weight_bytes(weight))
        .sum();
    let [limit] = scene.summaries[PREFILL].limits.as_slice() else { panic!("one device is full") };
    assert_eq!((limit.device, limit.blocks.len()), (0, 4));
    assert_eq!(limit.needed_bytes, away + scene.devices[1].cache_bytes);
}

#[test]
fn steps_are_filtered_by_devices_in_any_case() {
    let mut scene = predicted(&pipeline());
    scene.devices[0].name = "GPU-A".to_owned();
    let program = &scene.programs[DECODE];
    let on_device = program.steps.iter().filter(|step| step.device == 0);
    let on_device: Vec<usize> = on_device.map(|step| step.number).collect();
    let mut view = View::new(&scene);
    for filter in ["GPU-A", "gpu-a"] {
        view.filter = filter.to_owned();
        assert_eq!(sorted(&scene, program, &view), on_device, "{filter}");
    }
}

#[test]
fn movement_can_be_the_bottleneck() {
    let mut plan = pipeline();
    for step in plan.programs[DECODE].steps.rows_mut() {
        if let Action::Move { movement: Move::Transfer { from, .. }, .. } = step.action {
            step.estimate_nanos = if from.index() == 0 { 40_000_000 } else { 20_000_000 };
        }
    }
    let scene = predicted(&plan);
    let Some(Bottleneck::Movement(Some(lane))) = scene.summaries[DECODE].bottleneck else {
        panic!("{:?}", scene.summaries[DECODE].bottleneck)
    };
    assert_eq!(scene.lanes[lane].kind, LaneKind::Link(0, 1));
    let line = &scene.headline(DECODE)[1];
    assert!(line.starts_with("Bottleneck: movement takes 60.0 ms"), "{line}");
    assert!(line.ends_with(", most of it gpu0 → numa0"), "{line}");
}

#[test]
fn a_trace_of_another_plan_measures_nothing() {
    let plan = pipeline();
    let document = Document::of(plan.clone(), Some(trace_at(&plan, 7, 300, LONG)), 8);
    let scene = &document.scene;
    for program in [PREFILL, DECODE] {
        let lines = scene.headline(program);
        let said = "; the trace is of another plan: measured times are not compared";
        assert!(lines[0].ends_with(said), "{}", lines[0]);
        assert_eq!(lines[1..], predicted(&plan).headline(program)[1..]);
        assert_eq!(scene.summaries[program].measured_nanos, None);
        assert!(scene.programs[program].steps.iter().all(|step| step.measured.is_none()));
    }
    assert!(!scene.runs.is_empty(), "its spans are drawn");
    assert_eq!(document.scene.findings.len(), 1, "{:?}", scene.findings);
}

#[test]
fn a_device_is_as_busy_in_its_lanes_as_in_its_column() {
    let tensor = made_up::plan(Wish::new(4, 4, 0, Style::Tensor));
    for plan in [tensor, streaming(), pipeline()] {
        let scene = predicted(&plan);
        for (program, summary) in scene.programs.iter().zip(&scene.summaries) {
            let mut busy = vec![0_u64; scene.devices.len()];
            for ((lane, _), nanos) in program.queues.iter().zip(&program.predicted.busy) {
                let LaneKind::Queue(device, _) = scene.lanes[*lane].kind else { panic!("a queue") };
                busy[device] += nanos;
            }
            assert_eq!(busy, summary.busy_nanos[..scene.devices.len()]);
        }
    }
    let text = predicted(&streaming()).to_string();
    assert!(text.contains("gpu0 copy: moving "), "{text}");
}

#[test]
fn devices_that_share_every_layer_are_the_bottleneck_together() {
    for (gpus, names) in [(2, "gpu0 and gpu1"), (4, "gpu0 to gpu3")] {
        let scene = predicted(&made_up::plan(Wish::new(4, gpus, 0, Style::Tensor)));
        let line = &scene.headline(DECODE)[1];
        let said = format!("Bottleneck: {names} share the work, busy up to ");
        assert!(line.starts_with(&said), "{line}");
        let summary = &scene.summaries[DECODE];
        assert!((0..gpus as usize).all(|device| summary.is_bottleneck(device)));
    }
    // The stages of a pipeline work one after the other.
    let mut scene = predicted(&pipeline());
    assert!(scene.summaries[DECODE].as_busy.is_empty());
    // Only devices of one kind make a row.
    scene.summaries[DECODE].as_busy = vec![0, 1, 2];
    let line = &scene.headline(DECODE)[1];
    assert!(line.starts_with("Bottleneck: gpu0, numa0 and numa1 share the work"), "{line}");
}

#[test]
fn the_headline_says_what_bars_and_steps_are_predicted_for() {
    let scene = measured(&pipeline(), SHORT);
    let said = [PREFILL, DECODE].map(|program| scene.headline(program).remove(0));
    let ending = "; cards, bars and steps are predicted ";
    assert!(said[0].ends_with(&format!("{ending}for 32 tokens")), "{}", said[0]);
    assert!(said[1].ends_with(&format!("{ending}with 32 tokens cached")), "{}", said[1]);
    let line = measured(&pipeline(), LONG).headline(PREFILL).remove(0);
    assert!(!line.contains(ending), "{line}");
}

#[test]
fn what_only_one_plan_has_is_compared_with_its_bytes_and_folded() {
    let before = predicted(&pipeline());
    let after = predicted(&made_up::plan(Wish::new(6, 2, 1, Style::Pipeline)));
    let comparison = compare(&before, &after, DECODE);
    let models = comparison.models.as_deref();
    assert_eq!(models, Some("different models: made-up-12 / made-up-6"));
    // What the files hold counts, not what their folder is called.
    let of = |title: &str, fingerprint| Scene {
        title: title.to_owned(),
        checkpoint: vec![fingerprint],
        ..before.clone()
    };
    let models = |other: Scene| compare(&of("model", 1), &other, DECODE).models;
    assert_eq!(models(of("a copy", 1)), None);
    assert_eq!(models(of("model", 2)), Some("different checkpoints called model".to_owned()));
    assert_eq!(models(of("other", 2)), Some("different models: model / other".to_owned()));
    let device = |name: &str| comparison.devices.iter().find(|row| row.subject == name);
    let (gpu1, numa1) = (device("gpu1").expect("named"), device("numa1").expect("named"));
    assert!(gpu1.before == "–" && gpu1.after.contains(" of "), "{gpu1:?}");
    assert!(numa1.after == "–" && numa1.before.contains(" of "), "{numa1:?}");
    let only = comparison.blocks.iter().filter(|row| row.after == "–");
    let only: Vec<&str> = only.map(|row| row.subject.as_str()).collect();
    assert_eq!(only, ["layers 6–7", "layers 8–11"]);
    let devices = before.devices_with(&after);
    let names: Vec<&str> = devices.iter().map(|device| device.name.as_str()).collect();
    assert_eq!(names, ["gpu0", "numa0", "numa1", "gpu1"]);
    let colors = [0, 3].map(|device| theme::device_among(&devices, device));
    assert_ne!(colors[0], colors[1]);
    assert_eq!(compare(&before, &before, DECODE).models, None);
}

#[test]
fn a_pinned_layer_is_not_folded_with_its_neighbours() {
    let mut plan = pipeline();
    let reason = Reason::Pinned { pattern: r"layers\.2\.=gpu0".into() };
    let pinned = plan.causes.push(Cause { reason, runner_up: None });
    for step in plan.programs[DECODE].steps.rows_mut() {
        if step.name.starts_with("layers.2.") {
            step.cause = pinned;
        }
    }
    let scene = predicted(&plan);
    let program = &scene.programs[DECODE];
    let block = program.blocks.iter().position(|block| block.number == Some(2));
    let block = block.expect("it has a layer 2");
    assert!(program.groups.iter().any(|group| (group.first, group.last) == (block, block)));
    assert_eq!(program.blocks[block].cause, r"pinned here by layers\.2\.=gpu0");
}

#[test]
fn weights_and_caches_of_other_devices_are_named_with_their_homes() {
    let scene = predicted(&streaming());
    let step = |program: usize, name: &str| {
        let steps = &scene.programs[program].steps;
        let step = steps.iter().find(|step| step.name == name && !step.kind.is_move());
        step.expect("it is there")
    };
    let linear = step(PREFILL, "layers.1.self_attn.q_proj");
    assert_eq!(scene.home_text(PREFILL, &[linear.number]), "weights at home on numa0");
    assert!(linear.weights.iter().any(|weight| weight.ends_with("at home on numa0")));
    assert!(linear.cause.starts_with("gpu0 has no room for its weights: "), "{}", linear.cause);
    let better = linear.runner_up.as_deref().expect("there is a better place");
    assert!(better.starts_with("gpu0 with its weights held there, "), "{better}");
    let attention = step(PREFILL, "layers.1.self_attn");
    assert_eq!(scene.home_text(PREFILL, &[attention.number]), "cache at home on numa0");
    assert!(attention.cause.starts_with("gpu0 has no room for its cache: "), "{}", attention.cause);
    let decoding = step(DECODE, "layers.1.self_attn");
    assert_eq!(scene.home_text(DECODE, &[decoding.number]), "");
    assert!(decoding.cause.starts_with("gpu0 has no room for it: "), "{}", decoding.cause);
    let text = scene.to_string();
    assert!(text.contains("alike on gpu0, weights and cache at home on numa0: "), "{text}");
}

#[test]
fn rates_count_what_a_run_reads() {
    let mut plan = pipeline();
    let device = DeviceId::from_index(0);
    let mut stack = |shape: [u32; 3]| {
        let name = format!("experts {shape:?}");
        let mut row = plan.weights.rows()[0].clone();
        row = Weight { name, device, format: Format::F32, shape: shape.to_vec(), ..row };
        plan.weights.push(row)
    };
    let gate = stack([8, 64, 32]);
    let up = stack([8, 64, 32]);
    let down = stack([8, 32, 64]);
    let program = &mut plan.programs[DECODE];
    let steps = program.steps.rows_mut();
    let linear = steps.iter_mut().find(|step| &*step.name == "layers.0.mlp.down_proj").unwrap();
    let experts = Experts { gate, up, down, activation: Activation::Silu, part: None };
    let (x, ids) = (linear.reads[0], linear.reads[1]);
    linear.action = Action::Run(Op::Experts(experts.clone()));
    program.buffers[ids].ty.shape = smallvec![Dim::Tokens, Dim::Fixed(2)];
    program.buffers[x].ty.shape = smallvec![Dim::Tokens, Dim::Fixed(32)];
    let all = 3 * 8 * 64 * 32 * 4;
    let row = |plan: &Plan, name: &str| {
        let scene = predicted(plan);
        scene.programs[DECODE].steps.iter().find(|step| step.name == name).unwrap().clone()
    };
    let row_of_experts = |plan: &Plan| row(plan, "layers.0.mlp.down_proj");
    // Two of eight are used.
    assert_eq!(row_of_experts(&plan).weight_bytes, all);
    assert_eq!(row_of_experts(&plan).read_bytes, Some(all / 4));
    assert_eq!(row_of_experts(&plan).flops, 2.0 * 3.0 * 2.0 * 64.0 * 32.0);
    // Half of the choices fall on these.
    let part = Some(ExpertPart { first: 0, load: 0.5 });
    let steps = plan.programs[DECODE].steps.rows_mut();
    let step = steps.iter_mut().find(|step| &*step.name == "layers.0.mlp.down_proj").unwrap();
    step.action = Action::Run(Op::Experts(Experts { part, ..experts }));
    assert_eq!(row_of_experts(&plan).read_bytes, Some(all / 8));
    assert_eq!(row_of_experts(&plan).flops, 2.0 * 3.0 * 64.0 * 32.0);
    // A table is not read as a whole.
    assert_eq!(row(&plan, "embed_tokens").read_bytes, None);
}

#[test]
fn a_window_bounds_the_arithmetic_of_attention() {
    let mut plan = pipeline();
    let flops = |plan: &Plan| {
        let scene = predicted(plan);
        let steps = &scene.programs[DECODE].steps;
        steps.iter().find(|step| step.kind == Kind::Attention).expect("it attends").flops
    };
    // Half of 64 tokens are cached, and a token sees itself.
    let whole = flops(&plan);
    for step in plan.programs[DECODE].steps.rows_mut() {
        if let Action::Run(Op::Attention(attention)) = &mut step.action {
            attention.window = Some(8);
        }
    }
    assert_eq!(flops(&plan), whole / 33.0 * 8.0);
}

#[test]
fn a_movement_between_devices_that_there_are_not_is_no_edge() {
    let mut plan = pipeline();
    let known = predicted(&plan).programs[DECODE].edges.len();
    for step in plan.programs[DECODE].steps.rows_mut() {
        if let Action::Move { movement: Move::Transfer { from, .. }, .. } = &mut step.action {
            *from = DeviceId::from_index(400_000_000);
        }
    }
    assert_eq!((known, predicted(&plan).programs[DECODE].edges.len()), (2, 0));
}
