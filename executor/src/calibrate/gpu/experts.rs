//! How fast the chosen experts of a mixture are.

use anyhow::{Context as _, Result, ensure};
use ir::machine::{LinearRate, RatePoint};
use ir::op::Activation;
use ir::tensor::Format;

use super::{Meter, rate};
use crate::kernels::cpu::pack::packed_bytes;
use crate::kernels::gpu::device::Span;
use crate::kernels::gpu::experts::Experts;
use crate::kernels::gpu::linear::FLOAT_TOKENS;
use crate::kernels::gpu::matrix::Stack;

/// Formats that experts are measured in: those that mixtures are held in.
pub(super) const EXPERT_FORMATS: [Format; 3] = [Format::Bf16, Format::Q8, Format::Q4];
/// Experts that a token uses, and half of them.
const EXPERTS_USED: usize = 8;
/// Tokens that share an expert where there are many.
const SHARED: [usize; 4] = [1, 4, 16, 128];

/// A mixture of one format.
pub(super) struct Mixture {
    gate: Stack,
    up: Stack,
    down: Stack,
}

impl Mixture {
    /// The first of its experts.
    fn first(&self, experts: usize) -> Result<Self> {
        let first = |stack: &Stack| {
            let (rows, columns) = (stack.rows(), stack.columns());
            Stack::new(stack.format(), experts, rows, columns, stack.data().clone())
        };
        Ok(Self { gate: first(&self.gate)?, up: first(&self.up)?, down: first(&self.down)? })
    }

    /// The weights of an expert.
    fn weights(&self) -> usize {
        3 * self.gate.rows() * self.gate.columns()
    }
}

impl Meter<'_> {
    /// A mixture of some experts.
    pub(super) fn mixture(&self, format: Format) -> Result<Mixture> {
        let [features, inner, experts] = self.sizes.mixture;
        let stack = |rows: usize, columns: usize| {
            let bytes = packed_bytes(format, rows, columns);
            let data = self.filled(experts * bytes, &self.packed(format, rows, columns))?;
            Stack::new(format, experts, rows, columns, data)
        };
        let [gate, up] = [stack(inner, features)?, stack(inner, features)?];
        Ok(Mixture { gate, up, down: stack(features, inner)? })
    }

    /// The rates of its experts for few tokens, which choose as if at random.
    pub(super) fn experts(&self, mixture: &Mixture, step_nanos: f64) -> Result<LinearRate> {
        let held = mixture.gate.experts();
        let used = [EXPERTS_USED, EXPERTS_USED / 2];
        let point = |tokens: usize| {
            let nanos = used.map(|used| {
                let choice = |number: usize, slot: usize| {
                    chosen(number * tokens + slot / used, slot % used) % held
                };
                self.time_experts(mixture, [tokens, used], &choice)
            });
            let [all, half] = nanos;
            let weights = used.map(|used| (used * mixture.weights()) as f64);
            let (weights_per_sec, nanos) = rate(weights, [all?, half?], step_nanos);
            anyhow::Ok(RatePoint { tokens: tokens as u32, weights_per_sec, nanos })
        };
        let points = [1, FLOAT_TOKENS].into_iter().map(point).collect::<Result<_>>()?;
        Ok(LinearRate { format: mixture.gate.format(), points })
    }

    /// The rates of its experts for many tokens, of which as many choose each.
    pub(super) fn shared_experts(&self, mixture: &Mixture, step_nanos: f64) -> Result<LinearRate> {
        let held = mixture.gate.experts();
        let held = [held, held / 2];
        let point = |sharing: usize| {
            let nanos = held.map(|held| {
                let tokens = sharing * held;
                ensure!(tokens > FLOAT_TOKENS, "{tokens} tokens do not share experts");
                let choice = |number: usize, slot: usize| (slot + number * 5) * 7 % held;
                self.time_experts(&mixture.first(held)?, [tokens, 1], &choice)
            });
            let [all, half] = nanos;
            let weights = held.map(|held| (held * mixture.weights()) as f64);
            let (weights_per_sec, nanos) = rate(weights, [all?, half?], step_nanos);
            anyhow::Ok(RatePoint { tokens: sharing as u32, weights_per_sec, nanos })
        };
        let points = SHARED.into_iter().map(point).collect::<Result<_>>()?;
        Ok(LinearRate { format: mixture.gate.format(), points })
    }

    /// Nanoseconds of experts of tokens that use some each, of which `chosen` names that of a slot for launches of each
    /// number.
    fn time_experts(
        &self,
        mixture: &Mixture,
        [tokens, used]: [usize; 2],
        chosen: &dyn Fn(usize, usize) -> usize,
    ) -> Result<f64> {
        /// Choices of experts that launches take in turn.
        const CHOICES: usize = 8;
        let Mixture { gate, up, down } = mixture;
        let count = tokens * gate.columns();
        let (x, out) = (self.floats(count)?, self.floats(count)?);
        let choice = |number: usize| -> Result<Span> {
            let ids = (0..tokens * used).map(|slot| chosen(number, slot) as i32);
            let ids: Vec<i32> = ids.collect();
            self.filled(size_of_val(&ids[..]), bytemuck::cast_slice(&ids))
        };
        let choices = (0..CHOICES).map(choice).collect::<Result<Vec<_>>>()?;
        let weights = self.floats(tokens * used)?;
        let mut call = Experts {
            x: &x,
            tokens,
            ids: &choices[0],
            weights: &weights,
            used,
            first_expert: 0,
            gate,
            up,
            down,
            activation: Activation::Silu,
            workspace: &x,
            out: &out,
        };
        let workspace = self.gpu.allocate(call.sizes().bytes() as usize)?;
        call.workspace = &workspace;
        let mut turns = choices.iter().cycle();
        self.time(self.sizes.launches.next_multiple_of(CHOICES), || {
            let ids = turns.next().context("there are choices")?;
            self.gpu.experts(&Experts { ids, ..call })
        })
    }
}

/// A token's choice of that rank: others for every rank, of any power of two of experts that is larger than these.
fn chosen(token: usize, rank: usize) -> usize {
    let mixed = (token as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let (first, step) = ((mixed >> 48) as usize, (mixed >> 32) as usize | 1);
    first + rank * step
}
