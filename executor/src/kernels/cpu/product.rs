//! Products of some strips with some panels, in the order in which a kernel's operands stay close to it.
//!
//! Few rows take a panel at a time, along all its columns: it is read from memory once, and its strips follow each
//! other. So do vectors with any number of rows.
//!
//! Tiles multiply faster than the outer caches feed them, so their products with many rows are *blocks* of up to
//! [`BLOCK_PANELS`] panels and [`BLOCK_STRIPS`] strips, taken [`BLOCK_COLUMNS`] columns at a time. In these columns a
//! panel has 16 KiB in bf16 and stays in the first cache while strips pass by; all strips have 256 KiB and, with 512
//! KiB of sums, stay in the second while panels pass by. So for each step of four tiles (64 cycles of products) 3 KiB
//! come from the second cache and next to nothing from further away. With tiles of bytes, everything but the sums takes
//! half as many bytes for the same number of products.

#![expect(unsafe_code, reason = "members write disjoint parts of the outputs")]

use std::marker::PhantomData;
use std::ops::Range;
use std::{ptr, slice};

use anyhow::Context as _;
use ir::op::Then;
use ir::packing;

use super::disjoint::DisjointMut;
use super::encode::{Encoding, Strip};
use super::epilogue::Target;
use super::isa::Isa;
use super::pack::{PANEL, PackedMatrix, padded};
use super::tile::{
    GROUP_BYTES, GroupScales, Kernel, MOST_ROWS, Operands, ROOM_BYTES, Registers, Source, Tile,
};
use crate::memory::Buffer;
use crate::team::Team;

/// Most panels of a block; of a gate, those of both matrices together.
const BLOCK_PANELS: usize = packing::BLOCK_PANELS as usize;
/// Most strips of a block.
pub(super) const BLOCK_STRIPS: usize = packing::BLOCK_STRIPS as usize;
/// Tasks that each member of a team should find, to even out what it is late by.
const TASKS_EACH: usize = 4;
/// The same of blocks: a core whose other thread belongs to somebody else loads tiles at a quarter of the speed.
const BLOCKS_EACH: usize = 8;
/// Columns of a block that are multiplied before the next panel's.
pub(super) const BLOCK_COLUMNS: usize = packing::BLOCK_COLUMNS as usize;

/// The products of some strips with some panels of `weights[0]` (and of `weights[1]`, for a gate).
pub(super) struct Product<'a> {
    pub(super) kernel: Kernel,
    pub(super) weights: &'a [&'a PackedMatrix],
    pub(super) panels: Range<usize>,
    pub(super) encoded: DisjointMut<'a, u8>,
    pub(super) target: &'a Target<'a>,
    /// The panel that its member multiplies after these.
    pub(super) next: Option<*const u8>,
}

/// How the products of some matrices with some strips are dealt out in tasks.
pub(super) struct Deal {
    /// For each matrix its panels, and in how many parts they are dealt.
    matrices: Vec<(usize, usize)>,
    /// In how many groups the strips are dealt, neighbours together.
    groups: usize,
    strips: usize,
}

impl Deal {
    /// Deals `strips` strips and the panels of each matrix to `members`. Of a gate, `panels` holds those of one of its
    /// two matrices.
    pub(super) fn new(
        kernel: Kernel,
        panels: &[usize],
        is_gate: bool,
        strips: usize,
        members: usize,
    ) -> Self {
        let mut panels_each = kernel.block_panels(is_gate);
        let has_blocks = panels_each > 1;
        let mut strips_each = if has_blocks { BLOCK_STRIPS.min(strips) } else { strips };
        let wanted = members * if has_blocks { BLOCKS_EACH } else { TASKS_EACH };
        let parts = |each: usize| panels.iter().map(move |panels| panels.div_ceil(each));
        while parts(panels_each).sum::<usize>() * strips.div_ceil(strips_each.max(1)) < wanted {
            // Squares need the least of both sides.
            if strips_each > 1 && strips_each >= panels_each {
                strips_each = strips_each.div_ceil(2);
            } else if panels_each > 1 {
                panels_each /= 2;
            } else {
                break;
            }
        }
        let matrices = panels.iter().copied().zip(parts(panels_each)).collect();
        Self { matrices, groups: strips.div_ceil(strips_each.max(1)), strips }
    }

    /// Number of tasks.
    pub(super) fn tasks(&self) -> usize {
        self.matrices.iter().map(|(_, parts)| parts).sum::<usize>() * self.groups
    }

    /// The matrix, its panels and the strips of a task. Tasks that share panels are neighbours.
    pub(super) fn task(&self, task: usize) -> (usize, Range<usize>, Range<usize>) {
        let (mut part, group) = (task / self.groups, task % self.groups);
        let mut matrix = 0;
        while part >= self.matrices[matrix].1 {
            part -= self.matrices[matrix].1;
            matrix += 1;
        }
        let (panels, parts) = self.matrices[matrix];
        let cut = |whole: usize, part: usize, parts: usize| part * whole / parts;
        (
            matrix,
            cut(panels, part, parts)..cut(panels, part + 1, parts),
            cut(self.strips, group, self.groups)..cut(self.strips, group + 1, self.groups),
        )
    }
}

impl Kernel {
    /// Panels that are best multiplied together, of each of a gate's two matrices.
    pub(super) fn block_panels(self, is_gate: bool) -> usize {
        match (self.in_blocks, is_gate) {
            (true, false) => BLOCK_PANELS,
            (true, true) => BLOCK_PANELS / 2,
            (false, _) => 1,
        }
    }
}

/// Room for what all members of a team unpack, and for the sums of their blocks.
pub(super) struct Rooms {
    isa: Isa,
    buffer: Buffer,
    /// Sums of one member.
    sums: usize,
    /// Bytes of one member: its sums, and unpacked columns of one panel.
    bytes: usize,
}

impl Rooms {
    /// Room for the products of some kernels with matrices of up to `columns` columns, one product after another, and
    /// with groups of up to `strips` strips.
    ///
    /// # Errors
    /// When there is no memory.
    pub(super) fn new(
        team: &Team,
        kernels: &[Kernel],
        strips: usize,
        columns: usize,
    ) -> anyhow::Result<Self> {
        let has_blocks = kernels.iter().any(|kernel| kernel.in_blocks);
        let sums = if has_blocks { BLOCK_PANELS * strips.min(BLOCK_STRIPS) } else { 0 };
        let unpacked = kernels.iter().filter(|kernel| kernel.unpacks);
        let unpacked = unpacked.map(|kernel| match kernel.encoding {
            Encoding::Tiles => BLOCK_COLUMNS * PANEL * 2,
            Encoding::ByteTiles => ROOM_BYTES,
            // Of both matrices of a gate.
            Encoding::Float | Encoding::Rounded | Encoding::Pairs | Encoding::Blocks { .. } => {
                2 * padded(kernel.format, columns) * PANEL * 2
            }
        });
        let bytes = sums * size_of::<Tile>() + unpacked.max().unwrap_or(0);
        let buffer = team.arena().take(team.members() * bytes).context("room for products")?;
        let isa = kernels.first().map_or(Isa::Portable, |kernel| kernel.isa);
        Ok(Self { isa, buffer, sums, bytes })
    }

    /// What `member` works with; only it may.
    pub(super) fn of(&self, member: usize) -> Workplace<'_> {
        let start = self.buffer.as_ptr().wrapping_add(member * self.bytes);
        let unpacked = start.wrapping_add(self.sums * size_of::<Tile>());
        Workplace {
            tiles: [[[0.0; PANEL]; MOST_ROWS]; 2],
            registers: Registers::new(self.isa),
            sums: start.cast(),
            unpacked,
            rooms: PhantomData,
        }
    }
}

/// What one member works with.
pub(super) struct Workplace<'a> {
    tiles: [Tile; 2],
    registers: Registers,
    /// `[panel, matrix of a gate, strip]`, of a block.
    sums: *mut Tile,
    /// Columns of a panel, unpacked; for vectors all columns of two.
    unpacked: *mut u8,
    rooms: PhantomData<&'a Rooms>,
}

impl Product<'_> {
    /// Multiplies and writes the result.
    ///
    /// # Safety
    /// The strips are encoded, no one else touches these rows and columns of the target, and the workplace is of
    /// [`Rooms`] that were made for this kernel, this matrix's columns and as many strips.
    pub(super) unsafe fn finish(&self, strips: &[Strip], workplace: &mut Workplace<'_>) {
        if self.kernel.in_blocks {
            for strips in strips.chunks(BLOCK_STRIPS) {
                let most = self.kernel.block_panels(self.matrices().len() == 2);
                for start in self.panels.clone().step_by(most) {
                    let panels = start..self.panels.end.min(start + most);
                    // SAFETY: the caller's.
                    unsafe { self.finish_block(panels, strips, workplace) };
                }
            }
        } else {
            for panel in self.panels.clone() {
                // SAFETY: the caller's.
                unsafe { self.finish_panel(panel, strips, workplace) };
            }
        }
    }

    /// The matrices whose products make one output.
    fn matrices(&self) -> &[&PackedMatrix] {
        match self.target.then {
            Then::Nothing | Then::Activate(_) => &self.weights[..1],
            Then::Gate(_) => &self.weights[..2],
        }
    }

    /// What is read after the products of a panel.
    fn after(&self, panel: usize) -> Option<*const u8> {
        let is_last = panel + 1 == self.panels.end;
        if is_last { self.next } else { Some(self.weights[0].panel(panel + 1)) }
    }

    /// As much as `like` of what is read after all these panels.
    fn next_source(&self, like: Source) -> Source {
        let start = self.next.unwrap_or(like.start);
        Source { start, ..like }
    }

    /// A strip's columns from `start` on, encoded.
    fn encoded(&self, strip: Strip, start: usize) -> *const u8 {
        let offset = self.kernel.encoding.offset(strip, self.weights[0].columns(), start);
        self.encoded.pointer().wrapping_add(offset)
    }

    /// The scales of a strip's columns from `start` on, and those of the panel that was unpacked there.
    fn group_scales(&self, strip: Strip, start: usize, packed: *const u8) -> GroupScales {
        let columns = self.weights[0].columns();
        let offset = self.kernel.encoding.scales_offset(strip, columns, start);
        GroupScales {
            strip: self.encoded.pointer().wrapping_add(offset).cast(),
            panel: packed.wrapping_add(GROUP_BYTES).cast(),
        }
    }

    /// The products of one panel along all its columns, strip after strip.
    ///
    /// # Safety
    /// That of [`Product::finish`].
    unsafe fn finish_panel(&self, panel: usize, strips: &[Strip], workplace: &mut Workplace<'_>) {
        let kernel = self.kernel;
        let columns = padded(kernel.format, self.weights[0].columns());
        let Workplace { tiles, registers, unpacked, .. } = workplace;
        let mut panels = [ptr::null(); 2];
        for (i, matrix) in self.matrices().iter().enumerate() {
            let (from, vectors) = (matrix.panel(panel), matrix.vectors(panel));
            let room = unpacked.wrapping_add(i * columns * PANEL * 2);
            // SAFETY: the room has as many columns of each matrix of a gate.
            panels[i] = unsafe { kernel.unpacked(from, vectors, columns, 0..columns, room) };
        }
        for (i, &strip) in strips.iter().enumerate() {
            let is_last = i + 1 == strips.len();
            for (i, (matrix, tile)) in self.matrices().iter().zip(&mut *tiles).enumerate() {
                // A panel that was unpacked, or that more strips follow for, is in a cache.
                let next = match self.matrices().get(i + 1) {
                    Some(_) => Some(panels[i + 1]),
                    None if is_last && !kernel.unpacks => self.after(panel),
                    None => None,
                };
                let operands = Operands {
                    panel: panels[i],
                    vectors: matrix.vectors(panel),
                    strip: self.encoded(strip, 0),
                    rows: strip.rows,
                    columns,
                    next: next.unwrap_or(panels[i]),
                };
                // SAFETY: the caller's, and `linear` and `experts` check the level and the shapes.
                unsafe {
                    if kernel.encoding.is_tiles() {
                        registers.multiply_along(kernel, operands, tile);
                    } else {
                        kernel.multiply(operands, tile);
                    }
                }
            }
            let [tile, other] = &*tiles;
            let at = (strip.first, panel * PANEL);
            // SAFETY: the caller's.
            unsafe { self.target.write(kernel.isa, tile, other, strip.rows, at) };
        }
    }

    /// The products of a block by tiles.
    ///
    /// # Safety
    /// That of [`Product::finish`], for at most [`BLOCK_STRIPS`] strips and as many panels as a block has.
    unsafe fn finish_block(
        &self,
        panels: Range<usize>,
        strips: &[Strip],
        workplace: &mut Workplace<'_>,
    ) {
        let (kernel, matrices) = (self.kernel, self.matrices());
        let columns = padded(kernel.format, matrices[0].columns());
        // SAFETY: the room has this many tiles, and is this member's.
        let sums = unsafe {
            let count = panels.len() * matrices.len() * strips.len();
            slice::from_raw_parts_mut(workplace.sums, count)
        };
        // Columns of a panel, one after the other, as they are unpacked and multiplied.
        let turns = columns.div_ceil(BLOCK_COLUMNS) * panels.len() * matrices.len();
        let at = |turn: usize| {
            let (pair, matrix) = (turn / matrices.len(), turn % matrices.len());
            let (part, panel) = (pair / panels.len(), panels.start + pair % panels.len());
            let start = part * BLOCK_COLUMNS;
            (matrices[matrix], panel, start..columns.min(start + BLOCK_COLUMNS))
        };
        let source = |turn: usize| {
            let (matrix, panel, part) = at(turn);
            kernel.source(matrix.panel(panel), matrix.vectors(panel), part)
        };
        for turn in 0..turns {
            let (matrix, panel, part) = at(turn);
            let vectors = matrix.vectors(panel);
            // SAFETY: the columns of `part` lie in the panel, and the room is for as many.
            let packed = unsafe {
                let from = matrix.panel(panel);
                kernel.unpacked(from, vectors, columns, part.clone(), workplace.unpacked)
            };
            // Memory is asked for what is unpacked next, some with every strip.
            let next =
                if turn + 1 < turns { source(turn + 1) } else { self.next_source(source(0)) };
            let share = next.lines().div_ceil(strips.len());
            let goes_on = part.start > 0;
            let sums = &mut sums[turn % (panels.len() * matrices.len()) * strips.len()..];
            for (i, (&strip, sums)) in strips.iter().zip(sums).enumerate() {
                next.prefetch(i * share..(i + 1) * share);
                let operands = Operands {
                    panel: packed,
                    vectors,
                    strip: self.encoded(strip, part.start),
                    rows: strip.rows,
                    columns: part.len(),
                    next: ptr::from_mut(sums).wrapping_add(1).cast(),
                };
                let scales = (kernel.encoding == Encoding::ByteTiles)
                    .then(|| self.group_scales(strip, part.start, packed));
                // SAFETY: the caller's; the columns of the strip follow those before them.
                unsafe { workplace.registers.multiply(operands, scales, goes_on, sums) };
            }
        }
        let mut sums = sums.chunks_exact(strips.len() * matrices.len());
        for (panel, sums) in panels.zip(&mut sums) {
            let (firsts, seconds) = sums.split_at(strips.len());
            for (i, strip) in strips.iter().enumerate() {
                let (tile, other) = (&firsts[i], seconds.get(i).unwrap_or(&firsts[i]));
                let at = (strip.first, panel * PANEL);
                // SAFETY: the caller's.
                unsafe { self.target.write(kernel.isa, tile, other, strip.rows, at) };
            }
        }
    }
}
