//! No weight is fetched over another that may still be read.

use std::collections::BTreeMap;

use crate::check::order::Order;
use crate::check::{Scope, Violation};
use crate::id::{BufferId, StepId};
use crate::plan::{Action, Queue};

/// Bytes of a window that a weight was fetched to last.
struct Taken {
    end: u64,
    buffer: BufferId,
}

pub(super) fn check(scope: Scope<'_>, order: &Order, found: &mut Vec<Violation>) {
    let program = scope.program;
    let mut freers: BTreeMap<BufferId, StepId> = BTreeMap::new();
    for (id, step) in program.steps.iter() {
        for &buffer in &step.frees {
            freers.entry(buffer).or_insert(id);
        }
    }
    // One lane fetches for a device, and it does so in order.
    for lane in program.lanes.iter().filter(|lane| lane.queue == Queue::Copy) {
        // By their first bytes; they do not overlap.
        let mut window: BTreeMap<u64, Taken> = BTreeMap::new();
        for &id in &lane.steps {
            let Some(step) = program.steps.get(id) else { continue };
            let Action::Fetch { offset: start, .. } = step.action else { continue };
            let Some(&buffer) = step.writes.first() else { continue };
            let Some(ty) = program.buffers.get(buffer).map(|buffer| &buffer.ty) else { continue };
            let end = start.saturating_add(ty.bytes(program.max));
            let below = window.range(..end).rev();
            let overlapped: Vec<u64> =
                below.take_while(|(_, taken)| taken.end > start).map(|(&start, _)| start).collect();
            for other in overlapped.iter().filter_map(|start| window.remove(start)) {
                let is_over = freers.get(&other.buffer).is_some_and(|&f| order.before(f, id));
                if !is_over {
                    let step = scope.name(id);
                    found.push(Violation::Overwrite { step, buffer: other.buffer });
                }
            }
            window.insert(start, Taken { end, buffer });
        }
    }
}
