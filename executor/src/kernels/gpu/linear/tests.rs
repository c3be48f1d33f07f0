mod captured;
mod narrow;
mod spoilt;

use half::bf16;
use ir::op::{Activation, Then};
use ir::tensor::{DType, Format};

use super::{FLOAT_TOKENS, Linear, MAX_FUSED_TOKENS, ROW_PLANES, RmsNorm};
use crate::kernels::cpu::pack::PANEL;
use crate::kernels::cpu::testing::{Random, distance, erf_in_64_bits};
use crate::kernels::gpu::ahead::Region;
use crate::kernels::gpu::device::{Gpu, Span};
use crate::kernels::gpu::matrix::testing::{Sample, panels, row_major};
use crate::kernels::gpu::matrix::{Layout, Matrix};
use crate::kernels::gpu::portion::BLOCK;
use crate::kernels::gpu::testing::gpu;

/// One linear to check.
#[derive(Clone, Copy)]
struct Case<'a> {
    layout: Layout,
    format: Format,
    columns: usize,
    /// Of each matrix.
    rows: &'a [usize],
    /// Of the activations.
    element: DType,
    tokens: usize,
    norm: Option<Norm>,
    biased: bool,
    then: Then,
    residual: bool,
}

#[derive(Clone, Copy)]
struct Norm {
    scaled: bool,
    scale_offset: f32,
}

const SCALED: Norm = Norm { scaled: true, scale_offset: 0.0 };

const PLAIN: Case<'static> = Case {
    layout: Layout::Panels,
    format: Format::Bf16,
    columns: 256,
    rows: &[64],
    element: DType::F32,
    tokens: 1,
    norm: None,
    biased: false,
    then: Then::Nothing,
    residual: false,
};

const EPSILON: f32 = 1e-3;

fn floats(gpu: &Gpu, count: usize, seed: u64) -> (Span, Vec<f32>) {
    let values = Random(seed).floats(count);
    (gpu.upload(&values), values)
}

/// Activations, and what their bits stand for.
fn activations(gpu: &Gpu, element: DType, count: usize) -> (Span, Vec<f32>) {
    let (span, values) = floats(gpu, count, 3);
    if element == DType::F32 {
        return (span, values);
    }
    let narrow: Vec<bf16> = values.into_iter().map(bf16::from_f32).collect();
    (gpu.upload(&narrow), narrow.into_iter().map(bf16::to_f32).collect())
}

pub(in crate::kernels::gpu) fn activation_in_64_bits(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Relu => x.max(0.0),
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::Gelu => 0.5 * x * (1.0 + erf_in_64_bits(x / std::f64::consts::SQRT_2)),
        Activation::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
            0.5 * x * (1.0 + inner.tanh())
        }
    }
}

/// The outputs of a linear, in plain loops.
fn expected(
    case: &Case<'_>,
    x: &[f32],
    scale: Option<&[f32]>,
    samples: &[Sample],
    biases: &[Vec<f32>],
    residual: &[f32],
) -> Vec<Vec<f64>> {
    let columns = case.columns;
    let product = |matrix: usize, token: usize, row: usize| {
        let x = &x[token * columns..][..columns];
        let squares: f64 = x.iter().map(|&x| f64::from(x).powi(2)).sum();
        let root = (squares / columns as f64 + f64::from(EPSILON)).sqrt();
        let sum: f64 = (0..columns)
            .map(|column| {
                let x = match case.norm {
                    Some(norm) => {
                        let scale = scale.map_or(1.0, |scale| scale[column] + norm.scale_offset);
                        f64::from(x[column]) * f64::from(scale) / root
                    }
                    None => f64::from(x[column]),
                };
                x * samples[matrix].values[row * columns + column]
            })
            .sum();
        sum + if case.biased { f64::from(biases[matrix][row]) } else { 0.0 }
    };
    let each = |matrix: usize, then: &dyn Fn(usize, usize, f64) -> f64| {
        let mut out = Vec::new();
        for token in 0..case.tokens {
            for row in 0..case.rows[matrix] {
                let at = token * case.rows[matrix] + row;
                let value = then(token, row, product(matrix, token, row));
                out.push(value + if case.residual { f64::from(residual[at]) } else { 0.0 });
            }
        }
        out
    };
    match case.then {
        Then::Gate(activation) => {
            vec![each(0, &|token, row, gate| {
                activation_in_64_bits(activation, gate) * product(1, token, row)
            })]
        }
        Then::Activate(activation) => (0..case.rows.len())
            .map(|matrix| each(matrix, &|_, _, value| activation_in_64_bits(activation, value)))
            .collect(),
        Then::Nothing => {
            (0..case.rows.len()).map(|matrix| each(matrix, &|_, _, value| value)).collect()
        }
    }
}

fn check(gpu: &Gpu, case: Case<'_>, splits: Option<usize>) {
    let (x, x_values) = activations(gpu, case.element, case.tokens * case.columns);
    let (scale, scale_values) = floats(gpu, case.columns, 5);
    // As in plans, there is room for more tokens: kernels are told of all of it.
    let room = case.tokens + MAX_FUSED_TOKENS;
    let (residual, residual_values) = floats(gpu, room * case.rows[0], 7);
    let samples: Vec<Sample> = (0_u64..)
        .zip(case.rows)
        .map(|(i, &rows)| match case.layout {
            Layout::Panels => panels(gpu, case.format, rows, case.columns, 11 + i),
            Layout::RowMajor => row_major(gpu, case.format, rows, case.columns, 11 + i),
        })
        .collect();
    let biases: Vec<_> =
        (0_u64..).zip(case.rows).map(|(i, &rows)| floats(gpu, rows, 17 + i)).collect();
    let outputs = if matches!(case.then, Then::Gate(_)) { 1 } else { case.rows.len() };
    let outputs: Vec<Span> =
        case.rows[..outputs].iter().map(|rows| gpu.poisoned(room * rows * 4)).collect();
    let scaled = case.norm.is_some_and(|norm| norm.scaled);
    let is_narrow = case.element == DType::Bf16;
    let order = gpu.right_operands(&samples[0].matrix, case.tokens).filter(|_| is_narrow);
    let x = order.map_or(x.clone(), |order| gpu.ordered(&x, [case.tokens, case.columns], order));
    let linear = Linear {
        x: &x,
        element: case.element,
        order,
        tokens: case.tokens,
        norm: case.norm.map(|norm| RmsNorm {
            scale: norm.scaled.then_some(&scale),
            scale_offset: norm.scale_offset,
            epsilon: EPSILON,
        }),
        matrices: &samples.iter().map(|sample| &sample.matrix).collect::<Vec<&Matrix>>(),
        biases: &biases.iter().map(|(bias, _)| case.biased.then_some(bias)).collect::<Vec<_>>(),
        then: case.then,
        residual: case.residual.then_some(&residual),
        outputs: &outputs.iter().collect::<Vec<_>>(),
        made: DType::F32,
        made_order: None,
        ahead: &[],
        sum: None,
    };
    // Of floats, matrix instructions take two parts, which together are 2⁻¹⁷ off at most.
    let limit = match (case.element, case.format) {
        // Blocks are scaled in bf16.
        (DType::Bf16, Format::Q8 | Format::Q4) => 5e-3,
        _ if gpu.has_portions(&linear) => 8e-6,
        _ => 3e-6,
    };
    match splits {
        Some(splits) => gpu.multiply_rows(&linear, splits),
        None => gpu.linear(&linear).unwrap(),
    }
    let biases: Vec<Vec<f32>> = biases.iter().map(|(_, values)| values.clone()).collect();
    let scale = scaled.then_some(&scale_values[..]);
    let expected = expected(&case, &x_values, scale, &samples, &biases, &residual_values);
    let Case { layout, format, columns, rows, tokens, .. } = case;
    let what = format!("{layout:?} {format} {rows:?} by {columns}, {tokens} tokens");
    let halves: Vec<Span> =
        rows[..outputs.len()].iter().map(|rows| gpu.poisoned(room * rows * 2)).collect();
    if is_narrow {
        let outputs = &halves.iter().collect::<Vec<_>>();
        gpu.linear(&Linear { outputs, made: DType::Bf16, ..linear }).unwrap();
    }
    for ((out, half), expected) in outputs.iter().zip(&halves).zip(&expected) {
        let out = gpu.download::<f32>(out, expected.len());
        let distance = distance(&out, expected);
        assert!(distance < limit, "{distance} away: {what}");
        if is_narrow {
            let half = gpu.download::<bf16>(half, expected.len());
            assert!(out.iter().copied().map(bf16::from_f32).eq(half), "not rounded: {what}");
        }
    }
    if let ([half], Some(order), false) = (&halves[..], order, case.residual)
        && rows[0].is_multiple_of(BLOCK)
    {
        narrow::check_operands(gpu, &linear, order, half);
    }
}

#[test]
fn panels_of_every_format_and_shape() {
    let Some(gpu) = gpu() else { return };
    for format in Format::ALL {
        // Rows of whole panels, of one vector, of a part of one; columns of part blocks, of part vectors.
        for (rows, columns) in [(64, 256), (16, 128), (41, 96), (100, 36), (7, 31)] {
            check(&gpu, Case { format, rows: &[rows], columns, ..PLAIN }, None);
        }
        for tokens in [2, 3, 5, FLOAT_TOKENS] {
            check(&gpu, Case { format, rows: &[50], columns: 160, tokens, ..PLAIN }, None);
        }
    }
}

#[test]
fn rows_of_every_format_and_split() {
    let Some(gpu) = gpu() else { return };
    for format in [Format::F32, Format::F16, Format::Bf16] {
        let case = Case { layout: Layout::RowMajor, format, ..PLAIN };
        for tokens in [2, 3, 5, FLOAT_TOKENS] {
            check(&gpu, Case { rows: &[61], columns: 264, tokens, ..case }, None);
        }
        // Some after others.
        for tokens in [FLOAT_TOKENS + 1, 2 * FLOAT_TOKENS, MAX_FUSED_TOKENS - 3] {
            let case = Case { tokens, biased: true, norm: Some(SCALED), ..case };
            check(&gpu, Case { rows: &[61], columns: 264, residual: true, ..case }, None);
            let gate = Then::Gate(Activation::Silu);
            check(&gpu, Case { rows: &[24, 24], columns: 64, then: gate, ..case }, None);
            check(&gpu, Case { rows: &[7, 130], columns: 2048, ..case }, None);
        }
        for splits in [1, 2, ROW_PLANES] {
            let norm = Some(SCALED);
            check(&gpu, Case { rows: &[37], columns: 1048, norm, ..case }, Some(splits));
        }
    }
}

#[test]
fn rows_for_a_part_of_shared_memory_and_for_more_than_all() {
    let Some(gpu) = gpu() else { return };
    for (columns, tokens) in [(20_480, 1), (9000, FLOAT_TOKENS)] {
        for format in [Format::Q8, Format::Q4] {
            let case = Case { format, rows: &[7], columns, tokens, norm: Some(SCALED), ..PLAIN };
            check(&gpu, case, None);
        }
    }
}

#[test]
fn a_norm_in_front() {
    let Some(gpu) = gpu() else { return };
    for format in Format::ALL {
        for columns in [128, 100, 37] {
            let norm = Some(Norm { scaled: true, scale_offset: 1.0 });
            for tokens in [1, 2, FLOAT_TOKENS - 1] {
                check(&gpu, Case { format, columns, norm, tokens, rows: &[40], ..PLAIN }, None);
            }
        }
    }
    check(&gpu, Case { norm: Some(Norm { scaled: false, scale_offset: 0.0 }), ..PLAIN }, None);
}

#[test]
fn rows_for_more_cubes_than_processors() {
    let Some(gpu) = gpu() else { return };
    let rows = 8 * PANEL * gpu.processors() as usize + 7;
    for (rows, tokens) in [(rows, 1), (rows, 5), (rows / 2, FLOAT_TOKENS)] {
        let case = Case { columns: 64, tokens, norm: Some(SCALED), ..PLAIN };
        for format in [Format::Q8, Format::Q4] {
            check(&gpu, Case { format, rows: &[rows], ..case }, None);
            let then = Then::Gate(Activation::Silu);
            check(&gpu, Case { format, rows: &[rows, rows], then, ..case }, None);
        }
        check(&gpu, Case { layout: Layout::RowMajor, rows: &[rows], ..case }, None);
    }
}

#[test]
fn what_follows_the_products() {
    let Some(gpu) = gpu() else { return };
    use Activation::{Gelu, GeluTanh, Relu, Silu};
    for layout in [Layout::Panels, Layout::RowMajor] {
        for activation in [Relu, Silu, Gelu, GeluTanh] {
            let case = Case { layout, biased: true, residual: true, tokens: 2, ..PLAIN };
            let then = Then::Activate(activation);
            check(&gpu, Case { rows: &[40], then, ..case }, None);
            let then = Then::Gate(activation);
            check(&gpu, Case { rows: &[40, 40], then, ..case }, None);
        }
    }
}

#[test]
fn gates_of_every_format() {
    let Some(gpu) = gpu() else { return };
    for format in Format::ALL {
        let norm = Some(SCALED);
        let then = Then::Gate(Activation::Silu);
        let case = Case { format, rows: &[48, 48], then, norm, tokens: 3, ..PLAIN };
        check(&gpu, case, None);
        if format.float().is_some() {
            for splits in [1, ROW_PLANES] {
                check(&gpu, Case { layout: Layout::RowMajor, ..case }, Some(splits));
            }
        }
    }
}

#[test]
fn several_outputs_in_one_launch() {
    let Some(gpu) = gpu() else { return };
    for layout in [Layout::Panels, Layout::RowMajor] {
        let case = Case { layout, rows: &[70, 16, 33], biased: true, tokens: 2, ..PLAIN };
        check(&gpu, case, None);
        let norm = Some(SCALED);
        check(&gpu, Case { norm, ..case }, None);
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let Some(gpu) = gpu() else { return };
    let (x, _) = floats(&gpu, 256, 1);
    let [narrow, wide] = [128, 256].map(|columns| panels(&gpu, Format::F16, 16, columns, 1).matrix);
    let makes = |made, matrices: &[&Matrix], tokens, outputs: &[&Span]| {
        gpu.linear(&Linear {
            x: &x,
            element: DType::F32,
            order: None,
            tokens,
            norm: None,
            matrices,
            biases: &vec![None; matrices.len()],
            then: Then::Nothing,
            residual: None,
            outputs,
            made,
            made_order: None,
            ahead: &[],
            sum: None,
        })
    };
    let linear = |matrices: &[&Matrix], tokens, outputs: &[&Span]| {
        makes(DType::F32, matrices, tokens, outputs)
    };
    assert!(makes(DType::Bf16, &[&narrow], 1, &[&x]).is_err());
    assert!(linear(&[], 1, &[]).is_err());
    assert!(linear(&[&narrow, &wide], 1, &[&x, &x]).is_err());
    assert!(linear(&[&narrow], FLOAT_TOKENS + 1, &[&x]).is_err());
    assert!(linear(&[&narrow], 1, &[]).is_err());
}

#[test]
fn asking_ahead_changes_no_bit() {
    let Some(gpu) = gpu() else { return };
    if !gpu.asks_ahead() {
        eprintln!("skipped: the device asks for nothing ahead");
        return;
    }
    let (x, _) = floats(&gpu, 256, 3);
    let spans = [300 << 10, 80].map(|bytes| gpu.poisoned(bytes));
    let next = spans.each_ref().map(|span| Region::new(span, span.bytes()).unwrap());
    for sample in [
        row_major(&gpu, Format::Bf16, 4096, 256, 1),
        row_major(&gpu, Format::F16, 8, 256, 1),
        panels(&gpu, Format::Q8, 96, 256, 1),
    ] {
        let rows = sample.matrix.rows();
        let of = |ahead: &[Region]| {
            let out = gpu.poisoned(rows * 4);
            gpu.linear(&Linear {
                x: &x,
                element: DType::F32,
                order: None,
                tokens: 1,
                norm: None,
                matrices: &[&sample.matrix],
                biases: &[None],
                then: Then::Nothing,
                residual: None,
                outputs: &[&out],
                made: DType::F32,
                made_order: None,
                ahead,
                sum: None,
            })
            .unwrap();
            let out: Vec<f32> = gpu.download(&out, rows);
            out.into_iter().map(f32::to_bits).collect::<Vec<u32>>()
        };
        let expected = of(&[]);
        assert_eq!(of(&next), expected);
        assert_eq!(of(&next[1..]), expected);
    }
}
