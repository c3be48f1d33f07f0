//! Experts of a mixture: one token, which memory bounds, and a prompt.

use anyhow::Result;
use executor::kernels::cpu::experts::{Expert, Experts, experts};
use executor::kernels::cpu::isa::Isa;
use executor::kernels::cpu::pack::PackedMatrix;
use executor::team::Team;
use ir::op::Activation;
use ir::tensor::Format;

use crate::linears::{arithmetic, matrix};
use crate::{Amount, Bench, made_up};

/// Those of a 15 B mixture, half of its experts.
const FEATURES: usize = 2048;
const INTERMEDIATE: usize = 768;
const EXPERTS: usize = 64;
const USED: usize = 8;
const PROMPT: usize = 512;

pub(crate) fn measure(bench: &mut Bench) -> Result<()> {
    for format in [Format::Bf16, Format::Q8, Format::Q4] {
        let matrices = (0..EXPERTS)
            .map(|_| {
                let matrix = |rows, columns| matrix(&bench.team, format, rows, columns);
                let (gate, up) = (matrix(INTERMEDIATE, FEATURES)?, matrix(INTERMEDIATE, FEATURES)?);
                Ok([gate, up, matrix(FEATURES, INTERMEDIATE)?])
            })
            .collect::<Result<Vec<[PackedMatrix; 3]>>>()?;
        let all: Vec<Expert<'_>> =
            matrices.iter().map(|[gate, up, down]| Expert { gate, up, down }).collect();
        let expert_bytes = 2 * format.bytes(INTERMEDIATE as u64, FEATURES as u64)
            + format.bytes(FEATURES as u64, INTERMEDIATE as u64);
        // All experts in turn, so that none is still near when it is chosen again.
        let mut first = 0;
        let amount = Amount::Bytes(EXPERTS as u64 * expert_bytes);
        bench.measure(&format!("experts of one token, {format}"), amount, |team, isa| {
            for _ in 0..EXPERTS / USED {
                run(team, isa, &all, 1, first);
                first += USED;
            }
        });
        let operations = PROMPT * USED * 3 * 2 * FEATURES * INTERMEDIATE;
        let amount = Amount::Operations(operations as u64, arithmetic(format));
        bench.measure(&format!("experts of {PROMPT} tokens, {format}"), amount, |team, isa| {
            run(team, isa, &all, PROMPT, 0);
        });
    }
    Ok(())
}

/// Tokens that choose neighbouring experts, the first of them `first`, then the next ones.
fn run(team: &Team, isa: Isa, all: &[Expert<'_>], tokens: usize, first: usize) {
    let x: Vec<f32> = (0..tokens * FEATURES).map(made_up).collect();
    let ids: Vec<i32> = (0..tokens * USED).map(|i| ((first + i) % EXPERTS) as i32).collect();
    let inputs = Experts {
        x: &x,
        tokens,
        ids: &ids,
        weights: &vec![0.125; tokens * USED],
        first_expert: 0,
        experts: all,
        activation: Activation::Silu,
    };
    let mut out = vec![0.0; tokens * FEATURES];
    experts(team, isa, &inputs, &mut out).expect("the sizes fit together");
}
