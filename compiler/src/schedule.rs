//! Turns placed work into one program: steps in lanes, waits and frees.
//!
//! - Steps are numbered in the order of the graph, and lanes keep that order: every lane issues the collectives
//!   it shares with another in the same order, and no wait can close a circle.
//! - A weight is fetched as soon as the window has room for it, so its step comes right after the one that makes room.
//! - A wait stands only where lane order and other waits do not imply it.

mod movement;
mod narrow;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use anyhow::{Context as _, Result};
use ir::dag::Node;
use ir::graph::{Cause, Placed, PlacedGraph, Work};
use ir::id::{
    BufferId, CauseId, CollectiveId, DeviceId, Few, Id as _, NodeId, StepId, Table, ValueId,
};
use ir::layout::Layout;
use ir::op::Op;
use ir::plan::{Action, Buffer, Lane, Program, Queue, Step};
use ir::smallvec;
use ir::tensor::TensorType;

use self::narrow::Narrow;
use crate::bind::{Bound, BoundPart, Fetched};
use crate::clock::Clocks;
use crate::cost::{Operands, fetch_nanos, run_nanos};
use crate::free::place_frees;
use crate::graphs::Graphs;
use crate::part::local_type;
use crate::target::Batch;
use crate::task::Task;
use crate::window::{Window, aligned};

/// The program of placed graphs for one kind of batch; causes are added to the plan's.
pub(crate) fn schedule(
    task: &Task<'_>,
    graphs: &Graphs,
    bound: &Bound,
    batch: &Batch,
    causes: &mut Causes,
) -> Result<Program> {
    let graph = graphs.placed.of(batch.placed_as);
    let parts = bound.parts.of(batch.placed_as);
    // One for each part and each copy that a move makes; fetches come on top.
    let made =
        graph.nodes().map(|(id, node)| parts[id].len().max(node.work.layouts[0].devices.len()));
    let usual_steps = made.sum();
    let mut draft = Draft {
        task,
        batch,
        lanes: BTreeMap::new(),
        lane_of: Table::with_capacity(usual_steps),
        steps: Table::with_capacity(usual_steps),
        buffers: Table::with_capacity(usual_steps),
        uses: Table::with_capacity(usual_steps),
        after: Table::with_capacity(usual_steps),
        fetchers: BTreeMap::new(),
        held: graph.values().ids().map(|_| Few::new()).collect(),
        narrow: Narrow::of(task.target, graph, parts, batch)?,
        collectives: 0,
    };
    draft.plan_fetches(graph, parts, &graphs.window_bytes, causes)?;
    for (id, node) in graph.nodes() {
        let cause = causes.add(&node.work.cause);
        match &node.work.work {
            Work::Compute(_) => draft.compute(graph, node, &parts[id], cause)?,
            Work::Move(movement) => draft.movement(graph, node, movement, cause)?,
        }
    }
    Ok(draft.finish(graph.outputs()[0]))
}

/// The causes of a plan, each once.
#[derive(Debug, Default)]
pub(crate) struct Causes {
    /// The plan's table.
    pub(crate) table: Table<CauseId, Cause>,
}

impl Causes {
    fn add(&mut self, cause: &Cause) -> CauseId {
        // Neighbouring nodes share causes, so the search is short from the end.
        match self.table.rows().iter().rposition(|known| known == cause) {
            Some(index) => CauseId::from_index(index),
            None => self.table.push(cause.clone()),
        }
    }
}

/// A program while its steps are being added.
struct Draft<'a> {
    task: &'a Task<'a>,
    batch: &'a Batch,
    /// Number of each lane that has a step; numbers are given in order of first use.
    lanes: BTreeMap<(DeviceId, Queue), usize>,
    lane_of: Table<StepId, usize>,
    steps: Table<StepId, Step>,
    buffers: Table<BufferId, Buffer>,
    /// The writer of each buffer, then its readers.
    uses: Table<BufferId, Few<StepId>>,
    /// Earlier steps that each step depends on.
    after: Table<StepId, Few<StepId>>,
    /// The weights that each GPU has yet to fetch.
    fetchers: BTreeMap<DeviceId, Fetcher>,
    /// Who holds each value, and where.
    held: Table<ValueId, Few<(DeviceId, BufferId)>>,
    /// What GPUs hold in 16 bits.
    narrow: Narrow,
    collectives: usize,
}

/// What one GPU fetches.
struct Fetcher {
    window: Window,
    /// Nodes whose weights are not all under way, in the order they run.
    waiting: VecDeque<Wanted>,
    /// Buffers of nodes whose weights are under way, in the order the nodes run.
    arriving: VecDeque<Vec<BufferId>>,
}

/// The weights that one node wants.
struct Wanted {
    name: Arc<str>,
    cause: CauseId,
    /// Those that are not under way, each with the time it takes.
    weights: VecDeque<(Fetched, f64)>,
    /// Buffers of those that are.
    buffers: Vec<BufferId>,
}

impl Draft<'_> {
    /// Lists what each GPU fetches, and starts as much as there is room for.
    fn plan_fetches(
        &mut self,
        graph: &PlacedGraph,
        parts: &Table<NodeId, Vec<BoundPart>>,
        window_bytes: &Table<DeviceId, u64>,
        causes: &mut Causes,
    ) -> Result<()> {
        for (id, node) in graph.nodes() {
            for part in parts[id].iter().filter(|part| !part.fetched.is_empty()) {
                let nanos = |fetched: &Fetched| {
                    let (home, bytes) = (fetched.home, self.bytes(fetched));
                    fetch_nanos(self.task.target, home, part.device, bytes)
                };
                let weights =
                    part.fetched.iter().map(|fetched| Ok((fetched.clone(), nanos(fetched)?)));
                let wanted = Wanted {
                    name: node.name.clone(),
                    cause: causes.add(&node.work.cause),
                    weights: weights.collect::<Result<_>>()?,
                    buffers: Vec::new(),
                };
                let fetcher = self.fetchers.entry(part.device).or_insert_with(|| Fetcher {
                    window: Window::new(window_bytes[part.device]),
                    waiting: VecDeque::new(),
                    arriving: VecDeque::new(),
                });
                fetcher.waiting.push_back(wanted);
            }
        }
        let devices: Vec<DeviceId> = self.fetchers.keys().copied().collect();
        for device in devices {
            self.fetch(device);
        }
        Ok(())
    }

    /// Starts the fetches that the window has room for.
    fn fetch(&mut self, device: DeviceId) {
        while let Some(fetcher) = self.fetchers.get_mut(&device) {
            let Some(wanted) = fetcher.waiting.front_mut() else { return };
            let extent = self.batch.extent;
            if wanted.buffers.is_empty() {
                let bytes =
                    wanted.weights.iter().map(|(fetched, _)| aligned(fetched.ty.bytes(extent)));
                fetcher.window.begin(bytes.sum());
            }
            let Some((fetched, nanos)) = wanted.weights.front().cloned() else {
                let wanted = fetcher.waiting.pop_front().expect("it was just looked at");
                fetcher.arriving.push_back(wanted.buffers);
                continue;
            };
            let Some((offset, after)) = fetcher.window.place(fetched.ty.bytes(extent)) else {
                return;
            };
            let buffer = self.buffers.push(Buffer { device, ty: fetched.ty });
            self.uses.push(Few::new());
            wanted.buffers.push(buffer);
            wanted.weights.pop_front();
            let (name, cause) = (wanted.name.clone(), wanted.cause);
            let action = Action::Fetch { weight: fetched.weight, offset };
            let lane = (device, Queue::Copy);
            let step = self.step(&name, lane, action, Few::new(), smallvec![buffer], nanos, cause);
            self.after[step].extend(after);
        }
    }

    fn bytes(&self, fetched: &Fetched) -> u64 {
        fetched.ty.bytes(self.batch.extent)
    }

    fn compute(
        &mut self,
        graph: &PlacedGraph,
        node: &Node<Placed>,
        parts: &[BoundPart],
        cause: CauseId,
    ) -> Result<()> {
        let is_term = self.narrow.residuals.contains_key(&node.outputs[0]);
        for (member, part) in parts.iter().enumerate() {
            let device = part.device;
            let op = if is_term { without_residual(&part.op) } else { part.op.clone() };
            let inputs = node.inputs[..if is_term { 1 } else { part.reads }].iter();
            let mut reads: Few<BufferId> =
                inputs.map(|&input| self.buffer(input, device)).collect();
            let writes: Few<BufferId> = node
                .outputs
                .iter()
                .zip(&node.work.layouts)
                .map(|(&value, layout)| self.new_buffer(graph, value, layout, member))
                .collect();
            let nanos =
                self.run_nanos(part, &op, &reads, &writes).with_context(|| node.name.clone())?;
            let fetched = self.arrived(part);
            reads.extend_from_slice(&fetched);
            let action = Action::Run(op);
            let lane = (device, Queue::Compute);
            let step = self.step(&node.name, lane, action, reads, writes, nanos, cause);
            if let Some(fetcher) = self.fetchers.get_mut(&device).filter(|_| !fetched.is_empty()) {
                fetcher.window.read(fetched.len(), step);
                self.fetch(device);
            }
        }
        Ok(())
    }

    fn run_nanos(
        &self,
        part: &BoundPart,
        op: &Op,
        reads: &[BufferId],
        writes: &[BufferId],
    ) -> Result<f64> {
        let operands = Operands {
            weights: &part.weights,
            reads: reads.iter().map(|&buffer| &self.buffers[buffer].ty).collect(),
            writes: writes.iter().map(|&buffer| &self.buffers[buffer].ty).collect(),
            is_fetched: !part.fetched.is_empty(),
            other_home: part.other_home,
        };
        run_nanos(self.task.target, part.device, op, &operands, self.batch)
    }

    /// The buffers that the fetched weights of a part are in.
    fn arrived(&mut self, part: &BoundPart) -> Vec<BufferId> {
        if part.fetched.is_empty() {
            return Vec::new();
        }
        let fetcher = self.fetchers.get_mut(&part.device);
        let buffers = fetcher.and_then(|fetcher| fetcher.arriving.pop_front());
        buffers.expect("the window holds the weights of any one node")
    }

    #[expect(clippy::too_many_arguments, reason = "these are the fields of a step")]
    fn step(
        &mut self,
        name: &Arc<str>,
        lane: (DeviceId, Queue),
        action: Action,
        reads: Few<BufferId>,
        writes: Few<BufferId>,
        nanos: f64,
        cause: CauseId,
    ) -> StepId {
        let number = self.lanes.len();
        let lane = *self.lanes.entry(lane).or_insert(number);
        self.lane_of.push(lane);
        let id = StepId::from_index(self.steps.len());
        self.after.push(reads.iter().map(|&buffer| self.uses[buffer][0]).collect());
        for &buffer in writes.iter().chain(&reads) {
            if !self.uses[buffer].contains(&id) {
                self.uses[buffer].push(id);
            }
        }
        self.steps.push(Step {
            name: name.clone(),
            action,
            reads,
            writes,
            frees: Few::new(),
            waits: Few::new(),
            estimate_nanos: nanos.round() as u64,
            cause,
        })
    }

    /// Adds waits and frees, and puts the lanes in the order of devices.
    fn finish(mut self, output: ValueId) -> Program {
        let mut after = std::mem::take(&mut self.after);
        let count = self.lanes.len();
        let clocks = Clocks::new(count, &self.lane_of, &after);
        let mut order: Vec<Vec<StepId>> = vec![Vec::new(); count];
        for step in self.steps.ids() {
            order[clocks.lane(step)].push(step);
        }
        // The first holder of the result is the device that returns it.
        let output = self.held[output][0].1;
        let owner_lane = |buffer: BufferId| {
            let device = self.buffers[buffer].device;
            *self.lanes.get(&(device, Queue::Compute)).expect("what is on a device is read there")
        };
        for (buffer, step, others) in place_frees(&clocks, &self.uses, owner_lane, &order, output) {
            self.steps[step].frees.push(buffer);
            after[step].extend(others);
        }
        let mut waits = Clocks::new(count, &self.lane_of, &after).waits;
        for step in self.steps.ids() {
            self.steps[step].waits = std::mem::take(&mut waits[step]);
        }
        let lanes = self
            .lanes
            .iter()
            .map(|(&(device, queue), &number)| Lane {
                device,
                queue,
                steps: std::mem::take(&mut order[number]),
            })
            .collect();
        Program {
            name: self.batch.program.clone(),
            phase: self.batch.phase,
            max: self.batch.max(),
            max_sequences: self.batch.max_sequences,
            buffers: self.buffers,
            steps: self.steps,
            lanes,
            output,
        }
    }

    fn next_collective(&mut self) -> CollectiveId {
        self.collectives += 1;
        CollectiveId::from_index(self.collectives - 1)
    }

    fn new_buffer(
        &mut self,
        graph: &PlacedGraph,
        value: ValueId,
        layout: &Layout,
        member: usize,
    ) -> BufferId {
        let device = layout.devices[member];
        let mut ty = local_type(&graph.value(value).ty, layout, member);
        if let Some(&dtype) = self.narrow.types.get(&(value, device)) {
            ty.dtype = dtype;
        }
        let buffer = self.push_buffer(device, ty);
        self.held[value].push((device, buffer));
        buffer
    }

    fn push_buffer(&mut self, device: DeviceId, ty: TensorType) -> BufferId {
        self.uses.push(Few::new());
        self.buffers.push(Buffer { device, ty })
    }

    fn find_buffer(&self, value: ValueId, device: DeviceId) -> Option<BufferId> {
        self.held[value].iter().find(|(holder, _)| *holder == device).map(|(_, buffer)| *buffer)
    }

    fn buffer(&self, value: ValueId, device: DeviceId) -> BufferId {
        self.find_buffer(value, device).unwrap_or_else(|| {
            panic!(
                "insert_moves left {value} where {} cannot read it",
                self.task.target.name(device)
            )
        })
    }
}

/// A linear that adds nothing to what it makes.
fn without_residual(op: &Op) -> Op {
    let mut op = op.clone();
    if let Op::Linear(linear) = &mut op {
        linear.residual = false;
    }
    op
}
