//! Sums over GPUs that reach each other's memory.
//!
//! - Every GPU has an *exchange*: flags and inboxes that its peers write to. A cube writes its share of the term to
//!   every peer, raises a flag there, waits for the flags of its peers, and sums up what has come in the order of the
//!   members: all of them get the same bits.
//! - A large term goes in pieces. A cube sends the next piece before it waits for one, so that links are busy while
//!   terms are added.
//! - Of a small term every number is written together with a flag, as NCCL's protocol LL does: it takes twice the bytes
//!   and one crossing instead of three.
//! - What is written is told by numbers that grow from one sum to the next, and by a run's number, so that captured
//!   launches serve every run and a run that ended early leaves nothing behind.
//! - A piece uses one of eight inboxes in turn, four for each of two runs. A member that sends piece k + 2 has seen the
//!   flag of piece k, which its peer raised when it had read piece k - 2: what is overwritten has been read. A peer that
//!   is ahead by a run writes where nobody reads.
//! - A peer that never comes makes the sum not a number after [`PATIENCE`] looks, and is noted in the exchange.

#![expect(unsafe_code, reason = "kernels are given addresses in the memory of other GPUs")]

mod large;
mod places;
mod small;

#[cfg(test)]
mod tests;

use cubecl::prelude::*;
use ir::workspace::{
    EXCHANGE_CUBES, EXCHANGE_HEADER_BYTES, EXCHANGE_INBOXES, exchange_flagged_bytes,
};

use super::addressed::store_word;
use super::device::{Gpu, Span};

/// Units of a cube.
const UNITS: u32 = 256;
/// Vectors of a large term that a unit has on their way at a time.
const LOADS: u32 = 4;
/// Inboxes of one run.
const RUN_INBOXES: u32 = EXCHANGE_INBOXES / 2;
/// Looks at a flag before a peer is given up, at about half a microsecond each: some ten seconds.
const PATIENCE: u32 = 20_000_000;
/// Sums of one run at most.
const SUMS: u32 = 1 << 13;
/// Where the counters of this GPU's cubes lie in its exchange, behind the flags of eight members.
const COUNTERS: u64 = 8 * EXCHANGE_CUBES as u64 * 4;
/// Where the member that was given up is noted.
const LOST: u64 = COUNTERS + EXCHANGE_CUBES as u64 * 4;

/// Where tables of addresses lie in an exchange.
pub const TABLES_START: usize = 10 << 10;
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
    /// `u32[1]`: the run's number.
    pub turn: &'a Span,
    /// Which sum of the run it is.
    pub number: u32,
}

impl Gpu {
    /// Clears an exchange, before any member uses it: memory may hold flags of another plan.
    ///
    /// # Errors
    /// When the device failed.
    pub fn clear_exchange(&self, exchange: &Span) -> anyhow::Result<()> {
        self.write(exchange, &vec![0; exchange.bytes()])?;
        self.sync()
    }

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
        let flagged_bytes = exchange_flagged_bytes(piece as u64) as u32;
        if 2 * bytes <= flagged_bytes as usize {
            self.sum_with_flags(group, term, out, bytes, flagged_bytes);
            return;
        }
        let (vectors, piece_vectors) = ((bytes / 16) as u32, (piece / 16) as u32);
        // A cube has the same place in every inbox, whatever it sums.
        let share = piece_vectors.div_ceil(EXCHANGE_CUBES).max(UNITS);
        // SAFETY: every index lies within its argument; addresses are those of exchanges, which are as large as plans
        // count them for the members.
        unsafe {
            large::sum::launch_unchecked(
                &self.client,
                CubeCount::Static(vectors.min(piece_vectors).div_ceil(share), 1, 1),
                CubeDim::new_1d(UNITS),
                term.argument(vectors as usize, 16),
                out.argument(vectors as usize, 16),
                group.addresses.argument(group.members as usize, 8),
                share,
                piece_vectors,
                vectors,
                flagged_bytes,
                group.rank,
                group.members,
            );
        }
    }

    fn sum_with_flags(
        &self,
        group: &Group<'_>,
        term: &Span,
        out: &Span,
        bytes: usize,
        flagged_bytes: u32,
    ) {
        let vectors = bytes / 16;
        // SAFETY: as above.
        unsafe {
            small::sum_with_flags::launch_unchecked(
                &self.client,
                CubeCount::Static((vectors as u32).div_ceil(UNITS), 1, 1),
                CubeDim::new_1d(UNITS),
                term.argument(vectors, 16),
                out.argument(vectors, 16),
                group.addresses.argument(group.members as usize, 8),
                group.turn.argument(1, 4),
                group.number,
                vectors as u32,
                flagged_bytes,
                group.rank,
                group.members,
            );
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
