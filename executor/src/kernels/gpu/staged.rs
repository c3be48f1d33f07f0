//! Steps of a tile's activations on their way through shared memory: copied two steps ahead into one of three stages.
//!
//! - Rows of a stage are 64 bytes longer than a step, so that lanes read from different banks.

use cubecl::prelude::barrier::copy_async_checked;
use cubecl::prelude::*;

use super::instructions::Packed;
use crate::kernels::cpu::pack::BLOCK_PAIR;

/// Columns of a step.
pub(super) const STEP: usize = BLOCK_PAIR;
/// Steps that have a place in shared memory.
pub(super) const STAGES: usize = 3;
/// 16-byte vectors of a row's columns in a step.
pub(super) const VECTORS: usize = STEP / 8;
/// 16-byte vectors from row to row.
pub(super) const STRIDE: usize = VECTORS + 4;

/// Starts to copy a vector, or to put zeros in its place where it lies outside.
#[cube]
pub(super) fn copy_vector(
    input: &[Packed],
    from: usize,
    is_inside: bool,
    staged: &mut Shared<[Packed]>,
    to: usize,
) {
    let count = select(is_inside, 1usize, 0usize);
    copy_async_checked(&input[from..from + count], &mut staged[to..to + 1], comptime!(4u32));
}

/// Ends what a unit copies of a step.
#[cube]
pub(super) fn end_copies() {
    gpu_asm!("cp.async.commit_group;");
}

/// Waits until this unit's copies are there, but for the newest step's.
#[cube]
pub(super) fn wait_for_copies() {
    gpu_asm!("cp.async.wait_group 1;");
}

/// Where the stage before lies, in turn, of stages of `vectors` vectors each.
#[cube]
pub(super) fn stage_before(stage: usize, #[comptime] vectors: usize) -> usize {
    let last = comptime!((STAGES - 1) * vectors).runtime();
    select(stage == 0, last, stage - vectors)
}

/// Where the next stage lies, in turn.
#[cube]
pub(super) fn stage_after(stage: usize, #[comptime] vectors: usize) -> usize {
    let last = comptime!((STAGES - 1) * vectors).runtime();
    select(stage == last, 0usize.runtime(), stage + vectors)
}
