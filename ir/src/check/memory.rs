//! The most bytes each device holds at one time, in one run of any program.
//!
//! Buffers are counted at a program's largest extent. The bound holds for every interleaving of lanes: time is
//! measured by the progress of one lane of the device, and for what GPUs sent a node by that of one of these, and a
//! buffer counts from the first moment at which its writer can have started to the last at which the step that frees it
//! can be unfinished. Where a device's own lane writes and frees all its buffers the bound is exact.
//! On GPUs every buffer has a place, and so have weights and caches, each at a multiple of 256 bytes: what is counted
//! is what is taken, in one piece, before the first run.
//! Fetched weights lie in a window of their own, which is as large as the last byte that any of them takes.
//! A GPU that is used also holds the workspace of its kernels and what the driver takes, captured launches among it.
//! The NUMA node that its letters lie with holds these, and what the host has taken out of them, too.
//! Kernels of a NUMA node take scratch memory where its buffers lie, for one step at a time; how much depends on the
//! processor, and counted is the most that any takes.
//! What devices hand over may be there of all runs under way: as many as there are queues, and one more.

use std::collections::{BTreeMap, BTreeSet};

use crate::captured::captured_bytes;
use crate::check::Violation;
use crate::check::order::{LanePosition, Order};
use crate::forecast::DeviceForecast;
use crate::frame::Frame;
use crate::id::{BufferId, DeviceId, Id as _, StepId, Table};
use crate::letters;
use crate::machine::DeviceKind;
use crate::op::{Experts, Linear, Products};
use crate::packing::{
    BLOCK_COLUMNS, BLOCK_PAIR_COLUMNS, BLOCK_PANELS, BLOCK_STRIPS, PANEL_ROWS, STRIP_ROWS,
};
use crate::plan::{Action, Lane, Plan, Program, Queue, Step};
use crate::tensor::{DType, Format};
use crate::workspace::{aligned, workspaces};

/// Bytes each device holds: weights, caches, the most buffers at one time over all programs, and scratch.
///
/// Where a program's order is broken, all its buffers count at once.
pub fn memory(plan: &Plan) -> Table<DeviceId, DeviceForecast> {
    let mut devices: Table<DeviceId, DeviceForecast> = plan
        .machine
        .devices
        .iter()
        .map(|(_, device)| DeviceForecast {
            capacity_bytes: device.memory_bytes,
            ..DeviceForecast::default()
        })
        .collect();
    for (_, weight) in plan.weights.iter() {
        if let Some(device) = devices.rows_mut().get_mut(weight.device.index()) {
            let bytes = placed(plan, weight.device, plan.weight_bytes(weight));
            let unpacked = plan.unpacked_bytes(weight).filter(|_| weight.also_unpacked);
            let unpacked = placed(plan, weight.device, unpacked.unwrap_or(0));
            device.weight_bytes =
                device.weight_bytes.saturating_add(bytes).saturating_add(unpacked);
        }
    }
    for (_, cache) in plan.caches.iter() {
        if let Some(device) = devices.rows_mut().get_mut(cache.device.index()) {
            // Keys and values are placed apart.
            let bytes = cache.bytes(plan.model.blocks, plan.model.block_tokens);
            let bytes = placed(plan, cache.device, bytes / 2).saturating_mul(2);
            device.cache_bytes = device.cache_bytes.saturating_add(bytes);
        }
    }
    // Machines may have thousands of GPUs and links: what does not work is left out, and links are looked at once.
    let working = plan.working_gpus();
    let mut homes = letters::homes(plan);
    homes.retain(|gpu, _| working.contains(gpu));
    for program in &plan.programs {
        for (device, bytes) in buffer_peaks(plan, program, &homes).iter() {
            devices[device].buffer_bytes = devices[device].buffer_bytes.max(*bytes);
        }
        for (device, end) in fetch_ends(program) {
            if let Some(device) = devices.rows_mut().get_mut(device.index()) {
                device.fetch_bytes = device.fetch_bytes.max(end);
            }
        }
        for lane in &program.lanes {
            if let Some(DeviceKind::Gpu { reserved_bytes, .. }) =
                plan.machine.devices.get(lane.device).map(|device| &device.kind)
            {
                let reserved = &mut devices[lane.device].reserved_bytes;
                *reserved = (*reserved).max(*reserved_bytes);
            }
        }
    }
    for (device, space) in workspaces(plan).iter() {
        devices[device].workspace_bytes = space.bytes();
    }
    for program in &plan.programs {
        for (device, bytes) in scratches(plan, program) {
            devices[device].workspace_bytes = devices[device].workspace_bytes.max(bytes);
        }
    }
    for (&gpu, &home) in &homes {
        let held = &mut devices[home].workspace_bytes;
        *held = held.saturating_add(letters::letter_bytes(plan, gpu));
    }
    for gpu in working {
        let reserved = &mut devices[gpu].reserved_bytes;
        *reserved = reserved.saturating_add(captured_bytes(plan, gpu));
    }
    if let Some(collectives) = &plan.machine.collectives {
        for device in users_of_library(plan) {
            if let Some(device) = devices.rows_mut().get_mut(device.index()) {
                let reserved = &mut device.reserved_bytes;
                *reserved = reserved.saturating_add(collectives.reserved_bytes);
            }
        }
    }
    devices
}

/// The GPUs that sum with the vendor's library of collectives.
fn users_of_library(plan: &Plan) -> BTreeSet<DeviceId> {
    let writers = |(program, step): (&Program, &Step)| {
        let written = step.writes.iter().filter_map(|&buffer| program.buffers.get(buffer));
        written.map(|buffer| buffer.device).collect::<Vec<_>>()
    };
    plan.library_sums().flat_map(writers).collect()
}

pub(super) fn check(plan: &Plan, found: &mut Vec<Violation>) {
    for (id, bytes) in memory(plan).iter() {
        let (needed_bytes, capacity_bytes) = (bytes.needed_bytes(), bytes.capacity_bytes);
        if needed_bytes > capacity_bytes {
            let device = plan.machine.devices[id].name.clone();
            found.push(Violation::Memory { device, needed_bytes, capacity_bytes });
        }
    }
}

/// Bytes with what lies between them and the next place.
fn placed(plan: &Plan, device: DeviceId, bytes: u64) -> u64 {
    match plan.machine.devices.get(device).map(|device| &device.kind) {
        Some(DeviceKind::Gpu { .. }) => aligned(bytes),
        Some(DeviceKind::Numa { .. }) | None => bytes,
    }
}

/// Where each fetched weight ends in the window of its device.
fn fetch_ends(program: &Program) -> impl Iterator<Item = (DeviceId, u64)> {
    program.steps.rows().iter().filter_map(|step| {
        let Action::Fetch { offset, .. } = step.action else { return None };
        let buffer = step.writes.first().and_then(|&buffer| program.buffers.get(buffer))?;
        Some((buffer.device, offset.saturating_add(buffer.ty.bytes(program.max))))
    })
}

/// The scratch memory of the steps of NUMA nodes.
fn scratches(plan: &Plan, program: &Program) -> impl Iterator<Item = (DeviceId, u64)> {
    program.lanes.iter().flat_map(move |lane| {
        let kind = plan.machine.devices.get(lane.device).map(|device| &device.kind);
        let (steps, members): (&[StepId], u64) = match kind {
            Some(DeviceKind::Numa { cpus, .. }) => (&lane.steps, cpus.len() as u64),
            Some(DeviceKind::Gpu { .. }) | None => (&[], 0),
        };
        let steps = steps.iter().filter_map(|&step| program.steps.get(step));
        steps.map(move |step| (lane.device, Scratch { plan, program, step, members }.bytes()))
    })
}

/// What a step of a NUMA node takes beside its buffers.
struct Scratch<'a> {
    plan: &'a Plan,
    program: &'a Program,
    step: &'a Step,
    /// Threads that compute it.
    members: u64,
}

impl Scratch<'_> {
    fn bytes(&self) -> u64 {
        let Action::Run(op) = &self.step.action else { return 0 };
        match op.products() {
            Some(Products::Linear(linear)) => self.of_linear(linear),
            Some(Products::Experts(experts)) => self.of_experts(experts),
            // It keeps sums of some queries alone.
            Some(Products::Attention(_)) | None => 0,
        }
    }

    fn of_linear(&self, linear: &Linear) -> u64 {
        let (rows, columns) = (self.size(0, 0), self.size(0, 1));
        let weights = linear.weights.iter().filter_map(|&weight| self.plan.weights.get(weight));
        let of = |format| {
            let rooms = self.rooms(format, rows, columns);
            encoded(format, rows, columns).saturating_add(rooms)
        };
        weights.map(|weight| of(weight.format)).max().unwrap_or(0)
    }

    fn of_experts(&self, experts: &Experts) -> u64 {
        let weight = |id| self.plan.weights.get(id);
        let (Some(gate), Some(down)) = (weight(experts.gate), weight(experts.down)) else {
            return 0;
        };
        let [.., inner, features] = *gate.shape else { return 0 };
        let (inner, features) = (u64::from(inner), u64::from(features));
        // Every token at each of its experts.
        let rows = self.size(0, 0).saturating_mul(self.size(1, 1));
        let columns = inner.max(features);
        let rooms = [gate, down].map(|weight| self.rooms(weight.format, rows, columns));
        [
            encoded(gate.format, rows, features),
            rows.saturating_mul(inner).saturating_mul(4),
            encoded(down.format, rows, inner),
            rows.saturating_mul(features).saturating_mul(4),
            rooms[0].max(rooms[1]),
        ]
        .into_iter()
        .fold(0, u64::saturating_add)
    }

    /// What all members unpack of a matrix, and the sums of their blocks.
    fn rooms(&self, format: Format, rows: u64, columns: u64) -> u64 {
        let panel_rows = u64::from(PANEL_ROWS);
        let sums = BLOCK_PANELS * rows.div_ceil(STRIP_ROWS).min(BLOCK_STRIPS);
        let sum_bytes = sums * STRIP_ROWS * panel_rows * 4;
        let unpacked_columns = match format {
            Format::F32 | Format::F16 => return 0,
            // Vectors unpack all columns of a panel, of both matrices of a gate.
            Format::Bf12 => padded(columns).saturating_mul(2).max(BLOCK_COLUMNS),
            Format::Bf16 | Format::Q8 | Format::Q4 => BLOCK_COLUMNS,
        };
        let of_member = sum_bytes.saturating_add(unpacked_columns.saturating_mul(panel_rows * 2));
        of_member.saturating_mul(self.members)
    }

    /// Size of an axis of a buffer that is read.
    fn size(&self, read: usize, axis: usize) -> u64 {
        let buffer = self.step.reads.get(read).and_then(|&id| self.program.buffers.get(id));
        let dim = buffer.and_then(|buffer| buffer.ty.shape.get(axis));
        dim.map_or(0, |dim| u64::from(dim.size(self.program.max)))
    }
}

/// Bytes of activations as they are encoded for a weight: bfloat16 beside blocks, and f32 beside floats where the
/// processor multiplies no narrower ones.
fn encoded(format: Format, rows: u64, columns: u64) -> u64 {
    let element_bytes = match format {
        Format::F32 | Format::F16 | Format::Bf16 | Format::Bf12 => 4,
        Format::Q8 | Format::Q4 => 2,
    };
    rows.saturating_mul(padded(columns)).saturating_mul(element_bytes)
}

fn padded(columns: u64) -> u64 {
    columns.checked_next_multiple_of(u64::from(BLOCK_PAIR_COLUMNS)).unwrap_or(u64::MAX)
}

/// A buffer's size and the steps between which it is held.
struct Held {
    bytes: u64,
    writer: Option<StepId>,
    freer: Option<StepId>,
}

/// The most bytes of buffers on each device; `homes` are the NUMA nodes that the letters of working GPUs lie with.
fn buffer_peaks(
    plan: &Plan,
    program: &Program,
    homes: &BTreeMap<DeviceId, DeviceId>,
) -> Table<DeviceId, u64> {
    let mut held: Table<BufferId, Held> = program
        .buffers
        .iter()
        .map(|(_, buffer)| Held { bytes: buffer.ty.bytes(program.max), writer: None, freer: None })
        .collect();
    for (id, step) in program.steps.iter() {
        for &buffer in &step.writes {
            if let Some(held) = held.rows_mut().get_mut(buffer.index()) {
                held.writer = held.writer.or(Some(id));
            }
        }
        for &buffer in &step.frees {
            if let Some(held) = held.rows_mut().get_mut(buffer.index()) {
                held.freer = held.freer.or(Some(id));
            }
        }
    }
    let mut on: Table<DeviceId, Vec<&Held>> =
        plan.machine.devices.ids().map(|_| Vec::new()).collect();
    for (id, buffer) in program.buffers.iter().filter(|(_, buffer)| buffer.ty.dtype != DType::U8) {
        if let Some(on) = on.rows_mut().get_mut(buffer.device.index()) {
            on.push(&held[id]);
        }
    }
    let mut sent: Table<DeviceId, Vec<&Held>> =
        plan.machine.devices.ids().map(|_| Vec::new()).collect();
    for (&gpu, &home) in homes {
        let buffers = letters::sent(plan, program, gpu).into_iter();
        sent[home].extend(buffers.map(|buffer| &held[buffer]));
    }
    let order = Order::of(program);
    let other_runs = plan.queues().len() as u64;
    let peak = |(device, own): (DeviceId, &Vec<&Held>)| {
        if plan.machine.devices[device].kind.is_gpu() {
            return Frame::new(plan, program, device).bytes();
        }
        let both = [own.as_slice(), &sent[device]].concat();
        let all = both.iter().map(|held| held.bytes).fold(0, u64::saturating_add);
        let Some(order) = &order else { return all.saturating_mul(other_runs + 1) };
        let lanes = program.lanes.iter().enumerate();
        let clocks: Vec<Clock<'_>> = lanes
            .filter(|(_, lane)| !lane.steps.is_empty())
            .map(|(lane, Lane { steps, .. })| Clock { lane, steps, order })
            .collect();
        let is_own = |clock: &&Clock<'_>| program.lanes[clock.lane].device == device;
        let own_clocks = || clocks.iter().filter(is_own);
        // Each lane gives a bound; the lowest holds.
        let lowest = |clocks: &mut dyn Iterator<Item = &Clock<'_>>, held: &[&Held]| {
            clocks.map(|clock| clock.peak(held, other_runs)).min()
        };
        // Where no lane is its own it holds what GPUs sent.
        let Some(together) = lowest(&mut own_clocks(), &both) else {
            return lowest(&mut clocks.iter(), &both).unwrap_or(all);
        };
        // What GPUs sent long before or after its own steps is told apart by their lanes alone.
        let is_senders = |clock: &&Clock<'_>| {
            let lane = &program.lanes[clock.lane];
            lane.queue == Queue::Compute && homes.get(&lane.device) == Some(&device)
        };
        let by_senders = lowest(&mut clocks.iter().filter(is_senders), &sent[device]);
        let apart = by_senders.and_then(|sent| {
            let own = lowest(&mut own_clocks(), own)?;
            Some(own.saturating_add(sent))
        });
        apart.map_or(together, |apart| together.min(apart))
    };
    on.iter().map(peak).collect()
}

/// Time as one lane tells it: moment `2 i` is before its step `i` starts, `2 i + 1` while the step runs.
struct Clock<'a> {
    lane: usize,
    steps: &'a [StepId],
    order: &'a Order,
}

impl Clock<'_> {
    /// Peak bytes of one run, plus, for each of `other_runs`, the buffers that may live before this lane's first step
    /// or after its last.
    fn peak(&self, held: &[&Held], other_runs: u64) -> u64 {
        let moments = 2 * self.steps.len() + 1;
        let mut starts = vec![0u128; moments];
        let mut ends = vec![0u128; moments];
        let mut of_another_run = 0u128;
        for held in held {
            let Some(writer) = held.writer else { continue };
            let first = self.first_moment(writer);
            let last = held.freer.map_or(moments - 1, |freer| self.last_moment(freer));
            starts[first] += u128::from(held.bytes);
            ends[last.max(first)] += u128::from(held.bytes);
            if first == 0 || last == moments - 1 {
                of_another_run += u128::from(held.bytes);
            }
        }
        let (mut now, mut peak) = (0, 0);
        for (start, end) in starts.into_iter().zip(ends) {
            now += start;
            peak = now.max(peak);
            now -= end;
        }
        u64::try_from(peak + of_another_run * u128::from(other_runs)).unwrap_or(u64::MAX)
    }

    /// The first moment at which `step` can have started.
    fn first_moment(&self, step: StepId) -> usize {
        let LanePosition { lane, position } = self.order.position(step);
        if lane == self.lane { 2 * position + 1 } else { 2 * self.order.reached(step, self.lane) }
    }

    /// The last moment at which `step` can be unfinished.
    fn last_moment(&self, step: StepId) -> usize {
        let LanePosition { lane, position } = self.order.position(step);
        if lane == self.lane {
            return 2 * position + 1;
        }
        2 * self.steps.partition_point(|&later| !self.order.before(step, later))
    }
}
