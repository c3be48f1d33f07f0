//! Values as operands of inline assembly.

use cubecl::prelude::*;

/// The value that a variable holds now: assembly that is given the variable is given its address.
#[cube]
pub(super) fn held<T: CubePrimitive>(value: T) -> T {
    intrinsic!(|scope| value.read_value(scope).into())
}
