//! Which steps GPUs that reach each other's memory do without the host, which steps are therefore still waited for on
//! the host, and at which addresses each GPU finds the memory of the others.
//!
//! - Sums are made in exchanges or by the vendor's library, without the host.
//! - A value that moves from one GPU to another, or that several gather, is read where it lies, once the host has seen
//!   that it is there. It keeps its place to the end of the run, and the next run of the GPU that it lies with waits
//!   until it has been read.
//! - The letters of a GPU's next run lie where those of this one do. So its lane leaves no run before it has heard from
//!   the device behind the last letter that it gave it.

#![expect(unsafe_code, reason = "launches reach the memory of other GPUs by address")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;

use anyhow::{Context as _, Result};
use cudarc::driver::{CudaContext, result, sys};
use ir::frame::Frame;
use ir::id::{BufferId, DeviceId, StepId, Table};
use ir::machine::DeviceKind;
use ir::plan::{Lane, Plan, Program, Queue};

use crate::kernels::gpu::device::{Gpu, Span};
use crate::kernels::gpu::mail::Place;
use crate::kernels::gpu::peers::Exchanges;
use crate::lane::fetching::last_read;
use crate::load::{GpuDriver, Options};
use crate::locked;

/// What the lanes of a plan's GPUs share.
pub(crate) struct Peers {
    /// For each program, which steps are parts of sums that GPUs make without the host.
    sums: Vec<Table<StepId, bool>>,
    /// For each program, which steps do what follows them in the same launch: a linear the sum of what it makes, a sum
    /// what is added to it.
    joined: Vec<Table<StepId, bool>>,
    /// For each program, what GPUs read in the memory of others: all that such a step reads of them.
    lying: Vec<BTreeMap<StepId, Vec<Lying>>>,
    /// For each program and step, which steps of other lanes it waits for on the host.
    waits: Vec<Table<StepId, Vec<StepId>>>,
    /// For each program, which steps lanes wait for on the host, in the run or before the next.
    awaited: Vec<Table<StepId, bool>>,
    /// GPUs that the vendor's library sums over, with a little memory to try it.
    libraries: Mutex<BTreeMap<DeviceId, (Gpu, Span)>>,
    exchanges: Mutex<BTreeMap<DeviceId, Memory>>,
    buffers: Mutex<BTreeMap<DeviceId, Memory>>,
    /// Which GPUs may reach the memory of which, by ordinals.
    granted: Mutex<BTreeSet<(usize, usize)>>,
}

/// Memory of a GPU that others reach.
#[derive(Clone, Copy)]
struct Memory {
    ordinal: usize,
    address: u64,
}

/// A value that a movement reads in the memory of another GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Lying {
    buffer: BufferId,
    with: DeviceId,
    /// Bytes from the start of that GPU's buffers.
    start: u64,
}

impl Peers {
    /// Finds what the GPUs of a plan that reach each other's memory do without the host.
    pub(crate) fn new(plan: &Plan, options: &Options) -> Self {
        let mut known = BTreeMap::new();
        let mut reach = |members: Vec<DeviceId>| {
            options.gpu_driver == GpuDriver::Cuda
                && *known
                    .entry(members)
                    .or_insert_with_key(|members| reach_each_other(plan, members))
        };
        let (mut sums, mut joined) = (Vec::new(), Vec::new());
        let (mut lying, mut waits, mut awaited) = (Vec::new(), Vec::new(), Vec::new());
        for program in &plan.programs {
            let mut is_sum = |id: StepId| {
                let step = &program.steps[id];
                let by_library =
                    options.gpu_driver == GpuDriver::Cuda && plan.is_library_sum(program, step);
                by_library
                    || plan.is_peer_sum(program, step) && reach(members(program, &step.reads))
            };
            let its_sums = program.steps.ids().map(&mut is_sum).collect();
            let mut frames = BTreeMap::new();
            let mut its_lying = BTreeMap::new();
            for (id, step) in program.steps.iter() {
                let moved = plan.peer_moved(program, step);
                let both = || [step.reads.as_slice(), step.writes.as_slice()].concat();
                if moved.is_empty() || !reach(members(program, &both())) {
                    continue;
                }
                let place = |(buffer, with)| {
                    let frame =
                        frames.entry(with).or_insert_with(|| Frame::new(plan, program, with));
                    Some(Lying { buffer, with, start: frame.place(buffer)?.start })
                };
                let lying: Option<Vec<Lying>> = moved.into_iter().map(place).collect();
                its_lying.extend(lying.map(|lying| (id, lying)));
            }
            joined.push(joined_with_next(plan, program, &its_sums));
            let its_waits = waits_on_the_host(program, &its_sums, &its_lying);
            let mut its_awaited = awaited_on_the_host(program, &its_waits, &its_lying);
            // Without CUDA there are no letters.
            if options.gpu_driver == GpuDriver::Cuda {
                let is_gpu = |device: DeviceId| plan.machine.devices[device].kind.is_gpu();
                let host = OnHost { sums: &its_sums, lying: &its_lying, waits: &its_waits };
                for end in unheard_ends(program, is_gpu, host, &its_awaited) {
                    its_awaited[end] = true;
                }
            }
            awaited.push(its_awaited);
            waits.push(its_waits);
            sums.push(its_sums);
            lying.push(its_lying);
        }
        let (libraries, exchanges, buffers) =
            (Mutex::default(), Mutex::default(), Mutex::default());
        Self {
            libraries,
            sums,
            joined,
            lying,
            waits,
            awaited,
            exchanges,
            buffers,
            granted: Mutex::default(),
        }
    }

    /// Whether a step is a GPU's part of a sum that needs no host.
    pub(crate) fn is_sum(&self, program: usize, step: StepId) -> bool {
        self.sums[program][step]
    }

    /// Whether a step is one that a GPU may queue together with what follows it in its lane and alone reads the step's
    /// only output: a sum of what a linear makes, or an addition to a sum.
    pub(crate) fn is_joined(&self, program: usize, step: StepId) -> bool {
        self.joined[program][step]
    }

    /// Whether a step is a GPU's part of a sum that needs no host, for all steps of a program.
    pub(crate) fn sums(&self, program: usize) -> &Table<StepId, bool> {
        &self.sums[program]
    }

    /// Whether GPUs make sums in a program without the host.
    pub(crate) fn have_sums(&self, program: usize) -> bool {
        self.sums[program].rows().contains(&true)
    }

    /// Whether what a step reads of other devices passes through the host: GPUs neither sum it up among themselves nor
    /// read it where it lies.
    pub(crate) fn reads_on_host(&self, program: usize, step: StepId) -> bool {
        !self.is_sum(program, step) && !self.lying[program].contains_key(&step)
    }

    /// The steps of a run that the next run of a GPU waits for: after them nobody reads its memory any more.
    pub(crate) fn last_takes(&self, plan: &Plan, program: usize, device: DeviceId) -> Vec<StepId> {
        last_takes(&plan.programs[program], &self.lying[program])
            .filter_map(|(with, step)| (with == device).then_some(step))
            .collect()
    }

    /// What a step waits for on the host, of other lanes.
    pub(crate) fn waits(&self, program: usize, step: StepId) -> &[StepId] {
        &self.waits[program][step]
    }

    /// For each step of a program whether lanes wait for it on the host.
    pub(crate) fn awaited(&self, program: usize) -> &Table<StepId, bool> {
        &self.awaited[program]
    }

    /// Tells the others where a GPU's exchange lies.
    pub(crate) fn register_exchange(&self, device: DeviceId, ordinal: usize, address: u64) {
        locked(&self.exchanges).insert(device, Memory { ordinal, address });
    }

    /// Tells the others where a GPU's buffers lie.
    pub(crate) fn register_buffers(&self, device: DeviceId, ordinal: usize, address: u64) {
        locked(&self.buffers).insert(device, Memory { ordinal, address });
    }

    /// Notes a GPU that the vendor's library sums over; `span` may be written until the first run.
    pub(crate) fn register_library(&self, device: DeviceId, gpu: Gpu, span: Span) {
        locked(&self.libraries).insert(device, (gpu, span));
    }

    /// Lets the vendor's library bring together the GPUs of each of its sums, which takes a second that no run should
    /// wait for. All of them are loaded.
    ///
    /// # Errors
    /// When the library fails.
    pub(crate) fn join_libraries(&self, plan: &Plan) -> Result<()> {
        let libraries = locked(&self.libraries);
        let sums = plan.library_sums();
        let groups: BTreeSet<Vec<DeviceId>> =
            sums.map(|(program, step)| members(program, &step.reads)).collect();
        for devices in &groups {
            let ordinals = ordinals(plan, devices)?;
            let its_members: Vec<&(Gpu, Span)> =
                devices.iter().filter_map(|device| libraries.get(device)).collect();
            for (gpu, span) in &its_members {
                gpu.sum_by_library(&ordinals, span, span, 1)?;
            }
            // A sum that failed shows in what it wrote.
            for (gpu, span) in &its_members {
                gpu.read(&span.part(0, size_of::<f32>()))?;
            }
        }
        Ok(())
    }

    /// The exchanges of a sum's members, once `device` may write to them.
    ///
    /// # Errors
    /// When a member has no exchange, or the driver grants no access.
    pub(crate) fn exchanges(&self, device: DeviceId, members: &[DeviceId]) -> Result<Exchanges> {
        let addresses = members.iter().map(|&id| self.reached(&self.exchanges, device, id));
        let addresses = addresses.collect::<Result<Vec<u64>>>()?;
        // SAFETY: the members have registered exchanges, of the size that the plan counts for its sums, which their
        // lanes keep; and `device` may reach them now.
        Ok(unsafe { Exchanges::new(&addresses) })
    }

    /// Where a value lies that a movement of `device` reads in the memory of another GPU, once it may be read; `None`
    /// where the value comes with a letter.
    ///
    /// # Errors
    /// When the driver grants no access.
    pub(crate) fn lies_at(
        &self,
        device: DeviceId,
        program: usize,
        step: StepId,
        buffer: BufferId,
    ) -> Result<Option<Place>> {
        let mut of_step = self.lying[program].get(&step).into_iter().flatten();
        let found = of_step.find(|lying| lying.buffer == buffer);
        let Some(&Lying { with, start, .. }) = found else { return Ok(None) };
        let address = self.reached(&self.buffers, device, with)? + start;
        // SAFETY: the other GPU's lane keeps its buffers, which `device` may reach now; and the value keeps its place
        // until it has been read.
        Ok(Some(unsafe { Place::new(0, address) }))
    }

    /// Where another GPU's memory lies, once `device` may reach it. The driver is asked once: while launches are
    /// captured it answers nothing.
    fn reached(
        &self,
        all: &Mutex<BTreeMap<DeviceId, Memory>>,
        device: DeviceId,
        other: DeviceId,
    ) -> Result<u64> {
        let all = locked(all);
        let memory = |device| all.get(&device).context("a GPU has no memory that others reach");
        let (own, other) = (memory(device)?, memory(other)?);
        let mut granted = locked(&self.granted);
        let pair = (own.ordinal, other.ordinal);
        if own.ordinal != other.ordinal && !granted.contains(&pair) {
            grant(own.ordinal, other.ordinal)?;
            granted.insert(pair);
        }
        Ok(other.address)
    }
}

/// For each step of a program whether it can be made in one launch with the sum that follows it, or as a sum with what is
/// added to it.
fn joined_with_next(
    plan: &Plan,
    program: &Program,
    sums: &Table<StepId, bool>,
) -> Table<StepId, bool> {
    let mut readers: Table<BufferId, usize> = program.buffers.ids().map(|_| 0).collect();
    program.steps.rows().iter().flat_map(|step| &step.reads).for_each(|&read| readers[read] += 1);
    let mut joined: Table<StepId, bool> = program.steps.ids().map(|_| false).collect();
    for lane in &program.lanes {
        for (position, pair) in lane.steps.windows(2).enumerate() {
            let [step, sum] = [pair[0], pair[1]];
            // Every member of the sum reads all of its terms.
            let is_term = |term: &BufferId| readers[*term] == program.steps[sum].reads.len();
            joined[step] = sums[sum]
                && plan.may_join_sum(program, &lane.steps, position)
                && program.steps[step].writes.iter().all(is_term);
            let is_read_once = |sum: &BufferId| readers[*sum] == 1 && *sum != program.output;
            joined[step] |= sums[step]
                && plan.may_join_add(program, &lane.steps, position)
                && program.steps[step].writes.iter().all(is_read_once);
        }
    }
    joined
}

/// For each step of a program what it waits for on the host: its waits, but for members of `sums`, which wait for each
/// other on the devices and, as the checker sees to, for nothing else. What a plan leaves out because a sum implies it
/// is not implied on the host: a step that reads a value of another device there waits for the step that writes it.
fn waits_on_the_host(
    program: &Program,
    sums: &Table<StepId, bool>,
    lying: &BTreeMap<StepId, Vec<Lying>>,
) -> Table<StepId, Vec<StepId>> {
    let mut waits: Table<StepId, Vec<StepId>> = program.steps.ids().map(|_| Vec::new()).collect();
    let steps = program.steps.iter();
    let writers: BTreeMap<BufferId, StepId> =
        steps.flat_map(|(id, step)| step.writes.iter().map(move |&buffer| (buffer, id))).collect();
    let has_sums = sums.rows().contains(&true);
    for lane in &program.lanes {
        for &id in lane.steps.iter().filter(|&&id| !sums[id]) {
            let step = &program.steps[id];
            waits[id].extend_from_slice(&step.waits);
            if has_sums && !lying.contains_key(&id) {
                let is_foreign =
                    |buffer: &&BufferId| program.buffers[**buffer].device != lane.device;
                let writers = step.reads.iter().filter(is_foreign).map(|buffer| writers[buffer]);
                waits[id].extend(writers.filter(|writer| !step.waits.contains(writer)));
            }
        }
    }
    waits
}

/// For each step of a program whether another lane waits for it on the host, in this run or before the next; of `lying`
/// the last ones are waited for.
fn awaited_on_the_host(
    program: &Program,
    waits: &Table<StepId, Vec<StepId>>,
    lying: &BTreeMap<StepId, Vec<Lying>>,
) -> Table<StepId, bool> {
    let mut awaited: Table<StepId, bool> = program.steps.ids().map(|_| false).collect();
    for &wait in waits.rows().iter().flatten() {
        awaited[wait] = true;
    }
    let devices = program.lanes.iter().map(|lane| lane.device);
    let last_reads = devices.filter_map(|device| last_read(program, device));
    for step in last_reads.chain(last_takes(program, lying).map(|(_, step)| step)) {
        awaited[step] = true;
    }
    awaited
}

/// What of a program's steps passes through the host.
#[derive(Clone, Copy)]
struct OnHost<'a> {
    /// Sums that do not.
    sums: &'a Table<StepId, bool>,
    /// What is read where it lies.
    lying: &'a BTreeMap<StepId, Vec<Lying>>,
    /// What steps wait for there.
    waits: &'a Table<StepId, Vec<StepId>>,
}

impl OnHost<'_> {
    /// The values of other devices that a step of a lane reads on the host.
    fn reads(self, program: &Program, lane: &Lane, step: StepId) -> Vec<BufferId> {
        if self.sums[step] || self.lying.contains_key(&step) {
            return Vec::new();
        }
        let reads = program.steps[step].reads.iter().copied();
        reads.filter(|&buffer| program.buffers[buffer].device != lane.device).collect()
    }
}

/// The last step of each GPU's lane of which the host would not hear that the device has all of its letters: from the
/// last step that one comes for on, none sends a value and none is waited for.
fn unheard_ends(
    program: &Program,
    is_gpu: impl Fn(DeviceId) -> bool,
    host: OnHost<'_>,
    awaited: &Table<StepId, bool>,
) -> Vec<StepId> {
    // The caller reads the output.
    let mut sent = BTreeSet::from([program.output]);
    for lane in &program.lanes {
        sent.extend(lane.steps.iter().flat_map(|&step| host.reads(program, lane, step)));
    }
    let mut ends = Vec::new();
    let is_computing = |lane: &&Lane| lane.queue == Queue::Compute && is_gpu(lane.device);
    for lane in program.lanes.iter().filter(is_computing) {
        let is_heard = |step: StepId| {
            awaited[step] || program.steps[step].writes.iter().any(|buffer| sent.contains(buffer))
        };
        let is_told = |step: StepId| {
            !host.waits[step].is_empty() || !host.reads(program, lane, step).is_empty()
        };
        let heard = lane.steps.iter().rposition(|&step| is_heard(step));
        let told = lane.steps.iter().rposition(|&step| is_told(step));
        // What a run is told of its batch comes before its first step.
        if heard.is_none() || heard < told {
            ends.extend(lane.steps.last());
        }
    }
    ends
}

/// For each GPU whose memory another reads, the last step of that other which does.
fn last_takes(
    program: &Program,
    lying: &BTreeMap<StepId, Vec<Lying>>,
) -> impl Iterator<Item = (DeviceId, StepId)> {
    let last_of_lane = |lane: &Lane| {
        let of_step = |&step: &StepId| {
            lying.get(&step).into_iter().flatten().map(move |lying| (lying.with, step))
        };
        // A later step takes the place of an earlier one.
        lane.steps.iter().flat_map(of_step).collect::<BTreeMap<_, _>>()
    };
    program.lanes.iter().flat_map(last_of_lane)
}

/// The devices whose buffers are read, in that order.
pub(crate) fn members(program: &Program, reads: &[BufferId]) -> Vec<DeviceId> {
    reads.iter().map(|&buffer| program.buffers[buffer].device).collect()
}

/// The driver's ordinals of GPUs, in their order.
///
/// # Errors
/// When one is none.
pub(crate) fn ordinals(plan: &Plan, devices: &[DeviceId]) -> Result<Vec<usize>> {
    let ordinal = |&device: &DeviceId| match plan.machine.devices[device].kind {
        DeviceKind::Gpu { ordinal, .. } => Some(ordinal as usize),
        DeviceKind::Numa { .. } => None,
    };
    devices.iter().map(ordinal).collect::<Option<_>>().context("one of these devices is no GPU")
}

fn reach_each_other(plan: &Plan, members: &[DeviceId]) -> bool {
    let Ok(ordinals) = ordinals(plan, members) else { return false };
    let pairs = ordinals.iter().flat_map(|&from| ordinals.iter().map(move |&to| (from, to)));
    pairs.filter(|(from, to)| from != to).all(|(from, to)| reaches(from, to).unwrap_or(false))
}

/// Whether launches on one GPU can reach the memory of another.
pub(crate) fn reaches(from: usize, to: usize) -> Result<bool> {
    // A context takes half a second, and nobody else has opened one yet.
    result::init()?;
    let (from, to) = (result::device::get(from as i32)?, result::device::get(to as i32)?);
    let mut answer = 0;
    // SAFETY: the answer is written to a number of this function.
    unsafe { sys::cuDeviceCanAccessPeer(&raw mut answer, from, to) }.result()?;
    Ok(answer != 0)
}

/// Lets launches on one GPU read and write the memory of another.
pub(crate) fn grant(own: usize, other: usize) -> Result<()> {
    let (own, other) = (CudaContext::new(own)?, CudaContext::new(other)?);
    own.bind_to_thread().context("binding the GPU's context")?;
    // SAFETY: both contexts are alive, and the first is this thread's.
    let granted = unsafe { sys::cuCtxEnablePeerAccess(other.cu_ctx(), 0) };
    if granted == sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED {
        return Ok(());
    }
    granted.result().context("reaching the memory of another GPU")
}

#[cfg(test)]
mod tests;
