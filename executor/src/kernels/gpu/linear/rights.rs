//! Activations as right operands of matrix instructions, of a portion's columns (see [`crate::kernels::gpu::portion`]).
//!
//! - A float becomes two parts, a bf16 and what that lacks as another: together 16 bits of mantissa. Up to four tokens
//!   have both parts in one operand of eight columns, the lower ones in the last four; up to eight have two operands.
//! - A plane's lanes convert a portion once, four columns each, and pass it on through shared memory.

use cubecl::prelude::*;
use ir::tensor::Format;

use super::input::Input;
use super::matrix::LANE_SLOTS;
use super::total::{Shape, Totals};
use crate::kernels::gpu::bf12::ENLARGED;
use crate::kernels::gpu::instructions::{self, pack};
use crate::kernels::gpu::panel::Panel;
use crate::kernels::gpu::portion::{portion_blocks, portion_columns};
use crate::kernels::gpu::words::{Four, half_of};

/// Lanes of a plane.
pub(super) const PLANE: usize = instructions::PLANE as usize;
/// Columns of an operand.
pub(super) const OPERAND_TOKENS: usize = 8;
/// Tokens of which an operand holds both parts.
pub(super) const WHOLE_TOKENS: usize = OPERAND_TOKENS / 2;

/// A lane's registers of a right operand.
pub(super) type Right = Vector<u32, Const<2>>;

/// Operands whose products are added: those of all parts of the activations.
pub(super) fn parts(tokens: usize) -> usize {
    if tokens <= WHOLE_TOKENS { 1 } else { 2 }
}

/// Fours of columns in a portion.
fn fours(panel: Panel) -> usize {
    portion_columns(panel) / 4
}

/// Fours that a lane converts of a portion.
fn rounds(tokens: usize, panel: Panel) -> usize {
    tokens.div_ceil(PLANE / fours(panel))
}

/// Registers from one step of four columns a lane to the next: half a plane stores to all banks.
fn step_stride(panel: Panel) -> usize {
    PLANE + 8 / portion_blocks(panel)
}

/// Registers of a plane.
fn plane_stride(tokens: usize, panel: Panel) -> usize {
    parts(tokens) * portion_blocks(panel) * 2 * step_stride(panel)
}

/// A plane's conversion of floats.
#[derive(CubeType)]
pub(super) struct Conversion {
    /// `[plane][part][block][step][lane]`.
    staged: Shared<[Right]>,
    /// A lane's fours of the next portion, `[round]`.
    x: Array<Four>,
    /// What they are multiplied with, as it was loaded.
    factors: Four,
    /// Sums of their squares, `[round]`.
    squares: Array<f32>,
    /// Where the lane stores its four columns of the first token.
    to: usize,
    /// Where it finds its first operand.
    from: usize,
    lane: usize,
}

#[cube]
impl Conversion {
    /// Room for the portions of a cube of `planes` planes; none where nothing is converted.
    pub(super) fn new(
        lane: usize,
        plane: usize,
        #[comptime] planes: usize,
        #[comptime] tokens: usize,
        #[comptime] panel: Panel,
    ) -> Conversion {
        let rounds = comptime!(rounds(tokens, panel));
        let stride = comptime!(plane_stride(tokens, panel));
        let four = lane % comptime!(fours(panel));
        let step = four / 8 * 2 + four % 2;
        let mut squares = Array::<f32>::new(rounds);
        #[unroll]
        for round in 0..rounds {
            squares[round] = 0.0;
        }
        Conversion {
            staged: Shared::new_slice(comptime!((planes * stride).max(1))),
            x: Array::new(rounds),
            factors: Four::new(1.0),
            squares,
            to: plane * stride + step * comptime!(step_stride(panel)) + four % 8 / 2,
            from: plane * stride + lane,
            lane,
        }
    }

    /// Starts to load a portion.
    pub(super) fn load<N: Size>(
        &mut self,
        input: &Input<N>,
        portion: usize,
        #[comptime] tokens: usize,
        #[comptime] panel: Panel,
    ) {
        let fours = comptime!(fours(panel));
        let column = portion * comptime!(portion_columns(panel)) + 4 * (self.lane % fours);
        self.factors = input.load_factors(column);
        #[unroll]
        for round in 0..comptime!(rounds(tokens, panel)) {
            let token = self.token(round, panel).min(comptime!(tokens - 1));
            self.x[round] = input.load_four(token, column);
        }
    }

    /// Converts what was loaded, for all lanes of the plane.
    pub(super) fn convert<N: Size>(
        &mut self,
        input: &Input<N>,
        #[comptime] tokens: usize,
        #[comptime] panel: Panel,
    ) {
        #[unroll]
        for round in 0..comptime!(rounds(tokens, panel)) {
            let mut x = self.x[round];
            if comptime!(input.is_normed) {
                #[unroll]
                for i in 0..4usize {
                    self.squares[round] += x.extract(i) * x.extract(i);
                }
                x *= input.offset_factors(self.factors);
            }
            if comptime!(matches!(panel.format, Format::Bf12)) {
                x *= Four::new(ENLARGED);
            }
            let mut upper = Right::empty();
            let mut lower = Right::empty();
            #[unroll]
            for i in 0..2usize {
                let (a, b) = (x.extract(comptime!(2 * i)), x.extract(comptime!(2 * i + 1)));
                let pair = pack(a, b, true);
                upper.insert(i, pair);
                let a = a - half_of(pair, 0usize, Format::Bf16);
                let b = b - half_of(pair, 1usize, Format::Bf16);
                lower.insert(i, pack(a, b, true));
            }
            let token = self.token(round, panel);
            let to_lower = if comptime!(parts(tokens) == 1) {
                comptime!(4 * WHOLE_TOKENS)
            } else {
                comptime!(plane_stride(tokens, panel) / 2)
            };
            let at = self.to + 4 * token;
            self.staged[at] = upper;
            self.staged[at + to_lower] = lower;
        }
    }

    /// The operand of one part, block and step.
    pub(super) fn operand(
        &self,
        #[comptime] part: usize,
        #[comptime] block: usize,
        #[comptime] step: usize,
        #[comptime] panel: Panel,
    ) -> Right {
        let step = comptime!((part * portion_blocks(panel) + block) * 2 + step);
        self.staged[self.from + comptime!(step * step_stride(panel))]
    }

    /// The token whose columns a lane converts in a round; beyond the last in places that no sum comes from.
    fn token(&self, #[comptime] round: usize, #[comptime] panel: Panel) -> usize {
        let fours = comptime!(fours(panel));
        self.lane / fours + comptime!(round * PLANE / fours)
    }

    /// Puts the plane's sums of squares, as those of all slots from `first_slot` on.
    pub(super) fn put_squares(
        &self,
        totals: &mut Totals,
        group: usize,
        first_slot: usize,
        #[comptime] shape: Shape,
        #[comptime] panel: Panel,
    ) {
        let fours = comptime!(fours(panel));
        #[unroll]
        for round in 0..comptime!(rounds(shape.tokens, panel)) {
            let mut sum = self.squares[round];
            let mut distance = comptime!(fours / 2);
            #[unroll]
            for _ in 0..comptime!(fours.ilog2()) {
                sum += plane_shuffle_xor(sum, distance as u32);
                comptime!(distance /= 2);
            }
            let token = self.token(round, panel);
            let slot = self.lane % fours;
            if token < shape.tokens && slot < LANE_SLOTS {
                totals.put_square(group, first_slot + slot, token, sum, shape);
            }
        }
    }
}
