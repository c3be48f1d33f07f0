//! The most likely tokens of rows of logits, in falling order, so that the logits need not leave the device.
//!
//! - A cube makes a list of a piece of a row: each unit holds a few of its tokens in registers.
//! - The units' best tokens are sorted first. The last of them that would be on a list bounds the piece's list: no
//!   token that comes after it is on that. Mostly few more tokens are left than a list has.
//! - These are sorted, as many at once as there are units, and merged by bitonic networks [Batcher 1968], whose every
//!   step compares each unit's token with that of one other unit.
//! - Launch after launch makes one list of several in the same way.
//! - What all tokens weigh at the row's temperature comes along, so that nucleus sampling knows the whole.
//!
//! [Batcher 1968]: https://doi.org/10.1145/1468075.1468121

#![expect(unsafe_code, reason = "kernels are launched without checks of every index")]

use cubecl::prelude::*;
use ir::workspace::shortlist::{
    LIST_WORDS, LISTED_LOGITS, LISTED_TOKENS, MERGED_LISTS, level_bytes, levels,
};

use super::device::{Gpu, Span};
use super::overlap::follow;

/// Units of a cube.
const UNITS: u32 = 256;
/// Tokens that a unit holds.
const EACH: u32 = LISTED_LOGITS / UNITS;
/// Units that share a list which is merged.
const SHARERS: u32 = UNITS / MERGED_LISTS;
/// Units that keep a list.
const KEPT: u32 = LISTED_TOKENS;
/// The most tokens that are left to sort: no more units than keep a list have any.
const CANDIDATES: u32 = KEPT * EACH;
/// What stands for a logit that is infinite or not a number: the first of its list.
pub const UNUSABLE: f32 = f32::MAX;
/// What stands for minus infinity, and for no token.
pub const IMPOSSIBLE: f32 = f32::MIN;
/// The id that stands for no token: exact as a float, and more than any token's.
const NOBODY: u32 = 0x00ff_ffff;

impl Gpu {
    /// A list for each of `rows` rows of logits `[rows, vocabulary]`, made in `scratch`, which is as long as
    /// [`ir::workspace::shortlist::bytes`] says: `[rows, LIST_WORDS]`. `inverse_temperatures` has one over the
    /// temperature of each row.
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
            // SAFETY: the spans are as long as rows, vocabulary and lists say, and the kernels stay within them.
            unsafe {
                match &made {
                    None => list::launch_unchecked(
                        &self.client,
                        count,
                        dim,
                        logits.argument(rows * vocabulary, float),
                        inverse_temperatures,
                        out,
                        vocabulary as u32,
                        self.plane(),
                    ),
                    Some((from, all)) => merge::launch_unchecked(
                        &self.client,
                        count,
                        dim,
                        from.argument(words(*all), float),
                        inverse_temperatures,
                        out,
                        *all,
                        self.plane(),
                    ),
                }
            }
            made = Some((span, lists));
        }
        made.map_or_else(|| scratch.part(0, 0), |(span, _)| span)
    }
}

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

#[cube]
fn nobody() -> Token {
    Token { logit: f32::new(IMPOSSIBLE), id: NOBODY.runtime() }
}

/// The tokens that a unit holds.
#[derive(CubeType)]
struct Held {
    logits: Array<f32>,
    ids: Array<u32>,
    /// From here on ids are of no tokens. Their logits are [`IMPOSSIBLE`], so that they come after all tokens.
    end: u32,
}

#[cube]
impl Held {
    fn token(&self, #[comptime] i: u32) -> Token {
        Token { logit: self.logits[i as usize], id: self.ids[i as usize] }
    }

    /// The first of them.
    fn best(&self) -> Token {
        let mut best = self.token(0u32);
        #[unroll]
        for i in 1..EACH {
            let token = self.token(i);
            if token.comes_before(&best) {
                best.take_over(&token);
            }
        }
        best
    }

    /// Whether there is such a token, and it does not come after `last`.
    fn is_candidate(&self, #[comptime] i: u32, last: &Token) -> bool {
        let token = self.token(i);
        let is_after = last.comes_before(&token);
        token.id < self.end && !is_after
    }

    /// What they weigh where a logit of `most` weighs 1.
    fn weight(&self, most: f32, inverse_temperature: f32) -> f32 {
        let mut weight = f32::new(0.0);
        #[unroll]
        for i in 0..EACH {
            let token = self.token(i);
            if token.id < self.end {
                weight += f32::exp((token.logit - most) * inverse_temperature);
            }
        }
        weight
    }
}

/// What the units' best tokens tell of the list.
#[derive(CubeType)]
struct Bounds {
    /// The highest logit.
    most: f32,
    /// No token after this one is on the list.
    last: Token,
}

/// Where units show each other their tokens: two halves, used in turn, so that one barrier a step is enough.
#[derive(CubeType)]
struct Shown {
    logits: Shared<[f32]>,
    ids: Shared<[u32]>,
    half: u32,
    /// Units of a plane, which need no barrier to see each other's tokens.
    #[cube(comptime)]
    plane: u32,
}

#[cube]
impl Shown {
    fn new(#[comptime] plane: u32) -> Shown {
        let cells = comptime!(2 * UNITS as usize);
        Shown {
            logits: Shared::new_slice(cells),
            ids: Shared::new_slice(cells),
            half: 0u32.runtime(),
            plane,
        }
    }

    /// Shows a token; the tokens of all units then lie from the returned place on.
    fn show(&mut self, logit: f32, id: u32) -> u32 {
        let first = self.half * UNITS;
        self.half = 1 - self.half;
        self.logits[(first + UNIT_POS) as usize] = logit;
        self.ids[(first + UNIT_POS) as usize] = id;
        sync_cube();
        first
    }

    fn token(&self, at: u32) -> Token {
        Token { logit: self.logits[at as usize], id: self.ids[at as usize] }
    }

    /// Shows a token and sees that of another unit.
    fn exchange(&mut self, logit: f32, id: u32, unit: u32) -> Token {
        let first = self.show(logit, id);
        self.token(first + unit)
    }

    /// Shows a token to the unit whose number differs in one bit and sees that unit's.
    fn swap(&mut self, logit: f32, id: u32, #[comptime] distance: u32) -> Token {
        if comptime!(distance < self.plane) {
            Token { logit: plane_shuffle_xor(logit, distance), id: plane_shuffle_xor(id, distance) }
        } else {
            self.exchange(logit, id, UNIT_POS ^ distance)
        }
    }

    /// Keeps the earlier or, where `keeps_later` is 1, the later of this unit's token and of that of the unit whose
    /// number differs in one bit.
    fn step(&mut self, token: &mut Token, #[comptime] distance: u32, keeps_later: u32) {
        let other = self.swap(token.logit, token.id, distance);
        let mut is_earlier = 0u32.runtime();
        if token.comes_before(&other) {
            is_earlier = 1u32.runtime();
        }
        // CubeCL 0.11.3 compares no truth values in C++.
        if is_earlier == keeps_later {
            token.take_over(&other);
        }
    }

    /// Sorts the units' tokens.
    fn sort(&mut self, token: &mut Token) {
        #[unroll]
        for stage in 0..comptime!(UNITS.ilog2()) {
            #[unroll]
            for level in 0..comptime!(stage + 1) {
                let bit = comptime!(stage - level);
                // Every other run of 2^(stage + 1) tokens is sorted the other way round.
                let keeps_later = ((UNIT_POS >> bit) ^ (UNIT_POS >> (stage + 1))) & 1;
                self.step(token, comptime!(1u32 << bit), keeps_later);
            }
        }
    }

    /// Keeps the first of the tokens of two sorted lists, of each of which a unit has one, sorted.
    fn merge(&mut self, own: &mut Token, added: &Token) {
        // One list forwards, the other backwards: the earlier of each pair are the first of both.
        let other = self.exchange(added.logit, added.id, UNITS - 1 - UNIT_POS);
        if !own.comes_before(&other) {
            own.take_over(&other);
        }
        #[unroll]
        for level in 0..comptime!(UNITS.ilog2()) {
            let bit = comptime!(UNITS.ilog2() - 1 - level);
            self.step(own, comptime!(1u32 << bit), (UNIT_POS >> bit) & 1);
        }
    }

    /// As many units as keep a list hold tokens that do not come after the last, so that there are enough for a list.
    /// Where fewer units hold any, the last is no token, and comes after all.
    fn bounds(&mut self, held: &Held) -> Bounds {
        let mut best = held.best();
        self.sort(&mut best);
        let first = self.show(best.logit, best.id);
        Bounds { most: self.logits[first as usize], last: self.token(first + KEPT - 1) }
    }

    /// Writes a list of the first candidates.
    fn write(&mut self, candidates: &Candidates, lists: &mut [f32]) {
        let mut kept = nobody();
        for first in range_stepped(0u32, candidates.count, UNITS) {
            let mut token = candidates.token(first + UNIT_POS);
            self.sort(&mut token);
            if first == 0 {
                kept.take_over(&token);
            } else {
                self.merge(&mut kept, &token);
            }
        }
        let at = (CUBE_POS_Y * CUBE_COUNT_X + CUBE_POS_X) * LIST_WORDS;
        if UNIT_POS < KEPT {
            lists[(at + UNIT_POS) as usize] = kept.logit;
            // Exact: there are fewer than 2^24 tokens.
            lists[(at + KEPT + UNIT_POS) as usize] = f32::cast_from(kept.id);
        }
        if UNIT_POS == 0 {
            lists[(at + 2 * KEPT) as usize] = candidates.weight;
        }
    }
}

/// All tokens of a cube that can be on its list, side by side.
#[derive(CubeType)]
struct Candidates {
    logits: Shared<[f32]>,
    ids: Shared<[u32]>,
    count: u32,
    /// What all tokens weigh, the others too.
    weight: f32,
}

#[cube]
impl Candidates {
    /// Gathers the tokens that do not come after `last`, and sums what the units' tokens weigh.
    fn new(held: &Held, last: &Token, weight: f32, #[comptime] plane: u32) -> Candidates {
        let mut own = 0u32;
        #[unroll]
        for i in 0..EACH {
            if held.is_candidate(i, last) {
                own += 1;
            }
        }
        let plane = comptime!(plane as usize);
        let planes = comptime!(UNITS as usize / plane);
        let mut counts = Shared::<[u32]>::new_slice(planes);
        let mut weights = Shared::<[f32]>::new_slice(planes);
        let unit = UNIT_POS as usize;
        let own_plane = unit / plane;
        let own_before = plane_exclusive_sum(own);
        let plane_count = plane_sum(own);
        let plane_weight = plane_sum(weight);
        if unit.is_multiple_of(plane) {
            counts[own_plane] = plane_count;
            weights[own_plane] = plane_weight;
        }
        sync_cube();
        let mut at = own_before;
        let mut count = 0u32;
        let mut all_weigh = f32::new(0.0);
        for other in 0..planes {
            if other < own_plane {
                at += counts[other];
            }
            count += counts[other];
            all_weigh += weights[other];
        }
        let mut logits = Shared::<[f32]>::new_slice(CANDIDATES as usize);
        let mut ids = Shared::<[u32]>::new_slice(CANDIDATES as usize);
        #[unroll]
        for i in 0..EACH {
            if held.is_candidate(i, last) {
                let token = held.token(i);
                logits[at as usize] = token.logit;
                ids[at as usize] = token.id;
                at += 1;
            }
        }
        sync_cube();
        Candidates { logits, ids, count, weight: all_weigh }
    }

    /// Nobody behind the last.
    fn token(&self, at: u32) -> Token {
        let mut token = nobody();
        if at < self.count {
            token.logit = self.logits[at as usize];
            token.id = self.ids[at as usize];
        }
        token
    }
}

/// Lists of pieces of a row.
#[cube(launch_unchecked)]
fn list(
    logits: &[f32],
    inverse_temperatures: &[f32],
    lists: &mut [f32],
    vocabulary: u32,
    #[comptime] plane: u32,
) {
    follow();
    let inverse_temperature = inverse_temperatures[CUBE_POS_Y as usize];
    let row = CUBE_POS_Y * vocabulary;
    let first = CUBE_POS_X * LISTED_LOGITS + UNIT_POS;
    let mut own = Array::<f32>::new(EACH as usize);
    let mut ids = Array::<u32>::new(EACH as usize);
    // Loads depend on nothing, so that all are under way at once: what is behind the row is read as its last.
    #[unroll]
    for i in 0..EACH {
        let id = first + i * UNITS;
        ids[i as usize] = id;
        own[i as usize] = logits[(row + u32::min(id, vocabulary - 1)) as usize];
    }
    #[unroll]
    for i in 0..EACH {
        let logit = usable(own[i as usize]);
        own[i as usize] = select(ids[i as usize] < vocabulary, logit, IMPOSSIBLE);
    }
    let held = Held { logits: own, ids, end: vocabulary };
    let mut shown = Shown::new(plane);
    let bounds = shown.bounds(&held);
    let weight = held.weight(bounds.most, inverse_temperature);
    let candidates = Candidates::new(&held, &bounds.last, weight, plane);
    shown.write(&candidates, lists);
}

/// One list of [`MERGED_LISTS`] of a row's lists.
#[cube(launch_unchecked)]
fn merge(
    from: &[f32],
    inverse_temperatures: &[f32],
    lists: &mut [f32],
    all: u32,
    #[comptime] plane: u32,
) {
    follow();
    let inverse_temperature = inverse_temperatures[CUBE_POS_Y as usize];
    let list = CUBE_POS_X * MERGED_LISTS + UNIT_POS / SHARERS;
    let is_there = list < all;
    // Each unit holds tokens from the front of a list to its end: so the units' bests are the fronts of all lists.
    let place = UNIT_POS % SHARERS;
    let at = (CUBE_POS_Y * all + u32::min(list, all - 1)) * LIST_WORDS;
    let mut own = Array::<f32>::new(EACH as usize);
    let mut ids = Array::<u32>::new(EACH as usize);
    #[unroll]
    for i in 0..EACH {
        let word = at + place + i * SHARERS;
        let logit = from[word as usize];
        let id = u32::cast_from(from[(word + KEPT) as usize]);
        own[i as usize] = select(is_there, logit, IMPOSSIBLE);
        ids[i as usize] = select(is_there, id, NOBODY);
    }
    // The unit with a list's first token weighs the list.
    let mut listed = f32::new(0.0);
    if is_there && place == 0 {
        listed = from[(at + 2 * KEPT) as usize];
    }
    let held = Held { logits: own, ids, end: NOBODY.runtime() };
    let mut shown = Shown::new(plane);
    let bounds = shown.bounds(&held);
    let front = held.token(0u32);
    let weight = listed * f32::exp((front.logit - bounds.most) * inverse_temperature);
    let candidates = Candidates::new(&held, &bounds.last, weight, plane);
    shown.write(&candidates, lists);
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
