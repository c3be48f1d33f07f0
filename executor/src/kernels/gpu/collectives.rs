//! Sums over GPUs by the vendor's library of collectives (NCCL). CubeCL loads it at run time, keeps what its members
//! share, and puts its work between launches.

use anyhow::{Result, ensure};
use cubecl::device::DeviceId;
use cubecl::prelude::ElemType;
use cubecl::server::ReduceOperation;

use super::device::{Gpu, Span, element};

impl Gpu {
    /// Whether the library is installed.
    pub fn has_collectives(&self) -> bool {
        self.is_cuda() && self.client.has_device_transport()
    }

    /// Queues `out = ` the sum of `count` numbers, f32, of each member. Members are GPUs by the driver's ordinals, in
    /// one order, and each queues the same sums: it waits on the device until all others have come.
    ///
    /// # Errors
    /// When the library is not there, or a span is shorter.
    pub fn sum_by_library(
        &self,
        members: &[usize],
        term: &Span,
        out: &Span,
        count: usize,
    ) -> Result<()> {
        ensure!(self.has_collectives(), "NCCL is not installed");
        let bytes = count * size_of::<f32>();
        ensure!(
            bytes <= term.bytes().min(out.bytes()),
            "a sum of {bytes} bytes outgrows its operands"
        );
        // CubeCL's names of CUDA devices.
        let id = |&ordinal: &usize| DeviceId { type_id: 0, index_id: ordinal as u16 };
        let ids = members.iter().map(id).collect();
        let float: ElemType = element(ir::tensor::DType::F32);
        let [term, out] = [term, out].map(|span| span.part(0, bytes).handle());
        let mut client = self.client.clone();
        client.all_reduce(term, out, float, ids, ReduceOperation::Sum);
        client.sync_collective();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn two_gpus_sum_between_launches() {
        let gpus = [0, 1].map(Gpu::cuda);
        let [Ok(first), Ok(second)] = &gpus else {
            eprintln!("skipped: there are no two GPUs");
            return;
        };
        if !first.has_collectives() {
            eprintln!("skipped: NCCL is not installed");
            return;
        }
        const COUNT: usize = 1_000_003;
        // Whole numbers, so that sums are exact.
        let term = |rank: usize| -> Vec<f32> {
            (0..COUNT).map(|i| (i % 1000) as f32 + 1000.0 * rank as f32).collect()
        };
        let member = |gpu: &Gpu, rank: usize| -> Vec<f32> {
            let (term, out) = (gpu.upload(&term(rank)), gpu.poisoned(COUNT * size_of::<f32>()));
            for _ in 0..3 {
                // What is summed was launched before, what is made of the sum comes after.
                gpu.add(&term, &term, &out, COUNT);
                gpu.sum_by_library(&[0, 1], &out, &out, COUNT).unwrap();
                gpu.add(&out, &term, &out, COUNT);
            }
            gpu.download(&out, COUNT)
        };
        let sums = thread::scope(|scope| {
            let others = scope.spawn(|| member(second, 1));
            [member(first, 0), others.join().unwrap()]
        });
        for (rank, sums) in sums.iter().enumerate() {
            let own = term(rank);
            let expected = term(0).into_iter().zip(term(1)).zip(own);
            let expected = expected.map(|((a, b), own)| 2.0 * (a + b) + own);
            assert!(sums.iter().copied().eq(expected), "GPU {rank}");
        }
    }
}
