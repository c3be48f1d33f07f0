//! For which kinds of runs launches are captured, which of these make room for others, and whether prompts are padded
//! for that.
//!
//! What is decided here is the same for all devices of a run. A lane that is to record its steps, and a GPU some of
//! whose launches cannot be captured (`State::prepare_capture`), may still leave it.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard};

use ir::captured;
use ir::id::WeightId;
use ir::op::Op;
use ir::plan::{Action, Phase, Plan, Program, Step};
use ir::tensor::Dim;

use crate::load::{GpuDriver, Options};
use crate::locked;
use crate::ops::gpu::GraphKey;

/// Runs of other kinds between two of one kind, at most, that make it worth capturing: prompts of any length are met
/// again at some time, and capturing each would cost more than it brings.
const MOST_MET: usize = 8;

/// Kinds of runs that are captured, as few as their memory is counted for.
pub(crate) struct KnownGraphs {
    /// The most that are captured at one time.
    most: usize,
    /// Tokens of the longest prompts that are captured and replayed as decode steps are; 0 where none is.
    most_tokens: usize,
    /// Tokens of the longest ones that are padded to few lengths, so that fewer are captured; 0 where none is.
    most_padded: usize,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    /// Kinds of which a run has ended well of late, the latest last.
    met: VecDeque<GraphKey>,
    /// Kinds whose launches lanes hold, or will before they come to the next run; the least recently used first.
    held: Vec<Held>,
    /// Parts of runs that GPUs have replayed.
    replays: usize,
}

#[derive(Clone, Copy)]
struct Held {
    key: GraphKey,
    /// Whether the last run that was to capture it has ended well.
    is_captured: bool,
}

/// What a run does about captured launches, where runs of its kind may be captured and replayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Admission {
    /// Whether its launches are captured.
    pub(crate) captures: bool,
    /// The kind whose launches are dropped for that.
    pub(crate) replaces: Option<GraphKey>,
}

impl KnownGraphs {
    /// None yet, and never more captured at one time than a plan counts memory for.
    pub(crate) fn of(plan: &Plan, options: &Options) -> Self {
        let captures_prompts =
            options.gpu_driver == GpuDriver::Cuda && captured::includes_prompts(plan);
        let most = usize::try_from(captured::most_kinds(plan)).unwrap_or(usize::MAX);
        // What is traced launches up to three times as much.
        let most = if options.trace { most / 3 } else { most };
        let most_tokens =
            if captures_prompts { captured::most_prompt_tokens(plan) as usize } else { 0 };
        let pads_prompts = captures_prompts && longer_runs_are_free(plan);
        let most_padded =
            if pads_prompts { captured::most_padded_tokens(plan) as usize } else { 0 };
        Self { most, most_tokens, most_padded, known: Mutex::default() }
    }

    /// None yet, never more than `most` captured at one time, and no prompts of more than `most_tokens` tokens.
    #[cfg(test)]
    pub(crate) fn new(most: usize, most_tokens: usize) -> Self {
        Self { most, most_tokens, most_padded: 0, known: Mutex::default() }
    }

    /// Tokens that the run of a prompt of `tokens` tokens is to have: where short ones are captured and replayed, few
    /// lengths, and little more work.
    pub(crate) fn padded(&self, tokens: usize) -> usize {
        match tokens {
            _ if tokens > self.most_padded => tokens,
            0..=32 => tokens.next_multiple_of(8),
            33..=64 => tokens.next_multiple_of(16),
            _ => tokens.next_multiple_of(32),
        }
    }

    /// Lets in a run of a program in the order in which lanes work through runs; `None` where runs of its kind are
    /// never captured. A decode is captured at once, a prompt when its kind comes again soon, since many lengths do not.
    pub(crate) fn admit(&self, key: GraphKey, phase: Phase) -> Option<Admission> {
        let is_decode = phase == Phase::Decode;
        if !is_decode && key.tokens() > self.most_tokens {
            return None;
        }
        let mut known = self.lock();
        if let Some(position) = known.held.iter().position(|held| held.key == key) {
            let held = known.held.remove(position);
            known.held.push(held);
            return Some(Admission { captures: !held.is_captured, replaces: None });
        }
        if self.most == 0 || !is_decode && !known.met.contains(&key) {
            return Some(Admission { captures: false, replaces: None });
        }
        let is_full = known.held.len() >= self.most;
        let replaces = is_full.then(|| known.held.remove(0).key);
        known.held.push(Held { key, is_captured: false });
        Some(Admission { captures: true, replaces })
    }

    /// A run that was let in has ended well, of which GPUs have replayed `replays` parts.
    pub(crate) fn note_end(&self, key: GraphKey, admission: Admission, replays: usize) {
        let mut known = self.lock();
        known.replays += replays;
        known.met.retain(|&met| met != key);
        known.met.push_back(key);
        if known.met.len() > MOST_MET {
            known.met.pop_front();
        }
        if let Some(held) = known.held.iter_mut().find(|held| held.key == key) {
            held.is_captured |= admission.captures;
        }
    }

    /// A run that was let in has not ended well: what it was to capture some lanes may lack.
    pub(crate) fn note_failure(&self, key: GraphKey, admission: Admission) {
        let mut known = self.lock();
        if let Some(held) = known.held.iter_mut().find(|held| held.key == key) {
            held.is_captured &= !admission.captures;
        }
    }

    /// Parts of runs that GPUs have replayed, one for each GPU that takes part in a run.
    pub(crate) fn replays(&self) -> usize {
        self.lock().replays
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        locked(&self.known)
    }
}

/// Whether it costs nothing to compute a few tokens more: processors take longer for them, experts would be read for
/// tokens of no sequence, and the vendor's library, whose matrices in 16 and 32 bits are from some tokens on, may take
/// longer, too.
fn longer_runs_are_free(plan: &Plan) -> bool {
    let is_packed = |&weight: &WeightId| plan.weights[weight].format.float().is_none();
    let is_free = |program: &Program, step: &Step| {
        let Action::Run(Op::Linear(linear)) = &step.action else { return true };
        let read = &program.buffers[step.reads[0]];
        // Of rows that are wanted there are no more.
        let is_padded = read.ty.shape.first() == Some(&Dim::Tokens);
        plan.machine.devices[read.device].kind.is_gpu()
            && (!is_padded || linear.weights.iter().all(is_packed))
    };
    let mut programs = plan.programs.iter();
    !plan.has_experts()
        && programs.all(|program| program.steps.rows().iter().all(|step| is_free(program, step)))
}

#[cfg(test)]
mod tests {
    use ir::machine::DeviceKind;
    use ir::tensor::{DType, Format};
    use ir::workspace::MAX_PLANE_ROWS;

    use super::*;
    use crate::batch::Batch;
    use crate::ops::tests::{beside_a_gpu, gated, plan, written};

    fn key(program: usize, tokens: usize) -> GraphKey {
        let mut batch = Batch::default();
        batch.push(&vec![0; tokens], 0, tokens, &[0, 1, 2, 3, 4, 5, 6, 7], false);
        GraphKey::of(program, &batch)
    }

    const SHORT: usize = MAX_PLANE_ROWS as usize;
    const REPLAYS: Option<Admission> = Some(Admission { captures: false, replaces: None });
    const CAPTURES: Option<Admission> = Some(Admission { captures: true, replaces: None });

    impl KnownGraphs {
        fn note(&self, key: GraphKey, captures: bool) {
            self.note_end(key, Admission { captures, replaces: None }, 0);
        }
    }

    #[test]
    fn decodes_are_captured_at_once_and_prompts_when_they_come_again() {
        let known = KnownGraphs::new(8, SHORT);
        let (decode, prompt) = (key(1, 1), key(0, 20));
        assert_eq!(known.admit(decode, Phase::Decode), CAPTURES);
        assert_eq!(known.admit(prompt, Phase::Prefill), REPLAYS);
        // A run that did not end well says nothing of its kind, and its capture is made by the next.
        assert_eq!(known.admit(prompt, Phase::Prefill), REPLAYS);
        assert_eq!(known.admit(decode, Phase::Decode), CAPTURES);
        known.note(decode, true);
        known.note(prompt, false);
        assert_eq!(known.admit(decode, Phase::Decode), REPLAYS);
        assert_eq!(known.admit(prompt, Phase::Prefill), CAPTURES);
        known.note(prompt, true);
        assert_eq!(known.admit(prompt, Phase::Prefill), REPLAYS);
    }

    #[test]
    fn prompts_are_captured_through_cuda_and_short_ones_of_packed_matrices_padded() {
        let folder = tempfile::tempdir().unwrap();
        let model = written(&gated()[0], folder.path());
        let machine = beside_a_gpu();
        let plan = |device, format| plan(&model, (&machine, device), format, DType::F32);
        let found = |plan: &Plan, gpu_driver, trace| {
            let known = KnownGraphs::of(plan, &Options { gpu_driver, trace, ..Options::default() });
            (known.most_tokens, known.padded(61), known.padded(97), known.most)
        };
        let most = 512;
        let [packed, floats] = [Format::Q8, Format::F16].map(|format| plan("gpu0", format));
        // Sixteen kinds, and two for each sequence.
        assert_eq!(found(&packed, GpuDriver::Cuda, false), (most, 64, 97, 24));
        assert_eq!(found(&floats, GpuDriver::Cuda, false), (most, 61, 97, 24));
        assert_eq!(found(&packed, GpuDriver::Cuda, true), (most, 64, 97, 8));
        assert_eq!(found(&packed, GpuDriver::Vulkan, false), (0, 61, 97, 24));
        let of_node = plan("numa0", Format::Q8);
        assert_eq!(found(&of_node, GpuDriver::Cuda, false), (0, 61, 97, 24));
        // As many tokens as reading matrices takes longer than.
        let mut of_hopper = packed;
        for device in of_hopper.machine.devices.rows_mut() {
            if let DeviceKind::Gpu { has_warpgroups, .. } = &mut device.kind {
                *has_warpgroups = true;
            }
        }
        assert_eq!(found(&of_hopper, GpuDriver::Cuda, false), (most, 64, 128, 24));
    }

    #[test]
    fn long_prompts_are_never_captured_and_short_ones_where_the_plan_lets_them() {
        let [short, long] = [SHORT, SHORT + 1].map(|tokens| key(0, tokens));
        for (most_tokens, expected) in [(SHORT, REPLAYS), (0, None)] {
            let known = KnownGraphs::new(8, most_tokens);
            assert_eq!(known.admit(short, Phase::Prefill), expected);
            assert_eq!(known.admit(long, Phase::Prefill), None);
            // Decodes are, however many sequences there are.
            assert_eq!(known.admit(long, Phase::Decode), CAPTURES);
        }
    }

    #[test]
    fn the_least_recently_used_makes_room() {
        let known = KnownGraphs::new(2, SHORT);
        let [first, second, third] = [1, 2, 3].map(|program| key(program, 1));
        for decode in [first, second] {
            assert_eq!(known.admit(decode, Phase::Decode), CAPTURES);
            known.note(decode, true);
        }
        assert_eq!(known.admit(first, Phase::Decode), REPLAYS);
        let replaces = |key| Some(Admission { captures: true, replaces: Some(key) });
        assert_eq!(known.admit(third, Phase::Decode), replaces(second));
        // What a second run under way was to capture anew, and did not, the next captures; one that was to replay says
        // nothing.
        known.note_failure(first, Admission { captures: false, replaces: None });
        assert_eq!(known.admit(first, Phase::Decode), REPLAYS);
        known.note(third, true);
        known.note_failure(third, Admission { captures: true, replaces: None });
        assert_eq!(known.admit(third, Phase::Decode), CAPTURES);
        // The end of a run that was let in before its kind was dropped brings nothing back.
        known.note(second, true);
        assert_eq!(known.admit(second, Phase::Decode), replaces(first));
        assert_eq!(known.lock().held.len(), 2);
    }

    #[test]
    fn where_there_is_memory_for_none_none_is_captured() {
        let known = KnownGraphs::new(0, SHORT);
        let decode = key(1, 1);
        assert_eq!(known.admit(decode, Phase::Decode), REPLAYS);
        known.note(decode, false);
        assert_eq!(known.admit(decode, Phase::Decode), REPLAYS);
    }
}
