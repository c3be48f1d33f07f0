//! Slots in the order of their experts, and the tiles that they are cut into.

use cubecl::prelude::*;

/// Units of a cube that looks for an expert's slots: a whole number of planes.
pub(super) const UNITS: usize = 256;

/// Writes where each expert's slots start, and the slots. Those of experts that are not held are left out.
///
/// A cube for each expert looks at all slots; one more finds the end of the last expert's.
#[cube(launch_unchecked)]
pub(super) fn sort_slots(
    ids: &[i32],
    starts: &mut [u32],
    order: &mut [u32],
    first_expert: i32,
    experts: i32,
    slots: usize,
    #[comptime] plane: usize,
) {
    let expert = CUBE_POS_X as i32;
    let unit = UNIT_POS as usize;
    let mut before = 0u32;
    let mut own = 0u32;
    for slot in range_stepped(unit, slots, UNITS) {
        let id = ids[slot] - first_expert;
        if id >= 0 && id < experts {
            if id < expert {
                before += 1;
            }
            if id == expert {
                own += 1;
            }
        }
    }
    let planes = comptime!(UNITS / plane);
    let mut totals = Shared::<[u32]>::new_slice(comptime!(2 * planes));
    let own_plane = unit / plane;
    let own_before = plane_exclusive_sum(own);
    let plane_own = plane_sum(own);
    let plane_before = plane_sum(before);
    if unit.is_multiple_of(plane) {
        totals[2 * own_plane] = plane_own;
        totals[2 * own_plane + 1] = plane_before;
    }
    sync_cube();
    let mut start = 0u32;
    let mut at = own_before;
    for other in 0..planes {
        start += totals[2 * other + 1];
        if other < own_plane {
            at += totals[2 * other];
        }
    }
    if unit == 0 {
        starts[expert as usize] = start;
    }
    if expert < experts && own > 0 {
        at += start;
        for slot in range_stepped(unit, slots, UNITS) {
            if ids[slot] - first_expert == expert {
                order[at as usize] = slot as u32;
                at += 1;
            }
        }
    }
}

/// Writes each tile's expert, first slot in the order, and slots; no slots where there is no such tile.
#[cube(launch_unchecked)]
pub(super) fn list_tiles(
    starts: &[u32],
    tiles: &mut [u32],
    experts: u32,
    all: u32,
    #[comptime] tile: u32,
) {
    let number = ABSOLUTE_POS as u32;
    if number < all {
        let mut left = number;
        let mut found = experts;
        let mut first = 0u32;
        let mut slots = 0u32;
        let mut start = starts[0];
        for expert in 0..experts {
            let end = starts[(expert + 1) as usize];
            let count = (end - start).div_ceil(tile);
            if found == experts {
                if left < count {
                    found = expert;
                    first = start + left * tile;
                    slots = u32::min(end - first, tile.runtime());
                } else {
                    left -= count;
                }
            }
            start = end;
        }
        let at = (3 * number) as usize;
        tiles[at] = found;
        tiles[at + 1] = first;
        tiles[at + 2] = slots;
    }
}
