//! What a step reads and writes is on its device, or at the other end of a link; a weight from elsewhere was fetched, or
//! is a table that a GPU reaches.
//!
//! Any step may free any buffer: that is the run's bookkeeping, no work of a device.

use std::collections::{BTreeMap, BTreeSet};

use crate::check::attention::attending;
use crate::check::order::LanePosition;
use crate::check::{Scope, Violation};
use crate::id::{BufferId, DeviceId, StepId, Table, WeightId};
use crate::layout::Move;
use crate::machine::DeviceKind;
use crate::op::Op;
use crate::plan::{Action, Cache, Phase, Program, Queue, Step};
use crate::tensor::DType;

pub(super) fn check(
    scope: Scope<'_>,
    positions: &Table<StepId, Option<LanePosition>>,
    found: &mut Vec<Violation>,
) {
    let Scope { plan, program } = scope;
    let links: BTreeSet<(DeviceId, DeviceId)> =
        plan.machine.links.iter().map(|link| (link.from, link.to)).collect();
    let fetched = fetched(program);
    for (index, lane) in program.lanes.iter().enumerate() {
        if lane.queue == Queue::Copy && lane.steps.is_empty() {
            found.push(Violation::IdleLane { program: program.name.clone(), lane: index });
        }
    }
    check_caches(scope, found);
    for (id, step) in program.steps.iter() {
        let Some(at) = positions[id] else { continue };
        let lane = &program.lanes[at.lane];
        let is_numa = plan
            .machine
            .devices
            .get(lane.device)
            .is_some_and(|device| matches!(device.kind, DeviceKind::Numa { .. }));
        let suits = match (&step.action, lane.queue) {
            (Action::Run(_) | Action::Move { .. }, Queue::Compute) => true,
            (Action::Fetch { .. }, Queue::Copy) => !is_numa,
            (Action::Run(_) | Action::Move { .. }, Queue::Copy)
            | (Action::Fetch { .. }, Queue::Compute) => false,
        };
        if !suits {
            found.push(Violation::WrongQueue { step: scope.name(id), queue: lane.queue });
        }
        let place =
            Place { scope, links: &links, fetched: &fetched, device: lane.device, id, step };
        match &step.action {
            Action::Run(op) => place.check_run(op, found),
            Action::Move { movement, .. } => place.check_move(movement, found),
            Action::Fetch { weight, offset: _ } => place.check_fetch(*weight, found),
        }
    }
}

/// One step appends to each cache, that of the layer whose name the cache has: what a program has cached, the others
/// read. So a program may leave caches out only where no program attends.
fn check_caches(scope: Scope<'_>, found: &mut Vec<Violation>) {
    let Scope { plan, program } = scope;
    let mut caches = BTreeSet::new();
    for (id, step) in program.steps.iter() {
        let Action::Run(op) = &step.action else { continue };
        let Some(cache) = op.cache() else { continue };
        if !caches.insert(cache) {
            found.push(Violation::CacheWrittenTwice { step: scope.name(id), cache });
        }
        if plan.caches.get(cache).is_some_and(|cache| *cache.name != *step.name) {
            found.push(Violation::StrangeCache { step: scope.name(id), cache });
        }
    }
    if plan.programs.iter().any(|program| attending(program).next().is_some()) {
        for cache in plan.caches.ids().filter(|cache| !caches.contains(cache)) {
            found.push(Violation::UnusedCache { program: program.name.clone(), cache });
        }
    }
}

/// The weight that each buffer is fetched for.
fn fetched(program: &Program) -> BTreeMap<BufferId, WeightId> {
    let steps = program.steps.rows().iter();
    steps
        .filter_map(|step| match step.action {
            Action::Fetch { weight, .. } => Some((*step.writes.first()?, weight)),
            Action::Run(_) | Action::Move { .. } => None,
        })
        .collect()
}

/// One step and the device whose lane runs it.
struct Place<'a> {
    scope: Scope<'a>,
    links: &'a BTreeSet<(DeviceId, DeviceId)>,
    fetched: &'a BTreeMap<BufferId, WeightId>,
    device: DeviceId,
    id: StepId,
    step: &'a Step,
}

impl Place<'_> {
    fn check_run(&self, op: &Op, found: &mut Vec<Violation>) {
        let Step { reads, writes, .. } = self.step;
        for &buffer in reads.iter().chain(writes) {
            self.check_buffer(buffer, self.device, found);
        }
        let plan = self.scope.plan;
        let mut expected = plan.fetched(op, self.device).into_iter();
        // What was fetched comes last.
        let is_packed = |buffer: &&BufferId| {
            let buffer = self.scope.program.buffers.get(**buffer);
            buffer.is_some_and(|buffer| buffer.ty.dtype == DType::U8)
        };
        let ordinary = reads.len() - reads.iter().rev().take_while(is_packed).count();
        for &buffer in &reads[ordinary..] {
            let weight = expected.next();
            if weight.is_none() || self.fetched.get(&buffer) != weight.as_ref() {
                found.push(Violation::StrangeWeight { step: self.name(), buffer });
            }
        }
        let lacking: Vec<WeightId> = expected.collect();
        let can_be_fetched = plan.fetched(op, self.device);
        for weight in op.weights() {
            let is_elsewhere = plan.weights.get(weight).is_some_and(|w| w.device != self.device);
            let is_read = can_be_fetched.contains(&weight) && !lacking.contains(&weight);
            if let Some(home) = self.reaches_to(op, weight) {
                self.check_link(home, self.device, found);
            } else if is_elsewhere && !is_read {
                found.push(Violation::ForeignWeight { step: self.name(), weight });
            }
        }
        if let (Some(cache), Some(home)) = (op.cache(), plan.borrowed(op, self.device)) {
            if self.may_borrow(home) {
                self.check_link(home.device, self.device, found);
                self.check_link(self.device, home.device, found);
            } else {
                found.push(Violation::ForeignCache { step: self.name(), cache });
            }
        }
    }

    /// The NUMA node whose table the step, one of a GPU, reaches.
    fn reaches_to(&self, op: &Op, weight: WeightId) -> Option<DeviceId> {
        let plan = self.scope.plan;
        let kind = |device: DeviceId| plan.machine.devices.get(device).map(|device| &device.kind);
        let home = plan.reached(op, self.device)?.device;
        let (here, there) = (kind(self.device)?, kind(home)?);
        (op.table() == Some(weight) && here.is_gpu() && !there.is_gpu()).then_some(home)
    }

    /// Whether the step may attend to a cache of another device: a GPU's to a NUMA node's, of floats and in prefill,
    /// where enough tokens look back for the crossing to be worth it.
    fn may_borrow(&self, cache: &Cache) -> bool {
        let is_gpu = |device: DeviceId| {
            let device = self.scope.plan.machine.devices.get(device);
            device.map(|device| device.kind.is_gpu())
        };
        self.scope.program.phase == Phase::Prefill
            && (is_gpu(self.device), is_gpu(cache.device)) == (Some(true), Some(false))
            && matches!(cache.dtype, DType::F32 | DType::F16 | DType::Bf16)
    }

    fn check_move(&self, movement: &Move, found: &mut Vec<Violation>) {
        let Step { reads, writes, .. } = self.step;
        // The device that each read and the writes must be on; any where `None`.
        let (source, target) = match *movement {
            // The receiver drives a transfer: one that another device drives touches what is not on that device.
            Move::Transfer { from, to } if to == self.device => (Some(from), to),
            Move::Transfer { .. } => (Some(self.device), self.device),
            Move::Broadcast { from } => (Some(from), self.device),
            Move::Slice { .. } => (Some(self.device), self.device),
            Move::AllReduce | Move::AllGather { .. } | Move::ReduceScatter { .. } => {
                (None, self.device)
            }
        };
        if *movement == (Move::Broadcast { from: self.device }) {
            let problem = format!("{movement} goes nowhere");
            found.push(Violation::Shape { step: self.name(), problem });
        }
        let mut senders = BTreeSet::new();
        for &buffer in reads {
            if let Some(source) = source {
                self.check_buffer(buffer, source, found);
            }
            senders.extend(self.device_of(buffer));
        }
        for &buffer in writes {
            self.check_buffer(buffer, target, found);
        }
        for sender in senders {
            self.check_link(sender, target, found);
        }
    }

    fn check_fetch(&self, weight: WeightId, found: &mut Vec<Violation>) {
        for &buffer in &self.step.writes {
            self.check_buffer(buffer, self.device, found);
        }
        let machine = &self.scope.plan.machine;
        let Some(home) = self.scope.plan.weights.get(weight).map(|weight| weight.device) else {
            return;
        };
        match machine.devices.get(home).map(|home| &home.kind) {
            Some(DeviceKind::Numa { .. }) => self.check_link(home, self.device, found),
            Some(DeviceKind::Gpu { .. }) | None => {
                found.push(Violation::NothingToFetch { step: self.name(), weight });
            }
        }
    }

    fn check_link(&self, sender: DeviceId, target: DeviceId, found: &mut Vec<Violation>) {
        if sender != target && !self.links.contains(&(sender, target)) {
            let name = |device| match self.scope.plan.machine.devices.get(device) {
                Some(device) => device.name.clone(),
                None => device.to_string(),
            };
            let (from, to) = (name(sender), name(target));
            found.push(Violation::NoLink { step: self.name(), from, to });
        }
    }

    fn check_buffer(&self, buffer: BufferId, device: DeviceId, found: &mut Vec<Violation>) {
        if self.device_of(buffer).is_some_and(|actual| actual != device) {
            found.push(Violation::ForeignBuffer { step: self.name(), buffer });
        }
    }

    fn device_of(&self, buffer: BufferId) -> Option<DeviceId> {
        self.scope.program.buffers.get(buffer).map(|buffer| buffer.device)
    }

    fn name(&self) -> super::StepName {
        self.scope.name(self.id)
    }
}
