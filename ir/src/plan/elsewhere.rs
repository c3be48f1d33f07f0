//! What steps use that is at home on another device: weights that are fetched, tables that are reached, caches that are
//! borrowed.

use std::collections::BTreeSet;

use super::{Cache, Plan, Program, Queue, Weight};
use crate::id::{CacheId, DeviceId, WeightId};
use crate::op::Op;

impl Plan {
    /// The weights of `op` that a step of `device` reads from buffers, because their home is elsewhere: the last
    /// of its reads, one for each, in this order.
    pub fn fetched(&self, op: &Op, device: DeviceId) -> Vec<WeightId> {
        let is_fetched = |weight: &WeightId| {
            let weight = self.weights.get(*weight);
            weight.is_some_and(|weight| weight.shape.len() > 1 && weight.device != device)
        };
        if op.takes_fetched() {
            op.weights().into_iter().filter(is_fetched).collect()
        } else {
            Vec::new()
        }
    }

    /// The table of another device that a step of `device` looks rows up in, where `op` does: it *reaches* the table, whose
    /// rows come over the link one by one, for as many tokens as there are. Such a table lies in the memory of its home,
    /// pinned, as GPUs hold one, and nothing but lookups of GPUs uses it.
    pub fn reached(&self, op: &Op, device: DeviceId) -> Option<&Weight> {
        op.table().and_then(|table| self.weights.get(table)).filter(|table| table.device != device)
    }

    /// The tables that a device reaches in any program.
    pub fn reached_by(&self, device: DeviceId) -> BTreeSet<WeightId> {
        let ops = self.programs.iter().flat_map(|program| program.ops_of(device));
        ops.filter_map(|op| self.reached(op, device).and(op.table())).collect()
    }

    /// The tables that any device reaches.
    pub fn reached_tables(&self) -> BTreeSet<WeightId> {
        self.machine.devices.ids().flat_map(|device| self.reached_by(device)).collect()
    }

    /// The cache of another device that a step of `device` attends to, where `op` does: it *borrows* the cache. What is
    /// cached comes over the link, to a window as large as the cache, before the step attends, and what the step adds
    /// goes back.
    pub fn borrowed(&self, op: &Op, device: DeviceId) -> Option<&Cache> {
        op.cache().and_then(|cache| self.caches.get(cache)).filter(|cache| cache.device != device)
    }

    /// The caches that a device borrows in any program, each as often as it does.
    pub fn borrowed_by(&self, device: DeviceId) -> impl Iterator<Item = CacheId> {
        let ops = self.programs.iter().flat_map(move |program| program.ops_of(device));
        ops.filter_map(move |op| self.borrowed(op, device).and(op.cache()))
    }

    /// Whether any device borrows a cache.
    pub fn borrows(&self) -> bool {
        self.machine.devices.ids().any(|device| self.borrowed_by(device).next().is_some())
    }

    /// Whether runs of a program work one after another: nothing is fetched for one before it starts, and what the run
    /// before borrowed is at home again when that has ended.
    pub fn runs_one_by_one(&self, program: &Program) -> bool {
        program.lanes.iter().any(|lane| lane.queue == Queue::Copy) || self.borrows()
    }
}
