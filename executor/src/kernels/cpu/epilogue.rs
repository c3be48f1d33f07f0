//! What is done with a tile of products on its way to the output: bias, activation or gate, residual.

#![expect(unsafe_code, reason = "members write disjoint columns of one output")]

use ir::op::Then;

use super::activation::activated;
use super::disjoint::DisjointMut;
use super::isa::Isa;
use super::lanes::{Kernel, LANES, Lanes, vectorize};
use super::pack::PANEL;
use super::tile::Tile;

/// Where a tile goes and what is added on the way.
#[derive(Clone, Copy)]
pub(super) struct Target<'a> {
    /// `[rows, columns]`, row after row.
    pub(super) out: DisjointMut<'a, f32>,
    pub(super) columns: usize,
    /// One term for each column; of a gate, for the gate and for what it multiplies.
    pub(super) biases: [Option<&'a [f32]>; 2],
    pub(super) then: Then,
    /// Of the shape of the output.
    pub(super) residual: Option<&'a [f32]>,
}

impl Target<'_> {
    /// Finishes the first `rows` rows of `tile` and writes them from `first_row` and `first_column` on.
    ///
    /// `other` holds the products that a gate multiplies.
    ///
    /// # Safety
    /// No one else touches these elements of the output.
    pub(super) unsafe fn write(
        &self,
        isa: Isa,
        tile: &Tile,
        other: &Tile,
        rows: usize,
        (first_row, first_column): (usize, usize),
    ) {
        vectorize(isa, Write { target: self, tile, other, rows, first_row, first_column });
    }
}

/// One call of [`Target::write`], with what its caller vouches for.
struct Write<'a> {
    target: &'a Target<'a>,
    tile: &'a Tile,
    other: &'a Tile,
    rows: usize,
    first_row: usize,
    first_column: usize,
}

impl Kernel for Write<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { target, tile, other, rows, first_row, first_column } = self;
        let width = PANEL.min(target.columns - first_column);
        for (row, (values, others)) in tile.iter().zip(other).enumerate().take(rows) {
            let start = (first_row + row) * target.columns + first_column;
            // SAFETY: these elements of the output are this call's alone.
            let out = unsafe { target.out.part(start..start + width) };
            for (vector, out) in out.chunks_mut(LANES).enumerate() {
                let at = vector * LANES;
                let end = at + out.len();
                let with_bias = |value: L, bias: Option<&[f32]>| match bias {
                    Some(bias) => value.add(L::read(&bias[first_column + at..first_column + end])),
                    None => value,
                };
                let mut value = with_bias(L::read(&values[at..]), target.biases[0]);
                match target.then {
                    Then::Nothing => {}
                    Then::Activate(activation) => value = activated(activation, value),
                    Then::Gate(activation) => {
                        let factor = with_bias(L::read(&others[at..]), target.biases[1]);
                        value = activated(activation, value).mul(factor);
                    }
                }
                if let Some(residual) = target.residual {
                    value = value.add(L::read(&residual[start + at..start + end]));
                }
                value.write(out);
            }
        }
    }
}
