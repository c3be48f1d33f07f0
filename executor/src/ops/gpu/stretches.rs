//! Runs of neighbouring steps of one lane that nothing outside the lane takes part in but at their ends.

use std::ops::Range;

use ir::id::{BufferId, DeviceId, Table};
use ir::plan::{Action, Lane, Program};

use crate::peers::Peers;

/// For each buffer whether a step of another device reads it on the host, or the caller does. `index` is the program's.
pub(super) fn exported(
    program: &Program,
    device: DeviceId,
    peers: &Peers,
    index: usize,
) -> Table<BufferId, bool> {
    let mut exported: Table<BufferId, bool> = program.buffers.ids().map(|_| false).collect();
    let foreign = program.lanes.iter().filter(|lane| lane.device != device);
    let steps = foreign.flat_map(|lane| &lane.steps);
    for &step in steps.filter(|&&step| peers.reads_on_host(index, step)) {
        for &buffer in &program.steps[step].reads {
            exported[buffer] = program.buffers[buffer].device == device;
        }
    }
    let is_ours = program.buffers[program.output].device == device;
    exported[program.output] |= is_ours;
    exported
}

/// Cuts a lane's steps, by position, so that only the first of a stretch waits for other lanes, or moves
/// anything on the host, and only the last is waited for or writes what others read. `index` is the program's.
pub(crate) fn stretches(
    program: &Program,
    lane: &Lane,
    peers: &Peers,
    index: usize,
) -> Vec<Range<usize>> {
    let exported = exported(program, lane.device, peers, index);
    let (awaited, sums) = (peers.awaited(index), peers.sums(index));
    let mut stretches: Vec<Range<usize>> = Vec::new();
    let mut is_closed = true;
    for (position, &id) in lane.steps.iter().enumerate() {
        let step = &program.steps[id];
        let is_move = !matches!(step.action, Action::Run(_)) && !sums[id];
        match stretches.last_mut() {
            Some(last) if !is_closed && peers.waits(index, id).is_empty() && !is_move => {
                last.end = position + 1;
            }
            _ => stretches.push(position..position + 1),
        }
        is_closed = is_move || awaited[id] || step.writes.iter().any(|&buffer| exported[buffer]);
    }
    stretches
}
