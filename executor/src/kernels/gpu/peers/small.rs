//! Small terms: every number with a flag beside it.

use cubecl::prelude::*;

use super::flags::{is_run_lost, look_again};
use super::places::{flagged, inbox_of};
use super::{PATIENCE, SUMS, UNITS};
use crate::kernels::gpu::addressed::{load_four, store_pairs};
use crate::kernels::gpu::words::Four;

/// The sum of small terms: a unit sends four numbers, each with a flag, and waits for those of every peer.
#[cube(launch_unchecked)]
pub(super) fn sum_with_flags(
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
        let turn = turn[0];
        // Never 0, which is what erased flags are.
        let number = turn * SUMS + sum_of_run + 1;
        let inbox = inbox_of(turn, sum_of_run);
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
        if is_run_lost(own, turn) {
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
                    let its = comptime!(member).runtime();
                    looks = look_again(looks, addresses, turn, its, rank, members);
                }
                // Whoever writes here next waits for what this GPU sends after this sum.
                if has_flag(first, number) && has_flag(second, number) {
                    store_pairs(place, Four::zeroed());
                    store_pairs(place + 16, Four::zeroed());
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

/// Whether both numbers of two pairs have come.
#[cube]
fn has_flag(pairs: Four, number: u32) -> bool {
    u32::reinterpret(pairs.extract(1usize)) == number
        && u32::reinterpret(pairs.extract(3usize)) == number
}
