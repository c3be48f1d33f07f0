//! From a plan's file to an executor that is ready: check again, then bind every device.

use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Arc, mpsc};
use std::thread;

use anyhow::{Context as _, Result, anyhow, bail};
use ir::id::DeviceId;
use ir::machine::{Device, DeviceKind, Machine};
use ir::plan::{Plan, Queue};

use crate::bind::{self, Form};
use crate::checkpoint::Checkpoint;
use crate::executor::{Executor, LaneThread};
use crate::kernels::cpu::isa::Isa;
use crate::lane::{Inbox, Lane, awaited, queues};
use crate::ops::gpu;
use crate::run::panic_message;
use crate::trace::Recorder;

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
    /// The most threads of each CPU device; all its processors where `None`.
    pub threads: Option<usize>,
    /// Whether spans are recorded.
    pub trace: bool,
    /// A failure to provoke, for tests.
    pub fault: Option<Fault>,
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
}

/// Ways to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// By an error.
    Error,
    /// By a panic.
    Panic,
}

/// A plan and where it was read from.
pub struct PlanFile {
    /// The plan.
    pub plan: Plan,
    /// Folder that its relative paths start from.
    pub folder: PathBuf,
    /// Fingerprint of the file's text.
    pub fingerprint: u64,
}

impl PlanFile {
    /// Reads a plan and proves it sound.
    ///
    /// # Errors
    /// When the file cannot be read, is not a plan of this version, or is unsound; all findings are listed.
    pub fn open(path: &Path) -> Result<Self> {
        let name = path.display();
        let text = fs::read_to_string(path).with_context(|| format!("reading plan {name}"))?;
        let plan = Plan::from_ron(&text).with_context(|| format!("reading plan {name}"))?;
        let findings = ir::check::check(&plan);
        if !findings.is_empty() {
            let list: Vec<String> = findings.iter().map(ToString::to_string).collect();
            bail!("{name} is unsound, compile it again: {}", list.join("; "));
        }
        let folder = path.parent().map(Path::to_path_buf).unwrap_or_default();
        Ok(Self { plan, folder, fingerprint: ir::fingerprint(text.as_bytes()) })
    }

    /// The folder of the checkpoint, with its tokenizer and configuration.
    pub fn checkpoint_folder(&self) -> PathBuf {
        self.folder.join(&self.plan.model.folder)
    }
}

/// Binds every device of a plan and reads its weights. `progress` is told bytes read and bytes in all, from
/// the calling thread.
///
/// # Errors
/// When the checkpoint has changed, the machine lacks a device, or a weight cannot be read.
pub fn load(
    file: PlanFile,
    options: &Options,
    mut progress: impl FnMut(u64, u64),
) -> Result<Executor> {
    let differences = probe::mismatch(&required(&file.plan.machine, options.gpu_driver))?;
    if !differences.is_empty() {
        bail!("the plan is for another machine, compile it here: {}", differences.join("; "));
    }
    let checkpoint = Arc::new(Checkpoint::open(&file.plan.files, &file.folder)?);
    let plan = Arc::new(file.plan);
    let recorder = options.trace.then(|| Arc::new(Recorder::new(file.fingerprint)));
    let total = plan.weights.rows().iter().map(|weight| weight.bytes()).sum();
    let (events, news) = mpsc::channel();
    let mut lanes = Vec::new();
    for (device, queue) in queues(&plan) {
        let name = &plan.machine.devices[device].name;
        if queue == Queue::Copy {
            bail!("{name} has a copy queue, which this build does not serve");
        }
        let starter = Starter {
            plan: Arc::clone(&plan),
            device,
            queue,
            checkpoint: Arc::clone(&checkpoint),
            options: options.clone(),
            recorder: recorder.clone(),
            inbox: Arc::new(Inbox::default()),
            events: events.clone(),
        };
        let inbox = Arc::clone(&starter.inbox);
        let thread = thread::Builder::new()
            .name(name.clone())
            .spawn(move || starter.start())
            .with_context(|| format!("starting the thread of {name}"))?;
        lanes.push(LaneThread { inbox, thread: Some(thread) });
    }
    // From here on a failure closes the inboxes of the lanes that did start.
    let executor = Executor::new(plan, lanes, recorder);
    drop(events);
    let (mut loaded, mut ready) = (0, 0);
    while ready < executor.lanes() {
        match news.recv() {
            Ok(Event::Loaded(bytes)) => {
                loaded += bytes;
                progress(loaded, total);
            }
            Ok(Event::Ready) => ready += 1,
            Ok(Event::Failed(error)) => return Err(error),
            Err(mpsc::RecvError) => return Err(anyhow!("a lane ended while it was loading")),
        }
    }
    Ok(executor)
}

/// The devices that must be here.
fn required(machine: &Machine, gpu_driver: GpuDriver) -> Machine {
    let is_required = |device: &&Device| match device.kind {
        DeviceKind::Numa { .. } => true,
        DeviceKind::Gpu { .. } => gpu_driver == GpuDriver::Cuda,
    };
    let devices = machine.devices.rows().iter().filter(is_required).cloned().collect();
    Machine { devices, ..machine.clone() }
}

enum Event {
    Loaded(u64),
    Ready,
    Failed(anyhow::Error),
}

/// What a lane thread needs to come up.
struct Starter {
    plan: Arc<Plan>,
    device: DeviceId,
    queue: Queue,
    checkpoint: Arc<Checkpoint>,
    options: Options,
    recorder: Option<Arc<Recorder>>,
    inbox: Arc<Inbox>,
    events: mpsc::Sender<Event>,
}

impl Starter {
    /// Binds the device and serves; tells how the binding went.
    fn start(self) {
        let name = self.plan.machine.devices[self.device].name.clone();
        // Nobody listens any more when another lane has failed; then the inbox is closed, too.
        let tell = |event| drop(self.events.send(event));
        let bound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            bind::Device::bind(&self.plan, self.device, &self.checkpoint, &self.options, |bytes| {
                // The inbox is closed when another lane has failed to load.
                tell(Event::Loaded(bytes));
                !self.inbox.is_closed()
            })
        }));
        let device = match bound {
            Ok(Ok(device)) => device,
            Ok(Err(error)) => return tell(Event::Failed(error)),
            Err(payload) => {
                let cause = panic_message(&*payload);
                return tell(Event::Failed(anyhow!("loading {name} failed: {cause}")));
            }
        };
        let of_program = |program: &ir::plan::Program| {
            let is_ours =
                |lane: &ir::plan::Lane| lane.device == self.device && lane.queue == self.queue;
            program.lanes.iter().position(is_ours)
        };
        let lanes: Vec<Option<usize>> = self.plan.programs.iter().map(of_program).collect();
        let awaited: Vec<_> = self.plan.programs.iter().map(awaited).collect();
        let cut = |((program, lane), awaited): ((&ir::plan::Program, &Option<usize>), &_)| {
            let lane = lane.map(|lane| &program.lanes[lane])?;
            Some(match &device.form {
                Form::Gpu(_) if self.recorder.is_none() => gpu::stretches(program, lane, awaited),
                // A GPU's steps are recorded one by one, each with its end on the device.
                Form::Gpu(_) | Form::Cpu(_) => (0..lane.steps.len()).map(|at| at..at + 1).collect(),
            })
        };
        let stretches = self.plan.programs.iter().zip(&lanes).zip(&awaited).map(cut).collect();
        let lane = Lane {
            lanes,
            awaited,
            stretches,
            plan: self.plan,
            device,
            inbox: self.inbox,
            recorder: self.recorder,
            fault: self.options.fault,
        };
        // The maps are closed before the lane says that it is ready.
        drop(self.checkpoint);
        drop(self.events.send(Event::Ready));
        drop(self.events);
        lane.serve();
    }
}

impl FromStr for Kernels {
    type Err = anyhow::Error;
    fn from_str(text: &str) -> Result<Self> {
        match text {
            "own" => Ok(Self::Own),
            "plain" => Ok(Self::Plain),
            _ => bail!("unknown kernels {text:?}: own and plain exist"),
        }
    }
}

impl FromStr for GpuDriver {
    type Err = anyhow::Error;
    fn from_str(text: &str) -> Result<Self> {
        match text {
            "cuda" => Ok(Self::Cuda),
            "vulkan" => Ok(Self::Vulkan),
            _ => bail!("unknown GPU driver {text:?}: cuda and vulkan exist"),
        }
    }
}

impl FromStr for CpuBackend {
    type Err = anyhow::Error;
    fn from_str(text: &str) -> Result<Self> {
        match text {
            "flex" => Ok(Self::Flex),
            "ndarray" => Ok(Self::NdArray),
            _ => bail!("unknown CPU backend {text:?}: flex and ndarray exist"),
        }
    }
}
