//! Launches that GPUs capture and replay: for how many kinds of runs they are held, and the memory that they take.
//!
//! A captured launch takes memory of the device, from the driver, until its graph is dropped; the driver keeps it for
//! the next one. So the executor holds a number of graphs that is known, and what they take is counted.

use crate::id::{BufferId, DeviceId, Id as _, StepId, WeightId};
use crate::machine::DeviceKind;
use crate::op::{Linear, Products};
use crate::packing::gpu_has_panels;
use crate::plan::{Action, Buffer, Phase, Plan, Program, Queue, Step, Weight};
use crate::tensor::DType;
use crate::workspace::{
    FLOAT_ROWS, MAX_FUSED_ROWS, MAX_PACKED_ROWS, MAX_PLANE_ROWS, is_cast, most_float_rows_of,
    most_rows_on, piece_rows,
};

/// Kinds of runs held beside those of `SEQUENCE_KINDS`: lengths of prompts, near and far contexts.
const OTHER_KINDS: u64 = 16;
/// Decodes of as many sequences come with near and with far contexts, and with whole logits or the most likely ones.
/// Seldom more than two of these are in use.
const SEQUENCE_KINDS: u64 = 2;

/// The most kinds of runs whose launches are held at one time: beyond these, the least recently used are dropped.
pub fn most_kinds(plan: &Plan) -> u64 {
    let sequences = plan.programs.iter().map(|program| u64::from(program.max_sequences)).max();
    OTHER_KINDS.saturating_add(sequences.unwrap_or(0).saturating_mul(SEQUENCE_KINDS))
}

/// Whether prompts of up to [`most_prompt_tokens()`] tokens are captured.
pub fn includes_prompts(plan: &Plan) -> bool {
    plan.captures_prompts && can_include_prompts(plan)
}

/// Whether they could be, but GPUs lack the memory for that.
pub fn lacks_room_for_prompts(plan: &Plan) -> bool {
    !plan.captures_prompts && can_include_prompts(plan)
}

/// Whether they can be.
///
/// - Where GPUs have all they need, unless the vendor's library of collectives sums, which no graph captures.
/// - Beside a host, where one GPU works, with no part of a mixture on the host and no borrowed cache: several GPUs, and
///   one that waits for experts, wait longer than launches take, and what brings a borrowed cache is launched anew for
///   each run.
pub fn can_include_prompts(plan: &Plan) -> bool {
    match Beside::of(plan) {
        Beside::Nothing => plan.library_sums().next().is_none(),
        Beside::Fetches | Beside::Nodes => {
            plan.working_gpus().len() == 1 && !plan.borrows() && !plan.has_experts()
        }
    }
}

/// Tokens of the longest prompts that are captured on a GPU that multiplies all of them by kernels of its own, which take
/// up to so many rows at a time: longer ones are more launches, and take the host a fraction of the GPU's time.
pub const MOST_TOKENS_OF_KERNELS: u32 = MAX_PACKED_ROWS;

/// Tokens of the longest prompts that are captured where a plan [`includes_prompts()`]: all that one run takes, where
/// GPUs have all they need and the vendor's library, which makes as many launches of any. Beside a host, whose letters wait
/// for each other in all but short programs, memory is scarce.
pub fn most_prompt_tokens(plan: &Plan) -> u32 {
    match Beside::of(plan) {
        Beside::Nodes => most_padded_tokens(plan),
        Beside::Nothing if all_gpus(plan, DeviceKind::has_library) => {
            let prompts = plan.programs.iter().filter(|program| program.phase == Phase::Prefill);
            prompts.map(|program| program.max.tokens).max().unwrap_or(0)
        }
        Beside::Nothing | Beside::Fetches => MOST_TOKENS_OF_KERNELS,
    }
}

/// What else works beside the launches of GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Beside {
    Nothing,
    Fetches,
    Nodes,
}

impl Beside {
    /// The most of it in any program.
    fn of(plan: &Plan) -> Self {
        let lanes = plan.programs.iter().flat_map(|program| &program.lanes);
        let working = lanes.filter(|lane| !lane.steps.is_empty()).map(|lane| {
            match (plan.machine.devices.get(lane.device), lane.queue) {
                (Some(device), Queue::Compute) if device.kind.is_gpu() => Self::Nothing,
                (Some(device), Queue::Copy) if device.kind.is_gpu() => Self::Fetches,
                _ => Self::Nodes,
            }
        });
        working.max().unwrap_or(Self::Nothing)
    }
}

/// Tokens of the longest prompts that take hardly longer with a few tokens more, where a plan [`includes_prompts()`] and
/// its matrices are packed: to read matrices takes longer than to multiply.
pub fn most_padded_tokens(plan: &Plan) -> u32 {
    if all_gpus(plan, DeviceKind::has_warpgroups) { MAX_FUSED_ROWS } else { MAX_PLANE_ROWS }
}

/// Whether all GPUs that work have something.
fn all_gpus(plan: &Plan, has: impl Fn(&DeviceKind) -> bool) -> bool {
    let gpus = plan.working_gpus();
    gpus.iter().all(|&id| plan.machine.devices.get(id).is_some_and(|device| has(&device.kind)))
}

/// Bytes that captured launches take on a device, at most; 0 where none is captured.
pub fn captured_bytes(plan: &Plan, device: DeviceId) -> u64 {
    let kind = plan.machine.devices.get(device).map(|device| &device.kind);
    let Some(DeviceKind::Gpu { launch_bytes, .. }) = kind else { return 0 };
    let has_prompts = includes_prompts(plan);
    let captured = |program: &&Program| program.phase == Phase::Decode || has_prompts;
    let programs = plan.programs.iter().filter(captured);
    let launches = programs.map(|program| launches(plan, program, device)).max().unwrap_or(0);
    launches.saturating_mul(most_kinds(plan)).saturating_mul(*launch_bytes)
}

/// The most launches of a captured run on a GPU.
fn launches(plan: &Plan, program: &Program, device: DeviceId) -> u64 {
    /// The batch's numbers, the start of sums, up to four for the most likely tokens, and the end.
    const OF_RUN: u64 = 7;
    let Some(lane) = program.lane(device, Queue::Compute) else { return 0 };
    let others = program
        .lanes
        .iter()
        .filter(|other| (other.device, other.queue) != (device, Queue::Compute));
    let steps_of_others = others.flat_map(|other| &other.steps);
    let mut is_told = vec![false; program.steps.len()];
    for &wait in
        steps_of_others.filter_map(|&id| program.steps.get(id)).flat_map(|step| &step.waits)
    {
        if let Some(is_told) = is_told.get_mut(wait.index()) {
            *is_told = true;
        }
    }
    let of_step = |id: &StepId| {
        let step = program.steps.get(*id)?;
        let waiting = u64::from(!step.waits.is_empty());
        // Each value is sent by itself.
        let telling = if is_told[id.index()] { step.writes.len().max(1) as u64 } else { 0 };
        Some(waiting + telling + Launches { plan, program, step, device }.count())
    };
    let of_steps: u64 = lane.steps.iter().filter_map(of_step).sum();
    if of_steps == 0 { 0 } else { OF_RUN + of_steps }
}

/// What a step of a GPU launches beside what crosses devices.
struct Launches<'a> {
    plan: &'a Plan,
    program: &'a Program,
    step: &'a Step,
    device: DeviceId,
}

impl Launches<'_> {
    /// The most of them.
    fn count(&self) -> u64 {
        match &self.step.action {
            Action::Run(op) => match op.products() {
                Some(Products::Linear(linear)) => self.of_linear(linear),
                // What comes to the cache, the parts of a long context, and their merging.
                Some(Products::Attention(_)) => 3,
                // Slots sorted and tiles listed, inputs narrowed, two products, the slots summed.
                Some(Products::Experts(_)) => 6,
                None => 1,
            },
            // Each value is taken, and added or put in its place.
            Action::Move { .. } => 2 * self.step.reads.len() as u64,
            Action::Fetch { .. } => 0,
        }
    }

    /// Neighbours that lie alike are multiplied in one launch; without the vendor's library, which may be missing where
    /// the plan runs, as many rows at a time as kernels take.
    fn of_linear(&self, linear: &Linear) -> u64 {
        let lies = |weight: &Weight| {
            (weight.format, weight.device, gpu_has_panels(weight.format, &weight.shape))
        };
        let mut kinds: Vec<_> =
            linear.weights.iter().map(|&id| self.plan.weights.get(id).map(lies)).collect();
        kinds.dedup();
        let is_narrow =
            |buffer: Option<&Buffer>| buffer.is_some_and(|buffer| buffer.ty.dtype != DType::F32);
        let buffer = |id: Option<&BufferId>| self.program.buffers.get(*id?);
        let (input, output) = (buffer(self.step.reads.first()), buffer(self.step.writes.first()));
        let rows = input.and_then(|input| input.ty.shape.first());
        let rows = rows.map_or(u32::MAX, |rows| rows.size(self.program.max));
        // Few rows of f32 are taken as they are; any other input is first brought in its form, but for small matrices.
        let most_floats = most_float_rows_of(self.plan, linear);
        let is_taken = rows <= most_floats && !is_narrow(input) && !is_cast(linear);
        let of_part = kinds.len() as u64 * if is_taken { 1 } else { 2 };
        let (of_kernels, of_library) = match self.program.phase {
            Phase::Prefill => {
                let rows = rows.min(most_prompt_tokens(self.plan));
                (rows.min(MOST_TOKENS_OF_KERNELS), rows)
            }
            Phase::Decode => (rows, rows),
        };
        let by_kernels = of_part * self.parts(linear, of_kernels);
        by_kernels.max(self.by_library(linear, of_library)) + u64::from(is_narrow(output))
    }

    /// With the vendor's library: casts of the input, and for each matrix the unpacking and the product of each piece
    /// and what follows it.
    fn by_library(&self, linear: &Linear, rows: u32) -> u64 {
        /// A product may begin with zeros, and end with the sum of its parts.
        const OF_PRODUCT: u64 = 3;
        let Plan { machine, weights, .. } = self.plan;
        let kind = machine.devices.get(self.device).map(|device| &device.kind);
        let Some(kind) = kind.filter(|kind| kind.has_library()) else { return 0 };
        let weights = linear.weights.iter().filter_map(|&id| weights.get(id));
        let sizes = |weight: &Weight| {
            let size = |dim: Option<&u32>| dim.copied().unwrap_or(1);
            [size(weight.shape.first()), size(weight.shape.last())]
        };
        // Of prompts what is held unpacked as well is the library's from fewer rows on.
        let most = match self.program.phase {
            Phase::Prefill => MAX_FUSED_ROWS,
            Phase::Decode => u32::MAX,
        };
        let is_own =
            |weight: &Weight| rows <= most.min(most_rows_on(kind, weight.format, sizes(weight)[1]));
        if rows <= FLOAT_ROWS || weights.clone().all(is_own) {
            return 0;
        }
        let of_matrix = |weight: &Weight| {
            let [outputs, inputs] = sizes(weight);
            let (pieces, unpacked) = match weight.format.float() {
                Some(_) => (1, 0),
                None => (u64::from(outputs.div_ceil(piece_rows(outputs, inputs).max(1))), 1),
            };
            // The cast is made anew where the format of products changes.
            1 + pieces * (unpacked + OF_PRODUCT) + 1
        };
        weights.map(of_matrix).sum()
    }

    /// Parts of `rows` rows that are multiplied one after another.
    fn parts(&self, linear: &Linear, rows: u32) -> u64 {
        /// What is launched for a matrix in f16 or f32 without the library, half of which are counted for a part: a
        /// cast, the unpacking, the product and what follows it.
        const OF_FLOATS: u64 = 2;
        let Plan { machine, weights, .. } = self.plan;
        let of_matrix = |&id: &WeightId| {
            let weight = weights.get(id)?;
            let kind = &machine.devices.get(self.device)?.kind;
            if rows <= FLOAT_ROWS {
                return None;
            }
            let columns = weight.shape.last().copied().unwrap_or(1);
            let most = most_rows_on(kind, weight.format, columns);
            Some(if most > FLOAT_ROWS { u64::from(rows.div_ceil(most)) } else { OF_FLOATS })
        };
        linear.weights.iter().filter_map(of_matrix).max().unwrap_or(1)
    }
}
