//! The parts of every token's context become one.
//!
//! - A cube takes one head. Everything that it reads it asks for at once: each unit a few elements of every so
//!   manieth part, each plane the stats of all parts.

use cubecl::prelude::{Cast as _, *};

use super::split::{Split, parts};
use super::{Decode, Partial};
use crate::kernels::gpu::attention::Shape;
use crate::kernels::gpu::attention::scores::{UNSEEN, weight};
use crate::kernels::gpu::device::{Gpu, Span, element};
use crate::kernels::gpu::order::{Order, element_of};
use crate::kernels::gpu::overlap::follow;

/// Units of a cube, unless a head alone takes more: WebGPU's default limit.
const UNITS: u32 = 256;

/// Which parts and elements the lanes of a cube read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Team {
    /// Units of a plane.
    plane: u32,
    /// Planes of a cube.
    planes: u32,
    /// Vectors of a head: a team has a unit for each.
    units: u32,
    /// Teams of a cube, each with parts of its own.
    teams: u32,
}

impl Team {
    fn new(head_dim: u32, vector: u32, plane: u32) -> Self {
        let units = head_dim / vector;
        let planes = UNITS.max(units).div_ceil(plane);
        Self { plane, planes, units, teams: planes * plane / units }
    }
}

impl Gpu {
    pub(super) fn merge(
        &self,
        call: &Decode<'_>,
        shape: Shape,
        split: Split,
        partial: &Partial,
        out: &Span,
    ) {
        let tokens = &call.tokens;
        let rows = tokens.tokens * shape.heads as usize;
        let head_dim = shape.head_dim as usize;
        let vector = 4.min(1 << head_dim.trailing_zeros());
        let team = Team::new(shape.head_dim, vector, self.plane());
        let (size, vectors) = (vector as usize, rows * head_dim / vector as usize);
        let order = Order::of(call.order);
        let made_rows = call.order.map_or(rows, |order| order.count() * shape.heads as usize);
        let made = order.element();
        // Only pairs are neighbours in operands.
        let together = if call.order.is_some() { 2 } else { size };
        // SAFETY: every index lies within its argument by the grid, and parts are no more than splits.
        unsafe {
            merge::launch_unchecked(
                &self.client,
                CubeCount::Static(tokens.tokens as u32, shape.heads, 1),
                CubeDim::new_2d(team.plane, team.planes),
                size,
                together,
                partial.values.argument(vectors * split.splits as usize, 4 * size),
                partial.stats.argument(rows * split.splits as usize * 2, 4),
                tokens.sequence.argument(tokens.tokens, 4),
                tokens.position.argument(tokens.tokens, 4),
                out.argument(made_rows * head_dim / together, made.bytes() as usize * together),
                shape.heads,
                split,
                team,
                self.is_cuda(),
                order,
                element(made),
            );
        }
    }
}

/// Cubes: tokens, heads.
#[cube(launch_unchecked)]
fn merge<F: Float, N: Size, M: Size>(
    partial: &[Vector<f32, N>],
    stats: &[f32],
    sequences: &[i32],
    positions: &[i32],
    out: &mut [Vector<F, M>],
    heads: u32,
    #[comptime] split: Split,
    #[comptime] team: Team,
    #[comptime] cuda: bool,
    #[comptime] order: Order,
    #[define(F)] _made: ElemType,
) {
    follow();
    let splits = comptime!(split.splits);
    let size = N::value();
    let head_dim = comptime!(team.units * size as u32);
    let token = CUBE_POS_X;
    let row = token * heads + CUBE_POS_Y;
    let unit = UNIT_POS_Y * team.plane + UNIT_POS_X;
    let place = unit % team.units;
    let member = unit / team.units;
    let range = parts(sequences[token as usize], positions[token as usize], split);
    if range.end <= range.base {
        if unit < team.units {
            put(out, Vector::<f32, N>::zeroed(), token, heads, unit, head_dim, order);
        }
        terminate!();
    }
    let count = (range.end - range.base).div_ceil(range.share);
    let first = row * splits;

    // What is behind the last part is read as the last, and weighs nothing.
    let each = comptime!(splits.div_ceil(team.teams));
    let mut held = Array::<Vector<f32, N>>::new(each as usize);
    #[unroll]
    for i in 0..each {
        let part = u32::min(member + i * team.teams, count - 1);
        held[i as usize] = partial[((first + part) * team.units + place) as usize];
    }
    let lane_parts = comptime!(splits.div_ceil(team.plane));
    let mut largest = Array::<f32>::new(lane_parts as usize);
    let mut totals = Array::<f32>::new(lane_parts as usize);
    #[unroll]
    for i in 0..lane_parts {
        let part = UNIT_POS_X + i * team.plane;
        let from = 2 * (first + u32::min(part, count - 1));
        largest[i as usize] = select(part < count, stats[from as usize], UNSEEN);
        totals[i as usize] = select(part < count, stats[(from + 1) as usize], 0.0f32);
    }

    let mut above = UNSEEN.runtime();
    #[unroll]
    for i in 0..lane_parts {
        above = above.max(largest[i as usize]);
    }
    let above = plane_max(above);
    let mut weights = Shared::<[f32]>::new_slice(comptime!((lane_parts * team.plane) as usize));
    let mut total = 0.0f32;
    #[unroll]
    for i in 0..lane_parts {
        let kept = weight(largest[i as usize] - above, cuda);
        total += totals[i as usize] * kept;
        if UNIT_POS_Y == 0 {
            weights[(UNIT_POS_X + i * team.plane) as usize] = kept;
        }
    }
    let total = plane_sum(total);
    sync_cube();

    let mut sum = Vector::<f32, N>::zeroed();
    #[unroll]
    for i in 0..each {
        let part = member + i * team.teams;
        if part < count {
            sum += held[i as usize] * Vector::<f32, N>::new(weights[part as usize]);
        }
    }
    let mut met =
        Shared::<[Vector<f32, N>]>::new_slice(comptime!((team.teams * team.units) as usize));
    if member < team.teams {
        met[unit as usize] = sum;
    }
    sync_cube();
    if unit < team.units {
        let mut merged = Vector::<f32, N>::zeroed();
        #[unroll]
        for other in 0..team.teams {
            merged += met[(other * team.units + unit) as usize];
        }
        let merged = merged / Vector::new(total) * Vector::new(comptime!(order.factor()));
        put(out, merged, token, heads, unit, head_dim, order);
    }
}

/// Puts a unit's elements of this cube's head.
#[cube]
fn put<F: Float, N: Size, M: Size>(
    out: &mut [Vector<F, M>],
    merged: Vector<f32, N>,
    token: u32,
    heads: u32,
    unit: u32,
    #[comptime] head_dim: u32,
    #[comptime] order: Order,
) {
    let (size, together) = (N::value(), M::value());
    let first = CUBE_POS_Y as usize * comptime!(head_dim as usize) + unit as usize * size;
    let features = heads as usize * comptime!(head_dim as usize);
    #[unroll]
    for part in 0..comptime!(size / together) {
        let mut elements = Vector::<f32, M>::empty();
        #[unroll]
        for i in 0..together {
            elements.insert(i, merged.extract(comptime!(part * together + i)));
        }
        let at = element_of(token as usize, first + comptime!(part * together), features, order);
        out[at / together] = Vector::<F, M>::cast_from(elements);
    }
}
