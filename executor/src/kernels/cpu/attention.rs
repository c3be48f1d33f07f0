//! Causal attention of grouped heads over a paged cache, from queries, keys and values to the weighted values.
//!
//! Many queries meet keys of bfloat16 by tiles where the processor has them ([`tiles`]), others by vectors ([`span`]).
//!
//! One dispatch of the team has up to three phases: append this run's keys and values to the cache; attend, in
//! pieces (sequence, key head, queries, part of the context) that members claim; join the parts of long contexts.
//! How work is cut depends on the batch and the number of members only, and parts are joined in order, so the
//! result is the same bit for bit in every run.

#![expect(
    unsafe_code,
    reason = "pointers into the cache, and members that write disjoint parts of one slice"
)]

mod packing;
mod plan;
mod span;
#[cfg(test)]
mod tests;
pub(super) mod tiles;

use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr;

use self::packing::{Bf16, F16, F32, Int8, Packing};
use self::plan::{Job, Piece};
use self::span::{Rows, SPAN_TILES, SPAN_TOKENS, Scores, Span};
use self::tiles::Room;
use super::cache::{Cache, Element, Side, TILE_TOKENS};
use super::disjoint::DisjointMut;
use super::isa::Isa;
use super::lanes::{Kernel, LANES, Lanes, vectorize};
use super::math::exp2;
use super::norm::{Norm, norm_row};
use super::rope::{RopeView, rotate};
use crate::team::{Chunks, Phase, Team};

/// One sequence of a batch.
#[derive(Clone, Copy, Debug)]
pub struct Sequence<'a> {
    /// Row of its first token among the batch's.
    pub first_token: usize,
    /// Its tokens in this run.
    pub tokens: usize,
    /// Its tokens in the cache before this run.
    pub past: usize,
    /// The blocks that hold it, in order, with room for this run's tokens.
    pub blocks: &'a [u32],
}

/// What an attention computes with, beside the cache.
///
/// Activations are of type `X`: slices for the kernel, tensors for [`super::extension`].
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a, X = &'a [f32]> {
    /// `[tokens, heads · head_dim]`.
    pub q: X,
    /// `[tokens, kv_heads · head_dim]`.
    pub k: X,
    /// `[tokens, kv_heads · head_dim]`.
    pub v: X,
    /// The batch; no two sequences share tokens, or blocks that are written.
    pub sequences: &'a [Sequence<'a>],
    /// Query heads.
    pub heads: usize,
    /// Query heads that share one key head.
    pub group: usize,
    /// Query head `h` reads key head `(first_head + h) / group`.
    pub first_head: usize,
    /// Factor on the scores.
    pub scale: f32,
    /// Token `i` sees tokens `j` with `i - j < window`.
    pub window: Option<usize>,
    /// Scores become `cap · tanh(score / cap)`.
    pub soft_cap: Option<f32>,
    /// Normalises each query head, before the rotation.
    pub q_norm: Option<Norm<'a>>,
    /// Normalises each key head, before the rotation.
    pub k_norm: Option<Norm<'a>>,
    /// Turns queries and keys.
    pub rope: Option<RopeView<'a>>,
}

impl<'a, X> Attention<'a, X> {
    /// The same of other queries, keys and values.
    pub(super) fn with<Y>(&self, [q, k, v]: [Y; 3]) -> Attention<'a, Y> {
        let Self { sequences, heads, group, first_head, scale, .. } = *self;
        let Self { window, soft_cap, q_norm, k_norm, rope, .. } = *self;
        Attention {
            q,
            k,
            v,
            sequences,
            heads,
            group,
            first_head,
            scale,
            window,
            soft_cap,
            q_norm,
            k_norm,
            rope,
        }
    }
}

/// Appends the batch's keys and values to `cache` and writes the weighted values to `out`,
/// `[tokens, heads · head_dim]`. Rows of no sequence are left as they are.
///
/// # Panics
/// When shapes disagree, a sequence has too few blocks or one that does not exist, two sequences share tokens, a block
/// is written twice, or the processor lacks the level.
pub fn attention(team: &Team, isa: Isa, attention: &Attention, cache: &mut Cache, out: &mut [f32]) {
    let isa = isa.checked();
    attention_by(team, isa, isa == Isa::Amx, attention, cache, out);
}

/// An attention with or without tiles.
fn attention_by(
    team: &Team,
    isa: Isa,
    has_tiles: bool,
    attention: &Attention,
    cache: &mut Cache,
    out: &mut [f32],
) {
    let shape = *cache.shape();
    attention.check(&shape, out.len());
    let plan = plan::plan(attention, shape.kv_heads, team.members());
    let tiles: Vec<(usize, Range<usize>)> = new_tiles(attention.sequences).collect();
    // Rooms for tiles are large, and few rows make no use of them.
    let has_tiles = has_tiles && plan.jobs.iter().any(|job| job.rows() >= tiles::LEAST_ROWS);
    // The member that attends to a part writes all of it before anybody reads it.
    let mut parts: Vec<f32> = Vec::with_capacity(plan.part_rows * part_stride(shape.head_dim));
    let work = Work {
        isa,
        has_tiles,
        attention,
        cache,
        plan: &plan,
        tiles: &tiles,
        appending: team.phase(tiles.len() * shape.kv_heads, 1),
        attending: team.phase(plan.pieces.len(), 1),
        joining: Chunks::new(plan.jobs.len(), 1),
        parts: DisjointMut::new(parts.spare_capacity_mut()),
        out: DisjointMut::new(out),
    };
    team.work_off(|_| match shape.element {
        Element::F32 => vectorize(isa, Member::<F32>::of(&work)),
        Element::F16 => vectorize(isa, Member::<F16>::of(&work)),
        Element::Bf16 => vectorize(isa, Member::<Bf16>::of(&work)),
        Element::Int8 => vectorize(isa, Member::<Int8>::of(&work)),
    });
}

impl Attention<'_> {
    fn check(&self, shape: &super::cache::CacheShape, out: usize) {
        let width = self.heads * shape.head_dim;
        let kv_width = shape.kv_heads * shape.head_dim;
        assert!(self.heads > 0 && self.group > 0, "heads in groups");
        let last_kv_head = (self.first_head + self.heads - 1) / self.group;
        assert!(last_kv_head < shape.kv_heads, "every query head has a key head");
        assert!(
            self.q.len() == out && out.is_multiple_of(width),
            "one output row for each query row"
        );
        let tokens = out / width;
        assert!(
            self.k.len() == tokens * kv_width && self.v.len() == self.k.len(),
            "keys and values"
        );
        if let Some(rope) = &self.rope {
            assert!(
                rope.dims <= shape.head_dim && rope.table.len() >= tokens * rope.dims,
                "rotations"
            );
        }
        for sequence in self.sequences {
            assert!(sequence.first_token + sequence.tokens <= tokens, "tokens are in the batch");
            let blocks = (sequence.past + sequence.tokens).div_ceil(shape.block_tokens);
            assert!(sequence.blocks.len() >= blocks, "a sequence has blocks for its tokens");
            let exist = |&block: &u32| (block as usize) < shape.blocks;
            assert!(sequence.blocks[..blocks].iter().all(exist), "blocks exist");
        }
        assert!(self.is_disjoint(shape.block_tokens), "no tokens or written blocks are shared");
    }

    /// Whether each token is of one sequence at most, and each block is written in one place. Blocks are known to be
    /// enough.
    fn is_disjoint(&self, block_tokens: usize) -> bool {
        let range =
            |sequence: &Sequence| (sequence.first_token, sequence.first_token + sequence.tokens);
        let mut tokens: Vec<(usize, usize)> = self.sequences.iter().map(range).collect();
        tokens.sort_unstable();
        let written = self.sequences.iter().flat_map(|sequence| {
            let end = sequence.past + sequence.tokens;
            &sequence.blocks[sequence.past / block_tokens..end.div_ceil(block_tokens)]
        });
        let mut written: Vec<u32> = written.copied().collect();
        written.sort_unstable();
        tokens.windows(2).all(|two| two[0].1 <= two[1].0)
            && written.windows(2).all(|two| two[0] != two[1])
    }

    /// Local query heads that read `kv_head`.
    fn heads_of(&self, kv_head: usize) -> Range<usize> {
        let first = (kv_head * self.group).saturating_sub(self.first_head);
        first..((kv_head + 1) * self.group).saturating_sub(self.first_head).min(self.heads)
    }
}

/// For every sequence the parts of this run's tokens that lie in one tile: its number, and tokens of it.
fn new_tiles<'a>(sequences: &'a [Sequence]) -> impl Iterator<Item = (usize, Range<usize>)> + 'a {
    sequences.iter().enumerate().flat_map(|(i, sequence)| {
        let end = sequence.past + sequence.tokens;
        let first = sequence.past / TILE_TOKENS * TILE_TOKENS;
        (first..end)
            .step_by(TILE_TOKENS)
            .map(move |tile| (i, tile.max(sequence.past)..end.min(tile + TILE_TOKENS)))
    })
}

/// Floats that a row leaves for joining: its sums, its largest score and its total.
fn part_stride(head_dim: usize) -> usize {
    head_dim.next_multiple_of(LANES) + 2
}

/// One dispatch, as all members see it.
struct Work<'a> {
    isa: Isa,
    has_tiles: bool,
    attention: &'a Attention<'a>,
    cache: &'a Cache<'a>,
    plan: &'a plan::Plan,
    tiles: &'a [(usize, Range<usize>)],
    appending: Phase<'a>,
    attending: Phase<'a>,
    joining: Chunks,
    parts: DisjointMut<'a, MaybeUninit<f32>>,
    out: DisjointMut<'a, f32>,
}

/// One member's part in it.
struct Member<'a, P> {
    work: &'a Work<'a>,
    packing: std::marker::PhantomData<P>,
}

impl<'a, P> Member<'a, P> {
    fn of(work: &'a Work<'a>) -> Self {
        Self { work, packing: std::marker::PhantomData }
    }
}

impl<P: Packing> Kernel for Member<'_, P> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let work = self.work;
        let head_dim = work.cache.shape().head_dim;
        let mut heads = vec![0.0; TILE_TOKENS * head_dim];
        let mut turn = work.appending.begin();
        while let Some(range) = turn.claim() {
            for i in range {
                work.append::<L>(i, &mut heads);
            }
        }
        turn.finish();
        let mut rows = Rows::<P>::new(head_dim);
        let mut room = if work.has_tiles { Room::new::<P>(work.isa, head_dim) } else { None };
        let mut turn = work.attending.begin();
        while let Some(range) = turn.claim() {
            for piece in &work.plan.pieces[range] {
                work.attend::<L, P>(piece, &mut rows, room.as_mut());
            }
        }
        if work.plan.part_rows > 0 {
            turn.finish();
            while let Some(range) = work.joining.claim() {
                work.plan.jobs[range].iter().for_each(|job| work.join::<L>(job));
            }
        }
    }
}

impl Work<'_> {
    /// Stores the keys and values of one tile and head; `heads` has room for a tile of one head.
    #[inline(always)]
    fn append<L: Lanes>(&self, index: usize, heads: &mut [f32]) {
        let Attention { k, v, sequences, k_norm, rope, .. } = self.attention;
        let shape = self.cache.shape();
        let (kv_heads, head_dim) = (shape.kv_heads, shape.head_dim);
        let ((sequence, tokens), kv_head) = (&self.tiles[index / kv_heads], index % kv_heads);
        let sequence = &sequences[*sequence];
        let heads = &mut heads[..tokens.len() * head_dim];
        for side in [Side::Keys, Side::Values] {
            for (token, head) in tokens.clone().zip(heads.chunks_exact_mut(head_dim)) {
                let token = sequence.first_token + token - sequence.past;
                let start = (token * kv_heads + kv_head) * head_dim;
                match side {
                    Side::Keys => {
                        let key = &k[start..start + head_dim];
                        prepare::<L>(key, k_norm.as_ref(), rope.as_ref(), token, head);
                    }
                    Side::Values => head.copy_from_slice(&v[start..start + head_dim]),
                }
            }
            // SAFETY: tiles and heads are claimed once, and `check` has found that no block is written twice.
            unsafe { self.cache.append(side, sequence.blocks, kv_head, tokens.start, heads) };
        }
    }

    /// Lets the queries of a piece see its keys.
    #[inline(always)]
    fn attend<L: Lanes, P: Packing>(
        &self,
        piece: &Piece,
        rows: &mut Rows<P>,
        room: Option<&mut Room>,
    ) {
        let attention = self.attention;
        let job = &self.plan.jobs[piece.job];
        let sequence = &attention.sequences[job.sequence];
        self.read_queries::<L, P>(job, rows);
        let scores = Scores { scale: attention.scale, soft_cap: attention.soft_cap };
        let mut room = room.and_then(|room| room.take(rows).then_some(room));
        for first in piece.keys.clone().step_by(SPAN_TOKENS) {
            let end = piece.keys.end.min(first + SPAN_TOKENS);
            let span = self.span(sequence, job.kv_head, first..end, piece.keys.end);
            // SAFETY: the span is of this cache, whose elements are those of `P`; a room is for bfloat16.
            unsafe {
                match &mut room {
                    Some(room) => tiles::attend::<L, P>(rows, room, &span, end, scores),
                    None => span::attend::<L, P>(rows, &span, scores),
                }
            }
        }
        let head_dim = rows.head_dim;
        for row in 0..rows.factors.len() {
            let total = L::read(&rows.totals[row * LANES..]).sum();
            let sums = &rows.sums[row * rows.width..(row + 1) * rows.width];
            match piece.part {
                None => {
                    let factor = L::splat(1.0 / total);
                    let out = self.output(job, row, head_dim);
                    for (out, sums) in out.chunks_mut(LANES).zip(sums.chunks(LANES)) {
                        L::read(sums).mul(factor).write(out);
                    }
                }
                Some(first_row) => {
                    let stride = part_stride(head_dim);
                    let start = (first_row + row) * stride;
                    // SAFETY: the plan gives every piece rows of its own.
                    let part = unsafe { self.parts.part(start..start + stride) };
                    for (to, &sum) in part.iter_mut().zip(sums) {
                        to.write(sum);
                    }
                    part[rows.width].write(rows.largest[row]);
                    part[rows.width + 1].write(total);
                }
            }
        }
    }

    /// Fills `rows` with the queries of `job`.
    #[inline(always)]
    fn read_queries<L: Lanes, P: Packing>(&self, job: &Job, rows: &mut Rows<P>) {
        let attention = self.attention;
        let sequence = &attention.sequences[job.sequence];
        let (head_dim, stride) = (rows.head_dim, rows.stride());
        rows.reset(job.rows());
        let mut head = vec![0.0; rows.width];
        for row in 0..job.rows() {
            let (query, local_head) = job.row(row);
            let token = sequence.first_token + query;
            let start = (token * attention.heads + local_head) * head_dim;
            let q = &attention.q[start..start + head_dim];
            let (norm, rope) = (attention.q_norm.as_ref(), attention.rope.as_ref());
            prepare::<L>(q, norm, rope, token, &mut head[..head_dim]);
            let end = sequence.past + query + 1;
            let start = attention.window.map_or(0, |window| end.saturating_sub(window));
            rows.visible[row] = (start, end);
            let operands = &mut rows.queries[row * stride..(row + 1) * stride];
            // SAFETY: the padded head is a multiple of 16 long, and its operands and bias fit a stride.
            rows.factors[row] = unsafe { P::pack_query::<L>(&head, operands.as_mut_ptr()) };
        }
    }

    /// Where the keys and values of `tokens` lie, which begin at a tile, and those of the tokens after, up to `end`.
    #[inline(always)]
    fn span(&self, sequence: &Sequence, kv_head: usize, tokens: Range<usize>, end: usize) -> Span {
        let shape = self.cache.shape();
        let mut span = Span {
            first: tokens.start,
            tiles: tokens.len().div_ceil(TILE_TOKENS),
            keys: [ptr::null(); SPAN_TILES],
            values: [ptr::null(); SPAN_TILES],
            next_keys: [ptr::null(); SPAN_TILES],
            next_values: [ptr::null(); SPAN_TILES],
            key_scales: [ptr::null(); SPAN_TILES],
            value_scales: [ptr::null(); SPAN_TILES],
        };
        let (keys, values) = (self.cache.base(Side::Keys), self.cache.base(Side::Values));
        for (tile, token) in tokens.step_by(TILE_TOKENS).enumerate() {
            let offset = shape.tile_offset(sequence.blocks, kv_head, token);
            // SAFETY: `check` has found the sequence's blocks to exist.
            unsafe {
                span.keys[tile] = keys.add(offset);
                span.values[tile] = values.add(offset);
                let next = token + SPAN_TOKENS;
                if next < end {
                    let offset = shape.tile_offset(sequence.blocks, kv_head, next);
                    span.next_keys[tile] = keys.add(offset);
                    span.next_values[tile] = values.add(offset);
                } else {
                    span.next_keys[tile] = span.keys[tile];
                    span.next_values[tile] = span.values[tile];
                }
                if shape.element == Element::Int8 {
                    let offset = shape.scale_offset(sequence.blocks, kv_head, token);
                    span.key_scales[tile] = keys.add(offset).cast();
                    span.value_scales[tile] = values.add(offset).cast();
                }
            }
        }
        span
    }

    /// Joins what the pieces of a job have gathered.
    #[inline(always)]
    fn join<L: Lanes>(&self, job: &Job) {
        let head_dim = self.cache.shape().head_dim;
        let stride = part_stride(head_dim);
        let Some(first_row) = job.part else { return };
        for row in 0..job.rows() {
            let part = |piece: usize| {
                let start = (first_row + piece * job.rows() + row) * stride;
                // SAFETY: all rows are written, and nobody writes them any more.
                unsafe {
                    let part = self.parts.read(start..start + stride);
                    &*(ptr::from_ref(part) as *const [f32])
                }
            };
            let largest = (0..job.pieces).map(|piece| part(piece)[stride - 2]);
            let largest = largest.fold(f32::NEG_INFINITY, f32::max);
            let out = self.output(job, row, head_dim);
            out.fill(0.0);
            let mut total = L::splat(0.0);
            for piece in 0..job.pieces {
                let part = part(piece);
                let factor = exp2(L::splat(part[stride - 2] - largest));
                total = L::splat(part[stride - 1]).mul_add(factor, total);
                for (out, sums) in out.chunks_mut(LANES).zip(part.chunks(LANES)) {
                    L::read(sums).mul_add(factor, L::read(out)).write(out);
                }
            }
            let factor = L::splat(1.0).div(total);
            for out in out.chunks_mut(LANES) {
                L::read(out).mul(factor).write(out);
            }
        }
    }

    /// The output of one row of a job.
    #[inline(always)]
    #[expect(
        clippy::mut_from_ref,
        reason = "rows of jobs are disjoint, and each is written by one member"
    )]
    fn output(&self, job: &Job, row: usize, head_dim: usize) -> &mut [f32] {
        let (query, local_head) = job.row(row);
        let token = self.attention.sequences[job.sequence].first_token + query;
        let start = (token * self.attention.heads + local_head) * head_dim;
        // SAFETY: jobs' rows are disjoint, since `check` has found that sequences share no tokens.
        unsafe { self.out.part(start..start + head_dim) }
    }
}

/// Normalises and turns one head.
#[inline(always)]
fn prepare<L: Lanes>(
    head: &[f32],
    norm: Option<&Norm>,
    rope: Option<&RopeView>,
    token: usize,
    out: &mut [f32],
) {
    match norm {
        Some(norm) => norm_row::<L>(norm, head, out),
        None => out.copy_from_slice(head),
    }
    if let Some(rope) = rope {
        rotate::<L>(rope, token, out);
    }
}
