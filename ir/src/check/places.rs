//! What a step reads and writes is on its device, or at the other end of a link.
//!
//! Any step may free any buffer: that is the run's bookkeeping, no work of a device.

use std::collections::BTreeSet;

use crate::check::order::Home;
use crate::check::{Scope, Violation};
use crate::id::{BufferId, DeviceId, StepId, Table};
use crate::layout::Move;
use crate::machine::DeviceKind;
use crate::op::Op;
use crate::plan::{Action, Queue, Step};

pub(super) fn check(
    scope: Scope<'_>,
    homes: &Table<StepId, Option<Home>>,
    found: &mut Vec<Violation>,
) {
    let Scope { plan, program } = scope;
    let links: BTreeSet<(DeviceId, DeviceId)> =
        plan.machine.links.iter().map(|link| (link.from, link.to)).collect();
    let mut caches = BTreeSet::new();
    for (id, step) in program.steps.iter() {
        if let Action::Run(op) = &step.action
            && let Some(cache) = op.cache()
            && !caches.insert(cache)
        {
            found.push(Violation::CacheWrittenTwice { step: scope.name(id), cache });
        }
        let Some(home) = homes[id] else { continue };
        let lane = &program.lanes[home.lane];
        let is_numa = plan
            .machine
            .devices
            .get(lane.device)
            .is_some_and(|device| matches!(device.kind, DeviceKind::Numa { .. }));
        let computes = matches!(step.action, Action::Run(_));
        if lane.queue == Queue::Copy && (computes || is_numa) {
            found.push(Violation::WrongQueue { step: scope.name(id) });
        }
        let place = Place { scope, links: &links, device: lane.device, id, step };
        match &step.action {
            Action::Run(op) => place.check_run(op, found),
            Action::Move { movement, .. } => place.check_move(movement, found),
        }
    }
}

/// One step and the device whose lane runs it.
struct Place<'a> {
    scope: Scope<'a>,
    links: &'a BTreeSet<(DeviceId, DeviceId)>,
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
        for weight in op.weights() {
            if self.scope.plan.weights.get(weight).is_some_and(|w| w.device != self.device) {
                found.push(Violation::ForeignWeight { step: self.name(), weight });
            }
        }
        if let Some(cache) = op.cache()
            && self.scope.plan.caches.get(cache).is_some_and(|c| c.device != self.device)
        {
            found.push(Violation::ForeignCache { step: self.name(), cache });
        }
    }

    fn check_move(&self, movement: &Move, found: &mut Vec<Violation>) {
        let Step { reads, writes, .. } = self.step;
        // The device that each read and the writes must be on; any where `None`.
        let (source, target) = match *movement {
            // Either end may drive a transfer: between a GPU and a NUMA node the GPU does.
            Move::Transfer { from, to } if [from, to].contains(&self.device) => (Some(from), to),
            Move::Transfer { .. } => (Some(self.device), self.device),
            Move::Broadcast { from } => (Some(from), self.device),
            Move::Slice { .. } => (Some(self.device), self.device),
            Move::AllReduce | Move::AllGather { .. } | Move::ReduceScatter { .. } => {
                (None, self.device)
            }
        };
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
            if sender != target && !self.links.contains(&(sender, target)) {
                let name = |device| match self.scope.plan.machine.devices.get(device) {
                    Some(device) => device.name.clone(),
                    None => device.to_string(),
                };
                let (from, to) = (name(sender), name(target));
                found.push(Violation::NoLink { step: self.name(), from, to });
            }
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
