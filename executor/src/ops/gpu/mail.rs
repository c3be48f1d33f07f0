//! What crosses between a GPU's lane and the host in a run, and where: letters in pinned memory.
//!
//! - A step that waits for others has an incoming letter, a step that others wait for an outgoing one. Values of other
//!   devices come with the first, what other devices read goes with the second.
//! - A lane that replays what was captured needs nothing from its host thread but letters, in the order of its steps.
//! - Steps of large runs share one place for their values, which is then used by one step after another.

#![expect(unsafe_code, reason = "letters lie in memory that a GPU reads and writes, too")]

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use cudarc::driver::CudaContext;
use ir::id::{BufferId, DeviceId, StepId, Table};
use ir::letters::{self, FLAG_BYTES, Places, SENDING_FLAGS_BYTES};
use ir::plan::{Action, Plan, Program, Queue};

use super::copies::copy;
use crate::kernels::gpu::device::{ALIGNMENT, Gpu};
use crate::kernels::gpu::mail::{Place, posting_cubes};
use crate::memory::Region;
use crate::peers::Peers;
use crate::pinned::Pinned;
use crate::waiting::look_for;

/// How long a letter of a GPU is looked for without a system call: longer than a step of a decode.
const SPINNING: Duration = Duration::from_millis(20);
/// How long a letter of a GPU is looked for before the device is asked whether it has failed, and the lane whether the
/// letter is to come: where not, the launches on their way have as long again.
const LOOKING: Duration = Duration::from_millis(400);

/// The letters of one GPU.
pub(super) struct Mail {
    pinned: Pinned,
    region: Arc<Region>,
    context: Arc<CudaContext>,
    programs: Vec<Letters>,
    /// Where the numbers of a run's batch start, and how many bytes they take.
    inputs: (usize, usize),
}

/// The letters of one program.
#[derive(Default)]
struct Letters {
    incoming: BTreeMap<StepId, Incoming>,
    outgoing: BTreeMap<StepId, Outgoing>,
    /// Whether steps share one place for their values.
    is_shared: bool,
}

/// From the host.
struct Incoming {
    flag: usize,
    values: Vec<(BufferId, usize)>,
    /// Raised when the values have been taken.
    taken: usize,
}

/// To the host.
struct Outgoing {
    /// Raised when the step is done.
    flag: usize,
    values: Vec<Sent>,
}

/// A value on its way to the host.
struct Sent {
    buffer: BufferId,
    flags: usize,
    place: usize,
}

/// What a program says about a GPU's part in it.
pub(super) struct Part<'a> {
    pub(super) program: &'a Program,
    /// Which of the plan's programs it is.
    pub(super) index: usize,
    pub(super) peers: &'a Peers,
    /// Buffers that others read on the host.
    pub(super) exported: &'a Table<BufferId, bool>,
}

impl Mail {
    /// Pins memory for all letters, and for `input_bytes` bytes of a run's batch; `None` where the GPU is not driven
    /// through CUDA.
    ///
    /// # Errors
    /// When that cannot be done.
    pub(super) fn new(
        plan: &Plan,
        device: DeviceId,
        gpu: &Gpu,
        parts: &[Part<'_>],
        input_bytes: usize,
    ) -> Result<Option<Self>> {
        let Some(ordinal) = gpu.ordinal() else { return Ok(None) };
        let (programs, bytes) = lay_out(device, parts, input_bytes);
        let counted = letters::letter_bytes(plan, device);
        ensure!(bytes as u64 <= counted, "letters take {bytes} bytes, the plan counts {counted}");
        let home = letters::home(plan, device).map(|home| &plan.machine.devices[home].kind);
        let region = Arc::new(Region::near(bytes, home)?);
        let context = CudaContext::new(ordinal).context("opening the GPU's context")?;
        let pinned = Pinned::alone(&context, &region).context("pinning memory for letters")?;
        Ok(Some(Self { pinned, region, context, programs, inputs: (0, input_bytes) }))
    }

    /// Whether all launches of a run can be queued before its values exist.
    pub(super) fn can_be_replayed(&self, program: usize) -> bool {
        !self.programs[program].is_shared
    }

    /// Writes the numbers of a run's batch; the run before must be over.
    ///
    /// # Errors
    /// When there are more than there is a place for.
    pub(super) fn write_inputs(&mut self, words: &[i32]) -> Result<()> {
        let (start, bytes) = self.inputs;
        ensure!(size_of_val(words) <= bytes, "the numbers of a batch outgrow their place");
        self.write(start, bytemuck::cast_slice(words));
        Ok(())
    }

    /// Where the GPU finds the numbers of a run's batch.
    pub(super) fn inputs(&self) -> Place {
        self.at(None, Some(self.inputs.0))
    }

    /// Where a step finds the flag of its incoming letter, if it has one.
    pub(super) fn incoming(&self, program: usize, step: StepId) -> Option<Place> {
        let letter = self.programs[program].incoming.get(&step)?;
        Some(self.at(Some(letter.flag), None))
    }

    /// Where a step finds the value of another device's buffer.
    ///
    /// # Errors
    /// When none comes.
    pub(super) fn value(&self, program: usize, step: StepId, buffer: BufferId) -> Result<Place> {
        let (letter, place) = self.place(program, step, buffer)?;
        Ok(self.at(Some(letter.flag), Some(place)))
    }

    /// The letter that brings a value, and where the value starts.
    fn place(&self, program: usize, step: StepId, buffer: BufferId) -> Result<(&Incoming, usize)> {
        let letter = self.programs[program].incoming.get(&step);
        let value = letter.and_then(|letter| {
            let value = letter.values.iter().find(|(id, _)| *id == buffer);
            value.map(|(_, place)| (letter, *place))
        });
        value.with_context(|| format!("{buffer} does not come for {step}"))
    }

    /// Where a step tells that values of other devices have been taken; `None` where nobody asks.
    pub(super) fn taken(&self, program: usize, step: StepId) -> Option<Place> {
        let letters = &self.programs[program];
        let letter = letters.incoming.get(&step).filter(|letter| !letter.values.is_empty())?;
        letters.is_shared.then(|| self.at(Some(letter.taken), None))
    }

    /// Where a step sends its values; and where it tells that it is done, if it sends none and others wait for it.
    pub(super) fn outgoing(
        &self,
        program: usize,
        step: StepId,
    ) -> (Vec<(BufferId, Place)>, Option<Place>) {
        let Some(letter) = self.programs[program].outgoing.get(&step) else {
            return (Vec::new(), None);
        };
        let place = |sent: &Sent| self.at(Some(sent.flags), Some(sent.place));
        let values = letter.values.iter().map(|sent| (sent.buffer, place(sent))).collect();
        let flag = self.at(Some(letter.flag), None);
        (values, letter.values.is_empty().then_some(flag))
    }

    /// Whether a step sends a letter.
    pub(super) fn sends(&self, program: usize, step: StepId) -> bool {
        self.programs[program].outgoing.contains_key(&step)
    }

    /// The buffers that come with a step's letter.
    pub(super) fn expected(&self, program: usize, step: StepId) -> Vec<BufferId> {
        let letter = self.programs[program].incoming.get(&step);
        letter.iter().flat_map(|letter| &letter.values).map(|(buffer, _)| *buffer).collect()
    }

    /// Writes a value that comes with a step's letter.
    ///
    /// # Errors
    /// When there is no such value, or it is longer than its place.
    pub(super) fn put(
        &mut self,
        program: usize,
        step: StepId,
        buffer: BufferId,
        bytes: &[u8],
    ) -> Result<()> {
        let (_, place) = self.place(program, step, buffer)?;
        ensure!(place + bytes.len() <= self.region.bytes(), "{buffer} outgrows its place");
        self.write(place, bytes);
        Ok(())
    }

    /// Hands over a step's letter in run `turn`.
    pub(super) fn deliver(&self, program: usize, step: StepId, turn: u32) {
        if let Some(letter) = self.programs[program].incoming.get(&step) {
            self.pinned.flag(letter.flag).store(turn, Ordering::Release);
        }
    }

    /// Hands over all letters of run `turn`, whatever they hold: the run is over and its launches must end.
    pub(super) fn release(&self, program: usize, turn: u32) {
        for letter in self.programs[program].incoming.values() {
            self.pinned.flag(letter.flag).store(turn, Ordering::Release);
        }
    }

    /// Waits until the values of a step's letter have been taken, where another letter needs their place.
    ///
    /// # Errors
    /// When the device failed, or does not answer after `is_over` says that it should have.
    pub(super) fn wait_until_taken(
        &self,
        program: usize,
        step: StepId,
        turn: u32,
        is_over: impl Fn() -> Result<bool>,
    ) -> Result<()> {
        let letters = &self.programs[program];
        match letters.incoming.get(&step) {
            Some(letter) if letters.is_shared && !letter.values.is_empty() => {
                self.wait_for(letter.taken, 1, turn, is_over)
            }
            Some(_) | None => Ok(()),
        }
    }

    /// Waits for a step's letter in run `turn`, of which buffers take `bytes` bytes; hands its values to `read`.
    ///
    /// # Errors
    /// When the device failed, or does not answer after `is_over` says that it should have, or `read` fails.
    pub(super) fn receive(
        &self,
        program: usize,
        step: StepId,
        turn: u32,
        is_over: impl Fn() -> Result<bool>,
        bytes: impl Fn(BufferId) -> usize,
        mut read: impl FnMut(BufferId, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let Some(letter) = self.programs[program].outgoing.get(&step) else { return Ok(()) };
        if letter.values.is_empty() {
            return self.wait_for(letter.flag, 1, turn, is_over);
        }
        for sent in &letter.values {
            let bytes = bytes(sent.buffer);
            self.wait_for(sent.flags, posting_cubes(bytes), turn, &is_over)?;
            ensure!(
                sent.place + bytes <= self.region.bytes(),
                "{} outgrows its place",
                sent.buffer
            );
            // SAFETY: the bytes lie in the region, and the GPU has raised all flags, after which it writes there no
            // more in this run.
            let value = unsafe {
                std::slice::from_raw_parts(self.region.as_ptr().add(sent.place).cast_const(), bytes)
            };
            read(sent.buffer, value)?;
        }
        Ok(())
    }

    /// Waits until neighbouring flags hold the turn.
    fn wait_for(
        &self,
        first: usize,
        flags: usize,
        turn: u32,
        is_over: impl Fn() -> Result<bool>,
    ) -> Result<()> {
        let raised = Cell::new(0);
        let all_are_raised = || {
            let is_raised = |flag: usize| {
                self.pinned.flag(first + flag * size_of::<u32>()).load(Ordering::Acquire) == turn
            };
            while raised.get() < flags && is_raised(raised.get()) {
                raised.set(raised.get() + 1);
            }
            raised.get() == flags
        };
        let mut is_last_look = false;
        while !look_for(SPINNING, LOOKING, all_are_raised) {
            // A device that has failed answers every call with its failure.
            self.context.mem_get_info().context("waiting for the GPU")?;
            ensure!(
                !is_last_look,
                "the GPU did not send what it computed: run it again, and if that happens again tell us, with the plan"
            );
            is_last_look = is_over()?;
        }
        Ok(())
    }

    fn write(&mut self, start: usize, bytes: &[u8]) {
        assert!(start + bytes.len() <= self.region.bytes(), "a letter lies beyond its memory");
        // SAFETY: the bytes lie in the region. The GPU reads there only after a flag or a launch that is yet to come.
        let place =
            unsafe { std::slice::from_raw_parts_mut(self.region.as_ptr().add(start), bytes.len()) };
        copy(bytes, place);
    }

    /// Where the GPU finds flags and a value that start there in the region.
    fn at(&self, flags: Option<usize>, value: Option<usize>) -> Place {
        let address = |start: usize| self.pinned.address() + start as u64;
        // SAFETY: both have room in the region, whose pages stay pinned until the lane's launches have ended; flags,
        // and for a batch's numbers the end of the run before, say which side may use them.
        unsafe { Place::new(flags.map_or(0, address), value.map_or(0, address)) }
    }
}

/// The letters of each program of a GPU, behind `input_bytes` bytes of a run's batch; and the bytes of all.
fn lay_out(device: DeviceId, parts: &[Part<'_>], input_bytes: usize) -> (Vec<Letters>, usize) {
    let mut bytes = input_bytes.next_multiple_of(ALIGNMENT);
    let mut programs: Vec<Letters> =
        parts.iter().map(|part| Letters::new(part, device, &mut bytes)).collect();
    // One program runs at a time: values of all start at the same byte.
    let start = bytes;
    for (letters, part) in programs.iter_mut().zip(parts) {
        bytes = bytes.max(letters.place_values(part.program, start));
    }
    (programs, bytes)
}

impl Letters {
    /// The letters of a GPU's compute lane; their flags take memory from byte `end` on.
    fn new(part: &Part<'_>, device: DeviceId, end: &mut usize) -> Self {
        let mut take = |bytes: u64| {
            let start = *end;
            *end += bytes.next_multiple_of(FLAG_BYTES) as usize;
            start
        };
        let mut letters = Self::default();
        let &Part { program, index, peers, exported } = part;
        let awaited = peers.awaited(index);
        for &id in program.lane(device, Queue::Compute).iter().flat_map(|lane| &lane.steps) {
            let step = &program.steps[id];
            let is_move =
                matches!(step.action, Action::Move { .. }) && peers.reads_on_host(index, id);
            let foreign = |buffer: &&BufferId| program.buffers[**buffer].device != device;
            let read: Vec<BufferId> = if is_move {
                step.reads.iter().filter(foreign).copied().collect()
            } else {
                Vec::new()
            };
            if !read.is_empty() || !peers.waits(index, id).is_empty() {
                let values = read.into_iter().map(|buffer| (buffer, 0)).collect();
                let letter = Incoming { flag: take(FLAG_BYTES), values, taken: take(FLAG_BYTES) };
                letters.incoming.insert(id, letter);
            }
            let sent = step.writes.iter().filter(|&&buffer| exported[buffer]);
            let values: Vec<Sent> = sent
                .map(|&buffer| Sent { buffer, flags: take(SENDING_FLAGS_BYTES), place: 0 })
                .collect();
            if awaited[id] || !values.is_empty() {
                letters.outgoing.insert(id, Outgoing { flag: take(FLAG_BYTES), values });
            }
        }
        letters
    }

    /// Gives values their places from byte `start` on; where they end.
    fn place_values(&mut self, program: &Program, start: usize) -> usize {
        let incoming = self.incoming.values_mut().map(|letter| {
            letter.values.iter_mut().map(|(id, place)| (*id, place)).collect::<Vec<_>>()
        });
        let outgoing = self.outgoing.values_mut().map(|letter| {
            letter.values.iter_mut().map(|sent| (sent.buffer, &mut sent.place)).collect()
        });
        let letters: Vec<Vec<(BufferId, &mut usize)>> = incoming.chain(outgoing).collect();
        let bytes =
            |(buffer, _): &(BufferId, &mut usize)| program.buffers[*buffer].ty.bytes(program.max);
        let sizes: Vec<Vec<u64>> =
            letters.iter().map(|values| values.iter().map(bytes).collect()).collect();
        let places = Places::of(&sizes);
        for (values, starts) in letters.into_iter().zip(&places.starts) {
            for ((_, place), &from) in values.into_iter().zip(starts) {
                *place = start + from as usize;
            }
        }
        self.is_shared = places.is_shared;
        start + places.bytes as usize
    }
}

#[cfg(test)]
mod tests {
    use ::tests::machines::{gpu, linked, numa};
    use ::tests::toys::Toy;
    use compiler::options::{parse_pipeline, parse_tensor_parallel};
    use ir::workspace::RunSizes;

    use super::super::stretches::exported;
    use super::*;
    use crate::load::{GpuDriver, Options};

    /// The bytes of a GPU's letters where no GPUs reach each other, and whether steps of a program share a place.
    fn laid_out(plan: &Plan, device: DeviceId) -> (usize, bool) {
        let options = Options { gpu_driver: GpuDriver::Vulkan, ..Options::default() };
        let peers = Peers::new(plan, &options);
        let programs = plan.programs.iter().enumerate();
        let exported: Vec<_> = programs
            .clone()
            .map(|(index, program)| exported(program, device, &peers, index))
            .collect();
        let part =
            |(index, program)| Part { program, index, peers: &peers, exported: &exported[index] };
        let parts: Vec<Part<'_>> = programs.map(part).collect();
        let (letters, bytes) = lay_out(device, &parts, RunSizes::of(plan).bytes() as usize);
        (bytes, letters.iter().any(|letters| letters.is_shared))
    }

    #[test]
    fn letters_take_what_the_plan_counts() {
        let requests = [
            (1, parse_pipeline("gpu0,numa0").unwrap()),
            (1, parse_pipeline("numa0,gpu0").unwrap()),
            (1, parse_tensor_parallel("gpu0,numa0").unwrap()),
            (2, parse_tensor_parallel("gpu0,gpu1").unwrap()),
            (2, parse_pipeline("gpu0,gpu1,numa0").unwrap()),
        ];
        for (gpus, request) in requests {
            let devices = (0..gpus).map(|ordinal| gpu(ordinal, 1 << 30));
            let machine = linked(devices.chain([numa(0, 1 << 30)]).collect());
            let options = compiler::Options { request, ..compiler::Options::default() };
            let model = Toy::llama().model().unwrap();
            let mut plan = compiler::compile(&model, &machine, &options, &mut |_, _| ()).unwrap();
            for is_large in [false, true] {
                if is_large {
                    plan.programs.iter_mut().for_each(|program| program.max.tokens <<= 14);
                }
                for device in plan.machine.devices.ids().take(gpus as usize) {
                    let (bytes, is_shared) = laid_out(&plan, device);
                    let counted = letters::letter_bytes(&plan, device) as usize;
                    assert_eq!(is_shared, is_large);
                    // Of flags more are counted than steps have, and places that fewer letters would have of their own.
                    let steps = plan.programs.iter().map(|program| program.steps.len()).max();
                    let flags = 4 * FLAG_BYTES * letters::most_programs(&plan);
                    let own = if is_large { letters::OWN_PLACES_BYTES } else { 0 };
                    let most = bytes.max(own as usize) + steps.unwrap() * flags as usize;
                    assert!((bytes..=most).contains(&counted), "{bytes} of {counted}");
                }
            }
        }
    }
}
