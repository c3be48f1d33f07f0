//! Whatever the compiler makes of random models, machines and requests is sound, and no harm to it goes unnoticed.

mod wishes;

use compiler::options::Request;
use compiler::{Options, compile};
use ir::check::{check, memory};
use ir::id::{BufferId, Id as _, StepId};
use ir::layout::Move;
use ir::machine::Machine;
use ir::plan::{Action, Plan, Program, Step};
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::strategy::ValueTree as _;
use tests::machines;
use tests::toys::Toy;
use wishes::{Wishes, machine, toy, wishes};

/// The plan, or nothing where the wishes cannot be had.
fn compiled(toy: &Toy, machine: &Machine, wishes: &Wishes) -> Option<Plan> {
    wishes::compiled(&toy.model().expect("the toy is a model"), machine, wishes)
}

#[test]
fn most_wishes_can_be_had() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let mut had = 0;
    for _ in 0..64 {
        let strategy = (toy(), machine(), wishes());
        let tree = strategy.new_tree(&mut runner).expect("the strategy rejects nothing");
        let (toy, machine, wishes) = tree.current();
        had += usize::from(compiled(&toy, &machine, &wishes).is_some());
    }
    assert!(had >= 32, "{had} of 64 make a plan, so the tests here test little");
}

/// Few random machines are just too small for a model, so these are not random.
#[test]
fn plans_that_fetch_weights_are_as_sound() {
    let mut fetching = 0;
    for toy in [Toy { layers: 4, ..Toy::llama() }, Toy { layers: 3, ..Toy::mixture() }] {
        let model = toy.model().expect("the toy is a model");
        for kibibytes in (300..1300).step_by(25) {
            let options =
                Options { context: Some(128), prefill_tokens: Some(64), ..Options::default() };
            let machine = machines::fast_link(kibibytes << 10);
            let Ok(plan) = compile(&model, &machine, &options, &mut |_, _| ()) else { continue };
            if plan.forecast.devices.rows().iter().all(|device| device.fetch_bytes == 0) {
                continue;
            }
            fetching += 1;
            for program in 0..plan.programs.len() {
                check_waits(&plan, program);
                check_harms(&plan, program);
            }
        }
    }
    assert!(fetching >= 8, "{fetching} plans fetch weights, so this tests little");
}

#[test]
fn plans_that_sum_by_groups_are_as_sound() {
    let mut machine = machines::two_gpu_two_numa();
    for link in &mut machine.links {
        link.bytes_per_sec = 1e6;
    }
    let model = Toy { layers: 2, ..Toy::llama() }.model().expect("the toy is a model");
    let request = Request::TensorParallelRanks(4);
    let options =
        Options { context: Some(128), prefill_tokens: Some(64), request, ..Options::default() };
    let plan = compile(&model, &machine, &options, &mut |_, _| ()).expect("four devices share it");
    check_waits(&plan, 0);
    check_harms(&plan, 0);
    // Sums over two groups: one copy of each group's sum.
    let is_across = |step: &Step| {
        let is_sum = matches!(step.action, Action::Move { movement: Move::AllReduce, .. });
        let kind = |buffer: BufferId| {
            plan.machine.devices[plan.programs[0].buffers[buffer].device].kind.clone()
        };
        let is_gpu = |buffer: &BufferId| kind(*buffer).is_gpu();
        is_sum && step.reads.iter().any(is_gpu) && !step.reads.iter().all(is_gpu)
    };
    let steps = plan.programs[0].steps.ids();
    let across: Vec<StepId> =
        steps.filter(|&step| is_across(&plan.programs[0].steps[step])).collect();
    assert_eq!(across.len() % 4, 0);
    let reads = |step: StepId| plan.programs[0].steps[step].reads.clone();
    assert!(!across.is_empty() && across.iter().all(|&step| reads(step).len() == 2));
    let (first, later) = (across[0], across[4]);
    assert_ne!(reads(first), reads(across[1]), "the second GPU reads its own copy");
    for (harm, expected) in [
        (vec![reads(later)[0], reads(first)[1]], "its steps differ in what they do or read"),
        (vec![reads(across[1])[0], reads(first)[1]], "the devices that hold its terms"),
    ] {
        let mut harmed = plan.clone();
        harmed.programs[0].steps[first].reads = harm;
        let found: Vec<String> = check(&harmed).iter().map(ToString::to_string).collect();
        assert!(found.iter().any(|finding| finding.contains(expected)), "{found:?}");
    }
}

/// Every wait is needed.
fn check_waits(plan: &Plan, program: usize) {
    for step in plan.programs[program].steps.ids() {
        for wait in 0..plan.programs[program].steps[step].waits.len() {
            let mut plan = plan.clone();
            let lost = plan.programs[program].steps[step].waits.remove(wait);
            assert!(!check(&plan).is_empty(), "{step} needs no wait for {lost}");
        }
    }
}

/// No step can be harmed unnoticed.
fn check_harms(plan: &Plan, program: usize) {
    for step in plan.programs[program].steps.ids() {
        for kind in 0..HARMS {
            let mut harmed = plan.clone();
            if let Some(harm) = harm(&mut harmed.programs[program], kind, step) {
                assert!(!check(&harmed).is_empty(), "{harm} goes unnoticed");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_compiled_is_sound(toy in toy(), machine in machine(), wishes in wishes()) {
        if let Some(plan) = compiled(&toy, &machine, &wishes) {
            let found: Vec<String> = check(&plan).iter().map(ToString::to_string).collect();
            prop_assert_eq!(found, Vec::<String>::new());
            prop_assert_eq!(memory(&plan), plan.forecast.devices.clone());
            for (before, device) in machine.devices.rows().iter().zip(plan.forecast.devices.rows()) {
                let held = device.needed_bytes();
                prop_assert!(held <= before.memory_bytes, "{} holds {}", before.name, held);
            }
        }
    }

    #[test]
    fn the_same_inputs_give_the_same_bytes(toy in toy(), machine in machine(), wishes in wishes()) {
        if let Some(plan) = compiled(&toy, &machine, &wishes) {
            let text = plan.to_ron().expect("a plan can be written");
            let again = compiled(&toy, &machine, &wishes).expect("it was compiled before");
            prop_assert_eq!(&text, &again.to_ron().expect("a plan can be written"));
            prop_assert_eq!(Plan::from_ron(&text).expect("a plan can be read"), plan);
        }
    }

    #[test]
    fn every_wait_is_needed(toy in toy(), machine in machine(), wishes in wishes()) {
        let Some(plan) = compiled(&toy, &machine, &wishes) else { return Ok(()) };
        check_waits(&plan, 0);
    }

    #[test]
    fn no_harm_goes_unnoticed(
        toy in toy(),
        machine in machine(),
        wishes in wishes(),
        harms in prop::collection::vec((0..HARMS, any::<Index>()), 8),
    ) {
        let Some(plan) = compiled(&toy, &machine, &wishes) else { return Ok(()) };
        for (kind, at) in harms {
            let mut harmed = plan.clone();
            let program = &mut harmed.programs[0];
            let step = StepId::from_index(at.index(program.steps.len()));
            if let Some(harm) = harm(program, kind, step) {
                prop_assert!(!check(&harmed).is_empty(), "{harm} goes unnoticed");
            }
        }
    }
}

/// Kinds of harm.
const HARMS: u8 = 7;

/// Does one step of a program some harm, and says what; nothing where the step cannot be harmed so.
fn harm(program: &mut Program, kind: u8, id: StepId) -> Option<String> {
    let lane = program.lanes.iter().position(|lane| lane.steps.contains(&id))?;
    let place = program.lanes[lane].steps.iter().position(|&step| step == id)?;
    let before = place.checked_sub(1).map(|before| program.lanes[lane].steps[before]);
    let step = program.steps[id].clone();
    Some(match kind {
        0 => {
            let buffer = *step.frees.first()?;
            program.steps[id].frees.remove(0);
            format!("a leak of {buffer}")
        }
        1 => {
            let before = before?;
            let buffer = *step.frees.iter().find(|buffer| step.reads.contains(buffer))?;
            program.steps[id].frees.retain(|&freed| freed != buffer);
            program.steps[before].frees.push(buffer);
            format!("an early end of {buffer}")
        }
        2 => {
            let before = before?;
            let made = &program.steps[before].writes;
            step.reads.iter().find(|read| made.contains(read))?;
            program.lanes[lane].steps.swap(place - 1, place);
            format!("{id} before {before}")
        }
        3 => {
            program.lanes[lane].steps.remove(place);
            format!("a lost {id}")
        }
        4 => {
            program.steps[id].waits.push(*program.lanes[lane].steps.last()?);
            format!("a wait of {id} for the end of its lane")
        }
        5 => {
            let Action::Fetch { offset, .. } = &mut program.steps[id].action else { return None };
            *offset += 128;
            format!("{id} at a byte that no library reads from")
        }
        _ => {
            let buffer = *step.writes.first()?;
            let device = program.buffers[buffer].device;
            let other = ir::id::DeviceId::from_index(device.index() + 1);
            program.buffers[buffer].device = other;
            format!("{buffer} on {other}")
        }
    })
}
