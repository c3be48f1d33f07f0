//! Matrix products of many rows by the vendor's library (cuBLASLt), loaded at run time.
//!
//! - The library works on a stream of our own, since CubeCL's are private. Events of the whole context put its work
//!   between CubeCL's launches: all that was queued before a product ends before it, and what is queued after it
//!   begins after it. Nothing waits on the host.
//! - Copies of weights that are made meanwhile would be drawn into that order; beside them the streams take turns by
//!   flags.

#![expect(
    unsafe_code,
    reason = "the vendor's library and driver are called through their C interfaces"
)]

mod turns;

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use anyhow::{Context as _, Result, bail, ensure};
use cudarc::cublaslt::{result, sys};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, sys as driver};
use ir::tensor::DType;
use ir::workspace;

use self::turns::{TURNS_BYTES, Turns};
use super::device::{Gpu, Span};

/// Device memory that the library may use while it multiplies, with the flags of turns.
pub const WORKSPACE_BYTES: usize = workspace::LIBRARY_BYTES as usize;
/// What the library has of it.
const PRODUCT_BYTES: usize = WORKSPACE_BYTES - TURNS_BYTES;
/// Shapes of products that are kept ready: some for each length of a prompt, each less than a kilobyte on the host.
const MOST_PLANS: usize = 4096;

/// The library, ready on one GPU.
pub struct Vendor {
    library: Library,
    stream: Arc<CudaStream>,
    workspace: Span,
    /// The end of what CubeCL queued, then the end of the products.
    events: [CudaEvent; 2],
    /// For work beside which copies are made.
    turns: Option<Turns>,
    plans: BTreeMap<Shape, Plan>,
    /// How products are put between launches.
    pub order: Order,
}

/// Ways to put products between CubeCL's launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// By events of the whole context. Copies that are on their way in it take part in that order: products wait for
    /// them, and they for products.
    Events,
    /// By flags: for work beside which copies are made.
    Flags,
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
}

impl Library {
    /// Loads the library for a GPU; `None` where it is not installed.
    ///
    /// # Errors
    /// When it is there and refuses to start.
    pub fn load(gpu: &Gpu, ordinal: usize) -> Result<Option<Self>> {
        // SAFETY: the call only looks for the library.
        if !gpu.is_cuda() || !unsafe { sys::is_culib_present() } {
            return Ok(None);
        }
        let context = CudaContext::new(ordinal).context("opening the GPU's context")?;
        context.bind_to_thread().context("binding the GPU's context")?;
        let handle = result::create_handle().context("starting cuBLASLt")?;
        Ok(Some(Self { context, handle }))
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
    /// The library with [`WORKSPACE_BYTES`] of memory; `beside_copies` says whether products are to be put in
    /// [`Order::Flags`].
    ///
    /// # Errors
    /// When the driver has no more streams, or launches cannot raise flags.
    pub fn new(gpu: &Gpu, library: Library, workspace: Span, beside_copies: bool) -> Result<Self> {
        let context = &library.context;
        let stream = context.new_stream().context("making a stream for cuBLASLt")?;
        let event = || context.new_event(None).context("making an event for cuBLASLt");
        let events = [event()?, event()?];
        let flags = beside_copies.then(|| workspace.part(PRODUCT_BYTES, TURNS_BYTES));
        let turns = flags.map(|flags| Turns::new(gpu, context, &flags)).transpose()?;
        let (plans, order) = (BTreeMap::new(), Order::Events);
        Ok(Self { library, stream, workspace, events, turns, plans, order })
    }

    /// Queues products after all launches made so far; launches made from now on come after them.
    ///
    /// # Errors
    /// When the library has no algorithm for a product or refuses it.
    pub fn multiply(&mut self, gpu: &Gpu, products: &[Product<'_>]) -> Result<()> {
        self.stream.context().bind_to_thread().context("binding the GPU's context")?;
        // Prompts come in any length; what is asked for again is soon found again.
        if self.plans.len() >= MOST_PLANS {
            self.plans.clear();
        }
        for product in products {
            let shape = product.shape();
            if !self.plans.contains_key(&shape) {
                self.plans.insert(shape, Plan::new(self.library.handle, shape)?);
            }
        }
        // What no launch could write would be multiplied as it is.
        let read =
            products.iter().flat_map(|product| [Some(product.x), Some(product.w), product.term]);
        let read: Vec<&Span> = read.flatten().collect();
        match self.order {
            Order::Events => {
                self.begin_after_all(gpu, &read)?;
                let queued = products.iter().try_for_each(|product| self.queue(product));
                let ended = self.end_before_all();
                queued.and(ended)
            }
            Order::Flags => {
                let turns = self.turns.as_ref().context("no copies were to be made meanwhile")?;
                turns.begin(gpu, &self.stream, &read)?;
                // A turn that began ends, whatever was queued in it.
                let queued = products.iter().try_for_each(|product| self.queue(product));
                let ended = turns.end(gpu, &self.stream);
                queued.and(ended)
            }
        }
    }

    /// Lets what is queued on the stream begin after all that the context has.
    fn begin_after_all(&self, gpu: &Gpu, read: &[&Span]) -> Result<()> {
        // What CubeCL has not passed on is not yet in the context.
        gpu.flush_written(read)?;
        let (context, event) = (self.stream.context().cu_ctx(), self.events[0].cu_event());
        // SAFETY: context, stream and event live as long as `self`.
        unsafe { driver::cuCtxRecordEvent(context, event) }
            .result()
            .context("recording what a product comes after")?;
        // SAFETY: as above.
        unsafe { driver::cuStreamWaitEvent(self.stream.cu_stream(), event, 0) }
            .result()
            .context("waiting for what a product comes after")
    }

    /// Lets all that is queued in the context from now on begin after what the stream has.
    fn end_before_all(&self) -> Result<()> {
        let (context, event) = (self.stream.context().cu_ctx(), self.events[1].cu_event());
        // SAFETY: as above.
        unsafe { driver::cuEventRecord(event, self.stream.cu_stream()) }
            .result()
            .context("recording a product")?;
        // SAFETY: as above.
        unsafe { driver::cuCtxWaitEvent(context, event) }.result().context("waiting for a product")
    }

    fn queue(&self, product: &Product<'_>) -> Result<()> {
        let plan = &self.plans[&product.shape()];
        product.check()?;
        let (one, zero) = (1.0_f32, 0.0_f32);
        let add = if product.term.is_some() { &one } else { &zero };
        let pointer = |span: &Span| -> Result<*mut c_void> { Ok(span.address()? as *mut c_void) };
        // SAFETY: the spans are as long as the layouts say (checked above) and alive; scalars are read before
        // the call returns.
        unsafe {
            result::matmul(
                self.library.handle,
                plan.description,
                (&raw const one).cast(),
                ptr::from_ref(add).cast(),
                pointer(product.w)?,
                plan.w,
                pointer(product.x)?,
                plan.x,
                pointer(product.term.unwrap_or(product.out))?,
                plan.out,
                pointer(product.out)?,
                plan.out,
                &raw const plan.algorithm,
                pointer(&self.workspace)?,
                PRODUCT_BYTES,
                self.stream.cu_stream().cast(),
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
        let (preference, workspace_bytes) = (result::create_matmul_pref()?, PRODUCT_BYTES);
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

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::testing::gpu;
    use super::*;

    #[test]
    fn products_fall_between_the_launches_around_them() {
        let Some(gpu) = gpu() else { return };
        let Some(library) = Library::load(&gpu, 0).unwrap() else {
            eprintln!("skipped: no cuBLASLt");
            return;
        };
        let mut vendor =
            Vendor::new(&gpu, library, gpu.allocate(WORKSPACE_BYTES).unwrap(), true).unwrap();
        let (tokens, inputs, outputs) = (48, 256, 128);
        let wave = |count: usize, phase: f32| -> Vec<f32> {
            (0..count).map(|i| (i as f32 * 0.37 + phase).sin()).collect()
        };
        let narrow = |wide: &[f32]| wide.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>();
        let (x, w) = (narrow(&wave(tokens * inputs, 0.0)), narrow(&wave(outputs * inputs, 1.0)));
        let term = wave(tokens * outputs, 2.0);
        let (x_span, w_span, term_span) = (gpu.upload(&x), gpu.upload(&w), gpu.upload(&term));
        // One in the type that it is made of, in 16 bits.
        let narrow_out = gpu.poisoned(tokens * outputs * 2);
        let product = Product {
            x: &x_span,
            w: &w_span,
            element: DType::Bf16,
            term: None,
            out: &narrow_out,
            made: DType::Bf16,
            stride: outputs,
            tokens,
            inputs,
            outputs,
        };
        vendor.multiply(&gpu, &[product]).unwrap();
        let narrow_made = gpu.download::<bf16>(&narrow_out, tokens * outputs);
        let doubled = gpu.poisoned(tokens * outputs * 4);
        let out = gpu.poisoned(tokens * outputs * 4);
        for order in [Order::Events, Order::Flags].repeat(10) {
            vendor.order = order;
            let count = tokens * outputs;
            gpu.add(&term_span, &term_span, &doubled, count);
            // In two pieces, side by side.
            let piece = |first: usize, outputs: usize| {
                let w = w_span.part(first * inputs * 2, outputs * inputs * 2);
                let [term, out] =
                    [&doubled, &out].map(|span| span.part(first * 4, span.bytes() - first * 4));
                (w, term, out, outputs)
            };
            for (w, term, out, outputs) in [piece(0, 64), piece(64, 64)] {
                let product = Product {
                    x: &x_span,
                    w: &w,
                    element: DType::Bf16,
                    term: Some(&term),
                    out: &out,
                    made: DType::F32,
                    stride: 128,
                    tokens,
                    inputs,
                    outputs,
                };
                vendor.multiply(&gpu, &[product]).unwrap();
            }
            gpu.add(&out, &term_span, &out, count);
            let made = gpu.download::<f32>(&out, count);
            for (i, made) in made.iter().enumerate() {
                let row = |m: &[bf16], row: usize| m[row * inputs..(row + 1) * inputs].to_vec();
                let (x, w) = (row(&x, i / outputs), row(&w, i % outputs));
                let sum: f64 = x
                    .iter()
                    .zip(&w)
                    .map(|(a, b)| f64::from(a.to_f32()) * f64::from(b.to_f32()))
                    .sum();
                let rounded = (f64::from(narrow_made[i].to_f32()) - sum).abs();
                assert!(rounded < 4e-3 * sum.abs().max(1e-3), "{i}: {} of {sum}", narrow_made[i]);
                let expected = sum + 3.0 * f64::from(term[i]);
                assert!(
                    (f64::from(*made) - expected).abs() < 1e-3,
                    "{i}: {made} is not {expected}"
                );
            }
        }
    }
}
