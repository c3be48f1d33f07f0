//! What a GPU holds between runs, and how each operation is queued.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use ir::frame::Frame;
use ir::id::{BufferId, DeviceId, Table, WeightId};
use ir::machine::{Device, DeviceKind};
use ir::op::Op;
use ir::plan::{Plan, Program, Step, Weight};
use ir::tensor::{DType, Extent, TensorType};
use ir::workspace::workspace;

use super::caches::Caches;
use super::home_tables::{HomeTable, HomeTables};
use super::inner::InnerValues;
use super::inputs::Inputs;
use super::mail::{Mail, Part};
use super::memory::Memory;
use super::replay::Replays;
use super::rotations::Rotations;
use super::scratch::Scratch;
use super::stamps::Stamps;
use super::stretches::exported;
use super::sums::Sums;
use super::weights::Weights;
use crate::bind::Shared;
use crate::checkpoint::Checkpoint;
use crate::counting::ExpertCounter;
use crate::fetch::Window;
use crate::kernels::gpu::ahead::Region;
use crate::kernels::gpu::device::{Gpu, Span};
use crate::kernels::gpu::peers::Group;
use crate::kernels::gpu::vendor::{Library, Vendor, WORKSPACE_BYTES};
use crate::kernels::gpu::warpgroup::RightOperands;
use crate::ops::Scope;
use crate::peers::members;
use crate::trace::Recorder;

/// One GPU's weights, caches and places of buffers.
pub(crate) struct State {
    pub(super) gpu: Gpu,
    pub(super) device: DeviceId,
    pub(super) vendor: Option<Vendor>,
    pub(super) weights: Weights,
    /// Those at home on NUMA nodes that this device reaches.
    pub(super) tables: BTreeMap<WeightId, Arc<HomeTable>>,
    pub(super) caches: Caches,
    pub(super) rotations: Rotations,
    pub(super) inputs: Inputs,
    pub(super) scratch: Scratch,
    pub(super) sums: Sums,
    /// `None` where the GPU is not driven through CUDA: then values are copied by CubeCL.
    pub(super) mail: Option<Mail>,
    /// What is left for weights while a plan is loaded.
    memory: Memory,
    home_tables: Arc<HomeTables>,
    /// Memory of the buffers of every program: one runs at a time.
    pub(super) buffers: Span,
    frames: Vec<Frame>,
    /// Memory that fetched weights pass through; `None` where none are.
    window: Option<Span>,
    /// For each program, which buffers others read.
    pub(super) exported: Vec<Table<BufferId, bool>>,
    /// For each program, what lies between two linears.
    pub(super) inner: Vec<InnerValues>,
    pub(super) replays: Replays,
    /// Number of the run whose batch is on the device.
    pub(super) run: Option<u32>,
    pub(super) expert_counter: Option<Arc<ExpertCounter>>,
    /// Where replayed runs leave the time; `None` where no steps are traced.
    pub(super) stamps: Option<Stamps>,
}

/// A step's operands and where its results go.
#[derive(Default)]
pub(super) struct Operands {
    pub(super) inputs: Vec<Operand>,
    pub(super) outputs: Vec<Operand>,
    /// What its launches ask for ahead.
    pub(super) ahead: Vec<Region>,
    /// Where its only output is summed up with those of other GPUs.
    pub(super) sum: Option<Group>,
}

/// A buffer of the run under way.
#[derive(Clone)]
pub(super) struct Operand {
    pub(super) span: Span,
    pub(super) dtype: DType,
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// How it lies where that is not row after row: in bf16, whatever `dtype` says (see [`super::inner`]).
    pub(super) order: Option<RightOperands>,
}

impl Operand {
    /// Bytes of a row.
    pub(super) fn row_bytes(&self) -> usize {
        self.columns * self.dtype.bytes() as usize
    }

    /// At most `most` of its rows, from `first` on.
    pub(super) fn rows_from(&self, first: usize, most: usize) -> Self {
        let rows = most.min(self.rows - first);
        let span = self.span.part(first * self.row_bytes(), rows * self.row_bytes());
        Self { span, rows, ..self.clone() }
    }
}

/// Rows and columns of a buffer of type `ty` in a run of size `extent`.
pub(super) fn dims(ty: &TensorType, extent: Extent) -> (usize, usize) {
    let rows = ty.shape.first().map_or(1, |dim| dim.size(extent));
    (rows as usize, ty.features(extent) as usize)
}

impl State {
    /// Takes the memory of everything but weights, which are added one by one.
    ///
    /// # Errors
    /// When there is not as much memory, or a library that the plan counts does not start.
    pub(crate) fn new(
        plan: &Plan,
        device: DeviceId,
        gpu: Gpu,
        ordinal: usize,
        Shared { peers, home_caches, home_tables }: Shared,
        expert_counter: Option<Arc<ExpertCounter>>,
    ) -> Result<Self> {
        let frames: Vec<Frame> =
            plan.programs.iter().map(|program| Frame::new(plan, program, device)).collect();
        let bytes = frames.iter().map(Frame::bytes).max().unwrap_or(0) as usize;
        let library = counted_library(plan, device, &gpu, ordinal)?;
        let library_bytes = library.as_ref().map_or(0, |(_, bytes)| *bytes);
        let space = workspace(plan, device, library_bytes);
        let counted = ir::check::memory(plan)[device];
        let context_bytes = match plan.machine.devices[device].kind {
            DeviceKind::Gpu { reserved_bytes, .. } => reserved_bytes,
            DeviceKind::Numa { .. } => 0,
        };
        let mut memory = Memory::new(&counted, context_bytes, &space, &gpu)?;
        let programs = plan.programs.iter().enumerate();
        let exported = programs.map(|(index, program)| exported(program, device, &peers, index));
        let exported: Vec<Table<BufferId, bool>> = exported.collect();
        let inner = plan.programs.iter().zip(&exported);
        let inner = inner.map(|(program, exported)| InnerValues::new(program, device, exported));
        let inner = inner.collect();
        let part =
            |(index, program)| Part { program, index, peers: &peers, exported: &exported[index] };
        let parts: Vec<Part<'_>> = plan.programs.iter().enumerate().map(part).collect();
        let inputs = Inputs::new(plan, &mut memory)?;
        let mail = Mail::new(plan, device, &gpu, &parts, inputs.bytes())?;
        let window_bytes = counted.fetch_bytes as usize;
        let window = (window_bytes > 0).then(|| memory.take(window_bytes)).transpose();
        let window = window.context("the window of fetched weights")?;
        let buffers = memory.take(bytes).context("the buffers of its steps")?;
        if gpu.is_cuda() {
            peers.register_buffers(device, ordinal, buffers.address()?);
        }
        let scratch = Scratch::new(&space, &mut memory)?;
        let mut library_sums = plan.library_sums();
        let is_member =
            |(program, sum): (&Program, &Step)| members(program, &sum.reads).contains(&device);
        if gpu.is_cuda() && library_sums.any(is_member) {
            ensure!(
                gpu.has_collectives(),
                "the plan sums over GPUs with NCCL, of which no libnccl.so is found here: install \
                 its development package, or calibrate this machine and compile the plan again"
            );
            peers.register_library(device, gpu.clone(), scratch.inner.clone());
        }
        let counts_library = plan.machine.devices[device].kind.has_library();
        let has_library = Some(library.is_some()).filter(|&has| has == counts_library);
        let vendor = library.map(|(library, bytes)| {
            let workspace = memory.take(bytes as usize)?;
            anyhow::Ok(Vendor::new(&gpu, library, workspace))
        });
        Ok(Self {
            weights: Weights::new(&gpu, has_library)?,
            tables: BTreeMap::new(),
            home_tables,
            caches: Caches::new(plan, device, home_caches, space.borrowed_bytes, &mut memory)?,
            rotations: Rotations::new(plan, device, &gpu, &mut memory)?,
            inputs,
            mail,
            scratch,
            vendor: vendor.transpose()?,
            buffers,
            frames,
            window,
            inner,
            exported,
            sums: Sums::new(peers, plan, (device, &gpu), &space, &mut memory)?,
            memory,
            replays: Replays::default(),
            run: None,
            expert_counter,
            stamps: None,
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
        self.weights.hold(&self.gpu, |bytes| self.memory.take(bytes), weight, checkpoint)
    }

    /// Adds the plan's next weight, weight `id`, a table of a NUMA node that this device reaches. Says whether it has been
    /// read for all that do.
    ///
    /// # Errors
    /// When it cannot be read or there is no memory for it.
    pub(crate) fn reach(
        &mut self,
        plan: &Plan,
        id: WeightId,
        checkpoint: &Checkpoint,
    ) -> Result<bool> {
        let Some(ordinal) = self.gpu.ordinal() else {
            let take = |bytes: usize| self.gpu.allocate(bytes);
            self.weights.hold(&self.gpu, take, &plan.weights[id], checkpoint)?;
            let mut devices = plan.machine.devices.ids();
            let first = devices.find(|&device| plan.reached_by(device).contains(&id));
            return Ok(first == Some(self.device));
        };
        let (table, is_read) = self.home_tables.get(plan, id, ordinal, checkpoint)?;
        self.tables.insert(id, table);
        self.weights.skip();
        Ok(is_read)
    }

    /// Lets replayed runs leave the times of their steps for a recorder.
    ///
    /// # Errors
    /// When there is no memory for them.
    pub(crate) fn trace(&mut self, plan: &Plan, recorder: &Arc<Recorder>) -> Result<()> {
        self.stamps = Stamps::new(plan, &self.gpu, Arc::clone(recorder))?;
        Ok(())
    }

    /// Waits until everything that was loaded is there.
    ///
    /// # Errors
    /// When the device failed.
    pub(crate) fn finish_loading(&mut self) -> Result<()> {
        self.weights.finish_loading(&self.gpu, &mut self.memory)
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
            return Ok(Operand { span, dtype: ty.dtype, rows, columns, order: None });
        }
        let place = self.frames[program].place(buffer);
        let place = place.with_context(|| format!("{buffer} is not on this device"))?;
        ensure!(ty.bytes(extent) <= place.bytes, "{buffer} outgrows its place");
        let span = self.buffers.part(place.start as usize, place.bytes as usize);
        let operand = Operand { span, dtype: ty.dtype, rows, columns, order: None };
        let order = self.inner_order(schedule, (program, buffer), &operand, scope);
        Ok(Operand { order, ..operand })
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

    /// Queues one operation.
    pub(super) fn launch(&mut self, op: &Op, scope: Scope<'_>, operands: &Operands) -> Result<()> {
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

/// The vendor's library and the bytes that the plan counts for it. `None` where the plan counts none, and where the
/// library is missing, of which the user is told: products of many rows are then made by kernels of our own.
fn counted_library(
    plan: &Plan,
    device: DeviceId,
    gpu: &Gpu,
    ordinal: usize,
) -> Result<Option<(Library, u64)>> {
    let Device { name, kind, .. } = &plan.machine.devices[device];
    let DeviceKind::Gpu { library_bytes, .. } = *kind else { return Ok(None) };
    // A plan without products of many rows counts no memory for the library, whatever it would take.
    let bytes = workspace(plan, device, library_bytes).library_bytes;
    if bytes == 0 || !gpu.is_cuda() {
        return Ok(None);
    }
    let Some(library) = Library::load(gpu, ordinal)? else {
        // No error: the plan may be of another machine, or of one that had the library when it was probed.
        tracing::warn!(
            "{name}: cuBLASLt, which the plan counts on, is not found here, so many tokens are multiplied by slower \
             kernels: install it, or calibrate and compile again without it"
        );
        return Ok(None);
    };
    ensure!(
        bytes >= WORKSPACE_BYTES as u64,
        "the plan counts {bytes} bytes for cuBLASLt, which takes {WORKSPACE_BYTES}: write library_bytes: \
         {WORKSPACE_BYTES}, or 0 to do without it, in the machine file and compile again"
    );
    Ok(Some((library, bytes)))
}
