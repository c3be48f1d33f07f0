//! How many rows GPUs multiply in which way.

use crate::machine::DeviceKind;
use crate::tensor::Format;

/// The most rows that a GPU's own kernels multiply with floats, and with any format where there are no matrix
/// instructions; more are multiplied by the vendor's library where it is there, but for those of small matrices and of
/// [`most_fused_rows()`].
pub const FLOAT_ROWS: u32 = 8;
/// The most rows for which a GPU with the matrix instructions of warpgroups takes matrices in 16 bits as they lie; for
/// more the vendor's library has them row after row. Also the most rows of floats that any multiplies with small
/// matrices, and of an operand.
pub const MAX_FUSED_ROWS: u32 = 128;
/// The most rows for which it takes packed matrices as they lie; for more they are unpacked for the vendor's library. An
/// H200 takes 512 rows of 4 and 8 bits so in 0.62 of the time and of 12 bits in 0.8: see benches/RESULTS.md. Prompts of
/// more than [`MAX_FUSED_ROWS`] use what is held unpacked as well.
pub const MAX_PACKED_ROWS: u32 = 512;
/// The same with other matrix instructions; of matrices in 16 bits half as many, since the library then reads them as
/// fast.
pub const MAX_PLANE_ROWS: u32 = 64;
/// Weights of the matrices of a linear from which on those take few rows, too. The smallest of a layer of the 8 B shape,
/// which was measured, has 16.8 million.
const LEAST_OPERAND_WEIGHTS: u64 = 12 << 20;
/// What the columns of matrices are a multiple of for the matrix instructions of warpgroups.
pub const WARPGROUP_COLUMNS: u32 = 64;

/// The most rows that are multiplied as floats with large matrices of that format where there are the matrix instructions
/// of warpgroups, which take more in 16 bits. An H200 decodes 2 sequences in 16 and 12 bits 1.13 times as fast so as it
/// does with floats, 3 in 4 bits 1.2 times and in 8 bits 1.04 times: see benches/RESULTS.md.
fn most_large_float_rows(held: Format) -> u32 {
    match held {
        Format::F32 | Format::F16 => FLOAT_ROWS,
        Format::Bf16 | Format::Bf12 => 1,
        Format::Q8 | Format::Q4 => 2,
    }
}

/// The most rows that a GPU multiplies as floats with the matrices of a linear, each of a format and so many weights.
/// Small matrices do not make up for the launch that casts their input.
pub fn most_float_rows(
    matrices: impl IntoIterator<Item = (Format, u64)>,
    has_warpgroups: bool,
) -> u32 {
    let (mut most, mut all) = (0, 0_u64);
    for (held, weights) in matrices {
        most = most.max(most_large_float_rows(held));
        all = all.saturating_add(weights);
    }
    if has_warpgroups && all >= LEAST_OPERAND_WEIGHTS { most } else { FLOAT_ROWS }
}

/// Rows of activations as right operands of a GPU's matrix instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OperandRows {
    /// How many operands there are.
    pub stacks: u32,
    /// Rows of each, what pads the last with them.
    pub rows: u32,
}

impl OperandRows {
    /// How `rows` rows lie: few kinds, since kernels are compiled for each. `None` where there are too many.
    pub fn of(rows: u32) -> Option<Self> {
        /// Columns of an operand are a multiple of it.
        const LEAST: u32 = 8;
        const FEW: u32 = 2 * LEAST;
        let stacks = rows.div_ceil(MAX_FUSED_ROWS).max(1);
        let of_each = rows.div_ceil(stacks);
        let multiple = if of_each <= FEW { LEAST } else { MAX_FUSED_ROWS / 4 };
        let rows_of_each = of_each.next_multiple_of(multiple);
        (rows <= MAX_PACKED_ROWS).then_some(Self { stacks, rows: rows_of_each })
    }

    /// All rows.
    pub fn count(self) -> u32 {
        self.stacks * self.rows
    }
}

/// The most rows that a GPU with matrix instructions, be they those of warpgroups or not, multiplies with a matrix of
/// that format as it lies; for more the vendor's library has it row after row.
pub fn most_fused_rows(held: Format, has_warpgroups: bool) -> u32 {
    match (held, has_warpgroups) {
        (Format::F32 | Format::F16, _) => FLOAT_ROWS,
        (Format::Bf16, true) => MAX_FUSED_ROWS,
        (Format::Bf16, false) => MAX_PLANE_ROWS / 2,
        (Format::Bf12 | Format::Q8 | Format::Q4, true) => MAX_PACKED_ROWS,
        (Format::Bf12 | Format::Q8 | Format::Q4, false) => MAX_PLANE_ROWS,
    }
}

/// The same for a matrix of `columns` columns on a device.
pub fn most_rows_on(device: &DeviceKind, held: Format, columns: u32) -> u32 {
    most_fused_rows(held, has_warpgroups_for(device, columns))
}

/// Whether a device has the matrix instructions of warpgroups for a matrix of `columns` columns.
pub fn has_warpgroups_for(device: &DeviceKind, columns: u32) -> bool {
    device.has_warpgroups() && columns.is_multiple_of(WARPGROUP_COLUMNS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operands_hold_all_rows_and_each_has_some() {
        let of = |rows| OperandRows::of(rows).map(|operands| (operands.stacks, operands.rows));
        assert_eq!(of(MAX_PACKED_ROWS + 1), None);
        assert_eq!([of(1), of(8), of(9)], [Some((1, 8)), Some((1, 8)), Some((1, 16))]);
        assert_eq!([of(17), of(128), of(129)], [Some((1, 32)), Some((1, 128)), Some((2, 96))]);
        for rows in 1..=MAX_PACKED_ROWS {
            let operands = OperandRows::of(rows).unwrap();
            assert!(operands.count() >= rows && operands.count() < rows + operands.rows);
        }
    }

    #[test]
    fn few_rows_are_floats_as_formats_and_sizes_say() {
        let of = |held, weights| most_float_rows([(held, weights)], true);
        let large = LEAST_OPERAND_WEIGHTS;
        assert_eq!(Format::ALL.map(|held| of(held, large)), [8, 8, 1, 1, 2, 2]);
        assert_eq!(of(Format::Bf12, large - 1), FLOAT_ROWS);
        // Matrices of one linear share a launch, and the form that those take which are floats the longest.
        let shared = [(Format::Q4, large / 2), (Format::Bf16, large / 2)];
        assert_eq!(most_float_rows(shared, true), 2);
        assert_eq!(most_float_rows(shared, false), FLOAT_ROWS);
    }
}
