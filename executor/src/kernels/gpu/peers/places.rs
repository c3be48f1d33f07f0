//! Where flags and terms lie in an exchange.

use cubecl::prelude::*;
use ir::workspace::{EXCHANGE_CUBES, EXCHANGE_HEADER_BYTES, EXCHANGE_INBOXES};

use super::RUN_INBOXES;

/// Which inbox a run's piece of that number uses.
#[cube]
pub(super) fn inbox_of(turn: u32, number: u32) -> u32 {
    (turn % 2) * comptime!(RUN_INBOXES) + number % comptime!(RUN_INBOXES)
}

/// Which part of an inbox of `owner` is for the terms of `member`: it needs none for its own.
fn part_of_inbox(owner: u32, member: u32) -> u32 {
    if member < owner { member } else { member - 1 }
}

/// Where number `at` of a member's small term lies, with its flag, in an inbox of the owner's exchange.
#[cube]
pub(super) fn flagged(
    exchange: u64,
    inbox: u32,
    #[comptime] owner: u32,
    #[comptime] member: u32,
    at: u32,
    flagged_bytes: u32,
    #[comptime] members: u32,
) -> u64 {
    let part = comptime!(part_of_inbox(owner, member));
    let place = u64::cast_from(inbox * comptime!(members - 1) + part);
    exchange
        + comptime!(EXCHANGE_HEADER_BYTES)
        + place * u64::cast_from(flagged_bytes)
        + u64::cast_from(at) * 8
}

/// Where a member's term lies in an inbox of the owner's exchange, behind those of small terms.
#[cube]
pub(super) fn letters(
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
pub(super) fn flag_of(member: u32, cube: u32) -> u64 {
    u64::cast_from((member * EXCHANGE_CUBES + cube) * 8)
}
