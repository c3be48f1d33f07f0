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

/// Writes each tile's expert, first slot in the order, and slots; no slots where there is no such tile. One cube does.
#[cube(launch_unchecked)]
pub(super) fn list_tiles(
    starts: &[u32],
    tiles: &mut [u32],
    experts: usize,
    all: usize,
    #[comptime] tile: u32,
    #[comptime] plane: usize,
) {
    let unit = UNIT_POS as usize;
    let planes = comptime!(UNITS / plane);
    let own_plane = unit / plane;
    let mut totals = Shared::<[u32]>::new_slice(planes);
    // Tiles of the experts before those of a round.
    let mut before = 0u32;
    for first in range_stepped(0, experts, UNITS) {
        let expert = first + unit;
        let mut start = 0u32;
        let mut end = 0u32;
        if expert < experts {
            start = starts[expert];
            end = starts[expert + 1];
        }
        let own = (end - start).div_ceil(tile);
        let mut at = before + plane_exclusive_sum(own);
        let plane_own = plane_sum(own);
        if unit.is_multiple_of(plane) {
            totals[own_plane] = plane_own;
        }
        sync_cube();
        for other in 0..planes {
            let total = totals[other];
            before += total;
            if other < own_plane {
                at += total;
            }
        }
        sync_cube();
        while start < end {
            let to = 3 * at as usize;
            tiles[to] = expert as u32;
            tiles[to + 1] = start;
            tiles[to + 2] = u32::min(end - start, tile.runtime());
            start += tile;
            at += 1;
        }
    }
    for number in range_stepped(before as usize + unit, all, UNITS) {
        tiles[3 * number + 2] = 0;
    }
}
