//! The registers that tiles are multiplied in, and what is multiplied in them.

#![expect(unsafe_code, reason = "kernels read packed weights and activations by address")]

use std::marker::PhantomData;

use super::bytes::{self, GroupScales};
use super::{Kernel, MOST_ROWS, Operands, Tile, portable};
#[cfg(target_arch = "x86_64")]
use super::{amx, few};
use crate::kernels::cpu::isa::Isa;
use crate::kernels::cpu::pack::PANEL;

/// The registers that tiles are multiplied in, from their first product until they are dropped.
pub(in crate::kernels::cpu) struct Registers {
    isa: Isa,
    /// Rows of the strips that they are shaped for; 0 while they are not.
    rows: usize,
    /// Where sums of bytes are scaled.
    sums: bytes::Sums,
    /// Registers are a thread's.
    thread: PhantomData<*const ()>,
}

/// Most steps of a product whose columns are listed.
pub(in crate::kernels::cpu) const LISTED_STEPS: usize = 8;

/// Rows of bf16 times two vectors of columns that lie anywhere.
pub(in crate::kernels::cpu) struct Listed<'a> {
    /// The first row's first step; each is 32 elements, and steps follow each other.
    pub(in crate::kernels::cpu) rows: *const u8,
    /// From one row to the next.
    pub(in crate::kernels::cpu) row_bytes: usize,
    /// Number of rows, at most [`MOST_ROWS`].
    pub(in crate::kernels::cpu) count: usize,
    /// For each step two tiles of columns: sixteen pairs of elements of each of sixteen columns.
    pub(in crate::kernels::cpu) steps: &'a [[*const u8; 2]],
    /// From one pair of elements to the next.
    pub(in crate::kernels::cpu) column_bytes: usize,
    /// 32 sums of the first row.
    pub(in crate::kernels::cpu) sums: *mut f32,
    /// Floats from one row's sums to the next.
    pub(in crate::kernels::cpu) sums_width: usize,
    /// Whether products are added to the sums.
    pub(in crate::kernels::cpu) goes_on: bool,
}

impl Registers {
    /// Registers for a level; of others than AMX none, and products are plain.
    pub(in crate::kernels::cpu) fn new(isa: Isa) -> Self {
        let sums = bytes::Sums([[0; PANEL]; MOST_ROWS]);
        Self { isa, rows: 0, sums, thread: PhantomData }
    }

    /// Multiplies some columns of a strip with those of a panel, in bf16, or with `scales` a group of columns in bytes;
    /// the products are added to `sums` if they go on from earlier columns.
    ///
    /// # Safety
    /// The operands and the scales of their rows are readable, the strip encoded in tiles of bf16 or of bytes, and the
    /// processor has the level.
    pub(in crate::kernels::cpu) unsafe fn multiply(
        &mut self,
        operands: Operands,
        scales: Option<GroupScales>,
        goes_on: bool,
        sums: &mut Tile,
    ) {
        debug_assert!(operands.rows <= MOST_ROWS && operands.vectors <= 2);
        // SAFETY: the caller's.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            if self.isa == Isa::Amx {
                self.shape(operands.rows);
                let Some(scales) = scales else {
                    return amx::multiply(operands, goes_on, sums);
                };
                amx::multiply_bytes(operands, &mut self.sums);
                let sizes = (operands.rows, operands.vectors);
                return amx::add_scaled(&self.sums, sizes, scales, goes_on, sums);
            }
            match scales {
                None => portable::tiles(operands, goes_on, sums),
                Some(scales) => bytes::multiply(operands, scales, goes_on, sums),
            }
        }
    }

    /// Multiplies rows with columns that are listed.
    ///
    /// # Safety
    /// All that is listed is readable, the sums are the caller's, and the processor has the level.
    pub(in crate::kernels::cpu) unsafe fn multiply_listed(&mut self, listed: Listed<'_>) {
        debug_assert!(listed.count <= MOST_ROWS);
        // SAFETY: the caller's.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            if self.isa == Isa::Amx {
                self.shape(listed.count);
                return amx::multiply_listed(listed);
            }
            portable::listed(listed);
        }
    }

    /// Multiplies one strip with one panel along all its columns, by the kernel that tiles have for few rows.
    ///
    /// # Safety
    /// That of [`Kernel::multiply`].
    pub(in crate::kernels::cpu) unsafe fn multiply_along(
        &mut self,
        kernel: Kernel,
        operands: Operands,
        tile: &mut Tile,
    ) {
        debug_assert!(operands.rows <= kernel.rows && operands.vectors <= 2);
        // SAFETY: the caller's.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            if self.isa == Isa::Amx {
                self.shape(operands.rows);
                return few::multiply(kernel.format, operands, tile);
            }
            let _ = (kernel, operands, tile);
            unreachable!("kernels of few rows in tiles are chosen for AMX");
        }
    }

    /// Shapes the registers for strips of `rows` rows.
    ///
    /// # Safety
    /// The processor has tiles, and the process permission to use them.
    #[cfg(target_arch = "x86_64")]
    unsafe fn shape(&mut self, rows: usize) {
        if self.rows != rows {
            self.rows = rows;
            // SAFETY: the caller's; they are released when these registers are dropped.
            unsafe { amx::shape(rows) };
        }
    }
}

impl Drop for Registers {
    fn drop(&mut self) {
        #[cfg(target_arch = "x86_64")]
        if self.rows > 0 {
            // SAFETY: they were shaped by this thread, which a `Registers` does not leave.
            unsafe { amx::release() };
        }
    }
}
