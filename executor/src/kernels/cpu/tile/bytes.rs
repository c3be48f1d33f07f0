//! Tiles of bytes: panels of blocks unpacked to bytes, whose products a processor with tiles adds up exactly.
//!
//! Sums of bytes would have to leave the tiles for every block of 32 columns to be scaled, which costs more than the
//! tiles save. So the columns of a block of products, a *group*, get one scale for each row: its codes are multiplied
//! once, when they are unpacked, with what their block's scale is of the largest one, and rounded to bytes again. The
//! rounding is at most half a group's scale, 1/254 of the largest weight that the group could hold: that of a
//! quantisation to 8 bits in groups of 256.
//!
//! Activations are quantised in the same groups (see [`crate::kernels::cpu::encode`]).

use std::slice;

use half::f16;
use ir::tensor::Format;

use super::{MOST_ROWS, Operands, Tile};
use crate::kernels::cpu::pack::{BLOCK_PAIR, PANEL, VECTOR};
use crate::kernels::cpu::product::BLOCK_COLUMNS;
use crate::kernels::cpu::quantize::{BLOCK, OFFSET_4, OFFSET_8};

/// Most bytes of a panel's group; its scales follow.
pub(in crate::kernels::cpu) const GROUP_BYTES: usize = BLOCK_COLUMNS * PANEL;
/// Bytes of an unpacked group with its scales.
pub(in crate::kernels::cpu) const ROOM_BYTES: usize = GROUP_BYTES + PANEL * size_of::<f32>();
/// Most blocks of a group.
pub(super) const GROUP_BLOCKS: usize = BLOCK_COLUMNS / BLOCK;

/// Sums of bytes of a strip and a panel, as they leave the tiles.
#[repr(align(64))]
pub(super) struct Sums(pub(super) [[i32; PANEL]; MOST_ROWS]);

/// How codes become bytes of their group's scale.
pub(super) struct Rounding {
    /// Code of zero.
    pub(super) offset: i32,
    /// Bits that codes are shifted up before, so that their product keeps its fraction.
    pub(super) shift: u32,
    /// What the scale that is largest in its group becomes; its codes then reach up to 127.
    pub(super) most: f32,
    /// What the largest block's scale is divided by to be the group's.
    pub(super) ratio: f32,
}

/// Bits that the product of a code and its multiplier is shifted down, rounded.
pub(super) const PRODUCT_SHIFT: u32 = 15;

impl Rounding {
    /// That of q8 or q4.
    pub(super) fn of(format: Format) -> Self {
        // 8 codes on one side of zero, times 15.875, are 127 steps.
        let (offset, shift, most) = match format {
            Format::Q4 => (OFFSET_4, 4, 15.875 * 2048.0),
            Format::Q8 | Format::F32 | Format::F16 | Format::Bf16 | Format::Bf12 => {
                (OFFSET_8, 0, 32_767.0)
            }
        };
        Self { offset, shift, most, ratio: most / f32::from(1_u16 << (PRODUCT_SHIFT - shift)) }
    }
}

/// Where the scales of a group lie.
#[derive(Clone, Copy)]
pub(in crate::kernels::cpu) struct GroupScales {
    /// One for each row of the strip.
    pub(in crate::kernels::cpu) strip: *const f32,
    /// One for each row of the panel.
    pub(in crate::kernels::cpu) panel: *const f32,
}

/// Unpacks a group of a panel: for each four columns and vector in turn 16 words of four signed bytes; then, from
/// [`GROUP_BYTES`] on, a scale for each row.
///
/// # Safety
/// `panel` has `columns` columns in the format, whole steps of at most [`BLOCK_COLUMNS`], and `to` room for
/// [`ROOM_BYTES`].
pub(super) unsafe fn unpack(
    format: Format,
    panel: *const u8,
    vectors: usize,
    columns: usize,
    to: *mut u8,
) {
    let Rounding { offset, shift, most, ratio } = Rounding::of(format);
    let is_q8 = format == Format::Q8;
    let lanes = vectors * VECTOR;
    let code_bytes = if is_q8 { BLOCK_PAIR } else { BLOCK_PAIR / 2 };
    let step_bytes = lanes * (4 + code_bytes);
    // SAFETY: the caller's.
    let (steps, bytes, scales_to) = unsafe {
        (
            slice::from_raw_parts(panel, columns / BLOCK_PAIR * step_bytes),
            slice::from_raw_parts_mut(to, columns * lanes),
            slice::from_raw_parts_mut(to.add(GROUP_BYTES).cast::<f32>(), lanes),
        )
    };
    let scale = |block: usize, lane: usize| {
        let step = &steps[block / 2 * step_bytes..];
        let at = (block % 2 * lanes + lane) * 2;
        f16::from_le_bytes([step[at], step[at + 1]]).to_f32()
    };
    for lane in 0..lanes {
        let blocks = columns / BLOCK;
        // What is not a number is above all.
        let largest = (0..blocks).map(|block| scale(block, lane).abs().to_bits()).max();
        let largest = f32::from_bits(largest.unwrap_or(0));
        let inverse = if largest > 0.0 { most / largest } else { 0.0 };
        scales_to[lane] = largest / ratio;
        for column in 0..columns {
            let block = column / BLOCK;
            let multiplier = (scale(block, lane) * inverse).round_ties_even() as i32;
            let (group, byte) = (column % BLOCK / 4, column % 4);
            let codes = &steps[block / 2 * step_bytes + lanes * 4..];
            let code = if is_q8 {
                codes[((block % 2 * (BLOCK / 4) + group) * lanes + lane) * 4 + byte]
            } else {
                codes[(group * lanes + lane) * 4 + byte] >> (block % 2 * 4) & 15
            };
            let product = ((i32::from(code) - offset) << shift) * multiplier;
            let rounded = (product + (1 << (PRODUCT_SHIFT - 1))) >> PRODUCT_SHIFT;
            bytes[(column / 4 * lanes + lane) * 4 + byte] = rounded as u8;
        }
    }
}

/// Products of a group, scaled, added to `sums` if they go on from earlier columns.
///
/// # Safety
/// That of [`super::Registers::multiply`].
pub(super) unsafe fn multiply(
    operands: Operands,
    scales: GroupScales,
    goes_on: bool,
    sums: &mut Tile,
) {
    let Operands { panel, vectors, strip, rows, columns, next: _ } = operands;
    let lanes = vectors * VECTOR;
    // SAFETY: the caller's.
    let (panel, strip, row_scales, lane_scales) = unsafe {
        (
            slice::from_raw_parts(panel, columns * lanes),
            slice::from_raw_parts(strip, columns * rows),
            slice::from_raw_parts(scales.strip, rows),
            slice::from_raw_parts(scales.panel, lanes),
        )
    };
    for (row, sums) in sums[..rows].iter_mut().enumerate() {
        for (lane, sum) in sums[..lanes].iter_mut().enumerate() {
            let mut total = 0_i32;
            for column in 0..columns {
                let x =
                    strip[(column / BLOCK_PAIR * rows + row) * BLOCK_PAIR + column % BLOCK_PAIR];
                let weight = panel[(column / 4 * lanes + lane) * 4 + column % 4];
                total += i32::from(x.cast_signed()) * i32::from(weight.cast_signed());
            }
            let scale = row_scales[row] * lane_scales[lane];
            *sum = (total as f32).mul_add(scale, if goes_on { *sum } else { 0.0 });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(target_arch = "x86_64")]
    use crate::kernels::cpu::isa::Isa;

    /// Shapes of panels: vectors and columns.
    const SHAPES: [(usize, usize); 3] = [(1, 64), (2, 256), (2, 128)];
    /// Scales that a block of the fourth row may have.
    const SCALES: [Option<f32>; 5] =
        [None, Some(f32::NAN), Some(0.0), Some(f32::INFINITY), Some(1e-7)];

    /// Some steps of a panel: codes that look random, and scales of which one may be given.
    fn panel(format: Format, vectors: usize, columns: usize, scale: Option<f32>) -> Vec<u8> {
        let lanes = vectors * VECTOR;
        let mut state = 7_u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        let mut bytes = Vec::new();
        for step in 0..columns / BLOCK_PAIR {
            for i in 0..2 * lanes {
                let random = (f32::from(next()) - 100.0) * 0.01;
                let scale = scale.filter(|_| step == 0 && i == 3).unwrap_or(random);
                bytes.extend(f16::from_f32(scale).to_le_bytes());
            }
            let codes = if format == Format::Q8 { BLOCK_PAIR } else { BLOCK_PAIR / 2 };
            // No code of 8 bits is 128 below zero.
            let least = u8::from(format == Format::Q8);
            bytes.extend((0..codes * lanes).map(|_| next().max(least)));
        }
        bytes
    }

    fn unpacked(
        format: Format,
        panel: &[u8],
        vectors: usize,
        columns: usize,
    ) -> (Vec<i8>, Vec<f32>) {
        let mut room = vec![0_u32; ROOM_BYTES / 4];
        // SAFETY: the panel has so many columns, and the room is as large as it should be.
        unsafe { unpack(format, panel.as_ptr(), vectors, columns, room.as_mut_ptr().cast()) };
        let bytes = room.iter().flat_map(|word| word.to_le_bytes().map(u8::cast_signed));
        let group_scales = room[GROUP_BYTES / 4..].iter().map(|&word| f32::from_bits(word));
        (
            bytes.take(columns * vectors * VECTOR).collect(),
            group_scales.take(vectors * VECTOR).collect(),
        )
    }

    #[test]
    fn bytes_are_half_a_group_s_scale_from_their_weights() {
        for (format, vectors, columns) in [Format::Q8, Format::Q4]
            .into_iter()
            .flat_map(|format| [(1, 64), (2, 256), (2, 192)].map(|(v, c)| (format, v, c)))
        {
            let lanes = vectors * VECTOR;
            let panel = panel(format, vectors, columns, None);
            let (bytes, group_scales) = unpacked(format, &panel, vectors, columns);
            let step_bytes = panel.len() / (columns / BLOCK_PAIR);
            for column in 0..columns {
                for lane in 0..lanes {
                    let step = &panel[column / BLOCK_PAIR * step_bytes..];
                    let block = column % BLOCK_PAIR / BLOCK;
                    let at = (block * lanes + lane) * 2;
                    let scale = f16::from_le_bytes([step[at], step[at + 1]]).to_f32();
                    let codes = &step[lanes * 4..];
                    let in_group = |group: usize| codes[(group * lanes + lane) * 4 + column % 4];
                    let group = column % BLOCK / 4;
                    let code = if format == Format::Q8 {
                        i32::from(in_group(block * (BLOCK / 4) + group)) - OFFSET_8
                    } else {
                        i32::from(in_group(group) >> (block * 4) & 15) - OFFSET_4
                    };
                    let byte = bytes[(column / 4 * lanes + lane) * 4 + column % 4];
                    let (weight, step) = (code as f32 * scale, group_scales[lane]);
                    let off = (f32::from(byte) * step - weight).abs();
                    assert!(off <= 0.51 * step, "{format} {column} {lane}: {byte} for {weight}");
                    assert!((-127..=127).contains(&byte));
                }
            }
        }
    }

    #[test]
    fn what_is_not_a_number_spoils_its_row_alone() {
        for (format, given) in
            [Format::Q8, Format::Q4].into_iter().flat_map(|format| SCALES.map(|s| (format, s)))
        {
            for (vectors, columns) in SHAPES {
                let panel = panel(format, vectors, columns, given);
                let (_, group_scales) = unpacked(format, &panel, vectors, columns);
                for (row, scale) in group_scales.iter().enumerate() {
                    let given = given.filter(|_| row == 3);
                    assert_eq!(scale.is_nan(), given.is_some_and(f32::is_nan), "{format} {row}");
                    let is_infinite = given.is_some_and(f32::is_infinite);
                    assert_eq!(scale.is_infinite(), is_infinite, "{format} {row}");
                }
            }
        }
    }

    #[test]
    fn zeros_are_zeros() {
        for format in [Format::Q8, Format::Q4] {
            for (vectors, columns) in SHAPES {
                let panel = panel(format, vectors, columns, Some(0.0));
                let (bytes, _) = unpacked(format, &panel, vectors, columns);
                let groups = bytes.chunks(4 * vectors * VECTOR).take(BLOCK / 4);
                assert!(groups.flat_map(|group| &group[3 * 4..4 * 4]).all(|&byte| byte == 0));
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn vectors_unpack_what_the_plain_form_does() {
        if Isa::detect() < Isa::Avx512 {
            eprintln!("skipped: this processor has no AVX-512");
            return;
        }
        for format in [Format::Q8, Format::Q4] {
            for scale in SCALES {
                for (vectors, columns) in SHAPES {
                    let panel = panel(format, vectors, columns, scale);
                    let (plain, group_scales) = unpacked(format, &panel, vectors, columns);
                    let mut room = vec![0_u32; ROOM_BYTES / 4];
                    let to = room.as_mut_ptr().cast();
                    // SAFETY: as for the plain form, and the level was detected.
                    unsafe {
                        let from = panel.as_ptr();
                        super::super::unpack::bytes_by_avx512(format, from, vectors, columns, to);
                    }
                    let bytes =
                        room.iter().flat_map(|word| word.to_le_bytes().map(u8::cast_signed));
                    assert!(bytes.take(plain.len()).eq(plain), "{format} {scale:?}");
                    let found = room[GROUP_BYTES / 4..].iter().copied().take(group_scales.len());
                    assert!(found.eq(group_scales.iter().map(|scale| scale.to_bits())));
                }
            }
        }
    }
}
