//! Asking memory for weights before they are multiplied.
//!
//! Processors do that by themselves where a read goes on for long; at the end of a panel they ask for what lies behind
//! it, which another member reads, and not for what this one reads next.

use std::arch::x86_64::{__cpuid, _MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
use std::sync::OnceLock;

use super::LINE;

/// How far ahead of their use weights are asked for, in bytes: far enough to hide the memory's latency at the rate of
/// one core, near enough to stay in the first cache.
///
/// Intel's cores read up to a quarter faster when they are asked for what lies near, within the 4 KiB page that they
/// read or the next one, whose lines they ask for by themselves, too. The longer distance is the one chosen on AMD's.
pub(super) fn ahead_bytes() -> usize {
    const NEAR: usize = 2048;
    const FAR: usize = 8192;
    // A fact about the machine, and asking for it is too slow for every kernel.
    static BYTES: OnceLock<usize> = OnceLock::new();
    *BYTES.get_or_init(|| {
        let vendor = __cpuid(0);
        let name = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes);
        if name.as_flattened() == b"GenuineIntel" { NEAR } else { FAR }
    })
}

/// What is asked for while a panel is read: its own bytes further on, and at its end the start of what is read next.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    /// How far on.
    bytes: usize,
    /// From here on the next is asked for.
    turn: *const u8,
    /// How far it is there from what is read.
    jump: usize,
}

impl Ahead {
    /// For a panel of `bytes` bytes from `start` on, which is read in steps of `step_bytes`, and for what is read
    /// `next`.
    #[inline(always)]
    pub(super) fn new(
        (start, bytes): (*const u8, usize),
        step_bytes: usize,
        next: *const u8,
    ) -> Self {
        Self::at(ahead_bytes().next_multiple_of(step_bytes), (start, bytes), next)
    }

    /// Like [`Ahead::new`], but `on` bytes ahead. If `on` is no multiple of a step, a part of the next panel's first
    /// step is not asked for.
    #[inline(always)]
    pub(super) fn at(on: usize, (start, bytes): (*const u8, usize), next: *const u8) -> Self {
        let on = on.min(bytes);
        let turn = start.wrapping_add(bytes - on);
        Self { bytes: on, turn, jump: next.addr().wrapping_sub(turn.addr()) }
    }

    /// How far beyond the step that begins there.
    #[inline(always)]
    pub(super) fn distance(self, step: *const u8) -> usize {
        if step < self.turn { self.bytes } else { self.jump }
    }
}

/// Asks for a line of memory.
#[inline(always)]
pub(super) fn prefetch(line: *const u8) {
    // SAFETY: asking may point anywhere.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) };
}

/// Asks for the lines of some bytes of memory.
#[inline(always)]
pub(super) fn prefetch_lines(start: *const u8, bytes: usize) {
    (0..bytes).step_by(LINE).for_each(|line| prefetch(start.wrapping_add(line)));
}

/// Asks for a line of memory that the first cache has no room for yet.
pub(super) fn prefetch_l2(line: *const u8) {
    // SAFETY: asking may point anywhere.
    unsafe { _mm_prefetch::<_MM_HINT_T1>(line.cast()) };
}

/// Asks for as much of a panel as is asked for ahead.
pub(super) fn prefetch_start(panel: *const u8) {
    prefetch_lines(panel, ahead_bytes());
}
