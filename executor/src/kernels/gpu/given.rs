//! Which of the operands that a launch may leave out it has, as a kernel's constant.
//!
//! CubeCL 0.11.3 finds compiled kernels on disk by a hash in which an operand that is left out leaves no trace: a linear
//! with a bias and no residual would be taken for one with a residual and no bias, of any plan that ran before. So every
//! kernel that may lack one of several operands has this number among its constants, which are hashed.

/// A bit for each operand that is there, the first one lowest.
pub(super) fn given(operands: impl IntoIterator<Item = bool>) -> u32 {
    operands.into_iter().enumerate().map(|(at, is_there)| u32::from(is_there) << at).sum()
}
