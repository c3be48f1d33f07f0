mod newest;

use half::bf16;
use ir::tensor::DType;

use super::*;
use crate::kernels::gpu::attention::testing::*;
use crate::kernels::gpu::bf12::ENLARGED;
use crate::kernels::gpu::testing::gpu;

fn check(attention: &Attention, run: &Run, element: DType, what: &str) {
    check_split(attention, run, element, 3, what);
}

fn check_split(attention: &Attention, run: &Run, element: DType, splits: usize, what: &str) {
    let Some(gpu) = gpu() else { return };
    if element == DType::Bf16 && !gpu.multiplies(element) {
        eprintln!("skipped {what}: the device has no matrix instructions for bf16");
        return;
    }
    let cached = Cached::filled(&gpu, run, attention, element);
    let features = (attention.heads * attention.head_dim) as usize;
    let queries: Vec<f32> = noise(run.rows() * features, 9).iter().map(|q| q * 4.0).collect();
    let on_device = run.upload(&gpu);
    let out = gpu.poisoned(run.rows() * features * 4);
    let call = Decode {
        attention,
        cache: cached.cache(),
        tokens: on_device.tokens(),
        queries: &gpu.upload(&queries),
        fresh: None,
        ahead: &[],
        workspace: &gpu.poisoned(Partial::bytes(attention, run.rows(), splits).iter().sum()),
        order: None,
    };
    gpu.decode_split(&call, splits, &out);
    let expected = reference(attention, run, &cached, &queries);
    let actual: Vec<f32> = gpu.download(&out, run.rows() * features);
    check_operands(&gpu, &call, splits, &actual, what);
    // Where matrix instructions multiply them, queries and weights are rounded as the cache's elements are.
    let tolerance = match (element, gpu.multiplies(element)) {
        (DType::Bf16, _) => 2e-2,
        (_, true) => 4e-3,
        (_, false) => 2e-5,
    };
    assert_close(&actual, &expected, tolerance, what);
    assert!(actual[expected.len()..].iter().all(|x| *x == 0.0), "{what}: padding is not zero");
}

/// Checks attention that lies as operands of matrices of each layout against the same row after row.
fn check_operands(gpu: &Gpu, call: &Decode<'_>, splits: usize, rows: &[f32], what: &str) {
    if !gpu.decode_appends(call.attention, &call.cache) || !gpu.multiplies(DType::Bf16) {
        return;
    }
    let tokens = call.tokens.tokens;
    let halves: Vec<bf16> = rows.iter().copied().map(bf16::from_f32).collect();
    for (is_spread, factor) in [(true, 1.0), (true, ENLARGED), (false, 1.0)] {
        let order = RightOperands { stacks: tokens.div_ceil(96), tokens: 96, is_spread, factor };
        let features = rows.len() / tokens;
        let out = gpu.poisoned(order.count() * features * 2);
        gpu.decode_split(&Decode { order: Some(order), ..*call }, splits, &out);
        gpu.assert_ordered(&out, &gpu.upload(&halves), [tokens, features], order, what);
    }
}

#[test]
fn tokens_see_their_own_sequence_up_to_themselves() {
    let run = Run::new(&[(0, 1), (99, 1), (15, 1), (16, 3), (300, 1)]).padded(2);
    for element in [DType::F32, DType::F16, DType::Bf16] {
        check(&plain(4, 2, 64), &run, element, "64");
    }
}

#[test]
fn heads_have_many_sizes() {
    let run = Run::new(&[(40, 1), (77, 1)]);
    for head_dim in [4, 32, 80, 96, 128, 256] {
        check(&plain(2, 1, head_dim), &run, DType::F32, &format!("{head_dim} f32"));
        check(&plain(2, 1, head_dim), &run, DType::F16, &format!("{head_dim} f16"));
        check(&plain(2, 1, head_dim), &run, DType::Bf16, &format!("{head_dim} bf16"));
    }
}

#[test]
fn groups_are_of_many_sizes() {
    let run = Run::new(&[(40, 1), (130, 1)]);
    for (heads, kv_heads) in [(1, 1), (3, 3), (6, 2), (14, 2), (16, 1), (18, 2), (12, 1)] {
        for head_dim in [32, 256] {
            let what = format!("{heads}/{kv_heads} of {head_dim}");
            check(&plain(heads, kv_heads, head_dim), &run, DType::F16, &what);
        }
    }
}

#[test]
fn a_split_may_cut_a_group() {
    let run = Run::new(&[(33, 1), (64, 1)]);
    let cut = Attention { group: 4, first_head: 3, kv_heads: 3, ..plain(6, 1, 32) };
    check(&cut, &run, DType::F16, "cut group");
}

#[test]
fn windows_hide_earlier_tokens() {
    let run = Run::new(&[(5, 2), (31, 1), (200, 1), (700, 1)]);
    for window in [1, 7, 32, 100] {
        let attention = Attention { window: Some(window), ..plain(4, 2, 32) };
        check(&attention, &run, DType::F16, &format!("window {window}"));
    }
}

#[test]
fn scores_are_capped() {
    let run = Run::new(&[(50, 1), (3, 1)]);
    let attention = Attention { soft_cap: Some(1.5), scale: 0.7, ..plain(4, 2, 32) };
    check(&attention, &run, DType::F16, "cap");
}

#[test]
fn long_contexts_are_split_and_merged() {
    let run = Run::new(&[(4321, 1), (9, 1)]).padded(1);
    for splits in [1, 2, 17, 64] {
        for head_dim in [20, 64, 128] {
            let what = format!("{splits} splits of {head_dim}");
            check_split(&plain(4, 2, head_dim), &run, DType::F16, splits, &what);
        }
    }
}

#[test]
fn a_whole_context_needs_no_merge() {
    let run = Run::new(&[(0, 1), (255, 1), (30, 1)]).padded(2);
    for (heads, kv_heads) in [(4, 2), (12, 1), (18, 2)] {
        for head_dim in [32, 128, 256] {
            for element in [DType::F32, DType::F16, DType::Bf16] {
                let what = format!("{heads}/{kv_heads} of {head_dim} in {element}");
                check_split(&plain(heads, kv_heads, head_dim), &run, element, 1, &what);
            }
        }
    }
    let cut = Attention { group: 4, first_head: 3, kv_heads: 3, ..plain(6, 1, 32) };
    check_split(&cut, &run, DType::F16, 1, "cut group");
}

/// Contexts of at most 60 tokens, so many that cubes have few planes on the largest GPU.
pub(super) fn many_short(count: usize) -> Run {
    let parts: Vec<(usize, usize)> = (0..count).map(|i| (i * 7 % 60, 1)).collect();
    Run::new(&parts).padded(1)
}

#[test]
fn many_contexts_are_given_fewer_planes_each() {
    for count in [90, 300] {
        for head_dim in [32, 128] {
            for element in [DType::F16, DType::Bf16] {
                let what = format!("{count} contexts of {head_dim} in {element}");
                check_split(&plain(4, 4, head_dim), &many_short(count), element, 1, &what);
            }
        }
    }
    let cut = Attention { group: 4, first_head: 3, kv_heads: 3, ..plain(6, 1, 32) };
    check_split(&cut, &many_short(450), DType::F16, 1, "cut group");
}

#[test]
fn contexts_that_are_short_or_seen_through_a_window_are_not_split() {
    let Some(gpu) = gpu() else { return };
    let attention = plain(8, 2, 64);
    let narrow = Attention { window: Some(SHORT_CONTEXT as u32), ..attention.clone() };
    let short = Run::new(&[(SHORT_CONTEXT - 1, 1), (0, 1)]).upload(&gpu);
    let long = Run::new(&[(0, 1), (SHORT_CONTEXT, 1)]).upload(&gpu);
    assert_eq!(short.tokens().reach, Reach::Short);
    assert_eq!(long.tokens().reach, Reach::Long);
    assert_eq!(gpu.splits(&attention, &short.tokens()), 1);
    assert_eq!(gpu.splits(&narrow, &long.tokens()), 1);
}

#[test]
fn no_run_is_split_further_than_plans_count() {
    let Some(gpu) = gpu() else { return };
    let attention = plain(8, 2, 64);
    let run = Run::new(&[(SHORT_CONTEXT, 1)]).upload(&gpu);
    for tokens in 1..=20 {
        let splits = gpu.splits(&attention, &Tokens { tokens, ..run.tokens() });
        assert!(splits as u32 <= workspace::attention_splits(attention.kv_heads, tokens as u32));
    }
}

#[test]
fn asking_ahead_changes_no_bit() {
    let Some(gpu) = gpu() else { return };
    if !gpu.asks_ahead() {
        eprintln!("skipped: the device asks for nothing ahead");
        return;
    }
    let run = Run::new(&[(40, 1), (255, 1)]).padded(1);
    let attention = plain(8, 2, 128);
    let cached = Cached::filled(&gpu, &run, &attention, DType::F16);
    let count = run.rows() * 8 * 128;
    let queries = gpu.upload(&noise(count, 9));
    let span = gpu.poisoned(1 << 20);
    let next = [Region::new(&span, span.bytes()).unwrap()];
    for splits in [1, 3] {
        let of = |ahead: &[Region]| {
            let on_device = run.upload(&gpu);
            let out = gpu.poisoned(count * 4);
            let call = Decode {
                attention: &attention,
                cache: cached.cache(),
                tokens: on_device.tokens(),
                queries: &queries,
                fresh: None,
                ahead,
                workspace: &gpu
                    .poisoned(Partial::bytes(&attention, run.rows(), splits).iter().sum()),
                order: None,
            };
            gpu.decode_split(&call, splits, &out);
            let out: Vec<f32> = gpu.download(&out, count);
            out.into_iter().map(f32::to_bits).collect::<Vec<u32>>()
        };
        assert_eq!(of(&next), of(&[]), "{splits} splits");
    }
}
