//! One thread for each queue of each device: it works through its steps of every run, in order.

pub(crate) mod fetching;
pub(crate) mod parting;
pub(crate) mod pulse;

use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use anyhow::Result;
use ir::id::{DeviceId, StepId};
use ir::op::Op;
use ir::plan::{Action, Phase, Plan, Program, Queue};
use ir::trace::Span;

use self::parting::Parting;
use self::pulse::{Pulse, Work};
use crate::bell::Bell;
use crate::bind::{Cpu, Device, Form};
use crate::counting::ExpertCounter;
use crate::load::{Fault, FaultKind};
use crate::locked;
use crate::moves;
use crate::ops::gpu::GraphKey;
use crate::ops::{self, Scope};
use crate::peers::Peers;
use crate::run::{Failure, Run, panic_message};
use crate::trace::Recorder;

/// Runs that a lane has yet to work through.
#[derive(Default)]
pub(crate) struct Inbox {
    runs: Mutex<VecDeque<Arc<Run>>>,
    waiting: AtomicUsize,
    is_closed: AtomicBool,
    bell: Bell,
}

/// What a lane thread works with.
pub(crate) struct Lane {
    pub(crate) plan: Arc<Plan>,
    pub(crate) device: Device,
    /// For each program the index of this queue's lane in it.
    pub(crate) lanes: Vec<Option<usize>>,
    /// For each program that the lane works in, its steps by position, cut where others take part.
    pub(crate) stretches: Vec<Option<Vec<Range<usize>>>>,
    /// For each program the steps of other lanes after which a run reads nothing of this device's memory.
    pub(crate) last_takes: Vec<Vec<StepId>>,
    /// Whether a run begins when the one before has ended: GPUs borrow what NUMA nodes cached in it, or the other way
    /// round.
    pub(crate) begins_alone: bool,
    pub(crate) peers: Arc<Peers>,
    /// Where GPUs meet before they give their memory back.
    pub(crate) parting: Arc<Parting>,
    pub(crate) pulse: Arc<Pulse>,
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) recorder: Option<Arc<Recorder>>,
    pub(crate) expert_counter: Option<Arc<ExpertCounter>>,
    pub(crate) fault: Option<Fault>,
}

impl Inbox {
    pub(crate) fn push(&self, run: Arc<Run>) {
        locked(&self.runs).push_back(run);
        self.waiting.fetch_add(1, Ordering::SeqCst);
        self.bell.ring();
    }

    /// Lets the lane end after the runs that wait.
    pub(crate) fn close(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
        self.bell.ring();
    }

    /// Whether no more runs will come.
    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::SeqCst)
    }

    /// The next run; `None` once closed and empty.
    fn next(&self) -> Option<Arc<Run>> {
        self.bell.wait_until(|| self.waiting.load(Ordering::SeqCst) > 0 || self.is_closed());
        let run = locked(&self.runs).pop_front()?;
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        Some(run)
    }
}

impl Lane {
    /// A lane thread's life.
    pub(crate) fn serve(mut self) {
        let mut spans = Vec::new();
        let (mut before, mut latest): (Option<Arc<Run>>, Option<Arc<Run>>) = (None, None);
        while let Some(run) = self.inbox.next() {
            let latest = latest.replace(Arc::clone(&run));
            if let Some(key) = run.admission.and_then(|admission| admission.replaces) {
                self.attend(&run, |this| this.discard_captured(key));
            }
            let Some(lane) = self.lanes[run.program] else { continue };
            let _presence = run.enter();
            let before = before.replace(Arc::clone(&run));
            self.attend(&run, |this| {
                if let Some(before) = before {
                    // A run that was aborted reads nothing that matters.
                    before.wait_for(&this.last_takes[before.program]);
                }
                if let Some(latest) = latest.filter(|_| this.begins_alone) {
                    latest.wait_for_end();
                }
                this.work(&run, lane, &mut spans);
                // What a GPU gives back is at home then.
                let may_borrow = this.plan.programs[run.program].phase == Phase::Prefill;
                if let (true, Form::Gpu(state)) =
                    (this.begins_alone && may_borrow, &this.device.form)
                {
                    state.finish()?;
                }
                if let Some(recorder) = &this.recorder {
                    recorder.add(&mut spans);
                }
                Ok(())
            });
            if run.is_aborted() {
                self.attend(&run, |this| this.leave(&run));
            }
        }
        self.part();
    }

    /// Does a part of a lane's work in a run. What fails or panics in it beside its steps ends the run, not the thread.
    fn attend(&mut self, run: &Run, work: impl FnOnce(&mut Self) -> Result<()>) {
        if let Err(cause) = guarded(|| work(self)) {
            let program = &self.plan.programs[run.program];
            run.abort(Failure::beside_steps(program, &self.device.name, cause));
        }
    }

    /// Makes room for what a run captures, in whichever runs this lane takes part.
    fn discard_captured(&mut self, key: GraphKey) -> Result<()> {
        let Form::Gpu(state) = &mut self.device.form else { return Ok(()) };
        state.discard_captured(key)
    }

    /// Leaves a run that ended early: tells the GPUs that meet this one in it, and waits for what this one has queued.
    fn leave(&mut self, run: &Run) -> Result<()> {
        let Form::Gpu(state) = &mut self.device.form else { return Ok(()) };
        let scope = Scope { plan: &self.plan, batch: &run.batch, run: run.number };
        let told = guarded(|| state.leave_sums(scope, run.program));
        // Whatever became of that: launches wait for letters.
        state.let_through(scope, run.program);
        told.map_err(anyhow::Error::msg)
    }

    /// Works through one run, or leaves it early when it is aborted.
    fn work(&mut self, run: &Run, lane: usize, spans: &mut Vec<Span>) {
        let plan = Arc::clone(&self.plan);
        let program = &plan.programs[run.program];
        let Form::Gpu(state) = &self.device.form else {
            self.work_in_stretches(run, program, lane, spans);
            return;
        };
        let is_recorded = self.recorder.is_none() || state.traces_replays();
        let admission = run.admission.filter(|_| is_recorded && state.can_capture());
        let is_captured = state.is_captured(run.graph_key);
        // All GPU lanes of a run decide alike here, so that all of them come to its meetings. One by itself replays
        // what it captured in a run of this kind that was under way before.
        let is_alone = self.gpus_that_meet(program) == 1;
        match admission {
            Some(admission) if admission.captures && !(is_alone && is_captured) => {
                self.work_and_capture(run, program, lane, spans);
            }
            Some(_) if is_captured => self.work_replayed(run, program, lane, spans),
            Some(_) | None => {
                self.work_in_stretches(run, program, lane, spans);
            }
        }
    }

    fn gpus_that_meet(&self, program: &Program) -> usize {
        lanes_that_meet(program, |device| self.plan.machine.devices[device].kind.is_gpu())
    }

    /// Works through a run and captures it: one GPU after another, while all wait.
    fn work_and_capture(
        &mut self,
        run: &Run,
        program: &Program,
        lane: usize,
        spans: &mut Vec<Span>,
    ) {
        let steps = &program.lanes[lane].steps;
        let Some(&first) = steps.first().filter(|_| !run.is_aborted()) else { return };
        let plan = Arc::clone(&self.plan);
        let scope = Scope { plan: &plan, batch: &run.batch, run: run.number };
        // A capture that may have begun is made or abandoned.
        let mut is_pending = true;
        let prepared = guarded(|| {
            if let Form::Gpu(state) = &mut self.device.form {
                // At one time there is one graph of a kind. It goes before CubeCL prepares: what its launches read goes
                // with it, and the run brings that anew.
                state.discard_captured(run.graph_key)?;
                is_pending = state.prepare_capture(&plan, run);
            }
            Ok(())
        });
        let is_wanted = prepared.is_ok() && is_pending;
        let has_ended = prepared.is_ok() && self.work_in_stretches(run, program, lane, spans);
        let lanes = self.gpus_that_meet(program);
        let Form::Gpu(state) = &mut self.device.form else { return };
        let outcome = prepared.and_then(|()| {
            guarded(|| {
                state.finish()?;
                if has_ended && run.meet(0, lanes) {
                    if is_wanted {
                        is_pending = false;
                        state.capture(scope, run.program, steps, run.graph_key)?;
                    }
                    run.meet(1, lanes);
                }
                Ok(())
            })
        });
        // Others learn of it before this lane does more.
        if let Err(cause) = outcome {
            self.fail(run, program, first, cause);
        }
        if let (true, Form::Gpu(state)) = (is_pending, &self.device.form) {
            state.abandon_capture();
        }
    }

    /// Works through a run that is replayed: what is left to do on the host is to carry letters.
    fn work_replayed(&mut self, run: &Run, program: &Program, lane: usize, spans: &mut Vec<Span>) {
        let steps = &program.lanes[lane].steps;
        let Form::Gpu(state) = &mut self.device.form else { return };
        let Some(&first) = steps.first() else { return };
        let scope = Scope { plan: &self.plan, batch: &run.batch, run: run.number };
        let mut at = first;
        let outcome = guarded(|| {
            for &id in steps {
                at = id;
                if let Some(fault) = &self.fault {
                    fault.strike(&program.steps[id].name)?;
                }
            }
            state.start_replay(scope, run.graph_key)?;
            for &id in steps {
                at = id;
                if state.expects_letter(run.program, id) {
                    if !run.wait_for(self.peers.waits(run.program, id)) {
                        return Ok(());
                    }
                    state.deliver(scope, run, id)?;
                }
                state.receive(scope, run, id)?;
                run.slots.pass(id);
                if self.peers.awaited(run.program)[id] {
                    run.finish(id);
                }
            }
            state.check_output(scope, run)?;
            spans.append(&mut state.spans(run, lane as u32, steps)?);
            run.note_replay();
            Ok(())
        });
        if let Err(cause) = outcome {
            self.fail(run, program, at, cause);
        }
    }

    /// Works through a run stretch by stretch; whether it came to its end.
    fn work_in_stretches(
        &mut self,
        run: &Run,
        program: &Program,
        lane: usize,
        spans: &mut Vec<Span>,
    ) -> bool {
        let recorder = self.recorder.clone();
        let now = || recorder.as_ref().map_or(0, |recorder| recorder.now());
        let steps = &program.lanes[lane].steps;
        let is_cpu = matches!(self.device.form, Form::Cpu(_));
        // Whoever waits for the lane to leave knows that steps of processors end, however long one takes; what they
        // wait for may not.
        let mut at_work: Option<Work<'_>> = None;
        for stretch in self.stretches[run.program].clone().unwrap_or_default() {
            let stretch = &steps[stretch];
            let Some(&first) = stretch.first() else { continue };
            let ready = now();
            let waits = self.peers.waits(run.program, first);
            if !run.has_done(waits) {
                at_work = None;
            }
            if !run.wait_for(waits) {
                return false;
            }
            if is_cpu && at_work.is_none() {
                at_work = Some(run.pulse.work());
            }
            let mut at = first;
            let start = now();
            // After a panic the run is over; a cache it was writing is marked as gone.
            if let Err(cause) = guarded(|| self.perform(run, program, stretch, &mut at)) {
                self.fail(run, program, at, cause);
                return false;
            }
            let end = now();
            for &id in stretch {
                if self.peers.awaited(run.program)[id] {
                    run.finish(id);
                }
                if recorder.is_some() {
                    let (run, lane) = (run.number, lane as u32);
                    spans.push(Span { run, step: id, lane, ready, start, end });
                }
            }
        }
        let (Form::Gpu(state), Some(&last)) = (&self.device.form, steps.last()) else {
            return true;
        };
        let scope = Scope { plan: &self.plan, batch: &run.batch, run: run.number };
        let outcome = guarded(|| state.check_output(scope, run));
        let is_right = outcome.is_ok();
        if let Err(cause) = outcome {
            self.fail(run, program, last, cause);
        }
        is_right
    }

    /// Ends a run at a step that failed.
    fn fail(&self, run: &Run, program: &Program, at: StepId, cause: String) {
        run.abort(Failure::at_step(program, at, &self.device.name, cause));
    }

    /// Works through neighbouring steps; `at` is the one under way.
    fn perform(
        &mut self,
        run: &Run,
        program: &Program,
        stretch: &[StepId],
        at: &mut StepId,
    ) -> Result<()> {
        for &id in stretch {
            *at = id;
            if let Some(fault) = &self.fault {
                fault.strike(&program.steps[id].name)?;
            }
        }
        let scope = Scope { plan: &self.plan, batch: &run.batch, run: run.number };
        match &mut self.device.form {
            Form::Cpu(cpu) => {
                for &id in stretch {
                    *at = id;
                    compute(cpu, scope, run, program, id)?;
                    if let Some(counter) = &self.expert_counter {
                        count_chosen(counter, run, program, id)?;
                    }
                }
            }
            Form::Gpu(state) => {
                let is_traced = self.recorder.is_some();
                state.run(scope, run, stretch, is_traced, at)?;
            }
        }
        for &id in stretch {
            run.slots.pass(id);
        }
        Ok(())
    }
}

/// Does work that may fail or panic; what went wrong.
fn guarded(work: impl FnOnce() -> Result<()>) -> Result<(), String> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(format!("{error:#}")),
        Err(payload) => Err(panic_message(&*payload)),
    }
}

/// One step of a NUMA node.
fn compute(
    cpu: &mut Cpu,
    scope: Scope<'_>,
    run: &Run,
    program: &Program,
    id: StepId,
) -> Result<()> {
    let step = &program.steps[id];
    let inputs =
        step.reads.iter().map(|&buffer| run.slots.read(buffer)).collect::<Result<Vec<_>>>()?;
    match &step.action {
        Action::Run(op) => {
            let outputs = ops::run(op, cpu, scope, inputs)?;
            anyhow::ensure!(
                outputs.len() == step.writes.len(),
                "{op} makes {} values, {id} of {} writes {}",
                outputs.len(),
                program.name,
                step.writes.len()
            );
            for (&buffer, value) in step.writes.iter().zip(outputs) {
                run.slots.write(buffer, value);
            }
        }
        Action::Move { movement, slice, .. } => {
            let value = moves::run(movement, *slice, cpu, inputs)?;
            for &buffer in &step.writes {
                run.slots.write(buffer, value.clone());
            }
        }
        Action::Fetch { weight, .. } => {
            anyhow::bail!(
                "a NUMA node has no queue that fetches weights, so {weight} stays at home"
            )
        }
    }
    Ok(())
}

/// The GPU lanes that come to the meetings of a run that is captured: those that have something to do.
fn lanes_that_meet(program: &Program, is_gpu: impl Fn(DeviceId) -> bool) -> usize {
    let meets = |lane: &&ir::plan::Lane| {
        lane.queue == Queue::Compute && !lane.steps.is_empty() && is_gpu(lane.device)
    };
    program.lanes.iter().filter(meets).count()
}

/// Counts what a router chose, if the step is one.
fn count_chosen(counter: &ExpertCounter, run: &Run, program: &Program, id: StepId) -> Result<()> {
    let step = &program.steps[id];
    if let (Action::Run(Op::Route { .. }), Some(&ids)) = (&step.action, step.writes.first()) {
        let chosen = run.slots.read(ids)?.into_data();
        let chosen = chosen.as_slice::<i32>();
        counter.add(program, id, chosen.map_err(|error| anyhow::anyhow!("{error:?}"))?);
    }
    Ok(())
}

impl Fault {
    fn strike(&self, step: &str) -> Result<()> {
        if step != self.step || self.is_over.load(Ordering::Relaxed) {
            return Ok(());
        }
        match self.kind {
            FaultKind::Error => anyhow::bail!("a fault was injected"),
            FaultKind::Panic => panic!("a panic was injected"),
        }
    }
}

#[cfg(test)]
mod tests {
    use ir::id::{BufferId, Id as _, Table};
    use ir::plan::{Lane as PlannedLane, Phase};
    use ir::tensor::Extent;

    use super::*;

    #[test]
    fn only_gpu_lanes_with_something_to_do_meet() {
        let lane = |device: usize, queue, steps: &[usize]| PlannedLane {
            device: DeviceId::from_index(device),
            queue,
            steps: steps.iter().map(|&step| StepId::from_index(step)).collect(),
        };
        let program = Program {
            name: "decode1".into(),
            phase: Phase::Decode,
            max: Extent { tokens: 1, rows: 1 },
            max_sequences: 1,
            buffers: Table::default(),
            steps: Table::default(),
            lanes: vec![
                lane(0, Queue::Compute, &[0, 1]),
                lane(0, Queue::Copy, &[2]),
                lane(1, Queue::Compute, &[]),
                lane(2, Queue::Compute, &[3]),
                lane(3, Queue::Compute, &[4]),
            ],
            output: BufferId::from_index(0),
        };
        // The last is a NUMA node's.
        assert_eq!(lanes_that_meet(&program, |device| device.index() < 3), 2);
    }

    #[test]
    fn a_panic_is_what_went_wrong() {
        assert_eq!(guarded(|| panic!("no device")), Err("no device".into()));
        assert_eq!(guarded(|| anyhow::bail!("no memory")), Err("no memory".into()));
    }
}
