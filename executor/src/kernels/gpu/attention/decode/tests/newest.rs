//! Decode that appends does what appending and then decoding does.

use ir::op::{Norm, NormKind, Pairing};

use super::*;
use crate::kernels::gpu::attention::append::{NormWeights, Rotation};

/// Rows of the rotation table: as many as there are tokens.
const TABLE_ROWS: usize = 8;

fn norm(kind: NormKind) -> Option<Norm> {
    Some(Norm { kind, scale: None, bias: None, epsilon: 1e-3, scale_offset: 0.5 })
}

fn check_newest(
    attention: &Attention,
    run: &Run,
    rotation: Option<(Pairing, u32)>,
    splits: usize,
    what: &str,
) {
    let Some(gpu) = gpu() else { return };
    for element in [DType::F16, DType::Bf16] {
        let two = [0; 2].map(|_| Cached::filled(&gpu, run, attention, element));
        if !gpu.decode_appends(attention, &two[0].cache()) {
            eprintln!("skipped {what}: decode appends only with matrix instructions for {element}");
            continue;
        }
        let head_dim = attention.head_dim as usize;
        let [width, kv_width] =
            [attention.heads, attention.kv_heads].map(|heads| heads as usize * head_dim);
        let rows = run.rows();
        let queries: Vec<f32> = noise(rows * width, 9).iter().map(|q| q * 4.0).collect();
        let [keys, values] = [5, 6].map(|seed| gpu.upload(&noise(rows * kv_width, seed)));
        let [scale, bias] = [7, 8].map(|seed| gpu.upload(&noise(head_dim, seed)));
        let table = gpu.upload(&noise(TABLE_ROWS * head_dim, 4));
        let table_rows: Vec<i32> = (0..rows).map(|row| (row * 3 % TABLE_ROWS) as i32).collect();
        let table_rows = gpu.upload(&table_rows);
        let on_device = run.upload(&gpu);
        let of = |cached: &Cached, appends: bool| {
            let (cache, tokens) = (cached.cache(), on_device.tokens());
            let append = Append {
                attention,
                cache,
                tokens,
                queries: &gpu.upload(&queries),
                keys: &keys,
                values: &values,
                query_norm: NormWeights { scale: Some(&scale), bias: Some(&bias) },
                key_norm: NormWeights { scale: Some(&bias), bias: None },
                rotation: rotation.map(|(pairing, dims)| Rotation {
                    pairing,
                    dims,
                    table: &table,
                    table_rows: TABLE_ROWS,
                    rows: &table_rows,
                }),
            };
            let prepared = gpu.poisoned(rows * width * 4);
            if !appends {
                gpu.append(&append, &prepared);
            }
            let out = gpu.poisoned(rows * width * 4);
            let bytes = Partial::bytes(attention, rows, splits).iter().sum();
            let call = Decode {
                attention,
                cache,
                tokens,
                queries: &prepared,
                fresh: appends.then_some(&append),
                ahead: &[],
                workspace: &gpu.poisoned(bytes),
                order: None,
            };
            gpu.decode_split(&call, splits, &out);
            let count = cached.keys.len();
            let contents = [cache.keys, cache.values].map(|span| {
                loaded(&gpu, span, count, element).into_iter().map(f64::from).collect()
            });
            (gpu.download::<f32>(&out, rows * width), contents)
        };
        let (out, cached) = of(&two[0], true);
        let (expected, expected_cached): (_, [Vec<f64>; 2]) = of(&two[1], false);
        let expected: Vec<f64> = expected.into_iter().map(f64::from).collect();
        assert_close(&out, &expected, 1e-3, what);
        for (made, expected) in cached.iter().zip(&expected_cached) {
            for (i, (made, expected)) in made.iter().zip(expected).enumerate() {
                let is_same = (made - expected).abs() <= 1e-2 || made.is_nan() && expected.is_nan();
                assert!(is_same, "{what}: {made} is cached instead of {expected} at {i}");
            }
        }
    }
}

fn run() -> Run {
    Run::new(&[(0, 1), (99, 1), (15, 1), (16, 1), (31, 1), (300, 1)]).padded(2)
}

#[test]
fn newest_tokens_are_appended_by_the_cube_that_reads_them() {
    let cases = [
        (8, 2, 128, 1),
        (8, 2, 128, 17),
        (4, 2, 32, 3),
        (12, 1, 64, 1),
        (18, 1, 128, 3),
        (3, 3, 256, 3),
        (16, 1, 256, 1),
    ];
    for (heads, kv_heads, head_dim, splits) in cases {
        let what = format!("{heads}/{kv_heads} of {head_dim}, {splits} splits");
        let rotation = Some((Pairing::Halves, head_dim));
        check_newest(&plain(heads, kv_heads, head_dim), &run(), rotation, splits, &what);
    }
    for count in [90, 300] {
        let what = format!("{count} contexts");
        let rotation = Some((Pairing::Halves, 128));
        check_newest(&plain(8, 4, 128), &many_short(count), rotation, 1, &what);
    }
}

#[test]
fn newest_tokens_are_normalised_and_rotated() {
    let norms = [(norm(NormKind::Rms), norm(NormKind::Layer)), (None, norm(NormKind::Rms))];
    let rotations = [
        None,
        Some((Pairing::Halves, 24)),
        Some((Pairing::Neighbours, 96)),
        Some((Pairing::Halves, 96)),
    ];
    for (q_norm, k_norm) in norms {
        for rotation in rotations {
            let attention = Attention {
                q_norm: q_norm.clone(),
                k_norm: k_norm.clone(),
                window: Some(40),
                ..plain(6, 2, 96)
            };
            check_newest(&attention, &run(), rotation, 2, &format!("{rotation:?}"));
        }
    }
    let cut = Attention { group: 4, first_head: 3, kv_heads: 3, ..plain(6, 1, 32) };
    check_newest(&cut, &run(), None, 2, "cut group");
}
