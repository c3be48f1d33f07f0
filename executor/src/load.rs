//! From a plan's file to an executor that is ready: check again, then bind every device.

mod options;

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use command_line::FileKind;
use ir::id::DeviceId;
use ir::machine::{Device, DeviceKind, Machine};
use ir::plan::{Plan, Queue};

use crate::bind::{self, Form, Shared};
use crate::checkpoint::Checkpoint;
use crate::cpus::{self, SparedCpus};
use crate::executor::{Executor, LaneThread};
use crate::fetch::{Fetcher, Homes, Window, fetched};
use crate::lane::fetching::FetchLane;
use crate::lane::parting::Parting;
use crate::lane::pulse::Pulse;
use crate::lane::{Inbox, Lane};
use crate::ops::gpu;
use crate::ranks::ranks;
use crate::run::panic_message;
use crate::trace::Recorder;

pub use self::options::{CpuBackend, Fault, FaultKind, GpuDriver, Kernels, Options};

/// A plan and where it was read from.
pub struct PlanFile {
    /// The plan.
    pub plan: Plan,
    /// Folder that its relative paths start from.
    pub folder: PathBuf,
    /// Fingerprint of the file's text.
    pub fingerprint: u64,
    /// Whether somebody has said that the checkpoint lies elsewhere.
    is_moved: bool,
}

impl PlanFile {
    /// Reads a plan and proves it sound.
    ///
    /// # Errors
    /// When the file cannot be read, is not a plan of this version, or is unsound; all findings are listed.
    pub fn open(path: &Path) -> Result<Self> {
        let name = path.display();
        let text = command_line::read_text(path, FileKind::Plan)?;
        let plan = Plan::from_ron(&text).with_context(|| format!("reading {name}"))?;
        let findings = ir::check::check(&plan);
        if !findings.is_empty() {
            let list: Vec<String> = findings.iter().map(ToString::to_string).collect();
            bail!("{name} is unsound, compile it again: {}", list.join("; "));
        }
        let folder = path.parent().map(Path::to_path_buf).unwrap_or_default();
        let fingerprint = ir::fingerprint(text.as_bytes());
        Ok(Self { plan, folder, fingerprint, is_moved: false })
    }

    /// Lets the checkpoint lie in another folder than the plan says.
    pub fn move_checkpoint(&mut self, folder: &Path) {
        let before = std::mem::take(&mut self.plan.model.folder);
        for file in self.plan.files.rows_mut() {
            // Of a checkpoint in the plan's folder all paths are plain names.
            if let Ok(inside) = file.path.strip_prefix(&before) {
                file.path = inside.to_owned();
            }
        }
        self.folder = folder.to_owned();
        self.is_moved = true;
    }

    /// The folder of the checkpoint, with its tokenizer and configuration: by a name also where it is the current one.
    pub fn checkpoint_folder(&self) -> PathBuf {
        let folder = self.folder.join(&self.plan.model.folder);
        if folder.as_os_str().is_empty() { PathBuf::from(".") } else { folder }
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
    let is_plain = options.kernels == Kernels::Plain || options.backend != CpuBackend::Flex;
    ensure!(
        !(is_plain && file.plan.borrows()),
        "GPUs borrow caches of NUMA nodes in this plan, which takes CPU devices with kernels of our own: leave out \
         --kernels plain and --cpu-backend ndarray"
    );
    let fetches = file.plan.queues().iter().any(|(_, queue)| *queue == Queue::Copy);
    ensure!(
        !(is_plain && fetches),
        "GPUs fetch weights of NUMA nodes in this plan, which takes CPU devices with kernels of our own: leave out \
         --kernels plain and --cpu-backend ndarray"
    );
    cpus::ensure_processors(&file.plan, options)?;
    ensure_host_memory(&file.plan, probe::available_memory())?;
    let checkpoint = Checkpoint::open(&file.plan.files, &file.folder);
    let checkpoint = Arc::new(checkpoint.map_err(|error| match file.is_moved {
        true => error.context(format!(
            "{} is to hold the checkpoint that the plan was compiled for",
            file.folder.display()
        )),
        false => error,
    })?);
    let plan = Arc::new(file.plan);
    // One device alone needs no telling.
    let ranks = ranks(&plan, options);
    ranks.iter().filter(|_| ranks.len() > 1).for_each(|rank| tracing::info!("{rank}"));
    let recorder = options.trace.then(|| Arc::new(Recorder::new(file.fingerprint)));
    let total = plan.weights.rows().iter().map(|weight| plan.weight_bytes(weight)).sum();
    let (events, news) = mpsc::channel();
    let pulse: Arc<Pulse> = Arc::default();
    let starter = Starter {
        plan: Arc::clone(&plan),
        checkpoint,
        options: options.clone(),
        recorder: recorder.clone(),
        shared: Shared::new(&plan, options),
        parting: Arc::default(),
        pulse: Arc::clone(&pulse),
        events,
    };
    // When anything fails from here on, the executor ends the lanes that did start.
    let mut executor = Executor::new(Arc::clone(&plan), recorder, pulse, options);
    let queues = plan.queues();
    let on = |wanted| queues.iter().filter(move |(_, queue)| *queue == wanted);
    let fetching: Vec<DeviceId> = on(Queue::Copy).map(|&(device, _)| device).collect();
    // A NUMA node may hold weights for GPUs and compute nothing.
    let homes = fetching.iter().flat_map(|&gpu| fetched(&plan, gpu));
    let homes = homes.map(|weight| plan.weights[weight].device);
    let computing: BTreeSet<DeviceId> =
        on(Queue::Compute).map(|&(device, _)| device).chain(homes).collect();
    for &device in &computing {
        executor.add(starter.start(device)?);
    }
    let mut loaded = 0;
    let mut held = Held::default();
    let mut wait_for = |lanes: usize, held: &mut Held| {
        let mut ready = 0;
        while ready < lanes {
            match news.recv().expect("the starter holds a sender") {
                Event::Loaded(bytes) => {
                    loaded += bytes;
                    progress(loaded, total);
                }
                Event::Ready(shared) => {
                    held.homes.extend(shared.homes);
                    held.windows.extend(shared.windows);
                    ready += 1;
                }
                Event::Failed(error) => return Err(error),
            }
        }
        Ok(())
    };
    wait_for(computing.len(), &mut held)?;
    starter.shared.peers.join_libraries(&plan).context("letting NCCL bring GPUs together")?;
    for (id, device) in plan.machine.devices.iter() {
        let DeviceKind::Gpu { ordinal, .. } = device.kind else { continue };
        let ordinal = (options.gpu_driver == GpuDriver::Cuda).then_some(ordinal as usize);
        starter.shared.home_caches.pin(&plan, id, ordinal)?;
    }
    for &device in &fetching {
        executor.add(starter.start_fetching(device, &mut held)?);
    }
    wait_for(fetching.len(), &mut held)?;
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

/// Memory of NUMA nodes is taken page by page while weights are read: what is too much would end this process, or
/// another, then.
fn ensure_host_memory(plan: &Plan, available: Option<u64>) -> Result<()> {
    let counted = ir::check::memory(plan);
    let nodes = counted.iter().filter(|(id, _)| !plan.machine.devices[*id].kind.is_gpu());
    let needed = nodes.map(|(_, device)| device.needed_bytes()).fold(0, u64::saturating_add);
    if let Some(available) = available {
        ensure!(
            needed <= available,
            "the plan takes {needed} bytes of the host's memory and {available} are available: end other programs, or \
             compile with --without for a NUMA node, a smaller --context or another --format"
        );
    }
    Ok(())
}

enum Event {
    Loaded(u64),
    Ready(Held),
    Failed(anyhow::Error),
}

/// What lanes that compute hold and lanes that fetch use.
#[derive(Default)]
struct Held {
    homes: Homes,
    windows: BTreeMap<DeviceId, Window>,
}

/// What lane threads need to come up.
#[derive(Clone)]
struct Starter {
    plan: Arc<Plan>,
    checkpoint: Arc<Checkpoint>,
    options: Options,
    recorder: Option<Arc<Recorder>>,
    shared: Shared,
    parting: Arc<Parting>,
    pulse: Arc<Pulse>,
    events: mpsc::Sender<Event>,
}

impl Starter {
    /// Starts the lane of a device that computes; it tells how that went.
    fn start(&self, device: DeviceId) -> Result<LaneThread> {
        let starter = self.clone();
        self.spawn(device, Queue::Compute, move |inbox| starter.compute(device, inbox))
    }

    /// Starts the lane of a GPU that fetches; it tells how that went.
    fn start_fetching(&self, device: DeviceId, held: &mut Held) -> Result<LaneThread> {
        let name = &self.plan.machine.devices[device].name;
        let window = held.windows.remove(&device);
        let window = window.with_context(|| format!("{name} fetches weights and has no window"))?;
        let home = |weight| {
            let home = held.homes.get(&weight).cloned();
            let home = home.with_context(|| {
                let name = &self.plan.weights[weight].name;
                format!("{name} is fetched, and its home has not loaded it")
            })?;
            Ok((weight, home))
        };
        let homes = fetched(&self.plan, device).map(home).collect::<Result<Homes>>()?;
        let starter = self.clone();
        self.spawn(device, Queue::Copy, move |inbox| starter.fetch(device, window, homes, inbox))
    }

    fn spawn(
        &self,
        device: DeviceId,
        queue: Queue,
        work: impl FnOnce(Arc<Inbox>) + Send + 'static,
    ) -> Result<LaneThread> {
        let name = self.plan.machine.devices[device].name.clone();
        let inbox = Arc::new(Inbox::default());
        let (its_inbox, events) = (Arc::clone(&inbox), self.events.clone());
        let thread = thread::Builder::new().name(format!("{name} {queue}")).spawn(move || {
            // Nobody waits for a thread that said nothing; once all are loaded nobody listens any more.
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| work(its_inbox))) {
                let cause = panic_message(&*payload);
                drop(events.send(Event::Failed(anyhow!("loading {name} failed: {cause}"))));
            }
        });
        let thread = thread.with_context(|| {
            format!("starting a thread for {}", self.plan.machine.devices[device].name)
        })?;
        Ok(LaneThread { inbox, thread: Some(thread) })
    }

    /// Binds the device and serves; tells how the binding went.
    fn compute(self, device: DeviceId, inbox: Arc<Inbox>) {
        // Nobody listens any more when another lane has failed; then the inbox is closed, too.
        let tell = |event| drop(self.events.send(event));
        let (plan, checkpoint, options) = (&self.plan, &self.checkpoint, &self.options);
        // Where another lane fails meanwhile, this one is waited for.
        let work = self.pulse.work();
        let bound = bind::Device::bind(plan, device, checkpoint, options, &self.shared, |bytes| {
            tell(Event::Loaded(bytes));
            !inbox.is_closed()
        });
        drop(work);
        let traced = bound.and_then(|mut bound| {
            if let (Form::Gpu(state), Some(recorder)) = (&mut bound.form, &self.recorder) {
                state.trace(plan, recorder)?;
            }
            Ok(bound)
        });
        let bound = match traced {
            Ok(bound) => bound,
            Err(error) => return tell(Event::Failed(error)),
        };
        // Before runs begin, which is when all lanes are ready.
        if let Form::Gpu(_) = &bound.form {
            self.parting.join();
        }
        let lanes = self.lanes(device, Queue::Compute);
        let cut = |(index, program): (usize, &ir::plan::Program)| {
            let lane = lanes[index].map(|lane| &program.lanes[lane])?;
            Some(match &bound.form {
                Form::Gpu(_) if self.recorder.is_none() => {
                    gpu::stretches(program, lane, &self.shared.peers, index)
                }
                // Steps that are not replayed are recorded one by one, each with its end on the device.
                Form::Gpu(_) | Form::Cpu(_) => (0..lane.steps.len()).map(|at| at..at + 1).collect(),
            })
        };
        let stretches = self.plan.programs.iter().enumerate().map(cut).collect();
        let held = Held {
            homes: bound.homes(&self.plan),
            windows: bound.window().map(|window| (device, window)).into_iter().collect(),
        };
        let programs = 0..self.plan.programs.len();
        let lane = Lane {
            lanes,
            stretches,
            last_takes: programs
                .map(|index| self.shared.peers.last_takes(&self.plan, index, device))
                .collect(),
            begins_alone: self.plan.borrows(),
            peers: self.shared.peers,
            parting: self.parting,
            pulse: self.pulse,
            plan: self.plan,
            device: bound,
            inbox,
            recorder: self.recorder,
            expert_counter: self.options.expert_counter,
            fault: self.options.fault,
        };
        // The files are closed before the lane says that it is ready.
        drop(self.checkpoint);
        drop(self.events.send(Event::Ready(held)));
        drop(self.events);
        lane.serve();
    }

    /// Pins what is fetched and serves; tells how the pinning went.
    fn fetch(self, device: DeviceId, window: Window, homes: Homes, inbox: Arc<Inbox>) {
        let work = self.pulse.work();
        let bound = SparedCpus::find(&self.plan).and_then(|spared| spared.bind());
        let fetcher = bound.and_then(|()| Fetcher::new(window, homes));
        drop(work);
        let fetcher = match fetcher {
            Ok(fetcher) => fetcher,
            Err(error) => return drop(self.events.send(Event::Failed(error))),
        };
        let lane = FetchLane {
            lanes: self.lanes(device, Queue::Copy),
            plan: self.plan,
            device,
            fetcher,
            inbox,
            pulse: self.pulse,
            recorder: self.recorder,
            fault: self.options.fault,
        };
        drop(self.checkpoint);
        drop(self.events.send(Event::Ready(Held::default())));
        drop(self.events);
        lane.serve();
    }

    /// For each program the index of a queue's lane in it.
    fn lanes(&self, device: DeviceId, queue: Queue) -> Vec<Option<usize>> {
        let is_it = |lane: &ir::plan::Lane| lane.device == device && lane.queue == queue;
        let of = |program: &ir::plan::Program| program.lanes.iter().position(is_it);
        self.plan.programs.iter().map(of).collect()
    }
}

// Not derived: each name would have its doc comment as help, which makes `--help` list every argument at length.
