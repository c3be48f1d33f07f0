//! Attention of a few query rows over one span of keys: products, softmax so far, and the sum of values.

use std::f32::consts::LOG2_E;

use super::super::cache::TILE_TOKENS;
use super::super::lanes::{LANES, Lanes};
use super::super::math::{exp2, tanh};
use super::packing::Packing;

/// Keys of a span: enough that the running sums are rescaled seldom, few enough that their keys and values
/// stay in the first-level cache while all rows pass over them.
pub(super) const SPAN_TOKENS: usize = 128;
/// Tiles of a span.
pub(super) const SPAN_TILES: usize = SPAN_TOKENS / TILE_TOKENS;

/// What rows do to products before the softmax.
#[derive(Clone, Copy)]
pub(super) struct Scores {
    /// Factor on the products.
    pub(super) scale: f32,
    /// Bound through the hyperbolic tangent.
    pub(super) soft_cap: Option<f32>,
}

/// Where a span's keys and values lie.
pub(super) struct Span {
    /// Token of the first tile's first slot.
    pub(super) first: usize,
    pub(super) tiles: usize,
    pub(super) keys: [*const u8; SPAN_TILES],
    pub(super) values: [*const u8; SPAN_TILES],
    /// Where those of the span after it lie: they are asked for while this one is computed.
    pub(super) next_keys: [*const u8; SPAN_TILES],
    pub(super) next_values: [*const u8; SPAN_TILES],
    /// For bytes only.
    pub(super) key_scales: [*const f32; SPAN_TILES],
    pub(super) value_scales: [*const f32; SPAN_TILES],
}

/// Query rows and what they have gathered so far.
pub(super) struct Rows<P: Packing> {
    pub(super) head_dim: usize,
    /// Floats of a row of `sums`: `head_dim` padded to whole vectors.
    pub(super) width: usize,
    /// Operands of each query, its bias last.
    pub(super) queries: Vec<P::Operand>,
    /// What the products of each query lack.
    pub(super) factors: Vec<f32>,
    /// Tokens that each row sees.
    pub(super) visible: Vec<(usize, usize)>,
    /// Largest score, in powers of two.
    pub(super) largest: Vec<f32>,
    /// Sums of weights, 16 of them to be added up.
    pub(super) totals: Vec<f32>,
    /// Weighted sums of values.
    pub(super) sums: Vec<f32>,
}

impl<P: Packing> Rows<P> {
    /// No rows of heads of `head_dim`.
    pub(super) fn new(head_dim: usize) -> Self {
        Self {
            head_dim,
            width: head_dim.next_multiple_of(LANES),
            queries: Vec::new(),
            factors: Vec::new(),
            visible: Vec::new(),
            largest: Vec::new(),
            totals: Vec::new(),
            sums: Vec::new(),
        }
    }

    /// Room for `rows` rows that have gathered nothing and see nothing.
    pub(super) fn reset(&mut self, rows: usize) {
        let operands = rows * self.stride();
        self.queries.clear();
        self.queries.resize(operands, P::ZERO);
        self.factors.clear();
        self.factors.resize(rows, 1.0);
        self.visible.clear();
        self.visible.resize(rows, (0, 0));
        self.largest.clear();
        self.largest.resize(rows, f32::NEG_INFINITY);
        self.totals.clear();
        self.totals.resize(rows * LANES, 0.0);
        self.sums.clear();
        self.sums.resize(rows * self.width, 0.0);
    }

    /// Which share of the next span each four rows ask for: those units whose number agrees with theirs in these
    /// bits. Asking for all at once would leave memory idle while the other rows compute.
    #[inline(always)]
    fn ahead_mask(&self) -> usize {
        let blocks = (self.factors.len() / 4).clamp(1, 8);
        (1 << blocks.ilog2()) - 1
    }

    /// Operands of one query.
    pub(super) fn stride(&self) -> usize {
        self.width / P::PER_UNIT + 1
    }
}

/// Lets all `rows` see `span`.
///
/// # Safety
/// The span's pointers are those of as many tiles with elements of `P` and heads of `rows.head_dim`.
#[inline(always)]
pub(super) unsafe fn attend<L: Lanes, P: Packing>(rows: &mut Rows<P>, span: &Span, scores: Scores) {
    let count = rows.factors.len();
    let mut first = 0;
    // SAFETY: the rows exist, and the span is as the caller says.
    unsafe {
        while first + 4 <= count {
            attend_block::<L, P, 4>(rows, first, span, scores);
            first += 4;
        }
        if first + 2 <= count {
            attend_block::<L, P, 2>(rows, first, span, scores);
            first += 2;
        }
        if first < count {
            attend_block::<L, P, 1>(rows, first, span, scores);
        }
    }
}

/// Lets rows `first..first + R` see `span`.
///
/// # Safety
/// As `attend`, and the rows exist.
#[inline(always)]
unsafe fn attend_block<L: Lanes, P: Packing, const R: usize>(
    rows: &mut Rows<P>,
    first: usize,
    span: &Span,
    scores: Scores,
) {
    // Rows are in the order of their tokens: the first sees the earliest, the last the latest.
    let (start, end) = (rows.visible[first].0, rows.visible[first + R - 1].1);
    let end = end.min(span.first + span.tiles * TILE_TOKENS);
    if start.max(span.first) >= end {
        return;
    }
    let first_tile = start.saturating_sub(span.first) / TILE_TOKENS;
    let last_tile = (end - span.first).div_ceil(TILE_TOKENS);
    let mut weights = [[0.0_f32; SPAN_TOKENS]; R];
    let mut operands = [[P::ZERO; SPAN_TOKENS]; R];
    let mut shrink = [L::splat(1.0); R];
    let mut factors = [1.0_f32; R];
    // SAFETY: the rows exist and the span is as the caller says.
    unsafe {
        multiply_keys::<L, P, R>(rows, first, span, first_tile, last_tile, &mut weights);
        for r in 0..R {
            let weights = &mut weights[r][..last_tile * TILE_TOKENS];
            shrink[r] = weigh::<L, P>(rows, first + r, span, first_tile, weights, scores);
            let from = first_tile * TILE_TOKENS;
            let to = operands[r].as_mut_ptr().add(from / P::PER_UNIT);
            factors[r] = P::pack_weights::<L>(&weights[from..], to);
        }
        let units = (end - span.first).div_ceil(P::PER_UNIT);
        let range = (first_tile, units);
        gather_values::<L, P, R>(rows, first, span, range, &operands, shrink, factors);
    }
}

/// Writes the products of rows with the keys of tiles `first_tile..last_tile`.
///
/// # Safety
/// As `attend_block`.
#[inline(always)]
unsafe fn multiply_keys<L: Lanes, P: Packing, const R: usize>(
    rows: &Rows<P>,
    first: usize,
    span: &Span,
    first_tile: usize,
    last_tile: usize,
    products: &mut [[f32; SPAN_TOKENS]; R],
) {
    let mut tile = first_tile;
    // SAFETY: the tiles exist.
    unsafe {
        if L::REGISTERS >= 32 && P::SUM_VECTORS == 1 {
            while tile + 4 <= last_tile {
                multiply_tiles::<L, P, R, 4>(rows, first, span, tile, products);
                tile += 4;
            }
        }
        if L::REGISTERS >= 32 {
            while tile + 2 <= last_tile {
                multiply_tiles::<L, P, R, 2>(rows, first, span, tile, products);
                tile += 2;
            }
        }
        while tile < last_tile {
            multiply_tiles::<L, P, R, 1>(rows, first, span, tile, products);
            tile += 1;
        }
    }
}

/// Writes the products of `R` rows with `N` tiles of keys.
///
/// # Safety
/// As `attend_block`, and the tiles exist.
#[inline(always)]
unsafe fn multiply_tiles<L: Lanes, P: Packing, const R: usize, const N: usize>(
    rows: &Rows<P>,
    first: usize,
    span: &Span,
    tile: usize,
    products: &mut [[f32; SPAN_TOKENS]; R],
) {
    let unit_bytes = LANES * P::PER_UNIT * P::ELEMENT.bytes();
    let (stride, bias) = (rows.stride(), rows.width / P::PER_UNIT);
    let ahead = rows.ahead_mask();
    // SAFETY: the rows and tiles exist, so all that is read here does.
    unsafe {
        let queries = rows.queries.as_ptr().add(first * stride);
        let mut sums = [[P::start::<L>(P::ZERO); N]; R];
        for (r, sums) in sums.iter_mut().enumerate() {
            *sums = [P::start::<L>(*queries.add(r * stride + bias)); N];
        }
        for step in 0..rows.head_dim / P::PER_UNIT {
            if step & ahead == (first / 4) & ahead {
                for n in 0..N {
                    L::prefetch(span.next_keys[tile + n].wrapping_add(step * unit_bytes));
                }
            }
            let mut units = [P::load::<L>(span.keys[tile].add(step * unit_bytes)); N];
            for (n, unit) in units.iter_mut().enumerate().skip(1) {
                *unit = P::load::<L>(span.keys[tile + n].add(step * unit_bytes));
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let query = *queries.add(r * stride + step);
                for (sum, unit) in sums.iter_mut().zip(units) {
                    *sum = P::add_keys::<L>(*sum, unit, query);
                }
            }
        }
        for (sums, products) in sums.iter().zip(products) {
            for (n, sum) in sums.iter().enumerate() {
                P::finish::<L>(*sum).store(products.as_mut_ptr().add((tile + n) * TILE_TOKENS));
            }
        }
    }
}

/// Turns a row's products into softmax weights against the largest score so far, and returns the factor by which
/// that shrinks what the row has gathered. Products before `first_tile` are not there.
///
/// # Safety
/// As `attend_block`; `weights` is whole tiles long, and has the products of those from `first_tile` on.
#[inline(always)]
pub(super) unsafe fn weigh<L: Lanes, P: Packing>(
    rows: &mut Rows<P>,
    row: usize,
    span: &Span,
    first_tile: usize,
    weights: &mut [f32],
    scores: Scores,
) -> L {
    const LANE_INDEX: [f32; LANES] =
        [0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.];
    let (start, end) = rows.visible[row];
    let tiles = first_tile..weights.len() / TILE_TOKENS;
    let lowest = L::splat(f32::NEG_INFINITY);
    // Scores are kept as powers of two: the factor rides on the scale.
    let (scale, cap) = match scores.soft_cap {
        None => (scores.scale * LOG2_E, 0.0),
        Some(cap) => (scores.scale / cap, cap * LOG2_E),
    };
    let scale = L::splat(scale * rows.factors[row]);
    let mut top = lowest;
    for tile in tiles.clone() {
        let tile_start = span.first + tile * TILE_TOKENS;
        // SAFETY: the tile exists, and with it 16 weights; scales are there for bytes.
        unsafe {
            let weights = weights.as_mut_ptr().add(tile * TILE_TOKENS);
            let mut score = L::load(weights).mul(scale);
            if P::PER_UNIT == 4 {
                score = score.mul(L::load(span.key_scales[tile]));
            }
            if scores.soft_cap.is_some() {
                score = tanh(score).mul(L::splat(cap));
            }
            if tile_start + TILE_TOKENS > end || tile_start < start {
                let lane = L::load(LANE_INDEX.as_ptr());
                let seen = L::splat(end as f32 - tile_start as f32);
                score = L::select_less(lane, seen, score, lowest);
                let hidden = L::splat(start as f32 - tile_start as f32);
                score = L::select_less(lane, hidden, lowest, score);
            }
            score.store(weights);
            top = score.max(top);
        }
    }
    let before = rows.largest[row];
    let largest = before.max(top.largest());
    rows.largest[row] = largest;
    // A row that has seen nothing yet has no largest score to measure against.
    let base = if largest == f32::NEG_INFINITY { 0.0 } else { largest };
    let shrink = exp2(L::splat(before - base));
    let base = L::splat(base);
    let mut total = L::splat(0.0);
    for tile in tiles {
        // SAFETY: as above.
        unsafe {
            let weights = weights.as_mut_ptr().add(tile * TILE_TOKENS);
            let mut weight = exp2(L::load(weights).sub(base));
            total = total.add(weight);
            if P::PER_UNIT == 4 {
                // Scales of slots without a token are anything, so no product of theirs may be used.
                let scaled = weight.mul(L::load(span.value_scales[tile]));
                weight = L::select_less(L::splat(0.0), weight, scaled, L::splat(0.0));
            }
            weight.store(weights);
        }
    }
    let totals = &mut rows.totals[row * LANES..(row + 1) * LANES];
    L::read(totals).mul_add(shrink, total).write(totals);
    shrink
}

/// Adds the weighted values of `range` (from a tile, to a unit) to the shrunk sums of rows.
///
/// # Safety
/// As `attend_block`.
#[inline(always)]
unsafe fn gather_values<L: Lanes, P: Packing, const R: usize>(
    rows: &mut Rows<P>,
    first: usize,
    span: &Span,
    range: (usize, usize),
    weights: &[[P::Operand; SPAN_TOKENS]; R],
    shrink: [L; R],
    factors: [f32; R],
) {
    let vectors = rows.width / LANES;
    let mut vector = 0;
    // SAFETY: the vectors lie in a row; the cache has slack behind the last one of a narrow head.
    unsafe {
        if L::REGISTERS >= 32 && P::SUM_VECTORS == 1 {
            while vector + 4 <= vectors {
                let at = (first, vector);
                gather_vectors::<L, P, R, 4>(rows, at, span, range, weights, &shrink, &factors);
                vector += 4;
            }
        }
        if L::REGISTERS >= 32 {
            while vector + 2 <= vectors {
                let at = (first, vector);
                gather_vectors::<L, P, R, 2>(rows, at, span, range, weights, &shrink, &factors);
                vector += 2;
            }
        }
        while vector < vectors {
            let at = (first, vector);
            gather_vectors::<L, P, R, 1>(rows, at, span, range, weights, &shrink, &factors);
            vector += 1;
        }
    }
}

/// Adds `N` vectors of weighted values to `R` rows; `at` is the first row and the first vector.
///
/// # Safety
/// As `gather_values`, and the vectors exist.
#[inline(always)]
unsafe fn gather_vectors<L: Lanes, P: Packing, const R: usize, const N: usize>(
    rows: &mut Rows<P>,
    at: (usize, usize),
    span: &Span,
    range: (usize, usize),
    weights: &[[P::Operand; SPAN_TOKENS]; R],
    shrink: &[L; R],
    factors: &[f32; R],
) {
    let tile_units = TILE_TOKENS / P::PER_UNIT;
    let lane_bytes = P::PER_UNIT * P::ELEMENT.bytes();
    let (first_tile, last_unit) = range;
    let ahead = rows.ahead_mask();
    let mut sums = [[P::start::<L>(P::ZERO); N]; R];
    // SAFETY: rows, vectors and tiles exist, so all that is read and written here does.
    unsafe {
        for tile in first_tile..last_unit.div_ceil(tile_units) {
            let values = span.values[tile].add(at.1 * LANES * lane_bytes);
            let next_values = span.next_values[tile].wrapping_add(at.1 * LANES * lane_bytes);
            let first_unit = tile * tile_units;
            for unit in 0..tile_units.min(last_unit - first_unit) {
                let row = unit * rows.head_dim * lane_bytes;
                if unit & ahead == (at.0 / 4) & ahead {
                    for n in 0..N {
                        L::prefetch(next_values.wrapping_add(row + n * LANES * lane_bytes));
                    }
                }
                let values = values.add(row);
                let mut units = [P::load::<L>(values); N];
                for (n, unit) in units.iter_mut().enumerate().skip(1) {
                    *unit = P::load::<L>(values.add(n * LANES * lane_bytes));
                }
                for (sums, weights) in sums.iter_mut().zip(weights) {
                    let weight = *weights.get_unchecked(first_unit + unit);
                    for (sum, unit) in sums.iter_mut().zip(units) {
                        *sum = P::add_values::<L>(*sum, unit, weight);
                    }
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            let row = (at.0 + r) * rows.width + at.1 * LANES;
            for (n, sum) in sums.iter().enumerate() {
                let to = rows.sums.as_mut_ptr().add(row + n * LANES);
                let added = P::finish::<L>(*sum).mul(L::splat(factors[r]));
                L::load(to).mul_add(shrink[r], added).store(to);
            }
        }
    }
}
