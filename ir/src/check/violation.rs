//! What can be wrong with a plan.

use std::fmt;
use std::sync::Arc;

use crate::check::Scope;
use crate::check::order::MAX_LANES;
use crate::id::{BufferId, CacheId, CollectiveId, RopeId, StepId, WeightId};
use crate::plan::Queue;

/// A step as people find it: its row, its layer and its program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepName {
    /// Row of the program's steps.
    pub step: StepId,
    /// The layer it belongs to.
    pub name: Arc<str>,
    /// The program.
    pub program: String,
}

/// One way in which a plan is unsound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Violation {
    /// An id names no row.
    Dangling {
        /// What carries the id.
        holder: String,
        /// The id.
        id: String,
    },
    /// Two devices, programs or processors of a device cannot be told apart.
    DuplicateName {
        /// What they are.
        kind: &'static str,
        /// Their name.
        name: String,
    },
    /// A NUMA device has no processors to run on.
    NoProcessors {
        /// Name of the device.
        device: String,
    },
    /// Two devices of the machine are one, or the limits of the model contradict each other.
    Limits {
        /// What is wrong.
        problem: String,
    },
    /// A program is not one of falling prefills followed by rising decodes, or has an impossible extent.
    Phases {
        /// The program.
        program: String,
        /// What is wrong.
        problem: String,
    },
    /// A rotary embedding is malformed.
    Rope {
        /// The rope.
        rope: RopeId,
        /// What is wrong.
        problem: String,
    },
    /// A cache is malformed.
    Cache {
        /// The cache.
        cache: CacheId,
        /// Its layer.
        name: String,
        /// What is wrong.
        problem: String,
    },
    /// A weight's shape, format or sources are malformed.
    Weight {
        /// The weight.
        weight: WeightId,
        /// The checkpoint's name for it.
        name: String,
        /// What is wrong.
        problem: String,
    },
    /// A program has more lanes than any host has queues.
    TooManyLanes {
        /// The program.
        program: String,
        /// How many it has.
        lanes: usize,
    },
    /// A copy queue has a lane and fetches nothing.
    IdleLane {
        /// The program.
        program: String,
        /// Index of the lane.
        lane: usize,
    },
    /// Two lanes are the same queue of one device.
    DuplicateLane {
        /// The program.
        program: String,
        /// Position of the second among the program's lanes.
        lane: usize,
    },
    /// A step is in no lane, or in several, or several times in one.
    NotInOneLane {
        /// The step.
        step: StepName,
        /// How often lanes name it.
        times: usize,
    },
    /// A step does in a queue what that queue is not for, or a NUMA device has a queue beside its compute queue.
    WrongQueue {
        /// The step.
        step: StepName,
        /// The queue.
        queue: Queue,
    },
    /// Lane order, waits and collectives form a cycle.
    Deadlock {
        /// A step of the cycle.
        step: StepName,
    },
    /// A step touches a buffer of a device that it may not touch.
    ForeignBuffer {
        /// The step.
        step: StepName,
        /// The buffer.
        buffer: BufferId,
    },
    /// A step computes with a weight of another device that was not fetched for it.
    ForeignWeight {
        /// The step.
        step: StepName,
        /// The weight.
        weight: WeightId,
    },
    /// A step fetches a weight that no NUMA node holds.
    NothingToFetch {
        /// The step.
        step: StepName,
        /// The weight.
        weight: WeightId,
    },
    /// A step reads a fetched weight that it does not compute with.
    StrangeWeight {
        /// The step.
        step: StepName,
        /// The buffer with the weight.
        buffer: BufferId,
    },
    /// A weight is fetched to bytes of the window where another may still be read.
    Overwrite {
        /// The step that fetches.
        step: StepName,
        /// The buffer of the other weight.
        buffer: BufferId,
    },
    /// A step computes with a cache of another device.
    ForeignCache {
        /// The step.
        step: StepName,
        /// The cache.
        cache: CacheId,
    },
    /// A move needs a link that the machine does not have.
    NoLink {
        /// The step.
        step: StepName,
        /// Name of the sending device.
        from: String,
        /// Name of the receiving device.
        to: String,
    },
    /// Two steps touch a buffer, one of them changing it, in no fixed order.
    Race {
        /// One of the steps.
        first: StepName,
        /// The other.
        second: StepName,
        /// The buffer.
        buffer: BufferId,
    },
    /// A step reads a buffer before it is written.
    ReadBeforeWrite {
        /// The step.
        step: StepName,
        /// The buffer.
        buffer: BufferId,
    },
    /// A step reads or writes a buffer that has ended.
    AfterFree {
        /// The step.
        step: StepName,
        /// The buffer.
        buffer: BufferId,
    },
    /// A buffer is written a second time.
    WrittenTwice {
        /// The second writer.
        step: StepName,
        /// The buffer.
        buffer: BufferId,
    },
    /// A buffer is freed a second time.
    FreedTwice {
        /// The second step that frees it.
        step: StepName,
        /// The buffer.
        buffer: BufferId,
    },
    /// No step writes a buffer.
    NeverWritten {
        /// The program.
        program: String,
        /// The buffer.
        buffer: BufferId,
    },
    /// No step frees a buffer, and it is not the output.
    Leak {
        /// The program.
        program: String,
        /// The buffer.
        buffer: BufferId,
    },
    /// A step frees the output.
    OutputFreed {
        /// The step.
        step: StepName,
    },
    /// A collective is not one alike step on each member.
    Collective {
        /// The program.
        program: String,
        /// The collective.
        collective: CollectiveId,
        /// What is wrong.
        problem: String,
    },
    /// Two lanes issue two collectives in different orders.
    CollectiveOrder {
        /// The program.
        program: String,
        /// One of the collectives.
        first: CollectiveId,
        /// The other.
        second: CollectiveId,
    },
    /// Reads, writes, weights or numbers of a step do not fit its action.
    Shape {
        /// The step.
        step: StepName,
        /// What is wrong.
        problem: String,
    },
    /// Two steps of a program append to one cache.
    CacheWrittenTwice {
        /// The second step.
        step: StepName,
        /// The cache.
        cache: CacheId,
    },
    /// A step appends to the cache of another layer.
    StrangeCache {
        /// The step.
        step: StepName,
        /// The cache.
        cache: CacheId,
    },
    /// Programs attend, but one of them not to every cache.
    UnusedCache {
        /// The program.
        program: String,
        /// The cache.
        cache: CacheId,
    },
    /// The output is not the logits.
    Output {
        /// The program.
        program: String,
        /// What is wrong.
        problem: String,
    },
    /// A device would hold more bytes than it has.
    Memory {
        /// Name of the device.
        device: String,
        /// All that counts there: weights, caches, the most buffers at one time, the window of fetched weights, scratch
        /// memory, letters, and what drivers and captured launches take.
        needed_bytes: u64,
        /// What the device has.
        capacity_bytes: u64,
    },
}

impl Scope<'_> {
    pub(super) fn name(&self, step: StepId) -> StepName {
        let name = self.program.steps.get(step).map(|step| step.name.clone()).unwrap_or_default();
        StepName { step, name, program: self.program.name.clone() }
    }
}

/// `s12 (layers.0.q) of prefill`.
impl fmt::Display for StepName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}) of {}", self.step, self.name, self.program)
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dangling { holder, id } => write!(f, "{holder} names {id}, which does not exist"),
            Self::DuplicateName { kind, name } => write!(f, "two {kind} are called {name:?}"),
            Self::NoProcessors { device } => write!(f, "{device} has no processors to run on"),
            Self::Limits { problem } => f.write_str(problem),
            Self::Phases { program, problem } | Self::Output { program, problem } => {
                write!(f, "program {program}: {problem}")
            }
            Self::Rope { rope, problem } => write!(f, "{rope}: {problem}"),
            Self::Cache { cache, name, problem } => write!(f, "{cache} ({name}): {problem}"),
            Self::Weight { weight, name, problem } => write!(f, "{weight} ({name}): {problem}"),
            Self::TooManyLanes { program, lanes } => {
                write!(
                    f,
                    "program {program} has {lanes} lanes; at most {MAX_LANES} are checked: use fewer devices"
                )
            }
            Self::DuplicateLane { program, lane } => {
                write!(f, "lane {lane} of {program} is a queue that has a lane already")
            }
            Self::IdleLane { program, lane } => {
                write!(f, "lane {lane} of {program} is a copy queue in which nothing is fetched")
            }
            Self::NotInOneLane { step, times: 0 } => write!(f, "{step} is in no lane"),
            Self::NotInOneLane { step, times } => write!(f, "{step} is in lanes {times} times"),
            Self::WrongQueue { step, queue } => {
                write!(f, "{step} is in a {queue} queue, where it cannot run")
            }
            Self::Deadlock { step } => write!(f, "{step} waits for itself"),
            Self::ForeignBuffer { step, buffer } => {
                write!(f, "{step} touches {buffer}, which is on another device")
            }
            Self::ForeignWeight { step, weight } => {
                write!(f, "{step} computes with {weight}, which is on another device")
            }
            Self::NothingToFetch { step, weight } => {
                write!(f, "{step} fetches {weight}, which no NUMA node holds")
            }
            Self::StrangeWeight { step, buffer } => {
                write!(f, "{step} reads {buffer}, which holds no weight that it computes with")
            }
            Self::Overwrite { step, buffer } => {
                write!(f, "{step} fetches over {buffer}, which may still be read")
            }
            Self::ForeignCache { step, cache } => {
                write!(f, "{step} computes with {cache}, which is on another device")
            }
            Self::NoLink { step, from, to } => {
                write!(f, "{step} moves from {from} to {to}, between which there is no link")
            }
            Self::Race { first, second, buffer } => {
                write!(f, "{first} and {second} touch {buffer} in no fixed order")
            }
            Self::ReadBeforeWrite { step, buffer } => {
                write!(f, "{step} reads {buffer} before it is written")
            }
            Self::AfterFree { step, buffer } => write!(f, "{step} touches {buffer} after its end"),
            Self::WrittenTwice { step, buffer } => {
                write!(f, "{step} writes {buffer}, which is written already")
            }
            Self::FreedTwice { step, buffer } => {
                write!(f, "{step} frees {buffer}, which is freed already")
            }
            Self::NeverWritten { program, buffer } => {
                write!(f, "no step of {program} writes {buffer}")
            }
            Self::Leak { program, buffer } => write!(f, "no step of {program} frees {buffer}"),
            Self::OutputFreed { step } => write!(f, "{step} frees the output"),
            Self::Collective { program, collective, problem } => {
                write!(f, "collective {collective} of {program}: {problem}")
            }
            Self::CollectiveOrder { program, first, second } => {
                write!(f, "lanes of {program} issue {first} and {second} in different orders")
            }
            Self::Shape { step, problem } => write!(f, "{step}: {problem}"),
            Self::CacheWrittenTwice { step, cache } => {
                write!(f, "{step} appends to {cache}, to which another step appends")
            }
            Self::StrangeCache { step, cache } => {
                write!(f, "{step} appends to {cache}, which is another layer's")
            }
            Self::UnusedCache { program, cache } => {
                write!(f, "no step of {program} appends to {cache}")
            }
            Self::Memory { device, needed_bytes, capacity_bytes } => {
                write!(f, "{device} would hold {needed_bytes} bytes and has {capacity_bytes}")
            }
        }
    }
}
