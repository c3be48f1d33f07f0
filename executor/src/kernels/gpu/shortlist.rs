//! The most likely tokens of rows of logits, in falling order, so that the logits need not leave the device.
//!
//! - A group of units keeps one token a unit, sorted. Others are sorted beside them and merged in by bitonic networks
//!   [Batcher 1968], whose every step compares each unit's token with that of one other unit.
//! - Cubes make lists of pieces of a row; launch after launch merges them into one.
//! - What all tokens weigh at the row's temperature comes along, so that nucleus sampling knows the whole.
//!
//! [Batcher 1968]: https://doi.org/10.1145/1468075.1468121

use cubecl::prelude::*;
use ir::workspace::shortlist::{
    LIST_WORDS, LISTED_LOGITS, LISTED_TOKENS, MERGED_LISTS, level_bytes, levels,
};

use super::device::{Gpu, Span};

/// Units of a cube.
const UNITS: u32 = 256;
/// Units that keep a list.
const KEPT: u32 = LISTED_TOKENS;
/// Groups of a cube, each of which keeps a list.
const GROUPS: u32 = UNITS / KEPT;
/// What stands for a logit that is infinite or not a number: the first of its list.
pub const UNUSABLE: f32 = f32::MAX;
/// What stands for minus infinity, and for no token.
pub const IMPOSSIBLE: f32 = f32::MIN;

impl Gpu {
    /// A list for each of `rows` rows of logits `[rows, vocabulary]`, made in `scratch`, which is as long as
    /// [`ir::workspace::shortlist::bytes`] says: `[rows, LIST_WORDS]`. `inverse_temperatures` has one over the temperature
    /// of each row.
    pub fn shortlist(
        &self,
        logits: &Span,
        [rows, vocabulary]: [usize; 2],
        inverse_temperatures: &Span,
        scratch: &Span,
    ) -> Span {
        let words = |lists: u32| rows * lists as usize * LIST_WORDS as usize;
        let (mut start, mut made) = (0, None::<(Span, u32)>);
        for lists in levels(vocabulary as u32) {
            let bytes = level_bytes(rows as u32, lists) as usize;
            let span = scratch.part(start, bytes);
            start += bytes;
            let count = CubeCount::Static(lists, rows as u32, 1);
            let (dim, float) = (CubeDim::new_1d(UNITS), size_of::<f32>());
            let out = span.argument(words(lists), float);
            let inverse_temperatures = inverse_temperatures.argument(rows, float);
            match &made {
                None => list::launch(
                    &self.client,
                    count,
                    dim,
                    logits.argument(rows * vocabulary, float),
                    inverse_temperatures,
                    out,
                    vocabulary as u32,
                ),
                Some((from, all)) => merge::launch(
                    &self.client,
                    count,
                    dim,
                    from.argument(words(*all), float),
                    inverse_temperatures,
                    out,
                    *all,
                ),
            }
            made = Some((span, lists));
        }
        made.map_or_else(|| scratch.part(0, 0), |(span, _)| span)
    }
}

/// A token that a unit keeps.
#[derive(CubeType)]
struct Token {
    logit: f32,
    id: u32,
}

#[cube]
impl Token {
    /// Higher logits first, then lower ids.
    fn comes_before(&self, other: &Token) -> bool {
        self.logit > other.logit || (self.logit == other.logit && self.id < other.id)
    }

    fn take_over(&mut self, other: &Token) {
        self.logit = other.logit;
        self.id = other.id;
    }
}

/// Where units show each other their tokens: two halves, used in turn, so that one barrier a step is enough.
#[derive(CubeType)]
struct Shown {
    logits: Shared<[f32]>,
    ids: Shared<[u32]>,
    half: u32,
}

#[cube]
impl Shown {
    fn new() -> Shown {
        let cells = comptime!(2 * UNITS as usize);
        Shown {
            logits: Shared::new_slice(cells),
            ids: Shared::new_slice(cells),
            half: 0u32.runtime(),
        }
    }

    /// Shows a token and sees that of another unit.
    fn exchange(&mut self, logit: f32, id: u32, unit: u32) -> Token {
        let first = self.half * UNITS;
        self.half = 1 - self.half;
        self.logits[(first + UNIT_POS) as usize] = logit;
        self.ids[(first + UNIT_POS) as usize] = id;
        sync_cube();
        Token { logit: self.logits[(first + unit) as usize], id: self.ids[(first + unit) as usize] }
    }

    /// Keeps the earlier or, where `keeps_later` is 1, the later of this unit's token and of that of the unit whose number
    /// differs in one bit.
    fn step(&mut self, token: &mut Token, #[comptime] distance: u32, keeps_later: u32) {
        let other = self.exchange(token.logit, token.id, UNIT_POS ^ distance);
        let mut is_earlier = 0u32.runtime();
        if token.comes_before(&other) {
            is_earlier = 1u32.runtime();
        }
        // CubeCL 0.11.3 compares no truth values in C++.
        if is_earlier == keeps_later {
            token.take_over(&other);
        }
    }

    /// Sorts the tokens of each group.
    fn sort(&mut self, token: &mut Token) {
        let unit = UNIT_POS % KEPT;
        #[unroll]
        for stage in 0..comptime!(KEPT.ilog2()) {
            let size = comptime!(2u32 << stage);
            #[unroll]
            for level in 0..comptime!(stage + 1) {
                // Every other run of `size` tokens is sorted the other way round.
                let keeps_later = ((unit >> (stage - level)) ^ (unit >> (stage + 1))) & 1;
                self.step(token, comptime!(size >> (level + 1)), keeps_later);
            }
        }
    }

    /// Keeps the first of two sorted lists' tokens, sorted: a group's own, and those that the units `ahead` of it show.
    fn merge(&mut self, own: &mut Token, shown: &Token, ahead: u32) {
        let unit = UNIT_POS % KEPT;
        // One list forwards, the other backwards: the earlier of each pair are the first of both.
        let mirrored = (UNIT_POS - unit + ahead) % UNITS + (KEPT - 1 - unit);
        let other = self.exchange(shown.logit, shown.id, mirrored);
        if !own.comes_before(&other) {
            own.take_over(&other);
        }
        #[unroll]
        for level in 0..comptime!(KEPT.ilog2()) {
            let bit = comptime!(KEPT.ilog2() - 1 - level);
            self.step(own, comptime!(1u32 << bit), (unit >> bit) & 1);
        }
    }

    /// Keeps the first tokens of all groups' lists in the first group.
    fn gather(&mut self, token: &mut Token) {
        #[unroll]
        for round in 0..comptime!(GROUPS.ilog2()) {
            let shown = Token { logit: token.logit, id: token.id };
            self.merge(token, &shown, comptime!(KEPT << round).runtime());
        }
    }

    /// The logit that the first unit has.
    fn first(&mut self, token: &Token) -> f32 {
        let first = self.exchange(token.logit, token.id, 0u32.runtime());
        first.logit
    }

    /// The sum over all units, in the first.
    fn sum(&mut self, term: f32) -> f32 {
        let mut sum = term;
        #[unroll]
        for round in 0..comptime!(UNITS.ilog2()) {
            let distance = comptime!(UNITS >> (round + 1));
            let other = self.exchange(sum, 0u32.runtime(), UNIT_POS ^ distance);
            sum += other.logit;
        }
        sum
    }
}

#[cube]
fn nobody() -> Token {
    Token { logit: f32::new(IMPOSSIBLE), id: u32::new(0x00ff_ffff) }
}

/// Writes the first group's list.
#[cube]
fn write(lists: &mut [f32], token: &Token, weight: f32) {
    let first = (CUBE_POS_Y * CUBE_COUNT_X + CUBE_POS_X) * LIST_WORDS;
    if UNIT_POS < KEPT {
        lists[(first + UNIT_POS) as usize] = token.logit;
        // Exact: there are fewer than 2^24 tokens.
        lists[(first + KEPT + UNIT_POS) as usize] = f32::cast_from(token.id);
    }
    if UNIT_POS == 0 {
        lists[(first + 2 * KEPT) as usize] = weight;
    }
}

/// Lists of pieces of a row.
#[cube(launch)]
fn list(logits: &[f32], inverse_temperatures: &[f32], lists: &mut [f32], vocabulary: u32) {
    let first = CUBE_POS_X * LISTED_LOGITS;
    let row = CUBE_POS_Y * vocabulary;
    let mut shown = Shown::new();
    let mut kept = nobody();
    #[unroll]
    for round in 0..comptime!(LISTED_LOGITS / UNITS) {
        let id = first + round * UNITS + UNIT_POS;
        let mut token = nobody();
        if id < vocabulary {
            token.id = id;
            token.logit = usable(logits[(row + id) as usize]);
        }
        shown.sort(&mut token);
        shown.merge(&mut kept, &token, 0u32.runtime());
    }
    shown.gather(&mut kept);
    let most = shown.first(&kept);
    let inverse_temperature = inverse_temperatures[CUBE_POS_Y as usize];
    let mut weight = f32::new(0.0);
    #[unroll]
    for round in 0..comptime!(LISTED_LOGITS / UNITS) {
        let id = first + round * UNITS + UNIT_POS;
        if id < vocabulary {
            weight += f32::exp((usable(logits[(row + id) as usize]) - most) * inverse_temperature);
        }
    }
    let weight = shown.sum(weight);
    write(lists, &kept, weight);
}

/// One list of [`MERGED_LISTS`] of a row's lists.
#[cube(launch)]
fn merge(from: &[f32], inverse_temperatures: &[f32], lists: &mut [f32], all: u32) {
    let first = CUBE_POS_X * MERGED_LISTS;
    let row = CUBE_POS_Y * all;
    let (group, unit) = (UNIT_POS / KEPT, UNIT_POS % KEPT);
    let mut shown = Shown::new();
    let mut kept = nobody();
    #[unroll]
    for round in 0..comptime!(MERGED_LISTS / GROUPS) {
        let list = first + round * GROUPS + group;
        let mut token = nobody();
        if list < all {
            let at = (row + list) * LIST_WORDS + unit;
            token.logit = from[at as usize];
            token.id = u32::cast_from(from[(at + KEPT) as usize]);
        }
        shown.merge(&mut kept, &token, 0u32.runtime());
    }
    shown.gather(&mut kept);
    let most = shown.first(&kept);
    let inverse_temperature = inverse_temperatures[CUBE_POS_Y as usize];
    let mut weight = f32::new(0.0);
    let list = first + UNIT_POS;
    if UNIT_POS < MERGED_LISTS && list < all {
        let at = (row + list) * LIST_WORDS;
        weight = from[(at + 2 * KEPT) as usize]
            * f32::exp((from[at as usize] - most) * inverse_temperature);
    }
    let weight = shown.sum(weight);
    write(lists, &kept, weight);
}

/// A logit as it is compared.
#[cube]
fn usable(logit: f32) -> f32 {
    let mut usable = f32::new(UNUSABLE);
    // Neither holds for what is not a number.
    if logit < f32::new(UNUSABLE) {
        usable = max(logit, f32::new(IMPOSSIBLE));
    }
    usable
}

#[cfg(test)]
mod tests;
