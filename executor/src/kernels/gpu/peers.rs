//! Sums over GPUs that reach each other's memory.
//!
//! - Every GPU has an *exchange*: flags and inboxes that its peers write to. A cube writes its piece of the term to
//!   every peer, raises a flag there, waits for the flags of its peers, and sums up what has come in the order of the
//!   members: all of them get the same bits.
//! - What is written is told by numbers that grow from one sum to the next, and by a run's number, so that captured
//!   launches serve every run and a run that ended early leaves nothing behind.
//! - A sum uses one of four inboxes in turn, two for each of two runs: a peer that is ahead by one sum, or by one run,
//!   writes where nobody reads.
//! - A peer that never comes makes the sum not a number after [`PATIENCE`] looks, and is noted in the exchange.

#![expect(unsafe_code, reason = "kernels are given addresses in the memory of other GPUs")]

use cubecl::prelude::*;
use ir::workspace::{EXCHANGE_CUBES, EXCHANGE_HEADER_BYTES};

use super::addressed::{fence, load_four, load_word, look, raise, store_four, store_word};
use super::device::{Gpu, Span};
use super::words::Four;

/// Units of a cube.
const UNITS: u32 = 256;
/// Looks at a flag before a peer is given up, at about half a microsecond each: some ten seconds.
const PATIENCE: u32 = 20_000_000;
/// Sums of one run at most.
const SUMS: u32 = 1 << 13;
/// Where the counters of this GPU's cubes lie in its exchange, behind the flags of eight members.
const COUNTERS: u64 = 8 * EXCHANGE_CUBES as u64 * 4;
/// Where the member that was given up is noted.
const LOST: u64 = COUNTERS + EXCHANGE_CUBES as u64 * 4;

/// Where tables of addresses lie in an exchange.
pub const TABLES_START: usize = 2560;
/// Bytes of a table.
pub const TABLE_BYTES: usize = 256;
/// Tables of an exchange.
pub const TABLES: usize = (EXCHANGE_HEADER_BYTES as usize - TABLES_START) / TABLE_BYTES;

/// Members of a sum.
pub struct Group<'a> {
    /// `u64[members]`: the addresses of their exchanges.
    pub addresses: &'a Span,
    /// How many.
    pub members: u32,
    /// Which this GPU is.
    pub rank: u32,
    /// Bytes that an inbox takes at a time, a multiple of 256: the same on all members.
    pub piece_bytes: usize,
}

impl Gpu {
    /// Queues the preparation of an exchange for a run; `turn` is `u32[1]`, the run's number.
    ///
    /// # Errors
    /// When the exchange is not one of a CUDA device.
    pub fn start_sums(&self, exchange: &Span, turn: &Span) -> anyhow::Result<()> {
        let address = exchange.address()?;
        // SAFETY: counters and what follows them lie in the head of the exchange.
        unsafe {
            start::launch_unchecked(
                &self.client,
                CubeCount::Static(1, 1, 1),
                CubeDim::new_1d(UNITS),
                turn.argument(1, size_of::<u32>()),
                address,
            );
        }
        Ok(())
    }

    /// The member that never came, if there is one.
    ///
    /// # Errors
    /// When the device failed.
    pub fn lost_member(&self, exchange: &Span) -> anyhow::Result<Option<u32>> {
        let bytes = self.read(&exchange.part(0, EXCHANGE_HEADER_BYTES as usize))?;
        let word: [u8; 4] = bytes[LOST as usize..LOST as usize + 4].try_into()?;
        Ok(u32::from_le_bytes(word).checked_sub(1))
    }

    /// `out` becomes the sum of the terms of all members, f32 each, `count` numbers, a multiple of 4. Every member
    /// queues the same sums in the same order.
    pub fn sum_over_peers(&self, group: &Group<'_>, term: &Span, out: &Span, count: usize) {
        let piece = group.piece_bytes;
        let bytes = count * size_of::<f32>();
        for start in (0..bytes).step_by(piece) {
            let length = piece.min(bytes - start);
            let vectors = (length / 16) as u32;
            let cubes = vectors.div_ceil(UNITS).clamp(1, EXCHANGE_CUBES);
            let (term, out) = (term.part(start, length), out.part(start, length));
            // SAFETY: every index lies within its argument; addresses are those of exchanges, which are as large as
            // plans count them for the members.
            unsafe {
                sum::launch_unchecked(
                    &self.client,
                    CubeCount::Static(cubes, 1, 1),
                    CubeDim::new_1d(UNITS),
                    term.argument(vectors as usize, 16),
                    out.argument(vectors as usize, 16),
                    group.addresses.argument(group.members as usize, 8),
                    vectors.div_ceil(cubes),
                    vectors,
                    piece as u32,
                    group.rank,
                    group.members,
                );
            }
        }
    }
}

/// Sets the counters of all cubes to the first number of a run; nobody is lost yet.
#[cube(launch_unchecked)]
fn start(turn: &[u32], exchange: u64) {
    let mut cube = UNIT_POS;
    while cube < EXCHANGE_CUBES {
        store_word(exchange + comptime!(COUNTERS) + u64::cast_from(cube * 4), turn[0] * SUMS);
        cube += UNITS;
    }
    if UNIT_POS == 0 {
        store_word(exchange + comptime!(LOST), 0u32);
    }
}

#[cube(launch_unchecked)]
fn sum(
    term: &[Four],
    out: &mut [Four],
    addresses: &[u64],
    share: u32,
    vectors: u32,
    piece_bytes: u32,
    #[comptime] rank: u32,
    #[comptime] members: u32,
) {
    let cube = CUBE_POS_X;
    let unit = UNIT_POS;
    let own = addresses[comptime!(rank as usize)];
    let counter = own + comptime!(COUNTERS) + u64::cast_from(cube * 4);
    let number = load_word(counter) + 1;
    let inbox = (number / comptime!(SUMS) % 2) * 2 + number % 2;
    let start = cube * share;
    let end = u32::min(start + share, vectors);

    #[unroll]
    for peer in 0..members {
        if comptime!(peer != rank) {
            let place = letters(addresses[peer as usize], inbox, rank, piece_bytes, members);
            let mut at = start + unit;
            while at < end {
                store_four(place + u64::cast_from(at) * 16, term[at as usize]);
                at += UNITS;
            }
        }
    }
    fence();
    sync_cube();
    let mut lost = Shared::<[u32]>::new_slice(1usize);
    if unit == 0 {
        lost[0] = 0u32;
    }
    if unit < members && unit != rank {
        let flag = addresses[unit as usize] + flag_of(rank, cube);
        raise(flag, number);
    }
    sync_cube();
    if unit < members && unit != rank {
        let flag = own + flag_of(unit, cube);
        // Where one sum was lost, the others of the run are, too.
        let mut looks = 0u32;
        if load_word(own + comptime!(LOST)) > 0 {
            looks = PATIENCE.runtime();
        }
        // Flags only grow, and are behind by less than half of all numbers.
        while look(flag) - number >= 0x8000_0000u32 && looks < PATIENCE {
            looks += 1;
        }
        if looks >= PATIENCE {
            lost[0] = unit + 1;
            store_word(own + comptime!(LOST), unit + 1);
        }
    }
    sync_cube();
    let is_lost = lost[0] > 0;
    let mut at = start + unit;
    while at < end {
        let mut all = Four::zeroed();
        #[unroll]
        for member in 0..members {
            if comptime!(member == rank) {
                all += term[at as usize];
            } else {
                all += load_four(
                    letters(own, inbox, member, piece_bytes, members) + u64::cast_from(at) * 16,
                );
            }
        }
        if is_lost {
            all = Four::new(f32::NAN);
        }
        out[at as usize] = all;
        at += UNITS;
    }
    sync_cube();
    if unit == 0 {
        store_word(counter, number);
    }
}

/// Where a member's term lies in an inbox of an exchange.
#[cube]
fn letters(
    exchange: u64,
    inbox: u32,
    member: u32,
    piece_bytes: u32,
    #[comptime] members: u32,
) -> u64 {
    let place = u64::cast_from(inbox * members + member);
    exchange + comptime!(EXCHANGE_HEADER_BYTES) + place * u64::cast_from(piece_bytes)
}

/// Where the flag of a member's cube lies in an exchange.
#[cube]
fn flag_of(member: u32, cube: u32) -> u64 {
    u64::cast_from((member * EXCHANGE_CUBES + cube) * 4)
}
