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

use cubecl::prelude::*;
use ir::workspace::{
    EXCHANGE_CUBES, EXCHANGE_HEADER_BYTES, EXCHANGE_INBOXES, exchange_flagged_bytes,
};

use super::addressed::{
    fence, load_four, load_word, look, raise, store_four, store_pairs, store_word,
};
use super::device::{Gpu, Span};
use super::words::Four;

#[cfg(test)]
mod tests;

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
            sum::launch_unchecked(
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
            sum_with_flags::launch_unchecked(
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

/// The sum of large terms, piece after piece.
#[cube(launch_unchecked)]
fn sum(
    term: &[Four],
    out: &mut [Four],
    addresses: &[u64],
    share: u32,
    piece_vectors: u32,
    vectors: u32,
    flagged_bytes: u32,
    #[comptime] rank: u32,
    #[comptime] members: u32,
) {
    let own = addresses[comptime!(rank as usize)];
    let counter = own + comptime!(COUNTERS) + u64::cast_from(CUBE_POS_X * 4);
    let first = load_word(counter) + 1;
    let inbox_bytes = piece_vectors * 16;
    let place = CUBE_POS_X * share;
    let lost = own + comptime!(LOST);
    // Where one sum was lost, the others of the run are, too.
    let mut is_lost = load_word(lost) > 0;
    let mut piece = 0u32.runtime();
    let mut start = 0u32.runtime();
    send(
        term,
        addresses,
        0u32.runtime(),
        place,
        share,
        piece_vectors,
        vectors,
        flagged_bytes,
        first,
        rank,
        members,
    );
    while start < vectors {
        let next = start + piece_vectors;
        let number = first + piece;
        if next < vectors {
            send(
                term,
                addresses,
                next,
                place,
                share,
                piece_vectors,
                vectors,
                flagged_bytes,
                number + 1,
                rank,
                members,
            );
        }
        // All units wait, whatever each of them has seen.
        let have_come = have_come(own, number, is_lost, members, rank);
        is_lost = is_lost || !have_come;
        let here = start + place;
        let end = u32::min(here + share, u32::min(next, vectors));
        let inbox = inbox_of(number);
        let mut from = here + UNIT_POS;
        while from < end {
            let mut all = Array::<Four>::new(LOADS as usize);
            #[unroll]
            for i in 0..LOADS {
                all[i as usize] = Four::zeroed();
            }
            #[unroll]
            for member in 0..members {
                let letter = letters(own, inbox, rank, member, inbox_bytes, flagged_bytes, members);
                let mut its_term = Array::<Four>::new(LOADS as usize);
                #[unroll]
                for i in 0..LOADS {
                    let at = from + i * UNITS;
                    if at < end {
                        if comptime!(member == rank) {
                            its_term[i as usize] = term[at as usize];
                        } else {
                            its_term[i as usize] =
                                load_four(letter + u64::cast_from(at - start) * 16);
                        }
                    }
                }
                #[unroll]
                for i in 0..LOADS {
                    all[i as usize] += its_term[i as usize];
                }
            }
            #[unroll]
            for i in 0..LOADS {
                let at = from + i * UNITS;
                if at < end {
                    out[at as usize] = select(is_lost, Four::new(f32::NAN), all[i as usize]);
                }
            }
            from += comptime!(LOADS * UNITS);
        }
        piece += 1;
        start = next;
    }
    sync_cube();
    if UNIT_POS == 0 {
        store_word(counter, first + piece - 1);
    }
}

/// Sends a cube's share of the piece that begins at vector `start` to all peers, and tells them.
#[cube]
#[expect(clippy::too_many_arguments, reason = "a kernel's parts have no state of their own")]
fn send(
    term: &[Four],
    addresses: &[u64],
    start: u32,
    place: u32,
    share: u32,
    piece_vectors: u32,
    vectors: u32,
    flagged_bytes: u32,
    number: u32,
    #[comptime] rank: u32,
    #[comptime] members: u32,
) {
    let here = start + place;
    let end = u32::min(here + share, u32::min(start + piece_vectors, vectors));
    let inbox = inbox_of(number);
    let mut own_term = Array::<Four>::new(LOADS as usize);
    let mut from = here + UNIT_POS;
    while from < end {
        #[unroll]
        for i in 0..LOADS {
            let at = from + i * UNITS;
            if at < end {
                own_term[i as usize] = term[at as usize];
            }
        }
        #[unroll]
        for peer in 0..members {
            if comptime!(peer != rank) {
                let exchange = addresses[peer as usize];
                let letter = letters(
                    exchange,
                    inbox,
                    peer,
                    rank,
                    piece_vectors * 16,
                    flagged_bytes,
                    members,
                );
                #[unroll]
                for i in 0..LOADS {
                    let at = from + i * UNITS;
                    if at < end {
                        store_four(letter + u64::cast_from(at - start) * 16, own_term[i as usize]);
                    }
                }
            }
        }
        from += comptime!(LOADS * UNITS);
    }
    fence();
    sync_cube();
    if UNIT_POS < members && UNIT_POS != rank {
        raise(addresses[UNIT_POS as usize] + flag_of(rank, CUBE_POS_X), number);
    }
}

/// Waits until all peers have sent a cube's share of a piece; whether they have.
#[cube]
fn have_come(
    own: u64,
    number: u32,
    is_lost: bool,
    #[comptime] members: u32,
    #[comptime] rank: u32,
) -> bool {
    let mut lost = Shared::<[u32]>::new_slice(1usize);
    // The cube is done with what it learned of the piece before.
    sync_cube();
    if UNIT_POS == 0 {
        lost[0] = 0u32;
    }
    sync_cube();
    if UNIT_POS < members && UNIT_POS != rank {
        let flag = own + flag_of(UNIT_POS, CUBE_POS_X);
        let mut looks = select(is_lost, PATIENCE, 0u32);
        // Flags only grow, and are behind by less than half of all numbers.
        while look(flag) - number >= 0x8000_0000u32 && looks < PATIENCE {
            looks += 1;
        }
        if looks >= PATIENCE {
            lost[0] = UNIT_POS + 1;
            store_word(own + comptime!(LOST), UNIT_POS + 1);
        }
    }
    sync_cube();
    lost[0] == 0
}

/// The sum of small terms: a unit sends four numbers, each with a flag, and waits for those of every peer.
#[cube(launch_unchecked)]
fn sum_with_flags(
    term: &[Four],
    out: &mut [Four],
    addresses: &[u64],
    turn: &[u32],
    sum_of_run: u32,
    vectors: u32,
    flagged_bytes: u32,
    #[comptime] rank: u32,
    #[comptime] members: u32,
) {
    let at = CUBE_POS_X * UNITS + UNIT_POS;
    if at < vectors {
        let own = addresses[comptime!(rank as usize)];
        let own_term = term[at as usize];
        let number = turn[0] * SUMS + sum_of_run;
        let inbox = inbox_of(number);
        let flag = f32::reinterpret(number);
        #[unroll]
        for peer in 0..members {
            if comptime!(peer != rank) {
                let exchange = addresses[peer as usize];
                let place = flagged(exchange, inbox, peer, rank, at, flagged_bytes, members);
                #[unroll]
                for half in 0..2usize {
                    let mut pairs = Four::zeroed();
                    #[unroll]
                    for i in 0..2usize {
                        pairs.insert(comptime!(2 * i), own_term.extract(comptime!(2 * half + i)));
                        pairs.insert(comptime!(2 * i + 1), flag);
                    }
                    store_pairs(place + comptime!(16 * half as u64), pairs);
                }
            }
        }
        // Where one sum was lost, the others of the run are, too.
        let mut looks = 0u32;
        if load_word(own + comptime!(LOST)) > 0 {
            looks = PATIENCE.runtime();
        }
        let mut all = Four::zeroed();
        #[unroll]
        for member in 0..members {
            if comptime!(member == rank) {
                all += own_term;
            } else {
                let place = flagged(own, inbox, rank, member, at, flagged_bytes, members);
                let mut first = load_four(place);
                let mut second = load_four(place + 16);
                while !(has_flag(first, number) && has_flag(second, number)) && looks < PATIENCE {
                    first = load_four(place);
                    second = load_four(place + 16);
                    looks += 1;
                    if looks == PATIENCE {
                        store_word(own + comptime!(LOST), comptime!(member + 1).runtime());
                    }
                }
                #[unroll]
                for i in 0..2usize {
                    let (upper, lower) =
                        (first.extract(comptime!(2 * i)), second.extract(comptime!(2 * i)));
                    all.insert(i, all.extract(i) + upper);
                    all.insert(comptime!(2 + i), all.extract(comptime!(2 + i)) + lower);
                }
            }
        }
        out[at as usize] = select(looks >= PATIENCE, Four::new(f32::NAN), all);
    }
}

/// Which inbox the piece of that number uses.
#[cube]
fn inbox_of(number: u32) -> u32 {
    (number / comptime!(SUMS) % 2) * comptime!(RUN_INBOXES) + number % comptime!(RUN_INBOXES)
}

/// Whether both numbers of two pairs have come.
#[cube]
fn has_flag(pairs: Four, number: u32) -> bool {
    u32::reinterpret(pairs.extract(1usize)) == number
        && u32::reinterpret(pairs.extract(3usize)) == number
}

/// Which part of an inbox of `owner` is for the terms of `member`: it needs none for its own.
fn part_of_inbox(owner: u32, member: u32) -> u32 {
    if member < owner { member } else { member - 1 }
}

/// Where four numbers of a member's small term lie in an inbox of the owner's exchange.
#[cube]
fn flagged(
    exchange: u64,
    inbox: u32,
    #[comptime] owner: u32,
    #[comptime] member: u32,
    vector: u32,
    flagged_bytes: u32,
    #[comptime] members: u32,
) -> u64 {
    let part = comptime!(part_of_inbox(owner, member));
    let place = u64::cast_from(inbox * comptime!(members - 1) + part);
    exchange
        + comptime!(EXCHANGE_HEADER_BYTES)
        + place * u64::cast_from(flagged_bytes)
        + u64::cast_from(vector) * 32
}

/// Where a member's term lies in an inbox of the owner's exchange, behind those of small terms.
#[cube]
fn letters(
    exchange: u64,
    inbox: u32,
    #[comptime] owner: u32,
    #[comptime] member: u32,
    piece_bytes: u32,
    flagged_bytes: u32,
    #[comptime] members: u32,
) -> u64 {
    // The own term is read where it lies.
    let part = comptime!(if member == owner { 0 } else { part_of_inbox(owner, member) });
    let place = u64::cast_from(inbox * comptime!(members - 1) + part);
    let small = u64::cast_from(comptime!(EXCHANGE_INBOXES * (members - 1)) * flagged_bytes);
    exchange + comptime!(EXCHANGE_HEADER_BYTES) + small + place * u64::cast_from(piece_bytes)
}

/// Where the flag of a member's cube lies in an exchange.
#[cube]
fn flag_of(member: u32, cube: u32) -> u64 {
    u64::cast_from((member * EXCHANGE_CUBES + cube) * 4)
}
