//! Random models, machines and requests.

use compiler::options::{FormatRule, Objective, Pin, Request};
use compiler::{Options, compile};
use ir::machine::Machine;
use ir::model::Model;
use ir::plan::Plan;
use ir::tensor::DType;
use proptest::prelude::*;
use proptest::sample::{Index, select};
use tests::machines::{gpu, linked, numa};
use tests::toys::{FeedForward, Habits, Toy};

pub(crate) fn toy() -> impl Strategy<Value = Toy> {
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

/// Up to three GPUs with between 64 KiB and 1 MiB, and three NUMA nodes with up to 64 MiB each; sometimes links
/// are fast, and sometimes one is missing.
pub(crate) fn machine() -> impl Strategy<Value = Machine> {
    let node = (16u32..26).prop_map(|bits| 1u64 << bits);
    let devices =
        (prop::collection::vec((64u64 << 10)..1 << 20, 0..4), prop::collection::vec(node, 1..4));
    let links = (any::<bool>(), prop::option::weighted(0.2, any::<Index>()));
    (devices, links).prop_map(|((gpus, nodes), (are_fast, lost))| {
        let gpus = (0..).zip(gpus).map(|(ordinal, bytes)| gpu(ordinal, bytes));
        let nodes = (0..).zip(nodes).map(|(node, bytes)| numa(node, bytes));
        let mut machine = linked(gpus.chain(nodes).collect());
        if are_fast {
            // Then toys, whose prompts are short, are worth fetching.
            machine.links.iter_mut().for_each(|link| link.bytes_per_sec *= 100.0);
        }
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
pub(crate) struct Wishes {
    kind: u8,
    devices: Vec<Index>,
    shares: Option<Vec<u8>>,
    pin: Option<(Index, bool)>,
    format: Option<(&'static str, Index)>,
    /// Context, sequences, and tokens of one prefill.
    pub(crate) sizes: (u32, u32, u32),
    objective: bool,
}

pub(crate) fn wishes() -> impl Strategy<Value = Wishes> {
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
        prefill_tokens: Some(prefill_tokens),
        formats: format.into_iter().collect(),
        objective: if wishes.objective { Objective::Latency } else { Objective::Throughput },
        request,
        pins: pin.into_iter().collect(),
        ..Options::default()
    }
}

/// The plan, or nothing where the wishes cannot be had.
pub(crate) fn compiled(model: &Model, machine: &Machine, wishes: &Wishes) -> Option<Plan> {
    match compile(model, machine, &options(wishes, machine), &mut |_, _| ()) {
        Ok(plan) => Some(plan),
        Err(error) => {
            let text = format!("{error:#}");
            assert!(!text.is_empty() && !text.contains('\n'), "an error of one line: {text}");
            None
        }
    }
}
