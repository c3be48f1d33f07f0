//! Every operation beside its plain form in Burn's operations, on the same numbers.

use burn::tensor::{DType, Device, Int, Tensor, TensorData, activation, s};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use ir::op::{Activation, NormKind, Pairing, Then};
use ir::tensor::Format;

use super::*;
use crate::kernels::cpu::testing::{Random, distance};
use crate::kernels::gpu::attention::testing::{noise, plain};
use crate::kernels::gpu::device::Gpu;
use crate::kernels::gpu::matrix::testing::{packed, panels_of, unpacked};
use crate::kernels::gpu::testing::gpu;

/// Random numbers, `[rows, columns]`, for Burn on the host.
fn random(rows: usize, columns: usize, seed: u64) -> Tensor<2> {
    host(Random(seed).floats(rows * columns), rows, columns)
}

fn host(values: Vec<f32>, rows: usize, columns: usize) -> Tensor<2> {
    Tensor::from_data(TensorData::new(values, [rows, columns]), &Device::flex())
}

fn numbers(x: &Tensor<2>) -> Vec<f32> {
    x.to_data().as_slice::<f32>().unwrap().to_vec()
}

/// The same on the GPU.
fn sent(gpu: &Gpu, x: &Tensor<2>) -> CubeTensor {
    let [rows, columns] = x.dims();
    let (tensor, span) = gpu.fresh(rows, columns, DType::F32);
    gpu.write(&span, bytemuck::cast_slice(&numbers(x))).unwrap();
    tensor
}

/// Numbers on the GPU.
fn ints(gpu: &Gpu, values: &[i32], columns: usize) -> CubeTensor {
    let (tensor, span) = gpu.fresh(values.len() / columns, columns, DType::I32);
    gpu.write(&span, bytemuck::cast_slice(values)).unwrap();
    tensor
}

/// Fails where a result is further from Burn's than a part of its largest element.
fn assert_near(made: CubeTensor, expected: &Tensor<2>, most: f64, what: &str) {
    let made = Tensor::<2>::from_primitive::<CubeBackend>(made).into_data();
    assert_eq!(made.shape().as_slice(), expected.dims(), "{what}");
    let expected: Vec<f64> = numbers(expected).into_iter().map(f64::from).collect();
    let off = distance(made.as_slice::<f32>().unwrap(), &expected);
    assert!(off <= most, "{what}: {off} off, of {most}");
}

/// What matrix instructions round to 16 bits.
fn rounded(gpu: &Gpu, exact: f64) -> f64 {
    if gpu.is_cuda() { 2e-2 } else { exact }
}

#[test]
fn norms_gates_and_caps() {
    let Some(gpu) = gpu() else { return };
    let [x, up, residual] = [1, 2, 3].map(|seed| random(7, 72, seed));
    let [scale, bias, gate] = [random(1, 72, 4), random(1, 72, 5), random(7, 1, 6)];
    let send = |x: &Tensor<2>| sent(&gpu, x);
    for kind in [NormKind::Rms, NormKind::Layer] {
        let centred = match kind {
            NormKind::Rms => x.clone(),
            NormKind::Layer => x.clone() - x.clone().mean_dim(1),
        };
        let variance = (centred.clone() * centred.clone()).mean_dim(1);
        let normed = centred / (variance + 1e-5).sqrt() * (scale.clone() + 1.0) + bias.clone();
        let norm = Norm {
            kind,
            scale: Some(send(&scale)),
            bias: Some(send(&bias)),
            scale_offset: 1.0,
            epsilon: 1e-5,
        };
        let made = CubeBackend::norm(send(&x), &norm, Some(send(&residual))).unwrap();
        assert_near(made, &(normed + residual.clone()), 1e-5, "a norm");
    }
    let activated = activation::silu(x.clone());
    let made = CubeBackend::activate(Activation::Silu, send(&x), None).unwrap();
    assert_near(made, &activated, 1e-5, "an activation");
    let made = CubeBackend::activate(Activation::Silu, send(&x), Some(send(&up))).unwrap();
    assert_near(made, &(activated * up), 1e-5, "a gate");
    let made = CubeBackend::sigmoid_gate(send(&gate), send(&x)).unwrap();
    assert_near(made, &(activation::sigmoid(gate) * x.clone()), 1e-5, "a sigmoid");
    let capped = (x.clone() / 0.5).tanh() * 0.5;
    assert_near(CubeBackend::soft_cap(0.5, send(&x)).unwrap(), &capped, 1e-5, "a cap");
}

#[test]
fn rows_of_tables_and_of_activations() {
    let Some(gpu) = gpu() else { return };
    let (table, x) = (random(50, 64, 1), random(3, 64, 2));
    let rows = [4, 40, 0];
    let chosen = Tensor::<1, Int>::from_data(rows, &Device::flex());
    let ids = || ints(&gpu, &rows, 3);
    // A table as it lies, and one in panels.
    let whole = CubeBackend::matrix(sent(&gpu, &table)).unwrap();
    let panels = panels_of(&gpu, Format::F32, 50, 64, &numbers(&table)).matrix;
    for matrix in [&whole, &panels] {
        let made = CubeBackend::look_up(matrix, ids(), 3.0).unwrap();
        assert_near(made, &(table.clone().select(0, chosen.clone()) * 3.0), 1e-6, "a table");
        let made = CubeBackend::add_rows(sent(&gpu, &x), matrix, ids(), 2).unwrap();
        let expected = table.clone().select(0, chosen.clone() + 2) + x.clone();
        assert_near(made, &expected, 1e-6, "positions");
    }
    let made = CubeBackend::select_rows(sent(&gpu, &table), ids()).unwrap();
    assert_near(made, &table.select(0, chosen), 0.0, "rows");
}

/// A linear of `tokens` tokens with all that may surround it, with weights whose values are known.
fn check_linear(gpu: &Gpu, tokens: usize, weights: &[(Matrix, Tensor<2>)], what: &str) {
    let [_, columns] = weights[0].1.dims();
    let (x, scale) = (random(tokens, columns, 1), random(1, columns, 2));
    let normed = x.clone() / ((x.clone() * x.clone()).mean_dim(1) + 1e-5).sqrt() * scale.clone();
    let matrices: Vec<&Matrix> = weights.iter().map(|(matrix, _)| matrix).collect();
    let bias = |index: usize| random(1, matrices[index].rows(), 3 + index as u64);
    let by =
        |index: usize| normed.clone().matmul(weights[index].1.clone().transpose()) + bias(index);
    let residual = random(tokens, matrices[0].rows(), 9);
    let call = |matrices, then, residual: Option<&Tensor<2>>| {
        let norm = Norm {
            kind: NormKind::Rms,
            scale: Some(sent(gpu, &scale)),
            bias: None,
            scale_offset: 0.0,
            epsilon: 1e-5,
        };
        let biases = [0, 1].map(|index| Some(sent(gpu, &bias(index))));
        let linear = Linear {
            x: sent(gpu, &x),
            norm: Some(norm),
            matrices,
            biases: &biases[..matrices.len()],
            then,
            residual: residual.map(|residual| sent(gpu, residual)),
        };
        CubeBackend::linear(linear).unwrap()
    };
    let most = rounded(gpu, 2e-5);
    let made = call(&matrices, Then::Nothing, None);
    assert_eq!(made.len(), 2);
    for (index, made) in made.into_iter().enumerate() {
        assert_near(made, &by(index), most, what);
    }
    let made = call(&matrices[..1], Then::Activate(Activation::Silu), Some(&residual));
    let expected = activation::silu(by(0)) + residual.clone();
    assert_near(made.into_iter().next().unwrap(), &expected, most, what);
    let made = call(&matrices, Then::Gate(Activation::Silu), None);
    let [made] = made.try_into().unwrap();
    assert_near(made, &(activation::silu(by(0)) * by(1)), 2.0 * most, what);
}

#[test]
fn linears_of_few_and_of_many_tokens() {
    let Some(gpu) = gpu() else { return };
    let (rows, columns) = (96, 128);
    let wide = [11, 12].map(|seed| random(rows, columns, seed));
    let whole = wide.clone().map(|w| (CubeBackend::matrix(sent(&gpu, &w)).unwrap(), w));
    for tokens in [1, 8, 40, 130] {
        check_linear(&gpu, tokens, &whole, &format!("{tokens} tokens, as they lie"));
        for format in [Format::F16, Format::Q8, Format::Q4] {
            let weights = wide.each_ref().map(|w| {
                let sample = panels_of(&gpu, format, rows, columns, &numbers(w));
                let values = sample.values.iter().map(|&value| value as f32).collect();
                (sample.matrix, host(values, rows, columns))
            });
            check_linear(&gpu, tokens, &weights, &format!("{tokens} tokens, {format}"));
        }
    }
}

/// Compiled kernels are found on disk by a hash, which must tell apart which operands there are.
#[test]
fn one_operand_is_not_taken_for_another() {
    let Some(gpu) = gpu() else { return };
    let (rows, columns) = (64, 64);
    let weight = random(rows, columns, 1);
    let matrix = CubeBackend::matrix(sent(&gpu, &weight)).unwrap();
    for tokens in [5, 70] {
        let x = random(tokens, columns, 2);
        let [first, second] = [random(1, columns, 3), random(1, columns, 4)];
        let term = random(tokens, columns, 5);
        let send = |x: Option<&Tensor<2>>| x.map(|x| sent(&gpu, x));
        let zero = Tensor::zeros([1, columns], &Device::flex());
        for (bias, residual) in
            [(None, Some(&term)), (Some(&first), None), (Some(&first), Some(&term)), (None, None)]
        {
            let linear = Linear {
                x: sent(&gpu, &x),
                norm: None,
                matrices: &[&matrix],
                biases: &[send(bias)],
                then: Then::Nothing,
                residual: send(residual),
            };
            let [made] = CubeBackend::linear(linear).unwrap().try_into().unwrap();
            let product = x.clone().matmul(weight.clone().transpose());
            let expected = product + bias.unwrap_or(&zero).clone();
            let expected = expected + residual.unwrap_or(&zero).clone();
            let what = format!("{tokens} tokens: {:?}", (bias.is_some(), residual.is_some()));
            assert_near(made, &expected, rounded(&gpu, 2e-5), &what);
        }
        for (scale, bias, residual) in [
            (Some(&first), None, None),
            (None, Some(&second), None),
            (None, None, Some(&term)),
            (Some(&first), Some(&second), None),
            (Some(&first), None, Some(&term)),
            (None, Some(&second), Some(&term)),
        ] {
            let centred = x.clone() - x.clone().mean_dim(1);
            let variance = (centred.clone() * centred.clone()).mean_dim(1);
            let one = zero.clone() + 1.0;
            let expected = centred / (variance + 1e-5).sqrt() * scale.unwrap_or(&one).clone()
                + bias.unwrap_or(&zero).clone()
                + residual.unwrap_or(&zero).clone();
            let norm = Norm {
                kind: NormKind::Layer,
                scale: send(scale),
                bias: send(bias),
                scale_offset: 0.0,
                epsilon: 1e-5,
            };
            let made = CubeBackend::norm(sent(&gpu, &x), &norm, send(residual)).unwrap();
            let what = (scale.is_some(), bias.is_some(), residual.is_some());
            assert_near(made, &expected, 1e-5, &format!("{tokens} tokens: {what:?}"));
        }
    }
}

/// Rotates the halves of every head of `x: [tokens, heads · dims]` by angles `[tokens, dims / 2]`.
fn turned(x: &Tensor<2>, angles: &Tensor<2>) -> Tensor<2> {
    let ([_, width], [_, half]) = (x.dims(), angles.dims());
    let (cosine, sine) = (angles.clone().cos(), angles.clone().sin());
    let heads = (0..width).step_by(2 * half).flat_map(|start| {
        let a = x.clone().slice(s![.., start..start + half]);
        let b = x.clone().slice(s![.., start + half..start + 2 * half]);
        let first = a.clone() * cosine.clone() - b.clone() * sine.clone();
        [first, b * cosine.clone() + a * sine.clone()]
    });
    Tensor::cat(heads.collect(), 1)
}

#[test]
fn attention_over_a_paged_cache() {
    let Some(gpu) = gpu() else { return };
    let (heads, kv_heads, dims, block_tokens) = (4, 2, 32, 16);
    let form = plain(heads as u32, kv_heads as u32, dims as u32);
    let (prompt, blocks) = (37, [3, 0, 2]);
    let all = prompt + 1;
    let make = |width: usize, seed| host(noise(all * width, seed), all, width);
    let (q, k, v) = (make(heads * dims, 1), make(kv_heads * dims, 2), make(kv_heads * dims, 3));
    let angles: Vec<f32> = (0..all)
        .flat_map(|position| (0..dims / 2).map(move |i| position as f32 * 0.5_f32.powi(i as i32)))
        .collect();
    let angles = host(angles, all, dims / 2);
    let table = Tensor::cat(vec![angles.clone().cos(), angles.clone().sin()], 1);
    // Burn's: a head of queries sees the key head of its group.
    let (turned_q, turned_k) = (turned(&q, &angles), turned(&k, &angles));
    let hidden: Vec<bool> = (0..all).flat_map(|i| (0..all).map(move |j| j > i)).collect();
    let hidden = Tensor::<2, burn::tensor::Bool>::from_data(
        TensorData::new(hidden, [all, all]),
        &Device::flex(),
    );
    let head =
        |x: &Tensor<2>, index: usize| x.clone().slice(s![.., index * dims..(index + 1) * dims]);
    let seen = (0..heads).map(|index| {
        let kv_head = index / (heads / kv_heads);
        let scores = head(&turned_q, index).matmul(head(&turned_k, kv_head).transpose());
        let scores = (scores * form.scale).mask_fill(hidden.clone(), f32::NEG_INFINITY);
        activation::softmax(scores, 1).matmul(head(&v, kv_head))
    });
    let expected = Tensor::cat(seen.collect(), 1);
    for dtype in [DType::F32, DType::F16] {
        let count = 4 * kv_heads * block_tokens * dims;
        let cache = [0, 1].map(|_| {
            let (mut tensor, span) = gpu.fresh(count / dims, dims, dtype);
            gpu.write(&span, &vec![0xff; count * dtype.size()]).unwrap();
            let shape = burn::tensor::Shape::new([4, kv_heads, block_tokens, dims]);
            tensor = CubeTensor::new_contiguous(
                tensor.client,
                tensor.device,
                shape,
                tensor.handle,
                dtype,
            );
            tensor
        });
        let run = |range: std::ops::Range<usize>| {
            let tokens: Vec<i32> = range.clone().map(|token| token as i32).collect();
            let count = tokens.len();
            let of = |x: &Tensor<2>| sent(&gpu, &x.clone().slice(s![range.clone(), ..]));
            let call = Attention {
                form: &form,
                queries: of(&q),
                keys: of(&k),
                values: of(&v),
                head_norms: Default::default(),
                rotation: Some(Rotation {
                    pairing: Pairing::Halves,
                    table: sent(&gpu, &table),
                    rows: ints(&gpu, &tokens, count),
                }),
                cache: cache.clone(),
                tokens: Tokens {
                    sequence: ints(&gpu, &vec![0; count], count),
                    position: ints(&gpu, &tokens, count),
                    parts: ints(&gpu, &[0, count as i32, range.start as i32], 3),
                    blocks: ints(&gpu, &blocks, 3),
                    longest: range.end,
                    is_decode: count == 1,
                },
            };
            // SAFETY: there are four blocks, and as many rows of the table as there are positions.
            let made = unsafe { CubeBackend::attention(call) }.unwrap();
            let most = if gpu.is_cuda() || dtype == DType::F16 { 1e-2 } else { 2e-5 };
            let expected = expected.clone().slice(s![range.clone(), ..]);
            assert_near(made, &expected, most, &format!("{range:?} in {dtype:?}"));
        };
        run(0..prompt);
        run(prompt..all);
    }
}

#[test]
fn experts_that_a_router_chooses() {
    let Some(gpu) = gpu() else { return };
    let (experts, features, intermediate, used) = (6, 64, 96, 2);
    for tokens in [3, 50] {
        let (x, logits) = (random(tokens, features, 1), random(tokens, experts, 2));
        let weights = activation::softmax(logits.clone(), 1);
        let (best, ids) = weights.topk_with_indices(used, 1);
        let best = best.clone() / best.sum_dim(1);
        let (made_ids, made) = CubeBackend::route(sent(&gpu, &logits), used, true).unwrap();
        assert_near(made.clone(), &best, 1e-5, "weights of experts");
        let found = Tensor::<2, Int>::from_primitive::<CubeBackend>(made_ids.clone()).into_data();
        let found = found.as_slice::<i32>().unwrap().to_vec();
        assert_eq!(found, ids.into_data().convert::<i32>().as_slice::<i32>().unwrap());
        let stack = |rows: usize, columns: usize, seed: u64| {
            let bytes: Vec<Vec<u8>> = (0..experts as u64)
                .map(|expert| packed(Format::Q8, rows, columns, seed + expert))
                .collect();
            let values = bytes.iter().map(|bytes| {
                let values = unpacked(bytes, Format::Q8, rows, columns);
                host(values.into_iter().map(|value| value as f32).collect(), rows, columns)
            });
            let values: Vec<Tensor<2>> = values.collect();
            let data = gpu.upload::<u8>(&bytes.concat());
            (Stack::new(Format::Q8, experts, rows, columns, data).unwrap(), values)
        };
        let (gate, up) = (stack(intermediate, features, 10), stack(intermediate, features, 20));
        let down = stack(features, intermediate, 30);
        let call = Experts {
            x: sent(&gpu, &x),
            ids: made_ids,
            weights: made,
            first_expert: 0,
            stacks: [&gate.0, &up.0, &down.0],
            activation: Activation::Silu,
        };
        let by = |x: &Tensor<2>, matrix: &Tensor<2>| x.clone().matmul(matrix.clone().transpose());
        let rows = found.chunks_exact(used).enumerate().map(|(token, chosen)| {
            let x = x.clone().slice(s![token..token + 1, ..]);
            let outputs = chosen.iter().enumerate().map(|(slot, &expert)| {
                let expert = expert as usize;
                let inner = activation::silu(by(&x, &gate.1[expert])) * by(&x, &up.1[expert]);
                let weight = best.clone().slice(s![token..token + 1, slot..slot + 1]);
                by(&inner, &down.1[expert]) * weight
            });
            outputs.reduce(|sum, output| sum + output).unwrap()
        });
        let expected = Tensor::cat(rows.collect(), 0);
        let made = CubeBackend::experts(call).unwrap();
        assert_near(made, &expected, rounded(&gpu, 2e-5), &format!("{tokens} tokens"));
    }
}

#[test]
fn the_most_likely_token_is_burns_argmax() {
    let Some(gpu) = gpu() else { return };
    let logits = random(3, 5000, 1);
    let temperatures = host(vec![1.0; 3], 3, 1);
    let made = CubeBackend::shortlist(sent(&gpu, &logits), sent(&gpu, &temperatures)).unwrap();
    let made = Tensor::<2>::from_primitive::<CubeBackend>(made).into_data();
    let lists: Vec<f32> = made.as_slice::<f32>().unwrap().to_vec();
    let best: Vec<i64> =
        logits.argmax(1).into_data().convert::<i64>().as_slice::<i64>().unwrap().to_vec();
    assert_eq!(lists.len(), 3 * 260);
    for (list, best) in lists.chunks_exact(260).zip(best) {
        assert_eq!(list[128] as i64, best);
        assert!(list[..128].is_sorted_by(|a, b| a >= b));
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let Some(gpu) = gpu() else { return };
    let (x, matrix) = (random(2, 64, 1), random(32, 48, 2));
    let matrix = CubeBackend::matrix(sent(&gpu, &matrix)).unwrap();
    let told = |result: Result<CubeTensor>| format!("{:#}", result.err().unwrap());
    let linear = Linear {
        x: sent(&gpu, &x),
        norm: None,
        matrices: &[&matrix],
        biases: &[None],
        then: Then::Nothing,
        residual: None,
    };
    let wrong = CubeBackend::linear(linear).map(|mut made| made.remove(0));
    assert_eq!(told(wrong), "64 features come to matrices of 48 columns");
    let wrong = CubeBackend::soft_cap(1.0, ints(&gpu, &[1, 2], 2));
    assert_eq!(told(wrong), "a tensor has elements of I32, not F32");
    let wrong = CubeBackend::activate(
        Activation::Silu,
        sent(&gpu, &x),
        Some(sent(&gpu, &random(1, 64, 3))),
    );
    assert_eq!(told(wrong), "what a gate is multiplied with: 64 elements instead of 128");
    assert!(CubeBackend::route(sent(&gpu, &x), 65, true).is_err());
}
