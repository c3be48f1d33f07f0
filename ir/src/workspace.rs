//! Scratch memory of GPUs, read off a plan: the compiler counts it, the executor allocates it once.
//!
//! - Every part is as large as the largest use of it in any program, and no two parts overlap.
//! - What kernels of NUMA nodes take beside buffers is counted elsewhere ([`crate::check::memory`]): they allocate it
//!   when they run.

pub mod experts;
mod rows;
mod run;
pub mod shortlist;

use std::collections::BTreeSet;

use crate::id::{BufferId, DeviceId, Few, RopeId, Table};
use crate::machine::{DeviceKind, Link};
use crate::op::{Attention, Experts, Linear, NormKind, Op, Products, Then};
use crate::packing::{has_panels, has_whole_loads};
use crate::plan::{Action, Plan, Program, Step};
use crate::tensor::{DType, Dim, Format};

pub use rows::{
    FLOAT_ROWS, MAX_FUSED_ROWS, MAX_PACKED_ROWS, MAX_PLANE_ROWS, OperandRows, WARPGROUP_COLUMNS,
    has_warpgroups_for, most_float_rows, most_fused_rows, most_rows_on,
};
pub use run::{RunPart, RunSizes};

/// Bytes, about, of a piece of a packed matrix that is unpacked for the vendor's library: large enough that a product
/// of one piece fills any GPU, small beside the memory of the smallest.
const UNPACKED_BYTES: u64 = 128 << 20;
/// Memory that the vendor's library may use while it multiplies: NVIDIA advises 32 MiB for Hopper.
pub const LIBRARY_BYTES: u64 = 32 << 20;
/// The most parts that decode attention splits a context into: beyond it merging costs more than splitting saves.
pub const ATTENTION_SPLITS: u32 = 64;
/// Parts of contexts, over all tokens and key heads of a run, that keep the largest GPU busy: three cubes on each of
/// up to 170 multiprocessors.
const ATTENTION_CUBES: u32 = 512;
/// What the start of every part, and of every piece of one, is a multiple of, in bytes.
pub const WORKSPACE_ALIGNMENT: u64 = 256;
/// What the rows of a piece are a multiple of; each row makes two bytes of a token's output.
const PIECE_ROWS: u32 = WORKSPACE_ALIGNMENT as u32 / 2;

/// Members of a sum over GPUs at most.
pub const EXCHANGE_MEMBERS: usize = 8;
/// Bytes of a term that GPUs add at a time without the host: rows are whole ones.
const SUMMED_BYTES: u32 = 16;
/// Cubes of a sum over GPUs at most.
pub const EXCHANGE_CUBES: u32 = 256;
/// Bytes of an exchange before its inboxes: flags of eight members, counters, and which run lost a member.
pub const EXCHANGE_HEADER_BYTES: u64 = 20 << 10;
/// Inboxes of an exchange that a member's terms take in turn: four for each of two runs.
pub const EXCHANGE_INBOXES: u32 = 8;
/// Bytes of a term that an inbox takes at a time at most: the time of a piece is many times that of its flags.
pub const MOST_PIECE_BYTES: u64 = 4 << 20;
/// Bytes that an inbox has for small terms at most, those of all peers together: every number has a flag beside it.
const MOST_FLAGGED_BYTES: u64 = 2 << 20;
/// What a term in a piece takes longer than its bytes: two crossings more than one with flags. Measured on two H200s.
pub const CROSSINGS_NANOS: f64 = 3.5e3;
/// Bytes at most of a term that a linear sends by itself.
pub const MOST_JOINED_TERM_BYTES: u64 = 64 << 10;

/// Bytes of each kind of scratch on one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Workspace {
    /// A product's input as its matrix takes it.
    pub input_bytes: u64,
    /// A matrix or some of its rows, one after another: a packed one before the vendor's library multiplies with it.
    pub matrix_bytes: u64,
    /// Products that a gate is multiplied with; outputs of 16 bits that are made in f32 first; queries after their
    /// rotation; what lies between the matrices of a mixture's chosen experts; what a movement brings; lists of the
    /// most likely tokens.
    pub inner_bytes: u64,
    /// What decode attention finds in each part of the contexts.
    pub partial_bytes: u64,
    /// What a run is told: tokens, positions, sequences, rows and cache blocks.
    pub run_bytes: u64,
    /// Cosines and sines of rotary embeddings.
    pub rotation_bytes: u64,
    /// The vendor library's own.
    pub library_bytes: u64,
    /// Where other GPUs leave the terms of sums.
    pub exchange_bytes: u64,
    /// The keys of a cache that is borrowed from a NUMA node; the values take as much again.
    pub borrowed_bytes: u64,
}

impl Workspace {
    /// Bytes of all parts; at most `u64::MAX`.
    pub fn bytes(&self) -> u64 {
        self.parts().into_iter().map(aligned).fold(0, u64::saturating_add)
    }

    fn parts(&self) -> [u64; 10] {
        let Self {
            input_bytes,
            matrix_bytes,
            inner_bytes,
            partial_bytes,
            run_bytes,
            rotation_bytes,
            library_bytes,
            exchange_bytes,
            borrowed_bytes,
        } = *self;
        [
            input_bytes,
            matrix_bytes,
            inner_bytes,
            partial_bytes,
            run_bytes,
            rotation_bytes,
            library_bytes,
            exchange_bytes,
            borrowed_bytes,
            borrowed_bytes,
        ]
    }
}

/// The workspace of each device; empty for those that are no GPU or have no lane.
pub fn workspaces(plan: &Plan) -> Table<DeviceId, Workspace> {
    let exchange = Exchange::of(plan);
    let space = |(id, device): (DeviceId, &crate::machine::Device)| match device.kind {
        DeviceKind::Gpu { library_bytes, .. } => of_device(plan, id, library_bytes, exchange),
        DeviceKind::Numa { .. } => Workspace::default(),
    };
    plan.machine.devices.iter().map(space).collect()
}

/// The workspace of a GPU whose vendor's library takes `library_bytes`; these are 0 where the library is not there:
/// then GPUs without matrix instructions make products in f32, and plans count what that takes.
pub fn workspace(plan: &Plan, device: DeviceId, library_bytes: u64) -> Workspace {
    of_device(plan, device, library_bytes, Exchange::of(plan))
}

fn of_device(plan: &Plan, device: DeviceId, library_bytes: u64, exchange: Exchange) -> Workspace {
    let mut space = Workspace::default();
    let mut ropes = BTreeSet::new();
    let mut has_lane = false;
    let mut members = 0;
    for program in &plan.programs {
        if program.buffers.get(program.output).is_some_and(|output| output.device == device) {
            let rows = RunSizes::of(plan).sequences;
            raise(&mut space.inner_bytes, shortlist::bytes(rows, plan.model.vocabulary));
        }
        for lane in program.lanes.iter().filter(|lane| lane.device == device) {
            has_lane = true;
            for step in lane.steps.iter().filter_map(|&step| program.steps.get(step)) {
                let need = Need { plan, program, step, device, library_bytes };
                match &step.action {
                    Action::Run(op) => {
                        need.add(op, &mut space);
                        ropes.extend(op.rope());
                    }
                    Action::Move { .. } => {
                        if plan.is_peer_sum(program, step) {
                            members = members.max(step.reads.len());
                        }
                        // Sums, too: only the executor knows which GPUs reach each other, and the terms of others
                        // come through the host. That is no more than one term, and mostly not more than gates take.
                        need.add_movement(&mut space);
                    }
                    Action::Fetch { .. } => (),
                }
            }
        }
    }
    if members > 0 {
        space.exchange_bytes = exchange.bytes(members);
    }
    if has_lane {
        space.run_bytes = RunSizes::of(plan).bytes();
    }
    let rotations = ropes.into_iter().map(|rope| rotation_bytes(plan, rope));
    space.rotation_bytes = rotations.fold(0, u64::saturating_add);
    space
}

/// Parts that decode attention splits each context into, in a run of `tokens` tokens.
pub fn attention_splits(kv_heads: u32, tokens: u32) -> u32 {
    (ATTENTION_CUBES / kv_heads.saturating_mul(tokens).max(1)).clamp(1, ATTENTION_SPLITS)
}

/// Bytes of the values, f32 `[tokens, heads, splits, head_dim]`, and of the largest score and the sum of weights,
/// f32 `[tokens, heads, splits, 2]`, that decode attention leaves.
pub fn attention_terms(attention: &Attention, tokens: u32, splits: u32) -> [u64; 2] {
    let Attention { heads, head_dim, .. } = *attention;
    [head_dim, 2].map(|each| aligned(product(&[tokens, heads, splits, each], 4)))
}

/// Rows of the table of a rotary embedding: all positions, or the tokens of a run where it is made for each.
pub fn rotation_rows(plan: &Plan, rope: RopeId) -> u32 {
    let follows = plan.ropes.get(rope).is_some_and(|rope| rope.frequencies.follow_length());
    if follows { RunSizes::of(plan).tokens } else { plan.model.context }
}

/// Numbers of a sum that GPUs add at a time without the host, of terms of that type: features are a multiple of it.
pub fn summed_together(term: DType) -> u32 {
    SUMMED_BYTES / term.bytes() as u32
}

/// Bytes at most of a term in f32 that one of `members` GPUs sends with a flag beside every number, over links of that
/// rate. That takes twice the bytes, of all members, and one crossing instead of three: as many as take no longer than is
/// saved, and as inboxes have room for.
pub fn most_flagged_term_bytes(members: usize, bytes_per_sec: f64) -> u64 {
    let peers = (members.max(2) - 1) as u64;
    let worth = (bytes_per_sec * CROSSINGS_NANOS / 1e9) as u64 / peers;
    let bytes = worth.clamp(MOST_JOINED_TERM_BYTES, MOST_FLAGGED_BYTES / 2 / peers);
    bytes - bytes % WORKSPACE_ALIGNMENT
}

/// How terms of sums over GPUs lie in the exchanges of all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exchange {
    /// Bytes of the pieces in which GPUs pass each other terms.
    pub piece_bytes: u64,
    /// Bytes that an inbox has for a small term of another GPU, of which every number has a flag beside it.
    pub flagged_bytes: u64,
}

impl Exchange {
    /// That of terms of at most `term_bytes` bytes of at most so many members, whose slowest link has that rate.
    pub fn new(term_bytes: u64, members: usize, bytes_per_sec: f64) -> Self {
        let piece_bytes = aligned(term_bytes).min(MOST_PIECE_BYTES);
        // Pieces, and so inboxes, are as large as the largest term or larger than small ones.
        let flagged_bytes = 2 * piece_bytes.min(most_flagged_term_bytes(members, bytes_per_sec));
        Self { piece_bytes, flagged_bytes }
    }

    /// That of a plan.
    pub fn of(plan: &Plan) -> Self {
        let (mut term_bytes, mut groups) = (0, Vec::<Few<DeviceId>>::new());
        for program in &plan.programs {
            let steps = program.steps.rows().iter().filter(|step| plan.is_peer_sum(program, step));
            for step in steps {
                let terms = step.reads.iter().filter_map(|&term| program.buffers.get(term));
                let group: Few<DeviceId> = terms.map(|term| term.device).collect();
                // Sums of a plan are over few groups.
                if !groups.contains(&group) {
                    groups.push(group);
                }
                let written = step.writes.iter().filter_map(|&buffer| program.buffers.get(buffer));
                let bytes = written.map(|buffer| buffer.ty.bytes(program.max)).max();
                term_bytes = term_bytes.max(bytes.unwrap_or(0));
            }
        }
        let is_within = |link: &&Link| {
            groups.iter().any(|group| group.contains(&link.from) && group.contains(&link.to))
        };
        let rates = plan.machine.links.iter().filter(is_within).map(|link| link.bytes_per_sec);
        let members = groups.iter().map(|group| group.len()).max().unwrap_or(0);
        Self::new(term_bytes, members, rates.fold(f64::INFINITY, f64::min))
    }

    /// Bytes of the exchange of one of `members` GPUs, for the terms of the others.
    pub fn bytes(self, members: usize) -> u64 {
        let inboxes = u64::from(EXCHANGE_INBOXES) * (members.max(2) - 1) as u64;
        EXCHANGE_HEADER_BYTES + inboxes * (self.flagged_bytes + self.piece_bytes)
    }
}

/// Rows of a packed matrix `[outputs, inputs]` that are unpacked at a time for the vendor's library, to elements of two
/// bytes: whole panels, in pieces as even as can be that start, and whose outputs in two bytes start, at multiples of
/// [`WORKSPACE_ALIGNMENT`].
pub fn piece_rows(outputs: u32, inputs: u32) -> u32 {
    let row_bytes = product(&[inputs.max(1)], 2);
    let most = u32::try_from(UNPACKED_BYTES / row_bytes).unwrap_or(u32::MAX).max(1);
    let pieces = outputs.div_ceil(most).max(1);
    outputs.div_ceil(pieces).next_multiple_of(PIECE_ROWS).min(outputs)
}

/// Bytes with what lies between them and the next place; at most `u64::MAX`.
pub(crate) fn aligned(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(WORKSPACE_ALIGNMENT).unwrap_or(u64::MAX)
}

fn raise(most: &mut u64, bytes: u64) {
    *most = bytes.max(*most);
}

fn product(sizes: &[u32], element_bytes: u64) -> u64 {
    sizes.iter().map(|&size| u64::from(size)).fold(element_bytes, u64::saturating_mul)
}

fn rotation_bytes(plan: &Plan, rope: RopeId) -> u64 {
    let dims = plan.ropes.get(rope).map_or(0, |rope| rope.dims);
    aligned(product(&[rotation_rows(plan, rope), dims], 4))
}

/// One step.
struct Need<'a> {
    plan: &'a Plan,
    program: &'a Program,
    step: &'a Step,
    device: DeviceId,
    library_bytes: u64,
}

impl Need<'_> {
    fn add(&self, op: &Op, space: &mut Workspace) {
        match op.products() {
            Some(Products::Linear(linear)) => self.add_linear(linear, space),
            Some(Products::Experts(experts)) => self.add_experts(experts, space),
            Some(Products::Attention(attention)) => self.add_attention(op, attention, space),
            None => (),
        }
    }

    fn add_linear(&self, linear: &Linear, space: &mut Workspace) {
        let (rows, features) = (self.size(0, 0), self.size(0, 1));
        if is_cast(linear) {
            raise(&mut space.input_bytes, product(&[rows.min(MAX_FUSED_ROWS), features], 4));
        }
        if rows <= FLOAT_ROWS {
            let are_operands = rows > most_float_rows_of(self.plan, linear);
            if let Some(operands) = OperandRows::of(rows).filter(|_| are_operands) {
                let element = Format::Bf16.bytes(1, 1);
                raise(&mut space.input_bytes, product(&[operands.count(), features], element));
            }
            return;
        }
        raise(&mut space.library_bytes, self.library_bytes);
        let has_library = self.library_bytes > 0;
        let [input, made] = [&self.step.reads, &self.step.writes].map(|all| self.dtype(all));
        for weight in &linear.weights {
            let Some(weight) = self.plan.weights.get(*weight) else { continue };
            let [outputs, inputs] = *weight.shape else { continue };
            let format = product_format(weight.format, has_library);
            let element = format.bytes(1, 1);
            if format.float() != Some(input) || linear.norm.is_some() {
                raise(&mut space.input_bytes, product(&[rows, features], element));
            }
            // Those of any GPU: the one that runs the plan may have other instructions than the plan says.
            let most = most_fused_rows(weight.format, true);
            if product_format(weight.format, true) == Format::Bf16 {
                // What has matrix instructions takes rows in 16 bits as operands; without the library any, in parts.
                let most = rows.min(most);
                let operands = OperandRows::of(most).map(OperandRows::count);
                let taken = operands.or((!has_library).then_some(most)).unwrap_or(0);
                let element = Format::Bf16.bytes(1, 1);
                raise(&mut space.input_bytes, product(&[taken, features], element));
            }
            let kind = self.plan.machine.devices.get(weight.device).map(|device| &device.kind);
            let is_packed = |kind| has_panels(kind, weight.format, &weight.shape);
            // Where the library that the plan counts is missing, nothing is held unpacked.
            let is_as_planned = kind.is_some_and(|kind| kind.has_library() == has_library);
            let is_unpacked = weight.also_unpacked && is_as_planned;
            if !is_unpacked && kind.is_some_and(is_packed) {
                let piece = if has_library { piece_rows(outputs, inputs) } else { outputs };
                raise(&mut space.matrix_bytes, product(&[piece, inputs], element));
            }
            // The products of a gate lie where its outputs will.
            let is_gated = matches!(linear.then, Then::Gate(_));
            let of_rows = |rows, dtype: DType| aligned(product(&[rows, outputs], dtype.bytes()));
            if is_gated {
                let made = if has_library { made } else { DType::F32 };
                raise(&mut space.inner_bytes, of_rows(rows, made));
            }
            // Kernels that take floats, and what stands in for the library, make outputs of 16 bits in f32 first, beside
            // the products of a gate.
            if made != DType::F32 {
                let first = if has_library { rows.min(MAX_FUSED_ROWS) } else { rows };
                let beside = if is_gated && !has_library { 2 } else { 1 };
                raise(&mut space.inner_bytes, beside * of_rows(first, DType::F32));
            }
        }
    }

    fn add_experts(&self, experts: &Experts, space: &mut Workspace) {
        let gate = self.plan.weights.get(experts.gate).map(|gate| gate.shape.as_slice());
        let Some(&[experts, intermediate, features]) = gate else { return };
        let (tokens, used) = (self.size(0, 0), self.size(1, 1));
        let sizes = experts::Experts { tokens, used, experts, features, intermediate };
        raise(&mut space.inner_bytes, sizes.bytes());
    }

    fn add_attention(&self, op: &Op, attention: &Attention, space: &mut Workspace) {
        let Attention { heads, kv_heads, head_dim, .. } = *attention;
        if let Some(cache) = self.plan.borrowed(op, self.device) {
            let Plan { model, .. } = self.plan;
            raise(&mut space.borrowed_bytes, cache.bytes(model.blocks, model.block_tokens) / 2);
        }
        raise(&mut space.inner_bytes, product(&[self.program.max.tokens, heads, head_dim], 4));
        let most = self.program.max_sequences;
        // Of more tokens than `ATTENTION_CUBES` no context is split, and the terms only grow.
        let candidates = (1..=most.min(ATTENTION_CUBES)).chain([most]);
        for tokens in candidates {
            let terms = attention_terms(attention, tokens, attention_splits(kv_heads, tokens));
            raise(&mut space.partial_bytes, terms[0].saturating_add(terms[1]));
        }
    }

    /// The largest term or part comes from another device before it is added or placed.
    fn add_movement(&self, space: &mut Workspace) {
        for buffer in self.step.reads.iter().filter_map(|&id| self.program.buffers.get(id)) {
            if buffer.device != self.device {
                raise(&mut space.inner_bytes, buffer.ty.bytes(self.program.max));
            }
        }
    }

    /// The type of the elements of the first of some buffers.
    fn dtype(&self, buffers: &[BufferId]) -> DType {
        let buffer = buffers.first().and_then(|&id| self.program.buffers.get(id));
        buffer.map_or(DType::F32, |buffer| buffer.ty.dtype)
    }

    /// Size of an axis of a buffer that is read.
    fn size(&self, read: usize, axis: usize) -> u32 {
        let buffer = self.step.reads.get(read).and_then(|&id| self.program.buffers.get(id));
        let dim = buffer.and_then(|buffer| buffer.ty.shape.get(axis));
        dim.map_or(0, |dim: &Dim| dim.size(self.program.max))
    }
}

/// What a GPU multiplies a matrix of that format in with many rows, input and matrix alike: matrix instructions, those
/// of the vendor's library among them, take both in one format. Without the library that is what is counted: f32, for
/// GPUs without matrix instructions; those with them multiply parts of the rows in bf16.
pub fn product_format(held: Format, has_library: bool) -> Format {
    match (held, has_library) {
        (_, false) => Format::F32,
        // Blocks carry f16 scales; bf16 keeps their range, and its rounding is below that of the blocks.
        (Format::Bf12 | Format::Q8 | Format::Q4, true) => Format::Bf16,
        (Format::F32 | Format::F16 | Format::Bf16, true) => held,
    }
}

/// The format that keeps a GPU from computing a linear of `rows` rows of `features` elements with matrices in the
/// formats `held`: it would have to lay out rows that are no whole loads. `None` where it can compute it.
pub fn broken_loads(
    linear: &Linear,
    held: impl IntoIterator<Item = Format>,
    (rows, features): (u32, u32),
    has_library: bool,
) -> Option<Format> {
    let is_product = rows > FLOAT_ROWS;
    let products = held.into_iter().filter(|_| is_product);
    let laid_out = products.map(|held| product_format(held, has_library));
    let mut laid_out = is_cast(linear).then_some(Format::F32).into_iter().chain(laid_out);
    laid_out.find(|&format| !has_whole_loads(format, u64::from(features)))
}

/// The most rows that a GPU with the matrix instructions of warpgroups multiplies as floats with a linear's matrices.
pub(crate) fn most_float_rows_of(plan: &Plan, linear: &Linear) -> u32 {
    let weights = linear.weights.iter().filter_map(|&id| plan.weights.get(id));
    most_float_rows(weights.map(|weight| (weight.format, weight.elements())), true)
}

/// Whether the input of few rows is normalised first: kernels do so on the way where the norm is a plain root mean
/// square.
pub(crate) fn is_cast(linear: &Linear) -> bool {
    let norm = linear.norm.as_ref();
    norm.is_some_and(|norm| norm.kind != NormKind::Rms || norm.bias.is_some())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packing::PANEL_ROWS;

    #[test]
    fn pieces_are_even_whole_panels_near_the_limit() {
        const { assert!(PIECE_ROWS.is_multiple_of(PANEL_ROWS)) };
        assert_eq!(piece_rows(14336, 4096), 14336);
        assert_eq!(piece_rows(14337, 8192), 7296);
        for (outputs, inputs) in [(128_256, 4096), (151_936, 896), (256_000, 3584)] {
            let rows = piece_rows(outputs, inputs);
            assert!(rows.is_multiple_of(PIECE_ROWS));
            assert!(product(&[rows - PIECE_ROWS, inputs], 2) < UNPACKED_BYTES);
        }
    }
}
