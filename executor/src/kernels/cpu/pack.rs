//! Weight matrices in the one layout that all kernels read, for one row of activations as for thousands.
//!
//! A matrix of `rows` outputs and `columns` inputs is cut into *panels* of 32 rows, each two *vectors* of 16
//! (the last panel may have one; missing rows are zero). A panel is contiguous, in the order in which a
//! kernel walks along the columns; one step is, for each vector in turn:
//!
//! | format | columns of a step | bytes of a vector's step |
//! | --- | --- | --- |
//! | f32 | 1 | 16 floats |
//! | f16 | 1 | 16 halves |
//! | bf16 | 2 | 16 pairs of neighbouring columns: what a dot-product instruction, or a tile, takes |
//! | bf12 | 8 | three times 16 words, see [`super::bf12`]; in front of a panel a word for each row |
//! | q8, q4 | 64: two blocks | see below |
//!
//! A step of blocks starts with the scales, `[block][vector][16]` halves. Then for q8 `[block][group][vector][16]`
//! words of four neighbouring columns, eight groups a block; for q4 `[group][vector][16]` words whose low nibbles
//! are the first block's group and whose high nibbles are the second's.
//! Columns are padded with zeros: to 32 for bf16 (the depth of a tile), to 64 for blocks.

#![expect(unsafe_code, reason = "members write disjoint panels of one region")]

use std::array;
use std::ops::Range;
use std::slice;
use std::sync::Arc;

use anyhow::Context as _;
use half::{bf16, f16};
use ir::packing;
use ir::tensor::Format;

use super::bf12;
use super::disjoint::DisjointMut;
use super::isa::Isa;
use super::lanes::vectorize;
use super::quantize::{BLOCK, Blocks, Quantize4, Quantize8};
use crate::memory::Region;
use crate::team::{Chunks, Team};

/// Rows of a vector: 32-bit lanes of an AVX-512 register.
pub const VECTOR: usize = 16;
/// Rows of a panel.
pub const PANEL: usize = packing::PANEL_ROWS as usize;
/// Columns of a step of blocks.
pub const BLOCK_PAIR: usize = packing::BLOCK_PAIR_COLUMNS as usize;
/// Depth of a tile of bf16, which pads their columns.
pub(super) const TILE_DEPTH: usize = packing::BF16_COLUMNS as usize;

/// Writes the rows of a range, at most 32, row after row: where matrices and tables get their elements.
pub type Fill<'a> = dyn Fn(Range<usize>, &mut [f32]) + Sync + 'a;

/// A weight matrix, packed.
pub struct PackedMatrix {
    format: Format,
    rows: usize,
    columns: usize,
    region: Arc<Region>,
    /// Where it starts in the region, which the matrices of a stack share.
    start: usize,
}

/// Room for the rows of a panel in f32, before they are packed, for each member of a team.
pub struct WideRows {
    region: Region,
    columns: usize,
}

impl WideRows {
    /// For matrices of so many columns.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn new(team: &Team, columns: usize) -> anyhow::Result<Self> {
        let bytes = team.members() * PANEL * columns * size_of::<f32>();
        let region = Region::new(bytes).with_context(|| format!("rows of {columns} columns"))?;
        Ok(Self { region, columns })
    }
}

/// Packs a matrix of `rows` × `columns`: see [`PackedMatrix::fill()`].
///
/// # Errors
/// When there is no memory.
pub fn pack(
    team: &Team,
    format: Format,
    rows: usize,
    columns: usize,
    fill: &Fill<'_>,
) -> anyhow::Result<PackedMatrix> {
    let mut matrix = stack(team, format, rows, columns, 1)?.remove(0);
    matrix.fill(team, &mut WideRows::new(team, columns)?, fill);
    Ok(matrix)
}

/// Room for `count` matrices of `rows` × `columns`, one right behind the other: zeros that nobody has touched.
///
/// # Errors
/// When there is no memory.
pub fn stack(
    team: &Team,
    format: Format,
    rows: usize,
    columns: usize,
    count: usize,
) -> anyhow::Result<Vec<PackedMatrix>> {
    let bytes = packed_bytes(format, rows, columns);
    let region = team
        .regions()
        .take(count * bytes)
        .with_context(|| format!("{count} matrices of {rows} by {columns} in {format}"))?;
    let region = Arc::new(region);
    let matrix = |index: usize| {
        let (region, start) = (Arc::clone(&region), index * bytes);
        PackedMatrix { format, rows, columns, region, start }
    };
    Ok((0..count).map(matrix).collect())
}

/// Packs whole panels of 32 rows from `wide`, the rows of a matrix from the first panel's on, row after row. Rows
/// that the last panel lacks are zeros.
///
/// # Panics
/// When `packed` is not as long as the panels are.
pub fn pack_rows(format: Format, columns: usize, wide: &[f32], packed: &mut [u8]) {
    let size = panel_bytes(format, columns, 2);
    assert_eq!(packed.len(), (wide.len() / columns).div_ceil(PANEL) * size, "panels of rows");
    let rows = wide.chunks(PANEL * columns);
    for (wide, packed) in rows.zip(packed.chunks_exact_mut(size)) {
        let vectors = (wide.len() / columns).div_ceil(VECTOR);
        packed.fill(0);
        let packed = &mut packed[..panel_bytes(format, columns, vectors)];
        pack_panel(format, columns, vectors, wide, packed);
    }
}

impl PackedMatrix {
    /// Packs the matrix; free members of the team pack, and so touch first, some panels each.
    ///
    /// # Panics
    /// When `wide` is for another number of columns or fewer members.
    pub fn fill(&mut self, team: &Team, wide: &mut WideRows, fill: &Fill<'_>) {
        let (format, rows, columns) = (self.format, self.rows, self.columns);
        assert_eq!(wide.columns, columns, "rows of other matrices");
        let parts = DisjointMut::new(wide.region.as_mut_slice::<f32>());
        let start = self.region.as_ptr().wrapping_add(self.start);
        // SAFETY: these bytes of the region are this matrix's, which is borrowed exclusively.
        let packed = unsafe { slice::from_raw_parts_mut(start, self.bytes()) };
        let packed = DisjointMut::new(packed);
        let chunks = Chunks::new(self.panels(), 1);
        team.work_off(|member| {
            // SAFETY: each member has a part of its own.
            let wide =
                unsafe { parts.part(member * PANEL * columns..(member + 1) * PANEL * columns) };
            while let Some(range) = chunks.claim() {
                for panel in range {
                    let rows = panel * PANEL..((panel + 1) * PANEL).min(rows);
                    let wide = &mut wide[..rows.len() * columns];
                    fill(rows, wide);
                    let start = self.panel_offset(panel);
                    let end = start + panel_bytes(format, columns, self.vectors(panel));
                    // SAFETY: panels lie apart and each is claimed once.
                    let packed = unsafe { packed.part(start..end) };
                    pack_panel(format, columns, self.vectors(panel), wide, packed);
                }
            }
        });
    }

    /// The rows of `panels` whole panels from the one numbered `first` on, as a matrix of their own in the same memory.
    ///
    /// # Panics
    /// When there are not as many.
    pub fn part(&self, first: usize, panels: usize) -> Self {
        assert!((first + panels) * PANEL <= self.rows, "panels {first} to {}", first + panels);
        Self {
            format: self.format,
            rows: panels * PANEL,
            columns: self.columns,
            region: Arc::clone(&self.region),
            start: self.start + self.panel_offset(first),
        }
    }

    /// How the elements are held.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Outputs.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Bytes of memory, padding included.
    pub fn bytes(&self) -> usize {
        packed_bytes(self.format, self.rows, self.columns)
    }

    /// Its memory, padding included.
    pub fn contents(&self) -> &[u8] {
        &self.region.as_slice::<u8>()[self.start..][..self.bytes()]
    }

    /// The memory it lies in, which may hold the other matrices of a stack, too.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    pub(super) fn panels(&self) -> usize {
        panels(self.rows)
    }

    /// Vectors of one panel: 2, or 1 at the end.
    pub(super) fn vectors(&self, panel: usize) -> usize {
        (self.rows - panel * PANEL).div_ceil(VECTOR).min(2)
    }

    pub(super) fn panel(&self, panel: usize) -> *const u8 {
        assert!(panel < self.panels(), "panel {panel} of {}", self.panels());
        self.region.as_ptr().wrapping_add(self.start + self.panel_offset(panel)).cast_const()
    }

    /// Where a panel starts in the matrix's memory.
    pub(super) fn panel_offset(&self, panel: usize) -> usize {
        panel * panel_bytes(self.format, self.columns, 2)
    }
}

/// Columns with their padding.
pub fn padded(format: Format, columns: usize) -> usize {
    packing::packed_columns(format, columns as u64) as usize
}

/// Bytes of a packed matrix.
pub fn packed_bytes(format: Format, rows: usize, columns: usize) -> usize {
    packing::packed_bytes(format, rows as u64, columns as u64) as usize
}

fn panels(rows: usize) -> usize {
    rows.div_ceil(PANEL)
}

fn panel_bytes(format: Format, columns: usize, vectors: usize) -> usize {
    packing::panel_bytes(format, columns as u64) as usize / 2 * vectors
}

/// Packs one panel from its rows, `wide`, row after row.
fn pack_panel(format: Format, columns: usize, vectors: usize, wide: &[f32], packed: &mut [u8]) {
    let row = |lane: usize| wide.get(lane * columns..(lane + 1) * columns);
    match format {
        Format::F32 => pack_floats(row, vectors, packed, f32::to_ne_bytes),
        Format::F16 => {
            pack_floats(row, vectors, packed, |value| f16::from_f32(value).to_ne_bytes())
        }
        Format::Bf16 => pack_pairs(row, vectors, packed),
        Format::Bf12 => bf12::pack(row, vectors, packed),
        Format::Q8 => pack_blocks(row, vectors, packed, 8),
        Format::Q4 => pack_blocks(row, vectors, packed, 4),
    }
}

fn pack_floats<'a, const N: usize>(
    row: impl Fn(usize) -> Option<&'a [f32]>,
    vectors: usize,
    packed: &mut [u8],
    narrow: impl Fn(f32) -> [u8; N],
) {
    let lanes = vectors * VECTOR;
    let (elements, _) = packed.as_chunks_mut::<N>();
    for lane in 0..lanes {
        match row(lane) {
            Some(row) => {
                for (column, &value) in row.iter().enumerate() {
                    elements[column * lanes + lane] = narrow(value);
                }
            }
            None => elements[lane..].iter_mut().step_by(lanes).for_each(|e| *e = narrow(0.0)),
        }
    }
}

fn pack_pairs<'a>(row: impl Fn(usize) -> Option<&'a [f32]>, vectors: usize, packed: &mut [u8]) {
    let lanes = vectors * VECTOR;
    let (pairs, _) = packed.as_chunks_mut::<4>();
    for lane in 0..lanes {
        // The region is zero at first, which is the padding of rows and of columns.
        for (step, pair) in row(lane).unwrap_or(&[]).chunks(2).enumerate() {
            let low = bf16::from_f32(pair[0]).to_bits();
            let high = pair.get(1).map_or(0, |&value| bf16::from_f32(value).to_bits());
            pairs[step * lanes + lane] = (u32::from(high) << 16 | u32::from(low)).to_ne_bytes();
        }
    }
}

fn pack_blocks<'a>(
    row: impl Fn(usize) -> Option<&'a [f32]>,
    vectors: usize,
    packed: &mut [u8],
    bits: usize,
) {
    let isa = Isa::detect();
    let lanes = vectors * VECTOR;
    let step_bytes = lanes * (2 * 2 + BLOCK_PAIR * bits / 8);
    for (step, packed) in packed.chunks_exact_mut(step_bytes).enumerate() {
        let (scales, codes) = packed.split_at_mut(lanes * 4);
        let ((scales, _), (words, _)) = (scales.as_chunks_mut::<2>(), codes.as_chunks_mut::<4>());
        for vector in (0..lanes).step_by(VECTOR) {
            let mut columns = [[[0.0; VECTOR]; BLOCK]; 2];
            for lane in 0..VECTOR {
                let present = row(vector + lane).and_then(|row| row.get(step * BLOCK_PAIR..));
                let columns = columns.as_flattened_mut().iter_mut();
                for (column, &value) in columns.zip(present.unwrap_or(&[])) {
                    column[lane] = value;
                }
            }
            let blocks = columns.each_ref().map(|columns| {
                if bits == 8 {
                    vectorize(isa, Quantize8(columns))
                } else {
                    vectorize(isa, Quantize4(columns))
                }
            });
            for (half, block) in blocks.iter().enumerate() {
                let scales = &mut scales[half * lanes + vector..][..VECTOR];
                for (place, scale) in scales.iter_mut().zip(block.scales) {
                    *place = scale.to_ne_bytes();
                }
            }
            pack_codes(&blocks, bits, |group, given| {
                words[group * lanes + vector..][..VECTOR].copy_from_slice(&given);
            });
        }
    }
}

/// Hands out the words of a pair of blocks, those of sixteen rows at a time, each with its group's number.
fn pack_codes(blocks: &[Blocks; 2], bits: usize, mut put: impl FnMut(usize, [[u8; 4]; VECTOR])) {
    let [(first, _), (second, _)] = blocks.each_ref().map(|block| block.codes.as_chunks::<4>());
    let word = |group: &[[u8; VECTOR]; 4], lane: usize| group.map(|codes| codes[lane]);
    for (group, (low, high)) in first.iter().zip(second).enumerate() {
        if bits == 8 {
            put(group, array::from_fn(|lane| word(low, lane)));
            put(BLOCK / 4 + group, array::from_fn(|lane| word(high, lane)));
        } else {
            put(
                group,
                array::from_fn(|lane| {
                    let (low, high) = (word(low, lane), word(high, lane));
                    array::from_fn(|i| low[i] | high[i] << 4)
                }),
            );
        }
    }
}
