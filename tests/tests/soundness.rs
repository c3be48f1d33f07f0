//! Whatever the compiler makes of random models, machines and requests is sound, and no harm to it goes unnoticed.

use compiler::options::{FormatRule, Objective, Pin, Request};
use compiler::{Options, compile};
use ir::check::{check, memory};
use ir::id::{Id as _, StepId};
use ir::machine::Machine;
use ir::plan::{Plan, Program};
use ir::tensor::DType;
use proptest::prelude::*;
use proptest::sample::{Index, select};
use tests::machines::{gpu, linked, numa};
use tests::toys::{FeedForward, Habits, Toy};

fn toy() -> impl Strategy<Value = Toy> {
    let mixture = (2u32..6, 1u32..3, any::<bool>()).prop_map(|(experts, used, is_shared)| {
        FeedForward::Mixture { experts, used: used.min(experts), is_shared }
    });
    let feed_forward = prop_oneof![
        Just(FeedForward::Plain),
        Just(FeedForward::Gated),
        Just(FeedForward::Gated),
        mixture
    ];
    let sizes = (
        1u32..4,
        select(vec![32u32, 64, 96]),
        1u32..5,
        1u32..4,
        select(vec![8u32, 16]),
        select(vec![32u32, 96, 100, 128]),
        select(vec![60u32, 64, 256]),
    );
    let habits = (any::<[bool; 4]>(), any::<[bool; 3]>()).prop_map(|(a, b)| Habits {
        has_biases: a[0],
        has_positions: a[1],
        has_head_norms: a[2],
        has_branch_norms: a[3],
        is_parallel: b[0],
        has_soft_cap: b[1],
        is_tied: b[2],
    });
    let stored = select(vec![DType::F32, DType::F16, DType::Bf16]);
    (sizes, feed_forward, habits, stored).prop_map(
        |(
            (layers, features, kv_heads, group, head_dim, intermediate, vocabulary),
            feed_forward,
            habits,
            stored,
        )| Toy {
            layers,
            features,
            heads: kv_heads * group,
            kv_heads,
            head_dim,
            intermediate,
            feed_forward,
            vocabulary,
            stored,
            habits,
        },
    )
}

/// Up to three GPUs and three NUMA nodes, with between 64 KiB and 64 MiB each; sometimes a link is missing.
fn machine() -> impl Strategy<Value = Machine> {
    let memory = || (16u32..27).prop_map(|bits| 1u64 << bits);
    let devices = (prop::collection::vec(memory(), 0..4), prop::collection::vec(memory(), 1..4));
    (devices, prop::option::weighted(0.2, any::<Index>())).prop_map(|((gpus, nodes), lost)| {
        let gpus = (0..).zip(gpus).map(|(ordinal, bytes)| gpu(ordinal, bytes));
        let nodes = (0..).zip(nodes).map(|(node, bytes)| numa(node, bytes));
        let mut machine = linked(gpus.chain(nodes).collect());
        if let Some(lost) = lost
            && !machine.links.is_empty()
        {
            machine.links.remove(lost.index(machine.links.len()));
        }
        machine
    })
}

/// Requests as indices into the names of a machine's devices.
#[derive(Clone, Debug)]
struct Wishes {
    kind: u8,
    devices: Vec<Index>,
    shares: Option<Vec<u8>>,
    pin: Option<(Index, bool)>,
    format: Option<(&'static str, Index)>,
    sizes: (u32, u32, u32),
    objective: bool,
}

fn wishes() -> impl Strategy<Value = Wishes> {
    let formats = select(vec!["f32", "f16", "bf16", "q8", "q4"]);
    (
        0u8..4,
        prop::collection::vec(any::<Index>(), 1..4),
        prop::option::of(prop::collection::vec(1u8..5, 4)),
        prop::option::weighted(0.2, (any::<Index>(), any::<bool>())),
        prop::option::of((formats, any::<Index>())),
        (1u32..257, 1u32..9, 1u32..65),
        any::<bool>(),
    )
        .prop_map(|(kind, devices, shares, pin, format, sizes, objective)| Wishes {
            kind,
            devices,
            shares,
            pin,
            format,
            sizes,
            objective,
        })
}

fn options(wishes: &Wishes, machine: &Machine) -> Options {
    let name =
        |index: &Index| machine.devices.rows()[index.index(machine.devices.len())].name.clone();
    let mut names: Vec<String> = Vec::new();
    for name in wishes.devices.iter().map(name) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let request = match wishes.kind {
        0 | 1 => Request::Any,
        2 => Request::Pipeline(names),
        _ => {
            let share =
                |member: usize| wishes.shares.as_ref().map(|shares| f64::from(shares[member]));
            let members = names.into_iter().enumerate();
            Request::TensorParallel(members.map(|(member, name)| (name, share(member))).collect())
        }
    };
    let pin = wishes.pin.as_ref().map(|(device, all)| {
        let pattern = if *all { "layers" } else { "layers.0.(q|up|experts)" };
        let pin: Pin = format!("{pattern}={}", name(device)).parse().expect("it is a pin");
        pin
    });
    let format = wishes.format.as_ref().map(|(format, device)| {
        let rule: FormatRule = format!("{}={format}", name(device)).parse().expect("it is a rule");
        rule
    });
    let (context, max_sequences, prefill_tokens) = wishes.sizes;
    Options {
        context: Some(context),
        max_sequences,
        prefill_tokens,
        formats: format.into_iter().collect(),
        objective: if wishes.objective { Objective::Latency } else { Objective::Throughput },
        request,
        pins: pin.into_iter().collect(),
        ..Options::default()
    }
}

/// The plan, or nothing where the wishes cannot be had.
fn compiled(toy: &Toy, machine: &Machine, wishes: &Wishes) -> Option<Plan> {
    let model = toy.model().expect("the toy is a model");
    match compile(&model, machine, &options(wishes, machine), &mut |_, _| ()) {
        Ok(plan) => Some(plan),
        Err(error) => {
            let text = format!("{error:#}");
            assert!(!text.is_empty() && !text.contains('\n'), "an error of one line: {text}");
            None
        }
    }
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

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_compiled_is_sound(toy in toy(), machine in machine(), wishes in wishes()) {
        if let Some(plan) = compiled(&toy, &machine, &wishes) {
            let found: Vec<String> = check(&plan).iter().map(ToString::to_string).collect();
            prop_assert_eq!(found, Vec::<String>::new());
            prop_assert_eq!(memory(&plan), plan.forecast.devices.clone());
            for (before, device) in machine.devices.rows().iter().zip(plan.forecast.devices.rows()) {
                let held = device.weight_bytes + device.cache_bytes + device.buffer_bytes;
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
        let steps = &plan.programs[0].steps;
        for step in steps.ids() {
            for wait in 0..steps[step].waits.len() {
                let mut plan = plan.clone();
                let lost = plan.programs[0].steps[step].waits.remove(wait);
                prop_assert!(!check(&plan).is_empty(), "{step} needs no wait for {lost}");
            }
        }
    }

    #[test]
    fn no_harm_goes_unnoticed(
        toy in toy(),
        machine in machine(),
        wishes in wishes(),
        harms in prop::collection::vec((0u8..6, any::<Index>()), 8),
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
        _ => {
            let buffer = *step.writes.first()?;
            let device = program.buffers[buffer].device;
            let other = ir::id::DeviceId::from_index(device.index() + 1);
            program.buffers[buffer].device = other;
            format!("{buffer} on {other}")
        }
    })
}
