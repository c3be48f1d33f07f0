//! Reading single rows back from a packed matrix: embeddings share their table with the head.

use half::{bf16, f16};
use ir::tensor::Format;

use super::bf12;
use super::pack::{BLOCK_PAIR, PANEL, PackedMatrix, VECTOR};
use super::quantize::{BLOCK, OFFSET_4, OFFSET_8};

impl PackedMatrix {
    /// Writes row `row` to `out`, one element for each column.
    ///
    /// # Panics
    /// When there is no such row, or `out` has another length.
    pub fn read_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows() && out.len() == self.columns(), "row {row} of {}", self.rows());
        let (panel, lane) = (row / PANEL, row % PANEL);
        let lanes = self.vectors(panel) * VECTOR;
        let bytes = &self.contents()[self.panel_offset(panel)..];
        match self.format() {
            Format::F32 => read_floats(bytes, lanes, lane, out, f32::from_ne_bytes),
            Format::F16 => {
                read_floats(bytes, lanes, lane, out, |bytes| f16::from_ne_bytes(bytes).to_f32());
            }
            Format::Bf16 => {
                let (pairs, _) = bytes.as_chunks::<4>();
                for (column, out) in out.iter_mut().enumerate() {
                    let [a, b, c, d] = pairs[column / 2 * lanes + lane];
                    let half = if column % 2 == 0 { [a, b] } else { [c, d] };
                    *out = bf16::from_ne_bytes(half).to_f32();
                }
            }
            Format::Bf12 => {
                let panel = bf12::Panel::new(bytes, lanes / VECTOR);
                for (column, out) in out.iter_mut().enumerate() {
                    *out = bf16::from_bits(panel.bits(lane, column)).to_f32();
                }
            }
            Format::Q8 => read_blocks(bytes, lanes, lane, out, 8),
            Format::Q4 => read_blocks(bytes, lanes, lane, out, 4),
        }
    }
}

fn read_floats<const N: usize>(
    bytes: &[u8],
    lanes: usize,
    lane: usize,
    out: &mut [f32],
    widen: impl Fn([u8; N]) -> f32,
) {
    let (elements, _) = bytes.as_chunks::<N>();
    for (column, out) in out.iter_mut().enumerate() {
        *out = widen(elements[column * lanes + lane]);
    }
}

fn read_blocks(bytes: &[u8], lanes: usize, lane: usize, out: &mut [f32], bits: usize) {
    let step_bytes = lanes * (2 * 2 + BLOCK_PAIR * bits / 8);
    for (packed, out) in bytes.chunks_exact(step_bytes).zip(out.chunks_mut(BLOCK_PAIR)) {
        let (scales, codes) = packed.split_at(lanes * 4);
        let ((scales, _), (words, _)) = (scales.as_chunks::<2>(), codes.as_chunks::<4>());
        for (column, out) in out.iter_mut().enumerate() {
            let (half, group, byte) = (column / BLOCK, column % BLOCK / 4, column % 4);
            let scale = f16::from_ne_bytes(scales[half * lanes + lane]).to_f32();
            let code = if bits == 8 {
                i32::from(words[(half * BLOCK / 4 + group) * lanes + lane][byte]) - OFFSET_8
            } else {
                let both = words[group * lanes + lane][byte];
                i32::from(both >> (4 * half) & 15) - OFFSET_4
            };
            *out = scale * code as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::pack::pack;
    use super::super::testing::with_team;
    use super::*;

    #[test]
    fn a_part_has_the_rows_of_the_whole() {
        with_team(1, |team| {
            let (rows, columns) = (3 * PANEL + 5, 40);
            let fill = |range: std::ops::Range<usize>, values: &mut [f32]| {
                (range.start * columns..).zip(values).for_each(|(i, value)| *value = i as f32);
            };
            for format in [Format::F32, Format::Q4] {
                let whole = pack(team, format, rows, columns, &fill).unwrap();
                let part = whole.part(1, 2);
                assert_eq!(part.rows(), 2 * PANEL);
                let (mut of_part, mut of_whole) = (vec![0.0; columns], vec![0.0; columns]);
                for row in 0..2 * PANEL {
                    part.read_row(row, &mut of_part);
                    whole.read_row(PANEL + row, &mut of_whole);
                    assert_eq!(of_part, of_whole, "{format} {row}");
                }
            }
        });
    }

    #[test]
    fn every_row_comes_back_as_its_format_holds_it() {
        with_team(1, |team| {
            // Relative to the largest element of a row.
            let tolerances = [
                (Format::F32, 0.0),
                (Format::F16, 5e-4),
                (Format::Bf16, 4e-3),
                (Format::Bf12, 4e-3),
                (Format::Q8, 4.1e-3),
                // Codes reach from -8 to 7: where the largest element is negative, its positive twin has none.
                (Format::Q4, 0.1251),
            ];
            for (format, tolerance) in tolerances {
                for (rows, columns) in [(1, 1), (5, 33), (32, 64), (49, 131)] {
                    let value = |row: usize, column: usize| {
                        ((row * 37 + column * 11) % 101) as f32 / 50.0 - 1.0
                    };
                    let fill = |range: std::ops::Range<usize>, values: &mut [f32]| {
                        for (row, values) in range.zip(values.chunks_exact_mut(columns)) {
                            (0..).zip(values).for_each(|(column, v)| *v = value(row, column));
                        }
                    };
                    let matrix = pack(team, format, rows, columns, &fill).unwrap();
                    let mut out = vec![0.0; columns];
                    for row in 0..rows {
                        matrix.read_row(row, &mut out);
                        for (column, out) in out.iter().enumerate() {
                            let off = (out - value(row, column)).abs();
                            assert!(off <= tolerance, "{format} {row} {column}: off by {off}");
                        }
                    }
                }
            }
        });
    }
}
