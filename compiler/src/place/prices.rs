//! What each unit costs and takes on each group of devices.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use ir::id::{DeviceId, NodeId, Table};
use ir::layout::Move;
use ir::plan::{Phase, Plan, Program, Queue};

use crate::bind::bind;
use crate::cost::{Way, move_nanos};
use crate::emit::{emit, program};
use crate::graphs::{Graphs, Phases};
use crate::options::Objective;
use crate::part::{WeightKey, computations, parts};
use crate::place::Layouts;
use crate::place::arrangement::Arrangement;
use crate::place::group::Group;
use crate::place::lay_out::lay_out;
use crate::place::offer::Offer;
use crate::place::units::Units;
use crate::schedule::Causes;
use crate::target::{Batch, Target};
use crate::task::Task;

/// Tokens of the answer that a placement is judged by: a chat answer of a paragraph.
const ANSWER_TOKENS: u64 = 128;
/// What the time to the first token weighs, and that from there to the last; the rest of 1 is for both together.
const PART_WEIGHT: f64 = 1.0 / 6.0;

/// Times of the programs that a placement is judged by.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Times {
    /// One prefill of the most tokens; of a whole model a prompt in as many of them as it takes, for throughput what
    /// the busiest lane does of it.
    pub(crate) prefill: u64,
    /// One decode step: of one sequence for latency, of the most sequences for throughput.
    pub(crate) decode: u64,
}

impl Times {
    /// Time of what `prefill` counts and an answer of 128 tokens: of parts of a model it adds up.
    ///
    /// Latency: `prefill + 128 · decode`. Throughput: what one such request adds to the time of all, `prefill + 128 ·
    /// decode / sequences`, where prefill is the busiest lane's work, since runs of prompts overlap.
    pub(crate) fn request(self, target: &Target) -> u64 {
        let sequences = match target.objective {
            Objective::Latency => 1,
            Objective::Throughput => u64::from(target.max_sequences),
        };
        self.prefill.saturating_add(ANSWER_TOKENS.saturating_mul(self.decode) / sequences)
    }

    /// What is minimised, of a whole model.
    ///
    /// Latency: the time of a request and, with less weight, of its prompt and of its answer, in proportion: where
    /// hosts decode, an answer takes seconds, and prompts that take tenths of one would count for nothing in a sum.
    /// Throughput: the time of a request.
    pub(crate) fn score(self, target: &Target) -> u64 {
        let request = self.request(target);
        match target.objective {
            Objective::Latency => {
                let part = |nanos: u64| (nanos.max(1) as f64).powf(PART_WEIGHT);
                let parts = part(self.prefill) * part(request - self.prefill);
                ((request as f64).powf(1.0 - 2.0 * PART_WEIGHT) * parts) as u64
            }
            Objective::Throughput => request,
        }
    }
}

/// The batches that placements are priced with: prefill, the decode of one sequence, and that of the most sequences,
/// since no other program takes more memory than these.
pub(crate) fn priced_batches(target: &Target) -> Vec<Batch> {
    let mut batches = vec![target.prefill(), target.decode(1)];
    if target.max_sequences > 1 {
        batches.push(target.decode(target.max_sequences));
    }
    batches
}

/// Of what was worked out for each of [`priced_batches`] that of the decode which placements are judged by.
pub(crate) fn judged_decode<'p, T>(target: &Target, priced: &'p [T]) -> &'p T {
    match target.objective {
        Objective::Latency => &priced[1],
        Objective::Throughput => &priced[priced.len() - 1],
    }
}

/// Units priced on one group.
#[derive(Clone, Debug)]
pub(crate) struct Priced {
    /// The devices.
    pub(crate) group: Group,
    /// Times of each unit.
    pub(crate) times: Vec<Times>,
    /// For each unit the bytes on each member: weights and caches.
    pub(crate) bytes: Vec<Vec<u64>>,
    /// Bytes on each member that are neither: buffers, and what a device that is used needs besides.
    pub(crate) buffers: Vec<u64>,
}

/// The device that each node is pinned to, with the user's pattern that pins it, which a table of tokens that is tried
/// on a NUMA node lacks; `None` where it is free.
pub(crate) type Pins = Table<NodeId, Option<(DeviceId, Option<String>)>>;

/// Nanoseconds of each node.
type NodeNanos = Table<NodeId, u64>;

/// What groups of devices are priced with.
pub(crate) struct Prices<'a> {
    pub(super) task: &'a Task<'a>,
    pub(super) units: &'a Units,
    pub(super) pins: &'a Pins,
    /// Bytes that pinned nodes take are not there for stages.
    pub(super) free: Table<DeviceId, u64>,
    pub(super) handovers: Handovers<'a>,
    known_groups: Known<Priced>,
    pub(super) known_offers: Known<(Arrangement, Offer)>,
    known_decodes: Known<(DeviceId, Option<Arc<NodeNanos>>)>,
}

/// What was worked out before. Two threads may work out the same at a time.
pub(super) struct Known<T>(Mutex<Vec<T>>);

impl<T> Default for Known<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> Known<T> {
    pub(super) fn find<U>(&self, wanted: impl Fn(&T) -> Option<U>) -> Option<U> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().find_map(wanted)
    }

    pub(super) fn add(&self, known: T) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(known);
    }
}

impl<'a> Prices<'a> {
    /// Prices of the task.
    pub(crate) fn new(task: &'a Task<'a>, units: &'a Units, pins: &'a Pins) -> Self {
        let mut free: Table<DeviceId, u64> =
            task.target.machine.devices.rows().iter().map(|device| device.memory_bytes).collect();
        let mut seen = Vec::new();
        for (id, node) in task.model.layers.nodes() {
            let Some((device, _)) = pins[id] else { continue };
            for weight in node.work.weights() {
                let key = WeightKey::whole(task, weight, device);
                if !seen.contains(&key) {
                    free[device] = free[device].saturating_sub(key.bytes(task));
                    seen.push(key);
                }
            }
            if let Some(cache) = node.work.cache() {
                let cache = &task.model.caches[cache];
                let heads = (cache.kv_heads, cache.head_dim);
                let bytes = task.target.cache_bytes(device, heads);
                free[device] = free[device].saturating_sub(bytes);
            }
        }
        Self {
            task,
            units,
            pins,
            free,
            handovers: Handovers::new(task),
            known_groups: Known::default(),
            known_offers: Known::default(),
            known_decodes: Known::default(),
        }
    }

    /// All units on one group, each with its neighbours there. A group is priced once.
    pub(super) fn price(&self, group: &Group) -> Result<Priced> {
        let wanted = |priced: &Priced| (priced.group == *group).then(|| priced.clone());
        if let Some(priced) = self.known_groups.find(wanted) {
            return Ok(priced);
        }
        let priced = price_group(self.task, self.units, self.pins, group)?;
        self.known_groups.add(priced.clone());
        Ok(priced)
    }

    /// What a group of these devices takes on each beside weights and caches, as it was priced, whatever its shares.
    pub(super) fn known_buffers(&self, devices: &[DeviceId]) -> Option<Vec<u64>> {
        let is_wanted = |priced: &Priced| *priced.group.devices == *devices;
        self.known_groups.find(|priced| is_wanted(priced).then(|| priced.buffers.clone()))
    }

    /// Time of each node in the decode that placements are judged by when the device does everything, worked out once;
    /// `None` where it cannot.
    pub(super) fn decode_nanos(&self, device: DeviceId) -> Option<Arc<NodeNanos>> {
        let known = self.known_decodes.find(|(of, nanos)| (*of == device).then(|| nanos.clone()));
        if let Some(nanos) = known {
            return nanos;
        }
        let nanos = decode_nanos(self.task, device).map(Arc::new);
        self.known_decodes.add((device, nanos.clone()));
        nanos
    }

    /// Work per time, in any scale.
    pub(super) fn speed(&self, priced: &Priced) -> f64 {
        let all = priced.times.iter().map(|times| times.request(self.task.target)).sum::<u64>();
        1.0 / (all.max(1) as f64)
    }
}

/// Prices all units on one group, each with its neighbours on the same group, but for what is pinned to other devices.
fn price_group(task: &Task<'_>, units: &Units, pins: &Pins, group: &Group) -> Result<Priced> {
    let target = task.target;
    let mut batches = priced_batches(target);
    // The decode that is not judged is left out where its buffers are hardly larger: that of one sequence beside that of
    // the most, and that of the most beside prefill of as many tokens or more.
    if target.objective == Objective::Throughput || target.max_sequences <= target.prefill_tokens {
        batches = vec![target.prefill(), judged_decode(target, &batches).clone()];
    }
    let priced = |(groups, group_of): (Vec<Group>, Table<NodeId, usize>)| -> Result<_> {
        let graphs = arrange(task, &groups, &group_of)?;
        let plan = emit(task, &graphs, &batches)?;
        Ok((graphs, plan))
    };
    let whole = Arrangement::whole(group.clone(), units);
    let with_pins = priced(whole.groups(units, pins, Phase::Prefill));
    // Devices of pins may be out of its reach, as a stage among others all the same.
    let has_pins = pins.rows().iter().any(Option::is_some);
    let (graphs, plan) = with_pins.or_else(|error| match has_pins {
        true => priced((vec![group.clone()], pins.rows().iter().map(|_| 0).collect())),
        false => Err(error),
    })?;
    // Members work in step, so a unit takes as long as its busiest member. What is pinned costs the same anywhere.
    let unit_of = unit_of_name(task, units, |id| pins[id].is_none());
    let times = |program: &Program| busiest(task, units, program, &group.devices, &unit_of);
    let prefill = times(&plan.programs[0]);
    let decode = times(judged_decode(task.target, &plan.programs));
    Ok(Priced {
        times: prefill
            .into_iter()
            .zip(decode)
            .map(|(prefill, decode)| Times { prefill, decode })
            .collect(),
        bytes: unit_bytes(task, units, pins, group, &graphs)?,
        buffers: group
            .devices
            .iter()
            .map(|&device| {
                let bytes = &plan.forecast.devices[device];
                bytes.needed_bytes() - bytes.weight_bytes - bytes.cache_bytes
            })
            .collect(),
        group: group.clone(),
    })
}

/// The unit of each node that counts, by its name.
pub(crate) fn unit_of_name<'a>(
    task: &Task<'a>,
    units: &Units,
    counts: impl Fn(NodeId) -> bool,
) -> HashMap<&'a str, usize> {
    let nodes = task.model.layers.nodes().filter(|(id, _)| counts(*id));
    nodes.map(|(id, node)| (&*node.name, units.of[id])).collect()
}

/// For each unit the nanoseconds of the one of `devices` that works longest for those of its nodes that `unit_of` has:
/// they work at the same time.
pub(crate) fn busiest(
    task: &Task<'_>,
    units: &Units,
    program: &Program,
    devices: &[DeviceId],
    unit_of: &HashMap<&str, usize>,
) -> Vec<u64> {
    let mut busy = vec![task.per_device(0u64); units.len()];
    let lanes = program.lanes.iter().filter(|lane| lane.queue == Queue::Compute);
    for lane in lanes.filter(|lane| devices.contains(&lane.device)) {
        for step in lane.steps.iter().map(|&step| &program.steps[step]) {
            if let Some(&unit) = unit_of.get(&*step.name) {
                busy[unit][lane.device] += step.estimate_nanos;
            }
        }
    }
    busy.iter().map(|unit| unit.rows().iter().copied().max().unwrap_or(0)).collect()
}

fn decode_nanos(task: &Task<'_>, device: DeviceId) -> Option<NodeNanos> {
    let layers = &task.model.layers;
    let group_of = layers.nodes().map(|_| 0).collect();
    let graphs = arrange(task, &[Group::one(device)], &group_of).ok()?;
    let decode = judged_decode_program(task, &graphs).ok()?;
    // Without movement there is one step for each node, in the same order.
    let steps = decode.steps.rows();
    assert_eq!(steps.len(), layers.len(), "insert_moves moved something on one device");
    Some(steps.iter().map(|step| step.estimate_nanos).collect())
}

/// The program of the decode that placements are judged by.
///
/// # Errors
/// When a device does not compute what it is to.
pub(crate) fn judged_decode_program(task: &Task<'_>, graphs: &Graphs) -> Result<Program> {
    let batches = priced_batches(task.target);
    let batch = judged_decode(task.target, &batches);
    program(task, graphs, &bind(task, graphs)?, batch, &mut Causes::default())
}

/// The placed graphs of nodes on groups, with their moves.
fn arrange(task: &Task<'_>, groups: &[Group], group_of: &Table<NodeId, usize>) -> Result<Graphs> {
    let prefill = lay_out(task.model, groups, group_of)?;
    let window_bytes = task.per_device(0);
    let layouts = Layouts { nodes: Phases { prefill, decode: None }, window_bytes };
    Graphs::new(task, layouts, &mut |_, _| ())
}

/// Weights and caches of each unit on each member. Pinned nodes are elsewhere.
fn unit_bytes(
    task: &Task<'_>,
    units: &Units,
    pins: &Pins,
    group: &Group,
    graphs: &Graphs,
) -> Result<Vec<Vec<u64>>> {
    let mut bytes = vec![vec![0; group.devices.len()]; units.len()];
    let nodes = task.model.layers.nodes().map(|(id, _)| id);
    for (id, (node, op)) in nodes.zip(computations(&graphs.placed.prefill)) {
        if pins[id].is_some() {
            continue;
        }
        let of_unit = &mut bytes[units.of[id]];
        // What reads a table may be pinned to a GPU elsewhere, which reaches it: the table is a member's all the same.
        let member = |device: DeviceId| {
            let member = group.devices.iter().position(|&member| member == device);
            member.expect("weights and caches are on members")
        };
        let mut seen = Vec::new();
        for part in parts(task, node, op) {
            let part = part?;
            for key in &part.weights {
                if !seen.contains(key) {
                    seen.push(*key);
                    of_unit[member(key.device)] += key.bytes(task);
                }
            }
            if let ir::op::Op::Attention(attention) = &part.op {
                let heads = (attention.kv_heads, attention.head_dim);
                of_unit[member(part.device)] += task.target.cache_bytes(part.device, heads);
            }
        }
    }
    Ok(bytes)
}

/// Bytes that a plan lacks on the device that lacks most.
pub(crate) fn missing(plan: &Plan) -> Option<(DeviceId, u64)> {
    let lacking = plan.forecast.devices.iter().filter_map(|(device, bytes)| {
        let missing = bytes.missing_bytes();
        (missing > 0).then_some((device, missing))
    });
    lacking.max_by_key(|&(device, bytes)| (bytes, std::cmp::Reverse(device)))
}

/// What it takes to hand the activations of one unit, of the model's width, to the next.
pub(crate) struct Handovers<'a> {
    task: &'a Task<'a>,
    /// Prefill and the decode that placements are judged by, each with the bytes that are handed over.
    batches: [(Batch, u64); 2],
}

impl<'a> Handovers<'a> {
    fn new(task: &'a Task<'a>) -> Self {
        let batches = priced_batches(task.target);
        let layers = &task.model.layers;
        let first = layers.nodes().next().map(|(_, first)| &layers.value(first.outputs[0]).ty);
        let batches = [&batches[0], judged_decode(task.target, &batches)]
            .map(|batch| (batch.clone(), first.map_or(0, |ty| ty.bytes(batch.extent))));
        Self { task, batches }
    }

    /// Nanoseconds from one device to another; `None` where no link leads there.
    pub(crate) fn between(&self, from: DeviceId, to: DeviceId) -> Option<Times> {
        if from == to {
            return Some(Times::default());
        }
        let movement = Move::Transfer { from, to };
        let nanos = |(batch, bytes): &(Batch, u64)| {
            let by_letters = batch.phase == Phase::Decode;
            let (incoming, way) = ([(from, *bytes)], Way::alone(by_letters));
            let nanos = move_nanos(self.task.target, to, &movement, &incoming, *bytes, way);
            nanos.ok().map(|nanos| nanos as u64)
        };
        let [prefill, decode] = self.batches.each_ref().map(nanos);
        Some(Times { prefill: prefill?, decode: decode? })
    }
}
