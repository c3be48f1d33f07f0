//! Values that cross between a GPU and the host through pinned memory that both reach by address: no copy engine, no
//! event and no system call takes part, so that one crossing takes a few microseconds, beside fetches too.
//!
//! - What comes from the host lies behind a *flag* that the host raises last; a launch that takes it looks at the flag
//!   until it is raised. So launches can be queued, or captured, before their values exist.
//! - What goes to the host raises one flag for each cube, the last thing that cube does.
//! - A raised flag holds the number of the run, the *turn*, which launches read from device memory: captured launches
//!   serve every run.

#![expect(unsafe_code, reason = "kernels are given addresses of host memory")]

use cubecl::prelude::*;
use ir::letters::SENDING_CUBES;

use super::addressed::{fence, load_four, look, raise, store_four, store_long};
use super::device::{Gpu, Span};
use super::words::Four;

/// Units of a cube.
const UNITS: usize = 256;
/// Bytes that a unit moves at once: values take a multiple of it on both sides.
pub const UNIT_BYTES: usize = size_of::<[f32; 4]>();
/// Cubes that send a value at most.
const POSTING_CUBES: usize = SENDING_CUBES as usize;
/// Cubes that take a value at most: twice as many, since the answers of a link take longer.
const TAKING_CUBES: usize = 128;

/// Where one side leaves something for the other, by the addresses that the GPU knows it by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The first of the flags: one, or one for each cube that sends.
    flags: u64,
    /// The value, at a multiple of [`UNIT_BYTES`].
    value: u64,
}

impl Place {
    /// A place with flags at one address and a value at the other; 0 stands for what launches with this place do not
    /// use.
    ///
    /// # Safety
    /// As long as launches with this place may run, the GPU reaches all flags, and as many bytes of the value as they
    /// are told to move, up to the next multiple of [`UNIT_BYTES`]; and flags, turns or the order of launches keep both
    /// sides from using these bytes at the same time.
    pub unsafe fn new(flags: u64, value: u64) -> Self {
        Self { flags, value }
    }
}

/// Cubes, and so flags, that a value of `bytes` bytes is sent with.
pub fn posting_cubes(bytes: usize) -> usize {
    bytes.div_ceil(UNITS * UNIT_BYTES).clamp(1, POSTING_CUBES)
}

impl Gpu {
    /// Queues sending the first `bytes` bytes of a span to the host. `turn` is `u32[1]`.
    pub fn post(&self, span: &Span, bytes: usize, to: Place, turn: &Span) {
        let vectors = bytes.div_ceil(UNIT_BYTES);
        let cubes = posting_cubes(bytes);
        // SAFETY: indices lie within the arguments; the place has memory for the value, and a flag for every cube, as
        // [`Place::new`] asks for.
        unsafe {
            post::launch_unchecked(
                &self.client,
                CubeCount::new_1d(cubes as u32),
                CubeDim::new_1d(UNITS as u32),
                span.argument(vectors, UNIT_BYTES),
                turn.argument(1, size_of::<u32>()),
                to.value,
                to.flags,
                vectors.div_ceil(cubes) as u32,
                vectors as u32,
            );
        }
    }

    /// Queues raising the flag at `to` when all launches made so far are done.
    pub fn raise_flag(&self, to: Place, turn: &Span) {
        // The turn stands for a value that there is none of.
        self.post(turn, 0, to, turn);
    }

    /// Queues a wait for the flag at `from`, then taking `bytes` bytes from the host to the start of a span.
    pub fn take(&self, from: Place, span: &Span, bytes: usize, turn: &Span) {
        self.launch_take(from, span, bytes, Some(turn));
    }

    /// Queues taking what is already there.
    pub fn take_at_once(&self, from: Place, span: &Span, bytes: usize) {
        self.launch_take(from, span, bytes, None);
    }

    /// Queues a wait for the flag at `from`.
    pub fn wait_for_flag(&self, from: Place, turn: &Span) {
        // As above.
        self.launch_take(from, turn, 0, Some(turn));
    }

    /// Queues writing the device's clock, in nanoseconds, to the value at `to` when all launches made so far are done,
    /// and raising its flag. The value takes 8 bytes, at a multiple of 8.
    pub fn stamp(&self, to: Place, turn: &Span) {
        // SAFETY: as above.
        unsafe {
            stamp::launch_unchecked(
                &self.client,
                CubeCount::new_single(),
                CubeDim::new_single(),
                turn.argument(1, size_of::<u32>()),
                to.value,
                to.flags,
            );
        }
    }

    fn launch_take(&self, from: Place, span: &Span, bytes: usize, turn: Option<&Span>) {
        let vectors = bytes.div_ceil(UNIT_BYTES);
        let cubes = vectors.div_ceil(UNITS).clamp(1, TAKING_CUBES);
        // SAFETY: as above.
        unsafe {
            take::launch_unchecked(
                &self.client,
                CubeCount::new_1d(cubes as u32),
                CubeDim::new_1d(UNITS as u32),
                span.argument(vectors.max(1), UNIT_BYTES),
                turn.map(|turn| turn.argument(1, size_of::<u32>())).into(),
                from.value,
                from.flags,
                vectors as u32,
            );
        }
    }
}

#[cube(launch_unchecked)]
fn post(value: &[Four], turn: &[u32], address: u64, flags: u64, share: u32, vectors: u32) {
    let start = CUBE_POS_X * share;
    let end = u32::min(start + share, vectors);
    let mut at = start + UNIT_POS;
    while at < end {
        store_four(address + u64::cast_from(at) * 16, value[at as usize]);
        at += CUBE_DIM;
    }
    fence();
    sync_cube();
    if UNIT_POS == 0 {
        raise(flags + u64::cast_from(CUBE_POS_X * 4), turn[0]);
    }
}

#[cube(launch_unchecked)]
fn take(
    out: &mut [Four],
    turn: &ComptimeOption<Box<[u32]>>,
    address: u64,
    flag: u64,
    vectors: u32,
) {
    #[comptime]
    match turn {
        ComptimeOption::Some(turn) => {
            if UNIT_POS == 0 {
                let turn = turn[0];
                let mut raised = look(flag);
                while raised != turn {
                    raised = look(flag);
                }
            }
            sync_cube();
        }
        ComptimeOption::None => {}
    }
    let mut at = CUBE_POS_X * CUBE_DIM + UNIT_POS;
    while at < vectors {
        out[at as usize] = load_four(address + u64::cast_from(at) * 16);
        at += CUBE_COUNT_X * CUBE_DIM;
    }
}

#[cube(launch_unchecked)]
fn stamp(turn: &[u32], address: u64, flag: u64) {
    let nanos: u64;
    gpu_asm!("mov.u64 {nanos}, %globaltimer;", nanos = out(_) nanos);
    store_long(address, nanos);
    raise(flag, turn[0]);
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::Ordering;
    use std::thread;
    use std::time::Duration;

    use super::super::testing::cuda;
    use super::*;
    use crate::memory::Region;
    use crate::pinned::Pinned;

    /// Bytes of the flags, behind which values start.
    const FLAGS_BYTES: usize = ir::letters::SENDING_FLAGS_BYTES as usize;

    #[test]
    fn values_wait_for_the_host_and_come_back_whole() {
        let Some((gpu, context)) = cuda() else { return };
        // One number, less than a cube, several cubes with a rest, more than all cubes take at once.
        for count in [1_usize, 1000, 4100, 300_000] {
            let bytes = count * size_of::<f32>();
            let there = 2 * FLAGS_BYTES;
            let back = (there + bytes).next_multiple_of(UNIT_BYTES);
            let mut region = Region::new(2 * FLAGS_BYTES + 2 * (bytes + UNIT_BYTES)).unwrap();
            let sent: Vec<f32> = (0..count).map(|i| i as f32 + 0.5).collect();
            let start = there / size_of::<f32>();
            region.as_mut_slice::<f32>()[start..start + count].copy_from_slice(&sent);
            let region = Arc::new(region);
            let pinned = Pinned::alone(&context, &region).unwrap();
            let place = |flags: usize, value: usize| {
                let address = |start: usize| pinned.address() + start as u64;
                // SAFETY: both lie in the region, whose pages stay pinned until the launches have ended.
                unsafe { Place::new(address(flags), address(value)) }
            };
            let turn = gpu.upload(&[7_u32]);
            let span = gpu.poisoned(bytes.next_multiple_of(UNIT_BYTES));
            let flag = |at: usize| pinned.flag(at * size_of::<u32>());
            // Another run's number is no flag for this one.
            flag(0).store(6, Ordering::Release);
            thread::scope(|scope| {
                scope.spawn(|| {
                    thread::sleep(Duration::from_millis(5));
                    flag(0).store(7, Ordering::Release);
                });
                gpu.take(place(0, there), &span, bytes, &turn);
                gpu.post(&span, bytes, place(FLAGS_BYTES, back), &turn);
                gpu.flush().unwrap();
            });
            let first = FLAGS_BYTES / size_of::<u32>();
            for cube in 0..posting_cubes(bytes) {
                while flag(first + cube).load(Ordering::Acquire) != 7 {
                    std::hint::spin_loop();
                }
            }
            let start = back / size_of::<f32>();
            let received = &region.as_slice::<f32>()[start..start + count];
            assert_eq!(received, sent, "{count} numbers");
        }
    }
}
