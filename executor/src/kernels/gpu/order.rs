//! How rows of activations lie that a kernel writes.

use cubecl::prelude::*;
use ir::tensor::DType;

use super::bf12::ENLARGED;
use super::portion::BLOCK;
use super::warpgroup::RightOperands;

/// Elements of an operand that lie side by side.
const EIGHT: usize = 8;
/// Eights of a block.
const EIGHTS: usize = BLOCK / EIGHT;

/// How rows lie, when a kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Order {
    /// Token after token.
    Rows,
    /// As a linear takes them: see [`RightOperands`].
    Operands {
        /// Tokens of a stack.
        tokens: usize,
        /// As there.
        is_spread: bool,
        /// Whether they are multiplied with [`ENLARGED`].
        is_enlarged: bool,
    },
}

impl Order {
    /// That of operands; without any, rows.
    pub(super) fn of(operands: Option<RightOperands>) -> Self {
        operands.map_or(Self::Rows, |RightOperands { tokens, is_spread, factor, .. }| {
            Self::Operands { tokens, is_spread, is_enlarged: factor == ENLARGED }
        })
    }

    /// The type of elements: operands are in bf16.
    pub(super) fn element(self) -> DType {
        match self {
            Self::Rows => DType::F32,
            Self::Operands { .. } => DType::Bf16,
        }
    }

    /// What elements are multiplied with.
    pub(super) fn factor(self) -> f32 {
        if matches!(self, Self::Operands { is_enlarged: true, .. }) { ENLARGED } else { 1.0 }
    }
}

/// Where a feature of a token lies, in elements. One with an even number has the next behind it.
#[cube]
pub(super) fn element_of(
    token: usize,
    feature: usize,
    features: usize,
    #[comptime] order: Order,
) -> usize {
    match order {
        Order::Rows => token * features + feature,
        Order::Operands { tokens, is_spread, .. } => {
            let (eight, of_eight) = if is_spread {
                // An eight has every fourth pair of a block.
                let (block, pair) = (feature / BLOCK, feature % BLOCK / 2);
                (block * EIGHTS + pair % EIGHTS, pair / EIGHTS * 2 + feature % 2)
            } else {
                (feature / EIGHT, feature % EIGHT)
            };
            let stack = token / tokens * (features / EIGHT);
            ((stack + eight) * tokens + token % tokens) * EIGHT + of_eight
        }
    }
}
