//! Experts of a mixture: one token, which memory bounds, and a prompt.

use anyhow::Result;
use executor::calibrate::work::{Mixture, MixtureTokens, USED};
use executor::kernels::cpu::arithmetic::Arithmetic;
use ir::tensor::Format;

use crate::{Amount, Bench};

/// Half of those of a 15 B mixture.
const EXPERTS: usize = 64;
const PROMPT: usize = 512;

pub(crate) fn measure(bench: &mut Bench) -> Result<()> {
    for format in [Format::Bf16, Format::Q8, Format::Q4] {
        let mixture = Mixture::new(&bench.team, format, EXPERTS)?;
        // All experts in turn, so that none is still near when it is chosen again.
        let turn = |first| MixtureTokens::new(1, move |_, rank| first + rank);
        let mut turns: Vec<_> = (0..EXPERTS).step_by(USED).map(turn).collect();
        let amount = Amount::Bytes(EXPERTS as u64 * format.bytes(1, mixture.weights()));
        bench.measure(&format!("experts of one token, {format}"), amount, |team, isa| {
            for tokens in &mut turns {
                mixture.compute(team, isa, tokens).expect("the sizes fit together");
            }
        })?;
        let mut tokens = MixtureTokens::new(PROMPT, |token, rank| (token * USED + rank) % EXPERTS);
        let operations = 2 * (PROMPT * USED) as u64 * mixture.weights();
        // As many choose each expert.
        let arithmetic = Arithmetic::of_linear(bench.isa, format, PROMPT * USED / EXPERTS);
        let amount = Amount::Operations(operations, arithmetic);
        bench.measure(&format!("experts of {PROMPT} tokens, {format}"), amount, |team, isa| {
            mixture.compute(team, isa, &mut tokens).expect("the sizes fit together");
        })?;
    }
    Ok(())
}
