//! Kernels of our own, by kind of device.

pub mod cpu;
pub mod gpu;

use std::ops::Range;

use ir::op::Then;

/// Which matrices of a linear each launch, or dispatch, takes: neighbours of one kind; a gate and what it multiplies
/// together.
pub(crate) fn launches<M, K: PartialEq>(
    matrices: &[M],
    then: Then,
    kind: impl Fn(&M) -> K,
) -> Vec<Range<usize>> {
    let is_gated = matches!(then, Then::Gate(_));
    let mut end = 0;
    let alike = matrices.chunk_by(|a, b| is_gated || kind(a) == kind(b));
    alike
        .map(|alike| {
            let first = end;
            end += alike.len();
            first..end
        })
        .collect()
}
