//! A GPU's part of movements: what crosses devices passes through the host, or is read where another GPU within reach
//! holds it.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, bail, ensure};
use ir::id::{BufferId, DeviceId, StepId};
use ir::layout::Move;
use ir::plan::{Program, Queue};
use ir::tensor::Format;

use super::linear::cast;
use super::runs::{turn, with_bytes};
use super::state::{Operand, State, dims};
use crate::kernels::gpu::device::{ALIGNMENT, Span};
use crate::kernels::gpu::peers::{Group, Sum};
use crate::ops::Scope;
use crate::peers::{members, ordinals};
use crate::slots::Slots;

impl State {
    /// Queues one movement of the members' values.
    pub(super) fn move_values(
        &self,
        scope: Scope<'_>,
        program: usize,
        id: StepId,
        movement: &Move,
        slice: Option<(u32, u32)>,
        slots: Option<&Slots>,
    ) -> Result<()> {
        let schedule = &scope.plan.programs[program];
        let step = &schedule.steps[id];
        let &[out] = step.writes.as_slice() else { bail!("a movement writes one buffer") };
        let out = self.operand(schedule, program, out, scope)?;
        let here: Vec<bool> =
            step.reads.iter().map(|&id| schedule.buffers[id].device == self.device).collect();
        // What lies with other GPUs is there once the host has said so, all of it.
        if !self.sums.peers.reads_on_host(program, id) {
            self.queue_wait(program, id);
        }
        let whole = |index: usize, into: &Span| -> Result<Operand> {
            let buffer = *step.reads.get(index).context("a movement reads nothing")?;
            if here[index] {
                return self.operand(schedule, program, buffer, scope);
            }
            let (ty, extent) = (&schedule.buffers[buffer].ty, scope.batch.extent());
            let bytes = ty.bytes(extent) as usize;
            if let Some(place) = self.sums.peers.lies_at(self.device, program, id, buffer)? {
                self.gpu.take_at_once(place, into, bytes);
            } else if let Some(mail) = &self.mail {
                let place = mail.value(program, id, buffer)?;
                self.gpu.take(place, into, bytes, &self.inputs.turn());
            } else {
                let slots = slots.context("a value comes without a letter")?;
                with_bytes(schedule, buffer, scope, slots, |bytes| self.gpu.write(into, bytes))?;
            }
            let (rows, columns) = dims(ty, extent);
            Ok(Operand { span: into.part(0, bytes), dtype: ty.dtype, rows, columns, order: None })
        };
        let staging = &self.scratch.inner;
        match movement {
            Move::Transfer { .. } | Move::Broadcast { .. } => {
                ensure!(!here[0], "a value is moved to where it is");
                whole(0, &out.span)?;
            }
            Move::AllReduce => {
                // Sums go in the order of the members, so that every member gets the same bits.
                let is_wide = schedule.buffers[step.reads[0]].ty.dtype == out.dtype;
                let mut sum = whole(0, if is_wide { &out.span } else { staging })?;
                if !is_wide {
                    self.gpu.cast(&cast(&sum, Format::F32, &out.span))?;
                    sum = out.clone();
                }
                for index in 1..step.reads.len() {
                    let term = whole(index, staging)?;
                    let count = out.rows * out.columns;
                    let (a, b) = ((&sum.span, sum.dtype), (&term.span, term.dtype));
                    self.gpu.add_terms(a, b, &out.span, count);
                    sum = out.clone();
                }
            }
            Move::Slice { axis: 1 } => {
                let x = whole(0, staging)?;
                let (first, kept) = slice.context("a movement that cuts names no slice")?;
                let shape = [x.rows, x.columns];
                self.gpu.columns(&x.span, &out.span, shape, first as usize, kept as usize);
            }
            Move::AllGather { axis: 1 } => {
                let mut first = 0;
                for (index, &is_here) in here.iter().enumerate() {
                    let start = first * size_of::<f32>();
                    // A single row's columns may come to their place. What is written behind them is their successors'.
                    let part = if out.rows == 1 && !is_here && start.is_multiple_of(ALIGNMENT) {
                        whole(index, &out.span.part(start, out.span.bytes() - start))?
                    } else {
                        let part = whole(index, staging)?;
                        let shape = [part.rows, part.columns];
                        self.gpu.place_columns(&part.span, &out.span, shape, first, out.columns);
                        part
                    };
                    first += part.columns;
                }
            }
            Move::Slice { .. } | Move::AllGather { .. } | Move::ReduceScatter { .. } => {
                bail!("{movement:?} is not done on GPUs")
            }
        }
        Ok(())
    }

    /// Queues this GPU's part of a sum that GPUs make among themselves, and of what `add` adds to it.
    pub(super) fn sum_over_peers(
        &mut self,
        scope: Scope<'_>,
        program: usize,
        step: StepId,
        add: Option<StepId>,
    ) -> Result<()> {
        let schedule = &scope.plan.programs[program];
        let [term, mut out] = self.terms(scope, program, step)?;
        let count = out.rows * out.columns;
        if scope.plan.is_library_sum(schedule, &schedule.steps[step]) {
            // The library is never asked for a sum that it would refuse: others would wait for it on their devices.
            self.gpu.flush_written(&[&term.span])?;
            return self.sum_by_library(scope, program, step, &term, &out);
        }
        let group = self.next_sum(schedule, step)?;
        let mut residual = None;
        if let Some(add) = add.map(|add| &schedule.steps[add]) {
            let operand = |buffer: BufferId| self.operand(schedule, program, buffer, scope);
            let sum = schedule.steps[step].writes.first();
            let other = add.reads.iter().find(|&read| Some(read) != sum);
            residual = Some(operand(*other.context("nothing is added to a sum")?)?);
            out = operand(*add.writes.first().context("an addition writes nothing")?)?;
        }
        let residual = residual.as_ref().map(|residual| &residual.span);
        let (term, of_term, out) = (&term.span, term.dtype, &out.span);
        self.gpu.sum_over_peers(&group, &Sum { term, of_term, residual, out, count })
    }

    /// This GPU's term of a sum, and where the sum goes.
    fn terms(&self, scope: Scope<'_>, program: usize, step: StepId) -> Result<[Operand; 2]> {
        let schedule = &scope.plan.programs[program];
        let step = &schedule.steps[step];
        let &[out] = step.writes.as_slice() else { bail!("a movement writes one buffer") };
        let ours = |buffer: &&BufferId| schedule.buffers[**buffer].device == self.device;
        let term = step.reads.iter().find(ours).context("a GPU sums terms of others")?;
        let operand = |buffer| self.operand(schedule, program, buffer, scope);
        Ok([operand(*term)?, operand(out)?])
    }

    fn sum_by_library(
        &mut self,
        scope: Scope<'_>,
        program: usize,
        step: StepId,
        term: &Operand,
        out: &Operand,
    ) -> Result<()> {
        let schedule = &scope.plan.programs[program];
        let ordinals = ordinals(scope.plan, &members(schedule, &schedule.steps[step].reads))?;
        let count = out.rows * out.columns;
        self.sums.sum_by_library(&self.gpu, &ordinals, &term.span, &out.span, count)
    }

    /// The members of the run's next sum over GPUs, which is that step.
    pub(super) fn next_sum(&mut self, schedule: &Program, step: StepId) -> Result<Group> {
        let members = members(schedule, &schedule.steps[step].reads);
        self.sums.next(&self.gpu, &members, self.inputs.turn())
    }

    /// Lets GPUs that sum with this one in a run that ended early wait for no more than it has queued; what the
    /// vendor's library sums is queued to the end of the run, whatever there is to be summed: it cannot be told.
    ///
    /// # Errors
    /// When they cannot be told.
    pub(crate) fn leave_sums(&mut self, scope: Scope<'_>, program: usize) -> Result<()> {
        if !self.sums.peers.have_sums(program) {
            return Ok(());
        }
        let schedule = &scope.plan.programs[program];
        let steps =
            schedule.lane(self.device, Queue::Compute).into_iter().flat_map(|lane| &lane.steps);
        let sums = steps.copied().filter(|&step| self.sums.peers.is_sum(program, step));
        let is_by_library =
            |&step: &StepId| scope.plan.is_library_sum(schedule, &schedule.steps[step]);
        let (by_library, sums): (Vec<StepId>, Vec<StepId>) = sums.partition(is_by_library);
        let groups: BTreeSet<Vec<DeviceId>> =
            sums.iter().map(|&step| members(schedule, &schedule.steps[step].reads)).collect();
        groups
            .iter()
            .try_for_each(|members| self.sums.leave(&self.gpu, members, turn(scope.run)))?;
        let queued = if self.run == Some(scope.run) { self.sums.by_library() } else { 0 };
        let missing: Vec<StepId> = by_library.into_iter().skip(queued).collect();
        for step in missing {
            let [term, out] = self.terms(scope, program, step)?;
            // A term that no launch could write would be refused; this one is written.
            let zeros = vec![0; out.rows * out.columns * size_of::<f32>()];
            self.gpu.write(&term.span.part(0, zeros.len()), &zeros)?;
            self.sum_by_library(scope, program, step, &term, &out)?;
        }
        self.gpu.flush()
    }
}
