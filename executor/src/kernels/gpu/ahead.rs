//! What comes next, asked for ahead: a launch has the L2 cache fetch what the launch behind it reads first, so that
//! memory is busy while one ends and the other begins.
//!
//! - Nothing is waited for and nothing is written: results are the same with and without.
//! - What a launch asks for must fit into the L2 cache beside what it reads itself meanwhile.

#![expect(unsafe_code, reason = "assembly is given an address")]

use cubecl::prelude::*;

use super::device::{Gpu, Span, is_hopper_or_newer};
use super::instructions::Packed;
use super::registers::held;

/// Asked for by an attention of few tokens, which reads little itself and is soon over: with more, the attention takes
/// longer (measured on an H200).
pub const ATTENTION_AHEAD_BYTES: usize = 8 << 20;

/// Asked for by a linear of few tokens at its end: what memory delivers in 1 µs, which is about what lies between
/// the last loads of one launch and the first of the next.
pub const LINEAR_AHEAD_BYTES: usize = 4 << 20;

/// The cubes of a linear that ask, those that begin last: two for each processor of an H200.
const ASKING_CUBES: usize = 264;

/// Asked for at once: small enough for some thousand planes to have a part of it each.
const PIECE_BYTES: u32 = 4 << 10;

/// The start of a span that is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    address: u64,
    bytes: u32,
}

/// Regions as a kernel's argument; none compile to nothing.
pub(super) type Regions = Sequence<Ahead>;

/// A region on the device.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Ahead {
    address: u64,
    /// A multiple of 16.
    bytes: u32,
}

impl Gpu {
    /// Whether launches can ask for memory ahead: NVIDIA GPUs from Hopper on.
    pub fn asks_ahead(&self) -> bool {
        self.is_cuda() && is_hopper_or_newer(self.client.properties())
    }
}

impl Region {
    /// The first bytes of a span, `most` at most.
    ///
    /// # Errors
    /// On a device that is not driven through CUDA.
    pub fn new(span: &Span, most: usize) -> anyhow::Result<Self> {
        let bytes = span.bytes().min(most) / 16 * 16;
        Ok(Self { address: span.address()?, bytes: u32::try_from(bytes)? })
    }
}

/// As an argument of kernels.
pub(super) fn argument(regions: &[Region]) -> SequenceArg<Ahead> {
    regions.iter().map(|region| AheadLaunch::new(region.address, region.bytes)).collect()
}

/// Asks for one plane's part of the regions: that of the plane of number `asker` among `askers`.
#[cube]
fn ask(regions: &Regions, asker: u32, askers: u32) {
    #[unroll]
    for index in 0..regions.len() {
        let region = regions.index(index);
        if UNIT_POS_PLANE == 0 {
            let mut start = asker * PIECE_BYTES;
            while start < region.bytes {
                let bytes = u32::min(region.bytes - start, PIECE_BYTES);
                fetch(region.address + u64::cast_from(start), bytes);
                start += askers * PIECE_BYTES;
            }
        }
    }
}

/// Asks for the part of one of a launch's planes, `plane` of the `planes` of its cube.
#[cube]
pub(super) fn ask_at_once(regions: &Regions, plane: u32, planes: u32) {
    let count = comptime!(regions.len());
    if comptime!(count > 0) {
        let cube = (CUBE_POS_Z * CUBE_COUNT_Y + CUBE_POS_Y) * CUBE_COUNT_X + CUBE_POS_X;
        let cubes = CUBE_COUNT_X * CUBE_COUNT_Y * CUBE_COUNT_Z;
        ask(regions, cube * planes + plane, cubes * planes);
    }
}

/// Asks for the part of one of a linear's planes, `plane` of the `planes` of its cube, if its cube is one that asks.
#[cube]
pub(super) fn ask_at_the_end(regions: &Regions, plane: u32, planes: u32) {
    let count = comptime!(regions.len());
    if comptime!(count > 0) {
        let cubes = CUBE_COUNT_X;
        let asking = u32::min(cubes, comptime!(ASKING_CUBES as u32));
        let first = cubes - asking;
        if CUBE_POS_X >= first {
            ask(regions, (CUBE_POS_X - first) * planes + plane, asking * planes);
        }
    }
}

/// Asks for the line of the cache where an element lies.
#[cube]
pub(super) fn ask_for_line(at: &[Packed]) {
    // SAFETY: nothing is read, and no address is wrong to ask for.
    let pointer = unsafe { at.as_ptr_unchecked() };
    gpu_asm!("prefetch.global.L2 [{pointer}];", pointer = in(_) pointer);
}

#[cube]
fn fetch(address: u64, bytes: u32) {
    let (address, bytes) = (held::<u64>(address), held::<u32>(bytes));
    gpu_asm!(
        "cp.async.bulk.prefetch.L2.global [{a}], {n};",
        a = in(_) address, n = in(_) bytes,
    );
}
