//! How many bytes a weight takes on a device: sizes of the layouts that executors hold weights in.
//!
//! - A NUMA node packs a matrix in panels of 32 rows; the last panel is as large as the others. Columns are padded
//!   to what its instructions take at once. Tables that GPUs reach lie there as GPUs hold them, which takes no more; they
//!   are counted so, too.
//! - A GPU packs block formats and stacks the same way, and holds other floats row after row without padding, as
//!   vendor libraries take them, where rows are whole loads.
//! - A panel of bfloat16 in 12 bits starts with a word for each row.
//! - Vectors are never packed, and a stack is its matrices one after the other.

use smallvec::smallvec;

use crate::machine::DeviceKind;
use crate::tensor::{DType, Dim, Format, TensorType};

/// Rows of a panel: two vectors of 16 lanes.
pub const PANEL_ROWS: u32 = 32;
/// Columns of one step through a panel of a block format: two blocks.
pub const BLOCK_PAIR_COLUMNS: u32 = 64;
/// Columns that panels of bfloat16 are padded to: the depth of a matrix tile.
pub const BF16_COLUMNS: u32 = 32;
/// Rows of activations that a processor multiplies at once, at most: a strip.
pub const STRIP_ROWS: u64 = 32;
/// Most panels of a block, what a processor with tiles keeps the sums of; of a gate, those of both matrices together.
pub const BLOCK_PANELS: u64 = 8;
/// Most strips of a block.
pub const BLOCK_STRIPS: u64 = 16;
/// Columns of a block that are multiplied before the next panel's.
pub const BLOCK_COLUMNS: u64 = 256;
/// Bytes in front of a row's share of a panel in 12 bits: its base exponent.
const BASE_BYTES: u64 = 4;

/// Bytes that one unit of a GPU loads at once: every row of a matrix that is not packed is a multiple of this long.
pub const LOAD_BYTES: u64 = 16;

/// Columns of a packed matrix, padding included.
pub fn packed_columns(format: Format, columns: u64) -> u64 {
    let multiple = match format {
        Format::F32 | Format::F16 => 1,
        Format::Bf16 | Format::Bf12 => BF16_COLUMNS,
        Format::Q8 | Format::Q4 => BLOCK_PAIR_COLUMNS,
    };
    columns.checked_next_multiple_of(u64::from(multiple)).unwrap_or(u64::MAX)
}

/// Bytes of one panel; at most `u64::MAX`.
pub fn panel_bytes(format: Format, columns: u64) -> u64 {
    let head = match format {
        Format::Bf12 => u64::from(PANEL_ROWS) * BASE_BYTES,
        Format::F32 | Format::F16 | Format::Bf16 | Format::Q8 | Format::Q4 => 0,
    };
    head.saturating_add(format.bytes(u64::from(PANEL_ROWS), packed_columns(format, columns)))
}

/// Bytes of a packed matrix; at most `u64::MAX`.
pub fn packed_bytes(format: Format, rows: u64, columns: u64) -> u64 {
    rows.div_ceil(u64::from(PANEL_ROWS)).saturating_mul(panel_bytes(format, columns))
}

/// Whether a device of that kind holds a weight in panels.
pub fn has_panels(kind: &DeviceKind, format: Format, shape: &[u32]) -> bool {
    match kind {
        DeviceKind::Numa { .. } => shape.len() > 1,
        DeviceKind::Gpu { .. } => gpu_has_panels(format, shape),
    }
}

/// Whether a GPU holds a weight in panels.
pub fn gpu_has_panels(format: Format, shape: &[u32]) -> bool {
    let (_, _, columns) = dimensions(shape);
    let is_packed = format.float().is_none() || !has_whole_loads(format, columns);
    shape.len() > 2 || shape.len() > 1 && is_packed
}

/// Features of a head that kernels of NUMA nodes store at once: those of a 32-bit word, but f16 is stored singly.
pub fn stored_together(dtype: DType) -> u32 {
    match dtype {
        DType::F32 | DType::F16 | DType::I32 | DType::U8 => 1,
        DType::Bf16 => 2,
        DType::I8 => 4,
    }
}

/// Whether units of a GPU load whole rows of a matrix that is not packed.
pub(crate) fn has_whole_loads(format: Format, columns: u64) -> bool {
    format.bytes(1, columns).is_multiple_of(LOAD_BYTES)
}

/// Bytes that a device of that kind needs for a weight; at most `u64::MAX`.
pub fn held_bytes(kind: &DeviceKind, format: Format, shape: &[u32]) -> u64 {
    let (stack, rows, columns) = dimensions(shape);
    let matrix = if has_panels(kind, format, shape) {
        packed_bytes(format, rows, columns)
    } else {
        format.bytes(rows, columns)
    };
    stack.saturating_mul(matrix)
}

/// What a device receives of a weight that a NUMA node packed: its panels, one after the other.
///
/// `None` for a vector. Sizes beyond `u32::MAX` are cut off there: no device has as much memory.
pub fn packed_type(format: Format, shape: &[u32]) -> Option<TensorType> {
    if shape.len() < 2 {
        return None;
    }
    let (stack, rows, columns) = dimensions(shape);
    let panels = stack.saturating_mul(rows.div_ceil(u64::from(PANEL_ROWS)));
    let fixed = |size: u64| Dim::Fixed(u32::try_from(size).unwrap_or(u32::MAX));
    let shape = smallvec![fixed(panels), fixed(panel_bytes(format, columns))];
    Some(TensorType { dtype: DType::U8, shape })
}

/// Matrices, rows of each and columns of a weight.
fn dimensions(shape: &[u32]) -> (u64, u64, u64) {
    let size = |&size: &u32| u64::from(size);
    match shape {
        [] => (1, 1, 1),
        [columns] => (1, 1, size(columns)),
        [stack @ .., rows, columns] => {
            (stack.iter().map(size).fold(1, u64::saturating_mul), size(rows), size(columns))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_matrix_is_packed_in_whole_panels_of_padded_columns() {
        assert_eq!(packed_bytes(Format::F32, 33, 5), 2 * 32 * 5 * 4);
        assert_eq!(packed_bytes(Format::Bf16, 1, 33), 32 * 64 * 2);
        assert_eq!(packed_bytes(Format::Bf12, 1, 33), 32 * (64 * 3 / 2 + 4));
        assert_eq!(packed_bytes(Format::Q8, 32, 65), 32 * 4 * 34);
        assert_eq!(packed_bytes(Format::Q4, 32, 64), 32 * 2 * 18);
    }

    #[test]
    fn a_device_holds_what_its_kernels_read() {
        let numa = DeviceKind::Numa { node: 0, cpus: vec![0] };
        let gpu = DeviceKind::Gpu {
            ordinal: 0,
            reserved_bytes: 0,
            library_bytes: 0,
            launch_bytes: 0,
            has_warpgroups: false,
        };
        assert_eq!(held_bytes(&numa, Format::Bf16, &[2, 33, 40]), 2 * 64 * 64 * 2);
        assert_eq!(held_bytes(&gpu, Format::Bf16, &[33, 40]), 33 * 40 * 2);
        assert_eq!(held_bytes(&gpu, Format::Bf16, &[33, 36]), 64 * 64 * 2);
        assert_eq!(held_bytes(&gpu, Format::Bf16, &[2, 33, 40]), 2 * 64 * 64 * 2);
        assert_eq!(held_bytes(&gpu, Format::Q8, &[33, 40]), 64 * 2 * 34);
        assert_eq!(held_bytes(&numa, Format::F32, &[7]), 28);
    }

    #[test]
    fn a_fetched_stack_is_its_panels() {
        let ty = packed_type(Format::Q4, &[3, 40, 64]).expect("a stack has panels");
        assert_eq!(ty.to_string(), "u8[6, 1152]");
        assert_eq!(packed_type(Format::F32, &[7]), None);
    }
}
