//! Values on their way from the host to a GPU, through memory that is pinned once.
//!
//! CubeCL pins memory anew for what it is given, which takes longer than a copy.

#![expect(unsafe_code, reason = "pinned memory is copied by the driver")]

use std::cell::RefCell;

use anyhow::{Result, ensure};
use ir::id::DeviceId;
use ir::plan::{Action, Plan};

use crate::fetch::Link;
use crate::kernels::gpu::device::{Gpu, Span};
use crate::memory::Region;

/// Where values wait for their copy; `None` where the GPU is not driven through CUDA, or nothing comes.
pub(super) struct Arrivals(Option<RefCell<Stage>>);

struct Stage {
    link: Link,
    region: Region,
}

impl Arrivals {
    /// Pins memory for the largest value that comes from another device.
    ///
    /// # Errors
    /// When that cannot be done.
    pub(super) fn new(plan: &Plan, device: DeviceId, gpu: &Gpu) -> Result<Self> {
        let (Some(ordinal), bytes) = (gpu.ordinal(), most_bytes(plan, device)) else {
            return Ok(Self(None));
        };
        if bytes == 0 {
            return Ok(Self(None));
        }
        let (region, mut link) = (Region::new(bytes)?, Link::new(ordinal)?);
        link.pin(&region)?;
        Ok(Self(Some(RefCell::new(Stage { link, region }))))
    }

    /// Copies a value to the start of a span: when the launches made so far are done with what lies there, and before
    /// those to come.
    ///
    /// # Errors
    /// When the device failed, or the span is shorter.
    pub(super) fn write(&self, gpu: &Gpu, span: &Span, bytes: &[u8]) -> Result<()> {
        let Some(stage) = &self.0 else { return gpu.write(span, bytes) };
        let Stage { link, region } = &mut *stage.borrow_mut();
        ensure!(bytes.len() <= span.bytes().min(region.bytes()), "a value outgrows its place");
        gpu.sync()?;
        let staged = &mut region.as_mut_slice::<u8>()[..bytes.len()];
        staged.copy_from_slice(bytes);
        // SAFETY: the span is as long, launches that use it have ended, and the copy ends before anything else is done.
        unsafe { link.copy(span.address()?, staged) }?;
        link.wait()
    }
}

/// Bytes of the largest buffer of another device that is read here.
fn most_bytes(plan: &Plan, device: DeviceId) -> usize {
    let read = plan.programs.iter().flat_map(|program| {
        let lanes = program.lanes.iter().filter(move |lane| lane.device == device);
        let steps = lanes.flat_map(|lane| &lane.steps).map(|&step| &program.steps[step]);
        let moves = steps.filter(|step| matches!(step.action, Action::Move { .. }));
        let buffers = moves.flat_map(|step| &step.reads).map(|&buffer| &program.buffers[buffer]);
        buffers.filter(|buffer| buffer.device != device).map(|buffer| buffer.ty.bytes(program.max))
    });
    read.max().unwrap_or(0) as usize
}
