//! Matrix products of many rows by the vendor's library (cuBLASLt), loaded at run time.
//!
//! - The library works on the stream of CubeCL's launches, called by the thread that makes them (see
//!   [`super::stream`]): products come between the launches around them with nothing to wait for, and are captured like
//!   them.
//! - So what goes wrong there is told later: by [`Vendor::check()`].

#![expect(
    unsafe_code,
    reason = "the vendor's library and driver are called through their C interfaces"
)]

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ffi::c_void;
use std::ptr;
use std::sync::{Arc, Mutex};

use anyhow::{Context as _, Error, Result, bail, ensure};
use cubecl::device_handle::DeviceHandle;
use cubecl::server::{BufferBinding, Handle};
use cubecl_runtime::server::Server as _;
use cudarc::cublaslt::{result, sys};
use cudarc::driver::CudaContext;
use ir::tensor::DType;
use ir::workspace;

use super::device::{Gpu, Span};
use super::stream::{Server, Stream};
use crate::locked;

/// Device memory that the library may use while it multiplies.
pub const WORKSPACE_BYTES: usize = workspace::LIBRARY_BYTES as usize;
/// Shapes of products that are kept ready: some for each length of a prompt, each less than a kilobyte on the host.
const MOST_PLANS: usize = 4096;

/// The library, ready on one GPU.
pub struct Vendor {
    server: DeviceHandle<Server>,
    workspace: Span,
    desk: Arc<Mutex<Desk>>,
}

/// What the thread works with that calls the library.
struct Desk {
    library: Library,
    plans: BTreeMap<Shape, Plan>,
    /// Why a product since the last check was not made.
    failure: Option<Error>,
}

/// One product: `out = x · wᵀ`, or `out = x · wᵀ + term`; sums are in f32 until they are written.
pub struct Product<'a> {
    /// `[tokens, inputs]` of `element`.
    pub x: &'a Span,
    /// `[outputs, inputs]` of `element`.
    pub w: &'a Span,
    /// f32 or 16-bit floats.
    pub element: DType,
    /// `[tokens, outputs]` of `made` that is added, in rows like those of `out`.
    pub term: Option<&'a Span>,
    /// `[tokens, outputs]` of `made`.
    pub out: &'a Span,
    /// f32, or `element`.
    pub made: DType,
    /// Elements from one row of `out` to the next.
    pub stride: usize,
    /// Rows of `x`.
    pub tokens: usize,
    /// Columns of `x`.
    pub inputs: usize,
    /// Rows of `w`.
    pub outputs: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Shape {
    element: DType,
    made: DType,
    tokens: usize,
    inputs: usize,
    outputs: usize,
    stride: usize,
}

/// What the library wants to be told about a product, with the algorithm it chose.
struct Plan {
    description: sys::cublasLtMatmulDesc_t,
    w: sys::cublasLtMatrixLayout_t,
    x: sys::cublasLtMatrixLayout_t,
    out: sys::cublasLtMatrixLayout_t,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

/// The library, started.
pub struct Library {
    context: Arc<CudaContext>,
    handle: sys::cublasLtHandle_t,
    /// Where it works.
    stream: Stream,
}

/// A product that is queued, with the addresses of its operands.
struct Call {
    shape: Shape,
    w: u64,
    x: u64,
    /// What is added, or the output where nothing is.
    term: u64,
    out: u64,
    workspace: u64,
    adds: bool,
    /// What launches before were to write.
    read: Vec<Handle>,
    /// The output and the workspace, which are there until the product is queued.
    _written: [Handle; 2],
}

// SAFETY: neither the library's handle nor its descriptions belong to a thread, and one thread at a time uses them.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Send for Plan {}

impl Library {
    /// Loads the library for what this thread launches on a GPU; `None` where it is not installed. To be called before
    /// any run.
    ///
    /// # Errors
    /// When it is there and refuses to start, or nobody knows on which stream.
    pub fn load(gpu: &Gpu, ordinal: usize) -> Result<Option<Self>> {
        // SAFETY: the call only looks for the library.
        if !gpu.is_cuda() || !unsafe { sys::is_culib_present() } {
            return Ok(None);
        }
        let context = CudaContext::new(ordinal).context("opening the GPU's context")?;
        context.bind_to_thread().context("binding the GPU's context")?;
        let stream = gpu.own_stream(&context).context("finding a stream for cuBLASLt")?;
        let handle = result::create_handle().context("starting cuBLASLt")?;
        Ok(Some(Self { context, handle, stream }))
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        // What the library answers helps nobody now.
        // SAFETY: the handle was made once by the library and is not used again.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

impl Vendor {
    /// The library with [`WORKSPACE_BYTES`] of memory.
    pub fn new(gpu: &Gpu, library: Library, workspace: Span) -> Self {
        let desk = Desk { library, plans: BTreeMap::new(), failure: None };
        Self { server: gpu.server(), workspace, desk: Arc::new(Mutex::new(desk)) }
    }

    /// Queues a product after all launches that this thread has made; those it makes from now on come after it.
    ///
    /// # Errors
    /// When its operands are shorter than its shape. What the library refuses [`Vendor::check()`] tells.
    pub fn multiply(&self, product: &Product<'_>) -> Result<()> {
        product.check()?;
        let &Product { x, w, term, out, .. } = product;
        let call = Call {
            shape: product.shape(),
            w: w.address()?,
            x: x.address()?,
            term: term.unwrap_or(out).address()?,
            out: out.address()?,
            workspace: self.workspace.address()?,
            adds: term.is_some(),
            read: [Some(x), Some(w), term].into_iter().flatten().map(Span::handle).collect(),
            _written: [out, &self.workspace].map(Span::handle),
        };
        let desk = Arc::clone(&self.desk);
        self.server.submit(move |server| {
            let desk = &mut *locked(&desk);
            if desk.failure.is_none() {
                desk.failure = desk.multiply(server, &call).err();
            }
        });
        Ok(())
    }

    /// Whether all products were made that were queued before launches were last passed on to the device.
    ///
    /// # Errors
    /// When the library has no algorithm for one or refuses it, or what it was to read could not be written: each is
    /// told once.
    pub fn check(&self) -> Result<()> {
        locked(&self.desk).failure.take().map_or(Ok(()), Err)
    }
}

impl Desk {
    /// Queues a product on the stream.
    fn multiply(&mut self, server: &mut Server, call: &Call) -> Result<()> {
        let Self { library, plans, .. } = self;
        library.context.bind_to_thread().context("binding the GPU's context")?;
        // What no launch could write would be multiplied as it is.
        let read: Vec<BufferBinding> = call.read.iter().cloned().map(Handle::binding).collect();
        let checked = read.first().map(|first| first.stream).map(|of| server.check(read, of));
        checked.transpose().context("a launch before a product could not be made")?;
        // Prompts come in any length; what is asked for again is soon found again.
        if plans.len() >= MOST_PLANS {
            plans.clear();
        }
        let plan = match plans.entry(call.shape) {
            Entry::Occupied(held) => held.into_mut(),
            Entry::Vacant(place) => place.insert(Plan::new(library.handle, call.shape)?),
        };
        let (one, zero) = (1.0_f32, 0.0_f32);
        let add = if call.adds { &one } else { &zero };
        let pointer = |address: u64| address as *mut c_void;
        // SAFETY: the memory is as long as the layouts say, which was checked where its address was taken, and is the
        // call's until it is queued, as that of launches is; scalars are read before the call returns.
        unsafe {
            result::matmul(
                library.handle,
                plan.description,
                (&raw const one).cast(),
                ptr::from_ref(add).cast(),
                pointer(call.w),
                plan.w,
                pointer(call.x),
                plan.x,
                pointer(call.term),
                plan.out,
                pointer(call.out),
                plan.out,
                &raw const plan.algorithm,
                pointer(call.workspace),
                WORKSPACE_BYTES,
                library.stream.raw().cast(),
            )
        }
        .context("multiplying with cuBLASLt")
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // What the library answers helps nobody now.
        // SAFETY: those that are there were made once by the library and are not used again.
        unsafe {
            if !self.description.is_null() {
                let _ = result::destroy_matmul_desc(self.description);
            }
            for layout in [self.w, self.x, self.out].into_iter().filter(|layout| !layout.is_null())
            {
                let _ = result::destroy_matrix_layout(layout);
            }
        }
    }
}

impl Product<'_> {
    fn shape(&self) -> Shape {
        let Self { element, made, tokens, inputs, outputs, stride, .. } = *self;
        Shape { element, made, tokens, inputs, outputs, stride }
    }

    fn check(&self) -> Result<()> {
        ensure!(
            self.made == DType::F32 || self.made == self.element,
            "products of {} are asked for in {}",
            self.element,
            self.made
        );
        let [size, made_size] = [self.element, self.made].map(|dtype| dtype.bytes() as usize);
        let holds = |span: &Span, count: usize, size: usize| span.bytes() >= count * size;
        let made = self.tokens.saturating_sub(1) * self.stride + self.outputs;
        ensure!(
            holds(self.x, self.tokens * self.inputs, size)
                && holds(self.w, self.outputs * self.inputs, size)
                && self.outputs <= self.stride
                && holds(self.out, made, made_size)
                && self.term.is_none_or(|term| holds(term, made, made_size)),
            "a product's operands are shorter than its shape"
        );
        Ok(())
    }
}

impl Plan {
    /// Rows that follow each other are, to the library, columns: it is asked for `outᵀ = w · xᵀ`.
    fn new(handle: sys::cublasLtHandle_t, shape: Shape) -> Result<Self> {
        let (element, made) = (type_of(shape.element)?, type_of(shape.made)?);
        let (tokens, inputs, outputs) =
            (shape.tokens as u64, shape.inputs as u64, shape.outputs as u64);
        // What is made of it is destroyed where the rest fails.
        let mut plan = Self {
            description: result::create_matmul_desc(
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                sys::cudaDataType_t::CUDA_R_32F,
            )?,
            w: ptr::null_mut(),
            x: ptr::null_mut(),
            out: ptr::null_mut(),
            algorithm: sys::cublasLtMatmulAlgo_t { data: [0; 8] },
        };
        // CUBLAS_OP_T of the library's enumeration of operations.
        let transposed = 1_i32;
        // SAFETY: the attribute is read before the call returns.
        unsafe {
            result::set_matmul_desc_attribute(
                plan.description,
                sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
                (&raw const transposed).cast(),
                size_of_val(&transposed),
            )?;
        }
        plan.w = result::create_matrix_layout(element, inputs, outputs, inputs as i64)?;
        plan.x = result::create_matrix_layout(element, inputs, tokens, inputs as i64)?;
        plan.out = result::create_matrix_layout(made, outputs, tokens, shape.stride as i64)?;
        let (preference, workspace_bytes) = (result::create_matmul_pref()?, WORKSPACE_BYTES);
        // SAFETY: attributes are read before the calls return; what is destroyed is not used again.
        let heuristic = unsafe {
            result::set_matmul_pref_attribute(
                preference,
                sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                (&raw const workspace_bytes).cast(),
                size_of_val(&workspace_bytes),
            )?;
            let (w, x, out) = (plan.w, plan.x, plan.out);
            let heuristic = result::get_matmul_algo_heuristic(
                handle,
                plan.description,
                w,
                x,
                out,
                out,
                preference,
            );
            result::destroy_matmul_pref(preference)?;
            heuristic
        };
        let heuristic = heuristic.with_context(|| {
            format!("cuBLASLt has no algorithm for {tokens} × {inputs} × {outputs}")
        })?;
        plan.algorithm = heuristic.algo;
        Ok(plan)
    }
}

/// What the library calls a type of elements.
fn type_of(dtype: DType) -> Result<sys::cudaDataType_t> {
    Ok(match dtype {
        DType::F32 => sys::cudaDataType_t::CUDA_R_32F,
        DType::F16 => sys::cudaDataType_t::CUDA_R_16F,
        DType::Bf16 => sys::cudaDataType_t::CUDA_R_16BF,
        DType::I32 | DType::U8 | DType::I8 => bail!("a product of integers is asked for"),
    })
}
