//! Memory of captured launches.

use ir::captured::{captured_bytes, includes_prompts, most_kinds, most_prompt_tokens};
use ir::check::memory;
use ir::machine::DeviceKind;
use ir::op::{Norm, NormKind, Op};
use ir::plan::{Action, Phase, Plan, Program, Weight};
use ir::tensor::{DType, Format};

use crate::collectives::by_library;
use crate::plans::{b, d, gpus, node_before_gpus, one_device, pipeline, s, streamed};

const LAUNCH_BYTES: u64 = 2560;

fn decoding(mut plan: Plan, sequences: u32) -> Plan {
    for program in &mut plan.programs {
        program.phase = Phase::Decode;
        program.max_sequences = sequences;
    }
    plan
}

fn on_gpu(mut plan: Plan) -> Plan {
    plan.machine.devices[d(0)].kind = DeviceKind::Gpu {
        ordinal: 0,
        reserved_bytes: 0,
        library_bytes: 1,
        launch_bytes: LAUNCH_BYTES,
        has_warpgroups: false,
    };
    plan
}

#[test]
fn every_launch_of_every_kind_is_counted_beside_what_the_driver_takes_by_itself() {
    let plan = decoding(on_gpu(one_device()), 1);
    // The batch's numbers and six more; six linears of eight rows; what else is one launch: embedding, norm, sum,
    // router and wanted rows; attention; experts.
    let launches = 7 + 6 + 5 + 3 + 6;
    assert_eq!(captured_bytes(&plan, d(0)), launches * 18 * LAUNCH_BYTES);
    assert_eq!(memory(&plan)[d(0)].reserved_bytes, launches * 18 * LAUNCH_BYTES);
    let more = decoding(on_gpu(one_device()), 9);
    assert_eq!(most_kinds(&more), 16 + 2 * 9);
    assert_eq!(captured_bytes(&more, d(0)), launches * 34 * LAUNCH_BYTES);
    let mut short = plan.clone();
    short.programs.iter_mut().for_each(|program| program.lanes[0].steps.truncate(1));
    assert_eq!(captured_bytes(&short, d(0)), 8 * 18 * LAUNCH_BYTES);
}

#[test]
fn steps_that_wait_for_other_devices_or_tell_them_launch_that_too() {
    let mut plan = decoding(on_gpu(pipeline()), 1);
    let beside = captured_bytes(&plan, d(0));
    // A second value is sent by itself.
    let mut two = plan.clone();
    for program in &mut two.programs {
        let of_next = program.steps[program.lanes[1].steps[0]].waits[0];
        program.steps[of_next].writes.push(b(0));
    }
    assert_eq!(captured_bytes(&two, d(0)) - beside, 18 * LAUNCH_BYTES);
    plan.programs.iter_mut().for_each(|program| program.lanes.truncate(1));
    // The next device waits for one step.
    assert_eq!(beside - captured_bytes(&plan, d(0)), 18 * LAUNCH_BYTES);
    let steps = plan.programs.iter_mut().flat_map(|program| program.steps.rows_mut());
    steps.filter(|step| &*step.name == "embed").for_each(|step| step.waits.push(s(0)));
    assert_eq!(beside, captured_bytes(&plan, d(0)));
}

/// Lets a step write bfloat16.
fn narrow(program: &mut Program, name: &str) {
    let step = program.steps.rows().iter().find(|step| &*step.name == name);
    let buffer = step.expect("there is such a step").writes[0];
    program.buffers[buffer].ty.dtype = DType::Bf16;
}

#[test]
fn an_input_in_another_form_is_a_launch_of_its_own() {
    let plan = decoding(on_gpu(one_device()), 1);
    let before = captured_bytes(&plan, d(0));
    let more = |change: fn(&mut Program)| {
        let mut plan = plan.clone();
        plan.programs.iter_mut().for_each(change);
        (captured_bytes(&plan, d(0)) - before) / (18 * LAUNCH_BYTES)
    };
    // The head sees the wanted rows alone.
    assert_eq!(more(|program| program.max.tokens = 9), 5);
    assert_eq!(more(|program| program.max.rows = 9), 1);
    assert_eq!(more(|program| narrow(program, "norm")), 3);
    assert_eq!(more(|program| narrow(program, "q")), 1);
    let with_norm = |kind: NormKind| {
        let mut plan = plan.clone();
        let steps = plan.programs.iter_mut().flat_map(|program| program.steps.rows_mut());
        for step in steps.filter(|step| &*step.name == "q") {
            let Action::Run(Op::Linear(linear)) = &mut step.action else { continue };
            linear.norm =
                Some(Norm { kind, scale: None, bias: None, epsilon: 1e-5, scale_offset: 0.0 });
        }
        (captured_bytes(&plan, d(0)) - before) / (18 * LAUNCH_BYTES)
    };
    assert_eq!((with_norm(NormKind::Rms), with_norm(NormKind::Layer)), (0, 1));
}

#[test]
fn many_rows_are_launched_in_parts_and_by_the_library_piece_by_piece() {
    let launches = |format: Format, has_library: bool, shape: [u32; 2]| {
        let mut plan = decoding(on_gpu(one_device()), 1);
        if let DeviceKind::Gpu { library_bytes, .. } = &mut plan.machine.devices[d(0)].kind {
            *library_bytes = u64::from(has_library);
        }
        for weight in plan.weights.rows_mut().iter_mut().filter(|weight| weight.shape.len() > 1) {
            weight.format = format;
        }
        let steps = plan.programs[0].steps.rows().iter();
        let of_q = steps.filter(|step| &*step.name == "q").find_map(|step| match &step.action {
            Action::Run(Op::Linear(linear)) => linear.weights.first().copied(),
            Action::Run(_) | Action::Move { .. } | Action::Fetch { .. } => None,
        });
        plan.weights[of_q.expect("there is such a linear")].shape = shape[..].into();
        plan.programs.iter_mut().for_each(|program| program.max.tokens = 130);
        captured_bytes(&plan, d(0)) / (18 * LAUNCH_BYTES)
    };
    let small = [8, 8];
    let of_few = launches(Format::Q4, false, small) - 5 * 3 * 2;
    // Five linears see all tokens: 64 and 64 and two, each with an input of its own. By the library it is as many: the
    // input, a matrix unpacked, up to three for its product, and what follows. It may be missing where the plan runs.
    assert_eq!(launches(Format::Q4, true, small), of_few + 5 * (3 * 2));
    // What is not multiplied as it lies takes four launches for a matrix, and by the library one more.
    assert_eq!(launches(Format::F32, false, small), of_few + 5 * 4);
    assert_eq!(launches(Format::F32, true, small), of_few + 5 * 5);
    // A matrix in two pieces.
    let large = [1 << 17, 1 << 10];
    assert_eq!(launches(Format::Q4, true, large), launches(Format::Q4, true, small) + 4);
    assert_eq!(launches(Format::Q4, false, large), launches(Format::Q4, false, small));
    // It is the GPU that has the library, wherever what it fetches stays.
    let mut fetched = decoding(on_gpu(streamed()), 1);
    fetched.programs.iter_mut().for_each(|program| program.max.tokens = 130);
    let mut held = fetched.clone();
    held.weights.rows_mut().iter_mut().for_each(|weight| weight.device = d(0));
    assert_eq!(captured_bytes(&fetched, d(0)), captured_bytes(&held, d(0)));
}

#[test]
fn launches_of_prompts_are_counted_up_to_the_longest_that_are_captured() {
    let prompts = |tokens: u32, library: u64| {
        let mut plan = on_gpu(one_device());
        if let DeviceKind::Gpu { library_bytes, .. } = &mut plan.machine.devices[d(0)].kind {
            *library_bytes = library;
        }
        plan.programs.truncate(1);
        plan.programs[0].max.tokens = tokens;
        assert!(includes_prompts(&plan));
        plan
    };
    let bytes = |tokens, library| captured_bytes(&prompts(tokens, library), d(0));
    // The vendor's library makes as many launches of any number of tokens, kernels without it more of more.
    assert_eq!(most_prompt_tokens(&prompts(5000, 1)), 5000);
    assert_eq!(bytes(5000, 1), bytes(512, 1));
    assert_eq!(most_prompt_tokens(&prompts(5000, 0)), 512);
    assert!(bytes(64, 0) < bytes(512, 0));
    assert_eq!(bytes(5000, 0), bytes(512, 0));
}

#[test]
fn beside_hosts_short_prompts_are_captured_but_for_mixtures() {
    let mixture = on_gpu(pipeline());
    assert!(!includes_prompts(&mixture));
    let mut dense = mixture;
    for step in dense.programs.iter_mut().flat_map(|program| program.steps.rows_mut()) {
        if let Action::Run(op @ Op::Experts(_)) = &mut step.action {
            *op = Op::Add;
        }
    }
    assert!(includes_prompts(&dense));
    dense.programs.iter_mut().for_each(|program| program.max.tokens = 5000);
    assert_eq!(most_prompt_tokens(&dense), 64);
}

#[test]
fn nodes_and_what_has_no_part_in_decoding_hold_none() {
    assert_eq!(captured_bytes(&decoding(one_device(), 1), d(0)), 0);
    assert_eq!(captured_bytes(&decoding(on_gpu(one_device()), 1), d(7)), 0);
    let mut idle = decoding(on_gpu(one_device()), 1);
    idle.programs.iter_mut().for_each(|program| program.lanes.clear());
    assert_eq!(captured_bytes(&idle, d(0)), 0);
    // Prompts alone, which are not captured: another device waits for them.
    let mut prompts = on_gpu(pipeline());
    prompts.programs.truncate(1);
    assert_eq!(captured_bytes(&prompts, d(0)), 0);
}

#[test]
fn prompts_on_several_gpus_are_captured_where_these_wait_for_each_other_alone() {
    let mut plan = gpus();
    assert!(includes_prompts(&plan));
    assert!(!includes_prompts(&node_before_gpus()) && !includes_prompts(&streamed()));
    // No graph captures the vendor's library.
    plan.programs.iter_mut().for_each(|program| by_library(program, usize::MAX));
    assert!(!includes_prompts(&plan));
}

#[test]
fn neighbouring_matrices_of_one_format_are_one_launch() {
    let merged = |formats: [Format; 3]| {
        let mut plan = decoding(on_gpu(one_device()), 1);
        let before = captured_bytes(&plan, d(0));
        let first = plan.weights.rows()[1].clone();
        let ids = formats.map(|format| plan.weights.push(Weight { format, ..first.clone() }));
        for step in plan.programs.iter_mut().flat_map(|program| program.steps.rows_mut()) {
            if let (Action::Run(Op::Linear(linear)), "q") = (&mut step.action, &*step.name) {
                linear.weights = ids[..].into();
            }
        }
        (captured_bytes(&plan, d(0)) - before) / (18 * LAUNCH_BYTES)
    };
    assert_eq!(merged([Format::Q4; 3]), 0);
    assert_eq!(merged([Format::Q4, Format::Q4, Format::Q8]), 1);
    assert_eq!(merged([Format::Q4, Format::Q8, Format::Q4]), 2);
}
