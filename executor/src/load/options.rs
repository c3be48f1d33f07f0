//! What a plan is run with.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::ValueEnum;
use clap::builder::PossibleValue;
use ir::plan::Plan;

use crate::counting::ExpertCounter;
use crate::cpus;
use crate::kernels::cpu::isa::Isa;

/// How a plan is run. Nothing here changes where anything runs.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Which form of the operations CPU devices use.
    pub kernels: Kernels,
    /// Which of Burn's CPU backends holds the tensors of CPU devices.
    pub backend: CpuBackend,
    /// What drives GPUs.
    pub gpu_driver: GpuDriver,
    /// Which instructions kernels may use; the best there are where `None`.
    pub isa: Option<Isa>,
    /// The most threads of each CPU device; where `None` one on each of its processors, but for those that it leaves to
    /// the threads that drive GPUs.
    pub threads: Option<usize>,
    /// Whether spans are recorded.
    pub trace: bool,
    /// Where the choices of routers are counted; `None` where they are not.
    pub expert_counter: Option<Arc<ExpertCounter>>,
    /// A failure to provoke, for tests.
    pub fault: Option<Fault>,
}

impl Options {
    /// Whether every NUMA node of a plan that computes has as many threads as if nothing were said of them.
    pub fn has_usual_threads(&self, plan: &Plan) -> bool {
        cpus::has_usual_threads(plan, self)
    }
}

/// Forms of the operations on a CPU device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kernels {
    /// This project's kernels.
    #[default]
    Own,
    /// Burn's tensor operations, in f32.
    Plain,
}

/// Burn's CPU backends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CpuBackend {
    /// `burn-flex`.
    #[default]
    Flex,
    /// `burn-ndarray`, deprecated and slow: it has no kernels of ours.
    NdArray,
}

/// What drives the GPUs of a plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GpuDriver {
    /// NVIDIA's, loaded at run time.
    #[default]
    Cuda,
    /// Vulkan: the first device, which may be one in software, stands for every GPU. For tests.
    Vulkan,
}

/// A failure that a step is made to have.
#[derive(Clone, Debug)]
pub struct Fault {
    /// Name of the steps that fail.
    pub step: String,
    /// How they fail.
    pub kind: FaultKind,
    /// Raised when they are to fail no more.
    pub is_over: Arc<AtomicBool>,
}

/// Ways to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// By an error.
    Error,
    /// By a panic.
    Panic,
}

impl ValueEnum for Kernels {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::Own, Self::Plain]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(match self {
            Self::Own => "own",
            Self::Plain => "plain",
        }))
    }
}

impl ValueEnum for GpuDriver {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::Cuda, Self::Vulkan]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(match self {
            Self::Cuda => "cuda",
            Self::Vulkan => "vulkan",
        }))
    }
}

impl ValueEnum for CpuBackend {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::Flex, Self::NdArray]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(match self {
            Self::Flex => "flex",
            Self::NdArray => "ndarray",
        }))
    }
}
