//! Matrices for tests, with the values that their bytes stand for.

use half::{bf16, f16};
use ir::tensor::Format;

use super::{Layout, Matrix};
use crate::kernels::cpu::bf12;
use crate::kernels::cpu::pack::{BLOCK_PAIR, PANEL, VECTOR, pack, packed_bytes, padded};
use crate::kernels::cpu::testing::{Random, with_team};
use crate::kernels::gpu::device::Gpu;

/// A matrix on the device and its values, row after row.
pub(in crate::kernels::gpu) struct Sample {
    pub(in crate::kernels::gpu) matrix: Matrix,
    pub(in crate::kernels::gpu) values: Vec<f64>,
}

/// A matrix of random values in panels, packed by the CPU.
pub(in crate::kernels::gpu) fn panels(
    gpu: &Gpu,
    format: Format,
    rows: usize,
    columns: usize,
    seed: u64,
) -> Sample {
    panels_of(gpu, format, rows, columns, &Random(seed).floats(rows * columns))
}

/// A matrix of those values in panels, packed by the CPU.
pub(in crate::kernels::gpu) fn panels_of(
    gpu: &Gpu,
    format: Format,
    rows: usize,
    columns: usize,
    wide: &[f32],
) -> Sample {
    let bytes = packed_of(format, rows, columns, wide);
    let values = unpacked(&bytes, format, rows, columns);
    let data = gpu.upload(&bytes);
    let matrix = Matrix::new(format, Layout::Panels, rows, columns, data).unwrap();
    Sample { matrix, values }
}

/// A row-major matrix of random values.
pub(in crate::kernels::gpu) fn row_major(
    gpu: &Gpu,
    format: Format,
    rows: usize,
    columns: usize,
    seed: u64,
) -> Sample {
    row_major_of(gpu, format, rows, columns, &Random(seed).floats(rows * columns))
}

/// A row-major matrix of those values.
pub(in crate::kernels::gpu) fn row_major_of(
    gpu: &Gpu,
    format: Format,
    rows: usize,
    columns: usize,
    wide: &[f32],
) -> Sample {
    let (bytes, values) = match format {
        Format::F32 => {
            (bytemuck::cast_slice(wide).to_vec(), wide.iter().map(|&v| f64::from(v)).collect())
        }
        Format::F16 => {
            let narrow: Vec<f16> = wide.iter().map(|&v| f16::from_f32(v)).collect();
            (bytemuck::cast_slice(&narrow).to_vec(), narrow.iter().map(|v| v.to_f64()).collect())
        }
        Format::Bf16 => {
            let narrow: Vec<bf16> = wide.iter().map(|&v| bf16::from_f32(v)).collect();
            (bytemuck::cast_slice(&narrow).to_vec(), narrow.iter().map(|v| v.to_f64()).collect())
        }
        Format::Bf12 | Format::Q8 | Format::Q4 => panic!("{format} has no row-major layout"),
    };
    let data = gpu.upload::<u8>(&bytes);
    let matrix = Matrix::new(format, Layout::RowMajor, rows, columns, data).unwrap();
    Sample { matrix, values }
}

/// Rows of [`spoilt()`] that begin with what is no number, infinite or very large.
pub(in crate::kernels::gpu) const SPOILT_ROWS: [u32; 5] = [0, 3, 6, 9, 12];

/// Random values but for those of [`SPOILT_ROWS`].
pub(in crate::kernels::gpu) fn spoilt(rows: usize, columns: usize, seed: u64) -> Vec<f32> {
    let mut wide = Random(seed).floats(rows * columns);
    let strange = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e36, -1e7];
    for (row, value) in SPOILT_ROWS.into_iter().zip(strange) {
        wide[row as usize * columns] = value;
    }
    wide
}

/// The float formats whose elements the device can write.
pub(in crate::kernels::gpu) fn float_formats(gpu: &Gpu) -> Vec<Format> {
    if gpu.is_cuda() {
        vec![Format::F32, Format::F16, Format::Bf16]
    } else {
        eprintln!("skipped: bf16 elements, which shaders do not have");
        vec![Format::F32, Format::F16]
    }
}

/// The bytes of a matrix of random values in panels.
pub(in crate::kernels::gpu) fn packed(
    format: Format,
    rows: usize,
    columns: usize,
    seed: u64,
) -> Vec<u8> {
    packed_of(format, rows, columns, &Random(seed).floats(rows * columns))
}

/// The bytes of a matrix of those values in panels.
fn packed_of(format: Format, rows: usize, columns: usize, wide: &[f32]) -> Vec<u8> {
    let mut bytes = Vec::new();
    with_team(1, |team| {
        let fill = |range: std::ops::Range<usize>, values: &mut [f32]| {
            values.copy_from_slice(&wide[range.start * columns..range.end * columns]);
        };
        let matrix = pack(team, format, rows, columns, &fill).unwrap();
        bytes = matrix.region().as_slice::<u8>()[..packed_bytes(format, rows, columns)].to_vec();
    });
    bytes
}

/// What packed bytes stand for, by the layout's description, element by element.
pub(in crate::kernels::gpu) fn unpacked(
    bytes: &[u8],
    format: Format,
    rows: usize,
    columns: usize,
) -> Vec<f64> {
    let half = |at: usize| f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f64();
    let mut values = Vec::new();
    for row in 0..rows {
        let panel = row / PANEL;
        let start = panel * packed_bytes(format, PANEL, columns);
        let lanes = if rows - panel * PANEL > VECTOR { PANEL } else { VECTOR };
        let lane = row % PANEL;
        for column in 0..padded(format, columns) {
            let pair = start
                + column / BLOCK_PAIR * packed_bytes(format, lanes, BLOCK_PAIR) / (PANEL / lanes);
            let (block, group, byte) = (column / 32 % 2, column % 32 / 4, column % 4);
            let value = match format {
                Format::F32 => {
                    let at = start + (column * lanes + lane) * 4;
                    f64::from(f32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()))
                }
                Format::F16 => half(start + (column * lanes + lane) * 2),
                Format::Bf16 => {
                    let at = start + (column / 2 * lanes + lane) * 4 + column % 2 * 2;
                    bf16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f64()
                }
                Format::Bf12 => {
                    let panel = bf12::Panel::new(&bytes[start..], lanes / VECTOR);
                    bf16::from_bits(panel.bits(lane, column)).to_f64()
                }
                Format::Q8 => {
                    let scale = half(pair + (block * lanes + lane) * 2);
                    let word = pair + lanes * 4 + ((block * 8 + group) * lanes + lane) * 4;
                    scale * (f64::from(bytes[word + byte]) - 128.0)
                }
                Format::Q4 => {
                    let scale = half(pair + (block * lanes + lane) * 2);
                    let word = pair + lanes * 4 + (group * lanes + lane) * 4;
                    scale * (f64::from(bytes[word + byte] >> (4 * block) & 15) - 8.0)
                }
            };
            if column < columns {
                values.push(value);
            }
        }
    }
    values
}
