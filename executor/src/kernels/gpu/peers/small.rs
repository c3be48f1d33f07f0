//! Small terms: every number with a flag beside it.

use cubecl::prelude::*;

use super::flags::{is_run_lost, look_again};
use super::places::{flagged, inbox_of};
use super::{Group, PATIENCE, SUMS, UNITS};
use crate::kernels::gpu::addressed::{load_long, store_long};

/// Where the members of a sum of small terms meet, as a kernel sees it.
#[derive(CubeType, CubeLaunch, Clone)]
#[expand(derive(Clone))]
pub(in crate::kernels::gpu) struct Meeting {
    /// Those of the members' exchanges.
    addresses: Sequence<u64>,
    /// `[1]`: the run's number.
    turn: Box<[u32]>,
    /// Which sum of the run it is.
    sum_of_run: u32,
    /// Numbers of each term: all members send as many.
    count: u32,
    /// Bytes that an inbox has for a small term.
    flagged_bytes: u32,
    /// Which of the members this GPU is.
    #[cube(comptime)]
    rank: u32,
    /// How many there are.
    #[cube(comptime)]
    members: u32,
}

impl Group {
    /// How kernels are told of the group, for terms of `count` numbers.
    pub(in crate::kernels::gpu) fn meeting(&self, count: usize) -> MeetingLaunch {
        MeetingLaunch::new(
            self.exchanges.0.iter().copied().collect(),
            self.turn.argument(1, size_of::<u32>()),
            self.number,
            count as u32,
            self.exchange.flagged_bytes as u32,
            self.rank,
            self.exchanges.0.len() as u32,
        )
    }
}

/// The sum of small terms, a number for each unit.
#[cube(launch_unchecked)]
pub(super) fn sum_with_flags<T: Float>(
    term: &[T],
    residual: &ComptimeOption<Box<[f32]>>,
    out: &mut [f32],
    meeting: &Meeting,
    #[define(T)] _of_term: ElemType,
    #[comptime] _given: u32,
) {
    let at = CUBE_POS_X * UNITS + UNIT_POS;
    if meeting.has(at) {
        let turn = meeting.turn();
        let mut sum = meeting.sum(turn, at, f32::cast_from(term[at as usize]));
        #[comptime]
        match residual.clone() {
            ComptimeOption::Some(residual) => sum += residual[at as usize],
            ComptimeOption::None => {}
        }
        out[at as usize] = sum;
    }
}

#[cube]
impl Meeting {
    /// The run's number.
    pub(in crate::kernels::gpu) fn turn(&self) -> u32 {
        self.turn[0]
    }

    /// Whether terms have a number `at`.
    pub(in crate::kernels::gpu) fn has(&self, at: u32) -> bool {
        at < self.count
    }

    /// Number `at` of the sum of all terms, of which this GPU's is `value`, in run `turn`.
    pub(in crate::kernels::gpu) fn sum(&self, turn: u32, at: u32, value: f32) -> f32 {
        let rank = comptime!(self.rank);
        let members = comptime!(self.members);
        let own = *self.addresses.index(comptime!(rank as usize));
        // Never 0, which is what erased flags are.
        let flag = turn * SUMS + self.sum_of_run + 1;
        let inbox = inbox_of(turn, self.sum_of_run);
        let sent =
            u64::cast_from(flag) * comptime!(1u64 << 32) + u64::cast_from(u32::reinterpret(value));
        #[unroll]
        for peer in 0..members {
            if comptime!(peer != rank) {
                let exchange = *self.addresses.index(peer as usize);
                let place = flagged(exchange, inbox, peer, rank, at, self.flagged_bytes, members);
                store_long(place, sent);
            }
        }
        // Where one sum was lost, the others of the run are, too.
        let mut looks = 0u32;
        if is_run_lost(own, turn) {
            looks = PATIENCE.runtime();
        }
        let mut all = f32::new(0.0);
        #[unroll]
        for member in 0..members {
            if comptime!(member == rank) {
                all += value;
            } else {
                let place = flagged(own, inbox, rank, member, at, self.flagged_bytes, members);
                let mut received = load_long(place);
                while u32::cast_from(received >> 32) != flag && looks < PATIENCE {
                    received = load_long(place);
                    let its = comptime!(member).runtime();
                    looks = look_again(looks, own, &self.addresses, turn, its, members);
                }
                // The peer that writes here next waits for what this GPU sends after this sum.
                if u32::cast_from(received >> 32) == flag {
                    store_long(place, 0u64);
                }
                all += f32::reinterpret(u32::cast_from(received & comptime!(u32::MAX as u64)));
            }
        }
        select(looks >= PATIENCE, f32::new(f32::NAN), all)
    }
}
