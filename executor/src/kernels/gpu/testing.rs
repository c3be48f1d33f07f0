//! What the kernels' tests share: a GPU, real or in software.

use std::sync::Arc;

use cubecl::client::Graph;
use cudarc::driver::CudaContext;
use ir::tensor::{DType, Format};

use super::cast::Cast;
use super::device::{Gpu, Span};
use super::warpgroup::RightOperands;

/// The first CUDA device; where there is none, the first Vulkan device, which may be one in software.
/// `None`, with the reason printed, where there is neither: then a test checks nothing.
///
/// # Panics
/// Where `HYBRID_TEST_GPU` is `cuda`, as `tests/gpu.sh` sets it, and there is no CUDA device.
pub(crate) fn gpu() -> Option<Gpu> {
    let found = match std::env::var("HYBRID_TEST_GPU").as_deref() {
        Ok("cuda") => Ok(Gpu::cuda(0).expect("HYBRID_TEST_GPU asks for a CUDA device")),
        Ok(other) => panic!("HYBRID_TEST_GPU is {other:?}, not cuda"),
        Err(_) => Gpu::cuda(0).or_else(|_| Gpu::vulkan()),
    };
    match found {
        Ok(gpu) => Some(gpu),
        Err(error) => {
            eprintln!("skipped: no GPU, and no Vulkan device in software: {error:#}");
            None
        }
    }
}

/// That device and its context where it is a CUDA device. `None`, with the reason printed, on others: they reach no memory
/// by address and have no streams.
pub(crate) fn cuda() -> Option<(Gpu, Arc<CudaContext>)> {
    let gpu = gpu()?;
    let Some(ordinal) = gpu.ordinal() else {
        eprintln!("skipped: there is no CUDA device");
        return None;
    };
    Some((gpu, CudaContext::new(ordinal).unwrap()))
}

impl Gpu {
    /// New device memory with these elements.
    pub(crate) fn upload<T: bytemuck::NoUninit>(&self, elements: &[T]) -> Span {
        let bytes: &[u8] = bytemuck::cast_slice(elements);
        let span = self.allocate(bytes.len()).unwrap();
        self.write(&span, bytes).unwrap();
        span
    }

    /// The first `count` elements of a span.
    pub(crate) fn download<T: bytemuck::Pod>(&self, span: &Span, count: usize) -> Vec<T> {
        let bytes = self.read(span).unwrap();
        bytemuck::pod_collect_to_vec(&bytes[..count * size_of::<T>()])
    }

    /// What `queue` queues, done once and captured, and how many of its launches begin while those before them end.
    pub(crate) fn captured(&self, queue: impl Fn() -> anyhow::Result<()>) -> (Graph, usize) {
        self.client.graph_prepare().unwrap();
        queue().unwrap();
        let mut overlapped = 0;
        let captured = self.capture(|| {
            queue()?;
            overlapped = self.overlap_launches().unwrap();
            Ok(())
        });
        (captured.unwrap().unwrap(), overlapped)
    }

    /// bf16 `[tokens, features]` in another order.
    pub(crate) fn ordered(
        &self,
        x: &Span,
        [tokens, features]: [usize; 2],
        order: RightOperands,
    ) -> Span {
        let out = self.poisoned(order.count() * features * 2);
        self.cast(&Cast {
            x,
            element: DType::Bf16,
            tokens,
            features,
            norm: None,
            residual: None,
            format: Format::Bf16,
            order: Some(order),
            out: &out,
        })
        .unwrap();
        out
    }

    /// Checks rows that lie in an order against the same in bf16, row after row.
    pub(crate) fn assert_ordered(
        &self,
        actual: &Span,
        rows: &Span,
        [tokens, features]: [usize; 2],
        order: RightOperands,
        what: &str,
    ) {
        let expected = self.ordered(rows, [tokens, features], order);
        let eights = features / 8;
        let [actual, expected] =
            [actual, &expected].map(|span| self.download::<[u16; 8]>(span, order.count() * eights));
        for (at, pair) in actual.iter().zip(&expected).enumerate() {
            let token = at / (eights * order.tokens) * order.tokens + at % order.tokens;
            // Nobody reads what pads the last operand.
            if token < tokens {
                assert_eq!(pair.0, pair.1, "{what}: token {token} of {tokens}, {order:?}");
            }
        }
    }

    /// New device memory whose every bit is set, so that an element that no kernel wrote shows as not a number.
    pub(crate) fn poisoned(&self, bytes: usize) -> Span {
        self.upload(&vec![0xff_u8; bytes])
    }
}
