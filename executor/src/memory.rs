//! Memory of one device: regions that their users touch first, and an arena of buffers used again and again.
//!
//! - A region has no pages until it is written to; the thread that writes first decides the node, unless it is bound to
//!   one.
//! - Regions of 2 MiB or more are aligned for huge pages and ask for them; small ones of a device lie side by side, so
//!   that they have huge pages together.
//! - An arena's buffers lie in one stretch, each in the smallest gap that it fits: runs of other lengths use the pages
//!   that the largest has touched.

#![expect(unsafe_code, reason = "maps anonymous memory and views it as plain numbers")]

mod arena;
mod region;

pub use arena::{Arena, Buffer};
pub use region::{Region, Regions};

/// Size of a huge page on x86-64 and of a block mapping on aarch64 with 4 KiB pages.
const HUGE_PAGE_BYTES: usize = 2 << 20;
/// What starts and sizes of buffers, and of regions side by side, are multiples of: one page.
const PAGE_BYTES: usize = 4096;
/// Address space of a stretch, which is larger where one buffer is. It costs nothing until it is written to, and runs
/// whose buffers take more are those of models whose weights take a hundred times as much.
const STRETCH_BYTES: usize = 1 << 30;

/// Whole pages for `bytes`, one at least; `None` where there is no such size.
fn whole_pages(bytes: usize) -> Option<usize> {
    bytes.max(1).checked_next_multiple_of(PAGE_BYTES)
}
