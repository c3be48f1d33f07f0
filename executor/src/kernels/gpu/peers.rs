//! Sums over GPUs that reach each other's memory.
//!
//! - Every GPU has an *exchange*: flags and inboxes that its peers write to. A cube writes its share of the term to
//!   every peer, raises a flag there, waits for the flags of its peers, and sums up what has come in the order of the
//!   members: all of them get the same bits.
//! - A large term goes in pieces. A cube sends the next piece before it waits for one, so that links are busy while
//!   terms are added.
//! - Of a small term every number is written in f32 together with a flag, as NCCL's protocol LL does: it takes twice the
//!   bytes, of terms in 16 bits four times, and one crossing instead of three. There may be more cubes than find a place
//!   at a time: devices begin them in their order, so the first that a GPU has not ended has its peers' numbers to come.
//!   What makes such a term can send it by itself, number by number, and write the sum in its place (see
//!   [`small::Meeting`]): no launch stands between a product and its sum.
//! - What is written is told by numbers that grow from one sum to the next, and by a run's number, so that captured
//!   launches serve every run and a run that ended early leaves nothing behind. Those of pieces do not come round;
//!   those of small terms do, so the GPU that has read one erases it.
//! - A piece uses one of eight inboxes in turn, four for each of two runs. A member that sends piece k + 2 has seen the
//!   flag of piece k, which its peer raised when it had read piece k - 2: what is overwritten has been read. A peer
//!   that is ahead by a run writes where nobody reads.
//! - A peer that never comes makes the sum not a number after [`PATIENCE`] looks, or soon if it told that it has left
//!   the run. That is noted in the exchanges of all members, and their further sums of the run are not numbers either.

#![expect(unsafe_code, reason = "kernels are given addresses in the memory of other GPUs")]

mod flags;
mod large;
mod places;
pub(super) mod small;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use anyhow::ensure;
use cubecl::prelude::*;
use ir::tensor::{DType, Format};
use ir::workspace::{
    EXCHANGE_CUBES, EXCHANGE_HEADER_BYTES, EXCHANGE_INBOXES, EXCHANGE_MEMBERS, Exchange,
    summed_together,
};

use super::addressed::store_word;
use super::device::{Gpu, Span, element};
use super::given::given;

/// Units of a cube.
const UNITS: u32 = 256;
/// Vectors of a large term that a unit has on their way at a time.
const LOADS: u32 = 4;
/// Inboxes of one run.
const RUN_INBOXES: u32 = EXCHANGE_INBOXES / 2;
/// Looks at a flag before a peer is given up, at about half a microsecond each: some ten seconds.
const PATIENCE: u32 = 20_000_000;
/// Sums of one run at most, one more than that: from the numbers of one run's small terms to those of the next.
const SUMS: u32 = 1 << 13;
/// Where the counters of this GPU's cubes lie in its exchange, behind the flags of all members.
const COUNTERS: u64 = EXCHANGE_MEMBERS as u64 * EXCHANGE_CUBES as u64 * 8;
/// Where the number of the last run that lost a member is noted.
const LOST: u64 = COUNTERS + EXCHANGE_CUBES as u64 * 4;
/// Where that member is noted, counted from 1.
const WHO: u64 = LOST + 4;
/// Where the number of the last run that a member left is noted.
const LEFT: u64 = LOST + 8;

const _: () = assert!(LEFT + 4 <= EXCHANGE_HEADER_BYTES, "what members tell lies before inboxes");

/// Where the exchanges of a sum's members lie, at most [`EXCHANGE_MEMBERS`].
#[derive(Clone, Debug)]
pub struct Exchanges(Arc<[u64]>);

/// Members of a sum.
#[derive(Clone, Debug)]
pub struct Group {
    /// Their exchanges.
    pub exchanges: Exchanges,
    /// Which this GPU is.
    pub rank: u32,
    /// How terms lie in inboxes: the same on all members.
    pub exchange: Exchange,
    /// `u32[1]`: the run's number.
    pub turn: Span,
    /// Which sum of the run it is.
    pub number: u32,
}

/// A sum over GPUs, as one of them makes it: `residual + Σ terms`.
#[derive(Clone, Copy, Debug)]
pub struct Sum<'a> {
    /// This GPU's term: as many numbers.
    pub term: &'a Span,
    /// Of the terms of all members: a float type.
    pub of_term: DType,
    /// What this GPU adds, in f32.
    pub residual: Option<&'a Span>,
    /// In f32; none of the others.
    pub out: &'a Span,
    /// Numbers.
    pub count: usize,
}

impl Exchanges {
    /// The exchanges at these addresses, in the order of the members.
    ///
    /// # Safety
    /// As long as launches with them may run, the GPU reaches an exchange at each address that is large enough for as
    /// many members. A [`Group`] with them has the rank of the GPU that its launches run on, and pieces of the size
    /// that the exchanges have been made for.
    pub unsafe fn new(addresses: &[u64]) -> Self {
        Self(addresses.into())
    }
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

    /// Queues the preparation of an exchange for a run.
    ///
    /// # Errors
    /// When the exchange is not one of a CUDA device.
    pub fn start_sums(&self, exchange: &Span) -> anyhow::Result<()> {
        let address = exchange.address()?;
        // SAFETY: the counters lie in the head of the exchange.
        unsafe {
            start::launch_unchecked(
                &self.client,
                CubeCount::Static(1, 1, 1),
                CubeDim::new_1d(UNITS),
                address,
            );
        }
        Ok(())
    }

    /// Queues telling all members that this GPU does no more of run `turn` than it has queued: those that wait for more
    /// need not wait long.
    pub fn leave_sums(&self, exchanges: &Exchanges, turn: u32) {
        // SAFETY: the GPU reaches the exchanges, and what is written lies in their heads.
        unsafe {
            flags::leave::launch_unchecked(
                &self.client,
                CubeCount::Static(1, 1, 1),
                CubeDim::new_1d(1),
                exchanges.0.iter().copied().collect(),
                turn,
            );
        }
    }

    /// The member that never came in run `turn`, if there is one.
    ///
    /// # Errors
    /// When the device failed.
    pub fn lost_member(&self, exchange: &Span, turn: u32) -> anyhow::Result<Option<u32>> {
        let bytes = self.read(&exchange.part(0, EXCHANGE_HEADER_BYTES as usize))?;
        let word = |at: u64| -> anyhow::Result<u32> {
            Ok(u32::from_le_bytes(bytes[at as usize..at as usize + 4].try_into()?))
        };
        Ok(if word(LOST)? == turn { word(WHO)?.checked_sub(1) } else { None })
    }

    /// Queues a sum. Every member queues the same sums in the same order.
    ///
    /// # Errors
    /// When the numbers are no whole vectors, or the run has too many sums.
    pub fn sum_over_peers(&self, group: &Group, sum: &Sum<'_>) -> anyhow::Result<()> {
        let Sum { term, of_term, residual, out, count } = *sum;
        ensure!(of_term.is_float(), "GPUs sum no terms of {of_term}");
        let together = summed_together(of_term) as usize;
        ensure!(
            count.is_multiple_of(together),
            "GPUs sum {together} numbers at a time, not {count}"
        );
        group.check()?;
        let given = given([residual.is_some()]);
        if group.has_flags_for(count) {
            // SAFETY: every index lies within its argument, and the exchanges are large enough for the members.
            unsafe {
                small::sum_with_flags::launch_unchecked(
                    &self.client,
                    CubeCount::new_1d((count as u32).div_ceil(UNITS)),
                    CubeDim::new_1d(UNITS),
                    term.argument(count, of_term.bytes() as usize),
                    residual.map(|residual| residual.argument(count, size_of::<f32>())).into(),
                    out.argument(count, size_of::<f32>()),
                    group.meeting(count),
                    element(of_term),
                    given,
                );
            }
            return Ok(());
        }
        let (vectors, piece_vectors) =
            ((count / together) as u32, (group.exchange.piece_bytes / 16) as u32);
        // A cube has the same place in every inbox, whatever it sums.
        let share = piece_vectors.div_ceil(EXCHANGE_CUBES).max(UNITS);
        // SAFETY: as above.
        unsafe {
            large::sum::launch_unchecked(
                &self.client,
                CubeCount::Static(vectors.min(piece_vectors).div_ceil(share), 1, 1),
                CubeDim::new_1d(UNITS),
                term.argument(vectors as usize, 16),
                residual.map(|residual| residual.argument(count / 4, 16)).into(),
                out.argument(count / 4, 16),
                group.exchanges.0.iter().copied().collect(),
                group.turn.argument(1, 4),
                share,
                piece_vectors,
                vectors,
                group.exchange.flagged_bytes as u32,
                group.rank,
                group.exchanges.0.len() as u32,
                Format::from(of_term),
                given,
            );
        }
        Ok(())
    }
}

impl Group {
    /// Whether terms of `count` numbers pass with a flag beside every number.
    pub fn has_flags_for(&self, count: usize) -> bool {
        2 * count * size_of::<f32>() <= self.exchange.flagged_bytes as usize
    }

    /// Checks the sum's number.
    ///
    /// # Errors
    /// When the run has too many sums.
    pub fn check(&self) -> anyhow::Result<()> {
        ensure!(self.number < SUMS - 1, "a run has more than {} sums over GPUs", SUMS - 1);
        Ok(())
    }
}

/// Sets the counters of all cubes back: they have summed no piece of the run.
#[cube(launch_unchecked)]
fn start(exchange: u64) {
    let mut cube = UNIT_POS;
    while cube < EXCHANGE_CUBES {
        store_word(exchange + comptime!(COUNTERS) + u64::cast_from(cube * 4), 0u32);
        cube += UNITS;
    }
}
