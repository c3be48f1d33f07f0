//! Whatever the compiler makes of random models, machines and requests is sound, and no harm to it goes unnoticed.

mod wishes;

use std::collections::BTreeSet;

use compiler::options::Request;
use compiler::{Options, compile};
use ir::check::{check, memory};
use ir::id::{BufferId, CacheId, DeviceId, Id as _, StepId};
use ir::layout::Move;
use ir::machine::{DeviceKind, Machine};
use ir::op::{ExpertPart, Op};
use ir::plan::{Action, Plan, Program, Queue, Step};
use ir::tensor::DType;
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

/// The plan; a case whose wishes cannot be had is rejected, and another takes its place.
fn had(toy: &Toy, machine: &Machine, wishes: &Wishes) -> Result<Plan, TestCaseError> {
    let plan = compiled(toy, machine, wishes);
    plan.ok_or_else(|| TestCaseError::reject("the wishes cannot be had"))
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
    let (mut fetching, mut done) = (0, BTreeSet::new());
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
                done.append(&mut check_harms(&plan, program));
            }
        }
    }
    assert!(fetching >= 8, "{fetching} plans fetch weights, so this tests little");
    assert!(Harm::OF_FETCHES.iter().all(|harm| done.contains(harm)));
}

/// Random plans are hardly ever harmed in each of these ways.
#[test]
fn every_kind_of_harm_is_done_and_noticed() {
    let mut machine = machines::two_gpu_two_numa();
    machine.devices.rows_mut().iter_mut().for_each(|device| device.memory_bytes = 1 << 24);
    let toys = [Toy { layers: 2, ..Toy::llama() }, Toy { layers: 2, ..Toy::mixture() }];
    let requests = [Request::TensorParallelRanks(2), Request::PipelineRanks(2)];
    let mut done = BTreeSet::new();
    for (toy, request) in toys.iter().flat_map(|toy| requests.iter().map(move |r| (toy, r))) {
        let model = toy.model().expect("the toy is a model");
        let request = request.clone();
        let options =
            Options { context: Some(128), prefill_tokens: Some(64), request, ..Options::default() };
        let plan = compile(&model, &machine, &options, &mut |_, _| ()).expect("GPUs have room");
        done.append(&mut check_harms(&plan, 0));
    }
    // Only fetches are harmed in the other ways.
    let others: Vec<Harm> = Harm::ALL.into_iter().filter(|harm| !done.contains(harm)).collect();
    assert_eq!(others, Harm::OF_FETCHES);
}

/// Rows of 100 features in 16 bits are no whole loads.
#[test]
fn what_gpus_cannot_multiply_stays_beside_them() {
    let toy = Toy { intermediate: 100, stored: DType::Bf16, ..Toy::llama() };
    let model = toy.model().expect("the toy is a model");
    let mut machine = machines::one_gpu_two_numa();
    let gpu = &mut machine.devices.rows_mut()[0];
    // With the vendor's library products are made in 16 bits.
    gpu.kind = DeviceKind::Gpu {
        ordinal: 0,
        reserved_bytes: 0,
        library_bytes: 256,
        launch_bytes: 0,
        has_warpgroups: false,
    };
    let options = Options { context: Some(128), prefill_tokens: Some(64), ..Options::default() };
    let on_gpu = Request::Pipeline(vec!["gpu0".to_owned()]);
    let compiled = |request: Request, prefill_tokens: u32| {
        let prefill_tokens = Some(prefill_tokens);
        let options = Options { request, prefill_tokens, ..options.clone() };
        compile(&model, &machine, &options, &mut |_, _| ())
    };
    let refusal = compiled(on_gpu.clone(), 64).expect_err("no GPU multiplies so");
    let expected = "layers.0.down: gpu0 does not multiply rows of 100 features in bf16";
    assert!(format!("{refusal:#}").contains(expected), "{refusal:#}");
    compiled(on_gpu, 8).expect("few rows are multiplied with matrices as they lie");
    let any = compiled(Request::Any, 64).expect("NUMA nodes multiply anything");
    let mut candidates = any.forecast.candidates.iter();
    assert!(candidates.any(|candidate| candidate.name.contains("beside gpu0")), "the GPU attends");
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
        harmed.programs[0].steps[first].reads = harm.into();
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

/// No step can be harmed unnoticed; the kinds of harm that are done.
fn check_harms(plan: &Plan, program: usize) -> BTreeSet<Harm> {
    let mut done = BTreeSet::new();
    for step in plan.programs[program].steps.ids() {
        for harm in Harm::ALL {
            let mut harmed = plan.clone();
            if let Some(what) = harm.strike(&mut harmed, program, step) {
                assert!(!check(&harmed).is_empty(), "{what} goes unnoticed");
                done.insert(harm);
            }
        }
    }
    done
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_compiled_is_sound(toy in toy(), machine in machine(), wishes in wishes()) {
        let plan = had(&toy, &machine, &wishes)?;
        let found: Vec<String> = check(&plan).iter().map(ToString::to_string).collect();
        prop_assert_eq!(found, Vec::<String>::new());
        prop_assert_eq!(memory(&plan), plan.forecast.devices.clone());
        prop_assert_eq!(machine.devices.len(), plan.forecast.devices.len());
        for (before, device) in machine.devices.rows().iter().zip(plan.forecast.devices.rows()) {
            let held = device.needed_bytes();
            prop_assert!(held <= before.memory_bytes, "{} holds {}", before.name, held);
        }
    }

    #[test]
    fn the_same_inputs_give_the_same_bytes(toy in toy(), machine in machine(), wishes in wishes()) {
        let plan = had(&toy, &machine, &wishes)?;
        let text = plan.to_ron().expect("a plan can be written");
        let again = compiled(&toy, &machine, &wishes).expect("it was compiled before");
        prop_assert_eq!(&text, &again.to_ron().expect("a plan can be written"));
        prop_assert_eq!(Plan::from_ron(&text).expect("a plan can be read"), plan);
    }

    #[test]
    fn every_wait_is_needed(
        toy in toy(),
        machine in machine(),
        wishes in wishes(),
        program in any::<Index>(),
    ) {
        let plan = had(&toy, &machine, &wishes)?;
        check_waits(&plan, program.index(plan.programs.len()));
    }

    #[test]
    fn no_harm_goes_unnoticed(
        toy in toy(),
        machine in machine(),
        wishes in wishes(),
        program in any::<Index>(),
        harms in prop::collection::vec((prop::sample::select(&Harm::ALL[..]), any::<Index>()), 8),
    ) {
        let plan = had(&toy, &machine, &wishes)?;
        let program = program.index(plan.programs.len());
        for (harm, at) in harms {
            let mut harmed = plan.clone();
            let step = StepId::from_index(at.index(plan.programs[program].steps.len()));
            if let Some(what) = harm.strike(&mut harmed, program, step) {
                prop_assert!(!check(&harmed).is_empty(), "{what} goes unnoticed");
            }
        }
    }
}

/// A kind of harm to one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Harm {
    /// A buffer that it frees stays.
    Leak,
    /// A buffer that it reads ends with the step before it.
    EarlyEnd,
    /// It comes before the step that makes what it reads.
    Swap,
    /// It is not done.
    Loss,
    /// It waits for the end of its lane.
    Circle,
    /// What it fetches lies where no library reads.
    Misplaced,
    /// What it fetches lies over another weight that is read with it.
    Overlap,
    /// What it writes lies on another device.
    Elsewhere,
    /// It attends to another's cache.
    Cache,
    /// Its mixture begins with another expert.
    Experts,
    /// The sender does it.
    Sender,
    /// Its sum's members are turned around.
    Sum,
}

impl Harm {
    const ALL: [Self; 12] = [
        Self::Leak,
        Self::EarlyEnd,
        Self::Swap,
        Self::Loss,
        Self::Circle,
        Self::Misplaced,
        Self::Overlap,
        Self::Elsewhere,
        Self::Cache,
        Self::Experts,
        Self::Sender,
        Self::Sum,
    ];
    /// Those to fetches.
    const OF_FETCHES: [Self; 2] = [Self::Misplaced, Self::Overlap];

    /// Does it to a step of a program, and says what; nothing where the step cannot be harmed so.
    fn strike(self, plan: &mut Plan, program: usize, id: StepId) -> Option<String> {
        let caches = plan.caches.len();
        let schedule = &mut plan.programs[program];
        let lane = schedule.lanes.iter().position(|lane| lane.steps.contains(&id))?;
        match self {
            Self::Leak => leak(schedule, id),
            Self::EarlyEnd => end_early(schedule, lane, id),
            Self::Swap => swap(schedule, lane, id),
            Self::Loss => {
                schedule.lanes[lane].steps.retain(|&step| step != id);
                Some(format!("a lost {id}"))
            }
            Self::Circle => {
                let last = *schedule.lanes[lane].steps.last()?;
                schedule.steps[id].waits.push(last);
                Some(format!("a wait of {id} for the end of its lane"))
            }
            Self::Misplaced => {
                let Action::Fetch { offset, .. } = &mut schedule.steps[id].action else {
                    return None;
                };
                *offset += 128;
                Some(format!("{id} at a byte that no library reads from"))
            }
            Self::Overlap => overlap(schedule, id),
            Self::Elsewhere => {
                let buffer = *schedule.steps[id].writes.first()?;
                let device = &mut schedule.buffers[buffer].device;
                *device = DeviceId::from_index(device.index() + 1);
                Some(format!("{buffer} on {device}"))
            }
            Self::Cache => exchange_caches(schedule, id, caches),
            Self::Experts => shift_experts(schedule, id),
            Self::Sender => let_sender_drive(schedule, lane, id),
            Self::Sum => turn_sum_around(plan, program, id),
        }
    }
}

/// The step before one in its lane.
fn before(program: &Program, lane: usize, id: StepId) -> Option<StepId> {
    let steps = &program.lanes[lane].steps;
    let place = steps.iter().position(|&step| step == id)?;
    Some(steps[place.checked_sub(1)?])
}

fn leak(program: &mut Program, id: StepId) -> Option<String> {
    let frees = &mut program.steps[id].frees;
    let buffer = (!frees.is_empty()).then(|| frees.remove(0))?;
    Some(format!("a leak of {buffer}"))
}

fn end_early(program: &mut Program, lane: usize, id: StepId) -> Option<String> {
    let before = before(program, lane, id)?;
    let step = &mut program.steps[id];
    let buffer = *step.frees.iter().find(|buffer| step.reads.contains(buffer))?;
    step.frees.retain(|freed| *freed != buffer);
    program.steps[before].frees.push(buffer);
    Some(format!("an early end of {buffer}"))
}

fn swap(program: &mut Program, lane: usize, id: StepId) -> Option<String> {
    let before = before(program, lane, id)?;
    let made = &program.steps[before].writes;
    program.steps[id].reads.iter().find(|read| made.contains(read))?;
    let steps = &mut program.lanes[lane].steps;
    let place = steps.iter().position(|&step| step == id)?;
    steps.swap(place - 1, place);
    Some(format!("{id} before {before}"))
}

/// Whoever reads the weight reads another at the same time.
fn overlap(program: &mut Program, id: StepId) -> Option<String> {
    let Action::Fetch { .. } = program.steps[id].action else { return None };
    let weight = *program.steps[id].writes.first()?;
    let reads_it = |step: &&Step| step.reads.contains(&weight);
    let reads = program.steps.rows().iter().find(reads_it)?.reads.clone();
    let (other, to) = program.steps.iter().find_map(|(other, step)| match step.action {
        Action::Fetch { offset, .. } if other != id => {
            step.writes.iter().any(|made| reads.contains(made)).then_some((other, offset))
        }
        Action::Run(_) | Action::Move { .. } | Action::Fetch { .. } => None,
    })?;
    if let Action::Fetch { offset, .. } = &mut program.steps[id].action {
        *offset = to;
    }
    Some(format!("{id} over {other}"))
}

/// Exchanges the cache of a step with the next one.
fn exchange_caches(program: &mut Program, id: StepId, caches: usize) -> Option<String> {
    let Action::Run(Op::Attention(attention)) = &program.steps[id].action else { return None };
    let own = attention.cache;
    let next = CacheId::from_index((own.index() + 1) % caches);
    for step in program.steps.rows_mut() {
        if let Action::Run(Op::Attention(attention)) = &mut step.action {
            match attention.cache {
                cache if cache == own => attention.cache = next,
                cache if cache == next => attention.cache = own,
                _ => (),
            }
        }
    }
    (own != next).then(|| format!("{own} and {next} in each other's place"))
}

/// Lets a mixture begin with another expert.
fn shift_experts(program: &mut Program, id: StepId) -> Option<String> {
    let Action::Run(Op::Experts(experts)) = &mut program.steps[id].action else { return None };
    let first = experts.first() + 1;
    experts.part = Some(ExpertPart { first, load: 0.5 });
    Some(format!("{id} with experts from {first} on"))
}

/// Lets the sender drive a transfer, as soon as it has made the value.
fn let_sender_drive(program: &mut Program, lane: usize, id: StepId) -> Option<String> {
    let step = program.steps[id].clone();
    let Action::Move { movement: Move::Transfer { from, .. }, .. } = step.action else {
        return None;
    };
    let sender = program.lanes.iter().position(|lane| {
        lane.queue == Queue::Compute && lane.device == from && !lane.steps.contains(&id)
    })?;
    let writes_it = |id: &StepId| program.steps[*id].writes.contains(&step.reads[0]);
    let made = program.lanes[sender].steps.iter().position(writes_it)?;
    program.lanes[lane].steps.retain(|&step| step != id);
    program.lanes[sender].steps.insert(made + 1, id);
    for reader in program.steps.rows_mut() {
        if reader.reads.contains(&step.writes[0]) {
            reader.waits.push(id);
        }
    }
    Some(format!("{id} by its sender"))
}

/// Turns the members of a sum over GPUs around, where they make others.
fn turn_sum_around(plan: &mut Plan, program: usize, id: StepId) -> Option<String> {
    let schedule = &plan.programs[program];
    let sum = |step: &Step| match step.action {
        Action::Move { collective, .. } if plan.is_peer_sum(schedule, step) => collective,
        Action::Move { .. } | Action::Run(_) | Action::Fetch { .. } => None,
    };
    let own = sum(&schedule.steps[id])?;
    let members = |step: &Step| -> BTreeSet<DeviceId> {
        step.reads.iter().map(|&buffer| schedule.buffers[buffer].device).collect()
    };
    let is_other = |step: &Step| sum(step).is_some_and(|other| other != own);
    let others = schedule.steps.rows().iter().filter(|step| is_other(step));
    others.map(members).find(|others| *others == members(&schedule.steps[id]))?;
    let steps = schedule.steps.iter();
    let of_sum = steps.filter_map(|(id, step)| (sum(step) == Some(own)).then_some(id));
    for step in of_sum.collect::<Vec<StepId>>() {
        plan.programs[program].steps[step].reads.reverse();
    }
    Some(format!("the members of {own} the other way around"))
}
