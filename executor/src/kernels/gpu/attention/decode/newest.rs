//! Newest tokens that are on their way into the cache: each cube prepares the query heads that it works on, and where
//! its part ends with the newest token, key and value of that token too.

use cubecl::prelude::*;

use super::matrix::{Rows, is_head};
use crate::kernels::gpu::attention::Shape;
use crate::kernels::gpu::attention::heads::{Angle, Fresh};
use crate::kernels::gpu::instructions::{PLANE, Packed, pack};

/// Where a cube stands.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Place {
    pub(super) token: u32,
    pub(super) kv_head: u32,
    /// The first of its query heads, among those of the device and among those of the key head.
    pub(super) first_head: i32,
    pub(super) in_group: u32,
    /// The cache row of the newest token.
    pub(super) newest: u32,
    /// Whether the newest token is in the cube's part.
    pub(super) has_newest: bool,
}

/// Finds the angles of a unit's elements of the cube's heads.
#[cube]
pub(super) fn find_angles(
    fresh: &Fresh,
    token: u32,
    angles: &mut Sequence<Angle>,
    #[comptime] shape: Shape,
    #[comptime] rows: Rows,
) {
    let units = comptime!(rows.planes * PLANE);
    let unit = UNIT_POS_Y * PLANE + UNIT_POS_X;
    #[comptime]
    match &fresh.turn {
        ComptimeOption::Some(turn) => {
            #[unroll]
            for i in 0..comptime!(((rows.heads + 1) * shape.head_dim).div_ceil(units)) {
                angles.push(turn.angle(token, (unit + i * units) % comptime!(shape.head_dim)));
            }
        }
        ComptimeOption::None => {}
    }
}

/// The cube's query heads in shared memory, f32 `[rows.heads + 1, head_dim]`; the last row is for the key.
///
/// Key and value are in the cache for this cube when it returns. Other cubes may write the same there and read only
/// what they wrote.
#[cube]
pub(super) fn prepare(
    fresh: &Fresh,
    queries: &[f32],
    keys: &mut [Packed],
    values: &mut [Packed],
    angles: &Sequence<Angle>,
    place: Place,
    #[comptime] shape: Shape,
    #[comptime] rows: Rows,
) -> Shared<[f32]> {
    let head_dim = comptime!(shape.head_dim);
    let heads = comptime!(rows.heads);
    let vectors = comptime!(head_dim / 8);
    let elements = comptime!((rows.heads + 1) * head_dim);
    let (plane, lane) = (UNIT_POS_Y, UNIT_POS_X);
    let unit = plane * PLANE + lane;
    let kv_row = place.token * comptime!(shape.kv_heads) + place.kv_head;

    // Everything is loaded before the first barrier.
    let writes_value = place.has_newest && plane == 0 && lane < vectors;
    let mut value = Packed::zeroed();
    if writes_value {
        let from = kv_row * head_dim + 8 * lane;
        #[unroll]
        for i in 0..4u32 {
            let at = from + 2 * i;
            let pair = pack(fresh.values[at as usize], fresh.values[(at + 1) as usize], rows.bf16);
            value.insert(i as usize, pair);
        }
    }
    let per_lane = comptime!(head_dim / PLANE);
    let mut bare = Shared::<[f32]>::new_slice(elements as usize);
    #[unroll]
    for round in 0..comptime!((rows.heads + 1).div_ceil(rows.planes)) {
        let slot = round * comptime!(rows.planes) + plane;
        let head = place.first_head + i32::cast_from(slot);
        let is_query = is_head(head, slot, place.in_group, shape, rows);
        let is_key = slot == heads && place.has_newest;
        let mut held = Array::<f32>::new(per_lane as usize);
        #[unroll]
        for i in 0..per_lane {
            let at = lane + i * PLANE;
            let mut element = 0.0f32;
            if is_query {
                let row = place.token * comptime!(shape.heads) + u32::cast_from(head);
                element = queries[(row * head_dim + at) as usize];
            }
            if is_key {
                element = fresh.keys[(kv_row * head_dim + at) as usize];
            }
            held[i as usize] = element;
        }
        if is_query {
            fresh.query_norm.apply(&mut held, lane, head_dim, PLANE);
        }
        if is_key {
            fresh.key_norm.apply(&mut held, lane, head_dim, PLANE);
        }
        if slot <= heads {
            #[unroll]
            for i in 0..per_lane {
                bare[(slot * head_dim + lane + i * PLANE) as usize] = held[i as usize];
            }
        }
    }
    sync_cube();

    let prepared = turned(fresh, bare, angles, unit, shape, rows);
    if place.has_newest {
        let cached = place.newest * vectors + lane;
        if writes_value {
            values[cached as usize] = value;
        }
        if plane == 1 && lane < vectors {
            let mut key = Packed::zeroed();
            #[unroll]
            for i in 0..4u32 {
                let at = heads * head_dim + 8 * lane + 2 * i;
                let pair = pack(prepared[at as usize], prepared[(at + 1) as usize], rows.bf16);
                key.insert(i as usize, pair);
            }
            keys[cached as usize] = key;
        }
        // What the cube wrote to memory before the barrier, it reads behind it.
        sync_cube();
    }
    prepared
}

/// The heads of a cube, rotated.
#[cube]
fn turned(
    fresh: &Fresh,
    bare: Shared<[f32]>,
    angles: &Sequence<Angle>,
    unit: u32,
    #[comptime] shape: Shape,
    #[comptime] rows: Rows,
) -> Shared<[f32]> {
    #[comptime]
    match &fresh.turn {
        ComptimeOption::Some(_) => {
            let head_dim = comptime!(shape.head_dim);
            let elements = comptime!((rows.heads + 1) * shape.head_dim);
            let mut turned = Shared::<[f32]>::new_slice(elements as usize);
            #[unroll]
            for i in 0..comptime!(elements.div_ceil(rows.planes * PLANE)) {
                let at = unit + i * comptime!(rows.planes * PLANE);
                if at < elements {
                    let angle = angles.index(i as usize);
                    let first = at / head_dim * head_dim;
                    turned[at as usize] = bare[at as usize] * angle.cos
                        + bare[(first + angle.other) as usize] * angle.sin;
                }
            }
            sync_cube();
            turned
        }
        ComptimeOption::None => bare,
    }
}
