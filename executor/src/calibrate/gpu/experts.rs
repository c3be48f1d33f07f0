//! How fast the chosen experts of a mixture are.

use anyhow::{Context as _, Result};
use ir::machine::{LinearRate, RatePoint};
use ir::op::Activation;
use ir::tensor::Format;

use super::{Meter, Sizes, rate};
use crate::kernels::cpu::pack::packed_bytes;
use crate::kernels::gpu::device::Span;
use crate::kernels::gpu::experts::Experts;
use crate::kernels::gpu::linear::MAX_TOKENS;
use crate::kernels::gpu::matrix::Stack;

/// Formats that experts are measured in: those that mixtures are held in.
pub(super) const EXPERT_FORMATS: [Format; 3] = [Format::Bf16, Format::Q8, Format::Q4];
/// Experts that a token uses, and half of them.
const EXPERTS_USED: usize = 8;

impl Meter<'_> {
    /// The rates of a mixture's experts.
    pub(super) fn experts(&self, format: Format, step_nanos: f64) -> Result<LinearRate> {
        /// Choices of experts that launches take in turn.
        const CHOICES: usize = 8;
        let Sizes { mixture: [features, inner, experts], prompt, launches, .. } = self.sizes;
        let used = [EXPERTS_USED, EXPERTS_USED / 2];
        let stack = |rows: usize, columns: usize| {
            let bytes = packed_bytes(format, rows, columns);
            let data = self.filled(experts * bytes, &self.packed(format, rows, columns))?;
            Stack::new(format, experts, rows, columns, data)
        };
        let [gate, up] = [stack(inner, features)?, stack(inner, features)?];
        let down = stack(features, inner)?;
        let mut points = Vec::new();
        for tokens in [1, MAX_TOKENS, prompt] {
            let (x, out) = (self.floats(tokens * features)?, self.floats(tokens * features)?);
            let mut nanos = [0.0; 2];
            for (used, nanos) in used.into_iter().zip(&mut nanos) {
                // Neighbouring tokens choose other experts, as those of a balanced mixture do.
                let choice = |number: usize| -> Result<Span> {
                    let chosen = |slot: usize| (slot + number * 5) * 7 % experts;
                    let ids = (0..tokens * used).map(|slot| chosen(slot) as i32);
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
                    gate: &gate,
                    up: &up,
                    down: &down,
                    activation: Activation::Silu,
                    workspace: &x,
                    out: &out,
                };
                let workspace = self.gpu.allocate(call.sizes().bytes() as usize)?;
                call.workspace = &workspace;
                let mut turns = choices.iter().cycle();
                *nanos = self.time(launches.next_multiple_of(CHOICES), || {
                    let ids = turns.next().context("there are choices")?;
                    self.gpu.experts(&Experts { ids, ..call })
                })?;
            }
            let weights = used.map(|used| (used * 3 * features * inner) as f64);
            let (weights_per_sec, nanos) = rate(weights, nanos, step_nanos);
            points.push(RatePoint { tokens: tokens as u32, weights_per_sec, nanos });
        }
        Ok(LinearRate { format, points })
    }
}
