//! The compiler's product and the executor's whole input: `plan.ron`.

mod elsewhere;
mod peers;

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::asked::Asked;
use crate::forecast::Forecast;
use crate::graph::Cause;
use crate::id::{
    BufferId, CacheId, CauseId, CollectiveId, DeviceId, Few, FileId, RopeId, StepId, Table,
    WeightId,
};
use crate::layout::Move;
use crate::machine::{DeviceKind, Machine};
use crate::model::CheckpointFile;
use crate::op::{Op, Rope};
use crate::packing::{has_panels, held_bytes, packed_type};
use crate::ron_text::{self, Version};
use crate::tensor::{DType, Extent, Format, TensorType};
use crate::weight::Source;
use crate::workspace::product_format;

/// Raised whenever a field changes meaning; other plans are refused.
pub const VERSION: u32 = 9;

/// Fetched weights begin at multiples of this: what vendor libraries ask of a matrix.
pub const FETCH_ALIGNMENT: u64 = 256;

/// What the tokens of a cache's block are a multiple of: kernels attend to these at once.
pub(crate) const CACHE_TILE_TOKENS: u32 = 16;

/// A model placed on a machine, with a proven schedule for each phase.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// [`VERSION`] of the compiler that wrote it.
    pub version: u32,
    /// What is run.
    pub model: ModelInfo,
    /// What was asked of the compiler.
    pub asked: Asked,
    /// The machine it was made for.
    pub machine: Machine,
    /// Files that weights are read from.
    pub files: Table<FileId, CheckpointFile>,
    /// Weights, each on one device: its home.
    pub weights: Table<WeightId, Weight>,
    /// Paged KV caches, each on one device.
    pub caches: Table<CacheId, Cache>,
    /// Rotary embeddings.
    pub ropes: Table<RopeId, Rope>,
    /// Schedules over the same weights and caches: prefill by falling number of tokens, then decode by rising number of
    /// sequences.
    pub programs: Vec<Program>,
    /// Whether launches of prompts are captured as those of decodes are, where they can be
    /// ([`crate::captured::can_include_prompts()`]): not where GPUs lack the memory for that.
    pub captures_prompts: bool,
    /// Causes of placements and moves.
    pub causes: Table<CauseId, Cause>,
    /// What the compiler expects.
    pub forecast: Forecast,
}

/// What a plan runs, and its limits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelInfo {
    /// Name for people.
    pub name: String,
    /// The class of the language model that its configuration names.
    pub architecture: String,
    /// Folder with tokenizer and configuration; absolute, or relative to the folder of the plan.
    pub folder: PathBuf,
    /// Features of the logits.
    pub vocabulary: u32,
    /// The most tokens of one sequence, prompt and answer.
    pub context: u32,
    /// The most sequences at once.
    pub max_sequences: u32,
    /// Tokens of one cache block.
    pub block_tokens: u32,
    /// Blocks of every cache. Block ids are shared by all caches.
    pub blocks: u32,
}

/// One weight, or a slice of one, as one device holds it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Weight {
    /// The checkpoint's name for it.
    pub name: String,
    /// Its home: where it is held.
    pub device: DeviceId,
    /// How it is held: vectors as `F32`, matrices in the compute format.
    pub format: Format,
    /// One axis for a scale or bias, two for a matrix `[outputs, inputs]`, three for a stack of matrices.
    pub shape: Vec<u32>,
    /// Whether a GPU holds a packed matrix row after row as well, as the vendor's library takes it for prompts; else
    /// runs of more rows than are multiplied as it lies ([`crate::workspace::most_rows_on()`]) unpack it each time.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub also_unpacked: bool,
    /// One source for the whole weight; or, for a stack, one for each row of its first axis.
    pub sources: Vec<Source>,
}

impl Weight {
    /// Its elements; at most `u64::MAX`.
    pub fn elements(&self) -> u64 {
        self.shape.iter().map(|&size| u64::from(size)).fold(1, u64::saturating_mul)
    }
}

/// Keys and values of one layer on one device.
///
/// Keys and values are one region each, `[blocks, kv_heads, block_tokens, head_dim]`; of bytes each block ends with its
/// scales, `[kv_heads, block_tokens]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cache {
    /// The layer it belongs to.
    pub name: String,
    /// Where it is held.
    pub device: DeviceId,
    /// Type of its elements.
    pub dtype: DType,
    /// Key and value heads on this device.
    pub kv_heads: u32,
    /// Features of one head.
    pub head_dim: u32,
}

/// A static schedule, run from start to end for each batch of tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Program {
    /// `prefill`, `prefill64`, `decode1`, `decode8`.
    pub name: String,
    /// What kind of batch it is for.
    pub phase: Phase,
    /// The most tokens and wanted rows of one run.
    pub max: Extent,
    /// The most sequences of one run.
    pub max_sequences: u32,
    /// Tensors that steps exchange.
    pub buffers: Table<BufferId, Buffer>,
    /// All steps. Ids say nothing about order; lanes do.
    pub steps: Table<StepId, Step>,
    /// One for each device queue; each runs its steps in order.
    pub lanes: Vec<Lane>,
    /// Where the logits are at the end. No step frees it.
    pub output: BufferId,
}

/// Kinds of batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Phase {
    /// Any number of tokens of each sequence.
    Prefill,
    /// One token of each sequence.
    Decode,
}

/// One tensor on one device, from the step that writes it to the step that frees it.
///
/// A NUMA node allocates it when its step runs; on a GPU its place follows from the plan, see [`crate::frame`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Buffer {
    /// Where it is.
    pub device: DeviceId,
    /// What this device holds of the value: a slice where the value is split.
    pub ty: TensorType,
}

/// One queue of one device: a thread that runs steps in order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lane {
    /// The device.
    pub device: DeviceId,
    /// Which of its queues.
    pub queue: Queue,
    /// Steps in the order they run.
    pub steps: Vec<StepId>,
}

/// Queues of a device. NUMA nodes do their copies in the compute queue: their cores do both.
///
/// Activations are moved in compute queues, so that none of them ever stands behind a layer's weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Queue {
    /// Computes.
    Compute,
    /// Fetches weights beside it.
    Copy,
}

/// One action of the schedule.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Step {
    /// The layer it belongs to.
    pub name: Arc<str>,
    /// What is done.
    pub action: Action,
    /// Buffers read, in the order the action expects.
    pub reads: Few<BufferId>,
    /// Buffers written.
    pub writes: Few<BufferId>,
    /// Buffers that end with this step.
    pub frees: Few<BufferId>,
    /// Steps of other lanes that must end first; lane order is implied.
    pub waits: Few<StepId>,
    /// Predicted time in a run of [`Program::estimated()`] (decode: with half of the context cached).
    pub estimate_nanos: u64,
    /// Why it is here.
    pub cause: CauseId,
}

/// What a step does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum Action {
    /// Computes on buffers of its own device.
    ///
    /// A linear's or a mixture's matrices may be at home on a NUMA node: after its ordinary operands the step then
    /// reads one buffer for each of [`Plan::fetched`], in that order. A GPU's table may be, too: see [`Plan::reached`].
    Run(Op),
    /// Brings a weight from the NUMA node that is its home to a GPU, as it is packed there, for one run.
    ///
    /// The bytes lie in the device's fetch window, which is one region and belongs to one run at a time: a run's
    /// fetches start when no step of the run before it will read the window any more.
    Fetch {
        /// The weight; it has two axes or more.
        weight: WeightId,
        /// Where its bytes begin in the window, a multiple of [`FETCH_ALIGNMENT`].
        offset: u64,
    },
    /// One device's part of a movement: it reads buffers of the members, in their order, and writes its own.
    Move {
        /// The movement.
        movement: Move,
        /// Same for all steps of one collective; `None` for a transfer or a local slice.
        #[serde(deserialize_with = "crate::ron_text::written")]
        collective: Option<CollectiveId>,
        /// This device's slice, `(start, size)` along the movement's axis, where it makes one.
        #[serde(deserialize_with = "crate::ron_text::written")]
        slice: Option<(u32, u32)>,
        /// How it is made.
        #[serde(default, skip_serializing_if = "Algorithm::is_direct")]
        algorithm: Algorithm,
    },
}

/// Ways to make a movement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Algorithm {
    /// Every member reads what it needs of the others, or is sent it by them.
    #[default]
    Direct,
    /// The vendor's library of collectives makes a sum over GPUs, of which each passes on a part: in prefill alone,
    /// since no graph captures it.
    Library,
}

impl Algorithm {
    /// Whether it is [`Algorithm::Direct`].
    pub fn is_direct(&self) -> bool {
        matches!(self, Self::Direct)
    }
}

impl Plan {
    /// Reads a plan. Fails on text that is not a plan of this version; soundness is for [`crate::check`].
    pub fn from_ron(text: &str) -> Result<Self> {
        ron_text::read(
            text,
            &Version {
                number: VERSION,
                subject: "the plan has",
                otherwise: "not a plan",
                remedy: "compile it again",
            },
            |plan: &Self| plan.version,
        )
    }

    /// The smallest program of a phase among those that take the most in one run, of `tokens` tokens of `sequences`
    /// sequences, and of their logits where `wants_all`.
    pub fn program_for(
        &self,
        phase: Phase,
        tokens: usize,
        sequences: usize,
        wants_all: bool,
    ) -> Option<usize> {
        let takes = |program: &Program| {
            let Extent { tokens: most, rows } = program.max;
            let most = if wants_all { most.min(rows) } else { most };
            (tokens.min(most as usize), sequences.min(program.max_sequences as usize))
        };
        let size = |program: &Program| (program.max.tokens, program.max_sequences);
        let programs = self.programs.iter().enumerate();
        let of_phase = programs.filter(|(_, program)| program.phase == phase);
        let best = of_phase.max_by_key(|(_, program)| (takes(program), Reverse(size(program))));
        best.map(|(index, _)| index)
    }

    /// Bytes that a weight takes at home; at most `u64::MAX`, and 0 where it has no home.
    pub fn weight_bytes(&self, weight: &Weight) -> u64 {
        self.machine.devices.get(weight.device).map_or(0, |device| weight.bytes(&device.kind))
    }

    /// Bytes of a packed matrix of a GPU row after row, in [`product_format`]; at most `u64::MAX`, and `None` for what
    /// no GPU holds packed or could hold otherwise.
    pub fn unpacked_bytes(&self, weight: &Weight) -> Option<u64> {
        let kind = &self.machine.devices.get(weight.device)?.kind;
        let [rows, columns] = *weight.shape else { return None };
        let format = product_format(weight.format, kind.has_library());
        let is_packed = |format| has_panels(kind, format, &weight.shape);
        (kind.is_gpu() && is_packed(weight.format) && !is_packed(format))
            .then(|| format.bytes(u64::from(rows), u64::from(columns)))
    }

    /// Whether any program chooses experts of a mixture.
    pub fn has_experts(&self) -> bool {
        let mut steps = self.programs.iter().flat_map(|program| program.steps.rows());
        steps.any(|step| matches!(step.action, Action::Run(Op::Experts(_))))
    }

    /// The GPUs that compute or fetch in any program.
    pub(crate) fn working_gpus(&self) -> BTreeSet<DeviceId> {
        let lanes = self.programs.iter().flat_map(|program| &program.lanes);
        let is_gpu = |id: &DeviceId| {
            self.machine.devices.get(*id).is_some_and(|device| device.kind.is_gpu())
        };
        lanes.map(|lane| lane.device).filter(is_gpu).collect()
    }

    /// The queues that work in any program, in the order of devices. As many runs may be under way at a time, and one
    /// more.
    pub fn queues(&self) -> BTreeSet<(DeviceId, Queue)> {
        let lanes = self.programs.iter().flat_map(|program| &program.lanes);
        lanes.map(|lane| (lane.device, lane.queue)).collect()
    }

    /// Fingerprints of the checkpoint's files, in order: the same for the same checkpoint wherever it lies.
    pub fn fingerprints(&self) -> Vec<u64> {
        self.files.rows().iter().map(|file| file.fingerprint).collect()
    }

    /// Writes a plan; the same plan gives the same bytes.
    pub fn to_ron(&self) -> Result<String> {
        ron_text::write(self, 4)
    }
}

impl Program {
    /// The run that estimates are for: of the most tokens, and of as many rows of logits as are wanted behind a prompt or
    /// by a decode. Texts are scored by more rows of a prompt.
    pub fn estimated(&self) -> Extent {
        match self.phase {
            Phase::Prefill => Extent { rows: 1, ..self.max },
            Phase::Decode => self.max,
        }
    }

    /// The lane of a queue of a device; `None` where it does nothing.
    pub fn lane(&self, device: DeviceId, queue: Queue) -> Option<&Lane> {
        self.lanes.iter().find(|lane| lane.device == device && lane.queue == queue)
    }

    /// What a device computes, in the order of its lanes.
    pub fn ops_of(&self, device: DeviceId) -> impl Iterator<Item = &Op> {
        let lanes = self.lanes.iter().filter(move |lane| lane.device == device);
        lanes.flat_map(|lane| &lane.steps).filter_map(|&step| {
            let Action::Run(op) = &self.steps.get(step)?.action else { return None };
            Some(op)
        })
    }
}

impl Weight {
    /// Bytes it takes on a device of that kind; at most `u64::MAX`.
    pub fn bytes(&self, kind: &DeviceKind) -> u64 {
        held_bytes(kind, self.format, &self.shape)
    }

    /// The type of a buffer that it is fetched to; `None` for a vector.
    pub fn packed_type(&self) -> Option<TensorType> {
        packed_type(self.format, &self.shape)
    }
}

impl Cache {
    /// Bytes of `blocks` blocks of keys and values; at most `u64::MAX`.
    pub fn bytes(&self, blocks: u32, block_tokens: u32) -> u64 {
        [self.kv_heads, blocks, block_tokens]
            .into_iter()
            .map(u64::from)
            .fold(2 * self.dtype.head_bytes(self.head_dim), u64::saturating_mul)
    }
}
