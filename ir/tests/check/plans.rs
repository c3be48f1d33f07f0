//! Sound plans made by hand, for changing until they are not.

mod builder;

use ir::id::{BufferId, CacheId, DeviceId, Id as _, StepId, WeightId};
use ir::layout::Move;
use ir::machine::DeviceKind;
use ir::plan::{Lane, Plan, Queue};

use builder::Builder;

const FEATURES: u32 = 8;

pub(crate) fn d(index: usize) -> DeviceId {
    DeviceId::from_index(index)
}
pub(crate) fn w(index: usize) -> WeightId {
    WeightId::from_index(index)
}
pub(crate) fn b(index: usize) -> BufferId {
    BufferId::from_index(index)
}
pub(crate) fn s(index: usize) -> StepId {
    StepId::from_index(index)
}
pub(crate) fn c(index: usize) -> CacheId {
    CacheId::from_index(index)
}

/// Attention and a mixture of experts on one NUMA device.
pub(crate) fn one_device() -> Plan {
    let mut made = Builder::new(1);
    let x = made.embed(0);
    let x = made.attention_block(0, x);
    let x = made.mixture_block(0, x);
    made.head(0, x)
}

/// Attention on one device, the mixture and the head on the next.
pub(crate) fn pipeline() -> Plan {
    let mut made = Builder::new(2);
    let x = made.embed(0);
    let x = made.attention_block(0, x);
    let x = made.transfer(0, 1, x);
    let x = made.mixture_block(1, x);
    made.head(1, x)
}

/// One key head on each of two devices, and sums of what they make, one of them in slices.
pub(crate) fn tensor_parallel() -> Plan {
    let mut made = Builder::new(2);
    let sums = made.shared_attention();
    let scatter = Move::ReduceScatter { axis: 1 };
    let parts = made.collective("scatter", scatter, &[0, 1], &sums, FEATURES / 2);
    let gather = Move::AllGather { axis: 1 };
    let wholes = made.collective("gather", gather, &[0, 1], &parts, FEATURES);
    made.head(0, wholes[0])
}

/// The same on two GPUs, which make a second whole sum.
pub(crate) fn gpus() -> Plan {
    let mut made = Builder::new(2);
    for (ordinal, device) in (0..).zip(made.plan.machine.devices.rows_mut()) {
        device.kind = gpu(ordinal);
    }
    let sums = made.shared_attention();
    let again = made.collective("again", Move::AllReduce, &[0, 1], &sums, FEATURES);
    made.head(0, again[0])
}

/// The plan with one of its devices a GPU.
pub(crate) fn on_gpu(mut plan: Plan, device: usize) -> Plan {
    plan.machine.devices[d(device)].kind = gpu(0);
    plan
}

/// A node that embeds, then two GPUs that hand the value to each other some times.
pub(crate) fn node_before_gpus() -> Plan {
    let mut made = Builder::new(3);
    for ordinal in [1, 2] {
        made.plan.machine.devices[d(ordinal)].kind = gpu(ordinal as u32);
    }
    let x = made.embed(0);
    let mut x = made.transfer(0, 1, x);
    for _ in 0..4 {
        x = made.transfer(1, 2, x);
        x = made.transfer(2, 1, x);
    }
    made.head(1, x)
}

/// A GPU that computes two linears and a mixture with a NUMA device's weights; the second is fetched over the first.
pub(crate) fn streamed() -> Plan {
    let mut made = Builder::new(2);
    made.plan.machine.devices[d(0)].kind = DeviceKind::Gpu {
        ordinal: 0,
        reserved_bytes: 1 << 10,
        library_bytes: 0,
        launch_bytes: 0,
        has_warpgroups: false,
    };
    made.plan.machine.devices[d(0)].name = "gpu0".into();
    made.program.lanes[1] = Lane { device: d(0), queue: Queue::Copy, steps: Vec::new() };
    let x = made.embed(0);
    let x = made.fetched_linear("first", x, 0, &[]);
    let first = made.program.steps.ids().last().expect("there is a step");
    let x = made.fetched_mixture(x, PANEL_BYTES);
    let x = made.fetched_linear("second", x, 0, &[first]);
    made.head(0, x)
}

/// A GPU without the vendor's library.
pub(crate) fn gpu(ordinal: u32) -> DeviceKind {
    DeviceKind::Gpu {
        ordinal,
        reserved_bytes: 0,
        library_bytes: 0,
        launch_bytes: 0,
        has_warpgroups: false,
    }
}

/// A weight of 8 features in bfloat16: one panel of 32 rows and 32 columns.
pub(crate) const PANEL_BYTES: u64 = 2048;
