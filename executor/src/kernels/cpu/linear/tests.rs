mod tiles;

use half::{bf16, f16};
use ir::op::{Activation, NormKind};
use ir::tensor::Format;

use super::*;
use crate::kernels::cpu::encode::Encoding;
use crate::kernels::cpu::pack::pack;
use crate::kernels::cpu::product::BLOCK_COLUMNS as GROUP;
use crate::kernels::cpu::quantize::tests::{quantize_4, quantize_8};
use crate::kernels::cpu::quantize::{BLOCK, OFFSET_4, OFFSET_8};
use crate::kernels::cpu::testing::{Random, with_team};

/// Numbers between -1 and 1 that look random.
pub(in super::super) fn numbers(seed: u32, count: usize) -> Vec<f32> {
    // From 0 it would make nothing but zeros.
    Random(u64::from(seed) + 1).floats(count)
}

pub(in super::super) fn packed(
    team: &Team,
    format: Format,
    rows: usize,
    columns: usize,
    values: &[f32],
) -> PackedMatrix {
    pack(team, format, rows, columns, &|range, to| {
        to.copy_from_slice(&values[range.start * columns..range.end * columns]);
    })
    .unwrap()
}

/// What the weights are once they are held in a format, and unpacked for a kernel.
fn held(kernel: Kernel, columns: usize, values: &[f32]) -> Vec<f64> {
    let format = kernel.format;
    let round = |value: &f32| match format {
        Format::F16 => f16::from_f32(*value).to_f64(),
        Format::Bf16 | Format::Bf12 => bf16::from_f32(*value).to_f64(),
        Format::F32 | Format::Q8 | Format::Q4 => f64::from(*value),
    };
    let is_q8 = format == Format::Q8;
    // Codes of a block of 32, and their scale.
    let block = |values: &[f32]| {
        let mut whole = [0.0; BLOCK];
        whole[..values.len()].copy_from_slice(values);
        let (block, offset) = match is_q8 {
            true => (quantize_8(&whole), OFFSET_8),
            false => (quantize_4(&whole), OFFSET_4),
        };
        let codes = block.codes[..values.len()].iter().map(|&code| i32::from(code) - offset);
        (codes.map(f64::from).collect::<Vec<f64>>(), block.scale.to_f64())
    };
    // Blocks of 256 columns in bytes of one unit: the largest code is at most 127 of them.
    let group = |values: &[f32]| {
        let blocks: Vec<(Vec<f64>, f64)> = values.chunks(BLOCK).map(block).collect();
        let largest = blocks.iter().fold(0.0_f64, |most, (_, scale)| most.max(scale.abs()));
        let (steps, most) = if is_q8 { (32_768.0, 32_767.0_f32) } else { (2048.0, 32_512.0) };
        let (unit, inverse) = (largest * steps / f64::from(most), most / largest as f32);
        let bytes = |(codes, scale): (Vec<f64>, f64)| {
            let factor = f64::from((scale as f32 * inverse).round_ties_even()) / steps;
            codes.into_iter().map(move |code| (code * factor + 0.5).floor() * unit)
        };
        blocks.into_iter().flat_map(bytes).collect::<Vec<f64>>()
    };
    match format {
        Format::F32 | Format::F16 | Format::Bf16 | Format::Bf12 => {
            values.iter().map(round).collect()
        }
        Format::Q8 | Format::Q4 if kernel.encoding == Encoding::ByteTiles => {
            values.chunks(columns).flat_map(|row| row.chunks(GROUP).flat_map(group)).collect()
        }
        Format::Q8 | Format::Q4 => {
            let scaled = |values: &[f32]| {
                let (codes, scale) = block(values);
                codes.into_iter().map(move |code| code * scale)
            };
            values.chunks(columns).flat_map(|row| row.chunks(BLOCK).flat_map(scaled)).collect()
        }
    }
}

/// What the activations are once they are encoded for a kernel.
fn heard(kernel: Kernel, columns: usize, values: &[f32]) -> Vec<f64> {
    let together = if kernel.encoding == Encoding::ByteTiles { GROUP } else { BLOCK };
    match kernel.format {
        Format::F32 | Format::F16 => values.iter().map(|&value| f64::from(value)).collect(),
        Format::Bf16 | Format::Bf12 => {
            values.iter().map(|&value| bf16::from_f32(value).to_f64()).collect()
        }
        Format::Q8 | Format::Q4 => values
            .chunks(columns)
            .flat_map(|row| row.chunks(together))
            .flat_map(|block| {
                let largest = block.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
                let (scale, inverse) = (largest / 127.0, 127.0 / largest);
                block
                    .iter()
                    .map(move |value| f64::from((value * inverse).round_ties_even() * scale))
            })
            .collect(),
    }
}

/// `x · wᵀ` of every token and row, and the sum of magnitudes that bounds the error.
fn products(x: &[f64], w: &[f64], columns: usize) -> Vec<(f64, f64)> {
    x.chunks(columns)
        .flat_map(|x| {
            w.chunks(columns).map(move |w| {
                let terms = || x.iter().zip(w).map(|(x, w)| x * w);
                (terms().sum(), terms().map(f64::abs).sum())
            })
        })
        .collect()
}

/// What a linear of one matrix alone makes of some rows.
fn multiplied(team: &Team, isa: Isa, matrix: &PackedMatrix, x: &[f32]) -> Vec<f32> {
    let tokens = x.len() / matrix.columns();
    let mut out = vec![f32::NAN; tokens * matrix.rows()];
    let layer: Linear<'_> = Linear {
        x,
        tokens,
        norm: None,
        weights: &[matrix],
        biases: &[],
        then: Then::Nothing,
        residual: None,
    };
    linear(team, isa, &layer, &mut [&mut out]).unwrap();
    out
}

fn multiplies_right(team: &Team, isa: Isa, format: Format, [tokens, rows, columns]: [usize; 3]) {
    let (x, w) = (numbers(1, tokens * columns), numbers(2, rows * columns));
    multiplies_these_right(team, isa, format, columns, &x, &w);
}

/// Checks products of rows of activations with rows of weights, of `columns` columns each.
fn multiplies_these_right(
    team: &Team,
    isa: Isa,
    format: Format,
    columns: usize,
    x: &[f32],
    w: &[f32],
) {
    let (tokens, rows) = (x.len() / columns, w.len() / columns);
    let matrix = packed(team, format, rows, columns, w);
    let out = multiplied(team, isa, &matrix, x);
    // Sums of at most 256 terms and then of such sums: their rounding stays below a few units.
    let tolerance = 1e-6;
    let kernel = Kernel::choose(isa, format, tokens);
    let wanted = products(&heard(kernel, columns, x), &held(kernel, columns, w), columns);
    for (i, (&found, (wanted, magnitude))) in out.iter().zip(wanted).enumerate() {
        assert!(
            (f64::from(found) - wanted).abs() <= tolerance * magnitude + 1e-7,
            "{isa} {format} {tokens}x{rows}x{columns} at {i}: {found} for {wanted} of {magnitude}"
        );
    }
}

#[test]
fn every_level_and_format_multiplies_right() {
    with_team(2, |team| {
        for isa in Isa::available() {
            for format in Format::ALL {
                for tokens in [1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 16, 25, 33, 40] {
                    multiplies_right(team, isa, format, [tokens, 70, 130]);
                }
                for rows in [1, 15, 16, 17, 31, 32, 33, 48, 49, 64, 100] {
                    multiplies_right(team, isa, format, [3, rows, 64]);
                }
                for columns in [1, 2, 3, 31, 32, 33, 63, 65, 96, 100, 511, 600, 1100] {
                    multiplies_right(team, isa, format, [7, 33, columns]);
                    multiplies_right(team, isa, format, [20, 16, columns]);
                }
            }
        }
    });
}

/// Sums of products that are all as large as codes make them, of either sign.
#[test]
fn largest_codes_do_not_overflow() {
    let (rows, columns) = (33, 2 * BLOCK);
    with_team(2, |team| {
        for (isa, tokens) in
            Isa::available().into_iter().flat_map(|isa| [1, 4, 8].map(|n| (isa, n)))
        {
            for sign in [1.0, -1.0] {
                let x = vec![sign; tokens * columns];
                let mut w = vec![1.0; rows * columns];
                w.chunks_mut(2 * columns).for_each(|rows| rows[..columns].fill(-1.0));
                multiplies_these_right(team, isa, Format::Q8, columns, &x, &w);
                // One code of 0, and all others 15.
                w.fill(7.0);
                w.chunks_mut(BLOCK).for_each(|block| block[5] = -8.0);
                multiplies_these_right(team, isa, Format::Q4, columns, &x, &w);
            }
        }
    });
}

/// Rows of which one weight is so large that the others have fewer bits in 12-bit panels, or none.
#[test]
fn weights_far_below_the_largest_of_their_row_count() {
    let (rows, columns) = (33, 130);
    with_team(2, |team| {
        for (isa, tokens) in
            Isa::available().into_iter().flat_map(|isa| [1, 3, 8, 40].map(|n| (isa, n)))
        {
            let mut x = numbers(1, tokens * columns);
            let mut w = numbers(2, rows * columns);
            w.iter_mut().for_each(|weight| *weight *= 1.0 / f32::from(1_u16 << 15));
            // Nothing is multiplied with the large ones, so that the others are all there is.
            x.chunks_mut(columns).for_each(|x| x[5] = 0.0);
            w.chunks_mut(columns).for_each(|row| row[5] = 1.0);
            let matrix = packed(team, Format::Bf12, rows, columns, &w);
            let out = multiplied(team, isa, &matrix, &x);
            let kernel = Kernel::choose(isa, Format::Bf16, tokens);
            let [x, w] = [heard(kernel, columns, &x), held(kernel, columns, &w)];
            let wanted = products(&x, &w, columns);
            // A weight is off by half of 2^-21 of the largest at most, and so are sums by that many times the inputs.
            let tolerance = columns as f64 / f64::from(1 << 22);
            for (&found, (wanted, magnitude)) in out.iter().zip(wanted) {
                assert!(magnitude > 20.0 * tolerance, "{magnitude}");
                let off = (f64::from(found) - wanted).abs();
                assert!(off <= tolerance, "{isa} {tokens}: {found} for {wanted}");
            }
        }
    });
}

fn reference_activation(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Relu => x.max(0.0),
        Activation::Silu => x / (1.0 + (-x).exp()),
        // The integral of the density, by Simpson's rule.
        Activation::Gelu => {
            let density = |t: f64| (-t * t / 2.0).exp() / std::f64::consts::TAU.sqrt();
            let step = x / 1000.0;
            let inner: f64 = (1..1000)
                .map(|i| density(step * f64::from(i)) * if i % 2 == 1 { 4.0 } else { 2.0 })
                .sum();
            x * (0.5 + (density(0.0) + inner + density(x)) * step / 3.0)
        }
        Activation::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
            0.5 * x * (1.0 + inner.tanh())
        }
    }
}

fn reference_norm(norm: &Norm<'_>, x: &[f32]) -> Vec<f32> {
    let x: Vec<f64> = x.iter().map(|&value| f64::from(value)).collect();
    let count = x.len() as f64;
    let mean = match norm.kind {
        NormKind::Rms => 0.0,
        NormKind::Layer => x.iter().sum::<f64>() / count,
    };
    let variance = x.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / count;
    let factor = 1.0 / (variance + f64::from(norm.epsilon)).sqrt();
    (0..x.len())
        .map(|i| {
            let scale = norm.scale.map_or(1.0, |scale| f64::from(scale[i] + norm.scale_offset));
            let bias = norm.bias.map_or(0.0, |bias| f64::from(bias[i]));
            ((x[i] - mean) * factor * scale + bias) as f32
        })
        .collect()
}

/// Norm, bias, activation or gate, and residual against their definitions, in f32.
#[test]
fn what_surrounds_a_product_is_done_with_it() {
    let (tokens, rows, columns) = (9, 50, 90);
    let [x, scale, bias] = [1, 2, 3].map(|seed| numbers(seed, tokens * columns));
    let [gate, up] = [4, 5].map(|seed| numbers(seed, rows * columns));
    let [gate_bias, up_bias, residual] = [6, 7, 8].map(|seed| numbers(seed, tokens * rows));
    let rms = Norm {
        kind: NormKind::Rms,
        scale: Some(&scale[..columns]),
        bias: None,
        epsilon: 1e-5,
        scale_offset: 1.0,
    };
    let layer = Norm {
        kind: NormKind::Layer,
        scale: Some(&scale[..columns]),
        bias: Some(&bias[..columns]),
        epsilon: 1e-5,
        scale_offset: 0.0,
    };
    let plain = Norm { kind: NormKind::Layer, scale: None, bias: None, ..rms };
    let activations = [Activation::Relu, Activation::Silu, Activation::Gelu, Activation::GeluTanh];
    with_team(2, |team| {
        let matrices = [&gate, &up].map(|w| packed(team, Format::F32, rows, columns, w));
        for isa in Isa::available() {
            for norm in [None, Some(rms), Some(layer), Some(plain)] {
                let x64: Vec<f64> = match norm {
                    Some(norm) => x
                        .chunks(columns)
                        .flat_map(|row| reference_norm(&norm, row))
                        .map(f64::from)
                        .collect(),
                    None => x.iter().map(|&value| f64::from(value)).collect(),
                };
                let [gates, ups] = [&gate, &up].map(|w| {
                    let w: Vec<f64> = w.iter().map(|&value| f64::from(value)).collect();
                    products(&x64, &w, columns)
                });
                for activation in activations {
                    for then in [Then::Nothing, Then::Activate(activation), Then::Gate(activation)]
                    {
                        let is_gate = matches!(then, Then::Gate(_));
                        let count = if is_gate { 2 } else { 1 };
                        let mut out = vec![f32::NAN; tokens * rows];
                        let inputs: Linear<'_> = Linear {
                            x: &x,
                            tokens,
                            norm,
                            weights: &matrices.each_ref()[..count],
                            biases: &[Some(&gate_bias[..rows]), Some(&up_bias[..rows])][..count],
                            then,
                            residual: Some(&residual),
                        };
                        linear(team, isa, &inputs, &mut [&mut out]).unwrap();
                        for (i, &found) in out.iter().enumerate() {
                            let bias = |bias: &[f32]| f64::from(bias[i % rows]);
                            let gate = gates[i].0 + bias(&gate_bias);
                            let up = ups[i].0 + bias(&up_bias);
                            let wanted = f64::from(residual[i])
                                + match then {
                                    Then::Nothing => gate,
                                    Then::Activate(activation) => {
                                        reference_activation(activation, gate)
                                    }
                                    Then::Gate(activation) => {
                                        reference_activation(activation, gate) * up
                                    }
                                };
                            let error = (f64::from(found) - wanted).abs();
                            assert!(
                                error <= 4e-6 * (wanted.abs() + up.abs() + gate.abs()),
                                "{isa} {norm:?} {then:?} at {i}: {found} for {wanted}"
                            );
                        }
                    }
                }
            }
        }
    });
}

/// Three matrices at once give what each gives alone, for every number of members and again.
#[test]
fn results_do_not_depend_on_who_computes_what() {
    let (tokens, columns, sizes) = (29, 2100, [96, 33, 16]);
    let x = numbers(1, tokens * columns);
    let weights: Vec<Vec<f32>> =
        sizes.iter().map(|&rows| numbers(rows as u32, rows * columns)).collect();
    for format in Format::ALL {
        let mut all: Vec<Vec<Vec<f32>>> = Vec::new();
        for members in [1, 2, 3, 2] {
            with_team(members, |team| {
                let matrices: Vec<PackedMatrix> = sizes
                    .iter()
                    .zip(&weights)
                    .map(|(&rows, w)| packed(team, format, rows, columns, w))
                    .collect();
                let run = |x: &[f32], tokens: usize, chosen: &[usize]| {
                    let mut outs: Vec<Vec<f32>> =
                        chosen.iter().map(|&i| vec![f32::NAN; tokens * sizes[i]]).collect();
                    let chosen: Vec<&PackedMatrix> = chosen.iter().map(|&i| &matrices[i]).collect();
                    let inputs: Linear<'_> = Linear {
                        x,
                        tokens,
                        norm: None,
                        weights: &chosen,
                        biases: &[],
                        then: Then::Nothing,
                        residual: None,
                    };
                    let mut slices: Vec<&mut [f32]> =
                        outs.iter_mut().map(Vec::as_mut_slice).collect();
                    linear(team, Isa::detect(), &inputs, &mut slices).unwrap();
                    outs
                };
                let together = run(&x, tokens, &[0, 1, 2]);
                let apart: Vec<Vec<f32>> = (0..3).flat_map(|i| run(&x, tokens, &[i])).collect();
                assert_eq!(together, apart, "{format}");
                if Kernel::choose(Isa::detect(), format, 40)
                    == Kernel::choose(Isa::detect(), format, 1)
                {
                    let alone = run(&x[5 * columns..][..columns], 1, &[0]);
                    assert_eq!(alone[0], together[0][5 * 96..6 * 96], "{format}");
                }
                all.push(together);
            });
        }
        assert!(all.iter().all(|outs| *outs == all[0]), "{format}");
    }
}

#[test]
fn sizes_that_do_not_fit_are_errors() {
    with_team(1, |team| {
        let matrix = packed(team, Format::F32, 4, 8, &numbers(1, 32));
        let other = packed(team, Format::F32, 4, 9, &numbers(1, 36));
        let x = numbers(2, 16);
        let fits: Linear<'_> = Linear {
            x: &x,
            tokens: 2,
            norm: None,
            weights: &[&matrix],
            biases: &[],
            then: Then::Nothing,
            residual: None,
        };
        let fails = |inputs: Linear<'_>, elements: usize| {
            let mut out = vec![0.0; elements];
            linear(team, Isa::Portable, &inputs, &mut [&mut out]).is_err()
        };
        assert!(!fails(fits, 8));
        assert!(fails(fits, 7));
        assert!(fails(Linear { tokens: 3, ..fits }, 12));
        assert!(fails(Linear { weights: &[&matrix, &other], ..fits }, 8));
        assert!(fails(Linear { biases: &[Some(&x[..3])], ..fits }, 8));
        assert!(fails(Linear { residual: Some(&x), ..fits }, 8));
        assert!(fails(Linear { then: Then::Gate(Activation::Silu), ..fits }, 8));
    });
}
