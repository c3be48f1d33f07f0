//! Letters: memory of the host, pinned, in which GPUs and the host leave each other values of a run, with flags that
//! say when they are there. The compiler counts it, the executor allocates it once.
//!
//! - It lies with the NUMA node that exchanges values with the GPU fastest, and counts there.
//! - What the host takes out of a letter is a value of its own for as long as the plan keeps the buffer.
//! - A GPU that reads values in the memory of another needs no letter. Whether GPUs reach each other is known only
//!   where they are, so where several compute, letters are counted for all that they exchange.

use std::collections::{BTreeMap, BTreeSet};

use crate::id::{BufferId, DeviceId, StepId};
use crate::plan::{Action, Lane, Phase, Plan, Program, Queue, Step};
use crate::workspace::{RunSizes, aligned};

/// Bytes of values up to which every letter of a program has a place of its own.
pub const OWN_PLACES_BYTES: u64 = 256 << 20;
/// Bytes from which several threads copy what goes into a letter, or comes out of one: others wake up in the time in
/// which one copies as much.
pub const SHARED_COPY_BYTES: u64 = 2 << 20;
/// Memory of a NUMA node that has room for the letters of several GPUs and what is taken out of them.
const LEAST_HOME_BYTES: u64 = 8 * OWN_PLACES_BYTES;
/// Bytes from one flag to another that the other side writes: the widest line of any cache.
pub const FLAG_BYTES: u64 = 128;
/// Cubes of a GPU that send a value at most, each of which raises a flag of 4 bytes: what they have on its way, 256 KB,
/// is more than a link holds.
pub const SENDING_CUBES: u64 = 64;
/// Bytes of the flags of a value that a GPU sends.
pub const SENDING_FLAGS_BYTES: u64 = SENDING_CUBES * 4;
/// Flags of a step that waits for others and is waited for: that its letter is there, that its values have been taken,
/// and that it is done.
const FLAGS_OF_STEP: u64 = 3;

/// Where the values of a program's letters lie.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Places {
    /// The first byte of each value of each letter.
    pub starts: Vec<Vec<u64>>,
    /// Whether all letters share one place, which each then uses after another: large programs' do.
    pub is_shared: bool,
    /// Bytes of all places.
    pub bytes: u64,
}

impl Places {
    /// The places of `letters`, for each the bytes of its values.
    pub fn of(letters: &[Vec<u64>]) -> Self {
        let sum = |values: &Vec<u64>| {
            values.iter().map(|&bytes| aligned(bytes)).fold(0, u64::saturating_add)
        };
        let all = letters.iter().map(sum).fold(0, u64::saturating_add);
        let is_shared = all > OWN_PLACES_BYTES;
        let mut next = 0_u64;
        let mut bytes = 0;
        let place = |values: &Vec<u64>| {
            if is_shared {
                next = 0;
            }
            let starts = values.iter().map(|&bytes| {
                let start = next;
                next = next.saturating_add(aligned(bytes));
                start
            });
            let starts = starts.collect();
            bytes = next.max(bytes);
            starts
        };
        let starts = letters.iter().map(place).collect();
        Self { starts, is_shared, bytes }
    }
}

/// The NUMA node with which a GPU's letters lie: of those it exchanges values with, the one that it does fastest with.
/// One without memory for much is passed over where another has it.
pub fn home(plan: &Plan, gpu: DeviceId) -> Option<DeviceId> {
    homes(plan).get(&gpu).copied()
}

/// The home of each GPU's letters, where it has one. Links are looked at once: a machine may have thousands.
pub fn homes(plan: &Plan) -> BTreeMap<DeviceId, DeviceId> {
    let devices = &plan.machine.devices;
    let is_gpu = |device: DeviceId| devices.get(device).map(|device| device.kind.is_gpu());
    let mut rates: BTreeMap<(DeviceId, DeviceId), f64> = BTreeMap::new();
    for link in &plan.machine.links {
        // The first link between two devices is the one that counts.
        rates.entry((link.from, link.to)).or_insert(link.bytes_per_sec);
    }
    let mut best: BTreeMap<DeviceId, (DeviceId, (bool, f64))> = BTreeMap::new();
    for (&(gpu, node), &there) in &rates {
        if (is_gpu(gpu), is_gpu(node)) != (Some(true), Some(false)) {
            continue;
        }
        let Some(&back) = rates.get(&(node, gpu)) else { continue };
        let rate = (devices[node].memory_bytes >= LEAST_HOME_BYTES, there.min(back));
        let home = best.entry(gpu).or_insert((node, rate));
        // The first of several that are alike.
        if rate > home.1 {
            *home = (node, rate);
        }
    }
    best.into_iter().map(|(gpu, (home, _))| (gpu, home)).collect()
}

/// The most bytes that a GPU's letters take; 0 for what is no GPU, or computes nothing.
pub fn letter_bytes(plan: &Plan, gpu: DeviceId) -> u64 {
    let is_gpu = plan.machine.devices.get(gpu).is_some_and(|device| device.kind.is_gpu());
    let programs = plan.programs.iter();
    let lanes: Vec<(&Program, &Lane)> = programs
        .filter_map(|program| Some((program, program.lane(gpu, Queue::Compute)?)))
        .filter(|(_, lane)| is_gpu && !lane.steps.is_empty())
        .collect();
    if lanes.is_empty() {
        return 0;
    }
    let is_alone = plan.working_gpus().len() == 1;
    let (mut flags, mut values) = (0, 0);
    for (program, lane) in lanes {
        let sent = sent(plan, program, gpu);
        let flags_of_steps = FLAGS_OF_STEP * FLAG_BYTES * lane.steps.len() as u64;
        let flags_of_values = SENDING_FLAGS_BYTES.next_multiple_of(FLAG_BYTES) * sent.len() as u64;
        flags = (flags_of_steps + flags_of_values).max(flags);
        let Places { is_shared, bytes, .. } = Places::of(&letters(plan, program, lane, &sent));
        // Fewer letters, and those of fewer sequences, may have places of their own.
        let may_be_own = is_shared && (!is_alone || program.phase == Phase::Decode);
        // One program runs at a time.
        values = if may_be_own { bytes.max(OWN_PLACES_BYTES) } else { bytes }.max(values);
    }
    let flags = flags.saturating_mul(most_programs(plan));
    [RunSizes::of(plan).bytes(), flags, values].into_iter().fold(0, u64::saturating_add)
}

/// The most programs that a plan for as many sequences has, so that what is counted does not depend on how many of them
/// were made: for prompts, for short ones, and for decodes of 1, 4, 16 and so on up to all sequences.
pub fn most_programs(plan: &Plan) -> u64 {
    let of_sequences = 3 + u64::from(plan.model.max_sequences.max(1).ilog2());
    of_sequences.max(plan.programs.len() as u64)
}

/// A GPU's buffers that the host reads, or the caller, if all that devices exchange passes through the host.
pub fn sent(plan: &Plan, program: &Program, gpu: DeviceId) -> BTreeSet<BufferId> {
    let others = program.lanes.iter().filter(|lane| lane.device != gpu);
    let steps = others.flat_map(|lane| &lane.steps).filter_map(|&id| program.steps.get(id));
    let steps = steps.filter(|step| !plan.is_library_sum(program, step));
    let read = steps.flat_map(|step| &step.reads).copied().chain([program.output]);
    let is_here =
        |buffer: &BufferId| program.buffers.get(*buffer).is_some_and(|buffer| buffer.device == gpu);
    read.filter(is_here).collect()
}

/// Bytes of the values of each letter of a lane, if all of them pass through the host.
fn letters(
    plan: &Plan,
    program: &Program,
    lane: &Lane,
    sent: &BTreeSet<BufferId>,
) -> Vec<Vec<u64>> {
    let bytes = |buffer: BufferId| {
        program.buffers.get(buffer).map_or(0, |buffer| buffer.ty.bytes(program.max))
    };
    let is_foreign = |buffer: &BufferId| {
        program.buffers.get(*buffer).is_some_and(|buffer| buffer.device != lane.device)
    };
    let of_step = |&id: &StepId| {
        let step: Option<&Step> = program.steps.get(id);
        let moving = step.filter(|step| {
            matches!(step.action, Action::Move { .. }) && !plan.is_library_sum(program, step)
        });
        let reads = moving.into_iter().flat_map(|step| &step.reads).copied().filter(is_foreign);
        let writes = step.into_iter().flat_map(|step| &step.writes).copied();
        let writes = writes.filter(|buffer| sent.contains(buffer));
        [reads.map(bytes).collect(), writes.map(bytes).collect()]
    };
    lane.steps.iter().flat_map(of_step).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_share_a_place_where_all_of_them_are_many_bytes() {
        let own = Places::of(&[vec![1, 300], Vec::new(), vec![256]]);
        let starts = vec![vec![0, 256], Vec::new(), vec![768]];
        assert_eq!(own, Places { starts, is_shared: false, bytes: 1024 });
        let most = OWN_PLACES_BYTES;
        let full = Places::of(&[vec![most - 256], vec![256]]);
        assert_eq!((full.is_shared, full.bytes), (false, most));
        let shared = Places::of(&[vec![most - 256, 256], vec![1], vec![256, 4]]);
        let starts = vec![vec![0, most - 256], vec![0], vec![0, 256]];
        assert_eq!(shared, Places { starts, is_shared: true, bytes: most });
        assert_eq!(Places::of(&[vec![u64::MAX], vec![9]]).bytes, u64::MAX);
        assert_eq!(Places::of(&[]), Places::default());
    }
}
