//! Heads as linears leave them, and what is done to them before attention: a norm, then a rotation.

use cubecl::prelude::*;
use ir::op::{self, NormKind, Pairing};

use super::append::{Append, NormWeights, Rotation};
use crate::kernels::gpu::device::Span;
use crate::kernels::gpu::given::given;

/// Which norm heads have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    Nothing,
    Rms,
    Layer,
}

/// The norm of a head.
#[derive(CubeType, CubeLaunch)]
pub(super) struct HeadNorm {
    /// `[head_dim]`.
    scale: ComptimeOption<Box<[f32]>>,
    /// `[head_dim]`.
    bias: ComptimeOption<Box<[f32]>>,
    epsilon: f32,
    /// Added to each factor.
    offset: f32,
    #[cube(comptime)]
    kind: Kind,
    /// Which of `scale` and `bias` there are: see [`crate::kernels::gpu::given`].
    #[expect(dead_code, reason = "kernels are told apart by it")]
    #[cube(comptime)]
    given: u32,
}

/// The rotation of heads.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Turn {
    /// `[table_rows, dims]`: cosines, then sines.
    table: Box<[f32]>,
    /// `[tokens]`: rows of the table.
    rows: Box<[i32]>,
    /// Leading elements that turn.
    #[cube(comptime)]
    dims: u32,
    /// Whether those that turn together are half of them apart; neighbours otherwise.
    #[cube(comptime)]
    halves: bool,
}

/// What becomes of one element: itself times `cos`, plus another times `sin`.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Angle {
    pub(super) cos: f32,
    pub(super) sin: f32,
    /// The other's place in the head.
    pub(super) other: u32,
}

/// Heads of a run's tokens as linears leave them, but for the queries.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Fresh {
    /// `[tokens, kv_heads · head_dim]`.
    pub(super) keys: Box<[f32]>,
    /// `[tokens, kv_heads · head_dim]`.
    pub(super) values: Box<[f32]>,
    pub(super) query_norm: HeadNorm,
    pub(super) key_norm: HeadNorm,
    pub(super) turn: ComptimeOption<Turn>,
}

impl Append<'_> {
    /// As an argument of kernels.
    pub(super) fn fresh(&self) -> FreshLaunch {
        let op::Attention { kv_heads, head_dim, .. } = *self.attention;
        let tokens = self.tokens.tokens;
        let count = tokens * (kv_heads * head_dim) as usize;
        let norm = |norm: &Option<op::Norm>, weights: NormWeights<'_>| {
            let floats = |span: Option<&Span>| span.map(|span| span.argument(head_dim as usize, 4));
            let (kind, epsilon, offset) = match norm {
                None => (Kind::Nothing, 0.0, 0.0),
                Some(norm) => {
                    let kind = match norm.kind {
                        NormKind::Rms => Kind::Rms,
                        NormKind::Layer => Kind::Layer,
                    };
                    (kind, norm.epsilon, norm.scale_offset)
                }
            };
            let (scale, bias) = (floats(weights.scale), floats(weights.bias));
            let given = given([scale.is_some(), bias.is_some()]);
            HeadNormLaunch::new(scale.into(), bias.into(), epsilon, offset, kind, given)
        };
        let turn = |rotation: Rotation<'_>| {
            let Rotation { pairing, dims, table, table_rows, rows } = rotation;
            TurnLaunch::new(
                table.argument(table_rows * dims as usize, 4),
                rows.argument(tokens, 4),
                dims,
                pairing == Pairing::Halves,
            )
        };
        FreshLaunch::new(
            self.keys.argument(count, 4),
            self.values.argument(count, 4),
            norm(&self.attention.q_norm, self.query_norm),
            norm(&self.attention.k_norm, self.key_norm),
            self.rotation.filter(|rotation| rotation.dims > 0).map(turn).into(),
        )
    }
}

#[cube]
impl HeadNorm {
    /// Normalises the head that a plane holds, element `lane + i · plane` as `held[i]`.
    pub(super) fn apply(
        &self,
        held: &mut Array<f32>,
        lane: u32,
        #[comptime] head_dim: u32,
        #[comptime] plane: u32,
    ) {
        let kind = comptime!(self.kind);
        let per_lane = comptime!(head_dim.div_ceil(plane));
        let count = comptime!(head_dim as f32);
        if comptime!(kind == Kind::Layer) {
            let mut sum = 0.0f32;
            #[unroll]
            for i in 0..per_lane {
                sum += held[i as usize];
            }
            let mean = plane_sum(sum) / count;
            #[unroll]
            for i in 0..per_lane {
                if lane + i * plane < head_dim {
                    held[i as usize] -= mean;
                }
            }
        }
        if comptime!(kind != Kind::Nothing) {
            let mut squares = 0.0f32;
            #[unroll]
            for i in 0..per_lane {
                squares += held[i as usize] * held[i as usize];
            }
            let factor = (plane_sum(squares) / count + self.epsilon).inverse_sqrt();
            #[unroll]
            for i in 0..per_lane {
                let at = lane + i * plane;
                if at < head_dim {
                    let mut value = held[i as usize] * factor;
                    #[comptime]
                    match self.scale.clone() {
                        ComptimeOption::Some(scale) => value *= scale[at as usize] + self.offset,
                        ComptimeOption::None => {}
                    }
                    #[comptime]
                    match self.bias.clone() {
                        ComptimeOption::Some(bias) => value += bias[at as usize],
                        ComptimeOption::None => {}
                    }
                    held[i as usize] = value;
                }
            }
        }
    }
}

#[cube]
impl Turn {
    /// What becomes of element `at` of a token's heads.
    pub(super) fn angle(&self, token: u32, at: u32) -> Angle {
        let dims = comptime!(self.dims);
        let pairs = comptime!(self.dims / 2);
        let mut angle = Angle { cos: 1.0f32, sin: 0.0f32, other: at };
        if at < dims {
            let mut pair = at / 2;
            let mut other = at ^ 1;
            let mut is_first = at.is_multiple_of(2);
            if comptime!(self.halves) {
                pair = at % pairs;
                is_first = at < pairs;
                other = (at + pairs) % dims;
            }
            let row = u32::cast_from(self.rows[token as usize]) * dims;
            let sin = self.table[(row + pairs + pair) as usize];
            angle.cos = self.table[(row + pair) as usize];
            angle.sin = select(is_first, -sin, sin);
            angle.other = other;
        }
        angle
    }
}
