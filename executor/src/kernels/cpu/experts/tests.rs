use ir::tensor::Format;

use super::*;
use crate::kernels::cpu::linear::tests::{numbers, packed};
use crate::kernels::cpu::linear::{Linear, linear};
use crate::kernels::cpu::testing::with_team;

/// The experts of every token by plain linears, added up in the order of the choices.
fn one_by_one(team: &Team, isa: Isa, inputs: &Experts<'_>) -> Vec<f32> {
    let features = inputs.x.len() / inputs.tokens;
    let used = inputs.ids.len() / inputs.tokens;
    let mut out = vec![0.0; inputs.x.len()];
    for choice in 0..inputs.ids.len() {
        let index = inputs.ids[choice] - inputs.first_expert;
        let Some(expert) = usize::try_from(index).ok().and_then(|i| inputs.experts.get(i)) else {
            continue;
        };
        let token = choice / used;
        let run = |x: &[f32], weights: &[&PackedMatrix], then: Then| {
            let mut out = vec![0.0; weights[0].rows()];
            let layer =
                Linear { x, tokens: 1, norm: None, weights, biases: &[], then, residual: None };
            linear(team, isa, &layer, &mut [&mut out]).unwrap();
            out
        };
        let row = token * features..(token + 1) * features;
        let gate = Then::Gate(inputs.activation);
        let inner = run(&inputs.x[row.clone()], &[expert.gate, expert.up], gate);
        let outer = run(&inner, &[expert.down], Then::Nothing);
        for (sum, value) in out[row].iter_mut().zip(outer) {
            *sum += inputs.weights[choice] * value;
        }
    }
    out
}

#[test]
fn grouping_changes_nothing() {
    let (features, intermediate, count, used) = (70, 40, 5, 2);
    for members in [1, 3] {
        with_team(members, |team| {
            for format in Format::ALL {
                let matrix = |seed, rows, columns| {
                    packed(team, format, rows, columns, &numbers(seed, rows * columns))
                };
                let matrices: Vec<[PackedMatrix; 3]> = (0..count)
                    .map(|i| {
                        [
                            matrix(3 * i, intermediate, features),
                            matrix(3 * i + 1, intermediate, features),
                            matrix(3 * i + 2, features, intermediate),
                        ]
                    })
                    .collect();
                let all: Vec<Expert<'_>> =
                    matrices.iter().map(|[gate, up, down]| Expert { gate, up, down }).collect();
                for tokens in [1, 2, 9, 40] {
                    let x = numbers(7, tokens * features);
                    let weights = numbers(8, tokens * used);
                    // Experts 2 to 6 are here, of ids up to 8; the first token has none.
                    let ids: Vec<i32> = (0..tokens * used)
                        .map(|i| if i < used { 8 } else { (i * 7 % 9) as i32 })
                        .collect();
                    let inputs = Experts {
                        x: &x,
                        tokens,
                        ids: &ids,
                        weights: &weights,
                        first_expert: 2,
                        experts: &all,
                        activation: Activation::Silu,
                    };
                    // Tiles sum in another order than vectors.
                    let isa = Isa::detect().min(Isa::Avx512Bf16Vnni);
                    let mut out = vec![f32::NAN; tokens * features];
                    experts(team, isa, &inputs, &mut out).unwrap();
                    assert_eq!(out, one_by_one(team, isa, &inputs), "{format} {tokens}");
                    assert!(out[..features].iter().all(|&value| value == 0.0));
                }
            }
        });
    }
}

#[test]
fn shapes_that_do_not_fit_are_errors() {
    with_team(1, |team| {
        let matrix =
            |rows, columns| packed(team, Format::F32, rows, columns, &numbers(1, rows * columns));
        let [up, down, odd] = [matrix(4, 8), matrix(8, 4), matrix(4, 9)];
        let fits = Expert { gate: &up, up: &up, down: &down };
        let x = numbers(1, 8);
        let run = |all: &[Expert<'_>], ids: &[i32]| {
            let inputs = Experts {
                x: &x,
                tokens: 1,
                ids,
                weights: &[1.0],
                first_expert: 0,
                experts: all,
                activation: Activation::Silu,
            };
            experts(team, Isa::Portable, &inputs, &mut [0.0; 8])
        };
        assert!(run(&[fits], &[0]).is_ok());
        assert!(run(&[], &[0]).is_err());
        assert!(run(&[fits], &[0, 0]).is_err());
        assert!(run(&[fits, Expert { up: &odd, ..fits }], &[0]).is_err());
    });
}
