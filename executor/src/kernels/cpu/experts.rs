//! Experts of a mixture: each token through the gated MLPs that its router chose.
//!
//! - Tokens are grouped by expert: a *slot* is one token at one of its experts, and slots of one expert are
//!   neighbours. Only experts with slots are read.
//! - One dispatch does it all, and memory is read all the time: a group's down projection waits for its own gate and up
//!   alone, and of few tokens, the member that finishes a panel's last group sums it.

#![expect(
    unsafe_code,
    reason = "members write disjoint parts of the buffers, and wait before they read those of others"
)]

use std::ops::Range;

use anyhow::{Context as _, bail, ensure};
use ir::op::{Activation, Then};

use super::disjoint::DisjointMut;
use super::encode::{Encoder, Rows, Strip, WHOLE};
use super::epilogue::Target;
use super::isa::Isa;
use super::pack::{PANEL, PackedMatrix};
use super::product::{Product, Rooms};
use super::tile::Kernel;
use crate::team::{Chunks, Claim, Team};

/// With fewer groups than this for each member of a team, all members together encode what lies between the
/// projections.
const GROUPS_EACH: usize = 4;

/// One expert: `down(activation(gate(x)) * up(x))`.
#[derive(Clone, Copy)]
pub struct Expert<'a> {
    /// `[intermediate, features]`.
    pub gate: &'a PackedMatrix,
    /// `[intermediate, features]`.
    pub up: &'a PackedMatrix,
    /// `[features, intermediate]`.
    pub down: &'a PackedMatrix,
}

/// The inputs of a layer of experts.
///
/// Activations are of type `X` and ids of type `I`: slices for the kernel, tensors for [`super::extension`].
#[derive(Clone, Copy)]
pub struct Experts<'a, X = &'a [f32], I = &'a [i32]> {
    /// `[tokens, features]`, row after row.
    pub x: X,
    /// Rows of `x`.
    pub tokens: usize,
    /// The router's choice, `[tokens, used]`; ids of experts that are not in `experts` count for nothing.
    pub ids: I,
    /// What each chosen expert's output is multiplied with, `[tokens, used]`.
    pub weights: X,
    /// The id of `experts[0]`.
    pub first_expert: i32,
    /// Experts of one shape and format.
    pub experts: &'a [Expert<'a>],
    /// Of the gate.
    pub activation: Activation,
}

/// The chosen experts' slots.
struct Slots {
    /// The token of each slot.
    tokens: Vec<u32>,
    /// The slot of each choice of each token, `[tokens, used]`; `None` where the expert is not here.
    of_choice: Vec<Option<u32>>,
    groups: Vec<Group>,
}

/// An expert with slots.
struct Group {
    expert: usize,
    first: usize,
    count: usize,
}

/// The panels of a matrix, dealt in parts.
struct Parts {
    panels: usize,
    count: usize,
}

/// The slots cut in strips, group after group.
struct Strips {
    all: Vec<Strip>,
    /// Where each group's strips end.
    ends: Vec<usize>,
}

/// Writes the weighted sum of each token's experts, `[tokens, features]`, added in the order of the choices.
///
/// Results are the same, bit for bit, from run to run and for any number of members.
///
/// # Errors
/// When sizes do not fit together, or there is no memory for what lies between the phases.
pub fn experts(team: &Team, isa: Isa, inputs: &Experts<'_>, out: &mut [f32]) -> anyhow::Result<()> {
    let [features, intermediate] = check(inputs, out)?;
    let slots = group(inputs);
    let Some(any) = slots.groups.first().map(|group| &inputs.experts[group.expert]) else {
        out.fill(0.0);
        return Ok(());
    };
    let count = slots.tokens.len();
    // One kernel for all experts, whatever their shares: the mean number of rows decides.
    let mean_rows = count.div_ceil(slots.groups.len());
    let isa = isa.checked();
    let up_kernel = Kernel::choose(isa, any.gate.format(), mean_rows);
    let down_kernel = Kernel::choose(isa, any.down.format(), mean_rows);
    let up_strips = cut(&slots, up_kernel);
    let down_strips = cut(&slots, down_kernel);
    let most_strips = slots.groups.iter().map(|group| group.count.div_ceil(up_kernel.rows)).max();
    let rooms = {
        let (strips, columns) = (most_strips.unwrap_or(0), features.max(intermediate));
        Rooms::new(team, &[up_kernel, down_kernel], strips, columns)?
    };

    let take = |bytes: usize| team.arena().take(bytes).context("computing with experts");
    let [mut encoded, mut inner, mut encoded_inner, mut outer] = [
        take(count * up_kernel.encoding.row_bytes(features))?,
        take(count * intermediate * size_of::<f32>())?,
        take(count * down_kernel.encoding.row_bytes(intermediate))?,
        take(count * features * size_of::<f32>())?,
    ];
    let [encoded, encoded_inner] = [&mut encoded, &mut encoded_inner]
        .map(|buffer| DisjointMut::new(buffer.as_mut_slice::<u8>()));
    let [inner, outer] =
        [&mut inner, &mut outer].map(|buffer| DisjointMut::new(buffer.as_mut_slice::<f32>()));
    let target =
        |out, columns, then| Target { out, columns, biases: [None; 2], then, residual: None };
    let inner_target = target(inner, intermediate, Then::Gate(inputs.activation));
    let outer_target = target(outer, features, Then::Nothing);
    let encoder = Encoder::new(team, features, &up_strips.all);
    let inner_encoder = Encoder::new(team, intermediate, &down_strips.all);
    let ups = Parts::new(up_kernel.block_panels(true), intermediate);
    let downs = Parts::new(down_kernel.block_panels(false), features);
    let up_tasks = team.shares(slots.groups.len() * ups.count);
    let down_tasks = team.shares(slots.groups.len() * downs.count);
    let expert = |group: usize| &inputs.experts[slots.groups[group].expert];
    let first_up =
        |task: usize| expert(task / ups.count).gate.panel(ups.panels(task % ups.count).start);
    let first_down =
        |task: usize| expert(task / downs.count).down.panel(downs.panels(task % downs.count).start);
    let (inners, outers) =
        (team.parts(slots.groups.len(), ups.count), team.parts(downs.count, slots.groups.len()));
    let are_few = inputs.tokens < team.members();
    // One member encodes a group, while others go on with more. Where groups are few, all end at once.
    let encodes_together = !are_few && slots.groups.len() < GROUPS_EACH * team.members();
    // The rows of some slots between the projections, which are written when this is called, and only read from then
    // on.
    let inner_rows = |slots: Range<usize>| {
        Rows {
            isa,
            encoding: down_kernel.encoding,
            // SAFETY: nobody writes these rows any more when this is called.
            x: unsafe { inner.read(slots.start * intermediate..slots.end * intermediate) },
            columns: intermediate,
            norm: None,
            sources: None,
        }
    };
    let sums = Chunks::new(inputs.tokens, inputs.tokens.div_ceil(4 * team.members()));
    let out = DisjointMut::new(out);
    team.work_off(|member| {
        if let Some(first) = up_tasks.first(member) {
            up_kernel.prefetch(first_up(first));
        }
        let mut workplace = rooms.of(member);
        let rows = Rows {
            isa,
            encoding: up_kernel.encoding,
            x: inputs.x,
            columns: features,
            norm: None,
            sources: Some(&slots.tokens),
        };
        // SAFETY: the buffer has room for all slots, and is read after this.
        unsafe { encoder.encode(&rows, encoded) };
        while let Some(Claim { task, next }) = up_tasks.claim(member) {
            let (group, panels) = (task / ups.count, ups.panels(task % ups.count));
            let weights = [expert(group).gate, expert(group).up];
            let (kernel, target) = (up_kernel, &inner_target);
            let next = next.map(first_up).or_else(|| down_tasks.first(member).map(first_down));
            let product = Product { kernel, weights: &weights, panels, encoded, target, next };
            // SAFETY: the input is encoded; each expert's panel is claimed once.
            unsafe { product.finish(up_strips.of(group), &mut workplace) };
            if inners.finish_task(group) {
                if !encodes_together {
                    let Group { first, count, .. } = slots.groups[group];
                    let rows = inner_rows(first..first + count);
                    let row_bytes = rows.encoding.row_bytes(intermediate);
                    // SAFETY: this member alone encodes the group's slots, and nobody reads them yet.
                    let to = unsafe {
                        encoded_inner.part(first * row_bytes..(first + count) * row_bytes)
                    };
                    let to = DisjointMut::new(to);
                    for strip in down_kernel.strips(0, count) {
                        // SAFETY: there is room for the group's slots, which are this member's.
                        unsafe { rows.encode(strip, 0, WHOLE, to) };
                    }
                }
                inners.open(group);
            }
        }
        if encodes_together {
            (0..slots.groups.len()).for_each(|group| inners.wait(group));
            let rows = inner_rows(0..count);
            // SAFETY: the buffer has room for all slots, and is read after this.
            unsafe { inner_encoder.encode(&rows, encoded_inner) };
        }
        while let Some(Claim { task, next }) = down_tasks.claim(member) {
            let (group, part) = (task / downs.count, task % downs.count);
            let panels = downs.panels(part);
            let columns = panels.start * PANEL..features.min(panels.end * PANEL);
            let weights = [expert(group).down];
            let (kernel, target, encoded) = (down_kernel, &outer_target, encoded_inner);
            let next = next.map(first_down);
            let product = Product { kernel, weights: &weights, panels, encoded, target, next };
            inners.wait(group);
            // SAFETY: the group's rows are encoded; each expert's panel is claimed once.
            unsafe { product.finish(down_strips.of(group), &mut workplace) };
            if outers.finish_task(part) {
                if are_few {
                    // SAFETY: all groups have written these columns, and nobody else adds them up.
                    unsafe { add_up(inputs, &slots, outer, 0..inputs.tokens, columns, out) };
                }
                outers.open(part);
            }
        }
        if are_few {
            return;
        }
        (0..downs.count).for_each(|part| outers.wait(part));
        while let Some(range) = sums.claim() {
            // SAFETY: all parts are written, and each token is claimed once.
            unsafe { add_up(inputs, &slots, outer, range, 0..features, out) };
        }
    });
    Ok(())
}

/// Groups the choices by expert, in the order of tokens within each.
fn group(inputs: &Experts<'_>) -> Slots {
    let index = |&id: &i32| {
        usize::try_from(id.checked_sub(inputs.first_expert)?)
            .ok()
            .filter(|&index| index < inputs.experts.len())
    };
    let mut counts = vec![0; inputs.experts.len()];
    inputs.ids.iter().filter_map(index).for_each(|expert| counts[expert] += 1);
    let mut next = 0;
    let mut groups = Vec::new();
    let mut free: Vec<usize> = Vec::with_capacity(counts.len());
    for (expert, &count) in counts.iter().enumerate() {
        free.push(next);
        if count > 0 {
            groups.push(Group { expert, first: next, count });
        }
        next += count;
    }
    let mut tokens = vec![0; next];
    let used = inputs.ids.len() / inputs.tokens.max(1);
    let of_choice = inputs
        .ids
        .iter()
        .enumerate()
        .map(|(choice, id)| {
            let expert = index(id)?;
            let slot = free[expert];
            free[expert] += 1;
            tokens[slot] = (choice / used) as u32;
            Some(slot as u32)
        })
        .collect();
    Slots { tokens, of_choice, groups }
}

impl Parts {
    /// Parts of at most `most` panels each of a matrix of `rows` rows.
    fn new(most: usize, rows: usize) -> Self {
        let panels = rows.div_ceil(PANEL);
        Self { panels, count: panels.div_ceil(most) }
    }

    fn panels(&self, part: usize) -> Range<usize> {
        part * self.panels / self.count..(part + 1) * self.panels / self.count
    }
}

fn cut(slots: &Slots, kernel: Kernel) -> Strips {
    let mut strips = Strips { all: Vec::new(), ends: Vec::with_capacity(slots.groups.len()) };
    for group in &slots.groups {
        strips.all.extend(kernel.strips(group.first, group.count));
        strips.ends.push(strips.all.len());
    }
    strips
}

impl Strips {
    fn of(&self, group: usize) -> &[Strip] {
        let start = if group == 0 { 0 } else { self.ends[group - 1] };
        &self.all[start..self.ends[group]]
    }
}

/// Adds up some columns of some tokens' experts.
///
/// # Safety
/// `outer` is `[slots, features]` and `out` `[tokens, features]`; nobody writes these columns of these tokens, or reads
/// them in `out`.
unsafe fn add_up(
    inputs: &Experts<'_>,
    slots: &Slots,
    outer: DisjointMut<'_, f32>,
    tokens: Range<usize>,
    columns: Range<usize>,
    out: DisjointMut<'_, f32>,
) {
    let features = inputs.x.len() / inputs.tokens;
    let used = inputs.ids.len() / inputs.tokens;
    for token in tokens {
        let place = |row: usize| row * features + columns.start..row * features + columns.end;
        // SAFETY: the caller's.
        let out = unsafe { out.part(place(token)) };
        out.fill(0.0);
        for choice in token * used..(token + 1) * used {
            let Some(slot) = slots.of_choice[choice] else { continue };
            let weight = inputs.weights[choice];
            // SAFETY: the caller's.
            let row = unsafe { outer.read(place(slot as usize)) };
            out.iter_mut().zip(row).for_each(|(sum, value)| *sum += weight * value);
        }
    }
}

/// Features and intermediate size.
fn check(inputs: &Experts<'_>, out: &[f32]) -> anyhow::Result<[usize; 2]> {
    let Some(first) = inputs.experts.first() else {
        bail!("a layer of experts without experts");
    };
    let (features, intermediate) = (first.gate.columns(), first.gate.rows());
    for (i, expert) in inputs.experts.iter().enumerate() {
        let shape = |matrix: &PackedMatrix| (matrix.rows(), matrix.columns(), matrix.format());
        let fits = shape(expert.gate) == shape(first.gate)
            && shape(expert.up) == shape(first.gate)
            && shape(expert.down) == (features, intermediate, first.down.format());
        ensure!(fits, "expert {i} has not the shape and format of the first one");
    }
    ensure!(
        inputs.x.len() == inputs.tokens * features && out.len() == inputs.x.len(),
        "an input of {} and an output of {} elements for {} tokens of {features}",
        inputs.x.len(),
        out.len(),
        inputs.tokens
    );
    ensure!(
        inputs.ids.len() == inputs.weights.len()
            && inputs.ids.len().is_multiple_of(inputs.tokens.max(1)),
        "{} ids and {} weights for {} tokens",
        inputs.ids.len(),
        inputs.weights.len(),
        inputs.tokens
    );
    Ok([features, intermediate])
}

#[cfg(test)]
mod tests;
