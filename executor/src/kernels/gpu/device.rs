//! A GPU as kernels see it: its queue, its properties, and pieces of its memory.

#![expect(unsafe_code, reason = "kernels are given raw pieces of device memory")]

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use anyhow::{Context as _, Result, ensure};
use burn_cubecl::CubeDevice;
use cubecl::bytes::Bytes;
use cubecl::client::{Client, Graph};
use cubecl::config::cache::CacheConfig;
use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig as _};
use cubecl::ir::DeviceProperties;
use cubecl::ir::features::Tma;
use cubecl::prelude::{
    BufferArg, CubeCount, CubeDim, ElemType, Scalar as _, TensorArg, TensorMapArg,
    TensorMapPrefetch, TensorMapSwizzle, Tiled, TiledArgs,
};
use cubecl::server::{Handle, ServerError};
use cubecl::zspace::{Shape, Strides};
use cubecl_runtime::runtime::Runtime;

use super::matrix::LOAD_BYTES;
use super::panics;
use super::warpgroup::LINE_BYTES;

/// Every piece of memory starts at a multiple of this many bytes: the widest load, and what each driver asks of
/// the start of a binding.
pub const ALIGNMENT: usize = ir::workspace::WORKSPACE_ALIGNMENT as usize;

/// One GPU, opened: launches from one thread run in the order they are made.
#[derive(Clone)]
pub struct Gpu {
    /// Burn's name for it.
    pub device: CubeDevice,
    /// Where launches are queued.
    pub client: Client,
}

/// A stretch of device memory.
#[derive(Clone, Debug)]
pub struct Span {
    handle: Handle,
    bytes: usize,
    /// Where CUDA sees its first byte; `None` on other devices.
    address: Option<u64>,
}

/// Whether a kernel for a device of those properties may have PTX in it. (Drivers of shaders do not tell of
/// multiprocessors.)
pub(super) fn has_ptx(properties: &DeviceProperties) -> bool {
    properties.hardware.num_streaming_multiprocessors.is_some()
}

/// Whether a device of those properties is an NVIDIA GPU of Hopper's kind or newer: they copy in bulk.
pub(super) fn is_hopper_or_newer(properties: &DeviceProperties) -> bool {
    has_ptx(properties) && properties.features.tma.contains(Tma::Base)
}

/// Lets CubeCL keep what it compiles in the user's cache folder, where the next process finds it; by itself it compiles
/// anew in every process. What a `cubecl.toml` or the environment says of all else holds.
fn keep_compiled_kernels() {
    let mut config = CubeClRuntimeConfig::from_current_dir().override_from_env();
    config.compilation.cache = true;
    if matches!(config.environment.path, CacheConfig::Target) {
        config.environment.path = CacheConfig::Global;
    }
    // Once a device is open, the configuration stays as it is.
    let _is_first = CubeClRuntimeConfig::try_set(config);
}

impl Gpu {
    /// Opens a GPU by the driver's ordinal. Its kernels are compiled once for each build of this program.
    ///
    /// # Errors
    /// When there is no driver, or no such GPU.
    pub fn cuda(ordinal: usize) -> Result<Self> {
        keep_compiled_kernels();
        panics::notice();
        let device = CubeDevice::cuda(ordinal).map_err(anyhow::Error::from)?;
        Ok(Self { client: device.client(), device })
    }

    /// Opens the first Vulkan device: in tests one in software.
    ///
    /// # Errors
    /// When there is none.
    pub fn vulkan() -> Result<Self> {
        panics::notice();
        let kind = cubecl::device::WgpuDeviceKind::default();
        // By any other interface kernels would be refused one by one.
        let device = CubeDevice::vulkan(kind)
            .map_err(anyhow::Error::from)
            .context("there is no Vulkan device; Mesa's mesa-vulkan-drivers are one in software")?;
        Ok(Self { client: device.client(), device })
    }

    /// Whether it is driven through CUDA: then vendor libraries and captured graphs are there.
    pub fn is_cuda(&self) -> bool {
        matches!(self.device, CubeDevice::Cuda(_))
    }

    /// Whether its kernels know a type.
    pub fn knows(&self, dtype: ir::tensor::DType) -> bool {
        self.client.properties().supports_type(element(dtype))
    }

    /// The driver's number for it, where it is driven through CUDA.
    pub fn ordinal(&self) -> Option<usize> {
        if let CubeDevice::Cuda(device) = &self.device { Some(device.index) } else { None }
    }

    /// Threads of a plane (a warp): 32 on every NVIDIA GPU, 4 to 8 on software devices.
    pub fn plane(&self) -> u32 {
        self.client.properties().hardware.plane_size_max
    }

    /// Multiprocessors, as far as the driver tells.
    pub fn processors(&self) -> u32 {
        self.client.properties().hardware.num_streaming_multiprocessors.unwrap_or(1)
    }

    /// Cubes and their size for `units` threads in all.
    pub(super) fn grid(&self, units: usize) -> (CubeCount, CubeDim) {
        /// Threads of a cube: eight planes of an NVIDIA GPU.
        const THREADS: usize = 256;
        /// The most cubes along one axis, by WebGPU's default limits.
        const AXIS: usize = 65535;
        let cubes = units.div_ceil(THREADS).max(1);
        let rows = cubes.div_ceil(AXIS);
        let count = CubeCount::Static(cubes.div_ceil(rows) as u32, rows as u32, 1);
        (count, CubeDim::new_1d(THREADS as u32))
    }

    /// Takes device memory of its own for as long as the span lives. It holds whatever was there.
    ///
    /// # Errors
    /// When there is not as much.
    pub fn allocate(&self, bytes: usize) -> Result<Span> {
        let bytes = bytes.max(1).next_multiple_of(ALIGNMENT);
        let handle = self.client.memory_persistent_allocation((), |()| self.client.empty(bytes));
        let address = if self.is_cuda() {
            type Server = <cubecl::cuda::CudaRuntime as Runtime>::Server;
            let resource = self.client.get_resource::<Server>(handle.clone());
            Some(resource.context("finding GPU memory")?.resource().ptr)
        } else {
            None
        };
        Ok(Span { handle, bytes, address })
    }

    /// Copies host memory to the start of a span, in the order of launches.
    ///
    /// # Errors
    /// When the span is shorter.
    pub fn write(&self, span: &Span, bytes: &[u8]) -> Result<()> {
        ensure!(bytes.len() <= span.bytes, "{} bytes are written to {}", bytes.len(), span.bytes);
        if !bytes.is_empty() {
            let part = span.part(0, bytes.len());
            self.client.write(&part.handle, Bytes::from_bytes_vec(bytes.to_vec()));
        }
        Ok(())
    }

    /// Waits for the launches that were made and copies a span to the host.
    ///
    /// # Errors
    /// When a launch failed.
    pub fn read(&self, span: &Span) -> Result<Bytes> {
        let bytes = self.client.read_one(span.handle.clone()).context("reading GPU memory")?;
        self.check_launches().map(|()| bytes)
    }

    /// Captures what `queue` queues, which is not done: launches that have run since `graph_prepare`. When they are
    /// replayed, some begin while others end (see [`super::overlap`]). Inside it is why the device captured nothing.
    ///
    /// # Errors
    /// Those of `queue`; a panic of its passes on once the capture has ended.
    pub(crate) fn capture(
        &self,
        queue: impl FnOnce() -> Result<()>,
    ) -> Result<Result<Graph, ServerError>> {
        if let Err(error) = self.client.start_capture() {
            return Ok(Err(error));
        }
        // What is left open would take in all that is queued from now on.
        let queued = catch_unwind(AssertUnwindSafe(|| {
            queue()?;
            anyhow::Ok(self.overlap_launches())
        }));
        let captured = self.client.stop_capture();
        let overlapped = queued.unwrap_or_else(|panic| resume_unwind(panic))?;
        self.check_launches()?;
        Ok(overlapped.and(captured))
    }

    /// Whether all launches of this process got as far as the device.
    ///
    /// # Errors
    /// When one was lost in a panic.
    #[expect(clippy::unused_self, reason = "who drives one GPU must not go on for another either")]
    pub(crate) fn check_launches(&self) -> Result<()> {
        panics::check()
    }

    /// Passes launches on to the device: until then they may wait in this process, for other calls to follow.
    ///
    /// # Errors
    /// When the device failed.
    pub fn flush(&self) -> Result<()> {
        self.client.flush().context("queueing launches")?;
        self.check_launches()
    }

    /// Passes launches on to the device, and says of those that write to some memory whether they could be made: for
    /// what reads it by address, which CubeCL knows nothing of.
    ///
    /// # Errors
    /// When one could not be made.
    pub fn flush_written(&self, written: &[&Span]) -> Result<()> {
        let handles = written.iter().map(|span| &span.handle);
        self.client.check(handles).context("a launch before could not be made")?;
        self.check_launches()
    }

    /// Waits for the launches that were made, and says of those that write to some memory whether they could be.
    ///
    /// # Errors
    /// When one could not, or the device failed.
    pub fn check(&self, written: &[&Span]) -> Result<()> {
        let handles = written.iter().map(|span| &span.handle);
        cubecl::future::block_on(self.client.sync_buffers(handles))
            .context("computing on the GPU")?;
        self.check_launches()
    }

    /// Waits for the launches that were made.
    ///
    /// # Errors
    /// When the device failed.
    pub fn sync(&self) -> Result<()> {
        cubecl::future::block_on(self.client.sync()).context("waiting for the GPU")?;
        self.check_launches()
    }
}

/// What a box has of a matrix (see [`Span::boxes()`]).
#[derive(Clone, Copy, Debug)]
pub(super) struct BoxLines {
    pub(super) layers: usize,
    /// Of each layer.
    pub(super) lines: usize,
}

impl Span {
    /// Memory that CubeCL manages, with all that belongs to it. Its address is not looked up.
    pub(super) fn of(handle: Handle) -> Self {
        let bytes = handle.size_in_used() as usize;
        Self { handle, bytes, address: None }
    }

    /// Its length.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// `bytes` bytes from byte `start` on; `start` is a multiple of [`ALIGNMENT`].
    ///
    /// # Panics
    /// When they lie beyond its end.
    #[must_use]
    pub fn part(&self, start: usize, bytes: usize) -> Self {
        assert!(start + bytes <= self.bytes, "a part lies beyond its span");
        assert!(start.is_multiple_of(ALIGNMENT), "a part starts at byte {start}");
        let after = self.bytes - start - bytes;
        let handle = self.handle.clone().offset_start(start as u64).offset_end(after as u64);
        let address = self.address.map(|address| address + start as u64);
        Self { handle, bytes, address }
    }

    /// How CubeCL names it.
    pub(super) fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Where CUDA sees its first byte.
    ///
    /// # Errors
    /// On a device that is not driven through CUDA, and of a tensor's memory.
    pub fn address(&self) -> Result<u64> {
        self.address.context("this memory is not of a CUDA device, or a tensor's")
    }

    /// All of it as a kernel's argument: loads of [`LOAD_BYTES`].
    pub fn loads(&self) -> BufferArg {
        self.argument(self.bytes / LOAD_BYTES, LOAD_BYTES)
    }

    /// As the device copies boxes of it: layers of lines of `words` 4 bytes each lie one after the other. A box has 128
    /// bytes of each of some lines of some layers, in which 16 bytes change places by the line's number.
    ///
    /// # Panics
    /// When it is shorter than that.
    pub(super) fn boxes(
        &self,
        layers: usize,
        lines: usize,
        words: usize,
        of_box: BoxLines,
    ) -> TensorMapArg<Tiled> {
        assert!(
            layers * lines * words * 4 <= self.bytes,
            "boxes of {layers} · {lines} · {words} · 4 of {} bytes",
            self.bytes
        );
        let shape = Shape::from([layers, lines, words]);
        let strides = Strides::new(&[lines * words, words, 1]);
        // SAFETY: the span is as long as the layers are.
        let tensor = unsafe { TensorArg::from_raw_parts(self.handle.clone(), strides, shape) };
        let tile_size = Shape::from([of_box.layers, of_box.lines, LINE_BYTES / 4]);
        TensorMapArg::new(TiledArgs { tile_size }, tensor, u32::elem_type_native())
            .with_swizzle(TensorMapSwizzle::B128)
            .with_prefetch(TensorMapPrefetch::B256)
    }

    /// As a kernel's argument: `count` elements or vectors of `size` bytes each.
    ///
    /// # Panics
    /// When it is shorter than that.
    pub fn argument(&self, count: usize, size: usize) -> BufferArg {
        assert!(
            count * size <= self.bytes,
            "a kernel takes {count} · {size} of {} bytes",
            self.bytes
        );
        // SAFETY: the span is as long as the argument says.
        unsafe { BufferArg::from_raw_parts(self.handle.clone(), count) }
    }
}

/// The element type of a kernel's generic float.
pub(crate) fn element(dtype: ir::tensor::DType) -> ElemType {
    use cubecl::ir::{FloatKind, IntKind, UIntKind};
    use ir::tensor::DType as Stored;
    match dtype {
        Stored::F32 => ElemType::Float(FloatKind::F32),
        Stored::F16 => ElemType::Float(FloatKind::F16),
        Stored::Bf16 => ElemType::Float(FloatKind::BF16),
        Stored::I32 => ElemType::Int(IntKind::I32),
        Stored::U8 => ElemType::UInt(UIntKind::U8),
        Stored::I8 => ElemType::Int(IntKind::I8),
    }
}
