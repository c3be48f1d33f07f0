//! What members tell each other in an exchange: which pieces have come, and that one does not come.
//!
//! - The flag of a large term's piece has 64 bits, the run's number above that of the piece: it only ever grows, so
//!   that an old one, or none, is never taken for one that is ahead.
//! - A run that lost a member, or that a member left, is told by its number: what is told of one run says nothing about
//!   the next.

use cubecl::prelude::*;

use super::{LEFT, LOST, PATIENCE, WHO};
use crate::kernels::gpu::addressed::{fence, load_word, store_word};

/// From the number of one run's first piece to that of the next run.
const RUN: u64 = 1 << 32;
/// Looks between two glances at whether a member has left: half a millisecond.
const GLANCE: u32 = 1 << 10;
/// Looks at what members may have sent before one left. A member that has left the run after this one has received all
/// terms of this one, so all were sent by then.
const LAST_LOOKS: u32 = 1 << 10;

/// What the flag of a run's piece is raised to.
#[cube]
pub(super) fn flag_number(turn: u32, piece: u32) -> u64 {
    u64::cast_from(turn) * comptime!(RUN) + u64::cast_from(piece)
}

/// Whether a run is known to have lost a member.
#[cube]
pub(super) fn is_run_lost(own: u64, turn: u32) -> bool {
    load_word(own + comptime!(LOST)) == turn
}

/// Counts one more look for a member that has not come. At [`PATIENCE`] it is given up, and all members learn of it; if
/// it has left the run, or one after it, that is soon.
#[cube]
pub(super) fn look_again(
    looks: u32,
    own: u64,
    addresses: &Sequence<u64>,
    turn: u32,
    member: u32,
    #[comptime] members: u32,
) -> u32 {
    let mut looks = looks + 1;
    let may_glance = looks < comptime!(PATIENCE - LAST_LOOKS);
    if looks % GLANCE == comptime!(GLANCE - 1) && may_glance {
        let has_left = load_word(own + comptime!(LEFT)) >= turn;
        if has_left {
            looks = comptime!(PATIENCE - LAST_LOOKS).runtime();
        }
    }
    if looks == PATIENCE {
        #[unroll]
        for peer in 0..members {
            let exchange = *addresses.index(peer as usize);
            store_word(exchange + comptime!(WHO), member + 1);
            store_word(exchange + comptime!(LOST), turn);
        }
        fence();
    }
    looks
}

/// Tells all members that one of them does no more of a run than it has queued; that it has left a later run stays
/// told.
#[cube(launch_unchecked)]
pub(super) fn leave(addresses: &Sequence<u64>, turn: u32) {
    // What was sent before comes before.
    fence();
    #[unroll]
    for member in 0..addresses.len() {
        let left = *addresses.index(member) + comptime!(LEFT);
        if load_word(left) < turn {
            store_word(left, turn);
        }
    }
}
