//! What a GPU holds between runs, and how it works through a stretch of its lane.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context as _, Result, bail, ensure};
use ir::frame::Frame;
use ir::id::{BufferId, DeviceId, StepId, Table, WeightId};
use ir::op::{Op, Products};
use ir::plan::{Action, Lane, Plan, Program, Queue, Weight};
use ir::tensor::{DType, Extent, TensorType};
use ir::workspace::workspace;

use super::arrivals::Arrivals;
use super::caches::Caches;
use super::inputs::{Inputs, reach};
use super::memory::Memory;
use super::replay::{Key, Replays};
use super::rotations::Rotations;
use super::scratch::Scratch;
use super::stretches::exported;
use super::sums::Sums;
use super::weights::Weights;
use crate::checkpoint::Checkpoint;
use crate::fetch::Window;
use crate::kernels::gpu::ahead::Region;
use crate::kernels::gpu::device::{Gpu, Span};
use crate::kernels::gpu::matrix::Matrix;
use crate::kernels::gpu::vendor::{Library, Order, Vendor, WORKSPACE_BYTES};
use crate::lane::fetching::releases;
use crate::ops::Scope;
use crate::peers::Peers;
use crate::slots::{Slots, Value};

/// One GPU's weights, caches and places of buffers.
pub(crate) struct State {
    pub(super) gpu: Gpu,
    pub(super) device: DeviceId,
    pub(super) vendor: Option<Vendor>,
    pub(super) weights: Weights,
    pub(super) caches: Caches,
    pub(super) rotations: Rotations,
    pub(super) inputs: Inputs,
    pub(super) scratch: Scratch,
    pub(super) sums: Sums,
    pub(super) arrivals: Arrivals,
    /// What is left for weights while a plan is loaded.
    memory: Memory,
    /// Memory of the buffers of every program: one runs at a time.
    buffers: Span,
    frames: Vec<Frame>,
    /// Memory that fetched weights pass through; `None` where none are.
    window: Option<Span>,
    /// For each program, which steps a copy queue waits for.
    releases: Vec<Table<StepId, bool>>,
    /// For each program, which buffers others read.
    exported: Vec<Table<BufferId, bool>>,
    replays: Replays,
    /// Number of the run whose batch is on the device.
    run: Option<u32>,
}

/// A step's operands and where its results go.
pub(super) struct Operands {
    pub(super) inputs: Vec<Operand>,
    pub(super) outputs: Vec<Operand>,
    /// What its launches ask for ahead.
    pub(super) ahead: Vec<Region>,
}

/// A buffer of the run under way.
pub(super) struct Operand {
    pub(super) span: Span,
    pub(super) rows: usize,
    pub(super) columns: usize,
}

/// Rows and columns of a buffer in a run of that size.
pub(super) fn dims(ty: &TensorType, extent: Extent) -> (usize, usize) {
    let rows = ty.shape.first().map_or(1, |dim| dim.size(extent));
    (rows as usize, ty.features(extent) as usize)
}

impl State {
    /// Takes the memory of everything but weights, which are added one by one.
    ///
    /// # Errors
    /// When there is not as much memory, or the vendor's library does not start.
    pub(crate) fn new(
        plan: &Plan,
        device: DeviceId,
        gpu: Gpu,
        ordinal: usize,
        peers: Arc<Peers>,
    ) -> Result<Self> {
        let frames: Vec<Frame> =
            plan.programs.iter().map(|program| Frame::new(program, device)).collect();
        let bytes = frames.iter().map(Frame::bytes).max().unwrap_or(0) as usize;
        let library = Library::load(&gpu, ordinal)?;
        let library_bytes = if library.is_some() { WORKSPACE_BYTES } else { 0 };
        let space = workspace(plan, device, library_bytes as u64);
        let counted = ir::check::memory(plan)[device];
        let mut memory = Memory::new(&counted, &space, &gpu)?;
        let programs = plan.programs.iter().enumerate();
        let exported =
            programs.map(|(index, program)| exported(program, device, peers.sums(index)));
        let exported = exported.collect();
        let window_bytes = counted.fetch_bytes as usize;
        let window = (window_bytes > 0).then(|| memory.take(window_bytes)).transpose();
        let window = window.context("the window of fetched weights")?;
        let vendor = library.map(|library| {
            let workspace = memory.take(space.library_bytes as usize)?;
            Vendor::new(library, workspace)
        });
        Ok(Self {
            weights: Weights::new(&gpu)?,
            caches: Caches::new(plan, device, &mut memory)?,
            rotations: Rotations::new(plan, device, &gpu, &mut memory)?,
            inputs: Inputs::new(plan, &mut memory)?,
            arrivals: Arrivals::new(plan, device, &gpu)?,
            scratch: Scratch::new(&space, &mut memory)?,
            vendor: vendor.transpose()?,
            buffers: memory.take(bytes).context("the buffers of its steps")?,
            frames,
            window,
            releases: plan.programs.iter().map(|program| releases(program, device)).collect(),
            exported,
            sums: Sums::new(peers, plan, device, ordinal, &space, &mut memory)?,
            memory,
            replays: Replays::default(),
            run: None,
            device,
            gpu,
        })
    }

    /// Where fetched weights are wanted.
    pub(crate) fn window(&self) -> Option<Window> {
        let span = self.window.clone()?;
        Some(Window { gpu: self.gpu.clone(), span })
    }

    /// Adds the plan's next weight, which is on another device.
    pub(crate) fn skip(&mut self) {
        self.weights.skip();
    }

    /// Adds the plan's next weight.
    ///
    /// # Errors
    /// When it cannot be read or there is no memory for it.
    pub(crate) fn hold(&mut self, weight: &Weight, checkpoint: &Checkpoint) -> Result<()> {
        self.weights.hold(&self.gpu, &mut self.memory, weight, checkpoint)
    }

    /// Waits until everything that was loaded is there.
    ///
    /// # Errors
    /// When the device failed.
    pub(crate) fn finish_loading(&mut self) -> Result<()> {
        self.weights.finish_loading(&self.gpu)
    }

    /// Works through a stretch of a lane. `at` is kept at the step that is queued. What other devices read is on
    /// the host when it returns; where steps are traced, all else is done on the device, too.
    ///
    /// # Errors
    /// When a step's operands are not what the operation takes, or the device failed.
    pub(crate) fn run(
        &mut self,
        scope: Scope<'_>,
        program: usize,
        steps: &[StepId],
        slots: &Slots,
        is_traced: bool,
        at: &mut StepId,
    ) -> Result<()> {
        if self.run != Some(scope.run) {
            self.inputs.fill(&self.gpu, scope.batch)?;
            self.rotations.fill(&self.gpu, scope)?;
            self.sums.start(&self.gpu, scope.run)?;
            self.run = Some(scope.run);
        }
        let schedule = &scope.plan.programs[program];
        let batch = scope.batch;
        let key = Key {
            program,
            step: steps[0],
            tokens: batch.tokens().len(),
            sequences: batch.parts().len(),
            rows: batch.rows().len(),
            reach: reach(batch),
        };
        let is_copy = |lane: &Lane| lane.device == self.device && lane.queue == Queue::Copy;
        let has_fetches = schedule.lanes.iter().any(is_copy);
        if let Some(vendor) = &mut self.vendor {
            vendor.order = if has_fetches { Order::Host } else { Order::Device };
        }
        // Beside fetches a replay takes longer than the few launches of a stretch.
        let is_replayable = !is_traced && !has_fetches && self.can_replay(schedule, steps, scope);
        if !is_replayable {
            self.queue(scope, program, steps, slots, at)?;
        } else if !self.replays.replay(key)? {
            let (gpu, mut replays) = (self.gpu.clone(), std::mem::take(&mut self.replays));
            let queued =
                replays.capture(&gpu, key, || self.queue(scope, program, steps, slots, at));
            self.replays = replays;
            queued?;
        }
        let last = *steps.last().context("a stretch has no steps")?;
        let mut has_waited = false;
        for &buffer in &schedule.steps[last].writes {
            if self.exported[program][buffer] {
                let value = self.export(schedule, program, buffer, scope)?;
                slots.write(buffer, value);
                has_waited = true;
            }
        }
        if (is_traced || self.releases[program][last]) && !has_waited {
            self.gpu.sync()?;
        }
        Ok(())
    }

    /// Whether a stretch can be captured: nothing but launches that are the same in every run of this size and reach.
    /// Sums over GPUs are left out: a GPU would wait for a peer that may not launch while this one is captured.
    fn can_replay(&self, program: &Program, steps: &[StepId], scope: Scope<'_>) -> bool {
        let tokens = scope.batch.tokens().len();
        steps.len() > 1
            && program.phase == ir::plan::Phase::Decode
            && steps.iter().all(|&id| match &program.steps[id].action {
                Action::Run(op) => self.vendor.is_none() || !self.calls_library(op, tokens),
                Action::Move { .. } | Action::Fetch { .. } => false,
            })
    }

    /// Whether an operation may call the vendor's library in a run of so many tokens.
    fn calls_library(&self, op: &Op, tokens: usize) -> bool {
        let Some(Products::Linear(linear)) = op.products() else { return false };
        let matrices: Result<Vec<&Matrix>> =
            linear.weights.iter().map(|&id| self.weights.matrix(id)).collect();
        matrices.map_or(true, |matrices| !self.multiplies_as_it_lies(tokens, matrices))
    }

    fn queue(
        &mut self,
        scope: Scope<'_>,
        program: usize,
        steps: &[StepId],
        slots: &Slots,
        at: &mut StepId,
    ) -> Result<()> {
        let tokens = scope.batch.tokens().len();
        for (position, &id) in steps.iter().enumerate() {
            *at = id;
            let schedule = &scope.plan.programs[program];
            let step = &schedule.steps[id];
            match &step.action {
                Action::Run(op) => {
                    let operand =
                        |&buffer: &BufferId| self.operand(schedule, program, buffer, scope);
                    let operands = Operands {
                        inputs: step.reads.iter().map(operand).collect::<Result<_>>()?,
                        outputs: step.writes.iter().map(operand).collect::<Result<_>>()?,
                        ahead: self.ahead(op, schedule, &steps[position + 1..], tokens)?,
                    };
                    self.launch(op, scope, &operands)?;
                }
                Action::Move { .. } if self.sums.peers.is_sum(program, id) => {
                    self.sum_over_peers(scope, program, id)?;
                }
                Action::Move { movement, slice, .. } => {
                    self.move_values(scope, program, id, movement, *slice, slots)?;
                }
                Action::Fetch { weight, .. } => {
                    bail!("a compute queue fetches no weights, so {weight} stays at home")
                }
            }
        }
        Ok(())
    }

    /// A buffer on this device, as large as it is in this run.
    pub(super) fn operand(
        &self,
        schedule: &Program,
        program: usize,
        buffer: BufferId,
        scope: Scope<'_>,
    ) -> Result<Operand> {
        let extent = scope.batch.extent();
        let ty = &schedule.buffers[buffer].ty;
        let (rows, columns) = dims(ty, extent);
        if let (Some(place), Some(window)) = (self.frames[program].fetched(buffer), &self.window) {
            let span = window.part(place.start as usize, place.bytes as usize);
            return Ok(Operand { span, rows, columns });
        }
        let place = self.frames[program].place(buffer);
        let place = place.with_context(|| format!("{buffer} is not on this device"))?;
        ensure!(ty.bytes(extent) <= place.bytes, "{buffer} outgrows its place");
        let span = self.buffers.part(place.start as usize, place.bytes as usize);
        Ok(Operand { span, rows, columns })
    }

    /// Where the weights lie that an operation reads from the window, as panels.
    pub(super) fn fetched(
        &self,
        op: &Op,
        scope: Scope<'_>,
        operands: &Operands,
    ) -> Result<BTreeMap<WeightId, Span>> {
        if self.window.is_none() {
            return Ok(BTreeMap::new());
        }
        let weights = scope.plan.fetched(op, self.device);
        let ordinary = operands.inputs.len().checked_sub(weights.len());
        let spans = &operands.inputs[ordinary.context("a weight was not fetched")?..];
        Ok(weights.into_iter().zip(spans.iter().map(|operand| operand.span.clone())).collect())
    }

    /// A buffer's value on the host, once the device is done with it.
    fn export(
        &self,
        schedule: &Program,
        program: usize,
        buffer: BufferId,
        scope: Scope<'_>,
    ) -> Result<Value> {
        let Operand { span, rows, columns } = self.operand(schedule, program, buffer, scope)?;
        let bytes = self.gpu.read(&span.part(0, rows * columns * size_of::<f32>()))?;
        match schedule.buffers[buffer].ty.dtype {
            DType::F32 => {
                let values: Vec<f32> = bytemuck::pod_collect_to_vec(&bytes);
                if values.first().is_some_and(|value| value.is_nan()) {
                    self.sums.check(&self.gpu)?;
                }
                Ok(Value::of_floats(values, rows, columns))
            }
            DType::I32 => Ok(Value::of_ints(bytemuck::pod_collect_to_vec(&bytes), rows, columns)),
            other @ (DType::F16 | DType::Bf16 | DType::U8) => {
                bail!("a buffer of {other} is read by another device")
            }
        }
    }

    /// Queues one operation.
    fn launch(&mut self, op: &Op, scope: Scope<'_>, operands: &Operands) -> Result<()> {
        let input = |index: usize| {
            operands.inputs.get(index).with_context(|| format!("input {index} is missing"))
        };
        let out = operands.outputs.first().context("an operation writes nothing")?;
        let count = out.rows * out.columns;
        let gpu = &self.gpu;
        match op {
            Op::Embed { table, scale } => {
                let rows = self.inputs.token();
                self.gather(*table, &rows, 0, *scale, None, out)?;
            }
            Op::AddPosition { table, offset } => {
                let rows = self.inputs.position();
                self.gather(*table, &rows, *offset, 1.0, Some(&input(0)?.span), out)?;
            }
            Op::Norm(norm) => self.norm(norm, input(0)?, operands.inputs.get(1), out)?,
            Op::Linear(linear) => self.linear(op, linear, scope, operands)?,
            Op::Attention(attention) => self.attention(attention, scope, operands)?,
            Op::Activate(kind) => self.activate(*kind, input(0)?, None, out)?,
            Op::Gate(kind) => self.activate(*kind, input(0)?, Some(input(1)?), out)?,
            Op::Add => gpu.add(&input(0)?.span, &input(1)?.span, &out.span, count),
            Op::SigmoidGate => {
                let (gate, x) = (&input(0)?.span, &input(1)?.span);
                gpu.sigmoid_gate(gate, x, &out.span, out.rows, out.columns);
            }
            Op::Route { used, renormalise } => {
                let logits = input(0)?;
                let weights = operands.outputs.get(1).context("a router writes weights")?;
                gpu.route(
                    &logits.span,
                    [logits.rows, logits.columns],
                    *used as usize,
                    *renormalise,
                    &out.span,
                    &weights.span,
                );
            }
            Op::Experts(experts) => self.experts(op, experts, scope, operands)?,
            Op::SelectRows => self.select_rows(input(0)?, out),
            Op::SoftCap { cap } => gpu.soft_cap(*cap, &input(0)?.span, &out.span, count),
        }
        Ok(())
    }
}
