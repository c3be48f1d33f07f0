//! Operations on Burn's tensors beside Burn's own, for tensors that do not lie as kernels read them, and what they refuse.
//! All forms that plans have are compared in `ops/tests.rs`.

use burn::tensor::{Device, Int, Tensor, TensorData, activation};
use burn_flex::{Flex, FlexTensor};
use ir::op::{NormKind, Then};
use ir::tensor::Format;

use super::*;
use crate::kernels::cpu::pack::{PackedMatrix, pack};
use crate::kernels::cpu::testing::{Random, with_team};

const TOKENS: usize = 5;
const FEATURES: usize = 96;
const OUTPUTS: usize = 40;

fn tensor(rows: usize, columns: usize, seed: u64) -> Tensor<2> {
    let values = Random(seed).floats(rows * columns);
    Tensor::from_data(TensorData::new(values, [rows, columns]), &Device::flex())
}

/// The same numbers in a tensor whose rows do not follow one another.
fn turned(x: &Tensor<2>) -> FlexTensor {
    let turned = x.clone().transpose().try_into_primitive::<Flex>().unwrap().to_contiguous();
    let turned = Tensor::<2>::from_primitive::<Flex>(turned).transpose();
    let turned = turned.try_into_primitive::<Flex>().unwrap();
    assert!(!turned.is_contiguous());
    turned
}

fn flex(x: &Tensor<2>) -> FlexTensor {
    x.clone().try_into_primitive::<Flex>().unwrap()
}

fn floats(x: &Tensor<2>) -> Vec<f32> {
    x.to_data().as_slice::<f32>().unwrap().to_vec()
}

fn packed(team: &Team, format: Format, weight: &Tensor<2>) -> PackedMatrix {
    let [rows, columns] = weight.dims();
    let values = floats(weight);
    let fill = |range: std::ops::Range<usize>, to: &mut [f32]| {
        to.copy_from_slice(&values[range.start * columns..range.end * columns]);
    };
    pack(team, format, rows, columns, &fill).unwrap()
}

/// Fails where a result is further from Burn's than some part of its largest element.
fn assert_near(made: FlexTensor, expected: &Tensor<2>, most: f32) {
    let made = Tensor::<2>::from_primitive::<Flex>(made);
    assert_eq!(made.dims(), expected.dims());
    let off: f32 = (made - expected.clone()).abs().max().into_scalar();
    let largest: f32 = expected.clone().abs().max().into_scalar();
    assert!(off <= most * largest, "{off} off, of {largest}");
}

#[test]
fn a_norm_and_a_gated_linear_are_what_burn_makes_of_them() {
    with_team(2, |team| {
        let (x, scale) = (tensor(TOKENS, FEATURES, 1), tensor(1, FEATURES, 2));
        let [gate, up] = [3, 4].map(|seed| tensor(OUTPUTS, FEATURES, seed));
        let normed =
            x.clone() / ((x.clone() * x.clone()).mean_dim(1) + 1e-5).sqrt() * scale.clone();
        let scale = floats(&scale);
        let norm = Norm {
            kind: NormKind::Rms,
            scale: Some(&scale),
            bias: None,
            epsilon: 1e-5,
            scale_offset: 0.0,
        };
        let by = |weight: &Tensor<2>| normed.clone().matmul(weight.clone().transpose());
        let gated = activation::silu(by(&gate)) * by(&up);
        for isa in Isa::available() {
            let cores = Cores { team, isa };
            let made = Flex::norm(cores, turned(&x), &norm, Some(flex(&x))).unwrap();
            assert_near(made, &(normed.clone() + x.clone()), 1e-5);
            for (format, most) in [(Format::F32, 1e-5), (Format::Bf16, 2e-2), (Format::Q8, 4e-2)] {
                let weights = [&gate, &up].map(|weight| packed(team, format, weight));
                let linear = Linear {
                    x: turned(&x),
                    tokens: TOKENS,
                    norm: Some(norm),
                    weights: &[&weights[0], &weights[1]],
                    biases: &[None, None],
                    then: Then::Gate(Activation::Silu),
                    residual: None,
                };
                let [made] = Flex::linear(cores, linear).unwrap().try_into().unwrap();
                assert_near(made, &gated, most);
            }
        }
    });
}

#[test]
fn weights_of_several_formats_share_an_input() {
    with_team(2, |team| {
        let x = tensor(TOKENS, FEATURES, 1);
        let formats = [Format::F32, Format::Bf16, Format::Bf16];
        let matrices = [2, 3, 4].map(|seed| tensor(OUTPUTS, FEATURES, seed));
        let weights: Vec<PackedMatrix> =
            formats.into_iter().zip(&matrices).map(|(format, m)| packed(team, format, m)).collect();
        let linear = Linear {
            x: flex(&x),
            tokens: TOKENS,
            norm: None,
            weights: &weights.iter().collect::<Vec<_>>(),
            biases: &[None; 3],
            then: Then::Nothing,
            residual: None,
        };
        let made = Flex::linear(Cores { team, isa: Isa::detect() }, linear).unwrap();
        assert_eq!(made.len(), 3);
        for (made, matrix) in made.into_iter().zip(&matrices) {
            assert_near(made, &x.clone().matmul(matrix.clone().transpose()), 2e-2);
        }
    });
}

#[test]
fn what_does_not_fit_is_refused() {
    with_team(1, |team| {
        let cores = Cores { team, isa: Isa::detect() };
        let x = tensor(TOKENS, FEATURES, 1);
        let matrix = packed(team, Format::F32, &tensor(OUTPUTS, FEATURES, 2));
        let table = Lookup::Packed(&matrix);
        let told = |result: Result<FlexTensor>| result.unwrap_err().to_string();
        let missing = told(Flex::look_up(cores, table, &[0, OUTPUTS as u32], 1.0));
        assert_eq!(missing, "row 40 is asked for of a table with 40 rows");
        let rows: Vec<u32> = (0..TOKENS as u32).collect();
        let missing = told(Flex::add_rows(cores, flex(&x), table, &rows, u32::MAX));
        assert!(missing.contains("with 40 rows"), "{missing}");
        let missing = told(Flex::select_rows(cores, flex(&x), &[TOKENS as u32]));
        assert_eq!(missing, "row 5 is asked for of an activation with 5 rows");
        let ids = Tensor::<2, Int>::from_data([[1_i32, 2]], &Device::flex());
        let ids = ids.try_into_primitive::<Flex>().unwrap();
        let wrong = told(Flex::activate(cores, Activation::Silu, ids));
        assert_eq!(wrong, "an activation is not f32");
        assert!(Flex::gate(cores, Activation::Silu, flex(&x), flex(&tensor(1, 3, 1))).is_err());
        assert!(Flex::route(cores, flex(&x), FEATURES + 1, true).is_err());
    });
}
