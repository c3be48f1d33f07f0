//! How the vendor's stream and CubeCL's take turns without a third stream taking part: by flags in device memory, which
//! launches raise and launches wait for.
//!
//! - CubeCL's streams are private, so what waits there is a launch of CubeCL's; on the vendor's stream it is a kernel
//!   in PTX, which the driver compiles.
//! - A launch that waits is queued after the one that raises its flag, so that streams which share a hardware queue
//!   cannot block.
//! - A flag that is ahead of the turn that is waited for ends the wait, too.
//! - What a stream writes before it raises a flag is done, as launches of one stream follow each other; flags are
//!   raised and seen with the order of the whole system.

use std::cell::Cell;
use std::ffi::{CStr, c_void};
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use cubecl::prelude::*;
use cudarc::driver::{CudaContext, CudaStream, result, sys as driver};

use crate::kernels::gpu::addressed::{fence, look, raise};
use crate::kernels::gpu::device::{ALIGNMENT, Gpu, Span};

/// Device memory of the flags.
pub(super) const TURNS_BYTES: usize = 2 * ALIGNMENT;

/// What waits for a flag on the vendor's stream, and what raises one. Both take the flag's address and its number.
const KERNELS: &CStr = c"
.version 6.0
.target sm_70
.address_size 64

.visible .entry await_turn(.param .u64 flag, .param .u32 number)
{
    .reg .u64 %flag;
    .reg .u32 %number, %seen;
    .reg .s32 %ahead;
    .reg .pred %waits;
    ld.param.u64 %flag, [flag];
    ld.param.u32 %number, [number];
LOOK:
    ld.acquire.sys.global.u32 %seen, [%flag];
    sub.s32 %ahead, %seen, %number;
    setp.lt.s32 %waits, %ahead, 0;
    @%waits bra LOOK;
    ret;
}

.visible .entry give_turn(.param .u64 flag, .param .u32 number)
{
    .reg .u64 %flag;
    .reg .u32 %number;
    ld.param.u64 %flag, [flag];
    ld.param.u32 %number, [number];
    fence.acq_rel.sys;
    st.release.sys.global.u32 [%flag], %number;
    ret;
}
";

/// The flags of two streams.
pub(super) struct Turns {
    /// Of the flag that is raised when the vendor may begin, and of the one for when it has ended.
    addresses: [u64; 2],
    /// The last turn's: what flags are raised to.
    number: Cell<u32>,
    context: Arc<CudaContext>,
    module: driver::CUmodule,
    await_turn: driver::CUfunction,
    give_turn: driver::CUfunction,
}

impl Turns {
    /// Turns by flags in [`TURNS_BYTES`] of device memory, which lives as long.
    ///
    /// # Errors
    /// When a kernel cannot be compiled.
    pub(super) fn new(gpu: &Gpu, context: &Arc<CudaContext>, flags: &Span) -> Result<Self> {
        context.bind_to_thread().context("binding the GPU's context")?;
        // SAFETY: the text ends with a zero.
        let module = unsafe { result::module::load_data(KERNELS.as_ptr().cast()) };
        let module = module.context("compiling the kernels that wait for turns")?;
        // SAFETY: the module was just loaded.
        let function = |name: &CStr| unsafe { result::module::get_function(module, name.into()) };
        let find = |name| function(name).context("finding a kernel that waits for turns");
        let (await_turn, give_turn) = (find(c"await_turn")?, find(c"give_turn")?);
        let address = flags.address()?;
        let addresses = [address, address + ALIGNMENT as u64];
        gpu.write(flags, &[0; TURNS_BYTES])?;
        let context = Arc::clone(context);
        let turns =
            Self { addresses, number: Cell::new(1), context, module, await_turn, give_turn };
        // A launch that cannot be made would leave the other stream waiting for good.
        for address in addresses {
            turns.give_to(gpu, address);
            turns.wait_for(gpu, address);
        }
        let raised = gpu.read(flags)?;
        let is_raised = |at: usize| raised[at..].starts_with(&turns.number.get().to_ne_bytes());
        ensure!(is_raised(0) && is_raised(ALIGNMENT), "launches cannot raise flags on this GPU");
        Ok(turns)
    }

    /// Lets the stream go on after all that was queued on CubeCL's.
    ///
    /// # Errors
    /// When something of `read` could not be written; then the stream waits for nothing.
    pub(super) fn begin(&self, gpu: &Gpu, stream: &CudaStream, read: &[&Span]) -> Result<()> {
        self.number.set(self.number.get().wrapping_add(1));
        self.give_to(gpu, self.addresses[0]);
        gpu.flush_written(read)?;
        self.launch(self.await_turn, stream, self.addresses[0])
    }

    /// Lets CubeCL's stream go on after all that was queued on this one.
    pub(super) fn end(&self, gpu: &Gpu, stream: &CudaStream) -> Result<()> {
        self.launch(self.give_turn, stream, self.addresses[1])?;
        self.wait_for(gpu, self.addresses[1]);
        Ok(())
    }

    fn give_to(&self, gpu: &Gpu, flag: u64) {
        let (cubes, units) = (CubeCount::new_1d(1), CubeDim::new_1d(1));
        // SAFETY: the flag lies in memory that lives as long as `self`.
        unsafe { give::launch_unchecked(&gpu.client, cubes, units, flag, self.number.get()) };
    }

    fn wait_for(&self, gpu: &Gpu, flag: u64) {
        let (cubes, units) = (CubeCount::new_1d(1), CubeDim::new_1d(1));
        // SAFETY: as above.
        unsafe { wait::launch_unchecked(&gpu.client, cubes, units, flag, self.number.get()) };
    }

    fn launch(&self, kernel: driver::CUfunction, stream: &CudaStream, flag: u64) -> Result<()> {
        let (mut flag, mut number) = (flag, self.number.get());
        let mut arguments: [*mut c_void; 2] = [(&raw mut flag).cast(), (&raw mut number).cast()];
        let one = (1, 1, 1);
        // SAFETY: the kernel takes a 64-bit and a 32-bit number, which are read before the call returns; the flag
        // lives as long as `self`.
        unsafe { result::launch_kernel(kernel, one, one, 0, stream.cu_stream(), &mut arguments) }
            .context("queueing a wait between streams")
    }
}

impl Drop for Turns {
    fn drop(&mut self) {
        // What the driver answers helps nobody now.
        let _ = self.context.bind_to_thread();
        // SAFETY: the module was loaded once and its kernels are not used again.
        let _ = unsafe { result::module::unload(self.module) };
    }
}

#[cube(launch_unchecked)]
fn give(flag: u64, number: u32) {
    fence();
    raise(flag, number);
}

#[cube(launch_unchecked)]
fn wait(flag: u64, number: u32) {
    let mut ahead = look(flag) - number;
    // Half of all differences are negative.
    while ahead >= 0x8000_0000u32 {
        ahead = look(flag) - number;
    }
}
