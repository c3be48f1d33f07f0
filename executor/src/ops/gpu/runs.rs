//! How a GPU works through its lane: stretch by stretch, or by replaying what was captured.
//!
//! - Stretch by stretch, the lane's thread waits on the host for what a step waits for, queues launches, and waits
//!   until the device is done with what others wait for.
//! - Small runs are queued as a whole before their values exist, as captured in an earlier run of their kind. Then the
//!   device waits by itself for what comes from the host, and the lane's thread only carries letters, in the order of
//!   steps.

use std::mem;

use anyhow::{Context as _, Result, bail, ensure};
use ir::captured::MOST_TOKENS_OF_KERNELS;
use ir::id::{BufferId, StepId};
use ir::op::{Op, Products};
use ir::plan::{Action, Phase, Plan, Program, Queue};
use ir::tensor::{DType, Extent, TensorType};
use ir::trace::Span;

use super::copies::collect;
use super::output::sent_type;
use super::replay::{GraphKey, Replays};
use super::stamps::Moment;
use super::state::{Operands, State, dims};
use crate::kernels::cpu::extension::Input;
use crate::kernels::gpu::matrix::Matrix;
use crate::kernels::gpu::shortlist::UNUSABLE;
use crate::kernels::gpu::vendor::Vendor;
use crate::ops::Scope;
use crate::run::Run;
use crate::slots::{Slots, Value};

/// What the launches of a run tell letters by: one more than its number, since flags are 0 at first.
pub(super) fn turn(run: u32) -> u32 {
    run + 1
}

impl State {
    /// Whether runs can be captured: then the GPUs that take part meet, and are captured one after another.
    pub(crate) fn can_capture(&self) -> bool {
        self.mail.is_some()
    }

    /// Begins a run if it can be captured when it is over: nothing but launches that are the same in every run of its
    /// kind, and no more than are counted. Says whether.
    pub(crate) fn prepare_capture(&self, plan: &Plan, run: &Run) -> bool {
        let most_tokens = match (plan.programs[run.program].phase, &self.vendor) {
            (Phase::Prefill, None) => MOST_TOKENS_OF_KERNELS as usize,
            (Phase::Prefill, Some(_)) | (Phase::Decode, _) => usize::MAX,
        };
        let can_be_replayed =
            self.mail.as_ref().is_some_and(|mail| mail.can_be_replayed(run.program))
                && self.expert_counter.is_none()
                && run.batch.tokens().len() <= most_tokens;
        if can_be_replayed {
            self.replays.prepare(&self.gpu);
        }
        can_be_replayed
    }

    /// Whether the vendor's library made all products that were queued before the last flush.
    ///
    /// # Errors
    /// When it refused one.
    fn check_products(&self) -> Result<()> {
        self.vendor.as_ref().map_or(Ok(()), Vendor::check)
    }

    /// Whether a step calls the vendor's library in a run, if there is one.
    fn may_call_library(&self, program: &Program, step: StepId, scope: Scope<'_>) -> bool {
        let step = &program.steps[step];
        let Action::Run(op) = &step.action else { return false };
        let Some(Products::Linear(linear)) = op.products() else { return false };
        let ty = &program.buffers[step.reads[0]].ty;
        let (rows, dtype) = (dims(ty, scope.batch.extent()).0, ty.dtype);
        let matrices: Result<Vec<&Matrix>> =
            linear.weights.iter().map(|&id| self.weights.matrix(id)).collect();
        let own = matrices.map(|matrices| self.own_element(rows, dtype, linear, matrices, scope));
        own.map_or(true, |own| own.is_none())
    }

    /// Whether a run can be replayed.
    pub(crate) fn is_captured(&self, key: GraphKey) -> bool {
        self.replays.holds(key)
    }

    /// Drops what was captured of runs of a kind.
    ///
    /// # Errors
    /// When the device failed.
    pub(crate) fn discard_captured(&mut self, key: GraphKey) -> Result<()> {
        self.replays.discard(&self.gpu, key)
    }

    /// Ends what [`State::prepare_capture()`] began for a run that did not end well.
    pub(crate) fn abandon_capture(&self) {
        self.replays.abandon(&self.gpu);
    }

    /// Captures a run that has just been worked through, while all GPUs of this process wait.
    ///
    /// # Errors
    /// When a step's operands are not what the operation takes.
    pub(crate) fn capture(
        &mut self,
        scope: Scope<'_>,
        program: usize,
        steps: &[StepId],
        key: GraphKey,
    ) -> Result<()> {
        let gpu = self.gpu.clone();
        let captured = Replays::capture(&gpu, || {
            let mut at = *steps.first().context("a run has no steps")?;
            self.queue_inputs()?;
            self.queue_stamp(Moment::Start);
            self.queue(scope, program, steps, None, &mut at)?;
            self.gpu.flush()?;
            Ok(self.check_products())
        })?;
        if let Some(graph) = captured {
            self.replays.keep(key, graph);
        }
        Ok(())
    }

    /// Waits until the device is done with everything.
    ///
    /// # Errors
    /// When it failed.
    pub(crate) fn finish(&self) -> Result<()> {
        self.gpu.sync()
    }

    /// Whether steps of replayed runs are traced.
    pub(crate) fn traces_replays(&self) -> bool {
        self.stamps.is_some()
    }

    /// Queues a captured run.
    ///
    /// # Errors
    /// When the device failed.
    pub(crate) fn start_replay(&mut self, scope: Scope<'_>, key: GraphKey) -> Result<()> {
        self.fill(scope)?;
        if let Some(stamps) = &mut self.stamps {
            stamps.begin();
        }
        self.replays.replay(key)?;
        self.gpu.check_launches()
    }

    /// What `lane` did in a replayed run whose letters have all come; nothing where no steps are
    /// traced.
    ///
    /// # Errors
    /// When the device failed.
    pub(crate) fn spans(&mut self, run: &Run, lane: u32, steps: &[StepId]) -> Result<Vec<Span>> {
        let Some(stamps) = &mut self.stamps else { return Ok(Vec::new()) };
        self.gpu.sync()?;
        stamps.spans((run.number, turn(run.number), lane), steps)
    }

    /// Whether a step of a replayed run waits for a letter.
    pub(crate) fn expects_letter(&self, program: usize, step: StepId) -> bool {
        self.mail.as_ref().is_some_and(|mail| mail.incoming(program, step).is_some())
    }

    /// Hands a step the letter that it waits for, if any, with values of the run.
    ///
    /// # Errors
    /// When a value is missing or has another size.
    pub(crate) fn deliver(&mut self, scope: Scope<'_>, run: &Run, step: StepId) -> Result<()> {
        let Some(mail) = &mut self.mail else { return Ok(()) };
        let schedule = &scope.plan.programs[run.program];
        for buffer in mail.expected(run.program, step) {
            with_bytes(schedule, buffer, scope, &run.slots, |bytes| {
                mail.put(run.program, step, buffer, bytes)
            })?;
        }
        if let Some(stamps) = &mut self.stamps {
            stamps.deliver(step);
        }
        mail.deliver(run.program, step, turn(run.number));
        Ok(())
    }

    /// Waits for what a step sends, if anything, and adds its values to the run's.
    ///
    /// # Errors
    /// When the device failed.
    pub(crate) fn receive(&mut self, scope: Scope<'_>, run: &Run, step: StepId) -> Result<()> {
        self.receive_unless(scope, run, step, || Ok(run.is_aborted()))?;
        if let (Some(stamps), Some(mail)) = (&mut self.stamps, &self.mail)
            && mail.sends(run.program, step)
        {
            stamps.hear(step);
        }
        Ok(())
    }

    /// The same; `is_over` is asked now and then whether nothing more is to come.
    fn receive_unless(
        &self,
        scope: Scope<'_>,
        run: &Run,
        step: StepId,
        is_over: impl Fn() -> Result<bool>,
    ) -> Result<()> {
        let Some(mail) = &self.mail else { return Ok(()) };
        let schedule = &scope.plan.programs[run.program];
        let extent = scope.batch.extent();
        let bytes = |buffer| sent_type(schedule, buffer, scope).bytes(extent) as usize;
        mail.receive(run.program, step, turn(run.number), is_over, bytes, |buffer, bytes| {
            run.slots.write(buffer, value(&sent_type(schedule, buffer, scope), extent, bytes)?);
            Ok(())
        })
    }

    /// Lets the queued launches of a run that ended early go through, whatever they compute, and waits for that: they
    /// would take the letters of the next run for their own.
    pub(crate) fn let_through(&mut self, scope: Scope<'_>, program: usize) {
        if let Some(mail) = &self.mail {
            mail.release(program, turn(scope.run));
        }
        // What the library refused in this run is no other's failure.
        if let Err(error) = self.gpu.sync().and_then(|()| self.check_products()) {
            tracing::debug!("a run that ended early: {error:#}");
        }
    }

    /// Works through a stretch of a lane. `at` is kept at the step that is queued. What other devices read is on
    /// the host when it returns; where steps are traced, all else is done on the device, too.
    ///
    /// # Errors
    /// When a step's operands are not what the operation takes, or the device failed.
    pub(crate) fn run(
        &mut self,
        scope: Scope<'_>,
        run: &Run,
        steps: &[StepId],
        is_traced: bool,
        at: &mut StepId,
    ) -> Result<()> {
        let (program, slots) = (run.program, &run.slots);
        if self.run != Some(scope.run) {
            self.fill(scope)?;
            self.queue_inputs()?;
        }
        let schedule = &scope.plan.programs[program];
        let (&first, &last) = steps.first().zip(steps.last()).context("a stretch has no steps")?;
        self.deliver(scope, run, first)?;
        self.queue(scope, program, steps, Some(slots), at)?;
        if let Some(mail) = &self.mail {
            self.gpu.flush()?;
            self.check_products()?;
            // All that the launches wait for of the host is there, so they end unless a GPU fails that they sum with.
            // One that could not be made raises no flag.
            let is_over = || self.gpu.check(&[&self.buffers, &self.scratch.inner]).map(|()| true);
            mail.wait_until_taken(program, first, turn(run.number), is_over)?;
            self.receive_unless(scope, run, last, is_over)?;
            return if is_traced { self.gpu.sync() } else { Ok(()) };
        }
        let mut has_waited = false;
        for &buffer in &schedule.steps[last].writes {
            if self.exported[program][buffer] {
                let (ty, extent) = (sent_type(schedule, buffer, scope), scope.batch.extent());
                let span = self.queue_sent(schedule, program, buffer, scope)?;
                let bytes = self.gpu.read(&span.part(0, ty.bytes(extent) as usize))?;
                slots.write(buffer, value(&ty, extent, &bytes)?);
                has_waited = true;
            }
        }
        if (is_traced || self.sums.peers.awaited(program)[last]) && !has_waited {
            self.gpu.sync()?;
        }
        Ok(())
    }

    /// Prepares what the launches of a run read of its batch.
    fn fill(&mut self, scope: Scope<'_>) -> Result<()> {
        self.sums.start();
        self.inputs.fill(&self.gpu, self.mail.as_mut(), scope.batch, turn(scope.run))?;
        self.rotations.fill(&self.gpu, scope)?;
        self.run = Some(scope.run);
        Ok(())
    }

    fn queue_inputs(&mut self) -> Result<()> {
        if let Some(mail) = &self.mail {
            self.inputs.queue(&self.gpu, mail);
        }
        self.sums.queue_start(&self.gpu)
    }

    /// Queues steps. Values of other devices come from `slots` where the device knows no letters.
    fn queue(
        &mut self,
        scope: Scope<'_>,
        program: usize,
        steps: &[StepId],
        slots: Option<&Slots>,
        at: &mut StepId,
    ) -> Result<()> {
        let tokens = scope.batch.tokens().len();
        let schedule = &scope.plan.programs[program];
        // What a step asks for ahead is the same however the lane is cut.
        let lane = schedule.lane(self.device, Queue::Compute).context("the GPU has no lane")?;
        let first = lane.steps.iter().position(|id| Some(id) == steps.first()).unwrap_or(0);
        // Whether the step before has made what this one does.
        let mut is_made = false;
        for (position, &id) in (first..).zip(steps) {
            *at = id;
            let step = &schedule.steps[id];
            let is_replayed = slots.is_none();
            if is_replayed && self.stamps.is_some() && self.expects_letter(program, id) {
                self.queue_wait(program, id);
                self.queue_stamp(Moment::Arrival(id));
            }
            match &step.action {
                _ if mem::take(&mut is_made) => (),
                Action::Run(op) => {
                    self.queue_wait(program, id);
                    let operand =
                        |&buffer: &BufferId| self.operand(schedule, program, buffer, scope);
                    let after = &lane.steps[position + 1..];
                    // The library's products leave a term. A sum that another stretch begins with may have to wait.
                    let is_joined = self.sums.peers.is_joined(program, id)
                        && !self.may_call_library(schedule, id, scope)
                        && steps.last() != Some(&id);
                    let sum = after.first().copied().filter(|_| is_joined);
                    let written = sum.map_or(&step.writes, |sum| &schedule.steps[sum].writes);
                    let mut operands = Operands {
                        inputs: step.reads.iter().map(operand).collect::<Result<_>>()?,
                        outputs: written.iter().map(operand).collect::<Result<_>>()?,
                        ahead: self.ahead(op, schedule, after, tokens)?,
                        sum: None,
                    };
                    operands.sum = sum.map(|sum| self.next_sum(schedule, sum)).transpose()?;
                    is_made = operands.sum.is_some();
                    self.launch(op, scope, &operands)?;
                    if let (Op::Route { .. }, Some(counter)) = (op, &self.expert_counter) {
                        let ids = operands.outputs.first().context("a router writes ids")?;
                        let bytes = ids.rows * ids.columns * size_of::<i32>();
                        let chosen = self.gpu.read(&ids.span.part(0, bytes))?;
                        counter.add(schedule, id, &collect::<i32>(&chosen));
                    }
                }
                Action::Move { .. } if self.sums.peers.is_sum(program, id) => {
                    // What another stretch begins with may have to wait.
                    is_made = self.sums.peers.is_joined(program, id) && steps.last() != Some(&id);
                    let add = lane.steps.get(position + 1).copied().filter(|_| is_made);
                    self.sum_over_peers(scope, program, id, add)?;
                }
                Action::Move { movement, slice, .. } => {
                    self.move_values(scope, program, id, movement, *slice, slots)?;
                }
                Action::Fetch { weight, .. } => {
                    bail!("a compute queue fetches no weights, so {weight} stays at home")
                }
            }
            if is_replayed {
                self.queue_stamp(Moment::End(id));
            }
            self.queue_letters(scope, program, id)?;
        }
        Ok(())
    }

    /// Queues leaving the time, where steps are traced.
    fn queue_stamp(&self, moment: Moment) {
        if let Some(stamps) = &self.stamps {
            self.gpu.stamp(stamps.place(moment), &self.inputs.turn());
        }
    }

    /// Queues a step's wait for a letter that brings no values.
    pub(super) fn queue_wait(&self, program: usize, step: StepId) {
        let Some(mail) = &self.mail else { return };
        if let Some(place) = mail.incoming(program, step) {
            self.gpu.wait_for_flag(place, &self.inputs.turn());
        }
    }

    /// Queues sending what a step sends.
    fn queue_letters(&self, scope: Scope<'_>, program: usize, step: StepId) -> Result<()> {
        let Some(mail) = &self.mail else { return Ok(()) };
        let (schedule, turn) = (&scope.plan.programs[program], self.inputs.turn());
        let (values, flag) = mail.outgoing(program, step);
        for (buffer, place) in values {
            let bytes = sent_type(schedule, buffer, scope).bytes(scope.batch.extent()) as usize;
            let span = self.queue_sent(schedule, program, buffer, scope)?;
            self.gpu.post(&span, bytes, place, &turn);
        }
        if let Some(place) = flag {
            match schedule.steps[step].writes.first() {
                // Others may read it where it lies: if the launch that was to write it was not made, nor is this one.
                Some(&written) => {
                    let written = self.operand(schedule, program, written, scope)?;
                    self.gpu.post(&written.span, 0, place, &turn);
                }
                None => self.gpu.raise_flag(place, &turn),
            }
        }
        if let Some(place) = mail.taken(program, step) {
            self.gpu.raise_flag(place, &turn);
        }
        Ok(())
    }

    /// Fails when a member of a sum over GPUs never came, once this device has done its part of a run.
    ///
    /// After a member is lost, the sums of the others are not numbers. The GPU that writes the output therefore looks
    /// for a lost member only if the output holds such a number, and GPUs that sum with that GPU leave it to it. Other
    /// GPUs cannot tell from the output whether their sums were numbers, least of all where a NUMA node writes it: they
    /// always look.
    ///
    /// # Errors
    /// That, or when the device failed.
    pub(crate) fn check_output(&self, scope: Scope<'_>, run: &Run) -> Result<()> {
        let schedule = &scope.plan.programs[run.program];
        if !self.sums.peers.have_sums(run.program) {
            return Ok(());
        }
        let writer = schedule.buffers[schedule.output].device;
        let is_suspect = if writer == self.device {
            with_bytes(schedule, schedule.output, scope, &run.slots, |bytes| {
                Ok(holds_unusable(bytes))
            })?
        } else {
            !self.sums.has_met(writer)
        };
        if is_suspect {
            self.sums.check(&self.gpu, &scope.plan.machine, turn(run.number))
        } else {
            Ok(())
        }
    }
}

/// Whether one of these floats is not a number, or stands for one in a shortlist. All are looked at: each GPU may have
/// made some, and each row may have come with another piece.
fn holds_unusable(floats: &[u8]) -> bool {
    let floats = floats.as_chunks().0.iter().map(|&bytes| f32::from_ne_bytes(bytes));
    floats.fold(false, |found, float| found | float.is_nan() | (float == UNUSABLE))
}

/// Hands over a buffer's value on the host.
pub(super) fn with_bytes<T>(
    schedule: &Program,
    buffer: BufferId,
    scope: Scope<'_>,
    slots: &Slots,
    with: impl FnOnce(&[u8]) -> Result<T>,
) -> Result<T> {
    let ty = sent_type(schedule, buffer, scope);
    let value = slots.read(buffer)?;
    let with = |bytes: &[u8]| {
        let expected = ty.bytes(scope.batch.extent()) as usize;
        ensure!(bytes.len() == expected, "{buffer} has another size");
        with(bytes)
    };
    match value.clone().into_flex().map(Input::of) {
        Ok(input) if ty.dtype != DType::F32 => with(bytemuck::cast_slice(input.ints()?)),
        Ok(input) => with(bytemuck::cast_slice(input.floats()?)),
        // Tensors of other backends are copied to be seen.
        Err(_) => with(value.into_data().as_bytes()),
    }
}

/// A value that the device sent, for others to read.
fn value(ty: &TensorType, extent: Extent, bytes: &[u8]) -> Result<Value> {
    let (rows, columns) = dims(ty, extent);
    match ty.dtype {
        DType::F32 => Ok(Value::of_floats(collect(bytes), rows, columns)),
        DType::I32 => Ok(Value::of_ints(collect(bytes), rows, columns)),
        // None but GPUs read it, two elements in a word.
        DType::F16 | DType::Bf16 => Ok(Value::of_ints(collect(bytes), rows, columns / 2)),
        other @ (DType::U8 | DType::I8) => {
            bail!("a buffer of {other} is read by another device")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_16_bits_come_as_they_are_sent() {
        let ty = TensorType { dtype: DType::Bf16, ..TensorType::activation(6) };
        let sent: Vec<u8> = (0..36).collect();
        let value = value(&ty, Extent { tokens: 3, rows: 1 }, &sent).unwrap();
        let data = value.into_data();
        assert_eq!(data.as_bytes(), sent);
    }

    #[test]
    fn one_number_that_is_none_is_found_wherever_it_stands() {
        let mut floats = vec![1.0_f32; 100];
        assert!(!holds_unusable(bytemuck::cast_slice(&floats)));
        for at in [0, 57, 99] {
            for unusable in [f32::NAN, -f32::NAN, UNUSABLE] {
                floats[at] = unusable;
                assert!(holds_unusable(bytemuck::cast_slice(&floats)), "{unusable} at {at}");
            }
            floats[at] = f32::NEG_INFINITY;
        }
    }
}
