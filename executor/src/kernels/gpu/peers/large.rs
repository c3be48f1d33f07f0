//! Large terms: piece after piece, each told by the flag of every cube. They pass as they are, in vectors of 16 bytes.

use cubecl::prelude::*;
use ir::tensor::Format;

use super::flags::{flag_number, is_run_lost, look_again};
use super::places::{flag_of, inbox_of, letters};
use super::{COUNTERS, LOADS, PATIENCE, UNITS};
use crate::kernels::gpu::addressed::{
    fence, load_four, load_word, look_for_long, raise_long, store_four, store_word,
};
use crate::kernels::gpu::words::Four;
use crate::kernels::gpu::words::{Words, half_of};

/// The sum of large terms in that format, piece after piece: four numbers in a vector, or eight of 16 bits.
#[cube(launch_unchecked)]
pub(super) fn sum(
    term: &[Four],
    residual: &ComptimeOption<Box<[Four]>>,
    out: &mut [Four],
    addresses: &Sequence<u64>,
    turn: &[u32],
    share: u32,
    piece_vectors: u32,
    vectors: u32,
    flagged_bytes: u32,
    #[comptime] rank: u32,
    #[comptime] members: u32,
    #[comptime] format: Format,
    #[comptime] _given: u32,
) {
    let narrow = comptime!(format != Format::F32);
    // Vectors of the sum for each of a term.
    let wide = comptime!(if narrow { 2u32 } else { 1u32 });
    let own = *addresses.index(comptime!(rank as usize));
    let turn = turn[0];
    let counter = own + comptime!(COUNTERS) + u64::cast_from(CUBE_POS_X * 4);
    let first = load_word(counter) + 1;
    let inbox_bytes = piece_vectors * 16;
    let place = CUBE_POS_X * share;
    // Where one sum was lost, the others of the run are, too.
    let mut is_lost = is_run_lost(own, turn);
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
        turn,
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
                turn,
                number + 1,
                rank,
                members,
            );
        }
        // All units wait, whatever each of them has seen.
        let have_come = have_come(addresses, turn, number, is_lost, rank, members);
        is_lost = is_lost || !have_come;
        let here = start + place;
        let end = u32::min(here + share, u32::min(next, vectors));
        let inbox = inbox_of(turn, number);
        let mut from = here + UNIT_POS;
        while from < end {
            let mut all = Array::<Four>::new(comptime!((wide * LOADS) as usize));
            #[unroll]
            for i in 0..comptime!(wide * LOADS) {
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
                    if comptime!(narrow) {
                        let words = Words::reinterpret(its_term[i as usize]);
                        all[comptime!((2 * i) as usize)] += four_of(words, 0usize, format);
                        all[comptime!((2 * i + 1) as usize)] += four_of(words, 1usize, format);
                    } else {
                        all[i as usize] += its_term[i as usize];
                    }
                }
            }
            #[unroll]
            for i in 0..comptime!(wide * LOADS) {
                let vector = from + comptime!(i / wide * UNITS);
                let at = (vector * wide + comptime!(i % wide)) as usize;
                if vector < end {
                    let mut sum = all[i as usize];
                    #[comptime]
                    match residual.clone() {
                        ComptimeOption::Some(residual) => sum += residual[at],
                        ComptimeOption::None => {}
                    }
                    out[at] = select(is_lost, Four::new(f32::NAN), sum);
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

/// The first or second half of a vector of eight numbers.
#[cube]
fn four_of(words: Words, #[comptime] half: usize, #[comptime] format: Format) -> Four {
    let mut four = Four::zeroed();
    #[unroll]
    for i in 0..4usize {
        let word = words.extract(comptime!(2 * half + i / 2));
        four.insert(i, half_of(word, comptime!(i % 2), format));
    }
    four
}

/// Sends a cube's share of the piece that begins at vector `start` to all peers, and tells them.
#[cube]
#[expect(clippy::too_many_arguments, reason = "a kernel's parts have no state of their own")]
fn send(
    term: &[Four],
    addresses: &Sequence<u64>,
    start: u32,
    place: u32,
    share: u32,
    piece_vectors: u32,
    vectors: u32,
    flagged_bytes: u32,
    turn: u32,
    number: u32,
    #[comptime] rank: u32,
    #[comptime] members: u32,
) {
    let here = start + place;
    let end = u32::min(here + share, u32::min(start + piece_vectors, vectors));
    let inbox = inbox_of(turn, number);
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
                let exchange = *addresses.index(peer as usize);
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
    #[unroll]
    for peer in 0..members {
        if comptime!(peer != rank) && UNIT_POS == peer {
            let flag = *addresses.index(peer as usize) + flag_of(rank, CUBE_POS_X);
            raise_long(flag, flag_number(turn, number));
        }
    }
}

/// Waits until all peers have sent a cube's share of a piece; whether they have.
#[cube]
fn have_come(
    addresses: &Sequence<u64>,
    turn: u32,
    number: u32,
    is_lost: bool,
    #[comptime] rank: u32,
    #[comptime] members: u32,
) -> bool {
    let mut lost = Shared::<[u32]>::new_slice(1usize);
    // The cube is done with what it learned of the piece before.
    sync_cube();
    if UNIT_POS == 0 {
        lost[0] = 0u32;
    }
    sync_cube();
    if UNIT_POS < members && UNIT_POS != rank {
        let own = *addresses.index(comptime!(rank as usize));
        let flag = own + flag_of(UNIT_POS, CUBE_POS_X);
        let expected = flag_number(turn, number);
        let mut looks = select(is_lost, PATIENCE, 0u32);
        // A peer is ahead by a piece, or by runs that this one has lost.
        while look_for_long(flag) < expected && looks < PATIENCE {
            looks = look_again(looks, own, addresses, turn, UNIT_POS, members);
        }
        if looks >= PATIENCE {
            lost[0] = UNIT_POS + 1;
        }
    }
    sync_cube();
    lost[0] == 0
}
